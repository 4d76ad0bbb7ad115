//! The schedule of attention: the blocks of queries that meet each block of keys, as one pure
//! function for host and kernels.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use tilewire_core::{Error, Result};

use super::desc::{Visible, bound};
use super::{AttnMask, Sequences};

/// Tile sizes. Pure data; equal on all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
pub struct AttnConfig {
    /// Queries of a tile.
    pub block_q: usize,
    /// Keys of a tile.
    pub block_kv: usize,
}

impl Default for AttnConfig {
    fn default() -> Self {
        Self { block_q: 64, block_kv: 64 }
    }
}

impl AttnConfig {
    /// Checks that both sizes are positive and a tile stays small.
    ///
    /// # Errors
    /// `InvalidArgument`.
    pub fn check(&self) -> Result<()> {
        if (1..=4096).contains(&self.block_q) && (1..=4096).contains(&self.block_kv) {
            return Ok(());
        }
        Err(Error::invalid(format!("the tile sizes {self} are out of range"))
            .expected("1 to 4096 each"))
    }
}

impl fmt::Display for AttnConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.block_q, self.block_kv)
    }
}

/// A rectangle of one sequence: some of its queries against some of its keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Slice {
    /// First row in the local tensor of queries, in the global tensor, and in the sequence.
    pub q: usize,
    pub q_pos: usize,
    pub i: usize,
    pub num_q: usize,
    /// The same of the keys.
    pub kv: usize,
    pub kv_pos: usize,
    pub j: usize,
    pub num_kv: usize,
    /// `skv - sq` of the sequence: query `i` sits at key position `i + shift`.
    pub shift: i64,
}

impl Slice {
    /// The part from query `q` and key `kv` on, of at most `num_q` by `num_kv`.
    pub fn tile(&self, q: usize, kv: usize, num_q: usize, num_kv: usize) -> Self {
        Self {
            q: self.q + q,
            q_pos: self.q_pos + q,
            i: self.i + q,
            num_q: num_q.min(self.num_q - q),
            kv: self.kv + kv,
            kv_pos: self.kv_pos + kv,
            j: self.j + kv,
            num_kv: num_kv.min(self.num_kv - kv),
            shift: self.shift,
        }
    }

    /// Returns how much of it the mask lets through. Needs at least one row each.
    pub fn visible(&self, mask: &AttnMask) -> Visible {
        let at = |j: usize, i: usize| j as i64 - i as i64 - self.shift;
        let (last_i, last_j) = (self.i + self.num_q - 1, self.j + self.num_kv - 1);
        mask.visible(at(self.j, last_i)..=at(last_j, self.i))
    }
}

/// Local queries that are to meet keys.
pub(crate) struct Queries<'a> {
    /// Spans of global rows that are not empty, ascending, each with its first local row: whoever
    /// meets a span of keys looks only at the spans of the same sequences.
    spans: Vec<(Range<usize>, usize)>,
    seqs: &'a Sequences,
    mask: &'a AttnMask,
}

impl<'a> Queries<'a> {
    /// Queries of the global rows `q`, one span after the other.
    pub fn new(q: &[Range<usize>], seqs: &'a Sequences, mask: &'a AttnMask) -> Self {
        let mut row = 0;
        let place = |s: &Range<usize>| {
            row += s.len();
            (s.clone(), row - s.len())
        };
        let mut spans: Vec<_> = q.iter().map(place).filter(|(s, _)| !s.is_empty()).collect();
        spans.sort_unstable_by_key(|(s, _)| s.start);
        Self { spans, seqs, mask }
    }

    /// The slices against local keys (global rows `kv`, one span after the other), in the order of
    /// keys and then of local queries, less those that the mask empties.
    pub fn slices(&self, kv: &[Range<usize>]) -> Vec<Slice> {
        let (mut out, mut row) = (Vec::new(), 0);
        for keys in kv {
            let first = out.len();
            out.extend(self.meet(keys).map(|s| Slice { kv: s.kv + row, ..s }));
            out[first..].sort_unstable_by_key(|s| s.q);
            row += keys.len();
        }
        out
    }

    /// Returns, for each span of keys, whether some query sees it.
    pub fn see(&self, kv: &[Range<usize>]) -> Vec<bool> {
        kv.iter().map(|keys| self.meet(keys).next().is_some()).collect()
    }

