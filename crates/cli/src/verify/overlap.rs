//! Cases of the comm+GEMM operations: every algorithm, uneven shards, fewer rows, exact integers.

use tilewire::core::numerics::Bound;
use tilewire::device::Device;
use tilewire::ops::ag_gemm::{AgGemmDesc, AgGemmInputs, AgGemmPlan};
use tilewire::ops::bulk::{BulkInputs, BulkPlan};
use tilewire::ops::collective::{CollectiveDesc, CollectiveKind};
use tilewire::ops::common::OverlapConfig;
use tilewire::ops::gemm::{Activation, BOrder, Epilogue, GemmDesc, GemmInputs};
use tilewire::ops::gemm_ar::{GemmArDesc, GemmArPlan};
use tilewire::ops::gemm_rs::{GemmRsDesc, GemmRsInputs, GemmRsPlan};
use tilewire::prelude::*;
use tilewire::symm::Traffic;
use tilewire_oracle::gemm as oracle;
use tilewire_oracle::{Mat, matmul_abs};

use super::ctx::tensor;
use super::{Case, Ctx, NCCL};

pub(super) fn cases() -> Vec<Case> {
    let mut v = Vec::new();
    let shape = [("m", 45), ("n", 34), ("k", 40)];
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F8E4M3, DType::F8E5M2] {
        v.push(Case::new("ag_gemm", dtype, &shape, run_ag));
        v.push(Case::new("gemm_rs", dtype, &shape, run_rs));
        v.push(Case::new("gemm_ar", dtype, &shape, run_ar));
    }
    v.push(Case::new("ag_gemm", DType::F32, &[("m", 3), ("n", 1), ("k", 5)], run_ag));
    v.push(Case::new("gemm_rs", DType::F32, &[("m", 3), ("n", 1), ("k", 5)], run_rs));
    v.push(Case::new("gemm_ar", DType::F32, &[("m", 3), ("n", 1), ("k", 5)], run_ar));
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F8E4M3] {
        v.push(Case::new(format!("{NCCL}/ag_gemm"), dtype, &shape, run_ag));
        v.push(Case::new(format!("{NCCL}/gemm_rs"), dtype, &shape, run_rs));
        v.push(Case::new(format!("{NCCL}/gemm_ar"), dtype, &shape, run_ar));
    }
    v.push(Case::new("bulk", DType::F32, &shape, run_bulk));
    v.push(Case::new("bulk", DType::BF16, &shape, run_bulk));
    v
}

/// Every way to do it, and the choice of the cost model; or by NCCL, and by puts, which it must
/// equal on integers, where GPUs reach each other.
fn configs(case: &Case, near: bool) -> Vec<Option<OverlapConfig>> {
    if case.by_nccl() {
        let by_puts = near.then(|| Some(OverlapConfig::of(Algo::Sequential, 1)));
        return [Some(OverlapConfig::by_nccl())].into_iter().chain(by_puts).collect();
    }
    let small = |algo, sub_chunks| {
        Some(OverlapConfig { block_m: 4, block_n: 16, ..OverlapConfig::of(algo, sub_chunks) })
    };
    vec![
        Some(OverlapConfig::of(Algo::Sequential, 1)),
        Some(OverlapConfig::of(Algo::Pipelined, 1)),
        Some(OverlapConfig::of(Algo::Pipelined, 3)),
        Some(OverlapConfig::of(Algo::Ring, 1)),
        Some(OverlapConfig::of(Algo::Ring, 3)),
        Some(OverlapConfig::of(Algo::Fused, 2)),
        small(Algo::Fused, 1),
        small(Algo::Pipelined, 2),
        small(Algo::Ring, 2),
        small(Algo::Sequential, 2),
        None,
    ]
}

/// Rank 0 has nothing, the last rank most, the others one row while there are any.
fn uneven(m: usize, size: usize) -> Shards {
    let mut rows = vec![0; size];
    let mut left = m;
    for r in &mut rows[1..] {
        *r = left.min(1);
        left -= *r;
    }
    rows[size - 1] += left;
    Shards::Explicit(rows)
}

/// Inputs such that every partial sum is exact in the wire type, or random ones.
fn operand(ctx: &mut Ctx, rows: usize, cols: usize, dtype: DType, exact: bool) -> Mat {
    if exact { ctx.integers(rows, cols, 1) } else { ctx.random(rows, cols, dtype) }
}

