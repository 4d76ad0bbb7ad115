//! The way back of GEMM+AR: which reduced rows arrive, from which ranks, in which order.

use tilewire_core::Rank;

use crate::common::ring::{self, Arrival};
use crate::common::{Algo, OverlapConfig, chunk_rows};

/// Reduced rows that arrive at rank `me`: chunk by chunk, as the owners finish them, sources from
/// `me - 1` backwards, as every owner sends to the next rank first; or, of a ring, from the rank
/// before.
pub(super) fn arrivals(me: Rank, rows: &[usize], cfg: &OverlapConfig) -> Vec<Arrival> {
    let (size, chunks) = (rows.len(), cfg.sub_chunks);
    if cfg.algo == Algo::Ring {
        return ring::arrivals(me, rows, chunks).collect();
    }
    let each = |chunk: usize| {
        (1..size).map(move |i| {
            let src = me.offset(size - i, size);
            let rows = chunk_rows(rows, src, chunk, chunks);
            Arrival { from: src, src, chunk, rows, last: chunk + 1 == chunks, passes: false }
        })
    };
    (0..chunks).flat_map(each).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::range_of;
    use proptest::prelude::*;

    proptest! {
        /// Every row that is not my own arrives once; every source sends `chunks` times, in order.
        #[test]
        fn each_foreign_row_arrives_once(
            rows in prop::collection::vec(0usize..20, 1..7),
            chunks in 1usize..5,
            algo in prop::sample::select(vec![Algo::Pipelined, Algo::Ring]),
        ) {
            let cfg = OverlapConfig::of(algo, chunks);
            let m: usize = rows.iter().sum();
            for me in Rank::all(rows.len()) {
                let mut seen = vec![0; m];
                range_of(&rows, me).for_each(|r| seen[r] += 1);
                let mut sends = vec![0; rows.len()];
                let mut of = vec![0; rows.len()];
                let list = arrivals(me, &rows, &cfg);
                for a in &list {
                    prop_assert!(a.src != me && a.from != me);
                    sends[a.from.idx()] += 1;
                    prop_assert_eq!(of[a.src.idx()], a.chunk);
                    of[a.src.idx()] += 1;
                    let all = list.iter().filter(|b| b.from == a.from).count();
                    prop_assert_eq!(a.last, sends[a.from.idx()] == all);
                    a.rows.clone().for_each(|r| seen[r] += 1);
                }
                prop_assert!(seen.iter().all(|&s| s == 1));
                prop_assert!(Rank::all(rows.len()).all(|r| r == me || of[r.idx()] == chunks));
            }
        }
    }
}
