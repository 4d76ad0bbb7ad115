use tilewire_oracle::gemm::{
    Activation, Gemm, activate, activate_bwd, dgelu, dgrad_dact, dsilu, gelu, gemm, linear_bwd,
    silu,
};
use tilewire_oracle::{Mat, matmul};

use crate::{assert_close, assert_grad, rng, vector};

const ALL: [Activation; 4] =
    [Activation::None, Activation::Relu, Activation::Gelu, Activation::SwiGlu];

#[test]
fn transpose_flags_select_the_operand() {
    let mut r = rng(1);
    let (a, b) = (Mat::random(&mut r, 3, 4), Mat::random(&mut r, 4, 5));
    let want = matmul(&a, &b);
    let (at, bt) = (a.transpose(), b.transpose());
    for (transa, transb) in [(false, false), (false, true), (true, false), (true, true)] {
        let (a, b) = (if transa { &at } else { &a }, if transb { &bt } else { &b });
        let g = Gemm { transa, transb, ..Gemm::new(a, b) };
        assert_eq!(gemm(&g).d, want, "{transa} {transb}");
        assert_close(
            "magnitude",
            &g.magnitude(),
            &matmul(&at.transpose().map(f64::abs), &bt.transpose().map(f64::abs)),
        );
    }
    let plain = Gemm::new(&a, &bt);
    assert_eq!(gemm(&plain).d, want, "the default is A B^T");
}

#[test]
fn known_values() {
    // The formulas in 40-digit decimal arithmetic.
    for (x, want_gelu, want_silu) in [
        (1.0, 0.841_191_990_608_276_7, 0.731_058_578_630_004_9),
        (-2.0, -0.045_402_305_912_224_98, -0.238_405_844_044_235_1),
        (0.5, 0.345_714_009_825_143_9, 0.311_229_665_600_927_3),
        (3.25, 3.248_431_372_855_252_5, 3.128_687_616_131_579_3),
    ] {
        assert!((gelu(x) - want_gelu).abs() < 1e-15, "gelu({x}) = {}", gelu(x));
        assert!((silu(x) - want_silu).abs() < 1e-15, "silu({x}) = {}", silu(x));
    }
    assert_eq!((dsilu(0.0), dgelu(0.0)), (0.5, 0.5));
}

#[test]
fn swiglu_gates_with_the_first_half() {
    let z = Mat::new(1, 4, vec![1.0, -3.0, 10.0, 100.0]);
    let d = activate(Activation::SwiGlu, &z);
    assert_eq!(d, Mat::new(1, 2, vec![silu(1.0) * 10.0, silu(-3.0) * 100.0]));
}

#[test]
fn bias_and_c_come_before_the_activation() {
    let (a, b) = (Mat::new(1, 1, vec![2.0]), Mat::new(2, 1, vec![1.0, -3.0]));
    let c = Mat::new(1, 2, vec![-10.0, 8.0]);
    let bias = [1.0, -1.0];
    let out =
        gemm(&Gemm { bias: Some(&bias), c: Some(&c), act: Activation::Relu, ..Gemm::new(&a, &b) });
    assert_eq!(out.aux.data, [-7.0, 1.0]);
    assert_eq!(out.d.data, [0.0, 1.0]);
}

#[test]
fn activation_gradients() {
    let mut r = rng(2);
    for act in ALL {
        for (rows, cols) in [(1, 2), (3, 8), (5, 6)] {
            let z = Mat::random(&mut r, rows, cols).map(|v| 2.0 * v);
            let d = Mat::random(&mut r, rows, act.out_cols(cols));
            let got = activate_bwd(act, &z, &d);
            assert_grad(&format!("{act:?}"), &got, &z, |z| activate(act, z).dot(&d));
        }
    }
}

#[test]
fn linear_gradients() {
    let mut r = rng(3);
    for (m, n, k) in [(1, 1, 1), (4, 3, 5), (6, 2, 3)] {
        let (x, w) = (Mat::random(&mut r, m, k), Mat::random(&mut r, n, k));
        let (b, dy) = (Mat::random(&mut r, 1, n), Mat::random(&mut r, m, n));
        let loss = |x: &Mat, w: &Mat, b: &Mat| {
            gemm(&Gemm { bias: Some(&b.data), ..Gemm::new(x, w) }).d.dot(&dy)
        };
        let g = linear_bwd(&x, &w, &dy);
        assert_grad("dx", &g.dx, &x, |x| loss(x, &w, &b));
        assert_grad("dw", &g.dw, &w, |w| loss(&x, w, &b));
        assert_grad("db", &vector(&g.db), &b, |b| loss(&x, &w, b));
    }
}

#[test]
fn fused_dgrad_is_the_gradient_of_activation_then_linear() {
    let mut r = rng(4);
    for act in ALL {
        let (m, n, n2) = (3, 4, 5);
        let z = Mat::random(&mut r, m, n);
        let b = Mat::random(&mut r, 1, n);
        let w = Mat::random(&mut r, n2, act.out_cols(n));
        let dy = Mat::random(&mut r, m, n2);
        let pre = |z: &Mat, b: &Mat| tilewire_oracle::gemm::add_bias(z, &b.data);
        let loss = |z: &Mat, b: &Mat| matmul(&activate(act, &pre(z, b)), &w.transpose()).dot(&dy);
        let (dz, bgrad) = dgrad_dact(act, &dy, &w, &pre(&z, &b));
        assert_grad(&format!("{act:?} dz"), &dz, &z, |z| loss(z, &b));
        assert_grad(&format!("{act:?} bgrad"), &vector(&bgrad), &b, |b| loss(&z, b));
    }
}
