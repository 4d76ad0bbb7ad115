//! Dispatch and combine on the expert-major layout, and their backward.

use super::{EpLayout, Origin, Slot};
use crate::Mat;
use crate::mat::total;

/// One value for each (source rank, token, choice): `[T_src, k]` for each source rank.
fn per_copy(layout: &EpLayout, f: impl Fn(Origin, Slot) -> f64) -> Vec<Mat> {
    let one = |(src, &tokens): (usize, &usize)| {
        Mat::from_fn(tokens, layout.k, |token, choice| {
            let o = Origin { src, token, choice };
            layout.slot(o).map_or(0.0, |s| f(o, s))
        })
    };
    layout.tokens.iter().enumerate().map(one).collect()
}

/// One matrix for each destination rank: element `(row, col)` is `f(origin, col)`, 0 in empty rows.
fn per_row(layout: &EpLayout, cols: usize, f: impl Fn(Origin, usize) -> f64) -> Vec<Mat> {
    let one = |rows: &Vec<Option<Origin>>| {
        Mat::from_fn(rows.len(), cols, |r, c| rows[r].map_or(0.0, |o| f(o, c)))
    };
    layout.ranks.iter().map(|r| one(&r.rows)).collect()
}

fn check(blocks: &[Mat], rows: impl Iterator<Item = usize>) -> usize {
    let cols = blocks.first().map_or(0, |b| b.cols);
    assert!(blocks.iter().all(|b| b.cols == cols), "blocks differ in columns");
    assert!(blocks.iter().map(|b| b.rows).eq(rows), "blocks have the wrong number of rows");
    cols
}

fn check_tokens(layout: &EpLayout, blocks: &[Mat]) -> usize {
    check(blocks, layout.tokens.iter().copied())
}

fn check_rows(layout: &EpLayout, blocks: &[Mat]) -> usize {
    check(blocks, layout.ranks.iter().map(|r| r.rows.len()))
}

fn inner(a: &[f64], b: &[f64]) -> f64 {
    total(a.iter().zip(b).map(|(x, y)| x * y))
}

/// `recv[rank][row] = x[src][token]` of the row's origin; padding and unused rows are zero.
///
/// `x[s]` is `[T_s, H]`; the result is `[rows of rank, H]` for each rank.
///
/// # Panics
/// If shapes do not fit.
pub fn dispatch(layout: &EpLayout, x: &[Mat]) -> Vec<Mat> {
    let cols = check_tokens(layout, x);
    per_row(layout, cols, |o, c| x[o.src].at(o.token, c))
}

/// Weight of the copy in each row, 0 in padding and unused rows; `[T_s, k] -> [rows of rank]`.
///
/// # Panics
/// If shapes do not fit.
pub fn dispatch_weights(layout: &EpLayout, weights: &[Mat]) -> Vec<Vec<f64>> {
    assert_eq!(check_tokens(layout, weights), layout.k, "weights are [T, k]");
    let columns = per_row(layout, 1, |o, _| weights[o.src].at(o.token, o.choice));
    columns.into_iter().map(|m| m.data).collect()
}

/// `out[src][t] = sum_j (w[src][t, j]) y[slot(src, t, j)]`, added in the order of `j`; copies without
/// a slot add nothing. Weights are 1 if not given.
///
/// `y[rank]` is `[rows of rank, H]`; the result is `[T_s, H]` for each source rank.
///
/// # Panics
/// If shapes do not fit.
pub fn combine(layout: &EpLayout, y: &[Mat], weights: Option<&[Mat]>) -> Vec<Mat> {
    let cols = check_rows(layout, y);
    let weight = |o: Origin| weights.map_or(1.0, |w| w[o.src].at(o.token, o.choice));
    let one = |(src, &tokens): (usize, &usize)| {
        Mat::from_fn(tokens, cols, |token, c| {
            let term = |choice| {
                let o = Origin { src, token, choice };
                layout.slot(o).map_or(0.0, |s| weight(o) * y[s.rank].at(s.row, c))
            };
            total((0..layout.k).map(term))
        })
    };
    layout.tokens.iter().enumerate().map(one).collect()
}

/// Gradients of [`dispatch`] and [`dispatch_weights`].
#[derive(Clone, PartialEq, Debug)]
pub struct DispatchGrads {
    /// Gradient of the tokens, `[T_s, H]`.
    pub dx: Vec<Mat>,
    /// Gradient of the weights, `[T_s, k]`, 0 for copies without a slot.
    pub dw: Option<Vec<Mat>>,
}

/// `dx[src][t] = sum_j d_recv[slot(src, t, j)]` (a combine) and, if the weights had a gradient,
/// `dw[src][t, j] = d_recv_weights[slot(src, t, j)]`.
///
/// # Panics
/// If shapes do not fit.
pub fn dispatch_bwd(
    layout: &EpLayout,
    d_recv: &[Mat],
    d_recv_weights: Option<&[Vec<f64>]>,
) -> DispatchGrads {
    let dx = combine(layout, d_recv, None);
    let dw = d_recv_weights.map(|dw| per_copy(layout, |_, s| dw[s.rank][s.row]));
    DispatchGrads { dx, dw }
}

/// Gradients of [`combine`].
#[derive(Clone, PartialEq, Debug)]
pub struct CombineGrads {
    /// Gradient of the expert outputs, `[rows of rank, H]`; padding and unused rows are zero.
    pub dy: Vec<Mat>,
    /// Gradient of the weights, `[T_s, k]`, 0 for copies without a slot; none if unweighted.
    pub dw: Option<Vec<Mat>>,
}

/// `dy[row] = (w[origin]) d_out[origin]` (a dispatch) and, if weighted,
/// `dw[src][t, j] = <d_out[src][t], y[slot(src, t, j)]>`.
///
/// # Panics
/// If shapes do not fit.
pub fn combine_bwd(
    layout: &EpLayout,
    y: &[Mat],
    weights: Option<&[Mat]>,
    d_out: &[Mat],
) -> CombineGrads {
    let cols = check_tokens(layout, d_out);
    assert_eq!(check_rows(layout, y), cols, "outputs and gradients have the same columns");
    let weight = |o: Origin| weights.map_or(1.0, |w| w[o.src].at(o.token, o.choice));
    let dy = per_row(layout, cols, |o, c| weight(o) * d_out[o.src].at(o.token, c));
    let dw = weights
        .map(|_| per_copy(layout, |o, s| inner(d_out[o.src].row(o.token), y[s.rank].row(s.row))));
    CombineGrads { dy, dw }
}
