//! Collectives on CUDA devices, by one of three ways.
//!
//! - **Meeting** (`meeting.rs`): one kernel that writes to all peers by bulk copies, meets them inside, and takes in
//!   what comes as it comes. From sm_90 on, for rows of whole 16 bytes.
//! - **Kernels**: enter, one kernel that writes to all peers, enter again (everybody has written), one
//!   kernel that takes in or adds. Few launches, so it is the way of small vectors.
//! - **Copy engines**: pushes with a flag behind each, taken in one by one as they arrive. The way of
//!   large vectors: no SM, and what came is copied while the next comes.

use std::sync::Arc;

use tilewire_core::{Error, Result};
use tilewire_device::cuda::CudaMemory;
use tilewire_device::{Buffer, Pending, Stream, Tensor};
use tilewire_symm::{Enter, Permit, Signals, SymBuf};

use super::config::Phase;
use super::meeting::{self, Meeting};
use super::plan::{CREDIT, CollectivePlan, DATA};
use super::{CollectiveKind, ReduceOp};
use crate::common::Bias;
use crate::common::cuda::together_on;
use crate::common::lanes::{Lane, Lanes, Mover, Poison, Reducer, Slots, Sum};

/// Shards from this size on are taken in one by one, as they arrive, instead of all at the end.
const ONE_BY_ONE_BYTES: usize = 1 << 20;

/// Vectors up to this size are moved by kernels. Measured on 8 H200, bus GB/s of kernels and of copy
/// engines: reduce_scatter of 64 MiB 271 and 244, of 256 MiB 289 and 306.
const BY_KERNEL_BYTES: usize = 96 << 20;

/// True if one kernel that meets the others moves a vector of `bytes` in all faster than the other ways. Measured on
/// 4 H200 (`docs/lab/collective.md`): first sizes where latency counts, then those where bandwidth does. Copy engines
/// are as fast from the last bound on, and take no multiprocessor.
fn best_meeting(kind: &CollectiveKind, bytes: usize) -> bool {
    const KIB: usize = 1 << 10;
    const MIB: usize = 1 << 20;
    let (small, from, to) = match kind {
        CollectiveKind::AllGather(_) => (2 * MIB, 16 * MIB, 384 * MIB),
        CollectiveKind::ReduceScatter(..) => (8 * KIB, 48 * MIB, usize::MAX),
        CollectiveKind::AllReduce(_) => (0, 4 * MIB, usize::MAX),
        CollectiveKind::AllToAll(_) => (128 * KIB, 48 * MIB, 128 * MIB),
    };
    bytes <= small || (from < bytes && bytes <= to)
}

/// Bytes of all vectors that a rank takes in where each is sent whole to everybody: a second phase would take longer.
const WHOLE_BYTES: usize = 2 << 20;

/// Rows of a vector of all-reduce, of `row` bytes each, that are sent whole to everybody.
pub(super) fn whole_rows(row: usize, size: usize) -> usize {
    WHOLE_BYTES.checked_div(row * size).unwrap_or(0)
}

/// Who moves a vector.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    Meeting,
    /// The same kernel: everybody sends all rows to all, and adds them.
    Whole,
    Kernels,
    Engines,
}

impl Way {
    /// Of `rows` rows and `bytes` in all. Equal on all ranks, as the arguments are.
    pub fn of(
        kind: &CollectiveKind,
        meets: bool,
        size: usize,
        (rows, bytes): (usize, usize),
    ) -> Self {
        let sums_all = matches!(kind, CollectiveKind::AllReduce(_));
        if meets && sums_all && rows > 0 && bytes * size <= WHOLE_BYTES {
            return Way::Whole;
        }
        // The kernel learns from each rank's first piece that it has begun: every rank owns rows of a sum.
        let owned = !sums_all || rows >= size;
        if meets && owned && best_meeting(kind, bytes) {
            return Way::Meeting;
        }
        if bytes <= BY_KERNEL_BYTES { Way::Kernels } else { Way::Engines }
    }

