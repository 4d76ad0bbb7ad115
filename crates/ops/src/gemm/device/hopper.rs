//! GEMM on sm_90a by wgmma and TMA (`hopper/sm90_gemm.cu`): choice of a variant, and launches.

use std::sync::Arc;

use tilewire_core::{DType, Error, Result};
use tilewire_device::cuda::{
    CudaContext, CudaMemory, CudaStream, Grid, Kernel, LaunchArgs, MapPromotion, MapSwizzle,
    RawTensorMap, TensorMapDesc,
};
use tilewire_kernels::abi::TwHopper;
use tilewire_kernels::hopper::{
    BOX_COLS, CLUSTER, D_HAS_MAP, Epilogue, HOPPER_GEMM, HOPPER_SKINNY_GEMM, HOPPER_SUM_PARTS,
    SKINNY_ROWS, SKINNY_THREADS, STORE_ROWS, SUM_THREADS, Skinny, THREADS, TILE_K, TILE_M, Variant,
    fits_sum_rows,
};

use super::product::{ACCUMULATE, Matrix, Product, bias_flag};
use super::tiles::{Cut, Wanted, best, has_few_tiles, num_pairs, order, variants, wanted};
use crate::common::counters::Counters;
use crate::common::cuda::{lacks_sm90, load, map_of_sums, workspace};
use crate::common::kernel::GemmChoice;
use crate::common::workspaces::Workspaces;
use crate::gemm::{AOrder, Activation, BOrder, GemmDesc};

/// The most rows for which `auto` takes the core where cuBLASLt fits, too.
pub(super) const FASTER_ROWS: usize = 32;

/// Addresses, and rows that tensor maps describe, are multiples of this.
const ALIGN_BYTES: usize = 16;

/// Returns why the core cannot make the products of `d`, whatever the addresses; none if it can.
pub(super) fn unfit(d: &GemmDesc) -> Option<String> {
    if order(d).is_none() {
        return Some("it has no products of A as [k, m] with B as [n, k]".to_owned());
    }
    if !matches!(d.a, DType::BF16 | DType::F16) {
        return Some(format!("its operands are bf16 or f16, not {}", d.a));
    }
    let act = d.epilogue.activation;
    if d.out != d.a && (d.out != DType::F32 || act != Activation::None) {
        return Some(format!("it has no {} results of {}", d.out, d.a));
    }
    if d.k == 0 || d.n == 0 {
        return Some("the product is empty".to_owned());
    }
    let cols = if act == Activation::SwiGlu { d.n / 2 } else { d.n };
    let unit = if d.out == DType::F32 { 2 } else { ALIGN_BYTES / d.out.size() };
    if !cols.is_multiple_of(unit) || (act == Activation::SwiGlu && !d.n.is_multiple_of(2 * unit)) {
        return Some(format!("it stores {unit} columns at a time, and there are {cols}"));
    }
    let rows = [
        ("A", if d.a_order == AOrder::Mk { d.k } else { ALIGN_BYTES }),
        ("B", if d.b_order == BOrder::Nk { d.k } else { d.n }),
    ];
    let odd = rows.iter().find(|(_, ld)| !(ld * d.a.size()).is_multiple_of(ALIGN_BYTES));
    odd.map(|(name, ld)| {
        format!("rows of {name}, {ld} {}, are no multiple of {ALIGN_BYTES} bytes", d.a)
    })
}

/// The kernels of one description on one device.
pub(super) struct Hopper {
    ctx: CudaContext,
    desc: GemmDesc,
    epilogue: Epilogue,
    wanted: Wanted,
    /// For whole contractions.
    kernels: Kernels,
    /// For contractions that are cut into parts, if some are.
    parts: Option<Parts>,
    /// For few rows.
    skinny: Option<SkinnyKernel>,
    /// Clusters of the device, and of a launch.
    all: u32,
    clusters: u32,
    counters: Arc<Counters>,
}

type Kernels = Vec<(Variant, Kernel)>;

