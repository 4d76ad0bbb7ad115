use tilewire_oracle::Mat;
use tilewire_oracle::nn::{
    AdamW, AdamWState, IGNORE, RopeSpec, RopeStyle, adamw_step, clip_grad_norm, cross_entropy,
    cross_entropy_bwd, embedding, embedding_bwd, grad_norm, load_balancing_loss, rms_norm,
    rms_norm_bwd, rope, rope_bwd, router, router_bwd, softmax,
};
use tilewire_oracle::permute::TopK;

use crate::{assert_close, assert_grad, rng, vector};

#[test]
fn rms_norm_values_and_gradients() {
    // Mean square 12.5.
    let y = rms_norm(&Mat::new(1, 2, vec![3.0, 4.0]), &[1.0, 2.0], 0.0);
    assert_close("by hand", &y, &Mat::new(1, 2, vec![3.0, 8.0]).map(|v| v / 12.5f64.sqrt()));
    let mut r = rng(1);
    for (t, h) in [(1, 1), (3, 5), (4, 8)] {
        let (x, w) = (Mat::random(&mut r, t, h), Mat::random(&mut r, 1, h));
        let dy = Mat::random(&mut r, t, h);
        let eps = 0.01;
        let (dx, dw) = rms_norm_bwd(&x, &w.data, eps, &dy);
        assert_grad("dx", &dx, &x, |x| rms_norm(x, &w.data, eps).dot(&dy));
        assert_grad("dw", &vector(&dw), &w, |w| rms_norm(&x, &w.data, eps).dot(&dy));
    }
}

#[test]
fn rope_rotates_pairs_by_position() {
    let half = RopeSpec { head_dim: 4, base: 100.0, style: RopeStyle::HalfSplit };
    let inter = RopeSpec { style: RopeStyle::Interleaved, ..half };
    let x = Mat::new(1, 4, vec![1.0, 2.0, 3.0, 4.0]);
    // Frequencies 1 and 100^(-1/2) = 0.1, position 3.
    let (s0, c0, s1, c1) = (3f64.sin(), 3f64.cos(), 0.3f64.sin(), 0.3f64.cos());
    let want = vec![c0 - 3.0 * s0, 2.0 * c1 - 4.0 * s1, s0 + 3.0 * c0, 2.0 * s1 + 4.0 * c1];
    assert_close("half", &rope(&x, &[3], half), &Mat::new(1, 4, want));
    let want = vec![c0 - 2.0 * s0, s0 + 2.0 * c0, 3.0 * c1 - 4.0 * s1, 3.0 * s1 + 4.0 * c1];
    assert_close("interleaved", &rope(&x, &[3], inter), &Mat::new(1, 4, want));
    assert_eq!(rope(&x, &[0], half), x);
}

#[test]
fn rope_scores_depend_on_distance_and_gradients_match() {
    let mut r = rng(2);
    for style in [RopeStyle::HalfSplit, RopeStyle::Interleaved] {
        let spec = RopeSpec { head_dim: 6, base: 10_000.0, style };
        let (q, k) = (Mat::random(&mut r, 1, 6), Mat::random(&mut r, 1, 6));
        let score = |m, n| rope(&q, &[m], spec).dot(&rope(&k, &[n], spec));
        assert!((score(7, 3) - score(104, 100)).abs() < 1e-11);
        assert!((score(7, 3) - score(3, 7)).abs() > 1e-3);
        let (x, dy) = (Mat::random(&mut r, 4, 12), Mat::random(&mut r, 4, 12));
        let positions = [5, 0, 2, 9];
        assert_grad("dx", &rope_bwd(&dy, &positions, spec), &x, |x| {
            rope(x, &positions, spec).dot(&dy)
        });
    }
}

#[test]
fn embedding_looks_up_and_adds_back() {
    let mut r = rng(3);
    let (table, ids) = (Mat::random(&mut r, 5, 3), [4, 0, 4, 2]);
    let y = embedding(&table, &ids);
    assert_eq!((y.row(0), y.row(1), y.row(2)), (table.row(4), table.row(0), table.row(4)));
    let dy = Mat::random(&mut r, 4, 3);
    assert_grad("table", &embedding_bwd(&dy, &ids, 5), &table, |t| embedding(t, &ids).dot(&dy));
}

#[test]
fn cross_entropy_values_and_gradients() {
    let uniform = cross_entropy(&Mat::zeros(2, 8).map(|_| 1000.0), &[3, IGNORE]);
    assert!((uniform.loss - 8f64.ln()).abs() < 1e-12 && uniform.num_valid == 1);
    assert_eq!(uniform.per_token[1], 0.0);
    let sums: Vec<f64> = softmax(&Mat::random(&mut rng(4), 3, 9)).transpose().col_sums();
    assert!(sums.iter().all(|s| (s - 1.0).abs() < 1e-12));
    assert_eq!(cross_entropy(&Mat::zeros(2, 4), &[IGNORE; 2]).loss, 0.0);
    let mut r = rng(5);
    for targets in [vec![1], vec![0, IGNORE, 4, 2], vec![IGNORE, IGNORE]] {
        let x = Mat::random(&mut r, targets.len(), 5);
        let got = cross_entropy_bwd(&x, &targets, 1.7);
        assert_grad("dlogits", &got, &x, |x| 1.7 * cross_entropy(x, &targets).loss);
    }
}

