//! Collectives on CUDA devices by NCCL: one call where shards are even, a group of calls where they
//! are not; and the choice between it and puts.
//!
//! A launch enters as every launch does: NCCL's kernels know no deadline, so the ranks must have met
//! before one of them spins.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use tilewire_core::{Rank, Result, Shape};
use tilewire_device::cuda::{CudaContext, NcclOp, NcclSum};
use tilewire_device::{Pending, Stream, Tensor};
use tilewire_symm::NcclTeam;

use super::config::{Phase, shard_rows};
use super::plan::{CREDIT, CollectivePlan, DATA};
use super::{CollectiveBackend, CollectiveDesc, CollectiveKind, ReduceOp};
use crate::common::backend::at_first;
use crate::common::cuda::together_on;
use crate::common::cuda::workspace;
use crate::common::lanes::{Lane, Poison, Slots};
use crate::common::nccl::{Clock, faster, open, room, unmeasured};

/// What a plan goes through, decided at `prepare`.
#[derive(Default)]
pub(super) struct Used(OnceLock<(Option<Arc<NcclTeam>>, String)>);

impl Used {
    pub fn nccl(&self) -> Option<&Arc<NcclTeam>> {
        self.0.get().and_then(|(n, _)| n.as_ref())
    }

    /// In words.
    pub fn text(&self) -> Option<&str> {
        self.0.get().map(|(_, text)| text.as_str())
    }
}

/// Collective: decides what a prepared plan goes through. Whatever is taken has run once, so that no
/// launch connects or loads.
pub(super) fn decide(plan: &CollectivePlan, lane: &Lane, stream: &Stream) -> Result<()> {
    if plan.used.0.get().is_some() {
        return Ok(());
    }
    let set = |nccl, text: String| {
        plan.used.0.get_or_init(|| (nccl, text));
    };
    let nccl = match open(plan.core.heap(), plan.backend)? {
        Ok(nccl) => nccl,
        Err(why) => {
            set(None, why);
            return Ok(());
        }
    };
    let usual = at_first(plan.core.heap(), plan.backend);
    let scratch = match room(plan.core.team(), Scratch::new(plan, lane.context()))? {
        Ok(scratch) => scratch,
        Err(e) if usual == CollectiveBackend::Nccl => return Err(e),
        Err(e) => {
            set(None, unmeasured(&e));
            return Ok(());
        }
    };
    // Only this rank knows that something failed here, and the others are about to meet it.
    let time = |nccl| scratch.time(plan, lane, stream, nccl).map_err(|e| plan.core.team().fail(e));
    let by_nccl = time(Some(&nccl))?;
    if usual == CollectiveBackend::Nccl {
        set(Some(nccl.clone()), nccl.library().to_owned());
        return Ok(());
    }
    let by_puts = time(None)?;
    let (first, why) = faster(plan.core.team(), &nccl, (by_nccl, by_puts))?;
    set(first.then_some(nccl), why);
    Ok(())
}

/// Tensors of the plan's most rows.
struct Scratch {
    x: Tensor,
    out: Tensor,
    clock: Clock,
}

impl Scratch {
    fn new(plan: &CollectivePlan, ctx: &CudaContext) -> Result<Self> {
        let (rows_in, rows_out) = plan.io_rows(plan.desc.m)?;
        let (t, cols) = (plan.desc.dtype, plan.desc.cols);
        let tensor = |rows: usize| {
            let memory = workspace(ctx, rows * cols * t.size())?;
            Tensor::over_cuda(memory, t, Shape::d2(rows, cols))
        };
        Ok(Self { x: tensor(rows_in)?, out: tensor(rows_out)?, clock: Clock::new(ctx)? })
    }

    /// Collective: microseconds of a launch on this rank.
    fn time(
        &self,
        plan: &CollectivePlan,
        lane: &Lane,
        stream: &Stream,
        nccl: Option<&Arc<NcclTeam>>,
    ) -> Result<f64> {
        self.clock.time(plan.core.team(), stream, || {
            plan.launch_by(nccl, lane, stream, plan.desc.m, (&self.x, &self.out)).map(drop)
        })
    }
}

/// Queues the collective.
pub(super) fn launch(
    plan: &CollectivePlan,
    nccl: &Arc<NcclTeam>,
    lane: &Lane,
    (stream, m): (&Stream, usize),
    (x, out): (&Tensor, &Tensor),
) -> Result<Pending<Tensor>> {
    let (core, name) = (&plan.core, plan.core.op());
    together_on(stream, &[("x", Some(x)), ("out", Some(out))]).map_err(|e| e.op(name))?;
    let (from, to) = (x.cuda()?, out.cuda()?);
    let rows = shard_rows(&plan.desc, m, core.team().size()).map_err(|e| e.op(name))?;
    let (phase, _) = plan.phases(m).map_err(|e| e.op(name))?;
    let (sum, ops) =
        calls(&plan.desc, core.team().rank(), (&rows, &phase), (from.addr(), to.addr()));
    let seq = core.begin_on(stream, format_args!("m={m}"))?;
    let enter = Slots { signals: &plan.signals, credit: CREDIT, flags: DATA..DATA };
    core.run_on(lane, (stream, seq), &enter, &[Poison::value(to.clone())], |l| {
        l.main.hold(|| Arc::new((from.clone(), to.clone())));
        // SAFETY: the tensors were checked against the description, from which the calls are made,
        // lie on this device and are held; all ranks agree on the description at `prepare`, and on
        // the rows by the rules of a launch.
        unsafe { nccl.queue(l.main, (plan.desc.dtype, sum), &ops) }
    })?;
    core.pending(out.clone(), stream, seq)
}

