//! The way back of GEMM+AR: which reduced rows arrive, from whom, in which order.

use std::ops::Range;

use tilewire_core::Rank;

use crate::common::chunk_rows;

/// Reduced rows that arrive at rank `me`: chunk by chunk, as the owners finish them, sources from
/// `me + 1` on. The flag marks the last chunk of a source.
pub(super) fn arrivals(
    me: Rank,
    rows: &[usize],
    chunks: usize,
) -> impl Iterator<Item = (Rank, Range<usize>, bool)> {
    let size = rows.len();
    (0..chunks).flat_map(move |c| {
        (1..size).map(move |i| {
            let src = me.offset(i, size);
            (src, chunk_rows(rows, src, c, chunks), c + 1 == chunks)
        })
    })
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
        ) {
            let m: usize = rows.iter().sum();
            for me in Rank::all(rows.len()) {
                let mut seen = vec![0; m];
                range_of(&rows, me).for_each(|r| seen[r] += 1);
                let mut sends = vec![0; rows.len()];
                for (src, r, last) in arrivals(me, &rows, chunks) {
                    prop_assert!(src != me);
                    sends[src.idx()] += 1;
                    prop_assert_eq!(last, sends[src.idx()] == chunks);
                    r.for_each(|r| seen[r] += 1);
                }
                prop_assert!(seen.iter().all(|&s| s == 1));
                prop_assert!(Rank::all(rows.len()).all(|r| r == me || sends[r.idx()] == chunks));
            }
        }
    }
}
