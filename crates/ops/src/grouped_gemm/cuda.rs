//! Grouped GEMM on CUDA devices, by the portable kernels (`grouped_gemm/sm80_grouped_gemm.cu`).

use bytemuck::{Pod, Zeroable};
use tilewire_core::{DType, Result, Shape};
use tilewire_device::cuda::{CudaContext, CudaStream, Kernel, LaunchArgs};
use tilewire_device::{Device, Tensor};
use tilewire_kernels::SM80_GROUPED_GEMM;

use super::{GroupedDesc, GroupedDgrad, GroupedFprop, GroupedWgrad, SplitKind, Splits, Weights};
use crate::common::cuda::{addr, fit_32_bits, hold, load, no_kernel};
use crate::gemm::cuda::{ACT_SHIFT, Param, TILE, act_code, check_operand, defines, out_code};

/// Flag of `TwGrouped`'s product.
const ZERO_TAIL: u32 = 128;

/// `TwGrouped` of `grouped_gemm/sm80_grouped_gemm.cu`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Grouped {
    g: Param,
    splits: u64,
    status: u64,
    accumulate: u64,
    stride: i64,
    groups: u32,
    pad: u32,
}

/// Kernels and status word of a plan.
pub(super) struct Prepared {
    desc: GroupedDesc,
    nt: Kernel,
    nn: Kernel,
    tn: Kernel,
    /// `[1]` i32.
    pub status: Tensor,
}

/// Fails for what no kernel does. Pure.
fn check(d: &GroupedDesc) -> Result<()> {
    check_operand(d.dtype)?;
    if d.dtype == DType::F32 {
        return Err(no_kernel("grouped products of f32", "use bf16 or f16, or the host"));
    }
    out_code(d.out)?;
    act_code(d.activation)?;
    let rows = d.capacity / TILE.m + d.groups;
    let wgrad = d.groups * d.n.div_ceil(TILE.m) * d.k.div_ceil(TILE.n);
    let blocks = [rows * d.n.div_ceil(TILE.n), rows * d.k.div_ceil(TILE.n), wgrad];
    fit_32_bits("grouped products", &[d.capacity, d.n, d.k, d.groups])?;
    fit_32_bits("tiles of grouped products", &blocks)
}

fn check_splits(s: &Splits) -> Result<()> {
    if s.kind == SplitKind::Ends || s.values.dtype() != DType::I64 {
        return Err(no_kernel(
            format!("{:?} in {} as splits", s.kind, s.values.dtype()),
            "give the counts as i64: `Splits::counts`",
        ));
    }
    Ok(())
}

/// The one matrix of all groups.
fn packed(w: &Weights) -> Result<&Tensor> {
    match w {
        Weights::Packed(w) => Ok(&w.data),
        Weights::Discrete(_) => Err(no_kernel(
            "weights in a tensor for each group",
            "keep them in one tensor: `Weights::Packed`",
        )),
    }
}

/// The part of a launch that the passes differ in.
struct Pass<'a> {
    kernel: &'a Kernel,
    g: Param,
    blocks: usize,
    mask: u64,
}

impl Prepared {
    pub fn new(ctx: &CudaContext, desc: &GroupedDesc) -> Result<Self> {
        check(desc)?;
        let module = load(ctx, &SM80_GROUPED_GEMM, defines(desc.dtype))?;
        let kernel = |name| {
            let k = module.kernel(name)?;
            k.allow_shared(TILE.shared_bytes).map(|()| k)
        };
        Ok(Self {
            desc: *desc,
            nt: kernel("tw_grouped_nt")?,
            nn: kernel("tw_grouped_nn")?,
            tn: kernel("tw_grouped_tn")?,
            status: Tensor::zeros(DType::I32, Shape::d1(1)).to(&Device::Cuda(ctx.clone()))?,
        })
    }

    /// Blocks of a pass whose rows are grouped, for `cols` columns of the product.
    fn row_blocks(&self, cols: usize) -> usize {
        (self.desc.capacity / TILE.m + self.desc.groups) * cols.div_ceil(TILE.n).max(1)
    }

