//! Attention on CUDA devices, by the portable kernels (`kernels/src/attention`), and forward by
//! that for sm_90a where it is asked for.

mod forward;
mod fp8;
mod hopper;
mod merge;
mod queue;

pub(crate) use forward::units;
pub(crate) use fp8::{Wide, kernel_desc};
pub(crate) use merge::{Merge, Parts};
pub(crate) use queue::{Needs, Prepared, inputs, inputs_bwd, param, param_bwd, part};
