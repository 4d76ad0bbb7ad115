//! FP8 q, k and v on CUDA devices: codes with their scales become bf16, f16 or f32
//! ([`AttentionDesc::widened`]), which the other kernels take.

use tilewire_core::{DType, Result, ScaleLayout};
use tilewire_device::cuda::{CudaContext, CudaMemory, CudaStream};

use crate::attention::{AttentionDesc, AttnInputs, HeadScales, LocalRows};
use crate::common::cuda::{addr, workspace};
use crate::quant::device::{Codes, Scales, Widen};
use tilewire_kernels::abi::TwAttn;

/// Returns what the kernels compute where q, k and v are widened.
pub(crate) fn kernel_desc(d: &AttentionDesc) -> AttentionDesc {
    AttentionDesc { dtype: d.widened(), scales: HeadScales::Token, ..d.clone() }
}

/// Workspace for queries, keys and values, and the kernel that fills it from e4m3.
pub(crate) struct Wide {
    widen: Widen,
    /// Bytes of an element.
    pub size: usize,
    pub q: CudaMemory,
    pub k: CudaMemory,
    pub v: CudaMemory,
}

impl Wide {
    /// For `rows` of heads: of queries, and of keys.
    ///
    /// # Errors
    /// Out of memory; `InvalidArgument` for more than the kernel can count.
    pub fn new(ctx: &CudaContext, d: &AttentionDesc, (q, kv): (usize, usize)) -> Result<Self> {
        for (rows, dim) in [(q, d.dqk), (kv, d.dqk), (kv, d.dv)] {
            Widen::check(rows, dim)?;
        }
        let size = d.widened().size();
        Ok(Self {
            widen: Widen::new(ctx, DType::F8E4M3, d.widened())?,
            size,
            q: workspace(ctx, size * q * d.dqk)?,
            k: workspace(ctx, size * kv * d.dqk)?,
            v: workspace(ctx, size * kv * d.dv)?,
        })
    }

    /// Returns what queued work refers to.
    pub fn held(&self) -> [CudaMemory; 3] {
        [self.q.clone(), self.k.clone(), self.v.clone()]
    }

    /// Queues `codes * scales` of `rows` of heads of `dim` elements to `out`.
    ///
    /// # Safety
    /// The addresses must be mapped for so many rows until the work has run, and held.
    ///
    /// # Errors
    /// What the driver reports.
    pub unsafe fn fill(
        &self,
        stream: &CudaStream,
        (x, scales): (u64, u64),
        (rows, dim): (usize, usize),
        out: u64,
    ) -> Result<()> {
        let codes = Codes { x, scales, layout: Scales::Rows, shape: (rows, dim) };
        // SAFETY: the caller's contract.
        unsafe { self.fill_by(stream, &codes, out) }
    }

    /// Queues the values of `codes` to `out`.
    ///
    /// # Safety
    /// As [`Wide::fill`].
    unsafe fn fill_by(&self, stream: &CudaStream, codes: &Codes, out: u64) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.widen.launch(stream, codes, out) }
    }

    /// Queues q, k and v of one rank; what `p` becomes. The inputs were checked and are held.
    pub(super) fn inputs(
        &self,
        stream: &CudaStream,
        d: &AttentionDesc,
        (x, rows): (&AttnInputs, LocalRows),
        p: TwAttn,
    ) -> Result<TwAttn> {
        let (q, kv) = ((rows.q, d.heads_q), (rows.kv, d.heads_kv));
        let all =
            [(&x.q, q, d.dqk, &self.q), (&x.k, kv, d.dqk, &self.k), (&x.v, kv, d.dv, &self.v)];
        for (o, (tokens, heads), dim, to) in all {
            let (layout, shape) = match d.scales {
                HeadScales::Token => (Scales::Rows, (tokens * heads, dim)),
                HeadScales::Block128 => {
                    (Scales::Of(ScaleLayout::Block128x128), (tokens, heads * dim))
                }
            };
            let (codes, scales) = (addr(&o.data)?, addr(o.scales.as_ref())?);
            let codes = Codes { x: codes, scales, layout, shape };
            // SAFETY: the operand was checked against the description, which the workspace was made
            // for; both are held.
            unsafe { self.fill_by(stream, &codes, to.addr())? };
        }
        Ok(TwAttn { q: self.q.addr(), k: self.k.addr(), v: self.v.addr(), ..p })
    }
}
