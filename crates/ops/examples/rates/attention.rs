//! Times of attention on CUDA device 0: causal, bf16, 32 query and 8 key heads of 128.
//!
//! `cargo run --release -p tilewire-ops --example rates attention [SEQ ...]`. Medians of 20 runs
//! after a warm-up, random inputs; a causal mask counts half of the products. One JSON object a
//! line, the forward pass by each backend that the device has.

use tilewire_core::{DType, Result, Shape};
use tilewire_device::cuda::{CudaContext, CudaEvent};
use tilewire_device::{Device, Queue, Stream, Tensor};
use tilewire_ops::attention::{
    AttentionDesc, AttentionPlan, AttnBackend, AttnGrads, AttnInputs, AttnMask, AttnOut, AttnSaved,
};

use crate::normal;

const RUNS: usize = 20;
const HEADS: (usize, usize) = (32, 8);
const DIM: usize = 128;

pub(crate) fn main() -> Result<()> {
    let ctx = CudaContext::new(0)?;
    let seqs: Vec<usize> = std::env::args().skip(2).filter_map(|a| a.parse().ok()).collect();
    for seq in if seqs.is_empty() { vec![4096, 16384] } else { seqs } {
        bench(&ctx, seq)?;
    }
    Ok(())
}

fn bench(ctx: &CudaContext, seq: usize) -> Result<()> {
    let (stream, device) = (Stream::on(ctx)?, Device::Cuda(ctx.clone()));
    let desc = AttentionDesc::new(seq, HEADS, DIM, DType::BF16, AttnMask::CAUSAL);
    let plan = AttentionPlan::with_backend(desc.clone(), None, AttnBackend::Portable)?;
    plan.prepare(&stream)?;
    let random =
        |heads: usize| normal(ctx, &stream, seq, heads * DIM)?.reshape(Shape::d3(seq, heads, DIM));
    let x = AttnInputs::new(random(HEADS.0)?, random(HEADS.1)?, random(HEADS.1)?);
    let d_out = random(HEADS.0)?;
    let empty = |dtype, shape| Tensor::zeros(dtype, shape).to(&device);
    let like = |h: usize| empty(DType::BF16, Shape::d3(seq, h, DIM));
    let (out, lse) = (like(HEADS.0)?, empty(DType::F32, Shape::d2(HEADS.0, seq))?);
    let grads = AttnGrads::new(like(HEADS.0)?, like(HEADS.1)?, like(HEADS.1)?);
    let fwd = |plan: &AttentionPlan| {
        let out = AttnOut { out: out.clone(), lse: lse.clone() };
        plan.launch_fwd(&stream, &x, out).map(drop)
    };
    let bwd = || {
        let saved = AttnSaved { out: out.clone(), lse: lse.clone(), d_out: d_out.clone() };
        plan.launch_bwd(&stream, &x, saved, grads.clone()).map(drop)
    };
    // Two products of 2 S^2 d each, half of them visible.
    let flops = 2.0 * (seq * seq * DIM * HEADS.0) as f64;
    let report = |pass: &str, backend: AttnBackend, us: f64, products: f64| -> Result<()> {
        let tflops = flops * products / us / 1e6;
        println!(
            "{{\"device\":\"{}\",\"work\":\"attention\",\"seq\":{seq},\"pass\":\"{pass}\",\
             \"backend\":\"{backend}\",\"us\":{us:.1},\"tflops\":{tflops:.1}}}",
            ctx.name()?
        );
        Ok(())
    };
    report("forward", AttnBackend::Portable, median(ctx, &stream, || fwd(&plan))?, 1.0)?;
    let hopper = AttentionPlan::with_backend(desc, None, AttnBackend::Hopper)?;
    match hopper.prepare(&stream) {
        Err(e) if e.is_unsupported() => {}
        r => {
            r?;
            let us = median(ctx, &stream, || fwd(&hopper))?;
            report("forward", AttnBackend::Hopper, us, 1.0)?;
        }
    }
    report("backward", AttnBackend::Portable, median(ctx, &stream, bwd)?, 2.5)
}

/// Median time of `launch` in microseconds.
fn median(ctx: &CudaContext, stream: &Stream, launch: impl Fn() -> Result<()>) -> Result<f64> {
    let s = stream.cuda()?;
    (0..5).try_for_each(|_| launch())?;
    let mut us = Vec::new();
    for _ in 0..RUNS {
        let (a, b) = (CudaEvent::new(ctx, true)?, CudaEvent::new(ctx, true)?);
        s.record(&a)?;
        launch()?;
        s.record(&b)?;
        stream.synchronize()?;
        us.push(b.us_since(&a)?);
    }
    us.sort_by(f64::total_cmp);
    Ok(us[RUNS / 2])
}
