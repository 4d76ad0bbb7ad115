//! The forward pass of e4m3 on sm_90a by FP8 products (`attention/sm90_attention_fp8.cu`).

use std::sync::Arc;

use tilewire_core::{DType, Error, Result};
use tilewire_device::cuda::{
    CudaContext, CudaMemory, CudaStream, Grid, Kernel, LaunchArgs, MapPromotion, MapSwizzle,
    RawTensorMap, TensorMapDesc,
};
use tilewire_kernels::abi::{TwAttn, TwFp8, TwSeg};
use tilewire_kernels::attention::hopper::STORE_ROWS;
use tilewire_kernels::attention::hopper_fp8::{
    FP8_DIM, FP8_KEYS, FP8_ROWS, FP8_THREADS, SM90_ATTENTION_FP8, TURN_THREADS, defines,
    shared_bytes,
};

use super::forward::{core_lacks, not_by_hopper};
use super::hopper::{map, order, stored};
use crate::attention::table::GAP;
use crate::attention::{AttentionDesc, AttnBackend, HeadScales};
use crate::common::counters::Counters;
use crate::common::cuda::{lacks_sm90, load, workspace};

/// Sequences that a launch may have at least, if its plan has fewer: as many as any plan takes.
const SEQUENCES: usize = 512;
/// Bytes of the transposed values of a block of keys and a head.
const BLOCK_BYTES: usize = FP8_KEYS * FP8_DIM;

/// Returns why the kernel does not attend as `d` says, whatever the addresses; none if it does.
fn unfit(d: &AttentionDesc) -> Option<String> {
    if d.dtype != DType::F8E4M3 {
        return Some(format!("its inputs are f8e4m3, not {}", d.dtype));
    }
    if d.scales != HeadScales::Block128 {
        return Some("f8e4m3 needs a scale for 128 tokens, not one for each".to_owned());
    }
    if d.has_extras() {
        return Some("it has no softcap, bias or dropout, and a positive scale".to_owned());
    }
    // A tile is counted in 32 bits.
    let tiles = d.sequences.tokens_kv.saturating_mul(d.heads_kv);
    (tiles >= 1 << 31).then(|| "the keys are too many".to_owned())
}

/// The kernels of one description on one device.
pub(super) struct HopperFp8 {
    ctx: CudaContext,
    turn: Kernel,
    attend: Kernel,
    num_sms: u32,
    /// By which tiles are dealt out.
    counters: Arc<Counters>,
    heads_kv: usize,
    /// The most blocks of keys of a launch.
    pub blocks: usize,
    /// Others attend where it does not take a launch.
    pub optional: bool,
}

/// Blocks of keys of a segment: one for each scale that its rows have.
fn blocks_of(s: &TwSeg) -> u32 {
    let keys = FP8_KEYS as u32;
    (s.row + s.len).div_ceil(keys) - s.row / keys
}

/// Returns the blocks of keys of segments, of which those that belong to a sequence come first.
pub(super) fn count_blocks(segs: &[TwSeg]) -> u32 {
    segs.iter().take_while(|s| s.shift != GAP).map(blocks_of).sum()
}

/// Numbers these blocks: how many segments belong to a sequence, and the blocks.
pub(super) fn number_blocks(segs: &mut [TwSeg]) -> (usize, u32) {
    let num = segs.iter().position(|s| s.shift == GAP).unwrap_or(segs.len());
    let blocks = segs[..num].iter_mut().fold(0, |blocks, s| {
        s.tile = blocks;
        blocks + blocks_of(s)
    });
    (num, blocks)
}

impl HopperFp8 {
    /// Loads the kernels if `backend` asks for them or takes them by itself; none if it does not.
    ///
    /// # Errors
    /// `Unsupported` if they are asked for, for what they do not do, and on other devices; as
    /// [`CudaContext::module`].
    pub fn of(ctx: &CudaContext, d: &AttentionDesc, backend: AttnBackend) -> Result<Option<Self>> {
        match backend {
            AttnBackend::Hopper if d.scales == HeadScales::Block128 => {}
            // Wider results are of f32 arithmetic.
            AttnBackend::Auto
                if d.out == DType::BF16 && core_lacks(ctx, (backend, unfit(d)))?.is_none() => {}
            _ => return Ok(None),
        }
        match Self::new(ctx, d, backend == AttnBackend::Auto) {
            // Nothing to compile them with, and not shipped either: widened.
            Err(e) if e.is_unavailable() && backend == AttnBackend::Auto => Ok(None),
            new => new.map(Some),
        }
    }

