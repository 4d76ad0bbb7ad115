//! Operations of a team on CUDA devices, each with tensors of a small and of a large size.

use std::cell::Cell;
use std::rc::Rc;

use tilewire_core::{BackendKind, DType, Result, ScaleLayout, Shape};
use tilewire_device::{Device, Pending, Stream, Tensor, cuda};
use tilewire_ops::Shards;
use tilewire_ops::ag_gemm::{AgGemmDesc, AgGemmInputs, AgGemmPlan};
use tilewire_ops::attention::{
    AttentionDesc, AttnGrads, AttnInputs, AttnMask, AttnOperand, AttnOut, AttnSaved,
};
use tilewire_ops::collective::{
    CollectiveBackend, CollectiveDesc, CollectiveKind, CollectivePlan, ReduceOp,
};
use tilewire_ops::common::{Algo, OverlapConfig};
use tilewire_ops::cp_attention::{CpAttentionDesc, CpAttentionPlan, CpConfig, Strategy};
use tilewire_ops::ep::{EpDesc, EpDispatch, EpHandle, EpLayout, EpPlan};
use tilewire_ops::gemm_ar::{GemmArDesc, GemmArPlan};
use tilewire_ops::gemm_rs::{GemmRsDesc, GemmRsInputs, GemmRsPlan};
use tilewire_ops::quant::{QuantDesc, QuantInputs, QuantPlan, Scope, Sides};
use tilewire_symm::{Heap, HeapCfg, World};
use tilewire_testing::{Lack, did_not_run};

use crate::expected::Facts;
use crate::inputs::{Fill, filled};
use crate::lacking::prepared;

pub const M: usize = 93;
const N: usize = 40;
const ODD: usize = 37;
/// Rows of N of a vector of which every rank sends many pieces; a large one of ODD by copy engines.
const MID: usize = 700_000;
const LARGE: usize = 1_500_000;
const K: usize = 48;

thread_local!(static WAITS: Cell<bool> = const { Cell::new(false) });

/// Runs `f`, in which this thread waits for each launch instead of joining it.
pub fn waiting<T>(f: impl FnOnce() -> T) -> T {
    let before = WAITS.replace(true);
    let out = f();
    WAITS.set(before);
    out
}

pub fn end<T>(s: &Stream, p: Pending<T>) -> Result<T> {
    if WAITS.get() { p.wait() } else { p.join(s) }
}

pub type Launch = Box<dyn Fn(&Stream) -> Result<()>>;

/// One operation with its tensors.
pub struct Op {
    pub name: &'static str,
    /// Tensors that change between launches, and how.
    pub inputs: Vec<(Tensor, Fill)>,
    pub outs: Vec<Tensor>,
    pub launch: Launch,
    /// How many launches it is, and the first so many of them.
    pub steps: Option<(usize, Rc<Steps>)>,
    pub facts: Facts,
}

/// The first launches of an operation.
pub type Steps = dyn Fn(&Stream, usize) -> Result<()>;

impl Op {
    /// One that is several launches in turn.
    pub fn of_steps(
        name: &'static str,
        inputs: Vec<(Tensor, Fill)>,
        outs: Vec<Tensor>,
        steps: (usize, Rc<Steps>),
        facts: Facts,
    ) -> Self {
        let (num, go) = (steps.0, steps.1.clone());
        let launch = Box::new(move |s: &Stream| go(s, num));
        Self { name, inputs, outs, launch, steps: Some(steps), facts }
    }

    pub fn refill(&self, seed: u64) -> Result<()> {
        for (i, (t, fill)) in self.inputs.iter().enumerate() {
            let new = filled(*fill, (seed, i), t.dtype(), t.shape())?;
            new.read(|b| t.write(|out| out.copy_from_slice(b)))??;
        }
        Ok(())
    }

    pub fn poison(&self) -> Result<()> {
        self.outs.iter().try_for_each(Tensor::poison)
    }

    pub fn bits(&self) -> Result<Vec<Vec<u8>>> {
        self.outs.iter().map(|t| t.read(<[u8]>::to_vec)).collect()
    }
}

/// How an operation is made on a rank.
pub type Make = fn(&Heap, &Stream) -> Result<Op>;

