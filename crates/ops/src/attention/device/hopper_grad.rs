//! The backward pass on sm_90a by wgmma and TMA (`attention/sm90_attention_bwd.cu`).

use std::sync::Arc;

use bytemuck::Zeroable;

use tilewire_core::{DType, Result};
use tilewire_device::cuda::{
    CudaContext, CudaStream, Grid, Kernel, LaunchArgs, RawTensorMap, TensorMapDesc,
};
use tilewire_kernels::abi::{TwAttn, TwAttnOrder};
use tilewire_kernels::attention::hopper::{
    HopperGrad, SM90_ATTENTION_BWD, STORE_ROWS, THREADS, TILE_M,
};

use super::hopper::{self, L2_BYTES, map, stored, together};
use crate::attention::AttentionDesc;
use crate::common::counters::Counters;
use crate::common::cuda::load;

/// Returns why the kernels do not make the gradients of `d`, whatever the addresses; none if they
/// do.
pub(super) fn unfit(d: &AttentionDesc) -> Option<String> {
    let fits = HopperGrad::DIMS.contains(&(d.dqk, d.dv));
    hopper::unfit(d).or_else(|| {
        if !fits {
            return Some(format!("they have no head dimensions {} and {}", d.dqk, d.dv));
        }
        (d.out != d.dtype).then(|| format!("their gradients are {}, not {}", d.dtype, d.out))
    })
}

/// The variant for a description that is not [`unfit`].
pub(super) fn variant(d: &AttentionDesc) -> HopperGrad {
    HopperGrad::of(d.dtype == DType::F16, (d.dqk, d.dv), d.has_extras())
}

/// The key heads that are done together: those of as many query heads as fit in L2.
pub(super) fn keys_together(d: &AttentionDesc, tokens_q: usize) -> u32 {
    let group = d.heads_q / d.heads_kv;
    let head = tokens_q.max(1) * (d.dqk + d.dv) * d.dtype.size() * group;
    (L2_BYTES / head).clamp(1, d.heads_kv) as u32
}

/// The kernels of one description on one device.
pub(super) struct Gradients {
    ctx: CudaContext,
    variant: HopperGrad,
    pub delta: Kernel,
    dq: Kernel,
    /// Of dk and dv, together or one after the other.
    dkv: Vec<Kernel>,
    num_sms: u32,
    /// By which tiles are dealt out.
    counters: Arc<Counters>,
}

impl Gradients {
    /// Loads the kernels of a description that is not [`unfit`], for a device that
    /// [lacks](hopper::Hopper::lacks) nothing.
    ///
    /// # Errors
    /// As [`CudaContext::module`]; `Unsupported` if the device refuses the shared memory.
    pub fn new(ctx: &CudaContext, d: &AttentionDesc) -> Result<Self> {
        let variant = variant(d);
        let m = load(ctx, &SM90_ATTENTION_BWD, variant.defines())?;
        let (delta, dq) = (m.kernel("tw_attn_delta")?, m.kernel("tw_hopper_attn_dq")?);
        dq.allow_shared(variant.dq_shared_bytes())?;
        let of_keys = |name: &&'static str| {
            let kernel = m.kernel(name)?;
            kernel.allow_shared(variant.dkv_shared_bytes()).map(|()| kernel)
        };
        let dkv = variant.of_keys().iter().map(of_keys).collect::<Result<_>>()?;
        let (num_sms, counters) = (ctx.num_sms()?, Counters::of(ctx)?);
        Ok(Self { ctx: ctx.clone(), variant, delta, dq, dkv, num_sms, counters })
    }

    /// Returns the rows of a tile of own segments.
    pub fn rows(&self) -> u64 {
        TILE_M as u64
    }

    /// Returns what is used, for people.
    pub fn name(&self) -> String {
        let (keys, queries) = (self.variant.keys.rows, self.variant.queries.rows);
        format!("the kernels for sm_90a (dq {TILE_M}x{keys}, dk and dv {queries}x{TILE_M})")
    }

    /// Queues dq of tables with at least one tile of queries: one kernel.
    ///
    /// # Safety
    /// `p` is that of a launch of `d`, the description of [`Gradients::new`]: its tensors have the
    /// rows and heads that it says, begin at multiples of 16 bytes, and stay until the kernel has
    /// run, `delta` among them; its own segments are of queries, the others of keys, of which there
    /// are `tokens_kv`, and lie inside of them.
    ///
    /// # Errors
    /// What the driver reports.
    pub unsafe fn launch_dq(
        &self,
        stream: &CudaStream,
        d: &AttentionDesc,
        (p, tokens_kv): (&TwAttn, usize),
    ) -> Result<()> {
        let rows = self.variant.keys.rows;
        let (q, d_out) = queries(d, p, TILE_M);
        let (k, v) = keys(d, p, rows);
        let dq = map(stored(p), d.heads_q * d.dqk, p.ld_q, STORE_ROWS);
        // Without a row of keys they have no address, and nothing is read.
        let or_q = |addr: u64| if addr == 0 { p.q } else { addr };
        let of = [(p.q, q), (p.d_out, d_out), (or_q(p.k), k), (or_q(p.v), v), (p.dq, dq)];
        let heads = (together(d, tokens_kv), p.heads_q);
        // SAFETY: `tw_hopper_attn_dq` takes (TwAttn, TwAttnOrder, 5 x TwTensorMap); the caller's
        // contract for what they describe.
        unsafe { self.launch(stream, &self.dq, self.variant.dq_shared_bytes(), p, heads, of) }
    }

    /// Queues dk and dv of tables with at least one tile of keys: one kernel, or one for each.
    ///
    /// # Safety
    /// As [`Gradients::launch_dq`], with own segments of keys, and others of `tokens_q` queries.
    ///
    /// # Errors
    /// What the driver reports.
    pub unsafe fn launch_dkv(
        &self,
        stream: &CudaStream,
        d: &AttentionDesc,
        (p, tokens_q): (&TwAttn, usize),
    ) -> Result<()> {
        let of = maps_of_keys(d, p, self.variant.queries.rows);
        let heads = (keys_together(d, tokens_q), p.heads_kv);
        let shared = self.variant.dkv_shared_bytes();
        // SAFETY: `tw_hopper_attn_dkv`, `_dk` and `_dv` take (TwAttn, TwAttnOrder, 6 x
        // TwTensorMap); the caller's contract for what they describe.
        self.dkv.iter().try_for_each(|k| unsafe { self.launch(stream, k, shared, p, heads, of) })
    }

    /// Queues a kernel of so many heads: those that are done together, and all.
    ///
    /// # Safety
    /// It takes (TwAttn, TwAttnOrder, N x TwTensorMap), and `p` and the maps are as it wants them.
    unsafe fn launch<const N: usize>(
        &self,
        stream: &CudaStream,
        kernel: &Kernel,
        shared: u32,
        p: &TwAttn,
        (together, heads): (u32, u32),
        maps: [(u64, TensorMapDesc); N],
    ) -> Result<()> {
        let maps =
            RawTensorMap::all(&self.ctx, maps.each_ref().map(|(at, m)| (*at, usize::MAX, m)))?;
        let counter = self.counters.next(stream);
        let order = TwAttnOrder { counter, heads: together, ..TwAttnOrder::zeroed() };
        let blocks = u64::from(self.num_sms).min(u64::from(p.tiles) * u64::from(heads));
        let grid = Grid::new(blocks as u32, THREADS).shared(shared);
        let args = maps.iter().fold(LaunchArgs::new().arg(p).arg(&order), LaunchArgs::raw_map);
        // SAFETY: the caller's contract. `counter` is none, or words that are zero and that no
        // other launch uses meanwhile.
        unsafe { kernel.launch(stream, grid, args) }
    }
}

