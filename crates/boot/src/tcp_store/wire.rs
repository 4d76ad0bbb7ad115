//! Bytes between a store's server and its clients: u32 length, then a body; little-endian.

use tilewire_core::{Error, ErrorKind, Result};

use crate::secret::{Nonce, Secret};

/// Version of this protocol.
pub(super) const VERSION: u16 = 1;

/// The longest body.
pub(super) const MAX_BODY: usize = 1 << 20;

/// The longest body before the peer has proved itself.
pub(super) const MAX_HELLO: usize = 128;

const MAGIC: [u8; 4] = *b"TWST";

/// The beginning of a client's last word in place of its proof, where the server's is under another
/// secret. It ends there, or goes on with who it says that it is.
pub(super) const OTHER_SECRET: &[u8] = b"secret";

/// The rank that a client says that it is. Nothing proves it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Who {
    pub rank: u32,
    pub size: u32,
    /// Of the job's name, without the number of the meeting.
    pub job: [u8; 16],
}

impl Who {
    pub fn new(rank: u32, size: usize, job: &str) -> Self {
        let mut hash = [0; 16];
        hash.copy_from_slice(&blake3::hash(job.as_bytes()).as_bytes()[..16]);
        Self { rank, size: size as u32, job: hash }
    }
}

/// The last word of a client that finds another secret.
pub(super) fn other_secret(who: Option<&Who>) -> Vec<u8> {
    let mut b = OTHER_SECRET.to_vec();
    if let Some(w) = who {
        b.extend(w.rank.to_le_bytes());
        b.extend(w.size.to_le_bytes());
        b.extend(w.job);
    }
    b
}

/// Reads such a word; none if it is another message.
pub(super) fn read_other_secret(b: &[u8]) -> Option<Option<Who>> {
    let rest = b.strip_prefix(OTHER_SECRET)?;
    if rest.is_empty() {
        return Some(None);
    }
    let (rank, rest) = chunk(rest).ok()?;
    let (size, rest) = chunk(rest).ok()?;
    let (job, rest) = chunk(rest).ok()?;
    let (rank, size) = (u32::from_le_bytes(rank), u32::from_le_bytes(size));
    rest.is_empty().then_some(Some(Who { rank, size, job }))
}

/// A request of a client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Request {
    Set { key: String, value: Vec<u8> },
    Get { key: String, wait_ms: u64 },
    Add { key: String, n: i64 },
}

/// An answer of the server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Response {
    Ok(Vec<u8>),
    /// Nobody set the key in time.
    Timeout,
    /// The arguments are not acceptable.
    Invalid(String),
    /// The store is full.
    Full(String),
}

/// The error of bytes that do not follow the protocol.
pub(super) fn broken(what: &str) -> Error {
    Error::new(ErrorKind::Protocol, what.to_owned()).op("store")
}

/// Puts the length in front.
pub(super) fn frame(body: &[u8]) -> Vec<u8> {
    let mut b = (body.len() as u32).to_le_bytes().to_vec();
    b.extend(body);
    b
}

/// The length of a body, if it is allowed.
pub(super) fn body_len(head: [u8; 4], max: usize) -> Result<usize> {
    let len = u32::from_le_bytes(head) as usize;
    if len > max { Err(broken("a message is longer than allowed")) } else { Ok(len) }
}

/// Takes the next whole body off the front of `buf`, if it is there.
pub(super) fn next_body(buf: &mut Vec<u8>, max: usize) -> Result<Option<Vec<u8>>> {
    let Some(head) = buf.first_chunk::<4>() else { return Ok(None) };
    let len = body_len(*head, max)?;
    if buf.len() < 4 + len {
        return Ok(None);
    }
    let rest = buf.split_off(4 + len);
    let body = std::mem::replace(buf, rest).split_off(4);
    Ok(Some(body))
}

