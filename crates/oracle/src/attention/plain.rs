//! The loops over queries and keys as the mathematics has them, and the blocked ones against them.

use tilewire_core::Rng;

use super::row::{Entry, Problem, Row};
use super::*;
use crate::mat::total;

/// The visible keys of a query, in order, by the plain product.
fn entries(problem: &Problem<'_>, row: &Row) -> Vec<Entry> {
    let (dqk, kv_head) = (problem.dqk, problem.kv_head(row.head));
    let sees = |&(j, _): &(usize, usize)| problem.spec.mask.sees(row.i, j, row.sq, row.kv.len());
    let entry = |(j, kv_row)| Entry { j, kv_row, score: 0.0, slope: 0.0, keep: 1.0 };
    let visible = row.kv.clone().enumerate().filter(sees);
    let mut entries: Vec<Entry> = visible.map(entry).collect();
    for e in &mut entries {
        let q = |c| problem.inputs.q.at(row.q_row, row.head * dqk + c);
        let k = |c| problem.inputs.k.at(e.kv_row, kv_head * dqk + c);
        let z = total((0..dqk).map(|c| q(c) * k(c)));
        problem.score(row, e, z);
    }
    entries
}

fn plain_attention(spec: &AttnSpec, inputs: &AttnInputs<'_>, sequences: &Sequences) -> AttnOut {
    let problem = Problem::new(spec, inputs, sequences);
    let dv = problem.dv;
    let mut o = Mat::zeros(inputs.q.rows, spec.heads_q * dv);
    let mut lse = Mat::zeros(spec.heads_q, inputs.q.rows).map(|_| f64::NEG_INFINITY);
    for row in problem.rows() {
        let entries = entries(&problem, &row);
        let row_lse = problem.lse(&row, &entries);
        *lse.at_mut(row.head, row.q_row) = row_lse;
        let v_col = problem.kv_head(row.head) * dv;
        for c in 0..dv {
            let terms = entries.iter().map(|e| {
                let p = (e.score - row_lse).exp();
                p * e.keep * inputs.v.at(e.kv_row, v_col + c)
            });
            *o.at_mut(row.q_row, row.head * dv + c) = total(terms);
        }
    }
    AttnOut { o, lse }
}

fn plain_attention_bwd(
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
    let entries = entries(problem, row);
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

fn bits(m: &Mat) -> Vec<u64> {
    m.data.iter().map(|v| v.to_bits()).collect()
}

/// Everything that attention can do, on sequences with gaps, without rows, and on shared keys.
fn problem(rng: &mut Rng, way: usize) -> (AttnSpec, [Mat; 4], Option<Bias>, Option<Vec<f64>>) {
    let (heads_q, heads_kv) = [(4, 4), (4, 2), (3, 1)][way % 3];
    let (dqk, dv) = [(5, 3), (8, 8), (1, 2)][way / 3 % 3];
    let masks = [AttnMask::FULL, AttnMask::CAUSAL, AttnMask::window(3, 2)];
    let mut spec = AttnSpec::new(heads_q, heads_kv, dqk, masks[way % 3]);
    spec.softcap = way.is_multiple_of(2).then_some(1.5);
    spec.dropout = (way % 4 == 1).then_some(Dropout { p: 0.3, seed: way as u64 });
    let mut mat = |r, c| Mat::random(rng, r, c);
    let x = [mat(40, heads_q * dqk), mat(50, heads_kv * dqk), mat(50, heads_kv * dv)];
    let heads = if way.is_multiple_of(5) { 1 } else { heads_q };
    let bias = (way % 5 < 2).then(|| Bias::new(heads, 21, 41, mat(heads * 21, 41)));
    let sink = (way % 2 == 1).then(|| mat(1, heads_q).data);
    let d_o = mat(40, heads_q * dv);
    let [q, k, v] = x;
    (spec, [q, k, v, d_o], bias, sink)
}

#[test]
fn blocks_and_threads_have_the_bits_of_plain_loops() {
    let mut rng = Rng::new(9);
    let shapes = [
        Sequences { q: vec![0..20, 20..20, 23..40], kv: vec![0..37, 37..40, 41..41] },
        Sequences { q: vec![1..2, 4..9, 30..40], kv: vec![0..1, 3..44, 44..50] },
        // Two sequences that read the same keys.
        Sequences { q: vec![0..9, 10..30], kv: vec![5..35, 5..35] },
    ];
    for (i, way) in (0..60).enumerate() {
        let (spec, [q, k, v, d_o], bias, sink) = problem(&mut rng, way);
        let x = AttnInputs {
            bias: bias.as_ref(),
            sink: sink.as_deref(),
            ..AttnInputs::new(&q, &k, &v)
        };
        let s = &shapes[i % shapes.len()];
        let want = plain_attention(&spec, &x, s);
        let grads = plain_attention_bwd(&spec, &x, s, &d_o);
        for threads in [1, 3] {
            let got = forward::attention_on(threads, &spec, &x, s);
            assert!(bits(&got.o) == bits(&want.o) && bits(&got.lse) == bits(&want.lse), "{way}");
            let got = backward::attention_bwd_on(threads, &spec, &x, s, &d_o);
            assert!(bits(&got.dq) == bits(&grads.dq), "dq, {way} on {threads}");
            assert!(bits(&got.dk) == bits(&grads.dk), "dk, {way} on {threads}");
            assert!(bits(&got.dv) == bits(&grads.dv), "dv, {way} on {threads}");
            assert_eq!(got.dsink, grads.dsink, "dsink, {way} on {threads}");
            let dbias = |g: &AttnGrads| g.dbias.as_ref().map(|b| bits(&b.data));
            assert_eq!(dbias(&got), dbias(&grads), "dbias, {way} on {threads}");
        }
    }
}
