//! The forward pass on sm_90a by wgmma and TMA (`attention/sm90_attention.cu`).

use std::sync::Arc;

use bytemuck::Zeroable;
use tilewire_core::{DType, Result};
use tilewire_device::cuda::{
    CudaContext, CudaModule, CudaStream, Grid, Kernel, LaunchArgs, MapPromotion, MapSwizzle,
    RawTensorMap, TensorMapDesc,
};
use tilewire_kernels::abi::{TwAttn, TwAttnOrder, TwSeg};
use tilewire_kernels::attention::hopper::{
    BOX_COLS, FEW, HopperVariant, SM90_ATTENTION, STORE_ROWS,
};

use crate::attention::AttentionDesc;
use crate::common::counters::Counters;
use crate::common::cuda::{lacks_sm90, load};

/// Bytes of the L2 cache that keys and values of the heads which are done together may take, of
/// the 50 MB of an H100.
pub(super) const L2_BYTES: usize = 40 << 20;

/// `TwAttn::out_type` of f16.
const OUT_F16: u32 = 1;

/// Returns why the kernel does not attend as `d` says, whatever the addresses; none if it does.
pub(super) fn unfit(d: &AttentionDesc) -> Option<String> {
    if !matches!(d.dtype, DType::BF16 | DType::F16) {
        return Some(format!("its inputs are bf16 or f16, not {}", d.dtype));
    }
    let fits = HopperVariant::DIMS.contains(&(d.dqk, d.dv));
    (!fits).then(|| format!("it has no head dimensions {} and {}", d.dqk, d.dv))
}

/// The variant for a description that is not [`unfit`].
pub(super) fn variant(d: &AttentionDesc) -> HopperVariant {
    HopperVariant { f16: d.dtype == DType::F16, dqk: d.dqk, dv: d.dv, extra: d.has_extras() }
}

/// The map of a tensor of rows of `cols` elements, `ld` apart, by boxes of `rows` of them and 128
/// bytes of columns.
pub(super) fn map(dtype: DType, cols: usize, ld: i64, rows: usize) -> TensorMapDesc {
    let size = dtype.size();
    TensorMapDesc {
        swizzle: MapSwizzle::B128,
        promotion: MapPromotion::B256,
        ..TensorMapDesc::ragged(dtype, cols, ld as usize * size, [rows, 2 * BOX_COLS / size])
    }
}

/// The maps of q, of k, of v and of out: boxes of `rows` rows of q, and of `keys` of k and v.
pub(super) fn described(
    d: &AttentionDesc,
    p: &TwAttn,
    (rows, keys): (usize, usize),
) -> [TensorMapDesc; 4] {
    let (q, kv) = (d.heads_q, d.heads_kv);
    [
        map(d.dtype, q * d.dqk, p.ld_q, rows),
        map(d.dtype, kv * d.dqk, p.ld_k, keys),
        map(d.dtype, kv * d.dv, p.ld_v, keys),
        map(stored(p), q * d.dv, p.ld_o, STORE_ROWS),
    ]
}

/// Returns the type of the maps of results. Those of f32 are stored without: any will do.
pub(super) fn stored(p: &TwAttn) -> DType {
    if p.out_type == OUT_F16 { DType::F16 } else { DType::BF16 }
}

/// The query heads that are done together: those of as many key heads as fit in L2.
pub(super) fn together(d: &AttentionDesc, tokens_kv: usize) -> u32 {
    let head = tokens_kv.max(1) * (d.dqk + d.dv) * d.dtype.size();
    let heads = (L2_BYTES / head).max(1) * (d.heads_q / d.heads_kv);
    heads.min(d.heads_q).max(1) as u32
}

/// In which order blocks take tiles; `few`: as for [`Hopper::launch`].
pub(super) fn order(
    counter: u64,
    (d, tokens_kv): (&AttentionDesc, usize),
    few: Option<[&[TwSeg]; 2]>,
) -> TwAttnOrder {
    let (heads, is_few) = (together(d, tokens_kv), u32::from(few.is_some()));
    let mut order = TwAttnOrder { counter, heads, few: is_few, ..TwAttnOrder::zeroed() };
    for (to, from) in [&mut order.own, &mut order.other].into_iter().zip(few.unwrap_or([&[]; 2])) {
        to[..from.len()].copy_from_slice(from);
    }
    order
}

/// The kernel of one description on one device.
pub(super) struct Hopper {
    ctx: CudaContext,
    variant: HopperVariant,
    kernel: Kernel,
    num_sms: u32,
    /// By which tiles are dealt out.
    counters: Arc<Counters>,
}

