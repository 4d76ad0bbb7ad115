//! The rendezvous: processes of a job find each other and connect, each with each.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::net::SocketType;
use tilewire_core::{Deadline, Error, ErrorKind, Rank, Result};

use crate::card::{Card, card_key, fetch, gather};
use crate::claim::{Sign, claim};
use crate::handshake::{HalfOpen, Identity, greet, say_refused};
use crate::peer;
use crate::refusals::{Reason, Refusals};
use crate::secret::{hex, random_bytes};
use crate::sock::{self, Accepted, Bell, ConnectError, Listener};
use crate::store::Store;

/// Connections that may be in their hello at the same time.
const MAX_HALF_OPEN: usize = 64;

/// Time for which a connection may keep its place in its hello while newer ones wait for one: an
/// honest rank needs much less.
pub(crate) const YOUNG: Duration = Duration::from_millis(50);

/// Pauses between attempts to connect to a rank, from the first to the longest.
const PAUSES: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(500)];

/// Time between looks at the cards of those that have not connected: one may have given up.
const LOOK: Duration = Duration::from_millis(500);

/// Limit for the time in which a waiting rank may lack a free descriptor; strangers' connections
/// are closed by then.
pub(crate) const NO_ROOM: Duration = Duration::from_secs(10);

/// An open connection to a peer, with a descriptor of its process if that can be had.
pub(crate) struct Link {
    pub sock: OwnedFd,
    /// None: the end of the peer is seen by that of the socket alone.
    pub pidfd: Option<OwnedFd>,
}

/// The result of a rendezvous.
pub(crate) struct Met {
    /// Element `i` is the link to rank `i`, none for our own.
    pub links: Vec<Option<Link>>,
    /// Connections that were refused.
    pub refused: u64,
    /// Shows others that this rank is taken, as long as the mesh lives.
    pub sign: Option<Sign>,
}

/// Connects to all other ranks.
pub(crate) fn rendezvous(store: &dyn Store, me: Identity<'_>, deadline: Deadline) -> Result<Met> {
    let nonce = hex(&random_bytes()?[..16]);
    let name = format!("tilewire-{}-{}-{nonce}", short(me.job), me.rank.get());
    let listener = Listener::open(SocketType::SEQPACKET, &name)?;
    let mine = Card::new(&me, &listener.name);
    claim(store, &me, &mine, deadline)?;
    // Before the card: who reads that must see whether its writer lives.
    let sign = Sign::show(&listener.name)?;
    let text = serde_json::to_vec(&mine).map_err(|e| Error::io("writing a card", e))?;
    store.set(&card_key(me.job, me.rank), &text)?;
    let met = meet(store, &me, &mine, &listener, deadline);
    // A rank that gives up says so in the store before it stops listening: then it has not died.
    let word = || gather(store, &me, &mine, Deadline::after(Duration::ZERO)).err();
    let met = met.map_err(|e| match e.is_peer_dead() {
        true => word().filter(|w| w.kind() == ErrorKind::Aborted).unwrap_or(e),
        false => e,
    });
    let (links, refused) = met.inspect_err(|e| {
        // Who comes late must not wait for a rank that has given up; if the store is what failed,
        // nobody will read it.
        let gone = serde_json::to_vec(&Card::withdrawn(&me, e)).unwrap_or_default();
        store.set(&card_key(me.job, me.rank), &gone).ok();
    })?;
    Ok(Met { links, refused, sign })
}

fn meet(
    store: &dyn Store,
    me: &Identity<'_>,
    mine: &Card,
    listener: &Listener,
    deadline: Deadline,
) -> Result<(Vec<Option<Link>>, u64)> {
    let cards = gather(store, me, mine, deadline)?;

    let stop = Stop { flag: AtomicBool::new(false), bell: Bell::new()? };
    let refused = Refusals::default();
    let (accepted, connected) = std::thread::scope(|s| {
        let accept = || {
            let given_up = |r| fetch(store, me, mine, r, Deadline::after(Duration::ZERO)).err();
            let watch = Watch { stop: &stop, refused: &refused, given_up: &given_up };
            stop.on_error(accept_lower(listener, me, &watch, deadline))
        };
        let acceptor = match std::thread::Builder::new().spawn_scoped(s, accept) {
            Ok(thread) => thread,
            Err(e) => {
                let e = Error::io("starting the thread that accepts other ranks", e);
                return (Err(e.op("rendezvous").rank(me.rank)), Ok(Vec::new()));
            }
        };
        let connected = stop.on_error(connect_higher(&cards, me, &stop, deadline));
        let accepted = acceptor.join().map_err(|_| Error::internal("the acceptor panicked"));
        (accepted.and_then(|r| r), connected)
    });
    // If both failed, the one that failed because the other did is not the cause.
    let mut socks = match (accepted, connected) {
        (Ok(a), Ok(c)) => a.into_iter().chain(c).collect::<Vec<_>>(),
        (Err(e), Err(f)) => return Err(if e.kind() == ErrorKind::Aborted { f } else { e }),
        (Err(e), _) | (_, Err(e)) => return Err(e),
    };
    let mut links: Vec<Option<Link>> = (0..me.size).map(|_| None).collect();
    for (rank, sock) in socks.drain(..) {
        links[rank.idx()] = Some(Link { pidfd: peer::pidfd(&sock)?, sock });
    }
    Ok((links, refused.total()))
}

