//! The tile order of GEMM+RS: one pure function for prediction, host and kernels.

use std::ops::Range;

use tilewire_core::Rank;

use crate::common::{Algo, OverlapConfig, part, range_of};

/// A tile of the product: global rows, columns, and its place in the slot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RsTile {
    /// Global rows.
    pub rows: Range<usize>,
    /// Columns.
    pub cols: Range<usize>,
    /// First element in the slot: tiles of a chunk lie one after the other, packed.
    pub at: usize,
}

/// One step of the compute lane.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RsTask {
    /// Compute tiles of a peer's rows, push each to its slot there, then signal once.
    Push {
        /// The rank that reduces these rows.
        owner: Rank,
        /// The number of the chunk in its rows.
        chunk: usize,
        /// The tiles.
        tiles: Vec<RsTile>,
    },
    /// Compute tiles of my own rows, wait for all peers' chunk, reduce and store.
    Reduce {
        /// The number of the chunk in my rows.
        chunk: usize,
        /// The tiles.
        tiles: Vec<RsTile>,
    },
}

/// Tiles of chunk `chunk` of `owner`'s rows. The same on every rank: a slot is read as written.
pub fn chunk_tiles(
    rows: &[usize],
    owner: Rank,
    chunk: usize,
    n: usize,
    cfg: &OverlapConfig,
) -> Vec<RsTile> {
    let shard = range_of(rows, owner);
    let p = part(shard.len(), chunk, cfg.sub_chunks);
    // Rows of earlier chunks fill the slot before this one.
    let mut at = p.start * n;
    let mut tiles = Vec::new();
    let mut r = p.start;
    while r < p.end {
        let e = r.saturating_add(cfg.block_m).min(p.end);
        let mut c = 0;
        while c < n {
            let f = c.saturating_add(cfg.block_n).min(n);
            tiles.push(RsTile { rows: shard.start + r..shard.start + e, cols: c..f, at });
            at += (e - r) * (f - c);
            c = f;
        }
        r = e;
    }
    tiles
}

/// Returns what rank `me` does, in order: chunk by chunk, owners `me + 1, ..., me + size - 1`, own
/// rows last, so that every round ends with rows that are complete. A ring goes owner by owner
/// instead, each chunk by chunk, so that all its sums stand at the end; with one chunk that is the
/// same order.
///
/// `Sequential` has one round and the same order; it differs in that nothing is pushed before
/// everything is computed, which the host does by deferring the pushes.
pub fn schedule(me: Rank, rows: &[usize], n: usize, cfg: &OverlapConfig) -> Vec<RsTask> {
    let size = rows.len();
    let mut tasks = Vec::new();
    let steps = size * cfg.sub_chunks;
    for step in 0..steps {
        let (chunk, i) = match cfg.algo {
            Algo::Ring => (step % cfg.sub_chunks, 1 + step / cfg.sub_chunks),
            _ => (step / size, 1 + step % size),
        };
        let owner = me.offset(i, size);
        let tiles = chunk_tiles(rows, owner, chunk, n, cfg);
        tasks.push(if owner == me {
            RsTask::Reduce { chunk, tiles }
        } else {
            RsTask::Push { owner, chunk, tiles }
        });
    }
    if cfg.algo == Algo::Sequential {
        // All products first: pushes in order, then the reductions.
        tasks.sort_by_key(|t| matches!(t, RsTask::Reduce { .. }));
    }
    tasks
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Every element of the product is computed once; tiles of an owner fill its slot without
        /// gap or overlap; own rows come last in each round.
        #[test]
        fn each_tile_once_and_slots_are_packed(
            rows in prop::collection::vec(0usize..30, 1..7),
            n in 0usize..40,
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
                let mut filled: Vec<Vec<u8>> = rows.iter().map(|r| vec![0; r * n]).collect();
                for t in schedule(me, &rows, n, &cfg) {
                    let (owner, tiles) = match t {
                        RsTask::Push { owner, tiles, .. } => (owner, tiles),
                        RsTask::Reduce { tiles, .. } => (me, tiles),
                    };
                    for tile in tiles {
                        let num = tile.rows.len() * tile.cols.len();
                        filled[owner.idx()][tile.at..tile.at + num].iter_mut().for_each(|f| *f += 1);
                        for r in tile.rows {
                            tile.cols.clone().for_each(|c| done[r * n + c] += 1);
                        }
                    }
                }
                prop_assert!(done.iter().all(|&d| d == 1));
                prop_assert!(filled.iter().flatten().all(|&f| f == 1));
            }
        }
    }

    #[test]
    fn next_rank_first_own_rows_last() {
        let owners = |algo, chunks| -> Vec<(u32, usize)> {
            let cfg = OverlapConfig::of(algo, chunks);
            let step = |t: &RsTask| match t {
                RsTask::Push { owner, chunk, .. } => (owner.get(), *chunk),
                RsTask::Reduce { chunk, .. } => (1, *chunk),
            };
            schedule(Rank::new(1), &[4, 4, 4], 8, &cfg).iter().map(step).collect()
        };
        assert_eq!(owners(Algo::Fused, 2), [(2, 0), (0, 0), (1, 0), (2, 1), (0, 1), (1, 1)]);
        // Owner by owner, sums at the end; the same with one chunk.
        assert_eq!(owners(Algo::Ring, 2), [(2, 0), (2, 1), (0, 0), (0, 1), (1, 0), (1, 1)]);
        assert_eq!(owners(Algo::Ring, 1), owners(Algo::Pipelined, 1));
    }
}
