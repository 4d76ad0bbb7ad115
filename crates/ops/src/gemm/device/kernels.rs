//! GEMM on CUDA devices: by cuBLASLt where it does what is asked, else, and for plans of few rows,
//! by the core for sm_90a (`kernels/src/hopper`), else by the portable kernels
//! (`gemm/sm80_gemm.cu`).

use std::sync::atomic::{AtomicBool, Ordering};

use tilewire_core::{DType, Error, ErrorKind, Result};
use tilewire_device::cuda::{CudaContext, CudaStream, Kernel, LaunchArgs};
use tilewire_kernels::SM80_GEMM;
use tilewire_kernels::abi::TwGemm;
use tilewire_symm::LiveTeam;

use super::cublaslt::Lt;
use super::hopper::{self, Hopper};
use super::product::{
    A_KM, ACCUMULATE, ACT_SHIFT, B_KN, Matrix, Product, SUMS, TILE, TILE_F32, Tile, act_code,
    bias_flag, out_code,
};
use super::widen::{Widened, kernel_desc};
use crate::common::Bias;
use crate::common::cuda::{addr, fit_32_bits, gemm_defines, hold, load, no_kernel, too_few_sms};
use crate::common::kernel::GemmChoice;
use crate::gemm::backend::unfit;
use crate::gemm::{AOrder, BOrder, GemmBackend, GemmDesc, GemmInputs, Operand};

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

/// Returns the error for a product of `dtype` with a scale: scales are applied where FP8 operands
/// are widened.
pub(crate) fn unscaled(dtype: DType) -> Error {
    no_kernel(
        format!("a product of {dtype} with a scale"),
        "scales are for FP8 operands: scale the output behind it",
    )
}