/// Kernels and workspace of contractions in parts.
struct Parts {
    kernels: Kernels,
    /// Adds the parts and finishes D.
    sum: Kernel,
    /// Memory for the sums of all parts.
    spaces: Workspaces<CudaMemory>,
}

fn load_all(ctx: &CudaContext, all: &[Variant]) -> Result<Kernels> {
    let of = |v: &Variant| {
        let kernel = load(ctx, &HOPPER_GEMM, v.defines())?.kernel("tw_hopper_gemm")?;
        kernel.allow_shared(v.shared_bytes())?;
        Ok((*v, kernel))
    };
    all.iter().map(of).collect()
}

impl Parts {
    /// Loads what `wanted` needs; `v`: a variant of the description.
    fn new(ctx: &CudaContext, wanted: &Wanted, v: &Variant) -> Result<Self> {
        let sum = load(ctx, &HOPPER_SUM_PARTS, v.of_sums().defines())?;
        let bytes = wanted.bytes;
        let spaces = Workspaces::new(ctx, move |ctx| workspace(ctx, bytes));
        spaces.prepare_one()?;
        let kernels = load_all(ctx, &wanted.of_parts)?;
        Ok(Self { kernels, sum: sum.kernel("tw_hopper_sum_parts")?, spaces })
    }
}

/// The kernel of few rows, and how it cuts contractions.
struct SkinnyKernel {
    variant: Skinny,
    cut: Cut,
    kernel: Kernel,
}

impl SkinnyKernel {
    fn new(ctx: &CudaContext, variant: Skinny, cut: Cut) -> Result<Self> {
        let kernel = load(ctx, &HOPPER_SKINNY_GEMM, variant.defines())?;
        let kernel = kernel.kernel("tw_hopper_skinny")?;
        kernel.allow_shared(variant.shared_bytes())?;
        Ok(Self { variant, cut, kernel })
    }

    /// A cluster for each tile of `cols` columns, of at most so many blocks altogether.
    fn grid(&self, cols: usize, most: u32) -> Grid {
        let parts = self.cut.parts as u32;
        let num = (cols.div_ceil(self.variant.width()) as u32).min(most / parts);
        Grid::new(num * parts, SKINNY_THREADS)
            .shared(self.variant.shared_bytes())
            .clusters([parts, 1, 1])
            .early()
    }

    fn explain(&self) -> String {
        let (cols, parts) = (self.variant.width(), self.cut.parts);
        let parts = if parts > 1 { format!(", k in {parts} parts") } else { String::new() };
        format!("up to {SKINNY_ROWS} rows: {cols} columns{parts}")
    }
}

