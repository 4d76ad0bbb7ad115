//! The description of a GEMM: shapes, types, orders, epilogue.

use std::fmt;

use tilewire_core::{DType, Error, ErrorKind, Result};

/// Order of the left operand in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum AOrder {
    /// `[m, k]` row-major.
    Mk,
    /// `[k, m]` row-major: the operand is its transpose.
    Km,
}

/// Order of the right operand in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum BOrder {
    /// `[n, k]` row-major: a weight of `n` output features (the usual "nt" product).
    Nk,
    /// `[k, n]` row-major.
    Kn,
}

/// Elementwise function of the epilogue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Activation {
    /// None.
    None,
    /// `max(x, 0)`.
    Relu,
    /// Tanh form of GELU.
    Gelu,
    /// `silu(gate) * up`; gate is the first half of the `n` columns, the output has `n / 2`.
    SwiGlu,
    /// Product with the derivative of GELU at `aux`.
    DGelu,
    /// Gradient of SwiGLU: `n` columns of product in, `2 n` columns out, `aux` is `[m, 2 n]`.
    DSwiGlu,
}

impl Activation {
    /// Columns of the output for `n` columns of the product.
    pub fn out_cols(self, n: usize) -> usize {
        match self {
            Activation::SwiGlu => n / 2,
            Activation::DSwiGlu => 2 * n,
            _ => n,
        }
    }

    /// Columns of `aux` for `n` columns of the product.
    pub fn aux_cols(self, n: usize) -> usize {
        match self {
            Activation::DSwiGlu => 2 * n,
            _ => n,
        }
    }

    /// True for the backward forms, which read `aux` instead of writing it.
    pub fn reads_aux(self) -> bool {
        matches!(self, Activation::DGelu | Activation::DSwiGlu)
    }

    /// True if an output column needs two columns of the product, or the other way round.
    pub(crate) fn pairs_columns(self) -> bool {
        matches!(self, Activation::SwiGlu | Activation::DSwiGlu)
    }
}

/// Operations on the product before it is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Epilogue {
    /// Add `bias[n]` (f32, or of the type of the output) to each row.
    pub bias: bool,
    /// Function applied after the bias.
    pub activation: Activation,
    /// Also store the pre-activation (forward activations only).
    pub aux: bool,
    /// Add to what the output holds instead of overwriting it.
    pub accumulate: bool,
    /// Also store the sums of the rows of `op(A)`, `[m]` f32: the bias gradient when
    /// `op(A)` is the transposed output gradient.
    pub bgrad: bool,
}

impl Epilogue {
    /// Store the product as it is.
    pub const NONE: Epilogue = Epilogue {
        bias: false,
        activation: Activation::None,
        aux: false,
        accumulate: false,
        bgrad: false,
    };
}

/// A matrix product and its epilogue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct GemmDesc {
    /// The most rows of the output.
    pub m: usize,
    /// Columns of the product.
    pub n: usize,
    /// Length of the contraction.
    pub k: usize,
    /// Element type of A.
    pub a: DType,
    /// Element type of B.
    pub b: DType,
    /// Element type of the output and of `aux`.
    pub out: DType,
    /// Layout of A.
    pub a_order: AOrder,
    /// Layout of B.
    pub b_order: BOrder,
    /// Epilogue.
    pub epilogue: Epilogue,
}

impl GemmDesc {
    /// `[m, k] x [n, k]^T -> [m, n]` with all tensors of one type.
    pub fn nt(m: usize, n: usize, k: usize, dtype: DType) -> Self {
        Self {
            m,
            n,
            k,
            a: dtype,
            b: dtype,
            out: if dtype.is_fp8() { DType::BF16 } else { dtype },
            a_order: AOrder::Mk,
            b_order: BOrder::Nk,
            epilogue: Epilogue::NONE,
        }
    }

    /// Checks the combination.
    ///
    /// # Errors
    /// `InvalidArgument` for dtypes that are not floating or contradicting epilogue flags;
    /// `Unsupported` for FP8 beside another type.
    pub fn check(&self) -> Result<()> {
        let bad = |text: String| Err(Error::invalid(text));
        for (what, d) in [("a", self.a), ("b", self.b), ("out", self.out)] {
            if !d.is_float() || d == DType::F64 {
                return bad(format!(
                    "`{what}` cannot be {d}; one of f32, bf16, f16, f8e4m3, f8e5m2"
                ));
            }
        }
        if self.a.is_fp8() != self.b.is_fp8() || (!self.a.is_fp8() && self.a != self.b) {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{} x {} is not supported: both operands must be FP8 (any of the two types), \
                     or both of the same type",
                    self.a, self.b
                ),
            ));
        }
        let e = &self.epilogue;
        if e.activation == Activation::SwiGlu && !self.n.is_multiple_of(2) {
            return bad(format!("SwiGLU needs an even number of columns, not {}", self.n));
        }
        if e.aux && (e.activation == Activation::None || e.activation.reads_aux()) {
            return bad("`aux` is an output of the forward activations only".to_owned());
        }
        if e.accumulate && e.activation != Activation::None {
            return bad("`accumulate` and an activation exclude each other".to_owned());
        }
        Ok(())
    }
}

impl fmt::Display for GemmDesc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "m={} n={} k={} {}x{}->{} {:?}/{:?} {:?}",
            self.m,
            self.n,
            self.k,
            self.a,
            self.b,
            self.out,
            self.a_order,
            self.b_order,
            self.epilogue
        )
    }
}
