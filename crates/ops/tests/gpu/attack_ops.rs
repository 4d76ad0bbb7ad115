//! The operations whose signals are attacked: as `team_ops`, of a few rows each, with what their
//! plans predict.

use std::rc::Rc;

use tilewire_core::{DType, Result, ScaleLayout, Shape};
use tilewire_device::{Stream, Tensor};
use tilewire_ops::Shards;
use tilewire_ops::ag_gemm::{AgGemmDesc, AgGemmInputs, AgGemmPlan};
use tilewire_ops::attention::{AttentionDesc, AttnGrads, AttnInputs, AttnMask, AttnOut, AttnSaved};
use tilewire_ops::bulk::{BulkInputs, BulkPlan};
use tilewire_ops::collective::{CollectiveDesc, CollectiveKind, CollectivePlan, ReduceOp};
use tilewire_ops::common::{Algo, OverlapConfig};
use tilewire_ops::cp_attention::{CpAttentionDesc, CpAttentionPlan, CpConfig, Pass, Strategy};
use tilewire_ops::ep::{EpDesc, EpDispatch, EpHandle, EpLayout, EpPlan};
use tilewire_ops::gemm::{GemmDesc, GemmInputs};
use tilewire_ops::gemm_ar::{GemmArDesc, GemmArPlan};
use tilewire_ops::gemm_rs::{GemmRsDesc, GemmRsInputs, GemmRsPlan};
use tilewire_ops::quant::{QuantDesc, QuantInputs, QuantPlan, Scope, Sides};
use tilewire_symm::{Heap, Traffic};

use crate::expected::Facts;
use crate::inputs::Fill;
use crate::team_ops::{Op, end, mine, tensor};

/// Rows of 48 bytes: whole units of 16, as the kernels take them that meet the others.
const M: usize = 31;
const N: usize = 24;
const K: usize = 16;
/// Rows that are no whole 16 bytes: they go by kernels between two meetings.
const ODD: usize = 19;

/// An operation, and what its plan predicts that a launch sends to each peer; none where it does
/// not predict.
pub struct Attacked {
    pub op: Op,
    pub predicted: Option<Traffic>,
}

pub type MakeAttacked = fn(&Heap, &Stream) -> Result<Attacked>;

fn simple(
    name: &'static str,
    (x, outs): (Vec<Tensor>, Vec<Tensor>),
    predicted: Option<Traffic>,
    launch: impl Fn(&Stream) -> Result<()> + 'static,
) -> Attacked {
    let inputs = x.into_iter().map(|t| (t, Fill::Normal)).collect();
    let op = Op { name, inputs, outs, launch: Box::new(launch), steps: None, facts: Facts::Named };
    Attacked { op, predicted }
}

fn kind(name: &str, heap: &Heap, m: usize) -> (CollectiveKind, usize, usize) {
    let size = heap.team().size();
    match name {
        "all_gather" => (CollectiveKind::AllGather(Shards::Even), mine(heap, m), m),
        "reduce_scatter" => {
            (CollectiveKind::ReduceScatter(Shards::Even, ReduceOp::Avg), m, mine(heap, m))
        }
        "all_reduce" => (CollectiveKind::AllReduce(ReduceOp::Sum), m, m),
        _ => {
            let each = m / size;
            (CollectiveKind::AllToAll(vec![vec![each; size]; size]), each * size, each * size)
        }
    }
}

fn collective(
    name: &'static str,
    heap: &Heap,
    s: &Stream,
    size: (usize, usize),
) -> Result<Attacked> {
    collective_by(CollectivePlan::new, name, (heap, s), size)
}

fn by_engines(name: &'static str, heap: &Heap, s: &Stream) -> Result<Attacked> {
    collective_by(CollectivePlan::by_copy_engines, name, (heap, s), (M, N))
}

