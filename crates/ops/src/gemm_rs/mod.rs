//! `gemm_rs`: `X W^T` overlapped with the reduce-scatter of its rows.
//!
//! Row-parallel linear layer: the contraction is sharded over the team, so each rank's product is a
//! partial sum of all rows. Rank r computes the rows of owner r + 1 first and its own last, pushes
//! each finished tile into its slot at the owner, and adds the peers' partials to its own f32
//! accumulators in rank order. The bias is added once, to the reduced value.
//!
//! # Backward
//! With `Y = reduce_scatter(X W^T)`: the gradient of X is `ag_gemm` of dY with W in `[k, n]`
//! order; the gradient of W is a local `gemm` of the gathered dY (its `gathered` output) with X;
//! the bias gradient is the column sum of dY: of the local rows if `bgrad` is taken from the
//! shard (then it must be all-reduced), of all rows if taken from the gathered dY (reduced).
//!
//! # Where
//! | | |
//! |---|---|
//! | kernel | `kernels/src/gemm/sm80_gemm.cu` |
//! |  | `kernels/src/collective/sm80_reduce.cu` |
//! |  | `kernels/src/comm/signal.cu` |
//! | oracle | `crates/oracle/src/collective.rs` |
//! | cases | `crates/cli/src/verify/overlap.rs` |
//! | page | `docs/protocols/gemm_rs.md` |

pub(crate) mod copies;
mod desc;
pub(crate) mod device;
pub(crate) mod host;
mod launch;
mod plan;
mod schedule;

pub use desc::GemmRsDesc;
pub use launch::GemmRsInputs;
pub(crate) use launch::slot_rows;
pub use plan::GemmRsPlan;
pub(crate) use plan::{explain, predict};
pub use schedule::{RsTask, schedule};
