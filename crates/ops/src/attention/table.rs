//! The tables of rows that meet, for the kernels: one pure function.

use std::ops::Range;

use bytemuck::Zeroable;

use super::Sequences;
use tilewire_kernels::abi::TwSeg;

/// The shift of rows that belong to no sequence.
pub(crate) const GAP: i32 = i32::MIN;

/// Segments of queries and of keys: local rows are the global rows `q` (one span after the other)
/// and `kv`. Queries, and keys of sequences, ascend in global rows: sums do not depend on the order
/// of spans. Keys of no sequence come last.
pub(crate) fn segments(
    q: &[Range<usize>],
    kv: &[Range<usize>],
    seqs: &Sequences,
) -> (Vec<TwSeg>, Vec<TwSeg>) {
    segments_in(q, kv, seqs, |_| 0)
}

/// The same with the segments of keys of each sequence in the order of `turn` of their local rows,
/// and ascending in global rows where that is equal. Sums are made in this order.
pub(crate) fn segments_in(
    q: &[Range<usize>],
    kv: &[Range<usize>],
    seqs: &Sequences,
    turn: impl Fn(usize) -> usize,
) -> (Vec<TwSeg>, Vec<TwSeg>) {
    let (mut qs, mut kvs) = (cut(q, &seqs.q), cut(kv, &seqs.kv));
    // Sequences ascend in global rows, too. Rows between them meet nobody.
    kvs.sort_by_key(|(s, seq)| (*seq, turn(s.row as usize), s.global));
    let shift = |s: usize| seqs.kv[s].len() as i32 - seqs.q[s].len() as i32;
    meet(&mut qs, &kvs, shift);
    meet(&mut kvs, &qs, shift);
    let plain = |v: Vec<(TwSeg, usize)>| v.into_iter().map(|(s, _)| s).collect();
    (plain(qs), plain(kvs))
}

/// Segments of a launch on one rank: all rows are here.
pub(crate) fn whole(seqs: &Sequences) -> (Vec<TwSeg>, Vec<TwSeg>) {
    let (q, kv) = (0..seqs.tokens_q, 0..seqs.tokens_kv);
    segments(std::slice::from_ref(&q), std::slice::from_ref(&kv), seqs)
}

/// No sequence.
const NONE: usize = usize::MAX;

/// Spans cut at the ends of sequences, each piece with its sequence.
fn cut(spans: &[Range<usize>], seqs: &[Range<usize>]) -> Vec<(TwSeg, usize)> {
    let mut out = Vec::new();
    let mut row = 0;
    for span in spans {
        let mut at = span.start;
        let mut s = seqs.partition_point(|r| r.end <= at);
        while at < span.end {
            while seqs.get(s).is_some_and(|r| r.end <= at) {
                s += 1;
            }
            let (seq, end, begin) = match seqs.get(s) {
                Some(r) if r.start <= at => (s, r.end, r.start),
                Some(r) => (NONE, r.start, at),
                None => (NONE, span.end, at),
            };
            let end = end.min(span.end);
            let [first, len, pos, global] =
                [row, end - at, at - begin, at].map(|x| u32::try_from(x).unwrap_or(u32::MAX));
            let seg = TwSeg { row: first, len, pos, global, shift: GAP, ..TwSeg::zeroed() };
            out.push((seg, seq));
            row += end - at;
            at = end;
        }
    }
    out.sort_by_key(|(s, _)| s.global);
    out
}

/// Tells `own` segments which `other` ones are of their sequence.
fn meet(own: &mut [(TwSeg, usize)], other: &[(TwSeg, usize)], shift: impl Fn(usize) -> i32) {
    let of: Vec<(usize, usize)> =
        other.iter().enumerate().filter(|(_, o)| o.1 != NONE).map(|(i, o)| (o.1, i)).collect();
    for (s, seq) in own.iter_mut().filter(|(_, seq)| *seq != NONE) {
        let first = of.partition_point(|(o, _)| o < seq);
        let num = of[first..].partition_point(|(o, _)| o == seq);
        // Pieces of one sequence follow each other: nothing lies between them.
        s.first = of.get(first).map_or(0, |(_, i)| *i as u32);
        s.end = s.first + num as u32;
        s.shift = shift(*seq);
    }
}

/// Numbers the tiles of `rows` rows; how many there are.
pub(crate) fn number_tiles(segs: &mut [TwSeg], rows: u64) -> u32 {
    segs.iter_mut().fold(0, |tiles, s| {
        s.tile = tiles;
        tiles + u64::from(s.len).div_ceil(rows) as u32
    })
}

#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, reason = "spans that happen to be one")]
mod tests {
    use super::*;

    /// Returns the (query, key) rows that meet by the tables, with their positions.
    fn pairs(q: &[TwSeg], kv: &[TwSeg]) -> Vec<(u32, u32, u32, u32)> {
        let mut out = Vec::new();
        for a in q {
            for b in &kv[a.first as usize..a.end as usize] {
                for (i, j) in (0..a.len).flat_map(|i| (0..b.len).map(move |j| (i, j))) {
                    out.push((a.row + i, b.row + j, a.pos + i, b.pos + j));
                }
            }
        }
        out.sort_unstable();
        out
    }

    #[test]
    fn tables_hold_each_pair_of_a_sequence_once() {
        let seqs =
            Sequences::padded((&[0, 4, 4, 9], &[0, 5, 5, 12]), (&[0, 6, 8, 8], &[0, 6, 9, 9]));
        let seqs = seqs.unwrap();
        for (q, kv) in [
            (vec![0..12], vec![0..9]),
            (vec![9..12, 1..7], vec![3..9, 0..2]),
            (vec![2..3, 5..6], vec![]),
        ] {
            let (qs, kvs) = segments(&q, &kv, &seqs);
            let rows = |spans: &[Range<usize>]| spans.iter().cloned().flatten().collect::<Vec<_>>();
            let (rq, rkv) = (rows(&q), rows(&kv));
            let mut want = Vec::new();
            for (r, g) in rq.iter().enumerate() {
                for (l, gk) in rkv.iter().enumerate() {
                    let both = |s: &usize| seqs.q[*s].contains(g) && seqs.kv[*s].contains(gk);
                    if let Some(s) = (0..seqs.q.len()).find(both) {
                        let (i, j) = (g - seqs.q[s].start, gk - seqs.kv[s].start);
                        want.push((r as u32, l as u32, i as u32, j as u32));
                    }
                }
            }
            want.sort_unstable();
            assert_eq!(pairs(&qs, &kvs), want);
            let turned: Vec<_> = pairs(&kvs, &qs).iter().map(|p| (p.1, p.0, p.3, p.2)).collect();
            let mut turned = turned;
            turned.sort_unstable();
            assert_eq!(turned, want, "the other way round");
            // Each row is in one segment, those between sequences too.
            let mut all: Vec<u32> = qs.iter().flat_map(|s| s.row..s.row + s.len).collect();
            all.sort_unstable();
            assert_eq!(all, (0..rq.len() as u32).collect::<Vec<_>>());
        }
    }

    #[test]
    fn tiles_are_counted_by_segment() {
        let seqs = Sequences::packed(&[0, 10, 10, 15], &[0, 3, 4, 9]).unwrap();
        let (mut q, kv) = segments(&[0..15], &[0..9], &seqs);
        assert_eq!(number_tiles(&mut q, 4), 5);
        assert_eq!(q.iter().map(|s| (s.tile, s.shift)).collect::<Vec<_>>(), [(0, -7), (3, 0)]);
        assert!(kv.len() == 3 && kv[1].first == kv[1].end, "keys that no query meets");
    }
}
