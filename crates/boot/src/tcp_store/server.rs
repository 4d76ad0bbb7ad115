//! The serving side of a store: one thread that polls.

use std::collections::HashMap;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{SocketFlags, SocketType};
use tilewire_core::{Deadline, Error, ErrorKind, Rank, Result, inject};

use super::StoreAddr;
use super::conn::{Conn, Stage};
use super::other_secret::OtherSecrets;
use super::user::Users;
use super::wire::{self, MAX_BODY, MAX_HELLO, Request, Response};
use crate::claim;
use crate::handshake::HELLO_LIMIT;
use crate::peer;
use crate::refusals::{Reason, Refusals};
use crate::rendezvous::YOUNG;
use crate::secret::{Secret, random_bytes};
use crate::sock::{self, Bell, Listener};
use crate::store::add_decimal;
use crate::stream::{MUTE, resolve};
use crate::threads::Worker;

/// Connections in their hello. Behind these the oldest makes way, once it is not [`YOUNG`] any
/// more: a flood of silent ones then delays an honest rank by that for each 128 of them.
const MAX_HALF_OPEN: usize = 128;
/// Of these, what one other user of this host may have, and what all others may have together:
/// beyond it, their newest is refused, and the space for ranks of our user stays free. Clients come
/// again a little later each time, so a rank of theirs (with the secret) gets through as well.
const MAX_OF_OTHER_USER: usize = 16;
const MAX_OF_OTHER_USERS: usize = 64;
const MAX_CONNECTIONS: usize = 1024;
const MAX_KEYS: usize = 1 << 20;
const MAX_BYTES: usize = 256 << 20;

/// Serves a store until dropped. Strangers are refused and counted, and service goes on.
pub struct StoreServer {
    addr: StoreAddr,
    refused: Arc<Refusals>,
    come: Arc<AtomicU64>,
    others: Arc<OtherSecrets>,
    stop: Arc<AtomicBool>,
    bell: Arc<Bell>,
    thread: Option<Worker>,
}

/// The listening socket of a server.
enum Ear {
    Tcp(OwnedFd),
    Unix(Listener),
}

impl StoreServer {
    /// Listens at `addr`.
    ///
    /// # Errors
    /// `Permission` if the address can be reached from other hosts and the secret was not
    /// configured but follows from the job's name. `Unavailable` if the address is in use. `Io`.
    pub fn bind(addr: &StoreAddr, secret: &Secret) -> Result<Self> {
        Self::try_bind(addr, secret)?.ok_or_else(|| {
            Error::new(ErrorKind::Unavailable, format!("{addr} is in use")).op("store")
        })
    }

    /// As [`StoreServer::bind`], but `None` if the address is in use.
    pub(crate) fn try_bind(addr: &StoreAddr, secret: &Secret) -> Result<Option<Self>> {
        let Some((ear, addr)) = listen(addr, secret)? else { return Ok(None) };
        let (refused, stop) = (Arc::<Refusals>::default(), Arc::new(AtomicBool::new(false)));
        let (bell, come) = (Arc::new(Bell::new()?), Arc::<AtomicU64>::default());
        let others = Arc::<OtherSecrets>::default();
        let mut service = Service {
            ear,
            secret: secret.clone(),
            refused: refused.clone(),
            come: come.clone(),
            others: others.clone(),
            users: Users::default(),
            data: Data::default(),
            conns: Vec::new(),
            was_full: false,
        };
        let (b, s) = (bell.clone(), stop.clone());
        let thread = Worker::start("tilewire-store", move || {
            // A broken poll ends the service: clients see the connection close, and say so.
            while !s.load(Ordering::Acquire) && service.turn(&b).is_ok() {}
        })?;
        Ok(Some(Self { addr, refused, come, others, stop, bell, thread: Some(thread) }))
    }

    /// The address, with the port that the kernel chose.
    pub fn addr(&self) -> &StoreAddr {
        &self.addr
    }

    /// Connections that were closed because their hello was bad or late.
    pub fn refused(&self) -> u64 {
        self.refused.total()
    }

    /// True once a rank has come to meet others here.
    pub(crate) fn has_come(&self, rank: Rank) -> bool {
        self.come.load(Ordering::Acquire) & bit(rank.get()) != 0
    }