/// Returns what a launch needs, or why there is no kernel for `d`. Pure.
fn plan(d: &GemmDesc) -> Result<(&'static str, Tile, u32)> {
    check_operand(d.a)?;
    let mut flags = out_code(d.out)? | act_code(d.epilogue.activation) << ACT_SHIFT;
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

/// Something, or why there is none.
type Why<T> = std::result::Result<T, String>;

/// A product on raw addresses: for one plan, or for the tiles of another operation.
pub(crate) struct GemmKernels {
    kernel: Kernel,
    tile: Tile,
    flags: u32,
    choice: GemmChoice,
    /// Or why not.
    lt: Why<Lt>,
    /// Or why not.
    hopper: Why<Hopper>,
    /// Another rank of the team makes its products in another way.
    differs: AtomicBool,
}

impl GemmKernels {
    /// Returns what makes products of the orders, types and activation of `desc`, of at most its
    /// size. Bias, pre-activation and accumulation are those of each [`Product`].
    ///
    /// # Errors
    /// `Unsupported` for what no kernel does, and `Unavailable` without cuBLASLt, if `backend` asks
    /// for it; as [`CudaContext::module`].
    pub fn new(ctx: &CudaContext, desc: &GemmDesc, choice: impl Into<GemmChoice>) -> Result<Self> {
        let choice = choice.into();
        choice.check()?;
        let (name, tile, flags) = plan(desc)?;
        let kernel = load(ctx, &SM80_GEMM, gemm_defines(desc.a))?.kernel(name)?;
        kernel.allow_shared(tile.shared_bytes)?;
        // Why `auto` prefers the core.
        let prefers = match choice.num_sms {
            Some(num) => Some(format!("{num} multiprocessors are the most of a launch")),
            None if choice.backend == GemmBackend::Auto && Hopper::is_faster(ctx, desc)? => {
                Some(format!("plans of up to {} rows are faster by the core", hopper::FASTER_ROWS))
            }
            None => None,
        };
        let (lt, hopper) = match prefers {
            None => {
                let lt = Self::lt(ctx, desc, choice.backend)?;
                let hopper = Self::hopper(ctx, desc, choice, lt.is_ok())?;
                (lt, hopper)
            }
            Some(prefers) => match Self::hopper(ctx, desc, choice, false)? {
                Err(why) => (Self::lt(ctx, desc, choice.backend)?, Err(why)),
                Ok(core) => (Err(prefers), Ok(core)),
            },
        };
        Ok(Self { kernel, tile, flags, choice, lt, hopper, differs: AtomicBool::new(false) })
    }

    fn lt(ctx: &CudaContext, desc: &GemmDesc, by: GemmBackend) -> Result<Why<Lt>> {
        Ok(match (by, unfit(desc)) {
            (GemmBackend::Portable, _) => Err(ASKED_FOR.to_owned()),
            (GemmBackend::Hopper, _) => Err("the core was asked for".to_owned()),
            (GemmBackend::CublasLt, Some(why)) => return Err(not_made_by("cuBLASLt", &why)),
            (GemmBackend::CublasLt, None) => Ok(Lt::new(ctx, desc)?),
            (GemmBackend::Auto, Some(why)) => Err(why),
            (GemmBackend::Auto, None) => match Lt::new(ctx, desc) {
                Err(e) if e.is_unavailable() || e.is_unsupported() => Err(e.to_string()),
                r => Ok(r?),
            },
        })
    }

    fn hopper(
        ctx: &CudaContext,
        d: &GemmDesc,
        choice: GemmChoice,
        has_lt: bool,
    ) -> Result<Why<Hopper>> {
        let by = choice.backend;
        let why = match by {
            GemmBackend::Portable => Some(ASKED_FOR.to_owned()),
            GemmBackend::CublasLt => Some("cuBLASLt was asked for".to_owned()),
            // Loaded where it may be used only: kernels take time to compile.
            GemmBackend::Auto if has_lt => Some("cuBLASLt makes the products".to_owned()),
            _ => match (hopper::unfit(d), Hopper::lacks(ctx)?) {
                (Some(why), _) | (None, Some(why)) => Some(why),
                (None, None) if by == GemmBackend::Auto => too_few_sms(ctx)?,
                (None, None) => None,
            },
        };
        match why {
            Some(why) if by == GemmBackend::Hopper => Err(not_made_by(CORE, &why)),
            Some(why) => Ok(Err(why)),
            None => match Hopper::new(ctx, d, choice) {
                // Nothing to compile it with, and not shipped either.
                Err(e) if e.is_unavailable() && by == GemmBackend::Auto => Ok(Err(e.to_string())),
                r => Ok(Ok(r?)),
            },
        }
    }

    /// Collective: where a rank has another library, or none, all take the portable kernel.
    ///
    /// # Errors
    /// As [`LiveTeam::exchange`].
    pub fn agree(&self, team: &LiveTeam) -> Result<()> {
        let hopper = || self.hopper.as_ref().map_or("portable".to_owned(), Hopper::text);
        let mine = self.lt.as_ref().map_or_else(|_| hopper(), Lt::text);
        let all = team.exchange("gemm", mine.as_bytes())?;
        let differs = all.iter().any(|text| text != mine.as_bytes());
        self.differs.store(differs, Ordering::Release);
        Ok(())
    }

    /// Returns `x` if it is used: it is not where ranks differ.
    fn of<'a, T>(&self, x: &'a Why<T>) -> std::result::Result<&'a T, &'a str> {
        if self.differs.load(Ordering::Acquire) {
            return Err("the ranks do not all make their products in the same way");
        }
        x.as_ref().map_err(String::as_str)
    }

    /// Returns what makes the products, and why.
    pub fn explain(&self) -> String {
        match (self.of(&self.lt), self.of(&self.hopper)) {
            (Ok(lt), _) => format!("products: {}{}", lt.explain(), self.choice.not_kept()),
            (Err(why), Ok(hopper)) => {
                format!("products: {}, because of cuBLASLt: {why}", hopper.explain())
            }
            (Err(lt), Err(why)) if lt == why => {
                format!("products: the portable kernel, because {why}{}", self.choice.not_kept())
            }
            (Err(lt), Err(why)) => {
                format!(
                    "products: the portable kernel, because of cuBLASLt: {lt}; of {CORE}: {why}{}",
                    self.choice.not_kept()
                )
            }
        }
    }

    /// Queues `D = act(A B (+ D) + bias)`; the caller holds the memory. Allocates nothing, but for
    /// a capture of the core with its contraction in parts, whose graph has sums of its own.
    ///
    /// # Safety
    /// The addresses must be mapped on the stream's device, for the shapes, orders and types that
    /// the kernel was made for, until the work has run (and be held by the graph if captured). No
    /// other work may write A, B or bias, or use D, meanwhile.
    ///
    /// # Errors
    /// What the driver reports; `Unsupported` for addresses that the one backend that was asked for
    /// does not take.
    pub unsafe fn launch(&self, stream: &CudaStream, p: &Product) -> Result<()> {
        let (m, n, _) = p.shape;
        if m == 0 || n == 0 {
            return Ok(());
        }
        if let Ok(lt) = self.of(&self.lt) {
            match lt.refuses(p) {
                // An algorithm that was chosen for more rows may refuse these few, before it queues
                // anything: seen with f32, one row, n and k of 64, on an H200. Which, depends on
                // the shape alone.
                //
                // SAFETY: the caller's contract.
                None => match unsafe { lt.launch(stream, p) } {
                    Err(e) if e.is_unsupported() && self.choice.backend == GemmBackend::Auto => {}
                    r => return r,
                },
                Some(why) if self.choice.backend == GemmBackend::CublasLt => {
                    return Err(not_made_by("cuBLASLt", &why));
                }
                Some(_) => {}
            }
        }
        if let Ok(hopper) = self.of(&self.hopper) {
            match hopper.refuses(p) {
                // SAFETY: the caller's contract.
                None => return unsafe { hopper.launch(stream, p) },
                Some(why) if self.choice.backend == GemmBackend::Hopper => {
                    return Err(not_made_by(CORE, &why));
                }
                Some(_) => {}
            }
        }
        // SAFETY: the caller's contract.
        unsafe { self.portable(stream, p) }
    }

    /// As [`GemmKernels::launch`], by the portable kernel.
    ///
    /// # Safety
    /// As there.
    unsafe fn portable(&self, stream: &CudaStream, p: &Product) -> Result<()> {
        let (m, n, k) = p.shape;
        let accumulate = if p.accumulate { ACCUMULATE } else { 0 };
        let param = TwGemm {
            a: p.a.addr,
            b: p.b.addr,
            d: p.d.addr,
            bias: p.bias.addr,
            lda: p.a.ld as i64,
            ldb: p.b.ld as i64,
            ldd: p.d.ld as i64,
            m: m as u32,
            n: n as u32,
            k: k as u32,
            flags: self.flags | accumulate | bias_flag(p.bias),
            aux: p.aux.addr,
            ldaux: p.aux.ld as i64,
        };
        let blocks = m.div_ceil(self.tile.m) * n.div_ceil(self.tile.n);
        // SAFETY: every kernel of the unit takes one `TwGemm` by value; the caller's contract for
        // what it points to.
        unsafe { self.kernel.launch(stream, self.tile.grid(blocks), LaunchArgs::new().arg(&param)) }
    }
}

