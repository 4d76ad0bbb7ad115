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

use tilewire_oracle::attention::{AttnInputs, AttnOut, AttnSpec, Sequences, keep};
use tilewire_oracle::{Mat, par};

/// Of each output.
#[derive(Clone)]
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
    /// Of scores, whose products are not added in f32.
    pub scores: f64,
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
    scores: f64,
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
    let parts = partial(spec, x, seqs, d_o, (out, by), &m);
    for part in parts {
        let add = |sum: &mut Mat, part: &Mat| *sum = sum.add(part);
        // What starts at a number of its own is in each part.
        m.lse = m.lse.zip(&part.lse, f64::max);
        add(&mut m.o, &part.o);
        add(&mut m.dq, &part.dq);
        add(&mut m.dk, &part.dk);
        add(&mut m.dv, &part.dv);
        m.dbias.iter_mut().zip(&part.dbias).for_each(|(sum, part)| add(sum, part));
        m.dsink.iter_mut().zip(&part.dsink).for_each(|(sum, part)| add(sum, part));
    }
    m
}

/// The magnitudes of some of the rows each, `start` being those of none.
fn partial(
    spec: &AttnSpec,
    x: &AttnInputs<'_>,
    seqs: &Sequences,
    d_o: &Mat,
    (out, by): (&AttnOut, Roundings),
    start: &Magnitudes,
) -> Vec<Magnitudes> {
    /// Fixed, so that sums are the same on all machines.
    const PARTS: usize = 4;
    let (group, dv) = (spec.heads_q / spec.heads_kv, d_o.cols / spec.heads_q);
    let rows: Vec<(usize, usize, usize)> = (0..seqs.q.len())
        .flat_map(|s| (0..spec.heads_q).map(move |head| (s, head)))
        .flat_map(|(s, head)| seqs.q[s].clone().map(move |q_row| (s, head, q_row)))
        .collect();
    let threads = par::threads(rows.len() * x.k.data.len());
    par::map(threads, PARTS, |part| {
        let mut m = start.clone();
        for &(s, head, q_row) in rows.iter().skip(part).step_by(PARTS) {
            let (q, kv) = (&seqs.q[s], &seqs.kv[s]);
            let own = head * dv..(head + 1) * dv;
            let both = d_o.row(q_row)[own.clone()].iter().zip(&out.o.row(q_row)[own]);
            let stored = by.stored * both.map(|(a, b)| (a * b).abs()).sum::<f64>();
            let (lse, kv_head, i) = (out.lse.at(head, q_row), head / group, q_row - q.start);
            let Roundings { rounded, scores, .. } = by;
            let row = Row { head, kv_head, q_row, i, lse, stored, rounded, scores };
            let pairs = pairs(spec, x, (q.len(), kv), &row, d_o);
            add(spec, x, &row, &pairs, d_o, &mut m);
        }
        m
    })
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
    let q = &x.q.row(row.q_row)[row.head * dqk..][..dqk];
    let d_o = &d_o.row(row.q_row)[row.head * dv..][..dv];
    let one = |(j, kv_row): (usize, usize)| {
        let (z, z_mag) = sums(q, &x.k.row(kv_row)[row.kv_head * dqk..][..dqk]);
        let z = spec.scale * z;
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
        let (_, dp_mag) = sums(d_o, &x.v.row(kv_row)[row.kv_head * dv..][..dv]);
        Pair {
            j,
            kv_row,
            p: (s - row.lse).exp(),
            score_mag: spec.scale.abs() * z_mag + bias.abs(),
            keep,
            dp_mag: keep * dp_mag,
        }
    };
    visible.map(one).collect()
}

/// `<a, b>` and `<|a|, |b|>`, several sums beside each other.
fn sums(a: &[f64], b: &[f64]) -> (f64, f64) {
    const BESIDE: usize = 4;
    let (mut sum, mut mag) = ([0.0; BESIDE], [0.0; BESIDE]);
    for (a, b) in a.chunks(BESIDE).zip(b.chunks(BESIDE)) {
        for (i, (a, b)) in a.iter().zip(b).enumerate() {
            sum[i] += a * b;
            mag[i] += (a * b).abs();
        }
    }
    (sum.iter().sum(), mag.iter().sum())
}

/// `sum += w |x|`.
fn add_abs(sum: &mut [f64], w: f64, x: &[f64]) {
    sum.iter_mut().zip(x).for_each(|(s, x)| *s += w * x.abs());
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
    let amp = 1.0 + 2.0 * (1.0 + most * (1.0 + row.scores) + row.lse.abs());
    *m.lse.at_mut(row.head, row.q_row) += most * (1.0 + row.scores);
    let delta: f64 = pairs.iter().map(|e| e.p * e.dp_mag).sum();
    let own = |head: usize, d: usize| head * d..(head + 1) * d;
    let (q, k) = (own(row.head, dqk), own(row.kv_head, dqk));
    let (o, v) = (own(row.head, dv), own(row.kv_head, dv));
    for e in pairs {
        let p = (amp + row.rounded) * e.p * e.keep;
        add_abs(&mut m.o.row_mut(row.q_row)[o.clone()], p, &x.v.row(e.kv_row)[v.clone()]);
        add_abs(&mut m.dv.row_mut(e.kv_row)[v.clone()], p, &d_o.row(row.q_row)[o.clone()]);
        let (ds, stored) = (amp * e.p * (e.dp_mag + delta), e.p * row.stored);
        let rounded = row.rounded * e.p * (e.dp_mag + delta);
        let slope = spec.scale.abs() * (1.0 + spec.softcap.map_or(0.0, |c| 2.0 * e.score_mag / c));
        let by = ds * slope + (stored + rounded) * spec.scale.abs();
        add_abs(&mut m.dq.row_mut(row.q_row)[q.clone()], by, &x.k.row(e.kv_row)[k.clone()]);
        add_abs(&mut m.dk.row_mut(e.kv_row)[k.clone()], by, &x.q.row(row.q_row)[q.clone()]);
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
