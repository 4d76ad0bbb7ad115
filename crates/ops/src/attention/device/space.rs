//! The workspace of attention.

use tilewire_core::Result;
use tilewire_device::cuda::{CudaContext, CudaMemory};

use super::fp8::Wide;
use super::hopper_fp8::HopperFp8;
use super::offsets::table_bytes;
use super::split::{Pieces, SplitKeys};
use crate::attention::AttentionDesc;
use crate::common::cuda::workspace;

/// The sizes of a workspace.
pub(super) struct Sizes {
    /// Most segments of one table.
    pub segs: usize,
    /// Queries times heads.
    pub queries: usize,
    /// With FP8 inputs of one rank: their description, and rows of heads of queries and of keys.
    pub wide: Option<(AttentionDesc, (usize, usize))>,
    /// Those of sums of dq, if one kernel makes all gradients.
    pub sums: Option<SumsSizes>,
}

/// The sizes of [`Sums`].
#[derive(Clone, Copy)]
pub(super) struct SumsSizes {
    /// Elements of dq.
    pub elements: usize,
    /// Words that count turns.
    pub words: usize,
}

/// Sums of dq of the backward passes of one stream, one at a time.
pub(crate) struct Sums {
    /// `[Hq, 2, tokens_q, dqk / 2]` f32.
    pub sums: CudaMemory,
    /// As `TwDqSums` says: zero between launches.
    pub words: CudaMemory,
}

impl Sums {
    pub fn new(ctx: &CudaContext, sizes: SumsSizes) -> Result<Self> {
        let (sums, words) = (4 * sizes.elements, 4 * sizes.words);
        Ok(Self { sums: workspace(ctx, sums)?, words: workspace(ctx, words)? })
    }
}

/// The workspace of one launch at a time.
pub(super) struct Space {
    /// Segments of queries for the forward kernel and for dq, and of keys: three tables. Written by
    /// a kernel in front of each launch, because launches may bring their own.
    pub tables: CudaMemory,
    /// `[Hq, tokens_q]` f32.
    pub delta: CudaMemory,
    /// `[1]` u32: whether the offsets of the launch were refused.
    pub refused: CudaMemory,
    /// With FP8 inputs of one rank.
    pub wide: Option<Wide>,
    /// With kernels for few queries.
    pub pieces: Option<Pieces>,
    /// With FP8 products: transposed values.
    pub turned: Option<CudaMemory>,
}

impl Space {
    pub fn new(
        ctx: &CudaContext,
        sizes: &Sizes,
        (split, fp8): (Option<&SplitKeys>, Option<&HopperFp8>),
    ) -> Result<Self> {
        let Sizes { segs, queries, wide, .. } = sizes;
        let wide = wide.as_ref().map(|(d, rows)| Wide::new(ctx, d, *rows)).transpose()?;
        let pieces = split.map(|s| s.workspace(ctx)).transpose()?;
        let turned = fp8.map(|f| f.workspace(ctx)).transpose()?;
        let (tables, delta) =
            (workspace(ctx, 3 * table_bytes(*segs))?, workspace(ctx, 4 * queries)?);
        Ok(Self { tables, delta, refused: workspace(ctx, 4)?, wide, pieces, turned })
    }
}
