//! Launches of few queries, whose keys are cut into pieces.

use bytemuck::Zeroable;
use tilewire_core::Result;
use tilewire_device::cuda::CudaStream;
use tilewire_kernels::abi::{TwAttn, TwSeg, TwSplit};
use tilewire_kernels::attention::split::SPLIT_FEW;

use super::queue::{Prepared, aligned};
use super::split::{Pieces, SplitKeys};
use crate::attention::AttentionDesc;
use crate::attention::split::{Cut, cut};

impl Prepared {
    /// Queues the forward pass of sequences that [`SplitKeys::takes`] accepts, of tensors that are
    /// held.
    pub(super) fn split(
        &self,
        stream: &CudaStream,
        d: &AttentionDesc,
        p: &TwAttn,
        (by, pieces): (&SplitKeys, &Pieces),
        (own, other): (&[TwSeg], &[TwSeg]),
    ) -> Result<()> {
        aligned(d, &[("q", p.q), ("k", p.k), ("v", p.v), ("out", p.out)])?;
        let Cut { own, tiles, several } = cut(own, other, &d.mask, &by.shape);
        if tiles == 0 {
            return Ok(());
        }
        let mut p = TwAttn { num_own: own.len() as u32, tiles, ..*p };
        let (parts, ends) = (pieces.parts.addr(), pieces.ends.addr());
        let mut s = TwSplit { parts, ends, tiles: several, ..TwSplit::zeroed() };
        if own.len().max(other.len()) <= SPLIT_FEW {
            s.few = 1;
            s.own[..own.len()].copy_from_slice(&own);
            s.other[..other.len()].copy_from_slice(other);
        } else {
            p.own = self.write_numbered(stream, 0, &own)?;
            p.other = self.write_numbered(stream, 2, other)?;
        }
        // SAFETY: what `p` points to was checked against the description (shapes, types, the same
        // device), begins at multiples of 16 bytes (`aligned`), and is held by the stream (`held`),
        // as `pieces` is, which is that of this stream and has the slots of the tiles that are
        // merged (`cut`); segments are made of the launch's own rows.
        unsafe { by.launch(stream, &p, &s) }
    }
}
