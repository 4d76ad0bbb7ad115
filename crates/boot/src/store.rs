//! A key-value store for the first contact of ranks.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tilewire_core::{Deadline, Error, ErrorKind, Result, inject};

/// A key-value store in which ranks leave messages for each other before they are connected.
pub trait Store: Send + Sync {
    /// Sets `key` to `value`, replacing what was there.
    ///
    /// # Errors
    /// `Io`, `Timeout` or `Protocol` of the connection; `Exhausted` if the store is full.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// The value of `key`; waits until somebody sets it.
    ///
    /// # Errors
    /// `Timeout` naming the key; otherwise as [`Store::set`].
    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>>;

    /// Adds `n` to the number at `key` (0 if there is none) and returns the sum.
    ///
    /// The number is kept as decimal text, as [`Store::get`] shows it.
    ///
    /// # Errors
    /// `InvalidArgument` if the value is not a number; otherwise as [`Store::set`].
    fn add(&self, key: &str, n: i64) -> Result<i64>;
}

/// Time for a last word at the end of a meeting, or to a server that may have ended.
pub(crate) const LAST_WORD: Duration = Duration::from_millis(500);

/// Limit for requests that a server can answer at once, in a meeting that ends at `end`. At its end
/// there is time for a last word.
pub(crate) fn op_limit(end: Option<Deadline>) -> Duration {
    let most = Duration::from_secs(30);
    end.map_or(most, |e| e.remaining().clamp(LAST_WORD, most))
}

/// The error of a `get` that ran out of time.
pub(crate) fn key_timeout(key: &str, deadline: Deadline) -> Error {
    Error::new(ErrorKind::Timeout, format!("no rank has set the key `{key}` in time"))
        .op("store")
        .elapsed(deadline.elapsed())
}

/// The value after `ADD`, shared by all servers of a store.
pub(crate) fn add_decimal(key: &str, old: Option<&Vec<u8>>, n: i64) -> Result<i64> {
    let old = match old {
        None => 0,
        Some(v) => std::str::from_utf8(v)
            .ok()
            .and_then(|s| s.parse::<i64>().ok())
            .ok_or_else(|| Error::invalid(format!("the value of `{key}` is not a number")))?,
    };
    old.checked_add(n).ok_or_else(|| Error::invalid(format!("the number at `{key}` overflows")))
}

/// A [`Store`] for the threads of one process.
#[derive(Default)]
pub struct LocalStore {
    map: Mutex<HashMap<String, Vec<u8>>>,
    bell: Condvar,
}

impl LocalStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Vec<u8>>> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store for LocalStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        inject::step("writing to the store")?;
        self.lock().insert(key.to_owned(), value.to_vec());
        self.bell.notify_all();
        Ok(())
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        inject::step("reading from the store")?;
        let mut map = self.lock();
        loop {
            if let Some(v) = map.get(key) {
                return Ok(v.clone());
            }
            let left = deadline.remaining();
            if left.is_zero() {
                return Err(key_timeout(key, deadline));
            }
            map = self.bell.wait_timeout(map, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn add(&self, key: &str, n: i64) -> Result<i64> {
        let mut map = self.lock();
        let sum = add_decimal(key, map.get(key), n)?;
        map.insert(key.to_owned(), sum.to_string().into_bytes());
        drop(map);
        self.bell.notify_all();
        Ok(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn get_waits_for_set_and_names_the_key_when_it_gives_up() {
        let s = LocalStore::new();
        std::thread::scope(|t| {
            t.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                s.set("k", b"v").unwrap();
            });
            assert_eq!(s.get("k", Deadline::after_s(5.0)).unwrap(), b"v");
        });
        let e = s.get("absent", Deadline::after_s(0.01)).unwrap_err();
        assert!(e.is_timeout() && e.to_string().contains("`absent`"), "{e}");
    }

    #[test]
    fn add_counts_and_refuses_what_is_no_number() {
        let s = LocalStore::new();
        assert_eq!(s.add("n", 2).unwrap(), 2);
        assert_eq!(s.add("n", -5).unwrap(), -3);
        assert_eq!(s.get("n", Deadline::after_s(0.0)).unwrap(), b"-3");
        s.set("t", b"text").unwrap();
        assert_eq!(s.add("t", 1).unwrap_err().kind(), ErrorKind::InvalidArgument);
        s.set("m", i64::MAX.to_string().as_bytes()).unwrap();
        assert!(s.add("m", 1).unwrap_err().to_string().contains("overflows"));
    }
}
