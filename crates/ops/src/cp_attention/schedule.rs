//! The schedule of context-parallel attention: whose rows each rank needs, and which slices of
//! queries and keys belong together, for both executors.

use std::ops::Range;

use tilewire_core::Rank;

use super::config::Strategy;
use super::desc::{CpAttentionDesc, Layout};
use crate::attention::host::Dims;
use crate::attention::{AttnMask, Queries, Sequences, Slice};

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
    /// Rows of keys of each group, member after member: their order on the wire. Each span is of
    /// one sequence, or padding, and where a mask hides rows by their distance each group's queries
    /// see all of a span or none, as far as that depends on the span's place, up to whole tiles.
    pub areas: Vec<Vec<Range<usize>>>,
    /// Of each area: the spans that go on where the one before them ends, in the same sequence.
    continues: Vec<Vec<bool>>,
    /// The spans of each rank among those of its area.
    pub spans: Vec<Range<usize>>,
    /// Of each area: the spans that some query of my group needs.
    pub needed: Vec<Vec<bool>>,
    /// Of each group: the spans of my area that its queries need.
    pub asked: Vec<Vec<bool>>,
    /// `ring` alone: of each rank, the spans of each area that its queries need.
    needed_by: Vec<Vec<Vec<bool>>>,
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

/// Cuts spans of rows where sequences begin and end.
fn by_sequence(spans: &[Range<usize>], sequences: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut out = Vec::with_capacity(spans.len());
    for span in spans {
        let first = sequences.partition_point(|s| s.end <= span.start);
        let here = sequences[first..].iter().take_while(|s| s.start < span.end);
        let mut start = span.start;
        for end in here.flat_map(|s| [s.start, s.end.min(span.end)]).chain([span.end]) {
            if end > start {
                out.push(start..end);
                start = end;
            }
        }
    }
    out
}

/// Cuts spans at `edges`, which ascend; true for those that go on where the one before them ends.
fn by_edges(spans: Vec<Range<usize>>, edges: &[usize]) -> Vec<(Range<usize>, bool)> {
    let mut out = Vec::with_capacity(spans.len());
    for span in spans {
        let first = edges.partition_point(|e| *e <= span.start);
        let mut start = span.start;
        for end in edges[first..].iter().take_while(|e| **e < span.end).chain([&span.end]) {
            out.push((start..*end, start > span.start));
            start = *end;
        }
    }
    out
}

/// Returns the rows at which what some group sees begins or ends, ascending: none where whole
/// sequences are visible, or all of them up to the diagonal, at which shards of equal rows end.
/// They are where tiles of `tile` rows of a sequence begin.
fn edges<'a>(
    queries: impl Iterator<Item = Queries<'a>>,
    mask: &AttnMask,
    s: &Sequences,
    tile: usize,
) -> Vec<usize> {
    let equal = || (s.tokens_q, &s.q) == (s.tokens_kv, &s.kv);
    let cuts = mask.left.is_some() || mask.right.is_some_and(|right| right > 0 || !equal());
    let mut all: Vec<usize> =
        if cuts { queries.flat_map(|q| q.edges(tile)).collect() } else { Vec::new() };
    all.sort_unstable();
    all.dedup();
    all
}

/// Returns which spans of one rank's keys a rank with these queries needs: those of which they see
/// a row, and padding between two of them, so that they stay one run.
fn needed(queries: &Queries<'_>, spans: &[Range<usize>], sequences: &[Range<usize>]) -> Vec<bool> {
    let mut needed = queries.see(spans);
    let mut before = None;
    for (i, span) in spans.iter().enumerate() {
        let s = sequences.partition_point(|s| s.end <= span.start);
        let padding = sequences.get(s).is_none_or(|s| s.start > span.start);
        if needed[i] {
            needed[before.unwrap_or(i)..i].fill(true);
            before = Some(i);
        } else if !padding {
            before = None;
        }
    }
    needed
}

/// Returns why tiles of `tile` rows are not the same on any number of ranks; none if they are: each
/// rank's rows of a sequence begin at a multiple of that.
pub(super) fn cuts_tiles(
    d: &CpAttentionDesc,
    s: &Sequences,
    size: usize,
    tile: usize,
) -> Option<String> {
    let cut = |spans: Vec<Range<usize>>, sequences: &[Range<usize>]| {
        by_sequence(&spans, sequences).into_iter().find_map(|span| {
            let of = &sequences.get(sequences.partition_point(|s| s.end <= span.start))?;
            let at = span.start.checked_sub(of.start)?;
            (!at.is_multiple_of(tile)).then_some(at)
        })
    };
    let at = Rank::all(size).find_map(|r| {
        cut(d.rows_q(s, r, size), &s.q).or_else(|| cut(d.rows_kv(s, r, size), &s.kv))
    })?;
    Some(format!("rows of a rank begin at row {at} of a sequence, no multiple of {tile}"))
}

