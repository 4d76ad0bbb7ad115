//! Shapes: up to eight dimensions, row-major unless strides say otherwise.

use std::fmt;

use crate::{Error, Result};

/// The most dimensions a tensor can have.
pub const MAX_DIMS: usize = 8;

/// Extents of a tensor, outermost first. A 0-dim shape has one element; an extent may be 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; MAX_DIMS],
    ndim: u8,
}

impl Shape {
    /// A shape with the given extents.
    ///
    /// # Errors
    /// `InvalidArgument` with more than [`MAX_DIMS`] extents, or if their product overflows.
    pub fn new(extents: &[usize]) -> Result<Self> {
        if extents.len() > MAX_DIMS {
            return Err(Error::invalid(format!(
                "a tensor has at most {MAX_DIMS} dimensions, this one has {}",
                extents.len()
            )));
        }
        let mut product = 1usize;
        for &e in extents {
            product = product
                .checked_mul(e.max(1))
                .ok_or_else(|| Error::invalid(format!("{extents:?} has too many elements")))?;
        }
        let mut dims = [0; MAX_DIMS];
        dims[..extents.len()].copy_from_slice(extents);
        Ok(Self { dims, ndim: extents.len() as u8 })
    }

    /// A shape of one dimension.
    pub fn d1(n: usize) -> Self {
        let mut dims = [0; MAX_DIMS];
        dims[0] = n;
        Self { dims, ndim: 1 }
    }

    /// A shape of two dimensions, rows by columns.
    pub fn d2(rows: usize, cols: usize) -> Self {
        let mut dims = [0; MAX_DIMS];
        dims[..2].copy_from_slice(&[rows, cols]);
        Self { dims, ndim: 2 }
    }

    /// A shape of three dimensions.
    pub fn d3(a: usize, b: usize, c: usize) -> Self {
        let mut dims = [0; MAX_DIMS];
        dims[..3].copy_from_slice(&[a, b, c]);
        Self { dims, ndim: 3 }
    }

    /// The extents.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.ndim as usize]
    }

    /// Number of dimensions.
    pub fn ndim(&self) -> usize {
        self.ndim as usize
    }

    /// Extent of dimension `i`.
    pub fn dim(&self, i: usize) -> usize {
        self.dims()[i]
    }

    /// Number of elements: the product of the extents, 1 for a 0-dim shape.
    pub fn num_elems(&self) -> usize {
        // Saturating: a shape that no memory can hold matches no buffer.
        if self.dims().contains(&0) {
            0
        } else {
            self.dims().iter().fold(1, |n, &d| n.saturating_mul(d))
        }
    }

    /// Row-major strides in elements.
    pub fn strides(&self) -> Vec<usize> {
        let mut s = vec![1; self.ndim()];
        for i in (0..self.ndim().saturating_sub(1)).rev() {
            s[i] = s[i + 1] * self.dim(i + 1);
        }
        s
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, d) in self.dims().iter().enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{d}")?;
        }
        f.write_str("]")
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_dim_zero_extent_and_overflow() {
        assert_eq!(Shape::new(&[]).unwrap().num_elems(), 1);
        assert_eq!(Shape::new(&[3, 0, 2]).unwrap().num_elems(), 0);
        assert!(Shape::new(&[usize::MAX, 2]).is_err());
        assert!(Shape::new(&[1; MAX_DIMS + 1]).is_err());
        assert_eq!(Shape::d3(2, 3, 4).strides(), [12, 4, 1]);
    }
}
