//! All gradients on sm_90a by one kernel (`attention/sm90_attention_grads.cu`).

use tilewire_core::{DType, Result};
use tilewire_device::cuda::{CudaContext, CudaStream, Grid, Kernel, LaunchArgs, RawTensorMap};
use tilewire_kernels::abi::{TwAttn, TwDqSums};
use tilewire_kernels::attention::hopper::{THREADS, TILE_M};
use tilewire_kernels::attention::hopper_fused::{
    FUSED_ROWS, HopperFused, SM90_ATTENTION_GRADS, SUMS_THREADS,
};

use super::hopper_grad::maps_of_keys;
use super::space::{Sums, SumsSizes};
use crate::attention::AttentionDesc;
use crate::common::cuda::load;

/// Returns why the kernel does not make the gradients of `d`, which those for sm_90a make; none if
/// it does.
pub(super) fn unfit(d: &AttentionDesc) -> Option<String> {
    if !HopperFused::fits(d.dqk, d.dv) {
        return Some(format!("its head dimensions are {} and {}", d.dqk, d.dv));
    }
    let why = "it has a softcap, a bias, dropout or a scale that is not positive";
    d.has_extras().then(|| why.to_owned())
}

/// The key heads that are done together, of `tiles` tiles of keys each: of a sequence where there
/// are turns, as each has its own, else of all. One whose tiles fill the multiprocessors is faster
/// than more of them, whose queries and sums of dq leave L2, if many heads follow; else it is as
/// many heads as give each multiprocessor two tiles (docs/lab/attention.md).
fn heads_together(tiles: u32, heads: u32, num_sms: u32) -> u32 {
    if 10 * tiles >= 9 * num_sms && tiles * heads >= 4 * num_sms {
        return 1;
    }
    (19 * num_sms / 10).div_ceil(tiles.max(1)).next_power_of_two().min(heads).max(1)
}

/// The kernels of one description on one device.
pub(super) struct Fused {
    ctx: CudaContext,
    variant: HopperFused,
    grads: Kernel,
    dq_of_sums: Kernel,
    num_sms: u32,
}

impl Fused {
    /// Loads the kernels of a description that is not [`unfit`]; `unordered`: those that add dq in
    /// any order.
    ///
    /// # Errors
    /// As [`CudaContext::module`]; `Unsupported` if the device refuses the shared memory.
    pub fn new(ctx: &CudaContext, d: &AttentionDesc, unordered: bool) -> Result<Self> {
        let variant = HopperFused::of(d.dtype == DType::F16);
        let variant = if unordered { variant.unordered() } else { variant };
        let m = load(ctx, &SM90_ATTENTION_GRADS, variant.defines())?;
        let (grads, dq_of_sums) =
            (m.kernel("tw_hopper_attn_grads")?, m.kernel("tw_attn_dq_of_sums")?);
        grads.allow_shared(variant.shared_bytes())?;
        Ok(Self { ctx: ctx.clone(), variant, grads, dq_of_sums, num_sms: ctx.num_sms()? })
    }

    /// Returns what launches of at most `tokens_q` rows in `segs` segments need beside tensors.
    pub fn sums(d: &AttentionDesc, tokens_q: usize, segs: usize) -> SumsSizes {
        let words = HopperFused::words(tokens_q / TILE_M + segs, d.heads_q);
        SumsSizes { elements: tokens_q * d.heads_q * d.dqk, words }
    }

    /// Queues dq, dk and dv: a kernel that makes all, and one that rounds dq. `keys` has own
    /// segments of keys, and those of queries as others; `queries` the other way round.
    ///
    /// # Safety
    /// `keys` and `queries` are of one launch of `d`, the description of [`Fused::new`]: its
    /// tensors have the rows and heads that it says, begin at multiples of 16 bytes, and stay until
    /// the kernels have run, `delta` among them; all segments lie inside of them, and have the
    /// numbers of tiles of [`TILE_M`] rows. `sums` has the [sizes](Fused::sums) for these rows and
    /// segments, and no other launch uses it meanwhile.
    ///
    /// # Errors
    /// What the driver reports.
    pub unsafe fn launch(
        &self,
        stream: &CudaStream,
        d: &AttentionDesc,
        (keys, queries): (&TwAttn, &TwAttn),
        sums: &Sums,
    ) -> Result<()> {
        let to = TwDqSums { sums: sums.sums.addr(), words: sums.words.addr() };
        let unordered = self.variant.unordered;
        if unordered {
            let bytes = 4 * keys.tokens_q as usize * d.heads_q * d.dqk;
            // SAFETY: the sums of so many rows, which are this launch's alone (the caller's
            // contract).
            unsafe { stream.fill(to.sums, 0, bytes)? }
        }
        if keys.tiles > 0 {
            let maps = maps_of_keys(d, keys, FUSED_ROWS);
            let maps =
                RawTensorMap::all(&self.ctx, maps.each_ref().map(|(at, m)| (*at, usize::MAX, m)))?;
            let tiles = u64::from(keys.tiles) * u64::from(keys.heads_kv);
            let blocks = u64::from(self.num_sms).min(tiles) as u32;
            let grid = Grid::new(blocks, THREADS).shared(self.variant.shared_bytes());
            let of = if unordered { 1 } else { keys.num_own.max(1) };
            let together = heads_together(keys.tiles / of, keys.heads_kv, self.num_sms);
            let args = LaunchArgs::new().arg(keys).arg(&to).arg(&together);
            let args = maps.iter().fold(args, LaunchArgs::raw_map);
            // SAFETY: `tw_hopper_attn_grads` takes (TwAttn, TwDqSums, u32, 6 x TwTensorMap); the
            // caller's contract for what they describe.
            unsafe { self.grads.launch(stream, grid, args)? }
        }
        if queries.tiles == 0 {
            return Ok(());
        }
        let grid = Grid::new(queries.tiles * queries.heads_q, SUMS_THREADS);
        // SAFETY: `tw_attn_dq_of_sums` takes (TwAttn, TwDqSums); the caller's contract for what
        // they describe.
        let rounded = unsafe {
            self.dq_of_sums.launch(stream, grid, LaunchArgs::new().arg(queries).arg(&to))
        };
        if rounded.is_err() {
            // Nothing resets the turns of the kernel before: the next launch would wait for ever.
            stream.fill_memory(&sums.words, 0)?;
        }
        rounded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of 1, 2, 4 and 8 heads of 4096, 8192, 16384 and 32768 keys the fastest on an H200, or within
    /// 1 % of it.
    #[test]
    fn heads_are_done_together_until_their_tiles_fill_the_device() {
        let of = |keys: usize| heads_together((keys / TILE_M) as u32, 8, 132);
        assert_eq!([4096, 8192, 16384, 32768].map(of), [8, 4, 1, 1]);
        assert_eq!(([of(0), of(128)], heads_together(5, 3, 4)), ([8, 8], 2));
        // The last tiles of few heads begin late if those of one come before all of the next.
        assert_eq!([128, 256].map(|tiles| heads_together(tiles, 2, 132)), [2, 1]);
    }
}
