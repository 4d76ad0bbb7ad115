//! The division of rows among ranks.

use std::ops::Range;

use tilewire_core::{Error, Rank, Result};

/// Rows of a global matrix per rank, in rank order. Shards may differ in size and be empty.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Shards {
    /// As evenly as possible: the first `m mod size` ranks have one row more.
    Even,
    /// Exactly these numbers of rows.
    Explicit(Vec<usize>),
}

impl Shards {
    /// Returns the rows of each rank for `m` rows in all.
    ///
    /// # Errors
    /// `InvalidArgument` if explicit shards are not for `size` ranks or do not sum to `m`.
    pub fn rows(&self, m: usize, size: usize) -> Result<Vec<usize>> {
        match self {
            Shards::Even => Ok((0..size).map(|r| m / size + usize::from(r < m % size)).collect()),
            Shards::Explicit(rows) if rows.len() != size => {
                Err(Error::invalid("explicit shards are for another number of ranks")
                    .expected(size)
                    .seen(rows.len()))
            }
            Shards::Explicit(rows) if rows.iter().sum::<usize>() != m => {
                Err(Error::invalid("explicit shards do not sum to the number of rows")
                    .expected(m)
                    .seen(rows.iter().sum::<usize>()))
            }
            Shards::Explicit(rows) => Ok(rows.clone()),
        }
    }

    /// Returns the most rows a rank has for any number of rows up to `m`.
    pub fn max_rows(&self, m: usize, size: usize) -> usize {
        match self {
            Shards::Even => m.div_ceil(size),
            Shards::Explicit(rows) => rows.iter().copied().max().unwrap_or(0),
        }
    }
}

/// Returns the row range of `rank` given the rows of all ranks.
pub(crate) fn range_of(rows: &[usize], rank: Rank) -> Range<usize> {
    let start = rows[..rank.idx()].iter().sum();
    start..start + rows[rank.idx()]
}

/// Returns part `i` of `n` of `rows` rows: as evenly as possible, larger parts first.
pub(crate) fn part(rows: usize, i: usize, n: usize) -> Range<usize> {
    let at = |i: usize| i * (rows / n) + i.min(rows % n);
    at(i)..at(i + 1)
}

/// Returns the global rows of chunk `chunk` of `num` of `owner`'s shard.
pub(crate) fn chunk_rows(rows: &[usize], owner: Rank, chunk: usize, num: usize) -> Range<usize> {
    let shard = range_of(rows, owner);
    let p = part(shard.len(), chunk, num);
    shard.start + p.start..shard.start + p.end
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn shards_and_parts_tile_the_rows(m in 0usize..500, size in 1usize..9, n in 1usize..7) {
            let rows = Shards::Even.rows(m, size).unwrap();
            prop_assert_eq!(rows.iter().sum::<usize>(), m);
            prop_assert!(rows.iter().all(|&r| r <= Shards::Even.max_rows(m, size)));
            let mut next = 0;
            for r in Rank::all(size) {
                let range = range_of(&rows, r);
                prop_assert_eq!(range.start, next);
                next = range.end;
            }
            let mut at = 0;
            for i in 0..n {
                let p = part(m, i, n);
                prop_assert_eq!(p.start, at);
                at = p.end;
            }
            prop_assert_eq!(at, m);
        }
    }

    #[test]
    fn explicit_shards_are_checked() {
        let s = Shards::Explicit(vec![3, 0, 5]);
        assert_eq!(s.rows(8, 3).unwrap(), [3, 0, 5]);
        assert!(s.rows(8, 2).is_err() && s.rows(7, 3).is_err());
    }
}
