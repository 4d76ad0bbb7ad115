//! Expert parallelism on CUDA devices, by `ep/sm80_ep.cu`.
//!
//! A phase is: enter (everybody's area of this phase is free), a kernel that writes to peers, enter
//! again on the phase's second slot (everybody has written), and kernels on what came. What comes
//! from token t of rank s has the place `s * max_tokens + t`, so that no numbers travel.

use bytemuck::{Pod, Zeroable};
use tilewire_core::{DType, Error, Rank, Result};
use tilewire_device::cuda::{CudaContext, CudaMemory, CudaStream, Grid, Kernel, LaunchArgs};
use tilewire_device::{Buffer, Stream, Tensor};
use tilewire_kernels::portable::{EP, EP_CHUNK, EP_THREADS, ep_defines};
use tilewire_symm::{BadInput, OneSided, Signals, SymBuf};

use super::plan::{COUNTS, EpDispatch, RETURNS, TOKENS};
use super::{EpDesc, EpHandle, EpLayout, EpTotals};
use crate::common::cuda::{addr, fit_32_bits, hold, load, mantissa, together_on, workspace};
use crate::common::lanes::{Enter, Lane, Lanes, Poison};
use crate::common::{Named, PlanCore};

const THREADS: u32 = EP_THREADS as u32;

/// `TwEp` of the kernels.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct LayerParam {
    counts: u64,
    meta: u64,
    tokens: u64,
    back: u64,
    stride: u64,
    first: u64,
    meta_stride: u64,
    row_stride: u64,
    back_stride: u64,
    size: u32,
    me: u32,
    max_tokens: u32,
    top_k: u32,
    experts: u32,
    capacity: u32,
    align: u32,
    scales: u32,
}

/// `TwHandle` of the kernels.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct HandleParam {
    rows: u64,
    ranks: u64,
    num: u64,
    copies: u64,
    source: u64,
    place: u64,
    counts: u64,
    m_splits: u64,
    total: u64,
    dropped: u64,
    lost: u64,
}

/// `TwRouting` of the kernels.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RoutingParam {
    idx: u64,
    chunks: u64,
    next: u64,
    status: u64,
    choices: u32,
    wide: u32,
    num_chunks: u32,
    pad: u32,
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
    layer: LayerParam,
    chunks: CudaMemory,
    next: CudaMemory,
    status: CudaMemory,
    /// `[ranks + 1]` u32; the layer has its address.
    first: CudaMemory,
    /// Record of each received row of the rank-major and flat layouts.
    row_source: CudaMemory,
}

/// The areas of a plan in symmetric memory.
pub(super) struct Areas<'a> {
    pub counts: &'a SymBuf,
    pub tokens: &'a SymBuf,
    pub returns: &'a SymBuf,
}

impl Prepared {
    /// Collective only in that no peer may launch before all ranks have come this far.
    pub fn new(lane: &Lane, stream: &Stream, d: &EpDesc, areas: &Areas<'_>) -> Result<Self> {
        let (ctx, os) = (lane.context(), lane.one_sided());
        let (size, me) = (d.experts_per_rank.len(), os.heap().team().rank());
        let s = strides(d);
        let records = size * d.max_tokens;
        fit_32_bits("an expert-parallel layer", &[records * d.top_k, d.capacity, d.num_experts()])?;
        let rank0 =
            |b: &SymBuf, at: usize, len: usize| os.addr(Rank::new(0), b.range(at, len), len);
        let choices = d.max_tokens * d.top_k;
        let num_chunks = choices.div_ceil(EP_CHUNK as usize).max(1);
        let first: Vec<u32> = (0..=size).map(|r| d.first_expert(r) as u32).collect();
        let first = CudaMemory::from_bytes(ctx, bytemuck::cast_slice(&first))?;
        let layer = LayerParam {
            counts: rank0(areas.counts, 0, 4 * size * d.num_experts())?,
            meta: rank0(areas.tokens, records * s.row, records * s.meta)?,
            tokens: rank0(areas.tokens, 0, records * s.row)?,
            back: rank0(areas.returns, 0, records * s.back)?,
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
        };
        let module = load(ctx, &EP, ep_defines(mantissa(d.out)))?;
        let kernels = EP.kernels.iter().map(|k| Ok((*k, module.kernel(k)?)));
        let stream = stream.cuda()?;
        // No record is there before one has come.
        let meta = areas.tokens.range(records * s.row, records * s.meta);
        os.clear(stream, meta, records * s.meta)?;
        tilewire_device::Queue::synchronize_until(stream, None)?;
        Ok(Self {
            kernels: kernels.collect::<Result<_>>()?,
            layer,
            chunks: workspace(ctx, 4 * num_chunks * (d.num_experts() + 1))?,
            next: workspace(ctx, 8 * d.num_experts())?,
            status: workspace(ctx, 4)?,
            first,
            row_source: workspace(ctx, 4 * d.recv_rows())?,
        })
    }

