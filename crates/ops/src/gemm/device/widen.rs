//! FP8 operands become f32 before a product: every bit of them and of their scales counts.

use tilewire_core::{DType, Result, ScaleLayout};
use tilewire_device::Buffer;
use tilewire_device::cuda::{CudaContext, CudaMemory, CudaStream};

use crate::common::cuda::{addr, workspace};
use crate::gemm::{GemmDesc, Operand};
use crate::quant::device::{Codes, Scales, Widen};

/// Returns what the kernels compute for `d`: with f32 in place of FP8.
pub(crate) fn kernel_desc(d: &GemmDesc) -> GemmDesc {
    match d.a.is_fp8() {
        true => GemmDesc { a: DType::F32, b: DType::F32, ..*d },
        false => *d,
    }
}

/// Workspace for the f32 of an FP8 operand.
pub(crate) struct Wide {
    widen: Widen,
    memory: CudaMemory,
    /// The scale of an operand without scales.
    one: CudaMemory,
}

impl Wide {
    /// For at most `rows x cols` elements of `dtype`, in any order.
    ///
    /// # Errors
    /// Out of memory; `InvalidArgument` for more than the kernel can count.
    pub fn new(ctx: &CudaContext, dtype: DType, rows: usize, cols: usize) -> Result<Self> {
        Widen::check(rows, cols)?;
        Widen::check(cols, rows)?;
        Ok(Self {
            widen: Widen::new(ctx, dtype, DType::F32)?,
            memory: workspace(ctx, 4 * rows * cols)?,
            one: CudaMemory::from_bytes(ctx, &1f32.to_ne_bytes())?,
        })
    }

    /// Returns what queued work refers to.
    pub fn held(&self) -> [CudaMemory; 2] {
        [self.memory.clone(), self.one.clone()]
    }

    /// Returns the address of the f32 elements.
    pub fn addr(&self) -> u64 {
        self.memory.addr()
    }

    /// Queues the widening of an operand to the workspace's elements from `first` on; where they
    /// are.
    ///
    /// # Safety
    /// The operand must be checked, of the workspace's device, inside of the workspace, and held;
    /// [`Wide::held`], too.
    ///
    /// # Errors
    /// What the driver reports.
    pub unsafe fn operand(&self, stream: &CudaStream, o: &Operand, first: usize) -> Result<u64> {
        let (scales, layout) = match &o.scales {
            Some((s, layout)) => (addr(s)?, Scales::Of(*layout)),
            None => (self.one.addr(), Scales::Of(ScaleLayout::Tensor)),
        };
        let s = o.data.shape();
        let codes = Codes { x: addr(&o.data)?, scales, layout, shape: (s.dim(0), s.dim(1)) };
        assert!(4 * (first + s.num_elems()) <= self.memory.len_bytes());
        let to = self.addr() + 4 * first as u64;
        // SAFETY: the caller's contract.
        unsafe { self.widen.launch(stream, &codes, to) }.map(|()| to)
    }

    /// Queues the widening of `shape.0` rows at address `x`, with one scale for all (of address 0:
    /// 1), to the workspace's rows from `first` on.
    ///
    /// # Safety
    /// The codes and the scale must be mapped until the work has run, the rows inside of the
    /// workspace; [`Wide::held`] must be held.
    ///
    /// # Errors
    /// What the driver reports.
    pub unsafe fn rows(
        &self,
        stream: &CudaStream,
        (x, scale): (u64, u64),
        first: usize,
        shape: (usize, usize),
    ) -> Result<()> {
        assert!(4 * (first + shape.0) * shape.1 <= self.memory.len_bytes());
        let scales = if scale == 0 { self.one.addr() } else { scale };
        let codes = Codes { x, scales, layout: Scales::Of(ScaleLayout::Tensor), shape };
        // SAFETY: the caller's contract.
        unsafe { self.widen.launch(stream, &codes, self.addr() + (4 * first * shape.1) as u64) }
    }
}

/// Both operands of a product.
pub(crate) struct Widened {
    pub a: Wide,
    pub b: Wide,
}

impl Widened {
    /// For a product of FP8; none for other types.
    ///
    /// # Errors
    /// As [`Wide::new`].
    pub fn of(ctx: &CudaContext, d: &GemmDesc) -> Result<Option<Self>> {
        if !d.a.is_fp8() {
            return Ok(None);
        }
        Ok(Some(Self { a: Wide::new(ctx, d.a, d.m, d.k)?, b: Wide::new(ctx, d.b, d.n, d.k)? }))
    }

    /// Returns what queued work refers to.
    pub fn held(&self) -> Vec<CudaMemory> {
        [self.a.held(), self.b.held()].concat()
    }
}
