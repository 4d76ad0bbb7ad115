//! Expert parallelism on CUDA devices, by `ep/sm80_ep.cu` and `ep/sm90_ep.cu`.
//!
//! A phase is one kernel that meets the other ranks itself: some blocks send, the others lay out
//! what arrives, as it arrives. What comes from token t of rank s has the place `s * max_tokens +
//! t`, so that no numbers travel. The flat layout, and the backward of a combine with weights or
//! not expert-major, leave the rows in the area for kernels behind it, and `tw_ep_leave` grants the
//! area when those have read it. Through NCCL a phase is two kernels, with a group of sends and
//! receives between them (`nccl.rs`).

mod areas;
mod decide;
mod nccl;
mod queue;

pub(super) use areas::router;
pub(super) use decide::{OnDevice, Used, make, phase_by, settle};
pub(super) use queue::{NUM_SMS, Phase, whole};
