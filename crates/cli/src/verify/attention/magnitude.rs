//! Magnitudes of the error bound of attention: what `|A||B|` is to a product.
//!
//! A rounding error of relative size `u` in a score of magnitude `m` changes `p = exp(s - lse)` by
//! at most `u (m + M) p`, with `M` the largest magnitude in the row (by way of `lse`). Each
//! magnitude below is the sum of absolute values of what is added, times `1 + 2 (1 + M + |lse|)`.
//!
//! The backward pass takes `delta = <d_out, out>` from the output as it was stored: the rounding of
//! the output type enters, but of `<|d_out|, |out|>` alone. That part is weighted by `stored`, the
//! output's roundoff as a multiple of what the bound allows for one unit of magnitude. Kernels that
//! round probabilities and the gradients of scores before their products enter in the same way:
//! `rounded` weighs the sums of absolute values themselves.

use tilewire_oracle::Mat;
use tilewire_oracle::attention::{AttnInputs, AttnOut, AttnSpec, Sequences, keep};

/// Of each output.
pub struct Magnitudes {
    pub o: Mat,
    pub lse: Mat,
    pub dq: Mat,
    pub dk: Mat,
    pub dv: Mat,
    pub dbias: Option<Mat>,
    pub dsink: Option<Mat>,
}

/// Roundings beside those of f32, as multiples of what the bound allows for one unit of magnitude.
#[derive(Clone, Copy)]
pub struct Roundings {
    /// Of the stored output.
    pub stored: f64,
    /// Of probabilities and gradients of scores.
    pub rounded: f64,
}

struct Pair {
    j: usize,
    kv_row: usize,
    p: f64,
    score_mag: f64,
    keep: f64,
    /// `keep <|d_o|, |v|>`.
    dp_mag: f64,
}

struct Row {
    head: usize,
    kv_head: usize,
    q_row: usize,
    i: usize,
    lse: f64,
    /// Weighted `<|d_o|, |o|>`.
    stored: f64,
    rounded: f64,
}

/// All magnitudes; `out` is the oracle's.
pub fn magnitudes(
    spec: &AttnSpec,
    x: &AttnInputs<'_>,
    seqs: &Sequences,
    d_o: &Mat,
    (out, by): (&AttnOut, Roundings),
) -> Magnitudes {
    let zeros = |m: &Mat| Mat::zeros(m.rows, m.cols);
    let mut m = Magnitudes {
        o: zeros(d_o),
        lse: out.lse.map(|l| if l == f64::NEG_INFINITY { 1.0 } else { 1.0 + l.abs() }),
        dq: zeros(x.q),
        dk: zeros(x.k),
        dv: zeros(x.v),
        dbias: x.bias.map(|b| zeros(&b.data)),
        dsink: x.sink.map(|s| Mat::zeros(1, s.len())),
    };
    let group = spec.heads_q / spec.heads_kv;
    for (q, kv) in seqs.q.iter().zip(&seqs.kv) {
        for head in 0..spec.heads_q {
            for (i, q_row) in q.clone().enumerate() {
                let (lse, kv_head) = (out.lse.at(head, q_row), head / group);
                let dv = d_o.cols / spec.heads_q;
                let product = |c: usize| (d_o.at(q_row, c) * out.o.at(q_row, c)).abs();
                let stored = by.stored * (head * dv..(head + 1) * dv).map(product).sum::<f64>();
                let row = Row { head, kv_head, q_row, i, lse, stored, rounded: by.rounded };
                let pairs = pairs(spec, x, (q.len(), kv), &row, d_o);
                add(spec, x, &row, &pairs, d_o, &mut m);
            }
        }
    }
    m
}