    /// Those that have come with another secret.
    pub(crate) fn other_secrets(&self) -> &OtherSecrets {
        &self.others
    }

    /// The reasons of those refusals; none if there are no refusals.
    pub(crate) fn reasons(&self) -> Option<String> {
        (self.refused.total() > 0).then(|| self.refused.to_string())
    }
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.bell.ring();
        if let Some(t) = self.thread.take() {
            t.join();
        }
    }
}

fn listen(addr: &StoreAddr, secret: &Secret) -> Result<Option<(Ear, StoreAddr)>> {
    let io = |e| Error::io(format!("listening at {addr}"), e).op("store");
    match addr {
        StoreAddr::Tcp(host, port) => {
            let all = resolve(host, *port, Deadline::after(MUTE))?;
            if !secret.is_explicit() && !all.iter().all(|a| a.ip().is_loopback()) {
                let msg = format!("{addr} can be reached from other hosts, and there is no secret");
                return Err(Error::new(ErrorKind::Permission, msg)
                    .op("store")
                    .hint("set TILEWIRE_SECRET to 32 or more hex digits, the same on all ranks"));
            }
            inject::step("binding the store")?;
            let l = match TcpListener::bind(&all[..]) {
                Err(e) if e.kind() == std::io::ErrorKind::AddrInUse => return Ok(None),
                r => r.map_err(io)?,
            };
            l.set_nonblocking(true).map_err(io)?;
            // The standard library's queue of 128 is full in a flood; a rank whose first packet
            // finds it so comes again after a second.
            rustix::net::listen(&l, sock::BACKLOG).map_err(|e| io(e.into()))?;
            let port = l.local_addr().map_err(io)?.port();
            Ok(Some((Ear::Tcp(l.into()), StoreAddr::Tcp(host.clone(), port))))
        }
        StoreAddr::Abstract(name) => match Listener::open_abstract(SocketType::STREAM, name) {
            Err(e) if in_use(&e) => Ok(None),
            r => Ok(Some((Ear::Unix(r?), addr.clone()))),
        },
    }
}

fn in_use(e: &Error) -> bool {
    let cause = std::error::Error::source(e).and_then(|c| c.downcast_ref::<Errno>());
    cause == Some(&Errno::ADDRINUSE)
}

fn bit(rank: u32) -> u64 {
    1u64.checked_shl(rank).unwrap_or(0)
}

#[derive(Default)]
struct Data {
    map: HashMap<String, Vec<u8>>,
    bytes: usize,
}

impl Data {
    fn set(&mut self, key: String, value: Vec<u8>) -> Response {
        let old = self.map.get(&key).map_or(0, |v| v.len() + key.len());
        let bytes = self.bytes - old + key.len() + value.len();
        if bytes > MAX_BYTES || (old == 0 && self.map.len() >= MAX_KEYS) {
            return Response::Full(format!("the store is full: it cannot take {bytes} bytes"));
        }
        self.bytes = bytes;
        self.map.insert(key, value);
        Response::Ok(Vec::new())
    }

    fn add(&mut self, key: String, n: i64) -> Response {
        match add_decimal(&key, self.map.get(&key), n) {
            Err(e) => Response::Invalid(e.message().to_owned()),
            Ok(sum) => match self.set(key, sum.to_string().into_bytes()) {
                Response::Ok(_) => Response::Ok(sum.to_le_bytes().to_vec()),
                full => full,
            },
        }
    }
}

struct Service {
    ear: Ear,
    secret: Secret,
    refused: Arc<Refusals>,
    /// The ranks that have claimed their places, as bits.
    come: Arc<AtomicU64>,
    others: Arc<OtherSecrets>,
    users: Users,
    data: Data,
    conns: Vec<Conn>,
    /// True once the log has reported that no descriptor was free.
    was_full: bool,
}