/// The reason for the portable kernel where a caller wants it.
pub(crate) const ASKED_FOR: &str = "it was asked for";

/// The name of the core in texts.
pub(crate) const CORE: &str = "the core for sm_90a";

/// Returns the error for a product that the one backend that was asked for does not make.
pub(crate) fn not_made_by(name: &str, why: &str) -> Error {
    Error::new(ErrorKind::Unsupported, format!("{name} cannot make this product: {why}"))
        .hint("use the backend `auto`, which takes another kernel then")
}

/// The kernels and workspace of a plan on a CUDA device.
pub(crate) struct Prepared {
    /// The description that the kernels are compiled for: with f32 in place of FP8.
    desc: GemmDesc,
    kernels: GemmKernels,
    /// With `bgrad`.
    row_sums: Option<Kernel>,
    /// With FP8 operands.
    widened: Option<Widened>,
}

impl Prepared {
    pub fn new(ctx: &CudaContext, desc: &GemmDesc, choice: GemmChoice) -> Result<Self> {
        let widened = Widened::of(ctx, desc)?;
        let desc = kernel_desc(desc);
        let kernels = GemmKernels::new(ctx, &desc, choice)?;
        let row_sums = desc
            .epilogue
            .bgrad
            .then(|| load(ctx, &SM80_GEMM, gemm_defines(desc.a))?.kernel("tw_gemm_row_sums"));
        Ok(Self { desc, kernels, row_sums: row_sums.transpose()?, widened })
    }

    /// Returns what makes the products, and why.
    pub fn explain(&self) -> String {
        self.kernels.explain()
    }

    /// Queues the product of tensors that were checked.
    pub fn launch(&self, stream: &CudaStream, m: usize, t: GemmInputs) -> Result<()> {
        let d = &self.desc;
        hold(stream, (t.clone(), self.widened.as_ref().map(Widened::held)));
        let place = |o: &Operand, is_a: bool| match &self.widened {
            // SAFETY: the operands were checked against the description that the workspace was made
            // for, and all is held.
            Some(w) => unsafe { if is_a { &w.a } else { &w.b }.operand(stream, o, 0) },
            None => addr(&o.data),
        };
        let act = d.epilogue.activation;
        let product = Product {
            shape: (m, d.n, d.k),
            a: Matrix::new(place(&t.a, true)?, if d.a_order == AOrder::Mk { d.k } else { m }),
            b: Matrix::new(place(&t.b, false)?, if d.b_order == BOrder::Nk { d.k } else { d.n }),
            d: Matrix::new(addr(&t.out)?, act.out_cols(d.n)),
            bias: Bias::of(t.bias.as_ref())?,
            aux: Matrix::new(addr(t.aux_in.as_ref().or(t.aux_out.as_ref()))?, act.aux_cols(d.n)),
            accumulate: d.epilogue.accumulate,
        };
        self.row_sums(stream, product.a, m, addr(t.bgrad.as_ref())?)?;
        // SAFETY: the tensors were checked against the description that the kernel was made for,
        // lie on this device, and are held; that the caller orders other work on them behind this
        // stream is what every launch asks for.
        unsafe { self.kernels.launch(stream, &product) }
    }

    /// Queues the sums of the rows of op(A), if they are asked for. The tensors are held.
    fn row_sums(&self, stream: &CudaStream, a: Matrix, m: usize, out: u64) -> Result<()> {
        let (Some(kernel), true) = (&self.row_sums, m > 0) else { return Ok(()) };
        let d = &self.desc;
        let (ld, m32, k) = (a.ld as i64, m as u32, d.k as u32);
        let flags = out_code(d.a)? | if d.a_order == AOrder::Km { A_KM } else { 0 };
        let args = LaunchArgs::new().arg(&a.addr).arg(&ld).arg(&m32).arg(&k).arg(&flags).arg(&out);
        // SAFETY: `tw_gemm_row_sums` takes (const void*, i64, u32, u32, u32, float*); A and the
        // sums were checked against the description, lie on this device, and are held.
        unsafe { kernel.launch(stream, SUMS.grid(m.div_ceil(SUMS.n)), args) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::{Activation, Epilogue};

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
