//! `sequential` by puts as one product of all rows, in f32, so that the weights are read once: a
//! product for each owner's rows reads them once for each.
//!
//! Peers' rows are rounded from it to the wire's type by one kernel; my own rows are added from it
//! as they are.

use std::ops::Range;

use tilewire_core::{DType, Result};
use tilewire_device::Buffer;
use tilewire_device::cuda::{CudaContext, CudaMemory};

use crate::common::Bias;
use crate::common::cuda::workspace;
use crate::common::lanes::Lanes;
use crate::common::reduce::{Reducer, Sum};
use crate::gemm_rs::GemmRsDesc;

/// The most bytes of all rows in f32. They are written and, for the peers, read again, which takes
/// some 30 us of an H200 for 64 MiB: as long as one more read of 128 MiB of weights. A product
/// larger than that is one of so many rows that its arithmetic hides the reads of the weights.
pub(crate) const MOST_BYTES: usize = 64 << 20;

/// The product of all rows.
pub(super) struct Whole {
    /// `[m, n]` f32; what is pushed itself where f32 is on the wire.
    pub sums: CudaMemory,
    /// Rounds to the wire's type; none for f32.
    round: Option<Reducer>,
    wire: DType,
}

impl Whole {
    /// Returns the workspace and the kernel for `d`, or none if it takes more than `most` bytes.
    /// `partial` is what peers' rows are pushed from.
    ///
    /// # Errors
    /// Out of memory; as [`Reducer::new`].
    pub fn of(
        ctx: &CudaContext,
        d: &GemmRsDesc,
        partial: &CudaMemory,
        most: usize,
    ) -> Result<Option<Self>> {
        let len = d.m * d.n * DType::F32.size();
        if len > most {
            return Ok(None);
        }
        let (sums, round) = match d.wire {
            DType::F32 => (partial.clone(), None),
            wire => {
                let round = Reducer::new(ctx, [DType::F32, DType::F32, wire])?;
                (workspace(ctx, len)?, Some(round))
            }
        };
        Ok(Some(Self { sums, round, wire: d.wire }))
    }

    /// Queues the rounding of the peers' rows, those of `m` rows of `n` columns that are not `own`,
    /// to `partial`. My own rows go with them where they lie between.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn round(
        &self,
        l: &Lanes<'_>,
        (m, n): (usize, usize),
        own: &Range<usize>,
        partial: &CudaMemory,
    ) -> Result<()> {
        let Some(round) = &self.round else { return Ok(()) };
        let rows = others(m, own);
        let at = |memory: &CudaMemory, t: DType| memory.addr() + (rows.start * n * t.size()) as u64;
        let sum = Sum {
            slots: at(&self.sums, DType::F32),
            stride: 0,
            own: 0,
            out: at(partial, self.wire),
            bias: Bias::default(),
            rows: rows.len(),
            cols: n,
            scale: 1.0,
        };
        round.launch_parts(l, &sum, (None, 1))
    }

    pub fn explain(&self) -> String {
        let to_peers = match self.round {
            Some(_) => format!("rounded to {}", self.wire),
            None => "sent as they are".to_owned(),
        };
        let bytes = self.sums.len_bytes();
        format!(
            "one product of all rows, in f32 ({bytes} bytes), of which peers' rows are {to_peers}"
        )
    }
}

/// Returns the fewest rows of `m` that lie in one piece and have all that are not `own`.
fn others(m: usize, own: &Range<usize>) -> Range<usize> {
    match (own.start, own.end) {
        (0, end) => end..m,
        (start, end) if end == m => 0..start,
        _ => 0..m,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_rows_of_others_are_rounded_and_none_behind_them() {
        for (m, own, want) in [
            (7, 0..3, 3..7),
            (7, 3..7, 0..3),
            (7, 2..3, 0..7),
            (7, 0..0, 0..7),
            (7, 7..7, 0..7),
            (7, 0..7, 7..7),
            (0, 0..0, 0..0),
        ] {
            assert_eq!(others(m, &own), want, "{m} {own:?}");
        }
    }
}
