//! Products of groups on sm_90a by wgmma and TMA (`hopper/sm90_grouped_gemm.cu`): choice of
//! variants, and launches.

use std::sync::{Arc, Mutex, PoisonError};

use tilewire_core::{DType, Error, ErrorKind, Result};
use tilewire_device::cuda::{
    CudaContext, CudaMemory, CudaStream, Grid, Kernel, LaunchArgs, MapPromotion, MapSwizzle,
    RawTensorMap, TensorMapDesc,
};
use tilewire_kernels::abi::{TwGrouped, TwHopper, TwHopperGrouped};
use tilewire_kernels::hopper::{
    BOX_COLS, CLUSTER, D_HAS_MAP, Epilogue, HOPPER_GROUPED_GEMM, Order, STORE_ROWS, THREADS,
    TILE_K, TILE_M, Variant, fits_sum_rows, pairs,
};

use crate::common::counters::Counters;
use crate::common::cuda::{hold, lacks_sm90, load, map_of_sums};
use crate::common::kernel::GemmChoice;
use crate::gemm::Activation;
use crate::grouped_gemm::GroupedDesc;

/// Addresses, and rows that tensor maps describe, are multiples of this.
const ALIGN_BYTES: usize = 16;
/// Features of 16 bits that it takes.
const UNIT: usize = 8;

/// A pass of a plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Pass {
    Fprop,
    Dgrad,
    Wgrad,
}

impl Pass {
    const ALL: [Pass; 3] = [Pass::Fprop, Pass::Dgrad, Pass::Wgrad];

    fn order(self) -> Order {
        match self {
            Pass::Fprop => Order::Nt,
            Pass::Dgrad => Order::Nn,
            Pass::Wgrad => Order::Tn,
        }
    }

    /// Rows, columns and contraction of the product of one group, with `d.capacity` rows of all
    /// groups shared equally.
    fn shape(self, d: &GroupedDesc) -> [usize; 3] {
        let rows = d.capacity.div_ceil(d.groups.max(1));
        match self {
            Pass::Fprop => [rows, d.n, d.k],
            Pass::Dgrad => [rows, d.k, d.n],
            Pass::Wgrad => [d.n, d.k, rows],
        }
    }

    /// The type of the results.
    fn out(self, d: &GroupedDesc) -> DType {
        if self == Pass::Wgrad { d.grad } else { d.out }
    }
}

/// Returns why the core cannot make the products of `d`, whatever the addresses; none if it can.
pub(super) fn unfit(d: &GroupedDesc) -> Option<String> {
    if !matches!(d.dtype, DType::BF16 | DType::F16) {
        return Some(format!("its operands are bf16 or f16, not {}", d.dtype));
    }
    let act = d.activation;
    if d.out != d.dtype && (d.out != DType::F32 || act != Activation::None) {
        return Some(format!("it has no {} results of {}", d.out, d.dtype));
    }
    if ![d.dtype, DType::F32].contains(&d.grad) {
        return Some(format!("it has no {} gradients of {}", d.grad, d.dtype));
    }
    if d.n == 0 || d.k == 0 {
        return Some("the products are empty".to_owned());
    }
    let n = if act == Activation::SwiGlu { 2 * UNIT } else { UNIT };
    if !d.n.is_multiple_of(n) || !d.k.is_multiple_of(UNIT) {
        return Some(format!(
            "its features are multiples of {UNIT} (n: of {n}), and there are {} x {}",
            d.n, d.k
        ));
    }
    // A row of the ragged maps is at most as long as this, too: see `TensorMapDesc::ragged`.
    (d.capacity > TensorMapDesc::RAGGED_ROWS).then(|| "there are too many rows".to_owned())
}

/// The widths of tiles that a pass may have: 128 columns where 256 leave multiprocessors without
/// a tile. Pure: every rank takes the same.
fn cols(pass: Pass, d: &GroupedDesc, clusters: u32) -> usize {
    let [m, n, _] = pass.shape(d);
    let wide = d.groups * pairs(m.div_ceil(TILE_M), n.div_ceil(256));
    if wide < clusters as usize { 128 } else { 256 }
}

