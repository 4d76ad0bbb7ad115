//! Attention forward and backward over queries and keys.
//!
//! Layout: `q` is `[total_q, Hq, dqk]`, `k` is `[total_kv, Hkv, dqk]`, `v` is `[total_kv, Hkv,
//! dv]`, `o` is `[total_q, Hq, dv]`, as matrices with heads and head dimension folded into the
//! columns (`head * d + c`). Query head `h` uses key-value head `h / (Hq / Hkv)`.
//!
//! For query `i` and key `j` of one sequence:
//!
//! ```text
//! z_ij = scale * <q_i, k_j>                    z_ij <- cap * tanh(z_ij / cap)   if softcap
//! s_ij = z_ij + bias[h, i, j]                  only for visible (i, j)
//! lse_i = ln(sum_j exp(s_ij) + exp(sink_h))    the sink term only if there is a sink
//! p_ij = exp(s_ij - lse_i)                     o_i = sum_j p_ij keep_ij / (1 - p_drop) v_j
//! ```
//!
//! A query that sees no key has `o = 0` and `lse = -inf` (`lse = sink` with a sink); so do rows
//! that belong to no sequence (`lse = -inf` always). The logarithm is natural.

mod backward;
mod forward;
#[cfg(test)]
mod plain;
mod row;

use std::ops::Range;

use tilewire_core::Rng;

pub use backward::{AttnGrads, attention_bwd};
pub use forward::{AttnOut, attention, merge};

use crate::Mat;

/// The keys that a query sees, by their distance.
///
/// Query `i` of `sq` sits at key position `i + skv - sq`: both ends are aligned (bottom-right), so
/// that the last query sees the last key under any causal mask, and decoding one token against a
/// cache needs no other mask. Key `j` is visible if it lies at most `left` before and `right`
/// behind that position; no bound means no limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AttnMask {
    /// Most keys seen before the own position.
    pub left: Option<usize>,
    /// Most keys seen behind the own position; 0 is causal.
    pub right: Option<usize>,
}

impl AttnMask {
    /// Every query sees every key.
    pub const FULL: Self = Self { left: None, right: None };
    /// A query sees itself and what came before.
    pub const CAUSAL: Self = Self { left: None, right: Some(0) };

    /// Sliding window: `left` keys before, the own position, `right` keys behind.
    pub const fn window(left: usize, right: usize) -> Self {
        Self { left: Some(left), right: Some(right) }
    }

    /// True if query `i` of `sq` sees key `j` of `skv` (positions inside the sequence).
    pub fn sees(&self, i: usize, j: usize, sq: usize, skv: usize) -> bool {
        // Wide enough for every bound of a window, `usize::MAX` too.
        let behind = j as i128 - (i as i128 + skv as i128 - sq as i128);
        self.left.is_none_or(|left| behind >= -(left as i128))
            && self.right.is_none_or(|right| behind <= right as i128)
    }
}

/// Dropout of attention probabilities.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Dropout {
    /// Probability that an entry is dropped, in `[0, 1)`.
    pub p: f64,
    /// Seed of the mask.
    pub seed: u64,
}

/// Largest token position that [`keep`] can tell apart, plus one.
pub const MAX_DROPOUT_POS: usize = 1 << 24;

/// True if the probability of this (head, query, key) survives dropout with probability `p`.
///
/// A pure function of global coordinates, so the mask is the same at every number of ranks: with
/// `counter = head << 48 | q_pos << 24 | k_pos`, the entry is kept if
/// `Rng::new(seed).f64_at(counter) >= p`, that is `Rng::at(counter) >> 11 >= p * 2^53`. `q_pos` and
/// `k_pos` are rows of the global packed tensors, padding rows counted.
///
/// # Panics
/// If a position is not below [`MAX_DROPOUT_POS`] or `head` not below 65536.
pub fn keep(seed: u64, head: usize, q_pos: usize, k_pos: usize, p: f64) -> bool {
    assert!(head < 1 << 16 && q_pos.max(k_pos) < MAX_DROPOUT_POS, "({head}, {q_pos}, {k_pos})");
    let counter = (head as u64) << 48 | (q_pos as u64) << 24 | k_pos as u64;
    Rng::new(seed).f64_at(counter) >= p
}

/// Additive bias `[heads, sq, skv]`, by position inside the sequence and shared by all sequences.
#[derive(Clone, PartialEq, Debug)]
pub struct Bias {
    /// `Hq`, or 1 for one bias for all heads.
    pub heads: usize,
    /// Largest query length.
    pub sq: usize,
    /// Largest key length.
    pub skv: usize,
    /// `[heads * sq, skv]`: row `head * sq + i`.
    pub data: Mat,
}

