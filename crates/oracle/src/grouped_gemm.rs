//! Grouped GEMM: one product for each expert over consecutive blocks of rows.
//!
//! Tokens are packed expert after expert: expert `e` owns rows `sum(splits[..e]) ..
//! sum(splits[..=e])` of a buffer of `capacity >= sum(splits)` rows. Splits may be any numbers, 0
//! too.

use std::ops::Range;

use crate::Mat;
use crate::product::{Factor, product};

/// The contents of an output's rows behind those of the last expert.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Tail<'a> {
    /// Zeros.
    Zero,
    /// Whatever the output held before (its earlier contents, `[capacity, cols]`).
    Untouched(&'a Mat),
}

/// Rows of each expert.
///
/// # Panics
/// If the splits sum to more than `capacity`.
pub fn group_rows(splits: &[usize], capacity: usize) -> Vec<Range<usize>> {
    let mut start = 0;
    let mut ranges = Vec::new();
    for &n in splits {
        ranges.push(start..start + n);
        start += n;
    }
    assert!(start <= capacity, "{start} rows in a buffer of {capacity}");
    ranges
}

/// Puts the experts' results below each other and the tail under them.
fn pack(parts: &[Mat], capacity: usize, tail: Tail<'_>) -> Mat {
    let packed = Mat::vstack(parts);
    let rest = match tail {
        Tail::Zero => Mat::zeros(capacity - packed.rows, packed.cols),
        Tail::Untouched(before) => {
            assert_eq!((before.rows, before.cols), (capacity, packed.cols), "earlier contents");
            before.slice_rows(packed.rows..capacity)
        }
    };
    Mat::vstack(&[packed, rest])
}

/// `Y[rows of e] = X[rows of e] W_e^T (+ bias_e)`: `x` is `[capacity, K]`, `w[e]` is `[N, K]`,
/// `bias` is `[E, N]`; the result is `[capacity, N]`.
///
/// # Panics
/// If shapes do not fit or there is no expert.
pub fn grouped_fprop(
    x: &Mat,
    w: &[Mat],
    bias: Option<&Mat>,
    splits: &[usize],
    tail: Tail<'_>,
) -> Mat {
    assert!(!w.is_empty() && w.len() == splits.len(), "one weight and one split for each expert");
    let weights: Vec<Factor<'_>> = w.iter().map(|w| Factor::from(w).t()).collect();
    times(x, &weights, bias, splits, tail)
}

/// `X[rows of e] W_e (+ bias_e)`.
fn times(x: &Mat, w: &[Factor<'_>], bias: Option<&Mat>, splits: &[usize], tail: Tail<'_>) -> Mat {
    let groups = group_rows(splits, x.rows);
    let one = |(e, rows): (usize, &Range<usize>)| {
        let y = product(&x.slice_rows(rows.clone()), w[e]);
        match bias {
            Some(b) => crate::gemm::add_bias(&y, b.row(e)),
            None => y,
        }
    };
    pack(&groups.iter().enumerate().map(one).collect::<Vec<_>>(), x.rows, tail)
}

/// `dX[rows of e] = dY[rows of e] W_e`: `dy` is `[capacity, N]`, `w[e]` is `[N, K]`; the result is
/// `[capacity, K]`.
///
/// # Panics
/// If shapes do not fit or there is no expert.
pub fn grouped_dgrad(dy: &Mat, w: &[Mat], splits: &[usize], tail: Tail<'_>) -> Mat {
    assert!(!w.is_empty() && w.len() == splits.len(), "one weight and one split for each expert");
    let weights: Vec<Factor<'_>> = w.iter().map(Factor::from).collect();
    times(dy, &weights, None, splits, tail)
}

/// The earlier contents that a weight gradient is added to.
#[derive(Clone, Copy, Debug)]
pub struct Accumulate<'a> {
    /// Earlier contents of the outputs, one `[N, K]` for each expert.
    pub c: &'a [Mat],
    /// `wgrad_accumulation_mask`: true adds to `c`, false overwrites it.
    pub mask: &'a [bool],
}

/// `D_e = dY[rows of e]^T X[rows of e]`, or `C_e + ` that where the mask says so; `[N, K]` each.
///
/// An expert without rows gives exact zeros (mask false) or keeps its `C_e` bit for bit (true).
/// (TransformerEngine PR 2360, `wgrad_accumulation_mask`.)
///
/// # Panics
/// If shapes do not fit.
pub fn grouped_wgrad(
    x: &Mat,
    dy: &Mat,
    splits: &[usize],
    accumulate: Option<Accumulate<'_>>,
) -> Vec<Mat> {
    assert_eq!(x.rows, dy.rows, "one gradient row for each token row");
    if let Some(a) = accumulate {
        assert_eq!((a.c.len(), a.mask.len()), (splits.len(), splits.len()), "one for each expert");
    }
    let mut grads = Vec::new();
    for (e, rows) in group_rows(splits, x.rows).into_iter().enumerate() {
        let empty = rows.is_empty();
        let dy = dy.slice_rows(rows.clone());
        let dw = product(Factor::from(&dy).t(), &x.slice_rows(rows));
        grads.push(match accumulate {
            // Adding zeros would turn -0 into +0.
            Some(a) if a.mask[e] && empty => a.c[e].clone(),
            Some(a) if a.mask[e] => a.c[e].add(&dw),
            _ => dw,
        });
    }
    grads
}

/// `db[e, n] = sum over rows of e of dY[row, n]`, `[E, N]`.
///
/// # Panics
/// If the splits sum to more than the rows of `dy`.
pub fn grouped_dbias(dy: &Mat, splits: &[usize]) -> Mat {
    let groups = group_rows(splits, dy.rows);
    let data = groups.into_iter().flat_map(|rows| dy.slice_rows(rows).col_sums()).collect();
    Mat::new(splits.len(), dy.cols, data)
}

/// The mask in a bitmap of 32-bit words: bit `e % 32` of word `e / 32`.
///
/// # Panics
/// If the bitmap has fewer than `num_experts` bits.
pub fn mask_from_bitmap(words: &[u32], num_experts: usize) -> Vec<bool> {
    assert!(words.len() * 32 >= num_experts, "{} words for {num_experts} experts", words.len());
    (0..num_experts).map(|e| words[e / 32] >> (e % 32) & 1 == 1).collect()
}
