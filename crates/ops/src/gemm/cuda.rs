//! GEMM on CUDA devices, by the portable kernels (`gemm/sm80_gemm.cu`).

use bytemuck::{Pod, Zeroable};
use tilewire_core::{DType, Result};
use tilewire_device::Tensor;
use tilewire_device::cuda::{CudaContext, CudaStream, Grid, Kernel, LaunchArgs};
use tilewire_kernels::SM80_GEMM;

use super::{AOrder, Activation, BOrder, GemmDesc, GemmInputs};
use crate::common::cuda::{addr, fit_32_bits, hold, load, no_kernel};

/// Rows and columns of a block's tile, threads and dynamic shared memory of the 16-bit kernels, as
/// `gemm/mainloop.cuh` defines them where nothing else is defined.
pub(crate) const TILE: Tile = Tile { m: 128, n: 128, threads: 256, shared_bytes: 65536 };
/// Those of the f32 kernel.
const TILE_F32: Tile = Tile { m: 64, n: 64, threads: 256, shared_bytes: 18432 };

/// Flags of `TwGemm`.
pub(crate) const ACT_SHIFT: u32 = 2;
const ACCUMULATE: u32 = 16;
const A_KM: u32 = 32;
const B_KN: u32 = 64;

/// What a block makes, and what it takes.
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

/// `TwGemm` of `gemm/mainloop.cuh`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Param {
    pub a: u64,
    pub b: u64,
    pub d: u64,
    pub bias: u64,
    pub lda: i64,
    pub ldb: i64,
    pub ldd: i64,
    pub m: u32,
    pub n: u32,
    pub k: u32,
    pub flags: u32,
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
    /// `[n]` f32, or 0.
    pub bias: u64,
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

/// The code of an activation of the epilogue.
pub(crate) fn act_code(act: Activation) -> Result<u32> {
    match act {
        Activation::None => Ok(0),
        Activation::Relu => Ok(1),
        Activation::Gelu => Ok(2),
        Activation::SwiGlu => Ok(3),
        Activation::DGelu | Activation::DSwiGlu => Err(no_kernel(
            format!("the epilogue {act:?}"),
            "take the plain product and multiply by the derivative behind it",
        )),
    }
}

/// Definitions of the units of `gemm/` and `grouped_gemm/` for operands of `dtype`.
pub(crate) fn defines(dtype: DType) -> Vec<(String, u64)> {
    vec![("TW_GEMM_F16".to_owned(), u64::from(dtype == DType::F16))]
}

/// Fails for operands that no kernel takes.
pub(crate) fn check_operand(dtype: DType) -> Result<()> {
    if dtype.is_fp8() {
        return Err(no_kernel(
            format!("{dtype} operands of a product"),
            "dequantise to bf16 first, or run on the host",
        ));
    }
    Ok(())
}

/// What a launch needs, or why there is no kernel for `d`. Pure.
fn plan(d: &GemmDesc) -> Result<(&'static str, Tile, u32)> {
    check_operand(d.a)?;
    let e = &d.epilogue;
    let mut flags = out_code(d.out)? | act_code(e.activation)? << ACT_SHIFT;
    if e.aux {
        return Err(no_kernel(
            "a product that also stores its pre-activation",
            "take the plain product and apply the activation behind it",
        ));
    }
    if e.bgrad {
        return Err(no_kernel("a product that also stores sums of rows", "sum them in a pass"));
    }
    fit_32_bits("a product", &[d.m, d.n, d.k])?;
    let tile = if d.a == DType::F32 { TILE_F32 } else { TILE };
    fit_32_bits("tiles of a product", &[d.m.div_ceil(tile.m) * d.n.div_ceil(tile.n)])?;
    let name = match (d.a_order, d.b_order) {
        _ if d.a == DType::F32 => "tw_gemm_f32",
        (AOrder::Mk, BOrder::Nk) => "tw_gemm_nt",
        (AOrder::Mk, BOrder::Kn) => "tw_gemm_nn",
        (AOrder::Km, BOrder::Kn) => "tw_gemm_tn",
        (AOrder::Km, BOrder::Nk) => "tw_gemm_tt",
    };
    flags |= if d.a_order == AOrder::Km { A_KM } else { 0 };
    flags |= if d.b_order == BOrder::Kn { B_KN } else { 0 };
    Ok((name, tile, flags))
}

