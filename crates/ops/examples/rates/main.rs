//! Rates of single operations on one GPU: `layers`, `gemm`, `grouped` or
//! `attention`.
//!
//! `cargo run --release -p tilewire-ops --example rates layers|gemm|grouped|attention [SHAPE ...]`

#![expect(clippy::print_stdout, reason = "a program that prints its results")]

mod attention;
mod gemm;
mod grouped;
mod layers;

use tilewire_core::{DType, Error, Result, Rng, Shape};
use tilewire_device::cuda::CudaContext;
use tilewire_device::{Device, Stream, Tensor};

/// What is timed.
type Launch<'a> = Box<dyn Fn() -> Result<()> + 'a>;

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        Some("layers") => layers::main(),
        Some("gemm") => gemm::main(),
        Some("grouped") => grouped::main(),
        Some("attention") => attention::main(),
        other => Err(Error::invalid("which rates?")
            .expected("`layers`, `gemm`, `grouped` or `attention`")
            .seen(other.unwrap_or("nothing"))),
    }
}

/// A matrix of normal numbers on the device. They repeat after some 4 million, copied there: what
/// they are matters to power, not to time, and a host makes them slowly.
fn normal(ctx: &CudaContext, stream: &Stream, rows: usize, cols: usize) -> Result<Tensor> {
    let first = (1usize << 22).div_ceil(cols).min(rows);
    let mut rng = Rng::new(1);
    let v: Vec<f32> = (0..first * cols).map(|_| rng.normal()).collect();
    let device = Device::Cuda(ctx.clone());
    let block = Tensor::from_f32(&v, DType::BF16, Shape::d2(first, cols))?.to(&device)?;
    let all = Tensor::zeros_on(&device, DType::BF16, Shape::d2(rows, cols))?;
    for at in (0..rows).step_by(first) {
        let num = first.min(rows - at);
        let (dst, src) = (all.rows(at, num)?.cuda()?, block.rows(0, num)?.cuda()?);
        stream.cuda()?.copy_memory(&dst, &src)?;
    }
    stream.synchronize()?;
    Ok(all)
}
