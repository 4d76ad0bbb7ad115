//! Collectives on CUDA devices by NCCL: one call where shards are even, a group of calls where they
//! are not.
//!
//! A launch enters as every launch does: NCCL's kernels have no deadline, so the ranks must have
//! met before one of these kernels spins.

use std::ops::Range;
use std::sync::Arc;

use tilewire_core::{Rank, Result};
use tilewire_device::cuda::{NcclOp, NcclSum};
use tilewire_device::{Pending, Tensor};
use tilewire_symm::NcclTeam;

use super::queue::OnDevice;
use crate::collective::launch::{CREDIT, DATA, Given};
use crate::collective::schedule::{Phase, shard_rows};
use crate::collective::{CollectiveDesc, CollectiveKind, ReduceOp};
use crate::common::cuda::together_on;
use crate::common::lanes::{Poison, Slots};

/// Queues the collective.
pub(super) fn launch(
    on: &OnDevice<'_>,
    nccl: &Arc<NcclTeam>,
    Given { stream, m, x, out, before: _ }: Given<'_>,
) -> Result<Pending<Tensor>> {
    let (base, core, name) = (on.base, &on.base.core, on.base.core.op());
    together_on(stream, &[("x", Some(x)), ("out", Some(out))]).map_err(|e| e.op(name))?;
    let (from, to) = (x.cuda()?, out.cuda()?);
    let rows = shard_rows(&base.desc, m, core.team().size()).map_err(|e| e.op(name))?;
    let (phase, _) = base.phases(m).map_err(|e| e.op(name))?;
    let (sum, ops) =
        calls(&base.desc, core.team().rank(), (&rows, &phase), (from.addr(), to.addr()));
    let at = core.begin_on(stream, format_args!("m={m}"))?;
    let enter = Slots { signals: &base.signals, credit: CREDIT, flags: DATA..DATA };
    core.run_on(on.lane, at, &enter, &[Poison::value(to.clone())], |l| {
        l.main.hold(|| Arc::new((from.clone(), to.clone())));
        // SAFETY: the tensors were checked against the description, from which the calls are made,
        // lie on this device and are held; all ranks agree on the description at `prepare`, and on
        // the rows by the rules of a launch.
        unsafe { nccl.queue(l.main, (base.desc.dtype, sum), &ops) }
    })?;
    core.pending(out.clone(), at)
}

/// Returns the calls of this rank, which are one group.
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

/// Returns the calls that gather all ranks' rows (`cols` elements of `elem` bytes each): from `x`
/// on each rank to `out`.
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

/// Returns the calls that add `x` over all ranks and give rank `i` its `rows[i]` rows of the sum.
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

/// Returns the ranks with rows.
fn roots(rows: &[usize]) -> impl Iterator<Item = usize> {
    (0..rows.len()).filter(|&i| rows[i] > 0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tilewire_core::DType;

    use super::*;
    use crate::Shards;
    use crate::collective::schedule;

    const COLS: usize = 3;

    fn of_all(kind: &CollectiveKind, m: usize, size: usize) -> Vec<Vec<NcclOp>> {
        let desc = CollectiveDesc { kind: kind.clone(), m, cols: COLS, dtype: DType::F32 };
        let rows = shard_rows(&desc, m, size).unwrap();
        let of = |me| {
            let phase = match kind {
                CollectiveKind::AllToAll(splits) => schedule::exchange(me, splits),
                _ => schedule::gather(me, &rows),
            };
            calls(&desc, me, (&rows, &phase), (0, 1 << 40)).1
        };
        Rank::all(size).map(of).collect()
    }

    /// Returns the elements that are received at `dst`.
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
}
