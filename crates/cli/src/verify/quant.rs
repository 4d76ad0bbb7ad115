//! Cases of quantisation: every layout, dtype and side to the bit; scales of a team; delayed
//! scaling; dequantisation.

use tilewire::core::{QTensor, ScaleLayout};
use tilewire::ops::quant::*;
use tilewire::prelude::*;
use tilewire::symm::LinkTraffic;
use tilewire_oracle::quant as oracle;
use tilewire_oracle::{Mat, fp8};

use super::{Case, Ctx};

const LAYOUTS: [(&str, ScaleLayout); 5] = [
    ("tensor", ScaleLayout::Tensor),
    ("1x128", ScaleLayout::Block1x128),
    ("128x128", ScaleLayout::Block128x128),
    ("mx", ScaleLayout::Mx1x32),
    ("mx_swizzled", ScaleLayout::Mx1x32Swizzled),
];
const FP8: [DType; 2] = [DType::F8E4M3, DType::F8E5M2];

pub(super) fn cases() -> Vec<Case> {
    let mut v = Vec::new();
    let mut add = |variant: &str, dtype, (m, cols), run| {
        v.push(Case::new(format!("quant/{variant}"), dtype, &[("m", m), ("cols", cols)], run));
    };
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (name, _) in LAYOUTS {
            add(name, dtype, (37, 45), run_local);
        }
        add("team", dtype, (23, 12), run_team);
        add("delayed", dtype, (23, 12), run_delayed);
    }
    for (name, _) in LAYOUTS {
        for size in [(1, 1), (0, 40), (40, 0), (130, 33)] {
            add(name, DType::F32, size, run_local);
        }
    }
    v
}

/// Random elements of very different magnitude in different blocks, with a few that are special.
fn data(ctx: &mut Ctx, rows: usize, cols: usize, dtype: DType) -> Mat {
    let x = ctx.random(rows, cols, dtype);
    let mut x = Mat::from_fn(rows, cols, |i, j| {
        x.at(i, j) * 2f64.powi(((i / 3 * 7 + j / 16 * 5) % 25) as i32 - 12)
    });
    if rows > 4 && cols > 4 {
        *x.at_mut(1, 2) = f64::NAN;
        *x.at_mut(rows - 1, cols - 1) = -0.0;
        x.row_mut(3).fill(0.0);
    }
    x.rounded(dtype)
}

/// Codes and scales must be the oracle's, byte for byte.
fn same(ctx: &mut Ctx, what: &str, got: &Option<Quantized>, want: &QTensor) -> Result<()> {
    let Some(got) = got else {
        ctx.fail(format!("{what}: no result"));
        return Ok(());
    };
    let codes = got.data.read(|b| b.iter().zip(&want.data).filter(|(a, b)| a != b).count())?;
    ctx.check(codes == 0 && got.data.shape() == want.shape, || {
        format!("{what}: {codes} codes differ")
    });
    let scales = got.scales.read(|b| b == want.scales)?;
    ctx.check(scales, || format!("{what}: scales differ"));
    Ok(())
}

fn layout_of(case: &Case) -> ScaleLayout {
    let name = case.op.split('/').nth(1).unwrap_or("tensor");
    LAYOUTS.iter().find(|(n, _)| *n == name).map_or(ScaleLayout::Tensor, |(_, l)| *l)
}

fn run_local(ctx: &mut Ctx, case: &Case) -> Result<()> {
    let (rows, cols, src, layout) = (case.dim("m"), case.dim("cols"), case.dtype, layout_of(case));
    for dst in FP8 {
        for pow2_scales in [false, true] {
            let x = data(ctx, rows, cols, src);
            let spec = oracle::QuantSpec { dtype: dst, layout, pow2_scales };
            // Made for more rows than it is launched with.
            let desc = QuantDesc {
                pow2_scales,
                sides: Sides::Both,
                ..QuantDesc::new(rows + 3, cols, src, dst, layout)
            };
            let plan = QuantPlan::new(desc, None)?;
            plan.prepare(&ctx.stream)?;
            let t = QuantInputs::new(&desc, &ctx.tensor(&x, src)?)?;
            let got = ctx.timed(|s| plan.launch(s, t))?;
            let q = oracle::quantize(&x, spec);
            same(ctx, "row", &got.row, &q)?;
            same(ctx, "column", &got.column, &oracle::quantize_transposed(&x, spec))?;
            if let Some(row) = &got.row {
                dequantise(ctx, row, &q, if pow2_scales { DType::BF16 } else { DType::F32 })?;
            }
        }
    }
    Ok(())
}

