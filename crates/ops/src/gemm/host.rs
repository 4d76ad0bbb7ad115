//! The arithmetic of GEMM on the host: `gemm` crate for the product, plain loops around it.

use super::Activation;

/// A strided f32 matrix: `at(i, j) = data[i * row + j * col]`.
#[derive(Clone, Copy)]
pub(crate) struct Mat<'a> {
    pub data: &'a [f32],
    pub row: usize,
    pub col: usize,
}

impl<'a> Mat<'a> {
    /// Row-major with `width` columns.
    pub fn rows(data: &'a [f32], width: usize) -> Self {
        Self { data, row: width, col: 1 }
    }

    /// The transpose.
    pub fn t(self) -> Self {
        Self { data: self.data, row: self.col, col: self.row }
    }

    /// The matrix from row `r` and column `c` on.
    pub fn from(self, r: usize, c: usize) -> Self {
        let at = (r * self.row + c * self.col).min(self.data.len());
        Self { data: &self.data[at..], ..self }
    }
}

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
    // SAFETY: the strides and extents were just checked against the slices, which are valid for
    // reads; `c` is an exclusive row-major slice of m*n elements. One thread, so that the order
    // of the sums depends on the shape alone.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c.as_mut_ptr(),
            1,
            n as isize,
            add,
            a.data.as_ptr(),
            a.col as isize,
            a.row as isize,
            b.data.as_ptr(),
            b.col as isize,
            b.row as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
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
