//! The schedules of the sequences that a plan was launched with last.
//!
//! All layers of a model attend to the same sequences, forward and backward, and a schedule of a
//! thousand documents takes milliseconds: it is computed at the first of these launches.

use std::collections::VecDeque;
use std::ops::{Deref, Range};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tilewire_core::Rank;

use super::config::Strategy;
use super::desc::CpAttentionDesc;
use super::schedule::{Schedule, num_rows};
use crate::attention::{AttnMask, LocalRows, Sequences};

/// Microbatches in flight in a pipeline have sequences of their own.
const MOST: usize = 8;

/// The schedule of a rank for its sequences, and the number of its rows.
pub(super) struct Made {
    seqs: Sequences,
    strategy: Strategy,
    /// Rows of a sequence at whose multiples spans of keys may begin.
    tile: usize,
    pub rows: LocalRows,
    mine: Schedule,
    /// Those of the other ranks; none in the place of mine.
    others: OnceLock<Vec<Option<Schedule>>>,
}

impl Deref for Made {
    type Target = Schedule;

    fn deref(&self) -> &Schedule {
        &self.mine
    }
}

impl Made {
    /// The schedule of sequences that nobody knows when a launch is queued: every rank gets all
    /// rows of keys that the description has.
    pub fn of_any(d: &CpAttentionDesc, strategy: Strategy, (me, size): (Rank, usize)) -> Self {
        let mut d = d.clone();
        let (q, kv) = (d.attn.sequences.tokens_q, d.attn.sequences.tokens_kv);
        d.attn.mask = AttnMask::FULL;
        d.attn.sequences = Sequences::one(q, kv);
        let seqs = d.attn.sequences.clone();
        let mine = Schedule::new(&d, &seqs, strategy, me, size);
        let own = |spans: Vec<Range<usize>>| num_rows(&spans);
        let rows =
            LocalRows { q: own(d.rows_q(&seqs, me, size)), kv: own(d.rows_kv(&seqs, me, size)) };
        Self { seqs, strategy, tile: 1, rows, mine, others: OnceLock::new() }
    }

    /// Returns the schedules of the other ranks, and none in the place of rank `me`, whose this is.
    pub fn others(&self, d: &CpAttentionDesc, me: Rank, size: usize) -> &[Option<Schedule>] {
        let made = |r| Schedule::in_tiles(d, &self.seqs, self.strategy, (r, size), self.tile);
        let of = |r| (r != me).then(|| made(r));
        self.others.get_or_init(|| Rank::all(size).map(of).collect())
    }
}

/// The last schedules of a plan, the oldest first.
#[derive(Default)]
pub(super) struct Schedules(Mutex<VecDeque<Arc<Made>>>);

impl Schedules {
    fn kept(&self) -> MutexGuard<'_, VecDeque<Arc<Made>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of a rank's rows if they are known.
    pub fn rows(&self, seqs: &Sequences) -> Option<LocalRows> {
        self.kept().iter().find(|m| m.seqs == *seqs).map(|m| m.rows)
    }

    /// Returns the schedule of rank `me`, which has `rows`, and computes it if need be.
    pub fn get(
        &self,
        (d, strategy, tile): (&CpAttentionDesc, Strategy, usize),
        (seqs, rows): (&Sequences, LocalRows),
        (me, size): (Rank, usize),
    ) -> Arc<Made> {
        let same = (strategy, tile);
        let found = |m: &&Arc<Made>| (m.strategy, m.tile) == same && m.seqs == *seqs;
        if let Some(made) = self.kept().iter().find(found) {
            return made.clone();
        }
        // Not under the lock; two threads that miss at once make two that are equal.
        let mine = Schedule::in_tiles(d, seqs, strategy, (me, size), tile);
        let seqs = seqs.clone();
        let made = Arc::new(Made { seqs, strategy, tile, rows, mine, others: OnceLock::new() });
        let mut kept = self.kept();
        if kept.len() == MOST {
            kept.pop_front();
        }
        kept.push_back(made.clone());
        made
    }
}

#[cfg(test)]
mod tests {
    use tilewire_core::DType;

    use super::*;
    use crate::attention::AttentionDesc;
    use crate::cp_attention::desc::Layout;
    use crate::cp_attention::tests::seqs;

    /// Sequences that come again find their schedule, and others never the schedule of these.
    #[test]
    fn a_schedule_is_that_of_its_sequences() {
        let a = AttentionDesc::new(64, (8, 4), 16, DType::BF16, AttnMask::CAUSAL);
        let d = CpAttentionDesc {
            layout: Layout::ZigzagPerSequence,
            a2a_size: 2,
            ..CpAttentionDesc::new(a)
        };
        let packed = |n: usize| seqs(&[(n, n, 1), (40 - n, 40 - n, 0)]);
        let (kept, me, size) = (Schedules::default(), Rank::new(1), 4);
        let get = |s: Strategy, n| {
            let q = num_rows(&d.rows_q(&packed(n), me, size));
            let rows = LocalRows { q, kv: q };
            let made = kept.get((&d, s, 1), (&packed(n), rows), (me, size));
            assert_eq!(kept.rows(&packed(n)), Some(rows));
            let new = |r| Schedule::new(&d, &packed(n), s, r, size);
            let same = |a: &Schedule, b: &Schedule| {
                assert_eq!((&a.member_q, &a.areas, &a.grid), (&b.member_q, &b.areas, &b.grid));
                assert_eq!((&a.needed, &a.asked), (&b.needed, &b.asked));
            };
            same(&made, &new(me));
            let others = made.others(&d, me, size);
            for (r, other) in Rank::all(size).zip(others) {
                assert_eq!(other.is_none(), r == me);
                other.iter().for_each(|o| same(o, &new(r)));
            }
            made
        };
        assert_eq!(kept.rows(&packed(8)), None);
        let first = get(Strategy::Get, 8);
        for n in 9..9 + MOST - 1 {
            get(Strategy::Get, n);
        }
        assert!(Arc::ptr_eq(&first, &get(Strategy::Get, 8)));
        // Other rows travel with another strategy.
        assert!(!Arc::ptr_eq(&first, &get(Strategy::Ring, 8)));
        // That was one too many, and the oldest went.
        assert!(!Arc::ptr_eq(&first, &get(Strategy::Get, 8)));
        assert_eq!(kept.kept().len(), MOST);
    }
}
