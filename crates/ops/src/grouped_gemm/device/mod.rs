//! Grouped GEMM on CUDA devices, by the portable kernels (`grouped_gemm/sm80_grouped_gemm.cu`), or
//! by the core for sm_90a (`hopper/sm90_grouped_gemm.cu`). FP8 operands are widened to f32 first.

mod hopper;
mod queue;
mod workspace;

pub(super) use queue::{Prepared, Run};
