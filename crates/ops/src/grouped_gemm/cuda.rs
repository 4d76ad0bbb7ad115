//! Grouped GEMM on CUDA devices, by the portable kernels (`grouped_gemm/sm80_grouped_gemm.cu`).

use bytemuck::{Pod, Zeroable};
use tilewire_core::{DType, Result, Shape};
use tilewire_device::cuda::{CudaContext, CudaMemory, CudaStream, Grid, Kernel, LaunchArgs};
use tilewire_device::{Device, Tensor};
use tilewire_kernels::SM80_GROUPED_GEMM;

use super::{GroupedDesc, GroupedDgrad, GroupedFprop, GroupedWgrad, SplitKind, Splits, Weights};
use crate::common::cuda::{addr, fit_32_bits, hold, load, no_kernel, workspace};
use crate::gemm::cuda::{
    ACT_SHIFT, Param, SUMS, TILE, Tile, act_code, check_operand, defines, out_code,
};

/// Flags of `TwGrouped`'s product.
const ZERO_TAIL: u32 = 128;
const ENDS: u32 = 512;
const NARROW_SPLITS: u32 = 1024;

/// Most blocks of `tw_grouped_dact`, which takes rows in rounds.
const DACT_BLOCKS: usize = 1024;

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
    table: u64,
}

/// `TwAddresses`: what one `tw_grouped_table` writes.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Addresses {
    at: [u64; 64],
}

/// Kernels and status word of a plan.
pub(super) struct Prepared {
    desc: GroupedDesc,
    nt: Kernel,
    nn: Kernel,
    tn: Kernel,
    dbias: Kernel,
    dact: Kernel,
    fill_table: Kernel,
    /// `[groups]` addresses of the matrices of a launch with one tensor for each group.
    table: CudaMemory,
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
    let rows = d.capacity / TILE.m + d.groups;
    let wgrad = d.groups * d.n.div_ceil(TILE.m) * d.k.div_ceil(TILE.n);
    let blocks = [rows * d.n.div_ceil(TILE.n), rows * d.k.div_ceil(TILE.n), wgrad];
    fit_32_bits("grouped products", &[d.capacity, d.n, d.k, d.groups])?;
    fit_32_bits("tiles of grouped products", &blocks)
}

/// How splits are told from counts in i64.
fn split_flags(s: &Splits) -> u32 {
    let ends = if s.kind == SplitKind::Ends { ENDS } else { 0 };
    ends | if s.values.dtype() == DType::I32 { NARROW_SPLITS } else { 0 }
}

