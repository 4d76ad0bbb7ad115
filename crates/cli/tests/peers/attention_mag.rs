//! `|A||B|` of attention: of each output the sum of the absolute values of what is added to it,
//! times what a rounding error in the scores does to a probability.
//!
//! As in `verify`, but on whole rows, because the cases of other suites are larger. A relative
//! error `u` of a score of size `m` changes `p = exp(s - lse)` by at most `u (m + M) p`, with `M`
//! the largest size in the row (by way of lse); hence `1 + 2 (1 + M + |lse|)`.
//!
//! The backward pass takes `delta = <d_out, out>` from the output as it was stored. What that adds
//! is kept apart: its rounding is that of the output type, but of `<|d_out|, |out|>` alone.

use std::ops::Range;

use tilewire_oracle::Mat;
use tilewire_oracle::attention::{AttnInputs, AttnOut, AttnSpec, Sequences};

pub struct Magnitudes {
    pub out: Mat,
    pub lse: Mat,
    pub dv: Mat,
    pub dq: Grad,
    pub dk: Grad,
    pub dbias: Option<Grad>,
    pub dsink: Option<Grad>,
}

/// Of a gradient that `delta` enters.
pub struct Grad {
    pub all: Mat,
    /// What the rounding of the output contributes.
    pub stored: Mat,
}

impl Grad {
    fn like(m: &Mat) -> Self {
        let [all, stored] = [(); 2].map(|()| Mat::zeros(m.rows, m.cols));
        Self { all, stored }
    }
}

/// A query of a head.
struct Row {
    head: usize,
    q_row: usize,
    i: usize,
    sq: usize,
    lse: f64,
    /// `<|d_out|, |out|>`.
    stored: f64,
}

/// A key that it sees: its score's size, its probability, and `<|d_out|, |v|>`.
struct Pair {
    j: usize,
    kv_row: usize,
    size: f64,
    p: f64,
    dp: f64,
}

/// `out` is the oracle's. Without dropout: no suite has it.
pub fn magnitudes(
    spec: &AttnSpec,
    x: &AttnInputs<'_>,
    seqs: &Sequences,
    d_out: &Mat,
    out: &AttnOut,
) -> Magnitudes {
    let zeros = |m: &Mat| Mat::zeros(m.rows, m.cols);
    let mut m = Magnitudes {
        out: zeros(d_out),
        lse: out.lse.map(|l| if l == f64::NEG_INFINITY { 1.0 } else { 1.0 + l.abs() }),
        dv: zeros(x.v),
        dq: Grad::like(x.q),
        dk: Grad::like(x.k),
        dbias: x.bias.map(|b| Grad::like(&b.data)),
        dsink: x.sink.map(|s| Grad::like(&Mat::zeros(1, s.len()))),
    };
    for (q, kv) in seqs.q.iter().zip(&seqs.kv) {
        for h in 0..spec.heads_q {
            for (i, q_row) in q.clone().enumerate() {
                let lse = out.lse.at(h, q_row);
                if lse > f64::NEG_INFINITY {
                    let [d, o] = [d_out, &out.o].map(|m| head(m, q_row, h, spec.heads_q));
                    let stored = d.iter().zip(o).map(|(d, o)| (d * o).abs()).sum();
                    let row = Row { head: h, q_row, i, sq: q.len(), lse, stored };
                    add(spec, x, d_out, &row, &pairs(spec, x, d_out, &row, kv), &mut m);
                }
            }
        }
    }
    m
}

/// Elements of one head.
fn head(m: &Mat, row: usize, head: usize, heads: usize) -> &[f64] {
    let d = m.cols / heads;
    &m.row(row)[head * d..(head + 1) * d]
}

fn head_mut(m: &mut Mat, row: usize, head: usize, heads: usize) -> &mut [f64] {
    let d = m.cols / heads;
    &mut m.row_mut(row)[head * d..(head + 1) * d]
}

