//! Every operation with a team, ready to launch: what the protocol and fault tests run.
#![allow(dead_code, reason = "each test binary uses its part")]

pub mod expected;

use std::cell::Cell;

use tilewire_core::*;
use tilewire_device::{Pending, Stream, Tensor};
use tilewire_ops::ag_gemm::*;
use tilewire_ops::attention::{AttentionDesc, AttnGrads, AttnInputs, AttnMask, AttnOut, AttnSaved};
use tilewire_ops::bulk::{BulkInputs, BulkPlan};
use tilewire_ops::collective::*;
use tilewire_ops::common::OverlapConfig;
use tilewire_ops::cp_attention::{CpAttentionDesc, CpAttentionPlan, CpConfig, Strategy};
use tilewire_ops::ep::{EpDesc, EpDispatch, EpPlan};
use tilewire_ops::gemm::{GemmDesc, GemmInputs};
use tilewire_ops::gemm_ar::*;
use tilewire_ops::gemm_rs::*;
use tilewire_ops::quant::{DequantDesc, DequantPlan, QuantDesc, QuantInputs, QuantPlan, Scope};
use tilewire_ops::{Algo, Shards};
use tilewire_symm::*;

pub const M: usize = 12;
pub const N: usize = 8;
pub const K: usize = 6;

/// A prepared operation with buffers of its own: fill the inputs, launch, read the output.
pub struct Ready {
    pub inputs: Vec<Tensor>,
    pub out: Tensor,
    pub launch: Launch,
}

/// Queues one round of the operation.
pub type Launch = Box<dyn Fn(&Stream) -> Result<()>>;

pub type Make = fn(&Heap, &Stream, bool) -> Result<Ready>;

fn prepared_if(yes: bool, f: impl FnOnce() -> Result<()>) -> Result<()> {
    if yes { f() } else { Ok(()) }
}

pub fn mine(heap: &Heap) -> usize {
    Shards::Even.rows(M, heap.team().size()).unwrap()[heap.team().rank().idx()]
}

pub fn zeros(rows: usize, cols: usize) -> Tensor {
    Tensor::zeros(DType::F32, Shape::d2(rows, cols))
}

pub fn out(rows: usize, cols: usize) -> Tensor {
    Tensor::poisoned(DType::F32, Shape::d2(rows, cols))
}

fn ag(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    ag_of(Algo::Fused, heap, stream, prepare)
}

fn ag_ring(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    ag_of(Algo::Ring, heap, stream, prepare)
}

fn ag_of(algo: Algo, heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    let config = OverlapConfig { block_m: 2, block_n: 4, ..OverlapConfig::of(algo, 2) };
    let plan = AgGemmPlan::new(AgGemmDesc::new(M, N, K, DType::F32), heap, Some(config))?;
    prepared_if(prepare, || plan.prepare(stream))?;
    let (x, w, y) = (zeros(mine(heap), K), zeros(N, K), out(M, N));
    let t = AgGemmInputs::new(x.clone(), w.clone(), y.clone());
    Ok(Ready {
        inputs: vec![x, w],
        out: y,
        launch: Box::new(move |s| plan.launch(s, M, t.clone())?.join(s).map(|_| ())),
    })
}

fn rs_of(algo: Algo, heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    let config = OverlapConfig { block_m: 2, block_n: 4, ..OverlapConfig::of(algo, 2) };
    let plan = GemmRsPlan::new(GemmRsDesc::new(M, N, K, DType::F32), heap, Some(config))?;
    prepared_if(prepare, || plan.prepare(stream))?;
    let (x, w, y) = (zeros(M, K), zeros(N, K), out(mine(heap), N));
    let t = GemmRsInputs::new(x.clone(), w.clone(), y.clone());
    Ok(Ready {
        inputs: vec![x, w],
        out: y,
        launch: Box::new(move |s| plan.launch(s, M, t.clone())?.join(s).map(|_| ())),
    })
}

fn rs_fused(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    rs_of(Algo::Fused, heap, stream, prepare)
}

fn rs_ring(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    rs_of(Algo::Ring, heap, stream, prepare)
}

fn rs_pipelined(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    rs_of(Algo::Pipelined, heap, stream, prepare)
}

fn ar(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    ar_of(Algo::Fused, heap, stream, prepare)
}

fn ar_ring(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    ar_of(Algo::Ring, heap, stream, prepare)
}

