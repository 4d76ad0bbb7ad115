//! The lists of pieces, carried out on small numbers: each rank ends with its rows.

use tilewire_core::{DType, ErrorKind, Rank};

use super::*;
use crate::attention::{AttentionDesc, AttnMask, Sequences};
use crate::cp_attention::desc::Layout;
use crate::cp_attention::device;
use crate::cp_attention::schedule::Schedule;

/// `(ranks, a2a_size, key heads of 8)`.
const GRIDS: [(usize, usize, usize); 7] =
    [(1, 1, 8), (2, 2, 8), (3, 1, 4), (4, 2, 4), (4, 2, 1), (8, 4, 2), (8, 2, 8)];

fn problems() -> Vec<(Sequences, AttnMask)> {
    let packed = Sequences::packed(&[0, 5, 5, 17, 29], &[0, 7, 9, 17, 31]).unwrap();
    let padded = Sequences::padded((&[0, 4, 9], &[0, 6, 13]), (&[0, 3, 9], &[0, 5, 11])).unwrap();
    vec![
        (Sequences::one(29, 29), AttnMask::CAUSAL),
        (Sequences::one(3, 2), AttnMask::FULL),
        (packed, AttnMask::window(3, 1)),
        (padded, AttnMask::CAUSAL),
    ]
}

/// `s` as `layout` can divide it: with padding behind each sequence up to equal chunks.
pub(crate) fn fitted(layout: Layout, size: usize, s: &Sequences) -> Sequences {
    if layout != Layout::ZigzagPerSequence {
        return s.clone();
    }
    let sides = [&s.q, &s.kv].map(|seqs| {
        let (mut cu, mut padded) = (vec![0], vec![0]);
        for r in seqs {
            cu.push(cu[cu.len() - 1] + r.len());
            padded.push(padded[padded.len() - 1] + r.len().next_multiple_of(2 * size));
        }
        (cu, padded)
    });
    let [q, kv] = &sides;
    Sequences::padded((&q.0, &q.1), (&kv.0, &kv.1)).unwrap()
}

pub(crate) struct World {
    pub d: CpAttentionDesc,
    pub sizes: Sizes,
    scheds: Vec<Schedule>,
    pub seqs: Sequences,
}

impl World {
    pub fn new(d: CpAttentionDesc, seqs: &Sequences, strategy: Strategy, size: usize) -> Self {
        d.check(size).and_then(|()| d.check_launch(seqs, size)).unwrap();
        let sched = |r| Schedule::new(&d, seqs, strategy, r, size);
        let scheds = Rank::all(size).map(sched).collect();
        Self { sizes: Sizes::new(&d, strategy, size), scheds, seqs: seqs.clone(), d }
    }

    pub fn lists(&self, r: usize) -> Pieces<'_> {
        Pieces { sizes: &self.sizes, sched: &self.scheds[r], me: Rank::new(r as u32) }
    }

    pub fn rows_q(&self, r: usize) -> Vec<usize> {
        let spans = self.d.rows_q(&self.seqs, Rank::new(r as u32), self.sizes.size);
        spans.into_iter().flatten().collect()
    }

    pub fn rows_kv(&self, r: usize) -> Vec<usize> {
        let spans = self.d.rows_kv(&self.seqs, Rank::new(r as u32), self.sizes.size);
        spans.into_iter().flatten().collect()
    }

    /// Returns, of the rows of rank `owner` in their order, whether one of `readers` needs them: a
    /// query of its group sees them, or they are padding between such rows.
    pub fn wanted(&self, readers: &[usize], owner: usize) -> Vec<bool> {
        let mut all = vec![false; self.rows_kv(owner).len()];
        for r in readers {
            let inner = self.sizes.inner;
            let group = r / inner * inner..(r / inner + 1) * inner;
            let queries: Vec<usize> = group.flat_map(|q| self.rows_q(q)).collect();
            let rows = self.needed_by(&queries, owner);
            all.iter_mut().zip(rows).for_each(|(all, one)| *all |= one);
        }
        all
    }

    fn needed_by(&self, queries: &[usize], owner: usize) -> Vec<bool> {
        let (s, mask) = (&self.seqs, &self.d.attn.mask);
        let sees = |kv: usize| {
            queries.iter().any(|q| crate::cp_attention::tests::allowed(s, mask, *q, kv))
        };
        let of = |kv: usize| s.kv.iter().position(|s| s.contains(&kv));
        let (mut rows, mut before) = (Vec::new(), None);
        for span in self.d.rows_kv(s, Rank::new(owner as u32), self.sizes.size) {
            for kv in span.clone() {
                let here = rows.len();
                rows.push(sees(kv));
                if rows[here] {
                    rows[before.unwrap_or(here)..here].fill(true);
                    before = Some(here);
                } else if of(kv).is_some() {
                    before = None;
                }
            }
        }
        rows
    }
}

