//! Packed sequences by offsets in tensors: a captured launch follows documents that change.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tilewire_core::{DType, Error, Result};
use tilewire_device::Tensor;

use super::{AttentionDesc, Sequences};
use crate::common::Named;

/// Sequences with padding of a launch by offsets that every plan takes; more if its description has
/// more.
pub(crate) const SEQUENCES: usize = 512;

/// Offsets of packed sequences, in tensors on the device of the launch, which reads them when it
/// runs. All are i32 `[n + 1]`, for `n` sequences (at least one); those that are not needed have no
/// rows, as in `[0, 5, 9, 9, 9]`.
///
/// Offsets that cannot be used make the results NaN, and
/// [`AttentionPlan::check`](super::AttentionPlan::check) or
/// [`CpAttentionPlan::check`](crate::cp_attention::CpAttentionPlan::check) reports it.
///
/// A plan takes those of at most 512 sequences, or as many as its description has, and of twice as
/// many without padding.
///
/// In `cp_attention` the offsets are those of the global tensors, equal on all ranks.
#[derive(Clone, Debug)]
pub struct AttnOffsets {
    /// `cu_seqlens` of queries and of keys, without padding.
    pub(super) cu: [Tensor; 2],
    /// First rows with padding; none where sequences follow each other.
    pub(super) padded: Option<[Tensor; 2]>,
}

/// On the host: why the first launch was refused whose results are NaN.
#[derive(Clone, Default)]
pub(crate) struct Refused(Arc<Mutex<Option<Error>>>);

impl Refused {
    fn locked(&self) -> MutexGuard<'_, Option<Error>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn keep(&self, why: Error) {
        self.locked().get_or_insert(why);
    }

    pub fn forget(&self) {
        *self.locked() = None;
    }

    pub fn check(&self) -> Result<()> {
        self.locked().clone().map_or(Ok(()), Err)
    }
}

/// Reads `[1]` i32 on a device: whether offsets of any launch could not be used.
pub(crate) fn read_status(status: &Tensor) -> Result<()> {
    match status.to_vec::<i32>()?[0] {
        0 => Ok(()),
        _ => Err(Error::invalid("the offsets of a launch cannot be used")
            .expected("offsets that begin with 0, ascend, and stay within the rows")
            .hint("its results are NaN; `reset` forgets this")),
    }
}

impl fmt::Display for AttnOffsets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let padded = if self.padded.is_some() { "padded " } else { "" };
        write!(f, "offsets of {} {padded}sequences", self.num())
    }
}

impl AttnOffsets {
    /// Sequences one after the other: sequence `s` is rows `cu[s]..cu[s + 1]`.
    pub fn packed(cu_seqlens_q: impl Into<Tensor>, cu_seqlens_kv: impl Into<Tensor>) -> Self {
        Self { cu: [cu_seqlens_q.into(), cu_seqlens_kv.into()], padded: None }
    }

    /// Sequences with padding between them: sequence `s` has `cu_seqlens[s + 1] - cu_seqlens[s]`
    /// rows from row `cu_seqlens_padded[s]` on. Each argument is `(cu_seqlens, cu_seqlens_padded)`.
    pub fn padded(q: (Tensor, Tensor), kv: (Tensor, Tensor)) -> Self {
        Self { cu: [q.0, kv.0], padded: Some([q.1, kv.1]) }
    }

    /// Number of sequences.
    pub fn num(&self) -> usize {
        self.cu[0].shape().num_elems().saturating_sub(1)
    }

    /// All tensors.
    pub fn tensors(&self) -> Vec<Tensor> {
        self.cu.iter().chain(self.padded.iter().flatten()).cloned().collect()
    }

    pub(crate) fn named(&self) -> [Named<'_>; 4] {
        let at = |i: usize| self.padded.as_ref().map(|p| &p[i]);
        [
            ("cu_seqlens_q", Some(&self.cu[0])),
            ("cu_seqlens_kv", Some(&self.cu[1])),
            ("cu_seqlens_q_padded", at(0)),
            ("cu_seqlens_kv_padded", at(1)),
        ]
    }

    /// Checks them for a launch of a plan for `d`.
    pub(crate) fn check(&self, d: &AttentionDesc) -> Result<()> {
        // Their tables have segments of the rows between sequences, too.
        let times = if self.padded.is_some() { 1 } else { 2 };
        let most = times * d.sequences.q.len().max(SEQUENCES);
        if self.num() > most {
            return Err(Error::invalid("the offsets are of more sequences than the plan")
                .expected(format_args!("at most {most}"))
                .seen(self.num()));
        }
        if self.num() == 0 {
            return Err(Error::invalid("offsets of no sequence")
                .expected("at least two offsets")
                .seen(self.cu[0].shape()));
        }
        for (what, t) in self.named() {
            let Some(t) = t else { continue };
            if t.dtype() != DType::I32 || t.shape().dims() != [self.num() + 1] {
                return Err(Error::invalid(format!("`{what}` has another type or shape"))
                    .expected(format_args!("i32 [{}]", self.num() + 1))
                    .seen(format_args!("{} {}", t.dtype(), t.shape())));
            }
        }
        Ok(())
    }

    /// The sequences of offsets on the host, in tensors of so many rows of queries and of keys.
    pub(crate) fn read(&self, (rows_q, rows_kv): (usize, usize)) -> Result<Sequences> {
        let of = |t: &Tensor| -> Result<Vec<usize>> {
            let rows = |v: i32| {
                usize::try_from(v).map_err(|_| Error::invalid("an offset is negative").seen(v))
            };
            t.to_vec::<i32>()?.into_iter().map(rows).collect()
        };
        let [q, kv] = [of(&self.cu[0])?, of(&self.cu[1])?];
        let mut s = match &self.padded {
            None => Sequences::packed(&q, &kv)?,
            Some(at) => Sequences::padded((&q, &of(&at[0])?), (&kv, &of(&at[1])?))?,
        };
        for (what, all, has) in [("q", &mut s.tokens_q, rows_q), ("kv", &mut s.tokens_kv, rows_kv)]
        {
            if *all > has {
                return Err(Error::invalid(format!("the sequences have more rows than `{what}`"))
                    .expected(format_args!("at most {has}"))
                    .seen(*all));
            }
            *all = has;
        }
        Ok(s)
    }
}