pub fn tensor(heap: &Heap, dtype: DType, rows: usize, cols: usize) -> Result<Tensor> {
    Tensor::poisoned(dtype, Shape::d2(rows, cols)).to(&heap.device())
}

pub fn mine(heap: &Heap, m: usize) -> usize {
    let (size, me) = (heap.team().size(), heap.team().rank().idx());
    m / size + usize::from(me < m % size)
}

fn collective(name: &'static str, heap: &Heap, s: &Stream, m: usize) -> Result<Op> {
    collective_by(name, heap, s, (m, N, CollectiveBackend::Put))
}

/// With rows that are no whole 16 bytes: not by the kernel that meets the others itself.
fn collective_odd(name: &'static str, heap: &Heap, s: &Stream, m: usize) -> Result<Op> {
    collective_by(name, heap, s, (m, ODD, CollectiveBackend::Put))
}

fn collective_by(
    name: &'static str,
    heap: &Heap,
    s: &Stream,
    (m, cols, backend): (usize, usize, CollectiveBackend),
) -> Result<Op> {
    let size = heap.team().size();
    let (kind, rows_in, rows_out) = match name {
        "all_gather" => (CollectiveKind::AllGather(Shards::Even), mine(heap, m), m),
        "reduce_scatter" => {
            (CollectiveKind::ReduceScatter(Shards::Even, ReduceOp::Avg), m, mine(heap, m))
        }
        "all_reduce" => (CollectiveKind::AllReduce(ReduceOp::Sum), m, m),
        _ => (
            CollectiveKind::AllToAll(vec![vec![m / size; size]; size]),
            m / size * size,
            m / size * size,
        ),
    };
    let desc = CollectiveDesc { kind, m, cols, dtype: DType::BF16 };
    let plan = CollectivePlan::with_backend(desc, heap, backend)?;
    prepared(|| plan.prepare(s))?;
    let x = tensor(heap, DType::BF16, rows_in, cols)?;
    let out = tensor(heap, DType::BF16, rows_out, cols)?;
    Ok(Op {
        name,
        inputs: vec![(x.clone(), Fill::Normal)],
        outs: vec![out.clone()],
        launch: Box::new(move |s| end(s, plan.launch(s, m, &x, &out)?).map(|_| ())),
        steps: None,
        facts: Facts::Named,
    })
}

/// The scale of a product of FP8.
fn scale(heap: &Heap, t: DType) -> Result<Option<Tensor>> {
    let new = || Tensor::poisoned(DType::F32, Shape::d1(1)).to(&heap.device());
    t.is_fp8().then(new).transpose()
}

fn ag_gemm((algo, t): (Algo, DType), heap: &Heap, s: &Stream) -> Result<Op> {
    ag_gemm_as((OverlapConfig::of(algo, 2), t), heap, s)
}

fn ag_gemm_as((config, t): (OverlapConfig, DType), heap: &Heap, s: &Stream) -> Result<Op> {
    let desc = AgGemmDesc::new(M, N, K, t);
    let out = desc.out;
    let plan = AgGemmPlan::new(desc, heap, Some(config))?;
    prepared(|| plan.prepare(s))?;
    let (x, w) = (tensor(heap, t, mine(heap, M), K)?, tensor(heap, t, N, K)?);
    let (out, gathered) = (tensor(heap, out, M, N)?, tensor(heap, t, M, K)?);
    let mut inputs = vec![(x.clone(), Fill::Normal), (w.clone(), Fill::Normal)];
    let scale = scale(heap, t)?;
    inputs.extend(scale.iter().map(|s| (s.clone(), Fill::Normal)));
    let t = AgGemmInputs {
        gathered: Some(gathered.clone()),
        scale,
        ..AgGemmInputs::new(x, w, out.clone())
    };
    Ok(Op {
        name: "ag_gemm",
        inputs,
        outs: vec![out, gathered],
        launch: Box::new(move |s| end(s, plan.launch(s, M, t.clone())?).map(|_| ())),
        steps: None,
        facts: Facts::Named,
    })
}

fn gemm_reduce((scatter, algo, t): (bool, Algo, DType), heap: &Heap, s: &Stream) -> Result<Op> {
    gemm_reduce_as((scatter, OverlapConfig::of(algo, 2), t), heap, s)
}

