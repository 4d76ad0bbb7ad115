//! Cases of context-parallel attention: every strategy on every layout.

use tilewire::ops::attention::{AttnConfig, Sequences};
use tilewire::ops::cp_attention::*;
use tilewire::prelude::*;

use super::attention::offsets::{self, Rows};
use super::attention::{Problem, describe, same_bits, words};
use super::{CORE, Case, Ctx, NCCL};

/// Layout, features, dtype. `kv8`: keys and values travel as e4m3; `dkv8`, `dkv5`: partial
/// gradients as e4m3, e5m2.
const COMBOS: [(&str, &str, DType); 22] = [
    ("zigzag", "causal+gqa", DType::F32),
    ("zigzag", "full+dims+sink", DType::BF16),
    ("contiguous", "causal+mqa+packed+dropout", DType::F32),
    ("contiguous", "window+padded+softcap", DType::F16),
    ("zigzag", "window+packed+bias", DType::F32),
    ("contiguous", "full+cross+bias1+dropout", DType::F32),
    ("zigzag", "causal+masked+sink", DType::F32),
    ("zigzag", "causal+gqa", DType::F8E4M3),
    ("contiguous", "full+padded+softcap+sink", DType::F8E4M3),
    ("zigzag", "causal+gqa+kv8", DType::BF16),
    ("zigzag", "causal+mqa+kv8+dkv8", DType::F32),
    ("contiguous", "window+dkv5", DType::F32),
    ("contiguous", "causal+gqa", DType::BF16),
    (PER_SEQUENCE, "causal+gqa+packed", DType::F32),
    (PER_SEQUENCE, "window+padded+softcap+sink", DType::BF16),
    (PER_SEQUENCE, "causal+mqa+cross+bias+dropout", DType::F32),
    (PER_SEQUENCE, "causal+gqa+packed+kv8+dkv8", DType::F32),
    (PER_SEQUENCE, "full+padded", DType::F8E4M3),
    (BALANCED, "causal+gqa+packed", DType::F32),
    (BALANCED, "window+padded+softcap+sink", DType::BF16),
    (BALANCED, "causal+mqa+cross+bias+dropout", DType::F32),
    (BALANCED, "full+packed", DType::F8E4M3),
];

/// The same of `all_gather` with gates, by the kernel for sm_90a, and head dimensions.
const GATED: [(&str, &str, DType, usize); 9] = [
    ("zigzag", "causal+gqa", DType::BF16, 64),
    ("contiguous", "causal+mqa+packed+dropout", DType::F16, 64),
    ("contiguous", "window+padded+softcap", DType::BF16, 128),
    ("zigzag", "window+packed+bias", DType::F16, 64),
    ("contiguous", "full+cross+bias1+dropout", DType::BF16, 64),
    ("zigzag", "causal+masked+sink", DType::F16, 128),
    (PER_SEQUENCE, "causal+gqa+packed", DType::BF16, 64),
    (BALANCED, "window+padded+softcap+sink", DType::BF16, 64),
    (BALANCED, "causal+gqa+packed", DType::F16, 256),
];

const PER_SEQUENCE: &str = "zigzag_per_sequence";
const BALANCED: &str = "balanced";

