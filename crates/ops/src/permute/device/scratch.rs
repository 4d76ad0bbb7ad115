//! The workspace for the routing of a map.

use tilewire_core::Result;
use tilewire_device::cuda::{CudaContext, CudaMemory};
use tilewire_kernels::portable::PERMUTE_CHUNK;

use crate::common::cuda::workspace;
use crate::permute::PermuteDesc;

/// Blocks that count and place `choices`.
pub(super) fn chunks(choices: usize) -> usize {
    choices.div_ceil(PERMUTE_CHUNK as usize).max(1)
}

/// The workspace for the routing of one map: one for each batch in flight, as the map itself.
#[derive(Clone)]
pub(crate) struct Scratch {
    pub(super) counts: CudaMemory,
    pub(super) first: CudaMemory,
}

impl Scratch {
    pub fn new(ctx: &CudaContext, d: &PermuteDesc, tokens: usize) -> Result<Self> {
        let counts = chunks(tokens * d.top_k) * (d.num_experts + 1);
        Ok(Self { counts: workspace(ctx, 4 * counts)?, first: workspace(ctx, 8 * d.num_experts)? })
    }
}
