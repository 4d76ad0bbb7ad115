//! The description of a GEMM+AR: that of its reduce-scatter half.

use tilewire_core::{DType, Result};

use crate::gemm_rs::GemmRsDesc;

/// `all_reduce(X W^T) + bias`: the description of its reduce-scatter half, whose shards say who
/// reduces which rows. The output is `[m, n]` on every rank.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct GemmArDesc(pub GemmRsDesc);

impl GemmArDesc {
    /// All tensors of one type (bf16 on the wire for FP8), no bias.
    pub fn new(m: usize, n: usize, k: usize, dtype: DType) -> Self {
        Self(GemmRsDesc::new(m, n, k, dtype))
    }

    /// Checks the description for a team of `size` ranks.
    ///
    /// # Errors
    /// As [`GemmRsDesc::check`].
    pub fn check(&self, size: usize) -> Result<()> {
        self.0.check(size)
    }
}
