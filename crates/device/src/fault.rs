//! The fault of a team: set once, seen by every node that belongs to it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use tilewire_core::{Error, Result};

/// First error of a group of nodes. The first writer wins; nobody clears it: a team that failed
/// is re-formed as a new team with a new fault.
#[derive(Default)]
pub struct Fault {
    flag: AtomicBool,
    error: Mutex<Option<Error>>,
    probes: Mutex<Vec<Weak<dyn Probe>>>,
    publish: OnceLock<Publish>,
}

/// Tells others of a fault.
type Publish = Box<dyn Fn(&Error) + Send + Sync>;

/// A place that must be looked at to learn of a fault: the report of a GPU in pinned memory.
pub trait Probe: Send + Sync {
    /// Looks, and sets the fault if there is one. Must be quick and must not block.
    fn poll(&self);

    /// Called periodically while a host thread blocks on a device: the wait has lasted from `from`
    /// until `to`, and continues. Must be quick and must not block.
    fn waiting(&self, _from: Duration, _to: Duration) {
        self.poll();
    }
}

impl std::fmt::Debug for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Fault({:?})", lock(&self.error))
    }
}

fn lock<T>(m: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Fault {
    /// No fault yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Records `error` unless one is recorded already. Returns the recorded one.
    pub fn set(&self, error: Error) -> Error {
        let (first, new) = {
            let mut slot = lock(&self.error);
            let new = slot.is_none();
            let first = slot.get_or_insert(error).clone();
            // Release: who sees the flag sees the error.
            self.flag.store(true, Ordering::Release);
            (first, new)
        };
        // Outside of the lock: the callback may ask for the fault.
        if let Some(publish) = self.publish.get().filter(|_| new) {
            publish(&first);
        }
        first
    }

    /// Calls `f` with the first error when it is recorded, whoever records it: a failed node must
    /// reach the peers as a failed wait does. Only the first `f` counts.
    pub fn on_set(&self, f: impl Fn(&Error) + Send + Sync + 'static) {
        let _first = self.publish.set(Box::new(f));
    }

    /// Looks at `probe` from now on whenever the fault is asked for, as long as it lives.
    pub fn watch(&self, probe: Weak<dyn Probe>) {
        lock(&self.probes).push(probe);
    }

    /// True once a fault is recorded. Cheap: polled inside spin loops, so it asks no probe.
    pub fn is_set(&self) -> bool {
        self.flag.load(Ordering::Acquire)
    }

    /// The recorded error, if any, after a look at all probes.
    pub fn get(&self) -> Option<Error> {
        if !self.is_set() {
            // Cloned out: a probe sets the fault, and may touch this list.
            let probes: Vec<_> = {
                let mut list = lock(&self.probes);
                list.retain(|p| p.strong_count() > 0);
                list.iter().filter_map(Weak::upgrade).collect()
            };
            probes.iter().for_each(|p| p.poll());
        }
        if !self.is_set() {
            return None;
        }
        lock(&self.error).clone()
    }

    /// `Err` with the recorded error, if any.
    ///
    /// # Errors
    /// The recorded error.
    pub fn check(&self) -> Result<()> {
        self.get().map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tilewire_core::ErrorKind;

    #[test]
    fn first_error_wins() {
        let f = Fault::new();
        assert!(f.check().is_ok());
        f.set(Error::new(ErrorKind::Timeout, "first"));
        f.set(Error::new(ErrorKind::PeerDead, "second"));
        assert_eq!(f.check().unwrap_err().message(), "first");
    }

    #[test]
    fn a_probe_is_asked_until_it_is_gone() {
        struct P(std::sync::Arc<Fault>);
        impl Probe for P {
            fn poll(&self) {
                self.0.set(Error::new(ErrorKind::Timeout, "device"));
            }
        }
        let f = std::sync::Arc::new(Fault::new());
        let p: std::sync::Arc<dyn Probe> = std::sync::Arc::new(P(f.clone()));
        f.watch(std::sync::Arc::downgrade(&p));
        assert!(!f.is_set());
        assert!(f.check().unwrap_err().is_timeout());
        let g = Fault::new();
        g.watch(std::sync::Arc::downgrade(&p));
        drop(p);
        assert!(g.check().is_ok());
    }
}