/// FP8 operands have a scale for their product; what is exact has none.
fn scale_of(dtype: DType, exact: bool, rank: usize) -> Option<f32> {
    (dtype.is_fp8() && !exact).then_some(0.3 + rank as f32 / 8.0)
}

fn scale_tensor(scale: Option<f32>) -> Result<Option<Tensor>> {
    scale.map(|s| Tensor::from_slice(&[s], Shape::d1(1))).transpose()
}

struct Launched {
    out: Tensor,
    predicted: Traffic,
}

/// Runs `launch` for every configuration of a case twice, and compares; with `exact` inputs all of
/// them to the bit. The bound is that of sums in any order, with a rounding at each rank.
fn sweep(
    ctx: &mut Ctx,
    (what, case): (&str, &Case),
    exact: bool,
    want: (&Mat, &Mat, &Bound),
    mut launch: impl FnMut(&mut Ctx, Option<OverlapConfig>) -> Result<Launched>,
) -> Result<()> {
    let mut reference: Option<Tensor> = None;
    let host = matches!(ctx.heap.device(), Device::Host);
    let near = ctx.heap.reaches_peers() || ctx.team.size() == 1;
    // Devices have no fused kernels yet, and say so.
    let usable = |c: &Option<OverlapConfig>| host || c.is_none_or(|c| c.algo != Algo::Fused);
    for config in configs(case, near).into_iter().filter(usable) {
        let mut first: Option<Tensor> = None;
        for _ in 0..2 {
            let before = ctx.team.traffic();
            let l = launch(ctx, config)?;
            ctx.traffic(what, &before, &l.predicted);
            ctx.compare(what, &l.out, want.0, want.1, want.2)?;
            match &first {
                Some(f) => ctx.same_bits("second run", f, &l.out)?,
                None => first = Some(l.out),
            }
        }
        if let (true, Some(f)) = (exact, first) {
            // Integers: overlapped and sequential must agree to the bit.
            match &reference {
                Some(r) => {
                    ctx.same_bits(&format!("{what}: {config:?} against sequential"), r, &f)?
                }
                None => reference = Some(f),
            }
        }
    }
    Ok(())
}

/// A layer that gathers its rows, as one rank has it, and what it must give.
struct AgProblem {
    desc: AgGemmDesc,
    m: usize,
    exact: bool,
    /// All rows, and those of this rank.
    x: Mat,
    mine: Mat,
    w: Mat,
    bias: Option<Mat>,
    aux_in: Mat,
    scale: Option<f32>,
    /// The value before the activation, and its magnitude.
    z: Mat,
    z_mag: Mat,
    want: Mat,
    mag: Mat,
    bound: Bound,
}

/// The activations, each with the number that chooses shards, rows and the order of the weight.
const AG_ACTIVATIONS: [Activation; 5] = [
    Activation::None,
    Activation::Gelu,
    Activation::SwiGlu,
    Activation::DGelu,
    Activation::DSwiGlu,
];