fn dequantise(ctx: &mut Ctx, got: &Quantized, q: &QTensor, out: DType) -> Result<()> {
    let (rows, cols) = (q.shape.dim(0), q.shape.dim(1));
    let plan = DequantPlan::new(DequantDesc { rows, cols, src: q.dtype, layout: q.layout, out })?;
    plan.prepare(&ctx.stream)?;
    let y = ctx.poisoned(out, q.shape)?;
    let y = ctx.timed(|s| plan.launch(s, got, &y))?;
    let want = oracle::dequantize(q);
    let nan = q.data.iter().any(|&c| fp8::decode(q.dtype, c).is_nan());
    // NaN has many bit patterns; everything else must be equal.
    let (got, want) = (y.to_f32()?, want.rounded(out).to_f32());
    let same = got
        .iter()
        .zip(&want)
        .all(|(a, b)| a.to_bits() == b.to_bits() || nan && a.is_nan() && b.is_nan());
    ctx.check(same, || format!("dequantised to {out}: values differ"));
    Ok(())
}

/// Rows of each rank: none on the first, when there are others.
fn shares(m: usize, size: usize) -> Vec<usize> {
    (0..size).map(|r| if size == 1 { m } else { m * r / size }).collect()
}

fn parts(ctx: &mut Ctx, case: &Case) -> Vec<Mat> {
    let rows = shares(case.dim("m"), ctx.team.size());
    rows.iter().map(|&r| data(ctx, r, case.dim("cols"), case.dtype)).collect()
}

fn over_team(case: &Case, dst: DType, scaling: Scaling) -> QuantDesc {
    QuantDesc {
        scope: Scope::Team,
        scaling,
        sides: Sides::Both,
        ..QuantDesc::new(case.dim("m"), case.dim("cols"), case.dtype, dst, ScaleLayout::Tensor)
    }
}

fn run_team(ctx: &mut Ctx, case: &Case) -> Result<()> {
    let me = ctx.team.rank().idx();
    for dst in FP8 {
        let desc = over_team(case, dst, Scaling::Current);
        let plan = QuantPlan::new(desc, Some(&ctx.heap))?;
        plan.prepare(&ctx.stream)?;
        for _ in 0..3 {
            let parts = parts(ctx, case);
            let t = QuantInputs::new(&desc, &ctx.tensor(&parts[me], case.dtype)?)?;
            let before = ctx.team.traffic();
            let got = ctx.timed(|s| plan.launch(s, t))?;
            ctx.traffic(&case.op, &before, &plan.predict());
            let spec = oracle::QuantSpec::new(dst, desc.layout);
            let scale = spec.scale(oracle::amax(&Mat::vstack(&parts))) as f32;
            let q = |x: &Mat| oracle::quantize_with_scale(x, dst, scale);
            same(ctx, "row", &got.row, &q(&parts[me]))?;
            same(ctx, "column", &got.column, &q(&parts[me].transpose()))?;
        }
    }
    Ok(())
}

fn run_delayed(ctx: &mut Ctx, case: &Case) -> Result<()> {
    let me = ctx.team.rank().idx();
    for (dst, scope) in FP8.into_iter().flat_map(|d| [(d, Scope::Local), (d, Scope::Team)]) {
        let desc =
            QuantDesc { scope, ..over_team(case, dst, Scaling::Delayed { window: 3, margin: 1 }) };
        let plan = QuantPlan::new(desc, Some(&ctx.heap))?;
        plan.prepare(&ctx.stream)?;
        let mut want = oracle::DelayedScaling::new(dst, 3, 1);
        for step in 0..6 {
            let mut parts = parts(ctx, case);
            if step == 2 {
                parts.iter_mut().for_each(|p| p.data.fill(0.0));
            }
            let t = QuantInputs::new(&desc, &ctx.tensor(&parts[me], case.dtype)?)?;
            let before = ctx.team.traffic();
            let got = ctx.timed(|s| plan.launch(s, t))?;
            let still = vec![LinkTraffic::default(); ctx.team.size()];
            let predicted = if scope == Scope::Team { plan.predict() } else { still };
            ctx.traffic(&case.op, &before, &predicted);
            let q = |x: &Mat| oracle::quantize_with_scale(x, dst, want.scale);
            same(ctx, "row", &got.row, &q(&parts[me]))?;
            same(ctx, "column", &got.column, &q(&parts[me].transpose()))?;
            let seen = if scope == Scope::Team { Mat::vstack(&parts) } else { parts[me].clone() };
            want.record(oracle::amax(&seen));
            let scale = plan.scale().map(|s| s.to_vec::<f32>()).transpose()?;
            ctx.check(scale == Some(vec![want.scale]), || format!("step {step}: scale {scale:?}"));
        }
    }
    Ok(())
}