fn gemm_reduce_as(by: (bool, OverlapConfig, DType), heap: &Heap, s: &Stream) -> Result<Op> {
    let (scatter, config, t) = by;
    let desc = GemmRsDesc { bias: true, ..GemmRsDesc::new(M, N, K, t) };
    let (x, w) = (tensor(heap, t, M, K)?, tensor(heap, t, N, K)?);
    let mut inputs = vec![(x.clone(), Fill::Normal), (w.clone(), Fill::Normal)];
    let scale = scale(heap, t)?;
    inputs.extend(scale.iter().map(|s| (s.clone(), Fill::Normal)));
    let bias = Tensor::from_f32(&[0.5; N], DType::F32, Shape::d1(N))?.to(&heap.device())?;
    let out = tensor(heap, desc.out, if scatter { mine(heap, M) } else { M }, N)?;
    let t = GemmRsInputs { bias: Some(bias), scale, ..GemmRsInputs::new(x, w, out.clone()) };
    let launch: Launch = if scatter {
        let plan = GemmRsPlan::new(desc, heap, Some(config))?;
        prepared(|| plan.prepare(s))?;
        Box::new(move |s| end(s, plan.launch(s, M, t.clone())?).map(|_| ()))
    } else {
        let plan = GemmArPlan::new(GemmArDesc(desc), heap, Some(config))?;
        prepared(|| plan.prepare(s))?;
        Box::new(move |s| end(s, plan.launch(s, M, t.clone())?).map(|_| ()))
    };
    Ok(Op {
        name: if scatter { "gemm_rs" } else { "gemm_ar" },
        inputs,
        outs: vec![out],
        launch,
        steps: None,
        facts: Facts::Named,
    })
}

/// Codes with the scale of the team.
fn quant(heap: &Heap, s: &Stream) -> Result<Op> {
    let desc = QuantDesc {
        scope: Scope::Team,
        sides: Sides::Both,
        ..QuantDesc::new(M, N, DType::BF16, DType::F8E4M3, ScaleLayout::Tensor)
    };
    let plan = QuantPlan::new(desc, Some(heap))?;
    prepared(|| plan.prepare(s))?;
    let t = QuantInputs::new(&desc, &tensor(heap, DType::BF16, mine(heap, M), N)?)?;
    let outs = t.row.iter().chain(&t.column).flat_map(|q| [q.data.clone(), q.scales.clone()]);
    Ok(Op {
        name: "quant",
        inputs: vec![(t.x.clone(), Fill::Normal)],
        outs: outs.collect(),
        launch: Box::new(move |s| end(s, plan.launch(s, t.clone())?).map(|_| ())),
        steps: None,
        facts: Facts::Named,
    })
}

/// Routing, dispatch and weighted combine, with routing that changes.
fn ep(layout: EpLayout, heap: &Heap, s: &Stream) -> Result<Op> {
    ep_by((layout, CollectiveBackend::Put), heap, s)
}

fn ep_by(by: (EpLayout, CollectiveBackend), heap: &Heap, s: &Stream) -> Result<Op> {
    ep_to(false, by, heap, s)
}

