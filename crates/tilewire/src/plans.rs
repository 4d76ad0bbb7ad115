//! Plans by description, for callers that pass tensors of any size at any time.
//!
//! A plan is made collectively and launched many times. Eager frameworks call operations without
//! saying ahead which shapes will come, so a [`Plans`] keeps the plans of one heap by a key: a hit
//! is a look into a table, a miss makes the plan together with the other ranks.
//!
//! # Protocol
//! All ranks of the team must miss the same keys in the same order, as they make any collective
//! call; hits may come in any order and number. A miss meets the other ranks first, through their
//! flight recorders, so that a rank that launches something else meanwhile is an error with both
//! ranks' words within seconds. What a miss does depends on the misses before it alone, which are
//! alike on all ranks: the plan that is given up for a new one is the least recently prepared.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use foldhash::fast::RandomState;
use tilewire_core::{Error, ErrorKind, Result};
use tilewire_device::Stream;
use tilewire_symm::{Fingerprint, Heap, Signals, SymBuf};

type Plan = Arc<dyn Any + Send + Sync>;

/// The plans of one heap, by key. See the [module](self).
pub struct Plans<K> {
    heap: Heap,
    /// Bytes per rank that the heap may grow to.
    limit_bytes: usize,
    held: Mutex<Held<K>>,
}

struct Held<K> {
    /// Keys are descriptions of many fields, hashed in each call: std's function takes 0.2 us.
    plans: HashMap<K, Plan, RandomState>,
    /// In the order in which they were prepared.
    order: VecDeque<K>,
    /// Misses so far: equal on all ranks.
    misses: u64,
}

/// The counters of a [`Plans`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PlansUsage {
    /// Plans that are ready to launch.
    pub plans: usize,
    /// Plans that have been made since the beginning.
    pub misses: u64,
    /// Bytes of symmetric memory per rank that are in use.
    pub used_bytes: usize,
    /// Bytes of symmetric memory per rank that there are.
    pub total_bytes: usize,
}

/// A plan to be made: its name, its symmetric memory, and the two steps of its making.
pub struct Recipe<P, M> {
    /// The operation: the same on all ranks.
    pub op: &'static str,
    /// Bytes of symmetric memory that the plan takes on each rank.
    pub len_bytes: usize,
    /// Takes the plan's memory and signals from the heap.
    pub make: M,
    /// Meets the other ranks: the plan's `prepare`.
    pub prepare: fn(&P, &Stream) -> Result<()>,
}

impl<K: Clone + Eq + Hash> Plans<K> {
    /// No plans yet. The heap grows when a plan needs more, up to `limit_bytes` per rank (equal on
    /// all ranks) and its reserve; then older plans go.
    pub fn new(heap: &Heap, limit_bytes: usize) -> Self {
        let held = Held { plans: HashMap::default(), order: VecDeque::new(), misses: 0 };
        Self { heap: heap.clone(), limit_bytes, held: Mutex::new(held) }
    }

    /// The heap.
    pub fn heap(&self) -> &Heap {
        &self.heap
    }

    fn held(&self) -> MutexGuard<'_, Held<K>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what is held.
    pub fn usage(&self) -> PlansUsage {
        let (free, total) = self.heap.usage();
        let held = self.held();
        PlansUsage {
            plans: held.plans.len(),
            misses: held.misses,
            used_bytes: total - free,
            total_bytes: total,
        }
    }

    /// The plan of `key`, made by `recipe` if there is none. Collective if there is none.
    ///
    /// # Errors
    /// `NotPrepared` if there is none and `stream` is being captured. `Mismatch` if a peer does
    /// something else; that ends the team. Otherwise what `make` and `prepare` report, and
    /// `Exhausted` if the plan does not fit into the heap's limit without all others.
    pub fn get<P: Any + Send + Sync, M: Fn(&Heap) -> Result<P>>(
        &self,
        key: &K,
        stream: &Stream,
        recipe: impl FnOnce() -> Recipe<P, M>,
    ) -> Result<Arc<P>> {
        let mut held = self.held();
        let plan = match held.plans.get(key) {
            Some(plan) => plan.clone(),
            None => {
                let recipe = recipe();
                let plan: Plan = Arc::new(self.miss(&mut held, stream, &recipe)?);
                held.plans.insert(key.clone(), plan.clone());
                held.order.push_back(key.clone());
                plan
            }
        };
        drop(held);
        plan.downcast().map_err(|_| Error::internal("one key names plans of two types"))
    }

