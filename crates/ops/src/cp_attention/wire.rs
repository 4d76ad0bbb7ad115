//! How tensors lie on the wire: elements of some rows, `[rows, heads, d]`, then their scales.

use std::ops::Range;

use tilewire_core::{DType, convert_from_f32, convert_to_f32};

/// Format of one tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Format {
    pub heads: usize,
    pub d: usize,
    pub dtype: DType,
    /// One f32 scale for each (row, head) follows the elements.
    pub scaled: bool,
}

impl Format {
    pub fn new(heads: usize, d: usize, dtype: DType) -> Self {
        Self { heads, d, dtype, scaled: dtype.is_fp8() }
    }

    pub fn row_bytes(&self) -> usize {
        self.heads * (self.d * self.dtype.size() + if self.scaled { 4 } else { 0 })
    }

    /// Appends `values`, `[rows, heads, d]`. Scales that are given are used (FP8 values that were
    /// made with them come back bit for bit); otherwise `amax / max_finite`.
    pub fn encode(&self, values: &[f32], scales: Option<&[f32]>, out: &mut Vec<u8>) {
        if !self.scaled {
            return append(out, self.dtype, values);
        }
        let max = self.dtype.max_finite() as f32;
        let own: Vec<f32> = match scales {
            Some(s) => s.to_vec(),
            None => values.chunks_exact(self.d).map(|x| scale_of(x, max)).collect(),
        };
        let mut codes = Vec::with_capacity(values.len());
        for (x, &s) in values.chunks_exact(self.d).zip(&own) {
            codes.extend(x.iter().map(|v| if s == 0.0 { 0.0 } else { v / s }));
        }
        append(out, self.dtype, &codes);
        append(out, DType::F32, &own);
    }

    /// The values of `rows` rows at the beginning of `bytes`, and the rest of `bytes`.
    pub fn decode<'a>(&self, bytes: &'a [u8], rows: usize, values: &mut [f32]) -> &'a [u8] {
        let (mine, rest) = bytes.split_at(rows * self.row_bytes());
        let (codes, scales) = mine.split_at(rows * self.heads * self.d * self.dtype.size());
        convert_to_f32(self.dtype, codes, values);
        if self.scaled {
            let mut s = vec![0.0; rows * self.heads];
            convert_to_f32(DType::F32, scales, &mut s);
            for (x, s) in values.chunks_exact_mut(self.d).zip(s) {
                x.iter_mut().for_each(|x| *x *= s);
            }
        }
        rest
    }
}

/// `amax / max`, not below the smallest normal number; 1 where there is nothing to scale.
fn scale_of(x: &[f32], max: f32) -> f32 {
    let amax = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    match amax == 0.0 || amax.is_infinite() {
        true => 1.0,
        false => ((f64::from(amax) / f64::from(max)) as f32).max(f32::MIN_POSITIVE),
    }
}

fn append(out: &mut Vec<u8>, dtype: DType, values: &[f32]) {
    let at = out.len();
    out.resize(at + values.len() * dtype.size(), 0);
    convert_from_f32(dtype, values, &mut out[at..]);
}

/// Rows `rows` and heads `heads` of `x`, `[.., all, d]`, packed.
pub(super) fn pick(
    x: &[f32],
    rows: Range<usize>,
    heads: &Range<usize>,
    all: usize,
    d: usize,
) -> Vec<f32> {
    let mut out = Vec::with_capacity(rows.len() * heads.len() * d);
    for r in rows {
        out.extend_from_slice(&x[(r * all + heads.start) * d..(r * all + heads.end) * d]);
    }
    out
}

/// Adds (or stores) `part`, `[rows, heads, d]`, at rows `first..` of `x`, `[.., all, d]`.
pub(super) fn add_heads(x: &mut [f32], part: &[f32], heads: &Range<usize>, all: usize, d: usize) {
    let width = heads.len() * d;
    for (r, row) in part.chunks_exact(width.max(1)).enumerate() {
        let at = (r * all + heads.start) * d;
        x[at..at + width].iter_mut().zip(row).for_each(|(x, p)| *x += p);
    }
}

/// `[rows, heads]` to `[heads, rows]`.
pub(super) fn transpose(x: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    for r in 0..rows {
        for c in 0..cols {
            out[c * rows + r] = x[r * cols + c];
        }
    }
    out
}
