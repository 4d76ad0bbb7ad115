//! Objects in use by queued work, listed by the threads that queued it.

use std::collections::VecDeque;
use std::thread::ThreadId;

use super::context::Thing;
use super::event::CudaEvent;
use crate::Point;

/// Objects that queued work refers to by address. The driver may, but need not, finish that work
/// before it frees memory; so the stream keeps it until an event behind the work has been reached,
/// and a launch frees nothing even then.
#[derive(Default)]
pub(super) struct Flight {
    /// Held since the last event, oldest first.
    pub open: Vec<Open>,
    pub closed: VecDeque<(CudaEvent, Vec<Thing>)>,
    /// The launch that has looked at its events last: one look is enough for a launch.
    looked: Option<u64>,
}

/// A thing, for whose work, and its number.
pub(super) struct Open {
    pub by: ThreadId,
    pub num: u64,
    pub thing: Thing,
}

/// So many things share an event.
pub(super) const BATCH: usize = 64;
/// The newest of a thread may belong to work that it is about to queue: other threads may queue any
/// number of things meanwhile.
const NEWEST: usize = 16;
/// Threads that are distinguished: the newest of a thread that has ended would stay until somebody
/// waits.
const THREADS: usize = 16;

impl Flight {
    /// Returns what is behind an event that has been reached, and the events: to be let go without
    /// the lock.
    pub fn reached(&mut self) -> Vec<(CudaEvent, Vec<Thing>)> {
        let n = self.closed.iter().take_while(|(e, _)| e.is_done()).count();
        self.closed.drain(..n).collect()
    }

    /// As [`Flight::reached`], once for each launch.
    pub fn reached_by(&mut self, launch: Option<u64>) -> Vec<(CudaEvent, Vec<Thing>)> {
        let is_new = launch.is_none() || self.looked != launch;
        self.looked = launch;
        if is_new { self.reached() } else { Vec::new() }
    }

    /// Takes what is not among the newest of its thread: its work has been queued.
    pub fn queued(&mut self) -> Vec<Thing> {
        let beyond = self.open.len().saturating_sub(THREADS * NEWEST);
        let mut left: Vec<(ThreadId, usize)> = Vec::new();
        for o in &self.open {
            match left.iter_mut().find(|(by, _)| *by == o.by) {
                Some((_, n)) => *n += 1,
                None => left.push((o.by, 1)),
            }
        }
        let mut at = 0;
        let is_queued = |o: &mut Open| {
            at += 1;
            let mut of_thread = left.iter_mut().filter(|(by, _)| *by == o.by);
            of_thread.any(|(_, n)| {
                *n -= 1;
                *n >= NEWEST
            }) || at <= beyond
        };
        self.open.extract_if(.., is_queued).map(|o| o.thing).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn thing(num: u64, by: ThreadId) -> Open {
        Open { by, num, thing: Arc::new(num) }
    }

    fn nums(list: &[Thing]) -> Vec<u64> {
        list.iter().map(|t| *t.downcast_ref::<u64>().unwrap()).collect()
    }

    /// A thread that holds one thing and has not queued its work yet, beside one that queues a lot.
    #[test]
    fn what_a_slow_thread_holds_is_not_behind_the_work_of_a_fast_one() {
        let me = std::thread::current().id();
        let other = std::thread::spawn(|| std::thread::current().id()).join().unwrap();
        let mut f = Flight::default();
        f.open.push(thing(0, other));
        f.open.extend((1..100).map(|n| thing(n, me)));
        assert_eq!(nums(&f.queued()), (1..84).collect::<Vec<_>>());
        assert_eq!(f.open.len(), 1 + NEWEST);
        assert_eq!(f.open[0].num, 0);
        assert!(f.queued().is_empty());
    }

    /// Threads that come and go do not keep what they have held for ever.
    #[test]
    fn what_many_threads_hold_is_bounded() {
        let mut f = Flight::default();
        for n in 0..500 {
            let by = std::thread::spawn(|| std::thread::current().id()).join().unwrap();
            f.open.push(thing(n, by));
        }
        assert_eq!(nums(&f.queued()), (0..500 - 256).collect::<Vec<_>>());
        assert_eq!(f.open.len(), THREADS * NEWEST);
    }
}
