//! The executor on devices: a launch queues copies by copy engines, the kernels of `attention`, or
//! NCCL.

mod by_nccl;
mod fp8;
mod keys;
mod nccl;
mod prepared;
mod run;
mod widen;

pub(super) use crate::attention::device::reset;
pub(super) use fp8::check;
pub(super) use nccl::check as check_nccl;
pub(super) use prepared::{Prepared, check_aligned, may_choose, may_gate};
pub(super) use run::{Op, launch, together};
