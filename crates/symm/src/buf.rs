//! Buffers of a heap.

use std::sync::{Arc, Mutex};

use tilewire_core::{Error, ErrorKind, Result};

use crate::heap::Heap;
use crate::team::lock;

/// Whether the work that uses dropped space has ended.
pub(crate) type Ended = Arc<dyn Fn() -> bool + Send + Sync>;

/// Space that its owner has dropped, and from when on nothing uses it any more: at once without a word of that.
#[derive(Clone)]
pub(crate) struct Dropped {
    pub at: usize,
    pub len: usize,
    pub ended: Option<Ended>,
}

/// What has been dropped and is not in use any more, in order. Without the lock of the list: the driver, which is asked
/// here, may be dropping what a graph used, under one of its own.
pub(crate) fn unused(dropped: Vec<Dropped>) -> Vec<(usize, usize)> {
    let ended = |d: &&Dropped| d.ended.as_ref().is_none_or(|f| f());
    let mut found: Vec<_> = dropped.iter().filter(ended).map(|d| (d.at, d.len)).collect();
    found.sort_unstable();
    found
}

/// Takes what all ranks return from the list. The caller drops it behind its lock, for the same reason.
pub(crate) fn take(dropped: &mut Vec<Dropped>, agreed: &[(usize, usize)]) -> Vec<Dropped> {
    let is_agreed = |d: &Dropped| agreed.contains(&(d.at, d.len));
    let (gone, kept) = std::mem::take(dropped).into_iter().partition(is_agreed);
    *dropped = kept;
    gone
}

struct BufInner {
    heap: Heap,
    offset: usize,
    len_bytes: usize,
    ended: Mutex<Option<Ended>>,
}

/// A buffer at the same offset of every rank's chunk. Dropping it only marks the space: it
/// returns at the collective [`Heap::collect`].
#[derive(Clone)]
pub struct SymBuf(Arc<BufInner>);

impl SymBuf {
    pub(crate) fn new(heap: &Heap, offset: usize, len_bytes: usize) -> Self {
        let ended = Mutex::default();
        Self(Arc::new(BufInner { heap: heap.clone(), offset, len_bytes, ended }))
    }

    /// For work that knows the buffer by its addresses alone: once it is dropped, [`Heap::collect`] leaves it until `ended`
    /// says that this work is over. The last word counts.
    pub fn keep_until(&self, ended: impl Fn() -> bool + Send + Sync + 'static) {
        *lock(&self.0.ended) = Some(Arc::new(ended));
    }

    /// Offset in the heap, in bytes.
    pub fn offset(&self) -> usize {
        self.0.offset
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.0.len_bytes
    }

    /// Offset in the heap of byte `at` of the buffer.
    ///
    /// # Panics
    /// If `at + len` reaches past the buffer: the schedule is wrong.
    pub fn range(&self, at: usize, len: usize) -> usize {
        assert!(
            at.checked_add(len).is_some_and(|e| e <= self.0.len_bytes),
            "bytes {at}+{len} of a symmetric buffer of {}",
            self.0.len_bytes
        );
        self.0.offset + at
    }

    /// The heap it was taken from.
    pub fn heap(&self) -> &Heap {
        &self.0.heap
    }

    /// Checks that the buffer belongs to `heap` and not to that of an earlier team.
    ///
    /// # Errors
    /// `Stale` otherwise.
    pub fn check_heap(&self, heap: &Heap) -> Result<()> {
        if self.0.heap.same(heap) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Stale, "a symmetric buffer of another heap was given")
            .expected(format_args!(
                "team {} generation {}",
                heap.team().name(),
                heap.team().generation()
            ))
            .seen(format_args!(
                "team {} generation {}",
                self.0.heap.team().name(),
                self.0.heap.team().generation()
            ))
            .hint("buffers do not outlive their team: allocate again after re-forming it"))
    }
}

impl std::fmt::Debug for SymBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SymBuf({}+{})", self.0.offset, self.0.len_bytes)
    }
}

impl Drop for BufInner {
    fn drop(&mut self) {
        let ended = lock(&self.ended).take();
        self.heap.note_dropped(Dropped { at: self.offset, len: self.len_bytes, ended });
    }
}
