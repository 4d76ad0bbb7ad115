//! Credits as values, which say to which peers a lane may put.

use tilewire_core::{Error, ErrorKind, Rank, Result, Team};

/// Proof that peers have granted a launch the use of their receive buffers.
///
/// A put takes it, so that code which writes to a peer without the peer's credit needs an `unsafe`
/// block with a reason. It has a bit for each peer, and is valid for the launch that acquired it:
/// drop it with the launch.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "a permit is what a put needs"]
pub struct Permit(u64);

impl Permit {
    /// Returns a permit for no peer: the beginning of a union by [`Permit::and`].
    pub fn none() -> Self {
        Self(0)
    }

    pub(crate) fn of(peer: Rank) -> Self {
        Self(1 << peer.idx())
    }

    /// Returns a permit to put to the peers of both.
    pub fn and(self, other: Permit) -> Self {
        Self(self.0 | other.0)
    }

    /// Adds the peers of `other`.
    pub fn add(&mut self, other: Permit) {
        self.0 |= other.0;
    }

    /// Returns whether `peer` has granted.
    pub fn names(&self, peer: Rank) -> bool {
        self.0 >> peer.idx() & 1 == 1
    }

    /// Returns a permit to put to every rank of a team of `size` ranks.
    ///
    /// # Safety
    /// A rank that receives a put under this permit must not access the range until it has waited
    /// for the signal behind the put. State the reason: another signal, a barrier, or that the
    /// range is written once.
    pub unsafe fn assume(size: usize) -> Self {
        Self(u64::MAX >> (64 - size.clamp(1, 64)))
    }

    /// Fails unless `peer` has granted.
    pub(crate) fn check(&self, team: &Team, peer: Rank) -> Result<()> {
        let me = team.rank();
        if peer == me || self.names(peer) {
            return Ok(());
        }
        let text = format!("a put to {} has no credit of that rank", team.named(peer));
        Err(Error::new(ErrorKind::Protocol, text)
            .of_team(team)
            .rank(me)
            .peer(peer)
            .hint("acquire the credit first; the schedule of this operation is wrong"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permit_names_the_peers_that_have_granted() {
        let all: Vec<Rank> = Rank::all(64).collect();
        let team = Team::new("t", &all, Rank::new(0), 64).unwrap().unwrap();
        let me = &team;
        let p = Permit::of(Rank::new(2)).and(Permit::of(Rank::new(63)));
        for r in 0..64 {
            let allowed = p.check(me, Rank::new(r)).is_ok();
            assert_eq!(allowed, [0, 2, 63].contains(&r), "rank {r}");
        }
        let e = Permit::none().check(me, Rank::new(1)).unwrap_err();
        assert!(e.kind() == ErrorKind::Protocol && e.get_peer() == Some(Rank::new(1)), "{e}");
        // SAFETY: nothing is put under this permit.
        let all = unsafe { Permit::assume(3) };
        assert!(all.check(me, Rank::new(2)).is_ok() && all.check(me, Rank::new(3)).is_err());
    }
}
