//! Proof, on both ends of a new connection, that the other knows the job's secret.
//!
//! Hello (ranks, size, nonce) -> Challenge (nonce, proof) -> Proof -> Welcome. The proofs are keyed
//! hashes over role, job, both ranks, world size, protocol version and both nonces.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use tilewire_core::{Deadline, Error, ErrorKind, Rank, Result};

use crate::frame::{self, Kind, MAX_FRAME, VERSION};
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

    /// Takes the next message, if there is one: `Some(rank)` once the peer has proved itself.
    ///
    /// # Errors
    /// Any error means: close this connection and go on with the others.
    pub fn step(&mut self, me: &Identity<'_>) -> Result<Option<Rank>> {
        let mut buf = vec![0u8; MAX_FRAME];
        let got = match sock::recv(&self.sock, &mut buf) {
            Err(rustix::io::Errno::AGAIN) => return Ok(None),
            r => r.map_err(|e| Error::io("reading a hello", e))?,
        };
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
                    return Err(refuse("the proof is wrong: the secret differs"));
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
/// `Protocol` if the peer does not know the secret: final. `Io`: the connection broke, which
/// happens to a process that was stopped for a while; try again. `Timeout` at the deadline.
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
    send(Kind::Hello, &hello)?;
    let challenge = read(sock, Kind::Challenge, peer, deadline)?;
    let (theirs, rest) = split::<32>(&challenge)?;
    let (mac, _) = split::<32>(rest)?;
    let s = Session { connecting: me.rank, listening: peer, nonces: [nonce, *theirs] };
    if me.proof("listening", &s) != blake3::Hash::from_bytes(*mac) {
        return Err(refuse("the listener's proof is wrong: the secret differs").peer(peer));
    }
    send(Kind::Proof, me.proof("connecting", &s).as_bytes())?;
    read(sock, Kind::Welcome, peer, deadline).map(|_| ())
}

fn read(sock: &OwnedFd, kind: Kind, peer: Rank, deadline: Deadline) -> Result<Vec<u8>> {
    if !sock::wait_one(sock.as_fd(), PollFlags::IN, deadline)? {
        return Err(Error::new(ErrorKind::Timeout, format!("{peer} does not answer the hello"))
            .op("rendezvous")
            .peer(peer)
            .elapsed(deadline.elapsed()));
    }
    let mut buf = vec![0u8; MAX_FRAME];
    let got = sock::recv(sock, &mut buf).map_err(|e| Error::io("reading a hello", e))?;
    if got.len == 0 {
        let closed = std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
        return Err(Error::io(format!("{peer} closed the connection during the hello"), closed));
    }
    let f = frame::decode(&buf[..got.len])?;
    if f.kind != kind || f.src != peer || got.cut || !got.fds.is_empty() {
        return Err(refuse("an unexpected answer").peer(peer));
    }
    Ok(f.payload.to_vec())
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
                    r => break r,
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
    fn a_listener_believes_no_proof_but_the_right_one() {
        let s = Secret::random().unwrap();
        let (a, b) = pair();
        let mut h = HalfOpen::new(b);
        let hello = [&2u32.to_le_bytes()[..], &3u32.to_le_bytes(), &[7; 32]].concat();
        let zero = Rank::new(0);
        sock::send(&a, &frame::encode_small(Kind::Hello, zero, &hello), &[]).unwrap();
        assert_eq!(h.step(&id(2, "j", &s)).unwrap(), None);
        sock::send(&a, &frame::encode_small(Kind::Proof, zero, &[0; 32]), &[]).unwrap();
        let e = h.step(&id(2, "j", &s)).unwrap_err();
        assert!(e.to_string().contains("the secret differs"), "{e}");
        // Nor does it take a proof before the hello.
        let (a, b) = pair();
        sock::send(&a, &frame::encode_small(Kind::Proof, zero, &[0; 32]), &[]).unwrap();
        assert!(HalfOpen::new(b).step(&id(2, "j", &s)).is_err());
    }
}
