//! Pieces of the keys of few queries, so that all multiprocessors have work: one pure function.

use tilewire_kernels::abi::TwSeg;
use tilewire_kernels::attention::split::SPLIT_KEYS;

use super::desc::bound;
use super::table::GAP;
use super::{AttnMask, Sequences};

/// Most queries of each sequence where [`AttnBackend::Auto`](super::AttnBackend::Auto) cuts keys
/// into pieces, so that all multiprocessors of a device read: of a plan's description and of a
/// launch.
pub const FEW_QUERIES: usize = 16;

/// Tiles of keys in whose time a block begins and ends, and a kernel merges.
const BLOCK_TILES: u64 = 2;
const MERGE_TILES: u64 = 2;

/// The kernel on a device, for one description.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Packed queries of a tile.
    pub rows: u32,
    /// Query heads of a key head, and key heads.
    pub group: u32,
    pub heads_kv: u32,
    /// Blocks that run at once.
    pub blocks: u32,
    /// Most blocks whose results are merged.
    pub slots: u32,
}

/// Segments of queries, those of several pieces first, each with its tiles.
pub(crate) struct Cut {
    pub own: Vec<TwSeg>,
    /// Row tiles times pieces of all segments, and of those of several pieces.
    pub tiles: u32,
    pub several: u32,
}

/// Returns whether all sequences have few queries, and there are rows.
pub(crate) fn are_few(seqs: &Sequences) -> bool {
    seqs.tokens_q > 0 && seqs.q.iter().all(|s| s.len() <= FEW_QUERIES)
}

/// The work of a segment.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Work {
    row_tiles: u32,
    /// Tiles of keys that its queries see.
    keys: u32,
}

impl Work {
    fn new(seg: &TwSeg, other: &[TwSeg], mask: &AttnMask, s: &Shape) -> Self {
        let row_tiles = (seg.len * s.group).div_ceil(s.rows);
        let keys = match other.get(seg.first as usize) {
            Some(keys) if seg.first < seg.end && seg.shift != GAP => {
                let at = |i: u32| i64::from(seg.pos + i) + i64::from(seg.shift);
                let first = mask.left.map_or(0, |left| at(0) - bound(left));
                let end = mask.right.map_or(i64::MAX, |right| at(seg.len - 1) + bound(right) + 1);
                let (pos, len) = (i64::from(keys.pos), i64::from(keys.len));
                let (lo, hi) = ((first - pos).max(0), (end - pos).min(len));
                let tile = SPLIT_KEYS as i64;
                if lo < hi { ((hi + tile - 1) / tile - lo / tile) as u32 } else { 0 }
            }
            _ => 0,
        };
        Self { row_tiles, keys }
    }

    fn pieces(&self, longest: u32) -> u32 {
        self.keys.div_ceil(longest).max(1)
    }

    fn blocks(&self, longest: u32, s: &Shape) -> u64 {
        u64::from(self.row_tiles) * u64::from(self.pieces(longest)) * u64::from(s.heads_kv)
    }
}

/// Cuts the keys of the segments `own` (each has at most one segment of `other`) into pieces of
/// about as many tiles that the launch takes the least time: the longest blocks, as often as
/// they do not run at once, or all blocks by turns. It depends on its arguments alone, and with it
/// the order of sums.
pub(crate) fn cut(own: &[TwSeg], other: &[TwSeg], mask: &AttnMask, s: &Shape) -> Cut {
    let of = |seg: &TwSeg| (*seg, Work::new(seg, other, mask, s));
    let mut work: Vec<(TwSeg, Work)> = own.iter().map(of).collect();
    let longest = longest_piece(work.iter().map(|(_, w)| *w).collect(), s);
    // The sort is stable: rows beside each other stay so.
    work.sort_by_key(|(_, w)| w.pieces(longest) == 1);
    let (mut tiles, mut several) = (0, 0);
    let number = |(seg, w): (TwSeg, Work)| {
        let pieces = w.pieces(longest);
        let seg = TwSeg { tile: tiles, ..seg };
        tiles += w.row_tiles * pieces;
        if pieces > 1 {
            several = tiles;
        }
        seg
    };
    let own = work.into_iter().map(number).collect();
    Cut { own, tiles, several }
}

