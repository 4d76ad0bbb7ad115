//! A mesh whose ranks are processes of one host, connected by Unix sockets.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use tilewire_core::{Deadline, Error, ErrorKind, Rank, Result};

use crate::claim::Sign;
use crate::frame::{self, Kind};
use crate::handshake::Identity;
use crate::inbox::{Inbox, Limits, SLICE};
use crate::mesh::{Mesh, Parcel, PeerExit, check_exchange, check_world, short};
use crate::monitor;
use crate::rendezvous::{Link, Met, rendezvous};
use crate::secret::Secret;
use crate::sock::{self, Bell};
use crate::store::Store;
use crate::threads::{Worker, dup_all, left_error};

/// Limit for [`Mesh::leave`] to find space in the socket of a peer that does not read.
const BYE_LIMIT: Duration = Duration::from_millis(500);

/// Limit for the time in which descriptors in flight leave no space for more: ranks receive theirs
/// in milliseconds.
const SPACE_LIMIT: Duration = Duration::from_secs(5);

/// A [`Mesh`] between processes of one host and one user.
///
/// Each rank listens on an abstract Unix socket (or on a file in a private directory) with a random
/// name, both ends of each connection check the peer's user id and prove that they know the secret,
/// and the connections stay open. One monitor thread per mesh receives, and watches both the
/// sockets and the peers' processes: a forked child that still holds a dead peer's socket does not
/// hide the death.
///
/// Dropping the mesh closes all descriptors and joins the thread; without [`Mesh::leave`] before
/// it, the others see a death.
pub struct LinkMesh {
    shared: Arc<Shared>,
    refused: u64,
    /// Kept for the eyes of other processes.
    _sign: Option<Sign>,
    monitor: Option<Worker>,
}

/// State shared by the monitor thread and the callers.
pub(crate) struct Shared {
    pub me: Rank,
    pub inbox: Inbox,
    pub links: Vec<Option<Link>>,
    pub bell: Bell,
    pub stop: AtomicBool,
    /// This rank has said goodbye.
    pub left: AtomicBool,
}

impl LinkMesh {
    /// Meets the other ranks of `job` through `store` and connects to all of them. Collective.
    ///
    /// `job` must be new for each mesh that is made through the same store.
    ///
    /// # Errors
    /// `Timeout` naming the ranks that did not come. `Mismatch` with both values if a rank has
    /// another protocol version, world size, user or host, or if another process has this rank.
    /// `Protocol` if a rank has another secret. `Permission` if one runs as another user, or as one
    /// that is not mapped into the user namespace. `PeerDead` if a rank ended meanwhile. Errors of
    /// the store and of the system.
    pub fn connect(
        store: &dyn Store,
        job: &str,
        rank: Rank,
        size: usize,
        secret: &Secret,
        deadline: Deadline,
    ) -> Result<Arc<Self>> {
        check_world(rank, size)?;
        if job.is_empty() {
            return Err(Error::invalid("the name of the job is empty"));
        }
        let met = rendezvous(store, Identity { job, rank, size, secret }, deadline)?;
        let Met { links, refused, sign } = met;
        let inbox = Inbox::new(rank, size, Limits::default());
        let (stop, left) = (AtomicBool::new(false), AtomicBool::new(false));
        let shared = Arc::new(Shared { me: rank, inbox, links, bell: Bell::new()?, stop, left });
        let theirs = shared.clone();
        let name = format!("tilewire-mesh-{}", rank.get());
        let monitor = Worker::start(&name, move || monitor::run(&theirs))?;
        Ok(Arc::new(Self { shared, refused, _sign: sign, monitor: Some(monitor) }))
    }

    /// Connections that were refused during the rendezvous: strangers, port scans, bad proofs.
    pub fn refused(&self) -> u64 {
        self.refused
    }

    fn is_forked(&self) -> bool {
        self.monitor.as_ref().is_some_and(Worker::is_foreign)
    }

