//! The kernels of a phase, and the code that queues them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::Zeroable;
use tilewire_core::{DType, Error, Result};
use tilewire_device::cuda::{CudaContext, CudaMemory, CudaStream, Grid, Kernel, LaunchArgs};
use tilewire_device::{Stream, Tensor};
use tilewire_kernels::abi::{TwEp, TwHandle, TwMeet, TwPush, TwRecv, TwReturn, TwRouting, TwTeam};
use tilewire_kernels::portable::{
    EP, EP_BULK, EP_BULK_LAY, EP_BULK_PIECE, EP_BULK_PIECES, EP_BULK_PUSH, EP_BULK_ZERO, EP_MOVERS,
    EP_RETURN, EP_RETURN_ENTRIES, EP_RETURN_PUSH, EP_RETURN_SLICE, EP_RETURN_STAGES, EP_RETURN_SUM,
    EP_RETURN_TOKENS, EP_THREADS, EP_UNEVEN, ep_bulk_defines, ep_defines, ep_return_defines,
};
use tilewire_symm::{BadInput, Signals, SymBuf};

use super::areas::router;
use super::nccl::{Staging, What};
use crate::common::cuda::{addr, fit_32_bits, hold, load, mantissa, together_on, workspace};
use crate::common::lanes::{Lane, Lanes, Poison, Slots, poison_of};
use crate::common::{LaunchAt, Named, PlanCore};
use crate::ep::launch::{Areas, COUNTS, Push, RETURNS, Return, TOKENS};
use crate::ep::schedule::{Cut, Schedule};
use crate::ep::{EpDesc, EpDispatch, EpHandle, EpLayout};

const THREADS: u32 = EP_THREADS as u32;
const MOVERS: u32 = EP_MOVERS as u32;
/// Multiprocessors that a phase takes by default.
pub(crate) const NUM_SMS: usize = 32;
/// The most blocks of a routing, and choices that are worth one.
const ROUTERS: usize = 16;
const ROUTER_CHOICES: usize = 2048;
/// Threads of a block of the portable combine.
const RETURN_THREADS: u32 = MOVERS / 2;

/// Areas that count their launches.
#[derive(Clone, Copy)]
enum Area {
    Counts,
    Tokens,
    Returns,
}

/// Returns this rank's part of `buf`.
///
/// # Errors
/// The errors of the heap.
pub(crate) fn whole(lane: &Lane, buf: &SymBuf) -> Result<CudaMemory> {
    let len = buf.len_bytes();
    let addr = lane.here().addr(buf.range(0, len), len)?;
    // SAFETY: the chunk of this rank is mapped as long as the heap lives, which the buffer keeps.
    Ok(unsafe { CudaMemory::lent(lane.context(), addr, len, Arc::new(buf.clone())) })
}

