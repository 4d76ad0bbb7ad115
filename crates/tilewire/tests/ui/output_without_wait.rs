use tilewire::ops::gemm::{GemmInputs, GemmPlan};
use tilewire::prelude::*;

fn product(plan: &GemmPlan, stream: &Stream, t: GemmInputs) -> Result<Vec<f32>> {
    // The output is reachable only through `wait` or `join`.
    plan.launch(stream, t)?.out.to_vec()
}

fn main() {}