fn collective_by(
    make: fn(CollectiveDesc, &Heap) -> Result<CollectivePlan>,
    name: &'static str,
    (heap, s): (&Heap, &Stream),
    (m, cols): (usize, usize),
) -> Result<Attacked> {
    let (kind, rows_in, rows_out) = kind(name, heap, m);
    let plan = make(CollectiveDesc { kind, m, cols, dtype: DType::BF16 }, heap)?;
    plan.prepare(s)?;
    let x = tensor(heap, DType::BF16, rows_in, cols)?;
    let out = tensor(heap, DType::BF16, rows_out, cols)?;
    let predicted = Some(plan.predict(m)?);
    Ok(simple(name, (vec![x.clone()], vec![out.clone()]), predicted, move |s| {
        end(s, plan.launch(s, m, &x, &out)?).map(|_| ())
    }))
}

/// A product beside a collective.
fn bulk(name: &'static str, of: &str, heap: &Heap, s: &Stream) -> Result<Attacked> {
    let (kind, rows_in, rows_out) = kind(of, heap, M);
    let gemm = GemmDesc::nt(M, N, K, DType::BF16);
    let product = gemm.out;
    let desc = CollectiveDesc { kind, m: M, cols: N, dtype: DType::BF16 };
    let plan = BulkPlan::new(gemm, desc, heap)?;
    plan.prepare(s)?;
    let (a, b) = (tensor(heap, DType::BF16, M, K)?, tensor(heap, DType::BF16, N, K)?);
    let out = tensor(heap, product, M, N)?;
    let x = tensor(heap, DType::BF16, rows_in, N)?;
    let y = tensor(heap, DType::BF16, rows_out, N)?;
    let predicted = Some(plan.predict(M)?);
    let tensors = (vec![a.clone(), b.clone(), x.clone()], vec![out.clone(), y.clone()]);
    Ok(simple(name, tensors, predicted, move |s| {
        let gemm = GemmInputs::new(a.clone(), b.clone(), out.clone());
        let t = BulkInputs { gemm, m: M, x: x.clone(), y: y.clone() };
        end(s, plan.launch(s, t)?).map(|_| ())
    }))
}

fn ag_gemm(name: &'static str, algo: Algo, heap: &Heap, s: &Stream) -> Result<Attacked> {
    let desc = AgGemmDesc::new(M, N, K, DType::BF16);
    let out = desc.out;
    let plan = AgGemmPlan::new(desc, heap, Some(OverlapConfig::of(algo, 2)))?;
    plan.prepare(s)?;
    let t = DType::BF16;
    let (x, w) = (tensor(heap, t, mine(heap, M), K)?, tensor(heap, t, N, K)?);
    let (out, gathered) = (tensor(heap, out, M, N)?, tensor(heap, t, M, K)?);
    let predicted = Some(plan.predict(M)?);
    let tensors = (vec![x.clone(), w.clone()], vec![out.clone(), gathered.clone()]);
    let t = AgGemmInputs { gathered: Some(gathered), ..AgGemmInputs::new(x, w, out) };
    Ok(simple(name, tensors, predicted, move |s| end(s, plan.launch(s, M, t.clone())?).map(|_| ())))
}

fn gemm_rs(
    name: &'static str,
    (algo, chunks): (Algo, usize),
    heap: &Heap,
    s: &Stream,
) -> Result<Attacked> {
    let desc = GemmRsDesc::new(M, N, K, DType::BF16);
    let out = tensor(heap, desc.out, mine(heap, M), N)?;
    let plan = GemmRsPlan::new(desc, heap, Some(OverlapConfig::of(algo, chunks)))?;
    plan.prepare(s)?;
    let (x, w) = (tensor(heap, DType::BF16, M, K)?, tensor(heap, DType::BF16, N, K)?);
    let predicted = Some(plan.predict(M)?);
    let t = GemmRsInputs::new(x.clone(), w.clone(), out.clone());
    Ok(simple(name, (vec![x, w], vec![out]), predicted, move |s| {
        end(s, plan.launch(s, M, t.clone())?).map(|_| ())
    }))
}

