//! Byte streams that never block past a deadline.

use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use tilewire_core::{Deadline, Error, ErrorKind, Result, inject};

use crate::rendezvous::NO_ROOM;
use crate::sock;

/// Limit for one attempt to connect, before the next begins.
const ATTEMPT: Duration = Duration::from_secs(2);

/// Longest time for which names are looked up that the name service does not know: it may have had
/// a moment's trouble.
const UNKNOWN: Duration = Duration::from_secs(1);

/// Longest time for a name service that does not answer: resolvers ask again after 5 s, when a
/// packet was lost.
pub(crate) const MUTE: Duration = Duration::from_secs(6);

/// The addresses of a host.
///
/// # Errors
/// `Unavailable` if the name is not known, or not in time. It is final.
pub(crate) fn resolve(host: &str, port: u16, deadline: Deadline) -> Result<Vec<SocketAddr>> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(vec![(ip, port).into()]);
    }
    let asked = Deadline::after(deadline.remaining().clamp(Duration::from_millis(100), MUTE));
    loop {
        let (answer, answers) = mpsc::channel();
        let name = host.to_owned();
        // The system's call has no limit of its own, and cannot be ended: then its thread stays.
        let look_up = move || {
            let found = (&*name, port).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
            answer.send(found).ok();
        };
        std::thread::Builder::new()
            .name("tilewire-names".to_owned())
            .spawn(look_up)
            .map_err(|e| Error::io("starting a thread that looks up a name", e))?;
        let why = match answers.recv_timeout(asked.remaining()) {
            Ok(Ok(found)) if !found.is_empty() => return Ok(found),
            Ok(Ok(_)) => "it has no address".to_owned(),
            Ok(Err(e)) => e.to_string(),
            Err(_) => "the name service does not answer".to_owned(),
        };
        let pause = Duration::from_millis(250);
        if asked.elapsed() + pause >= UNKNOWN.min(asked.limit()) {
            let s = asked.elapsed().as_secs_f64();
            let text = format!("the host `{host}` was not found in {s:.1} s: {why}");
            return Err(Error::new(ErrorKind::Unavailable, text)
                .op("store")
                .elapsed(asked.elapsed())
                .hint("is the name right? a number (127.0.0.1) needs no name service"));
        }
        std::thread::sleep(pause);
    }
}

/// A connected stream socket that does not block.
pub(crate) struct Stream(pub OwnedFd);

impl Stream {
    /// One attempt to connect. `Io` if it may succeed later.
    pub fn tcp(addrs: &[SocketAddr], deadline: Deadline) -> Result<Self> {
        inject::step("connecting to the store")?;
        let io = |e| Error::io("connecting to the store", e);
        let limit = deadline.remaining().clamp(Duration::from_millis(1), ATTEMPT);
        let mut last = Errno::ADDRNOTAVAIL.into();
        for addr in addrs {
            match TcpStream::connect_timeout(addr, limit) {
                Ok(s) => {
                    s.set_nonblocking(true).map_err(io)?;
                    s.set_nodelay(true).map_err(io)?;
                    return Ok(Self(s.into()));
                }
                Err(e) => last = e,
            }
        }
        Err(io(last))
    }

    /// Writes everything.
    pub fn write_all(&self, mut bytes: &[u8], deadline: Deadline) -> Result<()> {
        while !bytes.is_empty() {
            let flags = rustix::net::SendFlags::NOSIGNAL;
            match rustix::net::send(&self.0, bytes, flags) {
                Ok(n) => bytes = &bytes[n..],
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, deadline)?,
                Err(e) => return Err(Error::io("writing to the store", e)),
            }
        }
        Ok(())
    }

    /// Reads exactly as much as fits in `buf`.
    pub fn read_exact(&self, buf: &mut [u8], deadline: Deadline) -> Result<()> {
        let mut done = 0;
        while done < buf.len() {
            match rustix::io::read(&self.0, &mut buf[done..]) {
                Ok(0) => {
                    let e = std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
                    return Err(Error::io("the store closed the connection", e));
                }
                Ok(n) => done += n,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(PollFlags::IN, deadline)?,
                Err(e) => return Err(Error::io("reading from the store", e)),
            }
        }
        Ok(())
    }

    fn wait(&self, what: PollFlags, deadline: Deadline) -> Result<()> {
        if sock::wait_one(self.0.as_fd(), what, deadline)? {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Timeout, "the store does not answer")
            .op("store")
            .elapsed(deadline.elapsed()))
    }
}

/// Calls `attempt` until it succeeds, fails for good, or the time is up.
///
/// `Io` and `Timeout` are worth another attempt, and for a while a lack of descriptors, as others
/// may be closed; every other kind of error is final.
pub(crate) fn retry<T>(
    what: &str,
    deadline: Deadline,
    mut attempt: impl FnMut() -> Result<T>,
) -> Result<T> {
    let mut pause = Duration::from_millis(5);
    let mut full: Option<Instant> = None;
    loop {
        let e = match attempt() {
            Err(e) if matches!(e.kind(), ErrorKind::Io | ErrorKind::Timeout) => {
                full = None;
                e
            }
            // What the system has said, not a limit of ours.
            Err(e)
                if e.kind() == ErrorKind::Exhausted
                    && std::error::Error::source(&e).is_some()
                    && full.get_or_insert_with(Instant::now).elapsed() < NO_ROOM
                    && !deadline.expired() =>
            {
                e
            }
            r => return r,
        };
        if deadline.expired() {
            let tried = deadline.elapsed().as_secs_f64();
            let msg = format!("cannot reach the store at {what}, tried for {tried:.1} s");
            return Err(Error::new(ErrorKind::Timeout, format!("{msg}: {}", e.message()))
                .op("store")
                .elapsed(deadline.elapsed())
                .hint("is rank 0 (or the launcher) running, and is the address right?")
                .cause(e));
        }
        std::thread::sleep(pause.min(deadline.remaining()));
        pause = (pause * 2).min(Duration::from_millis(200));
    }
}
