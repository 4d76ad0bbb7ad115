//! The layout `balanced`: rows of packed sequences for each rank, equally many, with equal work.
//!
//! Rows are on a circle. An arc of a rank's number of rows that is moved around the circle has the
//! mean work on average, so somewhere it has the mean work: the rank gets that arc, and the rest is
//! a smaller circle for the ranks that are left, with the same mean (the splitting of a necklace:
//! Alon, 1987). `P` ranks so take at most `2 P - 1` runs of rows. Among the arcs whose work is near
//! the mean the one is taken whose ends cut the fewest rows of sequences. Where whole sequences
//! fill all ranks evenly, nothing is cut.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use super::work::{Doc, Work};
use crate::attention::{AttnMask, Sequences};
use crate::common::part;

/// Rows of the tiles of kernels. A cut inside of a sequence is at a multiple of it, counted from
/// the sequence's first row, where lengths allow.
const TILE: usize = 128;

/// Most work of a rank, and most work that the ranks behind it may be left with, in hundredths of
/// the mean. What lies between them is for the grain of rows.
const MOST: i128 = 103;
const MOST_LEFT: i128 = 102;

/// Rows of each rank: spans that ascend, equally many for all ranks.
pub(super) type Rows = Vec<Vec<Range<usize>>>;

/// Divisions that are kept: those of the documents of the last launches.
const KEPT: usize = 16;

struct Known {
    sequences: Sequences,
    mask: AttnMask,
    size: usize,
    rows: Arc<Rows>,
}

/// Returns the rows of each of `size` ranks, kept by content: all layers of a model, both passes
/// and all ranks of a process ask for the same ones.
pub(super) fn divided(s: &Sequences, mask: &AttnMask, size: usize) -> Arc<Rows> {
    static KNOWN: Mutex<VecDeque<Known>> = Mutex::new(VecDeque::new());
    let same = |k: &&Known| k.size == size && k.mask == *mask && k.sequences == *s;
    let lock = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = lock().iter().find(same) {
        return known.rows.clone();
    }
    // Outside of the lock: two threads may both compute it, and get the same.
    let rows = Arc::new(divide(s, mask, size));
    let mut known = lock();
    known.truncate(KEPT - 1);
    known.push_front(Known { sequences: s.clone(), mask: *mask, size, rows: rows.clone() });
    rows
}

/// Divides the rows of queries. Pure, so that all ranks divide alike.
pub(super) fn divide(s: &Sequences, mask: &AttnMask, size: usize) -> Rows {
    let work = Work::new(s, mask);
    let num: Vec<usize> = (0..size).map(|r| part(s.tokens_q, r, size).len()).collect();
    let rows = whole(&work, &num).unwrap_or_else(|| arcs(&work, &num));
    let mut rows: Rows = rows.into_iter().map(|r| by_sequence(&work, r)).collect();
    let most = rows.iter().map(Vec::len).fold(1, usize::max);
    rows.iter_mut().for_each(|r| r.resize(most, s.tokens_q..s.tokens_q));
    rows
}

/// Returns a division into whole sequences, the longest ones first, each to the rank that has the
/// most rows left; none if it does not fill all ranks evenly.
fn whole(work: &Work, num: &[usize]) -> Option<Rows> {
    let mut docs: Vec<&Doc> = work.docs.iter().filter(|d| !d.extent.is_empty()).collect();
    docs.sort_by_key(|d| std::cmp::Reverse(d.extent.len()));
    let (mut left, mut done) = (num.to_vec(), vec![0; num.len()]);
    let mut rows = vec![Vec::new(); num.len()];
    for d in docs {
        let r = (0..num.len()).max_by_key(|r| (left[*r], std::cmp::Reverse((done[*r], *r))))?;
        left[r] = left[r].checked_sub(d.extent.len())?;
        done[r] += work.of(&d.extent);
        rows[r].push(d.extent.clone());
    }
    let fits = |w: &i128| w * 100 * num.len() as i128 <= MOST * work.total;
    done.iter().all(fits).then_some(rows)
}

