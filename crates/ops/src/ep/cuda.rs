//! Expert parallelism on CUDA devices, by `ep/sm80_ep.cu` and `ep/sm90_ep.cu`.
//!
//! A phase is one kernel that meets the other ranks itself: some blocks send, the others lay out what
//! comes, as it comes. What comes from token t of rank s has the place `s * max_tokens + t`, so that no
//! numbers travel. Layouts other than expert-major, and the backward of combine, leave the rows in the
//! area for kernels behind it, and `tw_ep_leave` grants the area when those have read it.

use bytemuck::Zeroable;
use tilewire_core::{DType, Error, ErrorKind, Rank, Result};
use tilewire_device::cuda::{CudaContext, CudaMemory, CudaStream, Grid, Kernel, LaunchArgs};
use tilewire_device::{Buffer, Stream, Tensor};
use tilewire_kernels::portable::{
    EP, EP_BACK, EP_BACK_ENTRIES, EP_BACK_RETURN, EP_BACK_SLICE, EP_BACK_STAGES, EP_BACK_SUM,
    EP_BACK_TOKENS, EP_BULK, EP_BULK_LAY, EP_BULK_PIECE, EP_BULK_SEND, EP_BULK_ZERO, EP_MOVERS,
    EP_THREADS, ep_back_defines, ep_bulk_defines, ep_defines,
};
use tilewire_symm::{BadInput, OneSided, Signals, SymBuf, TeamParam};

use super::params::{
    BackParam, HandleParam, LayerParam, MeetParam, PoisonParam, RecvParam, RoutingParam, SendParam,
};
use super::plan::{COUNTS, EpDispatch, RETURNS, TOKENS};
use super::{EpDesc, EpHandle, EpLayout, EpTotals};
use crate::common::cuda::{addr, fit_32_bits, hold, load, mantissa, together_on, workspace};
use crate::common::lanes::{Lane, Lanes, Poison};
use crate::common::{Named, PlanCore};

const THREADS: u32 = EP_THREADS as u32;
const MOVERS: u32 = EP_MOVERS as u32;
/// Multiprocessors that a phase takes unless it is told otherwise.
pub(super) const NUM_SMS: usize = 32;
/// The most blocks of a routing, and choices that are worth one.
const ROUTERS: usize = 16;
const ROUTER_CHOICES: usize = 2048;
/// Chunks of a rank's rows that a dispatch sends, about.
const SEND_CHUNKS: usize = 1024;
/// Pairs of chunk and rank that a combine returns, about: several for each warp.
const BACK_CHUNKS: usize = 1024;
/// Threads of a block of the combine, so that two share a multiprocessor.
const BACK_THREADS: u32 = 512;

/// How the rows of a rank are cut: a chunk of tokens arrives as a whole, and warps share its rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Cut {
    chunk: usize,
    slices: usize,
    chunks: usize,
}

impl Cut {
    fn of(d: &EpDesc, chunk: usize, slices: usize) -> Self {
        // Parts of a kilobyte or more.
        let most = (d.hidden * d.out.size() / 1024).clamp(1, 8);
        let chunks = d.max_tokens.div_ceil(chunk).max(1);
        Self { chunk, slices: slices.clamp(1, most), chunks }
    }

    /// A warp sends a chunk, and warps lay it out: few tokens go alone, and several share a row.
    fn send(d: &EpDesc) -> Self {
        let chunk = d.max_tokens.div_ceil(SEND_CHUNKS).max(1);
        let warps = 116 * EP_MOVERS as usize / 32;
        let parts = d.max_tokens.div_ceil(chunk).max(1) * d.experts_per_rank.len();
        Self::of(d, chunk, warps / parts)
    }

    /// Small chunks, so that they come back in order and are added while others travel. In the portable
    /// kernel a block returns one, and its warps share rows if there are few.
    fn back(d: &EpDesc) -> Self {
        let pairs = d.max_tokens * d.experts_per_rank.len();
        let chunk = pairs.div_ceil(BACK_CHUNKS).clamp(1, EP_BACK_TOKENS as usize);
        Self::of(d, chunk, 32usize.div_ceil(chunk))
    }
}

