//! A collective as one kernel that meets the other ranks itself: `collective/sm90_collective.cu`.
//!
//! Every rank pushes the pieces of its parts with a flag behind each, and copies or adds pieces of
//! other ranks as they arrive. So neither a second meeting nor the copies out cost time of their
//! own. A flag holds the number of its launch; the end of a launch grants the memory for the next
//! one. A launch that goes another way queues that grant behind itself.

use std::sync::Arc;

use bytemuck::Zeroable;
use tilewire_core::{DType, Error, Rank, Result};
use tilewire_device::cuda::{CudaMemory, CudaStream, Grid, Kernel, LaunchArgs};
use tilewire_device::{Queue, Stream};
use tilewire_kernels::abi::{TwCollective, TwPart, TwTeam, TwTotal};
use tilewire_kernels::portable::{
    COLLECTIVE, COLLECTIVE_CHUNK, COLLECTIVE_PIECE, COLLECTIVE_RANKS, COLLECTIVE_SEND,
    COLLECTIVE_STAGES, COLLECTIVE_WARPS, collective_defines,
};
use tilewire_symm::SymBuf;

use crate::collective::launch::{Base, CREDIT, DATA};
use crate::collective::schedule::{Phase, shard_rows};
use crate::collective::way::whole_rows;
use crate::collective::{CollectiveDesc, CollectiveKind, ReduceOp};
use crate::common::cuda::{load, mantissa, workspace};
use crate::common::lanes::{Lane, Lanes, Poison, poison_of};

/// The most multiprocessors of a launch. Of 132, four plans that wait for different ranks fit at
/// once, or two of large sums. A launch also makes progress, if slowly, with a single one, so that
/// a large sum may ask for more.
const NUM_SMS: u32 = 32;
const NUM_SMS_OF_SUMS: u32 = 64;
/// Vectors above this size are large.
const LARGE_BYTES: usize = 32 << 20;
/// Bytes of dynamic shared memory, and the most of static.
const SHARED_BYTES: u32 = (COLLECTIVE_WARPS * COLLECTIVE_PIECE
    + COLLECTIVE_SEND * COLLECTIVE_STAGES * COLLECTIVE_CHUNK) as u32;
const STATIC_BYTES: u32 = 2048;
const THREADS: u32 = 32 * COLLECTIVE_WARPS as u32;
/// Pieces of a part that is not large, and the unit of which their bytes are a multiple.
const FEW_PIECES: usize = 128;
const STEP: usize = 1024;
/// The most bytes of a piece of such a part, and the bytes of a piece of a larger one. `MOST` is
/// for ranks that send different bytes to each peer: the bytes of a piece, and the least bytes in
/// all for which it applies. A piece costs one fence before its flag.
const FEW_BYTES: usize = 2 * COLLECTIVE_PIECE as usize;
const MORE_BYTES: usize = 4 * COLLECTIVE_PIECE as usize;
const MOST: (usize, usize) = (8 * COLLECTIVE_PIECE as usize, 40 << 20);

/// Returns the largest part that any rank sends to another, in rows, of a launch with `m` rows.
fn largest_part(desc: &CollectiveDesc, m: usize, size: usize) -> Result<usize> {
    let rows = match &desc.kind {
        CollectiveKind::AllToAll(splits) => splits.iter().flatten().copied().max(),
        _ => shard_rows(desc, m, size)?.into_iter().max(),
    };
    Ok(rows.unwrap_or(0))
}

/// Returns the bytes behind a flag, of parts of at most `part` bytes for each of `peers`. Equal on
/// all ranks. Where they are added, a piece is a whole number of slices.
fn piece_bytes(kind: &CollectiveKind, part: usize, peers: usize) -> usize {
    let few = part.div_ceil(FEW_PIECES).next_multiple_of(STEP).max(2 * STEP);
    let scatters = matches!(kind, CollectiveKind::ReduceScatter(..) | CollectiveKind::AllToAll(_));
    match few {
        few if few <= FEW_BYTES => few,
        _ if scatters && part * peers >= MOST.1 => MOST.0,
        _ => MORE_BYTES,
    }
}

