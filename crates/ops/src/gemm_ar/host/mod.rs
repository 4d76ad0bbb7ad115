//! GEMM+AR on the host backend: the scatter of `gemm_rs`, and the way back.

use std::cell::RefCell;
use std::sync::Arc;

use tilewire_core::Result;
use tilewire_symm::{Permit, Signals, SymBuf};

use super::schedule::arrivals;
use crate::common::ring::neighbours;
use crate::common::{Algo, Launch, OverlapConfig};
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
        let Launch { ctx, net, tag } = &s.launch;
        let row = s.desc.n * s.desc.out.size();
        let (credit, slot) = (self.signals.slot(CREDIT), self.signals.slot(DATA));
        for p in ctx.team().peers() {
            net.grant(ctx, p, credit, *tag, "gather credit")?;
        }
        let permit = RefCell::new(Permit::none());
        let ring = self.config.algo == Algo::Ring;
        let next = neighbours(ctx.rank(), s.rows.len()).1;
        s.compute(|chunk, rows| {
            if chunk == 0 {
                for p in ctx.team().peers() {
                    permit.borrow_mut().add(net.acquire(ctx, p, credit, *tag, "gather credit")?);
                }
            }
            for p in ctx.team().peers().filter(|p| !ring || *p == next) {
                s.t.out.read(|b| {
                    let bytes = &b[rows.start * row..rows.end * row];
                    let to = (p, self.gather.range(rows.start * row, bytes.len()));
                    net.put_flag(ctx, &permit.borrow(), to, bytes, slot, "return")
                })??;
            }
            Ok(())
        })?;
        for a in arrivals(ctx.rank(), &s.rows, &self.config) {
            let r = &a.rows;
            match a.last {
                true => net.wait_last(ctx, a.from, slot, 1, "returned")?,
                false => net.wait(ctx, a.from, slot, 1, "returned")?,
            }
            let at = self.gather.range(r.start * row, r.len() * row);
            if a.passes {
                let (to, from) = ((next, at), (at, r.len() * row));
                // SAFETY: the rows were waited for, and their writer gets no credit before the next
                // launch.
                unsafe { net.pass_signal(ctx, &permit.borrow(), to, from, slot, "return")? };
            }
            // SAFETY: the rows were waited for, and their writer gets no credit before the next launch.
            s.t.out.write(|o| unsafe { ctx.read_local(at, &mut o[r.start * row..r.end * row]) })?;
        }
        Ok(())
    }
}
