//! The matrix that every reference works on.

use std::ops::Range;

use tilewire_core::{DType, Rng, convert_from_f32, convert_to_f32};

use crate::par;
use crate::product::{Factor, product};

/// Elements that a thread takes at once.
const PART: usize = 1 << 14;

/// A dense row-major matrix of f64: element `(r, c)` is `data[r * cols + c]`.
///
/// Tensors of more dimensions are matrices with the outer or inner ones folded; each function says
/// how. Either extent may be 0.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Mat {
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    /// Elements, row-major.
    pub data: Vec<f64>,
}

impl Mat {
    /// A matrix from its elements, row-major.
    ///
    /// # Panics
    /// If `data` is not `rows * cols` long.
    pub fn new(rows: usize, cols: usize, data: Vec<f64>) -> Self {
        assert_eq!(data.len(), rows * cols, "{rows} x {cols} matrix has the wrong length");
        Self { rows, cols, data }
    }

    /// All zeros.
    pub fn zeros(rows: usize, cols: usize) -> Self {
        Self { rows, cols, data: vec![0.0; rows * cols] }
    }

    /// Element `(r, c)` is `f(r, c)`.
    pub fn from_fn(rows: usize, cols: usize, mut f: impl FnMut(usize, usize) -> f64) -> Self {
        let mut data = Vec::with_capacity(rows * cols);
        for r in 0..rows {
            for c in 0..cols {
                data.push(f(r, c));
            }
        }
        Self { rows, cols, data }
    }

    /// Row `r` is what `f(r, row)` makes of zeros; rows are made at once on all processors.
    pub fn from_rows(rows: usize, cols: usize, f: impl Fn(usize, &mut [f64]) + Sync) -> Self {
        let mut m = Self::zeros(rows, cols);
        if cols > 0 {
            let threads = par::threads(m.data.len());
            let some = PART.div_ceil(cols);
            par::parts(threads, &mut m.data, some * cols, |first, part| {
                let rows = part.chunks_exact_mut(cols).enumerate();
                rows.for_each(|(r, row)| f(first / cols + r, row));
            });
        }
        m
    }

    /// Exact widening of f32 elements.
    ///
    /// # Panics
    /// If `data` is not `rows * cols` long.
    pub fn from_f32(rows: usize, cols: usize, data: &[f32]) -> Self {
        Self::new(rows, cols, data.iter().map(|&v| f64::from(v)).collect())
    }

    /// Elements rounded to f32.
    pub fn to_f32(&self) -> Vec<f32> {
        self.data.iter().map(|&v| v as f32).collect()
    }

    /// Elements of `dtype` in `bytes`, widened (by way of f32).
    ///
    /// # Panics
    /// If `bytes` is not `rows * cols` elements long.
    pub fn from_bytes(rows: usize, cols: usize, dtype: DType, bytes: &[u8]) -> Self {
        let mut f = vec![0.0; rows * cols];
        convert_to_f32(dtype, bytes, &mut f);
        Self::from_f32(rows, cols, &f)
    }

    /// Elements rounded to f32 and then to `dtype`, as bytes.
    pub fn to_bytes(&self, dtype: DType) -> Vec<u8> {
        let mut bytes = vec![0; self.data.len() * dtype.size()];
        convert_from_f32(dtype, &self.to_f32(), &mut bytes);
        bytes
    }

    /// The same matrix with every element rounded to `dtype`: what a kernel is really given.
    pub fn rounded(&self, dtype: DType) -> Self {
        let mut m = self.clone();
        par::parts(par::threads(m.data.len()), &mut m.data, PART, |_, part| {
            let narrow: Vec<f32> = part.iter().map(|&v| v as f32).collect();
            let (mut bytes, mut wide) = (vec![0; part.len() * dtype.size()], vec![0.0; part.len()]);
            convert_from_f32(dtype, &narrow, &mut bytes);
            convert_to_f32(dtype, &bytes, &mut wide);
            part.iter_mut().zip(wide).for_each(|(o, v)| *o = f64::from(v));
        });
        m
    }

    /// Standard normal elements, each exactly representable in f32.
    pub fn random(rng: &mut Rng, rows: usize, cols: usize) -> Self {
        /// Numbers that one of them takes.
        const DRAWS: u64 = 2;
        let mut m = Self::zeros(rows, cols);
        par::parts(par::threads(m.data.len()), &mut m.data, PART, |first, part| {
            let mut own = rng.clone();
            own.skip(DRAWS * first as u64);
            part.iter_mut().for_each(|v| *v = f64::from(own.normal()));
        });
        rng.skip(DRAWS * m.data.len() as u64);
        m
    }

    /// Uniform integers in `-max..=max`, for comparisons that must be bit-exact.
    pub fn random_ints(rng: &mut Rng, rows: usize, cols: usize, max: u32) -> Self {
        let n = 2 * u64::from(max) + 1;
        Self::from_fn(rows, cols, |_, _| rng.below(n) as f64 - f64::from(max))
    }

    /// Element `(r, c)`.
    ///
    /// # Panics
    /// If out of range.
    pub fn at(&self, r: usize, c: usize) -> f64 {
        assert!(r < self.rows && c < self.cols, "({r}, {c}) of {} x {}", self.rows, self.cols);
        self.data[r * self.cols + c]
    }

    /// Element `(r, c)`, to write.
    ///
    /// # Panics
    /// If out of range.
    pub fn at_mut(&mut self, r: usize, c: usize) -> &mut f64 {
        assert!(r < self.rows && c < self.cols, "({r}, {c}) of {} x {}", self.rows, self.cols);
        &mut self.data[r * self.cols + c]
    }

