//! Quantised tensors: low-precision data with its scales.

use serde::{Deserialize, Serialize};

use crate::{DType, Error, Result, Shape};

/// The relation of scales to data. `value = data * scale` for every layout.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleLayout {
    /// One f32 scale for the tensor.
    Tensor,
    /// One f32 scale for each 1x128 block along the columns: `[rows, ceil(cols / 128)]`.
    Block1x128,
    /// One f32 scale for each 128x128 block: `[ceil(rows / 128), ceil(cols / 128)]`.
    Block128x128,
    /// MXFP8: one E8M0 scale for each 1x32 block along the columns: `[rows, ceil(cols / 32)]`.
    Mx1x32,
    /// [`ScaleLayout::Mx1x32`] in the 512-byte tiles that tensor cores of sm_100 read:
    /// rows padded to 128, blocks to 4 (research notes, grouped GEMM §7).
    Mx1x32Swizzled,
}

impl ScaleLayout {
    /// Element type of the scales.
    pub fn dtype(self) -> DType {
        match self {
            ScaleLayout::Mx1x32 | ScaleLayout::Mx1x32Swizzled => DType::E8M0,
            _ => DType::F32,
        }
    }

    /// Number of scales for a `rows x cols` tensor.
    pub fn num_scales(self, rows: usize, cols: usize) -> usize {
        match self {
            ScaleLayout::Tensor => 1,
            ScaleLayout::Block1x128 => rows * cols.div_ceil(128),
            ScaleLayout::Block128x128 => rows.div_ceil(128) * cols.div_ceil(128),
            ScaleLayout::Mx1x32 => rows * cols.div_ceil(32),
            ScaleLayout::Mx1x32Swizzled => {
                rows.next_multiple_of(128) * cols.div_ceil(32).next_multiple_of(4)
            }
        }
    }

    /// Index of the scale of element `(row, col)` in a tensor with `cols` columns.
    pub fn scale_idx(self, row: usize, col: usize, cols: usize) -> usize {
        match self {
            ScaleLayout::Tensor => 0,
            ScaleLayout::Block1x128 => row * cols.div_ceil(128) + col / 128,
            ScaleLayout::Block128x128 => (row / 128) * cols.div_ceil(128) + col / 128,
            ScaleLayout::Mx1x32 => row * cols.div_ceil(32) + col / 32,
            ScaleLayout::Mx1x32Swizzled => {
                let (block, num_blocks) = (col / 32, cols.div_ceil(32));
                let tile = (row / 128) * num_blocks.div_ceil(4) + block / 4;
                tile * 512 + (row % 32) * 16 + ((row % 128) / 32) * 4 + block % 4
            }
        }
    }
}

/// A quantised matrix: FP8 data `[rows, cols]` and scales as their layout says.
#[derive(Clone, PartialEq, Debug)]
pub struct QTensor {
    /// One byte an element, row-major.
    pub data: Vec<u8>,
    /// Scale bytes: f32 (native endian) or E8M0, as `layout.dtype()` says.
    pub scales: Vec<u8>,
    /// FP8 type of `data`.
    pub dtype: DType,
    /// Rows by columns.
    pub shape: Shape,
    /// Meaning of `scales`.
    pub layout: ScaleLayout,
}

impl QTensor {
    /// Checks that the parts fit each other.
    ///
    /// # Errors
    /// `InvalidArgument` if `dtype` is not FP8, `shape` is not two-dimensional, or a length is off.
    pub fn new(
        data: Vec<u8>,
        scales: Vec<u8>,
        dtype: DType,
        shape: Shape,
        layout: ScaleLayout,
    ) -> Result<Self> {
        if !dtype.is_fp8() {
            return Err(Error::invalid("quantised data must be FP8")
                .expected("f8e4m3 or f8e5m2")
                .seen(dtype));
        }
        if shape.ndim() != 2 {
            return Err(Error::invalid(format!(
                "a quantised tensor has two dimensions, got {shape}"
            )));
        }
        let need = layout.num_scales(shape.dim(0), shape.dim(1)) * layout.dtype().size();
        if data.len() != shape.num_elems() || scales.len() != need {
            return Err(Error::invalid("quantised tensor has the wrong number of bytes")
                .expected(format_args!("{} + {need}", shape.num_elems()))
                .seen(format_args!("{} + {}", data.len(), scales.len())));
        }
        Ok(Self { data, scales, dtype, shape, layout })
    }

    /// Scale of element `(row, col)`.
    pub fn scale(&self, row: usize, col: usize) -> f32 {
        let i = self.layout.scale_idx(row, col, self.shape.dim(1));
        let size = self.layout.dtype().size();
        let mut out = [0.0];
        crate::convert_to_f32(
            self.layout.dtype(),
            &self.scales[i * size..(i + 1) * size],
            &mut out,
        );
        out[0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scale_indices_are_a_bijection_onto_blocks() {
        for layout in [
            ScaleLayout::Tensor,
            ScaleLayout::Block1x128,
            ScaleLayout::Block128x128,
            ScaleLayout::Mx1x32,
            ScaleLayout::Mx1x32Swizzled,
        ] {
            let (rows, cols) = (200, 300);
            let mut owner = vec![None; layout.num_scales(rows, cols)];
            for r in 0..rows {
                for c in 0..cols {
                    let block = match layout {
                        ScaleLayout::Tensor => (0, 0),
                        ScaleLayout::Block1x128 => (r, c / 128),
                        ScaleLayout::Block128x128 => (r / 128, c / 128),
                        _ => (r, c / 32),
                    };
                    let o = &mut owner[layout.scale_idx(r, c, cols)];
                    assert_eq!(*o.get_or_insert(block), block, "{layout:?} at {r},{c}");
                }
            }
        }
    }

    #[test]
    fn lengths_are_checked() {
        let s = Shape::d2(2, 32);
        assert!(
            QTensor::new(vec![0; 64], vec![0; 2], DType::F8E4M3, s, ScaleLayout::Mx1x32).is_ok()
        );
        assert!(
            QTensor::new(vec![0; 64], vec![0; 3], DType::F8E4M3, s, ScaleLayout::Mx1x32).is_err()
        );
        assert!(QTensor::new(vec![0; 64], vec![0; 2], DType::F32, s, ScaleLayout::Mx1x32).is_err());
    }
}
