//! Cases of the local attention, and the problems that `cp_attention` shares with it.

mod magnitude;
pub(super) mod offsets;
mod problem;
mod share;

use tilewire::ops::attention::{
    AttentionDesc, AttentionPlan, AttnBackend, AttnConfig, AttnGrads, AttnOut,
};
use tilewire::prelude::*;

pub(super) use problem::{Problem, describe};

use self::offsets::Rows;
use super::{CORE, Case, Ctx};

pub(super) fn cases() -> Vec<Case> {
    let mut v = Vec::new();
    let words = [
        "causal",
        "full+gqa+sink",
        "window+mqa+softcap",
        "causal+dims+packed+dropout",
        "full+padded+bias",
        "causal+masked+bias1+sink",
        "window+cross+dropout+softcap",
    ];
    for w in words {
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::F8E4M3] {
            v.push(Case::new(format!("attention/{w}"), dtype, &[("seq", 29), ("d", 8)], run));
        }
    }
    for (seq, d) in [(70, 64), (66, 128), (65, 256), (1, 1), (3, 33)] {
        let shape = [("seq", seq), ("d", d)];
        v.push(Case::new("attention/causal+gqa", DType::F32, &shape, run));
        v.push(Case::new("attention/full+gqa", DType::BF16, &shape, run));
    }
    // Few queries: keys are cut in pieces.
    for (words, seq, d, dtype) in [
        ("causal+few+packed+gqa", 150, 64, DType::BF16),
        ("window+few+padded+mqa+sink", 300, 40, DType::F16),
        ("full+few+packed", 130, 128, DType::BF16),
        ("causal+few+packed+gqa", 140, 64, DType::F8E4M3),
    ] {
        let shape = [("seq", seq), ("d", d)];
        v.push(Case::new(format!("attention/{words}"), dtype, &shape, run));
    }
    // Several tiles of queries and of keys, tails of both.
    for (words, seq, d, dtype) in [
        ("causal+gqa+sink", 300, 128, DType::BF16),
        ("full+mqa", 170, 64, DType::F16),
        ("window+packed+gqa", 330, 64, DType::BF16),
        ("causal+padded+masked", 140, 256, DType::BF16),
        ("window+cross+dropout+softcap", 150, 128, DType::BF16),
        ("full+padded+bias", 140, 64, DType::F16),
        // Widened.
        ("causal+gqa+sink", 140, 64, DType::F8E4M3),
        ("window+packed+gqa", 150, 128, DType::F8E4M3),
    ] {
        let shape = [("seq", seq), ("d", d)];
        v.push(Case::new(format!("attention/{words}{CORE}"), dtype, &shape, run));
    }
    // A scale for 128 tokens, of heads of 128: as the plan chooses, and by FP8 products.
    for (words, seq, by) in [
        ("causal+gqa+sink+blocks", 29, ""),
        ("causal+gqa+sink+blocks", 140, CORE),
        ("window+padded+cross+blocks", 160, CORE),
    ] {
        let name = format!("attention/{words}{by}");
        v.push(Case::new(name, DType::F8E4M3, &[("seq", seq)], run));
    }
    v
}

/// The words of a case's name.
pub(super) fn words(case: &Case) -> Vec<&str> {
    case.op.trim_end_matches(CORE).split('/').next_back().unwrap_or("").split('+').collect()
}

/// Returns true if a plan attends by FP8 products.
fn multiplies_codes(ctx: &Ctx, desc: &AttentionDesc, by: AttnBackend) -> Result<bool> {
    let plan = AttentionPlan::with_backend(desc.clone(), None, by)?;
    plan.prepare(&ctx.stream)?;
    Ok(plan.explain().contains("FP8 products"))
}

fn run(ctx: &mut Ctx, case: &Case) -> Result<()> {
    let few = words(case).contains(&"few");
    let d = if words(case).contains(&"blocks") { 128 } else { case.dim("d") };
    let desc = describe(&words(case), (case.dim("seq"), d), 4, case.dtype)?;
    let by = if case.by_core() { AttnBackend::Hopper } else { AttnBackend::Auto };
    let by_products = words(case).contains(&"blocks") && multiplies_codes(ctx, &desc, by)?;
    let mut p = Problem::new(ctx, desc.clone());
    let behind = by_products.then(|| {
        p.by_fp8_products(ctx);
        let w = p.want();
        p.behind_fp8_products(ctx);
        (w, p.want())
    });
    if case.dtype.is_fp8() {
        p.widened(ctx);
    }
    // Of launches by widened codes; of those by FP8 products, and of the passes behind them.
    let wide = p.want();
    let (fwd, bwd) = behind.as_ref().map_or((&wide, &wide), |(f, b)| (f, b));
    let s = &desc.sequences;
    let [q, kv] = [s.tokens_q, s.tokens_kv].map(|n| [n].map(|n| 0..n));
    let rows = Rows { q: &q, kv: &kv };
    let small = AttnConfig { block_q: 5, block_kv: 7 };
    // The core has tiles of its own.
    let configs = if case.by_core() { vec![None] } else { vec![None, Some(small)] };
    for config in configs {
        let plan = AttentionPlan::with_backend(desc.clone(), config, by)?;
        plan.prepare(&ctx.stream)?;
        let x = p.inputs(ctx, &q, &kv)?;
        let mut first: Option<(AttnOut, AttnGrads)> = None;
        for _ in 0..2 {
            let o = p.out(ctx, s.tokens_q)?;
            let o = ctx.timed(|st| plan.launch_fwd(st, &x, o))?;
            p.check_out(ctx, fwd, &o, &q)?;
            let (saved, grads) = (p.saved(ctx, &o, &q)?, p.grads(ctx, s.tokens_q, s.tokens_kv)?);
            let g = ctx.timed(|st| plan.launch_bwd(st, &x, saved, grads))?;
            p.check_grads(ctx, bwd, &g, (&q, &kv), (DType::F32, 0))?;
            same_bits(ctx, &mut first, (o, g))?;
        }
        // Once a case, and refusals in one type: tables depend on neither tiles of the host nor
        // types, and each run costs seconds on emulated devices.
        if config.is_none()
            && let Some((o, g)) = offsets::run(ctx, (&plan, &p), (&x, &rows))?
        {
            if few || by_products {
                // These launches are by other kernels.
                p.check_out(ctx, &wide, &o, &q)?;
                p.check_grads(ctx, &wide, &g, (&q, &kv), (DType::F32, 0))?;
            } else {
                same_bits(ctx, &mut first, (o, g))?;
            }
            if case.by_core() || case.dtype == DType::F32 {
                offsets::refused(ctx, (&plan, &p), (&x, &rows))?;
            }
        }
    }
    Ok(())
}

/// Demands the bits of the first run of every later one.
pub(super) fn same_bits(
    ctx: &mut Ctx,
    first: &mut Option<(AttnOut, AttnGrads)>,
    got: (AttnOut, AttnGrads),
) -> Result<()> {
    let Some((o, g)) = first else {
        *first = Some(got);
        return Ok(());
    };
    let pairs = [
        ("out", &o.out, &got.0.out),
        ("lse", &o.lse, &got.0.lse),
        ("dq", &g.dq, &got.1.dq),
        ("dk", &g.dk, &got.1.dk),
        ("dv", &g.dv, &got.1.dv),
    ];
    for (what, a, b) in pairs {
        ctx.same_bits(&format!("another run of {what}"), a, b)?;
    }
    Ok(())
}
