//! The times that kernels took to load or compile.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::Origin;

/// Kernels that were asked for so far, and how long it took to get them.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct KernelTimes {
    /// Number of kernels that were compiled.
    pub compiled: usize,
    /// Number of kernels that were built in or cached.
    pub found: usize,
    /// Wall time in which at least one was looked for, compiled or loaded: threads that do so at
    /// the same time count once.
    pub took: Duration,
}

/// Adds up [`KernelTimes`].
#[derive(Default)]
pub(super) struct Clock(Mutex<State>);

#[derive(Default)]
struct State {
    times: KernelTimes,
    /// Number of threads that compile or load now, and since when there is one.
    busy: usize,
    since: Option<Instant>,
}

impl State {
    fn enter(&mut self, now: Instant) {
        self.busy += 1;
        self.since.get_or_insert(now);
    }

    fn leave(&mut self, now: Instant) {
        self.busy -= 1;
        if let (0, Some(since)) = (self.busy, self.since) {
            self.times.took += now.saturating_duration_since(since);
            self.since = None;
        }
    }
}

/// Time counts until this goes.
pub(crate) struct Busy<'a>(&'a Clock);

impl Clock {
    fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn busy(&self) -> Busy<'_> {
        self.with(|s| s.enter(Instant::now()));
        Busy(self)
    }

    pub fn count(&self, origin: Origin) {
        self.with(|s| match origin {
            Origin::Compiled => s.times.compiled += 1,
            Origin::Embedded | Origin::Cached => s.times.found += 1,
        });
    }

    /// So far; what goes on counts up to now.
    pub fn times(&self) -> KernelTimes {
        self.with(|s| {
            let more = s.since.map_or(Duration::ZERO, |since| since.elapsed());
            KernelTimes { took: s.times.took + more, ..s.times }
        })
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.with(|s| s.leave(Instant::now()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_at_the_same_time_count_once() {
        let (mut s, start) = (State::default(), Instant::now());
        let at = |ms: u64| start + Duration::from_millis(ms);
        // One from 0 to 30 and one from 10 to 50; nothing until 100; one from 100 to 101.
        s.enter(at(0));
        s.enter(at(10));
        s.leave(at(30));
        assert_eq!(s.times.took, Duration::ZERO);
        s.leave(at(50));
        s.enter(at(100));
        s.leave(at(101));
        assert_eq!((s.times.took, s.busy), (Duration::from_millis(51), 0));
    }
}
