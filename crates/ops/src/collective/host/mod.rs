//! The collectives on the host backend: the real protocol, step by step.
//!
//! Copy lane: for each peer in rotated order: acquire its credit, put, signal.
//! Compute lane: grant credits (my staging is free: the previous launch on this stream has read
//! it), keep my own part, wait for each source, copy or add.

use std::sync::Arc;

use tilewire_core::memory::filled;
use tilewire_core::{Rank, Result};
use tilewire_device::Tensor;
use tilewire_symm::{Signals, SymBuf};

use super::launch::{CREDIT, DATA};
use super::schedule::Phase;
use super::{CollectiveDesc, CollectiveKind, ReduceOp};
use crate::common::{Launch, narrow_into, wide};

pub(super) struct Run {
    pub launch: Launch,
    pub desc: CollectiveDesc,
    pub first: Phase,
    pub second: Option<Phase>,
    pub staging: SymBuf,
    pub staging2: Option<SymBuf>,
    pub signals: Arc<Signals>,
    pub signals2: Option<Arc<Signals>>,
    pub x: Tensor,
    pub out: Tensor,
}

impl Run {
    fn row_bytes(&self) -> usize {
        self.desc.cols * self.desc.dtype.size()
    }

    /// Pushes rows of `src` as the phase says.
    fn push(&self, phase: &Phase, src: &Tensor, staging: &SymBuf, signals: &Signals) -> Result<()> {
        let (Launch { ctx, net, tag }, row) = (&self.launch, self.row_bytes());
        for s in &phase.sends {
            let permit = net.acquire(ctx, s.dst, signals.slot(CREDIT), *tag, "credit")?;
            src.read(|b| {
                let bytes = &b[s.rows.start * row..s.rows.end * row];
                let to = (s.dst, staging.range(s.at * row, bytes.len()));
                net.put_flag(ctx, &permit, to, bytes, signals.slot(DATA), "push")
            })??;
        }
        Ok(())
    }

    fn grant(&self, phase: &Phase, signals: &Signals) -> Result<()> {
        let (Launch { ctx, net, tag }, slot) = (&self.launch, signals.slot(CREDIT));
        phase.recvs.iter().try_for_each(|r| net.grant(ctx, r.src, slot, *tag, "credit"))
    }

    /// Runs the copy lane.
    pub fn copies(&self) -> Result<()> {
        self.push(&self.first, &self.x, &self.staging, &self.signals)
    }

    /// Runs the compute lane.
    pub fn compute(&self) -> Result<()> {
        self.grant(&self.first, &self.signals)?;
        match &self.desc.kind {
            CollectiveKind::AllGather(_) | CollectiveKind::AllToAll(_) => {
                self.keep(&self.first, &self.x)?;
                self.collect(&self.first, &self.staging, &self.signals)
            }
            CollectiveKind::ReduceScatter(_, op) => self.reduce(*op),
            CollectiveKind::AllReduce(op) => {
                let (Some(second), Some(staging2), Some(signals2)) =
                    (&self.second, &self.staging2, &self.signals2)
                else {
                    return Err(tilewire_core::Error::internal(
                        "an all-reduce lacks its second phase",
                    ));
                };
                self.grant(second, signals2)?;
                self.reduce(*op)?;
                let mine = self.out.rows(second.own.1.start, second.own.1.len())?;
                self.push(second, &mine, staging2, signals2)?;
                self.collect(second, staging2, signals2)
            }
        }
    }

    /// Copies my own part from `src` to the output.
    fn keep(&self, phase: &Phase, src: &Tensor) -> Result<()> {
        let row = self.row_bytes();
        let (from, to) = (&phase.own.0, &phase.own.1);
        src.read(|s| {
            self.out.write(|o| {
                o[to.start * row..to.end * row]
                    .copy_from_slice(&s[from.start * row..from.end * row]);
            })
        })?
    }

    /// Waits for each source and copies its rows to the output.
    fn collect(&self, phase: &Phase, staging: &SymBuf, signals: &Signals) -> Result<()> {
        let (Launch { ctx, net, .. }, row) = (&self.launch, self.row_bytes());
        for r in &phase.recvs {
            net.wait_last(ctx, r.src, signals.slot(DATA), 1, "arrival")?;
            let at = staging.range(r.staging.start * row, r.staging.len() * row);
            let rows = r.out.start * row..r.out.end * row;
            // SAFETY: `src` has signalled its rows, and gets no new credit before the next launch.
            self.out.write(|o| unsafe { ctx.read_local(at, &mut o[rows]) })?;
        }
        Ok(())
    }

    /// Adds all ranks' terms of my rows, in rank order, in f32, and rounds once.
    fn reduce(&self, op: ReduceOp) -> Result<()> {
        let (Launch { ctx, net, .. }, row) = (&self.launch, self.row_bytes());
        let dtype = self.desc.dtype;
        for r in &self.first.recvs {
            net.wait_last(ctx, r.src, self.signals.slot(DATA), 1, "arrival")?;
        }
        ctx.compute("reduce")?;
        let own = &self.first.own.0;
        let mut sum = filled(0.0f32, own.len() * self.desc.cols)?;
        let mut add = |bytes: &[u8], first: bool| {
            for (s, &v) in sum.iter_mut().zip(wide(dtype, bytes).iter()) {
                *s = if first { v } else { *s + v };
            }
        };
        for src in Rank::all(ctx.team().size()) {
            let first = src.idx() == 0;
            if let Some(r) = self.first.recvs.iter().find(|r| r.src == src) {
                let at = self.staging.range(r.staging.start * row, r.staging.len() * row);
                // SAFETY: `src` has signalled its rows, and gets no new credit before the next
                // launch on this stream, which runs after this one.
                add(unsafe { ctx.local(at, r.staging.len() * row) }, first);
            } else {
                self.x.read(|b| add(&b[own.start * row..own.end * row], first))?;
            }
        }
        if op == ReduceOp::Avg {
            let scale = 1.0 / ctx.team().size() as f32;
            sum.iter_mut().for_each(|s| *s *= scale);
        }
        // Reduce-scatter: the output holds my rows only. All-reduce: my rows among all.
        let first_row = self.second.as_ref().map_or(0, |p| p.own.1.start);
        self.out.write(|o| narrow_into(o, dtype, (first_row, 0, self.desc.cols), &sum))
    }
}
