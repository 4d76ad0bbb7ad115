//! The lane of the host: one launch of one operation, as the worker thread that runs it sees it.

use std::sync::Mutex;

use tilewire_core::{Rank, Result};

use crate::heap::Heap;
use crate::hook::{HookAction, StepKind};
use crate::team::LiveTeam;
use crate::wait::WaitCtx;

/// One launch of one operation on one rank. It names itself in every error.
///
/// Offsets are bytes in the heap ([`SymBuf::range`](crate::SymBuf::range)).
pub struct OpCtx {
    pub(super) heap: Heap,
    pub(super) op: &'static str,
    seq: u64,
    /// A put that a test hook holds back until after the next signal to its peer.
    pub(super) held: Mutex<Option<(Rank, usize, Vec<u8>)>>,
}

impl OpCtx {
    /// Returns the context of launch `seq` of `op`.
    pub fn new(heap: &Heap, op: &'static str, seq: u64) -> Self {
        Self { heap: heap.clone(), op, seq, held: Mutex::new(None) }
    }

    /// Returns the team.
    pub fn team(&self) -> &LiveTeam {
        self.heap.team()
    }

    /// Returns my team rank.
    pub fn rank(&self) -> Rank {
        self.team().rank()
    }

    /// Returns the sequence number of the launch.
    pub fn seq(&self) -> u64 {
        self.seq
    }

    pub(super) fn hook(&self, kind: StepKind, peer: Option<Rank>, phase: &str) -> HookAction {
        self.team().hook((self.op, phase), kind, peer)
    }

    pub(super) fn wait_ctx<'a>(&'a self, peer: Rank, expected: u64, phase: &'a str) -> WaitCtx<'a> {
        WaitCtx { op: self.op, phase, seq: self.seq, peer, expected }
    }

    /// Marks the beginning of a piece of arithmetic.
    ///
    /// # Errors
    /// The fault of the team, so that the caller stops computing.
    pub fn compute(&self, phase: &str) -> Result<()> {
        self.hook(StepKind::Compute, None, phase);
        self.team().fault().check()
    }

    /// Copies out of my own chunk.
    ///
    /// # Safety
    /// As [`OpCtx::local`], until the call returns.
    pub unsafe fn read_local(&self, offset: usize, out: &mut [u8]) {
        self.heap.0.map.read(self.rank().idx(), offset, out);
    }

    /// Copies into my own chunk, for peers to get.
    ///
    /// # Safety
    /// No peer reads or writes the range meanwhile: all that read it before have granted its use.
    pub unsafe fn write_local(&self, offset: usize, bytes: &[u8]) {
        self.heap.0.map.write(self.rank().idx(), offset, bytes);
    }

    /// Fills a range of my own chunk with zeros: flags that no rank has stored yet.
    ///
    /// # Safety
    /// No peer uses the range before it has met this rank.
    pub unsafe fn clear_local(&self, offset: usize, len: usize) {
        self.heap.0.map.fill(self.rank().idx(), offset, len, 0);
    }

    /// Returns my own chunk, in place.
    ///
    /// # Safety
    /// All writers of the range have signalled (and were waited for), and have no credit to
    /// write again while the slice lives.
    pub unsafe fn local(&self, offset: usize, len: usize) -> &[u8] {
        // SAFETY: the caller's contract is that of `Mapping::slice`.
        unsafe { self.heap.0.map.slice(self.rank().idx(), offset, len) }
    }
}
