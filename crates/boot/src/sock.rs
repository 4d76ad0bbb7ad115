//! Unix sockets, descriptor passing and waiting, with deadlines everywhere.

use std::fs::DirBuilder;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use tilewire_core::{Deadline, Error, ErrorKind, Result, inject};

use crate::mesh::MAX_FDS;
use crate::peer;

/// A relative timeout in the kernel's form.
pub(crate) fn timespec(d: Duration) -> Timespec {
    Timespec { tv_sec: d.as_secs().min(1 << 40) as i64, tv_nsec: d.subsec_nanos() as i64 }
}

/// Waits until one of `fds` is ready or the time is up; interruptions look like the latter.
pub(crate) fn wait_any(fds: &mut [PollFd<'_>], limit: Option<Duration>) -> Result<()> {
    match poll(fds, limit.map(timespec).as_ref()) {
        Ok(_) => Ok(()),
        Err(Errno::INTR) => {
            fds.iter_mut().for_each(PollFd::clear_revents);
            Ok(())
        }
        Err(e) => Err(Error::io("waiting by poll", e)),
    }
}

/// Waits for one descriptor. False once the deadline has passed.
pub(crate) fn wait_one(fd: BorrowedFd<'_>, what: PollFlags, deadline: Deadline) -> Result<bool> {
    loop {
        let mut fds = [PollFd::from_borrowed_fd(fd, what)];
        wait_any(&mut fds, Some(deadline.remaining()))?;
        if !fds[0].revents().is_empty() {
            return Ok(true);
        }
        if deadline.expired() {
            return Ok(false);
        }
    }
}

/// Wakes a thread that polls.
pub(crate) struct Bell(OwnedFd);

impl Bell {
    pub fn new() -> Result<Self> {
        inject::step("eventfd")?;
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map(Self)
            .map_err(|e| Error::io("eventfd", e))
    }

    pub fn ring(&self) {
        // It can only fail when it has rung 2^64 times without being read.
        rustix::io::write(&self.0, &1u64.to_ne_bytes()).ok();
    }

    pub fn hush(&self) {
        rustix::io::read(&self.0, &mut [0u8; 8]).ok();
    }

    pub fn fd(&self) -> &OwnedFd {
        &self.0
    }
}

/// A message with the descriptors that arrived with it.
pub(crate) struct Received {
    pub len: usize,
    pub fds: Vec<OwnedFd>,
    /// The message was longer than the buffer.
    pub cut: bool,
    /// Descriptors came for which this process had no free slot.
    pub fds_lost: bool,
}

/// Sends one message without waiting.
pub(crate) fn send(sock: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
    let mut space = Vec::new();
    if !fds.is_empty() {
        space.resize(rustix::cmsg_space!(ScmRights(MAX_FDS)), MaybeUninit::uninit());
    }
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOBIG);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    loop {
        match rustix::net::sendmsg(sock, &[IoSlice::new(bytes)], &mut control, flags) {
            Err(Errno::INTR) => {}
            r => return r.map(|_| ()),
        }
    }
}

/// Receives one message without waiting. `len` 0 is the end of the connection.
pub(crate) fn recv(sock: &OwnedFd, buf: &mut [u8]) -> rustix::io::Result<Received> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let msg = loop {
        match rustix::net::recvmsg(sock, &mut [IoSliceMut::new(buf)], &mut control, flags) {
            Err(Errno::INTR) => {}
            r => break r?,
        }
    };
    let mut fds = Vec::new();
    for m in control.drain() {
        if let RecvAncillaryMessage::ScmRights(f) = m {
            fds.extend(f);
        }
    }
    let cut = msg.flags.contains(ReturnFlags::TRUNC);
    Ok(Received { len: msg.bytes, fds, cut, fds_lost: msg.flags.contains(ReturnFlags::CTRUNC) })
}

fn socket(kind: SocketType) -> Result<OwnedFd> {
    inject::step("opening a Unix socket")?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)
        .map_err(|e| Error::io("opening a Unix socket", e))
}

/// Name of a Unix socket as text: `@name` is abstract, everything else a path.
pub(crate) fn unix_addr(name: &str) -> Result<SocketAddrUnix> {
    match name.strip_prefix('@') {
        Some(n) => SocketAddrUnix::new_abstract_name(n.as_bytes()),
        None => SocketAddrUnix::new(name),
    }
    .map_err(|e| Error::io(format!("making the address of the socket `{name}`"), e))
}

/// A socket that has this name and does nothing. None if another has the name.
pub(crate) fn bind(name: &str) -> Result<Option<OwnedFd>> {
    let s = socket(SocketType::SEQPACKET)?;
    match rustix::net::bind(&s, &unix_addr(name)?) {
        Ok(()) => Ok(Some(s)),
        Err(Errno::ADDRINUSE) => Ok(None),
        Err(e) => Err(Error::io(format!("binding the socket `{name}`"), e)),
    }
}

/// Connects without waiting: `Ok(None)` if the listener's queue is full at the moment.
pub(crate) fn connect(kind: SocketType, name: &str) -> Result<Option<OwnedFd>, ConnectError> {
    let addr = unix_addr(name).map_err(ConnectError::Other)?;
    let s = socket(kind).map_err(ConnectError::Other)?;
    inject::step("connecting").map_err(ConnectError::Other)?;
    match rustix::net::connect(&s, &addr) {
        Ok(()) => Ok(Some(s)),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(Errno::CONNREFUSED | Errno::NOENT) => Err(ConnectError::Nobody),
        Err(e) => Err(ConnectError::Other(Error::io(format!("connecting to `{name}`"), e))),
    }
}

/// The reason why a connection failed.
pub(crate) enum ConnectError {
    /// Nobody listens there.
    Nobody,
    /// Anything else.
    Other(Error),
}