/// Joins spans that go on where the one before them ends and are needed as it is, or not either.
fn joined(spans: &[Range<usize>], continues: &[bool], needed: &[bool]) -> Vec<Range<usize>> {
    let mut out: Vec<Range<usize>> = Vec::with_capacity(spans.len());
    let mut before = None;
    for ((span, continues), needed) in spans.iter().zip(continues).zip(needed) {
        match out.last_mut() {
            Some(last) if *continues && before == Some(needed) => last.end = span.end,
            _ => out.push(span.clone()),
        }
        before = Some(needed);
    }
    out
}

/// Returns the most segments of a table of keys: for each sequence, and beside. They are chunks of
/// sequences, one more where a sequence ends and its padding begins, and two more for each sequence
/// in a span of the group's queries, where what that sees begins and ends.
pub(super) fn most_segments(layout: Layout, size: usize, inner: usize) -> (usize, usize) {
    match layout {
        Layout::ZigzagPerSequence => (2 * size + 1 + 4 * inner, 0),
        Layout::Zigzag | Layout::Contiguous | Layout::Balanced => (2 + 2, 4 * size + 4 * inner),
    }
}

/// Returns the places of the spans of each member of a group among those of all.
fn places(members: &[Vec<Range<usize>>]) -> Vec<Range<usize>> {
    let mut end = 0;
    let place = |spans: &Vec<Range<usize>>| {
        end += spans.len();
        end - spans.len()..end
    };
    members.iter().map(place).collect()
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
        Self::in_tiles(d, seqs, strategy, (me, size), 1)
    }

    /// Computes the schedule of rank `me` whose spans of keys begin at multiples of `tile` rows of
    /// a sequence, if all ranks' rows do ([`cuts_tiles`]).
    pub fn in_tiles(
        d: &CpAttentionDesc,
        seqs: &Sequences,
        strategy: Strategy,
        (me, size): (Rank, usize),
        tile: usize,
    ) -> Self {
        let grid = Grid::new(me, size, strategy.inner(d, size));
        let members =
            |g: usize| (0..grid.inner).map(move |i| Rank::new((g * grid.inner + i) as u32));
        let rows_q = |g| members(g).map(|r| d.rows_q(seqs, r, size)).collect::<Vec<_>>();
        let queries = |g| Queries::new(&rows_q(g).concat(), seqs, &d.attn.mask);
        let edges = edges((0..grid.outer).map(queries), &d.attn.mask, seqs, tile);
        let cut = |r| by_edges(by_sequence(&d.rows_kv(seqs, r, size), &seqs.kv), &edges);
        let (keys, continues): (Vec<Vec<_>>, Vec<Vec<bool>>) =
            Rank::all(size).map(|r| cut(r).into_iter().unzip()).unzip();
        let areas: Vec<_> = keys.chunks(grid.inner).map(<[_]>::concat).collect();
        let continues: Vec<_> = continues.chunks(grid.inner).map(<[_]>::concat).collect();
        let mine = queries(grid.group);
        let needs = |queries: &Queries<'_>, area: usize| {
            let of_rank = |spans: &Vec<_>| needed(queries, spans, &seqs.kv);
            keys[area * grid.inner..][..grid.inner].iter().flat_map(of_rank).collect()
        };
        let needs_all = |queries: &Queries<'_>| -> Vec<Vec<bool>> {
            (0..grid.outer).map(|area| needs(queries, area)).collect()
        };
        let heads = kv_heads(d.attn.heads_kv, grid.inner, grid.at);
        let hq = d.attn.heads_q / grid.inner;
        let needed_by = match strategy {
            Strategy::Ring => (0..grid.outer).map(|g| needs_all(&queries(g))).collect(),
            _ => Vec::new(),
        };
        let needed = needs_all(&mine);
        let slices = |g: usize| mine.slices(&joined(&areas[g], &continues[g], &needed[g]));
        Self {
            grid,
            dims: Dims { hq, hkv: heads.len(), dqk: d.attn.dqk, dv: d.attn.dv },
            first_head: grid.at * hq,
            member_q: rows_q(grid.group),
            spans: keys.chunks(grid.inner).flat_map(places).collect(),
            asked: (0..grid.outer).map(|g| needs(&queries(g), grid.group)).collect(),
            needed_by,
            slices: (0..grid.outer).map(slices).collect(),
            areas,
            continues,
            needed,
        }
    }

    /// Returns the spans `of` group `g`'s area as kernels get them: neighbours of which my group
    /// needs all or none are one again.
    pub fn joined(&self, g: usize, of: Range<usize>) -> Vec<Range<usize>> {
        joined(&self.areas[g][of.clone()], &self.continues[g][of.clone()], &self.needed[g][of])
    }

    /// Returns the rows of my group's queries.
    pub fn rows_q(&self) -> usize {
        self.member_q.iter().map(|s| num_rows(s)).sum()
    }

    /// Returns whether a query of my group needs a row of another group's keys.
    pub fn sees_others(&self) -> bool {
        let sees = |g: usize| {
            let spans = self.areas[g].iter().zip(&self.needed[g]);
            spans.into_iter().any(|(rows, needed)| *needed && !rows.is_empty())
        };
        self.grid.other_groups().any(sees)
    }

    /// Returns whether my group needs all rows of the other groups' keys.
    pub fn needs_all_others(&self) -> bool {
        let all = |g: usize| {
            let spans = self.areas[g].iter().zip(&self.needed[g]);
            spans.into_iter().all(|(rows, needed)| *needed || rows.is_empty())
        };
        self.grid.other_groups().all(all)
    }

    /// Returns the spans of rank `owner`'s keys that travel to rank `to` of a ring: those that it
    /// needs, or one of the ranks behind it up to the owner.
    pub fn passed(&self, owner: usize, to: usize) -> Vec<bool> {
        let size = self.grid.outer;
        let readers = (0..size).map(|i| (to + i) % size).take_while(|r| *r != owner);
        let with = |mut spans: Vec<bool>, r: usize| {
            spans.iter_mut().zip(&self.needed_by[r][owner]).for_each(|(span, more)| *span |= more);
            spans
        };
        readers.fold(vec![false; self.areas[owner].len()], with)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::AttentionDesc;
    use tilewire_core::DType;

    #[test]
    fn tiles_are_whole_where_chunks_begin_at_their_multiples() {
        let of = |layout, cu: &[usize], mask| {
            let seqs = Sequences::packed(cu, cu).unwrap();
            let attn = AttentionDesc::new(seqs.tokens_q, (1, 1), 8, DType::BF16, mask);
            let d = CpAttentionDesc { layout, ..CpAttentionDesc::new(attn) };
            cuts_tiles(&d, &seqs, 2, 4)
        };
        let (causal, full) = (AttnMask::CAUSAL, AttnMask::FULL);
        for (layout, cu, mask) in [
            (Layout::Zigzag, &[0, 16][..], causal),
            (Layout::Zigzag, &[0, 4, 16], full),
            // Chunks of four rows in all but the last.
            (Layout::Contiguous, &[0, 8, 15], causal),
            (Layout::ZigzagPerSequence, &[0, 16, 48], causal),
            (Layout::Zigzag, &[0], causal),
        ] {
            assert_eq!(of(layout, cu, mask), None, "{layout:?} {cu:?}");
        }
        for (layout, cu, mask, why) in [
            (Layout::Zigzag, &[0, 20][..], causal, "row 15 of"),
            (Layout::Zigzag, &[0, 3, 16], causal, "row 9 of"),
            (Layout::ZigzagPerSequence, &[0, 16, 24], causal, "row 6 of"),
        ] {
            let said = of(layout, cu, mask).unwrap_or_default();
            assert!(said.contains(why), "{layout:?} {cu:?}: {said}");
        }
    }

    /// Under windows, and where keys have other sequences than queries, too.
    #[test]
    fn spans_in_tiles_begin_with_them_and_hold_what_is_seen() {
        let (tile, size) = (4, 3);
        let mut cut = 0;
        for (q, kv) in [(&[0, 24, 48][..], &[0, 24, 48][..]), (&[0, 48], &[0, 72])] {
            let seqs = Sequences::packed(q, kv).unwrap();
            for mask in [AttnMask::window(5, 2), AttnMask::window(9, 0), AttnMask::CAUSAL] {
                let attn = AttentionDesc::new(48, (1, 1), 8, DType::BF16, mask);
                let layout = Layout::Contiguous;
                let attn = AttentionDesc { sequences: seqs.clone(), ..attn };
                let d = CpAttentionDesc { layout, ..CpAttentionDesc::new(attn) };
                assert_eq!(cuts_tiles(&d, &seqs, size, tile), None);
                for me in Rank::all(size) {
                    let of = |tile| {
                        let at = (me, size);
                        Schedule::in_tiles(&d, &seqs, Strategy::AllGather, at, tile)
                    };
                    let (tiled, exact) = (of(tile), of(1));
                    let rows = |s: &Schedule| -> Vec<usize> {
                        let spans = s.areas.concat().into_iter().zip(s.needed.concat());
                        spans.filter(|(_, n)| *n).flat_map(|(rows, _)| rows).collect()
                    };
                    let begins = |row: usize| {
                        let of = seqs.kv.iter().rfind(|s| s.start <= row).unwrap();
                        (row - of.start).is_multiple_of(tile)
                    };
                    assert!(tiled.areas.concat().iter().all(|s| begins(s.start)), "{mask:?}");
                    let (all, seen) = (rows(&tiled), rows(&exact));
                    assert!(seen.iter().all(|row| all.contains(row)), "{mask:?}");
                    // No tile without a row that is seen.
                    let tile_of = |rows: &[usize]| -> Vec<usize> {
                        let mut tiles: Vec<_> = rows.iter().map(|row| row / tile).collect();
                        tiles.dedup();
                        tiles
                    };
                    assert_eq!(tile_of(&all), tile_of(&seen), "{mask:?}");
                    cut += all.len() - seen.len();
                }
            }
        }
        assert!(cut > 10, "{cut}");
    }
}
