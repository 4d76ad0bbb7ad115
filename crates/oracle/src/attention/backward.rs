//! Attention backward.

use super::row::{Entry, Problem, Row, add_scaled, dots};
use super::{AttnInputs, AttnSpec, Bias, Sequences};
use crate::mat::total;
use crate::{Mat, par};

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
    let work = inputs.q.data.len().saturating_mul(inputs.k.rows);
    attention_bwd_on(par::threads(work), spec, inputs, sequences, d_o)
}

/// Two passes: one over the queries, for what belongs to a query, and one over blocks of keys, for
/// what belongs to a key. Each adds in the order of the queries, as one loop over all pairs does.
pub(super) fn attention_bwd_on(
    threads: usize,
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
    let rows = problem.rows();
    let ends = queries(threads, &problem, &rows, d_o, &mut grads);
    if let (Some(dsink), Some(sink)) = (&mut grads.dsink, inputs.sink) {
        for (row, end) in rows.iter().zip(&ends) {
            dsink[row.head] -= (sink[row.head] - end.lse).exp() * end.delta;
        }
    }
    keys(threads, &problem, &rows, d_o, &ends, &mut grads);
    grads
}

/// The numbers of a row's softmax that its backward pass needs.
#[derive(Clone, Copy)]
struct End {
    lse: f64,
    delta: f64,
}

/// `keep <d_o, v>` of each pair.
fn dps(problem: &Problem<'_>, row: &Row, entries: &[Entry], d_o: &Mat) -> Vec<f64> {
    let v =
        |e: &Entry| problem.part(problem.inputs.v, e.kv_row, problem.kv_head(row.head), problem.dv);
    let d_o = problem.part(d_o, row.q_row, row.head, problem.dv);
    let products = dots(d_o, &entries.iter().map(v).collect::<Vec<_>>());
    entries.iter().zip(products).map(|(e, dp)| e.keep * dp).collect()
}

/// Adds what belongs to a query. Rows that share a row of the bias are one thread's.
fn queries(
    threads: usize,
    problem: &Problem<'_>,
    rows: &[Row],
    d_o: &Mat,
    grads: &mut AttnGrads,
) -> Vec<End> {
    let dqk = problem.dqk;
    let num_bias = grads.dbias.as_ref().map(|b| b.data.rows);
    let mut groups = vec![Vec::new(); num_bias.unwrap_or(rows.len())];
    for (at, row) in rows.iter().enumerate() {
        groups[grads.dbias.as_ref().map_or(at, |b| b.row(row.head, row.i))].push(at);
    }
    let done = par::map(threads, groups.len(), |g| {
        let mut dbias = vec![0.0; grads.dbias.as_ref().map_or(0, |b| b.data.cols)];
        let one = |&at: &usize| {
            let row = &rows[at];
            let entries = problem.entries(row);
            let lse = problem.lse(row, &entries);
            let dp = dps(problem, row, &entries, d_o);
            let p: Vec<f64> = entries.iter().map(|e| (e.score - lse).exp()).collect();
            let delta = total(p.iter().zip(&dp).map(|(p, dp)| p * dp));
            let mut dq = vec![0.0; dqk];
            for ((e, p), dp) in entries.iter().zip(&p).zip(&dp) {
                let ds = p * (dp - delta);
                if !dbias.is_empty() {
                    dbias[e.j] += ds;
                }
                let k = problem.part(problem.inputs.k, e.kv_row, problem.kv_head(row.head), dqk);
                add_scaled(&mut dq, ds * e.slope, k);
            }
            (at, End { lse, delta }, dq)
        };
        let ends: Vec<_> = groups[g].iter().map(one).collect();
        (dbias, ends)
    });
    let mut ends = vec![End { lse: 0.0, delta: 0.0 }; rows.len()];
    for (g, (sums, group)) in done.into_iter().enumerate() {
        if let Some(dbias) = &mut grads.dbias {
            dbias.data.row_mut(g).copy_from_slice(&sums);
        }
        for (at, end, dq) in group {
            let row = &rows[at];
            let place = &mut grads.dq.row_mut(row.q_row)[row.head * dqk..(row.head + 1) * dqk];
            place.copy_from_slice(&dq);
            ends[at] = end;
        }
    }
    ends
}

/// Adds what belongs to a key.
fn keys(
    threads: usize,
    problem: &Problem<'_>,
    rows: &[Row],
    d_o: &Mat,
    ends: &[End],
    grads: &mut AttnGrads,
) {
    /// Rows of `k` that a thread takes at once.
    const BLOCK: usize = 32;
    let (dqk, dv, heads) = (problem.dqk, problem.dv, problem.spec.heads_kv);
    let num = problem.inputs.k.rows;
    let span = |block: usize| block * BLOCK..num.min((block + 1) * BLOCK);
    let blocks = num.div_ceil(BLOCK);
    let done = par::map(threads, blocks * heads, |task| {
        let (head, own) = (task % heads, span(task / heads));
        let mut dk = vec![0.0; own.len() * dqk];
        let mut dvs = vec![0.0; own.len() * dv];
        for (row, end) in rows.iter().zip(ends).filter(|(r, _)| problem.kv_head(r.head) == head) {
            let entries = problem.entries_in(row, &own);
            let dp = dps(problem, row, &entries, d_o);
            let q = problem.part(problem.inputs.q, row.q_row, row.head, dqk);
            let d_o = problem.part(d_o, row.q_row, row.head, dv);
            for (e, dp) in entries.iter().zip(&dp) {
                let (at, p) = (e.kv_row - own.start, (e.score - end.lse).exp());
                add_scaled(&mut dvs[at * dv..][..dv], p * e.keep, d_o);
                add_scaled(&mut dk[at * dqk..][..dqk], p * (dp - end.delta) * e.slope, q);
            }
        }
        (dk, dvs)
    });
    for (task, (dk, dvs)) in done.into_iter().enumerate() {
        let head = task % heads;
        for (i, row) in span(task / heads).enumerate() {
            grads.dk.row_mut(row)[head * dqk..][..dqk].copy_from_slice(&dk[i * dqk..][..dqk]);
            grads.dv.row_mut(row)[head * dv..][..dv].copy_from_slice(&dvs[i * dv..][..dv]);
        }
    }
}
