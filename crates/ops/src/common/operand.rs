//! The operand of a product: elements, or FP8 codes with their scales.

use tilewire_core::{DType, Error, Result, ScaleLayout, convert_to_f32};
use tilewire_device::Tensor;

use super::check::{Named, expect_tensor, wide};

/// An operand: a plain tensor, or FP8 data with its scales (`value = data * scale`).
#[derive(Clone, Debug)]
pub struct Operand {
    /// The elements.
    pub data: Tensor,
    /// Scales of FP8 data and their layout. Without them the scale is 1.
    pub scales: Option<(Tensor, ScaleLayout)>,
}

impl From<Tensor> for Operand {
    fn from(data: Tensor) -> Self {
        Self { data, scales: None }
    }
}

impl From<&Tensor> for Operand {
    fn from(data: &Tensor) -> Self {
        data.clone().into()
    }
}

impl Operand {
    /// Checks data and scales against a `[rows, cols]` matrix of `dtype`.
    pub(crate) fn check(&self, what: &str, dtype: DType, rows: usize, cols: usize) -> Result<()> {
        expect_tensor(what, &self.data, dtype, &[rows, cols])?;
        if let Some((s, layout)) = &self.scales {
            if !dtype.is_fp8() {
                return Err(Error::invalid(format!("`{what}` is {dtype} and has no scales")));
            }
            let n = layout.num_scales(rows, cols);
            if s.dtype() != layout.dtype() || s.shape().num_elems() != n {
                return Err(Error::invalid(format!("`{what}` has the wrong scales"))
                    .expected(format_args!("{n} {} for {layout:?}", layout.dtype()))
                    .seen(format_args!("{} {}", s.shape().num_elems(), s.dtype())));
            }
        }
        Ok(())
    }

    /// Its tensors with their name.
    pub(crate) fn named(&self, what: &'static str) -> [Named<'_>; 2] {
        [(what, Some(&self.data)), (what, self.scales.as_ref().map(|(s, _)| s))]
    }

    /// Runs `f` on the values as f32, in the row-major order of memory.
    pub(crate) fn with_wide<R>(&self, f: impl FnOnce(&[f32]) -> R) -> Result<R> {
        let Some((scales, layout)) = &self.scales else {
            return self.data.read(|b| f(&wide(self.data.dtype(), b)));
        };
        let (rows, cols) = (self.data.shape().dim(0), self.data.shape().dim(1));
        let mut v = vec![0.0; rows * cols];
        self.data.read(|b| convert_to_f32(self.data.dtype(), b, &mut v))?;
        let s = scales.to_f32()?;
        for (i, x) in v.iter_mut().enumerate() {
            *x *= s[layout.scale_idx(i / cols, i % cols, cols)];
        }
        Ok(f(&v))
    }
}
