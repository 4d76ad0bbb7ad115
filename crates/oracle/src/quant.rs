//! Quantisation to FP8: which scale, which codes.
//!
//! Common to every layout, with `max` the largest finite value of the FP8 type:
//!
//! - `value = data * scale`; `scale = amax / max` rounded to f32, and not below `2^-126`.
//! - With power-of-two scales (always for MXFP8): the smallest `2^e` with `amax / 2^e <= max`.
//! - `amax` ignores NaN. If it is 0 or infinite, the scale is 1 (E8M0 byte 127).
//! - `code = fp8(f32(x / scale))`: one IEEE f32 division, then [`fp8::encode`] (nearest even,
//!   saturating). NaN elements become NaN codes and leave the scale alone.
//! - The blocks at the right and bottom edges may be smaller; swizzle padding bytes are 0.

use std::ops::Range;

use tilewire_core::{DType, QTensor, ScaleLayout, Shape};

use crate::{Mat, fp8};

/// Recipe of a quantisation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QuantSpec {
    /// FP8 type of the data.
    pub dtype: DType,
    /// The elements that share a scale.
    pub layout: ScaleLayout,
    /// Restrict f32 scales to powers of two (E8M0 scales always are).
    pub pow2_scales: bool,
}

impl QuantSpec {
    /// The recipe with f32 scales of any value (powers of two for MXFP8).
    pub fn new(dtype: DType, layout: ScaleLayout) -> Self {
        Self { dtype, layout, pow2_scales: false }
    }

    /// Rows by columns of the block that shares a scale.
    pub fn block(&self, rows: usize, cols: usize) -> (usize, usize) {
        match self.layout {
            ScaleLayout::Tensor => (rows.max(1), cols.max(1)),
            ScaleLayout::Block1x128 => (1, 128),
            ScaleLayout::Block128x128 => (128, 128),
            ScaleLayout::Mx1x32 | ScaleLayout::Mx1x32Swizzled => (1, 32),
        }
    }

    /// Scale of a block whose largest magnitude is `amax`; exactly representable in the type of the
    /// scales.
    pub fn scale(&self, amax: f64) -> f64 {
        let max = self.dtype.max_finite();
        let e8m0 = self.layout.dtype() == DType::E8M0;
        if amax == 0.0 || amax.is_infinite() {
            return 1.0;
        }
        if !e8m0 && !self.pow2_scales {
            let scale = (amax / max) as f32;
            return f64::from(scale.max(f32::MIN_POSITIVE));
        }
        // E8M0 reaches down to 2^-127; an f32 scale stays normal.
        let mut exp = if e8m0 { -127 } else { -126 };
        while exp < 127 && amax / 2f64.powi(exp) > max {
            exp += 1;
        }
        2f64.powi(exp)
    }
}

/// Largest magnitude in a block, ignoring NaN; 0 if there is none.
///
/// # Panics
/// If the block is not inside `x`.
pub fn amax_of(x: &Mat, rows: Range<usize>, cols: Range<usize>) -> f64 {
    let block = x.slice_rows(rows).slice_cols(cols);
    block.data.iter().fold(0.0, |m: f64, v| m.max(v.abs()))
}

/// Largest magnitude in `x`, ignoring NaN; 0 if there is none.
pub fn amax(x: &Mat) -> f64 {
    amax_of(x, 0..x.rows, 0..x.cols)
}

/// Code of `x` under `scale`: `fp8(f32(x / scale))`.
///
/// # Panics
/// If `dtype` is not FP8.
pub fn code(dtype: DType, x: f64, scale: f64) -> u8 {
    fp8::encode(dtype, f64::from((x / scale) as f32))
}

/// Quantises `x` row-wise: blocks of 1x128 and 1x32 run along the columns.
///
/// # Panics
/// If `spec.dtype` is not FP8.
pub fn quantize(x: &Mat, spec: QuantSpec) -> QTensor {
    let (block_rows, block_cols) = spec.block(x.rows, x.cols);
    let mut q = empty(x, spec);
    for r0 in (0..x.rows).step_by(block_rows) {
        for c0 in (0..x.cols).step_by(block_cols) {
            let rows = r0..x.rows.min(r0 + block_rows);
            let cols = c0..x.cols.min(c0 + block_cols);
            let scale = spec.scale(amax_of(x, rows.clone(), cols.clone()));
            put_scale(&mut q, r0, c0, scale);
            for r in rows {
                for c in cols.clone() {
                    q.data[r * x.cols + c] = code(spec.dtype, x.at(r, c), scale);
                }
            }
        }
    }
    q
}

/// Quantises column-wise and stores the transposed copy: [`quantize`] of `x^T`, `[cols, rows]`.
///
/// Blocks of 1x128 and 1x32 run along the rows of `x`, so this is other data than [`quantize`], not
/// its transpose (except for [`ScaleLayout::Tensor`] and [`ScaleLayout::Block128x128`]).
///
/// # Panics
/// If `spec.dtype` is not FP8.
pub fn quantize_transposed(x: &Mat, spec: QuantSpec) -> QTensor {
    quantize(&x.transpose(), spec)
}

