//! The kernels of a grouped GEMM, and what queues them.

use std::ops::Deref;
use std::sync::Arc;

use bytemuck::Zeroable;
use tilewire_core::{DType, Error, Result, Shape};
use tilewire_device::cuda::{CudaContext, CudaStream, Grid, Kernel, LaunchArgs};
use tilewire_device::{Device, Tensor};
use tilewire_kernels::SM80_GROUPED_GEMM;
use tilewire_kernels::abi::{TwAddresses, TwGemm, TwGrouped};

use super::hopper::{self, Hopper};
use super::workspace::{Widened, Workspace};
use crate::common::Bias;
use crate::common::cuda::{addr, fit_32_bits, gemm_defines, hold, load, too_few_sms};
use crate::common::kernel::GemmChoice;
use crate::common::workspaces::Workspaces;
use crate::gemm::device::Wide;
use crate::gemm::device::bias_flag;
use crate::gemm::device::{A_KM, ACT_SHIFT, B_KN, SUMS, TILE, TILE_F32, Tile, act_code, out_code};
use crate::gemm::device::{ASKED_FOR, CORE, not_made_by};
use crate::gemm::{GemmBackend, Operand};
use crate::grouped_gemm::{
    GroupedDesc, GroupedDgrad, GroupedFprop, GroupedWgrad, SplitKind, Splits, Weights,
};

/// Flags of `TwGrouped`'s product.
const ZERO_TAIL: u32 = 128;
const ENDS: u32 = 512;
const NARROW_SPLITS: u32 = 1024;

/// Most blocks of `tw_grouped_dact`, which takes rows in rounds.
const DACT_BLOCKS: usize = 1024;

/// A kernel of products, and the flags that make it one of its order.
struct Products {
    kernel: Kernel,
    flags: u32,
}

/// Kernels and status word of a plan.
pub(crate) struct Prepared {
    /// The description that the kernels are compiled for: with f32 in place of FP8.
    desc: GroupedDesc,
    tile: Tile,
    nt: Products,
    nn: Products,
    tn: Products,
    dbias: Kernel,
    dact: Kernel,
    fill_table: Kernel,
    workspaces: Workspaces<Workspace>,
    choice: GemmChoice,
    /// Or why not.
    hopper: std::result::Result<Hopper, String>,
    /// `[1]` i32.
    pub status: Tensor,
}

/// A launch: a plan's kernels, and what they use besides tensors. Packed weights of wider types
/// need nothing.
pub(crate) struct Run<'a> {
    prepared: &'a Prepared,
    space: Option<Arc<Workspace>>,
}

impl Deref for Run<'_> {
    type Target = Prepared;

    fn deref(&self) -> &Prepared {
        self.prepared
    }
}

/// Fails for what no kernel does; else the tile of the products. Pure.
fn check(d: &GroupedDesc) -> Result<Tile> {
    let wide = d.dtype == DType::F32 || d.dtype.is_fp8();
    let tile = if wide { TILE_F32 } else { TILE };
    out_code(d.out)?;
    let rows = d.capacity / tile.m + d.groups;
    let wgrad = d.groups * d.n.div_ceil(tile.m) * d.k.div_ceil(tile.n);
    let blocks = [rows * d.n.div_ceil(tile.n), rows * d.k.div_ceil(tile.n), wgrad];
    fit_32_bits("grouped products", &[d.capacity, d.n, d.k, d.groups])?;
    fit_32_bits("tiles of grouped products", &blocks).map(|()| tile)
}

/// Returns how splits are distinguished from counts in i64.
fn split_flags(s: &Splits) -> u32 {
    let ends = if s.kind == SplitKind::Ends { ENDS } else { 0 };
    ends | if s.values.dtype() == DType::I32 { NARROW_SPLITS } else { 0 }
}

