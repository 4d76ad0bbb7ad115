//! The choice among the ways that devices move a vector, by its kind and size.

use super::CollectiveKind;

/// Vectors up to this size are moved by kernels. Measured on 8 H200, bus GB/s of kernels and of
/// copy engines: reduce_scatter of 64 MiB 271 and 244, of 256 MiB 289 and 306.
const BY_KERNEL_BYTES: usize = 96 << 20;

/// Returns whether one kernel that meets the other ranks moves a vector of `bytes` in all faster
/// than the other ways do. Measured on 4 H200 (`docs/lab/collective.md`): first sizes where latency
/// counts, then sizes where bandwidth does. Copy engines are as fast from the last bound on, and
/// take no multiprocessor.
fn best_meeting(kind: &CollectiveKind, bytes: usize) -> bool {
    const KIB: usize = 1 << 10;
    const MIB: usize = 1 << 20;
    let (small, from, to) = match kind {
        CollectiveKind::AllGather(_) => (2 * MIB, 16 * MIB, 384 * MIB),
        CollectiveKind::ReduceScatter(..) => (8 * KIB, 48 * MIB, usize::MAX),
        CollectiveKind::AllReduce(_) => (0, 4 * MIB, usize::MAX),
        CollectiveKind::AllToAll(_) => (128 * KIB, 48 * MIB, 128 * MIB),
    };
    bytes <= small || (from < bytes && bytes <= to)
}

/// The most bytes that a rank receives where each rank sends its whole vector to all ranks: up to
/// here a second phase would take longer.
const WHOLE_BYTES: usize = 2 << 20;

/// Returns the most rows, of `row` bytes each, of an all-reduce that sends whole vectors to all
/// ranks.
pub(super) fn whole_rows(row: usize, size: usize) -> usize {
    WHOLE_BYTES.checked_div(row * size).unwrap_or(0)
}

/// A way to move a vector.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    Meeting,
    /// The same kernel: each rank sends all its rows to all ranks, and each adds them.
    Whole,
    Kernels,
    Engines,
}

impl Way {
    /// Returns the way of a vector of `rows` rows and `bytes` in all: equal on all ranks, as the
    /// arguments are.
    pub fn of(
        kind: &CollectiveKind,
        meets: bool,
        size: usize,
        (rows, bytes): (usize, usize),
    ) -> Self {
        let sums_all = matches!(kind, CollectiveKind::AllReduce(_));
        if meets && sums_all && rows > 0 && bytes * size <= WHOLE_BYTES {
            return Way::Whole;
        }
        // The kernel learns from each rank's first piece that it has begun: every rank owns rows of
        // a sum.
        let owned = !sums_all || rows >= size;
        if meets && owned && best_meeting(kind, bytes) {
            return Way::Meeting;
        }
        if bytes <= BY_KERNEL_BYTES { Way::Kernels } else { Way::Engines }
    }

    pub fn words(self) -> &'static str {
        match self {
            Way::Meeting => "by one kernel that meets the other ranks",
            Way::Whole => "by one kernel, all rows to all ranks",
            Way::Kernels => "by kernels between two meetings",
            Way::Engines => "by copy engines",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Shards;
    use crate::collective::ReduceOp;

    #[test]
    fn sizes_and_rows_choose_the_way() {
        let all = [
            CollectiveKind::AllGather(Shards::Even),
            CollectiveKind::ReduceScatter(Shards::Even, ReduceOp::Sum),
            CollectiveKind::AllReduce(ReduceOp::Sum),
            CollectiveKind::AllToAll(vec![vec![1; 4]; 4]),
        ];
        let way = |k: usize, meets, rows, bytes| Way::of(&all[k], meets, 4, (rows, bytes));
        for k in 0..4 {
            let few = if k == 2 { Way::Whole } else { Way::Meeting };
            assert_eq!(way(k, true, 8, 1024), few, "{k}");
            assert_eq!(way(k, true, 1 << 20, 64 << 20), Way::Meeting, "{k}");
            assert_eq!(way(k, false, 8, 1024), Way::Kernels, "{k}");
            assert_eq!(way(k, false, 1 << 20, 256 << 20), Way::Engines, "{k}");
        }
        assert_eq!(way(0, true, 1 << 20, 8 << 20), Way::Kernels);
        assert_eq!(way(0, true, 1 << 20, 1 << 30), Way::Engines);
        assert_eq!(way(1, true, 1 << 20, 1 << 30), Way::Meeting);
        assert_eq!(way(3, true, 1 << 20, 256 << 20), Way::Engines);
        // A rank that owns no rows sends no piece by which its peers learn that it has begun.
        assert_eq!(way(2, true, 3, 6 << 20), Way::Kernels);
        assert_eq!(way(2, true, 3, 48), Way::Whole);
        assert_eq!(way(2, true, 0, 0), Way::Kernels);
        assert_eq!(way(2, true, 1 << 10, 512 << 10), Way::Whole);
        assert_eq!(way(2, true, 1 << 10, 513 << 10), Way::Kernels);
        assert_eq!((whole_rows(512, 4), whole_rows(0, 4), whole_rows(4 << 20, 2)), (1024, 0, 0));
        assert_eq!(way(1, true, 3, 48), Way::Meeting);
    }
}