/// What this rank calls, all of it as one group.
fn calls(
    desc: &CollectiveDesc,
    me: Rank,
    (rows, phase): (&[usize], &Phase),
    (x, out): (u64, u64),
) -> (NcclSum, Vec<NcclOp>) {
    let (cols, row) = (desc.cols, (desc.cols * desc.dtype.size()) as u64);
    let at = |base: u64, r: usize| base + r as u64 * row;
    let how = |op: &ReduceOp| if *op == ReduceOp::Avg { NcclSum::Avg } else { NcclSum::Sum };
    let shape = (cols, desc.dtype.size());
    match &desc.kind {
        CollectiveKind::AllGather(_) => (NcclSum::Sum, gather(me, rows, shape, (x, out))),
        CollectiveKind::ReduceScatter(_, op) => (how(op), scatter(me, rows, shape, (x, out))),
        CollectiveKind::AllReduce(op) => {
            let count = rows.iter().sum::<usize>() * cols;
            (how(op), vec![NcclOp::AllReduce { src: x, dst: out, count }])
        }
        CollectiveKind::AllToAll(_) => {
            let send = |peer: Rank, rows: &Range<usize>| NcclOp::Send {
                src: at(x, rows.start),
                count: rows.len() * cols,
                peer: peer.get(),
            };
            let recv = |peer: Rank, rows: &Range<usize>| NcclOp::Recv {
                dst: at(out, rows.start),
                count: rows.len() * cols,
                peer: peer.get(),
            };
            let mut ops = vec![send(me, &phase.own.0), recv(me, &phase.own.1)];
            ops.extend(phase.sends.iter().map(|s| send(s.dst, &s.rows)));
            ops.extend(phase.recvs.iter().map(|r| recv(r.src, &r.out)));
            (NcclSum::Sum, ops)
        }
    }
}

/// All ranks' rows (`cols` elements of `elem` bytes each): mine at `x`, those of all at `out`.
pub(crate) fn gather(
    me: Rank,
    rows: &[usize],
    (cols, elem): (usize, usize),
    (x, out): (u64, u64),
) -> Vec<NcclOp> {
    if even(rows) {
        return vec![NcclOp::AllGather { src: x, dst: out, count: rows[me.idx()] * cols }];
    }
    let one = |i: usize| NcclOp::Broadcast {
        src: x,
        dst: out + (before(rows, i) * cols * elem) as u64,
        count: rows[i] * cols,
        root: i as u32,
    };
    roots(rows).map(one).collect()
}

/// The sum of all ranks' `x`, of which rank `i` gets `rows[i]` rows.
pub(crate) fn scatter(
    me: Rank,
    rows: &[usize],
    (cols, elem): (usize, usize),
    (x, out): (u64, u64),
) -> Vec<NcclOp> {
    if even(rows) {
        return vec![NcclOp::ReduceScatter { src: x, dst: out, count: rows[me.idx()] * cols }];
    }
    let one = |i: usize| NcclOp::Reduce {
        src: x + (before(rows, i) * cols * elem) as u64,
        dst: out,
        count: rows[i] * cols,
        root: i as u32,
    };
    roots(rows).map(one).collect()
}

fn even(rows: &[usize]) -> bool {
    rows.windows(2).all(|w| w[0] == w[1])
}

fn before(rows: &[usize], i: usize) -> usize {
    rows[..i].iter().sum()
}

