//! Tensors of some rows and heads as bytes on the wire, and back.

use std::ops::Range;

use tilewire_core::memory::filled_or_unwind;
use tilewire_core::{DType, convert_from_f32};

use crate::common::wide;

/// Returns `values` as elements of `dtype`.
pub(super) fn narrow(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut out = filled_or_unwind(0, values.len() * dtype.size());
    convert_from_f32(dtype, values, &mut out);
    out
}

/// Returns elements of `dtype` as f32, each row and head of `dim` elements times its scale if there
/// are scales.
pub(super) fn widen(dtype: DType, codes: &[u8], scales: Option<&[u8]>, dim: usize) -> Vec<f32> {
    let mut values = wide(dtype, codes).into_owned();
    if let Some(scales) = scales {
        let scales = wide(DType::F32, scales);
        for (x, s) in values.chunks_exact_mut(dim).zip(scales.iter()) {
            x.iter_mut().for_each(|x| *x *= s);
        }
    }
    values
}

/// Codes and scales of `values`: `amax / max_finite` for each row and head of `dim` elements.
pub(super) fn quantise(dtype: DType, values: &[f32], dim: usize) -> [Vec<u8>; 2] {
    let max = dtype.max_finite() as f32;
    let scales: Vec<f32> = values.chunks_exact(dim).map(|x| scale_of(x, max)).collect();
    let mut codes = filled_or_unwind(0.0, values.len());
    for ((to, x), s) in codes.chunks_exact_mut(dim).zip(values.chunks_exact(dim)).zip(&scales) {
        to.iter_mut().zip(x).for_each(|(to, v)| *to = v / s);
    }
    [narrow(dtype, &codes), narrow(DType::F32, &scales)]
}

/// Returns the scale `amax / max`, not below the smallest normal number; 1 where there is nothing
/// to scale.
fn scale_of(x: &[f32], max: f32) -> f32 {
    let amax = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    match amax == 0.0 || amax.is_infinite() {
        true => 1.0,
        false => ((f64::from(amax) / f64::from(max)) as f32).max(f32::MIN_POSITIVE),
    }
}

/// Keys and values as they travel: for each tensor (k, v, then the scales of each if they travel as
/// FP8) its rows of some heads.
pub(super) struct KeyBytes<'a> {
    pub tensors: Vec<&'a [u8]>,
    pub dtype: DType,
    pub heads: usize,
    /// Bytes of a row and head of each tensor.
    pub wire: &'a [usize],
    /// Elements of a row and head of k and of v.
    pub dims: [usize; 2],
}

impl KeyBytes<'_> {
    /// Returns keys and values of `rows` as f32, `[rows, heads, d]`.
    pub fn widen(&self, rows: &Range<usize>) -> [Vec<f32>; 2] {
        [0, 1].map(|i| {
            let scales = (self.wire.len() > 2).then(|| self.rows(i + 2, rows));
            widen(self.dtype, self.rows(i, rows), scales, self.dims[i])
        })
    }

    fn rows(&self, i: usize, rows: &Range<usize>) -> &[u8] {
        let row = self.heads * self.wire[i];
        &self.tensors[i][rows.start * row..rows.end * row]
    }
}
