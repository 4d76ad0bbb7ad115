use tilewire_oracle::attention::{
    AttnInputs, AttnMask, AttnOut, AttnSpec, Bias, Dropout, Sequences, attention, keep, merge,
};
use tilewire_oracle::nn::log_softmax;
use tilewire_oracle::{Mat, matmul};

use crate::{assert_close, rng};

const NEG_INF: f64 = f64::NEG_INFINITY;

fn qkv(
    seed: u64,
    (sq, skv): (usize, usize),
    (hq, hkv): (usize, usize),
    dqk: usize,
    dv: usize,
) -> [Mat; 3] {
    let mut r = rng(seed);
    [
        Mat::random(&mut r, sq, hq * dqk),
        Mat::random(&mut r, skv, hkv * dqk),
        Mat::random(&mut r, skv, hkv * dv),
    ]
}

/// One head and one sequence by matrix products; `visible(i, j)` says what is not masked.
fn by_matrices(
    q: &Mat,
    k: &Mat,
    v: &Mat,
    scale: f64,
    visible: impl Fn(usize, usize) -> bool,
) -> (Mat, Vec<f64>) {
    let raw = matmul(q, &k.transpose()).map(|s| scale * s);
    let scores =
        Mat::from_fn(raw.rows, raw.cols, |i, j| if visible(i, j) { raw.at(i, j) } else { NEG_INF });
    let logp = log_softmax(&scores);
    // The diagonal is visible in every mask used here.
    let lse = (0..raw.rows).map(|i| scores.at(i, i) - logp.at(i, i)).collect();
    (matmul(&logp.map(f64::exp), v), lse)
}

#[test]
fn equals_the_matrix_formulation_head_by_head() {
    let (s, dqk, dv) = (6, 4, 3);
    type See = fn(usize, usize) -> bool;
    let masks: [(AttnMask, See); 4] = [
        (AttnMask::FULL, |_, _| true),
        (AttnMask::CAUSAL, |i, j| j <= i),
        (AttnMask::window(2, 1), |i, j| j + 2 >= i && j <= i + 1),
        (AttnMask { left: Some(1), right: Some(0) }, |i, j| j <= i && i - j < 2),
    ];
    for (hq, hkv) in [(1, 1), (4, 4), (6, 2), (3, 1)] {
        let [q, k, v] = qkv(1, (s, s), (hq, hkv), dqk, dv);
        for (mask, see) in masks {
            let spec = AttnSpec::new(hq, hkv, dqk, mask);
            let out = attention(&spec, &AttnInputs::new(&q, &k, &v), &Sequences::batched(1, s, s));
            for h in 0..hq {
                let g = h / (hq / hkv);
                let (qh, kh) =
                    (q.slice_cols(h * dqk..(h + 1) * dqk), k.slice_cols(g * dqk..(g + 1) * dqk));
                let vh = v.slice_cols(g * dv..(g + 1) * dv);
                let (o, lse) = by_matrices(&qh, &kh, &vh, 0.5, see);
                assert_close("o", &out.o.slice_cols(h * dv..(h + 1) * dv), &o);
                assert_close("lse", &out.lse.slice_rows(h..h + 1), &Mat::new(1, s, lse));
            }
        }
    }
}

#[test]
fn masks_align_at_the_bottom_right() {
    let seen = |mask: AttnMask, sq: usize, skv: usize| -> Vec<Vec<usize>> {
        (0..sq).map(|i| (0..skv).filter(|&j| mask.sees(i, j, sq, skv)).collect()).collect()
    };
    assert_eq!(seen(AttnMask::CAUSAL, 2, 4), [vec![0, 1, 2], vec![0, 1, 2, 3]]);
    assert_eq!(seen(AttnMask::CAUSAL, 1, 3), [vec![0, 1, 2]]);
    assert_eq!(seen(AttnMask::CAUSAL, 4, 2), [vec![], vec![], vec![0], vec![0, 1]]);
    assert_eq!(seen(AttnMask::window(1, 0), 2, 4), [vec![1, 2], vec![2, 3]]);
    assert_eq!(seen(AttnMask::window(0, 1), 3, 3), [vec![0, 1], vec![1, 2], vec![2]]);
    assert_eq!(seen(AttnMask::FULL, 1, 2), [vec![0, 1]]);
}

