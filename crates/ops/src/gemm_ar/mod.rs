//! `gemm_ar`: `X W^T` overlapped with the all-reduce of its rows.
//!
//! GEMM+RS by chunks; as soon as the owner has reduced a chunk it pushes the result to every
//! peer, while later chunks are still being computed. One owner
//! reduces an element, so all ranks hold the same bits. The bias is added once.
//!
//! # Backward
//! With `Y = all_reduce(X W^T)`, every rank holds the whole dY: the gradients of X and W are
//! local `gemm`s.
//!
//! # Where
//! | | |
//! |---|---|
//! | kernel | `kernels/src/gemm/sm80_gemm.cu` |
//! |  | `kernels/src/collective/sm80_reduce.cu` |
//! |  | `kernels/src/comm/signal.cu` |
//! | device | `crates/ops/src/gemm_rs/device/mod.rs` |
//! | oracle | `crates/oracle/src/collective.rs` |
//! | cases | `crates/cli/src/verify/overlap.rs` |
//! | page | `docs/protocols/gemm_ar.md` |

mod desc;
mod host;
mod plan;
mod schedule;

pub use desc::GemmArDesc;
pub use plan::GemmArPlan;
