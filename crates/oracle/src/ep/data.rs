//! Dispatch and combine on the expert-major layout, and their backward.

use super::{EpLayout, Origin, Slot};
use crate::Mat;
use crate::mat::total;

/// One value for each (token, choice) of source rank `src`: `[T_src, k]`.
fn per_copy(layout: &EpLayout, src: usize, f: impl Fn(Origin, Slot) -> f64 + Sync) -> Mat {
    Mat::from_rows(layout.tokens[src], layout.k, |token, out| {
        for (choice, v) in out.iter_mut().enumerate() {
            let o = Origin { src, token, choice };
            *v = layout.slot(o).map_or(0.0, |s| f(o, s));
        }
    })
}

/// The buffer of destination rank `rank`: `f` fills the rows that hold a copy, the others are 0.
fn per_row(
    layout: &EpLayout,
    (rank, cols): (usize, usize),
    f: impl Fn(Origin, &mut [f64]) + Sync,
) -> Mat {
    let rows = &layout.ranks[rank].rows;
    Mat::from_rows(rows.len(), cols, |r, out| {
        if let Some(o) = rows[r] {
            f(o, out);
        }
    })
}

/// `f` of each rank.
fn all(layout: &EpLayout, f: impl Fn(usize) -> Mat) -> Vec<Mat> {
    (0..layout.ranks.len()).map(f).collect()
}

/// The columns of blocks that have the number of rows that `fits` each.
fn check(blocks: &[Mat], num: usize, fits: impl Fn(usize, usize) -> bool) -> usize {
    let cols = blocks.first().map_or(0, |b| b.cols);
    assert!(blocks.iter().all(|b| b.cols == cols), "blocks differ in columns");
    let rows = blocks.len() == num && blocks.iter().enumerate().all(|(i, b)| fits(i, b.rows));
    assert!(rows, "blocks have the wrong number of rows");
    cols
}

fn check_tokens(layout: &EpLayout, blocks: &[Mat]) -> usize {
    check(blocks, layout.tokens.len(), |src, rows| rows == layout.tokens[src])
}

/// Rows behind those of the last expert may be left out.
fn check_rows(layout: &EpLayout, blocks: &[Mat]) -> usize {
    check(blocks, layout.ranks.len(), |rank, rows| {
        let r = &layout.ranks[rank];
        (r.total_padded().min(r.rows.len())..=r.rows.len()).contains(&rows)
    })
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
    all(layout, |rank| dispatch_to(layout, x, rank))
}

/// [`dispatch`] to one rank.
///
/// # Panics
/// If shapes do not fit.
pub fn dispatch_to(layout: &EpLayout, x: &[Mat], rank: usize) -> Mat {
    let cols = check_tokens(layout, x);
    per_row(layout, (rank, cols), |o, out| out.copy_from_slice(x[o.src].row(o.token)))
}

/// Weight of the copy in each row, 0 in padding and unused rows; `[T_s, k] -> [rows of rank]`.
///
/// # Panics
/// If shapes do not fit.
pub fn dispatch_weights(layout: &EpLayout, weights: &[Mat]) -> Vec<Vec<f64>> {
    assert_eq!(check_tokens(layout, weights), layout.k, "weights are [T, k]");
    let column =
        |rank| per_row(layout, (rank, 1), |o, out| out[0] = weights[o.src].at(o.token, o.choice));
    (0..layout.ranks.len()).map(|rank| column(rank).data).collect()
}

/// `out[src][t] = sum_j (w[src][t, j]) y[slot(src, t, j)]`, added in the order of `j`; copies
/// without a slot add nothing. Weights are 1 if not given.
///
/// `y[rank]` is `[rows of rank, H]`, or without the rows behind the last expert's; the result is
/// `[T_s, H]` for each source rank.
///
/// # Panics
/// If shapes do not fit.
pub fn combine(layout: &EpLayout, y: &[Mat], weights: Option<&[Mat]>) -> Vec<Mat> {
    all(layout, |src| combine_at(layout, y, weights, src))
}

/// [`combine`] at one source rank.
///
/// # Panics
/// If shapes do not fit.
pub fn combine_at(layout: &EpLayout, y: &[Mat], weights: Option<&[Mat]>, src: usize) -> Mat {
    let cols = check_rows(layout, y);
    let weight = |o: Origin| weights.map_or(1.0, |w| w[o.src].at(o.token, o.choice));
    Mat::from_rows(layout.tokens[src], cols, |token, out| {
        for choice in 0..layout.k {
            let o = Origin { src, token, choice };
            if let Some(s) = layout.slot(o) {
                let w = weight(o);
                out.iter_mut().zip(y[s.rank].row(s.row)).for_each(|(sum, y)| *sum += w * y);
            }
        }
    })
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
    let dw =
        d_recv_weights.map(|dw| all(layout, |src| per_copy(layout, src, |_, s| dw[s.rank][s.row])));
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
    let at = |rank| combine_bwd_at(layout, y, weights, d_out, rank);
    let (dy, dw): (Vec<Mat>, Vec<Option<Mat>>) = (0..layout.ranks.len()).map(at).unzip();
    CombineGrads { dy, dw: dw.into_iter().collect() }
}

/// [`combine_bwd`] of one rank: `dy` of its rows, `dw` of its tokens.
///
/// # Panics
/// If shapes do not fit.
pub fn combine_bwd_at(
    layout: &EpLayout,
    y: &[Mat],
    weights: Option<&[Mat]>,
    d_out: &[Mat],
    rank: usize,
) -> (Mat, Option<Mat>) {
    let cols = check_tokens(layout, d_out);
    assert_eq!(check_rows(layout, y), cols, "outputs and gradients have the same columns");
    let weight = |o: Origin| weights.map_or(1.0, |w| w[o.src].at(o.token, o.choice));
    let dy = per_row(layout, (rank, cols), |o, out| {
        let w = weight(o);
        out.iter_mut().zip(d_out[o.src].row(o.token)).for_each(|(v, d)| *v = w * d);
    });
    let product = |o: Origin, s: Slot| inner(d_out[o.src].row(o.token), y[s.rank].row(s.row));
    (dy, weights.map(|_| per_copy(layout, rank, product)))
}
