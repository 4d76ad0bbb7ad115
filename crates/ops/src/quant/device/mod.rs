//! Quantisation on CUDA devices, by the portable kernels (`quant/sm80_quant.cu`).

use tilewire_core::{DType, Rank, Result, ScaleLayout, Shape};
use tilewire_device::cuda::{CudaContext, CudaMemory, CudaStream, Grid, Kernel, LaunchArgs};
use tilewire_device::{Buffer, Device, Tensor};
use tilewire_kernels::abi::{TwDequant, TwQuant};
use tilewire_kernels::portable::{QUANT, QUANT_THREADS, QUANT_TILE, quant_defines};
use tilewire_symm::{Signals, SymBuf};

use super::launch::DATA;
use super::{DequantDesc, QuantDesc, QuantInputs, Quantized, Scaling};
use crate::common::cuda::{addr, fit_32_bits, hold, load, mantissa, workspace};
use crate::common::lanes::{Lanes, Poison};

/// Elements for which `tw_amax` has a block, up to the most blocks.
const AMAX_SHARE: usize = 16 * QUANT_THREADS as usize;
const AMAX_BLOCKS: usize = 1024;

/// Fails for what no kernel does. Pure.
pub(super) fn check(d: &QuantDesc) -> Result<()> {
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
    /// Partial maxima, f32; behind them my own maximum, for the team.
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
            parts: workspace(ctx, 4 * (AMAX_BLOCKS + 1))?,
            state,
        })
    }

    /// Queues the quantisation of tensors that were checked.
    pub fn launch(&self, stream: &CudaStream, t: &QuantInputs) -> Result<()> {
        self.queue(stream, t, |p, n| {
            let num = self.amax(stream, p, n)?;
            self.scale(stream, p, self.parts.addr(), num)
        })
    }

    /// As [`Prepared::launch`], with the largest magnitude of all ranks: one f32 to every peer, a
    /// flag behind it.
    pub fn launch_team(
        &self,
        l: &Lanes<'_>,
        (area, signals): (&SymBuf, &Signals),
        t: &QuantInputs,
    ) -> Result<()> {
        let team = l.here.heap().team();
        let at = |r: Rank| area.range(4 * r.idx(), 4);
        self.queue(l.main, t, |p, n| {
            let num = self.amax(l.main, p, n)?;
            let mine = self.parts.slice(4 * AMAX_BLOCKS, 4)?;
            self.top(l.main, num, mine.addr())?;
            l.fork()?;
            for peer in team.peers() {
                let to = (peer, at(team.rank()));
                l.net.put_flag(l.side, &l.permit, to, &mine, signals.slot(DATA), "amax")?;
            }
            let own = (team.rank(), at(team.rank()));
            l.net.put(l.main, &l.permit, own, &mine, "amax")?;
            l.net.wait_peers(l.main, signals.slot(DATA), "amax")?;
            let all = l.here.addr(area.range(0, 4 * team.size()), 4 * team.size())?;
            self.scale(l.main, p, all, team.size())
        })
    }

    /// Returns what a launch over a team poisons: its results, and the state of delayed scaling,
    /// which may have taken a maximum that never came.
    pub fn poisons(&self, t: &QuantInputs) -> Result<Vec<Poison>> {
        let results = t.row.iter().chain(&t.column).flat_map(|q| [&q.data, &q.scales]);
        let state = self.state.iter().flat_map(|s| [&s.history, &s.scale]);
        results.chain(state).map(|t| Ok(Poison::value(t.cuda()?))).collect()
    }

    /// Queues codes, and before them the scale of a tensor, which `scale` queues for its elements.
    fn queue(
        &self,
        stream: &CudaStream,
        t: &QuantInputs,
        scale: impl FnOnce(&TwQuant, usize) -> Result<()>,
    ) -> Result<()> {
        let d = &self.desc;
        let data = |q: &Option<Quantized>| addr(q.as_ref().map(|q| &q.data));
        let scales = |q: &Option<Quantized>| addr(q.as_ref().map(|q| &q.scales));
        let (rows, cols) = (t.x.shape().dim(0), t.x.shape().dim(1));
        let (row_scales, column_scales) = (scales(&t.row)?, scales(&t.column)?);
        let p = TwQuant {
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
            scale(&p, rows * cols)?;
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

    /// Queues the partial maxima of `n` elements; returns their number.
    fn amax(&self, stream: &CudaStream, p: &TwQuant, n: usize) -> Result<usize> {
        let (num, parts) = (n.div_ceil(AMAX_SHARE).min(AMAX_BLOCKS), self.parts.addr());
        assert!(4 * num <= self.parts.len_bytes());
        let len = n as u64;
        if num > 0 {
            let args = LaunchArgs::new().arg(&p.x).arg(&len).arg(&parts);
            // SAFETY: `tw_amax` takes (const Bits*, u64, float*): x has `n` elements, and each of
            // `num` blocks writes one of the parts; all are held.
            unsafe { self.amax.launch(stream, grid(num), args)? };
        }
        Ok(num)
    }

    /// Queues the largest of `num` partial maxima, to one f32 at `to`.
    fn top(&self, stream: &CudaStream, num: usize, to: u64) -> Result<()> {
        let (parts, num, pow2, none) = (self.parts.addr(), num as u32, 0u32, 0u64);
        let args = LaunchArgs::new().arg(&parts).arg(&num).arg(&pow2);
        let args = args.arg(&to).arg(&none).arg(&none);
        // SAFETY: as in `scale`; the maximum is one f32 of the workspace, which is held.
        unsafe { self.scale.launch(stream, grid(1), args) }
    }

    /// Queues the per-tensor scale from `num` maxima at `parts`.
    fn scale(&self, stream: &CudaStream, p: &TwQuant, parts: u64, num: usize) -> Result<()> {
        let (num, zero) = (num as u32, 0u64);
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

/// The layout of a matrix's scales.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Scales {
    Of(ScaleLayout),
    /// One f32 for each row, however long it is.
    Rows,
}

impl Scales {
    fn code(self) -> u32 {
        match self {
            Scales::Of(ScaleLayout::Tensor) => 0,
            Scales::Of(ScaleLayout::Block1x128) => 1,
            Scales::Of(ScaleLayout::Block128x128) => 2,
            Scales::Of(ScaleLayout::Mx1x32) => 3,
            Scales::Of(ScaleLayout::Mx1x32Swizzled) => 4,
            Scales::Rows => 5,
        }
    }
}

/// A quantised matrix on the device: `[rows, cols]` codes and scales as their layout says.
pub(crate) struct Codes {
    pub x: u64,
    pub scales: u64,
    pub layout: Scales,
    pub shape: (usize, usize),
}

/// The kernel that multiplies codes by their scales, on raw addresses.
pub(crate) struct Widen(Kernel);

impl Widen {
    /// For codes of type `src`, to f32, bf16 or f16.
    ///
    /// # Errors
    /// As [`CudaContext::module`].
    pub fn new(ctx: &CudaContext, src: DType, out: DType) -> Result<Self> {
        let module = load(ctx, &QUANT, quant_defines(mantissa(out), mantissa(src)))?;
        Ok(Self(module.kernel("tw_dequant")?))
    }

    /// Blocks of a row.
    fn chunks(cols: usize) -> usize {
        cols.div_ceil(4 * QUANT_THREADS as usize)
    }

    /// Checks that the blocks of a launch can be counted.
    pub fn check(rows: usize, cols: usize) -> Result<()> {
        let blocks = rows.saturating_mul(Self::chunks(cols));
        fit_32_bits("dequantisation", &[rows, cols, blocks])
    }

    /// Queues `out = codes * scales`, rounded once; the caller holds the memory.
    ///
    /// # Safety
    /// The addresses must be mapped on the stream's device for a matrix of that shape until the
    /// work has run (and be held by the graph if captured); nothing else may use `out` meanwhile.
    ///
    /// # Errors
    /// What the driver reports.
    pub unsafe fn launch(&self, stream: &CudaStream, q: &Codes, out: u64) -> Result<()> {
        let ((rows, cols), chunks) = (q.shape, Self::chunks(q.shape.1));
        if rows * chunks == 0 {
            return Ok(());
        }
        let p = TwDequant {
            x: q.x,
            scales: q.scales,
            out,
            rows: rows as u32,
            cols: cols as u32,
            layout: q.layout.code(),
            chunks: chunks as u32,
        };
        // SAFETY: `tw_dequant` takes a `TwDequant`; the caller's contract for what it points to.
        unsafe { self.0.launch(stream, grid(rows * chunks), LaunchArgs::new().arg(&p)) }
    }
}

/// The kernel that gives each row of a matrix codes and a scale of its own, on raw addresses.
pub(crate) struct Narrow(Kernel);

impl Narrow {
    /// Most columns of a row.
    pub const MOST_COLS: usize = 128;

    /// From f32, bf16 or f16 to codes of type `dst`.
    ///
    /// # Errors
    /// As [`CudaContext::module`].
    pub fn new(ctx: &CudaContext, src: DType, dst: DType) -> Result<Self> {
        let module = load(ctx, &QUANT, quant_defines(mantissa(src), mantissa(dst)))?;
        Ok(Self(module.kernel("tw_quant_1x128")?))
    }

    /// Queues codes `[rows, cols]` and scales `[rows]` of `x`; the caller holds the memory.
    ///
    /// # Safety
    /// The addresses must be mapped on the stream's device for matrices of that shape until the
    /// work has run (and be held by the graph if captured), scales at a multiple of 4; nothing else
    /// may use the results meanwhile.
    ///
    /// # Errors
    /// What the driver reports.
    pub unsafe fn launch(
        &self,
        stream: &CudaStream,
        x: u64,
        (codes, scales): (u64, u64),
        (rows, cols): (usize, usize),
    ) -> Result<()> {
        // A block of scales is a row: else there would be more than one.
        assert!(cols <= Self::MOST_COLS);
        if rows * cols == 0 {
            return Ok(());
        }
        let p = TwQuant {
            x,
            row: codes,
            row_scales: scales,
            column: 0,
            column_scales: 0,
            scale: 0,
            rows: rows as u32,
            cols: cols as u32,
            pow2: 0,
            swizzled: 0,
        };
        let blocks = rows.div_ceil(QUANT_TILE as usize);
        // SAFETY: `tw_quant_1x128` takes a `TwQuant`; the caller's contract for what it points to.
        unsafe { self.0.launch(stream, grid(blocks), LaunchArgs::new().arg(&p)) }
    }
}

/// The kernel of a dequantisation plan.
pub(super) struct Dequant(Widen);

impl Dequant {
    pub fn new(ctx: &CudaContext, desc: &DequantDesc) -> Result<Self> {
        Widen::check(desc.rows, desc.cols)?;
        Widen::new(ctx, desc.src, desc.out).map(Self)
    }

    /// Queues the dequantisation of tensors that were checked.
    pub fn launch(&self, stream: &CudaStream, q: &Quantized, out: &Tensor) -> Result<()> {
        let codes = Codes {
            x: addr(&q.data)?,
            scales: addr(&q.scales)?,
            layout: Scales::Of(q.layout),
            shape: (out.shape().dim(0), out.shape().dim(1)),
        };
        hold(stream, (q.clone(), out.clone()));
        // SAFETY: the tensors were checked to be of these shapes and types and on this device, and
        // are held.
        unsafe { self.0.launch(stream, &codes, addr(out)?) }
    }
}

fn grid(blocks: usize) -> Grid {
    Grid::new(blocks as u32, QUANT_THREADS as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_kernel_can_count_is_refused() {
        let (src, dst) = (DType::BF16, DType::F8E4M3);
        let d = QuantDesc::new(8, 8, src, dst, ScaleLayout::Tensor);
        check(&d).unwrap();
        assert!(check(&QuantDesc { rows: usize::MAX / 256, ..d }).is_err());
    }
}