/// Returns the most tiles of keys of a piece.
fn longest_piece(mut all: Vec<Work>, s: &Shape) -> u32 {
    let most = all.iter().map(|w| w.keys).max().unwrap_or(0).max(2);
    // Segments that are alike count once: a batch may have thousands.
    all.sort_unstable();
    let work: Vec<(Work, u64)> =
        all.chunk_by(PartialEq::eq).map(|same| (same[0], same.len() as u64)).collect();
    // The blocks that are longer than half of it.
    let long = |longest: u32| -> u64 {
        let long = work.iter().filter(|(w, _)| 2 * u64::from(w.keys) > u64::from(longest));
        long.map(|(w, num)| num * w.blocks(longest, s)).sum()
    };
    let at_once = u64::from(s.blocks.max(1));
    let cost = |longest: u32| -> Option<u64> {
        let (mut all, mut merged) = (0, 0);
        for (w, num) in &work {
            let blocks = num * w.blocks(longest, s);
            let keys = u64::from(w.row_tiles) * u64::from(s.heads_kv) * u64::from(w.keys);
            all += num * keys + BLOCK_TILES * blocks;
            merged += if w.pieces(longest) > 1 { blocks } else { 0 };
        }
        let rounds = long(longest).div_ceil(at_once) * (u64::from(longest) + BLOCK_TILES);
        let merge = if merged > 0 { MERGE_TILES } else { 0 };
        (merged <= u64::from(s.slots)).then(|| rounds.max(all.div_ceil(at_once)) + merge)
    };
    // The shortest pieces with which the long blocks take so many rounds.
    let shortest = |rounds: u64| {
        let (mut lo, mut hi) = (2, most);
        while lo < hi {
            let mid = lo.midpoint(hi);
            if long(mid) <= rounds * at_once { hi = mid } else { lo = mid + 1 }
        }
        lo
    };
    let candidates = (1..=3).map(shortest).chain([most]);
    // With the longest ones nothing is merged, so there is a cost.
    candidates.filter_map(|l| Some((cost(l)?, l))).min().map_or(most, |(_, l)| l)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::attention::table::whole;

    const H200: Shape = Shape { rows: 16, group: 8, heads_kv: 8, blocks: 264, slots: 792 };

    /// Sequences of one query each, over so many keys.
    fn batch(lens: &[usize]) -> (Vec<TwSeg>, Vec<TwSeg>) {
        let sums = |f: &dyn Fn(&usize) -> usize| {
            let mut all = vec![0];
            lens.iter().for_each(|n| all.push(all[all.len() - 1] + f(n)));
            all
        };
        whole(&Sequences::packed(&sums(&|_| 1), &sums(&|n| *n)).unwrap())
    }

    /// The pieces of each segment.
    fn pieces(c: &Cut) -> Vec<u32> {
        let ends = c.own.iter().skip(1).map(|s| s.tile).chain([c.tiles]);
        c.own.iter().zip(ends).map(|(s, end)| end - s.tile).collect()
    }

    #[test]
    fn keys_are_cut_until_all_multiprocessors_have_work() {
        let of = |lens: &[usize], mask| {
            let (own, other) = batch(lens);
            pieces(&cut(&own, &other, &mask, &H200))
        };
        // 33 pieces of each of 8 heads are 264 blocks; 1024 tiles are 32 of each.
        assert_eq!(of(&[65536], AttnMask::CAUSAL), [32]);
        assert_eq!(of(&[131_072], AttnMask::FULL), [33]);
        // Each block has a tile or two at least.
        assert_eq!(of(&[1024], AttnMask::FULL), [8]);
        assert_eq!(of(&[64], AttnMask::FULL), [1]);
        // Enough sequences: nothing to merge.
        assert_eq!(of(&[4096; 66], AttnMask::FULL), [1; 66]);
        // 320 blocks would take two rounds of 64 tiles, 640 three of 32.
        assert_eq!(of(&[4096; 40], AttnMask::FULL), [2; 40]);
        // A long one among short ones is first, and cut.
        let mut lens = [100; 100];
        lens[60] = 100_000;
        let all = of(&lens, AttnMask::FULL);
        assert!(all[0] > 10 && all[1..].iter().all(|p| *p == 1), "{all:?}");
        // A window has few tiles.
        assert_eq!(of(&[65536], AttnMask::window(511, 0)), [4]);
    }

    #[test]
    fn few_queries_are_those_of_every_sequence() {
        assert!(are_few(&Sequences::packed(&[0, 1, 17, 17], &[0, 5, 9, 20]).unwrap()));
        assert!(!are_few(&Sequences::packed(&[0, 1, 18], &[0, 5, 9]).unwrap()));
        assert!(!are_few(&Sequences::one(0, 5)));
    }

    proptest! {
        /// Segments keep their rows; pieces come first, are not empty, and fit in the workspace.
        #[test]
        fn every_segment_is_numbered_once(
            lens in prop::collection::vec((0usize..17, 0usize..20_000), 1..70),
            (rows, group, heads_kv) in (0usize..3, 1u32..9, 1u32..9),
            (left, blocks) in (prop::option::of(0usize..9000), 1u32..600),
        ) {
            let mut sums = [vec![0], vec![0]];
            for (q, kv) in &lens {
                let last = [*q, *kv].into_iter().enumerate().map(|(i, n)| sums[i][sums[i].len() - 1] + n);
                let last: Vec<usize> = last.collect();
                (0..2).for_each(|i| sums[i].push(last[i]));
            }
            let (mut own, other) = whole(&Sequences::packed(&sums[0], &sums[1]).unwrap());
            let slots = blocks * [1, 3][rows % 2];
            let s = Shape { rows: [16, 32, 64][rows], group, heads_kv, blocks, slots };
            let mask = AttnMask { left, right: [Some(0), Some(70), None][rows] };
            let c = cut(&own, &other, &mask, &s);
            prop_assert!(c.several * heads_kv <= s.slots);
            let ends: Vec<u32> = c.own.iter().skip(1).map(|s| s.tile).chain([c.tiles]).collect();
            for (seg, end) in c.own.iter().zip(ends) {
                let row_tiles = (seg.len * group).div_ceil(s.rows);
                prop_assert_eq!((end - seg.tile) % row_tiles, 0);
                let pieces = (end - seg.tile) / row_tiles;
                prop_assert_eq!(pieces > 1, end <= c.several);
                prop_assert!(pieces <= Work::new(seg, &other, &mask, &s).keys.max(1));
            }
            let mut seen: Vec<_> = c.own.iter().map(|s| TwSeg { tile: 0, ..*s }).collect();
            seen.sort_by_key(|s| s.row);
            own.sort_by_key(|s| s.row);
            let bytes = |s: &[TwSeg]| bytemuck::cast_slice::<_, u8>(s).to_vec();
            prop_assert_eq!(bytes(&seen), bytes(&own));
        }
    }
}