pub(super) fn cases() -> Vec<Case> {
    let mut v = Vec::new();
    for (strategy, _) in Strategy::NAMES {
        for (layout, words, dtype) in COMBOS {
            let op = format!("cp_attention/{strategy}/{layout}/{words}");
            v.push(Case::new(op, dtype, &[("seq", 29), ("d", 8)], run));
        }
        // Most shards are empty.
        let op = format!("cp_attention/{strategy}/zigzag/causal+gqa+tiny");
        v.push(Case::new(op, DType::F32, &[("seq", 3), ("d", 4)], run));
    }
    v.push(Case::new("cp_attention/auto/zigzag/causal", DType::F32, &[("seq", 29), ("d", 8)], run));
    for (layout, words, dtype, d) in GATED {
        let op = format!("cp_attention/gated/{layout}/{words}{CORE}");
        v.push(Case::new(op, dtype, &[("seq", 60), ("d", d)], run));
    }
    let op = format!("cp_attention/gated/zigzag/causal+gqa+tiny{CORE}");
    v.push(Case::new(op, DType::BF16, &[("seq", 3), ("d", 64)], run));
    // Where heads are traded rows are packed, and key heads are shared.
    for (strategy, _) in Strategy::NAMES.iter().filter(|s| s.1 != Strategy::Ring) {
        for (layout, words, dtype) in &COMBOS[..3] {
            let op = format!("{NCCL}/cp_attention/{strategy}/{layout}/{words}");
            v.push(Case::new(op, *dtype, &[("seq", 29), ("d", 8)], run));
        }
        for layout in [PER_SEQUENCE, BALANCED] {
            let op = format!("{NCCL}/cp_attention/{strategy}/{layout}/causal+gqa+packed");
            v.push(Case::new(op, DType::F32, &[("seq", 29), ("d", 8)], run));
        }
        let op = format!("{NCCL}/cp_attention/{strategy}/zigzag/causal+gqa+tiny");
        v.push(Case::new(op, DType::F32, &[("seq", 3), ("d", 4)], run));
    }
    v
}

fn config(case: &Case) -> Option<CpConfig> {
    let name = case.bare().split('/').nth(1)?;
    let tiles = AttnConfig { block_q: 8, block_kv: 6 };
    let (name, gated) = if case.by_core() { ("all_gather", true) } else { (name, false) };
    name.parse().ok().map(|strategy| CpConfig { strategy, tiles, gated, order: KeyOrder::Arrival })
}

/// Symmetric memory of a case on a heap of `size` ranks.
pub(super) fn heap_bytes(case: &Case, size: usize) -> Result<usize> {
    Ok(CpAttentionPlan::memory(&description(size, case)?, size, config(case)))
}

fn description(size: usize, case: &Case) -> Result<CpAttentionDesc> {
    let words = words(case);
    let has = |w: &str| words.contains(&w);
    // As many heads as every strategy can scatter; `mqa` shares one key head among the ranks.
    let heads = if size.is_power_of_two() { 4.max(size) } else { 2 * size };
    let mut attn = describe(&words, (case.dim("seq"), case.dim("d")), heads, case.dtype)?;
    if has("gqa") {
        // Half of the query heads, or (all_to_all on 8) a divisor of the ranks.
        attn.heads_kv = heads / 2;
    }
    let layout: Layout = case.bare().split('/').nth(2).unwrap_or("zigzag").parse()?;
    if layout == Layout::ZigzagPerSequence {
        let s = divided(&attn.sequences, 2 * size, has("padded"))?;
        if let Some(b) = &mut attn.bias {
            (b.sq, b.skv) = s.longest();
        }
        attn.sequences = s;
    }
    let a2a_size = if size.is_multiple_of(2) { 2 } else { 1 };
    let dkv_wire = match () {
        () if has("dkv8") => DType::F8E4M3,
        () if has("dkv5") => DType::F8E5M2,
        () => DType::F32,
    };
    let fp8_kv = has("kv8");
    Ok(CpAttentionDesc { layout, a2a_size, fp8_kv, dkv_wire, ..CpAttentionDesc::new(attn) })
}

/// `s` with sequences that can be cut into `chunks` equal chunks: with `padded` by the padding
/// behind them, otherwise because they are longer.
fn divided(s: &Sequences, chunks: usize, padded: bool) -> Result<Sequences> {
    let side = |sequences: &[std::ops::Range<usize>]| {
        let (mut cu, mut ends) = (vec![0], vec![0]);
        for r in sequences {
            let whole = r.len().next_multiple_of(chunks);
            cu.push(cu[cu.len() - 1] + if padded { r.len() } else { whole });
            ends.push(ends[ends.len() - 1] + whole);
        }
        (cu, ends)
    };
    let (q, kv) = (side(&s.q), side(&s.kv));
    Sequences::padded((&q.0, &q.1), (&kv.0, &kv.1))
}

