//! The forward pass of few queries, whose keys are cut into pieces
//! (`attention/sm80_attention_split.cu`).

use tilewire_core::{DType, Result};
use tilewire_device::cuda::{CudaContext, CudaMemory, CudaStream, Grid, Kernel, LaunchArgs};
use tilewire_kernels::abi::{TwAttn, TwSplit};
use tilewire_kernels::attention::split::{SM80_ATTENTION_SPLIT, SPLIT_THREADS, Split};

use super::forward::variant;
use crate::attention::split::{FEW_QUERIES, Shape, are_few};
use crate::attention::{AttentionDesc, AttnBackend, Sequences};
use crate::common::cuda::{load, workspace};

/// The kernels of one description on one device.
pub(super) struct SplitKeys {
    variant: Split,
    split: Kernel,
    merge: Kernel,
    pub shape: Shape,
}

/// Results over pieces, of one launch at a time.
pub(super) struct Pieces {
    /// `[slots, rows, dv]` f32.
    pub parts: CudaMemory,
    /// `[slots, rows, 2]` f32.
    pub ends: CudaMemory,
}

/// Returns the variant for a description whose sequences have few queries; none for others, and for
/// what the kernels do not do.
fn fit(d: &AttentionDesc, by: AttnBackend) -> Option<Split> {
    let few = by == AttnBackend::Auto && are_few(&d.sequences) && !d.has_extras();
    // Tiles and rows are counted in 32 bits.
    let counted = d.sequences.tokens_q.checked_mul(d.heads_q)? <= i32::MAX as usize;
    variant(d, false).filter(|_| few && counted)?;
    let longest = d.sequences.longest().0;
    let rows = longest * (d.heads_q / d.heads_kv);
    Some(Split::new(d.dtype == DType::F16, (d.dqk, d.dv), rows))
}

/// The same with as many stages as `most` bytes of shared memory hold; none if they hold too few.
fn fitting(v: Split, most: u32) -> Option<Split> {
    let of = |stages| Split { stages, ..v };
    let all = (2..=v.stages).rev().map(of);
    all.into_iter().find(|v| v.sums_fit() && v.shared_bytes() + v.static_bytes() <= most)
}

impl SplitKeys {
    /// Loads the kernels; none where another kernel attends.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn new(ctx: &CudaContext, d: &AttentionDesc, by: AttnBackend) -> Result<Option<Self>> {
        let most = ctx.max_shared_bytes()?;
        let Some(v) = fit(d, by).and_then(|v| fitting(v, most)) else { return Ok(None) };
        let m = match load(ctx, &SM80_ATTENTION_SPLIT, v.defines()) {
            // Nothing to compile them with, and not shipped either.
            Err(e) if e.is_unavailable() => return Ok(None),
            m => m?,
        };
        let (split, merge) = (m.kernel("tw_attn_split")?, m.kernel("tw_attn_split_merge")?);
        split.allow_shared(v.shared_bytes())?;
        let grid = Grid::new(1, SPLIT_THREADS).shared(v.shared_bytes());
        let blocks = ctx.num_sms()? * split.blocks_per_sm(grid)?.max(1);
        let (group, heads_kv) = ((d.heads_q / d.heads_kv) as u32, d.heads_kv as u32);
        // `cut` looks for pieces that run in up to three rounds.
        let shape = Shape { rows: v.rows as u32, group, heads_kv, blocks, slots: 3 * blocks };
        Ok(Some(Self { variant: v, split, merge, shape }))
    }

    /// Returns whether a launch of these sequences is by them.
    pub fn takes(&self, s: &Sequences) -> bool {
        are_few(s)
    }

    /// Returns what is used, for people.
    pub fn name(&self) -> String {
        let rows = self.variant.rows;
        format!(
            "sequences of at most {FEW_QUERIES} queries by kernels that cut their keys (tiles of \
             {rows} packed queries)"
        )
    }

    /// Returns what a launch writes its pieces to.
    pub fn workspace(&self, ctx: &CudaContext) -> Result<Pieces> {
        let (part, end) = self.variant.part_bytes();
        let slots = self.shape.slots as usize;
        Ok(Pieces { parts: workspace(ctx, slots * part)?, ends: workspace(ctx, slots * end)? })
    }

    /// Queues the forward pass of segments with at least one tile; `s.tiles` of them are merged.
    ///
    /// # Safety
    /// `p` is that of a launch of the description of [`SplitKeys::new`]: its tensors have the rows
    /// and heads that it says, begin at multiples of 16 bytes, and stay until the kernels have run,
    /// as what `s` points to, which has the slots of [`Shape::slots`] and serves no other launch
    /// meanwhile; segments lie inside of the tensors.
    ///
    /// # Errors
    /// What the driver reports.
    pub unsafe fn launch(&self, stream: &CudaStream, p: &TwAttn, s: &TwSplit) -> Result<()> {
        let grid = |tiles: u32| Grid::new(tiles * self.shape.heads_kv, SPLIT_THREADS);
        let args = || LaunchArgs::new().arg(p).arg(s);
        let all = grid(p.tiles).shared(self.variant.shared_bytes());
        // SAFETY: the kernel takes (TwAttn, TwSplit); the caller's contract for what they describe.
        unsafe { self.split.launch(stream, all, args())? };
        if s.tiles == 0 {
            return Ok(());
        }
        // SAFETY: as of the first kernel, which it waits for before it touches memory.
        unsafe { self.merge.launch(stream, grid(s.tiles).early(), args()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::{AttnMask, Dropout};

    #[test]
    fn few_queries_of_what_the_kernels_do_are_cut() {
        let seqs = |q: usize| Sequences::packed(&[0, 1, 1 + q], &[0, 900, 1000]).unwrap();
        let of = |d, dtype, q| AttentionDesc {
            sequences: seqs(q),
            ..AttentionDesc::new(1, (16, 2), d, dtype, AttnMask::CAUSAL)
        };
        let d = of(128, DType::BF16, 2);
        let good = |d: &AttentionDesc| fit(d, AttnBackend::Auto);
        assert_eq!(good(&d).map(|v| (v.rows, v.dqk)), Some((16, 128)));
        assert_eq!(good(&of(64, DType::F16, 4)).map(|v| (v.rows, v.f16)), Some((32, true)));
        assert_eq!(good(&of(256, DType::F16, 4)).map(|v| v.rows), Some(64));
        assert_eq!(good(&of(64, DType::BF16, 16)).map(|v| v.rows), Some(64));
        assert_eq!(good(&of(40, DType::BF16, 1)).map(|v| v.dv), Some(40));
        assert!(good(&AttentionDesc { sink: true, out: DType::F32, ..d.clone() }).is_some());
        let extra = AttentionDesc { dropout: Some(Dropout { p: 0.1, seed: 1 }), ..d.clone() };
        let scale = AttentionDesc { scale: -1.0, ..d.clone() };
        for bad in [of(128, DType::F32, 1), of(33, DType::BF16, 1), of(64, DType::F16, 17), extra] {
            assert!(good(&bad).is_none(), "{bad}");
        }
        assert!(good(&scale).is_none() && good(&of(128, DType::F8E4M3, 1)).is_none());
        assert!(fit(&d, AttnBackend::Portable).is_none() && fit(&d, AttnBackend::Hopper).is_none());
    }

    #[test]
    fn stages_are_as_many_as_shared_memory_holds() {
        let v = Split::new(false, (256, 256), 16);
        let of = |kib: u32| fitting(v, kib << 10).map(|v| v.stages);
        // sm_90, sm_80, sm_86.
        assert_eq!([of(227), of(163), of(99)], [Some(3), Some(2), None]);
    }
}