/// Returns the bytes of a piece that are added at a time.
fn slice_bytes(piece: usize) -> usize {
    (piece / 2).min(COLLECTIVE_PIECE as usize)
}

/// Returns the number of flags of parts of at most `part` bytes: one for each slice.
fn pieces(part: usize) -> usize {
    (2 * FEW_PIECES).max(part.div_ceil(COLLECTIVE_PIECE as usize))
}

/// Returns the most rows that a launch of all-reduce sends whole: 0 where this kernel never does
/// so.
pub(crate) fn most_whole_rows(desc: &CollectiveDesc, size: usize) -> usize {
    let row = desc.cols * desc.dtype.size();
    let fits = is_whole(row) && (2..=COLLECTIVE_RANKS).contains(&size);
    if fits { whole_rows(row, size).min(desc.m) } else { 0 }
}

/// Returns whether bulk copies can move rows of `row` bytes.
fn is_whole(row: usize) -> bool {
    row > 0 && row.is_multiple_of(16)
}

/// Returns the bytes of a rank's flags.
pub(crate) fn flag_bytes(desc: &CollectiveDesc, size: usize) -> usize {
    let shards = match &desc.kind {
        CollectiveKind::AllGather(s) | CollectiveKind::ReduceScatter(s, _) => {
            s.max_rows(desc.m, size)
        }
        // A part, or the vector if it is sent whole.
        CollectiveKind::AllReduce(_) => desc.m.div_ceil(size).max(most_whole_rows(desc, size)),
        CollectiveKind::AllToAll(splits) => splits.iter().flatten().copied().max().unwrap_or(0),
    };
    let part = shards * desc.cols * desc.dtype.size();
    8 * size * (1 + 2 * pieces(part))
}

/// Returns whether devices and rows allow one kernel. The answer is equal on all ranks whose
/// devices are of one kind.
pub(crate) fn is_possible(desc: &CollectiveDesc, lane: &Lane, size: usize) -> Result<bool> {
    let (ctx, row) = (lane.context(), desc.cols * desc.dtype.size());
    let fits = ctx.max_shared_bytes()? >= SHARED_BYTES + STATIC_BYTES;
    Ok(fits
        && lane.here().heap().reaches_peers()
        && is_whole(row)
        && (2..=COLLECTIVE_RANKS).contains(&size)
        && COLLECTIVE.runs_on(&ctx.arch()?))
}

/// The kernels, flags and workspace that `prepare` makes.
pub(super) struct Meeting {
    kernel: Kernel,
    leave: Kernel,
    team: TwTeam,
    flags: [u64; COLLECTIVE_RANKS],
    pieces: u32,
    /// Launches so far u64, then four counters u32.
    state: CudaMemory,
    num_sms: u32,
}

impl Meeting {
    /// Collective only in that no peer may launch before all ranks have reached this point.
    pub fn new(
        lane: &Lane,
        stream: &Stream,
        desc: &CollectiveDesc,
        (flags, len): (&SymBuf, usize),
    ) -> Result<Self> {
        let (ctx, here) = (lane.context(), lane.here());
        let (team, size) = (lane.team()?, here.heap().team().size());
        // Without sums the type of elements is any.
        let out = if desc.kind.reduces() { desc.dtype } else { DType::F32 };
        let module = load(ctx, &COLLECTIVE, collective_defines(mantissa(out)))?;
        let kernel = module.kernel(COLLECTIVE.kernels[0])?;
        kernel.allow_shared(SHARED_BYTES)?;
        let mut at = [0; COLLECTIVE_RANKS];
        for r in Rank::all(size) {
            at[r.idx()] = team.addr(r, flags.range(0, len), len)?;
        }
        // Clears the flags: no launch has written one yet, but the memory may have been used
        // before.
        let main = stream.cuda()?;
        here.clear(main, flags.range(0, len), len)?;
        main.synchronize_until(None)?;
        Ok(Self {
            kernel,
            leave: module.kernel(COLLECTIVE.kernels[1])?,
            team: team.param(),
            flags: at,
            pieces: ((len / 8 / size - 1) / 2) as u32,
            state: workspace(ctx, 8 + 16)?,
            num_sms: here.num_sms()?,
        })
    }

