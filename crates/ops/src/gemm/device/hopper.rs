//! GEMM on sm_90a by wgmma and TMA (`hopper/sm90_gemm.cu`): choice of a variant, and launches.

use std::sync::Arc;

use tilewire_core::{DType, Error, Result};
use tilewire_device::cuda::{
    CudaContext, CudaStream, Grid, Kernel, LaunchArgs, MapPromotion, MapSwizzle, RawTensorMap,
    TensorMapDesc,
};
use tilewire_kernels::abi::TwHopper;
use tilewire_kernels::hopper::{
    BOX_COLS, CLUSTER, Epilogue, HOPPER_GEMM, Order, STORE_ROWS, THREADS, TILE_K, TILE_M, Variant,
    pairs,
};

use super::cublaslt::row_counts;
use super::product::{ACCUMULATE, Matrix, Product, bias_flag};
use crate::common::counters::Counters;
use crate::common::cuda::{lacks_sm90, load};
use crate::common::kernel::GemmChoice;
use crate::gemm::{AOrder, Activation, BOrder, GemmDesc};

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

fn order(d: &GemmDesc) -> Option<Order> {
    match (d.a_order, d.b_order) {
        (AOrder::Mk, BOrder::Nk) => Some(Order::Nt),
        (AOrder::Mk, BOrder::Kn) => Some(Order::Nn),
        (AOrder::Km, BOrder::Kn) => Some(Order::Tn),
        (AOrder::Km, BOrder::Nk) => None,
    }
}

/// The variants that launches of a description may need: those of one epilogue in all widths.
fn variants(d: &GemmDesc) -> Option<Vec<Variant>> {
    let (order, e) = (order(d)?, &d.epilogue);
    let epilogue = match e.activation {
        // A launch of another operation's tile may store the bare product, too.
        Activation::None if e.bias || e.accumulate => Epilogue::Linear,
        Activation::None => Epilogue::Plain,
        Activation::Relu => Epilogue::Relu,
        Activation::Gelu => Epilogue::Gelu,
        Activation::SwiGlu => Epilogue::SwiGlu,
        Activation::DGelu => Epilogue::DGelu,
        Activation::DSwiGlu => Epilogue::DSwiGlu,
    };
    let (f16, out_f32) = (d.a == DType::F16, d.out == DType::F32);
    let fits =
        |v: &Variant| (v.order, v.f16, v.out_f32, v.epilogue) == (order, f16, out_f32, epilogue);
    Some(Variant::all().into_iter().filter(fits).collect())
}

/// The cost of a tile of `cols` columns, in columns of the widest: its rate among whole waves of
/// 8192 x 8192 x 8192 as measured on one H100 (docs/lab/gemm.md), where tiles of 256 columns take
/// 16 waves and those of 224, 192 and 128 take 18, 21 and 32, and the time beside its products.
fn tile_cost(cols: usize, k: usize) -> f64 {
    let rate = match cols {
        256 => 1.0,
        224 => 0.979,
        192 => 0.973,
        _ => 0.845,
    };
    // About 2 us, the time of 64 x 16 elements of k at 256 columns.
    cols as f64 / rate + 256.0 * 160.0 / k as f64
}

/// The one of `all`, of which there is one at least, that takes least for a product of (m, n, k):
/// by whole waves of clusters. Every one gives the same bits.
fn best(all: impl Iterator<Item = Variant>, shape: [usize; 3], clusters: u32) -> Option<Variant> {
    let cost = |v: &Variant| {
        let waves = num_pairs(v, shape).div_ceil(clusters as usize);
        waves as f64 * tile_cost(v.cols, shape[2])
    };
    all.min_by(|a, b| cost(a).total_cmp(&cost(b)))
}

fn num_pairs(v: &Variant, [m, n, _]: [usize; 3]) -> usize {
    let cols = if v.epilogue == Epilogue::SwiGlu { n / 2 } else { n };
    pairs(m.div_ceil(TILE_M), cols.div_ceil(v.width()))
}

/// The variants that launches of at most `d.m` rows take: those that are best for some numbers of
/// rows, so that no plan compiles what it never launches.
fn wanted(d: &GemmDesc, clusters: u32) -> Vec<Variant> {
    let all = variants(d).unwrap_or_default();
    let best = row_counts(d.m)
        .into_iter()
        .filter_map(|m| best(all.iter().copied(), [m, d.n, d.k], clusters));
    let mut found: Vec<Variant> = Vec::new();
    best.for_each(|v| {
        if !found.contains(&v) {
            found.push(v);
        }
    });
    found
}

/// The kernels of one description on one device.
pub(super) struct Hopper {
    ctx: CudaContext,
    desc: GemmDesc,
    /// At least one.
    kernels: Vec<(Variant, Kernel)>,
    clusters: u32,
    counters: Arc<Counters>,
}

