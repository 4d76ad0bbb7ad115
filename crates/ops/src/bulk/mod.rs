//! `bulk`: a collective beside a GEMM that does not depend on it.
//!
//! What backward passes need: the all-gather of the saved input beside the dgrad, and the
//! reduce-scatter of the dgrad beside the wgrad. The collective runs on the heap's copy stream
//! and its own stream, the GEMM on the caller's; both are joined to the caller's stream.
//!
//! # Where
//! | | |
//! |---|---|
//! | kernel | `kernels/src/collective/sm90_collective.cu` |
//! |  | `kernels/src/gemm/sm80_gemm.cu` |
//! | oracle | `crates/oracle/src/collective.rs` |
//! | cases | `crates/cli/src/verify/overlap.rs` |
//! | page | `docs/protocols/bulk.md` |

mod plan;

pub use plan::{BulkInputs, BulkOut, BulkPlan};
