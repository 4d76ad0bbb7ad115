//! The transfers of GEMM+RS and GEMM+AR, which both executors carry out: the workers of two lanes
//! on the host, two streams on devices.
//!
//! Partial products of a chunk of a peer's rows go to my slot there, a flag behind them. GEMM+AR
//! returns each chunk of reduced rows to all peers, or around a ring. Every chunk has a flag of its
//! own, both ways, and the credit of the launch covers both.

use std::ops::Range;

use tilewire_core::{Rank, Result};
use tilewire_symm::{Permit, SignalSlot, Signals, SymBuf, Transport};

use super::launch::DATA;
use crate::common::range_of;
use crate::common::ring::{Arrival, neighbours};

/// The transfers of one launch: rows, chunks, and their places.
pub(crate) struct Copies<'a> {
    /// Rows of each rank.
    pub rows: &'a [usize],
    /// Chunks of each rank's rows.
    pub chunks: usize,
    /// Rows of a slot.
    pub slot_rows: usize,
    /// Bytes of a row of partial products.
    pub row: usize,
    pub slots: &'a SymBuf,
    pub signals: &'a Signals,
    /// GEMM+AR: the way back.
    pub gather: Option<Gather<'a>>,
}

/// The buffer that reduced rows return to, for GEMM+AR.
#[derive(Clone, Copy)]
pub(crate) struct Gather<'a> {
    pub buf: &'a SymBuf,
    /// Bytes of a row of the output.
    pub row: usize,
    /// From neighbour to neighbour, instead of to every peer.
    pub ring: bool,
}

/// Signals of a plan with at most `chunks` chunks; `ways` is 2 for GEMM+AR, else 1.
pub(crate) fn num_signals(chunks: usize, ways: usize) -> usize {
    DATA + ways * chunks
}

impl Copies<'_> {
    /// The slots whose flags a launch publishes once to every peer. What goes around a ring is
    /// signalled to one peer alone, message by message.
    pub fn flags(&self) -> Range<usize> {
        let back = self.gather.is_some_and(|g| !g.ring);
        DATA..num_signals(self.chunks, 1 + usize::from(back))
    }

    /// Offset in the heap of `len` bytes of `src`'s slot from byte `at` on.
    pub fn slot(&self, src: Rank, at: usize, len: usize) -> usize {
        self.slots.range(src.idx() * self.slot_rows * self.row + at, len)
    }

    fn flag(&self, chunk: usize) -> SignalSlot {
        self.signals.slot(DATA + chunk)
    }

    /// The slot of a chunk that returns: a ring has one, whose counts come in order.
    fn returned(&self, g: &Gather<'_>, chunk: usize) -> SignalSlot {
        self.signals.slot(DATA + self.chunks + if g.ring { 0 } else { chunk })
    }

    /// Puts a chunk of `owner`'s rows to my slot there, tile by tile, and its flag behind the last
    /// one. `tile(i)` gives where in the slot tile `i` of `num` begins, its bytes and their number
    /// to what it is called with.
    pub fn push<T: Transport + ?Sized>(
        &self,
        (net, lane): (&T, &T::Lane),
        permit: &Permit,
        (owner, chunk): (Rank, usize),
        num: usize,
        tile: impl Fn(usize, &mut dyn FnMut(usize, &T::Memory, usize) -> Result<()>) -> Result<()>,
    ) -> Result<()> {
        let (me, flag) = (net.heap().team().rank(), self.flag(chunk));
        if num == 0 {
            return net.flag(lane, owner, flag, "chunk");
        }
        (0..num).try_for_each(|i| {
            tile(i, &mut |at, bytes, len| {
                let to = (owner, self.slot(me, at, len));
                match i + 1 == num {
                    true => net.put_flag(lane, permit, to, bytes, flag, "chunk"),
                    false => net.put(lane, permit, to, bytes, "chunk"),
                }
            })
        })
    }

    /// Waits for the parts of all peers of a chunk of my rows.
    pub fn wait<T: Transport + ?Sized>(
        &self,
        (net, lane): (&T, &T::Lane),
        chunk: usize,
    ) -> Result<()> {
        net.wait_peers(lane, self.flag(chunk), "chunk")
    }

    /// GEMM+AR: returns my reduced rows `rows` (global numbers), `part`, to all peers, or to the
    /// next rank of a ring.
    pub fn give<T: Transport + ?Sized>(
        &self,
        (net, lane): (&T, &T::Lane),
        permit: &Permit,
        (g, chunk): (&Gather<'_>, usize),
        rows: &Range<usize>,
        part: &T::Memory,
    ) -> Result<()> {
        let (team, slot) = (net.heap().team(), self.returned(g, chunk));
        let at = g.buf.range(rows.start * g.row, rows.len() * g.row);
        if g.ring {
            let next = neighbours(team.rank(), self.rows.len()).1;
            return match next == team.rank() {
                true => Ok(()),
                false => net.put_signal(lane, permit, (next, at), part, slot, "return"),
            };
        }
        team.peers().try_for_each(|p| net.put_flag(lane, permit, (p, at), part, slot, "return"))
    }

    /// GEMM+AR: waits for what returns next and calls `came`; of a ring it passes it on then.
    pub fn take<T: Transport + ?Sized>(
        &self,
        (net, lane): (&T, &T::Lane),
        permit: &Permit,
        (g, a): (&Gather<'_>, &Arrival),
        came: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let slot = self.returned(g, a.chunk);
        match a.last || !g.ring {
            true => net.wait_last(lane, a.from, slot, 1, "returned")?,
            false => net.wait(lane, a.from, slot, 1, "returned")?,
        }
        came()?;
        if !a.passes {
            return Ok(());
        }
        let (next, len) =
            (neighbours(net.heap().team().rank(), self.rows.len()).1, a.rows.len() * g.row);
        let at = g.buf.range(a.rows.start * g.row, len);
        // SAFETY: the lane has waited for the rows just now, and their writer gets no credit before
        // the next launch, which is behind this lane.
        unsafe { net.pass_signal(lane, permit, (next, at), (at, len), slot, "return") }
    }

    /// GEMM+AR: copies rows that were taken to `out`.
    pub fn land<T: Transport + ?Sized>(
        &self,
        (net, lane): (&T, &T::Lane),
        (g, rows): (&Gather<'_>, &Range<usize>),
        out: &mut T::Memory,
    ) -> Result<()> {
        if rows.is_empty() || g.row == 0 {
            return Ok(());
        }
        let at = g.buf.range(rows.start * g.row, rows.len() * g.row);
        // SAFETY: the lane is behind the wait for the rows (`take`), and their writer gets no
        // credit before the next launch.
        unsafe { net.get(lane, (net.heap().team().rank(), at), out, "returned") }
    }

    /// Global rows of rank `r`.
    pub fn range(&self, r: Rank) -> Range<usize> {
        range_of(self.rows, r)
    }
}