    fn param(&self, base: &Base) -> TwCollective {
        let mut p: TwCollective = Zeroable::zeroed();
        (p.flags, p.pieces) = (self.flags, self.pieces);
        (p.epoch, p.ticket) = (self.state.addr(), self.state.addr() + 8);
        const { assert!(DATA == CREDIT + 1, "the kernel takes the one for the slot behind the other") };
        p.slot = base.signals.slot(CREDIT).index() as u32;
        p
    }

    fn hold(&self, l: &Lanes<'_>) {
        l.main.hold(|| Arc::new((self.state.clone(), l.here.heap().clone())));
    }

    /// Queues the grant behind a launch that went another way: it has read its staging.
    pub fn leave(&self, l: &Lanes<'_>, base: &Base) -> Result<()> {
        self.hold(l);
        let param = self.param(base);
        let args = LaunchArgs::new().arg(&self.team).arg(&param);
        // SAFETY: the kernel takes (TwTeam, TwCollective), as `abi` declares them; the memory that
        // they point to is held.
        unsafe { self.leave.launch(l.main, Grid::new(1, 64), args) }
    }

    /// Returns the number of blocks: as many as have work, within the caller's or the default
    /// budget.
    fn blocks(&self, p: &TwCollective, size: usize, large: bool, asked: Option<u32>) -> u32 {
        let ours = if large && p.sums > 0 && p.takes > 0 { NUM_SMS_OF_SUMS } else { NUM_SMS };
        let most = asked.unwrap_or(ours);
        let peers = size as u32 - 1;
        let sends = p.sends * if p.same == 1 { 1 } else { peers };
        let rest = COLLECTIVE_WARPS as u32 - COLLECTIVE_SEND as u32;
        let takes = (p.sums + p.takes * peers).div_ceil(rest);
        sends.div_ceil(COLLECTIVE_SEND as u32).max(takes).clamp(1, most.min(self.num_sms))
    }

    fn go(&self, main: &CudaStream, blocks: u32, args: LaunchArgs<'_>) -> Result<()> {
        let grid = Grid::new(blocks, THREADS).shared(SHARED_BYTES);
        // SAFETY: the kernel takes (TwTeam, TwCollective, TwTotal, TwPoison), as `abi`
        // declares them; the ranges are those of a checked launch, held by it.
        unsafe { self.kernel.launch(main, grid, args) }
    }
}

/// One launch.
pub(super) struct Run<'a> {
    pub l: &'a Lanes<'a>,
    pub base: &'a Base,
    pub meeting: &'a Meeting,
    /// Bytes of a row.
    pub row: usize,
    /// All rows to all ranks.
    pub whole: bool,
}

