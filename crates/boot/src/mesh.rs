//! The mesh interface: the calls that ranks of one host have before they share memory.

use std::os::fd::{BorrowedFd, OwnedFd};

use tilewire_core::{Deadline, Error, Rank, Result};

/// The most ranks a mesh connects: masks of ranks are 64 bits.
pub const MAX_RANKS: usize = 64;

/// The most bytes of one parcel.
pub const MAX_PAYLOAD: usize = 1 << 20;

/// The most descriptors of one parcel: the kernel's limit for one `SCM_RIGHTS` message.
pub const MAX_FDS: usize = 253;

/// The longest tag in bytes.
pub const MAX_TAG: usize = 256;

/// The longest reason of a goodbye, in bytes.
pub const MAX_WHY: usize = 1 << 10;

/// A member's contribution to an exchange.
#[derive(Debug, Default)]
pub struct Parcel {
    /// The bytes, as given.
    pub payload: Vec<u8>,
    /// Own duplicates of the descriptors, in the order given, all close-on-exec.
    pub fds: Vec<OwnedFd>,
}

/// The end of a rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum PeerExit {
    /// Without a goodbye: killed, crashed, or its mesh dropped without [`Mesh::leave`].
    Died,
    /// With a goodbye.
    Left,
}

/// The phase of an error of [`Mesh::exchange`] from before anything was sent: the same tag may then
/// be used again.
pub const NOT_SENT: &str = "before sending";

/// All-to-all connections between the ranks of a world on one host.
///
/// Ranks are always world ranks here.
pub trait Mesh: Send + Sync {
    /// My world rank.
    fn rank(&self) -> Rank;

    /// Number of ranks in the world.
    fn size(&self) -> usize;

    /// Everybody among `members` gives a payload and descriptors, everybody gets all of them, in
    /// the order of `members`, the own entry included (with duplicated descriptors).
    ///
    /// Collective over `members`, of which I am one. `tag` names this one exchange: equal on all
    /// members and not used for another exchange. Exchanges with different tags may run at the same
    /// time and in different order on different ranks.
    ///
    /// # Errors
    /// `Timeout` if the deadline passes; the message lists all ranks that are missing, `peer` is
    /// the first. `PeerDead` at once if a member has died, or is gone without having given its
    /// part. `InvalidArgument` for a bad member list, tag, payload (over [`MAX_PAYLOAD`]) or
    /// number of descriptors (over [`MAX_FDS`]). `Exhausted` if a part came early and no space was
    /// left for it. `Protocol` if a member used the tag twice. `Stale` after [`Mesh::leave`].
    fn exchange(
        &self,
        tag: &str,
        members: &[Rank],
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
        deadline: Deadline,
    ) -> Result<Vec<Parcel>> {
        self.exchange_unless(&|| Ok(()), tag, members, payload, fds, deadline)
    }

    /// As [`Mesh::exchange`], and ends with the error of `stop` once it has one. `stop` is asked
    /// while parts are missing, at least every 20 ms.
    ///
    /// # Errors
    /// As [`Mesh::exchange`], and that of `stop`.
    fn exchange_unless(
        &self,
        stop: &dyn Fn() -> Result<()>,
        tag: &str,
        members: &[Rank],
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
        deadline: Deadline,
    ) -> Result<Vec<Parcel>>;

    /// Ranks known to be gone, died or left: bit `i` is world rank `i`.
    fn gone(&self) -> u64;

    /// Calls `f(rank, how)` once for each rank that goes, also for those that are gone already.
    ///
    /// `f` runs on the monitor thread of the mesh: it must be quick and must not drop the mesh's
    /// last reference while holding a lock. The rank is in [`Mesh::gone`] before the call.
    fn on_exit(&self, f: Box<dyn Fn(Rank, PeerExit) + Send + Sync>);

    /// Says goodbye: the others see [`PeerExit::Left`]. Idempotent.
    ///
    /// A mesh that is dropped without it counts as died.
    fn leave(&self);

    /// Says goodbye as [`Mesh::leave`], and why: the others find it by [`Mesh::farewell`]. At most
    /// [`MAX_WHY`] bytes of it are sent.
    fn leave_because(&self, why: &str) {
        let _untold = why;
        self.leave();
    }

    /// Returns why `rank` left, if it left with a reason.
    fn farewell(&self, rank: Rank) -> Option<String> {
        let _unknown = rank;
        None
    }

    /// Tells the others that this rank has died. For a rank that is a thread and panics; of a
    /// process its end tells, and nothing is done here.
    fn die(&self) {}
}

/// Returns the part of a reason that is sent, in whole characters.
pub(crate) fn short(why: &str) -> &str {
    let end = (0..=MAX_WHY.min(why.len())).rev().find(|&i| why.is_char_boundary(i));
    &why[..end.unwrap_or(0)]
}

/// Returns what both kinds of mesh require of the arguments of an exchange.
pub(crate) fn check_exchange(
    mesh: &dyn Mesh,
    tag: &str,
    members: &[Rank],
    payload: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<()> {
    let bad = |msg: String| Err(Error::invalid(msg).op("exchange").rank(mesh.rank()));
    if tag.is_empty() || tag.len() > MAX_TAG {
        return bad(format!("a tag must have 1 to {MAX_TAG} bytes, this one has {}", tag.len()));
    }
    if payload.len() > MAX_PAYLOAD {
        return bad(format!(
            "`{tag}`: the payload has {} bytes, but may have at most {MAX_PAYLOAD}",
            payload.len()
        ));
    }
    if fds.len() > MAX_FDS {
        return bad(format!(
            "`{tag}`: the message has {} descriptors, but may have at most {MAX_FDS}",
            fds.len()
        ));
    }
    for (i, r) in members.iter().enumerate() {
        if r.idx() >= mesh.size() {
            return bad(format!("`{tag}`: {r} is not in a world of {} ranks", mesh.size()));
        }
        if members[..i].contains(r) {
            return bad(format!("`{tag}`: {r} is named twice"));
        }
    }
    if !members.contains(&mesh.rank()) {
        return bad(format!("`{tag}`: the caller, {}, is not a member", mesh.rank()));
    }
    Ok(())
}

/// A world has 1 to 64 ranks, and each rank is in it.
pub(crate) fn check_world(rank: Rank, size: usize) -> Result<()> {
    if size == 0 || size > MAX_RANKS {
        return Err(Error::invalid(format!("a mesh has 1 to {MAX_RANKS} ranks, not {size}")));
    }
    if rank.idx() >= size {
        return Err(Error::invalid(format!("{rank} is not in a world of {size} ranks")));
    }
    Ok(())
}
