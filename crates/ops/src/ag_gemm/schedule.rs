//! The tile order of AG+GEMM: one pure function for prediction, host and kernels.

use std::ops::Range;

use tilewire_core::Rank;

use crate::common::{Algo, OverlapConfig, Via, chunk_rows};

/// One step of the compute lane.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum AgTask {
    /// Wait for chunk `chunk` of `src`. Chunks of one source arrive in order.
    Wait {
        /// The rank whose shard it is.
        src: Rank,
        /// The number of the chunk in that shard.
        chunk: usize,
    },
    /// Multiply global rows by columns of W.
    Tile {
        /// Rows of X and of the output.
        rows: Range<usize>,
        /// Columns of the product.
        cols: Range<usize>,
    },
}

/// Row tiles that are swept together over all columns, so that W is read from cache.
const RASTER_ROWS: usize = 12;

/// Returns what rank `me` does, in order. `rows` are the rows of all ranks, `n` my columns;
/// `whole_rows` asks for tiles over all columns (activations that pair columns).
///
/// Owner of step `i` is `me - i`, whose shard is the `i`-th to arrive: every rank sends to the next
/// one first, then to the one behind, and so on; of a ring it is what comes in hop `i`. Step 0 is
/// the own shard and needs no flag. Inside an owner: chunk by chunk, row tiles in groups of twelve
/// over all columns.
pub fn schedule(
    me: Rank,
    rows: &[usize],
    n: usize,
    cfg: &OverlapConfig,
    whole_rows: bool,
) -> Vec<AgTask> {
    let size = rows.len();
    let block_n = if whole_rows { n.max(1) } else { cfg.block_n.min(n.max(1)) };
    let mut tasks = Vec::new();
    let chunks = |owner: Rank| {
        (0..cfg.sub_chunks).map(move |c| (c, chunk_rows(rows, owner, c, cfg.sub_chunks)))
    };
    let owners = (0..size).map(|i| me.offset(size - i, size));
    if cfg.algo == Algo::Sequential {
        // NCCL has no flags: its work is done when the stream goes on.
        for src in owners.skip(1).filter(|_| cfg.via == Via::Puts) {
            tasks.extend((0..cfg.sub_chunks).map(|chunk| AgTask::Wait { src, chunk }));
        }
        let m = rows.iter().sum();
        tasks.push(AgTask::Tile { rows: 0..m, cols: 0..n });
        return tasks;
    }
    for owner in owners {
        for (chunk, range) in chunks(owner) {
            if owner != me {
                tasks.push(AgTask::Wait { src: owner, chunk });
            }
            raster(&range, n, cfg.block_m, block_n, &mut tasks);
        }
    }
    tasks
}

fn raster(rows: &Range<usize>, n: usize, block_m: usize, block_n: usize, out: &mut Vec<AgTask>) {
    let step = |at: usize, block: usize, end: usize| at.saturating_add(block).min(end);
    let mut top = rows.start;
    while top < rows.end {
        let bottom = step(top, block_m.saturating_mul(RASTER_ROWS), rows.end);
        let mut left = 0;
        while left < n {
            let right = step(left, block_n, n);
            let mut r = top;
            while r < bottom {
                let e = step(r, block_m, bottom);
                out.push(AgTask::Tile { rows: r..e, cols: left..right });
                r = e;
            }
            left = right;
        }
        top = bottom;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::range_of;
    use crate::common::ring::arrivals;
    use proptest::prelude::*;

    proptest! {
        /// Every output element is computed once, and never before its chunk was waited for;
        /// every chunk of every peer is waited for once and in order.
        #[test]
        fn each_tile_once_after_its_chunk(
            rows in prop::collection::vec(0usize..40, 1..7),
            n in 0usize..50,
            blocks in (1usize..20, 1usize..20),
            chunks in 1usize..5,
            algo in prop::sample::select(vec![
                Algo::Fused, Algo::Pipelined, Algo::Ring, Algo::Sequential,
            ]),
        ) {
            let (block_m, block_n) = blocks;
            let cfg = OverlapConfig { block_m, block_n, ..OverlapConfig::of(algo, chunks) };
            let m: usize = rows.iter().sum();
            for me in Rank::all(rows.len()) {
                let mut done = vec![0u8; m * n];
                let mut ready = vec![false; m];
                range_of(&rows, me).for_each(|r| ready[r] = true);
                let mut next = vec![0; rows.len()];
                for t in schedule(me, &rows, n, &cfg, false) {
                    match t {
                        AgTask::Wait { src, chunk } => {
                            prop_assert!(src != me);
                            prop_assert_eq!(next[src.idx()], chunk);
                            next[src.idx()] += 1;
                            chunk_rows(&rows, src, chunk, chunks).for_each(|r| ready[r] = true);
                        }
                        AgTask::Tile { rows, cols } => {
                            for r in rows {
                                prop_assert!(ready[r]);
                                cols.clone().for_each(|c| done[r * n + c] += 1);
                            }
                        }
                    }
                }
                prop_assert!(done.iter().all(|&d| d == 1));
                for p in Rank::all(rows.len()).filter(|&p| p != me) {
                    prop_assert_eq!(next[p.idx()], chunks);
                }
            }
        }
    }

    #[test]
    fn nccl_has_gathered_before_the_one_product() {
        let cfg = OverlapConfig { sub_chunks: 2, ..OverlapConfig::by_nccl() };
        let tasks = schedule(Rank::new(1), &[2, 3], 4, &cfg, false);
        assert_eq!(tasks, [AgTask::Tile { rows: 0..5, cols: 0..4 }]);
    }

    fn waits(tasks: &[AgTask]) -> Vec<(u32, usize)> {
        let wait = |t: &AgTask| match t {
            AgTask::Wait { src, chunk } => Some((src.get(), *chunk)),
            AgTask::Tile { .. } => None,
        };
        tasks.iter().filter_map(wait).collect()
    }

    #[test]
    fn own_rows_first_then_those_of_the_ranks_before() {
        let cfg = OverlapConfig::of(Algo::Pipelined, 1);
        let tasks = schedule(Rank::new(1), &[2, 2, 2], 4, &cfg, false);
        assert_eq!(waits(&tasks), [(0, 0), (2, 0)]);
        assert_eq!(tasks[0], AgTask::Tile { rows: 2..4, cols: 0..4 });
    }

    /// The lanes of a ring meet at each arrival: they must take them in one order.
    #[test]
    fn a_ring_waits_in_the_order_of_arrivals() {
        for (size, chunks) in [(1, 2), (2, 3), (5, 2)] {
            let rows = vec![3; size];
            for me in Rank::all(size) {
                let cfg = OverlapConfig::of(Algo::Ring, chunks);
                let come = arrivals(me, &rows, chunks).map(|a| (a.src.get(), a.chunk));
                let tasks = schedule(me, &rows, 4, &cfg, false);
                assert_eq!(waits(&tasks), come.collect::<Vec<_>>());
            }
        }
    }
}
