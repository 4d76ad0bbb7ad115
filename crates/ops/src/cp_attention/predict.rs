//! What a launch moves from this rank to each peer, from the definitions of the strategies.

use std::ops::Range;

use tilewire_core::{DType, Rank};
use tilewire_symm::{LinkTraffic, Traffic};

use super::config::{Schedule, Strategy, kv_heads, num_rows};
use super::{CpAttentionDesc, CpConfig};
use crate::attention::{Queries, Sequences};

/// Forward or backward pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Pass {
    /// out and lse.
    Forward,
    /// dq, dk, dv.
    Backward,
}

/// Bytes of one row on the wire, for the heads of one rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RowBytes {
    /// A row of q; with what the backward pass needs beside it.
    pub q: usize,
    pub q_bwd: usize,
    /// A row of k and v.
    pub kv: usize,
    /// A row of partial dK and dV between groups; inside a group.
    pub dkv: usize,
    pub dkv_back: usize,
    /// A row of out and lse; of dq.
    pub out: usize,
    pub dq: usize,
}

impl RowBytes {
    /// For groups of `inner` ranks.
    pub fn new(d: &CpAttentionDesc, inner: usize) -> Self {
        let a = &d.attn;
        let hq = a.heads_q / inner;
        let hkv = kv_heads(a.heads_kv, inner, 0).len();
        let bytes = |heads: usize, dims: &[usize], t: DType| -> usize {
            let scale = if t.is_fp8() { 4 } else { 0 };
            dims.iter().map(|d| heads * (d * t.size() + scale)).sum()
        };
        let whole = a.heads_kv.is_multiple_of(inner) && d.dkv_wire == DType::F32;
        let (kv, back) = ([a.dqk, a.dv], if whole { a.out } else { d.dkv_wire });
        let q = bytes(hq, &[a.dqk], a.dtype);
        Self {
            q,
            q_bwd: q + bytes(hq, &[a.dv], a.out) + 8 * hq,
            kv: bytes(hkv, &kv, d.kv_wire().0),
            dkv: bytes(hkv, &kv, d.dkv_wire),
            dkv_back: bytes(hkv, &kv, back),
            out: bytes(hq, &[a.dv], a.out) + 4 * hq,
            dq: bytes(hq, &[a.dqk], a.out),
        }
    }
}

struct Counter<'a> {
    d: &'a CpAttentionDesc,
    seqs: &'a Sequences,
    strategy: Strategy,
    size: usize,
    me: usize,
    inner: usize,
    row: RowBytes,
    t: Traffic,
}

/// What `me` moves in one launch.
pub(super) fn predict(
    d: &CpAttentionDesc,
    seqs: &Sequences,
    cfg: &CpConfig,
    pass: Pass,
    (me, size): (Rank, usize),
) -> Traffic {
    let inner = cfg.strategy.inner(d, size);
    let mut c = Counter {
        d,
        seqs,
        strategy: cfg.strategy,
        size,
        me: me.idx(),
        inner,
        row: RowBytes::new(d, inner),
        t: vec![LinkTraffic::default(); size],
    };
    c.heads(pass);
    c.exchange();
    if pass == Pass::Backward {
        c.partials();
    }
    c.t
}

