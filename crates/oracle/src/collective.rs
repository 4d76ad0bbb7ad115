//! References of the collectives: the contents of each rank after one, given those of all ranks
//! before it.
//!
//! All split and join along rows, in rank order. Shards may be uneven and empty. Fusions of a
//! collective with a GEMM follow, written as the collective and the GEMM one after the other.

use crate::{Mat, matmul};

/// The operation that combines the contributions of different ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReduceOp {
    /// Sum over the ranks.
    Sum,
    /// Sum divided by the number of ranks.
    Avg,
    /// Elementwise maximum.
    Max,
    /// Elementwise minimum.
    Min,
}

/// Elementwise reduction over the ranks, added in rank order.
///
/// # Panics
/// If there is no input or the shapes differ.
pub fn reduce(inputs: &[Mat], op: ReduceOp) -> Mat {
    assert!(!inputs.is_empty(), "nothing to reduce");
    let mut acc = inputs[0].clone();
    for x in &inputs[1..] {
        acc = acc.zip(x, |a, b| match op {
            ReduceOp::Sum | ReduceOp::Avg => a + b,
            ReduceOp::Max => a.max(b),
            ReduceOp::Min => a.min(b),
        });
    }
    match op {
        ReduceOp::Avg => acc.map(|v| v / inputs.len() as f64),
        _ => acc,
    }
}

/// The consecutive blocks of `x` with the given numbers of rows.
///
/// # Panics
/// If `rows` does not sum to `x.rows`.
pub fn split_rows(x: &Mat, rows: &[usize]) -> Vec<Mat> {
    assert_eq!(rows.iter().sum::<usize>(), x.rows, "splits do not cover the rows");
    let mut start = 0;
    let mut parts = Vec::new();
    for &n in rows {
        parts.push(x.slice_rows(start..start + n));
        start += n;
    }
    parts
}

/// `n` equal parts of `total`.
///
/// # Panics
/// If `total` is not a multiple of `n`.
pub fn even_splits(total: usize, n: usize) -> Vec<usize> {
    assert!(n > 0 && total.is_multiple_of(n), "{total} rows do not divide among {n}");
    vec![total / n; n]
}

/// Every rank receives all shards below each other.
///
/// # Panics
/// If the numbers of columns differ.
pub fn all_gather(shards: &[Mat]) -> Vec<Mat> {
    vec![Mat::vstack(shards); shards.len()]
}

/// Rank `r` receives block `r` (`rows[r]` rows) of the reduced input.
///
/// # Panics
/// If the shapes differ, or `rows` does not have one entry for each rank and the right sum.
pub fn reduce_scatter(inputs: &[Mat], rows: &[usize], op: ReduceOp) -> Vec<Mat> {
    assert_eq!(rows.len(), inputs.len(), "one block for each rank");
    split_rows(&reduce(inputs, op), rows)
}

/// Every rank receives the reduced input.
///
/// # Panics
/// If the shapes differ.
pub fn all_reduce(inputs: &[Mat], op: ReduceOp) -> Vec<Mat> {
    vec![reduce(inputs, op); inputs.len()]
}

/// Every rank receives the input of rank `root`.
///
/// # Panics
/// If `root` is not a rank.
pub fn broadcast(inputs: &[Mat], root: usize) -> Vec<Mat> {
    assert!(root < inputs.len(), "root {root} of {}", inputs.len());
    vec![inputs[root].clone(); inputs.len()]
}

/// Rank `d` receives block `d` of every rank's input, in source order; equal blocks.
///
/// # Panics
/// If an input's rows do not divide among the ranks.
pub fn all_to_all(inputs: &[Mat]) -> Vec<Mat> {
    let n = inputs.len();
    let splits: Vec<_> = inputs.iter().map(|x| even_splits(x.rows, n)).collect();
    all_to_all_uneven(inputs, &splits)
}

/// Rank `d` receives, in source order, the block that each rank `s` holds for it;
/// `splits[s][d]` rows go from `s` to `d`.
///
/// # Panics
/// If `splits` is not square or a row of it does not sum to that input's rows.
pub fn all_to_all_uneven(inputs: &[Mat], splits: &[Vec<usize>]) -> Vec<Mat> {
    let n = inputs.len();
    assert!(splits.len() == n && splits.iter().all(|s| s.len() == n), "splits must be n x n");
    let blocks: Vec<Vec<Mat>> =
        inputs.iter().zip(splits).map(|(x, rows)| split_rows(x, rows)).collect();
    (0..n).map(|d| Mat::vstack(&blocks.iter().map(|b| b[d].clone()).collect::<Vec<_>>())).collect()
}

/// `Y_r = gather(X) W_r^T`: rows of `X` and rows of `W` are sharded.
///
/// `x_shards[r]` is `[M_r, K]`, `w_shards[r]` is `[N_r, K]`; rank `r` receives `[sum M, N_r]`.
///
/// # Panics
/// If shapes do not fit.
pub fn ag_gemm(x_shards: &[Mat], w_shards: &[Mat]) -> Vec<Mat> {
    assert_eq!(x_shards.len(), w_shards.len(), "one weight shard for each rank");
    let gathered = all_gather(x_shards);
    gathered.iter().zip(w_shards).map(|(x, w)| matmul(x, &w.transpose())).collect()
}

/// The partial products `X_r W_r^T`, `[M, N]`, whose sum over the ranks is the result.
///
/// # Panics
/// If shapes do not fit.
pub fn partial_products(x_shards: &[Mat], w_shards: &[Mat]) -> Vec<Mat> {
    assert_eq!(x_shards.len(), w_shards.len(), "one weight shard for each rank");
    x_shards.iter().zip(w_shards).map(|(x, w)| matmul(x, &w.transpose())).collect()
}

/// `Y = sum_r X_r W_r^T`, rank `r` receives block `r` (`rows[r]` rows).
///
/// `x_shards[r]` is `[M, K_r]`, `w_shards[r]` is `[N, K_r]`: the contraction is sharded.
///
/// # Panics
/// If shapes do not fit.
pub fn gemm_rs(x_shards: &[Mat], w_shards: &[Mat], rows: &[usize]) -> Vec<Mat> {
    reduce_scatter(&partial_products(x_shards, w_shards), rows, ReduceOp::Sum)
}

/// As [`gemm_rs`], and every rank receives the whole sum.
///
/// # Panics
/// If shapes do not fit.
pub fn gemm_ar(x_shards: &[Mat], w_shards: &[Mat]) -> Vec<Mat> {
    all_reduce(&partial_products(x_shards, w_shards), ReduceOp::Sum)
}
