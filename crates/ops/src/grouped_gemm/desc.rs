//! The description of a grouped GEMM: groups, shapes, types.

use std::fmt;

use tilewire_core::{DType, Error, Result};
use tilewire_device::Tensor;

use crate::common::{Named, expect_tensor};
use crate::gemm::{AOrder, Activation, BOrder, Epilogue, GemmDesc, Operand};

/// Meaning of the split values.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum SplitKind {
    /// Rows of each group.
    Counts,
    /// End of each group: the inclusive prefix sums of the counts.
    Ends,
}

/// Rows of each group, in device memory: `[groups]` i32 or i64.
#[derive(Clone, Debug)]
pub struct Splits {
    /// The values.
    pub values: Tensor,
    /// Their meaning.
    pub kind: SplitKind,
}

impl Splits {
    /// Rows of each group.
    pub fn counts(values: &Tensor) -> Self {
        Self { values: values.clone(), kind: SplitKind::Counts }
    }

    /// End of each group.
    pub fn ends(values: &Tensor) -> Self {
        Self { values: values.clone(), kind: SplitKind::Ends }
    }

    /// The tensor with its name.
    pub(super) fn named(&self) -> [Named<'_>; 1] {
        [("splits", Some(&self.values))]
    }
}

/// Weights (or their gradients) of all groups.
#[derive(Clone, Debug)]
pub enum Weights {
    /// One matrix `[groups * n, k]`, group after group.
    Packed(Operand),
    /// One matrix `[n, k]` for each group.
    Discrete(Vec<Operand>),
}

impl Weights {
    /// The operands.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Operand> {
        match self {
            Weights::Packed(w) => std::slice::from_ref(w).iter(),
            Weights::Discrete(list) => list.iter(),
        }
    }
}

impl From<&Tensor> for Weights {
    fn from(t: &Tensor) -> Self {
        Weights::Packed(t.into())
    }
}

/// Products of one family of experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct GroupedDesc {
    /// Number of groups (experts).
    pub groups: usize,
    /// Rows of the packed tensors.
    pub capacity: usize,
    /// Output features.
    pub n: usize,
    /// Input features.
    pub k: usize,
    /// Element type of X, W and dY (FP8 with scales is accepted per operand).
    pub dtype: DType,
    /// Element type of Y and dX.
    pub out: DType,
    /// Element type of weight gradients.
    pub grad: DType,
    /// Activation of fprop (its derivative in dgrad).
    pub activation: Activation,
    /// Zero the rows of outputs beyond the last group; otherwise they keep what they hold.
    pub zero_tail: bool,
}

impl GroupedDesc {
    /// All tensors of one type, f32 gradients, no activation.
    pub fn new(groups: usize, capacity: usize, n: usize, k: usize, dtype: DType) -> Self {
        Self {
            groups,
            capacity,
            n,
            k,
            dtype,
            out: if dtype.is_fp8() { DType::BF16 } else { dtype },
            grad: DType::F32,
            activation: Activation::None,
            zero_tail: false,
        }
    }

    /// Columns of Y.
    pub fn out_cols(&self) -> usize {
        self.activation.out_cols(self.n)
    }

    /// Checks the combination.
    ///
    /// # Errors
    /// As [`GemmDesc::check`]; `InvalidArgument` for a gradient type that cannot be added to.
    pub fn check(&self) -> Result<()> {
        GemmDesc {
            m: self.capacity,
            n: self.n,
            k: self.k,
            a: self.dtype,
            b: self.dtype,
            out: self.out,
            a_order: AOrder::Mk,
            b_order: BOrder::Nk,
            epilogue: Epilogue { activation: self.activation, ..Epilogue::NONE },
        }
        .check()?;
        if self.activation.reads_aux() {
            return Err(Error::invalid(
                "the activation must be the forward one: dgrad takes its derivative",
            ));
        }
        if !matches!(self.grad, DType::F32 | DType::BF16 | DType::F16) {
            return Err(Error::invalid("weight gradients cannot have this dtype")
                .expected("f32, bf16 or f16")
                .seen(self.grad));
        }
        Ok(())
    }

    /// Checks splits: dtype and length. Values are checked where they lie.
    pub(super) fn check_splits(&self, s: &Splits) -> Result<()> {
        if !matches!(s.values.dtype(), DType::I32 | DType::I64) {
            return Err(Error::invalid("`splits` has the wrong dtype")
                .expected("i32 or i64")
                .seen(s.values.dtype()));
        }
        expect_tensor("splits", &s.values, s.values.dtype(), &[self.groups])
    }

    /// Checks weights of `rows x cols` per group.
    pub(super) fn check_weights(&self, what: &str, w: &Weights, dtype: DType) -> Result<()> {
        match w {
            Weights::Packed(w) => w.check(what, dtype, self.groups * self.n, self.k),
            Weights::Discrete(list) => {
                if list.len() != self.groups {
                    return Err(Error::invalid(format!(
                        "`{what}` must have one matrix for each group"
                    ))
                    .expected(self.groups)
                    .seen(list.len()));
                }
                list.iter().try_for_each(|w| w.check(what, dtype, self.n, self.k))
            }
        }
    }
}

impl fmt::Display for GroupedDesc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "E={} cap={} n={} k={} {}->{}/{} {:?}",
            self.groups,
            self.capacity,
            self.n,
            self.k,
            self.dtype,
            self.out,
            self.grad,
            self.activation
        )
    }
}
