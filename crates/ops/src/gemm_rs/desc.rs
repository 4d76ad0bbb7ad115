//! The description of a GEMM+RS: shapes, types, shards.

use std::fmt;

use tilewire_core::{DType, Error, Result};

use crate::Shards;
use crate::gemm::{AOrder, BOrder, Epilogue, GemmDesc};

/// `reduce_scatter(X W^T) + bias`. `m` and `n` are global, `k` is this rank's part.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct GemmRsDesc {
    /// The most rows of the product.
    pub m: usize,
    /// Columns of the product.
    pub n: usize,
    /// Length of this rank's contraction; may differ between ranks.
    pub k: usize,
    /// Element type of X.
    pub x: DType,
    /// Element type of W.
    pub w: DType,
    /// Element type of the output.
    pub out: DType,
    /// Element type of partial results on the wire: f32, bf16 or f16.
    pub wire: DType,
    /// Layout of W.
    pub w_order: BOrder,
    /// Output rows per rank.
    pub shards: Shards,
    /// Add `bias[n]` once.
    pub bias: bool,
}

impl GemmRsDesc {
    /// All tensors of one type (bf16 on the wire for FP8), rows divided evenly, no bias.
    pub fn new(m: usize, n: usize, k: usize, dtype: DType) -> Self {
        let out = GemmDesc::nt(m, n, k, dtype).out;
        Self {
            m,
            n,
            k,
            x: dtype,
            w: dtype,
            out,
            wire: out,
            w_order: BOrder::Nk,
            shards: Shards::Even,
            bias: false,
        }
    }

    /// The product that this rank computes.
    pub fn gemm(&self) -> GemmDesc {
        GemmDesc {
            m: self.m,
            n: self.n,
            k: self.k,
            a: self.x,
            b: self.w,
            out: self.out,
            a_order: AOrder::Mk,
            b_order: self.w_order,
            epilogue: Epilogue::NONE,
        }
    }

    /// Checks the description for a team of `size` ranks.
    ///
    /// # Errors
    /// As [`GemmDesc::check`]; `InvalidArgument` for a wire type that cannot be added, or shards
    /// of another team.
    pub fn check(&self, size: usize) -> Result<()> {
        self.gemm().check()?;
        if !matches!(self.wire, DType::F32 | DType::BF16 | DType::F16) {
            return Err(Error::invalid("partial results cannot be sent in this type")
                .expected("f32, bf16 or f16")
                .seen(self.wire));
        }
        self.shards.rows(self.m, size).map(|_| ())
    }

    /// Returns what must be equal on all ranks; `k`, the types of X, W and the output, and the
    /// order of W are a rank's own.
    pub(crate) fn common(&self) -> String {
        format!("m={} n={} {} {:?} bias={}", self.m, self.n, self.wire, self.shards, self.bias)
    }
}

impl fmt::Display for GemmRsDesc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} wire={} {:?} bias={}", self.gemm(), self.wire, self.shards, self.bias)
    }
}