fn pairs(
    spec: &AttnSpec,
    x: &AttnInputs<'_>,
    (sq, kv): (usize, &std::ops::Range<usize>),
    row: &Row,
    d_o: &Mat,
) -> Vec<Pair> {
    let (dqk, dv) = (x.q.cols / spec.heads_q, x.v.cols / spec.heads_kv);
    let visible = kv.clone().enumerate().filter(|(j, _)| spec.mask.sees(row.i, *j, sq, kv.len()));
    let one = |(j, kv_row): (usize, usize)| {
        let term =
            |c| x.q.at(row.q_row, row.head * dqk + c) * x.k.at(kv_row, row.kv_head * dqk + c);
        let z = spec.scale * (0..dqk).map(term).sum::<f64>();
        let bias = x.bias.map_or(0.0, |b| {
            let head = if b.heads == 1 { 0 } else { row.head };
            b.data.at(head * b.sq + row.i, j)
        });
        let s = spec.softcap.map_or(z, |c| c * (z / c).tanh()) + bias;
        let keep =
            spec.dropout.map_or(1.0, |d| match keep(d.seed, row.head, row.q_row, kv_row, d.p) {
                true => 1.0 / (1.0 - d.p),
                false => 0.0,
            });
        let dp =
            |c| (d_o.at(row.q_row, row.head * dv + c) * x.v.at(kv_row, row.kv_head * dv + c)).abs();
        Pair {
            j,
            kv_row,
            p: (s - row.lse).exp(),
            score_mag: spec.scale.abs() * (0..dqk).map(|c| term(c).abs()).sum::<f64>() + bias.abs(),
            keep,
            dp_mag: keep * (0..dv).map(dp).sum::<f64>(),
        }
    };
    visible.map(one).collect()
}

fn add(
    spec: &AttnSpec,
    x: &AttnInputs<'_>,
    row: &Row,
    pairs: &[Pair],
    d_o: &Mat,
    m: &mut Magnitudes,
) {
    let (dqk, dv) = (x.q.cols / spec.heads_q, x.v.cols / spec.heads_kv);
    if row.lse == f64::NEG_INFINITY {
        return;
    }
    let most = pairs.iter().map(|e| e.score_mag).fold(0.0, f64::max);
    let amp = 1.0 + 2.0 * (1.0 + most + row.lse.abs());
    *m.lse.at_mut(row.head, row.q_row) += most;
    let delta: f64 = pairs.iter().map(|e| e.p * e.dp_mag).sum();
    for e in pairs {
        for c in 0..dv {
            let (oc, vc) = (row.head * dv + c, row.kv_head * dv + c);
            let p = (amp + row.rounded) * e.p * e.keep;
            *m.o.at_mut(row.q_row, oc) += p * x.v.at(e.kv_row, vc).abs();
            *m.dv.at_mut(e.kv_row, vc) += p * d_o.at(row.q_row, oc).abs();
        }
        let (ds, stored) = (amp * e.p * (e.dp_mag + delta), e.p * row.stored);
        let rounded = row.rounded * e.p * (e.dp_mag + delta);
        let slope = spec.scale.abs() * (1.0 + spec.softcap.map_or(0.0, |c| 2.0 * e.score_mag / c));
        for c in 0..dqk {
            let (qc, kc) = (row.head * dqk + c, row.kv_head * dqk + c);
            let by = ds * slope + (stored + rounded) * spec.scale.abs();
            *m.dq.at_mut(row.q_row, qc) += by * x.k.at(e.kv_row, kc).abs();
            *m.dk.at_mut(e.kv_row, kc) += by * x.q.at(row.q_row, qc).abs();
        }
        if let (Some(db), Some(b)) = (&mut m.dbias, x.bias) {
            let head = if b.heads == 1 { 0 } else { row.head };
            *db.at_mut(head * b.sq + row.i, e.j) += ds + stored;
        }
    }
    if let (Some(ds), Some(sink)) = (&mut m.dsink, x.sink) {
        let p = (sink[row.head] - row.lse).exp();
        *ds.at_mut(0, row.head) += p * (amp * delta + row.stored);
    }
}