fn ag_problem(ctx: &mut Ctx, case: &Case, i: usize, exact: bool) -> Result<AgProblem> {
    let (act, max_m, k, dtype) = (AG_ACTIVATIONS[i], case.dim("m"), case.dim("k"), case.dtype);
    let (size, me) = (ctx.team.size(), ctx.team.rank().idx());
    // Different n on each rank; even, for SwiGLU.
    let n = case.dim("n") + 2 * me;
    let n = if matches!(act, Activation::SwiGlu) { n + n % 2 } else { n };
    let shards = if i.is_multiple_of(2) { Shards::Even } else { uneven(max_m, size) };
    let m = if i == 2 { max_m - max_m / 3 } else { max_m };
    let x = operand(ctx, m, k, dtype, exact);
    // The generator must stay in step on all ranks although `n` differs.
    let w_all = operand(ctx, case.dim("n") + 2 * size + 2, k, dtype, exact);
    let w = w_all.slice_rows(0..n);
    let bias_all = ctx.random(1, w_all.rows, DType::F32);
    let bias = (!exact).then(|| bias_all.slice_cols(0..n));
    let aux_all = ctx.random(m, 2 * w_all.rows, DType::F32);
    let out_dtype = GemmDesc::nt(m, n, k, dtype).out;
    let aux_in = aux_all.slice_cols(0..act.aux_cols(n)).rounded(out_dtype);
    let epilogue = Epilogue {
        bias: bias.is_some(),
        activation: act,
        aux: matches!(act, Activation::Gelu | Activation::SwiGlu),
        ..Epilogue::NONE
    };
    let w_order = if i == 0 { BOrder::Nk } else { BOrder::Kn };
    let rows = shards.rows(m, size)?;
    let start: usize = rows[..me].iter().sum();
    let mine = x.slice_rows(start..start + rows[me]);
    let desc = AgGemmDesc { shards, epilogue, w_order, ..AgGemmDesc::new(max_m, n, k, dtype) };
    let scale = scale_of(dtype, exact, 0);
    let scaled = w.map(|v| v * f64::from(scale.unwrap_or(1.0)));
    let bias_row = bias.as_ref().map(|b| &b.data[..]);
    let z = oracle::gemm(&oracle::Gemm { bias: bias_row, ..oracle::Gemm::new(&x, &scaled) }).d;
    let oracle_act = match act {
        Activation::Gelu | Activation::DGelu => oracle::Activation::Gelu,
        Activation::SwiGlu | Activation::DSwiGlu => oracle::Activation::SwiGlu,
        _ => oracle::Activation::None,
    };
    let want = match act.reads_aux() {
        true => oracle::activate_bwd(oracle_act, &aux_in, &z),
        false => oracle::activate(oracle_act, &z),
    };
    let z_mag = matmul_abs(&x, &scaled.transpose()).map(|v| v + 2.0);
    let most = z_mag.data.iter().fold(1.0f64, |a, &b| a.max(b));
    let mag = match act {
        Activation::None => z_mag.clone(),
        _ => want.map(|_| 1.2 * most * most.min(4.0)),
    };
    let bound = Bound::local(out_dtype, k);
    Ok(AgProblem { desc, m, exact, x, mine, w, bias, aux_in, scale, z, z_mag, want, mag, bound })
}

/// Every algorithm on one problem.
fn run_ag_problem(ctx: &mut Ctx, case: &Case, p: &AgProblem) -> Result<()> {
    let (d, e, m) = (&p.desc, p.desc.epilogue, p.m);
    let (dtype, out_dtype) = (case.dtype, GemmDesc::nt(m, d.n, d.k, case.dtype).out);
    let w = if d.w_order == BOrder::Nk { p.w.clone() } else { p.w.transpose() };
    let (x_t, w_t) = (tensor(&p.mine, dtype)?, tensor(&w, dtype)?);
    let bias = p.bias.as_ref().map(|b| tensor(b, DType::F32)?.reshape(Shape::d1(d.n)));
    let bias_t = bias.transpose()?;
    let aux_t = e.activation.reads_aux().then(|| tensor(&p.aux_in, out_dtype)).transpose()?;
    let mut plans = PlanCache::default();
    sweep(ctx, ("ag_gemm", case), p.exact, (&p.want, &p.mag, &p.bound), |ctx, config| {
        let plan = plans.get(config, || {
            let plan = AgGemmPlan::new(d.clone(), &ctx.heap, config)?;
            plan.prepare(&ctx.stream)?;
            Ok(plan)
        })?;
        let out = Tensor::poisoned(out_dtype, want_shape(&p.want));
        let inputs = ctx.place(AgGemmInputs {
            bias: bias_t.clone(),
            scale: scale_tensor(p.scale)?,
            aux_in: aux_t.clone(),
            aux_out: e.aux.then(|| Tensor::poisoned(out_dtype, Shape::d2(m, d.n))),
            gathered: Some(Tensor::poisoned(dtype, Shape::d2(m, d.k))),
            ..AgGemmInputs::new(x_t.clone(), w_t.clone(), out)
        })?;
        let gathered = inputs.gathered.clone();
        let done = ctx.timed(|s| plan.launch(s, m, inputs))?;
        if let Some(g) = &gathered {
            ctx.same_bits("gathered", g, &tensor(&p.x, dtype)?)?;
        }
        if let Some(a) = &done.aux_out {
            ctx.compare("aux", a, &p.z, &p.z_mag, &p.bound)?;
        }
        Ok(Launched { out: done.out, predicted: plan.predict(m)? })
    })?;
    drop(plans);
    ctx.heap.collect()
}

fn run_ag(ctx: &mut Ctx, case: &Case) -> Result<()> {
    for i in 0..AG_ACTIVATIONS.len() {
        for exact in if i == 0 { vec![true, false] } else { vec![false] } {
            let problem = ag_problem(ctx, case, i, exact)?;
            run_ag_problem(ctx, case, &problem)?;
        }
    }
    Ok(())
}

