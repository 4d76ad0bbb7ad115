//! Proof, on both ends of a new connection, that the other knows the job's secret.
//!
//! Hello (ranks, size, nonce) -> Challenge (nonce, proof) -> Proof -> Welcome. The proofs are keyed
//! hashes over role, job, both ranks, world size, protocol version and both nonces. A listener that
//! refuses says why (Refused): then the other does not come again.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use tilewire_core::{Deadline, Error, ErrorKind, Rank, Result};

use crate::frame::{self, Kind, MAX_FRAME, VERSION};
use crate::refusals::Reason;
use crate::secret::{Nonce, Secret, random_bytes};
use crate::sock;

/// Limit for the handshake of a connection that has not proved that it knows the secret.
pub(crate) const HELLO_LIMIT: Duration = Duration::from_secs(2);

/// The identity of this rank in one rendezvous.
#[derive(Clone, Copy)]
pub(crate) struct Identity<'a> {
    pub job: &'a str,
    pub rank: Rank,
    pub size: usize,
    pub secret: &'a Secret,
}

/// The facts that both ends of a connection sign in their proofs.
struct Session {
    connecting: Rank,
    listening: Rank,
    nonces: [Nonce; 2],
}

impl Identity<'_> {
    fn proof(&self, role: &str, s: &Session) -> blake3::Hash {
        let numbers = [s.connecting.get(), s.listening.get(), self.size as u32, VERSION as u32];
        let numbers: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        let parts = [self.job.as_bytes(), &numbers, &s.nonces[0], &s.nonces[1]];
        self.secret.mac(&format!("link {role}"), &parts)
    }
}

fn refuse(what: &str) -> Error {
    Error::new(ErrorKind::Protocol, format!("the hello of a connection is not valid: {what}"))
        .op("rendezvous")
}

/// The end of the message where proofs do not agree.
const SECRET: &str = "the secret differs";

/// Lets the peer know why it is refused, if it still reads.
pub(crate) fn say_refused(sock: &OwnedFd, me: Rank, why: &Error) {
    let remedy = why.get_hint().map(|h| format!("; {h}")).unwrap_or_default();
    let user = u8::from(why.kind() == ErrorKind::Permission);
    let text = [&[user], format!("{}{remedy}", why.message()).as_bytes()].concat();
    sock::send(sock, &frame::encode_small(Kind::Refused, me, &text), &[]).ok();
}

/// The error of a connection that the listener refused.
fn refused(peer: Rank, payload: &[u8]) -> Error {
    let (kind, text) = match payload {
        [1, text @ ..] => (ErrorKind::Permission, text),
        [_, text @ ..] => (ErrorKind::Protocol, text),
        [] => (ErrorKind::Protocol, &b"it gives no reason"[..]),
    };
    let text = String::from_utf8_lossy(text);
    Error::new(kind, format!("{peer} has refused this process: {text}")).op("rendezvous").peer(peer)
}

fn split<const N: usize>(b: &[u8]) -> Result<(&[u8; N], &[u8])> {
    b.split_first_chunk().ok_or_else(|| refuse("a message is too short"))
}

fn u32_of(b: &[u8]) -> Result<(u32, &[u8])> {
    let (n, rest) = split(b)?;
    Ok((u32::from_le_bytes(*n), rest))
}

/// A connection that came to our listener and has not proved anything yet.
pub(crate) struct HalfOpen {
    pub sock: OwnedFd,
    born: Instant,
    session: Option<Session>,
}

impl HalfOpen {
    pub fn new(sock: OwnedFd) -> Self {
        Self { sock, born: Instant::now(), session: None }
    }

    /// Time until it has to be closed.
    pub fn patience(&self) -> Duration {
        HELLO_LIMIT.saturating_sub(self.born.elapsed())
    }

    /// Time since it came.
    pub fn age(&self) -> Duration {
        self.born.elapsed()
    }

    /// True once its hello has come.
    pub fn has_spoken(&self) -> bool {
        self.session.is_some()
    }

    /// Takes the next message, if there is one: `Some(rank)` once the peer has proved itself.
    ///
    /// # Errors
    /// Any error means: close this connection and go on with the others. The peer knows why, if
    /// that is of use to it.
    pub fn step(&mut self, me: &Identity<'_>) -> Result<Option<Rank>, (Reason, Error)> {
        let mut buf = vec![0u8; MAX_FRAME];
        let read = match sock::recv(&self.sock, &mut buf) {
            Err(rustix::io::Errno::AGAIN) => return Ok(None),
            r => r.map_err(|e| Error::io("reading a hello", e)),
        };
        let got = read.map_err(|e| (Reason::Closed, e))?;
        if got.len == 0 {
            return Err((Reason::Closed, refuse("it was closed")));
        }
        self.answer(me, &buf, &got).map_err(|e| {
            let secret = e.message().ends_with(SECRET);
            say_refused(&self.sock, me.rank, &e);
            (if secret { Reason::Secret } else { Reason::Garbage }, e)
        })
    }

