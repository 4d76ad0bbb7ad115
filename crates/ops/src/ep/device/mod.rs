//! Expert parallelism on CUDA devices, by `ep/sm80_ep.cu` and `ep/sm90_ep.cu`.
//!
//! A phase is one kernel that meets the other ranks itself: some blocks send records, and other
//! blocks lay out records as they arrive. The record of token t of rank s is at `s * max_tokens +
//! t`, so that no numbers travel. In the flat layout, and in the backward of a combine with weights
//! or of a layout that is not expert-major, the rows stay in the area for kernels behind the phase,
//! and `tw_ep_leave` grants the area when these have read it. Through NCCL a phase is two kernels,
//! with a group of sends and receives between them (`nccl.rs`).

mod areas;
mod decide;
mod nccl;
mod queue;

pub(super) use areas::router;
pub(super) use decide::{OnDevice, Used, make, phase_by, settle};
pub(super) use queue::{NUM_SMS, Phase, whole};