fn want_shape(m: &Mat) -> Shape {
    Shape::d2(m.rows, m.cols)
}

/// One plan per configuration.
struct PlanCache<P>(Vec<(Option<OverlapConfig>, P)>);

impl<P> Default for PlanCache<P> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<P> PlanCache<P> {
    fn get(&mut self, key: Option<OverlapConfig>, make: impl FnOnce() -> Result<P>) -> Result<&P> {
        let at = match self.0.iter().position(|(k, _)| *k == key) {
            Some(i) => i,
            None => {
                self.0.push((key, make()?));
                self.0.len() - 1
            }
        };
        Ok(&self.0[at].1)
    }
}

/// The problem that `gemm_rs` and `gemm_ar` share: my operands, the whole result, |A||B|.
struct Partial {
    desc: GemmRsDesc,
    x: Tensor,
    w: Tensor,
    bias: Option<Tensor>,
    scale: Option<Tensor>,
    want: Mat,
    mag: Mat,
    bound: Bound,
    rows: Vec<usize>,
}

fn partial(ctx: &mut Ctx, case: &Case, i: usize, exact: bool) -> Result<(usize, Partial)> {
    let (max_m, n, dtype) = (case.dim("m"), case.dim("n"), case.dtype);
    let (size, me) = (ctx.team.size(), ctx.team.rank().idx());
    let m = if i == 2 { max_m / 2 } else { max_m };
    // A different part of the contraction on each rank.
    let ks: Vec<usize> = (0..size).map(|r| case.dim("k") / size + r % 3).collect();
    let k: usize = ks.iter().sum();
    let start: usize = ks[..me].iter().sum();
    let (x, w) = (operand(ctx, m, k, dtype, exact), operand(ctx, n, k, dtype, exact));
    let bias = ctx.random(1, n, DType::F32);
    let with_bias = i == 1;
    let shards = if i == 1 { uneven(max_m, size) } else { Shards::Even };
    let rows = shards.rows(m, size)?;
    let (x_me, w_me) = (x.slice_cols(start..start + ks[me]), w.slice_cols(start..start + ks[me]));
    let w_order = if i == 2 { BOrder::Kn } else { BOrder::Nk };
    let desc =
        GemmRsDesc { shards, bias: with_bias, w_order, ..GemmRsDesc::new(max_m, n, ks[me], dtype) };
    // Each rank's part of the contraction has a scale of its own.
    let ranks: Vec<usize> = ks.iter().enumerate().flat_map(|(r, &n)| vec![r; n]).collect();
    let scale = |r| scale_of(dtype, exact, r);
    let scaled = Mat::from_fn(n, k, |i, j| {
        let s = ranks.get(j).and_then(|&r| scale(r));
        w.at(i, j) * f64::from(s.unwrap_or(1.0))
    });
    let z = oracle::gemm(&oracle::Gemm {
        bias: with_bias.then_some(&bias.data[..]),
        ..oracle::Gemm::new(&x, &scaled)
    })
    .d;
    let mag = matmul_abs(&x, &scaled.transpose()).map(|v| v + f64::from(u8::from(with_bias)));
    let bound = Bound { out: desc.out, wire: desc.wire, acc: DType::F32, num_partials: size, k };
    let w_stored = if w_order == BOrder::Kn { w_me.transpose() } else { w_me };
    Ok((
        m,
        Partial {
            x: tensor(&x_me, dtype)?,
            w: tensor(&w_stored, dtype)?,
            bias: with_bias
                .then(|| Tensor::from_f32(&bias.to_f32(), DType::F32, Shape::d1(n)))
                .transpose()?,
            scale: scale_tensor(scale(me))?,
            desc,
            want: z,
            mag,
            bound,
            rows,
        },
    ))
}