/// Connections that the kernel keeps until they are accepted; it takes no more than
/// `net.core.somaxconn` (4096). Behind a full queue a rank would have to come again.
pub(crate) const BACKLOG: i32 = 4096;

/// A listening Unix socket that leaves nothing behind.
pub(crate) struct Listener {
    pub sock: OwnedFd,
    /// As in [`unix_addr`].
    pub name: String,
    file: Option<PathBuf>,
}

impl Listener {
    /// Listens on the abstract name, or where that is not possible on a file in a fresh directory.
    pub fn open(kind: SocketType, name: &str) -> Result<Self> {
        Self::open_abstract(kind, name).or_else(|e| {
            if e.kind() == ErrorKind::Exhausted {
                return Err(e);
            }
            let base = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
            let base = base.filter(|p| p.is_dir()).unwrap_or_else(std::env::temp_dir);
            Self::open_file(kind, &base, name)
        })
    }

    /// Listens on the abstract name.
    pub fn open_abstract(kind: SocketType, name: &str) -> Result<Self> {
        let name = format!("@{name}");
        Ok(Self { sock: listen(kind, &name)?, name, file: None })
    }

    /// Listens on a file in a new directory below `base` that only we can enter.
    pub fn open_file(kind: SocketType, base: &Path, name: &str) -> Result<Self> {
        // The directory is named by the nonce at the end of `name`: a path has at most 107 bytes.
        let short = name.get(name.len().saturating_sub(32)..).unwrap_or(name);
        let dir = base.join(format!("tw-{short}"));
        inject::step("creating a directory")?;
        DirBuilder::new()
            .mode(0o700)
            .create(&dir)
            .map_err(|e| Error::io(format!("creating {}", dir.display()), e))?;
        let file = dir.join("s");
        let Some(name) = file.to_str().filter(|s| s.len() <= 107) else {
            std::fs::remove_dir(&dir).ok();
            return Err(Error::new(
                ErrorKind::Unavailable,
                format!("{} is too long for the name of a socket", file.display()),
            )
            .hint("set XDG_RUNTIME_DIR to a shorter path"));
        };
        let name = name.to_owned();
        let sock = listen(kind, &name).inspect_err(|_| {
            std::fs::remove_dir(&dir).ok();
        })?;
        Ok(Self { sock, name, file: Some(file) })
    }

    /// The next connection, if one waits, and whether it comes from our user.
    pub fn accept(&self) -> Result<Accepted> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(&self.sock, flags) {
            Ok(s) => Ok(match peer::check_user(&s) {
                Ok(()) => Accepted::Connection(s),
                Err(e) => Accepted::Stranger(s, e),
            }),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(Accepted::Nothing),
            // No descriptor is free: the connection stays in the queue, and a poll would say so at
            // once.
            Err(Errno::MFILE | Errno::NFILE) => {
                std::thread::sleep(Duration::from_millis(10));
                Ok(Accepted::NoRoom)
            }
            Err(e) => Err(Error::io("accepting a connection", e)),
        }
    }
}

/// The result of [`Listener::accept`].
pub(crate) enum Accepted {
    Connection(OwnedFd),
    /// One of another user, and the reason why it is none of ours.
    Stranger(OwnedFd, Error),
    Nothing,
    /// One waits, and no descriptor is free.
    NoRoom,
}

fn listen(kind: SocketType, name: &str) -> Result<OwnedFd> {
    let s = socket(kind)?;
    let io = |e| Error::io(format!("listening on `{name}`"), e);
    inject::step("binding a socket")?;
    rustix::net::bind(&s, &unix_addr(name)?).map_err(io)?;
    rustix::net::listen(&s, BACKLOG).map_err(io)?;
    Ok(s)
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            // Nothing can be done about it here, and an empty directory does no harm.
            std::fs::remove_file(file).ok();
            file.parent().map(std::fs::remove_dir);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn file_fallback_is_private_and_leaves_nothing() {
        let tmp = tempfile::tempdir().unwrap();
        let nonce = "0123456789abcdef0123456789abcdef";
        let l = Listener::open_file(SocketType::SEQPACKET, tmp.path(), nonce).unwrap();
        let dir = Path::new(&l.name).parent().unwrap();
        assert_eq!(dir.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        let c = connect(SocketType::SEQPACKET, &l.name).ok().flatten().unwrap();
        let Accepted::Connection(s) = l.accept().unwrap() else { panic!("nobody came") };
        send(&c, b"hi", &[s.as_fd()]).unwrap();
        let mut buf = [0; 1];
        let got = recv(&s, &mut buf).unwrap();
        assert!(got.cut && !got.fds_lost && got.fds.len() == 1);
        drop(l);
        assert_eq!(std::fs::read_dir(tmp.path()).unwrap().count(), 0);
        let long = tmp.path().join("x".repeat(100));
        std::fs::create_dir(&long).unwrap();
        assert!(Listener::open_file(SocketType::SEQPACKET, &long, nonce).is_err());
        assert_eq!(std::fs::read_dir(&long).unwrap().count(), 0);
    }

    #[test]
    fn waiting_ends_at_the_deadline() {
        let bell = Bell::new().unwrap();
        let d = Deadline::after_s(0.05);
        assert!(!wait_one(bell.fd().as_fd(), PollFlags::IN, d).unwrap());
        assert!(d.expired());
        bell.ring();
        assert!(wait_one(bell.fd().as_fd(), PollFlags::IN, Deadline::after_s(5.0)).unwrap());
        bell.hush();
        assert!(!wait_one(bell.fd().as_fd(), PollFlags::IN, Deadline::after_s(0.0)).unwrap());
    }
}
