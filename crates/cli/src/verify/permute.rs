//! Cases of the local permutation: alignment, capacity, masks, dtypes, gradients.

use tilewire::core::numerics::Bound;
use tilewire::ops::permute::*;
use tilewire::prelude::*;
use tilewire_oracle::Mat;
use tilewire_oracle::permute as oracle;

use super::{Case, Ctx};

const VARIANTS: [&str; 4] = ["plain", "aligned", "drop", "one"];

pub(super) fn cases() -> Vec<Case> {
    let mut v = Vec::new();
    let mut add = |variant: &str, dtype, tokens: usize| {
        let shape = [("tokens", tokens), ("hidden", 12), ("experts", 9), ("top_k", 3)];
        v.push(Case::new(format!("permute/{variant}"), dtype, &shape, run));
    };
    for variant in VARIANTS {
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::F8E4M3, DType::F8E5M2] {
            add(variant, dtype, 23);
        }
        add(variant, DType::F32, 0);
        add(variant, DType::F32, 1);
    }
    v
}

/// A routing, its expected layout, and the map that the plan made of it.
struct Batch {
    topk: oracle::TopK,
    layout: oracle::Permutation,
    map: PermuteMap,
}

fn describe(case: &Case, variant: &str) -> PermuteDesc {
    let mut d = PermuteDesc::new(
        case.dim("tokens") + 2,
        case.dim("hidden"),
        case.dim("experts"),
        case.dim("top_k"),
        case.dtype,
    );
    d.align = if variant == "aligned" { 8 } else { 1 };
    d.num_scales = if case.dtype.is_fp8() { 2 } else { 0 };
    d.capacity = d.worst_case();
    if variant == "drop" {
        d.capacity = d.max_tokens * d.top_k / 2;
    }
    d
}

fn run(ctx: &mut Ctx, case: &Case) -> Result<()> {
    let variant = case.op.split('/').nth(1).unwrap_or("plain").to_owned();
    let plan = PermutePlan::new(describe(case, &variant))?;
    plan.prepare(&ctx.stream)?;
    for round in 0..3 {
        let b = route(ctx, case, &plan, (&variant, round))?;
        forward(ctx, &plan, &b)?;
        back(ctx, &plan, &b)?;
        gradients(ctx, &plan, &b)?;
    }
    Ok(())
}

fn route(
    ctx: &mut Ctx,
    case: &Case,
    plan: &PermutePlan,
    (variant, round): (&str, usize),
) -> Result<Batch> {
    let (d, t) = (*plan.desc(), case.dim("tokens"));
    let (k, e) = (d.top_k, d.num_experts);
    let topk = match (variant, round) {
        // Everybody to the same expert, several times; nobody anywhere; at random.
        ("one", _) => oracle::TopK::new(t, k, vec![(round % e) as i64; t * k]),
        (_, 1) => oracle::TopK::new(t, k, vec![-1; t * k]),
        _ => oracle::TopK::random(&mut ctx.rng, (t, k), e, 0.15),
    };
    let shape = Shape::d2(t, k);
    let idx = if round % 2 == 0 {
        Tensor::from_slice(&topk.idx, shape)?
    } else {
        Tensor::from_slice(&topk.idx.iter().map(|&i| i as i32).collect::<Vec<_>>(), shape)?
    };
    let idx = ctx.place(idx)?;
    let map = plan.map(t)?;
    ctx.timed(|s| plan.route(s, &idx, &map))?;
    map.check()?;
    let full = oracle::Permutation::new(&topk, e, d.align);
    let clamp = |o: usize| o.min(d.capacity) as i64;
    let splits: Vec<i64> = full.offsets.windows(2).map(|w| clamp(w[1]) - clamp(w[0])).collect();
    let lost = full.slots.iter().flatten().filter(|&&r| r >= d.capacity).count() as i64;
    let got = map.m_splits().to_vec::<i64>()?;
    ctx.check(got == splits, || format!("m_splits {got:?}, not {splits:?}"));
    let got = (map.total().to_vec::<i64>()?[0], map.dropped().to_vec::<i64>()?[0]);
    ctx.check(got == (full.sources.len() as i64, lost), || format!("total and dropped {got:?}"));
    let mut layout = full;
    layout.sources.resize(d.capacity, None);
    layout.slots.iter_mut().for_each(|s| *s = s.filter(|&r| r < d.capacity));
    let want: Vec<i32> = layout.slots.iter().map(|s| s.map_or(-1, |r| r as i32)).collect();
    ctx.check(map.slots().to_vec::<i32>()? == want, || "slots differ".to_owned());
    Ok(Batch { topk, layout, map })
}

