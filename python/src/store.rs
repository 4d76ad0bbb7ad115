//! A store of torch's, or JAX's, as the place where ranks meet.

use std::mem::ManuallyDrop;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{FromRawFd, RawFd};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tilewire::boot::{Store, TorchStore};
use tilewire::prelude::*;

/// Pause between two looks for a key.
const NAP: Duration = Duration::from_millis(2);

/// Limits for one call, which a live server answers at once: the longest, and the shortest, which
/// is for calls at the very end of a meeting.
const MOST: Duration = Duration::from_secs(30);
const LEAST: Duration = Duration::from_millis(500);

/// The operation of errors of a store.
const OP: &str = "store";

/// A call that the thread of a store makes, on the store or with the error of its connection.
type Call = Box<dyn FnOnce(PyResult<&Bound<'_, PyAny>>) + Send>;

/// Limit for the end of a thread whose connection was cut.
const CUT: Duration = Duration::from_secs(2);

/// A Python object as a [`Store`], with a limit for each of its calls.
///
/// The object has a text `where`, which says whose store this is; `address`, the host and the port
/// of a torch `TCPStore`, else None; and `connect()`, which gives a connection of its own with
/// `set(key, bytes)`, `check([key])`, `get(key)` and `add(key, number)`, as
/// `torch.distributed.Store` has them.
///
/// None of these calls ends by itself while the process that serves the store is stopped: torch
/// waits for its answer without end, or for its own timeout, which is minutes. So one thread makes
/// all calls, and the meeting waits for it as long as it likes. A call without an answer loses the
/// store: calls fail from then on. torch's connection is then cut, which ends the thread, as it
/// must not be there at the end of the interpreter: were it answered then, torch would end the
/// process by `std::terminate`. A server of torch's that does not answer from the start is not
/// connected to at all. JAX, whose own end waits for its coordinator, has no connection to cut:
/// there the thread stays until its call has ended.
///
/// A `get` of torch's that waits keeps other calls of the same connection from the server: so a key
/// is asked for until it is there.
pub struct PyStore {
    place: String,
    prefix: String,
    end: Deadline,
    /// The error of the first call without an answer.
    lost: OnceLock<Error>,
    /// The connection to torch's server, to cut it.
    connection: Arc<OnceLock<TcpStream>>,
    /// None only in `drop`.
    calls: Option<Sender<Call>>,
    /// Says nothing; it ends with the thread.
    thread: Mutex<Receiver<()>>,
}

impl PyStore {
    /// Opens the store `object` for a meeting that lasts to `end`; our keys begin with `prefix`. To
    /// be made and dropped without the interpreter's lock, which its thread needs.
    ///
    /// # Errors
    /// `Exhausted` if there is no thread for it.
    pub fn open(object: Py<PyAny>, prefix: &str, end: Deadline) -> Result<Self> {
        let (place, address) = Python::attach(|py| -> PyResult<(String, Option<(String, u16)>)> {
            let object = object.bind(py);
            Ok((object.getattr("where")?.extract()?, object.getattr("address")?.extract()?))
        })
        .map_err(|e| Error::internal(format!("a store without a place: {e}")))?;
        let (calls, queue) = mpsc::channel();
        let (alive, thread) = mpsc::channel();
        let store = Self {
            place,
            prefix: prefix.to_owned(),
            end,
            lost: OnceLock::new(),
            connection: Arc::default(),
            calls: Some(calls),
            thread: Mutex::new(thread),
        };
        let port = address.as_ref().map(|a| a.1);
        if let Some((host, port)) = address
            && let Err(e) = TorchStore::connect(&host, port, prefix, Deadline::after(store.limit()))
            && e.is_timeout()
        {
            store.lose(e.message());
            return Ok(store);
        }
        let slot = store.connection.clone();
        std::thread::Builder::new()
            .name("tilewire-store".to_owned())
            .spawn(move || {
                serve(object, port, &slot, &queue);
                drop(alive);
            })
            .map_err(|e| Error::io("starting the thread of the process group's store", e))?;
        Ok(store)
    }

    /// Returns the error of a meeting in this store that failed with `e`: where the store gave no
    /// answer, that is a `Timeout`.
    pub fn failure(&self, e: Error, rank: Rank) -> Error {
        let Some(silence) = self.lost.get() else { return e };
        if e.get_op() != Some(OP) || e.kind() != ErrorKind::Io {
            return e;
        }
        Error::new(ErrorKind::Timeout, silence.message())
            .op(OP)
            .phase("rendezvous")
            .rank(rank)
            .elapsed(self.end.elapsed())
            .hint(
                "the process that serves the store is stopped, hangs, or has ended: continue it, \
                 or end the job and start it again",
            )
    }

    /// The limit for a call that a live server answers at once.
    fn limit(&self) -> Duration {
        self.end.remaining().clamp(LEAST, MOST)
    }

    /// Notes that the store gives no answer. As long as the meeting goes on this is no `Timeout`,
    /// which there means that a rank is late, and that it is worth asking again.
    fn lose(&self, text: &str) -> Error {
        let e = self.lost.get_or_init(|| Error::new(ErrorKind::Io, text).op(OP)).clone();
        if let Some(connection) = self.connection.get() {
            // The server may have ended meanwhile.
            connection.shutdown(Shutdown::Both).ok();
        }
        e
    }

    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }

    /// Makes a call on the thread of the store, and waits for its end.
    fn call<T: Send + 'static>(
        &self,
        name: &str,
        f: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T> + Send + 'static,
    ) -> Result<T> {
        if let Some(e) = self.lost.get() {
            return Err(e.clone());
        }
        let (tell, answer) = mpsc::sync_channel(1);
        let call: Call = Box::new(move |store| {
            // Nobody listens any more if it took too long.
            tell.send(store.and_then(f).map_err(|e| e.to_string())).ok();
        });
        let gone = || Error::internal("the thread of the process group's store has ended").op(OP);
        self.calls.as_ref().ok_or_else(gone)?.send(call).map_err(|_| gone())?;
        let limit = self.limit();
        match answer.recv_timeout(limit) {
            Ok(done) => done.map_err(|e| {
                let text = format!("`{name}` of {} failed: {e}", self.place);
                Error::new(ErrorKind::Io, text).op(OP)
            }),
            Err(RecvTimeoutError::Disconnected) => Err(gone()),
            Err(RecvTimeoutError::Timeout) => {
                let (place, limit_s) = (&self.place, limit.as_secs_f64());
                let text = format!("{place} gave no answer to `{name}` within {limit_s:.1} s");
                Err(self.lose(&text))
            }
        }
    }
}