fn gemm_ar(name: &'static str, algo: Algo, heap: &Heap, s: &Stream) -> Result<Attacked> {
    let desc = GemmRsDesc::new(M, N, K, DType::BF16);
    let out = tensor(heap, desc.out, M, N)?;
    let plan = GemmArPlan::new(GemmArDesc(desc), heap, Some(OverlapConfig::of(algo, 2)))?;
    plan.prepare(s)?;
    let (x, w) = (tensor(heap, DType::BF16, M, K)?, tensor(heap, DType::BF16, N, K)?);
    let predicted = Some(plan.predict(M)?);
    let t = GemmRsInputs::new(x.clone(), w.clone(), out.clone());
    Ok(simple(name, (vec![x, w], vec![out]), predicted, move |s| {
        end(s, plan.launch(s, M, t.clone())?).map(|_| ())
    }))
}

/// Codes with the scale of the team.
fn quant(heap: &Heap, s: &Stream) -> Result<Attacked> {
    let desc = QuantDesc {
        scope: Scope::Team,
        sides: Sides::Both,
        ..QuantDesc::new(M, N, DType::BF16, DType::F8E4M3, ScaleLayout::Tensor)
    };
    let plan = QuantPlan::new(desc, Some(heap))?;
    plan.prepare(s)?;
    let t = QuantInputs::new(&desc, &tensor(heap, DType::BF16, mine(heap, M), N)?)?;
    let outs = t.row.iter().chain(&t.column).flat_map(|q| [q.data.clone(), q.scales.clone()]);
    let tensors = (vec![t.x.clone()], outs.collect());
    let predicted = Some(plan.predict());
    Ok(simple("quant", tensors, predicted, move |s| end(s, plan.launch(s, t.clone())?).map(|_| ())))
}

/// Routing, dispatch and combine, and both backward; with `straight`, rows come to where they stay.
fn ep(
    name: &'static str,
    (straight, layout): (bool, EpLayout),
    heap: &Heap,
    s: &Stream,
) -> Result<Attacked> {
    let (size, tokens, k, experts) = (heap.team().size(), 9, 2, 5);
    let mut desc = EpDesc::new(size, experts, tokens, N, k);
    (desc.dtype, desc.out, desc.layout) = (DType::BF16, DType::BF16, layout);
    desc.capacity = desc.worst_case();
    let plan = EpPlan::new(desc.clone(), heap)?;
    plan.prepare(s)?;
    let handle: EpHandle = plan.handle()?;
    let place = |t: Tensor| t.to(&heap.device());
    let idx = place(Tensor::zeros(DType::I64, Shape::d2(tokens, k)))?;
    let rows = |num: usize| tensor(heap, DType::BF16, num, N);
    let vector = |num: usize| place(Tensor::poisoned(DType::F32, Shape::d1(num)));
    let (x, w) = (rows(tokens)?, tensor(heap, DType::F32, tokens, k)?);
    let recv = EpDispatch {
        x: if straight { plan.zero_copy_recv()? } else { rows(desc.recv_rows())? },
        scales: None,
        weights: Some(vector(desc.capacity)?),
    };
    let (y, out, g, dx) = (rows(desc.capacity)?, rows(tokens)?, rows(tokens)?, rows(tokens)?);
    let (d_recv, d_weights) = (rows(desc.recv_rows())?, vector(desc.capacity)?);
    let dw = tensor(heap, DType::F32, tokens, k)?;
    let grad_straight = straight && matches!(layout, EpLayout::ExpertMajor { .. });
    let dy = if grad_straight { plan.zero_copy_grad()? } else { rows(desc.capacity)? };
    let mut outs =
        vec![recv.x.clone(), handle.row_index().clone(), handle.m_splits().clone(), out.clone()];
    outs.extend([&dy, &dx, &dw].map(Clone::clone));
    let mut inputs = vec![(idx.clone(), Fill::Experts(experts, k))];
    inputs.extend([&x, &w, &y, &g, &d_recv].map(|t| (t.clone(), Fill::Normal)));
    let steps = move |s: &Stream, _: usize| -> Result<()> {
        end(s, plan.route(s, &idx, None, &handle)?)?;
        end(s, plan.dispatch(s, &handle, &x, (Some(&w), None), &recv)?)?;
        end(s, plan.combine(s, &handle, &y, recv.weights.as_ref(), &out)?)?;
        let weights = recv.weights.as_ref().filter(|_| !grad_straight);
        let weighted = weights.map(|w| (w, &y, &d_weights));
        end(s, plan.combine_bwd(s, &handle, &g, weighted, &dy)?)?;
        let given = (&d_recv, recv.weights.as_ref());
        end(s, plan.dispatch_bwd(s, &handle, given, (&dx, Some(&dw)))?).map(|_| ())
    };
    let op = Op::of_steps(name, inputs, outs, (5, Rc::new(steps)), Facts::Named);
    Ok(Attacked { op, predicted: None })
}