#[test]
fn queries_that_see_nothing_are_zero() {
    let [q, k, v] = qkv(2, (4, 2), (2, 1), 3, 3);
    let spec = AttnSpec::new(2, 1, 3, AttnMask::CAUSAL);
    let sequences = Sequences::batched(1, 4, 2);
    let out = attention(&spec, &AttnInputs::new(&q, &k, &v), &sequences);
    for i in 0..4 {
        let blind = i < 2;
        assert_eq!(out.o.row(i).iter().all(|&v| v == 0.0), blind, "row {i}");
        assert_eq!(out.lse.at(1, i) == NEG_INF, blind, "row {i}");
    }
    let sink = [0.5, -1.0];
    let out = attention(
        &spec,
        &AttnInputs { sink: Some(&sink), ..AttnInputs::new(&q, &k, &v) },
        &sequences,
    );
    assert_eq!((out.lse.at(1, 0), out.o.at(0, 5)), (-1.0, 0.0), "only the sink is left");
}

#[test]
fn packed_sequences_do_not_see_each_other_and_padding_is_ignored() {
    let lens = [(3, 5), (0, 2), (4, 4), (2, 0)];
    let (cu_q, cu_kv) = ([0, 3, 3, 7, 9], [0, 5, 7, 11, 11]);
    let [q, k, v] = qkv(3, (9, 11), (2, 2), 3, 2);
    let spec = AttnSpec::new(2, 2, 3, AttnMask::CAUSAL);
    let packed = attention(&spec, &AttnInputs::new(&q, &k, &v), &Sequences::packed(&cu_q, &cu_kv));
    let (room_q, room_kv) = ([0, 4, 4, 10, 13], [1, 6, 9, 13, 13]);
    let spread = |m: &Mat, cu: &[usize], room: &[usize], rows: usize| {
        let mut out = Mat::zeros(rows, m.cols).map(|_| f64::NAN);
        for s in 0..4 {
            for i in 0..cu[s + 1] - cu[s] {
                out.row_mut(room[s] + i).copy_from_slice(m.row(cu[s] + i));
            }
        }
        out
    };
    let wide = [
        spread(&q, &cu_q, &room_q, 13),
        spread(&k, &cu_kv, &room_kv, 14),
        spread(&v, &cu_kv, &room_kv, 14),
    ];
    let sequences = Sequences::padded((&cu_q, &room_q), (&cu_kv, &room_kv));
    let padded = attention(&spec, &AttnInputs::new(&wide[0], &wide[1], &wide[2]), &sequences);
    let mut is_padding = [true; 13];
    for (s, &(sq, skv)) in lens.iter().enumerate() {
        let one = attention(
            &spec,
            &AttnInputs::new(
                &q.slice_rows(cu_q[s]..cu_q[s + 1]),
                &k.slice_rows(cu_kv[s]..cu_kv[s + 1]),
                &v.slice_rows(cu_kv[s]..cu_kv[s + 1]),
            ),
            &Sequences::batched(1, sq, skv),
        );
        assert_eq!(packed.o.slice_rows(cu_q[s]..cu_q[s + 1]), one.o);
        assert_eq!(packed.lse.slice_cols(cu_q[s]..cu_q[s + 1]), one.lse);
        assert_eq!(padded.o.slice_rows(room_q[s]..room_q[s] + sq), one.o);
        assert_eq!(padded.lse.slice_cols(room_q[s]..room_q[s] + sq), one.lse);
        is_padding[room_q[s]..room_q[s] + sq].fill(false);
    }
    assert_eq!(is_padding.iter().filter(|&&p| p).count(), 4);
    for i in (0..13).filter(|&i| is_padding[i]) {
        assert!(padded.o.row(i).iter().all(|&v| v == 0.0) && padded.lse.at(0, i) == NEG_INF);
    }
}

#[test]
fn sink_rescales_by_its_share() {
    let [q, k, v] = qkv(4, (5, 5), (2, 1), 3, 4);
    let spec = AttnSpec::new(2, 1, 3, AttnMask::CAUSAL);
    let (inputs, sequences) = (AttnInputs::new(&q, &k, &v), Sequences::batched(1, 5, 5));
    let plain = attention(&spec, &inputs, &sequences);
    for sink in [[0.0, 0.0], [1.5, -2.0]] {
        let got = attention(&spec, &AttnInputs { sink: Some(&sink), ..inputs }, &sequences);
        let lse = Mat::from_fn(2, 5, |h, i| (plain.lse.at(h, i).exp() + sink[h].exp()).ln());
        assert_close("lse", &got.lse, &lse);
        let o = Mat::from_fn(5, 8, |i, c| {
            let weight = plain.lse.at(c / 4, i).exp();
            plain.o.at(i, c) * weight / (weight + sink[c / 4].exp())
        });
        assert_close("o", &got.o, &o);
    }
}

