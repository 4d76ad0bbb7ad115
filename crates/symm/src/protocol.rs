//! The signal protocol, generic over the atomic words it runs on.
//!
//! The product uses `std::sync::atomic::AtomicU64` in shared memory; the model tests run this very
//! source on loom's words. Each function states the ordering on which its correctness rests.
//!
//! - **Signal**: the producer's payload stores happen before the release in [`signal`]; the
//!   consumer's acquire in [`reached`] makes them visible. Counts are monotonic, so a late or
//!   repeated look never sees an older state.
//! - **Credit**: a consumer that has finished reading grants the producer the right to overwrite
//!   with [`grant`], which carries a tag (the fingerprint of the launch) under the same release.
//! - **Flag**: the producer stores the number of the launch with [`flag`]; the consumer compares
//!   with [`flagged`]. It orders memory as a signal does. The same number stored twice changes
//!   nothing. A flag is not counted, so it need not be consumed.
//! - **Barrier**: each rank stores its epoch into the inbox of every rank, then waits for all its
//!   inboxes.
//! - **Abort**: each rank has one slot on each page; the slot holds the generation it is meant
//!   for, so that an abort of an earlier generation is ignored.
//! - **Bell**: a rank that has polled for a while sleeps; who has published something for it rings.
//! - **Record**: entries and notes that their owner overwrites while others read them.

mod bell;
mod record;

use std::sync::atomic::{AtomicU64, Ordering};

pub use self::bell::{Futex, ring, sleep};
pub use self::record::{entry_or_note, note, noted, publish, snapshot};

/// An atomic 64-bit word.
pub trait Word {
    /// Loads the word atomically.
    fn load(&self, order: Ordering) -> u64;
    /// Stores the word atomically.
    fn store(&self, value: u64, order: Ordering);
    /// Adds atomically; returns the value before.
    fn fetch_add(&self, value: u64, order: Ordering) -> u64;
    /// Compares and exchanges atomically; `Err` holds the value found.
    ///
    /// # Errors
    /// The value found, if it was not `current`.
    fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64>;
    /// Orders all accesses of this thread, whatever their word: `std::sync::atomic::fence`.
    fn fence(&self, order: Ordering);
}

impl Word for AtomicU64 {
    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }
    #[inline]
    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }
    #[inline]
    fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        self.fetch_add(value, order)
    }
    #[inline]
    fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64> {
        self.compare_exchange(current, new, success, failure)
    }
    #[inline]
    fn fence(&self, order: Ordering) {
        std::sync::atomic::fence(order);
    }
}

/// Adds `n` to a counter in a peer's page. Everything that this thread wrote before is visible to a
/// thread that sees the new count.
#[inline]
pub fn signal<W: Word>(count: &W, n: u64) {
    count.fetch_add(n, Ordering::Release);
}

/// Returns the counter's value if it has reached `expected`. Wrap-safe.
#[inline]
pub fn reached<W: Word>(count: &W, expected: u64) -> Option<u64> {
    let seen = count.load(Ordering::Acquire);
    (seen.wrapping_sub(expected) as i64 >= 0).then_some(seen)
}

/// Grants the peer one more use of my buffer. `tag` is the fingerprint of the launch.
#[inline]
pub fn grant<W: Word>(count: &W, tag_word: &W, tag: u64) {
    // The release of the count publishes the tag, and orders my earlier reads of the buffer
    // before the peer's next writes.
    tag_word.store(tag, Ordering::Relaxed);
    count.fetch_add(1, Ordering::Release);
}

/// Returns the tag of the grant if `expected` grants have been made.
#[inline]
pub fn granted<W: Word>(count: &W, tag_word: &W, expected: u64) -> Option<u64> {
    reached(count, expected).map(|_| tag_word.load(Ordering::Relaxed))
}

/// Stores `value`, which grows from launch to launch, in a peer's word. Everything that this thread
/// wrote before is visible to a thread that sees the value, and its earlier reads are complete.
#[inline]
pub fn flag<W: Word>(word: &W, value: u64) {
    word.store(value, Ordering::Release);
}

/// Returns the word's value if it is `value` or that of a later launch. Wrap-safe.
#[inline]
pub fn flagged<W: Word>(word: &W, value: u64) -> Option<u64> {
    reached(word, value)
}

/// Announces to one peer that I have entered barrier round `epoch`.
#[inline]
pub fn arrive<W: Word>(inbox: &W, epoch: u64) {
    inbox.store(epoch, Ordering::Release);
}

/// Returns whether the writer of this inbox slot has entered round `epoch`.
#[inline]
pub fn arrived<W: Word>(inbox: &W, epoch: u64) -> bool {
    reached(inbox, epoch).is_some()
}

/// Makes one turn of a wait. Returns the awaited value, or the reason to end, or `None` to go on.
///
/// The last look comes after the reason to end, so that a peer that signalled and then left or died
/// is not reported as missing.
#[inline]
pub fn turn<T, E>(
    mut ready: impl FnMut() -> Option<T>,
    must_end: impl FnOnce() -> Option<E>,
) -> Option<Result<T, E>> {
    if let Some(v) = ready() {
        return Some(Ok(v));
    }
    let why = must_end()?;
    Some(ready().ok_or(why))
}