/// Quantises with a given per-tensor scale, saturating what does not fit (delayed scaling).
///
/// # Panics
/// If `dtype` is not FP8.
pub fn quantize_with_scale(x: &Mat, dtype: DType, scale: f32) -> QTensor {
    let mut q = empty(x, QuantSpec::new(dtype, ScaleLayout::Tensor));
    q.data = x.data.iter().map(|&v| code(dtype, v, f64::from(scale))).collect();
    put_scale(&mut q, 0, 0, f64::from(scale));
    q
}

/// `data * scale` for every element.
///
/// # Panics
/// If the parts of `q` do not fit each other.
pub fn dequantize(q: &QTensor) -> Mat {
    let (rows, cols) = (q.shape.dim(0), q.shape.dim(1));
    Mat::from_fn(rows, cols, |r, c| {
        fp8::decode(q.dtype, q.data[r * cols + c]) * get_scale(q, q.layout.scale_idx(r, c, cols))
    })
}

/// `x` as it is after quantisation and back.
///
/// # Panics
/// If `spec.dtype` is not FP8.
pub fn fake_quantize(x: &Mat, spec: QuantSpec) -> Mat {
    dequantize(&quantize(x, spec))
}

fn empty(x: &Mat, spec: QuantSpec) -> QTensor {
    assert!(spec.dtype.is_fp8(), "{} is not FP8", spec.dtype);
    let num_scales = spec.layout.num_scales(x.rows, x.cols);
    QTensor {
        data: vec![0; x.rows * x.cols],
        scales: match spec.layout.dtype() {
            DType::E8M0 => vec![0; num_scales],
            // An empty tensor has a per-tensor scale that no element sets.
            _ => 1f32.to_ne_bytes().repeat(num_scales),
        },
        dtype: spec.dtype,
        shape: Shape::d2(x.rows, x.cols),
        layout: spec.layout,
    }
}

fn put_scale(q: &mut QTensor, row: usize, col: usize, scale: f64) {
    let i = q.layout.scale_idx(row, col, q.shape.dim(1));
    if q.layout.dtype() == DType::E8M0 {
        q.scales[i] = (scale.log2().round() + 127.0) as u8;
    } else {
        q.scales[4 * i..4 * i + 4].copy_from_slice(&(scale as f32).to_ne_bytes());
    }
}

fn get_scale(q: &QTensor, i: usize) -> f64 {
    if q.layout.dtype() == DType::E8M0 {
        return fp8::decode_e8m0(q.scales[i]);
    }
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&q.scales[4 * i..4 * i + 4]);
    f64::from(f32::from_ne_bytes(bytes))
}

/// Delayed scaling: the scale of a step comes from the magnitudes of earlier steps
/// (TransformerEngine `DelayedScaling`, with `amax_compute_algo = "max"`).
#[derive(Clone, PartialEq, Debug)]
pub struct DelayedScaling {
    /// FP8 type of the data.
    pub dtype: DType,
    /// The scale is multiplied by `2^margin`, which leaves that much headroom.
    pub margin: i32,
    /// Number of steps that are remembered.
    pub window: usize,
    /// Magnitudes of the last steps, oldest first, at most `window`.
    pub history: Vec<f64>,
    /// Scale to quantise the coming step with; 1 before the first.
    pub scale: f32,
}

impl DelayedScaling {
    /// No history, scale 1.
    ///
    /// # Panics
    /// If `window` is 0 or `dtype` is not FP8.
    pub fn new(dtype: DType, window: usize, margin: i32) -> Self {
        assert!(window > 0 && dtype.is_fp8(), "window {window}, {dtype}");
        Self { dtype, margin, window, history: Vec::new(), scale: 1.0 }
    }

    /// Records the magnitude of the step just done and sets the scale of the next:
    /// `f32(max(history) / max * 2^margin)`, between the least and the largest normal f32. A window
    /// whose maximum is 0 or infinite keeps the scale.
    pub fn record(&mut self, amax: f64) {
        self.history.push(amax);
        if self.history.len() > self.window {
            self.history.remove(0);
        }
        let top = self.history.iter().fold(0.0, |m: f64, &v| m.max(v));
        if top > 0.0 && top.is_finite() {
            let scale = (top / self.dtype.max_finite() * 2f64.powi(self.margin)) as f32;
            self.scale = scale.clamp(f32::MIN_POSITIVE, f32::MAX);
        }
    }

    /// Quantises a step: with the scale so far, and then records `amax(x)`.
    pub fn step(&mut self, x: &Mat) -> QTensor {
        let q = quantize_with_scale(x, self.dtype, self.scale);
        self.record(amax(x));
        q
    }
}
