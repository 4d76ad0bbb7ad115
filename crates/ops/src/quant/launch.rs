//! The inputs of a launch of a quantisation: slots, tensors, state.

use tilewire_core::{Error, Result};
use tilewire_device::Tensor;

use super::{QuantDesc, Quantized};
use crate::common::Named;

/// Signal slots of a plan over a team.
pub(super) const CREDIT: usize = 0;
pub(super) const DATA: usize = 1;

/// Tensors of one launch; the number of rows is that of `x` (at most the plan's).
#[derive(Clone, Debug)]
pub struct QuantInputs {
    /// `[rows, cols]`.
    pub x: Tensor,
    /// Row-wise result `[rows, cols]`.
    pub row: Option<Quantized>,
    /// Column-wise result `[cols, rows]`.
    pub column: Option<Quantized>,
}

impl QuantInputs {
    /// Fresh poisoned results for `x` under `desc`, on the device of `x`.
    ///
    /// # Errors
    /// `InvalidArgument` if `x` does not have two dimensions; `Exhausted` if the device has not
    /// enough memory.
    pub fn new(desc: &QuantDesc, x: &Tensor) -> Result<Self> {
        let s = x.shape();
        if s.ndim() != 2 {
            return Err(Error::invalid(format!("`x` has two dimensions, not {s}")).op("quant"));
        }
        let (rows, cols) = (s.dim(0), s.dim(1));
        let device = x.device();
        let make = |yes: bool, r, c| {
            let made = yes.then(|| Quantized::poisoned(desc.dst, desc.layout, r, c));
            made.map(|q| q.to(&device)).transpose()
        };
        Ok(Self {
            x: x.clone(),
            row: make(desc.sides.row(), rows, cols)?,
            column: make(desc.sides.column(), cols, rows)?,
        })
    }

    /// Every tensor with its name.
    pub(super) fn named(&self) -> [Named<'_>; 5] {
        let (row, column) = (self.row.as_ref(), self.column.as_ref());
        [
            ("x", Some(&self.x)),
            ("row", row.map(|q| &q.data)),
            ("row scales", row.map(|q| &q.scales)),
            ("column", column.map(|q| &q.data)),
            ("column scales", column.map(|q| &q.scales)),
        ]
    }
}

/// State of delayed scaling, in device memory: a replay moves it on as a launch does.
pub(super) struct State {
    /// `[window]` f32, a ring.
    pub history: Tensor,
    /// `[1]` f32.
    pub scale: Tensor,
    /// Steps recorded so far, `[1]` i64.
    pub steps: Tensor,
}
