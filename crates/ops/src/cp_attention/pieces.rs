//! The rows of bytes that move between ranks: one pure list for each phase, and the places of the
//! rows in the buffers.
//!
//! Owners publish rows, and the ranks that need them get them. Only the keys of `all_gather` are
//! pushed, and the keys of `ring` passed on (`puts.rs`). Rows of keys are in the order of the ranks
//! ("dense"), so that one table of segments serves all.

use std::ops::Range;

use tilewire_core::{DType, Rank};

use super::config::Strategy;
use super::desc::CpAttentionDesc;
use super::schedule::{Schedule, kv_heads, num_rows};
use crate::attention::device::{Segments, Shard};
use crate::attention::table::{segments, segments_in};
use crate::attention::{AttnOffsets, Sequences};
use tilewire_kernels::abi::{TwSeg, TwShard};

/// Segments of queries and of keys.
pub(super) type Tables = (Vec<TwSeg>, Vec<TwSeg>);

/// The keys that my group's queries meet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Against {
    /// My own, in rows of my tensors.
    Own,
    /// Those of the other ranks, in dense rows.
    Others,
    /// Those of all ranks, in dense rows.
    All,
    /// The same, with each sequence's keys in the order in which they come.
    AsTheyCome,
}

/// The buffers of a plan.
pub(super) const SCATTER: usize = 0;
pub(super) const AREA: usize = 1;
pub(super) const DKV: usize = 2;
pub(super) const GATHER: usize = 3;

/// Returns the bytes of a row and head of two tensors of `dtype`, then of their scales if it is
/// FP8.
fn wire(dqk: usize, dv: usize, dtype: DType) -> Vec<usize> {
    let scales = if dtype.is_fp8() { 2 } else { 0 };
    [dqk, dv].map(|dim| dim * dtype.size()).into_iter().chain(vec![4; scales]).collect()
}

/// Returns the places of tensors of `rows` rows of so many bytes each, from `first` on, and their
/// end. In the list scales follow the two tensors of codes; in memory they precede them, because
/// kernels read them at multiples of 4.
pub(super) fn place(first: usize, rows: usize, wire: &[usize]) -> (Vec<usize>, usize) {
    let (mut at, mut end) = (vec![0; wire.len()], first);
    for i in (2..wire.len()).chain(0..2) {
        at[i] = end;
        end += rows * wire[i];
    }
    (at, end)
}

/// Slots of a ring, in turn.
pub(super) const RING_SLOTS: usize = 2;

/// Rows of bytes in a buffer of `peer`, and where they go here; of rows that are put, where they
/// are here, and where they go in a buffer of `peer`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Piece {
    pub peer: Rank,
    pub src: usize,
    pub src_pitch: usize,
    pub dst: usize,
    pub dst_pitch: usize,
    pub width: usize,
    pub rows: usize,
}

/// `num` rows of rank `peer`, from its row `at` on, which are rows `dense..` of all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Span {
    pub peer: Rank,
    pub at: usize,
    pub dense: usize,
    pub num: usize,
}

/// Columns of a tensor of rows: `(first byte, bytes of a row, first byte of the columns)`.
pub(super) type Side = (usize, usize, usize);

pub(super) fn piece(
    r: &Span,
    (src, src_pitch, src_col): Side,
    (dst, dst_pitch, dst_col): Side,
) -> Piece {
    Piece {
        peer: r.peer,
        src: src + src_col,
        src_pitch,
        dst: dst + dst_col,
        dst_pitch,
        width: 0,
        rows: r.num,
    }
}

/// Returns spans of global rows, one after the other from row `first` of a tensor on.
fn parts_of(spans: &[Range<usize>], first: usize) -> Vec<TwShard> {
    let mut row = first;
    let part = |s: &Range<usize>| {
        row += s.len();
        let [global, row, len] = [s.start, row - s.len(), s.len()].map(|n| n as u32);
        TwShard { global, row, len }
    };
    spans.iter().filter(|s| !s.is_empty()).map(part).collect()
}

impl Piece {
    pub fn wide(self, width: usize) -> Self {
        Self { width, ..self }
    }
}

