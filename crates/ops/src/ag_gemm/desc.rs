//! The description of an AG+GEMM: shapes, types, shards.

use std::fmt;

use tilewire_core::{DType, Error, Result};

use crate::Shards;
use crate::gemm::{AOrder, BOrder, Epilogue, GemmDesc};

/// `all_gather(X) W^T` with an epilogue. Sizes are global in `m`, per rank in `n`.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct AgGemmDesc {
    /// The most rows of the gathered X.
    pub m: usize,
    /// Output columns on this rank; may differ between ranks.
    pub n: usize,
    /// Length of the contraction.
    pub k: usize,
    /// Element type of X.
    pub x: DType,
    /// Element type of W.
    pub w: DType,
    /// Element type of the output.
    pub out: DType,
    /// Layout of W.
    pub w_order: BOrder,
    /// Rows of X per rank.
    pub shards: Shards,
    /// Epilogue; `accumulate` and `bgrad` are not provided here.
    pub epilogue: Epilogue,
}

impl AgGemmDesc {
    /// All tensors of one type, rows divided evenly, no epilogue.
    pub fn new(m: usize, n: usize, k: usize, dtype: DType) -> Self {
        let g = GemmDesc::nt(m, n, k, dtype);
        Self {
            m,
            n,
            k,
            x: dtype,
            w: dtype,
            out: g.out,
            w_order: BOrder::Nk,
            shards: Shards::Even,
            epilogue: Epilogue::NONE,
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
            epilogue: self.epilogue,
        }
    }

    /// Checks the description for a team of `size` ranks.
    ///
    /// # Errors
    /// As [`GemmDesc::check`], and `InvalidArgument` for shards of another team.
    pub fn check(&self, size: usize) -> Result<()> {
        self.gemm().check()?;
        if self.epilogue.accumulate || self.epilogue.bgrad {
            return Err(Error::invalid("`accumulate` and `bgrad` belong to the wgrad `gemm`"));
        }
        self.shards.rows(self.m, size).map(|_| ())
    }

    /// Returns what must be equal on all ranks: everything but `n`.
    pub(super) fn common(&self) -> String {
        format!(
            "m={} k={} {} {:?} {:?}",
            self.m, self.k, self.x, self.shards, self.epilogue.activation
        )
    }
}

impl fmt::Display for AgGemmDesc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.gemm(), self.shards)
    }
}
