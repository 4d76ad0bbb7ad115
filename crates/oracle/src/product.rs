//! Products of matrices, blocked for caches and registers and spread over all processors.
//!
//! Every element is still `0 + a_i0 b_0j + a_i1 b_1j + ...`, added one after the other in this
//! order: blocks only change which element's turn it is. The bits are those of the plain loops,
//! which the tests of this module keep.

use crate::{Mat, par};

/// Rows and columns of what is held in registers: eight pairs of f64, the largest that leaves
/// registers for operands on every x86-64.
const TILE: (usize, usize) = (4, 4);
/// Rows of A that a thread takes at once, and how much of the contraction: 128 KiB.
const BLOCK: (usize, usize) = (64, 256);

/// A matrix as an operand of a product.
#[derive(Clone, Copy, Debug)]
pub struct Factor<'a> {
    /// Its elements.
    pub mat: &'a Mat,
    /// The transpose is meant.
    pub trans: bool,
    /// The absolute values are meant.
    pub abs: bool,
}

impl<'a> From<&'a Mat> for Factor<'a> {
    fn from(mat: &'a Mat) -> Self {
        Self { mat, trans: false, abs: false }
    }
}

impl Factor<'_> {
    /// The transpose.
    pub fn t(self) -> Self {
        Self { trans: !self.trans, ..self }
    }

    /// The absolute values.
    pub fn abs(self) -> Self {
        Self { abs: true, ..self }
    }

    fn shape(&self) -> (usize, usize) {
        let (rows, cols) = (self.mat.rows, self.mat.cols);
        if self.trans { (cols, rows) } else { (rows, cols) }
    }

    /// Writes rows `row..` and columns `col..` of as many as fit in `out`, `[cols][N]`: `N` rows
    /// lie beside each other, zeros where there is no row.
    fn pack<const N: usize>(&self, row: usize, col: usize, out: &mut [[f64; N]]) {
        let (rows, _) = self.shape();
        let some = (rows - row).min(N);
        let width = self.mat.cols;
        for (k, out) in out.iter_mut().enumerate() {
            *out = [0.0; N];
            if self.trans {
                out[..some].copy_from_slice(&self.mat.data[(col + k) * width + row..][..some]);
            } else {
                for (r, o) in out[..some].iter_mut().enumerate() {
                    *o = self.mat.data[(row + r) * width + col + k];
                }
            }
            if self.abs {
                out.iter_mut().for_each(|v| *v = v.abs());
            }
        }
    }
}

/// `C[i, j] = sum_k A[i, k] B[k, j]`: `a` is `[M, K]`, `b` is `[K, N]`, after the transposes.
///
/// # Panics
/// If the inner extents differ.
pub fn product<'a>(a: impl Into<Factor<'a>>, b: impl Into<Factor<'a>>) -> Mat {
    let (a, b) = (a.into(), b.into());
    let work = a.mat.data.len().saturating_mul(b.shape().1);
    product_on(par::threads(work), a, b)
}

fn product_on(threads: usize, a: Factor<'_>, b: Factor<'_>) -> Mat {
    let ((m, k), (inner, n)) = (a.shape(), b.shape());
    assert_eq!(k, inner, "inner extents differ");
    let mut c = Mat::zeros(m, n);
    if c.data.is_empty() || k == 0 {
        return c;
    }
    // All of B once, strip by strip of columns: `[strips][k][TILE.1]`.
    let mut packed = vec![[0.0; TILE.1]; n.div_ceil(TILE.1) * k];
    par::parts(threads, &mut packed, k, |first, strip| b.t().pack(first / k * TILE.1, 0, strip));
    par::parts(threads, &mut c.data, BLOCK.0 * n, |first, rows| {
        let mut own = vec![[0.0; TILE.0]; BLOCK.1 * BLOCK.0 / TILE.0];
        for k0 in (0..k).step_by(BLOCK.1) {
            let depth = BLOCK.1.min(k - k0);
            let strips = (rows.len() / n).div_ceil(TILE.0);
            for (s, strip) in own.chunks_exact_mut(depth).take(strips).enumerate() {
                a.pack(first / n + s * TILE.0, k0, strip);
            }
            for (j, b) in packed.chunks_exact(k).enumerate() {
                for (s, a) in own.chunks_exact(depth).take(strips).enumerate() {
                    let rows = &mut rows[s * TILE.0 * n..];
                    tile(a, &b[k0..k0 + depth], rows, j * TILE.1, n);
                }
            }
        }
    });
    c
}

