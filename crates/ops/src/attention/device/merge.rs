//! Results over parts of the keys to the result over all of them.

use tilewire_core::Result;
use tilewire_device::cuda::{CudaContext, CudaStream, Grid, Kernel, LaunchArgs};
use tilewire_kernels::abi::TwMerge;
use tilewire_kernels::attention::{PLAIN_ATTENTION, merge};

use super::forward::code;
use crate::attention::AttentionDesc;
use crate::common::cuda::load;

/// Parts and their merge, as addresses: `num` of `[rows, heads, dv]` and `[heads, rows]`, f32, one
/// behind the other.
pub(crate) struct Parts {
    pub parts: u64,
    pub lses: u64,
    pub num: usize,
    pub rows: usize,
    pub heads: usize,
    pub out: u64,
    pub lse: u64,
}

/// The kernel that merges.
pub(crate) struct Merge(Kernel);

impl Merge {
    /// For outputs of the description's type.
    pub fn new(ctx: &CudaContext, d: &AttentionDesc) -> Result<Self> {
        let defines = merge(u64::from(code(d.out)), d.dv as u64).defines();
        Ok(Self(load(ctx, &PLAIN_ATTENTION, defines)?.kernel("tw_attn_merge")?))
    }

    /// Queues the merge. What the addresses refer to must be held by the stream.
    pub fn launch(&self, stream: &CudaStream, p: &Parts) -> Result<()> {
        if p.rows * p.heads == 0 {
            return Ok(());
        }
        let param = TwMerge {
            parts: p.parts,
            lses: p.lses,
            out: p.out,
            lse: p.lse,
            num: p.num as u32,
            tokens_q: p.rows as u32,
            heads_q: p.heads as u32,
            pad: 0,
        };
        let blocks = (p.rows * p.heads).div_ceil(8) as u32;
        // SAFETY: the argument is the kernel's `TwMerge`; the caller holds what it points to, of
        // the sizes that it says.
        unsafe { self.0.launch(stream, Grid::new(blocks, 256), LaunchArgs::new().arg(&param)) }
    }
}
