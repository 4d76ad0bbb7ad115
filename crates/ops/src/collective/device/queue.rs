//! Copy engines, and kernels between two meetings: a phase of a collective, step by step.

use std::sync::{Arc, OnceLock};

use tilewire_core::{Error, Result};
use tilewire_device::cuda::CudaMemory;
use tilewire_device::{Buffer, Pending, Stream, Tensor};
use tilewire_symm::{Enter, Permit, Signals, SymBuf};

use super::meeting::{self, Meeting};
use crate::collective::launch::{Base, CREDIT, DATA, Given};
use crate::collective::schedule::{Phase, Recv};
use crate::collective::way::Way;
use crate::collective::{CollectiveKind, ReduceOp};
use crate::common::Bias;
use crate::common::cuda::together_on;
use crate::common::lanes::{Lane, Lanes, Poison, Slots};
use crate::common::moves::Mover;
use crate::common::reduce::{Reducer, Sum};

/// Shards from this size on are copied out one by one, as they arrive, instead of all at the end.
const ONE_BY_ONE_BYTES: usize = 1 << 20;

/// The kernels that `prepare` makes.
pub(crate) struct Prepared {
    reducer: Option<Reducer>,
    mover: Mover,
    meeting: Option<Meeting>,
}

impl Prepared {
    pub fn new(base: &Base, lane: &Lane, stream: &Stream) -> Result<Self> {
        let (desc, ctx) = (&base.desc, lane.context());
        let reduces = desc.kind.reduces();
        let reducer = reduces.then(|| Reducer::new(ctx, [desc.dtype; 3])).transpose()?;
        let flags = base.flags.as_ref();
        let meeting = flags.map(|(f, len)| Meeting::new(lane, stream, desc, (f, *len)));
        Ok(Self { reducer, mover: Mover::new(ctx)?, meeting: meeting.transpose()? })
    }
}

/// The context of a plan's launches on its device.
pub(crate) struct OnDevice<'a> {
    pub base: &'a Base,
    pub lane: &'a Lane,
    pub prepared: &'a OnceLock<Prepared>,
}

/// One launch.
struct Run<'a> {
    l: &'a Lanes<'a>,
    base: &'a Base,
    p: &'a Prepared,
    row: usize,
    /// Kernels move the rows; otherwise copy engines do.
    small: bool,
}

/// Queues the collective with its phases.
pub(super) fn launch(
    on: &OnDevice<'_>,
    Given { stream, m, x, out, before }: Given<'_>,
) -> Result<Pending<Tensor>> {
    let (base, lane, core) = (on.base, on.lane, &on.base.core);
    let (first, second) = base.phases(m).map_err(|e| e.op(core.op()))?;
    together_on(stream, &[("x", Some(x)), ("out", Some(out))]).map_err(|e| e.op(core.op()))?;
    let (from, to) = (x.cuda()?, out.cuda()?);
    let at = core.begin_on(stream, format_args!("m={m}"))?;
    let p =
        on.prepared.get().ok_or_else(|| Error::internal("a prepared plan lacks its kernels"))?;
    let row = base.desc.cols * base.desc.dtype.size();
    let (way, outs) = (base.way(m), [Poison::value(to.clone())]);
    if let (Way::Meeting | Way::Whole, Some(meeting)) = (way, &p.meeting) {
        core.run_alone(lane, at, &outs, |l| {
            before.map_or(Ok(()), |make| make(l))?;
            let run = meeting::Run { l, base, meeting, row, whole: way == Way::Whole };
            run.launch(m, (&first, second.as_ref()), (&from, &to))
        })?;
        return core.pending(out.clone(), at);
    }
    let small = way == Way::Kernels;
    // Copies carry flags; kernels meet instead.
    let flags = if small { DATA..DATA } else { DATA..DATA + 1 };
    let enter = Slots { signals: &base.signals, credit: CREDIT, flags };
    core.run_on(lane, at, &enter, &outs, |l| {
        l.main.hold(|| Arc::new((from.clone(), to.clone())));
        if let Some(make) = before {
            make(l)?;
            l.fork()?;
        }
        Run { l, base, p, row, small }.first(&first, second.as_ref(), (&from, &to))?;
        p.meeting.as_ref().map_or(Ok(()), |meeting| meeting.leave(l, base))
    })?;
    core.pending(out.clone(), at)
}