/// Bytes of a rank's credits and arrivals of one area.
fn flags_of_area(d: &EpDesc) -> usize {
    d.experts_per_rank.len() * (1 + Cut::send(d).chunks.max(Cut::back(d).chunks)) * 8
}

/// Bytes of a rank's flags: of tokens, and of what comes back.
pub(super) fn flag_area(d: &EpDesc) -> usize {
    2 * flags_of_area(d)
}

/// Areas that count their launches.
#[derive(Clone, Copy)]
enum Area {
    Counts,
    Tokens,
    Returns,
}

/// Bytes from record to record: copies and scales, payload, and what comes back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Strides {
    pub meta: usize,
    pub row: usize,
    pub back: usize,
}

/// Pieces of 16 bytes, so that whole rows are copied in such.
pub(super) fn strides(d: &EpDesc) -> Strides {
    let up = |bytes: usize| bytes.next_multiple_of(16);
    Strides {
        meta: up(8 + 12 * d.top_k + 4 * d.num_scales),
        row: up(d.hidden * d.dtype.size().max(d.out.size())),
        back: up(up(d.hidden * d.out.size()) + 4 * d.top_k),
    }
}

/// What a handle has in device memory.
pub(super) struct DeviceHandle {
    rows: CudaMemory,
    ranks: CudaMemory,
    num: CudaMemory,
    copies: CudaMemory,
    source: CudaMemory,
    place: CudaMemory,
    counts: CudaMemory,
    lost: CudaMemory,
}

impl DeviceHandle {
    pub fn new(ctx: &CudaContext, d: &EpDesc, me: usize) -> Result<Self> {
        let (size, choices) = (d.experts_per_rank.len(), d.max_tokens * d.top_k);
        let ints = |n: usize| workspace(ctx, 4 * n);
        Ok(Self {
            rows: ints(choices)?,
            ranks: ints(choices)?,
            num: ints(size * d.max_tokens)?,
            copies: ints(3 * size * choices)?,
            source: ints(d.capacity)?,
            place: ints(size * d.max_tokens)?,
            counts: ints(2 * d.experts_per_rank[me])?,
            lost: ints(2 * size)?,
        })
    }

    /// True numbers of the last routing that has run.
    pub fn totals(&self, total: &Tensor) -> Result<EpTotals> {
        let read = |m: &CudaMemory| -> Result<Vec<usize>> {
            let bytes = m.download()?;
            let words = bytes.chunks_exact(8).map(bytemuck::pod_read_unaligned::<i64>);
            Ok(words.map(|v| v as usize).collect())
        };
        Ok(EpTotals {
            counts: read(&self.counts)?,
            rows: total.to_vec::<i64>()?[0] as usize,
            dropped: read(&self.lost)?,
        })
    }
}

/// What `prepare` makes.
pub(super) struct Prepared {
    kernels: Vec<(&'static str, Kernel)>,
    team: TeamParam,
    layer: LayerParam,
    cuts: [Cut; 2],
    /// Address of rank 0's flags.
    flags: u64,
    flags_of_area: u64,
    blocks: CudaMemory,
    /// Launches of each area u64, then four counters u32 of each.
    state: CudaMemory,
    /// `[ranks + 1]` u32; the layer has its address.
    first: CudaMemory,
    /// Record of each received row of the rank-major and flat layouts.
    row_source: CudaMemory,
    /// Of the device, for this rank.
    pub num_sms: u32,
}

/// The areas of a plan in symmetric memory.
pub(super) struct Areas<'a> {
    pub counts: &'a SymBuf,
    pub tokens: &'a SymBuf,
    pub returns: &'a SymBuf,
    pub flags: &'a SymBuf,
}

