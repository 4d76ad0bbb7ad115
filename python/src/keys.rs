//! The keys by which calls find their plans.

use tilewire::ops::ag_gemm::AgGemmDesc;
use tilewire::ops::attention::{AttentionDesc, AttnMask, BiasShape, HeadScales};
use tilewire::ops::collective::CollectiveDesc;
use tilewire::ops::common::OverlapConfig;
use tilewire::ops::cp_attention::{CpConfig, Layout};
use tilewire::ops::ep::EpDesc;
use tilewire::ops::gemm_ar::GemmArDesc;
use tilewire::ops::gemm_rs::GemmRsDesc;
use tilewire::ops::quant::QuantDesc;
use tilewire::prelude::*;

/// Everything that plans of one world differ in. Rows are those that the plan was made for: a power
/// of two for each rank, unless the rows of each rank are given.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Key {
    AgGemm(AgGemmDesc, Option<OverlapConfig>),
    GemmRs(GemmRsDesc, Option<OverlapConfig>),
    GemmAr(GemmArDesc, Option<OverlapConfig>),
    Collective(CollectiveDesc),
    CpAttention(CpKey),
    /// And the multiprocessors that it may take.
    Ep(EpDesc, Option<usize>),
    Quant(QuantDesc),
}

/// Rows that a plan is made for so that calls with up to as many use it.
pub fn rounded(rows: usize) -> usize {
    rows.max(1).checked_next_power_of_two().unwrap_or(rows)
}

/// Sequences that a plan of an attention is made for, so that calls with up to as many use it. Any
/// plan takes 512, whatever its description says.
pub fn planned_for(sequences: usize) -> usize {
    if sequences <= 512 { 1 } else { rounded(sequences) }
}

/// An attention, whatever its rows: these come with each launch. Numbers by their bits.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct AttnKey {
    pub heads: [usize; 4],
    pub types: [DType; 2],
    pub scales: HeadScales,
    pub mask: AttnMask,
    pub scale: u64,
    pub softcap: Option<u64>,
    pub dropout: Option<(u64, u64)>,
    pub bias: Option<BiasShape>,
    pub sink: bool,
    pub tokens: [usize; 2],
    /// Sequences that the plan is made for, and the most queries of one.
    pub num: usize,
    pub longest: usize,
    /// Of a plan that serves these sequences only: their lengths.
    pub lengths: Vec<[usize; 2]>,
}

impl AttnKey {
    /// Of a description that is made for at most its rows.
    pub fn of(d: &AttentionDesc) -> Self {
        Self {
            heads: [d.heads_q, d.heads_kv, d.dqk, d.dv],
            types: [d.dtype, d.out],
            scales: d.scales,
            mask: d.mask,
            scale: d.scale.to_bits(),
            softcap: d.softcap.map(f64::to_bits),
            dropout: d.dropout.map(|x| (x.p.to_bits(), x.seed)),
            bias: d.bias,
            sink: d.sink,
            tokens: [d.sequences.tokens_q, d.sequences.tokens_kv],
            num: d.sequences.q.len(),
            longest: d.sequences.longest().0,
            lengths: match d.bias {
                Some(_) => d
                    .sequences
                    .q
                    .iter()
                    .zip(&d.sequences.kv)
                    .map(|(q, k)| [q.len(), k.len()])
                    .collect(),
                None => Vec::new(),
            },
        }
    }
}

/// A context-parallel attention: how rows are divided and how keys reach queries, beside.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct CpKey {
    pub attn: AttnKey,
    pub layout: Layout,
    pub config: Option<CpConfig>,
    pub a2a_size: usize,
    pub backward: bool,
}
