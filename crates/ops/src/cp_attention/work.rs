//! The work of attention: the (query, key) pairs that a mask lets through, of any rows of queries.
//!
//! Closed forms, so that a range of rows costs two searches among the sequences, however long they
//! are.

use std::ops::Range;

use crate::attention::{AttnMask, Sequences, bound};

/// One sequence of queries with its extent.
pub(super) struct Doc {
    /// Its rows, and those up to the next sequence, which see nothing. The extents tile all rows.
    pub extent: Range<usize>,
    /// Its own rows.
    pub rows: Range<usize>,
    keys: usize,
    /// Visible pairs of all sequences before it.
    before: i128,
}

/// The visible pairs of all rows of queries.
pub(super) struct Work {
    mask: AttnMask,
    pub docs: Vec<Doc>,
    pub tokens: usize,
    /// Visible pairs of all rows.
    pub total: i128,
}

impl Work {
    pub fn new(s: &Sequences, mask: &AttnMask) -> Self {
        let mut work = Self { mask: *mask, docs: Vec::new(), tokens: s.tokens_q, total: 0 };
        for (i, extent) in extents(s.tokens_q, &s.q).enumerate() {
            // Without sequences all rows are padding.
            let rows = s.q.get(i).cloned().unwrap_or(extent.end..extent.end);
            let keys = s.kv.get(i).map_or(0, Range::len);
            let doc = Doc { extent, rows, keys, before: work.total };
            work.total += work.pairs(&doc, doc.rows.len());
            work.docs.push(doc);
        }
        work
    }

    /// Returns the sequence in whose extent `row` is, which must be one of all rows.
    pub fn doc(&self, row: usize) -> &Doc {
        &self.docs[self.docs.partition_point(|d| d.extent.end <= row)]
    }

    /// Returns the visible pairs of the rows in front of `row`.
    pub fn before(&self, row: usize) -> i128 {
        if row >= self.tokens {
            return self.total;
        }
        let doc = self.doc(row);
        doc.before + self.pairs(doc, row.clamp(doc.rows.start, doc.rows.end) - doc.rows.start)
    }

    /// Returns the visible pairs of these rows.
    pub fn of(&self, rows: &Range<usize>) -> i128 {
        self.before(rows.end) - self.before(rows.start)
    }

    /// Returns the visible pairs of the first `num` queries of a sequence. Query `i` sees the keys
    /// `i + shift - left ..= i + shift + right` that there are: the number of those below the
    /// second bound less the number of those below the first one.
    fn pairs(&self, doc: &Doc, num: usize) -> i128 {
        let [sq, keys, num] = [doc.rows.len(), doc.keys, num].map(|x| x as i128);
        let shift = keys - sq;
        // The sum over `i < num` of `i + first`, bounded by 0 and `keys`.
        let below = |first: i128| sum(first + num, keys) - sum(first, keys);
        let right = self.mask.right.map(|r| i128::from(bound(r)));
        let left = self.mask.left.map(|l| i128::from(bound(l)));
        right.map_or(num * keys, |r| below(shift + r + 1)) - left.map_or(0, |l| below(shift - l))
    }
}

/// Returns the sum of all integers below `end`, each bounded by 0 and `most`.
fn sum(end: i128, most: i128) -> i128 {
    let (end, beyond) = (end.max(0).min(most), (end - most).max(0));
    end * (end - 1) / 2 + beyond * most
}

/// Returns the rows of each sequence up to the next one; the first begins at row 0, and without
/// sequences it is all rows. Every row is in one of them.
pub(super) fn extents(
    tokens: usize,
    sequences: &[Range<usize>],
) -> impl Iterator<Item = Range<usize>> + use<'_> {
    let start = move |i: usize| sequences.get(i).map_or(tokens, |s| s.start);
    (0..sequences.len().max(1)).map(move |i| if i == 0 { 0 } else { start(i) }..start(i + 1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Checks every row against a count of the pairs, under any mask, with padding, and with
        /// more queries than keys.
        #[test]
        fn pairs_are_those_of_the_definition(
            lens in prop::collection::vec((0usize..9, 0usize..9, 0usize..3), 0..5),
            mask in (prop::option::of(0usize..12), prop::option::of(0usize..12)),
        ) {
            let mask = AttnMask { left: mask.0, right: mask.1 };
            let s = crate::cp_attention::tests::seqs(&lens);
            let work = Work::new(&s, &mask);
            let sees = |q: usize, kv: usize| crate::cp_attention::tests::allowed(&s, &mask, q, kv);
            let mut sum = 0;
            for q in 0..s.tokens_q {
                prop_assert_eq!(work.before(q), sum);
                let seen = (0..s.tokens_kv).filter(|kv| sees(q, *kv)).count() as i128;
                prop_assert_eq!(work.of(&(q..q + 1)), seen, "row {}", q);
                sum += seen;
            }
            prop_assert_eq!((work.total, work.before(s.tokens_q)), (sum, sum));
        }
    }

    /// Bounds of a window beyond any sequence, and the longest sequences, do not overflow.
    #[test]
    fn large_numbers_do_not_overflow() {
        let n = 1usize << 40;
        let s = Sequences::one(n, n);
        let pairs = |mask| Work::new(&s, &mask).total;
        let half = (n as i128) * (n as i128 + 1) / 2;
        assert_eq!(pairs(AttnMask::CAUSAL), half);
        assert_eq!(pairs(AttnMask::window(usize::MAX, 0)), half);
        assert_eq!(pairs(AttnMask::window(usize::MAX, usize::MAX)), (n as i128).pow(2));
        assert_eq!(pairs(AttnMask::window(3, 0)), 4 * n as i128 - 6);
    }
}