/// The part of a launch that the passes differ in.
struct Pass<'a> {
    /// If the core may make it.
    core: Option<hopper::Pass>,
    kernel: &'a Kernel,
    tile: Tile,
    /// Without the address of `matrices`.
    g: TwGemm,
    blocks: usize,
    mask: u64,
    matrices: Matrices<'a>,
}

/// The tensors of which each group has its own.
#[derive(Clone, Copy)]
enum Matrices<'a> {
    None,
    /// Weights, the second operand.
    B(&'a Weights),
    /// Gradients of weights, the results.
    D(&'a Weights),
}

impl Prepared {
    pub fn new(ctx: &CudaContext, desc: &GroupedDesc, choice: GemmChoice) -> Result<Self> {
        choice.check()?;
        let tile = check(desc)?;
        let hopper = Self::hopper(ctx, desc, choice)?;
        let all = *desc;
        let workspaces = Workspaces::new(ctx, move |ctx| Workspace::new(ctx, &all));
        let desc = &match desc.dtype.is_fp8() {
            true => GroupedDesc { dtype: DType::F32, ..*desc },
            false => *desc,
        };
        let module = load(ctx, &SM80_GROUPED_GEMM, gemm_defines(desc.dtype))?;
        let kernel = |name, f32_flags| {
            let (name, flags) =
                if desc.dtype == DType::F32 { ("tw_grouped_f32", f32_flags) } else { (name, 0) };
            let kernel = module.kernel(name)?;
            kernel.allow_shared(tile.shared_bytes).map(|()| Products { kernel, flags })
        };
        Ok(Self {
            desc: *desc,
            tile,
            nt: kernel("tw_grouped_nt", 0)?,
            nn: kernel("tw_grouped_nn", B_KN)?,
            tn: kernel("tw_grouped_tn", A_KM)?,
            dbias: module.kernel("tw_grouped_dbias")?,
            dact: module.kernel("tw_grouped_dact")?,
            fill_table: module.kernel("tw_grouped_table")?,
            workspaces,
            choice,
            hopper,
            status: Tensor::zeros(DType::I32, Shape::d1(1)).to(&Device::Cuda(ctx.clone()))?,
        })
    }

    /// Returns the core's kernels, or why they are not used.
    fn hopper(
        ctx: &CudaContext,
        d: &GroupedDesc,
        choice: GemmChoice,
    ) -> Result<std::result::Result<Hopper, String>> {
        let by = choice.backend;
        let why = match by {
            GemmBackend::Portable => Some(ASKED_FOR.to_owned()),
            GemmBackend::CublasLt => {
                return Err(not_made_by("cuBLASLt", "the sizes of its groups are on the device"));
            }
            GemmBackend::Auto | GemmBackend::Hopper => {
                match (hopper::unfit(d), Hopper::lacks(ctx)?) {
                    (Some(why), _) | (None, Some(why)) => Some(why),
                    (None, None) if by == GemmBackend::Auto => too_few_sms(ctx)?,
                    (None, None) => None,
                }
            }
        };
        match why {
            Some(why) if by == GemmBackend::Hopper => Err(not_made_by(CORE, &why)),
            Some(why) => Ok(Err(why)),
            None => match Hopper::new(ctx, d, choice) {
                // Nothing to compile it with, and not shipped either.
                Err(e) if e.is_unavailable() && by == GemmBackend::Auto => Ok(Err(e.to_string())),
                r => r.map(Ok),
            },
        }
    }

    /// Returns what makes the products, and why.
    pub fn explain(&self) -> String {
        match &self.hopper {
            Ok(hopper) => format!("products: {}", hopper.explain()),
            Err(why) => {
                let kept = self.choice.not_kept();
                format!("products: the portable kernels, because {why}{kept}")
            }
        }
    }

    /// Gives `stream` a workspace of its own.
    pub fn prepare(&self, stream: &CudaStream) -> Result<()> {
        self.workspaces.prepare(stream)
    }

    /// Queues a launch by `queue`, with a workspace if it `needs` one.
    pub fn run(
        &self,
        stream: &CudaStream,
        needs: bool,
        queue: impl FnOnce(&Run<'_>) -> Result<()>,
    ) -> Result<()> {
        if !needs {
            return queue(&Run { prepared: self, space: None });
        }
        self.workspaces
            .with(stream, |space| queue(&Run { prepared: self, space: Some(space.clone()) }))
    }

    /// Queues the clearing of the status.
    pub fn reset(&self, stream: &CudaStream) -> Result<()> {
        hold(stream, self.status.clone());
        // SAFETY: four bytes of a tensor that is held.
        unsafe { stream.fill(addr(&self.status)?, 0, 4) }
    }
}

impl Run<'_> {
    fn widened(&self) -> Option<&Widened> {
        self.space.as_ref().and_then(|s| s.widened.as_ref())
    }

    /// Blocks of a pass whose rows are grouped, for `cols` columns of the product.
    fn row_blocks(&self, cols: usize) -> usize {
        (self.desc.capacity / self.tile.m + self.desc.groups) * cols.div_ceil(self.tile.n).max(1)
    }

    /// Returns the address of an operand as the kernels read it; queues its conversion to f32 if it
    /// is FP8.
    fn operand(
        &self,
        stream: &CudaStream,
        o: &Operand,
        of: impl FnOnce(&Widened) -> &Wide,
    ) -> Result<u64> {
        let Some(w) = self.widened() else { return addr(&o.data) };
        let wide = of(w);
        hold(stream, (o.clone(), wide.held()));
        // SAFETY: the operand was checked against the description that the workspace was made for,
        // and is held, as the workspace is.
        unsafe { wide.operand(stream, o, 0) }
    }

    /// As [`Prepared::weights`] of operands: FP8 is widened to packed weights.
    fn operands(&self, stream: &CudaStream, w: &Weights) -> Result<(u64, u64)> {
        let Some(wide) = self.widened() else { return self.weights(stream, w) };
        hold(stream, (w.clone(), wide.w.held()));
        let len = self.desc.n * self.desc.k;
        for (e, o) in w.all().enumerate() {
            // SAFETY: as in `operand`: one matrix of all groups, or one of each.
            unsafe { wide.w.operand(stream, o, e * len)? };
        }
        Ok((wide.w.addr(), 0))
    }

    /// Address of packed weights, or of the table that is filled before the launch: one of them 0.
    fn weights(&self, stream: &CudaStream, w: &Weights) -> Result<(u64, u64)> {
        let list = match w {
            Weights::Packed(w) => return Ok((addr(&w.data)?, 0)),
            Weights::Discrete(list) => list,
        };
        let none = || Error::internal("a launch lacks its table");
        let table = &self.space.as_ref().ok_or_else(none)?.table;
        hold(stream, table.clone());
        for (i, part) in list.chunks(64).enumerate() {
            let mut a = TwAddresses { at: [0; 64] };
            for (to, w) in a.at.iter_mut().zip(part) {
                *to = addr(&w.data)?;
            }
            let (num, at) = (part.len() as u32, table.addr() + 512 * i as u64);
            let args = LaunchArgs::new().arg(&a).arg(&num).arg(&at);
            // SAFETY: `tw_grouped_table` takes (TwAddresses, u32, u64*); the table has a word for
            // each group, and is held.
            unsafe { self.fill_table.launch(stream, Grid::new(1, 64), args)? };
        }
        Ok((0, table.addr()))
    }

    pub fn fprop(&self, stream: &CudaStream, t: &GroupedFprop) -> Result<()> {
        let d = &self.desc;
        let bias = Bias::of(t.bias.as_ref())?;
        let g = TwGemm {
            a: self.operand(stream, &t.x, |w| &w.x)?,
            b: 0,
            d: addr(&t.out)?,
            bias: bias.addr,
            lda: d.k as i64,
            ldb: d.k as i64,
            ldd: d.out_cols() as i64,
            m: d.capacity as u32,
            n: d.n as u32,
            k: d.k as u32,
            flags: out_code(d.out)?
                | act_code(d.activation) << ACT_SHIFT
                | self.tail()
                | bias_flag(bias)
                | self.nt.flags,
            aux: addr(t.aux_out.as_ref())?,
            ldaux: d.n as i64,
        };
        let blocks = self.row_blocks(d.n);
        let core = Some(hopper::Pass::Fprop);
        let (kernel, matrices) = (&self.nt.kernel, Matrices::B(&t.w));
        let pass = Pass { core, kernel, tile: self.tile, g, blocks, mask: 0, matrices };
        self.launch(stream, &t.splits, &pass, t.clone())
    }

    pub fn dgrad(&self, stream: &CudaStream, t: &GroupedDgrad) -> Result<()> {
        let d = &self.desc;
        let g = TwGemm {
            a: self.operand(stream, &t.dy, |w| &w.dy)?,
            b: 0,
            d: addr(&t.dx)?,
            bias: 0,
            lda: d.n as i64,
            ldb: d.k as i64,
            ldd: d.k as i64,
            m: d.capacity as u32,
            n: d.k as u32,
            k: d.n as u32,
            flags: out_code(d.out)? | self.tail() | self.nn.flags,
            aux: 0,
            ldaux: 0,
        };
        let blocks = self.row_blocks(d.k);
        let core = Some(hopper::Pass::Dgrad);
        let (kernel, matrices) = (&self.nn.kernel, Matrices::B(&t.w));
        let pass = Pass { core, kernel, tile: self.tile, g, blocks, mask: 0, matrices };
        self.launch(stream, &t.splits, &pass, t.clone())
    }

    pub fn wgrad(&self, stream: &CudaStream, t: &GroupedWgrad) -> Result<()> {
        let d = &self.desc;
        let g = TwGemm {
            a: self.operand(stream, &t.dy, |w| &w.dy)?,
            b: self.operand(stream, &t.x, |w| &w.x)?,
            d: 0,
            bias: 0,
            lda: d.n as i64,
            ldb: d.k as i64,
            ldd: d.k as i64,
            m: d.n as u32,
            n: d.k as u32,
            k: d.capacity as u32,
            flags: out_code(d.grad)? | self.tn.flags,
            aux: 0,
            ldaux: 0,
        };
        let blocks = d.groups * (d.n.div_ceil(self.tile.m) * d.k.div_ceil(self.tile.n)).max(1);
        let mask = addr(t.mask.as_ref())?;
        let core = Some(hopper::Pass::Wgrad);
        let (kernel, matrices) = (&self.tn.kernel, Matrices::D(&t.dw));
        let pass = Pass { core, kernel, tile: self.tile, g, blocks, mask, matrices };
        self.launch(stream, &t.splits, &pass, t.clone())?;
        let Some(dbias) = &t.dbias else { return Ok(()) };
        let g = TwGemm { b: 0, d: addr(dbias)?, n: d.n as u32, flags: out_code(d.dtype)?, ..g };
        let blocks = d.groups * d.n.div_ceil(SUMS.n).max(1);
        let (kernel, matrices) = (&self.dbias, Matrices::None);
        let pass = Pass { core: None, kernel, tile: SUMS, g, blocks, mask: 0, matrices };
        self.launch(stream, &t.splits, &pass, t.clone())
    }

    pub fn dactivation(
        &self,
        stream: &CudaStream,
        splits: &Splits,
        (dy, aux, dz): (&Tensor, &Tensor, &Tensor),
    ) -> Result<()> {
        let d = &self.desc;
        let g = TwGemm {
            a: addr(dy)?,
            d: addr(dz)?,
            lda: d.out_cols() as i64,
            ldd: d.n as i64,
            m: d.capacity as u32,
            n: d.out_cols() as u32,
            flags: out_code(d.out)? | act_code(d.activation) << ACT_SHIFT | self.tail(),
            aux: addr(aux)?,
            ldaux: d.n as i64,
            ..TwGemm::zeroed()
        };
        let blocks = d.capacity.min(DACT_BLOCKS);
        let tile = Tile { shared_bytes: 0, ..TILE };
        let (kernel, matrices) = (&self.dact, Matrices::None);
        let pass = Pass { core: None, kernel, tile, g, blocks, mask: 0, matrices };
        self.launch(stream, splits, &pass, (splits.clone(), dy.clone(), aux.clone(), dz.clone()))
    }

    /// Queues a pass of the core, whose tensors are held; if it refuses them, why.
    fn by_core(
        stream: &CudaStream,
        (core, pass): (&Hopper, hopper::Pass),
        matrices: Matrices<'_>,
        mut p: TwGrouped,
    ) -> Result<Option<String>> {
        let list = match matrices {
            Matrices::None => return Err(Error::internal("a pass of the core has no weights")),
            Matrices::B(Weights::Packed(w)) => {
                p.g.b = addr(&w.data)?;
                None
            }
            Matrices::D(Weights::Packed(w)) => {
                p.g.d = addr(&w.data)?;
                None
            }
            Matrices::B(Weights::Discrete(list)) | Matrices::D(Weights::Discrete(list)) => {
                Some(list.iter().map(|w| addr(&w.data)).collect::<Result<Vec<u64>>>()?)
            }
        };
        // SAFETY: `p` describes tensors that were checked against the description, lie on this
        // device, and are held; so are those of the list.
        unsafe { core.launch(stream, pass, &p, list.as_deref()) }
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
        let mut p = TwGrouped {
            g: TwGemm { flags: pass.g.flags | split_flags(splits), ..pass.g },
            splits: addr(&splits.values)?,
            status: addr(&self.status)?,
            accumulate: pass.mask,
            stride: (self.desc.n * self.desc.k) as i64,
            groups: self.desc.groups as u32,
            pad: 0,
            table: 0,
        };
        let held = Arc::new((held, self.status.clone(), self.space.clone()));
        if let (Ok(core), Some(of)) = (&self.hopper, pass.core) {
            hold(stream, held.clone());
            match Self::by_core(stream, (core, of), pass.matrices, p)? {
                None => return Ok(()),
                Some(why) if self.choice.backend == GemmBackend::Hopper => {
                    return Err(not_made_by(CORE, &why));
                }
                Some(_) => {}
            }
        }
        match pass.matrices {
            Matrices::None => {}
            Matrices::B(w) => (p.g.b, p.table) = self.operands(stream, w)?,
            Matrices::D(w) => (p.g.d, p.table) = self.weights(stream, w)?,
        }
        // Behind the kernels that fill the workspace: of many groups they are many, and what is
        // held before those may be let go before this one.
        hold(stream, held);
        let args = LaunchArgs::new().arg(&p);
        // SAFETY: every kernel of the unit takes one `TwGrouped` by value; the tensors were checked
        // against the description, lie on this device, and are held.
        unsafe { pass.kernel.launch(stream, pass.tile.grid(pass.blocks), args) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_kernel_does_is_said_with_a_way_out() {
        let d = |dtype| GroupedDesc::new(4, 100, 32, 16, dtype);
        for dtype in [DType::BF16, DType::F16, DType::F32, DType::F8E4M3, DType::F8E5M2] {
            let wide = !matches!(dtype, DType::BF16 | DType::F16);
            assert_eq!(check(&d(dtype)).unwrap().m, if wide { TILE_F32.m } else { TILE.m });
        }
        let bad = GroupedDesc { out: DType::F8E4M3, ..d(DType::BF16) };
        let e = check(&bad).err().unwrap();
        assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
    }
}