/// Returns a division into arcs.
fn arcs(work: &Work, num: &[usize]) -> Rows {
    let mut circle = Circle::new(work, std::iter::once(0..work.tokens));
    let mut rows = Vec::with_capacity(num.len());
    for (r, n) in num.iter().enumerate() {
        let ranks = num.len() - r;
        let (mine, left) = circle.take(circle.best(*n, ranks, num.len()), *n);
        rows.push(mine);
        circle = Circle::new(work, left);
    }
    rows
}

/// Sorts the runs of a rank and cuts them where a sequence begins or ends that another run has a
/// part of, too: whoever needs that part does not get the sequences beside it.
fn by_sequence(work: &Work, mut runs: Vec<Range<usize>>) -> Vec<Range<usize>> {
    runs.retain(|r| !r.is_empty());
    runs.sort_unstable_by_key(|r| r.start);
    runs.dedup_by(|next, last| {
        let joins = last.end == next.start;
        last.end = if joins { next.end } else { last.end };
        joins
    });
    let mut out = Vec::with_capacity(runs.len() + 2);
    for run in runs {
        let (first, last) = (&work.doc(run.start).extent, &work.doc(run.end - 1).extent);
        let from = if first.start < run.start { first.end.min(run.end) } else { run.start };
        let to = if last.end > run.end { last.start.max(from) } else { run.end };
        let cut = [run.start..from, from..to, to..run.end];
        out.extend(cut.into_iter().filter(|r| !r.is_empty()));
    }
    out
}

/// A run of rows on the circle.
struct Run {
    /// Its first place, and the work of all places before it.
    at: usize,
    before: i128,
    rows: Range<usize>,
}

/// The rows that no rank has yet, end to end and the last next to the first.
struct Circle<'a> {
    work: &'a Work,
    runs: Vec<Run>,
    len: usize,
    total: i128,
}

impl<'a> Circle<'a> {
    fn new(work: &'a Work, rows: impl IntoIterator<Item = Range<usize>>) -> Self {
        let mut new = Self { work, runs: Vec::new(), len: 0, total: 0 };
        for rows in rows.into_iter().filter(|r| !r.is_empty()) {
            let (at, before) = (new.len, new.total);
            new.len += rows.len();
            new.total += work.of(&rows);
            new.runs.push(Run { at, before, rows });
        }
        new
    }

    fn run(&self, place: usize) -> &Run {
        &self.runs[self.runs.partition_point(|r| r.at <= place) - 1]
    }

    /// Returns the work of the places before `place`.
    fn before(&self, place: usize) -> i128 {
        if place >= self.len {
            return self.total;
        }
        let run = self.run(place);
        let row = run.rows.start + place - run.at;
        run.before + self.work.before(row) - self.work.before(run.rows.start)
    }

    /// Returns the work of the arc of `n` places from `first` on.
    fn arc(&self, first: usize, n: usize) -> i128 {
        let end = first + n;
        match end.checked_sub(self.len) {
            None => self.before(end) - self.before(first),
            Some(end) => self.total - self.before(first) + self.before(end),
        }
    }

    /// Returns the cost of an end of an arc before `place`: the rows of the sequence that it cuts,
    /// and a tile where it cuts one.
    fn cut(&self, place: usize) -> usize {
        let run = self.run(place);
        let row = run.rows.start + place - run.at;
        if row == run.rows.start {
            return 0;
        }
        let d = self.work.doc(row);
        if row <= d.rows.start || row >= d.rows.end {
            return 0;
        }
        let tile = if (row - d.rows.start).is_multiple_of(TILE) { 0 } else { TILE };
        d.rows.len() + tile
    }

    /// Returns the first place of the arc of `n` places to give to a rank, where `ranks` of `size`
    /// ranks are left: of those whose work fits, the one that cuts the fewest rows, and of those
    /// the one nearest to the mean.
    fn best(&self, n: usize, ranks: usize, size: usize) -> usize {
        if n == 0 || n >= self.len {
            return 0;
        }
        let (ranks, size, all) = (ranks as i128, size as i128, self.work.total);
        let mut best: Option<((bool, i128, usize, i128), usize)> = None;
        let mut consider = |first: usize, cost: usize| {
            // Most candidates cut more than the best one so far.
            if best.is_some_and(|(b, _)| !b.0 && cost as i128 > b.1) {
                return;
            }
            let w = self.arc(first, n);
            let fits = w * 100 * size <= MOST * all
                && (self.total - w) * 100 * size <= MOST_LEFT * all * (ranks - 1);
            let off = (w * ranks - self.total).abs();
            let key = match fits {
                true => (false, cost as i128, 0, off),
                false => (true, off, cost, 0),
            };
            if best.is_none_or(|(b, at)| (key, first) < (b, at)) {
                best = Some((key, first));
            }
        };
        self.borders(n, &mut consider);
        self.even(n, ranks, &mut consider);
        best.map_or(0, |(_, first)| first)
    }

