//! A column-parallel linear layer on four ranks: the all-gather hides behind the product.
//!
//! `cargo run --release --package tilewire --example ag_gemm`

use std::io::Write;

use tilewire::ops::ag_gemm::{AgGemmDesc, AgGemmInputs, AgGemmPlan};
use tilewire::prelude::*;

const M: usize = 512;
const N: usize = 256; // output features of each rank
const K: usize = 384;

fn main() -> Result<()> {
    let sums = World::run_threads(4, WorldCfg::default(), |world| {
        let team = world.everyone("tp")?;
        let desc = AgGemmDesc::new(M, N, K, DType::F32);
        let heap = team.heap(BackendKind::Host, HeapCfg::new(AgGemmPlan::memory(&desc) + 4096))?;
        let plan = AgGemmPlan::new(desc, &heap, None)?;
        let stream = Stream::new("main")?;
        plan.prepare(&stream)?;
        if team.rank().get() == 0 {
            write!(std::io::stdout(), "{}", plan.explain()).map_err(|e| Error::io("stdout", e))?;
        }
        let rows = M / team.size();
        let me = team.rank().get() as f32;
        let x = Tensor::from_slice(&vec![me + 1.0; rows * K], Shape::d2(rows, K))?;
        let w = Tensor::from_slice(&vec![1.0f32; N * K], Shape::d2(N, K))?;
        let out = Tensor::poisoned(DType::F32, Shape::d2(M, N));
        let y = plan.launch(&stream, M, AgGemmInputs::new(x, w, out))?.wait()?;
        Ok(y.out.to_vec::<f32>()?.iter().sum::<f32>())
    })?;
    // Rows of rank r hold (r + 1) * K everywhere.
    let want = (1 + 2 + 3 + 4) as f32 * K as f32 * (M / 4 * N) as f32;
    assert!(sums.iter().all(|s| *s == want), "{sums:?} for {want}");
    writeln!(std::io::stdout(), "all ranks hold the product: {want}")
        .map_err(|e| Error::io("stdout", e))
}