/// Copies: equal to the bit.
fn forward(ctx: &mut Ctx, plan: &PermutePlan, b: &Batch) -> Result<()> {
    let (d, t) = (*plan.desc(), b.topk.num_tokens);
    let (x, w) = (ctx.random(t, d.hidden, d.dtype), ctx.random(t, d.top_k, DType::F32));
    let scales = (d.num_scales > 0).then(|| ctx.random(t, d.num_scales, DType::F32));
    let poisoned = |cols| ctx.poisoned(DType::F32, Shape::d2(d.capacity, cols));
    let tokens = Tokens {
        x: ctx.tensor(&x, d.dtype)?,
        weights: Some(ctx.tensor(&w, DType::F32)?),
        scales: scales.as_ref().map(|s| ctx.tensor(s, DType::F32)).transpose()?,
    };
    let out = Permuted {
        x: ctx.poisoned(d.dtype, Shape::d2(d.capacity, d.hidden))?,
        weights: Some(ctx.poisoned(DType::F32, Shape::d1(d.capacity))?),
        scales: scales.as_ref().map(|_| poisoned(d.num_scales)).transpose()?,
    };
    let out = ctx.timed(|s| plan.permute(s, &b.map, &tokens, &out))?;
    let want = oracle::permute(&x, &b.layout);
    ctx.same_bits("permuted x", &out.x, &ctx.tensor(&want, d.dtype)?)?;
    let want = oracle::permute_weights(&w, &b.layout);
    let want = ctx.tensor(&Mat::new(want.len(), 1, want), DType::F32)?;
    for got in out.weights.iter() {
        ctx.same_bits("permuted weights", got, &want)?;
    }
    for (got, s) in out.scales.iter().zip(&scales) {
        ctx.same_bits(
            "permuted scales",
            got,
            &ctx.tensor(&oracle::permute(s, &b.layout), DType::F32)?,
        )?;
    }
    Ok(())
}

/// Unpermute and its backward, with and without weights.
fn back(ctx: &mut Ctx, plan: &PermutePlan, b: &Batch) -> Result<()> {
    let (d, t) = (*plan.desc(), b.topk.num_tokens);
    let (rows, w) = (ctx.random(d.capacity, d.hidden, d.out), ctx.random(t, d.top_k, DType::F32));
    let dy = ctx.random(t, d.hidden, d.out);
    let (rows_t, w_t) = (ctx.tensor(&rows, d.out)?, ctx.tensor(&w, DType::F32)?);
    let mag = |r, c, v: usize| Mat::from_fn(r, c, |_, _| v as f64);
    for weighted in [false, true] {
        let out = ctx.poisoned(d.out, Shape::d2(t, d.hidden))?;
        let y =
            ctx.timed(|s| plan.unpermute(s, &b.map, (&rows_t, weighted.then_some(&w_t)), &out))?;
        let want = oracle::unpermute(&rows, weighted.then_some(&w), &b.layout);
        let bound = Bound::local(d.out, d.top_k);
        ctx.compare("unpermute", &y, &want, &mag(t, d.hidden, d.top_k), &bound)?;
        let g = UnpermuteGrads {
            d_out: ctx.tensor(&dy, d.out)?,
            d_rows: ctx.poisoned(d.out, Shape::d2(d.capacity, d.hidden))?,
            weighted: match weighted {
                false => None,
                true => Some(WeightedGrads {
                    weights: w_t.clone(),
                    rows: rows_t.clone(),
                    d_weights: ctx.poisoned(DType::F32, Shape::d2(t, d.top_k))?,
                }),
            },
        };
        let g = ctx.timed(|s| plan.unpermute_bwd(s, &b.map, &g))?;
        let want = oracle::unpermute_bwd(&rows, weighted.then_some(&w), &dy, &b.layout);
        let one = mag(d.capacity, d.hidden, 1);
        ctx.compare("d_rows", &g.d_rows, &want.0, &one, &Bound::local(d.out, 1))?;
        for (got, want) in g.weighted.iter().zip(&want.1) {
            let bound = Bound::local(DType::F32, d.hidden);
            ctx.compare("d_weights", &got.d_weights, want, &mag(t, d.top_k, d.hidden), &bound)?;
        }
    }
    Ok(())
}

/// The backward of permute: tokens and weights.
fn gradients(ctx: &mut Ctx, plan: &PermutePlan, b: &Batch) -> Result<()> {
    let (d, t) = (*plan.desc(), b.topk.num_tokens);
    let (g, gw) = (ctx.random(d.capacity, d.hidden, d.out), ctx.random(d.capacity, 1, DType::F32));
    let given = Permuted {
        x: ctx.tensor(&g, d.out)?,
        weights: Some(ctx.tensor(&gw, DType::F32)?.reshape(Shape::d1(d.capacity))?),
        scales: None,
    };
    let out = Tokens {
        x: ctx.poisoned(d.out, Shape::d2(t, d.hidden))?,
        weights: Some(ctx.poisoned(DType::F32, Shape::d2(t, d.top_k))?),
        scales: None,
    };
    let out = ctx.timed(|s| plan.permute_bwd(s, &b.map, &given, &out))?;
    let want = oracle::permute_bwd(&g, &b.layout);
    let mag = want.map(|_| d.top_k as f64);
    ctx.compare("d_tokens", &out.x, &want, &mag, &Bound::local(d.out, d.top_k))?;
    let want = Mat::from_fn(t, d.top_k, |i, j| b.layout.slot(i, j).map_or(0.0, |r| gw.at(r, 0)));
    for got in out.weights.iter() {
        ctx.same_bits("d_topk_weights", got, &ctx.tensor(&want, DType::F32)?)?;
    }
    Ok(())
}