impl Hopper {
    /// Returns why `ctx` has no such kernel; none if it has.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn lacks(ctx: &CudaContext) -> Result<Option<String>> {
        lacks_sm90(ctx, &SM90_ATTENTION)
    }

    /// Loads the kernel of a description that is not [`unfit`], and the module that it is of.
    ///
    /// # Errors
    /// As [`CudaContext::module`]; `Unsupported` if the device refuses the shared memory.
    pub fn new(ctx: &CudaContext, d: &AttentionDesc) -> Result<(Self, CudaModule)> {
        let variant = variant(d);
        let module = load(ctx, &SM90_ATTENTION, variant.defines())?;
        let kernel = module.kernel("tw_hopper_attn_fwd")?;
        kernel.allow_shared(variant.shared_bytes())?;
        let (num_sms, counters) = (ctx.num_sms()?, Counters::of(ctx)?);
        Ok((Self { ctx: ctx.clone(), variant, kernel, num_sms, counters }, module))
    }

    /// Returns whether a launch contains these segments of queries and keys itself.
    pub fn takes_few(segs: [&[TwSeg]; 2]) -> bool {
        segs.iter().all(|s| s.len() <= FEW)
    }

    /// Returns the rows of a tile of own segments.
    pub fn rows(&self) -> u64 {
        self.variant.rows() as u64
    }

    /// Returns what is used, for people.
    pub fn name(&self) -> String {
        let v = &self.variant;
        format!("the kernel for sm_90a (tiles {}x{})", v.rows(), v.keys())
    }

    /// Queues the forward pass of tables with at least one tile: one kernel. `few`: the segments of
    /// queries and of keys, if they are not more than [`FEW`]; else those that `p` points to.
    ///
    /// # Safety
    /// `p` is that of a launch of `d`, the description of [`Hopper::new`]: its tensors have the
    /// rows and heads that it says, begin at multiples of 16 bytes, and stay until the kernel has
    /// run; its segments lie inside of them, `tokens_kv` rows of keys.
    ///
    /// # Errors
    /// What the driver reports.
    pub unsafe fn launch(
        &self,
        stream: &CudaStream,
        d: &AttentionDesc,
        (p, tokens_kv): (&TwAttn, usize),
        few: Option<[&[TwSeg]; 2]>,
    ) -> Result<()> {
        let maps = self.maps(d, p)?;
        let order = order(self.counters.next(stream), (d, tokens_kv), few);
        let blocks = u64::from(self.num_sms).min(u64::from(p.tiles) * u64::from(p.heads_q));
        let grid = Grid::new(blocks as u32, self.variant.threads());
        let grid = grid.shared(self.variant.shared_bytes());
        let args = maps.iter().fold(LaunchArgs::new().arg(p).arg(&order), LaunchArgs::raw_map);
        // SAFETY: `tw_hopper_attn_fwd` takes (TwAttn, TwAttnOrder, 4 x TwTensorMap); the caller's
        // contract for what they describe. `counter` is none, or words that are zero and that no
        // other launch uses meanwhile.
        unsafe { self.kernel.launch(stream, grid, args) }
    }

    /// The tensor maps of q, k, v and out, as `attention/sm90_attention.cu` wants them.
    fn maps(&self, d: &AttentionDesc, p: &TwAttn) -> Result<[RawTensorMap; 4]> {
        let [q, k, v, out] = described(d, p, (self.variant.rows(), self.variant.keys()));
        // Without a row of keys they have no address, and nothing is read.
        let or_q = |addr: u64| if addr == 0 { p.q } else { addr };
        let any = usize::MAX;
        let all = [(p.q, any, &q), (or_q(p.k), any, &k), (or_q(p.v), any, &v), (p.out, any, &out)];
        RawTensorMap::all(&self.ctx, all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::{AttnMask, BiasShape, Dropout};

    #[test]
    fn what_the_kernel_is_not_asked_for_has_a_reason() {
        const BIAS: BiasShape = BiasShape { heads: 1, sq: 300, skv: 300 };
        let of = |d, dtype| AttentionDesc::new(300, (4, 2), d, dtype, AttnMask::CAUSAL);
        let d = of(128, DType::BF16);
        for good in [
            d.clone(),
            of(64, DType::F16),
            of(256, DType::BF16),
            AttentionDesc { dv: 128, ..of(192, DType::BF16) },
            AttentionDesc { sink: true, out: DType::F32, ..d.clone() },
            AttentionDesc { mask: AttnMask::window(70, 3), ..d.clone() },
            AttentionDesc { softcap: Some(3.0), ..d.clone() },
            AttentionDesc { bias: Some(BIAS), ..d.clone() },
            AttentionDesc { dropout: Some(Dropout { p: 0.1, seed: 1 }), ..d.clone() },
            AttentionDesc { scale: -0.1, ..d.clone() },
        ] {
            assert_eq!(unfit(&good), None, "{good}");
        }
        for (bad, why) in [
            (of(128, DType::F32), "f32"),
            (of(128, DType::F8E4M3), "e4m3"),
            (of(80, DType::BF16), "80 and 80"),
            (AttentionDesc { dv: 64, ..d.clone() }, "128 and 64"),
        ] {
            assert!(unfit(&bad).is_some_and(|w| w.contains(why)), "{bad}: {:?}", unfit(&bad));
        }
    }

    #[test]
    fn heads_are_done_together_whose_keys_fit_in_l2() {
        let d = AttentionDesc::new(8, (32, 8), 128, DType::BF16, AttnMask::CAUSAL);
        // 512 bytes of a row of keys and values: 8 MiB of 16384 rows.
        let of = |tokens| together(&d, tokens);
        assert_eq!([of(0), of(4096), of(16384), of(1 << 20)], [32, 32, 20, 4]);
    }
}