/// The kernel of a product on raw addresses: for one plan, or for the tiles of another operation.
pub(crate) struct GemmKernels {
    kernel: Kernel,
    tile: Tile,
    flags: u32,
}

impl GemmKernels {
    /// The kernel for the orders, types and activation of `desc`, for products of at most its size.
    ///
    /// # Errors
    /// `Unsupported` for what no kernel does; as [`CudaContext::module`].
    pub fn new(ctx: &CudaContext, desc: &GemmDesc) -> Result<Self> {
        let (name, tile, flags) = plan(desc)?;
        let kernel = load(ctx, &SM80_GEMM, defines(desc.a))?.kernel(name)?;
        kernel.allow_shared(tile.shared_bytes)?;
        Ok(Self { kernel, tile, flags })
    }

    /// Queues `D = act(A B (+ D) + bias)`. Allocates nothing, so it can be captured; the caller
    /// holds the memory.
    ///
    /// # Safety
    /// The addresses must be mapped on the stream's device, for the shapes, orders and types that
    /// the kernel was made for, until the work has run (and be held by the graph if captured). No
    /// other work may write A, B or bias, or use D, meanwhile.
    ///
    /// # Errors
    /// What the driver reports.
    pub unsafe fn launch(&self, stream: &CudaStream, p: &Product) -> Result<()> {
        let (m, n, k) = p.shape;
        if m == 0 || n == 0 {
            return Ok(());
        }
        let accumulate = if p.accumulate { ACCUMULATE } else { 0 };
        let param = Param {
            a: p.a.addr,
            b: p.b.addr,
            d: p.d.addr,
            bias: p.bias,
            lda: p.a.ld as i64,
            ldb: p.b.ld as i64,
            ldd: p.d.ld as i64,
            m: m as u32,
            n: n as u32,
            k: k as u32,
            flags: self.flags | accumulate,
        };
        let blocks = m.div_ceil(self.tile.m) * n.div_ceil(self.tile.n);
        // SAFETY: every kernel of the unit takes one `TwGemm` by value; the caller's contract for
        // what it points to.
        unsafe { self.kernel.launch(stream, self.tile.grid(blocks), LaunchArgs::new().arg(&param)) }
    }
}

/// What a plan has on a CUDA device.
pub(crate) struct Prepared {
    desc: GemmDesc,
    kernels: GemmKernels,
}

impl Prepared {
    pub fn new(ctx: &CudaContext, desc: &GemmDesc) -> Result<Self> {
        Ok(Self { desc: *desc, kernels: GemmKernels::new(ctx, desc)? })
    }

    /// Queues the product of tensors that were checked.
    pub fn launch(&self, stream: &CudaStream, m: usize, t: GemmInputs) -> Result<()> {
        let d = &self.desc;
        let at = |t: &Tensor, ld: usize| Ok::<_, tilewire_core::Error>(Matrix::new(addr(t)?, ld));
        let product = Product {
            shape: (m, d.n, d.k),
            a: at(&t.a.data, if d.a_order == AOrder::Mk { d.k } else { m })?,
            b: at(&t.b.data, if d.b_order == BOrder::Nk { d.k } else { d.n })?,
            d: at(&t.out, d.epilogue.activation.out_cols(d.n))?,
            bias: addr(t.bias.as_ref())?,
            accumulate: d.epilogue.accumulate,
        };
        hold(stream, t);
        // SAFETY: the tensors were checked against the description that the kernel was made for,
        // lie on this device, and are held; that the caller orders other work on them behind this
        // stream is what every launch asks for.
        unsafe { self.kernels.launch(stream, &product) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Epilogue;
    use super::*;

    #[test]
    fn what_no_kernel_does_is_said_with_a_way_out() {
        let d = GemmDesc::nt(8, 8, 8, DType::BF16);
        let e = |epilogue| GemmDesc { epilogue, ..d };
        for bad in [GemmDesc::nt(8, 8, 8, DType::F8E4M3), GemmDesc { out: DType::F8E5M2, ..d }] {
            let e = plan(&bad).err().unwrap();
            assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
        }
        let good = e(Epilogue { bias: true, activation: Activation::SwiGlu, ..Epilogue::NONE });
        assert_eq!(plan(&good).unwrap().2, 3 << ACT_SHIFT);
        assert!(plan(&GemmDesc { m: usize::MAX / 2, ..d }).is_err());
    }
}
