//! Attention on CUDA devices, by the portable kernels (`kernels/src/attention`).

mod fp8;
mod merge;
mod queue;

pub(crate) use fp8::{Wide, kernel_desc};
pub(crate) use merge::{Merge, Parts};
pub(crate) use queue::{Needs, Prepared, inputs, inputs_bwd, param, param_bwd, part, unit};
