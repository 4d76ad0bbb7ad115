//! `permute`: tokens of one rank to expert-major rows and back.
//!
//! Rows are expert-major; inside an expert by token, then by choice. The rows of each expert are
//! padded with zero rows to a multiple of the alignment; an expert without tokens has none. A
//! token that names an expert twice has two copies there. Copies whose row lies beyond the
//! capacity are dropped; the map has the true numbers.
//!
//! - **route** ([`PermutePlan::route`]): `topk_idx` to a [`PermuteMap`]: row of each choice, choice
//!   of each row, and `m_splits` for the grouped GEMM, all in device memory
//! - **permute**: `rows[slot(t, j)] = x[t]`; weights and FP8 scales travel along
//! - **unpermute**: `y[t] = sum_j w[t, j] rows[slot(t, j)]` in the order of `j`, in f32, rounded
//!   once
//! - **permute_bwd**, **unpermute_bwd**: their gradients, those of the weights included
//!
//! An index that is no expert sets the map's status; everything made from such a map is poison.
//! The definitions are those of `tilewire_oracle::permute`.
//!
//! # Where
//! | | |
//! |---|---|
//! | kernel | `kernels/src/permute/sm80_permute.cu` |
//! | oracle | `crates/oracle/src/permute.rs` |
//! | cases | `crates/cli/src/verify/permute.rs` |
//! | page | `docs/protocols/permute.md` |

mod desc;
mod device;
mod host;
mod launch;
mod map;
mod plan;
mod schedule;
#[cfg(test)]
mod tests;

pub use desc::{PermuteDesc, PermuteMemory, Permuted, Tokens};
pub use launch::{UnpermuteGrads, WeightedGrads};
pub use map::PermuteMap;
pub use plan::PermutePlan;