/// A layer of a few tokens, with its experts.
fn small_layer(heap: &Heap, s: &Stream) -> Result<(EpDesc, EpPlan, Tensor)> {
    let (size, tokens, k, experts) = (heap.team().size(), 5, 2, 5);
    let mut desc = EpDesc::new(size, experts, tokens, N, k);
    (desc.dtype, desc.out) = (DType::BF16, DType::BF16);
    desc.capacity = desc.worst_case();
    let plan = EpPlan::new(desc.clone(), heap)?;
    plan.prepare(s)?;
    let idx = Tensor::zeros(DType::I64, Shape::d2(tokens, k)).to(&heap.device())?;
    Ok((desc, plan, idx))
}

/// Two dispatches of one routing, and two combines: only credits part the two.
fn ep_twice(heap: &Heap, s: &Stream) -> Result<Attacked> {
    let (desc, plan, idx) = small_layer(heap, s)?;
    let handle: EpHandle = plan.handle()?;
    let rows = |num: usize| tensor(heap, DType::BF16, num, N);
    let x = [rows(desc.max_tokens)?, rows(desc.max_tokens)?];
    let y = [rows(desc.capacity)?, rows(desc.capacity)?];
    let out = [rows(desc.max_tokens)?, rows(desc.max_tokens)?];
    let recv = [rows(desc.recv_rows())?, rows(desc.recv_rows())?];
    let mut inputs = vec![(idx.clone(), Fill::Experts(desc.num_experts(), desc.top_k))];
    inputs.extend(x.iter().chain(&y).map(|t| (t.clone(), Fill::Normal)));
    let outs = recv.iter().chain(&out).cloned().collect();
    let steps = move |s: &Stream, _: usize| -> Result<()> {
        end(s, plan.route(s, &idx, None, &handle)?)?;
        for i in 0..2 {
            let recv = EpDispatch { x: recv[i].clone(), scales: None, weights: None };
            end(s, plan.dispatch(s, &handle, &x[i], (None, None), &recv)?)?;
        }
        for i in 0..2 {
            end(s, plan.combine(s, &handle, &y[i], None, &out[i])?)?;
        }
        Ok(())
    };
    let op = Op::of_steps("ep", inputs, outs, (5, Rc::new(steps)), Facts::Named);
    Ok(Attacked { op, predicted: None })
}

