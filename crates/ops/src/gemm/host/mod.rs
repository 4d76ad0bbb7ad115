//! The arithmetic of GEMM on the host: the `gemm-f32` crate for the product, plain loops around it.

use std::borrow::Cow;

use tilewire_core::memory::filled;
use tilewire_core::{Result, convert_from_f32};

use super::{AOrder, Activation, BOrder, GemmDesc, GemmInputs};
use crate::common::Mat;

/// `c = a b` (or `c += a b`): `a` is `[m, k]`, `b` is `[k, n]`, `c` row-major `[m, n]`.
///
/// # Panics
/// If an operand is shorter than its shape needs.
pub(crate) fn matmul(
    (m, n, k): (usize, usize, usize),
    a: Mat<'_>,
    b: Mat<'_>,
    c: &mut [f32],
    add: bool,
) {
    assert_eq!(c.len(), m * n, "output of a {m}x{n} product");
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        if !add {
            c.fill(0.0);
        }
        return;
    }
    let fits = |x: Mat<'_>, r: usize, s: usize| x.data.len() > (r - 1) * x.row + (s - 1) * x.col;
    assert!(fits(a, m, k) && fits(b, k, n), "an operand of a {m}x{n}x{k} product is too short");
    // The kernels store columns of C fastest, so that they get the transposed product: that of the
    // transposed operands in the other order.
    let (n_signed, flip) = (n as isize, n > 1);
    let ((m, n), (col, row)) = if flip { ((n, m), (n_signed, 1)) } else { ((m, n), (1, n_signed)) };
    let flipped = |x: Mat<'_>| (x.data.as_ptr(), x.row as isize, x.col as isize);
    let as_is = |x: Mat<'_>| (x.data.as_ptr(), x.col as isize, x.row as isize);
    let (l, r) = if flip { (flipped(b), flipped(a)) } else { (as_is(a), as_is(b)) };
    let (out, kernel) = (c.as_mut_ptr(), gemm_f32::gemm::f32::get_gemm_fn());
    let one_thread = gemm_common::Parallelism::None;
    // SAFETY: the strides and extents were just checked against the slices, which are valid for
    // reads; `c` is an exclusive row-major slice of m*n elements. One thread, so that the order
    // of the sums depends on the shape alone.
    unsafe {
        kernel(
            m, n, k, out, col, row, add, l.0, l.1, l.2, r.0, r.1, r.2, 1.0, 1.0, false, false,
            false, one_thread,
        );
    }
}

/// Sums of the rows of `[m, k]`, in column order.
pub(crate) fn row_sums(m: usize, k: usize, a: Mat<'_>, out: &mut [f32]) {
    for (i, o) in out.iter_mut().enumerate().take(m) {
        *o = (0..k).map(|j| a.data[i * a.row + j * a.col]).sum();
    }
}

const SQRT_2_OVER_PI: f32 = 0.797_884_6;
const GELU_CUBE: f32 = 0.044_715;

/// Tanh form of GELU.
pub(crate) fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + (SQRT_2_OVER_PI * (x + GELU_CUBE * x * x * x)).tanh())
}

/// Derivative of [`gelu`].
pub(crate) fn dgelu(x: f32) -> f32 {
    let t = (SQRT_2_OVER_PI * (x + GELU_CUBE * x * x * x)).tanh();
    let dt = SQRT_2_OVER_PI * (1.0 + 3.0 * GELU_CUBE * x * x);
    0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * dt
}

pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Adds the bias to `rows` rows of `width` columns.
pub(crate) fn add_bias(c: &mut [f32], bias: &[f32]) {
    if bias.is_empty() {
        return;
    }
    for row in c.chunks_exact_mut(bias.len()) {
        for (x, b) in row.iter_mut().zip(bias) {
            *x += b;
        }
    }
}

/// Applies `act` to one row of the product; `aux` is that row of the saved pre-activation for
/// the backward forms. `out` has `act.out_cols(n)` elements.
pub(crate) fn activate_row(act: Activation, x: &[f32], aux: &[f32], out: &mut [f32]) {
    match act {
        Activation::None => out.copy_from_slice(x),
        // Not `max`, which turns NaN into 0.
        Activation::Relu => {
            out.iter_mut().zip(x).for_each(|(o, &v)| *o = if v < 0.0 { 0.0 } else { v });
        }
        Activation::Gelu => out.iter_mut().zip(x).for_each(|(o, &v)| *o = gelu(v)),
        Activation::DGelu => {
            for ((o, &v), &h) in out.iter_mut().zip(x).zip(aux) {
                *o = v * dgelu(h);
            }
        }
        Activation::SwiGlu => {
            let (gate, up) = x.split_at(x.len() / 2);
            for ((o, &g), &u) in out.iter_mut().zip(gate).zip(up) {
                *o = g * sigmoid(g) * u;
            }
        }
        Activation::DSwiGlu => {
            let (gate, up) = aux.split_at(x.len());
            let (dgate, dup) = out.split_at_mut(x.len());
            for (i, &d) in x.iter().enumerate() {
                let s = sigmoid(gate[i]);
                dgate[i] = d * up[i] * s * (1.0 + gate[i] * (1.0 - s));
                dup[i] = d * gate[i] * s;
            }
        }
    }
}

/// The whole product with its epilogue, on this thread.
pub(super) fn run(d: &GemmDesc, m: usize, t: &GemmInputs) -> Result<()> {
    let mut acc = filled(0.0, m * d.n)?;
    t.a.with_wide(|a| {
        let a = match d.a_order {
            AOrder::Mk => Mat::rows(a, d.k),
            AOrder::Km => Mat::rows(a, m).t(),
        };
        if let Some(bgrad) = &t.bgrad {
            let mut sums = filled(0.0, m)?;
            row_sums(m, d.k, a, &mut sums);
            bgrad.write(|b| b.copy_from_slice(bytemuck::cast_slice(&sums)))?;
        }
        t.b.with_wide(|b| {
            let b = match d.b_order {
                BOrder::Nk => Mat::rows(b, d.k).t(),
                BOrder::Kn => Mat::rows(b, d.n),
            };
            matmul((m, d.n, d.k), a, b, &mut acc, false);
        })
    })??;
    finish(d, m, t, &mut acc)
}

/// Bias, activation, aux, accumulation and rounding.
fn finish(d: &GemmDesc, m: usize, t: &GemmInputs, acc: &mut [f32]) -> Result<()> {
    let act = d.epilogue.activation;
    if let Some(bias) = &t.bias {
        add_bias(acc, &bias.to_f32()?);
    }
    if let Some(aux) = &t.aux_out {
        aux.write(|b| convert_from_f32(d.out, acc, b))?;
    }
    let aux = match &t.aux_in {
        Some(a) => Cow::Owned(a.to_f32()?),
        None => Cow::Borrowed(&[][..]),
    };
    let (cols, aux_cols) = (act.out_cols(d.n), act.aux_cols(d.n));
    let mut rows = filled(0.0, m * cols)?;
    for i in 0..m {
        let saved = if aux.is_empty() { &[] } else { &aux[i * aux_cols..][..aux_cols] };
        activate_row(act, &acc[i * d.n..][..d.n], saved, &mut rows[i * cols..][..cols]);
    }
    if d.epilogue.accumulate {
        for (r, o) in rows.iter_mut().zip(t.out.to_f32()?) {
            *r += o;
        }
    }
    t.out.write(|b| convert_from_f32(d.out, &rows, b))
}
