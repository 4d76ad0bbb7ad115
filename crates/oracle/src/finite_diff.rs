//! Numeric gradients: the judge of every backward pass.

use crate::Mat;

/// Step of the central difference, relative to `max(1, |x|)`: near the cube root of the f64
/// epsilon, where truncation and cancellation errors meet (about 1e-10 relative).
const STEP: f64 = 1e-5;

/// Gradient of the scalar function `f` at `x` by central differences:
/// `(f(x + h e_i) - f(x - h e_i)) / 2h` for every element `i`.
pub fn numeric_grad(x: &Mat, mut f: impl FnMut(&Mat) -> f64) -> Mat {
    let mut probe = x.clone();
    let mut grad = Mat::zeros(x.rows, x.cols);
    for i in 0..x.data.len() {
        let h = STEP * x.data[i].abs().max(1.0);
        probe.data[i] = x.data[i] + h;
        let up = f(&probe);
        probe.data[i] = x.data[i] - h;
        let down = f(&probe);
        probe.data[i] = x.data[i];
        grad.data[i] = (up - down) / (2.0 * h);
    }
    grad
}

/// Largest `|got - want| / (1 + |want|)`; infinite if any difference is NaN.
///
/// # Panics
/// If the shapes differ.
pub fn max_rel_err(got: &Mat, want: &Mat) -> f64 {
    let errs = got.zip(want, |g, w| (g - w).abs() / (1.0 + w.abs()));
    // f64::max would drop a NaN, and a NaN must never look like agreement.
    errs.data.iter().fold(0.0, |m: f64, &e| if e.is_nan() { f64::INFINITY } else { m.max(e) })
}
