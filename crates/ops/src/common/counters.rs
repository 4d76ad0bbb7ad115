//! Counters from which the blocks of a launch take the numbers of their tiles.
//!
//! A counter is two words that are zero when a launch begins, and that it leaves at zero
//! (`hopper/core.cuh`; `attention/hopper_tiles.cuh` takes one of them). No two launches may use one
//! at once: launches on one stream take turns, so a stream has a counter, whichever plan launches;
//! a graph has one for each of its streams, from the capture on until the graph is gone. So two
//! launches of one graph must not overlap, which they may not anyhow, since both write the same
//! results. Where no counter is left, tiles go out by strides: the bits are the same.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use tilewire_core::Result;
use tilewire_device::cuda::{CudaContext, CudaMemory, CudaStream, StreamKey};

use super::cuda::{hold, workspace};

/// Counters of a device.
const NUM: usize = 256;
/// Bytes from one to the next: none shares a line of L2 with another.
const STRIDE: usize = 128;

/// A counter of a graph's stream; free again when it is dropped.
struct Taken<K> {
    index: usize,
    of: Weak<Mutex<Owners<K>>>,
}

impl<K> Drop for Taken<K> {
    fn drop(&mut self) {
        if let Some(all) = self.of.upgrade() {
            all.lock().unwrap_or_else(PoisonError::into_inner).free.push(self.index);
        }
    }
}

/// The owners of counters, by keys that are never another stream's.
struct Owners<K> {
    streams: Vec<(K, usize)>,
    captured: Vec<(K, Weak<Taken<K>>)>,
    free: Vec<usize>,
}

/// The counters of one device.
pub(crate) struct Counters {
    memory: CudaMemory,
    owners: Arc<Mutex<Owners<StreamKey>>>,
}

impl Counters {
    /// Those of the device of `ctx`, which last as long as the process: queued work may use them
    /// when its plan is gone.
    ///
    /// # Errors
    /// Out of memory, the first time.
    pub fn of(ctx: &CudaContext) -> Result<Arc<Self>> {
        static ALL: Mutex<Vec<(u32, Arc<Counters>)>> = Mutex::new(Vec::new());
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, known)) = all.iter().find(|(ordinal, _)| *ordinal == ctx.ordinal()) {
            return Ok(known.clone());
        }
        let memory = workspace(ctx, NUM * STRIDE)?;
        let new = Arc::new(Self { memory, owners: Arc::new(Mutex::new(Owners::of(NUM))) });
        all.push((ctx.ordinal(), new.clone()));
        Ok(new)
    }

    /// Returns where the counters lie: memory that is always there.
    pub fn addr(&self) -> u64 {
        self.memory.addr()
    }

    /// Returns the address of a counter for the launch that is queued next on `stream`; 0 if none
    /// is left.
    pub fn next(&self, stream: &CudaStream) -> u64 {
        let key = stream.key();
        let mut all = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        let index = if key.is_captured() {
            let taken = all.of_capture(key, &self.owners);
            // Dropping it may lock.
            drop(all);
            taken.map(|t| {
                let index = t.index;
                hold(stream, t);
                index
            })
        } else {
            all.of_stream(key)
        };
        index.map_or(0, |i| self.memory.addr() + (i * STRIDE) as u64)
    }
}

impl<K: Copy + PartialEq> Owners<K> {
    fn of(num: usize) -> Self {
        Self { streams: Vec::new(), captured: Vec::new(), free: (0..num).rev().collect() }
    }

    fn of_stream(&mut self, key: K) -> Option<usize> {
        if let Some((_, index)) = self.streams.iter().find(|(of, _)| *of == key) {
            return Some(*index);
        }
        // Half of them are for graphs: programs that make streams without end take no more.
        if self.streams.len() >= NUM / 2 {
            return None;
        }
        let index = self.free.pop()?;
        self.streams.push((key, index));
        Some(index)
    }

    fn of_capture(&mut self, key: K, all: &Arc<Mutex<Self>>) -> Option<Arc<Taken<K>>> {
        self.captured.retain(|(_, taken)| taken.strong_count() > 0);
        let known = self.captured.iter().find(|(of, _)| *of == key);
        if let Some(taken) = known.and_then(|(_, taken)| taken.upgrade()) {
            return Some(taken);
        }
        let taken = Arc::new(Taken { index: self.free.pop()?, of: Arc::downgrade(all) });
        self.captured.push((key, Arc::downgrade(&taken)));
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_streams_or_graphs_have_one_counter() {
        let all = Arc::new(Mutex::new(Owners::of(NUM)));
        let stream = |key: u32| all.lock().unwrap().of_stream(key);
        let capture = |key: u32| all.lock().unwrap().of_capture(key, &all);
        let (a, b) = (stream(1).unwrap(), stream(2).unwrap());
        assert!(a != b && stream(1) == Some(a));
        let first = capture(1).unwrap();
        let again = capture(1).unwrap();
        let other = capture(9).unwrap();
        assert!(first.index == again.index && ![a, b, first.index].contains(&other.index));
        let index = first.index;
        drop(first);
        let used: Vec<_> = (10..NUM as u32 - 4).filter_map(capture).collect();
        assert!(used.iter().all(|t| ![a, b, index, other.index].contains(&t.index)));
        // The graph is gone: its counter is another's.
        drop(again);
        assert_eq!(capture(1000).unwrap().index, index);
    }

    #[test]
    fn streams_without_end_leave_counters_to_graphs() {
        let all = Arc::new(Mutex::new(Owners::of(NUM)));
        let found = (0..1000).filter_map(|key| all.lock().unwrap().of_stream(key)).count();
        assert_eq!(found, NUM / 2);
        let graphs: Vec<_> =
            (0..1000u32).filter_map(|key| all.lock().unwrap().of_capture(key, &all)).collect();
        assert_eq!(graphs.len(), NUM / 2);
        drop(graphs);
        let last = all.lock().unwrap().of_capture(0, &all);
        assert!(last.is_some());
    }
}
