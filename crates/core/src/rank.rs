//! Ranks and teams as plain values.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Error, ErrorKind, Result};

/// Index of a member within a [`Team`] (or within the world, which is a team of everybody).
///
/// A newtype, so that a rank cannot be passed where a size, a count or a device ordinal is due.
///
/// ```
/// # use tilewire_core::Rank;
/// assert_eq!(Rank::new(3).to_string(), "r3");
/// assert_eq!(Rank::new(3).offset(2, 4), Rank::new(1)); // (3 + 2) mod 4
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rank(u32);

impl Rank {
    /// The rank with index `index`.
    pub const fn new(index: u32) -> Self {
        Self(index)
    }

    /// The rank as an array index.
    pub const fn idx(self) -> usize {
        self.0 as usize
    }

    /// The rank as a plain number, for wire formats and messages.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The rank `steps` places after this one on a ring of `size` ranks.
    pub fn offset(self, steps: usize, size: usize) -> Self {
        Self(((self.idx() + steps) % size) as u32)
    }

    /// All ranks of a team of `size` members, in order.
    pub fn all(size: usize) -> impl DoubleEndedIterator<Item = Rank> + Clone {
        (0..size as u32).map(Rank)
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "r{}", self.0)
    }
}

impl fmt::Debug for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// An ordered subset of the world's ranks, seen by one of its members.
///
/// The order given by the caller is the order of the team: member `i` has team rank `i`.
/// Passed whole, so that no function takes a bare rank and a bare size side by side.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Team {
    name: String,
    members: Vec<Rank>,
    me: Rank,
}

impl Team {
    /// A team of `members` (world ranks, in team order) as seen by world rank `me`.
    ///
    /// Returns `Ok(None)` if `me` is not among the members.
    ///
    /// # Errors
    /// `InvalidArgument` if `members` is empty, repeats a rank, names a rank `>= world_size`,
    /// has more than 64 entries, or if `name` is empty or longer than 64 bytes.
    pub fn new(name: &str, members: &[Rank], me: Rank, world_size: usize) -> Result<Option<Self>> {
        let bad = |msg: String| Err(Error::new(ErrorKind::InvalidArgument, msg).op("team"));
        if name.is_empty() || name.len() > 64 {
            return bad(format!("team name must have 1 to 64 bytes, this one has {}", name.len()));
        }
        if members.is_empty() {
            return bad(format!("team `{name}` has no members"));
        }
        if members.len() > Self::MAX_SIZE {
            return bad(format!(
                "team `{name}` has {} members, the most is {}",
                members.len(),
                Self::MAX_SIZE
            ));
        }
        for (i, r) in members.iter().enumerate() {
            if r.idx() >= world_size {
                return bad(format!(
                    "team `{name}` names {r}, but the world has {world_size} ranks"
                ));
            }
            if members[..i].contains(r) {
                return bad(format!("team `{name}` names {r} twice"));
            }
        }
        let found = members.iter().position(|&r| r == me);
        Ok(found.map(|i| Self {
            name: name.to_owned(),
            members: members.to_vec(),
            me: Rank::new(i as u32),
        }))
    }

    /// The most members a team can have (the abort and mask words hold 64 bits).
    pub const MAX_SIZE: usize = 64;

    /// The team of one rank: what a single process computes with.
    pub fn solo() -> Self {
        Self { name: "solo".to_owned(), members: vec![Rank::new(0)], me: Rank::new(0) }
    }

    /// My rank in this team.
    pub fn rank(&self) -> Rank {
        self.me
    }

    /// Number of members.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// The name given at creation.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// World ranks of the members, in team order.
    pub fn members(&self) -> &[Rank] {
        &self.members
    }

    /// World rank of team rank `r`.
    pub fn world_rank(&self, r: Rank) -> Rank {
        self.members[r.idx()]
    }

    /// Team rank of world rank `w`, if it is a member.
    pub fn team_rank(&self, w: Rank) -> Option<Rank> {
        self.members.iter().position(|&m| m == w).map(|i| Rank::new(i as u32))
    }

    /// Team rank `r` for people: "rank 5 (rank 1 of team cp2.0)", by its number in the world first.
    /// Where both numbers are the same, "rank 1" says all.
    pub fn named(&self, r: Rank) -> String {
        match self.members.get(r.idx()) {
            Some(world) if *world == r => format!("rank {}", r.get()),
            Some(world) => format!("rank {} (rank {} of team {})", world.get(), r.get(), self.name),
            None => format!("rank {} of team {}", r.get(), self.name),
        }
    }

    /// The other members, starting with the next one: `me+1, me+2, ..., me-1` (modulo size).
    ///
    /// Every rank starts elsewhere, so that one-sided pushes in this order never converge on one
    /// destination (no incast).
    pub fn peers(&self) -> impl Iterator<Item = Rank> + Clone {
        let (me, size) = (self.me, self.size());
        (1..size).map(move |i| me.offset(i, size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_is_position_not_world_rank() {
        let t = Team::new("t", &[Rank::new(5), Rank::new(2)], Rank::new(2), 8).unwrap().unwrap();
        assert_eq!((t.rank(), t.size()), (Rank::new(1), 2));
        assert_eq!(t.world_rank(Rank::new(0)), Rank::new(5));
        assert_eq!(t.team_rank(Rank::new(5)), Some(Rank::new(0)));
        assert_eq!(t.peers().collect::<Vec<_>>(), [Rank::new(0)]);
    }

    #[test]
    fn a_rank_is_named_by_its_number_in_the_world() {
        let members = [Rank::new(0), Rank::new(5)];
        let t = Team::new("t", &members, Rank::new(0), 8).unwrap().unwrap();
        assert_eq!(t.named(Rank::new(0)), "rank 0");
        assert_eq!(t.named(Rank::new(1)), "rank 5 (rank 1 of team t)");
        assert_eq!(t.named(Rank::new(2)), "rank 2 of team t");
    }

    #[test]
    fn non_member_is_none_and_bad_members_are_errors() {
        assert!(Team::new("t", &[Rank::new(0)], Rank::new(1), 2).unwrap().is_none());
        for (members, needle) in [
            (vec![], "no members"),
            (vec![Rank::new(2)], "the world has 2"),
            (vec![Rank::new(1), Rank::new(1)], "twice"),
        ] {
            let e = Team::new("t", &members, Rank::new(0), 2).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidArgument);
            assert!(e.to_string().contains(needle), "{e}");
        }
        assert!(Team::new("", &[Rank::new(0)], Rank::new(0), 1).is_err());
    }

    #[test]
    fn a_team_has_as_many_members_as_a_mask_has_bits() {
        let of = |size| Team::new("t", &Rank::all(size).collect::<Vec<_>>(), Rank::new(0), 80);
        assert_eq!(of(Team::MAX_SIZE).unwrap().unwrap().size(), 64);
        let why = of(Team::MAX_SIZE + 1).unwrap_err();
        assert!(why.to_string().contains("65 members, the most is 64"), "{why}");
    }

    #[test]
    fn peers_rotate() {
        let all: Vec<_> = Rank::all(4).collect();
        let t = Team::new("t", &all, Rank::new(2), 4).unwrap().unwrap();
        assert_eq!(t.peers().map(Rank::get).collect::<Vec<_>>(), [3, 0, 1]);
    }
}