pub(crate) fn worlds(f: impl FnMut(&World)) {
    worlds_of(|d| d, f);
}

/// Keys that travel as FP8 although they are wider, FP8 inputs, parts in FP8, and both.
pub(crate) fn worlds_of_fp8(mut f: impl FnMut(&World)) {
    let parts = |d| CpAttentionDesc { dkv_wire: DType::F8E5M2, ..d };
    let keys = |d| CpAttentionDesc { fp8_kv: true, ..d };
    worlds_of(parts, &mut f);
    worlds_of(keys, &mut f);
    worlds_of(|d| parts(keys(d)), &mut f);
    let inputs = |d: CpAttentionDesc| {
        let attn = AttentionDesc { dtype: DType::F8E4M3, out: DType::BF16, ..d.attn };
        CpAttentionDesc { attn, ..d }
    };
    worlds_of(inputs, &mut f);
    worlds_of(|d| parts(inputs(d)), &mut f);
}

fn worlds_of(change: impl Fn(CpAttentionDesc) -> CpAttentionDesc, mut f: impl FnMut(&World)) {
    for (size, a2a_size, hkv) in GRIDS {
        for (layout, (seqs, mask)) in
            Layout::NAMES.iter().flat_map(|l| problems().into_iter().map(move |p| (l.1, p)))
        {
            for (_, strategy) in &Strategy::NAMES {
                let mut attn = AttentionDesc::new(1, (8, hkv), 3, DType::F32, mask);
                attn.dv = 2;
                let seqs = fitted(layout, size, &seqs);
                // One plan serves all sequences of as many rows.
                attn.sequences = Sequences::one(seqs.tokens_q, seqs.tokens_kv);
                let d = change(CpAttentionDesc { layout, a2a_size, ..CpAttentionDesc::new(attn) });
                if strategy.check(&d, size).is_err() {
                    continue;
                }
                f(&World::new(d, &seqs, *strategy, size));
            }
        }
    }
}

/// f32 numbers as a buffer of bytes.
pub(crate) type Buffer = Vec<f32>;

pub(crate) fn put(b: &mut Buffer, at: usize, x: impl IntoIterator<Item = f32>) {
    for (i, x) in x.into_iter().enumerate() {
        b[at / 4 + i] = x;
    }
}

pub(crate) fn carry_out(pieces: &[Piece], from: &[Buffer], to: &mut Buffer) {
    for p in pieces {
        for r in 0..p.rows {
            let (src, dst) = ((p.src + r * p.src_pitch) / 4, (p.dst + r * p.dst_pitch) / 4);
            let row = &from[p.peer.idx()][src..src + p.width / 4];
            to[dst..dst + p.width / 4].copy_from_slice(row);
        }
    }
}

/// Every element has a number of its own.
fn number(row: usize, head: usize, c: usize) -> f32 {
    (row * 100 + head * 10 + c + 1) as f32
}

pub(crate) fn tensor(rows: &[usize], heads: std::ops::Range<usize>, dim: usize) -> Buffer {
    let each = |r: &usize| {
        let r = *r;
        heads.clone().flat_map(move |h| (0..dim).map(move |c| number(r, h, c)))
    };
    rows.iter().flat_map(each).collect()
}

pub(crate) fn bytes_of(w: &World, buffer: usize) -> Buffer {
    vec![-1.0; w.sizes.buffers(true)[buffer].div_ceil(4)]
}