/// The variants that a pass may launch: without anything that is added, and with it.
fn variants(pass: Pass, d: &GroupedDesc, clusters: u32) -> Vec<Variant> {
    let activation = match d.activation {
        _ if pass != Pass::Fprop => None,
        Activation::Relu => Some(Epilogue::Relu),
        Activation::Gelu => Some(Epilogue::Gelu),
        Activation::SwiGlu => Some(Epilogue::SwiGlu),
        _ => None,
    };
    let epilogues = match (activation, pass) {
        (Some(e), _) => vec![e],
        (None, Pass::Dgrad) => vec![Epilogue::Plain],
        (None, _) => vec![Epilogue::Plain, Epilogue::Linear],
    };
    let of = |epilogue| Variant {
        order: pass.order(),
        f16: d.dtype == DType::F16,
        out_f32: pass.out(d) == DType::F32,
        epilogue,
        cols: if epilogue == Epilogue::Plain { cols(pass, d, clusters) } else { 256 },
    };
    epilogues.into_iter().map(of).collect()
}

/// The kernels of one description on one device.
pub(super) struct Hopper {
    ctx: CudaContext,
    desc: GroupedDesc,
    kernels: Vec<(Pass, Variant, Kernel)>,
    clusters: u32,
    counters: Arc<Counters>,
    /// By use, the latest at the end.
    tables: Mutex<Vec<Arc<Table>>>,
}

/// Lists of tensors whose maps a plan keeps.
const MOST_TABLES: usize = 16;
/// Bytes of a tensor map.
const MAP_BYTES: usize = 128;

/// The tensor maps of the weights of each group, or of their gradients, and behind them their
/// addresses.
struct Table {
    pass: Pass,
    /// Of the boxes.
    rows: usize,
    list: Vec<u64>,
    num_maps: usize,
    memory: CudaMemory,
}

impl Table {
    fn maps(&self) -> u64 {
        if self.num_maps == 0 { 0 } else { self.memory.addr() }
    }

    fn addresses(&self) -> u64 {
        self.memory.addr() + (self.num_maps * MAP_BYTES) as u64
    }
}