impl Run<'_> {
    fn staged(&self, r: Rank, area: &SymBuf, row: usize, rows: usize) -> Result<u64> {
        let len = rows * self.row;
        self.l.team()?.addr(r, area.range(row * self.row, len), len)
    }

    fn count_put(&self, dst: Rank, rows: usize) {
        if rows > 0 {
            self.l.here.count_put(dst, rows * self.row);
        }
    }

    /// Fills in the parts of `from` that are sent to the ranks' first areas.
    fn sends(&self, p: &mut TwCollective, phase: &Phase, from: &CudaMemory) -> Result<()> {
        for s in &phase.sends {
            p.send[s.dst.idx()] = TwPart {
                src: from.addr() + (s.rows.start * self.row) as u64,
                dst: self.staged(s.dst, &self.base.staging, s.at, s.rows.len())?,
                len: (s.rows.len() * self.row) as u64,
            };
            self.count_put(s.dst, s.rows.len());
        }
        Ok(())
    }

    /// Returns the copies to the output of the rows that arrive in `area`.
    fn takes(
        &self,
        p: &mut TwCollective,
        phase: &Phase,
        area: &SymBuf,
        to: &CudaMemory,
    ) -> Result<()> {
        let me = self.l.here.heap().team().rank();
        for r in &phase.recvs {
            p.take[r.src.idx()] = TwPart {
                src: self.staged(me, area, r.staging.start, r.staging.len())?,
                dst: to.addr() + (r.out.start * self.row) as u64,
                len: (r.out.len() * self.row) as u64,
            };
        }
        Ok(())
    }

    /// Returns the sum of my rows: to row `at` of the output and, with `then`, to the staging of
    /// the other ranks.
    fn total(
        &self,
        phase: &Phase,
        op: ReduceOp,
        (from, to, at): (&CudaMemory, &CudaMemory, usize),
        then: Option<(&Phase, &SymBuf)>,
    ) -> Result<TwTotal> {
        let team = self.l.here.heap().team();
        let (me, size) = (team.rank(), team.size());
        let mut t: TwTotal = Zeroable::zeroed();
        t.slots = self.staged(me, &self.base.staging, 0, size * self.base.slot_rows)?;
        t.stride = (self.base.slot_rows * self.row) as u64;
        t.own = from.addr() + (phase.own.0.start * self.row) as u64;
        t.len = (phase.own.0.len() * self.row) as u64;
        t.to[me.idx()] = to.addr() + (at * self.row) as u64;
        t.scale = if op == ReduceOp::Avg { 1.0 / size as f32 } else { 1.0 };
        if let Some((second, area)) = then {
            for s in &second.sends {
                t.to[s.dst.idx()] = self.staged(s.dst, area, s.at, s.rows.len())?;
                self.count_put(s.dst, s.rows.len());
            }
        }
        Ok(t)
    }

    /// Returns the parameters by which all rows of `from` are sent to a slot of every rank, this
    /// one too, and their sum is stored at `to`.
    fn sends_whole(
        &self,
        p: &mut TwCollective,
        (m, op): (usize, ReduceOp),
        (from, to): (&CudaMemory, &CudaMemory),
    ) -> Result<TwTotal> {
        let team = self.l.here.heap().team();
        let (me, size, len) = (team.rank(), team.size(), (m * self.row) as u64);
        for r in Rank::all(size) {
            let dst = self.staged(r, &self.base.staging, me.idx() * m, m)?;
            p.send[r.idx()] = TwPart { src: from.addr(), dst, len };
            if r != me {
                self.count_put(r, m);
            }
        }
        p.same = 1;
        let mut t: TwTotal = Zeroable::zeroed();
        (t.slots, t.stride) = (self.staged(me, &self.base.staging, 0, size * m)?, len);
        (t.own, t.len, t.to[me.idx()]) = (from.addr(), len, to.addr());
        t.scale = if op == ReduceOp::Avg { 1.0 / size as f32 } else { 1.0 };
        Ok(t)
    }

    pub fn launch(
        &self,
        m: usize,
        (first, second): (&Phase, Option<&Phase>),
        (from, to): (&CudaMemory, &CudaMemory),
    ) -> Result<()> {
        let (base, l) = (self.base, self.l);
        base.core.check()?;
        self.meeting.hold(l);
        l.main.hold(|| Arc::new((from.clone(), to.clone())));
        let size = l.here.heap().team().size();
        let mut p = self.meeting.param(base);
        let mut t: TwTotal = Zeroable::zeroed();
        if !self.whole {
            self.sends(&mut p, first, from)?;
        }
        match &base.desc.kind {
            CollectiveKind::AllReduce(op) if self.whole => {
                t = self.sends_whole(&mut p, (m, *op), (from, to))?;
            }
            CollectiveKind::AllGather(_) | CollectiveKind::AllToAll(_) => {
                p.send[l.here.heap().team().rank().idx()] = TwPart {
                    src: from.addr() + (first.own.0.start * self.row) as u64,
                    dst: to.addr() + (first.own.1.start * self.row) as u64,
                    len: (first.own.0.len() * self.row) as u64,
                };
                p.same = u32::from(matches!(base.desc.kind, CollectiveKind::AllGather(_)));
                self.takes(&mut p, first, &base.staging, to)?;
            }
            CollectiveKind::ReduceScatter(_, op) => {
                t = self.total(first, *op, (from, to, 0), None)?;
            }
            CollectiveKind::AllReduce(op) => {
                let (Some(second), Some(area)) = (second, &base.staging2) else {
                    return Err(Error::internal("an all-reduce lacks its second phase"));
                };
                let at = second.own.1.start;
                t = self.total(first, *op, (from, to, at), Some((second, area)))?;
                self.takes(&mut p, second, area, to)?;
            }
        }
        let rows = if self.whole { m } else { largest_part(&base.desc, m, size)? };
        let part = rows * self.row;
        let piece = piece_bytes(&base.desc.kind, part, size - 1);
        cut(&mut p, &t, piece);
        if p.takes.max(p.sums).max(p.sends) > p.pieces {
            return Err(Error::internal("a launch has more pieces than flags"));
        }
        let large = m * self.row > LARGE_BYTES;
        let phases = 1 + u32::from(second.is_some() && !self.whole);
        for peer in base.core.team().peers() {
            (0..=phases).for_each(|_| l.here.count_signal(peer));
        }
        let poison = poison_of(&[Poison::value(to.clone())]);
        let args = LaunchArgs::new().arg(&self.meeting.team).arg(&p).arg(&t).arg(&poison);
        let blocks = self.meeting.blocks(&p, size, large, base.num_sms);
        self.meeting.go(l.main, blocks, args)
    }
}

