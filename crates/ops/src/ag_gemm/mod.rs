//! `ag_gemm`: all-gather of the rows of X overlapped with `act(X W^T + bias)`.
//!
//! Column-parallel linear layer: X is sharded by rows over the team, W by output features.
//! Each rank pushes its shard in chunks to every peer, and multiplies in the order in which
//! chunks arrive: its own shard first, then those of rank + 1, rank + 2, ....
//!
//! # Backward
//! With `Y = X W^T`: the gradient of X is `gemm_rs` of dY with W in `[k, n]` order (the mirrored
//! layer); the gradient of W needs the gathered X (`gathered` output, or a `bulk` all-gather
//! beside the dgrad) and is a local `gemm` with `a_order: Km` and `bgrad` for the bias.
//!
//! # Where
//! | | |
//! |---|---|
//! | kernel | `kernels/src/gemm/sm80_gemm.cu` |
//! |  | `kernels/src/comm/signal.cu` |
//! | oracle | `crates/oracle/src/collective.rs` |
//! | cases | `crates/cli/src/verify/overlap.rs` |
//! | page | `docs/protocols/ag_gemm.md` |

mod copies;
mod desc;
mod device;
mod host;
mod launch;
mod plan;
mod schedule;

pub use desc::AgGemmDesc;
pub use launch::AgGemmInputs;
pub use plan::AgGemmPlan;
pub use schedule::{AgTask, schedule};
