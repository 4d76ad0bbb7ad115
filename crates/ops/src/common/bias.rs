//! A bias: f32, or of the type of the results.

use tilewire_core::{DType, Result};
use tilewire_device::Tensor;

use super::cuda::addr;

/// Returns the type that a bias must have beside results of type `out`: `out` if the bias has it
/// already, else f32.
pub(crate) fn bias_type(bias: Option<&Tensor>, out: DType) -> DType {
    bias.map(Tensor::dtype).filter(|given| *given == out).unwrap_or(DType::F32)
}

/// A bias on the device, or none.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Bias {
    /// Its address, or 0.
    pub addr: u64,
    /// It is of the type of the results; otherwise it is f32.
    pub of_out: bool,
    size: usize,
}

impl Bias {
    /// Returns the bias in a tensor, whose type is that of [`bias_type`].
    ///
    /// # Errors
    /// `InvalidArgument` for a tensor of the host.
    pub fn of(t: Option<&Tensor>) -> Result<Self> {
        let Some(dtype) = t.map(Tensor::dtype) else { return Ok(Self::default()) };
        Ok(Self { addr: addr(t)?, of_out: dtype != DType::F32, size: dtype.size() })
    }

    /// Returns the part of the bias from column `col` on.
    pub fn at_col(self, col: usize) -> Self {
        let skip = if self.addr == 0 { 0 } else { (col * self.size) as u64 };
        Self { addr: self.addr + skip, ..self }
    }
}