#[test]
fn keys_that_are_needed_come_to_their_dense_rows() {
    worlds(|w| {
        let s = &w.sizes;
        if s.size == 1 || matches!(s.strategy, Strategy::AllGather | Strategy::Ring) {
            return;
        }
        let (buffer, at) = s.published();
        let chunks: Vec<Buffer> = (0..s.size)
            .map(|r| {
                let (mut b, rows) = (bytes_of(w, buffer), w.rows_kv(r));
                put(&mut b, at[0], tensor(&rows, 0..s.all_kv, 3));
                put(&mut b, at[1], tensor(&rows, 0..s.all_kv, 2));
                b
            })
            .collect();
        let dense: Vec<usize> = (0..s.size).flat_map(|r| w.rows_kv(r)).collect();
        for r in 0..s.size {
            let grid = w.scheds[r].grid;
            let heads = kv_heads(s.all_kv, s.inner, grid.at);
            let needed: Vec<bool> = w.scheds[r]
                .areas
                .iter()
                .zip(&w.scheds[r].needed)
                .flat_map(|(a, n)| a.iter().zip(n).flat_map(|(s, n)| vec![*n; s.len()]))
                .collect();
            for (pieces, dim) in w.lists(r).keys().iter().zip([3, 2]) {
                let mut got = vec![-2.0; s.all_keys() * s.hkv * dim];
                carry_out(pieces, &chunks, &mut got);
                let want = tensor(&dense, heads.clone(), dim);
                for (i, x) in want.iter().enumerate() {
                    let here = needed[i / (heads.len() * dim)];
                    assert_eq!(got[i], if here { *x } else { -2.0 }, "{:?} rank {r}", s.strategy);
                }
            }
        }
    });
}

#[test]
fn queries_of_a_group_come_and_results_go_back() {
    worlds(|w| {
        let s = &w.sizes;
        if s.inner == 1 {
            return;
        }
        let rows: Vec<_> = (0..s.size).map(|r| w.rows_q(r)).collect();
        let stat = |rows: &[usize], heads: std::ops::Range<usize>| -> Buffer {
            heads.flat_map(|h| rows.iter().map(move |r| number(*r, h, 0))).collect()
        };
        let [d_out, lse, delta] = s.upstream();
        let mut sent: Vec<Buffer> = Vec::new();
        for r in &rows {
            let mut b = bytes_of(w, SCATTER);
            put(&mut b, 0, tensor(r, 0..8, 3));
            put(&mut b, d_out, tensor(r, 0..8, 2));
            put(&mut b, lse, stat(r, 0..8));
            put(&mut b, delta, stat(r, 0..8));
            sent.push(b);
        }
        // The rows of its group that each rank publishes as its result.
        let mut back: Vec<Buffer> = Vec::new();
        for r in 0..s.size {
            let g = w.scheds[r].grid;
            let heads = w.scheds[r].first_head..w.scheds[r].first_head + s.hq;
            let group = rows[g.group * s.inner..(g.group + 1) * s.inner].concat();
            let mut all = Vec::new();
            for (at, dim) in [(0, 3), (d_out, 2)] {
                let mut got = vec![0.0; group.len() * s.hq * dim];
                carry_out(&w.lists(r).queries(at, dim, 4), &sent, &mut got);
                assert_eq!(got, tensor(&group, heads.clone(), dim));
                all.push(got);
            }
            for at in [lse, delta] {
                let mut got = vec![0.0; group.len() * s.hq];
                carry_out(&w.lists(r).stats(at), &sent, &mut got);
                assert_eq!(got, stat(&group, heads.clone()));
                all.push(got);
            }
            let mut b = bytes_of(w, GATHER);
            put(&mut b, 0, all[1].clone());
            put(&mut b, s.lse(), all[2].clone());
            back.push(b);
        }
        for (r, rows) in rows.iter().enumerate() {
            let (mut out, mut l) = (vec![0.0; rows.len() * 16], vec![0.0; rows.len() * 8]);
            carry_out(&w.lists(r).results(0, 2), &back, &mut out);
            carry_out(&w.lists(r).lse(), &back, &mut l);
            assert_eq!((out, l), (tensor(rows, 0..8, 2), stat(rows, 0..8)));
        }
    });
}

