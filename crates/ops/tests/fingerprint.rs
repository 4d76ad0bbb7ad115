//! Plans that differ in anything that matters are told apart, field by field.
//!
//! The list of fields is checked by the compiler: a field that is added to a description without a
//! line here does not build.

use tilewire_core::*;
use tilewire_device::Stream;
use tilewire_ops::ag_gemm::*;
use tilewire_ops::attention::{
    AttentionDesc, AttnConfig, AttnMask, BiasShape, Dropout, HeadScales, Sequences,
};
use tilewire_ops::collective::*;
use tilewire_ops::common::{OverlapConfig, Via};
use tilewire_ops::cp_attention::{
    CpAttentionDesc, CpAttentionPlan, CpConfig, KeyOrder, Layout, Strategy,
};
use tilewire_ops::ep::{EpDesc, EpLayout, EpPlan, Overflow};
use tilewire_ops::gemm::{Activation, BOrder, Epilogue, GemmBackend};
use tilewire_ops::gemm_ar::*;
use tilewire_ops::gemm_rs::*;
use tilewire_ops::quant::*;
use tilewire_ops::{Algo, Shards};
use tilewire_symm::*;

/// `same` must be equal on all ranks, `own` is a rank's own business.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Rule {
    Same,
    Own,
}

/// All descriptions that differ from `$base` in one field.
macro_rules! flips {
    ($name:ident, $base:expr, { $($field:ident: $rule:ident = $value:expr),* $(,)? }) => {{
        let base = $base;
        // No `..`: every field has a line.
        let $name { $($field: _),* } = base.clone();
        vec![$((stringify!($field), Rule::$rule, { let mut d = base.clone(); d.$field = $value; d })),*]
    }};
}

