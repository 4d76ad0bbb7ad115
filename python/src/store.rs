//! A store of torch's, or JAX's, as the place where ranks meet.

use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tilewire::boot::Store;
use tilewire::prelude::*;

/// Pause between two looks for a key.
const NAP: Duration = Duration::from_millis(2);

/// A Python object with `set(key, bytes)`, `check([key])`, `get(key)` and `add(key, number)`, as
/// `torch.distributed.Store` has them.
///
/// A `get` of torch's that waits keeps other calls of the same client from the server, those of
/// other threads too, until its own limit has passed: so a key is asked for until it is there, and
/// the interpreter is free in between.
pub struct PyStore {
    object: Py<PyAny>,
    prefix: String,
}

impl PyStore {
    /// Over `object`; our keys begin with `prefix`.
    pub fn new(object: Py<PyAny>, prefix: &str) -> Self {
        Self { object, prefix: prefix.to_owned() }
    }

    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }

    fn with<T>(
        &self,
        what: &str,
        f: impl FnOnce(Python<'_>, &Bound<'_, PyAny>) -> PyResult<T>,
    ) -> Result<T> {
        Python::attach(|py| {
            f(py, self.object.bind(py)).map_err(|e| {
                let text = format!("`{what}` of the process group's store failed: {e}");
                Error::new(ErrorKind::Io, text).op("store")
            })
        })
    }
}

impl Store for PyStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.with("`set`", |py, s| {
            s.call_method1("set", (self.key(key), PyBytes::new(py, value))).map(drop)
        })
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        let full = self.key(key);
        loop {
            let value = self.with("`get`", |_, s| {
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
                .op("store")
                .elapsed(deadline.elapsed()));
            }
            std::thread::sleep(NAP);
        }
    }

    fn add(&self, key: &str, n: i64) -> Result<i64> {
        self.with("`add`", |_, s| s.call_method1("add", (self.key(key), n))?.extract())
    }
}
