//! The copy lane of AG+GEMM, which both executors carry out: the worker of the heap's copy stream
//! on the host, that stream itself on devices.

use std::ops::Range;

use tilewire_core::{Rank, Result};
use tilewire_symm::{Permit, SignalSlot, Signals, SymBuf, Transport};

use super::launch::DATA;
use crate::common::ring::{Arrival, neighbours};
use crate::common::{chunk_rows, range_of};

/// The copies of one launch: rows, chunks, and the order in which they go to the peers.
pub(super) struct Copies<'a> {
    /// Rows of each rank.
    pub rows: &'a [usize],
    /// Chunks of each rank's rows.
    pub chunks: usize,
    /// From neighbour to neighbour, instead of to every peer.
    pub ring: bool,
    /// Bytes of a row.
    pub row: usize,
    pub gather: &'a SymBuf,
    pub signals: &'a Signals,
}

impl Copies<'_> {
    /// The slot of a chunk that comes: a ring has one, whose counts come in order; else each chunk
    /// has its own, so that a flag never says more than that its chunk has arrived.
    pub fn slot(&self, chunk: usize) -> SignalSlot {
        self.signals.slot(if self.ring { DATA } else { DATA + chunk })
    }

    /// Sends my shard to every peer, peers in rotated order, chunk by chunk: so the whole shard of
    /// the rank before arrives first, and nobody waits for the last one (`schedule.rs`). Of a ring
    /// it goes to the next rank alone. `part` gives bytes of my shard to what it is called with.
    pub fn push<T: Transport + ?Sized>(
        &self,
        (net, lane): (&T, &T::Lane),
        permit: &Permit,
        part: impl Fn(Range<usize>, &mut dyn FnMut(&T::Memory) -> Result<()>) -> Result<()>,
    ) -> Result<()> {
        let team = net.heap().team();
        let (me, next) = (team.rank(), neighbours(team.rank(), self.rows.len()).1);
        let first = range_of(self.rows, me).start;
        let send = |peer: Rank, chunk: usize| {
            let r = chunk_rows(self.rows, me, chunk, self.chunks);
            let (bytes, slot) = (self.bytes(&(r.start - first..r.end - first)), self.slot(chunk));
            let to = (peer, self.gather.range(r.start * self.row, bytes.len()));
            part(bytes, &mut |part| match self.ring {
                // It is signalled to one rank alone, message by message: no total is made ahead.
                true => net.put_signal(lane, permit, to, part, slot, "push"),
                false => net.put_flag(lane, permit, to, part, slot, "push"),
            })
        };
        let shard = |peer| (0..self.chunks).try_for_each(|chunk| send(peer, chunk));
        match self.ring {
            true if next == me => Ok(()),
            true => shard(next),
            false => team.peers().try_for_each(shard),
        }
    }

    /// Of a ring: waits for what comes next, and calls `came` before it goes on to the next
    /// rank.
    pub fn take<T: Transport + ?Sized>(
        &self,
        (net, lane): (&T, &T::Lane),
        permit: &Permit,
        a: &Arrival,
        came: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let slot = self.slot(a.chunk);
        match a.last {
            true => net.wait_last(lane, a.from, slot, 1, "chunk")?,
            false => net.wait(lane, a.from, slot, 1, "chunk")?,
        }
        came()?;
        if !a.passes {
            return Ok(());
        }
        let bytes = self.bytes(&a.rows);
        let at = self.gather.range(bytes.start, bytes.len());
        let next: Rank = neighbours(net.heap().team().rank(), self.rows.len()).1;
        // SAFETY: the lane has waited for the chunk just now, and its writer gets no credit before
        // the next launch, which is behind this lane.
        unsafe { net.pass_signal(lane, permit, (next, at), (at, bytes.len()), slot, "pass") }
    }

    fn bytes(&self, rows: &Range<usize>) -> Range<usize> {
        rows.start * self.row..rows.end * self.row
    }
}