impl Bias {
    /// A bias from its elements, `[heads * sq, skv]`.
    ///
    /// # Panics
    /// If `data` has another shape.
    pub fn new(heads: usize, sq: usize, skv: usize, data: Mat) -> Self {
        assert_eq!((data.rows, data.cols), (heads * sq, skv), "bias is [heads * sq, skv]");
        Self { heads, sq, skv, data }
    }

    /// Row of `data` for a query.
    fn row(&self, head: usize, i: usize) -> usize {
        (if self.heads == 1 { 0 } else { head }) * self.sq + i
    }
}

/// The options of an attention: heads, scale, mask and what else surrounds its softmax.
#[derive(Clone, PartialEq, Debug)]
pub struct AttnSpec {
    /// Query heads, a multiple of `heads_kv`.
    pub heads_q: usize,
    /// Key and value heads.
    pub heads_kv: usize,
    /// Factor of the scores, usually `1 / sqrt(dqk)`.
    pub scale: f64,
    /// Visible pairs.
    pub mask: AttnMask,
    /// Bound of the scores, applied before the bias.
    pub softcap: Option<f64>,
    /// Dropout of the probabilities; it does not enter `lse`.
    pub dropout: Option<Dropout>,
}

impl AttnSpec {
    /// `heads_q` query heads, `heads_kv` key heads, scale `1 / sqrt(dqk)`, nothing else.
    pub fn new(heads_q: usize, heads_kv: usize, dqk: usize, mask: AttnMask) -> Self {
        let scale = 1.0 / (dqk as f64).sqrt();
        Self { heads_q, heads_kv, scale, mask, softcap: None, dropout: None }
    }
}

/// Rows of each sequence in the packed tensors.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sequences {
    /// Rows of `q` and `o`.
    pub q: Vec<Range<usize>>,
    /// Rows of `k` and `v`.
    pub kv: Vec<Range<usize>>,
}

impl Sequences {
    /// Sequences one after the other: sequence `s` is rows `cu[s]..cu[s + 1]`.
    ///
    /// # Panics
    /// If the offsets decrease or differ in number.
    pub fn packed(cu_seqlens_q: &[usize], cu_seqlens_kv: &[usize]) -> Self {
        Self::padded((cu_seqlens_q, cu_seqlens_q), (cu_seqlens_kv, cu_seqlens_kv))
    }

    /// Sequences with padding between them: sequence `s` has `cu_seqlens[s + 1] - cu_seqlens[s]`
    /// rows from row `cu_seqlens_padded[s]` on. Each argument is `(cu_seqlens, cu_seqlens_padded)`.
    ///
    /// # Panics
    /// If offsets decrease, differ in number, or a sequence does not fit its padded rows.
    pub fn padded(q: (&[usize], &[usize]), kv: (&[usize], &[usize])) -> Self {
        let ranges = |(cu, padded): (&[usize], &[usize])| -> Vec<Range<usize>> {
            assert_eq!(cu.len(), padded.len(), "as many padded offsets as offsets");
            let each = cu.windows(2).zip(padded.windows(2)).map(|(c, p)| {
                assert!(c[0] <= c[1] && c[1] - c[0] <= p[1].saturating_sub(p[0]), "{c:?} in {p:?}");
                p[0]..p[0] + (c[1] - c[0])
            });
            each.collect()
        };
        let sequences = Self { q: ranges(q), kv: ranges(kv) };
        assert_eq!(sequences.q.len(), sequences.kv.len(), "as many query as key sequences");
        sequences
    }

    /// `batch` sequences of equal lengths (the layout `[batch, seq, heads, d]`).
    pub fn batched(batch: usize, sq: usize, skv: usize) -> Self {
        let ranges = |len: usize| (0..batch).map(|b| b * len..(b + 1) * len).collect();
        Self { q: ranges(sq), kv: ranges(skv) }
    }
}

/// Tensors that attention reads.
#[derive(Clone, Copy, Debug)]
pub struct AttnInputs<'a> {
    /// `[total_q, Hq * dqk]`.
    pub q: &'a Mat,
    /// `[total_kv, Hkv * dqk]`.
    pub k: &'a Mat,
    /// `[total_kv, Hkv * dv]`.
    pub v: &'a Mat,
    /// Added to the scores.
    pub bias: Option<&'a Bias>,
    /// Logit of each query head, `[Hq]`, that takes part in the softmax and has no value: a learned
    /// sink; zeros give the off-by-one softmax.
    pub sink: Option<&'a [f64]>,
}

impl<'a> AttnInputs<'a> {
    /// Inputs without bias and sink.
    pub fn new(q: &'a Mat, k: &'a Mat, v: &'a Mat) -> Self {
        Self { q, k, v, bias: None, sink: None }
    }
}
