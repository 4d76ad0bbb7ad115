//! Signal slots and their owners.

use std::sync::{Arc, Mutex};

use tilewire_core::{Error, ErrorKind, Rank, Result};

use crate::alloc::Allocator;
use crate::buf::{Dropped, Ended, take, unused};
use crate::control::NUM_SIGNALS;
use crate::team::{LiveTeam, lock};

/// The slots of a team: equal calls give equal slots on all members.
pub(crate) struct SlotPool {
    alloc: Allocator,
    dropped: Vec<Dropped>,
}

impl Default for SlotPool {
    fn default() -> Self {
        Self { alloc: Allocator::new(NUM_SIGNALS, 1), dropped: Vec::new() }
    }
}

impl LiveTeam {
    /// Takes `num` signal slots. Deterministic: equal calls give equal slots on all members.
    ///
    /// # Errors
    /// `Exhausted` if fewer slots are free.
    pub fn signals(&self, num: usize, tag: &str) -> Result<Signals> {
        let first = lock(&self.0.slots)
            .alloc
            .alloc(num, tag)
            .map_err(|e| e.op("signals").team(self.name()))?;
        Ok(Signals { first, num, team: self.clone(), ended: Mutex::default() })
    }

    /// Returns the slots that all members have dropped. Called by `Heap::collect`.
    pub(crate) fn collect_signals(&self) -> Result<()> {
        let dropped = lock(&self.0.slots).dropped.clone();
        let mine = unused(dropped);
        let agreed = self.intersect("collect-signals", &mine)?;
        // A count that was not consumed would let the first wait of the next owner pass.
        let slots = agreed.iter().flat_map(|&(first, num)| first..first + num);
        self.settle("collect-counts", self.check_slots(slots))?;
        let mut pool = lock(&self.0.slots);
        for &(first, num) in &agreed {
            pool.alloc.release(first, num);
        }
        let gone = take(&mut pool.dropped, &agreed);
        drop(pool);
        drop(gone);
        Ok(())
    }

    /// Returns the digest of all slot allocations so far.
    pub(crate) fn signals_digest(&self) -> (u64, u64) {
        lock(&self.0.slots).alloc.digest()
    }

    /// Returns the error for a slot whose count differs from the number that its waits consumed.
    pub(crate) fn uneven(&self, slot: usize, src: Rank, used: u64, seen: u64) -> Error {
        let text = format!("signal slot {slot}: a count was not consumed exactly once");
        Error::new(ErrorKind::Protocol, text)
            .of_team(self)
            .rank(self.rank())
            .peer(src)
            .expected(used)
            .seen(seen)
    }
}

/// A range of signal slots. Dropping it only marks them: they return at `Heap::collect`.
pub struct Signals {
    first: usize,
    num: usize,
    team: LiveTeam,
    ended: Mutex<Option<Ended>>,
}

impl Signals {
    /// Keeps the slots as [`SymBuf::keep_until`](crate::SymBuf::keep_until) keeps a buffer.
    pub fn keep_until(&self, ended: impl Fn() -> bool + Send + Sync + 'static) {
        *lock(&self.ended) = Some(Arc::new(ended));
    }

    /// Returns slot number `i` of the range.
    ///
    /// # Panics
    /// If the range has no slot `i`.
    pub fn slot(&self, i: usize) -> crate::SignalSlot {
        assert!(i < self.num, "slot {i} of {}", self.num);
        crate::SignalSlot(self.first + i)
    }

    /// Returns the number of slots.
    pub fn len(&self) -> usize {
        self.num
    }

    /// Returns whether the range is empty.
    pub fn is_empty(&self) -> bool {
        self.num == 0
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        if self.num > 0 && !self.team.0.process.is_foreign() {
            let ended = lock(&self.ended).take();
            let space = Dropped { at: self.first, len: self.num, ended };
            lock(&self.team.0.slots).dropped.push(space);
        }
    }
}