#[test]
fn softcap_bounds_scores_before_the_bias_is_added() {
    // One query, two keys with scores 3 and -1; all values in the open.
    let (q, k) = (Mat::new(1, 1, vec![1.0]), Mat::new(2, 1, vec![3.0, -1.0]));
    let v = Mat::new(2, 1, vec![1.0, 0.0]);
    let bias = Bias::new(1, 1, 2, Mat::new(1, 2, vec![0.0, 4.0]));
    let spec =
        AttnSpec { scale: 1.0, softcap: Some(2.0), ..AttnSpec::new(1, 1, 1, AttnMask::FULL) };
    let inputs = AttnInputs { bias: Some(&bias), ..AttnInputs::new(&q, &k, &v) };
    let out = attention(&spec, &inputs, &Sequences::batched(1, 1, 2));
    let (a, b) = (2.0 * 1.5f64.tanh(), 2.0 * (-0.5f64).tanh() + 4.0);
    assert!((out.o.at(0, 0) - a.exp() / (a.exp() + b.exp())).abs() < 1e-14);
    assert!((out.lse.at(0, 0) - (a.exp() + b.exp()).ln()).abs() < 1e-14);
}

#[test]
fn bias_of_minus_infinity_is_a_mask_and_one_head_serves_all() {
    let (hq, s) = (3, 4);
    let [q, k, v] = qkv(5, (2 * s, 2 * s), (hq, 3), 2, 2);
    let sequences = Sequences::batched(2, s, s);
    let upper = |i: usize, j: usize| if j > i { NEG_INF } else { 0.0 };
    let bias = Bias::new(1, s, s, Mat::from_fn(s, s, upper));
    let each = Bias::new(hq, s, s, Mat::from_fn(hq * s, s, |r, j| upper(r % s, j)));
    let run = |mask, bias: Option<&Bias>| {
        let inputs = AttnInputs { bias, ..AttnInputs::new(&q, &k, &v) };
        attention(&AttnSpec::new(hq, 3, 2, mask), &inputs, &sequences)
    };
    let want = run(AttnMask::CAUSAL, None);
    for bias in [&bias, &each] {
        let got = run(AttnMask::FULL, Some(bias));
        assert_close("o", &got.o, &want.o);
        assert_close("lse", &got.lse, &want.lse);
    }
    // A bias of its own for head 2 leaves the other heads alone.
    let odd = Bias::new(
        hq,
        s,
        s,
        Mat::from_fn(hq * s, s, |r, j| if r / s == 2 { j as f64 } else { 0.0 }),
    );
    let (got, plain) = (run(AttnMask::FULL, Some(&odd)), run(AttnMask::FULL, None));
    assert_eq!(got.o.slice_cols(0..4), plain.o.slice_cols(0..4));
    assert_ne!(got.o.slice_cols(4..6), plain.o.slice_cols(4..6));
}

#[test]
fn large_scores_do_not_overflow() {
    let [q, k, v] = qkv(6, (3, 3), (1, 1), 2, 2);
    let spec = AttnSpec { scale: 1e5, ..AttnSpec::new(1, 1, 2, AttnMask::FULL) };
    let out = attention(&spec, &AttnInputs::new(&q, &k, &v), &Sequences::batched(1, 3, 3));
    for i in 0..3 {
        let scores: Vec<f64> =
            (0..3).map(|j| 1e5 * (0..2).map(|c| q.at(i, c) * k.at(j, c)).sum::<f64>()).collect();
        let best = (0..3).max_by(|&a, &b| scores[a].total_cmp(&scores[b])).unwrap();
        assert_eq!(out.o.row(i), v.row(best), "hard maximum");
        assert!((out.lse.at(0, i) - scores[best]).abs() < 1e-9);
    }
}

