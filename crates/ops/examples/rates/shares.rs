//! Shares of context-parallel attention on one GPU: what each of 8 ranks computes of causal
//! documents, alone, and what gates cost where every key is there.
//!
//! A rank has runs of queries, as its layout says, each of which sees all keys of its document up
//! to its end: sequences of local attention with fewer queries than keys, which a launch has beside
//! each other. Rates are by the pairs that the mask shows; `of` is their ratio to that of one
//! document of 16384 rows in the same run. What has fewer pairs is launched so often that it takes
//! about as long: after some 50 ms the card's power limits its clock, which would count for the
//! longer one alone.
//!
//! `cargo run --release -p tilewire-ops --example rates shares [ROWS ...] [sustained]`, for single
//! documents of so many rows; without, packed ones, too.

use tilewire_core::{BackendKind, DType, Error, Result, Shape};
use tilewire_device::cuda::CudaContext;
use tilewire_device::{Device, Stream, Tensor};
use tilewire_ops::attention::{
    AttentionDesc, AttentionPlan, AttnBackend, AttnInputs, AttnMask, AttnOut, Sequences,
};
use tilewire_ops::cp_attention::{
    CpAttentionDesc, CpAttentionPlan, CpConfig, CpShare, KeyOrder, Layout, Pass, Strategy,
};
use tilewire_symm::{HeapCfg, World, WorldCfg};

use crate::{Turn, normal, take_turns};

const HEADS: (usize, usize) = (32, 8);
const DIM: usize = 128;
const RANKS: usize = 8;
/// Rows of the documents that ranks share, and of the one that is beside them.
const DOCUMENTS: [usize; 2] = [65536, 131_072];
const ALONE: usize = 16384;
/// Documents of 256 to 32768 rows, 131072 in all.
const MIX: [usize; 16] = [
    32768, 1024, 2048, 5120, 16384, 1024, 3072, 24576, 7168, 9216, 1024, 2048, 12288, 4096, 8960,
    256,
];

/// The causal attention of these sequences.
fn causal(seqs: Sequences) -> AttentionDesc {
    let mut d = AttentionDesc::new(seqs.tokens_q, HEADS, DIM, DType::BF16, AttnMask::CAUSAL);
    d.sequences = seqs;
    d
}

/// Pairs of a query and a key of `d` that the mask shows.
fn pairs(d: &AttentionDesc) -> f64 {
    let of = |(q, kv): (f64, f64)| q * (kv - q) + q * (q + 1.0) / 2.0;
    let rows = d.sequences.q.iter().zip(&d.sequences.kv);
    rows.map(|(q, kv)| of((q.len() as f64, kv.len() as f64))).sum()
}

/// Each rank's queries of packed documents, and the keys that they see.
fn divided(documents: &[usize], layout: Layout) -> Result<Vec<AttentionDesc>> {
    let mut cu = vec![0];
    documents.iter().for_each(|n| cu.push(cu[cu.len() - 1] + n));
    let desc = CpAttentionDesc::new(causal(Sequences::packed(&cu, &cu)?));
    let desc = CpAttentionDesc { layout, ..desc };
    let shares = CpShare::of_all(&desc, Strategy::AllGather, RANKS, Pass::Forward)?;
    let of = |share: &CpShare| {
        let (mut cu_q, mut cu_kv) = (vec![0], vec![0]);
        for run in &share.rows_q {
            for doc in cu.windows(2) {
                let rows = run.start.max(doc[0])..run.end.min(doc[1]);
                if !rows.is_empty() {
                    cu_q.push(cu_q[cu_q.len() - 1] + rows.len());
                    cu_kv.push(cu_kv[cu_kv.len() - 1] + rows.end - doc[0]);
                }
            }
        }
        Ok(causal(Sequences::packed(&cu_q, &cu_kv)?))
    };
    shares.iter().map(of).collect()
}

/// Tensors of a description.
struct Tensors {
    x: AttnInputs,
    out: AttnOut,
}

impl Tensors {
    fn new(ctx: &CudaContext, s: &Stream, d: &AttentionDesc) -> Result<Self> {
        let device = Device::Cuda(ctx.clone());
        let random = |rows: usize, heads: usize| {
            normal(ctx, s, rows, heads * DIM)?.reshape(Shape::d3(rows, heads, DIM))
        };
        let (q, kv) = (d.sequences.tokens_q, d.sequences.tokens_kv);
        let x = AttnInputs::new(random(q, HEADS.0)?, random(kv, HEADS.1)?, random(kv, HEADS.1)?);
        let out = Tensor::zeros_on(&device, DType::BF16, Shape::d3(q, HEADS.0, DIM))?;
        let lse = Tensor::zeros_on(&device, DType::F32, Shape::d2(HEADS.0, q))?;
        Ok(Self { x, out: AttnOut { out, lse } })
    }
}

