//! Quantisation on CUDA devices, by the portable kernels (`quant/sm80_quant.cu`).

use bytemuck::{Pod, Zeroable};
use tilewire_core::{DType, Result, ScaleLayout, Shape};
use tilewire_device::cuda::{CudaContext, CudaMemory, CudaStream, Grid, Kernel, LaunchArgs};
use tilewire_device::{Buffer, Device, Tensor};
use tilewire_kernels::portable::{QUANT, QUANT_THREADS, QUANT_TILE, quant_defines};

use super::{QuantDesc, QuantInputs, Quantized, Scaling, Scope};
use crate::common::cuda::{addr, fit_32_bits, hold, load, mantissa, no_kernel, workspace};

/// Elements for which `tw_amax` has a block, up to the most blocks.
const AMAX_SHARE: usize = 16 * QUANT_THREADS as usize;
const AMAX_BLOCKS: usize = 1024;

/// `TwQuant` of `quant/sm80_quant.cu`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Param {
    x: u64,
    row: u64,
    row_scales: u64,
    column: u64,
    column_scales: u64,
    scale: u64,
    rows: u32,
    cols: u32,
    pow2: u32,
    swizzled: u32,
}

/// Fails for what no kernel does. Pure.
pub(super) fn check(d: &QuantDesc) -> Result<()> {
    if d.scope == Scope::Team {
        return Err(no_kernel(
            "the largest magnitude of a team's ranks",
            "use `Scope::Local`, blocks with scales of their own, or the host",
        ));
    }
    let tile = QUANT_TILE as usize;
    fit_32_bits("quantisation", &[d.rows, d.cols, d.rows.div_ceil(tile) * d.cols.div_ceil(tile)])
}

/// State of delayed scaling on the device.
pub(super) struct State {
    pub history: Tensor,
    pub scale: Tensor,
    steps: Tensor,
    window: u32,
    margin: i32,
}

impl State {
    fn new(ctx: &CudaContext, window: usize, margin: i32) -> Result<Self> {
        fit_32_bits("window", &[window])?;
        let device = Device::Cuda(ctx.clone());
        Ok(Self {
            history: Tensor::zeros(DType::F32, Shape::d1(window)).to(&device)?,
            scale: Tensor::from_slice(&[1.0f32], Shape::d1(1))?.to(&device)?,
            steps: Tensor::zeros(DType::I64, Shape::d1(1)).to(&device)?,
            window: window as u32,
            margin,
        })
    }
}

/// Kernels and workspace of a plan.
pub(super) struct Prepared {
    desc: QuantDesc,
    quant: Kernel,
    amax: Kernel,
    scale: Kernel,
    scale_delayed: Kernel,
    /// Partial maxima, f32.
    parts: CudaMemory,
    pub state: Option<State>,
}

impl Prepared {
    pub fn new(ctx: &CudaContext, desc: &QuantDesc) -> Result<Self> {
        check(desc)?;
        let module = load(ctx, &QUANT, quant_defines(mantissa(desc.src), mantissa(desc.dst)))?;
        let state = match desc.scaling {
            Scaling::Current => None,
            Scaling::Delayed { window, margin } => Some(State::new(ctx, window, margin)?),
        };
        Ok(Self {
            desc: *desc,
            quant: module.kernel(match desc.layout {
                ScaleLayout::Tensor => "tw_quant_tensor",
                ScaleLayout::Block1x128 => "tw_quant_1x128",
                ScaleLayout::Block128x128 => "tw_quant_128x128",
                ScaleLayout::Mx1x32 | ScaleLayout::Mx1x32Swizzled => "tw_quant_mx",
            })?,
            amax: module.kernel("tw_amax")?,
            scale: module.kernel("tw_scale")?,
            scale_delayed: module.kernel("tw_scale_delayed")?,
            parts: workspace(ctx, 4 * AMAX_BLOCKS)?,
            state,
        })
    }