fn chunk<const N: usize>(b: &[u8]) -> Result<([u8; N], &[u8])> {
    let (head, rest) = b.split_first_chunk().ok_or_else(|| broken("a message is cut short"))?;
    Ok((*head, rest))
}

impl Request {
    pub fn encode(&self) -> Vec<u8> {
        let (op, key, number, value): (u8, _, u64, &[u8]) = match self {
            Self::Set { key, value } => (1, key, 0, value),
            Self::Get { key, wait_ms } => (2, key, *wait_ms, &[]),
            Self::Add { key, n } => (3, key, *n as u64, &[]),
        };
        let mut b = vec![op];
        b.extend((key.len() as u32).to_le_bytes());
        b.extend(number.to_le_bytes());
        b.extend(key.as_bytes());
        b.extend(value);
        b
    }

    pub fn decode(b: &[u8]) -> Result<Self> {
        let ([op], b) = chunk(b)?;
        let (key_len, b) = chunk(b)?;
        let (number, b) = chunk(b)?;
        let key_len = u32::from_le_bytes(key_len) as usize;
        let (key, value) =
            b.split_at_checked(key_len).ok_or_else(|| broken("a message is cut short"))?;
        let key = std::str::from_utf8(key).map_err(|_| broken("a key is not UTF-8"))?.to_owned();
        let number = u64::from_le_bytes(number);
        match (op, value) {
            (1, value) if number == 0 => Ok(Self::Set { key, value: value.to_vec() }),
            (2, []) => Ok(Self::Get { key, wait_ms: number }),
            (3, []) => Ok(Self::Add { key, n: number as i64 }),
            _ => Err(broken("a request is of no known kind")),
        }
    }
}

impl Response {
    pub fn encode(&self) -> Vec<u8> {
        let (status, rest): (u8, &[u8]) = match self {
            Self::Ok(v) => (0, v),
            Self::Timeout => (1, &[]),
            Self::Invalid(text) => (2, text.as_bytes()),
            Self::Full(text) => (3, text.as_bytes()),
        };
        [&[status], rest].concat()
    }

    pub fn decode(b: &[u8]) -> Result<Self> {
        let text = |t: &[u8]| String::from_utf8_lossy(t).into_owned();
        match b {
            [0, v @ ..] => Ok(Self::Ok(v.to_vec())),
            [1] => Ok(Self::Timeout),
            [2, t @ ..] => Ok(Self::Invalid(text(t))),
            [3, t @ ..] => Ok(Self::Full(text(t))),
            _ => Err(broken("a response is of no known kind")),
        }
    }
}

/// The client's first message, and also the server's: magic, version, nonce, and a proof or none.
pub(super) fn greeting(nonce: &Nonce, proof: Option<blake3::Hash>) -> Vec<u8> {
    let mut b = MAGIC.to_vec();
    b.extend(VERSION.to_le_bytes());
    b.extend(nonce);
    b.extend(proof.iter().flat_map(|p| p.as_bytes()));
    b
}

/// Reads a greeting: nonce and what follows it.
pub(super) fn read_greeting(b: &[u8]) -> Result<(Nonce, &[u8])> {
    let (magic, b) = chunk::<4>(b)?;
    if magic != MAGIC {
        return Err(broken("this is not a tilewire store"));
    }
    let (version, b) = chunk(b)?;
    let version = u16::from_le_bytes(version);
    if version != VERSION {
        return Err(Error::new(ErrorKind::Mismatch, "the store speaks another protocol version")
            .op("store")
            .expected(VERSION)
            .seen(version));
    }
    chunk(b)
}