#[test]
fn router_chooses_the_largest_and_renormalises() {
    let logits = Mat::new(2, 4, vec![0.0, 3.0, 1.0, 2.0, -0.0, 0.0, 0.0, 0.0]);
    let out = router(&logits, 2);
    assert_eq!(out.topk.idx, [1, 3, 0, 1], "equals: lower expert first");
    let e = std::f64::consts::E;
    let want = Mat::new(2, 2, vec![e / (e + 1.0), 1.0 / (e + 1.0), 0.5, 0.5]);
    assert_close("weights", &out.weights, &want);
}

#[test]
fn balancing_loss_is_one_when_uniform_and_e_when_collapsed() {
    let balanced = TopK::new(4, 1, vec![0, 1, 2, 3]);
    assert!((load_balancing_loss(&Mat::zeros(4, 4).map(|_| 0.25), &balanced) - 1.0).abs() < 1e-12);
    let collapsed = TopK::new(4, 1, vec![2; 4]);
    let certain = Mat::from_fn(4, 4, |_, e| if e == 2 { 1.0 } else { 0.0 });
    assert!((load_balancing_loss(&certain, &collapsed) - 4.0).abs() < 1e-12);
    // f = (3/4, 1/4), mean p = (0.6, 0.4): 2 (0.45 + 0.1).
    let p = Mat::new(2, 2, vec![0.7, 0.3, 0.5, 0.5]);
    let skewed = TopK::new(2, 2, vec![0, 1, 0, 0]);
    assert!((load_balancing_loss(&p, &skewed) - 1.1).abs() < 1e-12);
}

#[test]
fn router_gradients() {
    let mut r = rng(6);
    for (t, e, k) in [(1, 2, 1), (5, 4, 2), (4, 6, 3), (3, 3, 3)] {
        // Well-separated logits: a finite difference must not change the choice.
        let noise = Mat::random(&mut r, t, e);
        let logits =
            Mat::from_fn(t, e, |i, j| ((i * 3 + j * 5) % e) as f64 + 0.1 * noise.at(i, j).tanh());
        let d_weights = Mat::random(&mut r, t, k);
        let out = router(&logits, k);
        let got = router_bwd(&out, &d_weights, 0.9);
        assert_grad("dlogits", &got, &logits, |x| {
            let y = router(x, k);
            assert_eq!(y.topk, out.topk);
            y.weights.dot(&d_weights) + 0.9 * y.aux_loss
        });
    }
}

#[test]
fn adamw_two_steps_by_hand() {
    let opt = AdamW { lr: 0.1, beta1: 0.5, beta2: 0.75, eps: 0.0, weight_decay: 0.2 };
    let s = adamw_step(&opt, &AdamWState::new(vector(&[1.0, -2.0])), &vector(&[4.0, -1.0]));
    // Without history the bias-corrected step is the sign of the gradient.
    assert_close("step 1", &s.param, &vector(&[0.98 - 0.1, -1.96 + 0.1]));
    assert_eq!((s.m.data[0], s.v.data[0], s.step), (2.0, 4.0, 1));
    let s = adamw_step(&opt, &s, &vector(&[-2.0, 0.0]));
    // m = 0.5 * 2 - 0.5 * 2 = 0;  the second: m = -0.25, v = 0.1875, corrections 0.75 and 0.4375.
    let second = -1.86 * 0.98 + 0.1 * (0.25 / 0.75) / (0.1875f64 / 0.4375).sqrt();
    assert_close("step 2", &s.param, &vector(&[0.88 * 0.98, second]));
    let damped =
        adamw_step(&AdamW { eps: 4.0, ..opt }, &AdamWState::new(vector(&[0.0])), &vector(&[4.0]));
    assert_close("eps", &damped.param, &vector(&[-0.05]));
}

#[test]
fn clipping_limits_the_global_norm() {
    let grads = [vector(&[3.0]), vector(&[0.0, 4.0])];
    assert_eq!(grad_norm(&grads), 5.0);
    let (same, norm) = clip_grad_norm(&grads, 6.0);
    assert_eq!((same.as_slice(), norm), (grads.as_slice(), 5.0));
    let (cut, _) = clip_grad_norm(&grads, 1.0);
    assert!((grad_norm(&cut) - 1.0).abs() < 1e-6);
    assert!((cut[0].at(0, 0) / cut[1].at(0, 1) - 0.75).abs() < 1e-12, "direction kept");
}