/// The kernels and parameters that `prepare` makes.
pub(crate) struct Prepared {
    kernels: Vec<(&'static str, Kernel)>,
    team: TwTeam,
    layer: TwEp,
    cuts: [Cut; 2],
    /// Address of rank 0's flags.
    flags: u64,
    flags_of_area: u64,
    blocks: CudaMemory,
    /// Launches of each area u64, then four counters u32 of each.
    state: CudaMemory,
    /// `[ranks + 1]` u32; the layer has its address.
    first: CudaMemory,
    /// `[ranks]` u64, if their memory is not in even steps; the layer has its address.
    steps: Option<CudaMemory>,
    /// Record of each received row of the flat layout.
    row_source: CudaMemory,
    /// Through NCCL.
    staging: Option<Staging>,
    /// The number of the last routing.
    routed: AtomicU64,
    /// Of the device, for this rank.
    pub num_sms: u32,
}

impl Prepared {
    /// Collective only in that no peer may launch before all ranks have reached this point.
    pub fn new(
        lane: &Lane,
        stream: &Stream,
        (d, nccl): (&EpDesc, bool),
        areas: &Areas<'_>,
    ) -> Result<Self> {
        let (ctx, here) = (lane.context(), lane.here());
        let size = d.experts_per_rank.len();
        let choices = size * d.max_tokens * d.top_k;
        fit_32_bits("an expert-parallel layer", &[choices, d.capacity, d.num_experts()])?;
        let first: Vec<u32> = (0..=size).map(|r| d.first_expert(r) as u32).collect();
        let first = CudaMemory::from_bytes(ctx, bytemuck::cast_slice(&first))?;
        let at = areas.steps(lane, nccl)?;
        let table = |t: &Vec<u64>| CudaMemory::from_bytes(ctx, bytemuck::cast_slice(t));
        let steps = at.table.as_ref().map(table).transpose()?;
        let layer = areas.layer(lane, d, &at, (&first, steps.as_ref()))?;
        let load = |ctx: &CudaContext, source, mut defines: Vec<(String, u64)>| {
            defines.extend(steps.iter().map(|_| (EP_UNEVEN.to_owned(), 1)));
            load(ctx, source, defines)
        };
        let mut kernels = Vec::new();
        let module = load(ctx, &EP, ep_defines(mantissa(d.out)))?;
        for k in EP.kernels {
            kernels.push((*k, module.kernel(k)?));
        }
        let fits = ctx.max_shared_bytes()? >= BULK_BYTES.max(RETURN_BYTES) + STATIC_BYTES;
        if EP_BULK.runs_on(&ctx.arch()?) && fits {
            let kernel = load(ctx, &EP_BULK, ep_bulk_defines())?.kernel(EP_BULK.kernels[0])?;
            kernel.allow_shared(BULK_BYTES)?;
            kernels.push((EP_BULK.kernels[0], kernel));
            let back = load(ctx, &EP_RETURN, ep_return_defines(mantissa(d.out)))?;
            let back = back.kernel(EP_RETURN.kernels[0])?;
            back.allow_shared(RETURN_BYTES)?;
            kernels.push((EP_RETURN.kernels[0], back));
        }
        areas.clear(lane, stream.cuda()?, d)?;
        let s = Schedule::new(d);
        let new = Self {
            kernels,
            team: here.team_param(),
            layer,
            cuts: [Cut::push(d), Cut::returns(d)],
            flags: Areas::first_addr(lane, &at, areas.flags, (0, s.flags_len()))?,
            flags_of_area: s.flags_of_area() as u64,
            blocks: workspace(ctx, 4 * ROUTERS * d.num_experts())?,
            state: workspace(ctx, 3 * (8 + 16))?,
            first,
            steps,
            row_source: workspace(ctx, 4 * d.recv_rows())?,
            staging: nccl.then(|| Staging::new(ctx, d)).transpose()?,
            routed: AtomicU64::new(0),
            num_sms: here.num_sms()?,
        };
        new.kernel("tw_ep_route")?.allow_shared(router(d)?.1)?;
        Ok(new)
    }

    /// Collective, behind the agreement: NCCL, if rows go through it.
    pub fn connect(&self, core: &PlanCore, stream: &Stream, d: &EpDesc) -> Result<()> {
        let Some(s) = &self.staging else { return Ok(()) };
        s.connect(core, stream, d, &self.layer)
    }

    pub fn explain(&self) -> Option<&str> {
        self.staging.as_ref().and_then(Staging::explain)
    }

    fn has(&self, name: &str) -> bool {
        self.kernels.iter().any(|(n, _)| *n == name)
    }

    fn kernel(&self, name: &str) -> Result<&Kernel> {
        let found = self.kernels.iter().find(|(n, _)| *n == name).map(|(_, k)| k);
        found.ok_or_else(|| Error::internal(format!("the plan has no kernel {name}")))
    }

    /// Returns how a launch of `area` meets.
    fn meet(&self, signals: &Signals, area: Area, senders: u32) -> TwMeet {
        let (slot, at) = match area {
            Area::Counts => (COUNTS.1, 0),
            Area::Tokens => (TOKENS.0, 0),
            Area::Returns => (RETURNS.0, self.flags_of_area),
        };
        let Cut { chunk, slices, chunks } = self.cuts[usize::from(matches!(area, Area::Returns))];
        let (flags, stride) = match &self.staging {
            Some(s) => (s.flags(), 0),
            None => (self.flags, self.layer.stride),
        };
        TwMeet {
            flags: flags + at,
            stride,
            epoch: self.state.addr() + 8 * area as u64,
            ticket: self.state.addr() + 24 + 16 * area as u64,
            slot: signals.slot(slot).index() as u32,
            chunk: chunk as u32,
            slices: slices as u32,
            chunks: chunks as u32,
            senders,
            leave: 1,
        }
    }
}

/// Upper bound of the static shared memory of the kernels by bulk copies.
const STATIC_BYTES: u32 = 1024;

/// Shared memory of `tw_ep_push_bulk`.
const BULK_BYTES: u32 =
    ((EP_BULK_PUSH + EP_BULK_LAY) * EP_BULK_PIECES * EP_BULK_PIECE + EP_BULK_ZERO) as u32;
/// Threads; one warp fills rows that no token fills.
const BULK_THREADS: u32 = 32 * (EP_BULK_PUSH + EP_BULK_LAY + 1) as u32;

/// Shared memory of `tw_ep_return_bulk`: slices, and a list of rows for each warp.
const RETURN_BYTES: u32 = ((EP_RETURN_PUSH + EP_RETURN_SUM)
    * ((EP_RETURN_STAGES + 1) * EP_RETURN_SLICE + EP_RETURN_TOKENS * (4 + 8 * EP_RETURN_ENTRIES)))
    as u32;
const RETURN_BULK_THREADS: u32 = 32 * (EP_RETURN_PUSH + EP_RETURN_SUM) as u32;

/// The part of a phase that a kernel carries out; numbers as `part` of `TwRouting`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Half {
    Whole = 0,
    First = 1,
    Second = 2,
}