/// Sizes of a plan, in bytes and rows, and the places of its tensors in the buffers. Equal on all
/// ranks except for the heads.
#[derive(Clone, Debug)]
pub(super) struct Sizes {
    pub strategy: Strategy,
    pub size: usize,
    pub inner: usize,
    pub groups: usize,
    /// Places of a group that share a key head.
    pub share: usize,
    /// Most rows of a rank.
    pub max_q: usize,
    pub max_kv: usize,
    /// Heads in all, and of a rank.
    pub all_q: usize,
    pub all_kv: usize,
    pub hq: usize,
    pub hkv: usize,
    pub dqk: usize,
    pub dv: usize,
    /// Bytes of a row and query head of the tensors of queries that travel: q, then its scales if
    /// it is FP8.
    pub q_wire: Vec<usize>,
    /// Bytes of a row and key head of the tensors of keys that travel: k, v, then the scales of
    /// each if they travel as FP8.
    pub wire: Vec<usize>,
    /// The same for parts of dk and dv.
    pub part_wire: Vec<usize>,
    /// Bytes of an element of the outputs, and of dk and dv as the kernel makes them.
    pub out: usize,
    pub part: usize,
    /// Everything has arrived before the arithmetic begins: through NCCL.
    pub sequential: bool,
}

impl Sizes {
    pub fn new(d: &CpAttentionDesc, strategy: Strategy, size: usize) -> Self {
        let (a, inner) = (&d.attn, strategy.inner(d, size));
        let s = &a.sequences;
        let mut sizes = Self {
            strategy,
            size,
            inner,
            groups: size / inner,
            share: (inner / a.heads_kv).max(1),
            max_q: d.layout.max_rows(s.tokens_q, size),
            max_kv: d.layout.max_rows(s.tokens_kv, size),
            all_q: a.heads_q,
            all_kv: a.heads_kv,
            hq: a.heads_q / inner,
            hkv: kv_heads(a.heads_kv, inner, 0).len(),
            dqk: a.dqk,
            dv: a.dv,
            q_wire: if a.dtype.is_fp8() { vec![a.dqk, 4] } else { vec![a.dqk * a.dtype.size()] },
            wire: wire(a.dqk, a.dv, d.kv_wire().0),
            part_wire: wire(a.dqk, a.dv, d.dkv_wire),
            out: a.out.size(),
            part: DType::F32.size(),
            sequential: false,
        };
        if !sizes.adds() {
            sizes.part = sizes.out;
            sizes.part_wire = wire(a.dqk, a.dv, a.out);
        }
        sizes
    }

    /// Returns whether parts of dk and dv travel as FP8.
    pub fn fp8_parts(&self) -> bool {
        self.part_wire.len() > 2
    }

    /// Returns whether dk and dv are sums over ranks; otherwise one rank has the whole of each.
    pub fn adds(&self) -> bool {
        self.groups * self.share > 1 || (self.size > 1 && self.fp8_parts())
    }

    /// Returns whether only keys move before the arithmetic: then it begins with a rank's own keys
    /// while the other keys travel.
    pub fn begins_at_once(&self) -> bool {
        !self.sequential && self.inner == 1 && self.size > 1
    }

    /// Returns the number of parts of dk and dv that the owner of a row adds.
    pub fn num_parts(&self) -> usize {
        self.groups * self.share
    }

    /// Returns the number of the part that rank `p` has.
    fn part_of(&self, p: usize) -> usize {
        p / self.inner * self.share + p % self.inner % self.share
    }

    /// Returns the most rows of keys of all ranks.
    pub fn all_keys(&self) -> usize {
        self.size * self.max_kv
    }

    /// Returns where a rank publishes the tensors of its keys: buffer, and the first bytes.
    pub fn published(&self) -> (usize, Vec<usize>) {
        if self.inner > 1 {
            return (SCATTER, self.keys_from(self.end_of_queries(), self.max_kv).0);
        }
        let rows = if self.strategy == Strategy::AllGather { self.all_keys() } else { self.max_kv };
        (AREA, self.keys_from(0, rows).0)
    }