    fn answer(
        &mut self,
        me: &Identity<'_>,
        buf: &[u8],
        got: &sock::Received,
    ) -> Result<Option<Rank>> {
        if got.cut || !got.fds.is_empty() {
            return Err(refuse("too long, or with descriptors"));
        }
        let f = frame::decode(&buf[..got.len])?;
        match (&self.session, f.kind) {
            (None, Kind::Hello) => {
                let (to, rest) = u32_of(f.payload)?;
                let (size, rest) = u32_of(rest)?;
                let (nonce, rest) = split::<32>(rest)?;
                if to != me.rank.get() || size as usize != me.size || !rest.is_empty() {
                    return Err(refuse("meant for another rank or world"));
                }
                if f.src >= me.rank {
                    return Err(refuse("the lower rank connects to the higher"));
                }
                let nonces = [*nonce, random_bytes()?];
                let s = Session { connecting: f.src, listening: me.rank, nonces };
                let mut answer = s.nonces[1].to_vec();
                answer.extend(me.proof("listening", &s).as_bytes());
                self.send(me, Kind::Challenge, &answer)?;
                self.session = Some(s);
                Ok(None)
            }
            (Some(s), Kind::Proof) => {
                let (mac, rest) = split::<32>(f.payload)?;
                let same = me.proof("connecting", s) == blake3::Hash::from_bytes(*mac);
                if !same || !rest.is_empty() || f.src != s.connecting {
                    return Err(refuse(&format!("the proof is wrong: {SECRET}")));
                }
                let peer = s.connecting;
                self.send(me, Kind::Welcome, &[])?;
                Ok(Some(peer))
            }
            _ => Err(refuse("a message out of turn")),
        }
    }

    fn send(&self, me: &Identity<'_>, kind: Kind, payload: &[u8]) -> Result<()> {
        sock::send(&self.sock, &frame::encode_small(kind, me.rank, payload), &[])
            .map_err(|e| Error::io("answering a hello", e))
    }
}

/// The connecting side.
///
/// # Errors
/// `Protocol` if the peer does not know the secret, or it or `Permission` as the peer refuses:
/// final. `Io`: the connection broke, which happens to a process that was stopped for a while; try
/// again. `Timeout` at the deadline.
pub(crate) fn greet(
    sock: &OwnedFd,
    me: &Identity<'_>,
    peer: Rank,
    deadline: Deadline,
) -> Result<()> {
    let send = |kind, payload: &[u8]| {
        sock::send(sock, &frame::encode_small(kind, me.rank, payload), &[])
            .map_err(|e| Error::io("sending a hello", e))
    };
    let nonce = random_bytes()?;
    let mut hello = peer.get().to_le_bytes().to_vec();
    hello.extend((me.size as u32).to_le_bytes());
    hello.extend(nonce);
    if let Err(e) = send(Kind::Hello, &hello) {
        // A listener that refuses at once says why, and closes.
        let word = read(sock, Kind::Challenge, peer, Deadline::after(Duration::ZERO)).err();
        let is_last = |w: &Error| !matches!(w.kind(), ErrorKind::Io | ErrorKind::Timeout);
        return Err(word.filter(is_last).unwrap_or(e));
    }
    let challenge = read(sock, Kind::Challenge, peer, deadline)?;
    let (s, knows) = challenged(me, peer, nonce, &challenge)?;
    if !knows {
        // For the listener's own list of reasons: this is no proof under any secret.
        send(Kind::Proof, &[0; 32]).ok();
        return Err(refuse(&format!("the listener's proof is wrong: {SECRET}")).peer(peer));
    }
    send(Kind::Proof, me.proof("connecting", &s).as_bytes())?;
    read(sock, Kind::Welcome, peer, deadline).map(|_| ())
}

/// The session of a challenge that answers `nonce`, and whether `peer` knows the secret.
fn challenged(
    me: &Identity<'_>,
    peer: Rank,
    nonce: Nonce,
    challenge: &[u8],
) -> Result<(Session, bool)> {
    let (theirs, rest) = split::<32>(challenge)?;
    let (mac, _) = split::<32>(rest)?;
    let s = Session { connecting: me.rank, listening: peer, nonces: [nonce, *theirs] };
    let knows = me.proof("listening", &s) == blake3::Hash::from_bytes(*mac);
    Ok((s, knows))
}