/// With `straight`, rows come to where they stay.
fn ep_to(
    straight: bool,
    (layout, backend): (EpLayout, CollectiveBackend),
    heap: &Heap,
    s: &Stream,
) -> Result<Op> {
    let (size, tokens, k, experts) = (heap.team().size(), 21, 3, 7);
    let mut desc = EpDesc::new(size, experts, tokens, N, k);
    (desc.dtype, desc.out, desc.layout) = (DType::BF16, DType::BF16, layout);
    desc.capacity = desc.worst_case();
    let plan = EpPlan::with_backend(desc.clone(), heap, backend)?;
    prepared(|| plan.prepare(s))?;
    let handle: EpHandle = plan.handle()?;
    let place = |t: Tensor| t.to(&heap.device());
    let idx = place(Tensor::zeros(DType::I64, Shape::d2(tokens, k)))?;
    let (x, w) = (tensor(heap, DType::BF16, tokens, N)?, tensor(heap, DType::F32, tokens, k)?);
    let recv = EpDispatch {
        x: match straight {
            true => plan.zero_copy_recv()?,
            false => tensor(heap, DType::BF16, desc.recv_rows(), N)?,
        },
        scales: None,
        weights: Some(place(Tensor::poisoned(DType::F32, Shape::d1(desc.capacity)))?),
    };
    let rows = |num: usize| tensor(heap, DType::BF16, num, N);
    let vector = |num: usize| place(Tensor::poisoned(DType::F32, Shape::d1(num)));
    let (y, out, g, dx) = (rows(desc.capacity)?, rows(tokens)?, rows(tokens)?, rows(tokens)?);
    let (d_recv, d_weights) = (rows(desc.recv_rows())?, vector(desc.capacity)?);
    let dw = tensor(heap, DType::F32, tokens, k)?;
    // As kernels behind the phase make it (weighted), or as rows come (without weights).
    let grad_straight = straight && matches!(layout, EpLayout::ExpertMajor { .. });
    let dy = if grad_straight { plan.zero_copy_grad()? } else { rows(desc.capacity)? };
    dy.poison()?;
    let mut outs =
        vec![recv.x.clone(), handle.row_index().clone(), handle.m_splits().clone(), out.clone()];
    outs.extend([&dy, &dx, &dw].map(Clone::clone));
    let inputs = vec![
        (idx.clone(), Fill::Experts(experts, k)),
        (x.clone(), Fill::Normal),
        (w.clone(), Fill::Normal),
        (y.clone(), Fill::Normal),
        (g.clone(), Fill::Normal),
        (d_recv.clone(), Fill::Normal),
    ];
    let steps = move |s: &Stream, num: usize| -> Result<()> {
        end(s, plan.route(s, &idx, None, &handle)?)?;
        if num > 1 {
            end(s, plan.dispatch(s, &handle, &x, (Some(&w), None), &recv)?)?;
        }
        if num > 2 {
            end(s, plan.combine(s, &handle, &y, recv.weights.as_ref(), &out)?)?;
        }
        if num > 3 {
            let weights = recv.weights.as_ref().filter(|_| !grad_straight);
            let weighted = weights.map(|w| (w, &y, &d_weights));
            end(s, plan.combine_bwd(s, &handle, &g, weighted, &dy)?)?;
        }
        if num > 4 {
            let given = (&d_recv, recv.weights.as_ref());
            end(s, plan.dispatch_bwd(s, &handle, given, (&dx, Some(&dw)))?)?;
        }
        Ok(())
    };
    let facts = Facts::Experts(desc, grad_straight);
    Ok(Op::of_steps("ep", inputs, outs, (5, Rc::new(steps)), facts))
}

/// Forward and backward, with the output of the one in the other.
fn cp_attention(strategy: Strategy, heap: &Heap, s: &Stream) -> Result<Op> {
    cp_attention_of(DType::BF16, |d| d, (strategy, CollectiveBackend::Put), (heap, s))
}

fn cp_by(by: (Strategy, CollectiveBackend), heap: &Heap, s: &Stream) -> Result<Op> {
    cp_attention_of(DType::BF16, |d| d, by, (heap, s))
}

fn cp_attention_of(
    input: DType,
    change: impl Fn(CpAttentionDesc) -> CpAttentionDesc,
    (strategy, backend): (Strategy, CollectiveBackend),
    at: (&Heap, &Stream),
) -> Result<Op> {
    cp_attention_as(input, change, (CpConfig::of(strategy), backend), at)
}

