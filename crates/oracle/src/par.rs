//! Work on all processors, with results that do not depend on their number.
//!
//! Every item is computed by one thread from the inputs alone and stored in its own place: threads
//! decide when something is computed, never in which order numbers are added.

use std::sync::{Mutex, PoisonError};
use std::thread;

/// Operations below which threads cost more than they save.
const LEAST_WORK: usize = 1 << 18;

/// Threads for `work` operations: one if the work is small.
pub fn threads(work: usize) -> usize {
    match work >= LEAST_WORK {
        true => thread::available_parallelism().map_or(1, usize::from),
        false => 1,
    }
}

/// Calls `f` with each item, on `threads` threads; an idle thread takes the next item.
pub fn each<T: Send>(threads: usize, items: impl Iterator<Item = T> + Send, f: impl Fn(T) + Sync) {
    if threads <= 1 {
        return items.for_each(f);
    }
    let items = Mutex::new(items);
    // The lock is released before `f` runs.
    let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        while let Some(item) = next() {
            f(item);
        }
    };
    thread::scope(|s| {
        // Those that cannot be started, for lack of memory, are not needed.
        let start = || thread::Builder::new().spawn_scoped(s, work).is_ok();
        (1..threads).all(|_| start());
        work();
    });
}

/// `f(i)` for `i` in `0..num`, on `threads` threads, in the order of `i`.
pub fn map<T: Send>(threads: usize, num: usize, f: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let mut out: Vec<Option<T>> = (0..num).map(|_| None).collect();
    each(threads, out.iter_mut().enumerate(), |(i, o)| *o = Some(f(i)));
    out.into_iter().flatten().collect()
}

/// Calls `f(first, part)` for consecutive parts of at most `len` elements of `data`, on `threads`
/// threads; `first` is the index of the part's first element.
///
/// # Panics
/// If `len` is 0.
pub fn parts<T: Send>(
    threads: usize,
    data: &mut [T],
    len: usize,
    f: impl Fn(usize, &mut [T]) + Sync,
) {
    each(threads, data.chunks_mut(len).enumerate(), |(i, part)| f(i * len, part));
}