    /// True if a launch of `key` needs no meeting.
    pub fn contains(&self, key: &K) -> bool {
        self.held().plans.contains_key(key)
    }

    fn miss<P, M>(&self, held: &mut Held<K>, stream: &Stream, r: &Recipe<P, M>) -> Result<P>
    where
        M: Fn(&Heap) -> Result<P>,
    {
        if stream.is_capturing() {
            return Err(Error::new(
                ErrorKind::NotPrepared,
                "this call needs a new plan, which cannot be made during a capture",
            )
            .op(r.op)
            .hint("call it once with these shapes before the capture begins, or `prepare` it"));
        }
        self.meet(held, r.op, "is made")?;
        let plan = self.make(held, (r.op, r.len_bytes), &r.make)?;
        (r.prepare)(&plan, stream)?;
        Ok(plan)
    }

    /// Collective: all ranks are at their next miss, which is for `op` and `what`.
    fn meet(&self, held: &mut Held<K>, op: &'static str, what: &str) -> Result<()> {
        // The number of misses tells a rank that came here by another way.
        let words = Fingerprint::new(op, format_args!("{what}, plan {}", held.misses));
        self.heap.team().prepare_agree(&words).map_err(|e| e.op(op))?;
        held.misses += 1;
        Ok(())
    }

    /// Collective: a buffer of `len_bytes` on every rank and `num_signals` signal slots for it, for
    /// the caller. As for a plan, the heap grows if need be, and older plans go.
    ///
    /// # Errors
    /// `Mismatch` if a peer does something else or asks for other sizes; that ends the team.
    /// `Exhausted` if the heap's limit does not hold the buffer.
    pub fn alloc(
        &self,
        op: &'static str,
        len_bytes: usize,
        num_signals: usize,
    ) -> Result<(SymBuf, Signals)> {
        let mut held = self.held();
        let what = format!("takes {len_bytes} bytes and {num_signals} signals");
        self.meet(&mut held, op, &what)?;
        self.make(&mut held, (op, len_bytes), &|heap: &Heap| {
            let buf = heap.alloc(len_bytes, op)?;
            Ok((buf, heap.team().signals(num_signals, op)?))
        })
    }

    /// Takes the plan's memory and signals, in place of older plans if need be. Every step is taken
    /// on all ranks or on none: `settle` makes one verdict of their attempts.
    fn make<P>(
        &self,
        held: &mut Held<K>,
        (op, len_bytes): (&'static str, usize),
        make: &impl Fn(&Heap) -> Result<P>,
    ) -> Result<P> {
        let team = self.heap.team();
        let mut collected = false;
        loop {
            let e = match team.settle("plan", make(&self.heap)) {
                Ok(plan) => return Ok(plan),
                Err(e) if e.kind() == ErrorKind::Exhausted => e,
                Err(e) => return Err(e),
            };
            let (free, total) = self.heap.usage();
            if !collected {
                collected = true;
            } else if free < len_bytes && self.grow(total, len_bytes)? {
                continue;
            } else if let Some(oldest) = held.order.pop_front() {
                log::debug!("`{op}`: an older plan goes");
                held.plans.remove(&oldest);
            } else {
                let hint = "give `init` a larger `heap_bytes`, or use smaller shapes";
                return Err(e.op(op).hint(hint));
            }
            self.heap.collect()?;
        }
    }

    /// Returns whether the heap grew. The numbers are equal on all ranks, so the answer is.
    fn grow(&self, total: usize, need: usize) -> Result<bool> {
        let most = self.limit_bytes;
        let want = total.saturating_add(need).max(total.saturating_mul(2)).min(most);
        // It starts small, and may be asked for more than it can ever hold.
        if want < total.saturating_add(need) {
            return Ok(false);
        }
        let least = total.saturating_add(need);
        let grown = match self.heap.grow(want) {
            // What is needed now may fit.
            Err(e) if e.kind() == ErrorKind::Exhausted && want > least => self.heap.grow(least),
            grown => grown,
        };
        match grown {
            Ok(()) => Ok(true),
            Err(e) if matches!(e.kind(), ErrorKind::Exhausted | ErrorKind::Unsupported) => {
                log::debug!("the heap does not grow to {want} bytes: {e}");
                Ok(false)
            }
            Err(e) => Err(e),
        }
    }
}

impl<K> fmt::Debug for Plans<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Plans of {}", self.heap.team().name())
    }
}
