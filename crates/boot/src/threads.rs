//! A mesh whose ranks are threads of one process.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use tilewire_core::{Deadline, Error, ErrorKind, Rank, Result, inject};

use crate::inbox::{Inbox, Limits};
use crate::mesh::{Mesh, NOT_SENT, Parcel, PeerExit, check_exchange, check_world, short};

/// A [`Mesh`] between threads: the same behaviour as between processes, without sockets.
///
/// Give each rank thread its own element of [`ThreadMesh::group`]; when the thread ends without
/// [`Mesh::leave`], by a panic for instance, its element is dropped and the others see it as died.
pub struct ThreadMesh {
    me: Rank,
    inboxes: Arc<[Inbox]>,
    left: AtomicBool,
    monitor: Mutex<Option<Worker>>,
}

impl ThreadMesh {
    /// The `n` ends of a new world; element `i` is rank `i`.
    ///
    /// # Errors
    /// `InvalidArgument` unless 1 <= `n` <= 64.
    pub fn group(n: usize) -> Result<Vec<Arc<Self>>> {
        check_world(Rank::new(0), n)?;
        let inboxes: Arc<[Inbox]> =
            Rank::all(n).map(|r| Inbox::new(r, n, Limits::default())).collect();
        Ok(Rank::all(n)
            .map(|me| {
                let inboxes = inboxes.clone();
                let (left, monitor) = (AtomicBool::new(false), Mutex::new(None));
                Arc::new(Self { me, inboxes, left, monitor })
            })
            .collect())
    }

    fn inbox(&self) -> &Inbox {
        &self.inboxes[self.me.idx()]
    }

    fn tell_others(&self, how: PeerExit) {
        for peer in Rank::all(self.inboxes.len()).filter(|r| *r != self.me) {
            self.inboxes[peer.idx()].exit(self.me, how);
        }
    }
}

/// Duplicates descriptors, close-on-exec.
pub(crate) fn dup_all(fds: &[BorrowedFd<'_>]) -> Result<Vec<OwnedFd>> {
    let dup = |fd: &BorrowedFd<'_>| {
        inject::step("duplicating a descriptor")?;
        rustix::io::fcntl_dupfd_cloexec(fd, 3).map_err(|e| match e {
            rustix::io::Errno::MFILE => {
                Error::new(ErrorKind::Exhausted, "no file descriptor is free to duplicate another")
                    .hint("raise the limit of open files with `ulimit -n`")
            }
            e => Error::io("duplicating a descriptor", e),
        })
    };
    fds.iter().map(|fd| dup(fd).map_err(|e| e.phase(NOT_SENT))).collect()
}

impl Mesh for ThreadMesh {
    fn rank(&self) -> Rank {
        self.me
    }

    fn size(&self) -> usize {
        self.inboxes.len()
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
        if self.left.load(Ordering::Acquire) {
            return Err(left_error(tag, self.me));
        }
        self.inbox().check_alive(tag, members)?;
        // All parts before the first is given: an error leaves nobody with half an exchange.
        let part = |_: &Rank| Ok(Parcel { payload: payload.to_vec(), fds: dup_all(fds)? });
        let parts = members.iter().map(part).collect::<Result<Vec<_>>>()?;
        let mut own = Parcel::default();
        for (&peer, parcel) in members.iter().zip(parts) {
            if peer == self.me {
                own = parcel;
            } else if self.inbox().exit_of(peer).is_none() {
                // Nobody will read what is sent to a rank that has gone.
                self.inboxes[peer.idx()].deliver(self.me, tag, parcel);
            }
        }
        self.inbox().collect(tag, members, own, deadline, stop)
    }

    fn gone(&self) -> u64 {
        self.inbox().gone()
    }

    fn on_exit(&self, f: Box<dyn Fn(Rank, PeerExit) + Send + Sync>) {
        self.inbox().watch(f);
        let mut monitor = self.monitor.lock().unwrap_or_else(PoisonError::into_inner);
        if monitor.is_none() {
            let (inboxes, me) = (self.inboxes.clone(), self.me);
            let watch = move || while inboxes[me.idx()].announce_next() {};
            // Without a thread no watcher would be called: the next call tries again.
            *monitor = Worker::start("tilewire-exits", watch).ok();
        }
    }

    fn leave(&self) {
        self.leave_because("");
    }

    fn leave_because(&self, why: &str) {
        if !self.left.swap(true, Ordering::AcqRel) {
            for peer in Rank::all(self.inboxes.len()).filter(|r| *r != self.me) {
                self.inboxes[peer.idx()].reason(self.me, short(why));
            }
            self.tell_others(PeerExit::Left);
        }
    }

    fn farewell(&self, rank: Rank) -> Option<String> {
        self.inbox().reason_of(rank)
    }

    fn die(&self) {
        if !self.left.swap(true, Ordering::AcqRel) {
            self.tell_others(PeerExit::Died);
        }
    }
}

pub(crate) fn left_error(tag: &str, me: Rank) -> Error {
    Error::new(ErrorKind::Stale, format!("`{tag}`: this rank has left the mesh"))
        .op("exchange")
        .rank(me)
}

impl Drop for ThreadMesh {
    fn drop(&mut self) {
        if !self.left.load(Ordering::Acquire) {
            self.tell_others(PeerExit::Died);
        }
        self.inbox().close();
        let monitor = self.monitor.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(m) = monitor {
            m.join();
        }
    }
}

/// A thread that works for an object and ends with it.
pub(crate) struct Worker {
    handle: JoinHandle<()>,
    pid: u32,
}

impl Worker {
    /// Starts the thread.
    pub fn start(name: &str, f: impl FnOnce() + Send + 'static) -> Result<Self> {
        inject::step("starting a thread")?;
        let handle = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(f)
            .map_err(|e| Error::io(format!("starting the thread {name}"), e))?;
        Ok(Self { handle, pid: std::process::id() })
    }

    /// True in a child that was forked: the thread is not there, only our memory of it.
    pub fn is_foreign(&self) -> bool {
        self.pid != std::process::id()
    }

    /// Waits for the thread, unless it is the caller (a callback that drops its own mesh).
    pub fn join(self) {
        if self.is_foreign() {
            // Even its end would touch the thread.
            std::mem::forget(self.handle);
        } else if self.handle.thread().id() != std::thread::current().id() {
            // A panic there has been shown by the panic hook; a destructor can add nothing.
            self.handle.join().ok();
        }
    }
}
