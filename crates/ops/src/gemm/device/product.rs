//! Products of matrices on the device: addresses, tiles and codes, as the kernels take them.

use tilewire_core::{DType, Result};
use tilewire_device::cuda::Grid;

use crate::common::Bias;
use crate::common::cuda::no_kernel;
use crate::gemm::Activation;

/// Rows and columns of a block's tile, threads and dynamic shared memory of the 16-bit kernels, as
/// `gemm/mainloop.cuh` defines them where nothing else is defined.
pub(crate) const TILE: Tile = Tile { m: 128, n: 128, threads: 128, shared_bytes: 65536 };
/// Those of the f32 kernel.
pub(crate) const TILE_F32: Tile = Tile { m: 64, n: 64, threads: 256, shared_bytes: 18432 };

/// Flags of `TwGemm`.
pub(crate) const ACT_SHIFT: u32 = 2;
pub(super) const ACCUMULATE: u32 = 16;
pub(crate) const A_KM: u32 = 32;
pub(crate) const B_KN: u32 = 64;
const DACT: u32 = 256;
const BIAS_OUT: u32 = 2048;

/// Threads, sums and shared memory of a block of `tw_gemm_row_sums`.
pub(crate) const SUMS: Tile = Tile { m: 1, n: 32, threads: 256, shared_bytes: 1024 };

/// The tile that a block computes, and the threads and shared memory that it takes.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    pub m: usize,
    pub n: usize,
    pub threads: u32,
    pub shared_bytes: u32,
}

impl Tile {
    /// A grid of `blocks`, at least one.
    pub fn grid(&self, blocks: usize) -> Grid {
        Grid::new(blocks.max(1) as u32, self.threads).shared(self.shared_bytes)
    }
}

/// A matrix on the device: its address, and elements from row to row.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Matrix {
    pub addr: u64,
    pub ld: usize,
}

impl Matrix {
    pub fn new(addr: u64, ld: usize) -> Self {
        Self { addr, ld }
    }
}

/// One product on device addresses; orders, types and activation are those of the kernels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    /// Rows of D, columns of the product, length of the contraction.
    pub shape: (usize, usize, usize),
    pub a: Matrix,
    pub b: Matrix,
    pub d: Matrix,
    /// `[n]`, or none.
    pub bias: Bias,
    /// Pre-activation `[m, aux_cols]`: read by derivatives, else stored; address 0 for none.
    pub aux: Matrix,
    /// Add to what D holds.
    pub accumulate: bool,
}

/// The code of a type of D.
pub(crate) fn out_code(dtype: DType) -> Result<u32> {
    match dtype {
        DType::BF16 => Ok(0),
        DType::F16 => Ok(1),
        DType::F32 => Ok(2),
        other => Err(no_kernel(
            format!("{other} results of a product"),
            "store bf16 and quantise it with `QuantPlan`",
        )),
    }
}

/// The flag of a bias that is of the type of D.
pub(crate) fn bias_flag(bias: Bias) -> u32 {
    if bias.of_out { BIAS_OUT } else { 0 }
}

/// The code of an activation of the epilogue.
pub(crate) fn act_code(act: Activation) -> u32 {
    let derivative = if act.reads_aux() { DACT >> ACT_SHIFT } else { 0 };
    derivative
        | match act {
            Activation::None => 0,
            Activation::Relu => 1,
            Activation::Gelu | Activation::DGelu => 2,
            Activation::SwiGlu | Activation::DSwiGlu => 3,
        }
}
