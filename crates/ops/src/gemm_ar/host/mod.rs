//! GEMM+AR on the host: the scatter of `gemm_rs`, and the way back.

use tilewire_core::{Error, Result};

use crate::common::ring::Arrival;
use crate::gemm_rs::host::Run as Scatter;

pub(super) struct Run {
    pub scatter: Scatter,
    /// The chunks that the other owners return, in order.
    pub arrivals: Vec<Arrival>,
}

impl Run {
    /// Compute lane: reduces chunk by chunk, returns each reduced chunk at once, then takes in what
    /// the other owners have reduced.
    pub fn compute(&self) -> Result<()> {
        let (s, copies) = (&self.scatter, self.scatter.copies());
        let g = copies
            .gather
            .ok_or_else(|| Error::internal("an all-reduce lacks its gather buffer"))?;
        let bytes = |rows: &std::ops::Range<usize>| rows.start * g.row..rows.end * g.row;
        let permit = s.compute(|permit, chunk, rows| {
            s.t.out.read(|b| copies.give(s.net(), permit, (&g, chunk), &rows, &b[bytes(&rows)]))?
        })?;
        for a in &self.arrivals {
            copies.take(s.net(), &permit, (&g, a), || Ok(()))?;
            s.t.out.write(|o| copies.land(s.net(), (&g, &a.rows), &mut o[bytes(&a.rows)]))??;
        }
        Ok(())
    }
}
