//! Attention forward, and the merge of partial results.

use super::row::{Problem, add_scaled, log_sum_exp};
use super::{AttnInputs, AttnSpec, Sequences};
use crate::mat::total;
use crate::{Mat, par};

/// Result of [`attention`].
#[derive(Clone, PartialEq, Debug)]
pub struct AttnOut {
    /// `[total_q, Hq * dv]`.
    pub o: Mat,
    /// `[Hq, total_q]`, natural logarithm; -inf where nothing is visible.
    pub lse: Mat,
}

/// `o_i = sum_j p_ij v_j`, `p = softmax(scale q k^T)` with everything the module text lists
/// (Vaswani et al. 2017; lse as in FlashAttention).
///
/// # Panics
/// If shapes do not fit.
pub fn attention(spec: &AttnSpec, inputs: &AttnInputs<'_>, sequences: &Sequences) -> AttnOut {
    let work = inputs.q.data.len().saturating_mul(inputs.k.rows);
    attention_on(par::threads(work), spec, inputs, sequences)
}

pub(super) fn attention_on(
    threads: usize,
    spec: &AttnSpec,
    inputs: &AttnInputs<'_>,
    sequences: &Sequences,
) -> AttnOut {
    let problem = Problem::new(spec, inputs, sequences);
    let dv = problem.dv;
    let mut o = Mat::zeros(inputs.q.rows, spec.heads_q * dv);
    let mut lse = Mat::zeros(spec.heads_q, inputs.q.rows).map(|_| f64::NEG_INFINITY);
    let rows = problem.rows();
    let results = par::map(threads, rows.len(), |at| {
        let row = &rows[at];
        let entries = problem.entries(row);
        let lse = problem.lse(row, &entries);
        let mut o = vec![0.0; dv];
        for e in &entries {
            let v = problem.part(inputs.v, e.kv_row, problem.kv_head(row.head), dv);
            add_scaled(&mut o, (e.score - lse).exp() * e.keep, v);
        }
        (o, lse)
    });
    for (row, (part, row_lse)) in rows.iter().zip(results) {
        *lse.at_mut(row.head, row.q_row) = row_lse;
        o.row_mut(row.q_row)[row.head * dv..(row.head + 1) * dv].copy_from_slice(&part);
    }
    AttnOut { o, lse }
}

/// Attention over all keys from results over disjoint parts of them:
/// `lse = ln(sum_p exp(lse_p))`, `o = sum_p exp(lse_p - lse) o_p`. A sink may be in one part only.
///
/// # Panics
/// If there is no part or the shapes differ.
pub fn merge(parts: &[AttnOut]) -> AttnOut {
    assert!(!parts.is_empty(), "nothing to merge");
    let first = &parts[0];
    assert!(
        parts.iter().all(|p| (p.o.rows, p.o.cols) == (first.o.rows, first.o.cols)),
        "parts differ in shape"
    );
    let lse = Mat::from_fn(first.lse.rows, first.lse.cols, |h, i| {
        log_sum_exp(&parts.iter().map(|p| p.lse.at(h, i)).collect::<Vec<_>>())
    });
    let dv = first.o.cols / first.lse.rows;
    let o = Mat::from_fn(first.o.rows, first.o.cols, |i, c| {
        let whole = lse.at(c / dv, i);
        // -inf - -inf is NaN: parts in which nothing is visible are left out.
        let visible = parts.iter().filter(|p| p.lse.at(c / dv, i) > f64::NEG_INFINITY);
        total(visible.map(|p| (p.lse.at(c / dv, i) - whole).exp() * p.o.at(i, c)))
    });
    AttnOut { o, lse }
}