/// Polls of a wait before it sleeps.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Looks in a row, with nothing between them but a hint to the processor.
    pub spins: u32,
    /// Looks after them, with the processor given to others in between.
    pub yields: u32,
}

impl Pace {
    /// The pace of the host backend.
    pub const HOST: Self = Self { spins: 64, yields: 16 };
}

/// Polls until `ready` returns a value, or `must_end` a reason to stop.
///
/// After the polls of `pace` it sleeps by `sleep`, which is [`sleep`] on the bell of this rank, or
/// returns at once: whatever rings the bell has published it before, and the last look before a
/// sleep is at both, so that neither a value nor a reason is missed by a sleeper.
pub fn poll<T, E>(
    pace: Pace,
    mut ready: impl FnMut() -> Option<T>,
    mut must_end: impl FnMut() -> Option<E>,
    mut sleep: impl FnMut(&mut dyn FnMut() -> bool),
) -> Result<T, E> {
    for polls in 0..pace.spins.saturating_add(pace.yields) {
        if let Some(v) = ready() {
            return Ok(v);
        }
        match polls < pace.spins {
            true => std::hint::spin_loop(),
            false => std::thread::yield_now(),
        }
        // Asked once before the first sleep: reasons are rare, and cost more than a look.
        if polls + 1 == pace.spins
            && let Some(end) = turn(&mut ready, &mut must_end)
        {
            return end;
        }
    }
    loop {
        let mut end = None;
        sleep(&mut || {
            end = turn(&mut ready, &mut must_end);
            end.is_none()
        });
        if let Some(end) = end {
            return end;
        }
    }
}

/// Reason of an abort: the deadline of a wait for `about`.
pub const TIMED_OUT: u8 = 1;
/// `about` has died, or left.
pub const DEAD: u8 = 2;
/// The caller asked for it.
pub const ASKED_FOR: u8 = 3;
/// The next call is not that of `about`.
pub const DISAGREES: u8 = 4;
/// Another error of the rank that aborts. Kernels have 6 for one of their host's.
pub const OTHER_ERROR: u8 = 5;
/// As [`TIMED_OUT`], where world rank `about` is not in this team.
pub const TIMED_OUT_OUTSIDE: u8 = 7;
/// As [`DEAD`], where world rank `about` is not in this team.
pub const DEAD_OUTSIDE: u8 = 8;

/// The content of an abort word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AbortCode {
    /// Low 32 bits of the team generation the abort is meant for.
    pub generation: u32,
    /// The reason: one of the constants of this module, or 5 for another error.
    pub reason: u8,
    /// Team rank that it is about; for [`TIMED_OUT_OUTSIDE`] and [`DEAD_OUTSIDE`] a world rank.
    pub about: u8,
    /// Team rank that raised it first. A rank that sees an abort passes it on as it is.
    pub from: u8,
}

impl AbortCode {
    pub(crate) fn pack(self) -> u64 {
        // Bit 63 keeps the word nonzero.
        1 << 63
            | u64::from(self.from) << 48
            | u64::from(self.about) << 40
            | u64::from(self.reason) << 32
            | u64::from(self.generation)
    }

    pub(crate) fn unpack(word: u64) -> Option<Self> {
        (word >> 63 == 1).then_some(Self {
            generation: word as u32,
            reason: (word >> 32) as u8,
            about: (word >> 40) as u8,
            from: (word >> 48) as u8,
        })
    }
}

/// Raises an abort in my slot of a page. The first abort of a slot stays.
pub fn raise<W: Word>(slot: &W, code: AbortCode) {
    // Losing the exchange means that an abort is already there, which is all we want.
    let _already = slot.compare_exchange(0, code.pack(), Ordering::Release, Ordering::Relaxed);
}

/// Returns the abort in a slot, if it is meant for `generation`.
pub fn raised<W: Word>(slot: &W, generation: u32) -> Option<AbortCode> {
    let word = slot.load(Ordering::Acquire);
    AbortCode::unpack(word).filter(|c| c.generation == generation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_compare_across_the_wrap() {
        let w = AtomicU64::new(u64::MAX);
        assert!(reached(&w, u64::MAX).is_some() && reached(&w, 0).is_none());
        signal(&w, 2);
        assert_eq!(reached(&w, 0), Some(1));
        assert!(reached(&w, u64::MAX - 5).is_some());
    }

    #[test]
    fn an_abort_of_another_generation_is_not_heard() {
        let w = AtomicU64::new(0);
        let code = AbortCode { generation: 7, reason: 1, about: 3, from: 2 };
        raise(&w, code);
        raise(&w, AbortCode { generation: 7, reason: 2, about: 4, from: 2 });
        assert_eq!(raised(&w, 7), Some(code));
        assert_eq!(raised(&w, 8), None);
        assert_eq!(AbortCode::unpack(0), None);
    }
}