#[test]
fn what_is_published_fits_and_nothing_overlaps() {
    let fits = |w: &World| {
        let s = &w.sizes;
        let most = |buffer: usize| s.buffers(true)[buffer];
        // The tensors in each buffer in a backward pass: buffer, first byte, length.
        let mut all: Vec<(usize, usize, usize)> = Vec::new();
        if s.size == 1 {
            return;
        }
        let (buffer, at) = s.parts();
        let keys = s.all_keys() * s.hkv;
        all.extend(at.iter().zip(&s.part_wire).map(|(at, b)| (buffer, *at, keys * b)));
        let (buffer, at) = s.published();
        let rows = if s.strategy == Strategy::AllGather { s.all_keys() } else { s.max_kv };
        all.extend(at.iter().zip(&s.wire).map(|(at, b)| (buffer, *at, rows * s.all_kv * b)));
        if s.inner > 1 {
            let queries = s.max_q * s.all_q;
            all.push((GATHER, s.dq(), s.inner * s.max_q * s.hq * s.dqk * s.out));
            let places = [0, s.query_scales()];
            all.extend(places.iter().zip(&s.q_wire).map(|(at, b)| (SCATTER, *at, queries * b)));
            let [d_out, lse, delta] = s.upstream();
            all.push((SCATTER, d_out, queries * s.dv * s.out));
            all.extend([lse, delta].map(|at| (SCATTER, at, 4 * queries)));
        }
        all.sort_unstable();
        for (i, (buffer, at, len)) in all.iter().enumerate() {
            let next = all.get(i + 1).filter(|n| n.0 == *buffer).map_or(most(*buffer), |n| n.1);
            assert!(at + len <= next, "{:?} {all:?} {s:?}", s.strategy);
        }
        // Kernels write f32 where these are.
        assert!(
            s.packed_slot().1.is_multiple_of(4) && s.packed_slot().0[0].is_multiple_of(4)
                || !s.fp8_parts()
        );
    };
    worlds(fits);
    worlds_of_fp8(fits);
}

/// Checks the places of tensors with scales: scales first, at multiples of four bytes, and no
/// overlap.
#[test]
fn scales_lie_in_front_of_codes() {
    assert_eq!(place(8, 3, &[5, 7]), (vec![8, 23], 44));
    assert_eq!(place(8, 3, &[5, 7, 4, 4]), (vec![32, 47, 8, 20], 68));
}

#[test]
fn what_has_no_path_on_devices_is_refused_with_a_hint() {
    let d = CpAttentionDesc::new(AttentionDesc::new(8, (4, 4), 8, DType::BF16, AttnMask::CAUSAL));
    let large = AttentionDesc { dv: 136, ..d.attn.clone() };
    let kv =
        |attn: &AttentionDesc| CpAttentionDesc { fp8_kv: true, attn: attn.clone(), ..d.clone() };
    let parts = CpAttentionDesc { dkv_wire: DType::F8E5M2, ..d.clone() };
    let fp8 = AttentionDesc { dtype: DType::F8E4M3, ..large.clone() };
    for good in [d.clone(), kv(&d.attn), kv(&fp8), parts.clone()] {
        device::check(&good).unwrap();
    }
    for bad in [kv(&large), CpAttentionDesc { attn: large.clone(), ..parts }] {
        let e = device::check(&bad).unwrap_err();
        assert!(e.kind() == ErrorKind::Unsupported && e.get_hint().is_some(), "{e}");
    }
}

/// Checks sums of parts that are powers of two: the sum shows which ranks were added, and each only
/// once.
#[test]
fn each_rank_that_sees_a_row_adds_its_part_once() {
    worlds(|w| {
        let s = &w.sizes;
        if s.size == 1 {
            return;
        }
        let (buffer, at) = s.parts();
        let (k_at, v_at) = (at[0], at[1]);
        let dense: usize = w.seqs.tokens_kv;
        let chunks: Vec<Buffer> = (0..s.size)
            .map(|r| {
                let mut b = bytes_of(w, buffer);
                let own = (1u32 << r) as f32;
                put(&mut b, k_at, vec![own; dense * s.hkv * 3]);
                put(&mut b, v_at, vec![own; dense * s.hkv * 2]);
                b
            })
            .collect();
        for r in 0..s.size {
            let rows = w.rows_kv(r).len();
            let (slot, second) = s.slot();
            let (first, g) = (w.lists(r).first_key(r), w.scheds[r].grid);
            for (i, (pieces, dim)) in w.lists(r).parts().iter().zip([3, 2]).enumerate() {
                let len = if s.adds() { s.num_parts() * slot } else { rows * s.all_kv * dim * 4 };
                let mut to = vec![0.0; len / 4];
                carry_out(pieces, &chunks, &mut to);
                for (row, h) in (0..rows).flat_map(|x| (0..s.all_kv).map(move |h| (x, h))) {
                    let at = (row * s.all_kv + h) * dim;
                    let skip = if i == 1 { second / 4 } else { 0 };
                    let slots = if s.adds() { s.num_parts() } else { 1 };
                    let part = |n: usize| match s.adds() {
                        true => to[n * slot / 4 + skip + at],
                        false => to[at],
                    };
                    // A rank's own part is used in place.
                    let own = if s.inner == 1 { (1u32 << r) as f32 } else { 0.0 };
                    let got = (0..slots).map(part).sum::<f32>() + own;
                    let want: u32 = (0..s.size)
                        .filter(|p| kv_heads(s.all_kv, s.inner, p % s.inner).contains(&h))
                        .filter(|p| {
                            let asked = &w.scheds[r].asked[p / s.inner];
                            !s.adds()
                                || (s.inner == 1 && *p == r)
                                || sees(w, asked, g.group, first + row)
                        })
                        .map(|p| 1 << p)
                        .sum();
                    assert_eq!(got as u32, want, "{:?} rank {r} row {row} head {h}", s.strategy);
                }
            }
        }
    });
}