fn pairs(
    spec: &AttnSpec,
    x: &AttnInputs<'_>,
    d_out: &Mat,
    row: &Row,
    kv: &Range<usize>,
) -> Vec<Pair> {
    let (hq, hkv) = (spec.heads_q, spec.heads_kv);
    let kv_head = row.head / (hq / hkv);
    let q = head(x.q, row.q_row, row.head, hq);
    let d_out = head(d_out, row.q_row, row.head, hq);
    let seen = kv.clone().enumerate().filter(|(j, _)| spec.mask.sees(row.i, *j, row.sq, kv.len()));
    let pair = |(j, kv_row): (usize, usize)| {
        let (mut z, mut size, mut dp) = (0.0, 0.0, 0.0);
        for (q, k) in q.iter().zip(head(x.k, kv_row, kv_head, hkv)) {
            z += q * k;
            size += (q * k).abs();
        }
        for (d, v) in d_out.iter().zip(head(x.v, kv_row, kv_head, hkv)) {
            dp += (d * v).abs();
        }
        z *= spec.scale;
        let bias = x.bias.map_or(0.0, |b| b.data.at(bias_row(b.heads, b.sq, row), j));
        let s = spec.softcap.map_or(z, |c| c * (z / c).tanh()) + bias;
        Pair { j, kv_row, size: spec.scale * size + bias.abs(), p: (s - row.lse).exp(), dp }
    };
    seen.map(pair).collect()
}

fn bias_row(heads: usize, sq: usize, row: &Row) -> usize {
    (if heads == 1 { 0 } else { row.head }) * sq + row.i
}

fn add(
    spec: &AttnSpec,
    x: &AttnInputs<'_>,
    d_out: &Mat,
    row: &Row,
    pairs: &[Pair],
    m: &mut Magnitudes,
) {
    let (hq, hkv) = (spec.heads_q, spec.heads_kv);
    let kv_head = row.head / (hq / hkv);
    let most = pairs.iter().map(|e| e.size).fold(0.0, f64::max);
    let amp = 1.0 + 2.0 * (1.0 + most + row.lse.abs());
    let delta: f64 = pairs.iter().map(|e| e.p * e.dp).sum();
    *m.lse.at_mut(row.head, row.q_row) += most;
    let add = |to: &mut [f64], by: f64, x: &[f64]| {
        to.iter_mut().zip(x).for_each(|(t, x)| *t += by * x.abs());
    };
    for e in pairs {
        let (p, ds) = (amp * e.p, amp * e.p * (e.dp + delta));
        let slope = spec.scale * (1.0 + spec.softcap.map_or(0.0, |c| 2.0 * e.size / c));
        let [k, v] = [x.k, x.v].map(|m| head(m, e.kv_row, kv_head, hkv));
        let [q, d_out] = [x.q, d_out].map(|m| head(m, row.q_row, row.head, hq));
        add(head_mut(&mut m.out, row.q_row, row.head, hq), p, v);
        add(head_mut(&mut m.dv, e.kv_row, kv_head, hkv), p, d_out);
        add(head_mut(&mut m.dq.all, row.q_row, row.head, hq), ds * slope, k);
        add(head_mut(&mut m.dk.all, e.kv_row, kv_head, hkv), ds * slope, q);
        let stored = e.p * row.stored;
        add(head_mut(&mut m.dq.stored, row.q_row, row.head, hq), stored * spec.scale, k);
        add(head_mut(&mut m.dk.stored, e.kv_row, kv_head, hkv), stored * spec.scale, q);
        if let (Some(dbias), Some(b)) = (&mut m.dbias, x.bias) {
            let r = bias_row(b.heads, b.sq, row);
            *dbias.all.at_mut(r, e.j) += ds;
            *dbias.stored.at_mut(r, e.j) += stored;
        }
    }
    if let (Some(dsink), Some(sink)) = (&mut m.dsink, x.sink) {
        let p = (sink[row.head] - row.lse).exp();
        *dsink.all.at_mut(0, row.head) += amp * p * delta;
        *dsink.stored.at_mut(0, row.head) += p * row.stored;
    }
}
