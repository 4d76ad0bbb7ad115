//! GEMM+AR on the host backend: the scatter of `gemm_rs`, and the way back.

use std::sync::Arc;

use tilewire_core::{Rank, Result};
use tilewire_symm::{Signals, SymBuf};

use super::config::arrivals;
use crate::common::ring::neighbours;
use crate::common::{Algo, OverlapConfig};
use crate::gemm_rs::host::Run as Scatter;
use crate::gemm_rs::{CREDIT, DATA};

pub(super) struct Run {
    pub scatter: Scatter,
    pub gather: SymBuf,
    pub signals: Arc<Signals>,
    pub config: OverlapConfig,
}

impl Run {
    /// Compute lane: reduce chunk by chunk, push each reduced chunk to all peers at once (of a ring, to the
    /// next rank), then take in what the other owners have reduced.
    pub fn compute(&self) -> Result<()> {
        let s = &self.scatter;
        let (ctx, tag) = (&s.launch.ctx, s.launch.tag);
        let row = s.desc.n * s.desc.out.size();
        for p in ctx.team().peers() {
            ctx.grant(p, self.signals.slot(CREDIT), tag, "gather credit");
        }
        let ring = self.config.algo == Algo::Ring;
        let next = neighbours(ctx.rank(), s.rows.len()).1;
        s.compute(|chunk, rows| {
            if chunk == 0 {
                for p in ctx.team().peers() {
                    ctx.acquire(p, self.signals.slot(CREDIT), tag, "gather credit")?;
                }
            }
            for p in ctx.team().peers().filter(|p| !ring || *p == next) {
                if !rows.is_empty() && row > 0 {
                    s.t.out.read(|b| {
                        let bytes = &b[rows.start * row..rows.end * row];
                        ctx.put(
                            p,
                            self.gather.range(rows.start * row, bytes.len()),
                            bytes,
                            "return",
                        );
                    })?;
                }
                ctx.signal(p, self.signals.slot(DATA), 1, "returned");
            }
            Ok(())
        })?;
        for a in arrivals(ctx.rank(), &s.rows, &self.config) {
            let (slot, r) = (self.signals.slot(DATA), &a.rows);
            match a.last {
                true => ctx.wait_last(a.from, slot, 1, "returned")?,
                false => ctx.wait(a.from, slot, 1, "returned")?,
            }
            let at = self.gather.range(r.start * row, r.len() * row);
            if a.passes {
                self.pass(next, at, r.len() * row);
            }
            s.t.out.write(|o| ctx.read_local(at, &mut o[r.start * row..r.end * row]))?;
        }
        Ok(())
    }

    /// Of a ring: `len` bytes that have come, to the next rank.
    fn pass(&self, next: Rank, at: usize, len: usize) {
        let ctx = &self.scatter.launch.ctx;
        if len > 0 {
            // SAFETY: the rows were waited for, and their writer gets no credit before the next launch.
            ctx.put(next, at, unsafe { ctx.local(at, len) }, "return");
        }
        ctx.signal(next, self.signals.slot(DATA), 1, "returned");
    }
}
