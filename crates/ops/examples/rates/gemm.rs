//! Times of GEMM on CUDA device 0, by cuBLASLt, by the core for sm_90a and by the portable kernel,
//! and what a team of no peers would see: medians of 20 runs after a warm-up, random inputs, bf16.
//! One JSON object a line.
//!
//! `cargo run --release -p tilewire-ops --example rates gemm [M,N,K ...]`.

use tilewire_core::{DType, Result, Rng, Shape};
use tilewire_device::cuda::{CudaContext, CudaEvent};
use tilewire_device::{Device, Queue, Stream, Tensor};
use tilewire_ops::gemm::{
    AOrder, Activation, BOrder, Epilogue, GemmBackend, GemmDesc, GemmInputs, GemmPlan,
};

const RUNS: usize = 20;

pub(crate) fn main() -> Result<()> {
    let ctx = CudaContext::new(0)?;
    let shape = |a: String| {
        let v: Vec<usize> = a.split(',').filter_map(|x| x.parse().ok()).collect();
        <[usize; 3]>::try_from(v).ok()
    };
    let mut shapes: Vec<[usize; 3]> = std::env::args().skip(2).filter_map(shape).collect();
    if shapes.is_empty() {
        shapes = vec![[4096; 3], [8192; 3], [512, 512, 65536], [64, 4096, 4096]];
    }
    for s in shapes {
        bench(&ctx, s)?;
    }
    Ok(())
}

fn bench(ctx: &CudaContext, [m, n, k]: [usize; 3]) -> Result<()> {
    let device = Device::Cuda(ctx.clone());
    let stream = Stream::on(ctx)?;
    let mut rng = Rng::new(1);
    let few: Vec<f32> = (0..65_521).map(|_| rng.normal()).collect();
    let random = |rows: usize, cols: usize| -> Result<Tensor> {
        // Normal numbers repeat after a while: what they are matters to power, not to time.
        let v: Vec<f32> = (0..rows * cols).map(|i| few[i % few.len()]).collect();
        Tensor::from_f32(&v, DType::BF16, Shape::d2(rows, cols))?.to(&device)
    };
    let (a, b) = (random(m, k)?, random(n, k)?);
    let accumulate = Epilogue { accumulate: true, ..Epilogue::NONE };
    let fused = |activation| Epilogue { bias: true, activation, ..Epilogue::NONE };
    let nt = GemmDesc::nt(m, n, k, DType::BF16);
    let kinds = [
        ("fprop nt -> bf16", nt),
        ("dgrad nn -> bf16", GemmDesc { b_order: BOrder::Kn, ..nt }),
        (
            "wgrad tn += f32",
            GemmDesc {
                a_order: AOrder::Km,
                b_order: BOrder::Kn,
                out: DType::F32,
                epilogue: accumulate,
                ..nt
            },
        ),
        ("nt + bias -> bf16", GemmDesc { epilogue: fused(Activation::None), ..nt }),
        ("gelu(nt + bias) -> bf16", GemmDesc { epilogue: fused(Activation::Gelu), ..nt }),
        ("swiglu(nt + bias) -> bf16", GemmDesc { epilogue: fused(Activation::SwiGlu), ..nt }),
    ];
    for (name, desc) in kinds {
        // The same memory, read in another order.
        let place = |t: &Tensor, turned: bool, rows: usize| {
            t.reshape(if turned { Shape::d2(k, rows) } else { Shape::d2(rows, k) })
        };
        let a = place(&a, desc.a_order == AOrder::Km, m)?;
        let b = place(&b, desc.b_order == BOrder::Kn, n)?;
        let cols = desc.epilogue.activation.out_cols(n);
        let out = Tensor::zeros(desc.out, Shape::d2(m, cols)).to(&device)?;
        let bias = Tensor::zeros(DType::F32, Shape::d1(n)).to(&device)?;
        for backend in [GemmBackend::CublasLt, GemmBackend::Hopper, GemmBackend::Portable] {
            let plan = GemmPlan::with_backend(desc, backend)?;
            let start = std::time::Instant::now();
            match plan.prepare(&stream) {
                Err(e) if e.is_unsupported() || e.is_unavailable() => continue,
                r => r?,
            }
            let prepare_ms = start.elapsed().as_secs_f64() * 1e3;
            let launch = || {
                let bias = desc.epilogue.bias.then(|| bias.clone());
                let inputs =
                    GemmInputs { bias, ..GemmInputs::new(a.clone(), b.clone(), out.clone()) };
                plan.launch(&stream, inputs).map(drop)
            };
            let us = median(ctx, &stream, launch)?;
            let tflops = 2.0 * (m * n) as f64 * k as f64 / us / 1e6;
            // Which algorithm it is: one line, as it stands in a string.
            let explain =
                plan.explain().lines().last().unwrap_or_default().replace(['"', '\\'], "'");
            println!(
                "{{\"device\":\"{}\",\"work\":\"gemm\",\"m\":{m},\"n\":{n},\"k\":{k},\"pass\":\"{name}\",\
                 \"backend\":\"{backend}\",\"us\":{us:.1},\"tflops\":{tflops:.1},\
                 \"prepare_ms\":{prepare_ms:.1},\"explain\":\"{explain}\"}}",
                ctx.name()?
            );
        }
    }
    Ok(())
}

/// Median time of `launch` in microseconds.
pub(crate) fn median(
    ctx: &CudaContext,
    stream: &Stream,
    launch: impl Fn() -> Result<()>,
) -> Result<f64> {
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