fn ar_of(algo: Algo, heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    let config = OverlapConfig { block_m: 2, block_n: 4, ..OverlapConfig::of(algo, 2) };
    let plan = GemmArPlan::new(GemmArDesc::new(M, N, K, DType::F32), heap, Some(config))?;
    prepared_if(prepare, || plan.prepare(stream))?;
    let (x, w, y) = (zeros(M, K), zeros(N, K), out(M, N));
    let t = GemmRsInputs::new(x.clone(), w.clone(), y.clone());
    Ok(Ready {
        inputs: vec![x, w],
        out: y,
        launch: Box::new(move |s| plan.launch(s, M, t.clone())?.join(s).map(|_| ())),
    })
}

fn collective(kind: CollectiveKind, heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    let rows = match &kind {
        CollectiveKind::AllGather(_) => (mine(heap), M),
        CollectiveKind::ReduceScatter(..) => (M, mine(heap)),
        CollectiveKind::AllReduce(_) => (M, M),
        CollectiveKind::AllToAll(s) => (s[0].iter().sum(), s.iter().map(|r| r[0]).sum()),
    };
    let desc = CollectiveDesc { kind, m: M, cols: N, dtype: DType::F32 };
    let plan = CollectivePlan::new(desc, heap)?;
    prepared_if(prepare, || plan.prepare(stream))?;
    let (x, y) = (zeros(rows.0, N), out(rows.1, N));
    let (a, b) = (x.clone(), y.clone());
    Ok(Ready {
        inputs: vec![x],
        out: y,
        launch: Box::new(move |s| plan.launch(s, M, &a, &b)?.join(s).map(|_| ())),
    })
}

pub fn gather(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    collective(CollectiveKind::AllGather(Shards::Even), heap, stream, prepare)
}

pub fn scatter(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    collective(CollectiveKind::ReduceScatter(Shards::Even, ReduceOp::Sum), heap, stream, prepare)
}

fn reduce(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    collective(CollectiveKind::AllReduce(ReduceOp::Sum), heap, stream, prepare)
}

fn exchange(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    let n = heap.team().size();
    collective(CollectiveKind::AllToAll(vec![vec![3; n]; n]), heap, stream, prepare)
}

/// Routing, tokens out and back, and the backward of both.
fn ep(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    ep_of(false, heap, stream, prepare)
}

/// The same, cut as finely as devices cut, with rows that come straight to where they stay; the
/// gradient of a combine without weights.
fn ep_fine(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    ep_of(true, heap, stream, prepare)
}

fn ep_of(fine: bool, heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    let size = heap.team().size();
    let desc = EpDesc::new(size, 2 * size + 3, 4, N, 2);
    let plan = match fine {
        true => EpPlan::with_fine_chunks(desc.clone(), heap)?,
        false => EpPlan::new(desc.clone(), heap)?,
    };
    prepared_if(prepare, || plan.prepare(stream))?;
    let idx = Tensor::zeros(DType::I64, Shape::d2(4, 2));
    let (x, w, g) = (zeros(4, N), zeros(4, 2), zeros(4, N));
    let all = out(9, N);
    let (y, dx) = (all.rows(0, 4)?, all.rows(4, 4)?);
    let dw = all.rows(8, 1)?.reshape(Shape::d2(4, 2))?;
    let vector = || Tensor::poisoned(DType::F32, Shape::d1(desc.capacity));
    let rows = |made: fn(&EpPlan) -> Result<Tensor>| match fine && prepare {
        true => made(&plan),
        false => Ok(out(desc.capacity, N)),
    };
    let (x_recv, d_recv) = (rows(EpPlan::zero_copy_recv)?, rows(EpPlan::zero_copy_grad)?);
    x_recv.poison()?;
    d_recv.poison()?;
    let recv = EpDispatch { x: x_recv, scales: None, weights: Some(vector()) };
    let (d_weights, handle) = (vector(), plan.handle().unwrap());
    let inputs = vec![idx.clone(), x.clone(), w.clone(), g.clone()];
    let round = move |s: &Stream| -> Result<()> {
        let h = plan.route(s, &idx, None, &handle)?.join(s)?;
        let r = plan.dispatch(s, &h, &x, (Some(&w), None), &recv)?.join(s)?;
        plan.combine(s, &h, &r.x, r.weights.as_ref(), &y)?.join(s)?;
        let weighted = r.weights.as_ref().filter(|_| !fine).map(|w| (w, &r.x, &d_weights));
        plan.combine_bwd(s, &h, &g, weighted, &d_recv)?.join(s)?;
        // Without weights there are no gradients of them: the weights themselves go home.
        let d_weights = if fine { r.weights.as_ref() } else { Some(&d_weights) };
        plan.dispatch_bwd(s, &h, (&d_recv, d_weights), (&dx, Some(&dw)))?.join(s)?;
        Ok(())
    };
    Ok(Ready {
        inputs,
        out: all,
        launch: Box::new(move |s| match round(s) {
            // A death between two launches is found by who waits for the first.
            Err(e) if e.is_peer_dead() => Ok(()),
            done => done,
        }),
    })
}