impl Hopper {
    /// Returns why `ctx` has no such kernels; none if it has.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn lacks(ctx: &CudaContext) -> Result<Option<String>> {
        lacks_sm90(ctx, &HOPPER_GROUPED_GEMM)
    }

    /// Loads the kernels of a description that is not [`unfit`].
    ///
    /// # Errors
    /// As [`CudaContext::module`]; `Unsupported` if the device refuses the shared memory.
    pub fn new(ctx: &CudaContext, d: &GroupedDesc, choice: GemmChoice) -> Result<Self> {
        let clusters = choice.clusters(ctx.num_sms()?, CLUSTER);
        let mut kernels = Vec::new();
        for pass in Pass::ALL {
            for v in variants(pass, d, clusters) {
                let module = load(ctx, &HOPPER_GROUPED_GEMM, v.defines())?;
                let kernel = module.kernel("tw_hopper_grouped")?;
                kernel.allow_shared(v.grouped_shared_bytes())?;
                kernels.push((pass, v, kernel));
            }
        }
        Ok(Self {
            ctx: ctx.clone(),
            desc: *d,
            kernels,
            clusters,
            counters: Counters::of(ctx)?,
            tables: Mutex::default(),
        })
    }

    /// Returns what is used, for people.
    pub fn explain(&self) -> String {
        let cols =
            |pass| self.kernels.iter().find(|(p, ..)| *p == pass).map_or(0, |(_, v, _)| v.cols);
        let [fprop, dgrad, wgrad] = Pass::ALL.map(cols);
        format!(
            "the core for sm_90a ({TILE_M} rows x {fprop}, {dgrad} and {wgrad} columns forward, of \
             dX and of dW, {} clusters of {CLUSTER} blocks); the portable kernels where an \
             address is no multiple of {ALIGN_BYTES} bytes",
            self.clusters,
        )
    }

    /// Returns why it does not make these products; none if it does.
    fn refuses(&self, p: &TwGrouped, list: &[u64]) -> Option<String> {
        if p.g.aux != 0 && self.desc.activation == Activation::None {
            return Some("it stores no pre-activation where no activation follows".to_owned());
        }
        let all = [
            ("A", p.g.a),
            ("B", p.g.b),
            ("the result", p.g.d),
            ("the bias", p.g.bias),
            ("the pre-activation", p.g.aux),
        ];
        let each = list.iter().map(|addr| ("a tensor of one group", *addr));
        let odd = all.into_iter().chain(each).find(|(_, a)| !a.is_multiple_of(ALIGN_BYTES as u64));
        odd.map(|(name, _)| format!("{name} does not start at a multiple of {ALIGN_BYTES} bytes"))
    }

    /// Queues one kernel, or returns why it does not make these products. `list`: the weights, or
    /// by wgrad the results, of each group, if they are no packed tensor.
    ///
    /// # Safety
    /// `p` must be what `sm80_grouped_gemm.cu` takes for this pass of the description, but for the
    /// list; its addresses, and those of the list, must be mapped on the stream's device until the
    /// work has run.
    ///
    /// # Errors
    /// `NotPrepared` for a list that is new during a capture; what the driver reports.
    pub unsafe fn launch(
        &self,
        stream: &CudaStream,
        pass: Pass,
        p: &TwGrouped,
        list: Option<&[u64]>,
    ) -> Result<Option<String>> {
        if let Some(why) = self.refuses(p, list.unwrap_or_default()) {
            return Ok(Some(why));
        }
        let adds = p.g.bias != 0 || p.accumulate != 0;
        let fits = |v: &Variant| match v.epilogue {
            Epilogue::Plain => !adds && p.g.aux == 0,
            _ => true,
        };
        let found = self.kernels.iter().find(|(of, v, _)| *of == pass && fits(v));
        let Some((_, v, kernel)) = found else {
            return Err(Error::internal("a pass was launched that has no variant of the core"));
        };
        let by_map = pass == Pass::Wgrad && v.out_f32 && adds && adds_by_map(&self.desc, p.g.d);
        let product = TwHopper {
            d: p.g.d,
            bias: p.g.bias,
            aux: p.g.aux,
            counter: self.counters.next(stream),
            ldd: p.g.ldd,
            ldaux: p.g.ldaux,
            m: p.g.m,
            n: p.g.n,
            k: p.g.k,
            flags: p.g.flags | if by_map { D_HAS_MAP } else { 0 },
            // Sums of groups are whole.
            parts: 0,
            steps: 0,
        };
        let mut param = TwHopperGrouped {
            g: product,
            splits: p.splits,
            status: p.status,
            accumulate: p.accumulate,
            stride: p.stride,
            groups: p.groups,
            pad: 0,
            maps: 0,
            addresses: 0,
        };
        if let Some(list) = list {
            let table = self.table(stream, (pass, v), list)?;
            (param.maps, param.addresses) = (table.maps(), table.addresses());
            hold(stream, table);
        }
        let [a, b, d] = self.maps((pass, v), by_map, p)?;
        let grid = Grid::new(self.num_clusters(pass, v) * CLUSTER, THREADS)
            .shared(v.grouped_shared_bytes())
            .clusters([CLUSTER, 1, 1]);
        let args = LaunchArgs::new().arg(&param).raw_map(&a).raw_map(&b).raw_map(&d);
        // SAFETY: `tw_hopper_grouped` takes (TwHopperGrouped, TwTensorMap, TwTensorMap,
        // TwTensorMap); the caller's contract for what they describe.
        unsafe { kernel.launch(stream, grid, args) }?;
        Ok(None)
    }

    /// The tensor maps of a list of tensors, which are made when it is first seen and never change:
    /// every stream, and every graph, may use them.
    fn table(
        &self,
        stream: &CudaStream,
        (pass, v): (Pass, &Variant),
        list: &[u64],
    ) -> Result<Arc<Table>> {
        let mut all = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        let rows = v.b_rows();
        let known = |t: &Arc<Table>| (t.pass, t.rows) == (pass, rows) && t.list == list;
        if let Some(at) = all.iter().position(known) {
            let table = all.remove(at);
            all.push(table.clone());
            return Ok(table);
        }
        if stream.key().is_captured() {
            return Err(Error::new(
                ErrorKind::NotPrepared,
                "a list of tensors, one for each group, is new during a capture",
            )
            .hint("launch once with these tensors before the capture, or pack them into one"));
        }
        let table = Arc::new(self.new_table((pass, v), list)?);
        if all.len() >= MOST_TABLES {
            // The one that was not used for longest; launches and graphs hold what they use.
            drop(all.remove(0));
        }
        all.push(table.clone());
        Ok(table)
    }

    fn new_table(&self, (pass, v): (Pass, &Variant), list: &[u64]) -> Result<Table> {
        let d = &self.desc;
        let rows = v.b_rows();
        let own = match pass {
            Pass::Wgrad if v.out_f32 => map_of_sums([d.n, d.k], d.k),
            Pass::Wgrad => planes(d.grad, [1, d.n, d.k], STORE_ROWS),
            _ => planes(d.dtype, [1, d.n, d.k], rows),
        };
        // Gradients of f32 have maps where they are added to by them.
        let none = pass == Pass::Wgrad && v.out_f32 && !adds_by_map(d, 0);
        let num_maps = if none { 0 } else { list.len() };
        let mut bytes = Vec::with_capacity(num_maps * MAP_BYTES + 8 * list.len());
        for addr in &list[..num_maps] {
            bytes.extend(RawTensorMap::at(&self.ctx, *addr, usize::MAX, &own)?.to_bytes());
        }
        bytes.extend(list.iter().flat_map(|addr| addr.to_ne_bytes()));
        let memory = CudaMemory::from_bytes(&self.ctx, &bytes)?;
        Ok(Table { pass, rows, list: list.to_vec(), num_maps, memory })
    }

    /// As many clusters as there may be pairs of tiles, whatever the splits, up to all.
    fn num_clusters(&self, pass: Pass, v: &Variant) -> u32 {
        let d = &self.desc;
        let [m, n, _] = pass.shape(d);
        let n = if v.epilogue == Epilogue::SwiGlu { n / 2 } else { n };
        let tiles_n = n.div_ceil(v.width());
        let most = match pass {
            Pass::Wgrad => d.groups * pairs(m.div_ceil(TILE_M), tiles_n),
            // Each group may end with a row of tiles of its own.
            _ => (d.capacity / TILE_M + d.groups) * tiles_n,
        };
        most.clamp(1, self.clusters as usize) as u32
    }

    /// The tensor maps of A, B and D, as `hopper/sm90_grouped_gemm.cu` wants them. `by_map`: D is
    /// f32, and is added to by its map.
    fn maps(
        &self,
        (pass, v): (Pass, &Variant),
        by_map: bool,
        p: &TwGrouped,
    ) -> Result<[RawTensorMap; 3]> {
        let (d, t) = (&self.desc, self.desc.dtype);
        let cols = d.out_cols();
        let [of_a, of_b, of_d] = match pass {
            Pass::Fprop => [
                ragged(t, d.k, TILE_K),
                planes(t, [d.groups, d.n, d.k], v.b_rows()),
                ragged(d.out, cols, STORE_ROWS),
            ],
            Pass::Dgrad => [
                ragged(t, d.n, TILE_K),
                planes(t, [d.groups, d.n, d.k], v.b_rows()),
                ragged(d.out, d.k, STORE_ROWS),
            ],
            Pass::Wgrad => {
                let of_d = match by_map {
                    true => map_of_sums([d.groups.max(1) * d.n, d.k], d.k),
                    false => planes(d.grad, [d.groups, d.n, d.k], STORE_ROWS),
                };
                [ragged(t, d.n, TILE_K), ragged(t, d.k, TILE_K), of_d]
            }
        };
        // Another D of f32 is not described: any map will do.
        let (of_d, at_d) = if v.out_f32 && !by_map { (of_a, p.g.a) } else { (of_d, p.g.d) };
        // What lies there the caller answers for, as for every address of a launch. A tensor
        // without elements may be nowhere, which no map describes: nothing of it is read.
        let at = |addr: u64| if addr == 0 { self.counters.addr() } else { addr };
        let any = usize::MAX;
        RawTensorMap::all(
            &self.ctx,
            [(at(p.g.a), any, &of_a), (at(p.g.b), any, &of_b), (at(at_d), any, &of_d)],
        )
    }
}