    /// Calls `f` with the arcs that begin or end where a sequence does, or a run of the circle, and
    /// the cost of their other end.
    fn borders(&self, n: usize, f: &mut impl FnMut(usize, usize)) {
        for run in &self.runs {
            let docs = &self.work.docs;
            let first = docs.partition_point(|d| d.rows.start <= run.rows.start);
            let inside = docs[first..].iter().take_while(|d| d.rows.start < run.rows.end);
            let places = inside.map(|d| run.at + d.rows.start - run.rows.start);
            for place in std::iter::once(run.at).chain(places) {
                let (end, first) = ((place + n) % self.len, (place + self.len - n) % self.len);
                f(place, self.cut(end));
                f(first, self.cut(first));
            }
        }
    }

    /// Calls `f` with arcs that have the mean work of the `ranks` that are left, as nearly as rows
    /// and whole tiles have it, and the cost of their ends.
    fn even(&self, n: usize, ranks: i128, f: &mut impl FnMut(usize, usize)) {
        let mut f = |first: usize| {
            let (first, end) = (first % self.len, (first + n) % self.len);
            f(first, self.cut(first) + self.cut(end));
        };
        let heavy = |first: usize| self.arc(first % self.len, n) * ranks >= self.total;
        // Arcs side by side all around: between a light and a heavy one lies an even one.
        let stops = (0..self.len).step_by(n).chain([self.len]).collect::<Vec<_>>();
        for ends in stops.windows(2) {
            let (mut low, mut high) = (ends[0], ends[1]);
            let begin = heavy(low);
            if begin == heavy(high) {
                continue;
            }
            while high - low > 1 {
                let mid = low + (high - low) / 2;
                match heavy(mid) == begin {
                    true => low = mid,
                    false => high = mid,
                }
            }
            for first in [low, high] {
                f(first);
                // The whole tiles next to its first row, and next to the row behind its last.
                for (end, back) in [(first, 0), (first + n, n)] {
                    for end in self.tiles(end % self.len) {
                        f(end + self.len - back);
                    }
                }
            }
        }
    }

    /// Returns the places of the ends of the tile in which `place` is, as far as its run has them.
    fn tiles(&self, place: usize) -> [usize; 2] {
        let run = self.run(place);
        let inside = place - run.at;
        let row = run.rows.start + inside;
        let over = row.saturating_sub(self.work.doc(row).rows.start) % TILE;
        let more = if over == 0 { 0 } else { TILE - over };
        [
            if over <= inside { place - over } else { place },
            if inside + more < run.rows.len() { place + more } else { place },
        ]
    }

    /// Returns the rows of the arc of `n` places from `first` on, and all others, in the circle's
    /// order from the end of the arc on.
    fn take(&self, first: usize, n: usize) -> (Vec<Range<usize>>, Vec<Range<usize>>) {
        let (mut mine, mut left) = (Vec::new(), Vec::new());
        // The places from `first` on, once around.
        for (turn, places) in [(0, first..self.len), (self.len, 0..first)] {
            for run in &self.runs {
                let here = run.at.max(places.start)..(run.at + run.rows.len()).min(places.end);
                if here.is_empty() {
                    continue;
                }
                let row = |place: usize| run.rows.start + place - run.at;
                let middle = (first + n).saturating_sub(turn).clamp(here.start, here.end);
                mine.push(row(here.start)..row(middle));
                left.push(row(middle)..row(here.end));
            }
        }
        left.retain(|r| !r.is_empty());
        (mine, left)
    }
}

#[cfg(test)]
#[path = "balanced_tests.rs"]
mod tests;