/// Other sequences for the same plan: with fewer rows, for [`Layout::ZigzagPerSequence`] as many
/// sequences as have a row in each of the `chunks` chunks, less one, and for [`Layout::Balanced`]
/// four, one of them empty.
fn others(d: &CpAttentionDesc, chunks: usize) -> Result<Sequences> {
    let s = &d.attn.sequences;
    if d.layout == Layout::ZigzagPerSequence {
        let num = s.tokens_q.min(s.tokens_kv) / chunks;
        return Ok(Sequences::batched(num.saturating_sub(1).max(1), chunks, chunks));
    }
    let (q, kv) = s.longest();
    let (q, kv) = (q.min(s.tokens_q / 2), kv.min(s.tokens_kv / 2));
    if d.layout == Layout::Balanced {
        let cu = |n: usize| [0, n / 5, n / 5, n / 2, n];
        return Sequences::packed(&cu(q), &cu(kv));
    }
    Ok(Sequences::one(q, kv))
}

fn run(ctx: &mut Ctx, case: &Case) -> Result<()> {
    let desc = description(ctx.team.size(), case)?;
    let plan =
        CpAttentionPlan::with_backend(desc.clone(), &ctx.heap, config(case), case.backend())?;
    plan.prepare(&ctx.stream)?;
    let mut problem = Problem::new(ctx, desc.attn.clone());
    pass(ctx, &plan, &mut problem, None)?;
    let fewer = others(&desc, 2 * ctx.team.size())?;
    let mut attn = desc.attn.clone();
    attn.sequences = fewer.clone();
    let mut problem = Problem::new(ctx, attn);
    pass(ctx, &plan, &mut problem, Some(fewer))
}

/// Two forward and backward passes against the oracle.
fn pass(
    ctx: &mut Ctx,
    plan: &CpAttentionPlan,
    p: &mut Problem,
    fewer: Option<Sequences>,
) -> Result<()> {
    let (q, kv) = (plan.rows_q(fewer.as_ref()), plan.rows_kv(fewer.as_ref()));
    let mut x = p.inputs(ctx, &q, &kv)?;
    x.sequences = fewer.clone();
    if plan.desc().fp8_kv {
        p.quantise_kv();
    }
    if plan.desc().fp8_kv || plan.desc().attn.dtype.is_fp8() {
        p.widened(ctx);
    }
    let w = p.want_of_all(ctx)?;
    let count = |r: &[std::ops::Range<usize>]| r.iter().map(|s| s.len()).sum::<usize>();
    let (rows_q, rows_kv) = (count(&q), count(&kv));
    // Partials travel between groups, and where key heads are shared, inside of them.
    let partials = (plan.desc().dkv_wire, ctx.team.size());
    let mut first = None;
    for _ in 0..2 {
        let before = ctx.team.traffic();
        let o = p.out(ctx, rows_q)?;
        let o = ctx.timed(|s| plan.launch_fwd(s, &x, o))?;
        ctx.traffic("forward", &before, &plan.predict(fewer.as_ref(), Pass::Forward)?);
        p.check_out(ctx, &w, &o, &q)?;
        let before = ctx.team.traffic();
        let (saved, grads) = (p.saved(ctx, &o, &q)?, p.grads(ctx, rows_q, rows_kv)?);
        let g = ctx.timed(|s| plan.launch_bwd(s, &x, saved, grads))?;
        ctx.traffic("backward", &before, &plan.predict(fewer.as_ref(), Pass::Backward)?);
        p.check_grads(ctx, &w, &g, (&q, &kv), partials)?;
        same_bits(ctx, &mut first, (o, g))?;
    }
    if fewer.is_some() || plan.takes_offsets().is_err() {
        return Ok(());
    }
    let rows = Rows { q: &q, kv: &kv };
    if let Some((o, g)) = offsets::run(ctx, (plan, p), (&x, &rows))? {
        p.check_out(ctx, &w, &o, &q)?;
        p.check_grads(ctx, &w, &g, (&q, &kv), partials)?;
        if plan.config()?.gated || plan.desc().attn.dtype == DType::F32 {
            offsets::refused(ctx, (plan, p), (&x, &rows))?;
        }
    }
    Ok(())
}
