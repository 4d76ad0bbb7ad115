//! The schedule of context-parallel attention: whose rows each rank needs, and which slices of
//! queries and keys belong together, for both executors.

use std::ops::Range;

use tilewire_core::Rank;

use super::config::Strategy;
use super::desc::CpAttentionDesc;
use crate::attention::host::Dims;
use crate::attention::{Queries, Sequences, Slice};

/// Ranks as `outer` groups of `inner` consecutive ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Grid {
    pub inner: usize,
    pub outer: usize,
    /// My place in the group, and my group.
    pub at: usize,
    pub group: usize,
}

impl Grid {
    fn new(me: Rank, size: usize, inner: usize) -> Self {
        Self { inner, outer: size / inner, at: me.idx() % inner, group: me.idx() / inner }
    }

    /// Returns member `i` of my group.
    pub fn member(&self, i: usize) -> Rank {
        Rank::new((self.group * self.inner + i) as u32)
    }

    /// Returns the other groups, the next one first.
    pub fn other_groups(&self) -> impl Iterator<Item = usize> + Clone {
        let (at, n) = (self.group, self.outer);
        (1..n).map(move |i| (at + i) % n)
    }
}

/// The rows, heads and slices of one rank in one launch.
pub(super) struct Schedule {
    pub grid: Grid,
    /// Heads that this rank computes, and the numbers of the first ones.
    pub dims: Dims,
    pub first_head: usize,
    /// Rows of each member of my group.
    pub member_q: Vec<Vec<Range<usize>>>,
    /// Rows of keys of each group, member after member: their order on the wire.
    pub areas: Vec<Vec<Range<usize>>>,
    /// Of each area: the spans that some query of my group sees.
    pub needed: Vec<Vec<bool>>,
    /// Of each group: the spans of my area that its queries see.
    pub asked: Vec<Vec<bool>>,
    /// `ring` alone: of each rank, the spans of each area that its queries see.
    seen: Vec<Vec<Vec<bool>>>,
    /// Slices of my group's queries against each area.
    pub slices: Vec<Vec<Slice>>,
}

/// Returns the key heads of place `at` among `inner`: a part of all key heads, or one head that
/// several places share.
pub(super) fn kv_heads(heads: usize, inner: usize, at: usize) -> Range<usize> {
    match heads % inner {
        0 => at * heads / inner..(at + 1) * heads / inner,
        _ => at * heads / inner..at * heads / inner + 1,
    }
}

pub(super) fn num_rows(spans: &[Range<usize>]) -> usize {
    spans.iter().map(Range::len).sum()
}

impl Schedule {
    /// Computes the schedule of rank `me`.
    pub fn new(
        d: &CpAttentionDesc,
        seqs: &Sequences,
        strategy: Strategy,
        me: Rank,
        size: usize,
    ) -> Self {
        let grid = Grid::new(me, size, strategy.inner(d, size));
        let members =
            |g: usize| (0..grid.inner).map(move |i| Rank::new((g * grid.inner + i) as u32));
        let rows_q = |g| members(g).map(|r| d.rows_q(seqs, r, size)).collect::<Vec<_>>();
        let rows_kv = |g| members(g).map(|r| d.rows_kv(seqs, r, size)).collect::<Vec<_>>();
        let queries = |g| Queries::new(&rows_q(g).concat(), seqs, &d.attn.mask);
        let areas: Vec<_> = (0..grid.outer).map(|g| rows_kv(g).concat()).collect();
        let mine = queries(grid.group);
        let heads = kv_heads(d.attn.heads_kv, grid.inner, grid.at);
        let hq = d.attn.heads_q / grid.inner;
        let sees = |g| {
            let queries = queries(g);
            areas.iter().map(|a| queries.see(a)).collect()
        };
        let seen = match strategy {
            Strategy::Ring => (0..grid.outer).map(sees).collect(),
            _ => Vec::new(),
        };
        Self {
            grid,
            dims: Dims { hq, hkv: heads.len(), dqk: d.attn.dqk, dv: d.attn.dv },
            first_head: grid.at * hq,
            member_q: rows_q(grid.group),
            needed: areas.iter().map(|a| mine.see(a)).collect(),
            asked: (0..grid.outer).map(|g| queries(g).see(&areas[grid.group])).collect(),
            seen,
            slices: areas.iter().map(|a| mine.slices(a)).collect(),
            areas,
        }
    }

    /// Returns the rows of my group's queries.
    pub fn rows_q(&self) -> usize {
        self.member_q.iter().map(|s| num_rows(s)).sum()
    }

    /// Returns whether a query of my group sees a row of another group's keys.
    pub fn sees_others(&self) -> bool {
        let sees = |g: usize| {
            let spans = self.areas[g].iter().zip(&self.needed[g]);
            spans.into_iter().any(|(rows, needed)| *needed && !rows.is_empty())
        };
        self.grid.other_groups().any(sees)
    }

    /// Returns whether my group's queries see all rows of the other groups' keys.
    pub fn sees_all_others(&self) -> bool {
        let all = |g: usize| {
            let spans = self.areas[g].iter().zip(&self.needed[g]);
            spans.into_iter().all(|(rows, needed)| *needed || rows.is_empty())
        };
        self.grid.other_groups().all(all)
    }

    /// Returns the spans of rank `owner`'s keys that travel to rank `to` of a ring: those that its
    /// queries see, or queries of the ranks behind it up to the owner.
    pub fn passed(&self, owner: usize, to: usize) -> Vec<bool> {
        let size = self.grid.outer;
        let readers = (0..size).map(|i| (to + i) % size).take_while(|r| *r != owner);
        let seen = |mut spans: Vec<bool>, r: usize| {
            spans.iter_mut().zip(&self.seen[r][owner]).for_each(|(span, sees)| *span |= sees);
            spans
        };
        readers.fold(vec![false; self.areas[owner].len()], seen)
    }

    /// Returns the rows of group `owner`'s keys among the keys of all ranks.
    pub fn dense(&self, owner: usize) -> Range<usize> {
        let first: usize = self.areas[..owner].iter().map(|a| num_rows(a)).sum();
        first..first + num_rows(&self.areas[owner])
    }

    /// Returns the runs of rows of `area` whose spans are `wanted`.
    pub fn runs(area: &[Range<usize>], wanted: &[bool]) -> Vec<Range<usize>> {
        let (mut at, mut out) = (0, Vec::<Range<usize>>::new());
        for (span, want) in area.iter().zip(wanted) {
            let rows = at..at + span.len();
            at = rows.end;
            match out.last_mut() {
                _ if !want || rows.is_empty() => {}
                Some(last) if last.end == rows.start => last.end = rows.end,
                _ => out.push(rows),
            }
        }
        out
    }
}
