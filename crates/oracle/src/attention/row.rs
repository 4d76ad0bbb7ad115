//! One query of one head: what forward and backward have in common.

use std::ops::Range;

use super::{AttnInputs, AttnSpec, Sequences, keep};
use crate::Mat;
use crate::mat::total;

/// A checked problem with its head dimensions.
pub(super) struct Problem<'a> {
    pub spec: &'a AttnSpec,
    pub inputs: &'a AttnInputs<'a>,
    pub sequences: &'a Sequences,
    pub dqk: usize,
    pub dv: usize,
}

/// A query row of a head.
pub(super) struct Row {
    /// Query head.
    pub head: usize,
    /// Row of `q`.
    pub q_row: usize,
    /// Rows of `k` and `v` of its sequence.
    pub kv: Range<usize>,
    /// Position in its sequence, and the sequence's length.
    pub i: usize,
    pub sq: usize,
}

/// One visible key.
pub(super) struct Entry {
    /// Position in the sequence.
    pub j: usize,
    /// Row of `k` and `v`.
    pub kv_row: usize,
    /// The score `s_ij`.
    pub score: f64,
    /// Derivative of the score with respect to `<q_i, k_j>`.
    pub slope: f64,
    /// Factor of the probability: 0 or `1 / (1 - p)` under dropout, else 1.
    pub keep: f64,
}

impl<'a> Problem<'a> {
    pub fn new(spec: &'a AttnSpec, inputs: &'a AttnInputs<'a>, sequences: &'a Sequences) -> Self {
        let (hq, hkv) = (spec.heads_q, spec.heads_kv);
        assert!(hkv > 0 && hq > 0 && hq.is_multiple_of(hkv), "{hq} query heads on {hkv}");
        let AttnInputs { q, k, v, bias, sink } = inputs;
        assert!(q.cols.is_multiple_of(hq) && v.cols.is_multiple_of(hkv), "columns are heads * d");
        let (dqk, dv) = (q.cols / hq, v.cols / hkv);
        assert_eq!((k.rows, k.cols), (v.rows, hkv * dqk), "k is [total_kv, Hkv * dqk]");
        assert!(sink.is_none_or(|s| s.len() == hq), "one sink for each query head");
        assert!(bias.is_none_or(|b| b.heads == 1 || b.heads == hq), "bias has 1 or Hq heads");
        assert!(spec.dropout.is_none_or(|d| (0.0..1.0).contains(&d.p)), "dropout outside [0, 1)");
        assert!(sequences.q.iter().all(|r| r.end <= q.rows), "a sequence ends beyond q");
        assert!(sequences.kv.iter().all(|r| r.end <= k.rows), "a sequence ends beyond k");
        Self { spec, inputs, sequences, dqk, dv }
    }

    /// Every query of every sequence and head.
    pub fn rows(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        for (q, kv) in self.sequences.q.iter().zip(&self.sequences.kv) {
            for head in 0..self.spec.heads_q {
                for (i, q_row) in q.clone().enumerate() {
                    rows.push(Row { head, q_row, kv: kv.clone(), i, sq: q.len() });
                }
            }
        }
        rows
    }

    /// Head of `k` and `v` that a query head reads.
    pub fn kv_head(&self, head: usize) -> usize {
        head / (self.spec.heads_q / self.spec.heads_kv)
    }

    /// The visible keys of a query among the rows `own` of `k`, in order, without their scores.
    fn visible(&self, row: &Row, own: &Range<usize>) -> Vec<Entry> {
        let rows = row.kv.start.max(own.start)..row.kv.end.min(own.end);
        let one = |kv_row| {
            let j = kv_row - row.kv.start;
            let sees = self.spec.mask.sees(row.i, j, row.sq, row.kv.len());
            sees.then_some(Entry { j, kv_row, score: 0.0, slope: 0.0, keep: 1.0 })
        };
        rows.filter_map(one).collect()
    }

    /// The visible keys of a query, in order.
    pub fn entries(&self, row: &Row) -> Vec<Entry> {
        self.entries_in(row, &row.kv)
    }

    /// Those among the rows `own` of `k`.
    pub fn entries_in(&self, row: &Row, own: &Range<usize>) -> Vec<Entry> {
        let mut entries = self.visible(row, own);
        let q = self.part(self.inputs.q, row.q_row, row.head, self.dqk);
        let k = |e: &Entry| self.part(self.inputs.k, e.kv_row, self.kv_head(row.head), self.dqk);
        let products = dots(q, &entries.iter().map(k).collect::<Vec<_>>());
        for (e, z) in entries.iter_mut().zip(products) {
            self.score(row, e, z);
        }
        entries
    }

    /// The elements of one head in a row of `q`, `k`, `v` or `o`.
    pub fn part<'m>(&self, m: &'m Mat, row: usize, head: usize, d: usize) -> &'m [f64] {
        &m.row(row)[head * d..(head + 1) * d]
    }

    /// Fills in what follows from `z = <q, k>`.
    pub fn score(&self, row: &Row, e: &mut Entry, z: f64) {
        let spec = self.spec;
        let (mut score, mut slope) = (spec.scale * z, spec.scale);
        if let Some(cap) = spec.softcap {
            let t = (score / cap).tanh();
            (score, slope) = (cap * t, slope * (1.0 - t * t));
        }
        if let Some(bias) = self.inputs.bias {
            score += bias.data.at(bias.row(row.head, row.i), e.j);
        }
        let keep = spec.dropout.map_or(1.0, |d| {
            if keep(d.seed, row.head, row.q_row, e.kv_row, d.p) { 1.0 / (1.0 - d.p) } else { 0.0 }
        });
        (e.score, e.slope, e.keep) = (score, slope, keep);
    }

    /// `ln(sum of exp)` of the scores and the sink; -inf if there is neither.
    pub fn lse(&self, row: &Row, entries: &[Entry]) -> f64 {
        let sink = self.inputs.sink.map(|s| s[row.head]);
        let logits: Vec<f64> = entries.iter().map(|e| e.score).chain(sink).collect();
        log_sum_exp(&logits)
    }
}

/// `<x, y>` with every `y`, each added in the order of the elements from +0 upwards. Sums of
/// several run beside each other: one alone would wait for each of its additions.
pub(super) fn dots(x: &[f64], y: &[&[f64]]) -> Vec<f64> {
    const BESIDE: usize = 8;
    let mut out = Vec::with_capacity(y.len());
    let mut groups = y.chunks_exact(BESIDE);
    for group in &mut groups {
        let group: [&[f64]; BESIDE] = std::array::from_fn(|i| &group[i][..x.len()]);
        let mut sums = [0.0; BESIDE];
        for (c, x) in x.iter().enumerate() {
            for (sum, y) in sums.iter_mut().zip(&group) {
                *sum += x * y[c];
            }
        }
        out.extend(sums);
    }
    out.extend(groups.remainder().iter().map(|y| total(x.iter().zip(*y).map(|(x, y)| x * y))));
    out
}

/// `sum += w x`, element by element.
pub(super) fn add_scaled(sum: &mut [f64], w: f64, x: &[f64]) {
    sum.iter_mut().zip(x).for_each(|(s, x)| *s += w * x);
}

/// `ln(sum_i exp(x_i))`, -inf of nothing; shifted by the maximum so that nothing overflows.
pub(super) fn log_sum_exp(x: &[f64]) -> f64 {
    let max = x.iter().fold(f64::NEG_INFINITY, |m, &v| m.max(v));
    if max == f64::NEG_INFINITY {
        return max;
    }
    max + total(x.iter().map(|v| (v - max).exp())).ln()
}
