//! Times of GEMM on CUDA device 0, by cuBLASLt's first choice and by the fastest of its first 16
//! algorithms, by the core for sm_90a and by the portable kernel: medians of 20 runs after a
//! warm-up, the card at rest before each turn and the order turned round once; random inputs, bf16.
//! One JSON object a line.
//!
//! `cargo run --release -p tilewire-ops --example rates gemm [M,N,K ...]`.

use std::thread;
use std::time::Duration;

use tilewire_core::{DType, Result, Shape};
use tilewire_device::cuda::{
    CublasLt, CudaContext, CudaEvent, CudaMemory, LtAlgo, LtDesc, LtProduct,
};
use tilewire_device::{Buffer, Device, Queue, Stream, Tensor};
use tilewire_ops::gemm::{
    AOrder, Activation, BOrder, Epilogue, GemmBackend, GemmDesc, GemmInputs, GemmPlan,
};

use crate::{Launch, normal};

const RUNS: usize = 20;
const REST: Duration = Duration::from_millis(80);
/// Algorithms of cuBLASLt that are tried, and the workspace that each may have.
const ALGOS: usize = 16;
const WORKSPACE_BYTES: usize = 32 << 20;
const SHAPES: [[usize; 3]; 10] = [
    [4096, 4096, 4096],
    [8192, 8192, 8192],
    [8192, 7168, 8192],
    [8192, 8192, 3584],
    [4096, 7168, 8192],
    [2048, 7168, 8192],
    [8192, 6144, 12288],
    [8192, 12288, 6144],
    [512, 512, 65536],
    [64, 4096, 4096],
];

pub(crate) fn main() -> Result<()> {
    let ctx = CudaContext::new(0)?;
    let shape = |a: String| {
        let v: Vec<usize> = a.split(',').filter_map(|x| x.parse().ok()).collect();
        <[usize; 3]>::try_from(v).ok()
    };
    let given: Vec<[usize; 3]> = std::env::args().skip(2).filter_map(shape).collect();
    let shapes = if given.is_empty() { &SHAPES[..] } else { &given };
    shapes.iter().try_for_each(|s| bench(&ctx, *s))
}

fn kinds([m, n, k]: [usize; 3]) -> Vec<(&'static str, GemmDesc)> {
    let added = Epilogue { accumulate: true, ..Epilogue::NONE };
    let fused = |activation| Epilogue { bias: true, activation, ..Epilogue::NONE };
    let nt = GemmDesc::nt(m, n, k, DType::BF16);
    let nn = GemmDesc { b_order: BOrder::Kn, ..nt };
    let tn = GemmDesc { a_order: AOrder::Km, ..nn };
    vec![
        ("nt -> bf16", nt),
        ("nn -> bf16", nn),
        ("tn -> bf16", tn),
        ("tn += f32", GemmDesc { out: DType::F32, epilogue: added, ..tn }),
        ("nt + bias -> bf16", GemmDesc { epilogue: fused(Activation::None), ..nt }),
        ("gelu(nt + bias) -> bf16", GemmDesc { epilogue: fused(Activation::Gelu), ..nt }),
        ("swiglu(nt + bias) -> bf16", GemmDesc { epilogue: fused(Activation::SwiGlu), ..nt }),
    ]
}

/// One way to a product, and the best of its medians.
struct Turn<'a> {
    by: String,
    explain: String,
    launch: Launch<'a>,
    us: f64,
}

fn bench(ctx: &CudaContext, shape @ [m, n, k]: [usize; 3]) -> Result<()> {
    let device = Device::Cuda(ctx.clone());
    let stream = Stream::on(ctx)?;
    let (a, b) = (normal(ctx, &stream, m, k)?, normal(ctx, &stream, n, k)?);
    for (name, desc) in kinds(shape) {
        // The same memory, read in another order.
        let place = |t: &Tensor, turned: bool, rows: usize| {
            t.reshape(if turned { Shape::d2(k, rows) } else { Shape::d2(rows, k) })
        };
        let a = place(&a, desc.a_order == AOrder::Km, m)?;
        let b = place(&b, desc.b_order == BOrder::Kn, n)?;
        let cols = desc.epilogue.activation.out_cols(n);
        let out = Tensor::zeros_on(&device, desc.out, Shape::d2(m, cols))?;
        let bias = Tensor::zeros_on(&device, DType::F32, Shape::d1(n))?;
        let mut turns = Vec::new();
        for backend in [GemmBackend::CublasLt, GemmBackend::Hopper, GemmBackend::Portable] {
            let plan = GemmPlan::with_backend(desc, backend)?;
            match plan.prepare(&stream) {
                Err(e) if e.is_unsupported() || e.is_unavailable() => continue,
                r => r?,
            }
            // One line, as it stands in a string.
            let explain =
                plan.explain().lines().last().unwrap_or_default().replace(['"', '\\'], "'");
            let (stream, a, b, out, bias) = (&stream, &a, &b, &out, &bias);
            let launch: Launch<'_> = Box::new(move || {
                let bias = desc.epilogue.bias.then(|| bias.clone());
                let inputs =
                    GemmInputs { bias, ..GemmInputs::new(a.clone(), b.clone(), out.clone()) };
                plan.launch(stream, inputs).map(drop)
            });
            turns.push(Turn { by: backend.to_string(), explain, launch, us: f64::INFINITY });
            if backend == GemmBackend::CublasLt {
                turns.push(fastest(ctx, stream, &desc, [a, b, out])?);
            }
        }
        for _ in 0..2 {
            for t in &mut turns {
                thread::sleep(REST);
                t.us = t.us.min(median(ctx, &stream, &*t.launch)?);
            }
            turns.reverse();
        }
        for Turn { by, explain, us, .. } in turns {
            let tflops = 2.0 * (m * n) as f64 * k as f64 / us / 1e6;
            println!(
                "{{\"device\":\"{}\",\"work\":\"gemm\",\"m\":{m},\"n\":{n},\"k\":{k},\"pass\":\"{name}\",\
                 \"backend\":\"{by}\",\"us\":{us:.1},\"tflops\":{tflops:.1},\
                 \"explain\":\"{explain}\"}}",
                ctx.name()?
            );
        }
    }
    Ok(())
}

