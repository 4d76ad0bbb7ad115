//! The workspace of attention.

use tilewire_core::Result;
use tilewire_device::cuda::{CudaContext, CudaMemory};

use super::fp8::Wide;
use super::offsets::table_bytes;
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
}

impl Space {
    pub fn new(ctx: &CudaContext, sizes: &Sizes) -> Result<Self> {
        let Sizes { segs, queries, wide } = sizes;
        let wide = wide.as_ref().map(|(d, rows)| Wide::new(ctx, d, *rows)).transpose()?;
        let (tables, delta) =
            (workspace(ctx, 3 * table_bytes(*segs))?, workspace(ctx, 4 * queries)?);
        Ok(Self { tables, delta, refused: workspace(ctx, 4)?, wide })
    }
}
