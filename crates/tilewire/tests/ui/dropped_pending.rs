#![deny(unused_must_use)]
use tilewire::ops::gemm::{GemmInputs, GemmPlan};
use tilewire::prelude::*;

fn product(plan: &GemmPlan, stream: &Stream, t: GemmInputs) -> Result<()> {
    plan.launch(stream, t)?;
    Ok(())
}

fn main() {}