    pub fn words(self) -> &'static str {
        match self {
            Way::Meeting => "by one kernel that meets the other ranks",
            Way::Whole => "by one kernel, all rows to all ranks",
            Way::Kernels => "by kernels between two meetings",
            Way::Engines => "by copy engines",
        }
    }
}

/// What `prepare` makes.
pub(super) struct Prepared {
    reducer: Option<Reducer>,
    mover: Mover,
    meeting: Option<Meeting>,
}

impl Prepared {
    pub fn new(plan: &CollectivePlan, lane: &Lane, stream: &Stream) -> Result<Self> {
        let (desc, ctx) = (&plan.desc, lane.context());
        let reduces = desc.kind.reduces();
        let reducer = reduces.then(|| Reducer::new(ctx, [desc.dtype; 3])).transpose()?;
        let flags = plan.flags.as_ref();
        let meeting = flags.map(|(f, len)| Meeting::new(lane, stream, desc, (f, *len)));
        Ok(Self { reducer, mover: Mover::new(ctx)?, meeting: meeting.transpose()? })
    }
}

/// One launch.
struct Run<'a> {
    l: &'a Lanes<'a>,
    plan: &'a CollectivePlan,
    p: &'a Prepared,
    row: usize,
    /// Kernels move it.
    small: bool,
}

/// Queues the collective with its phases.
pub(super) fn launch(
    plan: &CollectivePlan,
    lane: &Lane,
    (stream, m): (&Stream, usize),
    (first, second): (Phase, Option<Phase>),
    (x, out): (&Tensor, &Tensor),
) -> Result<Pending<Tensor>> {
    let core = &plan.core;
    together_on(stream, &[("x", Some(x)), ("out", Some(out))]).map_err(|e| e.op(core.op()))?;
    let (from, to) = (x.cuda()?, out.cuda()?);
    let seq = core.begin_on(stream, format_args!("m={m}"))?;
    let p = plan.cuda.get().ok_or_else(|| Error::internal("a prepared plan without kernels"))?;
    let row = plan.desc.cols * plan.desc.dtype.size();
    let (way, outs) = (plan.way(m), [Poison::value(to.clone())]);
    if let (Way::Meeting | Way::Whole, Some(meeting)) = (way, &p.meeting) {
        core.run_alone(lane, (stream, seq), &outs, |l| {
            let run = meeting::Run { l, plan, meeting, row, whole: way == Way::Whole };
            run.launch(m, (&first, second.as_ref()), (&from, &to))
        })?;
        return core.pending(out.clone(), stream, seq);
    }
    let small = way == Way::Kernels;
    // Copies carry flags; kernels meet instead.
    let flags = if small { DATA..DATA } else { DATA..DATA + 1 };
    let enter = Slots { signals: &plan.signals, credit: CREDIT, flags };
    core.run_on(lane, (stream, seq), &enter, &outs, |l| {
        l.main.hold(|| Arc::new((from.clone(), to.clone())));
        Run { l, plan, p, row, small }.first(&first, second.as_ref(), (&from, &to))?;
        p.meeting.as_ref().map_or(Ok(()), |meeting| meeting.leave(l, plan))
    })?;
    core.pending(out.clone(), stream, seq)
}

