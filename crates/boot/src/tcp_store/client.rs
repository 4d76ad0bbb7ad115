//! The asking side of a store.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::net::SocketType;
use tilewire_core::{Deadline, Error, ErrorKind, Result};

use super::StoreAddr;
use super::wire::{self, MAX_BODY, MAX_HELLO, Request, Response, Who};
use crate::peer;
use crate::secret::{Secret, random_bytes};
use crate::sock::{self, ConnectError};
use crate::store::{Store, key_timeout, op_limit};
use crate::stream::{Stream, resolve, retry};

/// Time for a server's word that a key is not there, behind the time that it was given.
const GET_SLACK: Duration = Duration::from_secs(1);

/// Limit for one attempt at the hello: a live server answers in microseconds.
const HELLO_WAIT: Duration = Duration::from_secs(5);

/// Longest wait for a server that looks at who has come with another secret, and for one that has
/// closed a connection before.
const LAST_LOOK: Duration = Duration::from_millis(500);

/// A [`Store`] served by a [`StoreServer`](crate::StoreServer) elsewhere.
///
/// Threads do not wait for each other: each call has a connection of its own, kept for the next.
pub struct StoreClient {
    addr: StoreAddr,
    secret: Secret,
    who: Option<Who>,
    idle: Mutex<Vec<Stream>>,
    /// The end of the meeting that this is for: no request lasts much longer.
    end: Option<Deadline>,
    /// A connection has broken: the server has ended, and will not come back.
    lost: AtomicBool,
}

impl StoreClient {
    /// Connects, trying again until the deadline while nobody listens.
    ///
    /// # Errors
    /// `Timeout` naming the address and how long it was tried. `Protocol` if the server does not
    /// know the secret or is something else. `Mismatch` for another version, `Permission` if it
    /// runs as another user. `Unavailable` after 2 s if the host's name is not known, and after 6 s
    /// if the name service does not answer.
    pub fn connect(addr: &StoreAddr, secret: &Secret, deadline: Deadline) -> Result<Self> {
        Self::connect_as(None, addr, secret, deadline)
    }

    /// As [`StoreClient::connect`], and says who it is where the server has another secret.
    pub(crate) fn connect_as(
        who: Option<Who>,
        addr: &StoreAddr,
        secret: &Secret,
        deadline: Deadline,
    ) -> Result<Self> {
        let first = open((addr, secret, who.as_ref()), deadline)?;
        let idle = Mutex::new(vec![first]);
        let (addr, secret, lost) = (addr.clone(), secret.clone(), AtomicBool::new(false));
        Ok(Self { addr, secret, who, idle, end: None, lost })
    }

    /// Ends requests with the meeting that they are for.
    pub(crate) fn ending(self, end: Deadline) -> Self {
        Self { end: Some(end), ..self }
    }

    /// Makes the next request use this connection.
    #[cfg(test)]
    pub(super) fn put_idle(&self, conn: Stream) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(conn);
    }

    fn limit(&self) -> Deadline {
        Deadline::after(op_limit(self.end))
    }

    /// The address.
    pub fn addr(&self) -> &StoreAddr {
        &self.addr
    }

    fn call(&self, request: &Request, deadline: Deadline) -> Result<Response> {
        let body = request.encode();
        if body.len() > MAX_BODY {
            let msg = format!(
                "key and value have {} bytes, but the store takes at most {MAX_BODY}",
                body.len()
            );
            return Err(Error::invalid(msg).op("store"));
        }
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = idle().pop();
        let conn = match kept {
            Some(c) => c,
            None => {
                // Whoever has a last word for a server that has gone is not kept by it.
                let lost = self.lost.load(Ordering::Relaxed);
                let limit =
                    if lost { deadline.remaining().min(LAST_LOOK) } else { deadline.remaining() };
                let way = (&self.addr, &self.secret, self.who.as_ref());
                open(way, Deadline::after(limit))?
            }
        };
        // A connection that failed in the middle of a message is dropped, not kept.
        let answer = say(&conn, &body, deadline)
            .and_then(|()| hear(&conn, MAX_BODY + 1, deadline))
            .and_then(|b| Response::decode(&b))
            .map_err(|e| {
                self.lost.fetch_or(e.kind() == ErrorKind::Io, Ordering::Relaxed);
                let hint = match e.kind() {
                    ErrorKind::Io => format!(
                        "the launcher, or rank 0, which serves it at {}, has ended: its own error \
                         says why",
                        self.addr
                    ),
                    _ => format!("the store is at {}", self.addr),
                };
                e.op("store").hint(hint)
            })?;
        idle().push(conn);
        match answer {
            Response::Invalid(text) => Err(Error::invalid(text).op("store")),
            Response::Full(text) => Err(Error::new(ErrorKind::Exhausted, text).op("store")),
            good => Ok(good),
        }
    }
}