/// Two dispatches of one routing to the same receive buffer, which is read between them: only what
/// a rank announces parts the second from the reader.
fn ep_straight_twice(heap: &Heap, s: &Stream) -> Result<Attacked> {
    let (desc, plan, idx) = small_layer(heap, s)?;
    let handle: EpHandle = plan.handle()?;
    let x = [0, 1].map(|_| tensor(heap, DType::BF16, desc.max_tokens, N));
    let [a, b] = x;
    let x = [a?, b?];
    let recv = EpDispatch { x: plan.zero_copy_recv()?, scales: None, weights: None };
    let read =
        QuantDesc::new(desc.recv_rows(), N, DType::BF16, DType::F8E4M3, ScaleLayout::Block1x128);
    let reader = QuantPlan::new(read, None)?;
    reader.prepare(s)?;
    let [first, second] = [0, 1].map(|_| QuantInputs::new(&read, &recv.x));
    let codes = [first?, second?];
    let mut inputs = vec![(idx.clone(), Fill::Experts(desc.num_experts(), desc.top_k))];
    inputs.extend(x.iter().map(|t| (t.clone(), Fill::Normal)));
    let q = codes.iter().flat_map(|t| t.row.iter());
    let outs = q.flat_map(|q| [q.data.clone(), q.scales.clone()]).collect();
    let steps = move |s: &Stream, _: usize| -> Result<()> {
        end(s, plan.route(s, &idx, None, &handle)?)?;
        for i in 0..2 {
            end(s, plan.dispatch(s, &handle, &x[i], (None, None), &recv)?)?;
            end(s, reader.launch(s, codes[i].clone())?)?;
        }
        Ok(())
    };
    let op = Op::of_steps("ep", inputs, outs, (3, Rc::new(steps)), Facts::Named);
    Ok(Attacked { op, predicted: None })
}

fn cp_attention(config: CpConfig, heap: &Heap, s: &Stream) -> Result<Attacked> {
    let size = heap.team().size();
    // The kernel with gates has no smaller heads.
    let (d, dtype) = if config.gated { (64, DType::BF16) } else { (8, DType::F32) };
    let desc = AttentionDesc::new(4 * size, (size, size), d, dtype, AttnMask::CAUSAL);
    let a2a_size = if size.is_multiple_of(2) { 2 } else { 1 };
    let desc = CpAttentionDesc { a2a_size, ..CpAttentionDesc::new(desc) };
    let t = desc.attn.out;
    let plan = CpAttentionPlan::new(desc, heap, Some(config))?;
    plan.prepare(s)?;
    let rows = plan.rows_q(None).iter().map(|r| r.len()).sum();
    let new = || tensor(heap, t, rows, size * d);
    // Backward from other keys: bytes left over from forward must not pass for those of backward.
    let all = (0..7).map(|_| new()).collect::<Result<Vec<_>>>()?;
    let lse = tensor(heap, DType::F32, size, rows)?;
    let o = AttnOut { out: new()?, lse: lse.clone() };
    let (dq, dk, dv) = (new()?, new()?, new()?);
    let outs = vec![o.out.clone(), lse.clone(), dq.clone(), dk.clone(), dv.clone()];
    let mut predicted = plan.predict(None, Pass::Forward)?;
    for (all, bwd) in predicted.iter_mut().zip(plan.predict(None, Pass::Backward)?) {
        all.puts += bwd.puts;
        all.put_bytes += bwd.put_bytes;
        all.signals += bwd.signals;
    }
    let of = |i: usize| AttnInputs::new(all[i].clone(), all[i + 1].clone(), all[i + 2].clone());
    let (fwd, bwd, d_out) = (of(0), of(3), all[6].clone());
    let tensors = (all, outs);
    Ok(simple("cp_attention", tensors, Some(predicted), move |s| {
        end(s, plan.launch_fwd(s, &fwd, o.clone())?)?;
        let saved = AttnSaved { out: o.out.clone(), lse: lse.clone(), d_out: d_out.clone() };
        let grads = AttnGrads::new(dq.clone(), dk.clone(), dv.clone());
        end(s, plan.launch_bwd(s, &bwd, saved, grads)?).map(|_| ())
    }))
}

