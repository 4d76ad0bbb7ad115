//! The order of gathered rows in a ring: each rank sends its own rows to the next rank and passes
//! on the rows that it receives from the one before, until all ranks have them. The ring exchange
//! of TransformerEngine's Userbuffers.

use std::ops::Range;

use tilewire_core::Rank;
use tilewire_symm::LinkTraffic;

use super::chunk_rows;

/// A chunk of another rank's rows that arrives.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Arrival {
    /// The rank that puts it into my chunk of the heap, and signals.
    pub from: Rank,
    /// The owner of the rows.
    pub src: Rank,
    /// The number of the chunk in those rows.
    pub chunk: usize,
    /// Global rows.
    pub rows: Range<usize>,
    /// This is the last message from `from`.
    pub last: bool,
    /// The next rank has not had it.
    pub passes: bool,
}

/// Returns the ranks before and behind `me`.
pub(crate) fn neighbours(me: Rank, size: usize) -> (Rank, Rank) {
    (me.offset(size - 1, size), me.offset(1, size))
}

/// Returns the messages that `me` receives, in order: rows of the rank before, then of the one
/// before that, and so on.
pub(crate) fn arrivals(me: Rank, rows: &[usize], chunks: usize) -> impl Iterator<Item = Arrival> {
    let size = rows.len();
    let (from, next) = neighbours(me, size);
    (1..size).flat_map(move |i| {
        let src = me.offset(size - i, size);
        (0..chunks).map(move |chunk| Arrival {
            from,
            src,
            chunk,
            rows: chunk_rows(rows, src, chunk, chunks),
            last: i + 1 == size && chunk + 1 == chunks,
            passes: src != next,
        })
    })
}

/// Returns the traffic from `me` to the next rank: the rows of all ranks but that rank's own.
/// Nothing moves in a team of one.
pub(crate) fn sent(me: Rank, rows: &[usize], row_bytes: usize, chunks: usize) -> LinkTraffic {
    let next = neighbours(me, rows.len()).1;
    let mut t = LinkTraffic::default();
    for (_, &num) in rows.iter().enumerate().filter(|(r, _)| *r != next.idx()) {
        t.puts += if row_bytes == 0 { 0 } else { num.min(chunks) as u64 };
        t.put_bytes += (num * row_bytes) as u64;
        t.signals += chunks as u64;
    }
    t
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::range_of;
    use proptest::prelude::*;

    proptest! {
        /// Runs all ranks message by message: no rank passes on rows before they have arrived,
        /// every row reaches every rank once, and the traffic is the predicted one.
        #[test]
        fn every_row_goes_once_around(
            rows in prop::collection::vec(0usize..20, 1..9),
            chunks in 1usize..5,
        ) {
            let (size, m) = (rows.len(), rows.iter().sum());
            let mut seen = vec![vec![0; m]; size];
            let mut queues: Vec<Vec<(Rank, usize)>> = vec![Vec::new(); size];
            for me in Rank::all(size) {
                range_of(&rows, me).for_each(|r| seen[me.idx()][r] += 1);
                if size > 1 {
                    let own = (0..chunks).map(|c| (me, c));
                    queues[neighbours(me, size).1.idx()].extend(own);
                }
            }
            let mut sends: Vec<Vec<Range<usize>>> =
                Rank::all(size).map(|me| if size == 1 { vec![] } else {
                    (0..chunks).map(|c| chunk_rows(&rows, me, c, chunks)).collect()
                }).collect();
            let lists: Vec<Vec<Arrival>> =
                Rank::all(size).map(|me| arrivals(me, &rows, chunks).collect()).collect();
            for step in 0..(size - 1) * chunks {
                // No rank waits for a message of the same step: all ranks receive, then all pass
                // on.
                let taken: Vec<Arrival> = lists.iter().map(|l| l[step].clone()).collect();
                for (me, a) in taken.iter().enumerate() {
                    prop_assert_eq!(a.from, neighbours(Rank::new(me as u32), size).0);
                    prop_assert_eq!(queues[me].get(step), Some(&(a.src, a.chunk)));
                    prop_assert_eq!(a.last, step + 1 == lists[me].len());
                    a.rows.clone().for_each(|r| seen[me][r] += 1);
                }
                for (me, a) in taken.iter().enumerate().filter(|(_, a)| a.passes) {
                    let next = neighbours(Rank::new(me as u32), size).1;
                    queues[next.idx()].push((a.src, a.chunk));
                    sends[me].push(a.rows.clone());
                }
            }
            prop_assert!(seen.iter().flatten().all(|&s| s == 1));
            for me in Rank::all(size) {
                let (sent, list) = (sent(me, &rows, 8, chunks), &sends[me.idx()]);
                prop_assert_eq!(sent.signals, list.len() as u64);
                prop_assert_eq!(sent.puts, list.iter().filter(|r| !r.is_empty()).count() as u64);
                prop_assert_eq!(sent.put_bytes, list.iter().map(|r| 8 * r.len() as u64).sum::<u64>());
                prop_assert_eq!(queues[me.idx()].len(), lists[me.idx()].len());
            }
        }
    }
}
