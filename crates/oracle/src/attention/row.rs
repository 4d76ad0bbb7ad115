//! One query of one head: what forward and backward have in common.

use std::ops::Range;

use super::{AttnInputs, AttnSpec, Sequences, keep};
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

    /// The visible keys of a query, in order.
    pub fn entries(&self, row: &Row) -> Vec<Entry> {
        let sees = |&(j, _): &(usize, usize)| self.spec.mask.sees(row.i, j, row.sq, row.kv.len());
        row.kv
            .clone()
            .enumerate()
            .filter(sees)
            .map(|(j, kv_row)| self.entry(row, j, kv_row))
            .collect()
    }

    fn entry(&self, row: &Row, j: usize, kv_row: usize) -> Entry {
        let spec = self.spec;
        let (head, kv_head) = (row.head, self.kv_head(row.head));
        let products = (0..self.dqk).map(|c| {
            let q = self.inputs.q.at(row.q_row, head * self.dqk + c);
            q * self.inputs.k.at(kv_row, kv_head * self.dqk + c)
        });
        let (mut score, mut slope) = (spec.scale * total(products), spec.scale);
        if let Some(cap) = spec.softcap {
            let t = (score / cap).tanh();
            (score, slope) = (cap * t, slope * (1.0 - t * t));
        }
        if let Some(bias) = self.inputs.bias {
            score += bias.data.at(bias.row(head, row.i), j);
        }
        let keep = spec.dropout.map_or(1.0, |d| {
            if keep(d.seed, head, row.q_row, kv_row, d.p) { 1.0 / (1.0 - d.p) } else { 0.0 }
        });
        Entry { j, kv_row, score, slope, keep }
    }

    /// `ln(sum of exp)` of the scores and the sink; -inf if there is neither.
    pub fn lse(&self, row: &Row, entries: &[Entry]) -> f64 {
        let sink = self.inputs.sink.map(|s| s[row.head]);
        let logits: Vec<f64> = entries.iter().map(|e| e.score).chain(sink).collect();
        log_sum_exp(&logits)
    }
}

/// `ln(sum_i exp(x_i))`, -inf of nothing; shifted by the maximum so that nothing overflows.
pub(super) fn log_sum_exp(x: &[f64]) -> f64 {
    let max = x.iter().fold(f64::NEG_INFINITY, |m, &v| m.max(v));
    if max == f64::NEG_INFINITY {
        return max;
    }
    max + total(x.iter().map(|v| (v - max).exp())).ln()
}
