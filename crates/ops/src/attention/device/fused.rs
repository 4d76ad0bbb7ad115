//! Plans of local attention whose gradients one kernel makes.

use tilewire_core::{Error, Result};
use tilewire_device::cuda::{CudaContext, CudaStream};
use tilewire_kernels::abi::TwAttn;

use super::hopper_fused::{Fused, unfit};
use super::queue::{Kernels, Make, Prepared, Sides, aligned, with_tables};
use super::space::Sums;
use crate::attention::AttentionDesc;
use crate::common::cuda::no_kernel;

fn lacks(why: &str) -> Error {
    no_kernel(
        format!("all gradients of attention at once ({why})"),
        "there is one on sm_90a for heads of 128, bf16 or f16, gradients of the same type, positive \
         scales, without softcap, bias and dropout",
    )
}

impl Kernels {
    /// Makes all gradients by one kernel; `unordered`: dq in any order.
    ///
    /// # Errors
    /// `Unsupported` if there is none; as [`Fused::new`].
    pub fn fuse(&mut self, ctx: &CudaContext, d: &AttentionDesc, unordered: bool) -> Result<()> {
        if d.dtype.is_fp8() {
            return Err(lacks("FP8 is widened first"));
        }
        let by = &mut self.backward;
        if matches!(by.make, Make::Portable(..)) {
            return Err(lacks(&format!("the backward pass is by {}", by.name)));
        }
        if let Some(why) = unfit(d) {
            return Err(lacks(&why));
        }
        by.fused = Some(Fused::new(ctx, d, unordered)?);
        by.name += ", all gradients by one kernel";
        by.name += if unordered { ", dq added in any order" } else { "" };
        self.sizes.sums = Some(Fused::sums(d, d.sequences.tokens_q, self.sizes.segs));
        Ok(())
    }
}

impl Prepared {
    /// Queues dq, dk and dv of every row of the tables by the kernel that makes all, and what
    /// [`Prepared::queries`] queues beside dq. `sums` is that of the stream.
    pub(super) fn all(
        &self,
        stream: &CudaStream,
        d: &AttentionDesc,
        (p, sums): (&TwAttn, &Sums),
        t: &Sides,
    ) -> Result<()> {
        let Some(fused) = &self.kernels.backward.fused else {
            return Err(Error::internal("no kernel makes all gradients"));
        };
        aligned(d, &[("q", p.q), ("k", p.k), ("v", p.v), ("d_out", p.d_out)])?;
        aligned(d, &[("dq", p.dq), ("dk", p.dk), ("dv", p.dv)])?;
        let keys = with_tables(p, (&t.keys, &t.queries));
        let queries = with_tables(p, (&t.queries, &t.keys));
        // SAFETY: what `p` points to was checked against the description (shapes, types, the same
        // device), begins at multiples of 16 bytes (`aligned`), and is held by the stream (`held`);
        // tables are made of the launch's own rows, with tiles of as many as both kernels have;
        // `sums` is that of this stream (`Workspaces`), for as many rows and segments as the plan
        // has.
        unsafe { fused.launch(stream, d, (&keys, &queries), sums)? }
        self.bias_and_sink(stream, d, queries)
    }
}