    fn new(ctx: &CudaContext, d: &AttentionDesc, optional: bool) -> Result<Self> {
        let why = unfit(d).map_or_else(|| lacks_sm90(ctx, &SM90_ATTENTION_FP8), |w| Ok(Some(w)))?;
        if let Some(why) = why {
            return Err(not_by_hopper(&why));
        }
        let module = load(ctx, &SM90_ATTENTION_FP8, defines())?;
        let attend = module.kernel("tw_hopper_attn_fp8_fwd")?;
        attend.allow_shared(shared_bytes())?;
        let (num_sms, counters) = (ctx.num_sms()?, Counters::of(ctx)?);
        let turn = module.kernel("tw_attn_fp8_values")?;
        let s = &d.sequences;
        // A sequence has one block, and one more for each border of scales in it. Launches may have
        // more sequences. Each block has a row.
        let most = s.tokens_kv.div_ceil(FP8_KEYS) + s.kv.len().max(SEQUENCES);
        let blocks = most.min(s.tokens_kv).max(1);
        let heads_kv = d.heads_kv;
        let ctx = ctx.clone();
        Ok(Self { ctx, turn, attend, num_sms, counters, heads_kv, blocks, optional })
    }

    /// Returns what is used, for people.
    pub fn name(&self) -> String {
        let others = match self.optional {
            true => "launches by offsets, of more sequences and at odd addresses",
            false => "launches by offsets",
        };
        format!("FP8 products on sm_90a (tiles {FP8_ROWS}x{FP8_KEYS}), {others} by ")
    }

    /// Returns whether it takes a launch with these addresses and numbered segments of keys, which
    /// have so many blocks.
    ///
    /// # Errors
    /// `Invalid` if it does not, with the reason.
    pub fn takes(&self, p: &TwAttn, blocks: u32) -> Result<()> {
        for (what, at) in [("q", p.q), ("k", p.k), ("v", p.v), ("out", p.out)] {
            if at % 16 != 0 {
                let text = format!("`{what}` does not begin at a multiple of 16 bytes");
                return Err(Error::invalid(text).hint("copy it to a tensor of its own"));
            }
        }
        if blocks as usize > self.blocks {
            return Err(Error::invalid("the launch has more sequences than the plan was made for")
                .expected(format_args!("at most {} blocks of keys", self.blocks))
                .seen(blocks));
        }
        Ok(())
    }

    /// Returns memory for the transposed values of a launch.
    pub fn workspace(&self, ctx: &CudaContext) -> Result<CudaMemory> {
        workspace(ctx, self.blocks * self.heads_kv * BLOCK_BYTES)
    }

    /// The tensor maps of q, k, the transposed values and out, as `attention/sm90_attention_fp8.cu`
    /// wants them.
    fn maps(&self, d: &AttentionDesc, p: &TwAttn, values: u64) -> Result<[RawTensorMap; 4]> {
        let width = self.heads_kv * FP8_DIM;
        let q = map(d.dtype, d.heads_q * FP8_DIM, p.ld_q, FP8_ROWS);
        let k = map(d.dtype, width, p.ld_k, FP8_KEYS);
        let v = TensorMapDesc {
            dtype: d.dtype,
            shape: [self.blocks, width, FP8_KEYS].into(),
            strides_bytes: [width * FP8_KEYS, FP8_KEYS].into(),
            tile: [1, FP8_DIM, FP8_KEYS].into(),
            swizzle: MapSwizzle::B128,
            promotion: MapPromotion::B256,
            wraps: false,
        };
        let out = map(stored(p), d.heads_q * FP8_DIM, p.ld_o, STORE_ROWS);
        let (bytes, any) = (self.blocks * self.heads_kv * BLOCK_BYTES, usize::MAX);
        // Without a row of keys they have no address, and nothing is read.
        let at_k = if p.k == 0 { p.q } else { p.k };
        let all = [(p.q, any, &q), (at_k, any, &k), (values, bytes, &v), (p.out, any, &out)];
        RawTensorMap::all(&self.ctx, all)
    }

