//! The operations, a function each: tensors in, tensors out, everything else by value.
//!
//! What an operation is asked to do (`describe`) needs shapes and types alone, and knows no
//! framework.

pub mod attention;
pub mod collective;
pub mod ep;
pub mod grouped;
pub mod overlap;
pub mod permute;
pub mod quant;

use tilewire::prelude::*;

/// The shape and type of a tensor, for descriptions.
#[derive(Clone, Copy, Debug)]
pub struct Form {
    pub shape: Shape,
    pub dtype: DType,
}

impl From<&Tensor> for Form {
    fn from(t: &Tensor) -> Self {
        Self { shape: t.shape(), dtype: t.dtype() }
    }
}

impl Form {
    /// Rows and columns of a matrix.
    pub fn matrix(&self, what: &str) -> Result<(usize, usize)> {
        match self.shape.dims() {
            [rows, cols] => Ok((*rows, *cols)),
            _ => Err(Error::invalid(format!("`{what}` must be a matrix")).seen(self.shape)),
        }
    }
}
