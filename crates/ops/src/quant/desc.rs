//! The description of a quantisation: shape, types, scales, recipe.

use std::fmt;

use tilewire_core::{DType, Error, Result, ScaleLayout, Shape};
use tilewire_device::{Device, Tensor};

use super::recipe::Recipe;
use crate::common::Operand;
use crate::common::expect_tensor;

/// The source of a per-tensor scale.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Scaling {
    /// From the tensor that is quantised.
    Current,
    /// From the magnitudes of the last `window` tensors, times `2^margin`; 1 before the first. A
    /// window whose maximum is 0 or infinite keeps the scale.
    Delayed {
        /// Number of magnitudes that are remembered.
        window: usize,
        /// Headroom, as a power of two.
        margin: i32,
    },
}

/// The ranks whose elements share a per-tensor scale.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Scope {
    /// This rank's.
    Local,
    /// Those of all ranks of the heap's team: each sees the same scale.
    Team,
}

/// The results that are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Sides {
    /// The matrix.
    Row,
    /// Its transpose, with its own scales.
    Column,
    /// Both, from one launch.
    Both,
}

impl Sides {
    /// True if the row-wise result is made.
    pub fn row(self) -> bool {
        self != Sides::Column
    }

    /// True if the column-wise result is made.
    pub fn column(self) -> bool {
        self != Sides::Row
    }
}

/// A quantisation of matrices with at most `rows` rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct QuantDesc {
    /// The most rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Element type of the input: f32, bf16 or f16.
    pub src: DType,
    /// Element type of the result: FP8.
    pub dst: DType,
    /// The elements that share a scale.
    pub layout: ScaleLayout,
    /// Restrict f32 scales to powers of two (E8M0 scales always are).
    pub pow2_scales: bool,
    /// The source of a per-tensor scale.
    pub scaling: Scaling,
    /// The ranks whose elements share a per-tensor scale.
    pub scope: Scope,
    /// The results that are made.
    pub sides: Sides,
}

impl QuantDesc {
    /// Row-wise, scales of any value from this rank's tensor.
    pub fn new(rows: usize, cols: usize, src: DType, dst: DType, layout: ScaleLayout) -> Self {
        Self {
            rows,
            cols,
            src,
            dst,
            layout,
            pow2_scales: false,
            scaling: Scaling::Current,
            scope: Scope::Local,
            sides: Sides::Row,
        }
    }

    /// The rule by which a scale follows from a magnitude.
    pub fn recipe(&self) -> Recipe {
        let pow2 = self.pow2_scales || self.layout.dtype() == DType::E8M0;
        Recipe { dtype: self.dst, pow2, e8m0: self.layout.dtype() == DType::E8M0 }
    }

    /// Checks the combination.
    ///
    /// # Errors
    /// `InvalidArgument` for a dtype that is not provided, an empty window, or a team's or delayed
    /// scale with a layout that has more than one.
    pub fn check(&self) -> Result<()> {
        if !matches!(self.src, DType::F32 | DType::BF16 | DType::F16) {
            return Err(Error::invalid("the input of a quantisation cannot have this dtype")
                .expected("f32, bf16 or f16")
                .seen(self.src));
        }
        if !self.dst.is_fp8() {
            return Err(Error::invalid("the result of a quantisation cannot have this dtype")
                .expected("f8e4m3 or f8e5m2")
                .seen(self.dst));
        }
        if self.layout != ScaleLayout::Tensor
            && (self.scope == Scope::Team || self.scaling != Scaling::Current)
        {
            return Err(Error::invalid("delayed scales, and scales of a team, must be per tensor")
                .expected("Tensor")
                .seen(format_args!("{:?}", self.layout)));
        }
        if let Scaling::Delayed { window, margin } = self.scaling {
            if window == 0 || margin.unsigned_abs() > 64 {
                return Err(Error::invalid("delayed scaling needs a window and a margin in range")
                    .expected("window of 1 or more, margin -64 to 64")
                    .seen(format_args!("window {window}, margin {margin}")));
            }
            if self.pow2_scales {
                return Err(Error::invalid("delayed scales cannot be restricted to powers of two")
                    .hint("choose the margin instead"));
            }
        }
        Shape::new(&[self.rows, self.cols]).map(|_| ())
    }
}

impl fmt::Display for QuantDesc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "rows={} cols={} {}->{} {:?}{} {:?} {:?} {:?}",
            self.rows,
            self.cols,
            self.src,
            self.dst,
            self.layout,
            if self.pow2_scales { " pow2" } else { "" },
            self.scaling,
            self.scope,
            self.sides
        )
    }
}

/// A quantised matrix on the device: FP8 data `[rows, cols]` and scales as their layout says.
#[derive(Clone, Debug)]
pub struct Quantized {
    /// The codes.
    pub data: Tensor,
    /// `[layout.num_scales(rows, cols)]` f32 or E8M0.
    pub scales: Tensor,
    /// Layout of the scales.
    pub layout: ScaleLayout,
}

impl Quantized {
    /// Memory for a `rows x cols` matrix, filled with poison.
    pub fn poisoned(dtype: DType, layout: ScaleLayout, rows: usize, cols: usize) -> Self {
        Self {
            data: Tensor::poisoned(dtype, Shape::d2(rows, cols)),
            scales: Tensor::poisoned(layout.dtype(), Shape::d1(layout.num_scales(rows, cols))),
            layout,
        }
    }

    /// A copy on `device`.
    pub(super) fn to(&self, device: &Device) -> Result<Self> {
        let (data, scales) = (self.data.to(device)?, self.scales.to(device)?);
        Ok(Self { data, scales, layout: self.layout })
    }

    /// Checks that this can hold (or is) a `rows x cols` matrix of `dtype`.
    pub(super) fn check(
        &self,
        what: &str,
        dtype: DType,
        (rows, cols): (usize, usize),
    ) -> Result<()> {
        expect_tensor(what, &self.data, dtype, &[rows, cols])?;
        let num = self.layout.num_scales(rows, cols);
        expect_tensor(&format!("{what} scales"), &self.scales, self.layout.dtype(), &[num])
    }

    /// Fills both with poison. Used when the team is faulted, so an error has nobody to go to.
    pub(super) fn poison(&self) {
        self.data.poison().ok();
        self.scales.poison().ok();
    }
}

impl From<&Quantized> for Operand {
    fn from(q: &Quantized) -> Self {
        Self { data: q.data.clone(), scales: Some((q.scales.clone(), q.layout)) }
    }
}

/// `out = data * scale`, rounded once to the type of `out`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct DequantDesc {
    /// The most rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// FP8 type of the data.
    pub src: DType,
    /// Layout of the scales.
    pub layout: ScaleLayout,
    /// Element type of the result: f32, bf16 or f16.
    pub out: DType,
}

impl DequantDesc {
    /// Checks the dtypes.
    ///
    /// # Errors
    /// `InvalidArgument` for a dtype that is not provided.
    pub fn check(&self) -> Result<()> {
        if self.src.is_fp8() && matches!(self.out, DType::F32 | DType::BF16 | DType::F16) {
            return Ok(());
        }
        Err(Error::invalid("a dequantisation does not support these dtypes")
            .expected("FP8 to f32, bf16 or f16")
            .seen(format_args!("{} to {}", self.src, self.out)))
    }
}

impl fmt::Display for DequantDesc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rows, cols, src, layout, out } = self;
        write!(f, "rows={rows} cols={cols} {src}->{out} {layout:?}")
    }
}