/// A job name as part of a socket's name: bounded, and still different for different jobs.
fn short(job: &str) -> String {
    let legal = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if job.len() <= 40 && job.chars().all(legal) {
        job.to_owned()
    } else {
        hex(&blake3::hash(job.as_bytes()).as_bytes()[..16])
    }
}

/// Lets the two halves of a rendezvous end each other.
struct Stop {
    flag: AtomicBool,
    bell: Bell,
}

impl Stop {
    fn on_error<T>(&self, r: Result<T>) -> Result<T> {
        r.inspect_err(|_| {
            self.flag.store(true, Ordering::Release);
            self.bell.ring();
        })
    }

    fn check(&self) -> Result<()> {
        if self.flag.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Aborted, "the other half of the rendezvous failed"));
        }
        Ok(())
    }
}

struct Watch<'a> {
    stop: &'a Stop,
    refused: &'a Refusals,
    /// The reason why a rank cannot be met, as its card says.
    given_up: &'a dyn Fn(Rank) -> Option<Error>,
}

impl Watch<'_> {
    /// Looks whether one of those that have not connected has given up, and never will.
    fn look(&self, done: &[Option<OwnedFd>]) -> Result<()> {
        let missing = Rank::all(done.len()).zip(done).filter(|(_, s)| s.is_none());
        // Trouble with the store is none of theirs.
        let theirs = |e: &Error| e.get_peer().is_some() && !e.is_timeout();
        missing.map(|(r, _)| r).find_map(|r| (self.given_up)(r).filter(theirs)).map_or(Ok(()), Err)
    }
}

type Sockets = Vec<(Rank, OwnedFd)>;

/// Serves our listener until all lower ranks have proved themselves; refuses other connections.
fn accept_lower(
    listener: &Listener,
    me: &Identity<'_>,
    watch: &Watch<'_>,
    deadline: Deadline,
) -> Result<Sockets> {
    let mut done: Vec<Option<OwnedFd>> = (0..me.rank.idx()).map(|_| None).collect();
    let mut open: Vec<HalfOpen> = Vec::new();
    // Since when no descriptor is free for those who wait.
    let mut full: Option<Instant> = None;
    let mut looked = Instant::now();
    while done.iter().any(Option::is_none) {
        watch.stop.check()?;
        if deadline.expired() {
            return Err(unconnected(&done, me, watch, deadline));
        }
        if looked.elapsed() >= LOOK {
            watch.look(&done)?;
            looked = Instant::now();
        }
        let free = make_space(&mut open, watch.refused);
        let patience = open.iter().map(HalfOpen::patience).fold(deadline.remaining(), Ord::min);
        let patience = patience.min(if free { LOOK } else { YOUNG });
        let ready: Vec<bool> = {
            let listen = if free { PollFlags::IN } else { PollFlags::empty() };
            let mut fds = vec![
                PollFd::new(watch.stop.bell.fd(), PollFlags::IN),
                PollFd::new(&listener.sock, listen),
            ];
            fds.extend(open.iter().map(|h| PollFd::new(&h.sock, PollFlags::IN)));
            sock::wait_any(&mut fds, Some(patience))?;
            fds.iter().skip(1).map(|f| !f.revents().is_empty()).collect()
        };
        let mut kept = Vec::new();
        for (mut h, ready) in open.into_iter().zip(&ready[1..]) {
            match if *ready { h.step(me) } else { Ok(None) } {
                // A rank that was stopped in its hello comes again: the newest connection counts.
                Ok(Some(peer)) => done[peer.idx()] = Some(h.sock),
                Ok(None) if !h.patience().is_zero() => kept.push(h),
                Ok(None) => watch.refused.add(Reason::Silent),
                Err((why, _)) => watch.refused.add(why),
            }
        }
        open = kept;
        if ready[0] {
            accept_some(listener, me, watch, &mut open, &mut full)?;
        }
    }
    Ok(Rank::all(done.len()).zip(done).filter_map(|(r, s)| Some((r, s?))).collect())
}