/// Returns whether f32 gradients, of which those of the first group lie at `addr`, are added to by
/// their map.
fn adds_by_map(d: &GroupedDesc, addr: u64) -> bool {
    fits_sum_rows(addr, [d.n, d.k], d.k)
}

/// Boxes of `rows` x 64 elements of packed rows of `cols`.
fn ragged(dtype: DType, cols: usize, rows: usize) -> TensorMapDesc {
    TensorMapDesc {
        swizzle: MapSwizzle::B128,
        promotion: MapPromotion::B256,
        ..TensorMapDesc::ragged(dtype, cols, cols * dtype.size(), [rows, BOX_COLS])
    }
}

/// Boxes of `rows` x 64 elements of one matrix of `shape[0]`.
fn planes(dtype: DType, shape: [usize; 3], rows: usize) -> TensorMapDesc {
    let row = shape[2] * dtype.size();
    TensorMapDesc {
        dtype,
        shape: [shape[0].max(1), shape[1], shape[2]].into(),
        strides_bytes: [shape[1] * row, row].into(),
        tile: [1, rows, BOX_COLS].into(),
        swizzle: MapSwizzle::B128,
        promotion: MapPromotion::B256,
        wraps: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_groups_that_the_core_does_not_make_have_a_reason() {
        let d = GroupedDesc::new(4, 100, 64, 72, DType::BF16);
        let with = |activation| GroupedDesc { activation, ..d };
        for good in [
            d,
            with(Activation::SwiGlu),
            GroupedDesc { out: DType::F32, grad: DType::BF16, ..d },
            GroupedDesc::new(0, 0, 8, 8, DType::F16),
        ] {
            assert_eq!(unfit(&good), None, "{good:?}");
            for pass in Pass::ALL {
                let all = variants(pass, &good, 66);
                let known = Variant::all_grouped();
                assert!(!all.is_empty() && all.iter().all(|v| known.contains(v)), "{all:?}");
            }
        }
        for (bad, why) in [
            (GroupedDesc::new(4, 100, 64, 72, DType::F32), "f32"),
            (GroupedDesc { out: DType::F16, ..d }, "f16 results"),
            (GroupedDesc { out: DType::F32, ..with(Activation::Gelu) }, "f32 results"),
            (GroupedDesc { grad: DType::F16, ..d }, "f16 gradients"),
            (GroupedDesc { n: 72, ..with(Activation::SwiGlu) }, "of 16"),
            (GroupedDesc { k: 73, ..d }, "64 x 73"),
            (GroupedDesc { k: 0, ..d }, "empty"),
            (GroupedDesc { capacity: (1 << 30) + 1, ..d }, "too many"),
        ] {
            assert!(unfit(&bad).is_some_and(|w| w.contains(why)), "{bad:?}: {:?}", unfit(&bad));
        }
    }

    #[test]
    fn gradients_whose_rows_fill_boxes_are_added_to_by_map() {
        let of = |n, addr| adds_by_map(&GroupedDesc::new(4, 100, n, 72, DType::BF16), addr);
        assert!(of(64, 0) && of(16, 1 << 20) && !of(72, 0) && !of(64, 8));
    }

    #[test]
    fn few_tiles_are_narrow() {
        let d = |groups, capacity, n, k| GroupedDesc::new(groups, capacity, n, k, DType::BF16);
        let large = d(32, 32768, 4096, 7168);
        assert_eq!(Pass::ALL.map(|p| cols(p, &large, 66)), [256; 3]);
        assert_eq!(Pass::ALL.map(|p| cols(p, &d(2, 256, 512, 8192), 66)), [128, 128, 256]);
    }
}