#[test]
fn merging_parts_of_the_keys_gives_the_whole() {
    let (hq, hkv, sq, skv) = (4, 2, 5, 9);
    let [q, k, v] = qkv(7, (sq, skv), (hq, hkv), 3, 2);
    let spec = AttnSpec::new(hq, hkv, 3, AttnMask::FULL);
    let sink = [0.3, -0.2, 1.0, 0.0];
    let inputs = AttnInputs { sink: Some(&sink), ..AttnInputs::new(&q, &k, &v) };
    let whole = attention(&spec, &inputs, &Sequences::batched(1, sq, skv));
    // An empty part too, and the sink in one part only.
    let parts: Vec<AttnOut> = [0..4, 4..4, 4..8, 8..9]
        .into_iter()
        .map(|kv| {
            let sink = (kv.start == 8).then_some(&sink[..]);
            let rows = Sequences {
                q: std::iter::once(0..sq).collect(),
                kv: std::iter::once(kv).collect(),
            };
            attention(&spec, &AttnInputs { sink, ..inputs }, &rows)
        })
        .collect();
    let merged = merge(&parts);
    assert_close("o", &merged.o, &whole.o);
    assert_close("lse", &merged.lse, &whole.lse);
    assert_eq!(merge(&parts[1..2]), parts[1], "nothing visible stays zero and -inf");
    assert_ne!(merge(&parts[..3]).o, whole.o);
}

#[test]
fn dropout_mask_is_a_fixed_function_of_global_coordinates() {
    let p = 0.25;
    let n = 40_000;
    let kept = (0..n).filter(|i| keep(9, i % 8, i / 8 % 100, i / 800, p)).count();
    assert!((kept as f64 / n as f64 - 0.75).abs() < 0.01, "{kept}");
    // Each coordinate and the seed matter.
    let bits = |seed, h, q0: usize, k0: usize| -> Vec<bool> {
        (0..64).map(|i| keep(seed, h, q0 + i / 8, k0 + i % 8, 0.5)).collect()
    };
    let base = bits(1, 0, 0, 0);
    assert_eq!(base, bits(1, 0, 0, 0));
    for other in [bits(2, 0, 0, 0), bits(1, 1, 0, 0), bits(1, 0, 8, 0), bits(1, 0, 0, 8)] {
        assert_ne!(base, other);
    }
    assert!(keep(1, 2, 3, 4, 0.0));
    // Pinned: every other implementation of the mask has to give these bits.
    let golden: u64 = base.iter().enumerate().map(|(i, &b)| u64::from(b) << i).sum();
    assert_eq!(golden, 0x30b8_e669_ee3f_ea00, "{golden:#x}");
}

#[test]
fn dropout_scales_what_it_keeps_and_leaves_lse_alone() {
    let (s, p, seed) = (6, 0.4, 11);
    let [q, k, _] = qkv(8, (s, s), (2, 1), 3, 1);
    // With v the identity, o holds the probabilities themselves.
    let v = Mat::from_fn(s, s, |i, j| if i == j { 1.0 } else { 0.0 });
    let spec = AttnSpec::new(2, 1, 3, AttnMask::FULL);
    let (inputs, sequences) = (AttnInputs::new(&q, &k, &v), Sequences::batched(1, s, s));
    let plain = attention(&spec, &inputs, &sequences);
    let dropped = AttnSpec { dropout: Some(Dropout { p, seed }), ..spec };
    let got = attention(&dropped, &inputs, &sequences);
    let want = Mat::from_fn(s, 2 * s, |i, c| {
        if keep(seed, c / s, i, c % s, p) { plain.o.at(i, c) / (1.0 - p) } else { 0.0 }
    });
    assert_close("o", &got.o, &want);
    assert_eq!(got.lse, plain.lse);
    assert!(want.data.contains(&0.0));
}

#[test]
fn dropout_counts_rows_of_the_packed_tensors_not_of_the_sequence() {
    let (s, p, seed) = (8, 0.5, 3);
    let [q, k, _] = qkv(9, (2 * s, 2 * s + 1), (1, 1), 2, 1);
    // o holds the probabilities of each sequence's own keys.
    let v = Mat::from_fn(2 * s + 1, s, |i, j| if (i.max(1) - 1) % s == j { 1.0 } else { 0.0 });
    let dropout = Some(Dropout { p, seed });
    let spec = AttnSpec { dropout, ..AttnSpec::new(1, 1, 2, AttnMask::FULL) };
    // Keys start at row 1: one row of padding before them.
    let sequences = Sequences { q: vec![0..s, s..2 * s], kv: vec![1..s + 1, s + 1..2 * s + 1] };
    let out = attention(&spec, &AttnInputs::new(&q, &k, &v), &sequences);
    for i in 0..2 * s {
        for j in 0..s {
            let kept = keep(seed, 0, i, i / s * s + 1 + j, p);
            assert_eq!(out.o.at(i, j) > 0.0, kept, "{i} {j}");
        }
    }
}
