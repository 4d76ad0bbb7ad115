//! Token permutation of a mixture of experts: tokens to expert-major rows and back.

use std::ops::Range;

use tilewire_core::Rng;

use crate::Mat;
use crate::mat::total;

/// Experts chosen for each token: `idx[t * k + j]` is the `j`-th expert of token `t`, -1 for none.
///
/// A token may name an expert twice; it then has two copies there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TopK {
    /// Number of tokens, `T`.
    pub num_tokens: usize,
    /// Choices for each token.
    pub k: usize,
    /// `[T, k]`, row-major.
    pub idx: Vec<i64>,
}

impl TopK {
    /// Choices from their array.
    ///
    /// # Panics
    /// If `idx` is not `num_tokens * k` long.
    pub fn new(num_tokens: usize, k: usize, idx: Vec<i64>) -> Self {
        assert_eq!(idx.len(), num_tokens * k, "topk_idx is [T, k]");
        Self { num_tokens, k, idx }
    }

    /// `k` distinct random experts for each token, each masked with probability `masked`.
    ///
    /// # Panics
    /// If there are fewer than `k` experts.
    pub fn random(rng: &mut Rng, shape: (usize, usize), num_experts: usize, masked: f64) -> Self {
        let (num_tokens, k) = shape;
        assert!(k <= num_experts, "{k} distinct of {num_experts}");
        let mut idx = Vec::new();
        for _ in 0..num_tokens {
            let mut left: Vec<usize> = (0..num_experts).collect();
            for _ in 0..k {
                let e = left.remove(rng.below(left.len() as u64) as usize);
                idx.push(if rng.next_f64() < masked { -1 } else { e as i64 });
            }
        }
        Self { num_tokens, k, idx }
    }

    /// Expert `j` of token `t`; none if masked (any negative index).
    ///
    /// # Panics
    /// If out of range.
    pub fn expert(&self, t: usize, j: usize) -> Option<usize> {
        assert!(
            t < self.num_tokens && j < self.k,
            "({t}, {j}) of ({}, {})",
            self.num_tokens,
            self.k
        );
        usize::try_from(self.idx[t * self.k + j]).ok()
    }

    /// Returns how many copies each expert receives.
    ///
    /// # Panics
    /// If an index is not below `num_experts`.
    pub fn counts(&self, num_experts: usize) -> Vec<usize> {
        let mut counts = vec![0; num_experts];
        for t in 0..self.num_tokens {
            for e in (0..self.k).filter_map(|j| self.expert(t, j)) {
                assert!(e < num_experts, "expert {e} of {num_experts}");
                counts[e] += 1;
            }
        }
        counts
    }

    /// The choices of some tokens.
    ///
    /// # Panics
    /// If out of range.
    pub fn slice(&self, tokens: Range<usize>) -> Self {
        let idx = self.idx[tokens.start * self.k..tokens.end * self.k].to_vec();
        Self { num_tokens: tokens.len(), k: self.k, idx }
    }
}

/// `n` rounded up to a multiple of `align`; 0 stays 0.
///
/// # Panics
/// If `align` is 0.
pub fn align_up(n: usize, align: usize) -> usize {
    assert!(align > 0, "the alignment must be positive");
    n.div_ceil(align) * align
}

/// The row of each copy of each token.
///
/// Rows are expert-major; inside an expert by token, then by choice. Each expert's rows are padded
/// to a multiple of the alignment (an expert without tokens has none).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Permutation {
    /// Number of tokens.
    pub num_tokens: usize,
    /// Choices for each token.
    pub k: usize,
    /// True number of rows of each expert, `[E]`.
    pub counts: Vec<usize>,
    /// First row of each expert and the total, `[E + 1]`; differences are the padded counts.
    pub offsets: Vec<usize>,
    /// The (token, choice) in each row; none in padding rows.
    pub sources: Vec<Option<(usize, usize)>>,
    /// Row of each (token, choice), `[T, k]`; none if masked. The inverse of `sources`.
    pub slots: Vec<Option<usize>>,
}

