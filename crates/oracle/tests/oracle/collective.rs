use tilewire_oracle::collective::{
    ReduceOp, ag_gemm, all_gather, all_reduce, all_to_all, all_to_all_uneven, broadcast, gemm_ar,
    gemm_rs, reduce_scatter,
};
use tilewire_oracle::{Mat, matmul};

use crate::{assert_close, rng};

/// One element for each row, so that a row tells where it came from.
fn tags(values: &[f64]) -> Mat {
    Mat::new(values.len(), 1, values.to_vec())
}

#[test]
fn gather_and_broadcast_by_hand() {
    let x = [tags(&[1.0]), tags(&[]), tags(&[2.0, 3.0])];
    assert_eq!(all_gather(&x), vec![tags(&[1.0, 2.0, 3.0]); 3]);
    assert_eq!(broadcast(&x, 2), vec![tags(&[2.0, 3.0]); 3]);
}

#[test]
fn reductions_by_hand() {
    let x = [tags(&[1.0, -4.0, 2.0]), tags(&[3.0, 6.0, 0.0])];
    let got = |op| all_reduce(&x, op);
    assert_eq!(got(ReduceOp::Sum), vec![tags(&[4.0, 2.0, 2.0]); 2]);
    assert_eq!(got(ReduceOp::Avg), vec![tags(&[2.0, 1.0, 1.0]); 2]);
    assert_eq!(got(ReduceOp::Max), vec![tags(&[3.0, 6.0, 2.0]); 2]);
    assert_eq!(got(ReduceOp::Min), vec![tags(&[1.0, -4.0, 0.0]); 2]);
    assert_eq!(reduce_scatter(&x, &[1, 2], ReduceOp::Sum), [tags(&[4.0]), tags(&[2.0, 2.0])]);
    assert_eq!(reduce_scatter(&x, &[3, 0], ReduceOp::Avg), [tags(&[2.0, 1.0, 1.0]), tags(&[])]);
}

#[test]
fn all_to_all_by_hand() {
    // Row "sd" goes from rank s to rank d.
    let even = [tags(&[0.0, 1.0, 2.0]), tags(&[10.0, 11.0, 12.0]), tags(&[20.0, 21.0, 22.0])];
    let want = [tags(&[0.0, 10.0, 20.0]), tags(&[1.0, 11.0, 21.0]), tags(&[2.0, 12.0, 22.0])];
    assert_eq!(all_to_all(&even), want);
    let uneven = [tags(&[1.0, 1.0]), tags(&[10.0, 10.0, 11.0])];
    let splits = [vec![0, 2], vec![2, 1]];
    assert_eq!(all_to_all_uneven(&uneven, &splits), [tags(&[10.0, 10.0]), tags(&[1.0, 1.0, 11.0])]);
}

#[test]
fn reduce_scatter_is_the_adjoint_of_all_gather() {
    let mut r = rng(1);
    let rows = [2, 0, 3, 1];
    let x: Vec<_> = rows.iter().map(|&n| Mat::random(&mut r, n, 3)).collect();
    let y: Vec<_> = rows.iter().map(|_| Mat::random(&mut r, 6, 3)).collect();
    let inner = |a: &[Mat], b: &[Mat]| a.iter().zip(b).map(|(a, b)| a.dot(b)).sum::<f64>();
    let (lhs, rhs) =
        (inner(&all_gather(&x), &y), inner(&x, &reduce_scatter(&y, &rows, ReduceOp::Sum)));
    assert!((lhs - rhs).abs() < 1e-12, "{lhs} {rhs}");
}

#[test]
fn transposed_splits_undo_all_to_all() {
    let mut r = rng(2);
    for n in 1..6 {
        let splits: Vec<Vec<usize>> =
            (0..n).map(|_| (0..n).map(|_| r.below(4) as usize).collect()).collect();
        let back: Vec<Vec<usize>> =
            (0..n).map(|d| splits.iter().map(|row| row[d]).collect()).collect();
        let x: Vec<_> = splits.iter().map(|s| Mat::random(&mut r, s.iter().sum(), 2)).collect();
        assert_eq!(all_to_all_uneven(&all_to_all_uneven(&x, &splits), &back), x);
    }
}

#[test]
fn fused_forms_equal_the_global_product() {
    let mut r = rng(3);
    let (x, w) = (Mat::random(&mut r, 6, 8), Mat::random(&mut r, 5, 8));
    let y = matmul(&x, &w.transpose());
    let rows = |m: &Mat, cuts: &[usize]| -> Vec<Mat> {
        cuts.windows(2).map(|c| m.slice_rows(c[0]..c[1])).collect()
    };
    let cols = |m: &Mat, cuts: &[usize]| -> Vec<Mat> {
        cuts.windows(2).map(|c| m.slice_cols(c[0]..c[1])).collect()
    };
    let got = ag_gemm(&rows(&x, &[0, 1, 4, 6]), &rows(&w, &[0, 2, 2, 5]));
    assert_close("ag_gemm", &Mat::hstack(&got), &y);
    let (xs, ws) = (cols(&x, &[0, 3, 4, 8]), cols(&w, &[0, 3, 4, 8]));
    assert_close("gemm_rs", &Mat::vstack(&gemm_rs(&xs, &ws, &[2, 3, 1])), &y);
    assert_eq!(gemm_rs(&xs, &ws, &[2, 3, 1])[1].rows, 3);
    for part in gemm_ar(&xs, &ws) {
        assert_close("gemm_ar", &part, &y);
    }
}