    /// Returns the places of the tensors of `rows` rows of keys of all heads from `first` on, and
    /// their end.
    fn keys_from(&self, first: usize, rows: usize) -> (Vec<usize>, usize) {
        place(first, rows * self.all_kv, &self.wire)
    }

    /// Returns the place of the scales of published queries, if they have any: behind the codes.
    pub fn query_scales(&self) -> usize {
        self.max_q * self.all_q * self.q_wire[0]
    }

    fn end_of_queries(&self) -> usize {
        self.max_q * self.all_q * self.q_wire.iter().sum::<usize>()
    }

    /// Returns the places of the tensors of message `t` of a ring, in the area of the receiver.
    pub fn ring_slot(&self, t: usize) -> Vec<usize> {
        let slot = self.keys_from(0, self.max_kv).1;
        self.keys_from(t % RING_SLOTS * slot, self.max_kv).0
    }

    /// Returns the places of d_out, lse and delta in the scatter buffer, behind q, k and v.
    pub fn upstream(&self) -> [usize; 3] {
        let d_out = self.keys_from(self.end_of_queries(), self.max_kv).1;
        let lse = d_out + self.max_q * self.all_q * self.dv * self.out;
        [d_out, lse, lse + 4 * self.max_q * self.all_q]
    }

    /// Returns where a rank's dk and dv of all rows are published: buffer, and the first bytes.
    pub fn parts(&self) -> (usize, Vec<usize>) {
        let buffer = if self.groups > 1 { DKV } else { GATHER };
        // Kernels write dq, and parts that are not FP8, where they are published: at multiples of
        // 16 bytes where their dimensions are. Bytes of FP8 need not be, so they go behind.
        let behind_dq = buffer == GATHER && self.fp8_parts();
        let dq = self.inner * self.max_q * self.hq * self.dqk * self.out;
        let first = if behind_dq { dq } else { 0 };
        (buffer, place(first, self.all_keys() * self.hkv, &self.part_wire).0)
    }

    /// Returns the place of the group's dq in its buffer.
    pub fn dq(&self) -> usize {
        match self.groups > 1 || self.fp8_parts() {
            true => 0,
            false => place(0, self.all_keys() * self.hkv, &self.part_wire).1,
        }
    }

    /// Returns the place of the group's lse in the gather buffer, behind out.
    pub fn lse(&self) -> usize {
        self.inner * self.max_q * self.hq * self.dv * self.out
    }

    /// Returns the same for parts that travel as FP8: places of the tensors, and bytes from part to
    /// part.
    pub fn packed_slot(&self) -> (Vec<usize>, usize) {
        let (at, end) = place(0, self.max_kv * self.all_kv, &self.part_wire);
        (at, end.next_multiple_of(16))
    }

    /// Returns the bytes of the four buffers of a plan, with or without those of the backward pass.
    pub fn buffers(&self, backward: bool) -> [usize; 4] {
        let mut bytes = [0; 4];
        if self.size == 1 {
            return bytes;
        }
        let (keys, queries) = (self.all_keys() * self.hkv, self.inner * self.max_q * self.hq);
        if self.inner > 1 {
            bytes[SCATTER] = match backward {
                true => self.upstream()[2] + 4 * self.max_q * self.all_q,
                false => self.keys_from(self.end_of_queries(), self.max_kv).1,
            };
            bytes[GATHER] = self.lse() + 4 * queries;
        } else {
            bytes[AREA] = match self.strategy {
                Strategy::AllGather => self.keys_from(0, self.all_keys()).1,
                Strategy::Ring => RING_SLOTS * self.keys_from(0, self.max_kv).1,
                _ => self.keys_from(0, self.max_kv).1,
            };
        }
        if backward {
            let (buffer, at) = self.parts();
            let end = at.iter().zip(&self.part_wire).map(|(at, b)| at + keys * b).max();
            bytes[buffer] = bytes[buffer].max(end.unwrap_or(0));
            if self.inner > 1 {
                bytes[GATHER] = bytes[GATHER].max(self.dq() + queries * self.dqk * self.out);
            }
        }
        bytes
    }

