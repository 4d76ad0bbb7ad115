//! Tensors of the backward launches of a permutation.

use tilewire_device::Tensor;

/// Tensors of a weighted unpermute's backward.
#[derive(Clone, Debug)]
pub struct WeightedGrads {
    /// The weights of the unpermute, `[tokens, top_k]` f32.
    pub weights: Tensor,
    /// Its rows, `[capacity, hidden]`.
    pub rows: Tensor,
    /// Gradient of the weights, `[tokens, top_k]` f32: 0 where masked or dropped.
    pub d_weights: Tensor,
}

/// Tensors of the backward of an unpermute.
#[derive(Clone, Debug)]
pub struct UnpermuteGrads {
    /// Gradient of the result, `[tokens, hidden]`.
    pub d_out: Tensor,
    /// Gradient of the rows, `[capacity, hidden]`; padding rows become zero.
    pub d_rows: Tensor,
    /// If the unpermute had weights.
    pub weighted: Option<WeightedGrads>,
}
