//! Collectives by copy engines: pushes with a flag behind each, one sum kernel for reductions.

use std::sync::Arc;

use tilewire_core::{Error, Result};
use tilewire_device::cuda::CudaMemory;
use tilewire_device::{Buffer, Pending, Stream, Tensor};
use tilewire_symm::{OneSided, SymBuf};

use super::config::Phase;
use super::plan::{CREDIT, CollectivePlan, DATA};
use super::{CollectiveDesc, CollectiveKind, ReduceOp};
use crate::common::lanes::{Enter, Lane, Lanes, Reducer, Sum, on_device};

/// Shards from this size on are taken in one by one, as they arrive, instead of all at the end.
const ONE_BY_ONE_BYTES: usize = 1 << 20;

/// What `prepare` makes.
pub(super) struct Prepared {
    reducer: Option<Reducer>,
}

impl Prepared {
    pub fn new(lane: &Lane, desc: &CollectiveDesc) -> Result<Self> {
        let reduces =
            matches!(desc.kind, CollectiveKind::ReduceScatter(..) | CollectiveKind::AllReduce(_));
        let types = [desc.dtype; 3];
        let reducer = reduces.then(|| Reducer::new(lane.context(), types)).transpose()?;
        Ok(Self { reducer })
    }
}

/// One launch.
struct Run<'a> {
    l: &'a Lanes<'a>,
    plan: &'a CollectivePlan,
    row: usize,
}

/// Queues the collective with its phases.
pub(super) fn launch(
    plan: &CollectivePlan,
    lane: &Lane,
    (stream, m): (&Stream, usize),
    (first, second): (Phase, Option<Phase>),
    (x, out): (&Tensor, &Tensor),
) -> Result<Pending<Tensor>> {
    let (core, name) = (&plan.core, plan.core.op());
    let on = |what, t| on_device(what, t, lane.context()).map_err(|e| e.op(name));
    let (from, to) = (on("x", x)?, on("out", out)?);
    let launch = core.begin(stream, format_args!("m={m}"))?;
    // A second phase has slots of its own: its flags lie behind the first's.
    let enter = Enter { signals: &plan.signals, credit: CREDIT, flags: DATA..DATA + 1 };
    core.run_on(lane, (stream, launch.ctx.seq()), &enter, &[&to], |l| {
        let run = Run { l, plan, row: plan.desc.cols * plan.desc.dtype.size() };
        run.first(&first, second.as_ref(), (&from, &to))
    })?;
    Pending::new(out.clone(), stream, Some(core.team().fault().clone()))
}