impl Counter<'_> {
    fn queries(&self, rank: usize) -> Vec<Range<usize>> {
        self.d.rows_q(self.seqs, Rank::new(rank as u32), self.size)
    }

    fn keys(&self, rank: usize) -> Vec<Range<usize>> {
        self.d.rows_kv(self.seqs, Rank::new(rank as u32), self.size)
    }

    /// Rows of queries and of keys of a rank.
    fn rows(&self, rank: usize) -> (usize, usize) {
        (num_rows(&self.queries(rank)), num_rows(&self.keys(rank)))
    }

    fn groups(&self) -> usize {
        self.size / self.inner
    }

    fn group(&self) -> usize {
        self.me / self.inner
    }

    /// My counterpart in group `g`.
    fn counterpart(&self, g: usize) -> usize {
        g * self.inner + self.me % self.inner
    }

    /// Spans of keys of group `g`.
    fn area(&self, g: usize) -> Vec<Range<usize>> {
        (g * self.inner..(g + 1) * self.inner).flat_map(|r| self.keys(r)).collect()
    }

    fn put(&mut self, to: usize, bytes: usize) {
        self.t[to].puts += u64::from(bytes > 0);
        self.t[to].put_bytes += bytes as u64;
    }

    /// Scatter of heads before, gather after: a message, its signal and a credit each way.
    fn heads(&mut self, pass: Pass) {
        let (first, r) = (self.group() * self.inner, self.row);
        let (me, mine) = (self.me, self.rows(self.me));
        for p in (first..first + self.inner).filter(|&p| p != me) {
            let theirs = self.rows(p);
            let (to, back) = match pass {
                Pass::Forward => (mine.0 * r.q, theirs.0 * r.out),
                Pass::Backward => (mine.0 * r.q_bwd, theirs.0 * r.dq + theirs.1 * r.dkv_back),
            };
            self.put(p, to + mine.1 * r.kv);
            self.put(p, back);
            self.t[p].signals += 4;
        }
    }

    /// Keys and values between groups.
    fn exchange(&mut self) {
        let (n, g) = (self.groups(), self.group());
        if n == 1 {
            return;
        }
        let bytes = |c: &Self, g: usize| num_rows(&c.area(g)) * c.row.kv;
        match self.strategy {
            Strategy::Ring | Strategy::Hybrid => {
                let (next, before) =
                    (self.counterpart((g + 1) % n), self.counterpart((g + n - 1) % n));
                // My own keys, then those of the groups before me; credits the other way.
                for back in 0..n - 1 {
                    let b = bytes(self, (g + n - back) % n);
                    self.put(next, b);
                    self.t[next].signals += 1;
                    self.t[before].signals += 1;
                }
            }
            Strategy::AllGather => {
                let b = bytes(self, g);
                for o in (0..n).filter(|&o| o != g) {
                    let p = self.counterpart(o);
                    self.put(p, b);
                    self.t[p].signals += 2;
                }
            }
            _ => {
                for o in (0..n).filter(|&o| o != g) {
                    let p = self.counterpart(o);
                    for rows in self.seen(g, o) {
                        self.t[p].gets += 1;
                        self.t[p].get_bytes += (rows * self.row.kv) as u64;
                    }
                    self.t[p].signals += 2;
                }
            }
        }
    }

    /// Rows of the spans of group `owner` that some query of group `reader` sees.
    fn seen(&self, reader: usize, owner: usize) -> Vec<usize> {
        let ranks = reader * self.inner..(reader + 1) * self.inner;
        let q: Vec<_> = ranks.flat_map(|r| self.queries(r)).collect();
        let area = self.area(owner);
        let seen = Queries::new(&q, self.seqs, &self.d.attn.mask).see(&area);
        area.iter().zip(seen).filter(|(_, seen)| *seen).map(|(s, _)| s.len()).collect()
    }

    /// Partial dK and dV to the owner: a put for each span that my queries see, one signal, and a
    /// credit for the owner's part of mine.
    fn partials(&mut self) {
        let (n, g) = (self.groups(), self.group());
        for o in (0..n).filter(|&o| o != g) {
            let p = self.counterpart(o);
            for rows in self.seen(g, o) {
                self.put(p, rows * self.row.dkv);
            }
            self.t[p].signals += 2;
        }
    }
}

/// Bytes of the four buffers of a plan: (slots, bytes of a slot) of scatter, area, dkv, gather.
pub(super) fn buffers(d: &CpAttentionDesc, strategy: Strategy, size: usize) -> [(usize, usize); 4] {
    let inner = strategy.inner(d, size);
    let (groups, r) = (size / inner, RowBytes::new(d, inner));
    let q = d.layout.max_rows(d.attn.sequences.tokens_q, size);
    let kv = d.layout.max_rows(d.attn.sequences.tokens_kv, size);
    let (to, back) = match d.backward {
        true => (r.q_bwd, (q * r.dq + kv * r.dkv_back).max(q * r.out)),
        false => (r.q, q * r.out),
    };
    let members = if inner > 1 { inner } else { 0 };
    let areas = match strategy {
        _ if groups == 1 => 0,
        Strategy::Get => 1,
        Strategy::AllGather => groups,
        _ => 2,
    };
    let dkv = if d.backward && groups > 1 { groups } else { 0 };
    [
        (members, q * to + kv * r.kv),
        (areas, inner * kv * r.kv),
        (dkv, inner * kv * r.dkv),
        (members, back),
    ]
}

/// Multiply-adds of the forward pass over all ranks, of the visible pairs.
pub(super) fn pairs(d: &CpAttentionDesc) -> f64 {
    let s = &d.attn.sequences;
    let mut sum = 0.0;
    for (q, kv) in s.q.iter().zip(&s.kv) {
        let (sq, skv) = (q.len() as f64, kv.len() as f64);
        let reach = |r: Option<usize>| r.map_or(skv, |r| (r as f64).min(skv));
        let (left, right) = (reach(d.attn.mask.left), reach(d.attn.mask.right));
        // A causal triangle is half of the rectangle; a window is a band.
        let causal = if d.attn.mask.right == Some(0) { 0.5 } else { 1.0 };
        sum += (sq * skv * causal).min(sq * (left + right + 1.0));
    }
    sum
}

impl Schedule {
    /// For tests: whose keys each task attends to.
    #[cfg(test)]
    pub fn order(&self) -> Vec<usize> {
        let owner = |t: &super::CpTask| match t {
            super::CpTask::Attend { owner } => Some(*owner),
            super::CpTask::Wait { .. } => None,
        };
        self.tasks.iter().filter_map(owner).collect()
    }
}