    /// Returns the global rows of keys, inside of sequences, at which what one of these spans of
    /// queries may see begins, or behind which it ends, by tiles of `tile` rows of a sequence.
    pub fn edges(&self, tile: usize) -> Vec<usize> {
        let tile = tile as i64;
        let mut out = Vec::new();
        for (span, _) in &self.spans {
            let first = self.seqs.q.partition_point(|s| s.end <= span.start);
            let num = self.seqs.q[first..].partition_point(|s| s.start < span.end);
            for (sq, skv) in self.seqs.q.iter().zip(&self.seqs.kv).skip(first).take(num) {
                let (start, end) = (sq.start.max(span.start), sq.end.min(span.end));
                if start >= end {
                    continue;
                }
                let (len, shift) = (skv.len() as i64, skv.len() as i64 - sq.len() as i64);
                let at = |row: usize| (row - sq.start) as i64 + shift;
                let begins = self.mask.left.map(|left| at(start) - bound(left));
                let ends = self.mask.right.map(|right| at(end) + bound(right));
                let begins = begins.map(|j| j.div_euclid(tile) * tile);
                let ends = ends.map(|j| -(-j).div_euclid(tile) * tile);
                let inside = begins.into_iter().chain(ends).filter(|j| (1..len).contains(j));
                out.extend(inside.map(|j| skv.start + j as usize));
            }
        }
        out
    }

    /// The slices against one span of keys, whose rows count from its first one.
    fn meet<'s>(&'s self, kv: &'s Range<usize>) -> impl Iterator<Item = Slice> + use<'s, 'a> {
        let (all, mask) = (self.seqs, self.mask);
        // Sequences ascend, and those that end before the span or begin behind it have no rows in
        // it.
        let first = all.kv.partition_point(|r| r.end <= kv.start);
        let num = all.kv[first..].partition_point(|r| r.start < kv.end);
        let of_sequence = move |i: usize| {
            let (sq, skv) = (&all.q[i], &all.kv[i]);
            let from = self.spans.partition_point(|(s, _)| s.end <= sq.start);
            let same = self.spans[from..].iter().take_while(|(s, _)| s.start < sq.end);
            same.filter_map(move |q| slice(q, kv, (sq, skv)))
        };
        (first..first + num).flat_map(of_sequence).filter(|s| s.visible(mask) != Visible::None)
    }
}

/// The slices of local queries (global rows `q`, one span after the other) against local keys
/// (global rows `kv`, likewise), as [`Queries::slices`].
pub(crate) fn slices(
    q: &[Range<usize>],
    kv: &[Range<usize>],
    seqs: &Sequences,
    mask: &AttnMask,
) -> Vec<Slice> {
    Queries::new(q, seqs, mask).slices(kv)
}

/// Returns what one sequence has in a span of queries, whose first local row is `row`, and a span
/// of keys.
fn slice(
    (q, row): &(Range<usize>, usize),
    kv: &Range<usize>,
    (sq, skv): (&Range<usize>, &Range<usize>),
) -> Option<Slice> {
    let cut = |a: &Range<usize>, b: &Range<usize>| a.start.max(b.start)..a.end.min(b.end);
    let (rq, rkv) = (cut(sq, q), cut(skv, kv));
    (!rq.is_empty() && !rkv.is_empty()).then(|| Slice {
        q: row + rq.start - q.start,
        q_pos: rq.start,
        i: rq.start - sq.start,
        num_q: rq.len(),
        kv: rkv.start - kv.start,
        kv_pos: rkv.start,
        j: rkv.start - skv.start,
        num_kv: rkv.len(),
        shift: skv.len() as i64 - sq.len() as i64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::single_range_in_vec_init)]
    fn slices_follow_sequences_and_mask() {
        let seqs = Sequences::packed(&[0, 4, 4, 10], &[0, 4, 6, 12]).unwrap();
        let all = slices(&[0..10], &[0..12], &seqs, &AttnMask::FULL);
        // The middle sequence has keys but no queries.
        assert_eq!(all.iter().map(|s| (s.num_q, s.num_kv)).collect::<Vec<_>>(), [(4, 4), (6, 6)]);
        let causal = slices(&[0..5], &[2..4, 8..12], &seqs, &AttnMask::CAUSAL);
        assert_eq!(causal.len(), 1, "{causal:?}");
        assert_eq!((causal[0].kv, causal[0].j, causal[0].num_kv), (0, 2, 2));
        assert!(slices(&[0..2], &[2..4], &seqs, &AttnMask::CAUSAL).is_empty());
        assert_eq!(slices(&[2..4], &[0..2], &seqs, &AttnMask::window(1, 0)).len(), 1);
        assert!(slices(&[3..4], &[0..2], &seqs, &AttnMask::window(1, 0)).is_empty());
    }
}
