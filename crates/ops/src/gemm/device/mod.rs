//! GEMM on CUDA devices: by cuBLASLt where it does what is asked, else, and for plans of few rows,
//! by the core for sm_90a, else by the portable kernels.

mod cublaslt;
mod hopper;
mod kernels;
mod product;
mod tiles;
mod widen;

pub(super) use kernels::Prepared;
pub(crate) use kernels::{ASKED_FOR, CORE, GemmKernels, not_made_by, unscaled};
pub(crate) use product::{
    A_KM, ACT_SHIFT, B_KN, Matrix, Product, SUMS, TILE, TILE_F32, Tile, act_code, bias_flag,
    out_code,
};
pub(crate) use widen::{Wide, Widened, kernel_desc};