/// Each with its name.
pub static OPS: [(&str, MakeAttacked); 37] = [
    ("all_gather", |h, s| collective("all_gather", h, s, (M, N))),
    ("reduce_scatter", |h, s| collective("reduce_scatter", h, s, (M, N))),
    ("all_reduce", |h, s| collective("all_reduce", h, s, (M, N))),
    ("all_to_all", |h, s| collective("all_to_all", h, s, (M, N))),
    ("all_gather, kernels", |h, s| collective("all_gather", h, s, (M, ODD))),
    ("reduce_scatter, kernels", |h, s| collective("reduce_scatter", h, s, (M, ODD))),
    ("all_reduce, kernels", |h, s| collective("all_reduce", h, s, (M, ODD))),
    ("all_to_all, kernels", |h, s| collective("all_to_all", h, s, (M, ODD))),
    ("engines all_gather", |h, s| by_engines("all_gather", h, s)),
    ("engines reduce_scatter", |h, s| by_engines("reduce_scatter", h, s)),
    ("engines all_reduce", |h, s| by_engines("all_reduce", h, s)),
    ("engines all_to_all", |h, s| by_engines("all_to_all", h, s)),
    ("ag_gemm pipelined", |h, s| ag_gemm("ag_gemm", Algo::Pipelined, h, s)),
    ("ag_gemm sequential", |h, s| ag_gemm("ag_gemm", Algo::Sequential, h, s)),
    ("ag_gemm ring", |h, s| ag_gemm("ag_gemm", Algo::Ring, h, s)),
    ("gemm_rs pipelined", |h, s| gemm_rs("gemm_rs", (Algo::Pipelined, 2), h, s)),
    ("gemm_rs pipelined, one chunk", |h, s| gemm_rs("gemm_rs", (Algo::Pipelined, 1), h, s)),
    ("gemm_rs sequential", |h, s| gemm_rs("gemm_rs", (Algo::Sequential, 2), h, s)),
    ("gemm_rs ring", |h, s| gemm_rs("gemm_rs", (Algo::Ring, 2), h, s)),
    ("gemm_ar pipelined", |h, s| gemm_ar("gemm_ar", Algo::Pipelined, h, s)),
    ("gemm_ar sequential", |h, s| gemm_ar("gemm_ar", Algo::Sequential, h, s)),
    ("gemm_ar ring", |h, s| gemm_ar("gemm_ar", Algo::Ring, h, s)),
    ("quant", quant),
    ("bulk all_gather", |h, s| bulk("bulk", "all_gather", h, s)),
    ("bulk reduce_scatter", |h, s| bulk("bulk", "reduce_scatter", h, s)),
    ("ep expert-major", |h, s| ep("ep", (false, EpLayout::ExpertMajor { align: 4 }), h, s)),
    ("ep flat", |h, s| ep("ep", (false, EpLayout::Flat { align: 1 }), h, s)),
    ("ep zero copy", |h, s| ep("ep", (true, EpLayout::ExpertMajor { align: 4 }), h, s)),
    ("ep rank-major", |h, s| ep("ep", (true, EpLayout::RankMajor { align: 1 }), h, s)),
    ("ep twice", ep_twice),
    ("ep zero copy twice", ep_straight_twice),
    ("cp_attention all_gather", |h, s| cp_attention(CpConfig::of(Strategy::AllGather), h, s)),
    ("cp_attention gated", |h, s| {
        cp_attention(CpConfig { gated: true, ..CpConfig::of(Strategy::AllGather) }, h, s)
    }),
    ("cp_attention get", |h, s| cp_attention(CpConfig::of(Strategy::Get), h, s)),
    ("cp_attention ring", |h, s| cp_attention(CpConfig::of(Strategy::Ring), h, s)),
    ("cp_attention all_to_all", |h, s| cp_attention(CpConfig::of(Strategy::AllToAll), h, s)),
    ("cp_attention hybrid", |h, s| cp_attention(CpConfig::of(Strategy::Hybrid), h, s)),
];

/// Those that `TW_ATTACKED=BEGINNING,...` names by how they begin (all without it).
pub fn asked_ops() -> Vec<(&'static str, MakeAttacked)> {
    let names = std::env::var("TW_ATTACKED").unwrap_or_default();
    let asked = |name: &str| names.split(',').any(|begins| name.starts_with(begins));
    let found: Vec<_> = OPS.into_iter().filter(|o| asked(o.0)).collect();
    assert!(!found.is_empty(), "no operation begins with one of {names}");
    found
}
