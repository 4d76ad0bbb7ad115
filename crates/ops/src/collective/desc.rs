//! The description of a collective: kind, shape, type.

use std::fmt;
use std::str::FromStr;

use tilewire_core::{DType, Error, Result};

use crate::Shards;

/// The operation that combines partial results.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum ReduceOp {
    /// Sum.
    Sum,
    /// Sum divided by the number of ranks.
    Avg,
}

/// The kind of a collective.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum CollectiveKind {
    /// The rows of all ranks, in rank order, on every rank. Input `[rows of me, cols]`, output `[m,
    /// cols]`.
    AllGather(Shards),
    /// The sum of `[m, cols]` over all ranks, divided by rows: output `[rows of me, cols]`.
    ReduceScatter(Shards, ReduceOp),
    /// The sum of `[m, cols]` over all ranks, on every rank.
    AllReduce(ReduceOp),
    /// Rows for each rank. `splits[src][dst]` rows go from `src` to `dst`; input rows are in
    /// destination order, output rows in source order.
    AllToAll(Vec<Vec<usize>>),
}

impl CollectiveKind {
    /// Returns the usual name of the operation.
    pub fn name(&self) -> &'static str {
        match self {
            CollectiveKind::AllGather(_) => "all_gather",
            CollectiveKind::ReduceScatter(..) => "reduce_scatter",
            CollectiveKind::AllReduce(_) => "all_reduce",
            CollectiveKind::AllToAll(_) => "all_to_all",
        }
    }

    /// Returns whether the operation adds terms.
    pub(super) fn reduces(&self) -> bool {
        matches!(self, CollectiveKind::ReduceScatter(..) | CollectiveKind::AllReduce(_))
    }
}

impl FromStr for ReduceOp {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        match s {
            "sum" => Ok(ReduceOp::Sum),
            "avg" => Ok(ReduceOp::Avg),
            _ => Err(Error::invalid(format!("unknown reduction `{s}`; one of sum, avg"))),
        }
    }
}

/// A collective over rows of `cols` elements.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct CollectiveDesc {
    /// The kind.
    pub kind: CollectiveKind,
    /// The most rows in all. All-to-all does not use it: its splits give the rows.
    pub m: usize,
    /// Elements of a row.
    pub cols: usize,
    /// Element type; the reductions take f32, bf16 and f16.
    pub dtype: DType,
}

impl CollectiveDesc {
    /// Checks the description for a team of `size` ranks.
    ///
    /// # Errors
    /// `InvalidArgument` if shards or splits are for another team, or the dtype cannot be added.
    pub fn check(&self, size: usize) -> Result<()> {
        if self.kind.reduces() && !matches!(self.dtype, DType::F32 | DType::BF16 | DType::F16) {
            return Err(Error::invalid(format!(
                "values of type {} cannot be added over ranks",
                self.dtype
            ))
            .expected("f32, bf16 or f16")
            .seen(self.dtype));
        }
        match &self.kind {
            CollectiveKind::AllGather(s) | CollectiveKind::ReduceScatter(s, _) => {
                s.rows(self.m, size).map(|_| ())
            }
            CollectiveKind::AllReduce(_) => Ok(()),
            CollectiveKind::AllToAll(splits) => {
                if splits.len() == size && splits.iter().all(|s| s.len() == size) {
                    return Ok(());
                }
                Err(Error::invalid("splits must be a square of the team's size")
                    .expected(format_args!("{size} x {size}"))
                    .seen(format_args!(
                        "{} x {}",
                        splits.len(),
                        splits.first().map_or(0, Vec::len)
                    )))
            }
        }
    }
}

impl fmt::Display for CollectiveDesc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "m={} cols={} {} {:?}", self.m, self.cols, self.dtype, self.kind)
    }
}
