//! The works on CUDA devices, by the portable kernels (`layers/sm80_layers.cu`,
//! `layers/sm80_optimizer.cu`).

mod queue;
mod sizes;

pub use queue::On;
pub(super) use queue::Prepared;
