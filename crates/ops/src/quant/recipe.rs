//! Scales from magnitudes, and blocks from layouts: pure, one definition for host and kernels.

use std::ops::Range;

use tilewire_core::{DType, ScaleLayout};

/// The rule by which a scale follows from a magnitude.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Recipe {
    /// FP8 type of the data.
    pub dtype: DType,
    /// Powers of two only.
    pub pow2: bool,
    /// Scales are E8M0: they reach down to `2^-127`, f32 scales to `2^-126`.
    pub e8m0: bool,
}

impl Recipe {
    /// The scale of elements whose largest magnitude is `amax` (not negative, not NaN).
    pub fn scale(&self, amax: f32) -> f32 {
        if amax == 0.0 || amax.is_infinite() {
            return 1.0;
        }
        if !self.pow2 {
            return (amax / self.dtype.max_finite() as f32).max(f32::MIN_POSITIVE);
        }
        pow2(self.exponent(amax))
    }

    /// The smallest `e` with `amax / 2^e <= max`, not below what the scale's type holds.
    fn exponent(&self, amax: f32) -> i32 {
        // max is 1.75 * 2^8 or 1.75 * 2^15: whether 1.f is above 1.75 decides between two.
        let top = if self.dtype == DType::F8E4M3 { 8 } else { 15 };
        let bits = amax.to_bits();
        let above = i32::from(bits & 0x7f_ffff > 0x60_0000);
        let floor = if self.e8m0 { -127 } else { -126 };
        // A subnormal magnitude has exponent field 0: far below the floor in any case.
        ((bits >> 23) as i32 - 127 - top + above).max(floor)
    }

    /// The next scale of delayed scaling, from the largest magnitude of the window. Finite: codes
    /// of an infinite one would be 0, and their products with it NaN.
    pub fn delayed(&self, top: f32, margin: i32, before: f32) -> f32 {
        if top == 0.0 || top.is_infinite() {
            return before;
        }
        let scale = f64::from(top) / self.dtype.max_finite() * 2f64.powi(margin);
        (scale as f32).clamp(f32::MIN_POSITIVE, f32::MAX)
    }
}

/// `2^e` for `-127 <= e <= 127`.
fn pow2(e: i32) -> f32 {
    if e == -127 { f32::from_bits(1 << 22) } else { f32::from_bits(((e + 127) as u32) << 23) }
}

/// Rows by columns of the elements that share a scale.
pub(super) fn block(layout: ScaleLayout, rows: usize, cols: usize) -> (usize, usize) {
    match layout {
        ScaleLayout::Tensor => (rows.max(1), cols.max(1)),
        ScaleLayout::Block1x128 => (1, 128),
        ScaleLayout::Block128x128 => (128, 128),
        ScaleLayout::Mx1x32 | ScaleLayout::Mx1x32Swizzled => (1, 32),
    }
}

/// All blocks of a `rows x cols` matrix, in row-major order; those at the edges may be smaller.
pub(super) fn blocks(
    layout: ScaleLayout,
    rows: usize,
    cols: usize,
) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let (br, bc) = block(layout, rows, cols);
    (0..rows).step_by(br).flat_map(move |r| {
        (0..cols).step_by(bc).map(move |c| (r..rows.min(r + br), c..cols.min(c + bc)))
    })
}