/// The fastest of cuBLASLt's first algorithms for a product, by a first pass of a few runs each.
fn fastest<'a>(
    ctx: &CudaContext,
    stream: &'a Stream,
    d: &GemmDesc,
    [a, b, out]: [&'a Tensor; 3],
) -> Result<Turn<'a>> {
    let lib = CublasLt::on(ctx)?;
    let (a_turned, b_turned) = (d.a_order == AOrder::Km, d.b_order == BOrder::Kn);
    let desc = LtDesc {
        n: d.n,
        k: d.k,
        dtype: d.a,
        out: d.out,
        a_turned,
        b_turned,
        bias: d.epilogue.bias,
    };
    let product = LtProduct {
        m: d.m,
        a: (a.cuda()?.addr(), if a_turned { d.m } else { d.k }),
        b: (b.cuda()?.addr(), if b_turned { d.n } else { d.k }),
        d: (out.cuda()?.addr(), d.n),
        bias: 0,
        accumulate: d.epilogue.accumulate,
    };
    let workspace = CudaMemory::zeroed(ctx, WORKSPACE_BYTES)?;
    let launch = |algo: &LtAlgo| {
        // SAFETY: the tensors have the shapes of the product and live as long as what is returned;
        // nothing else runs on the device.
        unsafe { lib.launch(stream.cuda()?, (&desc, &product), algo, Some(&workspace)) }
    };
    let mut best: Option<(f64, usize, LtAlgo)> = None;
    let algos = lib.algos(&desc, &product, (16, workspace.len_bytes()), ALGOS)?;
    for (i, algo) in algos.into_iter().enumerate() {
        thread::sleep(REST / 4);
        match median_of(5, ctx, stream, || launch(&algo)) {
            Ok(us) if best.as_ref().is_none_or(|b| us < b.0) => best = Some((us, i, algo)),
            Err(e) if !e.is_unsupported() => return Err(e),
            _ => {}
        }
    }
    let (_, i, algo) = best.ok_or_else(|| {
        tilewire_core::Error::internal("cuBLASLt has an algorithm, and none of the first runs")
    })?;
    let explain = format!("number {i} of cuBLASLt's first {ALGOS} algorithms, from 0");
    let launch: Launch<'a> = Box::new(move || {
        // SAFETY: as above.
        unsafe { lib.launch(stream.cuda()?, (&desc, &product), &algo, Some(&workspace)) }
    });
    Ok(Turn { by: "cublaslt best of 16".to_owned(), explain, launch, us: f64::INFINITY })
}

/// Median time of `launch` in microseconds.
pub(crate) fn median(
    ctx: &CudaContext,
    stream: &Stream,
    launch: impl Fn() -> Result<()>,
) -> Result<f64> {
    median_of(RUNS, ctx, stream, launch)
}

fn median_of(
    runs: usize,
    ctx: &CudaContext,
    stream: &Stream,
    launch: impl Fn() -> Result<()>,
) -> Result<f64> {
    let s = stream.cuda()?;
    (0..runs.div_ceil(4)).try_for_each(|_| launch())?;
    let mut us = Vec::new();
    for _ in 0..runs {
        let (a, b) = (CudaEvent::new(ctx, true)?, CudaEvent::new(ctx, true)?);
        s.record(&a)?;
        launch()?;
        s.record(&b)?;
        stream.synchronize()?;
        us.push(b.us_since(&a)?);
    }
    us.sort_by(f64::total_cmp);
    Ok(us[runs / 2])
}