/// The maps of a kernel that has tiles of keys, and visits `rows` queries at once: of k, v, q,
/// d_out, dk and dv.
pub(super) fn maps_of_keys(
    d: &AttentionDesc,
    p: &TwAttn,
    rows: usize,
) -> [(u64, TensorMapDesc); 6] {
    let (k, v) = keys(d, p, TILE_M);
    let (q, d_out) = queries(d, p, rows);
    let [dk, dv] = [(d.dqk, p.ld_k), (d.dv, p.ld_v)]
        .map(|(dim, ld)| map(stored(p), d.heads_kv * dim, ld, STORE_ROWS));
    // Without a query they have no address, and nothing is read.
    let or_k = |addr: u64| if addr == 0 { p.k } else { addr };
    let (at_q, at_d) = (or_k(p.q), or_k(p.d_out));
    [(p.k, k), (p.v, v), (at_q, q), (at_d, d_out), (p.dk, dk), (p.dv, dv)]
}

/// The maps of q and d_out, by boxes of `rows` of them.
fn queries(d: &AttentionDesc, p: &TwAttn, rows: usize) -> (TensorMapDesc, TensorMapDesc) {
    let of = |dim, ld| map(d.dtype, d.heads_q * dim, ld, rows);
    (of(d.dqk, p.ld_q), of(d.dv, p.ld_o))
}

/// The maps of k and v, by boxes of `rows` of them.
fn keys(d: &AttentionDesc, p: &TwAttn, rows: usize) -> (TensorMapDesc, TensorMapDesc) {
    let of = |dim, ld| map(d.dtype, d.heads_kv * dim, ld, rows);
    (of(d.dqk, p.ld_k), of(d.dv, p.ld_v))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::AttnMask;

    #[test]
    fn what_the_kernels_are_not_asked_for_has_a_reason() {
        let of = |d, dtype| AttentionDesc::new(300, (4, 2), d, dtype, AttnMask::CAUSAL);
        let d = of(128, DType::BF16);
        let wide = AttentionDesc { dv: 128, ..of(192, DType::BF16) };
        let widest = of(256, DType::BF16);
        let sink = AttentionDesc { sink: true, ..d.clone() };
        let extra = AttentionDesc { softcap: Some(3.0), ..d.clone() };
        for good in [d.clone(), of(64, DType::F16), wide, widest, sink, extra] {
            assert_eq!(unfit(&good), None, "{good}");
        }
        for (bad, why) in [
            (of(80, DType::BF16), "80 and 80"),
            (AttentionDesc { out: DType::F32, ..d.clone() }, "bf16, not f32"),
        ] {
            assert!(unfit(&bad).is_some_and(|w| w.contains(why)), "{bad}: {:?}", unfit(&bad));
        }
    }

    #[test]
    fn key_heads_are_done_together_whose_queries_fit_in_l2() {
        let d = AttentionDesc::new(8, (32, 8), 128, DType::BF16, AttnMask::CAUSAL);
        // 512 bytes of a row of queries and gradients of each of 4 heads: 8 MiB of 4096 rows.
        let of = |tokens| keys_together(&d, tokens);
        assert_eq!([of(0), of(4096), of(16384), of(1 << 20)], [8, 5, 1, 1]);
    }
}
