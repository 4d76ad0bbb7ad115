//! A client of torch's `TCPStore`, to meet through the store that `torchrun` already serves.
//!
//! The protocol (torch 2.11, `torch/csrc/distributed/c10d/TCPStoreBackend.hpp`): a byte names the
//! query, strings and vectors are a native-endian u64 length and the bytes; one VALIDATE with a
//! magic number opens a connection; SET has no answer, so a PING after it makes sure that it was
//! done. There is no authentication in this protocol: nothing secret is ever put in this store.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tilewire_core::{Deadline, Error, ErrorKind, Result};

use crate::store::{LAST_WORD, Store, key_timeout, op_limit};
use crate::stream::{Stream, resolve, retry};

/// Queries of the protocol that we use.
mod query {
    pub const VALIDATE: u8 = 0;
    pub const SET: u8 = 1;
    pub const GET: u8 = 3;
    pub const ADD: u8 = 4;
    pub const CHECK: u8 = 5;
    pub const WAIT: u8 = 6;
    pub const PING: u8 = 13;
}

const MAGIC: u32 = 0x3C85_F7CE;

/// Limit for one attempt at the hello.
const HELLO_WAIT: Duration = Duration::from_secs(5);

/// The longest value that is read.
const MAX_VALUE: u64 = 16 << 20;

/// A [`Store`] under a key prefix of ours in torch's `TCPStore`.
pub struct TorchStore {
    host: String,
    port: u16,
    prefix: String,
    idle: Mutex<Vec<Stream>>,
    /// The end of the meeting that this is for: no request lasts much longer.
    end: Option<Deadline>,
    /// A request has failed that a live server answers at once: whoever has a last word for it is
    /// not kept by it.
    lost: AtomicBool,
}

impl TorchStore {
    /// Connects to the store at `host:port`; our keys begin with `prefix`.
    ///
    /// # Errors
    /// `Timeout` naming the address if no torch store answers there before the deadline. `Protocol`
    /// if something else does. `Unavailable` as [`StoreClient::connect`](crate::StoreClient).
    pub fn connect(host: &str, port: u16, prefix: &str, deadline: Deadline) -> Result<Self> {
        // torch itself puts a slash before every key.
        let (host, prefix) = (host.to_owned(), format!("/{prefix}/"));
        let (idle, lost) = (Mutex::new(Vec::new()), AtomicBool::new(false));
        let store = Self { host, port, prefix, idle, end: None, lost };
        let first = store.open(deadline)?;
        store.keep(first);
        Ok(store)
    }

    /// Ends requests with the meeting that they are for.
    pub(crate) fn ending(self, end: Deadline) -> Self {
        Self { end: Some(end), ..self }
    }

    /// Returns the limit for requests that a live server answers at once.
    fn patience(&self) -> Duration {
        let most = if self.lost.load(Ordering::Relaxed) { LAST_WORD } else { Duration::MAX };
        op_limit(self.end).min(most)
    }

    fn open(&self, deadline: Deadline) -> Result<Stream> {
        let hosts = resolve(&self.host, self.port, deadline)?;
        retry(&format!("{}:{} (torch)", self.host, self.port), deadline, || {
            let conn = Stream::tcp(&hosts, deadline)?;
            let mut hello = vec![query::VALIDATE];
            hello.extend(MAGIC.to_ne_bytes());
            let limit = deadline.remaining().clamp(Duration::from_millis(100), HELLO_WAIT);
            let limit = Deadline::after(limit);
            conn.write_all(&hello, limit)?;
            ping(&conn, limit)?;
            Ok(conn)
        })
    }

