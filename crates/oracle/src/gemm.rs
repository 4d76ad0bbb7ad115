//! GEMM with epilogues, and the backward of a linear layer.

use crate::product::{Factor, product};
use crate::{Mat, matmul};

/// Function applied to the pre-activation `z`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Activation {
    /// `z`.
    #[default]
    None,
    /// `max(z, 0)`; derivative 0 at 0.
    Relu,
    /// The tanh form, as TransformerEngine and cuBLASLt compute it (not the erf form):
    /// `z/2 (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3)))`.
    Gelu,
    /// `silu(gate) * up`, `silu(g) = g / (1 + exp(-g))`. The pre-activation has `2N` columns: the
    /// first `N` are the gate, the second `N` are up; the output has `N`.
    SwiGlu,
}

impl Activation {
    /// Columns of the output when the pre-activation has `cols`.
    ///
    /// # Panics
    /// If `cols` is odd for SwiGLU.
    pub fn out_cols(self, cols: usize) -> usize {
        match self {
            Activation::SwiGlu => {
                assert!(cols.is_multiple_of(2), "SwiGLU needs a gate and an up half");
                cols / 2
            }
            _ => cols,
        }
    }
}

/// Operands of `D = act(op(A) op(B) + C + bias)`, all row-major.
#[derive(Clone, Copy, Debug)]
pub struct Gemm<'a> {
    /// `[M, K]`, or `[K, M]` if `transa`.
    pub a: &'a Mat,
    /// `[K, N]`, or `[N, K]` if `transb`.
    pub b: &'a Mat,
    /// `op(A) = A^T`.
    pub transa: bool,
    /// `op(B) = B^T`.
    pub transb: bool,
    /// `[N]`, added to every row.
    pub bias: Option<&'a [f64]>,
    /// Epilogue.
    pub act: Activation,
    /// `[M, N]`, added (beta = 1) before bias and activation, as cuBLASLt does.
    pub c: Option<&'a Mat>,
}

impl<'a> Gemm<'a> {
    /// `D = A B^T`, the linear layer `X W^T`, without epilogue.
    pub fn new(a: &'a Mat, b: &'a Mat) -> Self {
        let (transa, transb) = (false, true);
        Self { a, b, transa, transb, bias: None, act: Activation::None, c: None }
    }

    fn operands(&self) -> (Factor<'a>, Factor<'a>) {
        let op = |mat, trans| Factor { mat, trans, abs: false };
        (op(self.a, self.transa), op(self.b, self.transb))
    }

    /// `|op(A)| |op(B)|`, `[M, N]`: the magnitude in the error bound.
    ///
    /// # Panics
    /// If the inner extents differ.
    pub fn magnitude(&self) -> Mat {
        let (a, b) = self.operands();
        product(a.abs(), b.abs())
    }
}

/// Result of [`gemm`].
#[derive(Clone, PartialEq, Debug)]
pub struct GemmOut {
    /// `[M, N]` (`[M, N/2]` for SwiGLU).
    pub d: Mat,
    /// Pre-activation `z`, `[M, N]`: the auxiliary output that the backward needs.
    pub aux: Mat,
}

/// `z = op(A) op(B) + C + bias`, `D = act(z)` (cuBLASLt `cublasLtMatmul` with beta = 1).
///
/// # Panics
/// If shapes do not fit.
pub fn gemm(g: &Gemm<'_>) -> GemmOut {
    let (a, b) = g.operands();
    let mut aux = product(a, b);
    if let Some(c) = g.c {
        aux = aux.add(c);
    }
    if let Some(bias) = g.bias {
        aux = add_bias(&aux, bias);
    }
    GemmOut { d: activate(g.act, &aux), aux }
}

/// `x[r, c] + bias[c]`.
///
/// # Panics
/// If `bias` is not `x.cols` long.
pub fn add_bias(x: &Mat, bias: &[f64]) -> Mat {
    assert_eq!(bias.len(), x.cols, "one bias for each column");
    let row = |r, out: &mut [f64]| {
        out.iter_mut().zip(x.row(r)).zip(bias).for_each(|((o, v), b)| *o = v + b);
    };
    Mat::from_rows(x.rows, x.cols, row)
}

