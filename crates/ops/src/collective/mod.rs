//! `collective`: all_gather, reduce_scatter, all_reduce and all_to_all over symmetric memory.
//!
//! All four push: each rank copies its part into the receiver's staging area on the copy stream,
//! peers in rotated order, one signal per peer; the receiver's stream waits and copies or adds.
//! Sums are formed in f32 in rank order by the one owner of an element and rounded once, so all
//! ranks see the same bits.
//!
//! # Where
//! | | |
//! |---|---|
//! | kernel | `kernels/src/collective/sm90_collective.cu` |
//! |  | `kernels/src/collective/sm80_move.cu` |
//! |  | `kernels/src/collective/sm80_reduce.cu` |
//! |  | `kernels/src/comm/signal.cu` |
//! | oracle | `crates/oracle/src/collective.rs` |
//! | cases | `crates/cli/src/verify/collective.rs` |
//! | page | `docs/protocols/collective.md` |

mod desc;
pub(crate) mod device;
mod host;
mod launch;
mod plan;
mod schedule;
mod way;

pub use crate::common::backend::CollectiveBackend;
pub use desc::{CollectiveDesc, CollectiveKind, ReduceOp};
pub use plan::CollectivePlan;