    /// Row `r`.
    ///
    /// # Panics
    /// If out of range.
    pub fn row(&self, r: usize) -> &[f64] {
        assert!(r < self.rows, "row {r} of {}", self.rows);
        &self.data[r * self.cols..(r + 1) * self.cols]
    }

    /// Row `r`, to write.
    ///
    /// # Panics
    /// If out of range.
    pub fn row_mut(&mut self, r: usize) -> &mut [f64] {
        assert!(r < self.rows, "row {r} of {}", self.rows);
        &mut self.data[r * self.cols..(r + 1) * self.cols]
    }

    /// `self^T`.
    pub fn transpose(&self) -> Self {
        let column = |c: usize| self.data[c..].iter().step_by(self.cols);
        Self::from_rows(self.cols, self.rows, |r, row| {
            row.iter_mut().zip(column(r)).for_each(|(o, v)| *o = *v);
        })
    }

    /// The rows in `range`.
    ///
    /// # Panics
    /// If out of range.
    pub fn slice_rows(&self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.rows,
            "rows {range:?} of {}",
            self.rows
        );
        let data = self.data[range.start * self.cols..range.end * self.cols].to_vec();
        Self::new(range.len(), self.cols, data)
    }

    /// The columns in `range`.
    ///
    /// # Panics
    /// If out of range.
    pub fn slice_cols(&self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.cols,
            "cols {range:?} of {}",
            self.cols
        );
        Self::from_fn(self.rows, range.len(), |r, c| self.at(r, range.start + c))
    }

    /// The parts below each other; no parts give a 0 x 0 matrix.
    ///
    /// # Panics
    /// If the numbers of columns differ.
    pub fn vstack(parts: &[Mat]) -> Self {
        let cols = parts.first().map_or(0, |p| p.cols);
        assert!(parts.iter().all(|p| p.cols == cols), "parts differ in columns");
        let data: Vec<f64> = parts.iter().flat_map(|p| p.data.iter().copied()).collect();
        Self { rows: parts.iter().map(|p| p.rows).sum(), cols, data }
    }

    /// The parts beside each other; no parts give a 0 x 0 matrix.
    ///
    /// # Panics
    /// If the numbers of rows differ.
    pub fn hstack(parts: &[Mat]) -> Self {
        let rows = parts.first().map_or(0, |p| p.rows);
        assert!(parts.iter().all(|p| p.rows == rows), "parts differ in rows");
        let data =
            (0..rows).flat_map(|r| parts.iter().flat_map(move |p| p.row(r).to_vec())).collect();
        Self::new(rows, parts.iter().map(|p| p.cols).sum(), data)
    }

    /// `f` of every element.
    pub fn map(&self, f: impl Fn(f64) -> f64 + Sync) -> Self {
        let mut m = self.clone();
        par::parts(par::threads(m.data.len()), &mut m.data, PART, |_, part| {
            part.iter_mut().for_each(|v| *v = f(*v));
        });
        m
    }

    /// `f` of every pair of elements.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn zip(&self, other: &Mat, f: impl Fn(f64, f64) -> f64 + Sync) -> Self {
        assert_eq!((self.rows, self.cols), (other.rows, other.cols), "shapes differ");
        let mut m = self.clone();
        par::parts(par::threads(m.data.len()), &mut m.data, PART, |first, part| {
            part.iter_mut().zip(&other.data[first..]).for_each(|(a, b)| *a = f(*a, *b));
        });
        m
    }

    /// `self + other`.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn add(&self, other: &Mat) -> Self {
        self.zip(other, |a, b| a + b)
    }

    /// Row `r` times `weights[r]`.
    ///
    /// # Panics
    /// If there is not one weight for each row.
    pub fn scale_rows(&self, weights: &[f64]) -> Self {
        assert_eq!(weights.len(), self.rows, "one weight for each row");
        Self::from_fn(self.rows, self.cols, |r, c| weights[r] * self.at(r, c))
    }

    /// Sum over the rows: element `c` is `sum_r self[r, c]`. The gradient of a bias.
    pub fn col_sums(&self) -> Vec<f64> {
        let mut sums = vec![0.0; self.cols];
        for row in self.data.chunks_exact(self.cols.max(1)) {
            sums.iter_mut().zip(row).for_each(|(s, v)| *s += v);
        }
        sums
    }

    /// Sum of the products of corresponding elements.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn dot(&self, other: &Mat) -> f64 {
        total(self.zip(other, |a, b| a * b).data)
    }
}

/// Sum from +0 upwards. (`Iterator::sum` of nothing is -0, and an empty contraction must be +0.)
pub(crate) fn total(terms: impl IntoIterator<Item = f64>) -> f64 {
    terms.into_iter().fold(0.0, |acc, v| acc + v)
}

/// `C[i, j] = sum_k A[i, k] B[k, j]`; `A` is `[M, K]`, `B` is `[K, N]`.
///
/// # Panics
/// If the inner extents differ.
pub fn matmul(a: &Mat, b: &Mat) -> Mat {
    product(a, b)
}

/// `|A||B|`, the product of the absolute values: the magnitude in the error bound of
/// [`tilewire_core::numerics`].
///
/// # Panics
/// If the inner extents differ.
pub fn matmul_abs(a: &Mat, b: &Mat) -> Mat {
    product(Factor::from(a).abs(), Factor::from(b).abs())
}
