//! The lists of pieces by NCCL: rows from each rank to each, as sends and receives of one group.
//!
//! NCCL moves runs of bytes. Rows that are not contiguous are packed into a workspace before they
//! are sent, and unpacked at the receiver. Each rank computes the lists of all ranks, so the owner
//! of rows knows which ranks need them: nothing is published, and no sizes travel. No exchange
//! overlaps with arithmetic. This is the baseline, and the transport where peers' memory cannot be
//! read.

use tilewire_core::{DType, Error, Rank, Result};
use tilewire_device::cuda::{CudaContext, CudaMemory, CudaStream, NcclOp};
use tilewire_device::{Buffer, Stream};

use crate::common::PlanCore;
use crate::common::cuda::{hold, unsupported, workspace};
use crate::common::nccl::ByNccl;
use crate::cp_attention::config::Strategy;
use crate::cp_attention::desc::CpAttentionDesc;
use crate::cp_attention::pieces::{Piece, Sizes};

/// Bytes of a rank in the first call, which connects.
const PROBE: usize = 16;

/// Rows of bytes from one place of this device to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Rows {
    pub from: u64,
    pub from_pitch: usize,
    pub to: u64,
    pub to_pitch: usize,
    pub width: usize,
    pub rows: usize,
}

/// The pieces that move from tensors at `src` on their ranks to a tensor at `dst` here: the pieces
/// of this rank, and the pieces of every rank.
pub(super) struct List {
    pub src: u64,
    pub dst: u64,
    pub mine: Vec<Piece>,
    pub all: Vec<Vec<Piece>>,
}

/// One exchange of a rank.
#[derive(Default)]
pub(super) struct Trip {
    pub pack: Vec<Rows>,
    pub calls: Vec<NcclOp>,
    pub unpack: Vec<Rows>,
    /// Bytes of workspace that are sent, and received.
    pub sent: usize,
    pub received: usize,
}

fn is_run(p: &Piece, pitch: usize) -> bool {
    p.rows == 1 || pitch == p.width
}

/// Calls between two ranks are in the same order on both: by list, then as the receiver's pieces
/// are.
pub(super) fn trip(me: Rank, lists: &[List], (send_at, recv_at): (u64, u64)) -> Trip {
    let mut t = Trip::default();
    for list in lists {
        let some = |p: &&Piece| p.width * p.rows > 0;
        for p in list.mine.iter().filter(some) {
            let (to, to_pitch, count) = (list.dst + p.dst as u64, p.dst_pitch, p.width * p.rows);
            let (width, rows) = (p.width, p.rows);
            if p.peer == me {
                let from = list.src.wrapping_add(p.src as u64);
                let from_pitch = p.src_pitch;
                t.unpack.push(Rows { from, from_pitch, to, to_pitch, width, rows });
                continue;
            }
            let mut dst = to;
            if !is_run(p, to_pitch) {
                dst = recv_at + t.received as u64;
                t.received += count;
                t.unpack.push(Rows { from: dst, from_pitch: width, to, to_pitch, width, rows });
            }
            t.calls.push(NcclOp::Recv { dst, count, peer: p.peer.get() });
        }
        let others = list.all.iter().enumerate().filter(|(r, _)| *r != me.idx());
        for (r, theirs) in others {
            for p in theirs.iter().filter(some).filter(|p| p.peer == me) {
                let (from, from_pitch) = (list.src.wrapping_add(p.src as u64), p.src_pitch);
                let (width, rows, count) = (p.width, p.rows, p.width * p.rows);
                let mut src = from;
                if !is_run(p, from_pitch) {
                    src = send_at + t.sent as u64;
                    t.sent += count;
                    t.pack.push(Rows { from, from_pitch, to: src, to_pitch: width, width, rows });
                }
                t.calls.push(NcclOp::Send { src, count, peer: r as u32 });
            }
        }
    }
    t
}

/// Refuses descriptions and strategies that NCCL does not carry out.
///
/// # Errors
/// `Unsupported`, with an alternative as its hint.
pub(in crate::cp_attention) fn check(
    d: &CpAttentionDesc,
    strategy: Option<Strategy>,
) -> Result<()> {
    let use_puts = "use `CollectiveBackend::Put`";
    if d.attn.dtype.is_fp8() || d.kv_wire().1 || d.dkv_wire.is_fp8() {
        return Err(unsupported("FP8 does not travel through NCCL", use_puts));
    }
    if strategy == Some(Strategy::Ring) {
        return Err(unsupported("the ring does not run through NCCL", use_puts));
    }
    Ok(())
}

