//! Operations that overlap communication with arithmetic.
//!
//! One operation, one folder, the same files in each: `desc.rs` (what the caller wants, validated
//! before anything runs), `schedule.rs` (how to do it: pure, printable), `launch.rs` (what a launch
//! is given: tensors, slots, areas), `plan.rs` (owns the workspace: `prepare`, `launch`, `explain`,
//! `memory`), often `tests.rs`. The folder `host/` runs the real protocol on the host, `device/`
//! queues it on CUDA devices; neither knows the plan. Local operations have no schedule, `bulk`
//! only combines plans.
//!
//! # Life of a call
//! `Desc::new` validates; `Plan::new` takes symmetric buffers and signals from the heap;
//! `plan.prepare` is collective and compares fingerprints; `plan.launch` queues the work on the
//! caller's stream and returns a `Pending`. A plan made for at most `m` rows runs with fewer.

pub mod ag_gemm;
mod ahead;
pub mod attention;
pub mod bulk;
pub mod collective;
pub mod common;
pub mod cp_attention;
pub mod ep;
pub mod gemm;
pub mod gemm_ar;
pub mod gemm_rs;
pub mod grouped_gemm;
pub mod layers;
pub mod permute;
pub mod quant;

pub use ahead::compile_ahead;
pub use common::cuda::kernel_specs;
pub use common::{Algo, Machine, Shards};