/// Cuts the parts of `t` and `p` into pieces of `piece` bytes, and divides the warps between their
/// uses.
fn cut(p: &mut TwCollective, t: &TwTotal, piece: usize) {
    let slice = slice_bytes(piece);
    (p.piece, p.slice) = (piece as u32, slice as u32);
    let most = |parts: &[TwPart], bytes: usize| {
        parts.iter().map(|s| (s.len as usize).div_ceil(bytes) as u32).max().unwrap_or(0)
    };
    p.sends = most(&p.send, piece);
    p.sums = (t.len as usize).div_ceil(slice) as u32;
    p.takes = most(&p.take, if t.len > 0 { slice } else { piece });
    // Where sums are sent on, some warps copy them out from the beginning.
    let warps = COLLECTIVE_WARPS as u32;
    p.summers = match (p.sums, p.takes) {
        (0, _) => 0,
        (_, 0) => warps,
        _ => warps - warps / 4,
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Shards;

    /// Every piece is whole slices, which a warp can stage, and has a flag.
    #[test]
    fn pieces_are_whole_slices_with_flags() {
        let kinds = [
            CollectiveKind::AllGather(Shards::Even),
            CollectiveKind::ReduceScatter(Shards::Even, ReduceOp::Sum),
            CollectiveKind::AllReduce(ReduceOp::Sum),
        ];
        for kind in kinds {
            for part in (0..34).map(|e| (1usize << e) + 48) {
                for peers in [1, 3, 7] {
                    let piece = piece_bytes(&kind, part, peers);
                    let slice = slice_bytes(piece);
                    assert!(piece.is_multiple_of(slice) && slice.is_multiple_of(512), "{part}");
                    assert!(slice <= COLLECTIVE_PIECE as usize, "{part}: space for a sum");
                    assert!(part.div_ceil(slice) <= pieces(part), "{part}: a flag for each");
                }
            }
        }
    }
}