/// The part of a launch that the passes differ in.
struct Pass<'a> {
    kernel: &'a Kernel,
    tile: Tile,
    g: Param,
    blocks: usize,
    mask: u64,
    /// The table, or 0 for packed weights.
    table: u64,
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
            dbias: module.kernel("tw_grouped_dbias")?,
            dact: module.kernel("tw_grouped_dact")?,
            fill_table: module.kernel("tw_grouped_table")?,
            table: workspace(ctx, 8 * desc.groups)?,
            status: Tensor::zeros(DType::I32, Shape::d1(1)).to(&Device::Cuda(ctx.clone()))?,
        })
    }

    /// Blocks of a pass whose rows are grouped, for `cols` columns of the product.
    fn row_blocks(&self, cols: usize) -> usize {
        (self.desc.capacity / TILE.m + self.desc.groups) * cols.div_ceil(TILE.n).max(1)
    }

    /// Address of packed weights, or of the table that is filled before the launch: one of them 0.
    fn weights(&self, stream: &CudaStream, w: &Weights) -> Result<(u64, u64)> {
        let list = match w {
            Weights::Packed(w) => return Ok((addr(&w.data)?, 0)),
            Weights::Discrete(list) => list,
        };
        hold(stream, self.table.clone());
        for (i, part) in list.chunks(64).enumerate() {
            let mut a = Addresses { at: [0; 64] };
            for (to, w) in a.at.iter_mut().zip(part) {
                *to = addr(&w.data)?;
            }
            let (num, at) = (part.len() as u32, self.table.addr() + 512 * i as u64);
            let args = LaunchArgs::new().arg(&a).arg(&num).arg(&at);
            // SAFETY: `tw_grouped_table` takes (TwAddresses, u32, u64*); the table has a word for
            // each group, and is held.
            unsafe { self.fill_table.launch(stream, Grid::new(1, 64), args)? };
        }
        Ok((0, self.table.addr()))
    }

    pub fn fprop(&self, stream: &CudaStream, t: &GroupedFprop) -> Result<()> {
        let d = &self.desc;
        let (b, table) = self.weights(stream, &t.w)?;
        let g = Param {
            a: addr(&t.x.data)?,
            b,
            d: addr(&t.out)?,
            bias: addr(t.bias.as_ref())?,
            lda: d.k as i64,
            ldb: d.k as i64,
            ldd: d.out_cols() as i64,
            m: d.capacity as u32,
            n: d.n as u32,
            k: d.k as u32,
            flags: out_code(d.out)? | act_code(d.activation) << ACT_SHIFT | self.tail(),
            aux: addr(t.aux_out.as_ref())?,
            ldaux: d.n as i64,
        };
        let blocks = self.row_blocks(d.n);
        let pass = Pass { kernel: &self.nt, tile: TILE, g, blocks, mask: 0, table };
        self.launch(stream, &t.splits, &pass, t.clone())
    }

    pub fn dgrad(&self, stream: &CudaStream, t: &GroupedDgrad) -> Result<()> {
        let d = &self.desc;
        let (b, table) = self.weights(stream, &t.w)?;
        let g = Param {
            a: addr(&t.dy.data)?,
            b,
            d: addr(&t.dx)?,
            bias: 0,
            lda: d.n as i64,
            ldb: d.k as i64,
            ldd: d.k as i64,
            m: d.capacity as u32,
            n: d.k as u32,
            k: d.n as u32,
            flags: out_code(d.out)? | self.tail(),
            aux: 0,
            ldaux: 0,
        };
        let blocks = self.row_blocks(d.k);
        let pass = Pass { kernel: &self.nn, tile: TILE, g, blocks, mask: 0, table };
        self.launch(stream, &t.splits, &pass, t.clone())
    }

    pub fn wgrad(&self, stream: &CudaStream, t: &GroupedWgrad) -> Result<()> {
        let d = &self.desc;
        let (dw, table) = self.weights(stream, &t.dw)?;
        let g = Param {
            a: addr(&t.dy.data)?,
            b: addr(&t.x.data)?,
            d: dw,
            bias: 0,
            lda: d.n as i64,
            ldb: d.k as i64,
            ldd: d.k as i64,
            m: d.n as u32,
            n: d.k as u32,
            k: d.capacity as u32,
            flags: out_code(d.grad)?,
            aux: 0,
            ldaux: 0,
        };
        let blocks = d.groups * (d.n.div_ceil(TILE.m) * d.k.div_ceil(TILE.n)).max(1);
        let mask = addr(t.mask.as_ref())?;
        let pass = Pass { kernel: &self.tn, tile: TILE, g, blocks, mask, table };
        self.launch(stream, &t.splits, &pass, t.clone())?;
        let Some(dbias) = &t.dbias else { return Ok(()) };
        let g = Param { b: 0, d: addr(dbias)?, n: d.n as u32, flags: out_code(d.dtype)?, ..g };
        let blocks = d.groups * d.n.div_ceil(SUMS.n).max(1);
        let pass = Pass { kernel: &self.dbias, tile: SUMS, g, blocks, mask: 0, table: 0 };
        self.launch(stream, &t.splits, &pass, t.clone())
    }

    pub fn dactivation(
        &self,
        stream: &CudaStream,
        splits: &Splits,
        (dy, aux, dz): (&Tensor, &Tensor, &Tensor),
    ) -> Result<()> {
        let d = &self.desc;
        let g = Param {
            a: addr(dy)?,
            d: addr(dz)?,
            lda: d.out_cols() as i64,
            ldd: d.n as i64,
            m: d.capacity as u32,
            n: d.out_cols() as u32,
            flags: out_code(d.out)? | act_code(d.activation) << ACT_SHIFT | self.tail(),
            aux: addr(aux)?,
            ldaux: d.n as i64,
            ..Param::default()
        };
        let blocks = d.capacity.min(DACT_BLOCKS);
        let tile = Tile { shared_bytes: 0, ..TILE };
        let pass = Pass { kernel: &self.dact, tile, g, blocks, mask: 0, table: 0 };
        self.launch(stream, splits, &pass, (splits.clone(), dy.clone(), aux.clone(), dz.clone()))
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
        let p = Grouped {
            g: Param { flags: pass.g.flags | split_flags(splits), ..pass.g },
            splits: addr(&splits.values)?,
            status: addr(&self.status)?,
            accumulate: pass.mask,
            stride: (self.desc.n * self.desc.k) as i64,
            groups: self.desc.groups as u32,
            pad: 0,
            table: pass.table,
        };
        hold(stream, (held, self.status.clone()));
        let args = LaunchArgs::new().arg(&p);
        // SAFETY: every kernel of the unit takes one `TwGrouped` by value; the tensors were checked
        // against the description, lie on this device, and are held.
        unsafe { pass.kernel.launch(stream, pass.tile.grid(pass.blocks), args) }
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
        for e in [check(&d(DType::F32)), check(&d(DType::F8E4M3))] {
            let e = e.unwrap_err();
            assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
        }
    }
}