    /// Queues the quantisation of tensors that were checked.
    pub fn launch(&self, stream: &CudaStream, t: &QuantInputs) -> Result<()> {
        let d = &self.desc;
        let data = |q: &Option<Quantized>| addr(q.as_ref().map(|q| &q.data));
        let scales = |q: &Option<Quantized>| addr(q.as_ref().map(|q| &q.scales));
        let (rows, cols) = (t.x.shape().dim(0), t.x.shape().dim(1));
        let (row_scales, column_scales) = (scales(&t.row)?, scales(&t.column)?);
        let p = Param {
            x: addr(&t.x)?,
            row: data(&t.row)?,
            row_scales,
            column: data(&t.column)?,
            column_scales,
            scale: if row_scales != 0 { row_scales } else { column_scales },
            rows: rows as u32,
            cols: cols as u32,
            pow2: u32::from(d.recipe().pow2),
            swizzled: u32::from(d.layout == ScaleLayout::Mx1x32Swizzled),
        };
        self.hold(stream, t);
        if d.layout == ScaleLayout::Tensor {
            self.scale(stream, &p, rows * cols)?;
        }
        let tile = QUANT_TILE as usize;
        let tiles = rows.div_ceil(tile) * cols.div_ceil(tile);
        if tiles == 0 {
            return Ok(());
        }
        let args = LaunchArgs::new().arg(&p);
        // SAFETY: `tw_quant_*` take a `TwQuant`; its tensors were checked to be of these shapes and
        // types and on this device, and are held.
        unsafe { self.quant.launch(stream, grid(tiles), args) }
    }

    fn hold(&self, stream: &CudaStream, t: &QuantInputs) {
        let state = self.state.as_ref();
        let state = state.map(|s| (s.history.clone(), s.scale.clone(), s.steps.clone()));
        hold(stream, (t.clone(), self.parts.clone(), state));
    }

    /// Queues the per-tensor scale of `n` elements.
    fn scale(&self, stream: &CudaStream, p: &Param, n: usize) -> Result<()> {
        let (num, parts) = (n.div_ceil(AMAX_SHARE).min(AMAX_BLOCKS), self.parts.addr());
        debug_assert!(4 * num <= self.parts.len_bytes());
        let (len, zero) = (n as u64, 0u64);
        if num > 0 {
            let args = LaunchArgs::new().arg(&p.x).arg(&len).arg(&parts);
            // SAFETY: `tw_amax` takes (const Bits*, u64, float*): x has `n` elements, and each of
            // `num` blocks writes one of the parts; all are held.
            unsafe { self.amax.launch(stream, grid(num), args)? };
        }
        let num = num as u32;
        let args = LaunchArgs::new().arg(&parts).arg(&num);
        let Some(s) = &self.state else {
            let args = args.arg(&p.pow2).arg(&zero).arg(&p.row_scales).arg(&p.column_scales);
            // SAFETY: `tw_scale` takes (const float*, u32, u32, float*, float*, float*); null is
            // what it does not write, and the scales have one element each.
            return unsafe { self.scale.launch(stream, grid(1), args) };
        };
        let (history, steps, scale) = (addr(&s.history)?, addr(&s.steps)?, addr(&s.scale)?);
        let args = args.arg(&history).arg(&s.window).arg(&steps).arg(&scale).arg(&s.margin);
        let args = args.arg(&p.row_scales).arg(&p.column_scales);
        // SAFETY: `tw_scale_delayed` takes (const float*, u32, float*, u32, i64*, float*, int,
        // float*, float*); the history has `window` elements, and all of it is held.
        unsafe { self.scale_delayed.launch(stream, grid(1), args) }
    }
}

fn grid(blocks: usize) -> Grid {
    Grid::new(blocks as u32, QUANT_THREADS as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_kernel_does_is_said_with_a_way_out() {
        let (src, dst) = (DType::BF16, DType::F8E4M3);
        let d = QuantDesc::new(8, 8, src, dst, ScaleLayout::Tensor);
        check(&d).unwrap();
        let e = check(&QuantDesc { scope: Scope::Team, ..d }).unwrap_err();
        assert!(e.is_unsupported() && e.get_hint().is_some());
        assert!(check(&QuantDesc { rows: usize::MAX / 256, ..d }).is_err());
    }
}