/// A collective beside a product of its own; the table compares what the collective makes. Each
/// launch has its own product: nothing orders the products of launches on different streams.
fn bulk(kind: CollectiveKind, heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    let rows = match &kind {
        CollectiveKind::AllGather(_) => (mine(heap), M),
        _ => (M, mine(heap)),
    };
    let desc = CollectiveDesc { kind, m: M, cols: N, dtype: DType::F32 };
    let plan = BulkPlan::new(GemmDesc::nt(N, N, K, DType::F32), desc, heap)?;
    prepared_if(prepare, || plan.prepare(stream))?;
    let (x, y) = (zeros(rows.0, N), out(rows.1, N));
    let (a, b) = (zeros(N, K), zeros(N, K));
    Ok(Ready {
        inputs: vec![x.clone()],
        out: y.clone(),
        launch: Box::new(move |s| {
            let gemm = GemmInputs::new(a.clone(), b.clone(), out(N, N));
            let t = BulkInputs { gemm, m: M, x: x.clone(), y: y.clone() };
            plan.launch(s, t)?.join(s).map(|_| ())
        }),
    })
}

fn bulk_gather(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    bulk(CollectiveKind::AllGather(Shards::Even), heap, stream, prepare)
}

fn bulk_scatter(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    bulk(CollectiveKind::ReduceScatter(Shards::Even, ReduceOp::Sum), heap, stream, prepare)
}

/// Codes with the scale of the team, widened again. What rank 0 has decides the scale, and grows:
/// an old one gives other codes.
fn quant(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    let (from, to) = (DType::F32, DType::F8E4M3);
    let layout = ScaleLayout::Tensor;
    let desc = QuantDesc { scope: Scope::Team, ..QuantDesc::new(M, N, from, to, layout) };
    let plan = QuantPlan::new(desc, Some(heap))?;
    let wide = DequantPlan::new(DequantDesc { rows: M, cols: N, src: to, layout, out: from })?;
    prepared_if(prepare, || plan.prepare(stream).and_then(|()| wide.prepare(stream)))?;
    let (x, grown, y) = (zeros(M, N), zeros(M, N), out(M, N));
    let t = QuantInputs::new(&desc, &grown)?;
    let (first, launch) = (heap.team().rank() == Rank::new(0), Cell::new(0.0f32));
    Ok(Ready {
        inputs: vec![x.clone()],
        out: y.clone(),
        launch: Box::new(move |s| {
            launch.set(launch.get() + 10.0);
            let by = if first { launch.get() } else { 1.0 };
            let v: Vec<f32> = x.to_f32()?.iter().map(|v| v * by).collect();
            grown.write(|b| b.copy_from_slice(bytemuck::cast_slice(&v)))?;
            let q = plan.launch(s, t.clone())?.join(s)?.row.expect("a result by rows");
            wide.launch(s, &q, &y)?.join(s).map(|_| ())
        }),
    })
}

/// In the attacks alone: its launches differ by more than their inputs.
pub const QUANT: (&str, Make) = ("quant of a team", quant);

pub const OPS: [(&str, Make); 15] = [
    ("ep", ep),
    ("ep fine", ep_fine),
    ("ag_gemm", ag),
    ("ag_gemm ring", ag_ring),
    ("gemm_rs fused", rs_fused),
    ("gemm_rs pipelined", rs_pipelined),
    ("gemm_rs ring", rs_ring),
    ("gemm_ar", ar),
    ("gemm_ar ring", ar_ring),
    ("all_gather", gather),
    ("reduce_scatter", scatter),
    ("all_reduce", reduce),
    ("all_to_all", exchange),
    ("all_gather in bulk", bulk_gather),
    ("reduce_scatter in bulk", bulk_scatter),
];