/// Rank 0 makes and prepares a plan of `base`, rank 1 one of each of `flips`.
fn told_apart<D: Clone + Sync>(
    what: &str,
    base: D,
    flips: Vec<(&'static str, Rule, D)>,
    prepare: impl Fn(&D, &Heap, &Stream) -> Result<()> + Sync,
) {
    for (field, rule, flip) in &flips {
        let ends = World::run_threads(2, WorldCfg::for_tests(), |world| {
            let team = world.everyone("flip")?;
            let heap = team.heap(BackendKind::Host, HeapCfg::new(1 << 18))?;
            let desc = if team.rank() == Rank::new(0) { &base } else { flip };
            let done = prepare(desc, &heap, &Stream::new("s")?);
            // A rank that is refused stays until the other has its answer.
            let told = done.map_err(|e| (e.kind(), e.to_string()));
            while told.is_err() && world.alive().len() > 1 {
                match team.check() {
                    Err(_) => break,
                    Ok(()) => std::thread::yield_now(),
                }
            }
            Ok(told)
        })
        .unwrap_or_else(|e| panic!("{what}.{field}: {e}"));
        match rule {
            Rule::Own => assert!(ends.iter().all(Result::is_ok), "{what}.{field}: {ends:?}"),
            Rule::Same => {
                let kinds: Vec<_> = ends.iter().map(|e| e.as_ref().err().map(|e| e.0)).collect();
                let told = |k: &Option<ErrorKind>| {
                    matches!(k, Some(ErrorKind::Mismatch | ErrorKind::Aborted))
                };
                assert!(kinds.iter().all(told), "{what}.{field}: {ends:?}");
                assert!(kinds.contains(&Some(ErrorKind::Mismatch)), "{what}.{field}: {ends:?}");
            }
        }
    }
}

#[test]
fn comm_gemm_descriptions() {
    let base = AgGemmDesc::new(12, 8, 6, DType::F32);
    let bias = Epilogue { bias: true, ..Epilogue::NONE };
    let act = Epilogue { activation: Activation::Gelu, ..Epilogue::NONE };
    let mut flips = flips!(AgGemmDesc, base.clone(), {
        m: Same = 11, n: Own = 4, k: Same = 5, x: Same = DType::BF16, w: Own = DType::F32,
        out: Own = DType::BF16, w_order: Own = BOrder::Kn,
        shards: Same = Shards::Explicit(vec![12, 0]), epilogue: Own = bias,
    });
    flips.push(("epilogue.activation", Rule::Same, AgGemmDesc { epilogue: act, ..base.clone() }));
    // The types of one product go together: both operands at once.
    flips.iter_mut().filter(|f| f.0 == "x").for_each(|f| f.2.w = DType::BF16);
    told_apart("ag_gemm", base, flips, |d, h, s| AgGemmPlan::new(d.clone(), h, None)?.prepare(s));

    let base = GemmRsDesc::new(12, 8, 6, DType::F32);
    let flips = || {
        let mut flips = flips!(GemmRsDesc, base.clone(), {
            m: Same = 11, n: Same = 7, k: Own = 5, x: Own = DType::BF16, w: Own = DType::F32,
            out: Own = DType::BF16, wire: Same = DType::BF16, w_order: Own = BOrder::Kn,
            shards: Same = Shards::Explicit(vec![12, 0]), bias: Same = true,
        });
        flips.iter_mut().filter(|f| f.0 == "x").for_each(|f| f.2.w = DType::BF16);
        flips
    };
    told_apart("gemm_rs", base.clone(), flips(), |d, h, s| {
        GemmRsPlan::new(d.clone(), h, None)?.prepare(s)
    });
    // Its second half sends the results: their type must be equal.
    let ar = flips()
        .into_iter()
        .map(|(f, rule, d)| (f, if f == "out" { Rule::Same } else { rule }, GemmArDesc(d)));
    told_apart("gemm_ar", GemmArDesc(base.clone()), ar.collect(), |d, h, s| {
        GemmArPlan::new(d.clone(), h, None)?.prepare(s)
    });
}

#[test]
fn configurations() {
    let base = OverlapConfig { block_m: 2, block_n: 4, ..OverlapConfig::of(Algo::Fused, 2) };
    let mut flips = flips!(OverlapConfig, base, {
        algo: Same = Algo::Pipelined, via: Same = Via::Nccl, kernel: Same = GemmBackend::Portable,
        block_m: Same = 4, block_n: Same = 8, sub_chunks: Same = 1,
    });
    // The host refuses NCCL before ranks meet: `the_host_has_puts_only`. The text that is compared
    // names it: `the_three_choices_are_checked_together_and_shown`.
    flips.retain(|(field, ..)| *field != "via");
    let desc = AgGemmDesc::new(12, 8, 6, DType::F32);
    told_apart("config", base, flips, |c, h, s| {
        AgGemmPlan::new(desc.clone(), h, Some(*c))?.prepare(s)
    });
    let base = CpConfig::of(Strategy::AllGather);
    let tiles = AttnConfig { block_q: 32, ..AttnConfig::default() };
    let mut flips = flips!(CpConfig, base, { strategy: Same = Strategy::Ring, tiles: Same = tiles, gated: Same = true, order: Same = KeyOrder::Canonical });
    // The host has none but its own: `rows_have_the_same_bits_on_any_number_of_ranks`.
    flips.retain(|(field, ..)| *field != "order");
    let tiles = AttnConfig { block_kv: 32, ..AttnConfig::default() };
    flips.push(("tiles.block_kv", Rule::Same, CpConfig { tiles, ..base }));
    let desc = CpAttentionDesc::new(AttentionDesc::new(12, (2, 2), 4, DType::F32, AttnMask::FULL));
    told_apart("cp config", base, flips, |c, h, s| {
        CpAttentionPlan::new(desc.clone(), h, Some(*c))?.prepare(s)
    });
}

#[test]
fn collective_and_quant_descriptions() {
    let kind = CollectiveKind::ReduceScatter(Shards::Even, ReduceOp::Sum);
    let base = CollectiveDesc { kind, m: 12, cols: 6, dtype: DType::F32 };
    let of = |kind| CollectiveDesc { kind, ..base.clone() };
    let mut flips = flips!(CollectiveDesc, base.clone(), {
        kind: Same = CollectiveKind::AllReduce(ReduceOp::Sum), m: Same = 11, cols: Same = 5,
        dtype: Same = DType::BF16,
    });
    let avg = CollectiveKind::ReduceScatter(Shards::Even, ReduceOp::Avg);
    flips.push(("kind.op", Rule::Same, of(avg)));
    let shards = Shards::Explicit(vec![5, 7]);
    flips.push((
        "kind.shards",
        Rule::Same,
        of(CollectiveKind::ReduceScatter(shards, ReduceOp::Sum)),
    ));
    let prepare =
        |d: &CollectiveDesc, h: &Heap, s: &Stream| CollectivePlan::new(d.clone(), h)?.prepare(s);
    told_apart("collective", base.clone(), flips, prepare);
    let splits = |a| of(CollectiveKind::AllToAll(vec![vec![a, 2], vec![3, 1]]));
    told_apart("all_to_all", splits(1), vec![("splits", Rule::Same, splits(2))], prepare);

    let layout = ScaleLayout::Tensor;
    let base = QuantDesc {
        scope: Scope::Team,
        scaling: Scaling::Delayed { window: 4, margin: 0 },
        ..QuantDesc::new(12, 6, DType::F32, DType::F8E4M3, layout)
    };
    let mut flips = flips!(QuantDesc, base, {
        rows: Same = 11, cols: Same = 5, src: Same = DType::BF16, dst: Same = DType::F8E5M2,
        layout: Same = layout, pow2_scales: Same = true,
        scaling: Same = Scaling::Delayed { window: 5, margin: 0 }, scope: Same = Scope::Team,
        sides: Same = Sides::Both,
    });
    // There is one layout and one scope for the scale of a team; powers of two are not delayed.
    flips.retain(|f| f.0 != "layout" && f.0 != "scope");
    flips.iter_mut().filter(|f| f.0 == "pow2_scales").for_each(|f| f.2.scaling = Scaling::Current);
    told_apart("quant", base, flips, |d, h, s| QuantPlan::new(*d, Some(h))?.prepare(s));
}

#[test]
fn expert_descriptions() {
    let base = EpDesc { capacity: 64, ..EpDesc::new(2, 6, 4, 8, 2) };
    let flips = flips!(EpDesc, base.clone(), {
        experts_per_rank: Same = vec![2, 4], max_tokens: Same = 3, hidden: Same = 7, top_k: Same = 3,
        capacity: Same = 60, dtype: Same = DType::BF16, num_scales: Same = 1, out: Same = DType::BF16,
        layout: Same = EpLayout::ExpertMajor { align: 4 }, overflow: Same = Overflow::Error,
    });
    let fp8 = |mut d: EpDesc| {
        // Only FP8 tokens have scales.
        d.dtype = DType::F8E4M3;
        d
    };
    let (scales, rest): (Vec<_>, Vec<_>) = flips.into_iter().partition(|f| f.0 == "num_scales");
    let prepare = |d: &EpDesc, h: &Heap, s: &Stream| EpPlan::new(d.clone(), h)?.prepare(s);
    told_apart("ep", base.clone(), rest, prepare);
    let scales = scales.into_iter().map(|(f, r, d)| (f, r, fp8(d))).collect();
    told_apart("ep fp8", fp8(base), scales, prepare);
}

#[test]
fn attention_descriptions() {
    let config = Some(CpConfig::of(Strategy::Get));
    let attn = AttentionDesc {
        softcap: Some(30.0),
        dropout: Some(Dropout { p: 0.1, seed: 7 }),
        bias: Some(BiasShape { heads: 1, sq: 12, skv: 12 }),
        ..AttentionDesc::new(12, (4, 2), 4, DType::F32, AttnMask::window(3, 4))
    };
    let base = CpAttentionDesc::new(attn.clone());
    let prepare = |d: &CpAttentionDesc, h: &Heap, s: &Stream| {
        CpAttentionPlan::new(d.clone(), h, config)?.prepare(s)
    };
    let flips = flips!(CpAttentionDesc, base.clone(), {
        attn: Same = AttentionDesc { sink: true, ..attn.clone() }, layout: Same = Layout::Contiguous,
        a2a_size: Same = 2, fp8_kv: Same = true, dkv_wire: Same = DType::F8E5M2,
        backward: Same = false,
    });
    told_apart("cp_attention", base, flips, prepare);
    let seqs = Sequences::batched(2, 6, 6);
    let mut flips = flips!(AttentionDesc, attn.clone(), {
        heads_q: Same = 2, heads_kv: Same = 4, dqk: Same = 8, dv: Same = 8, dtype: Same = DType::BF16,
        out: Same = DType::BF16, mask: Same = AttnMask::window(2, 4), scale: Same = 0.25,
        softcap: Same = Some(20.0), dropout: Same = Some(Dropout { p: 0.1, seed: 8 }),
        bias: Same = Some(BiasShape { heads: 4, sq: 12, skv: 12 }), sink: Same = true,
        sequences: Same = seqs, scales: Same = HeadScales::Token,
    });
    // Plans with other scales are refused before anyone compares.
    flips.retain(|(field, ..)| *field != "scales");
    let also = |f: &'static str, d: AttentionDesc| (f, Rule::Same, d);
    flips.push(also("mask.right", AttentionDesc { mask: AttnMask::window(3, 5), ..attn.clone() }));
    let dropout = Some(Dropout { p: 0.2, seed: 7 });
    flips.push(also("dropout.p", AttentionDesc { dropout, ..attn.clone() }));
    flips.push(also("dropout", AttentionDesc { dropout: None, ..attn.clone() }));
    let longer = BiasShape { heads: 1, sq: 12, skv: 13 };
    flips.push(also("bias.skv", AttentionDesc { bias: Some(longer), ..attn.clone() }));
    let flips = flips.into_iter().map(|(f, r, d)| (f, r, CpAttentionDesc::new(d))).collect();
    told_apart("attention", CpAttentionDesc::new(attn), flips, prepare);
}
