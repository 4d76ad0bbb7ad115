//! Tensors of the launches of a grouped GEMM.

use tilewire_device::Tensor;

use super::{Splits, Weights};
use crate::gemm::Operand;

/// Tensors of an fprop.
#[derive(Clone, Debug)]
pub struct GroupedFprop {
    /// `[capacity, k]`.
    pub x: Operand,
    /// Weights.
    pub w: Weights,
    /// Bias `[groups, n]`: f32, or of the type of the output.
    pub bias: Option<Tensor>,
    /// Rows of each group.
    pub splits: Splits,
    /// `[capacity, out_cols]`.
    pub out: Tensor,
    /// Pre-activation `[capacity, n]`.
    pub aux_out: Option<Tensor>,
}

/// Tensors of a dgrad.
#[derive(Clone, Debug)]
pub struct GroupedDgrad {
    /// `[capacity, n]`.
    pub dy: Operand,
    /// Weights.
    pub w: Weights,
    /// Rows of each group.
    pub splits: Splits,
    /// `[capacity, k]`.
    pub dx: Tensor,
}

/// Tensors of a wgrad.
#[derive(Clone, Debug)]
pub struct GroupedWgrad {
    /// `[capacity, k]`.
    pub x: Operand,
    /// `[capacity, n]`.
    pub dy: Operand,
    /// Rows of each group.
    pub splits: Splits,
    /// Gradients, written or added to.
    pub dw: Weights,
    /// `wgrad_accumulation_mask`: `[groups]` u8, nonzero adds, zero overwrites. Default: all zero.
    pub mask: Option<Tensor>,
    /// Gradient of the bias `[groups, n]` f32, overwritten.
    pub dbias: Option<Tensor>,
}
