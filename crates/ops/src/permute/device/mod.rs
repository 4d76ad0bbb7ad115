//! Permutation on CUDA devices, by the portable kernels (`permute/sm80_permute.cu`).

mod queue;
mod scratch;

pub(super) use queue::Prepared;
pub(super) use scratch::Scratch;