/// Ranks with rows.
fn roots(rows: &[usize]) -> impl Iterator<Item = usize> {
    (0..rows.len()).filter(|&i| rows[i] > 0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tilewire_core::DType;
    use tilewire_symm::{HeapCfg, World, WorldCfg};

    use super::super::config;
    use super::*;
    use crate::Shards;

    const COLS: usize = 3;

    fn of_all(kind: &CollectiveKind, m: usize, size: usize) -> Vec<Vec<NcclOp>> {
        let desc = CollectiveDesc { kind: kind.clone(), m, cols: COLS, dtype: DType::F32 };
        let rows = shard_rows(&desc, m, size).unwrap();
        let of = |me| {
            let phase = match kind {
                CollectiveKind::AllToAll(splits) => config::exchange(me, splits),
                _ => config::gather(me, &rows),
            };
            calls(&desc, me, (&rows, &phase), (0, 1 << 40)).1
        };
        Rank::all(size).map(of).collect()
    }

    /// Element, and number of elements, of what is received at `dst`.
    fn place(dst: u64, count: usize) -> Range<usize> {
        let first = ((dst - (1 << 40)) / 4) as usize;
        first..first + count
    }

    proptest! {
        #[test]
        fn all_ranks_make_the_same_calls(rows in prop::collection::vec(0usize..5, 1..9)) {
            let (m, size) = (rows.iter().sum(), rows.len());
            for kind in [
                CollectiveKind::AllGather(Shards::Explicit(rows.clone())),
                CollectiveKind::ReduceScatter(Shards::Explicit(rows.clone()), ReduceOp::Avg),
                CollectiveKind::AllReduce(ReduceOp::Sum),
            ] {
                let calls = of_all(&kind, m, size);
                // The root and the number of elements of each; both are the same everywhere.
                let words = |ops: &Vec<NcclOp>| ops.iter().map(|op| match *op {
                    NcclOp::Broadcast { count, root, .. } | NcclOp::Reduce { count, root, .. } => (count, root),
                    NcclOp::AllGather { count, .. } | NcclOp::ReduceScatter { count, .. }
                    | NcclOp::AllReduce { count, .. } => (count, u32::MAX),
                    _ => (0, 0),
                }).collect::<Vec<_>>();
                prop_assert!(calls.iter().all(|c| words(c) == words(&calls[0])), "{calls:?}");
                let all: usize = words(&calls[0]).iter().map(|(n, root)| {
                    let parts = if *root == u32::MAX && !matches!(kind, CollectiveKind::AllReduce(_)) { size } else { 1 };
                    n * parts
                }).sum();
                prop_assert_eq!(all, m * COLS);
            }
        }

        #[test]
        fn what_is_sent_is_received_and_fills_the_output(size in 1usize..6, seed in any::<u64>()) {
            let mut rng = tilewire_core::Rng::new(seed);
            let splits: Vec<Vec<usize>> =
                (0..size).map(|_| (0..size).map(|_| rng.below(4) as usize).collect()).collect();
            let calls = of_all(&CollectiveKind::AllToAll(splits), 0, size);
            for (me, ops) in calls.iter().enumerate() {
                let mut seen = Vec::new();
                for op in ops {
                    let NcclOp::Recv { dst, count, peer } = *op else { continue };
                    seen.extend(place(dst, count));
                    let sent = calls[peer as usize].iter().any(|op| matches!(*op,
                        NcclOp::Send { count: c, peer: p, .. } if c == count && p as usize == me));
                    prop_assert!(sent, "{me} from {peer}");
                }
                seen.sort_unstable();
                prop_assert_eq!(&seen, &(0..seen.len()).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn the_host_has_puts_only() {
        let world = World::solo(WorldCfg::for_tests()).unwrap();
        let team = world.everyone("nccl").unwrap();
        let heap = team.heap(tilewire_core::BackendKind::Host, HeapCfg::new(4096)).unwrap();
        let kind = CollectiveKind::AllReduce(ReduceOp::Sum);
        let desc = CollectiveDesc { kind, m: 2, cols: 2, dtype: DType::F32 };
        let plan = |b| CollectivePlan::with_backend(desc.clone(), &heap, b);
        let e = plan(CollectiveBackend::Nccl).err().unwrap();
        assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
        plan(CollectiveBackend::Fastest).unwrap();
        use crate::common::{Algo, OverlapConfig};
        let by = Some(OverlapConfig::of(Algo::SequentialNccl, 1));
        let ag = crate::ag_gemm::AgGemmDesc::new(2, 2, 2, DType::F32);
        let rs = crate::gemm_rs::GemmRsDesc::new(2, 2, 2, DType::F32);
        let ar = crate::gemm_ar::GemmArDesc(rs.clone());
        let ep = crate::ep::EpDesc::new(1, 2, 2, 2, 1);
        let ep = |b| crate::ep::EpPlan::with_backend(ep.clone(), &heap, b).err();
        let mask = crate::attention::AttnMask::CAUSAL;
        let cp = crate::attention::AttentionDesc::new(2, (1, 1), 4, DType::F32, mask);
        let cp = crate::cp_attention::CpAttentionDesc::new(cp);
        let cp = |b| {
            crate::cp_attention::CpAttentionPlan::with_backend(cp.clone(), &heap, None, b).err()
        };
        for e in [
            crate::ag_gemm::AgGemmPlan::new(ag, &heap, by).err(),
            crate::gemm_rs::GemmRsPlan::new(rs, &heap, by).err(),
            crate::gemm_ar::GemmArPlan::new(ar, &heap, by).err(),
            ep(CollectiveBackend::Nccl),
            cp(CollectiveBackend::Nccl),
        ] {
            let e = e.unwrap();
            assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
        }
        // Nothing to choose from: puts.
        assert!(ep(CollectiveBackend::Fastest).is_none());
        assert!(cp(CollectiveBackend::Fastest).is_none());
        let e = heap.nccl().err().unwrap();
        assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
    }
}