fn run_rs(ctx: &mut Ctx, case: &Case) -> Result<()> {
    for (i, exact) in [(0, true), (0, false), (1, false), (2, false)] {
        let (m, p) = partial(ctx, case, i, exact)?;
        let me = ctx.team.rank().idx();
        let start: usize = p.rows[..me].iter().sum();
        let range = start..start + p.rows[me];
        let (want, mag) = (p.want.slice_rows(range.clone()), p.mag.slice_rows(range));
        let mut plans = PlanCache::default();
        sweep(ctx, ("gemm_rs", case), exact, (&want, &mag, &p.bound), |ctx, config| {
            let plan = plans.get(config, || {
                let plan = GemmRsPlan::new(p.desc.clone(), &ctx.heap, config)?;
                plan.prepare(&ctx.stream)?;
                Ok(plan)
            })?;
            let out = Tensor::poisoned(p.desc.out, want_shape(&want));
            let inputs = ctx.place(GemmRsInputs {
                bias: p.bias.clone(),
                scale: p.scale.clone(),
                ..GemmRsInputs::new(p.x.clone(), p.w.clone(), out)
            })?;
            let out = ctx.timed(|s| plan.launch(s, m, inputs))?;
            Ok(Launched { out, predicted: plan.predict(m)? })
        })?;
        drop(plans);
        ctx.heap.collect()?;
    }
    Ok(())
}

fn run_ar(ctx: &mut Ctx, case: &Case) -> Result<()> {
    for (i, exact) in [(0, true), (0, false), (1, false), (2, false)] {
        let (m, p) = partial(ctx, case, i, exact)?;
        let mut plans = PlanCache::default();
        sweep(ctx, ("gemm_ar", case), exact, (&p.want, &p.mag, &p.bound), |ctx, config| {
            let plan = plans.get(config, || {
                let plan = GemmArPlan::new(GemmArDesc(p.desc.clone()), &ctx.heap, config)?;
                plan.prepare(&ctx.stream)?;
                Ok(plan)
            })?;
            let out = Tensor::poisoned(p.desc.out, want_shape(&p.want));
            let inputs = ctx.place(GemmRsInputs {
                bias: p.bias.clone(),
                scale: p.scale.clone(),
                ..GemmRsInputs::new(p.x.clone(), p.w.clone(), out)
            })?;
            let out = ctx.timed(|s| plan.launch(s, m, inputs))?;
            Ok(Launched { out, predicted: plan.predict(m)? })
        })?;
        drop(plans);
        ctx.heap.collect()?;
    }
    Ok(())
}

fn run_bulk(ctx: &mut Ctx, case: &Case) -> Result<()> {
    let (m, n, k, dtype) = (case.dim("m"), case.dim("n"), case.dim("k"), case.dtype);
    let (size, me) = (ctx.team.size(), ctx.team.rank());
    let rows = Shards::Even.rows(m, size)?;
    let start: usize = rows[..me.idx()].iter().sum();
    let (a, b, x) = (ctx.random(m, k, dtype), ctx.random(n, k, dtype), ctx.random(m, n, dtype));
    let collective =
        CollectiveDesc { kind: CollectiveKind::AllGather(Shards::Even), m, cols: n, dtype };
    let plan = BulkPlan::new(GemmDesc::nt(m, n, k, dtype), collective, &ctx.heap)?;
    plan.prepare(&ctx.stream)?;
    for _ in 0..3 {
        let before = ctx.team.traffic();
        let out = Tensor::poisoned(dtype, Shape::d2(m, n));
        let inputs = ctx.place(BulkInputs {
            gemm: GemmInputs::new(&tensor(&a, dtype)?, &tensor(&b, dtype)?, out),
            m,
            x: tensor(&x.slice_rows(start..start + rows[me.idx()]), dtype)?,
            y: Tensor::poisoned(dtype, Shape::d2(m, n)),
        })?;
        let done = ctx.timed(|s| plan.launch(s, inputs))?;
        ctx.traffic("bulk", &before, &plan.predict(m)?);
        let want = oracle::gemm(&oracle::Gemm::new(&a, &b)).d;
        let mag = matmul_abs(&a, &b.transpose());
        ctx.compare("bulk gemm", &done.gemm, &want, &mag, &Bound::local(dtype, k))?;
        ctx.same_bits("bulk all_gather", &done.collective, &tensor(&x, dtype)?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A way that cannot be would make the whole case one that did not run.
    #[test]
    fn gpus_that_do_not_reach_each_other_are_not_asked_for_puts() {
        for case in cases().iter().filter(|c| c.by_nccl()) {
            let names = |near| -> Vec<_> {
                configs(case, near).into_iter().flatten().map(|c| c.name()).collect()
            };
            assert_eq!(names(true), ["sequential_nccl", "sequential"]);
            assert_eq!(names(false), ["sequential_nccl"]);
        }
    }
}