    fn keep(&self, conn: Stream) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(conn);
    }

    /// Runs `f` on a connection, which is kept only if `f` left it between two messages.
    fn with<T>(&self, deadline: Deadline, f: impl FnOnce(&Stream) -> Result<T>) -> Result<T> {
        let kept = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let conn = match kept {
            Some(c) => c,
            None => self.open(deadline)?,
        };
        let done = f(&conn).map_err(|e| {
            self.lost.fetch_or(e.kind() == ErrorKind::Io, Ordering::Relaxed);
            e.op("store").hint(format!("torch's store is at {}:{}", self.host, self.port))
        })?;
        self.keep(conn);
        Ok(done)
    }

    /// As [`TorchStore::with`], for a request that a live server answers at once: one that does not
    /// is lost.
    fn at_once<T>(&self, f: impl FnOnce(&Stream, Deadline) -> Result<T>) -> Result<T> {
        let limit = Deadline::after(self.patience());
        self.with(limit, |conn| f(conn, limit)).inspect_err(|e| {
            self.lost.fetch_or(e.is_timeout(), Ordering::Relaxed);
        })
    }

    fn query(&self, op: u8, key: &str) -> Vec<u8> {
        let mut b = vec![op];
        if matches!(op, query::CHECK | query::WAIT) {
            b.extend(1u64.to_ne_bytes());
        }
        put(&mut b, format!("{}{key}", self.prefix).as_bytes());
        b
    }
}

fn put(b: &mut Vec<u8>, bytes: &[u8]) {
    b.extend((bytes.len() as u64).to_ne_bytes());
    b.extend(bytes);
}

fn ping(conn: &Stream, deadline: Deadline) -> Result<()> {
    let nonce = std::process::id();
    let mut b = vec![query::PING];
    b.extend(nonce.to_ne_bytes());
    conn.write_all(&b, deadline)?;
    let answer: [u8; 4] = read(conn, deadline)?;
    if u32::from_ne_bytes(answer) != nonce {
        return Err(strange("a wrong answer to a ping"));
    }
    Ok(())
}

fn strange(what: &str) -> Error {
    Error::new(ErrorKind::Protocol, format!("the server is not a torch store: {what}")).op("store")
}

fn read<const N: usize>(conn: &Stream, deadline: Deadline) -> Result<[u8; N]> {
    let mut b = [0u8; N];
    conn.read_exact(&mut b, deadline)?;
    Ok(b)
}

impl Store for TorchStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.at_once(|conn, limit| {
            let mut b = self.query(query::SET, key);
            put(&mut b, value);
            conn.write_all(&b, limit)?;
            ping(conn, limit)
        })
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        // A store that hangs must not cost much more than the caller is willing to wait.
        let patience = self.patience().min(deadline.remaining() + Duration::from_secs(2));
        let limit = || Deadline::after(patience);
        let there = self.with(limit(), |conn| {
            conn.write_all(&self.query(query::CHECK, key), limit())?;
            match read(conn, limit())? {
                [0] => Ok(true),
                [1] => Ok(false),
                _ => Err(strange("a wrong answer to a check")),
            }
        })?;
        if !there && deadline.expired() {
            return Err(key_timeout(key, deadline));
        }
        self.with(limit(), |conn| {
            if !there {
                conn.write_all(&self.query(query::WAIT, key), limit())?;
                match read(conn, deadline) {
                    Ok([0]) => {}
                    Ok(_) => return Err(strange("a wrong answer to a wait")),
                    // Ending the connection also ends the wait on the server.
                    Err(e) if e.is_timeout() => return Err(key_timeout(key, deadline)),
                    Err(e) => return Err(e),
                }
            }
            conn.write_all(&self.query(query::GET, key), limit())?;
            let len = u64::from_ne_bytes(read(conn, limit())?);
            if len > MAX_VALUE {
                return Err(strange("a value that is longer than allowed"));
            }
            let mut value = vec![0u8; len as usize];
            conn.read_exact(&mut value, limit())?;
            Ok(value)
        })
    }

    fn add(&self, key: &str, n: i64) -> Result<i64> {
        self.at_once(|conn, limit| {
            let mut b = self.query(query::ADD, key);
            b.extend(n.to_ne_bytes());
            conn.write_all(&b, limit)?;
            Ok(i64::from_ne_bytes(read(conn, limit)?))
        })
    }
}

#[cfg(test)]
#[path = "torch_store_tests.rs"]
mod tests;