    /// Returns the bytes of one part of dk and dv of my rows in f32, and the first byte of dv in
    /// it.
    pub fn slot(&self) -> (usize, usize) {
        let dv = 4 * self.max_kv * self.all_kv * self.dqk;
        (dv + 4 * self.max_kv * self.all_kv * self.dv, dv)
    }
}

/// The lists of one launch of one rank.
pub(super) struct Pieces<'a> {
    pub sizes: &'a Sizes,
    pub sched: &'a Schedule,
    pub me: Rank,
}

impl Pieces<'_> {
    /// Returns the spans of keys of rank `p`, and the place of the first in its area.
    fn spans(&self, p: usize) -> (Range<usize>, &[Range<usize>]) {
        let at = self.sched.spans[p].clone();
        (at.clone(), &self.sched.areas[p / self.sizes.inner][at])
    }

    /// Returns the spans of keys of rank `p` as kernels get them.
    fn joined(&self, p: usize) -> Vec<Range<usize>> {
        self.sched.joined(p / self.sizes.inner, self.sched.spans[p].clone())
    }

    /// Returns the first dense row of the keys of rank `p`.
    pub fn first_key(&self, p: usize) -> usize {
        (0..p).map(|r| num_rows(self.spans(r).1)).sum()
    }

    /// Returns the first row of member `m` among the queries of my group.
    fn first_query(&self, m: usize) -> usize {
        self.sched.member_q[..m].iter().map(|s| num_rows(s)).sum()
    }

    /// Returns all ranks, me first, then in rotated order.
    fn ranks(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, size) = (self.me.idx(), self.sizes.size);
        (0..size).map(move |i| (me + i) % size)
    }

    /// Returns the runs of rows of rank `owner` in spans that are `wanted` (flags of its area), as
    /// rows of `peer`.
    pub fn runs(&self, owner: usize, wanted: &[bool], peer: usize) -> Vec<Span> {
        let (at, spans) = self.spans(owner);
        let first = self.first_key(owner);
        let peer = Rank::new(peer as u32);
        let mut out: Vec<Span> = Vec::new();
        let mut row = 0;
        for (span, want) in spans.iter().zip(&wanted[at]) {
            let new = Span { peer, at: row, dense: first + row, num: span.len() };
            row += span.len();
            match out.last_mut() {
                _ if !want || new.num == 0 => {}
                Some(last) if last.at + last.num == new.at => last.num += new.num,
                _ => out.push(new),
            }
        }
        out
    }

    /// Returns the pieces of k and v of my heads, of all rows that my group's queries see, to dense
    /// tensors.
    pub fn keys(&self) -> Vec<Vec<Piece>> {
        let s = self.sizes;
        let head = kv_heads(s.all_kv, s.inner, self.sched.grid.at).start;
        let runs: Vec<Span> =
            self.ranks().flat_map(|p| self.runs(p, &self.sched.needed[p / s.inner], p)).collect();
        let tensor = |(at, bytes): (usize, &usize)| {
            let one = |r: &Span| {
                let (there, here) = (s.all_kv * bytes, s.hkv * bytes);
                let src = (at + r.at * there, there, head * bytes);
                piece(r, src, (r.dense * here, here, 0)).wide(here)
            };
            runs.iter().map(one).collect()
        };
        s.published().1.into_iter().zip(&s.wire).map(tensor).collect()
    }

    /// Returns the rows of each member of my group among its queries.
    fn members(&self) -> Vec<Span> {
        let (g, inner) = (&self.sched.grid, self.sizes.inner);
        let run = |i: usize| {
            let m = (g.at + i) % inner;
            let num = num_rows(&self.sched.member_q[m]);
            Span { peer: g.member(m), at: 0, dense: self.first_query(m), num }
        };
        (0..inner).map(run).collect()
    }

    /// Returns the pieces of my heads of q (`at` 0) or d_out, with heads of `dim` elements of
    /// `elem` bytes.
    pub fn queries(&self, at: usize, dim: usize, elem: usize) -> Vec<Piece> {
        let s = self.sizes;
        let (there, here) = (s.all_q * dim * elem, s.hq * dim * elem);
        let col = self.sched.first_head * dim * elem;
        let one = |r: Span| piece(&r, (at, there, col), (r.dense * here, here, 0)).wide(here);
        self.members().into_iter().map(one).collect()
    }

    /// Returns the pieces of my heads of the queries: q, and its scales if it has any.
    pub fn query_tensors(&self) -> Vec<Vec<Piece>> {
        let places = [0, self.sizes.query_scales()];
        let tensor = |(at, bytes): (usize, &usize)| self.queries(at, *bytes, 1);
        places.into_iter().zip(&self.sizes.q_wire).map(tensor).collect()
    }

    /// Returns the pieces of my heads of a tensor with one number for each (head, query), stored
    /// head by head.
    pub fn stats(&self, at: usize) -> Vec<Piece> {
        let s = self.sizes;
        let (first, rows) = (self.sched.first_head, self.sched.rows_q());
        let one = |r: Span| {
            let row = 4 * r.num;
            let heads = Span { num: s.hq, ..r };
            piece(&heads, (at + first * row, row, 0), (4 * r.dense, 4 * rows, 0)).wide(row)
        };
        self.members().into_iter().map(one).collect()
    }

    /// Returns the tables of my queries against my own keys, in rows of my tensors.
    pub fn own_tables(&self, seqs: &Sequences) -> Tables {
        segments(&self.sched.member_q.concat(), &self.joined(self.me.idx()), seqs)
    }

    /// Returns the tables of my group's queries against the keys of all ranks, in dense rows.
    pub fn all_tables(&self, seqs: &Sequences) -> Tables {
        let all = (0..self.sizes.size).flat_map(|p| self.joined(p));
        segments(&self.sched.member_q.concat(), &all.collect::<Vec<_>>(), seqs)
    }

    /// Returns the ends of the keys of each rank in dense rows.
    pub fn ends(&self) -> Vec<usize> {
        (1..=self.sizes.size).map(|p| self.first_key(p)).collect()
    }

    /// Returns the tables of [`Pieces::all_tables`] with each sequence's keys in the order in which
    /// they come: mine, then those of the rank before me, which pushes to me first, and so on.
    pub fn tables_as_they_come(&self, seqs: &Sequences) -> Tables {
        let all: Vec<_> = (0..self.sizes.size).flat_map(|p| self.joined(p)).collect();
        let (ends, me, size) = (self.ends(), self.me.idx(), self.sizes.size);
        let turn = |row: usize| (me + size - ends.partition_point(|end| *end <= row)) % size;
        segments_in(&self.sched.member_q.concat(), &all, seqs, turn)
    }

    /// Returns the tables of my queries against the keys of the other ranks, in dense rows.
    pub fn other_tables(&self, seqs: &Sequences) -> Tables {
        let me = self.me.idx();
        let others = (0..self.sizes.size).filter(|p| *p != me);
        let others: Vec<_> = others.flat_map(|p| self.joined(p)).collect();
        let (q, mut kv) = segments(&self.sched.member_q.concat(), &others, seqs);
        let (first, mine) = (self.first_key(me), num_rows(self.spans(me).1));
        for s in kv.iter_mut().filter(|s| s.row as usize >= first) {
            s.row += mine as u32;
        }
        (q, kv)
    }

    /// Returns the rows that meet in a kernel: of the sequences `seqs`, or of those that the launch
    /// reads.
    pub fn segments(
        &self,
        of: Against,
        seqs: &Sequences,
        offsets: Option<&AttnOffsets>,
    ) -> Segments {
        match (offsets, of) {
            (Some(o), _) => Segments::ByOffsets(Box::new(o.clone()), self.shards(of, seqs)),
            (None, Against::Own) => Segments::Known(self.own_tables(seqs)),
            (None, Against::Others) => Segments::Known(self.other_tables(seqs)),
            (None, Against::All) => Segments::Known(self.all_tables(seqs)),
            (None, Against::AsTheyCome) => Segments::Known(self.tables_as_they_come(seqs)),
        }
    }

    /// Returns my queries and the keys that they meet as parts of global tensors with the rows of
    /// `seqs`, in the order in which [`Pieces::segments`] has them with sequences.
    fn shards(&self, of: Against, seqs: &Sequences) -> [Shard; 2] {
        let (me, size) = (self.me.idx(), self.sizes.size);
        let mut q = parts_of(&self.sched.member_q.concat(), 0);
        q.sort_by_key(|part| part.global);
        let turn = |p: usize| if of == Against::AsTheyCome { (me + size - p) % size } else { 0 };
        let ranks = (0..size).filter(|p| match of {
            Against::Own => *p == me,
            Against::Others => *p != me,
            Against::All | Against::AsTheyCome => true,
        });
        let of_rank = |p: usize| {
            let first = if of == Against::Own { 0 } else { self.first_key(p) };
            parts_of(self.spans(p).1, first).into_iter().map(move |part| (turn(p), part))
        };
        let mut kv: Vec<(usize, TwShard)> = ranks.flat_map(of_rank).collect();
        kv.sort_by_key(|(turn, part)| (*turn, part.global));
        let parts = kv.into_iter().map(|(_, part)| part).collect();
        [Shard { tokens: seqs.tokens_q, parts: q }, Shard { tokens: seqs.tokens_kv, parts }]
    }

    /// Returns the pieces of my rows of each member's results for its heads: out (`at` 0) or dq.
    pub fn results(&self, at: usize, dim: usize) -> Vec<Piece> {
        let s = self.sizes;
        let (there, all) = (s.hq * dim * s.out, s.all_q * dim * s.out);
        let one = |r: Span| {
            let src = (at + self.first_query(self.sched.grid.at) * there, there, 0);
            let col = r.peer.idx() % s.inner * there;
            let mine = Span { num: self.my_queries(), ..r };
            piece(&mine, src, (0, all, col)).wide(there)
        };
        self.members().into_iter().map(one).collect()
    }

    fn my_queries(&self) -> usize {
        num_rows(&self.sched.member_q[self.sched.grid.at])
    }

    /// Returns the pieces of my rows of each member's lse.
    pub fn lse(&self) -> Vec<Piece> {
        let s = self.sizes;
        let (rows, mine) = (4 * self.sched.rows_q(), 4 * self.my_queries());
        let one = |r: Span| {
            let src = (s.lse(), rows, 4 * self.first_query(self.sched.grid.at));
            let heads = Span { num: s.hq, ..r };
            piece(&heads, src, (r.peer.idx() % s.inner * s.hq * mine, mine, 0)).wide(mine)
        };
        self.members().into_iter().map(one).collect()
    }

    /// Returns the pieces of dk and dv of my rows from all ranks: to slots of parts, or to the
    /// gradients themselves where one rank has the whole sum of its heads. My own part, if it has
    /// all heads, is used in place.
    pub fn parts(&self) -> Vec<Vec<Piece>> {
        let s = self.sizes;
        let (slot, second) = s.slot();
        let (places, slot) = match s.fp8_parts() {
            true => s.packed_slot(),
            false => (vec![0, second], slot),
        };
        let own = s.inner == 1;
        let ranks = self.ranks().filter(|p| !own || *p != self.me.idx());
        let all = vec![true; self.sched.areas[self.sched.grid.group].len()];
        // A whole gradient has every row, a part only the rows that queries of its rank see.
        let asked = |p: usize| if s.adds() { &self.sched.asked[p / s.inner] } else { &all };
        let runs: Vec<Span> = ranks.flat_map(|p| self.runs(self.me.idx(), asked(p), p)).collect();
        let tensor = |((at, place), bytes): ((usize, usize), &usize)| {
            let one = |r: &Span| {
                let (there, here) = (s.hkv * bytes, s.all_kv * bytes);
                let p = r.peer.idx();
                let head = kv_heads(s.all_kv, s.inner, p % s.inner).start;
                let to = if s.adds() { s.part_of(p) * slot + place } else { 0 };
                let src = (at + r.dense * there, there, 0);
                piece(r, src, (to + r.at * here, here, head * bytes)).wide(there)
            };
            runs.iter().map(one).collect()
        };
        s.parts().1.into_iter().zip(places).zip(&s.part_wire).map(tensor).collect()
    }
}

#[cfg(test)]
#[path = "pieces_tests.rs"]
pub(super) mod tests;