    /// Sends all `frames` to all of `peers`; descriptors go with the first frame.
    ///
    /// Ranks that go meanwhile are left to the waiting that follows, and so is the error of `stop`,
    /// which ends this. A peer that does not read delays nobody else.
    fn send_all(
        &self,
        stop: &dyn Fn() -> Result<()>,
        peers: &[Rank],
        (frames, fds): (&[Vec<u8>], &[BorrowedFd<'_>]),
        deadline: Deadline,
    ) -> Result<()> {
        let mut todo: Vec<(Rank, usize)> = peers.iter().map(|r| (*r, 0)).collect();
        let limit = Deadline::after(deadline.remaining().min(SPACE_LIMIT));
        loop {
            let mut stuck = Vec::new();
            for (peer, next) in todo {
                if let Some(next) = self.send_some(peer, (frames, fds), next, limit)? {
                    stuck.push((peer, next));
                }
            }
            if stuck.is_empty() {
                return Ok(());
            }
            if deadline.expired() || stop().is_err() {
                // The wait for the parts finds out who is missing, or why it must end.
                return Ok(());
            }
            let mut poll: Vec<PollFd<'_>> = stuck
                .iter()
                .filter_map(|(r, _)| self.shared.links[r.idx()].as_ref())
                .map(|l| PollFd::new(&l.sock, PollFlags::OUT))
                .collect();
            sock::wait_any(&mut poll, Some(deadline.remaining().min(SLICE)))?;
            todo = stuck;
        }
    }

    /// Sends until done (`None`), or until the socket is full or, up to `until`, as many
    /// descriptors are under way as the kernel allows (`Some(next frame)`).
    fn send_some(
        &self,
        peer: Rank,
        (frames, fds): (&[Vec<u8>], &[BorrowedFd<'_>]),
        mut next: usize,
        until: Deadline,
    ) -> Result<Option<usize>> {
        let Some(link) = &self.shared.links[peer.idx()] else { return Ok(None) };
        if self.shared.inbox.exit_of(peer).is_some() {
            return Ok(None);
        }
        while next < frames.len() {
            let with = if next == 0 { fds } else { &[] };
            match sock::send(&link.sock, &frames[next], with) {
                Ok(()) => next += 1,
                Err(Errno::AGAIN) => return Ok(Some(next)),
                // The peer has gone: the monitor says how.
                Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => return Ok(None),
                // Those of all ranks count: there is space once these have received, and no poll
                // tells of it.
                Err(Errno::TOOMANYREFS) if !until.expired() => {
                    std::thread::sleep(Duration::from_millis(1));
                    return Ok(Some(next));
                }
                Err(Errno::TOOMANYREFS) => {
                    return Err(Error::new(
                        ErrorKind::Exhausted,
                        "too many file descriptors of this user are in flight between processes",
                    )
                    .hint("raise the limit of open files with `ulimit -n`"));
                }
                Err(e) => return Err(Error::io(format!("sending to {peer}"), e).peer(peer)),
            }
        }
        Ok(None)
    }
}

impl Mesh for LinkMesh {
    fn rank(&self) -> Rank {
        self.shared.me
    }

    fn size(&self) -> usize {
        self.shared.links.len()
    }

    fn exchange_unless(
        &self,
        stop: &dyn Fn() -> Result<()>,
        tag: &str,
        members: &[Rank],
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
        deadline: Deadline,
    ) -> Result<Vec<Parcel>> {
        check_exchange(self, tag, members, payload, fds)?;
        let me = self.shared.me;
        if self.shared.left.load(Ordering::Acquire) {
            return Err(left_error(tag, me));
        }
        if self.is_forked() {
            return Err(Error::new(ErrorKind::Stale, "this process was forked from a rank")
                .op("exchange")
                .rank(me)
                .hint("only the process that joined the mesh can use it"));
        }
        self.shared.inbox.check_alive(tag, members)?;
        let own = Parcel { payload: payload.to_vec(), fds: dup_all(fds)? };
        let frames = frame::encode_parcel(me, tag, payload, fds.len());
        // Everybody starts with another peer, so that not all send to the same one.
        let at = members.iter().position(|m| *m == me).unwrap_or(0);
        let peers: Vec<Rank> =
            (1..members.len()).map(|i| members[(at + i) % members.len()]).collect();
        self.send_all(stop, &peers, (&frames, fds), deadline)
            .and_then(|()| self.shared.inbox.collect(tag, members, own, deadline, stop))
            .map_err(|e| if e.get_op().is_some() { e } else { e.op("exchange").rank(me) })
    }

    fn gone(&self) -> u64 {
        self.shared.inbox.gone()
    }

    fn on_exit(&self, f: Box<dyn Fn(Rank, PeerExit) + Send + Sync>) {
        self.shared.inbox.watch(f);
        self.shared.bell.ring();
    }

    fn leave(&self) {
        self.leave_because("");
    }

    fn farewell(&self, rank: Rank) -> Option<String> {
        self.shared.inbox.reason_of(rank)
    }

    fn leave_because(&self, why: &str) {
        // A forked child must not say goodbye for its parent.
        if self.is_forked() || self.shared.left.swap(true, Ordering::AcqRel) {
            return;
        }
        let bye = [frame::encode_small(Kind::Bye, self.shared.me, short(why).as_bytes())];
        let peers: Vec<Rank> = Rank::all(self.size()).filter(|r| *r != self.shared.me).collect();
        // A peer that cannot be reached will see the closed socket: that is all one can do.
        self.send_all(&|| Ok(()), &peers, (&bye, &[]), Deadline::after(BYE_LIMIT)).ok();
    }
}

impl Drop for LinkMesh {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.bell.ring();
        if let Some(m) = self.monitor.take() {
            m.join();
        }
    }
}

#[cfg(test)]
#[path = "links_tests.rs"]
mod tests;
