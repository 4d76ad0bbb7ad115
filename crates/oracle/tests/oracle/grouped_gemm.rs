use tilewire_oracle::gemm::{Gemm, gemm};
use tilewire_oracle::grouped_gemm::{
    Accumulate, Tail, grouped_dbias, grouped_dgrad, grouped_fprop, grouped_wgrad, mask_from_bitmap,
};
use tilewire_oracle::{Mat, matmul};

use crate::{assert_close, assert_grad, rng};

const N: usize = 3;
const K: usize = 4;

const SPLITS: [&[usize]; 5] = [&[3], &[2, 0, 3], &[0, 0], &[0, 4, 1, 0], &[1, 1, 1]];
const CAPACITY: usize = 7;

struct Case {
    splits: &'static [usize],
    x: Mat,
    dy: Mat,
    bias: Mat,
    w: Vec<Mat>,
}

fn cases() -> Vec<Case> {
    let mut r = rng(1);
    SPLITS
        .iter()
        .map(|&splits| Case {
            splits,
            x: Mat::random(&mut r, CAPACITY, K),
            dy: Mat::random(&mut r, CAPACITY, N),
            bias: Mat::random(&mut r, splits.len(), N),
            w: splits.iter().map(|_| Mat::random(&mut r, N, K)).collect(),
        })
        .collect()
}

#[test]
fn each_expert_is_a_plain_gemm_and_the_tail_obeys_the_flag() {
    for case in cases() {
        let before = Mat::random(&mut rng(2), CAPACITY, N);
        let kept = grouped_fprop(
            &case.x,
            &case.w,
            Some(&case.bias),
            case.splits,
            Tail::Untouched(&before),
        );
        let zeroed = grouped_fprop(&case.x, &case.w, Some(&case.bias), case.splits, Tail::Zero);
        let mut start = 0;
        for (e, &n) in case.splits.iter().enumerate() {
            let x = case.x.slice_rows(start..start + n);
            let want = gemm(&Gemm { bias: Some(case.bias.row(e)), ..Gemm::new(&x, &case.w[e]) }).d;
            assert_eq!(kept.slice_rows(start..start + n), want);
            assert_eq!(zeroed.slice_rows(start..start + n), want);
            start += n;
        }
        assert_eq!(kept.slice_rows(start..CAPACITY), before.slice_rows(start..CAPACITY));
        assert_eq!(zeroed.slice_rows(start..CAPACITY), Mat::zeros(CAPACITY - start, N));
    }
}

#[test]
fn gradients() {
    for case in cases() {
        let Case { splits, x, dy, bias, w } = &case;
        let loss =
            |x: &Mat, w: &[Mat], b: &Mat| grouped_fprop(x, w, Some(b), splits, Tail::Zero).dot(dy);
        assert_grad("dx", &grouped_dgrad(dy, w, splits, Tail::Zero), x, |x| loss(x, w, bias));
        assert_grad("db", &grouped_dbias(dy, splits), bias, |b| loss(x, w, b));
        let stacked = Mat::vstack(w);
        let unstack = |s: &Mat| -> Vec<Mat> {
            (0..w.len()).map(|e| s.slice_rows(e * N..(e + 1) * N)).collect()
        };
        let dw = Mat::vstack(&grouped_wgrad(x, dy, splits, None));
        assert_grad("dw", &dw, &stacked, |s| loss(x, &unstack(s), bias));
    }
}

#[test]
fn garbage_beyond_the_splits_does_not_spread() {
    for case in cases() {
        let rows: usize = case.splits.iter().sum();
        let poison = |m: &Mat| {
            Mat::from_fn(m.rows, m.cols, |r, c| if r < rows { m.at(r, c) } else { f64::NAN })
        };
        let (x, dy) = (poison(&case.x), poison(&case.dy));
        let splits = case.splits;
        assert_eq!(
            grouped_fprop(&x, &case.w, None, splits, Tail::Zero),
            grouped_fprop(&case.x, &case.w, None, splits, Tail::Zero)
        );
        assert_eq!(
            grouped_wgrad(&x, &dy, splits, None),
            grouped_wgrad(&case.x, &case.dy, splits, None)
        );
        assert_eq!(grouped_dbias(&dy, splits), grouped_dbias(&case.dy, splits));
        assert_eq!(
            grouped_dgrad(&dy, &case.w, splits, Tail::Zero),
            grouped_dgrad(&case.dy, &case.w, splits, Tail::Zero)
        );
    }
}

#[test]
fn mask_chooses_between_adding_and_overwriting() {
    let mut r = rng(3);
    let (x, dy) = (Mat::random(&mut r, CAPACITY, K), Mat::random(&mut r, CAPACITY, N));
    let splits = [2, 0, 0, 3];
    let mask = [true, true, false, false];
    let mut c: Vec<Mat> = (0..4).map(|_| Mat::random(&mut r, N, K)).collect();
    c[1].data[0] = -0.0;
    // What is overwritten must not be read.
    c[2] = c[2].map(|_| f64::NAN);
    c[3] = c[3].map(|_| f64::NAN);
    let got = grouped_wgrad(&x, &dy, &splits, Some(Accumulate { c: &c, mask: &mask }));
    let dw = |rows: std::ops::Range<usize>| {
        matmul(&dy.slice_rows(rows.clone()).transpose(), &x.slice_rows(rows))
    };
    assert_close("added", &got[0], &dw(0..2).add(&c[0]));
    let bits = |m: &Mat| m.data.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&got[1]), bits(&c[1]), "empty and accumulating: untouched");
    assert_eq!(bits(&got[2]), vec![0; N * K], "empty and overwriting: exact zeros");
    assert_close("overwritten", &got[3], &dw(2..5));
}

#[test]
fn bitmap_words() {
    let mask = mask_from_bitmap(&[0b101, 1 << 1], 35);
    let set: Vec<usize> = (0..35).filter(|&e| mask[e]).collect();
    assert_eq!(set, [0, 2, 33]);
}

#[test]
#[should_panic(expected = "8 rows in a buffer of 7")]
fn splits_beyond_the_capacity_panic() {
    grouped_dbias(&Mat::zeros(7, 1), &[4, 4]);
}