impl Permutation {
    /// Lays out the copies.
    ///
    /// # Panics
    /// If an index is not below `num_experts` or `align` is 0.
    pub fn new(topk: &TopK, num_experts: usize, align: usize) -> Self {
        let counts = topk.counts(num_experts);
        let (mut offsets, mut sources) = (vec![0], Vec::new());
        let mut slots = vec![None; topk.num_tokens * topk.k];
        for e in 0..num_experts {
            for t in 0..topk.num_tokens {
                for j in (0..topk.k).filter(|&j| topk.expert(t, j) == Some(e)) {
                    slots[t * topk.k + j] = Some(sources.len());
                    sources.push(Some((t, j)));
                }
            }
            sources.resize(offsets[e] + align_up(counts[e], align), None);
            offsets.push(sources.len());
        }
        Self { num_tokens: topk.num_tokens, k: topk.k, counts, offsets, sources, slots }
    }

    /// Padded number of rows of each expert: the `m_splits` of the grouped GEMM.
    pub fn padded(&self) -> Vec<usize> {
        self.offsets.windows(2).map(|w| w[1] - w[0]).collect()
    }

    /// Row of choice `j` of token `t`.
    ///
    /// # Panics
    /// If out of range.
    pub fn slot(&self, t: usize, j: usize) -> Option<usize> {
        assert!(
            t < self.num_tokens && j < self.k,
            "({t}, {j}) of ({}, {})",
            self.num_tokens,
            self.k
        );
        self.slots[t * self.k + j]
    }
}

/// `rows[slot(t, j)] = x[t]`, padding rows zero; `[T, H] -> [rows, H]`.
///
/// # Panics
/// If `x` does not have one row for each token.
pub fn permute(x: &Mat, p: &Permutation) -> Mat {
    assert_eq!(x.rows, p.num_tokens, "one row for each token");
    Mat::from_fn(p.sources.len(), x.cols, |r, c| p.sources[r].map_or(0.0, |(t, _)| x.at(t, c)))
}

/// Weight of the copy in each row, 0 in padding rows; `[T, k] -> [rows]`.
///
/// # Panics
/// If `weights` is not `[T, k]`.
pub fn permute_weights(weights: &Mat, p: &Permutation) -> Vec<f64> {
    assert_eq!((weights.rows, weights.cols), (p.num_tokens, p.k), "weights are [T, k]");
    p.sources.iter().map(|s| s.map_or(0.0, |(t, j)| weights.at(t, j))).collect()
}

/// Gradient of [`permute`]: `dx[t] = sum_j d_rows[slot(t, j)]`.
///
/// # Panics
/// If `d_rows` does not have the permutation's rows.
pub fn permute_bwd(d_rows: &Mat, p: &Permutation) -> Mat {
    unpermute(d_rows, None, p)
}

/// `y[t] = sum_j w[t, j] rows[slot(t, j)]` in the order of `j`, masked choices left out; weights 1
/// if not given. `[rows, H] -> [T, H]`.
///
/// # Panics
/// If `rows` does not have the permutation's rows, or `weights` is not `[T, k]`.
pub fn unpermute(rows: &Mat, weights: Option<&Mat>, p: &Permutation) -> Mat {
    assert_eq!(rows.rows, p.sources.len(), "one row for each slot");
    Mat::from_fn(p.num_tokens, rows.cols, |t, c| {
        let term = |j: usize| {
            let w = weights.map_or(1.0, |w| w.at(t, j));
            p.slot(t, j).map_or(0.0, |r| w * rows.at(r, c))
        };
        total((0..p.k).map(term))
    })
}

/// Gradients of [`unpermute`] given `dy`, `[T, H]`: `d_rows[slot(t, j)] = w[t, j] dy[t]` (padding
/// rows zero) and `dw[t, j] = <dy[t], rows[slot(t, j)]>` (0 where masked; none without weights).
///
/// # Panics
/// If shapes do not fit.
pub fn unpermute_bwd(
    rows: &Mat,
    weights: Option<&Mat>,
    dy: &Mat,
    p: &Permutation,
) -> (Mat, Option<Mat>) {
    assert_eq!((rows.rows, rows.cols), (p.sources.len(), dy.cols), "rows are [rows, H]");
    assert_eq!(dy.rows, p.num_tokens, "one gradient row for each token");
    let d_rows = Mat::from_fn(rows.rows, rows.cols, |r, c| {
        p.sources[r].map_or(0.0, |(t, j)| weights.map_or(1.0, |w| w.at(t, j)) * dy.at(t, c))
    });
    let inner = |t: usize, r: usize| total(dy.row(t).iter().zip(rows.row(r)).map(|(a, b)| a * b));
    let d_weights = weights
        .map(|_| Mat::from_fn(p.num_tokens, p.k, |t, j| p.slot(t, j).map_or(0.0, |r| inner(t, r))));
    (d_rows, d_weights)
}
