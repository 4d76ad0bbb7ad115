//! GEMM+AR on the host backend: the scatter of `gemm_rs`, and the way back.

use std::sync::Arc;

use tilewire_core::Result;
use tilewire_symm::{Signals, SymBuf};

use super::config::arrivals;
use crate::gemm_rs::host::Run as Scatter;
use crate::gemm_rs::{CREDIT, DATA};

pub(super) struct Run {
    pub scatter: Scatter,
    pub gather: SymBuf,
    pub signals: Arc<Signals>,
    pub chunks: usize,
}

impl Run {
    /// Compute lane: reduce chunk by chunk, push each reduced chunk to all peers at once, then
    /// take in what the other owners have reduced.
    pub fn compute(&self) -> Result<()> {
        let s = &self.scatter;
        let (ctx, tag) = (&s.launch.ctx, s.launch.tag);
        let row = s.desc.n * s.desc.out.size();
        for p in ctx.team().peers() {
            ctx.grant(p, self.signals.slot(CREDIT), tag, "gather credit");
        }
        s.compute(|chunk, rows| {
            for p in ctx.team().peers() {
                if chunk == 0 {
                    ctx.acquire(p, self.signals.slot(CREDIT), tag, "gather credit")?;
                }
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
        for (src, r, last) in arrivals(ctx.rank(), &s.rows, self.chunks) {
            let slot = self.signals.slot(DATA);
            match last {
                true => ctx.wait_last(src, slot, 1, "returned")?,
                false => ctx.wait(src, slot, 1, "returned")?,
            }
            let at = self.gather.range(r.start * row, r.len() * row);
            s.t.out.write(|o| ctx.read_local(at, &mut o[r.start * row..r.end * row]))?;
        }
        Ok(())
    }
}