/// Adds the products of a strip of A and one of B to the rows of C from column `col` on.
fn tile(a: &[[f64; TILE.0]], b: &[[f64; TILE.1]], rows: &mut [f64], col: usize, n: usize) {
    let cols = TILE.1.min(n - col);
    let mut acc = [[0.0; TILE.1]; TILE.0];
    for (acc, row) in acc.iter_mut().zip(rows.chunks(n)) {
        acc[..cols].copy_from_slice(&row[col..col + cols]);
    }
    for (a, b) in a.iter().zip(b) {
        for (acc, a) in acc.iter_mut().zip(a) {
            for (acc, b) in acc.iter_mut().zip(b) {
                *acc += a * b;
            }
        }
    }
    for (acc, row) in acc.iter().zip(rows.chunks_mut(n)) {
        row[col..col + cols].copy_from_slice(&acc[..cols]);
    }
}

#[cfg(test)]
mod tests {
    use tilewire_core::Rng;

    use super::*;
    use crate::mat::total;

    /// The mathematics written down.
    fn naive(a: Factor<'_>, b: Factor<'_>) -> Mat {
        let at = |f: Factor<'_>, r, c| {
            let v = if f.trans { f.mat.at(c, r) } else { f.mat.at(r, c) };
            if f.abs { v.abs() } else { v }
        };
        let k = a.shape().1;
        Mat::from_fn(a.shape().0, b.shape().1, |i, j| {
            total((0..k).map(|k| at(a, i, k) * at(b, k, j)))
        })
    }

    #[test]
    fn blocks_and_threads_have_the_bits_of_plain_loops() {
        let mut rng = Rng::new(5);
        let fixed = [(1, 1, 1), (4, 4, 256), (64, 4, 257), (65, 5, 600), (3, 9, 0), (0, 3, 2)];
        let drawn: Vec<_> =
            (0..20).map(|_| [70, 40, 530].map(|n| 1 + rng.below(n) as usize)).collect();
        for (m, n, k) in fixed.into_iter().chain(drawn.into_iter().map(|[m, n, k]| (m, n, k))) {
            for way in 0..8 {
                let [ta, tb, abs] = [1, 2, 4].map(|bit| way & bit != 0);
                let mut draw = |r, c, t| match t {
                    true => Mat::random(&mut rng, c, r),
                    false => Mat::random(&mut rng, r, c),
                };
                let (a, b) = (draw(m, k, ta), draw(k, n, tb));
                let factor = |mat, trans| Factor { mat, trans, abs };
                let want = naive(factor(&a, ta), factor(&b, tb));
                for threads in [1, 3] {
                    let got = product_on(threads, factor(&a, ta), factor(&b, tb));
                    let bits = |m: &Mat| m.data.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                    assert_eq!((got.rows, got.cols), (m, n));
                    assert!(bits(&got) == bits(&want), "{m}x{n}x{k} {way} on {threads}");
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_reaches_its_row_and_column_alone() {
        let mut rng = Rng::new(6);
        let (mut a, b) = (Mat::random(&mut rng, 9, 300), Mat::random(&mut rng, 300, 7));
        *a.at_mut(4, 299) = f64::NAN;
        let c = product_on(2, (&a).into(), (&b).into());
        assert!((0..9).all(|i| (0..7).all(|j| c.at(i, j).is_nan() == (i == 4))));
    }
}