/// Takes connections while there is space for them.
fn accept_some(
    listener: &Listener,
    me: &Identity<'_>,
    watch: &Watch<'_>,
    open: &mut Vec<HalfOpen>,
    full: &mut Option<Instant>,
) -> Result<()> {
    // Strangers take no space, but they must not keep us from those who have some.
    for _ in 0..MAX_HALF_OPEN {
        if open.len() >= MAX_HALF_OPEN {
            break;
        }
        match listener.accept()? {
            Accepted::Connection(s) => open.push(HalfOpen::new(s)),
            Accepted::NoRoom if full.is_some_and(|t| t.elapsed() > NO_ROOM) => {
                let text = "no file descriptor is free for another rank's connection";
                return Err(Error::new(ErrorKind::Exhausted, text)
                    .op("rendezvous")
                    .rank(me.rank)
                    .hint("raise the limit of open files with `ulimit -n`"));
            }
            Accepted::NoRoom => {
                full.get_or_insert_with(Instant::now);
                return Ok(());
            }
            Accepted::Stranger(s, why) => {
                say_refused(&s, me.rank, &why);
                watch.refused.add(Reason::User);
            }
            Accepted::Nothing => {
                *full = None;
                return Ok(());
            }
        }
        *full = None;
    }
    Ok(())
}

/// Closes the oldest connection if there are too many: of those that have said nothing, if there
/// are some. False if all are young and none may be closed yet.
fn make_space(open: &mut Vec<HalfOpen>, refused: &Refusals) -> bool {
    if open.len() < MAX_HALF_OPEN {
        return true;
    }
    let oldest = |spoken| open.iter().position(|h| h.has_spoken() == spoken);
    let Some(i) = oldest(false).or_else(|| oldest(true)) else { return true };
    if open[i].age() < YOUNG {
        return false;
    }
    open.remove(i);
    refused.add(Reason::Silent);
    true
}

fn unconnected(
    done: &[Option<OwnedFd>],
    me: &Identity<'_>,
    watch: &Watch<'_>,
    deadline: Deadline,
) -> Error {
    let missing: Vec<_> =
        Rank::all(done.len()).zip(done).filter(|(_, s)| s.is_none()).map(|(r, _)| r).collect();
    let list: Vec<_> = missing.iter().map(Rank::to_string).collect();
    let msg = format!("no connection from {}; {}", list.join(", "), watch.refused);
    let e = Error::new(ErrorKind::Timeout, msg).op("rendezvous").rank(me.rank);
    missing.first().map_or(e.clone(), |r| e.peer(*r)).elapsed(deadline.elapsed())
}

fn connect_higher(
    cards: &[Card],
    me: &Identity<'_>,
    stop: &Stop,
    deadline: Deadline,
) -> Result<Sockets> {
    let higher = Rank::all(me.size).skip(me.rank.idx() + 1);
    higher.map(|r| Ok((r, connect_one(&cards[r.idx()], me, r, stop, deadline)?))).collect()
}

fn connect_one(
    card: &Card,
    me: &Identity<'_>,
    peer: Rank,
    stop: &Stop,
    deadline: Deadline,
) -> Result<OwnedFd> {
    let mut last: Option<Error> = None;
    let [mut pause, longest] = PAUSES;
    loop {
        stop.check()?;
        match sock::connect(SocketType::SEQPACKET, &card.addr) {
            Ok(None) => {}
            Ok(Some(s)) => {
                peer::check_user(&s).map_err(|e| {
                    let text = format!("{peer} is not of our user: {}", e.message());
                    e.reworded(text).op("rendezvous").rank(me.rank).peer(peer)
                })?;
                match greet(&s, me, peer, deadline) {
                    Ok(()) => return Ok(s),
                    Err(e) if e.kind() == ErrorKind::Io => last = Some(e),
                    Err(e) => return Err(e.rank(me.rank)),
                }
            }
            // It listened before it published the name, and listens until all are connected.
            Err(ConnectError::Nobody) => {
                return Err(Error::new(
                    ErrorKind::PeerDead,
                    format!("{peer} (pid {}) does not listen any more", card.pid),
                )
                .op("rendezvous")
                .rank(me.rank)
                .peer(peer)
                .hint("it has ended, or it runs in another network namespace"));
            }
            Err(ConnectError::Other(e)) => return Err(e.op("rendezvous").peer(peer)),
        }
        if deadline.expired() {
            let why = last.as_ref().map(|l| format!(": {}", l.message())).unwrap_or_default();
            let e = Error::new(ErrorKind::Timeout, format!("cannot connect to {peer}{why}"));
            let e = e.op("rendezvous").rank(me.rank).peer(peer).elapsed(deadline.elapsed());
            return Err(match last {
                Some(l) => e.cause(l),
                None => e,
            });
        }
        // A peer that closed without a word had no space, or was stopped.
        std::thread::sleep(pause.min(deadline.remaining()));
        pause = (2 * pause).min(longest);
    }
}

#[cfg(test)]
#[path = "rendezvous_tests.rs"]
mod tests;