impl Run<'_> {
    fn rows(&self, t: &CudaMemory, rows: &std::ops::Range<usize>) -> Result<CudaMemory> {
        t.slice(rows.start * self.row, rows.len() * self.row)
    }

    /// Copy lane: puts rows of `from` to each peer, in rotated order, a flag behind them.
    fn push(
        &self,
        (phase, permit): (&Phase, &Permit),
        from: &CudaMemory,
        to: &SymBuf,
        signals: &Signals,
    ) -> Result<()> {
        for s in &phase.sends {
            let part = self.rows(from, &s.rows)?;
            let at = to.range(s.at * self.row, part.len_bytes());
            let slot = signals.slot(DATA);
            self.l.net.put_flag(self.l.side, permit, (s.dst, at), &part, slot, "push")?;
        }
        Ok(())
    }

    /// Writes rows of `from` to each peer by one kernel, and this rank's own part to `own`.
    fn write(
        &self,
        phase: &Phase,
        from: &CudaMemory,
        to: &SymBuf,
        own: Option<&CudaMemory>,
    ) -> Result<()> {
        let team = self.l.team()?;
        let mut copies = Vec::with_capacity(phase.sends.len() + 1);
        for s in &phase.sends {
            let part = self.rows(from, &s.rows)?;
            let at = to.range(s.at * self.row, part.len_bytes());
            copies.push((part.addr(), team.addr(s.dst, at, part.len_bytes())?, part.len_bytes()));
            if part.len_bytes() > 0 {
                self.l.here.count_put(s.dst, part.len_bytes());
            }
        }
        if let Some(own) = own {
            let (src, dst) = (self.rows(from, &phase.own.0)?, self.rows(own, &phase.own.1)?);
            copies.push((src.addr(), dst.addr(), src.len_bytes()));
        }
        self.p.mover.launch(self.l, &copies)
    }

    /// Copies the received rows to the output by one kernel.
    fn take(&self, phase: &Phase, to: &CudaMemory, staging: &SymBuf) -> Result<()> {
        let copy = |r: &Recv| {
            let part = self.rows(to, &r.out)?;
            let at = staging.range(r.staging.start * self.row, part.len_bytes());
            Ok((self.l.here.addr(at, part.len_bytes())?, part.addr(), part.len_bytes()))
        };
        let copies = phase.recvs.iter().map(copy).collect::<Result<Vec<_>>>()?;
        self.p.mover.launch(self.l, &copies)
    }

    /// Meets the peers: all ranks have written.
    fn meet(&self, signals: &Signals) -> Result<()> {
        let slot = signals.slot(DATA);
        let meeting = Enter { credit: slot, tag: 0, first: slot, num: 0 };
        // No put behind this meeting uses its permit.
        self.l.net.enter(self.l.main, &meeting).map(|_permit| ())
    }

    /// Sends my terms of each owner's rows to it, and waits for the terms of my own rows from all
    /// ranks.
    fn scatter(&self, phase: &Phase, from: &CudaMemory) -> Result<()> {
        if self.small {
            self.write(phase, from, &self.base.staging, None)?;
            return self.meet(&self.base.signals);
        }
        self.push((phase, &self.l.permit), from, &self.base.staging, &self.base.signals)?;
        self.l.net.wait_peers(self.l.main, self.base.signals.slot(DATA), "arrival")
    }

    fn first(
        &self,
        first: &Phase,
        second: Option<&Phase>,
        (from, to): (&CudaMemory, &CudaMemory),
    ) -> Result<()> {
        let base = self.base;
        match &base.desc.kind {
            CollectiveKind::AllGather(_) | CollectiveKind::AllToAll(_) if self.small => {
                self.write(first, from, &base.staging, Some(to))?;
                self.meet(&base.signals)?;
                self.take(first, to, &base.staging)
            }
            CollectiveKind::AllGather(_) | CollectiveKind::AllToAll(_) => {
                self.push((first, &self.l.permit), from, &base.staging, &base.signals)?;
                self.keep(first, from, to)?;
                self.collect(first, to, &base.staging, &base.signals)
            }
            CollectiveKind::ReduceScatter(_, op) => {
                self.scatter(first, from)?;
                self.reduce(first, *op, from, (to, 0))
            }
            CollectiveKind::AllReduce(op) => {
                let (Some(second), Some(staging2), Some(signals2)) =
                    (second, &base.staging2, &base.signals2)
                else {
                    return Err(Error::internal("an all-reduce lacks its second phase"));
                };
                self.scatter(first, from)?;
                self.reduce(first, *op, from, (to, second.own.1.start))?;
                let mine = self.rows(to, &second.own.1)?;
                // The first credit was for both areas: it is behind all reads of both.
                if self.small {
                    self.write(second, &mine, staging2, None)?;
                    self.meet(signals2)?;
                    return self.take(second, to, staging2);
                }
                self.l.net.advance(self.l.main, signals2.slot(DATA), 1)?;
                self.l.fork()?;
                self.push((second, &self.l.permit), &mine, staging2, signals2)?;
                self.collect(second, to, staging2, signals2)
            }
        }
    }

    /// Copies my own part to the output.
    fn keep(&self, phase: &Phase, from: &CudaMemory, to: &CudaMemory) -> Result<()> {
        let (src, dst) = (self.rows(from, &phase.own.0)?, self.rows(to, &phase.own.1)?);
        self.l.main.copy_memory(&dst, &src)
    }

    /// Waits for the peers' rows and copies them to the output. It takes large parts one by one, in
    /// the order in which they arrive: while this rank sends to rank me + i, rank me - i sends to
    /// this rank.
    fn collect(
        &self,
        phase: &Phase,
        to: &CudaMemory,
        staging: &SymBuf,
        signals: &Signals,
    ) -> Result<()> {
        let (net, main, row) = (self.l.net, self.l.main, self.row);
        let me = self.l.me();
        let largest = phase.recvs.iter().map(|r| r.out.len() * row).max().unwrap_or(0);
        let one_by_one = largest >= ONE_BY_ONE_BYTES;
        if !one_by_one {
            net.wait_peers(main, signals.slot(DATA), "arrival")?;
        }
        for r in phase.recvs.iter().rev() {
            if one_by_one {
                net.wait(main, r.src, signals.slot(DATA), 1, "arrival")?;
            }
            let mut part = self.rows(to, &r.out)?;
            let at = staging.range(r.staging.start * row, part.len_bytes());
            if part.len_bytes() > 0 {
                // SAFETY: `src` has signalled its rows, and gets no new credit before the next
                // launch.
                unsafe { net.get(main, (me, at), &mut part, "staging")? };
            }
        }
        Ok(())
    }

    /// Adds all ranks' terms of my rows and stores the sums at row `at` of the output.
    fn reduce(
        &self,
        phase: &Phase,
        op: ReduceOp,
        from: &CudaMemory,
        (to, at): (&CudaMemory, usize),
    ) -> Result<()> {
        let here = self.l.here;
        let reducer = self.p.reducer.as_ref();
        let reducer = reducer.ok_or_else(|| Error::internal("a reduction lacks its kernel"))?;
        let own = self.rows(from, &phase.own.0)?;
        let out = self.rows(to, &(at..at + phase.own.0.len()))?;
        let size = here.heap().team().size();
        let stride = self.base.slot_rows * self.row;
        let slots = here.addr(self.base.staging.range(0, size * stride), size * stride)?;
        let sum = Sum {
            slots,
            stride: stride as u64,
            own: own.addr(),
            out: out.addr(),
            bias: Bias::default(),
            rows: phase.own.0.len(),
            cols: self.base.desc.cols,
            scale: if op == ReduceOp::Avg { 1.0 / size as f32 } else { 1.0 },
        };
        reducer.launch(self.l, &sum)
    }
}
