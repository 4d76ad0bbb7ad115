//! Attention on CUDA devices, by the portable kernels (`kernels/src/attention`), and by those for
//! sm_90a where they are asked for.

mod contained;
mod few;
mod forward;
mod fp8;
mod fused;
mod hopper;
mod hopper_fp8;
mod hopper_fused;
mod hopper_gates;
mod hopper_grad;
mod local;
mod merge;
mod offsets;
mod products;
mod queue;
mod space;
mod split;
mod tables;

pub(crate) use forward::{Needs, units};
pub(crate) use fp8::{Wide, kernel_desc};
pub(crate) use hopper_gates::{Gated, Keys};
pub(crate) use local::Local;
pub(crate) use merge::{Merge, Parts};
pub(crate) use offsets::{Segments, Shard, reset};
pub(crate) use queue::{Prepared, aligned, inputs, inputs_bwd, param, param_bwd, part};