impl Service {
    /// Waits for something to happen and handles it.
    fn turn(&mut self, bell: &Bell) -> Result<()> {
        let mut free = self.make_space();
        let now = Instant::now();
        let limit = self.conns.iter().filter_map(Conn::alarm).min();
        let limit = limit.map(|t| t.saturating_duration_since(now));
        let limit = if free > 0 { limit } else { Some(limit.map_or(YOUNG, |l| l.min(YOUNG))) };
        let ready: Vec<bool> = {
            let ear = match &self.ear {
                Ear::Tcp(fd) => fd,
                Ear::Unix(l) => &l.sock,
            };
            let listen = if free > 0 { PollFlags::IN } else { PollFlags::empty() };
            let mut fds = vec![PollFd::new(bell.fd(), PollFlags::IN), PollFd::new(ear, listen)];
            fds.extend(self.conns.iter().map(|c| PollFd::new(&c.sock, c.interest())));
            sock::wait_any(&mut fds, limit)?;
            fds.iter().skip(1).map(|f| !f.revents().is_empty()).collect()
        };
        for (i, mut c) in std::mem::take(&mut self.conns).into_iter().enumerate() {
            match self.serve(&mut c, ready[1 + i]) {
                Ok(()) => self.conns.push(c),
                Err(why) if c.half_open() => self.refused.add(why),
                Err(_) => {}
            }
        }
        self.wake();
        while ready[0] && free > 0 && self.accept() {
            free -= 1;
        }
        Ok(())
    }

    /// The number of connections that may be accepted now. If there are too many in their hello,
    /// closes those that are not young any more: first of those that have said nothing, the oldest.
    fn make_space(&mut self) -> usize {
        let mut half_open = self.conns.iter().filter(|c| c.half_open()).count();
        for silent in [true, false] {
            let mut k = 0;
            // In the order in which they came.
            while half_open >= MAX_HALF_OPEN && k < self.conns.len() {
                let c = &self.conns[k];
                let in_turn = c.half_open() && matches!(c.stage, Stage::Hello) == silent;
                if in_turn && c.born.elapsed() >= YOUNG {
                    self.conns.remove(k);
                    self.refused.add(Reason::Silent);
                    half_open -= 1;
                } else {
                    k += 1;
                }
            }
        }
        let free = MAX_HALF_OPEN.saturating_sub(half_open);
        free.min(MAX_CONNECTIONS.saturating_sub(self.conns.len()))
    }

    /// True if another user of this host may have one more connection in its hello. If it has too
    /// many, its oldest makes way, and if all others have, their oldest: once it is not young.
    fn make_space_for(&mut self, user: u32) -> bool {
        let of_all = |c: &Conn| c.half_open() && c.user.is_some_and(|u| !peer::is_our_user(u));
        let of_one = |c: &Conn| c.half_open() && c.user == Some(user);
        let count = |f: &dyn Fn(&Conn) -> bool| self.conns.iter().filter(|c| f(c)).count();
        let in_turn: &dyn Fn(&Conn) -> bool = if count(&of_one) >= MAX_OF_OTHER_USER {
            &of_one
        } else if count(&of_all) >= MAX_OF_OTHER_USERS {
            &of_all
        } else {
            return true;
        };
        let old = |c: &Conn| in_turn(c) && c.born.elapsed() >= YOUNG;
        let Some(k) = self.conns.iter().position(old) else { return false };
        self.conns.remove(k);
        self.refused.add(Reason::Silent);
        true
    }

