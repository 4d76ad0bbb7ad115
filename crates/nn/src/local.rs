//! Local products of the model, through the `gemm` operation.

use tilewire_core::{DType, Result, Shape};
use tilewire_device::{Stream, Tensor};
use tilewire_ops::gemm::{AOrder, BOrder, GemmDesc, GemmInputs, GemmPlan};

fn run(stream: &Stream, d: GemmDesc, a: Tensor, b: Tensor, out: Tensor) -> Result<Vec<f32>> {
    if d.m == 0 {
        return Ok(Vec::new());
    }
    let plan = GemmPlan::new(d)?;
    plan.prepare(stream)?;
    plan.launch(stream, GemmInputs::new(a, b, out))?.wait()?.to_vec()
}

/// `x w^T`: `x` is `[m, k]`, `w` is `[n, k]`.
///
/// # Errors
/// If shapes do not fit.
pub fn linear(stream: &Stream, x: &[f32], w: &Tensor) -> Result<Vec<f32>> {
    let (n, k) = (w.shape().dim(0), w.shape().dim(1));
    let m = x.len() / k;
    let out = Tensor::poisoned(DType::F32, Shape::d2(m, n));
    let x = Tensor::from_slice(x, Shape::d2(m, k))?;
    run(stream, GemmDesc::nt(m, n, k, DType::F32), x, w.clone(), out)
}

/// `dy w`: the gradient of the input of [`linear`].
///
/// # Errors
/// If shapes do not fit.
pub fn linear_dgrad(stream: &Stream, dy: &[f32], w: &Tensor) -> Result<Vec<f32>> {
    let (n, k) = (w.shape().dim(0), w.shape().dim(1));
    let m = dy.len() / n;
    let d = GemmDesc { b_order: BOrder::Kn, ..GemmDesc::nt(m, k, n, DType::F32) };
    let out = Tensor::poisoned(DType::F32, Shape::d2(m, k));
    run(stream, d, Tensor::from_slice(dy, Shape::d2(m, n))?, w.clone(), out)
}

/// Adds `dy^T x` to `grad` (`[n, k]`): the gradient of the weight of [`linear`].
///
/// # Errors
/// If shapes do not fit.
pub fn linear_wgrad(
    stream: &Stream,
    dy: &[f32],
    x: &[f32],
    (n, k): (usize, usize),
    grad: &mut [f32],
) -> Result<()> {
    let m = dy.len() / n;
    let d =
        GemmDesc { a_order: AOrder::Km, b_order: BOrder::Kn, ..GemmDesc::nt(n, k, m, DType::F32) };
    let out = Tensor::poisoned(DType::F32, Shape::d2(n, k));
    let (a, b) =
        (Tensor::from_slice(dy, Shape::d2(m, n))?, Tensor::from_slice(x, Shape::d2(m, k))?);
    for (g, v) in grad.iter_mut().zip(run(stream, d, a, b, out)?) {
        *g += v;
    }
    Ok(())
}
