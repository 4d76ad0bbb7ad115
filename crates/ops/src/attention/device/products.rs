//! Launches by FP8 products.

use tilewire_core::Result;
use tilewire_device::cuda::{CudaMemory, CudaStream};
use tilewire_kernels::abi::{TwAttn, TwFp8, TwSeg};
use tilewire_kernels::attention::hopper::FEW;
use tilewire_kernels::attention::hopper_fp8::FP8_ROWS;

use super::hopper_fp8::{HopperFp8, number_blocks};
use super::queue::Prepared;
use crate::attention::AttentionDesc;
use crate::attention::launch::Given;
use crate::attention::table::number_tiles;
use crate::common::cuda::addr;

impl Prepared {
    /// Queues the forward pass by FP8 products of tensors that are held, with the rows of the
    /// tables.
    pub(super) fn fp8(
        &self,
        stream: &CudaStream,
        (d, x, p): (&AttentionDesc, &Given<'_>, &TwAttn),
        (by, values): (&HopperFp8, &CudaMemory),
        (mut own, mut other): (Vec<TwSeg>, Vec<TwSeg>),
    ) -> Result<()> {
        let tiles = number_tiles(&mut own, FP8_ROWS as u64);
        let (num_other, blocks) = number_blocks(&mut other);
        by.takes(p, blocks)?;
        if tiles == 0 || p.heads_q == 0 {
            return Ok(());
        }
        other.truncate(num_other);
        let [q_scales, k_scales, v_scales] =
            [&x.x.q, &x.x.k, &x.x.v].map(|o| addr(o.scales.as_ref()));
        let f = TwFp8 {
            q_scales: q_scales?,
            k_scales: k_scales?,
            v_scales: v_scales?,
            values: values.addr(),
            num_other: num_other as u32,
            pad: 0,
        };
        let few = own.len().max(other.len()) <= FEW;
        let mut p = TwAttn { num_own: own.len() as u32, tiles, ..*p };
        if !few {
            p.own = self.write_numbered(stream, 0, &own)?;
            p.other = self.write_numbered(stream, 2, &other)?;
        }
        let few = few.then_some([&own[..], &other[..]]);
        // SAFETY: what `p` and `f` point to was checked against the description (shapes, types, the
        // same device), begins at multiples of 16 bytes, and is held by the stream (`held`), as
        // `values` is, which is that of this stream; tables are made of the launch's own rows, and
        // their blocks were counted.
        unsafe { by.launch(stream, (d, &p, &f), (x.rows.kv, blocks), few) }
    }
}