    pub fn fprop(&self, stream: &CudaStream, t: &GroupedFprop) -> Result<()> {
        let d = &self.desc;
        if t.aux_out.is_some() {
            return Err(no_kernel(
                "a grouped product that also stores its pre-activation",
                "take it without activation, and apply that behind it",
            ));
        }
        let g = Param {
            a: addr(&t.x.data)?,
            b: addr(packed(&t.w)?)?,
            d: addr(&t.out)?,
            bias: addr(t.bias.as_ref())?,
            lda: d.k as i64,
            ldb: d.k as i64,
            ldd: d.out_cols() as i64,
            m: d.capacity as u32,
            n: d.n as u32,
            k: d.k as u32,
            flags: out_code(d.out)? | act_code(d.activation)? << ACT_SHIFT | self.tail(),
        };
        let pass = Pass { kernel: &self.nt, g, blocks: self.row_blocks(d.n), mask: 0 };
        self.launch(stream, &t.splits, &pass, t.clone())
    }

    pub fn dgrad(&self, stream: &CudaStream, t: &GroupedDgrad) -> Result<()> {
        let d = &self.desc;
        let g = Param {
            a: addr(&t.dy.data)?,
            b: addr(packed(&t.w)?)?,
            d: addr(&t.dx)?,
            bias: 0,
            lda: d.n as i64,
            ldb: d.k as i64,
            ldd: d.k as i64,
            m: d.capacity as u32,
            n: d.k as u32,
            k: d.n as u32,
            flags: out_code(d.out)? | self.tail(),
        };
        let pass = Pass { kernel: &self.nn, g, blocks: self.row_blocks(d.k), mask: 0 };
        self.launch(stream, &t.splits, &pass, t.clone())
    }

    pub fn wgrad(&self, stream: &CudaStream, t: &GroupedWgrad) -> Result<()> {
        let d = &self.desc;
        if t.dbias.is_some() {
            return Err(no_kernel("the gradient of grouped biases", "sum the rows of `dy`"));
        }
        let g = Param {
            a: addr(&t.dy.data)?,
            b: addr(&t.x.data)?,
            d: addr(packed(&t.dw)?)?,
            bias: 0,
            lda: d.n as i64,
            ldb: d.k as i64,
            ldd: d.k as i64,
            m: d.n as u32,
            n: d.k as u32,
            k: d.capacity as u32,
            flags: out_code(d.grad)?,
        };
        let blocks = d.groups * (d.n.div_ceil(TILE.m) * d.k.div_ceil(TILE.n)).max(1);
        let pass = Pass { kernel: &self.tn, g, blocks, mask: addr(t.mask.as_ref())? };
        self.launch(stream, &t.splits, &pass, t.clone())
    }

    pub fn dactivation(
        &self,
        _stream: &CudaStream,
        _splits: &Splits,
        (_dy, _aux, _dz): (&Tensor, &Tensor, &Tensor),
    ) -> Result<()> {
        Err(no_kernel("the gradient of grouped activations", "run that part on the host"))
    }

    fn tail(&self) -> u32 {
        if self.desc.zero_tail { ZERO_TAIL } else { 0 }
    }

    /// Queues a pass over tensors that were checked, and are in `held`.
    fn launch<T: Send + Sync + 'static>(
        &self,
        stream: &CudaStream,
        splits: &Splits,
        pass: &Pass<'_>,
        held: T,
    ) -> Result<()> {
        check_splits(splits)?;
        let p = Grouped {
            g: pass.g,
            splits: addr(&splits.values)?,
            status: addr(&self.status)?,
            accumulate: pass.mask,
            stride: (self.desc.n * self.desc.k) as i64,
            groups: self.desc.groups as u32,
            pad: 0,
        };
        hold(stream, (held, self.status.clone()));
        let args = LaunchArgs::new().arg(&p);
        // SAFETY: every kernel of the unit takes one `TwGrouped` by value; the tensors were checked
        // against the description, lie on this device, and are held.
        unsafe { pass.kernel.launch(stream, TILE.grid(pass.blocks), args) }
    }

    /// Queues the clearing of the status.
    pub fn reset(&self, stream: &CudaStream) -> Result<()> {
        hold(stream, self.status.clone());
        // SAFETY: four bytes of a tensor that is held.
        unsafe { stream.fill(addr(&self.status)?, 0, 4) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_kernel_does_is_said_with_a_way_out() {
        let d = |dtype| GroupedDesc::new(4, 100, 32, 16, dtype);
        check(&d(DType::BF16)).unwrap();
        let t = Tensor::zeros(DType::I32, Shape::d1(4));
        let list = Weights::Discrete(Vec::new());
        for e in [
            check(&d(DType::F32)),
            check(&d(DType::F8E4M3)),
            check_splits(&Splits::ends(&t)),
            check_splits(&Splits::counts(&t)),
            packed(&list).map(|_| ()),
        ] {
            let e = e.unwrap_err();
            assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
        }
    }
}
