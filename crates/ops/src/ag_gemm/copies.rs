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

    /// Sends my shard to every peer, chunk by chunk, peers in rotated order; of a ring to the next
    /// rank. `part` gives bytes of my shard to what it is called with.
    pub fn push<T: Transport + ?Sized>(
        &self,
        (net, lane): (&T, &T::Lane),
        permit: &Permit,
        part: impl Fn(Range<usize>, &mut dyn FnMut(&T::Memory) -> Result<()>) -> Result<()>,
    ) -> Result<()> {
        let team = net.heap().team();
        let (me, next) = (team.rank(), neighbours(team.rank(), self.rows.len()).1);
        let first = range_of(self.rows, me).start;
        for chunk in 0..self.chunks {
            let r = chunk_rows(self.rows, me, chunk, self.chunks);
            let (bytes, slot) = (self.bytes(&(r.start - first..r.end - first)), self.slot(chunk));
            let at = self.gather.range(r.start * self.row, bytes.len());
            part(bytes, &mut |part| {
                if self.ring {
                    // It is signalled to one rank alone, message by message: no total is made
                    // ahead.
                    return match next == me {
                        true => Ok(()),
                        false => net.put_signal(lane, permit, (next, at), part, slot, "push"),
                    };
                }
                let put = |p| net.put_flag(lane, permit, (p, at), part, slot, "push");
                team.peers().try_for_each(put)
            })?;
        }
        Ok(())
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