/// Returns this process's connections to a `port`, as descriptors of our own.
fn connections(port: u16) -> Vec<TcpStream> {
    let all = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let numbers = all.filter_map(|f| f.file_name().to_str()?.parse::<RawFd>().ok());
    let streams = numbers.filter_map(|n| {
        // SAFETY: the descriptor is asked for its peer and duplicated, and stays its owner's, as
        // the stream is never dropped. One that was closed meanwhile makes both calls fail.
        let theirs = ManuallyDrop::new(unsafe { TcpStream::from_raw_fd(n) });
        theirs.peer_addr().ok().filter(|a| a.port() == port)?;
        // Another one may have the number by now.
        theirs.try_clone().ok().filter(|s| s.peer_addr().is_ok_and(|a| a.port() == port))
    });
    streams.collect()
}

/// Connects, and makes calls until the meeting is over. A connection to torch's server at a `port`
/// is left in `slot`, to be cut.
fn serve(object: Py<PyAny>, port: Option<u16>, slot: &OnceLock<TcpStream>, queue: &Receiver<Call>) {
    let there = || port.map(connections).unwrap_or_default();
    let others: Vec<_> = there().iter().flat_map(TcpStream::local_addr).collect();
    let store = Python::attach(|py| object.call_method0(py, "connect"));
    let new = |s: &TcpStream| s.local_addr().is_ok_and(|a| !others.contains(&a));
    let mut ours = there().into_iter().filter(new);
    // If another thread has connected meanwhile it may be that one's, and none is cut.
    if let (Some(connection), None) = (ours.next(), ours.next()) {
        slot.set(connection).ok();
    }
    for call in queue {
        Python::attach(|py| match &store {
            Ok(store) => call(Ok(store.bind(py))),
            Err(e) => call(Err(e.clone_ref(py))),
        });
    }
    // Here, as a connection is closed by its last owner.
    Python::attach(|_| drop((store, object)));
}

impl Drop for PyStore {
    fn drop(&mut self) {
        drop(self.calls.take());
        let most = if self.lost.get().is_some() { CUT } else { MOST };
        // It ends without a word.
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner);
        thread.recv_timeout(most).ok();
    }
}

impl Store for PyStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let (key, value) = (self.key(key), value.to_vec());
        self.call("set", move |s| {
            s.call_method1("set", (key, PyBytes::new(s.py(), &value))).map(drop)
        })
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        loop {
            let full = self.key(key);
            let value = self.call("get", move |s| {
                if !s.call_method1("check", (vec![full.as_str()],))?.extract::<bool>()? {
                    return Ok(None);
                }
                s.call_method1("get", (full.as_str(),))?.extract::<Vec<u8>>().map(Some)
            })?;
            if let Some(value) = value {
                return Ok(value);
            }
            if deadline.remaining().is_zero() {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!("no rank has set the key `{key}` in time"),
                )
                .op(OP)
                .elapsed(deadline.elapsed()));
            }
            std::thread::sleep(NAP);
        }
    }

    fn add(&self, key: &str, n: i64) -> Result<i64> {
        let key = self.key(key);
        self.call("add", move |s| s.call_method1("add", (key, n))?.extract())
    }
}