    /// Takes one connection. False if none waits.
    fn accept(&mut self) -> bool {
        let (Ear::Tcp(fd) | Ear::Unix(Listener { sock: fd, .. })) = &self.ear;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let sock = match rustix::net::accept_with(fd, flags) {
            Ok(s) => s,
            Err(Errno::CONNABORTED | Errno::INTR) => return true,
            Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                if !std::mem::replace(&mut self.was_full, true) {
                    log::warn!(
                        "the store has no file descriptor for another connection: see `ulimit -n`"
                    );
                }
                // The connection stays in the queue: without a pause this would spin.
                std::thread::sleep(Duration::from_millis(50));
                return false;
            }
            Err(_) => return false,
        };
        if matches!(self.ear, Ear::Unix(_)) && peer::check_user(&sock).is_err() {
            self.refused.add(Reason::User);
            return true;
        }
        let mut user = None;
        if matches!(self.ear, Ear::Tcp(_)) {
            // Only a matter of speed.
            rustix::net::sockopt::set_tcp_nodelay(&sock, true).ok();
            user = self.users.of(&sock);
            if user.is_some_and(|u| !peer::is_our_user(u) && !self.make_space_for(u)) {
                self.refused.add(Reason::Crowd);
                return true;
            }
        }
        let (input, output) = (Vec::new(), Vec::new());
        let (stage, born) = (Stage::Hello, Instant::now());
        let mut c = Conn { sock, born, user, stage, input, output };
        // A rank says hello at once: answered now, it has a proof before newer ones press.
        match self.serve(&mut c, true) {
            Ok(()) => self.conns.push(c),
            Err(why) => self.refused.add(why),
        }
        true
    }

    /// Reads, answers and writes as far as possible. An error closes the connection, and is the
    /// reason of the refusal if it was in its hello.
    fn serve(&mut self, c: &mut Conn, ready: bool) -> Result<(), Reason> {
        if ready {
            let broken = |_| Reason::Closed;
            c.flush().map_err(broken)?;
            let open = c.fill().map_err(broken)?;
            while c.output.is_empty() && !matches!(c.stage, Stage::Waiting { .. }) {
                let max = if c.half_open() { MAX_HELLO } else { MAX_BODY };
                let body = wire::next_body(&mut c.input, max).map_err(|_| Reason::Garbage)?;
                let Some(body) = body else { break };
                self.answer(c, &body)?;
                c.flush().map_err(broken)?;
            }
            if !open {
                return Err(Reason::Closed);
            }
        }
        let late = c.half_open() && c.born.elapsed() >= HELLO_LIMIT;
        if late { Err(Reason::Silent) } else { Ok(()) }
    }

    fn answer(&mut self, c: &mut Conn, body: &[u8]) -> Result<(), Reason> {
        let garbage = |_| Reason::Garbage;
        match &c.stage {
            Stage::Hello => {
                let (client, rest) = wire::read_greeting(body).map_err(garbage)?;
                let server = random_bytes().map_err(|_| Reason::Closed)?;
                if !rest.is_empty() {
                    return Err(Reason::Garbage);
                }
                let proof = wire::proof(&self.secret, "server", &client, &server);
                c.say(&wire::greeting(&server, Some(proof)));
                c.stage = Stage::Proof { client, server };
            }
            Stage::Proof { .. } if let Some(who) = wire::read_other_secret(body) => {
                if let Some(who) = who {
                    self.others.note(&c.sock, matches!(self.ear, Ear::Tcp(_)), c.user, who);
                }
                return Err(Reason::Secret);
            }
            Stage::Proof { client, server } => {
                let theirs = <[u8; 32]>::try_from(body).map_err(|_| Reason::Garbage)?;
                let ours = wire::proof(&self.secret, "client", client, server);
                if ours != blake3::Hash::from_bytes(theirs) {
                    return Err(Reason::Secret);
                }
                c.say(&Response::Ok(Vec::new()).encode());
                c.stage = Stage::Ready;
            }
            Stage::Ready | Stage::Waiting { .. } => match Request::decode(body).map_err(garbage)? {
                Request::Set { key, value } => c.say(&self.data.set(key, value).encode()),
                Request::Add { key, n } => {
                    let rank = claim::rank_of(&key).filter(|_| n > 0);
                    self.come.fetch_or(rank.map_or(0, bit), Ordering::Release);
                    c.say(&self.data.add(key, n).encode());
                }
                Request::Get { key, wait_ms } => {
                    let wait = Duration::from_millis(wait_ms.min(1 << 32));
                    c.stage = Stage::Waiting { key, until: Instant::now() + wait };
                }
            },
        }
        Ok(())
    }

    /// Answers the `get`s whose key is there or whose time is up.
    fn wake(&mut self) {
        let now = Instant::now();
        for c in &mut self.conns {
            let Stage::Waiting { key, until } = &c.stage else { continue };
            let answer = match self.data.map.get(key) {
                Some(v) => Response::Ok(v.clone()),
                None if *until <= now => Response::Timeout,
                None => continue,
            };
            c.stage = Stage::Ready;
            c.say(&answer.encode());
            // A connection that broke shows it at the next poll.
            c.flush().ok();
        }
    }
}