impl Hopper {
    /// Returns why `ctx` has no such kernels; none if it has.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn lacks(ctx: &CudaContext) -> Result<Option<String>> {
        lacks_sm90(ctx, &HOPPER_GEMM)
    }

    /// Returns whether it makes the products of `d` faster than cuBLASLt: those of few rows whose
    /// tiles are all computed at once (docs/lab/gemm.md).
    ///
    /// # Errors
    /// What the driver reports.
    pub fn is_faster(ctx: &CudaContext, d: &GemmDesc) -> Result<bool> {
        Ok(d.m <= FASTER_ROWS && has_few_tiles(d, ctx.num_sms()? as usize))
    }

    /// Loads the kernels of a description that is not [`unfit`].
    ///
    /// # Errors
    /// As [`CudaContext::module`]; `Unsupported` if the device refuses the shared memory.
    pub fn new(ctx: &CudaContext, d: &GemmDesc, choice: GemmChoice) -> Result<Self> {
        let all = GemmChoice::default().clusters(ctx.num_sms()?, CLUSTER);
        let clusters = choice.clusters(ctx.num_sms()?, CLUSTER);
        let wanted = wanted(d, choice.parts, all, clusters);
        let Some(v) = variants(d).and_then(|all| all.first().copied()) else {
            return Err(Error::internal("no variant of the core fits"));
        };
        let kernels = load_all(ctx, &wanted.whole)?;
        let parts = (!wanted.of_parts.is_empty()).then(|| Parts::new(ctx, &wanted, &v));
        let skinny = wanted.skinny.map(|(v, cut)| SkinnyKernel::new(ctx, v, cut));
        Ok(Self {
            ctx: ctx.clone(),
            desc: *d,
            epilogue: v.epilogue,
            wanted,
            kernels,
            parts: parts.transpose()?,
            skinny: skinny.transpose()?,
            all,
            clusters,
            counters: Counters::of(ctx)?,
        })
    }

    /// Returns what is used, equal in processes that use the same.
    pub fn text(&self) -> String {
        match self.wanted.most_parts() {
            1 => "hopper".to_owned(),
            // The number of parts depends on that of the device's multiprocessors.
            _ => format!("hopper, k in parts for {} clusters", self.all),
        }
    }

    /// Returns what is used, for people.
    pub fn explain(&self) -> String {
        let of = |kernels: &Kernels| {
            let cols: Vec<_> = kernels.iter().map(|(v, _)| v.cols.to_string()).collect();
            format!("{TILE_M} rows x {} columns", cols.join(" or "))
        };
        let whole = (!self.kernels.is_empty()).then(|| of(&self.kernels));
        let parts = self.parts.as_ref().map(|p| {
            let (c, m) = (self.wanted.most_parts_of_core(), self.wanted.bytes >> 10);
            format!("few tiles: {}, k in up to {c} parts, {m} KiB for their sums", of(&p.kernels))
        });
        let skinny = self.skinny.as_ref().map(SkinnyKernel::explain);
        let tiles: Vec<_> = whole.into_iter().chain(parts).chain(skinny).collect();
        format!(
            "the core for sm_90a ({}; {} clusters of {CLUSTER} blocks); the portable kernel where an \
             address or a row is no multiple of {ALIGN_BYTES} bytes",
            tiles.join("; "),
            self.clusters,
        )
    }

    /// Returns why it does not make this product; none if it does.
    pub fn refuses(&self, p: &Product) -> Option<String> {
        let (d, e) = (&self.desc, &self.epilogue);
        let (m, n, k) = p.shape;
        if (n, k) != (d.n, d.k) {
            return Some("it is not the product that the kernels were chosen for".to_owned());
        }
        let adds = p.bias.addr != 0 || p.accumulate;
        if *e == Epilogue::Plain && (adds || p.aux.addr != 0) {
            return Some("the kernels were chosen for a product without bias or sum".to_owned());
        }
        if m == 0 {
            return Some("the product is empty".to_owned());
        }
        if m > d.m {
            return Some(format!("{m} rows are more than the {} that it was made for", d.m));
        }
        let odd = |addr: u64, unit: usize| !addr.is_multiple_of(unit as u64);
        let row = |x: &Matrix, t: DType| (x.ld * t.size()) as u64;
        for (name, x) in [("A", &p.a), ("B", &p.b)] {
            if odd(x.addr, ALIGN_BYTES) || odd(row(x, d.a), ALIGN_BYTES) {
                return Some(unaligned(name, ALIGN_BYTES));
            }
        }
        // Pairs of f32 are stored as they are; 16 bits by a tensor map.
        let unit = if d.out == DType::F32 { 8 } else { ALIGN_BYTES };
        if odd(p.d.addr, unit) || odd(row(&p.d, d.out), unit) {
            return Some(unaligned("D", unit));
        }
        let pair = 2 * d.out.size();
        if p.aux.addr != 0 && (odd(p.aux.addr, pair) || odd(row(&p.aux, d.out), pair)) {
            return Some(unaligned("the pre-activation", pair));
        }
        let pair = if p.bias.of_out { pair } else { 8 };
        odd(p.bias.addr, pair).then(|| unaligned("the bias", pair))
    }

    /// Queues a product that is not refused: one kernel, or two where its contraction is cut.
    ///
    /// # Safety
    /// As `GemmKernels::launch`.
    ///
    /// # Errors
    /// What the driver reports.
    pub unsafe fn launch(&self, stream: &CudaStream, p: &Product) -> Result<()> {
        if let Some(skinny) = self.skinny.as_ref().filter(|_| p.shape.0 <= SKINNY_ROWS) {
            // SAFETY: the caller's contract.
            return unsafe { self.few_rows(stream, skinny, p) };
        }
        let (Some(cut), Some(parts)) = (self.wanted.cut(p.shape.0), &self.parts) else {
            let whole = Cut::new(self.desc.k, 1);
            let param = self.param(p, whole);
            // SAFETY: the caller's contract.
            return unsafe { self.products(stream, &self.kernels, p, param, whole) };
        };
        parts.spaces.with(stream, |space| {
            let ((_, n, _), sums) = (p.shape, space.addr());
            let param = self.param(p, cut);
            let of_parts = TwHopper { d: sums, ldd: n as i64, bias: 0, aux: 0, ..param };
            let grid = self.grid_of_sums(p.shape);
            let args = LaunchArgs::new().arg(&param).arg(&sums);
            // SAFETY: the space has the sums of all parts, and is this launch's alone until both
            // kernels are through. `tw_hopper_sum_parts` takes (TwHopper, const float*). The
            // caller's contract for the rest.
            unsafe {
                self.products(stream, &parts.kernels, p, of_parts, cut)?;
                parts.sum.launch(stream, grid, args)
            }
        })
    }

    /// Queues a product of at most [`SKINNY_ROWS`] rows.
    ///
    /// # Safety
    /// As `GemmKernels::launch`.
    unsafe fn few_rows(&self, stream: &CudaStream, by: &SkinnyKernel, p: &Product) -> Result<()> {
        let ((m, n, k), t) = (p.shape, self.desc.a);
        let nn = self.desc.b_order == BOrder::Kn;
        let of_a = map(p.a, [1, m, k], p.a.ld, Skinny::a_rows(m), t);
        let of_b = map(p.b, if nn { [1, k, n] } else { [1, n, k] }, p.b.ld, BOX_COLS, t);
        // What lies there the caller answers for, as for every address of a launch.
        let maps = [(p.a.addr, usize::MAX, &of_a), (p.b.addr, usize::MAX, &of_b)];
        let [a, b] = RawTensorMap::all(&self.ctx, maps)?;
        let param = self.param(p, by.cut);
        let args = LaunchArgs::new().arg(&param).raw_map(&a).raw_map(&b);
        let cols = n / if self.epilogue == Epilogue::SwiGlu { 2 } else { 1 };
        // Tiles of one block are loaded behind each other without a pause; the blocks of a cluster
        // meet between them.
        let limited = self.clusters < self.all || by.cut.parts == 1;
        let most = if limited { self.clusters * CLUSTER } else { u32::MAX };
        // SAFETY: `tw_hopper_skinny` takes (TwHopper, TwTensorMap, TwTensorMap); the caller's
        // contract for what they describe.
        unsafe { by.kernel.launch(stream, by.grid(cols, most), args) }
    }

    /// A block for each row and 256 columns. Where launches may not take all multiprocessors one
    /// for each that they may, which begins when the products have ended: blocks that wait would
    /// take the others.
    fn grid_of_sums(&self, (m, n, _): (usize, usize, usize)) -> Grid {
        let cols = if self.epilogue == Epilogue::SwiGlu { n / 2 } else { n };
        let all = m.saturating_mul(cols.div_ceil(2 * SUM_THREADS as usize)).min(1 << 30) as u32;
        if self.clusters < self.all {
            return Grid::new(all.min(self.clusters * CLUSTER), SUM_THREADS);
        }
        Grid::new(all, SUM_THREADS).early()
    }

    /// The parameter of the kernels of `p`, but for the counter.
    fn param(&self, p: &Product, cut: Cut) -> TwHopper {
        let (m, n, k) = p.shape;
        TwHopper {
            d: p.d.addr,
            bias: p.bias.addr,
            aux: p.aux.addr,
            counter: 0,
            ldd: p.d.ld as i64,
            ldaux: p.aux.ld as i64,
            m: m as u32,
            n: n as u32,
            k: k as u32,
            flags: bias_flag(p.bias) | if p.accumulate { ACCUMULATE } else { 0 },
            parts: cut.parts as u32,
            steps: cut.steps as u32,
        }
    }

    /// Queues the kernel of `p` that takes least of `all`.
    ///
    /// # Safety
    /// As `GemmKernels::launch`; `param.d` has `cut.parts` matrices of f32 if there are several.
    unsafe fn products(
        &self,
        stream: &CudaStream,
        all: &Kernels,
        p: &Product,
        param: TwHopper,
        cut: Cut,
    ) -> Result<()> {
        let (m, n, k) = p.shape;
        let shape = [m, n, k];
        let v = best(all.iter().map(|(v, _)| *v), shape, cut, self.clusters);
        let Some((v, kernel)) = all.iter().find(|(of, _)| Some(*of) == v) else {
            return Err(Error::internal("a product was launched that has no variant of the core"));
        };
        let by_map = adds_by_map(v, p);
        let [a, b, d] = self.maps(v, p)?;
        let (num, clusters) = (cut.parts * num_pairs(v, shape), self.clusters as usize);
        // A cluster that has one pair of tiles needs no number.
        let counter = if num > clusters { self.counters.next(stream) } else { 0 };
        let flags = param.flags | if by_map { D_HAS_MAP } else { 0 };
        let param = TwHopper { counter, flags, ..param };
        let grid = Grid::new(num.min(clusters) as u32 * CLUSTER, THREADS)
            .shared(v.shared_bytes())
            .clusters([CLUSTER, 1, 1])
            .early();
        let args = LaunchArgs::new().arg(&param).raw_map(&a).raw_map(&b).raw_map(&d);
        // SAFETY: `tw_hopper_gemm` takes (TwHopper, TwTensorMap, TwTensorMap, TwTensorMap); the
        // caller's contract for what they describe.
        unsafe { kernel.launch(stream, grid, args) }
    }

    /// The tensor maps of A, B and D, as `hopper/sm90_gemm.cu` wants them.
    fn maps(&self, v: &Variant, p: &Product) -> Result<[RawTensorMap; 3]> {
        let (m, n, k) = p.shape;
        let (a_mn, b_mn) = v.order.mn_major();
        let a = if a_mn { [k, m] } else { [m, k] };
        let b = if b_mn { [k, n] } else { [n, k] };
        let of_a = map(p.a, [1, a[0], a[1]], p.a.ld, TILE_K, self.desc.a);
        let of_b = map(p.b, [1, b[0], b[1]], p.b.ld, v.b_rows(), self.desc.b);
        let of_d = match v.epilogue {
            // Each half of D's columns is a matrix of its own.
            Epilogue::DSwiGlu => map(p.d, [2, m, n], n, STORE_ROWS, self.desc.out),
            Epilogue::SwiGlu => map(p.d, [1, m, n / 2], p.d.ld, STORE_ROWS, self.desc.out),
            _ if adds_by_map(v, p) => map_of_sums([m, n], p.d.ld),
            // Another D of f32 is not described: any map will do.
            _ if v.out_f32 => of_a,
            _ => map(p.d, [1, m, n], p.d.ld, STORE_ROWS, self.desc.out),
        };
        let d = if v.out_f32 && !adds_by_map(v, p) { p.a.addr } else { p.d.addr };
        // What lies there the caller answers for, as for every address of a launch.
        let any = usize::MAX;
        RawTensorMap::all(
            &self.ctx,
            [(p.a.addr, any, &of_a), (p.b.addr, any, &of_b), (d, any, &of_d)],
        )
    }
}