/// Returns whether the span of area `group` that holds dense row `row` is flagged.
fn sees(w: &World, flags: &[bool], group: usize, row: usize) -> bool {
    let areas = &w.scheds[0].areas;
    let mut at: usize = areas[..group].iter().map(|a| num_rows(a)).sum();
    for (span, flag) in areas[group].iter().zip(flags) {
        if (at..at + span.len()).contains(&row) {
            return *flag;
        }
        at += span.len();
    }
    panic!("no such row");
}

/// The tables that a launch hands to the kernels: over all ranks each pair of rows of a sequence
/// once for every head, and each row of queries and of keys once on every rank that has it.
#[test]
fn tables_of_all_ranks_hold_each_pair_once() {
    worlds(|w| {
        let (nq, nkv) = (w.seqs.tokens_q, w.seqs.tokens_kv);
        let mut done = vec![0u8; 8 * nq * nkv];
        for (r, sched) in w.scheds.iter().enumerate() {
            let (qs, kvs) = w.lists(r).all_tables(&w.seqs);
            let queries: Vec<usize> = sched.member_q.concat().into_iter().flatten().collect();
            let keys: Vec<usize> = sched.areas.concat().into_iter().flatten().collect();
            assert_eq!(
                (qs.iter().map(|s| s.len).sum::<u32>(), keys.len()),
                (queries.len() as u32, nkv)
            );
            for q in &qs {
                for kv in &kvs[q.first as usize..q.end as usize] {
                    for (i, j) in (0..q.len).flat_map(|i| (0..kv.len).map(move |j| (i, j))) {
                        let (a, b) = (queries[(q.row + i) as usize], keys[(kv.row + j) as usize]);
                        assert_eq!((a, b), ((q.global + i) as usize, (kv.global + j) as usize));
                        for h in sched.first_head..sched.first_head + sched.dims.hq {
                            done[(h * nq + a) * nkv + b] += 1;
                        }
                    }
                }
            }
        }
        let of = |x: usize, r: &[Range<usize>]| r.iter().position(|r| r.contains(&x));
        for (at, n) in done.iter().enumerate() {
            let (q, kv) = (of(at / nkv % nq, &w.seqs.q), of(at % nkv, &w.seqs.kv));
            assert_eq!(*n, u8::from(q.is_some() && q == kv));
        }
    });
}

/// Checks that own keys and the other ranks' keys are all keys, each once, at their rows in memory.
#[test]
fn own_and_other_keys_are_all_keys() {
    worlds(|w| {
        if !w.sizes.begins_at_once() {
            return;
        }
        let pairs = |(q, kv): Tables, first: u32| -> Vec<[u32; 6]> {
            let mut out = Vec::new();
            for q in &q {
                for k in &kv[q.first as usize..q.end as usize] {
                    for (i, j) in (0..q.len).flat_map(|i| (0..k.len).map(move |j| (i, j))) {
                        let (row, shift) = (k.row + j + first, q.shift as u32);
                        out.push([q.row + i, row, q.pos + i, k.pos + j, k.global + j, shift]);
                    }
                }
            }
            out
        };
        for r in 0..w.sizes.size {
            let lists = w.lists(r);
            let mut both = pairs(lists.own_tables(&w.seqs), lists.first_key(r) as u32);
            both.extend(pairs(lists.other_tables(&w.seqs), 0));
            let mut all = pairs(lists.all_tables(&w.seqs), 0);
            let mut coming = pairs(lists.tables_as_they_come(&w.seqs), 0);
            both.sort_unstable();
            all.sort_unstable();
            coming.sort_unstable();
            assert_eq!(both, all);
            assert_eq!(coming, all);
            // Every row of mine is written once by each part.
            for t in [lists.own_tables(&w.seqs), lists.other_tables(&w.seqs)] {
                let mut rows: Vec<u32> = t.0.iter().flat_map(|s| s.row..s.row + s.len).collect();
                rows.sort_unstable();
                assert_eq!(rows, (0..w.scheds[r].rows_q() as u32).collect::<Vec<_>>());
            }
        }
    });
}

