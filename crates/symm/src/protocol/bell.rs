//! The bell of a rank: who has published something rings it, and who waits sleeps on it.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::thread::futex;

/// A 32-bit word on which threads, also those of other processes, can sleep.
pub trait Futex {
    /// Loads the word atomically.
    fn load(&self, order: Ordering) -> u32;
    /// Adds atomically; returns the value before.
    fn fetch_add(&self, value: u32, order: Ordering) -> u32;
    /// Subtracts atomically; returns the value before.
    fn fetch_sub(&self, value: u32, order: Ordering) -> u32;
    /// Sleeps until [`Futex::wake_all`], or until `limit` has passed; it may return earlier. It
    /// does not sleep if the word is not `seen`, and no wake-up comes between that look and the
    /// sleep.
    fn wait(&self, seen: u32, limit: Duration);
    /// Wakes all that sleep on the word.
    fn wake_all(&self);
}

impl Futex for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }

    fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
        self.fetch_add(value, order)
    }

    fn fetch_sub(&self, value: u32, order: Ordering) -> u32 {
        self.fetch_sub(value, order)
    }

    fn wait(&self, seen: u32, limit: Duration) {
        let ts = futex::Timespec {
            tv_sec: limit.as_secs() as i64,
            tv_nsec: i64::from(limit.subsec_nanos()),
        };
        // Every outcome (woken, timed out, word already changed) leads to another look.
        let _outcome = futex::wait(self, futex::Flags::empty(), seen, Some(&ts));
    }

    fn wake_all(&self) {
        // Not FUTEX_PRIVATE: the sleeper may be another process. A failed wake costs the sleeper
        // one time slice, no more.
        let _woken = futex::wake(self, futex::Flags::empty(), u32::MAX);
    }
}

/// Wakes the threads that sleep on a bell. Everything that this thread published before is seen by
/// their next look.
pub fn ring<F: Futex>(bell: &F, sleepers: &F) {
    // SeqCst on both sides (Dekker): either this sees the sleeper, or that one sees the new bell.
    bell.fetch_add(1, Ordering::SeqCst);
    if sleepers.load(Ordering::SeqCst) > 0 {
        bell.wake_all();
    }
}

/// Sleeps until the bell rings, or `limit` passes, unless `still()` is false.
///
/// What is published before a ring is seen by `still`, or the ring ends the sleep: the bell is read
/// before `still` looks.
pub fn sleep<F: Futex>(bell: &F, sleepers: &F, limit: Duration, still: impl FnOnce() -> bool) {
    sleepers.fetch_add(1, Ordering::SeqCst);
    let seen = bell.load(Ordering::SeqCst);
    if still() {
        bell.wait(seen, limit);
    }
    sleepers.fetch_sub(1, Ordering::SeqCst);
}