/// Returns what one side shows to the other, bound to both nonces.
pub(super) fn proof(secret: &Secret, role: &str, client: &Nonce, server: &Nonce) -> blake3::Hash {
    secret.mac(&format!("store {role}"), &[&VERSION.to_le_bytes(), client, server])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fuzz_store_request() {
        let key = || "link/job/3".to_owned();
        let seeds = [
            Request::Set { key: key(), value: b"value".to_vec() },
            Request::Get { key: key(), wait_ms: 1000 },
            Request::Add { key: key(), n: -1 },
        ];
        let seeds = seeds.iter().map(Request::encode).collect();
        tilewire_testing::fuzz!("store_request", seeds, |b| {
            let Ok(r) = Request::decode(b) else { return false };
            assert_eq!(r.encode(), b, "a request has one encoding");
            true
        });
    }

    #[test]
    fn fuzz_store_response() {
        let text = || "the store is full".to_owned();
        let seeds = [
            Response::Ok(b"value".to_vec()),
            Response::Timeout,
            Response::Invalid(text()),
            Response::Full(text()),
        ];
        let seeds = seeds.iter().map(Response::encode).collect();
        tilewire_testing::fuzz!("store_response", seeds, |b| {
            let Ok(r) = Response::decode(b) else { return false };
            assert_eq!(Response::decode(&r.encode()).unwrap(), r);
            true
        });
    }

    /// All that a stranger can say before it has proved itself: greetings in a stream of bodies.
    #[test]
    fn fuzz_store_greeting() {
        let secret = Secret::from_job("s");
        let one = greeting(&[1; 32], None);
        let two = greeting(&[2; 32], Some(proof(&secret, "server", &[1; 32], &[2; 32])));
        let seeds =
            vec![frame(&one), frame(&two), [frame(&one), frame(OTHER_SECRET)].concat(), one];
        tilewire_testing::fuzz!("store_greeting", seeds, |b| {
            if let Some(who) = read_other_secret(b) {
                assert_eq!(other_secret(who.as_ref()), b, "a last word has one encoding");
                return true;
            }
            let (mut buf, mut greeted, mut done) = (b.to_vec(), 0, 0);
            loop {
                let body = match next_body(&mut buf, MAX_HELLO) {
                    Err(_) => return false,
                    Ok(None) => break,
                    Ok(Some(body)) => body,
                };
                assert!(body.len() <= MAX_HELLO);
                done += 4 + body.len();
                assert_eq!(b[done..], buf, "nothing is lost between two bodies");
                if let Ok((nonce, rest)) = read_greeting(&body) {
                    assert_eq!([&greeting(&nonce, None), rest].concat(), body);
                    greeted += 1;
                }
            }
            greeted > 0
        });
    }

    proptest! {
        #[test]
        fn round_trips(key in ".{0,20}", value in proptest::collection::vec(any::<u8>(), 0..50), n: i64) {
            for r in [
                Request::Set { key: key.clone(), value: value.clone() },
                Request::Get { key: key.clone(), wait_ms: n as u64 },
                Request::Add { key: key.clone(), n },
            ] {
                prop_assert_eq!(Request::decode(&r.encode()).unwrap(), r);
            }
            for r in [
                Response::Ok(value), Response::Timeout, Response::Invalid(key.clone()), Response::Full(key),
            ] {
                prop_assert_eq!(Response::decode(&r.encode()).unwrap(), r);
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(b in proptest::collection::vec(any::<u8>(), 0..100)) {
            Request::decode(&b).ok();
            Response::decode(&b).ok();
            read_greeting(&b).ok();
            let mut buf = b.clone();
            next_body(&mut buf, 64).ok();
        }
    }

    #[test]
    fn bodies_come_off_a_stream_one_by_one() {
        let mut buf = [frame(b"ab"), frame(b""), frame(b"cde")[..5].to_vec()].concat();
        assert_eq!(next_body(&mut buf, 10).unwrap().unwrap(), b"ab");
        assert_eq!(next_body(&mut buf, 10).unwrap().unwrap(), b"");
        assert_eq!(next_body(&mut buf, 10).unwrap(), None);
        buf.extend(b"de");
        assert_eq!(next_body(&mut buf, 10).unwrap().unwrap(), b"cde");
        assert!(next_body(&mut frame(&[0; 11]), 10).is_err());
    }
}
