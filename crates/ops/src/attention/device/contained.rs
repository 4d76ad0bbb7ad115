//! Forward passes that contain their segments, so that no table is written.

use tilewire_core::{Error, Result};
use tilewire_device::cuda::CudaStream;
use tilewire_kernels::abi::{TwAttn, TwSeg};

use super::forward::Attend;
use super::hopper::Hopper;
use super::queue::{Kernels, aligned};
use crate::attention::AttentionDesc;
use crate::attention::table::number_tiles;

impl Kernels {
    /// Returns whether the forward pass of these rows writes no table: a launch contains them.
    pub fn takes_few(&self, (q, kv): &(Vec<TwSeg>, Vec<TwSeg>)) -> bool {
        matches!(self.forward.attend, Attend::Hopper(_)) && Hopper::takes_few([q, kv])
    }

    /// Queues the forward pass of tensors that are held, of rows that [`Kernels::takes_few`]
    /// accepts.
    pub fn attend_few(
        &self,
        stream: &CudaStream,
        d: &AttentionDesc,
        p: &TwAttn,
        (mut q, kv): (Vec<TwSeg>, Vec<TwSeg>),
    ) -> Result<()> {
        let Attend::Hopper(h) = &self.forward.attend else {
            return Err(Error::internal("a launch that no kernel contains"));
        };
        let tiles = number_tiles(&mut q, h.rows());
        if tiles == 0 || p.heads_q == 0 {
            return Ok(());
        }
        let tokens_kv = kv.iter().map(|s| s.len as usize).sum();
        aligned(d, &[("q", p.q), ("k", p.k), ("v", p.v), ("out", p.out)])?;
        let p = TwAttn { num_own: q.len() as u32, tiles, ..*p };
        // SAFETY: what `p` points to was checked against the description (shapes, types, the same
        // device), begins at multiples of 16 bytes (`aligned`), and is held by the stream; the
        // launch contains its segments.
        unsafe { h.launch(stream, d, (&p, tokens_kv), Some([&q, &kv])) }
    }
}
