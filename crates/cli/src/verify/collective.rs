//! Cases of the four collectives.

use tilewire::core::numerics::Bound;
use tilewire::ops::collective::{CollectiveDesc, CollectiveKind, CollectivePlan, ReduceOp};
use tilewire::prelude::*;
use tilewire_oracle::{Mat, collective as oracle};

use super::ctx::tensor;
use super::{Case, Ctx, NCCL};

pub(super) fn cases() -> Vec<Case> {
    let mut v = Vec::new();
    for op in ["all_gather", "reduce_scatter", "reduce_scatter/avg", "all_reduce", "all_to_all"] {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            // Half of 7 rows are fewer than ranks.
            for (m, cols) in [(37, 24), (7, 24), (5, 3)] {
                v.push(Case::new(op, dtype, &[("m", m), ("cols", cols)], run));
            }
        }
    }
    for dtype in [DType::F8E4M3, DType::I64, DType::U8] {
        v.push(Case::new("all_gather", dtype, &[("m", 19), ("cols", 7)], run));
        v.push(Case::new("all_to_all", dtype, &[("m", 19), ("cols", 7)], run));
    }
    for op in ["all_gather", "reduce_scatter", "reduce_scatter/avg", "all_reduce", "all_to_all"] {
        for dtype in [DType::F32, DType::BF16] {
            v.push(Case::new(format!("{NCCL}/{op}"), dtype, &[("m", 37), ("cols", 24)], run));
        }
    }
    v
}

/// Returns what a case computes, whoever moves the data.
fn name(case: &Case) -> &str {
    case.bare().split('/').next().unwrap_or_default()
}

/// Inputs of all ranks, the expected output of mine, and |A||B|.
struct Problem {
    kind: CollectiveKind,
    x: Mat,
    want: Mat,
    mag: Mat,
    num_partials: usize,
    out_rows: usize,
}

fn problem(ctx: &mut Ctx, case: &Case, m: usize, uneven: bool) -> Result<Problem> {
    let (size, me, cols) = (ctx.team.size(), ctx.team.rank().idx(), case.dim("cols"));
    let shards = if uneven {
        // All rows at the last rank but one row each for as many others as there are.
        let mut rows: Vec<usize> =
            (0..size).map(|r| usize::from(r < m.saturating_sub(1))).collect();
        rows[size - 1] = m - rows[..size - 1].iter().sum::<usize>();
        Shards::Explicit(rows)
    } else {
        Shards::Even
    };
    let rows = shards.rows(m, size)?;
    let make = |ctx: &mut Ctx, r: usize| match case.dtype.is_float() {
        true => ctx.random(r, cols, case.dtype),
        false => ctx.integers(r, cols, 100).map(f64::abs),
    };
    let op = if case.op.ends_with("avg") { ReduceOp::Avg } else { ReduceOp::Sum };
    let oracle_op = if op == ReduceOp::Avg { oracle::ReduceOp::Avg } else { oracle::ReduceOp::Sum };
    let abs = |x: &[Mat]| {
        oracle::reduce(&x.iter().map(|m| m.map(f64::abs)).collect::<Vec<_>>(), oracle_op)
    };
    let pick = |mut v: Vec<Mat>| v.swap_remove(me);
    let (kind, x, want, mag) = match name(case) {
        "all_gather" => {
            let x: Vec<Mat> = rows.iter().map(|&r| make(ctx, r)).collect();
            let want = pick(oracle::all_gather(&x));
            (CollectiveKind::AllGather(shards), x, want, Mat::zeros(m, cols))
        }
        "reduce_scatter" => {
            let x: Vec<Mat> = (0..size).map(|_| make(ctx, m)).collect();
            let want = pick(oracle::reduce_scatter(&x, &rows, oracle_op));
            let mag = pick(oracle::split_rows(&abs(&x), &rows));
            (CollectiveKind::ReduceScatter(shards, op), x, want, mag)
        }
        "all_reduce" => {
            let x: Vec<Mat> = (0..size).map(|_| make(ctx, m)).collect();
            let (want, mag) = (pick(oracle::all_reduce(&x, oracle_op)), abs(&x));
            (CollectiveKind::AllReduce(op), x, want, mag)
        }
        _ => {
            let splits: Vec<Vec<usize>> = (0..size)
                .map(|_| (0..size).map(|_| ctx.rng.below(m as u64 / 2 + 1) as usize).collect())
                .collect();
            let x: Vec<Mat> = splits.iter().map(|s| make(ctx, s.iter().sum())).collect();
            let want = pick(oracle::all_to_all_uneven(&x, &splits));
            let mag = Mat::zeros(want.rows, cols);
            (CollectiveKind::AllToAll(splits), x, want, mag)
        }
    };
    let out_rows = want.rows;
    Ok(Problem { kind, x: pick(x), want, mag, num_partials: 0, out_rows })
}

fn run(ctx: &mut Ctx, case: &Case) -> Result<()> {
    let (m, cols, dtype) = (case.dim("m"), case.dim("cols"), case.dtype);
    for uneven in [false, true] {
        let p = problem(ctx, case, m, uneven)?;
        let desc = CollectiveDesc { kind: p.kind.clone(), m, cols, dtype };
        let plan = CollectivePlan::with_backend(desc, &ctx.heap, case.backend())?;
        plan.prepare(&ctx.stream)?;
        // Even shards also run with fewer rows than the plan was made for.
        let fewer = !uneven && !matches!(p.kind, CollectiveKind::AllToAll(_));
        let mut problems = vec![(m, p)];
        if fewer {
            problems.push((m / 2, problem(ctx, case, m / 2, false)?));
            // Behind a launch that may have gone another way.
            problems.push((m, problem(ctx, case, m, false)?));
        }
        for (m, p) in problems {
            let x = ctx.place(tensor(&p.x, dtype)?)?;
            let mut first: Option<Tensor> = None;
            for _ in 0..2 {
                let out = ctx.place(Tensor::poisoned(dtype, Shape::d2(p.out_rows, cols)))?;
                let (before, predicted) = (ctx.team.traffic(), plan.predict(m)?);
                ctx.timed(|s| plan.launch(s, m, &x, &out))?;
                ctx.traffic(&case.op, &before, &predicted);
                let k = ctx.team.size();
                // NCCL rounds a sum to the element type at each rank that it passes.
                let local = Bound { num_partials: p.num_partials, ..Bound::local(dtype, k) };
                let bound = if case.by_nccl() {
                    Bound { num_partials: k, wire: dtype, ..local }
                } else {
                    local
                };
                ctx.compare(&case.op, &out, &p.want, &p.mag, &bound)?;
                match &first {
                    Some(f) => ctx.same_bits("second run", f, &out)?,
                    None => first = Some(out),
                }
            }
        }
    }
    Ok(())
}