    fn kernel(&self, name: &str) -> Result<&Kernel> {
        let found = self.kernels.iter().find(|(n, _)| *n == name).map(|(_, k)| k);
        found.ok_or_else(|| Error::internal(format!("no kernel {name}")))
    }
}

/// One launch of one phase.
pub(super) struct Phase<'a> {
    pub core: &'a PlanCore,
    pub lane: &'a Lane,
    pub desc: &'a EpDesc,
    pub signals: &'a Signals,
    pub p: &'a Prepared,
    pub handle: &'a EpHandle,
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
        // SAFETY: every call site passes what the kernel takes (`ep/sm80_ep.cu`); tensors were
        // checked against the layer and are held, as are the handle and the plan's memory.
        unsafe { self.p.kernel(name)?.launch(main, Grid::new(blocks as u32, THREADS), args) }
    }

    fn run(
        &self,
        (stream, seq): (&Stream, u64),
        slots: (usize, usize),
        outs: &[Poison],
        f: impl FnOnce(&Lanes<'_>) -> Result<()>,
    ) -> Result<()> {
        let enter = Enter { signals: self.signals, credit: slots.0, flags: slots.1..slots.1 };
        self.core.run_on(self.lane, (stream, seq), &enter, outs, |l| {
            hold(l.main, self.handle.clone());
            let p = self.p;
            let own = [&p.chunks, &p.next, &p.status, &p.first, &p.row_source].map(Clone::clone);
            hold(l.main, own);
            f(l)
        })
    }

    /// Everybody has written to everybody.
    fn meet(&self, l: &Lanes<'_>, slot: usize) -> Result<()> {
        let slot = self.signals.slot(slot);
        l.os.enter(l.main, slot, slot, 0)
    }

    /// The routing of `idx` for `capacity` rows.
    pub fn route(&self, at: (&Stream, u64), idx: &Tensor, capacity: usize) -> Result<()> {
        let (d, h) = (self.desc, self.handle()?);
        let choices = idx.shape().num_elems();
        let num_chunks = choices.div_ceil(EP_CHUNK as usize).max(1);
        let layer = LayerParam { capacity: capacity as u32, ..self.p.layer };
        let a = RoutingParam {
            idx: addr(idx)?,
            chunks: self.p.chunks.addr(),
            next: self.p.next.addr(),
            status: self.p.status.addr(),
            choices: choices as u32,
            wide: u32::from(idx.dtype() == DType::I64),
            num_chunks: num_chunks as u32,
            pad: 0,
        };
        let zero = |t: &Tensor| Ok::<_, Error>(Poison(t.cuda()?, 0));
        let outs = [
            Poison::value(self.handle.row_index().cuda()?),
            zero(self.handle.m_splits())?,
            zero(self.handle.total())?,
            zero(self.handle.dropped())?,
        ];
        self.run(at, COUNTS, &outs, |l| {
            hold(l.main, idx.clone());
            let two = || LaunchArgs::new().arg(&layer).arg(&a);
            self.go(l.main, "tw_ep_count", num_chunks, two())?;
            self.go(l.main, "tw_ep_publish", d.experts_per_rank.len(), two())?;
            l.os.fail_if(l.main, &self.p.status, BadInput::Expert)?;
            self.meet(l, COUNTS.1)?;
            self.go(l.main, "tw_ep_scan", 1, two().arg(&h))?;
            self.go(l.main, "tw_ep_place", num_chunks, two().arg(&h))
        })
    }

    /// Records of my tokens to their ranks, and what came to the handle.
    fn exchange(
        &self,
        l: &Lanes<'_>,
        x: &Tensor,
        (weights, scales): (Option<&Tensor>, Option<&Tensor>),
        weights_out: Option<&Tensor>,
    ) -> Result<()> {
        let (d, layer, h) = (self.desc, &self.p.layer, self.handle()?);
        let row = (d.hidden * x.dtype().size()) as u64;
        let (x_at, w_at, s_at) = (addr(x)?, addr(weights)?, addr(scales)?);
        hold(l.main, (x.clone(), weights.cloned(), scales.cloned(), weights_out.cloned()));
        let args = LaunchArgs::new().arg(layer).arg(&h).arg(&x_at).arg(&row).arg(&w_at).arg(&s_at);
        self.go(l.main, "tw_ep_push", x.shape().dim(0), args)?;
        self.meet(l, TOKENS.1)?;
        let device = self.handle.device().ok_or_else(|| Error::internal("a handle of the host"))?;
        l.main.fill_memory(&device.source, 0xff)?;
        if let Some(w) = weights_out {
            l.main.fill_memory(&w.cuda()?, 0)?;
        }
        let out = addr(weights_out)?;
        let records = d.experts_per_rank.len() * d.max_tokens;
        let args = LaunchArgs::new().arg(layer).arg(&h).arg(&out);
        self.go(l.main, "tw_ep_index", records.div_ceil(THREADS as usize), args)
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
        self.run(at, TOKENS, &outs, |l| {
            hold(l.main, out.clone());
            self.exchange(l, x, given, out.weights.as_ref())?;
            let (layer, h) = (&self.p.layer, self.handle()?);
            let records = d.experts_per_rank.len() * d.max_tokens;
            let rows = self.p.row_source.addr();
            let three = || LaunchArgs::new().arg(layer).arg(&h).arg(&rows);
            let (mut source, mut place) = (rows, h.place);
            match d.layout {
                EpLayout::ExpertMajor { .. } => (source, place) = (h.source, 0),
                EpLayout::RankMajor { .. } => {
                    let blocks = records.div_ceil(THREADS as usize);
                    self.go(l.main, "tw_ep_rank_major", blocks, three())?;
                }
                EpLayout::Flat { .. } => {
                    l.main.fill_memory(&self.p.row_source, 0xff)?;
                    self.go(l.main, "tw_ep_flat", 1, three())?;
                }
            }
            let index = addr(self.handle.row_index())?;
            let args = LaunchArgs::new().arg(layer).arg(&h).arg(&place).arg(&index);
            self.go(l.main, "tw_ep_row_index", d.capacity.div_ceil(THREADS as usize), args)?;
            let (to, scales) = (addr(&out.x)?, addr(out.scales.as_ref())?);
            let row = (d.hidden * d.dtype.size()) as u64;
            let args = LaunchArgs::new().arg(layer).arg(&source).arg(&to).arg(&row).arg(&scales);
            self.go(l.main, "tw_ep_gather", d.recv_rows(), args)
        })
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
        self.run(at, TOKENS, &outs, |l| {
            self.exchange(l, d_out, (None, None), None)?;
            let (layer, h, hidden) = (&self.p.layer, self.handle()?, d.hidden as u32);
            let of = |f: fn((&Tensor, &Tensor, &Tensor)) -> Result<u64>| weighted.map_or(Ok(0), f);
            let (w, y, g) = (of(|t| addr(t.0))?, of(|t| addr(t.1))?, of(|t| addr(t.2))?);
            let to = addr(dy)?;
            let kept = weighted.map(|(w, y, g)| (w.clone(), y.clone(), g.clone()));
            hold(l.main, (dy.clone(), kept));
            let args = LaunchArgs::new().arg(layer).arg(&h).arg(&to).arg(&w).arg(&y);
            self.go(l.main, "tw_ep_gather_bwd", d.capacity, args.arg(&g).arg(&hidden))
        })
    }

    /// Combine and the backward of dispatch.
    pub fn back(&self, at: (&Stream, u64), b: &super::host::Back) -> Result<()> {
        let d = self.desc;
        let all = [Some(&b.out), b.dw_out.as_ref()];
        let outs = all.into_iter().flatten().map(|t| t.cuda().map(Poison::value));
        let outs = outs.collect::<Result<Vec<_>>>()?;
        self.run(at, RETURNS, &outs, |l| {
            hold(l.main, (b.y.clone(), b.weights.clone(), b.dw.clone()));
            hold(l.main, (b.out.clone(), b.dw_out.clone()));
            let (layer, h, hidden) = (&self.p.layer, self.handle()?, d.hidden as u32);
            let (y, w, dw) = (addr(&b.y)?, addr(b.weights.as_ref())?, addr(b.dw.as_ref())?);
            let expert_major = u32::from(b.expert_major);
            let args = LaunchArgs::new().arg(layer).arg(&h).arg(&y).arg(&w).arg(&dw);
            let records = d.experts_per_rank.len() * d.max_tokens;
            self.go(l.main, "tw_ep_return", records, args.arg(&hidden).arg(&expert_major))?;
            self.meet(l, RETURNS.1)?;
            let (out, dw_out) = (addr(&b.out)?, addr(b.dw_out.as_ref())?);
            let args = LaunchArgs::new().arg(layer).arg(&h).arg(&out).arg(&dw_out).arg(&hidden);
            self.go(l.main, "tw_ep_sum", b.out.shape().dim(0), args)
        })
    }
}
