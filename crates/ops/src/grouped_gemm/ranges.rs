//! Row ranges from splits: pure.

use std::ops::Range;

use super::SplitKind;

/// The reason why splits cannot be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum BadSplits {
    /// A group has fewer than no rows.
    Negative,
    /// The groups need more rows than there are.
    Capacity,
}

/// Rows of each group.
pub(super) fn ranges(
    values: &[i64],
    kind: SplitKind,
    capacity: usize,
) -> Result<Vec<Range<usize>>, BadSplits> {
    let mut start = 0i64;
    let mut out = Vec::with_capacity(values.len());
    for &v in values {
        let end = match kind {
            SplitKind::Counts => start.checked_add(v).ok_or(BadSplits::Capacity)?,
            SplitKind::Ends => v,
        };
        if end < start {
            return Err(BadSplits::Negative);
        }
        if end > capacity as i64 {
            return Err(BadSplits::Capacity);
        }
        out.push(start as usize..end as usize);
        start = end;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_ends_and_what_is_refused() {
        let want = vec![0..2, 2..2, 2..5];
        assert_eq!(ranges(&[2, 0, 3], SplitKind::Counts, 5), Ok(want.clone()));
        assert_eq!(ranges(&[2, 2, 5], SplitKind::Ends, 5), Ok(want));
        assert_eq!(ranges(&[2, 0, 4], SplitKind::Counts, 5), Err(BadSplits::Capacity));
        assert_eq!(ranges(&[3, 2, 5], SplitKind::Ends, 5), Err(BadSplits::Negative));
        assert_eq!(ranges(&[-1], SplitKind::Counts, 5), Err(BadSplits::Negative));
        assert_eq!(ranges(&[1, i64::MAX], SplitKind::Counts, 5), Err(BadSplits::Capacity));
    }
}