/// Returns the most bytes of one exchange that are packed, on either side. Without traded heads
/// rows are whole.
pub(super) fn packed_bytes(s: &Sizes, backward: bool) -> usize {
    if s.inner == 1 {
        return 0;
    }
    let (queries, keys) = (s.max_q * s.all_q, s.all_keys() * s.hkv);
    let sum = |bytes: &[usize]| bytes.iter().sum::<usize>();
    let upstream = if backward { s.dv * s.out + 8 } else { 0 };
    let there = keys * sum(&s.wire) + queries * (sum(&s.q_wire) + upstream);
    let parts = if backward { keys * sum(&s.part_wire) } else { 0 };
    let back = queries * (s.dqk.max(s.dv) * s.out + 4) + parts;
    there.max(back)
}

/// The communicator and the workspaces of a plan's exchanges through NCCL.
pub(super) struct Exchange {
    nccl: ByNccl,
    send: CudaMemory,
    recv: CudaMemory,
}

impl Exchange {
    pub fn new(ctx: &CudaContext, s: &Sizes, backward: bool) -> Result<Self> {
        let len = packed_bytes(s, backward).max(PROBE * s.size);
        let nccl = ByNccl::default();
        Ok(Self { nccl, send: workspace(ctx, len)?, recv: workspace(ctx, len)? })
    }

    /// Collective, behind the agreement of `prepare`.
    pub fn connect(&self, core: &PlanCore, stream: &Stream) -> Result<()> {
        if self.nccl.explain().is_some() {
            return Ok(());
        }
        let (me, size) = (core.team().rank(), core.team().size());
        let at = |r: usize| (r * PROBE) as u64;
        let src = self.send.addr();
        let own = self.recv.addr() + at(me.idx());
        let mut calls = vec![NcclOp::AllGather { src: own, dst: self.recv.addr(), count: PROBE }];
        // SAFETY: workspace of this plan, of which nothing is launched yet, with space for all
        // ranks.
        unsafe { self.nccl.prepare(core, stream, (DType::U8, &calls))? };
        calls.clear();
        for peer in (0..size).filter(|p| *p != me.idx()) {
            let dst = self.recv.addr() + at(peer);
            calls.push(NcclOp::Send { src: src + at(peer), count: PROBE, peer: peer as u32 });
            calls.push(NcclOp::Recv { dst, count: PROBE, peer: peer as u32 });
        }
        let main = stream.cuda()?;
        hold(main, [self.send.clone(), self.recv.clone()]);
        // SAFETY: as above.
        let queued = unsafe { self.nccl.exchange(main, &calls) };
        // Only this rank knows that it failed, and its peers wait for it.
        queued.map_err(|e| core.team().fail(e))
    }

    /// Queues calls on bytes, as one group.
    ///
    /// # Safety
    /// As [`ByNccl::exchange`].
    pub unsafe fn queue(&self, main: &CudaStream, calls: &[NcclOp]) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.nccl.exchange(main, calls) }
    }

    /// Queues an exchange. Everything that the lists refer to must be held by `keep`, which is
    /// called before each piece of work.
    ///
    /// # Safety
    /// The lists must be of tensors on the stream's device that hold all their pieces, and that
    /// nothing else uses meanwhile; all ranks must have made their lists from the same description
    /// and sequences.
    pub unsafe fn run(
        &self,
        (main, me): (&CudaStream, Rank),
        lists: &[List],
        keep: &dyn Fn(),
    ) -> Result<()> {
        let t = trip(me, lists, (self.send.addr(), self.recv.addr()));
        if t.sent.max(t.received) > self.send.len_bytes() {
            return Err(Error::internal("an exchange is larger than its workspace"));
        }
        let copies = |list: &[Rows]| {
            list.iter().try_for_each(|r| {
                keep();
                hold(main, [self.send.clone(), self.recv.clone()]);
                let shape = (r.width, r.rows);
                // SAFETY: the caller's contract; the workspace is large enough and is held.
                unsafe { main.copy_rows((r.to, r.to_pitch), (r.from, r.from_pitch), shape) }
            })
        };
        copies(&t.pack)?;
        keep();
        hold(main, [self.send.clone(), self.recv.clone()]);
        if !t.calls.is_empty() {
            // SAFETY: as above.
            unsafe { self.queue(main, &t.calls)? };
        }
        copies(&t.unpack)
    }

    pub fn explain(&self) -> Option<&str> {
        self.nccl.explain()
    }
}

#[cfg(test)]
#[path = "nccl_tests.rs"]
mod tests;
