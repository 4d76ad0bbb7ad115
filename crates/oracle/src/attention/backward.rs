//! Attention backward.

use super::row::{Entry, Problem, Row};
use super::{AttnInputs, AttnSpec, Bias, Sequences};
use crate::Mat;
use crate::mat::total;

/// Gradients of [`attention`](super::attention).
#[derive(Clone, PartialEq, Debug)]
pub struct AttnGrads {
    /// `[total_q, Hq * dqk]`.
    pub dq: Mat,
    /// `[total_kv, Hkv * dqk]`, summed over the query heads that share a key head.
    pub dk: Mat,
    /// `[total_kv, Hkv * dv]`, likewise.
    pub dv: Mat,
    /// Shape of the bias, summed over what shares an element.
    pub dbias: Option<Bias>,
    /// `[Hq]`.
    pub dsink: Option<Vec<f64>>,
}

/// Gradients given `d_o`, `[total_q, Hq * dv]`. With `keep'` the dropout factor:
///
/// ```text
/// dv_j   += p_ij keep'_ij do_i              dp_ij = keep'_ij <do_i, v_j>
/// delta_i = sum_j p_ij dp_ij  (= <do_i, o_i>)
/// ds_ij   = p_ij (dp_ij - delta_i)          dbias_ij += ds_ij
/// dz_ij   = ds_ij scale (1 - tanh^2)        dq_i += dz_ij k_j      dk_j += dz_ij q_i
/// dsink  += - exp(sink - lse_i) delta_i
/// ```
///
/// Rows that see nothing, and padding rows, have zero gradients. `lse` is taken to be unused by the
/// loss.
///
/// # Panics
/// If shapes do not fit.
pub fn attention_bwd(
    spec: &AttnSpec,
    inputs: &AttnInputs<'_>,
    sequences: &Sequences,
    d_o: &Mat,
) -> AttnGrads {
    let problem = Problem::new(spec, inputs, sequences);
    assert_eq!((d_o.rows, d_o.cols), (inputs.q.rows, spec.heads_q * problem.dv), "shape of o");
    let zeros = |m: &Mat| Mat::zeros(m.rows, m.cols);
    let mut grads = AttnGrads {
        dq: zeros(inputs.q),
        dk: zeros(inputs.k),
        dv: zeros(inputs.v),
        dbias: inputs.bias.map(|b| Bias { data: zeros(&b.data), ..b.clone() }),
        dsink: inputs.sink.map(|s| vec![0.0; s.len()]),
    };
    for row in problem.rows() {
        add_row(&problem, &row, d_o, &mut grads);
    }
    grads
}

/// Adds what one query of one head contributes.
fn add_row(problem: &Problem<'_>, row: &Row, d_o: &Mat, grads: &mut AttnGrads) {
    let entries = problem.entries(row);
    let lse = problem.lse(row, &entries);
    let dv = problem.dv;
    let (o_col, v_col) = (row.head * dv, problem.kv_head(row.head) * dv);
    let p: Vec<f64> = entries.iter().map(|e| (e.score - lse).exp()).collect();
    let dp: Vec<f64> = entries
        .iter()
        .map(|e| {
            let v = |c| problem.inputs.v.at(e.kv_row, v_col + c);
            e.keep * total((0..dv).map(|c| d_o.at(row.q_row, o_col + c) * v(c)))
        })
        .collect();
    let delta = total(p.iter().zip(&dp).map(|(p, dp)| p * dp));
    for ((e, p), dp) in entries.iter().zip(&p).zip(&dp) {
        for c in 0..dv {
            *grads.dv.at_mut(e.kv_row, v_col + c) += p * e.keep * d_o.at(row.q_row, o_col + c);
        }
        add_score(problem, row, e, p * (dp - delta), grads);
    }
    if let (Some(dsink), Some(sink)) = (&mut grads.dsink, problem.inputs.sink) {
        dsink[row.head] -= (sink[row.head] - lse).exp() * delta;
    }
}

/// Adds what the score of one pair contributes, given its gradient `ds`.
fn add_score(problem: &Problem<'_>, row: &Row, e: &Entry, ds: f64, grads: &mut AttnGrads) {
    if let Some(dbias) = &mut grads.dbias {
        let r = dbias.row(row.head, row.i);
        *dbias.data.at_mut(r, e.j) += ds;
    }
    let dqk = problem.dqk;
    let (q_col, k_col) = (row.head * dqk, problem.kv_head(row.head) * dqk);
    for c in 0..dqk {
        let (q, k) =
            (problem.inputs.q.at(row.q_row, q_col + c), problem.inputs.k.at(e.kv_row, k_col + c));
        *grads.dq.at_mut(row.q_row, q_col + c) += ds * e.slope * k;
        *grads.dk.at_mut(e.kv_row, k_col + c) += ds * e.slope * q;
    }
}