fn cp_attention_as(
    input: DType,
    change: impl Fn(CpAttentionDesc) -> CpAttentionDesc,
    (config, backend): (CpConfig, CollectiveBackend),
    (heap, s): (&Heap, &Stream),
) -> Result<Op> {
    // As many heads as two, three or four ranks can trade.
    let (heads, d) = (12, 64);
    let desc = AttentionDesc::new(M, (heads, heads), d, input, AttnMask::CAUSAL);
    let desc = change(CpAttentionDesc::new(desc));
    let t = desc.attn.out;
    let plan = CpAttentionPlan::with_backend(desc, heap, Some(config), backend)?;
    prepared(|| plan.prepare(s))?;
    let rows = plan.rows_q(None);
    let fp8_wires = plan.desc().fp8_kv || plan.desc().dkv_wire.is_fp8();
    let facts = Facts::Attention { rows: rows.clone(), heads, fp8_wires };
    let rows = rows.iter().map(|r| r.len()).sum();
    let new = || tensor(heap, t, rows, heads * d);
    let d_out = new()?;
    let mut inputs = vec![(d_out.clone(), Fill::Normal)];
    let mut operand = || -> Result<AttnOperand> {
        let data = tensor(heap, input, rows, heads * d)?;
        let scales = input.is_fp8().then(|| tensor(heap, DType::F32, rows, heads)).transpose()?;
        inputs.extend(
            [Some(&data), scales.as_ref()].into_iter().flatten().map(|t| (t.clone(), Fill::Normal)),
        );
        Ok(AttnOperand { data, scales })
    };
    let x = AttnInputs::new(operand()?, operand()?, operand()?);
    let lse = tensor(heap, DType::F32, heads, rows)?;
    let o = AttnOut { out: new()?, lse: lse.clone() };
    let (dq, dk, dv) = (new()?, new()?, new()?);
    let outs = vec![o.out.clone(), lse.clone(), dq.clone(), dk.clone(), dv.clone()];
    let steps = move |s: &Stream, num: usize| -> Result<()> {
        end(s, plan.launch_fwd(s, &x, o.clone())?)?;
        if num > 1 {
            let saved = AttnSaved { out: o.out.clone(), lse: lse.clone(), d_out: d_out.clone() };
            let grads = AttnGrads::new(dq.clone(), dk.clone(), dv.clone());
            end(s, plan.launch_bwd(s, &x, saved, grads)?)?;
        }
        Ok(())
    };
    Ok(Op::of_steps("cp_attention", inputs, outs, (2, Rc::new(steps)), facts))
}

/// Keys and values, and parts of their gradients, travel as FP8.
fn fp8_wires(d: CpAttentionDesc) -> CpAttentionDesc {
    CpAttentionDesc { fp8_kv: true, dkv_wire: DType::F8E4M3, ..d }
}

static ALL: [Make; 41] = [
    |h, s| collective("all_gather", h, s, M),
    |h, s| collective("reduce_scatter", h, s, M),
    |h, s| collective("all_reduce", h, s, M),
    |h, s| collective("all_to_all", h, s, M),
    // By copy engines: above the size that kernels move.
    |h, s| collective_odd("all_gather", h, s, LARGE),
    |h, s| collective_odd("all_reduce", h, s, LARGE),
    |h, s| ag_gemm((Algo::Pipelined, DType::BF16), h, s),
    |h, s| ag_gemm((Algo::Sequential, DType::BF16), h, s),
    |h, s| ag_gemm((Algo::Pipelined, DType::F8E4M3), h, s),
    |h, s| gemm_reduce((true, Algo::Pipelined, DType::BF16), h, s),
    |h, s| gemm_reduce((true, Algo::Sequential, DType::BF16), h, s),
    |h, s| gemm_reduce((true, Algo::Pipelined, DType::F8E4M3), h, s),
    |h, s| gemm_reduce((false, Algo::Pipelined, DType::BF16), h, s),
    |h, s| gemm_reduce((false, Algo::Sequential, DType::F8E5M2), h, s),
    quant,
    |h, s| ep(EpLayout::ExpertMajor { align: 4 }, h, s),
    |h, s| ep(EpLayout::Flat { align: 1 }, h, s),
    |h, s| {
        let by = (EpLayout::ExpertMajor { align: 4 }, CollectiveBackend::Put);
        ep_to(true, by, h, s)
    },
    |h, s| cp_attention(Strategy::AllGather, h, s),
    |h, s| cp_attention(Strategy::Get, h, s),
    |h, s| cp_attention(Strategy::Ring, h, s),
    |h, s| cp_attention_of(DType::F8E4M3, |d| d, (Strategy::Ring, CollectiveBackend::Put), (h, s)),
    |h, s| {
        cp_attention_of(
            DType::BF16,
            fp8_wires,
            (Strategy::AllGather, CollectiveBackend::Put),
            (h, s),
        )
    },
    |h, s| {
        cp_attention_of(
            DType::BF16,
            fp8_wires,
            (Strategy::AllToAll, CollectiveBackend::Put),
            (h, s),
        )
    },
    |h, s| cp_attention(Strategy::AllToAll, h, s),
    |h, s| ag_gemm((Algo::Ring, DType::BF16), h, s),
    |h, s| ag_gemm((Algo::Ring, DType::F8E4M3), h, s),
    |h, s| gemm_reduce((true, Algo::Ring, DType::BF16), h, s),
    |h, s| gemm_reduce((false, Algo::Ring, DType::BF16), h, s),
    |h, s| gemm_reduce((false, Algo::Ring, DType::F8E5M2), h, s),
    // By one kernel, in many pieces; and by kernels between two meetings.
    |h, s| collective("all_gather", h, s, MID),
    |h, s| collective("reduce_scatter", h, s, MID),
    |h, s| collective("all_reduce", h, s, MID),
    |h, s| collective("all_to_all", h, s, MID),
    |h, s| collective("reduce_scatter", h, s, LARGE),
    |h, s| collective("all_reduce", h, s, LARGE),
    |h, s| collective_odd("all_reduce", h, s, M),
    |h, s| collective_odd("all_to_all", h, s, M),
    |h, s| ep(EpLayout::RankMajor { align: 4 }, h, s),
    |h, s| {
        let by = (EpLayout::RankMajor { align: 1 }, CollectiveBackend::Put);
        ep_to(true, by, h, s)
    },
    |h, s| {
        let gated = CpConfig { gated: true, ..CpConfig::of(Strategy::AllGather) };
        cp_attention_as(DType::BF16, |d| d, (gated, CollectiveBackend::Put), (h, s))
    },
];