/// `act(z)`, elementwise ([`Activation::SwiGlu`]: `[M, 2N] -> [M, N]`).
///
/// # Panics
/// If `z` has an odd number of columns for SwiGLU.
pub fn activate(act: Activation, z: &Mat) -> Mat {
    let n = act.out_cols(z.cols);
    match act {
        Activation::None => z.clone(),
        Activation::Relu => z.map(|v| if v < 0.0 { 0.0 } else { v }),
        Activation::Gelu => z.map(gelu),
        Activation::SwiGlu => Mat::from_rows(z.rows, n, |r, out| {
            let (gate, up) = z.row(r).split_at(n);
            out.iter_mut().zip(gate).zip(up).for_each(|((o, &g), u)| *o = silu(g) * u);
        }),
    }
}

/// Gradient of `z` given `dact`, the gradient of `act(z)`: `dz = act'(z) * dact`.
///
/// SwiGLU: `dgate = dact * up * silu'(gate)`, `dup = dact * silu(gate)`, halves as in the forward.
///
/// # Panics
/// If `dact` does not have the shape of the forward's output.
pub fn activate_bwd(act: Activation, z: &Mat, dact: &Mat) -> Mat {
    let n = act.out_cols(z.cols);
    assert_eq!((dact.rows, dact.cols), (z.rows, n), "gradient has the output's shape");
    match act {
        Activation::None => dact.clone(),
        Activation::Relu => z.zip(dact, |v, d| if v > 0.0 { d } else { 0.0 }),
        Activation::Gelu => z.zip(dact, |v, d| dgelu(v) * d),
        Activation::SwiGlu => Mat::from_rows(z.rows, z.cols, |r, out| {
            for (c, o) in out.iter_mut().enumerate() {
                let (gate, up, d) = (z.at(r, c % n), z.at(r, n + c % n), dact.at(r, c % n));
                *o = if c < n { d * up * dsilu(gate) } else { d * silu(gate) };
            }
        }),
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `x sigmoid(x)`.
pub fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

/// `s + x s (1 - s)` with `s = sigmoid(x)`.
pub fn dsilu(x: f64) -> f64 {
    let s = sigmoid(x);
    s + x * s * (1.0 - s)
}

const GELU_CUBIC: f64 = 0.044715;

fn gelu_tanh(x: f64) -> f64 {
    ((2.0 / std::f64::consts::PI).sqrt() * (x + GELU_CUBIC * x.powi(3))).tanh()
}

/// GELU, tanh form: `x/2 (1 + t)`, `t = tanh(sqrt(2/pi) (x + 0.044715 x^3))`.
pub fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + gelu_tanh(x))
}

/// Derivative of [`gelu`]: `(1 + t)/2 + x/2 (1 - t^2) sqrt(2/pi) (1 + 3 * 0.044715 x^2)`.
pub fn dgelu(x: f64) -> f64 {
    let t = gelu_tanh(x);
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (1.0 + 3.0 * GELU_CUBIC * x * x);
    0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
}

/// Gradients of a linear layer.
#[derive(Clone, PartialEq, Debug)]
pub struct LinearGrads {
    /// `dX = dY W`, `[M, K]`.
    pub dx: Mat,
    /// `dW = dY^T X`, `[N, K]`.
    pub dw: Mat,
    /// `db[n] = sum_m dY[m, n]`, `[N]`.
    pub db: Vec<f64>,
}

/// Backward of `Y = X W^T + b`: `x` is `[M, K]`, `w` is `[N, K]`, `dy` is `[M, N]`.
///
/// # Panics
/// If shapes do not fit.
pub fn linear_bwd(x: &Mat, w: &Mat, dy: &Mat) -> LinearGrads {
    LinearGrads { dx: matmul(dy, w), dw: product(Factor::from(dy).t(), x), db: dy.col_sums() }
}

/// Fused dgrad epilogue (cuBLASLt `DGELU_BGRAD` and kin): with `Y = act(z) W^T`, the gradients of
/// `z` and of the bias inside `z`: `dz = act'(z) * (dY W)`, `bgrad[n] = sum_m dz[m, n]`.
///
/// `dy` is `[M, N2]`, `w` is `[N2, N]`, `aux = z` is `[M, N]` (`[M, 2N]` for SwiGLU).
///
/// # Panics
/// If shapes do not fit.
pub fn dgrad_dact(act: Activation, dy: &Mat, w: &Mat, aux: &Mat) -> (Mat, Vec<f64>) {
    let dz = activate_bwd(act, aux, &matmul(dy, w));
    let bgrad = dz.col_sums();
    (dz, bgrad)
}
