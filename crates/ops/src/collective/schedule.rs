//! The schedule of a collective: the rows that each rank sends to each other rank, for plan,
//! executors and prediction.

use std::ops::Range;

use tilewire_core::{Rank, Result};

use super::{CollectiveDesc, CollectiveKind};
use crate::common::Shards;

/// Rows of the input that a rank sends to a peer, and their place in its staging area.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Send {
    pub dst: Rank,
    /// Input rows.
    pub rows: Range<usize>,
    /// First staging row at the receiver.
    pub at: usize,
}

/// Staging rows that a source fills.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Recv {
    pub src: Rank,
    /// Staging rows.
    pub staging: Range<usize>,
    /// For gathers: output rows. For reductions: the same rows of the result for each source.
    pub out: Range<usize>,
}

/// One phase of a collective as seen by one rank: sends in rotated order, own part, receives.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Phase {
    pub sends: Vec<Send>,
    pub recvs: Vec<Recv>,
    /// Input rows that stay here, and the output rows they belong to.
    pub own: (Range<usize>, Range<usize>),
}

fn starts(rows: &[usize]) -> Vec<usize> {
    let mut at = 0;
    let mut v = vec![0];
    for r in rows {
        at += r;
        v.push(at);
    }
    v
}

/// Returns the rows of each rank for reductions and gathers of `m` rows.
pub(super) fn shard_rows(desc: &CollectiveDesc, m: usize, size: usize) -> Result<Vec<usize>> {
    match &desc.kind {
        CollectiveKind::AllGather(s) | CollectiveKind::ReduceScatter(s, _) => s.rows(m, size),
        _ => Shards::Even.rows(m, size),
    }
}

/// Returns the phase in which each rank sends its shard to all ranks. Staging row = global row.
pub(super) fn gather(me: Rank, rows: &[usize]) -> Phase {
    let s = starts(rows);
    let range = |r: Rank| s[r.idx()]..s[r.idx() + 1];
    let size = rows.len();
    let peers = (1..size).map(|i| me.offset(i, size));
    Phase {
        sends: peers
            .clone()
            .map(|dst| Send { dst, rows: 0..rows[me.idx()], at: s[me.idx()] })
            .collect(),
        recvs: peers.map(|src| Recv { src, staging: range(src), out: range(src) }).collect(),
        own: (0..rows[me.idx()], range(me)),
    }
}

/// Returns the phase in which each rank sends every owner's rows to that owner. Staging: one slot
/// of `slot_rows` for each source.
pub(super) fn scatter(me: Rank, rows: &[usize], slot_rows: usize) -> Phase {
    let s = starts(rows);
    let range = |r: Rank| s[r.idx()]..s[r.idx() + 1];
    let size = rows.len();
    let peers = (1..size).map(|i| me.offset(i, size));
    let mine = rows[me.idx()];
    Phase {
        sends: peers
            .clone()
            .map(|dst| Send { dst, rows: range(dst), at: me.idx() * slot_rows })
            .collect(),
        recvs: peers
            .map(|src| Recv {
                src,
                staging: src.idx() * slot_rows..src.idx() * slot_rows + mine,
                out: 0..mine,
            })
            .collect(),
        own: (range(me), 0..mine),
    }
}

/// Returns the phase of an all-to-all by `splits[src][dst]`. Staging row = output row.
pub(super) fn exchange(me: Rank, splits: &[Vec<usize>]) -> Phase {
    let size = splits.len();
    let out_start =
        |dst: Rank, src: Rank| -> usize { splits[..src.idx()].iter().map(|s| s[dst.idx()]).sum() };
    let input = starts(&splits[me.idx()]);
    let range = |start: usize, len: usize| start..start + len;
    let peers = (1..size).map(|i| me.offset(i, size));
    Phase {
        sends: peers
            .clone()
            .map(|dst| Send {
                dst,
                rows: input[dst.idx()]..input[dst.idx() + 1],
                at: out_start(dst, me),
            })
            .collect(),
        recvs: peers
            .map(|src| {
                let r = range(out_start(me, src), splits[src.idx()][me.idx()]);
                Recv { src, staging: r.clone(), out: r }
            })
            .collect(),
        own: (
            input[me.idx()]..input[me.idx() + 1],
            range(out_start(me, me), splits[me.idx()][me.idx()]),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Checks that each rank sends the rows that its peers expect, and that outputs are covered
    /// exactly once.
    fn matched(phases: &[Phase], gathers: bool) {
        for (i, p) in phases.iter().enumerate() {
            for s in &p.sends {
                let r = phases[s.dst.idx()].recvs.iter().find(|r| r.src.idx() == i).unwrap();
                assert_eq!((r.staging.start, r.staging.len()), (s.at, s.rows.len()));
            }
            if gathers {
                let mut all: Vec<usize> = p.recvs.iter().flat_map(|r| r.out.clone()).collect();
                all.extend(p.own.1.clone());
                all.sort_unstable();
                assert_eq!(all, (0..all.len()).collect::<Vec<_>>());
            } else {
                assert!(p.recvs.iter().all(|r| r.out == p.own.1));
            }
        }
    }

    proptest! {
        #[test]
        fn sends_and_receives_match(
            rows in prop::collection::vec(0usize..7, 1..9),
            seed in any::<u64>(),
        ) {
            let n = rows.len();
            let max = rows.iter().copied().max().unwrap_or(0);
            matched(&Rank::all(n).map(|r| gather(r, &rows)).collect::<Vec<_>>(), true);
            matched(&Rank::all(n).map(|r| scatter(r, &rows, max)).collect::<Vec<_>>(), false);
            let mut rng = tilewire_core::Rng::new(seed);
            let splits: Vec<Vec<usize>> =
                (0..n).map(|_| (0..n).map(|_| rng.below(5) as usize).collect()).collect();
            matched(&Rank::all(n).map(|r| exchange(r, &splits)).collect::<Vec<_>>(), true);
        }
    }
}
