//! Matrices of the host, as operations look at them.

/// A strided f32 matrix: `at(i, j) = data[i * row + j * col]`.
#[derive(Clone, Copy)]
pub(crate) struct Mat<'a> {
    pub data: &'a [f32],
    pub row: usize,
    pub col: usize,
}

impl<'a> Mat<'a> {
    /// Makes a row-major matrix with `width` columns.
    pub fn rows(data: &'a [f32], width: usize) -> Self {
        Self { data, row: width, col: 1 }
    }

    /// Returns the transpose.
    pub fn t(self) -> Self {
        Self { data: self.data, row: self.col, col: self.row }
    }

    /// Returns the matrix from row `r` and column `c` on.
    pub fn from(self, r: usize, c: usize) -> Self {
        let at = (r * self.row + c * self.col).min(self.data.len());
        Self { data: &self.data[at..], ..self }
    }
}
