//! RMSNorm.

use crate::Mat;
use crate::mat::total;

/// `1 / sqrt(mean(row^2) + eps)`.
fn rstd(row: &[f64], eps: f64) -> f64 {
    1.0 / (total(row.iter().map(|v| v * v)) / row.len() as f64 + eps).sqrt()
}

/// `y[t, c] = x[t, c] rstd_t w[c]`, `rstd_t = 1 / sqrt(mean_c x[t, c]^2 + eps)`
/// (Zhang and Sennrich 2019). `x` is `[T, H]`, `w` is `[H]`.
///
/// # Panics
/// If `w` is not `x.cols` long.
pub fn rms_norm(x: &Mat, w: &[f64], eps: f64) -> Mat {
    assert_eq!(w.len(), x.cols, "one weight for each column");
    let r: Vec<f64> = (0..x.rows).map(|t| rstd(x.row(t), eps)).collect();
    Mat::from_fn(x.rows, x.cols, |t, c| x.at(t, c) * r[t] * w[c])
}

/// Gradients `(dx, dw)` of [`rms_norm`] given `dy`, with `r = rstd_t`:
/// `dx = r w dy - x r^3 mean_c(w dy x)`, `dw[c] = sum_t dy[t, c] x[t, c] r`.
///
/// # Panics
/// If shapes do not fit.
pub fn rms_norm_bwd(x: &Mat, w: &[f64], eps: f64, dy: &Mat) -> (Mat, Vec<f64>) {
    assert_eq!((dy.rows, dy.cols, w.len()), (x.rows, x.cols, x.cols), "shapes differ");
    let r: Vec<f64> = (0..x.rows).map(|t| rstd(x.row(t), eps)).collect();
    let mean = |t| total((0..x.cols).map(|i| w[i] * dy.at(t, i) * x.at(t, i))) / x.cols as f64;
    let mean: Vec<f64> = (0..x.rows).map(mean).collect();
    let dx = Mat::from_fn(x.rows, x.cols, |t, c| {
        r[t] * w[c] * dy.at(t, c) - x.at(t, c) * r[t].powi(3) * mean[t]
    });
    let dw = Mat::from_fn(x.rows, x.cols, |t, c| dy.at(t, c) * x.at(t, c) * r[t]);
    (dx, dw.col_sums())
}
