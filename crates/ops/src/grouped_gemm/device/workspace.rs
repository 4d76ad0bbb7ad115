//! The workspace of launches on a CUDA device.

use tilewire_core::{DType, Result};
use tilewire_device::cuda::{CudaContext, CudaMemory};

use crate::common::cuda::workspace;
use crate::gemm::device::Wide;
use crate::grouped_gemm::GroupedDesc;

/// Workspace for the f32 of FP8 operands.
pub(super) struct Widened {
    pub x: Wide,
    pub dy: Wide,
    pub w: Wide,
}

/// The workspace of one launch at a time.
pub(super) struct Workspace {
    /// `[groups]` addresses of the matrices of a launch with one tensor for each group.
    pub table: CudaMemory,
    pub widened: Option<Widened>,
}

impl Workspace {
    pub fn new(ctx: &CudaContext, d: &GroupedDesc) -> Result<Self> {
        let wide = |dtype: DType| -> Result<_> {
            Ok(Widened {
                x: Wide::new(ctx, dtype, d.capacity, d.k)?,
                dy: Wide::new(ctx, dtype, d.capacity, d.n)?,
                w: Wide::new(ctx, dtype, d.groups * d.n, d.k)?,
            })
        };
        Ok(Self {
            table: workspace(ctx, 8 * d.groups)?,
            widened: d.dtype.is_fp8().then(|| wide(d.dtype)).transpose()?,
        })
    }
}
