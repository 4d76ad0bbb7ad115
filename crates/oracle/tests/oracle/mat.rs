use tilewire_core::DType;
use tilewire_oracle::finite_diff::{max_rel_err, numeric_grad};
use tilewire_oracle::{Mat, matmul, matmul_abs};

use crate::rng;

#[test]
fn product_by_hand() {
    let a = Mat::new(2, 3, vec![1.0, -2.0, 3.0, 0.0, 4.0, -5.0]);
    let b = Mat::new(3, 2, vec![1.0, 2.0, -1.0, 0.0, 2.0, 1.0]);
    assert_eq!(matmul(&a, &b), Mat::new(2, 2, vec![9.0, 5.0, -14.0, -5.0]));
    assert_eq!(matmul_abs(&a, &b), Mat::new(2, 2, vec![9.0, 5.0, 14.0, 5.0]));
}

#[test]
fn empty_contraction_is_plus_zero() {
    let d = matmul(&Mat::zeros(2, 0), &Mat::zeros(0, 3));
    assert_eq!((d.rows, d.cols), (2, 3));
    assert!(d.data.iter().all(|v| v.to_bits() == 0), "{:?}", d.data);
    assert!(Mat::zeros(0, 2).col_sums().iter().all(|v| v.to_bits() == 0));
}

#[test]
fn slices_and_stacks_are_inverse() {
    let x = Mat::random(&mut rng(1), 5, 7);
    assert_eq!(Mat::vstack(&[x.slice_rows(0..2), x.slice_rows(2..2), x.slice_rows(2..5)]), x);
    assert_eq!(Mat::hstack(&[x.slice_cols(0..3), x.slice_cols(3..7)]), x);
    assert_eq!(x.slice_rows(2..5).at(1, 4), x.at(3, 4));
    assert_eq!(x.slice_cols(3..7).at(1, 2), x.at(1, 5));
    assert_eq!(x.transpose().at(6, 4), x.at(4, 6));
    assert_eq!(x.transpose().transpose(), x);
}

#[test]
fn bytes_round_trip_and_rounding_is_nearest() {
    let x = Mat::random(&mut rng(2), 9, 4);
    assert_eq!(Mat::from_bytes(9, 4, DType::F32, &x.to_bytes(DType::F32)), x);
    let y = x.rounded(DType::BF16);
    assert_ne!(y, x);
    assert_eq!(y.rounded(DType::BF16), y);
    let u = DType::BF16.unit_roundoff();
    assert!(x.data.iter().zip(&y.data).all(|(x, y)| (x - y).abs() <= u * x.abs()));
}

#[test]
fn random_is_reproducible_and_ints_cover_their_range() {
    assert_eq!(Mat::random(&mut rng(3), 4, 4), Mat::random(&mut rng(3), 4, 4));
    let ints = Mat::random_ints(&mut rng(4), 40, 40, 2);
    for want in [-2.0, -1.0, 0.0, 1.0, 2.0] {
        assert!(ints.data.contains(&want), "{want} missing");
    }
    assert!(ints.data.iter().all(|v| v.abs() <= 2.0 && v.fract() == 0.0));
}

#[test]
fn sums_and_row_scales_by_hand() {
    let x = Mat::new(2, 2, vec![1.0, 2.0, 3.0, 4.0]);
    assert_eq!(x.col_sums(), [4.0, 6.0]);
    assert_eq!(x.scale_rows(&[2.0, -1.0]).data, [2.0, 4.0, -3.0, -4.0]);
    assert_eq!(x.dot(&x), 30.0);
}

#[test]
fn numeric_gradient_of_a_cubic_and_error_measure() {
    let x = Mat::new(1, 3, vec![0.5, -2.0, 3.0]);
    let grad = numeric_grad(&x, |x| x.data.iter().map(|v| v.powi(3)).sum());
    assert!(max_rel_err(&grad, &x.map(|v| 3.0 * v * v)) < 1e-8);
    assert!(max_rel_err(&grad, &x.map(|v| 3.0 * v)) > 0.1);
    assert!(max_rel_err(&x.map(|_| f64::NAN), &x).is_infinite());
}

#[test]
#[should_panic(expected = "inner extents differ")]
fn wrong_shapes_panic() {
    matmul(&Mat::zeros(2, 3), &Mat::zeros(2, 3));
}
