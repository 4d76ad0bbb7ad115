//! Backward passes of comm+GEMM as operations, against the oracle: the gradient of one is the
//! other.

mod table;

use table::*;
use tilewire_core::*;
use tilewire_device::Tensor;
use tilewire_ops::ag_gemm::*;
use tilewire_ops::bulk::*;
use tilewire_ops::collective::*;
use tilewire_ops::gemm::*;
use tilewire_ops::gemm_rs::*;
use tilewire_oracle::{Mat, collective as oracle, matmul};
use tilewire_symm::*;

const SIZE: usize = 3;

/// One matrix for each rank, the same on all ranks.
fn matrices(seed: u64, rows: usize, cols: usize) -> Vec<Mat> {
    let mut rng = Rng::new(seed);
    (0..SIZE).map(|_| Mat::random(&mut rng, rows, cols).rounded(DType::F32)).collect()
}

fn tensor(m: &Mat) -> Tensor {
    Tensor::from_f32(&m.to_f32(), DType::F32, Shape::d2(m.rows, m.cols)).unwrap()
}

fn near(what: &str, got: &Tensor, want: &Mat) {
    let got = got.to_f32().unwrap();
    assert_eq!(got.len(), want.data.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(&want.data).enumerate() {
        let good = (f64::from(*g) - w).abs() <= 1e-4 * (1.0 + w.abs());
        assert!(good, "{what}: element {i} is {g} and not {w}");
    }
}

fn wgrad(m: usize, n: usize, k: usize) -> GemmDesc {
    let orders = GemmDesc::nt(n, k, m, DType::F32);
    GemmDesc { a_order: AOrder::Km, b_order: BOrder::Kn, ..orders }
}

/// y_r = all_gather(x) w_r^T. dx = reduce_scatter(dy_r w_r) is `gemm_rs`, dw_r = dy_r^T
/// all_gather(x) a product beside nothing: the forward pass has kept what it gathered.
#[test]
fn gradients_of_ag_gemm_are_those_of_the_oracle() {
    let (x, w, dy) = (matrices(1, M / SIZE, K), matrices(2, N, K), matrices(3, M, N));
    World::run_threads(SIZE, WorldCfg::for_tests(), |world| {
        let (team, heap, stream) = heap_of(&world, "ag")?;
        let me = team.rank().idx();
        let plan = AgGemmPlan::new(AgGemmDesc::new(M, N, K, DType::F32), &heap, None)?;
        plan.prepare(&stream)?;
        let kept = out(M, K);
        let t = AgGemmInputs::new(tensor(&x[me]), tensor(&w[me]), out(M, N));
        let t = AgGemmInputs { gathered: Some(kept.clone()), ..t };
        plan.launch(&stream, M, t)?.join(&stream)?;
        let desc = GemmRsDesc { w_order: BOrder::Kn, ..GemmRsDesc::new(M, K, N, DType::F32) };
        let dgrad = GemmRsPlan::new(desc, &heap, None)?;
        dgrad.prepare(&stream)?;
        let dx = out(M / SIZE, K);
        let t = GemmRsInputs::new(tensor(&dy[me]), tensor(&w[me]), dx.clone());
        dgrad.launch(&stream, M, t)?.join(&stream)?;
        let (product, dw) = (GemmPlan::new(wgrad(M, N, K))?, out(N, K));
        product.prepare(&stream)?;
        let t = GemmInputs::new(tensor(&dy[me]), &kept, dw.clone());
        product.launch(&stream, t)?.join(&stream)?;
        finish(&stream, &team)?;
        let parts: Vec<Mat> = (0..SIZE).map(|r| matmul(&dy[r], &w[r])).collect();
        let want = oracle::reduce_scatter(&parts, &[M / SIZE; SIZE], oracle::ReduceOp::Sum);
        near("dx", &dx, &want[me]);
        near("dw", &dw, &matmul(&dy[me].transpose(), &Mat::vstack(&x)));
        team.agree(true).map(|_| ())
    })
    .unwrap();
}

/// y = reduce_scatter(x_r w_r^T). dx_r = all_gather(dy) w_r is `ag_gemm`, and dw_r =
/// all_gather(dy)^T x_r.
#[test]
fn gradients_of_gemm_rs_are_those_of_the_oracle() {
    let (x, w, dy) = (matrices(4, M, K), matrices(5, N, K), matrices(6, M / SIZE, N));
    World::run_threads(SIZE, WorldCfg::for_tests(), |world| {
        let (team, heap, stream) = heap_of(&world, "rs")?;
        let me = team.rank().idx();
        let desc = AgGemmDesc { w_order: BOrder::Kn, ..AgGemmDesc::new(M, K, N, DType::F32) };
        let dgrad = AgGemmPlan::new(desc, &heap, None)?;
        dgrad.prepare(&stream)?;
        let (dx, all, dw) = (out(M, K), out(M, N), out(N, K));
        let t = AgGemmInputs::new(tensor(&dy[me]), tensor(&w[me]), dx.clone());
        let t = AgGemmInputs { gathered: Some(all.clone()), ..t };
        dgrad.launch(&stream, M, t)?.join(&stream)?;
        let product = GemmPlan::new(wgrad(M, N, K))?;
        product.prepare(&stream)?;
        let t = GemmInputs::new(&all, tensor(&x[me]), dw.clone());
        product.launch(&stream, t)?.join(&stream)?;
        finish(&stream, &team)?;
        let dy = Mat::vstack(&dy);
        near("dx", &dx, &matmul(&dy, &w[me]));
        near("dw", &dw, &matmul(&dy.transpose(), &x[me]));
        team.agree(true).map(|_| ())
    })
    .unwrap();
}

/// What a backward pass overlaps: the reduce-scatter of dx beside the product for dw.
#[test]
fn a_reduce_scatter_beside_a_wgrad_is_that_of_the_oracle() {
    let (x, dy, dx) = (matrices(7, M, K), matrices(8, M, N), matrices(9, M, K));
    World::run_threads(SIZE, WorldCfg::for_tests(), |world| {
        let (team, heap, stream) = heap_of(&world, "bulk")?;
        let me = team.rank().idx();
        let kind = CollectiveKind::ReduceScatter(tilewire_ops::Shards::Even, ReduceOp::Sum);
        let scatter = CollectiveDesc { kind, m: M, cols: K, dtype: DType::F32 };
        let plan = BulkPlan::new(wgrad(M, N, K), scatter, &heap)?;
        plan.prepare(&stream)?;
        let want = oracle::reduce_scatter(&dx, &[M / SIZE; SIZE], oracle::ReduceOp::Sum);
        for _ in 0..3 {
            let gemm = GemmInputs::new(tensor(&dy[me]), tensor(&x[me]), out(N, K));
            let t = BulkInputs { gemm, m: M, x: tensor(&dx[me]), y: out(M / SIZE, K) };
            let done = plan.launch(&stream, t)?.wait()?;
            near("dw", &done.gemm, &matmul(&dy[me].transpose(), &x[me]));
            near("dx", &done.collective, &want[me]);
        }
        team.agree(true).map(|_| ())
    })
    .unwrap();
}

/// Two teams of the same ranks exchange tokens at once, on streams of their own: each has its own
/// rows.
#[test]
fn two_teams_of_experts_at_once_do_not_mix() {
    World::run_threads(SIZE, WorldCfg::for_tests(), |world| {
        let place = (world.rank().idx(), SIZE);
        let teams = [heap_of(&world, "one")?, heap_of(&world, "two")?];
        let (name, make) = OPS[0];
        assert_eq!(name, "ep");
        let ops = [make(&teams[0].1, &teams[0].2, true)?, make(&teams[1].1, &teams[1].2, true)?];
        for round in 0..20 {
            for (i, op) in ops.iter().enumerate() {
                fill(op, 2 * round + i as u64)?;
            }
            for (op, (_, _, stream)) in ops.iter().zip(&teams) {
                (op.launch)(stream)?;
            }
            for (op, (team, _, stream)) in ops.iter().zip(&teams) {
                finish(stream, team)?;
                assert_eq!(expected::differs(name, op, place)?, None, "round {round}");
            }
        }
        teams[0].0.agree(true).map(|_| ())
    })
    .unwrap();
}