/// Where there is NCCL: even shards, uneven ones, and the choice by the clock.
static BY_NCCL: [Make; 15] = [
    |h, s| collective_by("all_gather", h, s, (M, N, CollectiveBackend::Nccl)),
    |h, s| collective_by("reduce_scatter", h, s, (M, N, CollectiveBackend::Nccl)),
    |h, s| collective_by("all_reduce", h, s, (M, N, CollectiveBackend::Nccl)),
    |h, s| collective_by("all_to_all", h, s, (M, N, CollectiveBackend::Nccl)),
    |h, s| {
        collective_by("all_gather", h, s, (1_400_000 - 1_400_000 % 12, N, CollectiveBackend::Nccl))
    },
    |h, s| collective_by("all_gather", h, s, (M, N, CollectiveBackend::Fastest)),
    |h, s| ag_gemm_as((OverlapConfig::by_nccl(), DType::BF16), h, s),
    |h, s| gemm_reduce_as((true, OverlapConfig::by_nccl(), DType::BF16), h, s),
    |h, s| gemm_reduce_as((false, OverlapConfig::by_nccl(), DType::BF16), h, s),
    |h, s| ep_by((EpLayout::ExpertMajor { align: 4 }, CollectiveBackend::Nccl), h, s),
    |h, s| cp_by((Strategy::Get, CollectiveBackend::Nccl), h, s),
    |h, s| cp_by((Strategy::AllGather, CollectiveBackend::Nccl), h, s),
    |h, s| cp_by((Strategy::AllToAll, CollectiveBackend::Nccl), h, s),
    |h, s| ep_by((EpLayout::ExpertMajor { align: 4 }, CollectiveBackend::Fastest), h, s),
    |h, s| cp_by((Strategy::Get, CollectiveBackend::Fastest), h, s),
];

/// Those of `ops` that `TW_TEAM_OPS=FIRST-LAST` asks for (all without it), with their numbers: a
/// process for some of them, so that one that ends its device does not hide the others.
pub fn asked(ops: &[Make]) -> Vec<(usize, Make)> {
    let range = std::env::var("TW_TEAM_OPS").map_or(0..=usize::MAX, |text| {
        let ends = text.split_once('-').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
        let (first, last) = ends.unwrap_or_else(|| panic!("TW_TEAM_OPS is FIRST-LAST, not {text}"));
        first..=last
    });
    let found: Vec<_> = ops.iter().copied().enumerate().filter(|o| range.contains(&o.0)).collect();
    assert!(!found.is_empty() || ops.is_empty(), "no operation in {range:?}");
    found
}

/// By puts and gets.
pub fn by_puts() -> &'static [Make] {
    &ALL
}