/// Forward, then backward from other keys and values: bytes left over from the forward pass must
/// not pass for those of the backward pass. All outputs lie in one tensor.
fn cp(strategy: Strategy, heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    let (size, d) = (heap.team().size(), 2);
    let attn = AttentionDesc::new(M, (size, size), d, DType::F32, AttnMask::FULL);
    let a2a_size = if size % 2 == 0 { 2 } else { 1 };
    let desc = CpAttentionDesc { a2a_size, ..CpAttentionDesc::new(attn) };
    let plan = CpAttentionPlan::new(desc, heap, Some(CpConfig::of(strategy)))?;
    prepared_if(prepare, || plan.prepare(stream))?;
    let rows: usize = plan.rows_q(None).iter().map(|r| r.len()).sum();
    let inputs: Vec<Tensor> = (0..7).map(|_| zeros(rows, size * d)).collect();
    let all = out(5 * d + 1, rows * size);
    let part = |i: usize| all.rows(i * d, d)?.reshape(Shape::d2(rows, size * d));
    let lse = all.rows(5 * d - d, 1)?.reshape(Shape::d2(size, rows))?;
    let all = all.rows(0, 4 * d + 1)?;
    let o = AttnOut { out: part(0)?, lse };
    let grads = AttnGrads::new(part(1)?, part(2)?, part(3)?);
    let x = |i: usize| AttnInputs::new(&inputs[i], &inputs[i + 1], &inputs[i + 2]);
    let (fwd, bwd, d_out) = (x(0), x(3), inputs[6].clone());
    let saved = AttnSaved { out: o.out.clone(), lse: o.lse.clone(), d_out };
    Ok(Ready {
        inputs,
        out: all,
        launch: Box::new(move |s| {
            plan.launch_fwd(s, &fwd, o.clone())?.join(s)?;
            match plan.launch_bwd(s, &bwd, saved.clone(), grads.clone()).and_then(|p| p.join(s)) {
                // A death between the two is found by who waits for the first.
                Err(e) if e.is_peer_dead() => Ok(()),
                done => done.map(|_| ()),
            }
        }),
    })
}

pub fn cp_get(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    cp(Strategy::Get, heap, stream, prepare)
}

fn cp_ring(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    cp(Strategy::Ring, heap, stream, prepare)
}

fn cp_gather(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    cp(Strategy::AllGather, heap, stream, prepare)
}

fn cp_exchange(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    cp(Strategy::AllToAll, heap, stream, prepare)
}

fn cp_hybrid(heap: &Heap, stream: &Stream, prepare: bool) -> Result<Ready> {
    cp(Strategy::Hybrid, heap, stream, prepare)
}

/// Forward and backward of each strategy.
pub const CP: [(&str, Make); 5] = [
    ("cp_attention get", cp_get),
    ("cp_attention ring", cp_ring),
    ("cp_attention all_gather", cp_gather),
    ("cp_attention all_to_all", cp_exchange),
    ("cp_attention hybrid", cp_hybrid),
];

pub fn all_ops() -> impl Iterator<Item = (&'static str, Make)> {
    OPS.into_iter().chain(CP)
}

/// Two groups of two are the smallest hybrid.
pub fn ranks_for(name: &str, usual: usize) -> usize {
    if name.ends_with("hybrid") { 4 } else { usual }
}

pub fn fill(r: &Ready, seed: u64) -> Result<()> {
    let mut rng = Rng::new(seed);
    for t in &r.inputs {
        if t.dtype() == DType::I64 {
            // Experts: there are at least five.
            let v: Vec<i64> = (0..t.shape().num_elems()).map(|_| rng.below(5) as i64).collect();
            t.write(|b| b.copy_from_slice(bytemuck::cast_slice(&v)))?;
            continue;
        }
        let v: Vec<f32> = (0..t.shape().num_elems()).map(|_| rng.uniform(-1.0, 1.0)).collect();
        t.write(|b| b.copy_from_slice(bytemuck::cast_slice(&v)))?;
    }
    r.out.poison()
}

pub fn finish(s: &Stream, team: &LiveTeam) -> Result<()> {
    Pending::new((), s, Some(team.fault().clone()))?.wait()
}

pub fn heap_of(world: &World, name: &str) -> Result<(LiveTeam, Heap, Stream)> {
    let team = world.everyone(name)?;
    let heap = team.heap(BackendKind::Host, HeapCfg::new(1 << 16))?;
    Ok((team, heap, Stream::new("s")?))
}