impl Run<'_> {
    fn rows(&self, t: &CudaMemory, rows: &std::ops::Range<usize>) -> Result<CudaMemory> {
        t.slice(rows.start * self.row, rows.len() * self.row)
    }

    /// Copy lane: rows of `from` to each peer with the flag behind them, peers in rotated order.
    fn push(
        &self,
        phase: &Phase,
        from: &CudaMemory,
        to: &SymBuf,
        flag: (bool, usize),
    ) -> Result<()> {
        let signals = if flag.0 { self.plan.signals2.as_ref() } else { Some(&self.plan.signals) };
        let signals = signals.ok_or_else(|| Error::internal("no signals of a second phase"))?;
        for s in &phase.sends {
            let part = self.rows(from, &s.rows)?;
            let at = to.range(s.at * self.row, part.len_bytes());
            self.l.os.put_flag(self.l.side, (s.dst, at), &part, signals.slot(flag.1))?;
        }
        Ok(())
    }

    fn first(
        &self,
        first: &Phase,
        second: Option<&Phase>,
        (from, to): (&CudaMemory, &CudaMemory),
    ) -> Result<()> {
        self.push(first, from, &self.plan.staging, (false, DATA))?;
        match &self.plan.desc.kind {
            CollectiveKind::AllGather(_) | CollectiveKind::AllToAll(_) => {
                self.keep(first, from, to)?;
                self.collect(first, to, &self.plan.staging, (false, DATA))
            }
            CollectiveKind::ReduceScatter(_, op) => self.reduce(first, *op, from, (to, 0)),
            CollectiveKind::AllReduce(op) => {
                let (Some(second), Some(staging2), Some(signals2)) =
                    (second, &self.plan.staging2, &self.plan.signals2)
                else {
                    return Err(Error::internal("all_reduce without second phase"));
                };
                self.reduce(first, *op, from, (to, second.own.1.start))?;
                // Credits of the second phase, too: its staging area is another one.
                let data = signals2.slot(DATA);
                self.l.os.enter(self.l.main, signals2.slot(CREDIT), data, 1)?;
                self.l.fork()?;
                let mine = self.rows(to, &second.own.1)?;
                self.push(second, &mine, staging2, (true, DATA))?;
                self.collect(second, to, staging2, (true, DATA))
            }
        }
    }

    /// Copies my own part to the output.
    fn keep(&self, phase: &Phase, from: &CudaMemory, to: &CudaMemory) -> Result<()> {
        let (src, dst) = (self.rows(from, &phase.own.0)?, self.rows(to, &phase.own.1)?);
        self.l.main.copy_memory(&dst, &src)
    }

    /// Takes in what came. Large parts one by one, in the order in which they arrive: while rank
    /// me + i is sent to, rank me - i sends to me.
    fn collect(
        &self,
        phase: &Phase,
        to: &CudaMemory,
        staging: &SymBuf,
        flag: (bool, usize),
    ) -> Result<()> {
        let (os, main, row) = (self.l.os, self.l.main, self.row);
        let signals = if flag.0 { self.plan.signals2.as_ref() } else { Some(&self.plan.signals) };
        let signals = signals.ok_or_else(|| Error::internal("no signals of a second phase"))?;
        let me = os.heap().team().rank();
        let largest = phase.recvs.iter().map(|r| r.out.len() * row).max().unwrap_or(0);
        let one_by_one = largest >= ONE_BY_ONE_BYTES;
        if !one_by_one {
            os.wait_peers(main, signals.slot(flag.1))?;
        }
        for r in phase.recvs.iter().rev() {
            if one_by_one {
                os.wait(main, r.src, signals.slot(flag.1), 1)?;
            }
            let part = self.rows(to, &r.out)?;
            let at = staging.range(r.staging.start * row, part.len_bytes());
            if part.len_bytes() > 0 {
                os.get(main, me, at, &part)?;
            }
        }
        Ok(())
    }

    /// Adds everybody's part of my rows and stores them at row `at` of the output.
    fn reduce(
        &self,
        phase: &Phase,
        op: ReduceOp,
        from: &CudaMemory,
        (to, at): (&CudaMemory, usize),
    ) -> Result<()> {
        let (os, main, plan) = (self.l.os, self.l.main, self.plan);
        os.wait_peers(main, plan.signals.slot(DATA))?;
        let prepared = plan.cuda.get().and_then(|p| p.reducer.as_ref());
        let reducer = prepared.ok_or_else(|| Error::internal("a reduction without its kernel"))?;
        let own = self.rows(from, &phase.own.0)?;
        let out = self.rows(to, &(at..at + phase.own.0.len()))?;
        let size = os.heap().team().size();
        let stride = plan.slot_rows * self.row;
        let slots =
            os.addr(os.heap().team().rank(), plan.staging.range(0, size * stride), size * stride)?;
        main.hold(|| Arc::new((own.clone(), out.clone())));
        let sum = Sum {
            slots,
            stride: stride as u64,
            own: own.addr(),
            out: out.addr(),
            bias: None,
            rows: phase.own.0.len(),
            cols: plan.desc.cols,
            scale: if op == ReduceOp::Avg { 1.0 / size as f32 } else { 1.0 },
        };
        reducer.launch(self.l, &sum)
    }
}