impl Store for StoreClient {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let request = Request::Set { key: key.to_owned(), value: value.to_vec() };
        self.call(&request, self.limit()).map(|_| ())
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        let wait = deadline.remaining();
        let request = Request::Get { key: key.to_owned(), wait_ms: wait.as_millis() as u64 };
        // The server ends the wait. Our own deadline is for a server that does not.
        match self.call(&request, Deadline::after(wait + GET_SLACK))? {
            Response::Ok(value) => Ok(value),
            _ => Err(key_timeout(key, deadline).hint(format!("the store is at {}", self.addr))),
        }
    }

    fn add(&self, key: &str, n: i64) -> Result<i64> {
        let request = Request::Add { key: key.to_owned(), n };
        let answer = self.call(&request, self.limit())?;
        let Response::Ok(sum) = answer else { return Err(wire::broken("the answer has no sum")) };
        let sum =
            <[u8; 8]>::try_from(&sum[..]).map_err(|_| wire::broken("the answer has no sum"))?;
        Ok(i64::from_le_bytes(sum))
    }
}

/// The address that a client goes to, its secret, and who it is.
type Way<'a> = (&'a StoreAddr, &'a Secret, Option<&'a Who>);

fn open((addr, secret, who): Way<'_>, deadline: Deadline) -> Result<Stream> {
    let hosts = match addr {
        StoreAddr::Tcp(host, port) => resolve(host, *port, deadline)?,
        StoreAddr::Abstract(_) => Vec::new(),
    };
    retry(&addr.to_string(), deadline, || {
        let conn = match addr {
            StoreAddr::Tcp(..) => Stream::tcp(&hosts, deadline)?,
            StoreAddr::Abstract(name) => unix(addr, name)?,
        };
        let limit = deadline.remaining().clamp(Duration::from_millis(100), HELLO_WAIT);
        greet(&conn, (addr, secret, who), Deadline::after(limit))?;
        Ok(conn)
    })
}

fn unix(addr: &StoreAddr, name: &str) -> Result<Stream> {
    let later = |text: &str| Error::new(ErrorKind::Io, format!("connecting to {addr}: {text}"));
    match sock::connect(SocketType::STREAM, &format!("@{name}")) {
        Ok(Some(s)) => match peer::check_user(&s) {
            Ok(()) => Ok(Stream(s)),
            Err(e) => {
                let text = format!("none of our user serves {addr}: {}", e.message());
                Err(e.reworded(text).op("store"))
            }
        },
        Ok(None) => Err(later("its queue is full")),
        Err(ConnectError::Nobody) => Err(later("nobody listens")),
        Err(ConnectError::Other(e)) => Err(e),
    }
}

fn greet(conn: &Stream, (addr, secret, who): Way<'_>, deadline: Deadline) -> Result<()> {
    let client = random_bytes()?;
    say(conn, &wire::greeting(&client, None), deadline)?;
    let challenge = hear(conn, MAX_HELLO, deadline)
        .map_err(|e| if e.kind() == ErrorKind::Protocol { stranger(addr) } else { e })?;
    let (server, theirs) = wire::read_greeting(&challenge)
        .map_err(|e| if e.kind() == ErrorKind::Protocol { stranger(addr) } else { e })?;
    let theirs = <[u8; 32]>::try_from(theirs).map_err(|_| stranger(addr))?;
    let due = wire::proof(secret, "server", &client, &server);
    if due != blake3::Hash::from_bytes(theirs) {
        // For its list of reasons: this is no proof under any secret.
        say(conn, &wire::other_secret(who), deadline).ok();
        // It looks at whose process this is, which it can see until this end is closed.
        hear(conn, MAX_HELLO, Deadline::after(LAST_LOOK.min(deadline.remaining()))).ok();
        let msg = format!("the store at {addr} does not know our secret");
        return Err(Error::new(ErrorKind::Protocol, msg)
            .op("store")
            .hint("all ranks of a job need the same TILEWIRE_SECRET"));
    }
    say(conn, wire::proof(secret, "client", &client, &server).as_bytes(), deadline)?;
    match Response::decode(&hear(conn, MAX_HELLO, deadline)?)? {
        Response::Ok(_) => Ok(()),
        _ => Err(stranger(addr)),
    }
}

fn stranger(addr: &StoreAddr) -> Error {
    Error::new(ErrorKind::Protocol, format!("the server at {addr} is not a tilewire store"))
        .op("store")
}

fn say(conn: &Stream, body: &[u8], deadline: Deadline) -> Result<()> {
    conn.write_all(&wire::frame(body), deadline)
}

fn hear(conn: &Stream, max: usize, deadline: Deadline) -> Result<Vec<u8>> {
    let mut head = [0u8; 4];
    conn.read_exact(&mut head, deadline)?;
    let mut body = vec![0u8; wire::body_len(head, max)?];
    conn.read_exact(&mut body, deadline)?;
    Ok(body)
}