    /// Queues the forward pass: of `blocks` blocks of keys, the values transposed, then the rest.
    ///
    /// # Safety
    /// `p` is that of a launch of `d`, the description of [`HopperFp8::new`]: its tensors have the
    /// rows and heads that it says, begin at multiples of 16 bytes, and stay until the kernels have
    /// run, as what `f` points to; the values are those of [`HopperFp8::workspace`] and serve no
    /// other launch meanwhile. Segments lie inside of the tensors, and have blocks as
    /// [`number_blocks`] numbers them, at most `self.blocks`.
    ///
    /// # Errors
    /// What the driver reports.
    pub unsafe fn launch(
        &self,
        stream: &CudaStream,
        (d, p, f): (&AttentionDesc, &TwAttn, &TwFp8),
        (tokens_kv, blocks): (usize, u32),
        few: Option<[&[TwSeg]; 2]>,
    ) -> Result<()> {
        let maps = self.maps(d, p, f.values)?;
        let order = order(self.counters.next(stream), (d, tokens_kv), few);
        let args = || LaunchArgs::new().arg(p).arg(f).arg(&order);
        if blocks > 0 {
            let grid = Grid::new(blocks * self.heads_kv as u32, TURN_THREADS);
            // SAFETY: `tw_attn_fp8_values` takes (TwAttn, TwFp8, TwAttnOrder); the caller's
            // contract for what they describe.
            unsafe { self.turn.launch(stream, grid, args())? };
        }
        let num = u64::from(self.num_sms).min(u64::from(p.tiles) * u64::from(p.heads_q));
        let grid = Grid::new(num as u32, FP8_THREADS).shared(shared_bytes());
        let args = maps.iter().fold(args(), LaunchArgs::raw_map);
        // SAFETY: `tw_hopper_attn_fp8_fwd` takes these and 4 x TwTensorMap; the caller's contract
        // for what they describe. `counter` is none, or words that are zero and that no other
        // launch uses meanwhile.
        unsafe { self.attend.launch(stream, grid, args) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::table::whole;
    use crate::attention::{AttnMask, Dropout, Sequences};

    #[test]
    fn what_the_kernel_is_not_asked_for_has_a_reason() {
        let d = AttentionDesc {
            scales: HeadScales::Block128,
            ..AttentionDesc::new(300, (4, 2), 128, DType::F8E4M3, AttnMask::CAUSAL)
        };
        assert_eq!(unfit(&d), None);
        assert_eq!(unfit(&AttentionDesc { sink: true, out: DType::F32, ..d.clone() }), None);
        for (bad, why) in [
            (AttentionDesc { dtype: DType::BF16, ..d.clone() }, "bf16"),
            (AttentionDesc { scales: HeadScales::Token, ..d.clone() }, "128 tokens"),
            (AttentionDesc { softcap: Some(3.0), ..d.clone() }, "softcap"),
            (AttentionDesc { scale: 0.0, ..d.clone() }, "positive"),
            (AttentionDesc { dropout: Some(Dropout { p: 0.1, seed: 1 }), ..d.clone() }, "dropout"),
            (AttentionDesc { heads_kv: 1 << 23, ..d.clone() }, "too many"),
        ] {
            assert!(unfit(&bad).is_some_and(|w| w.contains(why)), "{bad}: {:?}", unfit(&bad));
        }
    }

    #[test]
    fn a_segment_has_a_block_for_each_scale() {
        // Of 100, 128, none and one key, with rows of no sequence between and behind them.
        let q: &[usize] = &[0, 5, 9, 9, 9];
        let kv: (&[usize], &[usize]) = (&[0, 100, 228, 228, 229], &[0, 100, 228, 300, 400]);
        let seqs = Sequences::padded((q, q), kv).unwrap();
        let (_, mut kv) = whole(&seqs);
        let (num, blocks) = number_blocks(&mut kv);
        assert_eq!(count_blocks(&kv), blocks);
        let seen: Vec<_> = kv[..num].iter().map(|s| (s.row, s.len, s.tile)).collect();
        assert_eq!((seen, blocks), (vec![(0, 100, 0), (100, 128, 1), (300, 1, 3)], 4));
        assert!(num < kv.len() && kv[num..].iter().all(|s| s.shift == GAP), "{kv:?}");
    }
}
