//! Attention on CUDA devices, by the portable kernels (`kernels/src/attention`), and by those for
//! sm_90a where they are asked for.

mod forward;
mod fp8;
mod hopper;
mod hopper_grad;
mod merge;
mod offsets;
mod queue;

pub(crate) use forward::{Needs, units};
pub(crate) use fp8::{Wide, kernel_desc};
pub(crate) use merge::{Merge, Parts};
pub(crate) use queue::{Prepared, inputs, inputs_bwd, param, param_bwd, part};
