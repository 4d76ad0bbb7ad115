//! The inputs of a launch of GEMM+RS: slots and tensors.

use tilewire_core::{DType, Error, Result};
use tilewire_device::Tensor;

use super::GemmRsDesc;
use crate::common::{apart, bias_type, expect_tensor};
use crate::gemm::BOrder;

pub(crate) const CREDIT: usize = 0;
pub(crate) const DATA: usize = 1;

/// Tensors of one launch with `m` rows in all.
#[derive(Clone, Debug)]
pub struct GemmRsInputs {
    /// `[m, k]`, my part of the contraction.
    pub x: Tensor,
    /// `[n, k]` or `[k, n]`.
    pub w: Tensor,
    /// Bias `[n]`: f32, or of the type of the output; equal on all ranks, added once.
    pub bias: Option<Tensor>,
    /// One f32 that multiplies my partial product: the product of the FP8 scales. On devices for
    /// FP8 operands only.
    pub scale: Option<Tensor>,
    /// Output: `[rows of me, n]` for `gemm_rs`, `[m, n]` for `gemm_ar`.
    pub out: Tensor,
}

impl GemmRsInputs {
    /// The plain product.
    pub fn new(x: Tensor, w: Tensor, out: Tensor) -> Self {
        Self { x, w, bias: None, scale: None, out }
    }

    /// Checks all tensors; `out_rows` is what the operation stores on this rank.
    pub(crate) fn check(&self, d: &GemmRsDesc, m: usize, out_rows: usize) -> Result<()> {
        expect_tensor("x", &self.x, d.x, &[m, d.k])?;
        match d.w_order {
            BOrder::Nk => expect_tensor("w", &self.w, d.w, &[d.n, d.k])?,
            BOrder::Kn => expect_tensor("w", &self.w, d.w, &[d.k, d.n])?,
        }
        expect_tensor("out", &self.out, d.out, &[out_rows, d.n])?;
        if self.bias.is_some() != d.bias {
            return Err(Error::invalid("`bias` and the description do not agree")
                .expected(if d.bias { "a tensor" } else { "none" })
                .seen(if d.bias { "none" } else { "a tensor" }));
        }
        if let Some(b) = &self.bias {
            expect_tensor("bias", b, bias_type(Some(b), d.out), &[d.n])?;
        }
        if let Some(s) = &self.scale {
            expect_tensor("scale", s, DType::F32, &[1])?;
        }
        apart(
            &[("out", Some(&self.out))],
            &[
                ("x", Some(&self.x)),
                ("w", Some(&self.w)),
                ("bias", self.bias.as_ref()),
                ("scale", self.scale.as_ref()),
            ],
        )
    }
}

/// Rows of one slot: enough for any `m` up to the plan's.
pub(crate) fn slot_rows(desc: &GemmRsDesc, size: usize) -> usize {
    desc.shards.max_rows(desc.m, size)
}