impl Half {
    /// Returns how many of `blocks` send: `some` where the phase also receives.
    fn senders(self, blocks: u32, some: u32) -> u32 {
        match self {
            Half::Whole => some,
            Half::First => blocks,
            Half::Second => 0,
        }
    }
}

/// The end of the kernel that exchanges records, and the beginning that it may take.
#[derive(Clone, Copy)]
struct Ends<'a> {
    /// The kernel leaves the area, and poisons the outputs after a fault; otherwise a kernel behind
    /// it does.
    leave: bool,
    /// The kernel may begin before the kernel in front of it has ended.
    early: bool,
    outs: &'a [Poison],
}

/// One launch of one phase.
pub(crate) struct Phase<'a> {
    pub core: &'a PlanCore,
    pub lane: &'a Lane,
    pub desc: &'a EpDesc,
    pub signals: &'a Signals,
    pub p: &'a Prepared,
    pub handle: &'a EpHandle,
    /// Multiprocessors to take.
    pub sms: u32,
}

impl Phase<'_> {
    /// Fails unless all tensors are on the device of `stream`.
    pub fn together(&self, stream: &Stream, tensors: &[Named<'_>]) -> Result<()> {
        together_on(stream, tensors)
    }

    fn handle(&self) -> Result<TwHandle> {
        let h = self.handle.device().ok_or_else(|| {
            Error::invalid("the handle was made on another device").hint("make it with this plan")
        })?;
        Ok(TwHandle {
            rows: h.rows.addr(),
            ranks: h.ranks.addr(),
            num: h.num.addr(),
            copies: h.copies.addr(),
            source: h.source.addr(),
            place: h.place.addr(),
            counts: h.counts.addr(),
            m_splits: addr(self.handle.m_splits())?,
            total: addr(self.handle.total())?,
            dropped: addr(self.handle.dropped())?,
            lost: h.lost.addr(),
        })
    }

    /// Queues a kernel of the unit with `blocks` blocks; nothing for 0.
    fn go(&self, main: &CudaStream, name: &str, blocks: usize, args: LaunchArgs<'_>) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
        self.go_in(main, name, Grid::new(blocks as u32, THREADS), args)
    }

    fn go_in(&self, main: &CudaStream, name: &str, grid: Grid, args: LaunchArgs<'_>) -> Result<()> {
        // SAFETY: every call site passes the parameters of the kernel (`ep/sm80_ep.cu`); tensors
        // were checked against the layer and are held, as are the handle and the plan's memory.
        unsafe { self.p.kernel(name)?.launch(main, grid, args) }
    }

    /// Queues a launch. Its kernels meet the other ranks; through NCCL the launch meets them first,
    /// by the signal `credit`.
    fn run(
        &self,
        at: LaunchAt<'_>,
        credit: usize,
        outs: &[Poison],
        f: impl FnOnce(&Lanes<'_>) -> Result<()>,
    ) -> Result<()> {
        let queue = |l: &Lanes<'_>| {
            self.core.check()?;
            hold(l.main, (self.handle.clone(), l.here.heap().clone()));
            hold(l.main, outs.iter().map(|o| o.0.clone()).collect::<Vec<_>>());
            let p = self.p;
            let memory = [&p.blocks, &p.state, &p.first, &p.row_source].map(Clone::clone);
            hold(l.main, (memory, p.steps.clone()));
            f(l)
        };
        if self.p.staging.is_some() {
            let enter = Slots { signals: self.signals, credit, flags: credit..credit };
            return self.core.run_on(self.lane, at, &enter, outs, queue);
        }
        self.core.run_alone(self.lane, at, outs, |l| {
            for peer in self.core.team().peers() {
                l.here.count_signal(peer);
            }
            queue(l)
        })
    }

    /// Queues the kernels of a phase by `go`, each with the layer that it sees and its half of the
    /// phase. Through NCCL there are two, with the exchange of blocks between them: the first
    /// writes to blocks of this rank, the second receives.
    fn halves(
        &self,
        l: &Lanes<'_>,
        (layer, what): (&TwEp, What),
        go: impl Fn(&TwEp, Half) -> Result<()>,
    ) -> Result<()> {
        let Some(s) = &self.p.staging else { return go(layer, Half::Whole) };
        go(&s.writer(self.desc, layer, what), Half::First)?;
        s.exchange(l.main, self.core, self.desc, (layer, what))?;
        go(layer, Half::Second)
    }

    /// Queues the routing of `idx` for `capacity` rows.
    pub fn route(&self, at: LaunchAt<'_>, idx: &Tensor, capacity: usize) -> Result<()> {
        let (p, h) = (self.p, self.handle()?);
        let choices = idx.shape().num_elems();
        let blocks = choices.div_ceil(ROUTER_CHOICES).clamp(1, ROUTERS.min(self.sms as usize));
        let (threads, shared) = router(self.desc)?;
        let warps = blocks * threads as usize / 32;
        let layer = TwEp { capacity: capacity as u32, ..p.layer };
        let a = TwRouting {
            idx: addr(idx)?,
            blocks: p.blocks.addr(),
            choices: choices as u32,
            wide: u32::from(idx.dtype() == DType::I64),
            span: choices.div_ceil(warps).next_multiple_of(32) as u32,
            bad_input: BadInput::Expert as u32,
            part: 0,
            pad: 0,
        };
        let zero = |t: &Tensor| Ok::<_, Error>(Poison(t.cuda()?, 0));
        let outs = [
            Poison::value(self.handle.row_index().cuda()?),
            zero(self.handle.m_splits())?,
            zero(self.handle.total())?,
            zero(self.handle.dropped())?,
        ];
        let meet = p.meet(self.signals, Area::Counts, 0);
        p.routed.store(at.seq, Ordering::Relaxed);
        self.run(at, COUNTS.0, &outs, |l| {
            hold(l.main, idx.clone());
            let poison = poison_of(&outs);
            self.halves(l, (&layer, What::Counts), |layer, half| {
                let a = TwRouting { part: half as u32, ..a };
                let args = LaunchArgs::new().arg(&p.team).arg(layer).arg(&meet).arg(&a).arg(&h);
                let grid = Grid::new(blocks as u32, threads).shared(shared);
                self.go_in(l.main, "tw_ep_route", grid, args.arg(&poison))
            })
        })
    }

    /// Queues the push of my tokens' records to their ranks, and the receipt of records into the
    /// handle and `recv`.
    fn exchange(
        &self,
        l: &Lanes<'_>,
        given: &Push,
        recv: &TwRecv,
        Ends { leave, early, outs }: Ends<'_>,
    ) -> Result<()> {
        let p = self.p;
        let send = TwPush {
            x: addr(&given.x)?,
            weights: addr(given.weights.as_ref())?,
            scales: addr(given.scales.as_ref())?,
            row_bytes: (self.desc.hidden * given.x.dtype().size()) as u64,
            tokens: given.x.shape().dim(0) as u32,
            pad: 0,
        };
        hold(l.main, given.clone());
        let poison = poison_of(if leave { outs } else { &[] });
        let whole = (send.x | send.row_bytes | recv.x).is_multiple_of(16) && self.desc.hidden > 0;
        let bulk = whole && p.staging.is_none() && p.has(EP_BULK.kernels[0]);
        let blocks = self.sms.max(2);
        let (name, grid) = match bulk {
            true => {
                let grid = Grid::new(self.sms, BULK_THREADS).shared(BULK_BYTES);
                (EP_BULK.kernels[0], Grid { early, ..grid })
            }
            false => ("tw_ep_push", Grid::new(blocks, MOVERS / 2)),
        };
        let h = self.handle()?;
        self.halves(l, (&p.layer, What::Tokens), |layer, half| {
            // Of the portable kernel: the other blocks lay out.
            let senders = half.senders(blocks, (self.sms / 3).max(1));
            let leave = u32::from(leave && half != Half::First);
            let meet = TwMeet { leave, ..p.meet(self.signals, Area::Tokens, senders) };
            let args = LaunchArgs::new().arg(&p.team).arg(layer).arg(&meet).arg(&h);
            self.go_in(l.main, name, grid, args.arg(&send).arg(recv).arg(&poison))
        })
    }

    /// Grants the area of tokens, behind the kernels that read its rows after the phase.
    fn leave(&self, l: &Lanes<'_>, outs: &[Poison]) -> Result<()> {
        let meet = self.p.meet(self.signals, Area::Tokens, 0);
        let args = LaunchArgs::new().arg(&self.p.team).arg(&self.p.layer).arg(&meet);
        self.go(l.main, "tw_ep_leave", 1, args)?;
        let outs: Vec<_> = outs.iter().map(|o| (o.0.clone(), o.1)).collect();
        l.here.poison_if_over(l.main, &outs)
    }

    pub fn dispatch(
        &self,
        at: LaunchAt<'_>,
        send: &Push,
        out: &EpDispatch,
        buffer: u32,
    ) -> Result<()> {
        let d = self.desc;
        let all = [Some(&out.x), out.weights.as_ref(), out.scales.as_ref()];
        let all = all.into_iter().flatten().chain([self.handle.row_index()]);
        let outs = all.map(|t| t.cuda().map(Poison::value)).collect::<Result<Vec<_>>>()?;
        // The place of a flat row is the number of rows before it, which is known when all have
        // arrived.
        let flat = matches!(d.layout, EpLayout::Flat { .. });
        let row_bytes = (d.hidden * d.dtype.size()) as u64;
        let mut recv = TwRecv {
            x: 0,
            weights: addr(out.weights.as_ref())?,
            scales: 0,
            index: 0,
            row_bytes,
            buffer,
            bad_input: BadInput::Buffer as u32,
            rank_major: u32::from(self.rank_major()),
            pad: 0,
        };
        if !flat {
            recv.x = addr(&out.x)?;
            recv.scales = addr(out.scales.as_ref())?;
            recv.index = addr(self.handle.row_index())?;
        }
        // A routing has passed its last wait when it lets the next kernel begin. Other kernels
        // before this one may wait for a peer.
        let early = self.p.routed.load(Ordering::Relaxed).checked_add(1) == Some(at.seq);
        self.run(at, TOKENS.0, &outs, |l| {
            self.exchange(l, send, &recv, Ends { leave: !flat, early, outs: &outs })?;
            if !flat {
                return Ok(());
            }
            self.spread(l, out)?;
            self.leave(l, &outs)
        })
    }

    fn rank_major(&self) -> bool {
        matches!(self.desc.layout, EpLayout::RankMajor { .. })
    }

    /// Queues the kernel that computes the received row of each record of the flat layout, from the
    /// numbers of received copies.
    fn flat_places(&self, l: &Lanes<'_>) -> Result<()> {
        let (layer, h, rows) = (&self.p.layer, self.handle()?, self.p.row_source.addr());
        l.main.fill_memory(&self.p.row_source, 0xff)?;
        self.go(l.main, "tw_ep_flat", 1, LaunchArgs::new().arg(layer).arg(&h).arg(&rows))
    }

    /// Queues the move of flat rows from the area of tokens to the outputs.
    fn spread(&self, l: &Lanes<'_>, out: &EpDispatch) -> Result<()> {
        let (d, layer, h) = (self.desc, &self.p.layer, self.handle()?);
        let rows = self.p.row_source.addr();
        self.flat_places(l)?;
        let index = addr(self.handle.row_index())?;
        let args = LaunchArgs::new().arg(layer).arg(&h).arg(&h.place).arg(&index);
        self.go(l.main, "tw_ep_row_index", d.capacity.div_ceil(THREADS as usize), args)?;
        let (to, scales) = (addr(&out.x)?, addr(out.scales.as_ref())?);
        let row = (d.hidden * d.dtype.size()) as u64;
        let args = LaunchArgs::new().arg(layer).arg(&rows).arg(&to).arg(&row).arg(&scales);
        self.go(l.main, "tw_ep_gather", d.recv_rows(), args)
    }

    pub fn combine_bwd(
        &self,
        at: LaunchAt<'_>,
        send: &Push,
        weighted: Option<(&Tensor, &Tensor, &Tensor)>,
        (dy, buffer): (&Tensor, u32),
    ) -> Result<()> {
        let d = self.desc;
        let all = [Some(dy), weighted.map(|w| w.2)];
        let outs = all.into_iter().flatten().map(|t| t.cuda().map(Poison::value));
        let outs = outs.collect::<Result<Vec<_>>>()?;
        if weighted.is_none() && matches!(d.layout, EpLayout::ExpertMajor { .. }) {
            // The received rows are the gradient: a dispatch.
            let recv = TwRecv {
                x: addr(dy)?,
                row_bytes: (d.hidden * d.out.size()) as u64,
                buffer,
                bad_input: BadInput::Buffer as u32,
                ..Zeroable::zeroed()
            };
            let ends = Ends { leave: true, early: false, outs: &outs };
            return self.run(at, TOKENS.0, &outs, |l| self.exchange(l, send, &recv, ends));
        }
        // Which received row answers which record is known to a dispatch, and to this phase.
        let recv = TwRecv { rank_major: u32::from(self.rank_major()), ..Zeroable::zeroed() };
        self.run(at, TOKENS.0, &outs, |l| {
            self.exchange(l, send, &recv, Ends { leave: false, early: false, outs: &outs })?;
            if let EpLayout::Flat { .. } = d.layout {
                self.flat_places(l)?;
            }
            let (layer, h, hidden) = (&self.p.layer, self.handle()?, d.hidden as u32);
            let of = |f: fn((&Tensor, &Tensor, &Tensor)) -> Result<u64>| weighted.map_or(Ok(0), f);
            let (w, y, g) = (of(|t| addr(t.0))?, of(|t| addr(t.1))?, of(|t| addr(t.2))?);
            let to = addr(dy)?;
            hold(l.main, weighted.map(|(w, y, _)| (w.clone(), y.clone())));
            let args = LaunchArgs::new().arg(layer).arg(&h).arg(&to).arg(&w).arg(&y);
            self.go(l.main, "tw_ep_gather_bwd", d.capacity, args.arg(&g).arg(&hidden))?;
            self.leave(l, &outs)
        })
    }

    /// Queues a combine or a backward of dispatch.
    pub fn return_rows(&self, at: LaunchAt<'_>, b: &Return) -> Result<()> {
        let (d, p, h) = (self.desc, self.p, self.handle()?);
        let all = [Some(&b.out), b.dw_out.as_ref()];
        let outs = all.into_iter().flatten().map(|t| t.cuda().map(Poison::value));
        let outs = outs.collect::<Result<Vec<_>>>()?;
        let param = TwReturn {
            y: addr(&b.y)?,
            weights: addr(b.weights.as_ref())?,
            dw: addr(b.dw.as_ref())?,
            out: addr(&b.out)?,
            dw_out: addr(b.dw_out.as_ref())?,
            hidden: d.hidden as u32,
            expert_major: u32::from(b.expert_major),
            tokens: b.out.shape().dim(0) as u32,
            pad: 0,
        };
        let whole = (param.y | param.out | (d.hidden * d.out.size()) as u64).is_multiple_of(16)
            && d.hidden > 0;
        let most = EP_RETURN_ENTRIES as usize;
        let few = d.top_k <= most && d.experts_per_rank.len() <= most;
        let bulk = whole && few && p.staging.is_none() && p.has(EP_RETURN.kernels[0]);
        let blocks = self.sms.max(2);
        let (name, grid) = match bulk {
            true => (
                EP_RETURN.kernels[0],
                Grid::new(self.sms, RETURN_BULK_THREADS).shared(RETURN_BYTES),
            ),
            false => ("tw_ep_return", Grid::new(blocks, RETURN_THREADS)),
        };
        // Of the portable kernel: few chunks leave more blocks to add.
        let chunks = p.cuts[1].chunks as u32 * p.layer.size;
        let senders = (blocks * 7 / 9).min(chunks).max(1);
        self.run(at, RETURNS.0, &outs, |l| {
            hold(l.main, (b.y.clone(), b.weights.clone(), b.dw.clone()));
            let poison = poison_of(&outs);
            self.halves(l, (&p.layer, What::Returns), |layer, half| {
                let senders = half.senders(blocks, senders);
                let leave = u32::from(half != Half::First);
                let meet = TwMeet { leave, ..p.meet(self.signals, Area::Returns, senders) };
                let args = LaunchArgs::new().arg(&p.team).arg(layer).arg(&meet).arg(&h).arg(&param);
                self.go_in(l.main, name, grid, args.arg(&poison))
            })
        })
    }
}