/// Prints rows of turns, each of so many launches.
fn print(
    ctx: &CudaContext,
    (what, seq): (&str, usize),
    turns: Vec<(Turn<'_>, usize)>,
) -> Result<()> {
    let (name, mut of) = (ctx.name()?, None);
    for (t, launches) in turns {
        let us = t.median() / launches as f64;
        let flops = 4.0 * DIM as f64 * HEADS.0 as f64;
        let by: f64 = t.explain.parse().map_err(|e| Error::internal(format!("pairs: {e}")))?;
        let tflops = flops * by / us / 1e6;
        let of = *of.get_or_insert(tflops);
        println!(
            "{{\"device\":\"{name}\",\"work\":\"{what}\",\"heads\":\"{}/{}\",\"dim\":{DIM},\
             \"seq\":{seq},\"what\":\"{}\",\"us\":{us:.1},\"launches\":{launches},\
             \"tflops\":{tflops:.1},\"of\":{:.3}{}}}",
            HEADS.0,
            HEADS.1,
            t.by,
            tflops / of,
            t.beside(),
        );
    }
    Ok(())
}

/// One document of `alone` rows, then each rank's share of `documents`.
fn shares(
    (ctx, s): (&CudaContext, &Stream),
    alone: usize,
    (what, documents, layout): (&str, &[usize], Layout),
) -> Result<()> {
    let n: usize = documents.iter().sum();
    let mut descs = vec![("alone".to_owned(), causal(Sequences::one(alone, alone)))];
    for (r, desc) in divided(documents, layout)?.into_iter().enumerate() {
        descs.push((format!("rank {r} of {RANKS}, {n} rows{what}"), desc));
    }
    let made = |(name, d): (String, AttentionDesc)| {
        let plan = AttentionPlan::with_backend(d.clone(), None, AttnBackend::Hopper)?;
        plan.prepare(s)?;
        Ok((name, Tensors::new(ctx, s, &d)?, d, plan))
    };
    let all = descs.into_iter().map(made).collect::<Result<Vec<_>>>()?;
    let most = all.iter().map(|(_, _, d, _)| pairs(d)).fold(0.0, f64::max);
    let (mut turns, mut launches) = (Vec::new(), Vec::new());
    for (name, t, d, plan) in &all {
        let num = (most / pairs(d)).round() as usize;
        let launch =
            move || (0..num).try_for_each(|_| plan.launch_fwd(s, &t.x, t.out.clone()).map(drop));
        turns.push(Turn::new(name, pairs(d).to_string(), Box::new(launch)));
        launches.push(num);
    }
    take_turns(ctx, s, &mut turns)?;
    print(ctx, ("share of cp_attention", n), turns.into_iter().zip(launches).collect())
}

/// One rank: the kernel without gates, and the one with them, whose tiles are of 128 keys, in a
/// launch of a team, with its `enter` and the check for faults behind it.
fn gates(ctx: &CudaContext, s: &Stream, n: usize) -> Result<()> {
    let world = World::solo(WorldCfg::default())?;
    let heap = world.everyone("gates")?.heap(BackendKind::Vmm, HeapCfg::new(64 << 20))?;
    let d = causal(Sequences::one(n, n));
    let plain = AttentionPlan::with_backend(d.clone(), None, AttnBackend::Hopper)?;
    plain.prepare(s)?;
    let config =
        CpConfig { gated: true, order: KeyOrder::Canonical, ..CpConfig::of(Strategy::AllGather) };
    let gated = CpAttentionPlan::new(CpAttentionDesc::new(d.clone()), &heap, Some(config))?;
    gated.prepare(s)?;
    let (t, pairs) = (Tensors::new(ctx, s, &d)?, pairs(&d).to_string());
    let by_plain = || plain.launch_fwd(s, &t.x, t.out.clone()).map(drop);
    let by_gated = || gated.launch_fwd(s, &t.x, t.out.clone()).map(drop);
    let mut turns = vec![
        Turn::new("without gates", pairs.clone(), Box::new(by_plain)),
        Turn::new("gated, no peers, tiles of 128 keys", pairs, Box::new(by_gated)),
    ];
    take_turns(ctx, s, &mut turns)?;
    print(ctx, ("gates", n), turns.into_iter().map(|t| (t, 1)).collect())
}

pub fn main() -> Result<()> {
    let asked = std::env::args().skip(2).filter(|a| a != "sustained");
    let asked: Vec<usize> =
        asked.map(|a| a.parse().map_err(|_| Error::invalid(a))).collect::<Result<_>>()?;
    let packed = asked.is_empty();
    let documents = if packed { DOCUMENTS.to_vec() } else { asked };
    let ctx = CudaContext::new(0)?;
    let stream = Stream::on(&ctx)?;
    if let Some(bad) = documents.iter().find(|n| !n.is_multiple_of(256)) {
        return Err(Error::invalid("rows are a multiple of 256: whole tiles").seen(bad));
    }
    let alone = documents.iter().fold(ALONE, |least, n| least.min(*n));
    // Two chunks of whole tiles at least.
    for n in [(alone / 1024 * 256).max(256), alone] {
        gates(&ctx, &stream, n)?;
    }
    for n in documents {
        shares((&ctx, &stream), alone, ("", &[n], Layout::Zigzag))?;
    }
    if !packed {
        return Ok(());
    }
    let zigzag = Layout::ZigzagPerSequence;
    for (what, documents, layout) in [
        (", documents of 8192, zigzag", &[8192; 8][..], zigzag),
        (", documents of 8192, balanced", &[8192; 8], Layout::Balanced),
        (", documents of 32768, zigzag", &[32768; 4], zigzag),
        (", documents of 32768, balanced", &[32768; 4], Layout::Balanced),
        (", documents of 256 to 32768, balanced", &MIX, Layout::Balanced),
    ] {
        shares((&ctx, &stream), alone, (what, documents, layout))?;
    }
    Ok(())
}