impl Hopper {
    /// Returns why `ctx` has no such kernels; none if it has.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn lacks(ctx: &CudaContext) -> Result<Option<String>> {
        lacks_sm90(ctx, &HOPPER_GEMM)
    }

    /// Loads the kernels of a description that is not [`unfit`].
    ///
    /// # Errors
    /// As [`CudaContext::module`]; `Unsupported` if the device refuses the shared memory.
    pub fn new(ctx: &CudaContext, d: &GemmDesc, choice: GemmChoice) -> Result<Self> {
        let clusters = choice.clusters(ctx.num_sms()?, CLUSTER);
        let mut kernels = Vec::new();
        for v in wanted(d, clusters) {
            let kernel = load(ctx, &HOPPER_GEMM, v.defines())?.kernel("tw_hopper_gemm")?;
            kernel.allow_shared(v.shared_bytes())?;
            kernels.push((v, kernel));
        }
        if kernels.is_empty() {
            return Err(Error::internal("no variant of the core fits"));
        }
        Ok(Self { ctx: ctx.clone(), desc: *d, kernels, clusters, counters: Counters::of(ctx)? })
    }

    /// Returns what is used, equal in processes that use the same.
    pub fn text(&self) -> String {
        "hopper".to_owned()
    }

    /// Returns what is used, for people.
    pub fn explain(&self) -> String {
        let cols: Vec<_> = self.kernels.iter().map(|(v, _)| v.cols.to_string()).collect();
        format!(
            "the core for sm_90a ({TILE_M} rows x {} columns, {} clusters of {CLUSTER} blocks); the \
             portable kernel where an address or a row is no multiple of {ALIGN_BYTES} bytes",
            cols.join(" or "),
            self.clusters,
        )
    }

    /// Returns why it does not make this product; none if it does.
    pub fn refuses(&self, p: &Product) -> Option<String> {
        let (d, e) = (&self.desc, &self.kernels[0].0.epilogue);
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

    /// Queues a product that is not refused: one kernel.
    ///
    /// # Safety
    /// As `GemmKernels::launch`.
    ///
    /// # Errors
    /// What the driver reports.
    pub unsafe fn launch(&self, stream: &CudaStream, p: &Product) -> Result<()> {
        let (m, n, k) = p.shape;
        let shape = [m, n, k];
        let v = best(self.kernels.iter().map(|(v, _)| *v), shape, self.clusters);
        let found = self.kernels.iter().find(|(of, _)| Some(*of) == v);
        let Some((v, kernel)) = found else {
            return Err(Error::internal("a product was launched that has no variant of the core"));
        };
        let [a, b, d] = self.maps(v, p)?;
        let (num, clusters) = (num_pairs(v, shape), self.clusters as usize);
        let param = TwHopper {
            d: p.d.addr,
            bias: p.bias.addr,
            aux: p.aux.addr,
            // A cluster that has one pair of tiles needs no number.
            counter: if num > clusters { self.counters.next(stream) } else { 0 },
            ldd: p.d.ld as i64,
            ldaux: p.aux.ld as i64,
            m: m as u32,
            n: n as u32,
            k: k as u32,
            flags: bias_flag(p.bias) | if p.accumulate { ACCUMULATE } else { 0 },
        };
        let grid = Grid::new(num.min(clusters) as u32 * CLUSTER, THREADS)
            .shared(v.shared_bytes())
            .clusters([CLUSTER, 1, 1]);
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
            // A D of f32 is not described: any map will do.
            _ if v.out_f32 => of_a,
            _ => map(p.d, [1, m, n], p.d.ld, STORE_ROWS, self.desc.out),
        };
        let d = if v.out_f32 { p.a.addr } else { p.d.addr };
        // What lies there the caller answers for, as for every address of a launch.
        let any = usize::MAX;
        RawTensorMap::all(
            &self.ctx,
            [(p.a.addr, any, &of_a), (p.b.addr, any, &of_b), (d, any, &of_d)],
        )
    }
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
    use crate::gemm::Epilogue as Wanted;

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

    #[test]
    fn waves_decide_about_the_width() {
        let nt = GemmDesc::nt(8192, 8192, 8192, DType::BF16);
        let all = variants(&nt).unwrap();
        let cols: Vec<_> = all.iter().map(|v| v.cols).collect();
        assert_eq!(cols, [256, 224, 192, 128]);
        let best = |m, n, k| best(all.iter().copied(), [m, n, k], 66).unwrap().cols;
        // As measured on one H100 (docs/lab/gemm.md).
        for (m, n, k, want) in [
            (8192, 8192, 8192, 256),
            (8192, 7168, 8192, 256),
            (4096, 4096, 4096, 256),
            (2048, 7168, 8192, 224),
        ] {
            assert_eq!(best(m, n, k), want, "{m} {n} {k}");
        }
        // Few tiles: narrow ones keep more multiprocessors busy.
        assert_eq!(best(256, 8192, 4096), 128);
        // A plan loads what it may launch.
        let cols = |m| wanted(&GemmDesc { m, ..nt }, 66).iter().map(|v| v.cols).collect::<Vec<_>>();
        assert!(cols(64).len() == 1 && cols(8192).contains(&256), "{:?}", [cols(64), cols(8192)]);
    }
}