impl Run<'_> {
    fn rows(&self, t: &CudaMemory, rows: &std::ops::Range<usize>) -> Result<CudaMemory> {
        t.slice(rows.start * self.row, rows.len() * self.row)
    }

    /// Copy lane: rows of `from` to each peer with the flag behind them, peers in rotated order.
    fn push(
        &self,
        (phase, permit): (&Phase, &Permit),
        from: &CudaMemory,
        to: &SymBuf,
        flag: (bool, usize),
    ) -> Result<()> {
        let signals = if flag.0 { self.plan.signals2.as_ref() } else { Some(&self.plan.signals) };
        let signals = signals.ok_or_else(|| Error::internal("no signals of a second phase"))?;
        for s in &phase.sends {
            let part = self.rows(from, &s.rows)?;
            let at = to.range(s.at * self.row, part.len_bytes());
            let slot = signals.slot(flag.1);
            self.l.net.put_flag(self.l.side, permit, (s.dst, at), &part, slot, "push")?;
        }
        Ok(())
    }

    /// Rows of `from` to each peer by one kernel, and what stays here to `own`.
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

    /// What came to the output by one kernel.
    fn take(&self, phase: &Phase, to: &CudaMemory, staging: &SymBuf) -> Result<()> {
        let copy = |r: &super::config::Recv| {
            let part = self.rows(to, &r.out)?;
            let at = staging.range(r.staging.start * self.row, part.len_bytes());
            Ok((self.l.here.addr(at, part.len_bytes())?, part.addr(), part.len_bytes()))
        };
        let copies = phase.recvs.iter().map(copy).collect::<Result<Vec<_>>>()?;
        self.p.mover.launch(self.l, &copies)
    }

    /// Everybody has written.
    fn meet(&self, signals: &Signals) -> Result<()> {
        let slot = signals.slot(DATA);
        let meeting = Enter { credit: slot, tag: 0, first: slot, num: 0 };
        // Nothing is put behind this meeting under its permit.
        self.l.net.enter(self.l.main, &meeting).map(|_permit| ())
    }

    /// Everybody's parts to their owners, and the owner's wait for all.
    fn scatter(&self, phase: &Phase, from: &CudaMemory) -> Result<()> {
        if self.small {
            self.write(phase, from, &self.plan.staging, None)?;
            return self.meet(&self.plan.signals);
        }
        self.push((phase, &self.l.permit), from, &self.plan.staging, (false, DATA))?;
        self.l.net.wait_peers(self.l.main, self.plan.signals.slot(DATA), "arrival")
    }

    fn first(
        &self,
        first: &Phase,
        second: Option<&Phase>,
        (from, to): (&CudaMemory, &CudaMemory),
    ) -> Result<()> {
        let plan = self.plan;
        match &plan.desc.kind {
            CollectiveKind::AllGather(_) | CollectiveKind::AllToAll(_) if self.small => {
                self.write(first, from, &plan.staging, Some(to))?;
                self.meet(&plan.signals)?;
                self.take(first, to, &plan.staging)
            }
            CollectiveKind::AllGather(_) | CollectiveKind::AllToAll(_) => {
                self.push((first, &self.l.permit), from, &plan.staging, (false, DATA))?;
                self.keep(first, from, to)?;
                self.collect(first, to, &plan.staging, (false, DATA))
            }
            CollectiveKind::ReduceScatter(_, op) => {
                self.scatter(first, from)?;
                self.reduce(first, *op, from, (to, 0))
            }
            CollectiveKind::AllReduce(op) => {
                let (Some(second), Some(staging2), Some(signals2)) =
                    (second, &plan.staging2, &plan.signals2)
                else {
                    return Err(Error::internal("all_reduce without second phase"));
                };
                self.scatter(first, from)?;
                self.reduce(first, *op, from, (to, second.own.1.start))?;
                let mine = self.rows(to, &second.own.1)?;
                if self.small {
                    // The first credit was for both areas: both were read behind it.
                    self.write(second, &mine, staging2, None)?;
                    self.meet(signals2)?;
                    return self.take(second, to, staging2);
                }
                let data = signals2.slot(DATA);
                let enter = Enter { credit: signals2.slot(CREDIT), tag: 0, first: data, num: 1 };
                let permit = self.l.net.enter(self.l.main, &enter)?;
                self.l.fork()?;
                self.push((second, &permit), &mine, staging2, (true, DATA))?;
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
        let (net, main, row) = (self.l.net, self.l.main, self.row);
        let signals = if flag.0 { self.plan.signals2.as_ref() } else { Some(&self.plan.signals) };
        let signals = signals.ok_or_else(|| Error::internal("no signals of a second phase"))?;
        let me = self.l.me();
        let largest = phase.recvs.iter().map(|r| r.out.len() * row).max().unwrap_or(0);
        let one_by_one = largest >= ONE_BY_ONE_BYTES;
        if !one_by_one {
            net.wait_peers(main, signals.slot(flag.1), "arrival")?;
        }
        for r in phase.recvs.iter().rev() {
            if one_by_one {
                net.wait(main, r.src, signals.slot(flag.1), 1, "arrival")?;
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

    /// Adds everybody's part of my rows and stores them at row `at` of the output.
    fn reduce(
        &self,
        phase: &Phase,
        op: ReduceOp,
        from: &CudaMemory,
        (to, at): (&CudaMemory, usize),
    ) -> Result<()> {
        let (here, plan) = (self.l.here, self.plan);
        let reducer = self.p.reducer.as_ref();
        let reducer = reducer.ok_or_else(|| Error::internal("a reduction without its kernel"))?;
        let own = self.rows(from, &phase.own.0)?;
        let out = self.rows(to, &(at..at + phase.own.0.len()))?;
        let size = here.heap().team().size();
        let stride = plan.slot_rows * self.row;
        let slots = here.addr(plan.staging.range(0, size * stride), size * stride)?;
        let sum = Sum {
            slots,
            stride: stride as u64,
            own: own.addr(),
            out: out.addr(),
            bias: Bias::default(),
            rows: phase.own.0.len(),
            cols: plan.desc.cols,
            scale: if op == ReduceOp::Avg { 1.0 / size as f32 } else { 1.0 },
        };
        reducer.launch(self.l, &sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Shards;

    #[test]
    fn sizes_and_rows_choose_the_way() {
        let all = [
            CollectiveKind::AllGather(Shards::Even),
            CollectiveKind::ReduceScatter(Shards::Even, ReduceOp::Sum),
            CollectiveKind::AllReduce(ReduceOp::Sum),
            CollectiveKind::AllToAll(vec![vec![1; 4]; 4]),
        ];
        let way = |k: usize, meets, rows, bytes| Way::of(&all[k], meets, 4, (rows, bytes));
        for k in 0..4 {
            let few = if k == 2 { Way::Whole } else { Way::Meeting };
            assert_eq!(way(k, true, 8, 1024), few, "{k}");
            assert_eq!(way(k, true, 1 << 20, 64 << 20), Way::Meeting, "{k}");
            assert_eq!(way(k, false, 8, 1024), Way::Kernels, "{k}");
            assert_eq!(way(k, false, 1 << 20, 256 << 20), Way::Engines, "{k}");
        }
        assert_eq!(way(0, true, 1 << 20, 8 << 20), Way::Kernels);
        assert_eq!(way(0, true, 1 << 20, 1 << 30), Way::Engines);
        assert_eq!(way(1, true, 1 << 20, 1 << 30), Way::Meeting);
        assert_eq!(way(3, true, 1 << 20, 256 << 20), Way::Engines);
        // A rank that owns no rows says nothing of itself.
        assert_eq!(way(2, true, 3, 6 << 20), Way::Kernels);
        assert_eq!(way(2, true, 3, 48), Way::Whole);
        assert_eq!(way(2, true, 0, 0), Way::Kernels);
        assert_eq!(way(2, true, 1 << 10, 512 << 10), Way::Whole);
        assert_eq!(way(2, true, 1 << 10, 513 << 10), Way::Kernels);
        assert_eq!((whole_rows(512, 4), whole_rows(0, 4), whole_rows(4 << 20, 2)), (1024, 0, 0));
        assert_eq!(way(1, true, 3, 48), Way::Meeting);
    }
}