impl Areas<'_> {
    fn layer(&self, lane: &Lane, d: &EpDesc, first: &CudaMemory) -> Result<LayerParam> {
        let os = lane.one_sided();
        let (size, me) = (d.experts_per_rank.len(), os.heap().team().rank());
        let (s, records) = (strides(d), size * d.max_tokens);
        let rank0 =
            |b: &SymBuf, at: usize, len: usize| os.addr(Rank::new(0), b.range(at, len), len);
        Ok(LayerParam {
            counts: rank0(self.counts, 0, 16 * size * d.num_experts())?,
            meta: rank0(self.tokens, records * s.row, records * s.meta)?,
            tokens: rank0(self.tokens, 0, records * s.row)?,
            back: rank0(self.returns, 0, records * s.back)?,
            stride: lane.stride(),
            first: first.addr(),
            meta_stride: s.meta as u64,
            row_stride: s.row as u64,
            back_stride: s.back as u64,
            size: size as u32,
            me: me.get(),
            max_tokens: d.max_tokens as u32,
            top_k: d.top_k as u32,
            experts: d.num_experts() as u32,
            capacity: d.capacity as u32,
            align: d.layout.align() as u32,
            scales: d.num_scales as u32,
        })
    }

    /// No launch has written a word yet, whatever the memory was used for before.
    fn clear(&self, lane: &Lane, stream: &CudaStream, d: &EpDesc) -> Result<()> {
        let (s, records) = (strides(d), d.experts_per_rank.len() * d.max_tokens);
        let words = [
            (self.counts, 0, 16 * d.experts_per_rank.len() * d.num_experts()),
            (self.tokens, records * s.row, records * s.meta),
            (self.flags, 0, flag_area(d)),
        ];
        for (b, at, len) in words {
            lane.one_sided().clear(stream, b.range(at, len), len)?;
        }
        tilewire_device::Queue::synchronize_until(stream, None)
    }
}

/// Threads of a block of the routing, and its shared memory: what `tw_table` of the kernel takes.
fn router(d: &EpDesc) -> Result<(u32, u32)> {
    let experts = d.num_experts();
    let threads = if experts <= 1024 { MOVERS } else { THREADS };
    let bytes = experts * (8 + 12 + 4 * threads as usize / 32);
    if bytes > 160 << 10 {
        return Err(Error::new(ErrorKind::Unsupported, "too many experts for the routing kernel")
            .expected("at most 3150")
            .seen(experts));
    }
    Ok((threads, bytes as u32))
}

impl Prepared {
    /// Collective only in that no peer may launch before all ranks have come this far.
    pub fn new(lane: &Lane, stream: &Stream, d: &EpDesc, areas: &Areas<'_>) -> Result<Self> {
        let (ctx, os) = (lane.context(), lane.one_sided());
        let size = d.experts_per_rank.len();
        let choices = size * d.max_tokens * d.top_k;
        fit_32_bits("an expert-parallel layer", &[choices, d.capacity, d.num_experts()])?;
        let first: Vec<u32> = (0..=size).map(|r| d.first_expert(r) as u32).collect();
        let first = CudaMemory::from_bytes(ctx, bytemuck::cast_slice(&first))?;
        let layer = areas.layer(lane, d, &first)?;
        let mut kernels = Vec::new();
        let module = load(ctx, &EP, ep_defines(mantissa(d.out)))?;
        for k in EP.kernels {
            kernels.push((*k, module.kernel(k)?));
        }
        if EP_BULK.runs_on(&ctx.arch()?) {
            let kernel = load(ctx, &EP_BULK, ep_bulk_defines())?.kernel(EP_BULK.kernels[0])?;
            kernel.allow_shared(BULK_BYTES)?;
            kernels.push((EP_BULK.kernels[0], kernel));
            let back = load(ctx, &EP_BACK, ep_back_defines(mantissa(d.out)))?;
            let back = back.kernel(EP_BACK.kernels[0])?;
            back.allow_shared(BACK_BYTES)?;
            kernels.push((EP_BACK.kernels[0], back));
        }
        areas.clear(lane, stream.cuda()?, d)?;
        let len = flag_area(d);
        let new = Self {
            kernels,
            team: os.team_param(),
            layer,
            cuts: [Cut::send(d), Cut::back(d)],
            flags: os.addr(Rank::new(0), areas.flags.range(0, len), len)?,
            flags_of_area: flags_of_area(d) as u64,
            blocks: workspace(ctx, 4 * ROUTERS * d.num_experts())?,
            state: workspace(ctx, 3 * (8 + 16))?,
            first,
            row_source: workspace(ctx, 4 * d.recv_rows())?,
            num_sms: os.num_sms()?,
        };
        new.kernel("tw_ep_route")?.allow_shared(router(d)?.1)?;
        Ok(new)
    }