/// Checks that parts of global tensors have the rows of the tables, in the same order.
#[test]
fn parts_for_offsets_are_in_the_order_of_the_tables() {
    worlds(|w| {
        if w.sizes.strategy != Strategy::AllGather {
            return;
        }
        let s = Sequences::one(w.seqs.tokens_q, w.seqs.tokens_kv);
        let of_segs = |t: Vec<TwSeg>| -> Vec<(u32, u32)> {
            t.iter().flat_map(|s| (0..s.len).map(|i| (s.global + i, s.row + i))).collect()
        };
        let of_parts = |s: &Shard| -> Vec<(u32, u32)> {
            s.parts.iter().flat_map(|p| (0..p.len).map(|i| (p.global + i, p.row + i))).collect()
        };
        for r in 0..w.sizes.size {
            let lists = w.lists(r);
            for of in [Against::Own, Against::Others, Against::All, Against::AsTheyCome] {
                let Segments::Known((q, kv)) = lists.segments(of, &s, None) else { panic!() };
                let [of_q, of_kv] = lists.shards(of, &s);
                assert_eq!(of_parts(&of_q), of_segs(q), "queries, {of:?}");
                assert_eq!(of_parts(&of_kv), of_segs(kv), "keys, {of:?}");
                assert_eq!((of_q.tokens, of_kv.tokens), (s.tokens_q, s.tokens_kv));
            }
        }
    });
}

/// Checks that a query meets my keys first, then those of the rank whose push to me is its first,
/// and so on, and that no segment has keys of two ranks.
#[test]
fn keys_are_met_in_the_order_in_which_they_come() {
    let mut met = 0;
    worlds(|w| {
        let size = w.sizes.size;
        for r in (0..size).filter(|_| w.sizes.begins_at_once()) {
            let lists = w.lists(r);
            let ends = lists.ends();
            let owner = |row: u32| ends.iter().position(|end| (row as usize) < *end).unwrap();
            let (qs, kvs) = lists.tables_as_they_come(&w.seqs);
            for q in &qs {
                let mut before = None;
                for k in &kvs[q.first as usize..q.end as usize] {
                    assert_eq!(owner(k.row), owner(k.row + k.len - 1));
                    // Peers are pushed to from the next rank on: I am the n-th of the rank n
                    // before me.
                    let turn = ((r + size - owner(k.row)) % size, k.global);
                    assert!(before < Some(turn), "{before:?}, then {turn:?}");
                    before = Some(turn);
                    met += usize::from(turn.0 > 0);
                }
            }
        }
    });
    assert!(met > 100, "{met} segments of other ranks");
}

/// Checks that a rank which attends to its own keys alone sees all that it should.
#[test]
fn who_sees_no_other_keys_is_known() {
    let mut seen = [0; 2];
    worlds(|w| {
        if !w.sizes.begins_at_once() {
            return;
        }
        for r in 0..w.sizes.size {
            let keys: Vec<usize> =
                (0..w.sizes.size).filter(|p| *p != r).flat_map(|p| w.rows_kv(p)).collect();
            let sees = |q: usize| {
                let mask = &w.d.attn.mask;
                keys.iter().any(|kv| crate::cp_attention::tests::allowed(&w.seqs, mask, q, *kv))
            };
            let others = w.rows_q(r).into_iter().any(sees);
            assert_eq!(w.scheds[r].sees_others(), others, "rank {r} of {}", w.d);
            seen[usize::from(others)] += 1;
        }
    });
    assert!(seen.iter().all(|n| *n > 10), "{seen:?}");
}

/// Checks that a rank which needs all rows of the others is known, so that NCCL's all-gather moves
/// no row that nobody needs.
#[test]
fn who_needs_all_other_keys_is_known() {
    let mut seen = [0; 2];
    worlds(|w| {
        for r in 0..w.sizes.size {
            let group = r / w.sizes.inner;
            let others = (0..w.sizes.size).filter(|p| p / w.sizes.inner != group);
            let all = others.flat_map(|p| w.wanted(&[r], p)).all(|wanted| wanted);
            assert_eq!(w.scheds[r].needs_all_others(), all, "rank {r} of {}", w.d);
            seen[usize::from(all)] += 1;
        }
    });
    assert!(seen.iter().all(|n| *n > 10), "{seen:?}");
}
