//! The tensors of one launch of a GEMM.

use tilewire_device::Tensor;

use crate::common::{Named, Operand};

/// Tensors of one launch. Shapes as [`GemmDesc`](super::GemmDesc) says, with the `m` of
/// `out` (at most the plan's).
#[derive(Clone, Debug)]
pub struct GemmInputs {
    /// A.
    pub a: Operand,
    /// B.
    pub b: Operand,
    /// Bias `[n]`: f32, or of the type of the output.
    pub bias: Option<Tensor>,
    /// Saved pre-activation `[m, aux_cols]` for the backward activations.
    pub aux_in: Option<Tensor>,
    /// Output `[m, out_cols]`; read as well with `accumulate`.
    pub out: Tensor,
    /// Pre-activation output `[m, n]`.
    pub aux_out: Option<Tensor>,
    /// Row sums of `op(A)`, `[m]` f32.
    pub bgrad: Option<Tensor>,
}

impl GemmInputs {
    /// The plain product: no bias, no second output.
    pub fn new(a: impl Into<Operand>, b: impl Into<Operand>, out: Tensor) -> Self {
        Self { a: a.into(), b: b.into(), bias: None, aux_in: None, out, aux_out: None, bgrad: None }
    }

    /// Every tensor with its name, those that are read before the others.
    pub(super) fn named(&self) -> [Named<'_>; 9] {
        let ([a, a_scales], [b, b_scales]) = (self.a.named("a"), self.b.named("b"));
        [
            a,
            a_scales,
            b,
            b_scales,
            ("bias", self.bias.as_ref()),
            ("aux_in", self.aux_in.as_ref()),
            ("out", Some(&self.out)),
            ("aux_out", self.aux_out.as_ref()),
            ("bgrad", self.bgrad.as_ref()),
        ]
    }
}

/// So many of the named tensors are read.
pub(super) const INS: usize = 6;
