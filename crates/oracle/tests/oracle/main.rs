//! The oracle is what everything else is measured by, so it is tested by what does not depend on
//! it: finite differences, hand-computed values, adjoint identities and second formulations.

mod attention;
mod attention_grad;
mod collective;
mod ep;
mod ep_data;
mod fp8;
mod gemm;
mod grouped_gemm;
mod mat;
mod nn;
mod permute;
mod quant;

use tilewire_core::Rng;
use tilewire_oracle::Mat;
use tilewire_oracle::finite_diff::{max_rel_err, numeric_grad};

/// Asserts that `got` is the gradient of `f` at `x`.
#[track_caller]
fn assert_grad(name: &str, got: &Mat, x: &Mat, f: impl FnMut(&Mat) -> f64) {
    let want = numeric_grad(x, f);
    let err = max_rel_err(got, &want);
    assert!(err < 1e-7, "{name}: error {err:e}\ngot  {:?}\nwant {:?}", got.data, want.data);
}

/// Asserts equality up to f64 rounding.
#[track_caller]
fn assert_close(name: &str, got: &Mat, want: &Mat) {
    let err = max_rel_err(got, want);
    assert!(err < 1e-12, "{name}: error {err:e}\ngot  {:?}\nwant {:?}", got.data, want.data);
}

/// A vector as a matrix of one row.
fn vector(v: &[f64]) -> Mat {
    Mat::new(1, v.len(), v.to_vec())
}

fn rng(seed: u64) -> Rng {
    Rng::new(seed)
}