    fn has(&self, name: &str) -> bool {
        self.kernels.iter().any(|(n, _)| *n == name)
    }

    fn kernel(&self, name: &str) -> Result<&Kernel> {
        let found = self.kernels.iter().find(|(n, _)| *n == name).map(|(_, k)| k);
        found.ok_or_else(|| Error::internal(format!("no kernel {name}")))
    }

    /// How a launch of `area` meets.
    fn meet(&self, signals: &Signals, area: Area, senders: u32) -> MeetParam {
        let (slot, at) = match area {
            Area::Counts => (COUNTS.1, 0),
            Area::Tokens => (TOKENS.0, 0),
            Area::Returns => (RETURNS.0, self.flags_of_area),
        };
        let Cut { chunk, slices, chunks } = self.cuts[usize::from(matches!(area, Area::Returns))];
        MeetParam {
            flags: self.flags + at,
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

/// Shared memory of `tw_ep_send_bulk`.
const BULK_BYTES: u32 = ((EP_BULK_SEND + EP_BULK_LAY) * 2 * EP_BULK_PIECE + EP_BULK_ZERO) as u32;
/// Its threads: one warp fills rows that nobody feeds.
const BULK_THREADS: u32 = 32 * (EP_BULK_SEND + EP_BULK_LAY + 1) as u32;

/// Shared memory of `tw_ep_back_bulk`: slices, and a list of rows for each warp.
const BACK_BYTES: u32 = ((EP_BACK_RETURN + EP_BACK_SUM)
    * ((EP_BACK_STAGES + 1) * EP_BACK_SLICE + EP_BACK_TOKENS * (4 + 8 * EP_BACK_ENTRIES)))
    as u32;
/// Its threads.
const BACK_BULK_THREADS: u32 = 32 * (EP_BACK_RETURN + EP_BACK_SUM) as u32;

/// One launch of one phase.
pub(super) struct Phase<'a> {
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
    /// Fails unless all tensors lie on the device of `stream`.
    pub fn together(&self, stream: &Stream, tensors: &[Named<'_>]) -> Result<()> {
        together_on(stream, tensors)
    }

    fn handle(&self) -> Result<HandleParam> {
        let h = self.handle.device().ok_or_else(|| {
            Error::invalid("the handle was made on another device").hint("make it with this plan")
        })?;
        Ok(HandleParam {
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

    /// Queues `blocks` of a kernel of the unit; none if there are none.
    fn go(&self, main: &CudaStream, name: &str, blocks: usize, args: LaunchArgs<'_>) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
        self.go_in(main, name, Grid::new(blocks as u32, THREADS), args)
    }

    fn go_in(&self, main: &CudaStream, name: &str, grid: Grid, args: LaunchArgs<'_>) -> Result<()> {
        // SAFETY: every call site passes what the kernel takes (`ep/sm80_ep.cu`); tensors were
        // checked against the layer and are held, as are the handle and the plan's memory.
        unsafe { self.p.kernel(name)?.launch(main, grid, args) }
    }

    fn run(
        &self,
        at: (&Stream, u64),
        outs: &[Poison],
        f: impl FnOnce(&Lanes<'_>) -> Result<()>,
    ) -> Result<()> {
        self.core.run_alone(self.lane, at, outs, |l| {
            self.core.team().check()?;
            hold(l.main, (self.handle.clone(), l.os.heap().clone()));
            hold(l.main, outs.iter().map(|o| o.0.clone()).collect::<Vec<_>>());
            let p = self.p;
            hold(l.main, [&p.blocks, &p.state, &p.first, &p.row_source].map(Clone::clone));
            for peer in self.core.team().peers() {
                l.os.count_signal(peer);
            }
            f(l)
        })
    }

    /// The routing of `idx` for `capacity` rows.
    pub fn route(&self, at: (&Stream, u64), idx: &Tensor, capacity: usize) -> Result<()> {
        let (p, h) = (self.p, self.handle()?);
        let choices = idx.shape().num_elems();
        let blocks = choices.div_ceil(ROUTER_CHOICES).clamp(1, ROUTERS.min(self.sms as usize));
        let (threads, shared) = router(self.desc)?;
        let warps = blocks * threads as usize / 32;
        let layer = LayerParam { capacity: capacity as u32, ..p.layer };
        let a = RoutingParam {
            idx: addr(idx)?,
            blocks: p.blocks.addr(),
            choices: choices as u32,
            wide: u32::from(idx.dtype() == DType::I64),
            span: choices.div_ceil(warps).next_multiple_of(32) as u32,
            bad_input: BadInput::Expert as u32,
        };
        let zero = |t: &Tensor| Ok::<_, Error>(Poison(t.cuda()?, 0));
        let outs = [
            Poison::value(self.handle.row_index().cuda()?),
            zero(self.handle.m_splits())?,
            zero(self.handle.total())?,
            zero(self.handle.dropped())?,
        ];
        let meet = p.meet(self.signals, Area::Counts, 0);
        self.run(at, &outs, |l| {
            hold(l.main, idx.clone());
            let poison = PoisonParam::new(&outs);
            let args = LaunchArgs::new().arg(&p.team).arg(&layer).arg(&meet).arg(&a).arg(&h);
            let grid = Grid::new(blocks as u32, threads).shared(shared);
            self.go_in(l.main, "tw_ep_route", grid, args.arg(&poison))
        })
    }

    /// Records of my tokens to their ranks; what comes to the handle, and to `recv`.
    fn exchange(
        &self,
        l: &Lanes<'_>,
        (x, weights, scales): (&Tensor, Option<&Tensor>, Option<&Tensor>),
        recv: &RecvParam,
        (leave, outs): (bool, &[Poison]),
    ) -> Result<()> {
        let p = self.p;
        let send = SendParam {
            x: addr(x)?,
            weights: addr(weights)?,
            scales: addr(scales)?,
            row_bytes: (self.desc.hidden * x.dtype().size()) as u64,
            tokens: x.shape().dim(0) as u32,
            pad: 0,
        };
        hold(l.main, (x.clone(), weights.cloned(), scales.cloned()));
        // Of the portable kernel: the others lay out.
        let senders = (self.sms / 3).max(1);
        let meet =
            MeetParam { leave: u32::from(leave), ..p.meet(self.signals, Area::Tokens, senders) };
        let poison = PoisonParam::new(if leave { outs } else { &[] });
        let whole = (send.x | send.row_bytes).is_multiple_of(16);
        let bulk = whole && p.has(EP_BULK.kernels[0]);
        let (name, grid) = match bulk {
            true => (EP_BULK.kernels[0], Grid::new(self.sms, BULK_THREADS).shared(BULK_BYTES)),
            false => ("tw_ep_send", Grid::new(self.sms.max(2), MOVERS)),
        };
        let h = self.handle()?;
        let args = LaunchArgs::new().arg(&p.team).arg(&p.layer).arg(&meet).arg(&h);
        self.go_in(l.main, name, grid, args.arg(&send).arg(recv).arg(&poison))
    }

    /// The area of tokens was read: behind the kernels of a phase that keep the rows there.
    fn leave(&self, l: &Lanes<'_>, outs: &[Poison]) -> Result<()> {
        let meet = self.p.meet(self.signals, Area::Tokens, 0);
        let args = LaunchArgs::new().arg(&self.p.team).arg(&self.p.layer).arg(&meet);
        self.go(l.main, "tw_ep_leave", 1, args)?;
        let outs: Vec<_> = outs.iter().map(|o| (o.0.clone(), o.1)).collect();
        l.os.poison_if_over(l.main, &outs)
    }

    pub fn dispatch(
        &self,
        at: (&Stream, u64),
        x: &Tensor,
        given: (Option<&Tensor>, Option<&Tensor>),
        out: &EpDispatch,
    ) -> Result<()> {
        let d = self.desc;
        let all = [Some(&out.x), out.weights.as_ref(), out.scales.as_ref()];
        let all = all.into_iter().flatten().chain([self.handle.row_index()]);
        let outs = all.map(|t| t.cuda().map(Poison::value)).collect::<Result<Vec<_>>>()?;
        let expert_major = matches!(d.layout, EpLayout::ExpertMajor { .. });
        let row_bytes = (d.hidden * d.dtype.size()) as u64;
        let mut recv = RecvParam {
            x: 0,
            weights: addr(out.weights.as_ref())?,
            scales: 0,
            index: 0,
            row_bytes,
        };
        if expert_major {
            recv.x = addr(&out.x)?;
            recv.scales = addr(out.scales.as_ref())?;
            recv.index = addr(self.handle.row_index())?;
        }
        self.run(at, &outs, |l| {
            self.exchange(l, (x, given.0, given.1), &recv, (expert_major, &outs))?;
            if expert_major {
                return Ok(());
            }
            self.spread(l, out)?;
            self.leave(l, &outs)
        })
    }

    /// Rows of the rank-major and flat layouts from the area of tokens.
    fn spread(&self, l: &Lanes<'_>, out: &EpDispatch) -> Result<()> {
        let (d, layer, h) = (self.desc, &self.p.layer, self.handle()?);
        let records = d.experts_per_rank.len() * d.max_tokens;
        let rows = self.p.row_source.addr();
        let three = LaunchArgs::new().arg(layer).arg(&h).arg(&rows);
        if let EpLayout::RankMajor { .. } = d.layout {
            let blocks = records.div_ceil(THREADS as usize);
            self.go(l.main, "tw_ep_rank_major", blocks, three)?;
        } else {
            l.main.fill_memory(&self.p.row_source, 0xff)?;
            self.go(l.main, "tw_ep_flat", 1, three)?;
        }
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
        at: (&Stream, u64),
        d_out: &Tensor,
        weighted: Option<(&Tensor, &Tensor, &Tensor)>,
        dy: &Tensor,
    ) -> Result<()> {
        let d = self.desc;
        let all = [Some(dy), weighted.map(|w| w.2)];
        let outs = all.into_iter().flatten().map(|t| t.cuda().map(Poison::value));
        let outs = outs.collect::<Result<Vec<_>>>()?;
        let recv: RecvParam = Zeroable::zeroed();
        self.run(at, &outs, |l| {
            self.exchange(l, (d_out, None, None), &recv, (false, &outs))?;
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

    /// Combine and the backward of dispatch.
    pub fn back(&self, at: (&Stream, u64), b: &super::host::Back) -> Result<()> {
        let (d, p, h) = (self.desc, self.p, self.handle()?);
        let all = [Some(&b.out), b.dw_out.as_ref()];
        let outs = all.into_iter().flatten().map(|t| t.cuda().map(Poison::value));
        let outs = outs.collect::<Result<Vec<_>>>()?;
        let param = BackParam {
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
        let whole = (param.y | param.out | (d.hidden * d.out.size()) as u64).is_multiple_of(16);
        let most = EP_BACK_ENTRIES as usize;
        let few = d.top_k <= most && d.experts_per_rank.len() <= most;
        let (name, grid) = match whole && few && p.has(EP_BACK.kernels[0]) {
            true => (EP_BACK.kernels[0], Grid::new(self.sms, BACK_BULK_THREADS).shared(BACK_BYTES)),
            false => ("tw_ep_back", Grid::new(2 * self.sms, BACK_THREADS)),
        };
        // Of the portable kernel: few chunks leave more blocks to add.
        let chunks = p.cuts[1].chunks as u32 * p.layer.size;
        let senders = (2 * self.sms * 7 / 9).min(chunks).max(1);
        let meet = p.meet(self.signals, Area::Returns, senders);
        self.run(at, &outs, |l| {
            hold(l.main, (b.y.clone(), b.weights.clone(), b.dw.clone()));
            let poison = PoisonParam::new(&outs);
            let args = LaunchArgs::new().arg(&p.team).arg(&p.layer).arg(&meet).arg(&h).arg(&param);
            self.go_in(l.main, name, grid, args.arg(&poison))
        })
    }
}