fn read(sock: &OwnedFd, kind: Kind, peer: Rank, deadline: Deadline) -> Result<Vec<u8>> {
    if !sock::wait_one(sock.as_fd(), PollFlags::IN, deadline)? {
        return Err(Error::new(ErrorKind::Timeout, format!("{peer} does not answer the hello"))
            .op("rendezvous")
            .peer(peer)
            .elapsed(deadline.elapsed()));
    }
    let mut buf = vec![0u8; MAX_FRAME];
    let got = match sock::recv(sock, &mut buf) {
        // What we sent was never read. What the peer said before it closed comes after this.
        Err(rustix::io::Errno::CONNRESET) => sock::recv(sock, &mut buf),
        r => r,
    };
    let got = got.map_err(|e| Error::io("reading a hello", e))?;
    if got.len == 0 {
        let closed = std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
        return Err(Error::io(format!("{peer} closed the connection during the hello"), closed));
    }
    if got.cut || !got.fds.is_empty() {
        return Err(refuse("an unexpected answer").peer(peer));
    }
    payload_of(&buf[..got.len], kind, peer).map(<[u8]>::to_vec)
}

/// The payload of a message of `peer` that is of this kind.
fn payload_of(message: &[u8], kind: Kind, peer: Rank) -> Result<&[u8]> {
    let f = frame::decode(message)?;
    if f.kind == Kind::Refused && f.src == peer {
        return Err(refused(peer, f.payload));
    }
    if f.kind != kind || f.src != peer {
        return Err(refuse("an unexpected answer").peer(peer));
    }
    Ok(f.payload)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    fn pair() -> (OwnedFd, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
    }

    fn id<'a>(rank: u32, job: &'a str, secret: &'a Secret) -> Identity<'a> {
        Identity { job, rank: Rank::new(rank), size: 3, secret }
    }

    /// Runs both ends; the results of the connecting and of the listening side.
    fn run(c: Identity<'_>, l: Identity<'_>, to: u32) -> (Result<()>, Result<Option<Rank>>) {
        let (a, b) = pair();
        std::thread::scope(|t| {
            let client = t.spawn(move || greet(&a, &c, Rank::new(to), Deadline::after_s(5.0)));
            let mut h = HalfOpen::new(b);
            let served = loop {
                let end = Deadline::after_s(5.0);
                assert!(sock::wait_one(h.sock.as_fd(), PollFlags::IN, end).unwrap());
                match h.step(&l) {
                    Ok(None) => {}
                    r => break r.map_err(|(_, e)| e),
                }
            };
            drop(h);
            (client.join().unwrap(), served)
        })
    }

    #[test]
    fn good_hello() {
        let s = Secret::random().unwrap();
        let (c, l) = run(id(0, "j", &s), id(2, "j", &s), 2);
        assert!(c.is_ok());
        assert_eq!(l.unwrap(), Some(Rank::new(0)));
    }

    #[test]
    fn wrong_secret_job_rank_or_direction_are_refused_on_both_ends() {
        let (s, other) = (Secret::random().unwrap(), Secret::random().unwrap());
        for (c, l, to) in [
            (id(0, "j", &other), id(2, "j", &s), 2),
            (id(0, "k", &s), id(2, "j", &s), 2),
            (id(0, "j", &s), id(2, "j", &s), 1),
            (id(2, "j", &s), id(0, "j", &s), 0),
        ] {
            let (c, l) = run(c, l, to);
            assert!(c.is_err() && l.is_err(), "{c:?} {l:?}");
        }
    }

    #[test]
    fn both_ends_know_the_reason() {
        let (s, other) = (Secret::random().unwrap(), Secret::random().unwrap());
        let (c, l) = run(id(0, "j", &other), id(2, "j", &s), 2);
        for e in [c.unwrap_err(), l.unwrap_err()] {
            assert!(e.message().ends_with(SECRET), "{e}");
        }
        let (c, _) = run(id(0, "j", &s), Identity { size: 4, ..id(2, "j", &s) }, 2);
        let e = c.unwrap_err();
        assert_eq!((e.kind(), e.get_peer()), (ErrorKind::Protocol, Some(Rank::new(2))));
        assert!(e.message().contains("r2 has refused this process"), "{e}");
        assert!(e.message().contains("another rank or world"), "{e}");
    }

    #[test]
    fn a_refusal_before_the_hello_is_read_arrives() {
        let s = Secret::random().unwrap();
        for closed_before in [false, true] {
            let (a, b) = pair();
            let one = Rank::new(1);
            let why = Error::new(ErrorKind::Permission, "you are of another user");
            let why = why.hint("be of ours");
            let refuse_and_close = move || {
                say_refused(&b, one, &why);
                drop(b);
            };
            let e = std::thread::scope(|t| {
                if closed_before {
                    refuse_and_close();
                } else {
                    // By then the hello has been sent, and is not read.
                    t.spawn(|| {
                        std::thread::sleep(Duration::from_millis(50));
                        refuse_and_close();
                    });
                }
                greet(&a, &id(0, "j", &s), one, Deadline::after_s(5.0)).unwrap_err()
            });
            assert_eq!(e.kind(), ErrorKind::Permission, "{e}");
            assert!(e.message().ends_with("you are of another user; be of ours"), "{e}");
        }
    }

    /// Messages of a stranger, to both ends: no mutation of an honest one proves anything.
    #[test]
    fn fuzz_handshake() {
        let zero = Rank::new(0);
        let hello = [&2u32.to_le_bytes()[..], &3u32.to_le_bytes(), &[7; 32]].concat();
        let secret = Secret::from_job("s");
        let s = Session { connecting: zero, listening: Rank::new(2), nonces: [[7; 32], [8; 32]] };
        let mac = *id(2, "j", &secret).proof("listening", &s).as_bytes();
        let challenge = [[8; 32], mac].concat();
        let small = |kind, src, payload: &[u8]| frame::encode_small(kind, Rank::new(src), payload);
        let seeds = vec![
            small(Kind::Hello, 0, &hello),
            small(Kind::Challenge, 2, &challenge),
            small(Kind::Proof, 0, &mac),
            small(Kind::Welcome, 2, &[]),
            small(Kind::Refused, 2, b"\x01you are of another user"),
        ];
        tilewire_testing::fuzz!("handshake", seeds, |b| {
            let secret = Secret::from_job("s");
            let (sender, two) = (id(0, "j", &secret), id(2, "j", &secret));
            // The listener: as a first message, and again behind that.
            let (_a, sock) = pair();
            let mut h = HalfOpen::new(sock);
            let got = || sock::Received { len: b.len(), fds: vec![], cut: false, fds_lost: false };
            let first = h.answer(&two, b, &got());
            assert!(first.as_ref().map_or(true, Option::is_none), "proved by one message");
            assert_eq!(first.is_ok(), h.has_spoken());
            let spoken = first.is_ok();
            assert!(!spoken || h.answer(&two, b, &got()).is_err(), "proved by a hello");
            // The connecting side.
            let kinds = [Kind::Challenge, Kind::Welcome];
            let said = kinds.map(|kind| payload_of(b, kind, two.rank).ok());
            let known = |c: &[u8]| challenged(&sender, two.rank, [7; 32], c).is_ok_and(|c| c.1);
            let fresh = |c: &[u8]| challenged(&sender, two.rank, [9; 32], c).is_ok_and(|c| c.1);
            assert!(!said[0].is_some_and(fresh), "a challenge of another connection");
            spoken || said[0].is_some_and(known) || said[1].is_some()
        });
    }

    #[test]
    fn a_listener_believes_no_proof_but_the_right_one() {
        let s = Secret::random().unwrap();
        let (a, b) = pair();
        let mut h = HalfOpen::new(b);
        let hello = [&2u32.to_le_bytes()[..], &3u32.to_le_bytes(), &[7; 32]].concat();
        let zero = Rank::new(0);
        sock::send(&a, &frame::encode_small(Kind::Hello, zero, &hello), &[]).unwrap();
        assert_eq!(h.step(&id(2, "j", &s)).unwrap(), None);
        sock::send(&a, &frame::encode_small(Kind::Proof, zero, &[0; 32]), &[]).unwrap();
        let (why, e) = h.step(&id(2, "j", &s)).unwrap_err();
        assert_eq!(why, Reason::Secret);
        assert!(e.to_string().contains("the secret differs"), "{e}");
        // Nor does it take a proof before the hello.
        let (a, b) = pair();
        sock::send(&a, &frame::encode_small(Kind::Proof, zero, &[0; 32]), &[]).unwrap();
        assert!(HalfOpen::new(b).step(&id(2, "j", &s)).is_err());
    }
}
