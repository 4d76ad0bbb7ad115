//! The inputs of a launch of AG+GEMM: slots, tensors, and the plan's part of the heap.

use std::sync::Arc;

use tilewire_device::Tensor;
use tilewire_symm::{Signals, SymBuf};

use super::AgGemmDesc;
use crate::common::PlanCore;

pub(super) const CREDIT: usize = 0;
pub(super) const DATA: usize = 1;

/// Tensors of one launch with `m` rows in all.
#[derive(Clone, Debug)]
pub struct AgGemmInputs {
    /// My shard `[rows of me, k]`.
    pub x: Tensor,
    /// `[n, k]` or `[k, n]`.
    pub w: Tensor,
    /// Bias `[n]`: f32, or of the type of the output.
    pub bias: Option<Tensor>,
    /// One f32 that multiplies the product before the bias: the product of the FP8 scales. It
    /// multiplies the rows of all ranks, so X must have been quantised with one scale for the team
    /// (`quant::Scope::Team`). On devices for FP8 operands only.
    pub scale: Option<Tensor>,
    /// Saved pre-activation `[m, aux_cols]` for the backward activations.
    pub aux_in: Option<Tensor>,
    /// Output `[m, out_cols]`.
    pub out: Tensor,
    /// Pre-activation output `[m, n]`.
    pub aux_out: Option<Tensor>,
    /// The gathered X `[m, k]`, for the gradient of W.
    pub gathered: Option<Tensor>,
}

impl AgGemmInputs {
    /// The plain product.
    pub fn new(x: Tensor, w: Tensor, out: Tensor) -> Self {
        Self { x, w, bias: None, scale: None, aux_in: None, out, aux_out: None, gathered: None }
    }
}

/// The plan's part of the heap, which its executors use.
pub(super) struct Base {
    pub desc: AgGemmDesc,
    pub core: PlanCore,
    pub gather: SymBuf,
    pub signals: Arc<Signals>,
}
