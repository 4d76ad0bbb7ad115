//! `grouped_gemm`: one product per expert over consecutive blocks of rows, with the block sizes
//! on the device.
//!
//! Rows are packed expert after expert; `splits` (i32 or i64; counts, or inclusive end offsets)
//! live in device memory and may change from replay to replay. Any alignment, empty groups, all
//! groups empty, and rows beyond the sum are legal. Splits that are negative or exceed the
//! capacity set the plan's status and touch nothing.
//!
//! - fprop: `Y_e = act(X_e W_e^T + b_e)`, optionally storing the pre-activation
//! - dgrad: `dX_e = dY_e W_e`, optionally times the derivative of the activation
//! - wgrad: `dW_e (+)= dY_e^T X_e`, per-expert accumulation mask; `db_e` = column sums of `dY_e`
//!
//! An expert without rows gets an exactly zero gradient, or keeps what it has when accumulating.
//!
//! # Where
//! | | |
//! |---|---|
//! | kernel | `kernels/src/grouped_gemm/sm80_grouped_gemm.cu` |
//! | kernel for sm_90a | `kernels/src/hopper/sm90_grouped_gemm.cu` |
//! | oracle | `crates/oracle/src/grouped_gemm.rs` |
//! | cases | `crates/cli/src/verify/grouped.rs` |
//! | page | `docs/protocols/grouped_gemm.md` |

mod desc;
mod device;
mod host;
mod launch;
mod plan;
mod ranges;

pub use desc::{GroupedDesc, SplitKind, Splits, Weights};
pub use launch::{GroupedDgrad, GroupedFprop, GroupedWgrad};
pub use plan::GroupedGemmPlan;