/// One operation of each family, of small tensors: their places among those by puts.
pub const FAMILIES: [usize; 11] = [0, 2, 6, 9, 12, 14, 15, 16, 19, 24, 36];

/// Operations of each way of meeting: by a kernel of one block, by kernels of many, by flags of
/// copy engines.
pub fn for_orders() -> Vec<Make> {
    vec![
        |h, s| collective_odd("all_gather", h, s, M),
        |h, s| collective("all_reduce", h, s, LARGE),
        |h, s| ep(EpLayout::ExpertMajor { align: 4 }, h, s),
        |h, s| ag_gemm((Algo::Pipelined, DType::BF16), h, s),
        |h, s| collective_odd("all_reduce", h, s, LARGE),
        |h, s| ep(EpLayout::Flat { align: 1 }, h, s),
        |h, s| gemm_reduce((true, Algo::Pipelined, DType::BF16), h, s),
        |h, s| cp_attention(Strategy::Get, h, s),
    ]
}

/// Operations that are several launches in turn.
pub fn in_steps() -> Vec<Make> {
    vec![
        |h, s| ep(EpLayout::ExpertMajor { align: 4 }, h, s),
        |h, s| ep(EpLayout::Flat { align: 1 }, h, s),
        |h, s| cp_attention(Strategy::Get, h, s),
        |h, s| cp_attention(Strategy::AllToAll, h, s),
    ]
}

/// Operations whose rows go by the copy stream.
pub fn by_copies() -> Vec<Make> {
    vec![
        |h, s| collective_odd("all_gather", h, s, LARGE),
        |h, s| ag_gemm((Algo::Pipelined, DType::BF16), h, s),
        |h, s| gemm_reduce((true, Algo::Pipelined, DType::BF16), h, s),
        |h, s| cp_attention(Strategy::AllGather, h, s),
    ]
}

/// Whether the bits of an operation of [`by_nccl`] are those of the way that the clock has chosen:
/// attention by puts merges results of two parts, by NCCL there is one.
pub fn has_bits_of_its_way(i: usize) -> bool {
    i + 1 == BY_NCCL.len()
}

/// None on a machine without NCCL.
pub fn by_nccl() -> &'static [Make] {
    match cuda::NcclComm::library() {
        Ok(_) => &BY_NCCL,
        Err(e) => {
            assert!(e.is_unavailable() && e.get_hint().is_some(), "{e}");
            &[]
        }
    }
}

/// As [`ranks`], on a machine with NCCL.
#[track_caller]
pub fn ranks_with_nccl() -> Option<usize> {
    let num = ranks()?;
    if by_nccl().is_empty() {
        did_not_run(Lack::Nccl, "it needs NCCL");
        return None;
    }
    Some(num)
}

/// As [`ranks`], where the library of the GPU bundle is preloaded, which counts and refuses calls.
#[track_caller]
pub fn ranks_watched() -> Option<usize> {
    let num = ranks()?;
    if std::env::var_os("TW_CALLS_DIR").is_none() {
        did_not_run(Lack::Watch, "it needs the library of the GPU bundle preloaded");
        return None;
    }
    Some(num)
}

/// Ranks that `TW_RANKS` asks for.
pub fn ranks_asked() -> Option<usize> {
    std::env::var("TW_RANKS").ok().map(|n| n.parse().unwrap())
}

/// As many ranks as there are devices, at most four, or as are asked for; `None` if that is no
/// team: then the test did not run.
#[track_caller]
pub fn ranks() -> Option<usize> {
    let num = cuda::device_count().unwrap_or_else(|e| {
        assert!(e.is_unavailable() && e.get_hint().is_some(), "{e}");
        0
    });
    if num < 2 {
        did_not_run(if num == 0 { Lack::Gpu } else { Lack::Gpus }, "it needs two devices");
        return None;
    }
    Some((num as usize).min(ranks_asked().unwrap_or(4)))
}

pub fn heap(world: &World, name: &str) -> Result<(Heap, Stream)> {
    let heap = world.everyone(name)?.heap(BackendKind::Vmm, HeapCfg::new(600 << 20))?;
    let Device::Cuda(ctx) = heap.device() else { panic!("a heap of the host") };
    Ok((heap, Stream::on(&ctx)?))
}