/// Returns whether f32 results are added to by their map.
fn adds_by_map(v: &Variant, p: &Product) -> bool {
    let (m, n, _) = p.shape;
    let adds = v.out_f32 && v.epilogue == Epilogue::Linear && p.accumulate && p.bias.addr == 0;
    adds && fits_sum_rows(p.d.addr, [m, n], p.d.ld)
}

/// Boxes of `rows` x 64 elements of `shape[0]` matrices that are `jump` elements apart.
fn map(x: Matrix, shape: [usize; 3], jump: usize, rows: usize, dtype: DType) -> TensorMapDesc {
    let bytes = dtype.size();
    TensorMapDesc {
        dtype,
        shape: shape.into(),
        strides_bytes: [jump * bytes, x.ld * bytes].into(),
        tile: [1, rows, BOX_COLS].into(),
        swizzle: MapSwizzle::B128,
        promotion: MapPromotion::B256,
        wraps: false,
    }
}

fn unaligned(name: &str, unit: usize) -> String {
    format!("{name} or its rows do not start at multiples of {unit} bytes")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::Bias;
    use crate::gemm::Epilogue as Wanted;

    #[test]
    fn f32_whose_rows_fill_boxes_are_added_to_by_map() {
        let all = Variant::all();
        let v = all.iter().find(|v| v.out_f32 && v.epilogue == Epilogue::Linear).unwrap();
        let of = |v: &Variant, [m, n, ld]: [usize; 3], addr, bias| {
            let d = Matrix::new(addr, ld);
            let (a, mut of_bias) = (Matrix::default(), Bias::default());
            of_bias.addr = bias;
            let p =
                Product { shape: (m, n, 64), a, b: a, d, bias: of_bias, aux: a, accumulate: true };
            adds_by_map(v, &p) && !adds_by_map(v, &Product { accumulate: false, ..p })
        };
        assert!(of(v, [144, 264, 264], 0, 0) && of(v, [16, 4, 8], 1 << 20, 0));
        for bad in [[136, 264, 264], [144, 266, 268], [144, 264, 266], [0, 264, 264]] {
            assert!(!of(v, bad, 0, 0), "{bad:?}");
        }
        assert!(!of(v, [144, 264, 264], 8, 0) && !of(v, [144, 264, 264], 0, 16));
        let other = all.iter().find(|v| !v.out_f32 && v.epilogue == Epilogue::Linear).unwrap();
        assert!(!of(other, [144, 264, 264], 0, 0));
    }

    #[test]
    fn what_the_core_is_not_asked_for_has_a_reason() {
        let d = GemmDesc::nt(100, 64, 72, DType::BF16);
        let with = |activation| {
            let epilogue = Wanted { bias: true, activation, ..Wanted::NONE };
            GemmDesc { epilogue, ..d }
        };
        for good in [
            d,
            GemmDesc { m: 7, a_order: AOrder::Km, b_order: BOrder::Kn, ..d },
            GemmDesc { out: DType::F32, n: 66, ..d },
            with(Activation::SwiGlu),
            with(Activation::DSwiGlu),
            GemmDesc::nt(3, 8, 8, DType::F16),
        ] {
            assert_eq!(unfit(&good), None, "{good}");
            assert!(!variants(&good).unwrap().is_empty(), "{good}");
        }
        for (bad, why) in [
            (GemmDesc { a_order: AOrder::Km, ..d }, "[n, k]"),
            (GemmDesc::nt(8, 8, 8, DType::F32), "f32"),
            (GemmDesc { out: DType::F16, ..d }, "f16 results"),
            (GemmDesc { out: DType::F32, ..with(Activation::Gelu) }, "f32 results"),
            (GemmDesc { n: 68, ..d }, "8 columns"),
            (GemmDesc { n: 72, ..with(Activation::SwiGlu) }, "there are 36"),
            (GemmDesc { k: 73, ..d }, "rows of A, 73 bf16"),
            (GemmDesc { n: 66, out: DType::F32, b_order: BOrder::Kn, ..d }, "rows of B, 66"),
            (GemmDesc { k: 0, ..d }, "empty"),
        ] {
            assert!(unfit(&bad).is_some_and(|w| w.contains(why)), "{bad}: {:?}", unfit(&bad));
        }
    }
}
