//! Times of GEMM on CUDA device 0, by cuBLASLt's first choice and by the fastest of its first 16
//! algorithms, by the core for sm_90a and by the portable kernel; random inputs, bf16. One JSON
//! object a line.
//!
//! `cargo run --release -p tilewire-ops --example rates gemm [PASS ...] [M,N,K ...] [sustained]`,
//! for the passes that begin with one of these words, `nt`, `tn +=` or `gelu`, or all of them.

use std::sync::Arc;

use tilewire_core::{DType, Error, Result, Shape};
use tilewire_device::cuda::{CublasLt, CudaContext, CudaMemory, LtAlgo, LtDesc, LtProduct};
use tilewire_device::{Buffer, Device, Stream, Tensor};
use tilewire_ops::gemm::{
    AOrder, Activation, BOrder, Epilogue, GemmBackend, GemmDesc, GemmInputs, GemmPlan,
};

use crate::{Launch, Turn, normal, take_turns, times};

/// Algorithms of cuBLASLt that are tried.
const ALGOS: usize = 16;
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
    let given: Vec<[usize; 3]> = std::env::args().skip(2).filter_map(shape).collect();
    let shapes = if given.is_empty() { &SHAPES[..] } else { &given };
    shapes.iter().try_for_each(|s| bench(&ctx, *s))
}

/// A shape of the command line.
pub(crate) fn shape(a: String) -> Option<[usize; 3]> {
    let v: Vec<usize> = a.split(',').filter_map(|x| x.parse().ok()).collect();
    v.try_into().ok()
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

/// Whether a pass is asked for by a word in front of this rest of its name: `nt` is `nt -> bf16`,
/// while `nt + bias -> bf16` is asked for by more of it.
fn ends(rest: &str) -> bool {
    rest.is_empty() || rest.starts_with([' ', '(']) && !rest.starts_with(" +")
}

fn bench(ctx: &CudaContext, shape @ [m, n, k]: [usize; 3]) -> Result<()> {
    let device = Device::Cuda(ctx.clone());
    let stream = Stream::on(ctx)?;
    let (a, b) = (normal(ctx, &stream, m, k)?, normal(ctx, &stream, n, k)?);
    let all = kinds(shape);
    let words: Vec<String> =
        std::env::args().skip(2).filter(|a| !a.contains(',') && a != "sustained").collect();
    let is = |name: &str, w: &String| name.strip_prefix(w.as_str()).is_some_and(ends);
    if let Some(odd) = words.iter().find(|w| !all.iter().any(|(name, _)| is(name, w))) {
        let names: Vec<_> = all.iter().map(|(name, _)| *name).collect();
        return Err(Error::invalid("which pass?").expected(names.join(", ")).seen(odd));
    }
    let asked = |name: &str| words.is_empty() || words.iter().any(|w| is(name, w));
    for (name, desc) in all.into_iter().filter(|(name, _)| asked(name)) {
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
            let Some(explain) = prepared(&stream, &plan)? else { continue };
            let (stream, a, b, out, bias) = (&stream, &a, &b, &out, &bias);
            let launch: Launch<'_> = Box::new(move || {
                let bias = desc.epilogue.bias.then(|| bias.clone());
                let inputs =
                    GemmInputs { bias, ..GemmInputs::new(a.clone(), b.clone(), out.clone()) };
                plan.launch(stream, inputs).map(drop)
            });
            turns.push(Turn::new(backend, explain, launch));
            if backend == GemmBackend::CublasLt {
                turns.push(fastest(ctx, stream, &desc, [a, b, out])?);
            }
        }
        take_turns(ctx, &stream, &mut turns)?;
        for t in turns {
            let (us, by, explain) = (t.median(), &t.by, &t.explain);
            let tflops = 2.0 * (m * n) as f64 * k as f64 / us / 1e6;
            println!(
                "{{\"device\":\"{}\",\"work\":\"gemm\",\"m\":{m},\"n\":{n},\"k\":{k},\"pass\":\"{name}\",\
                 \"backend\":\"{by}\",\"us\":{us:.1},\"tflops\":{tflops:.1},\
                 \"explain\":\"{explain}\"{}}}",
                ctx.name()?,
                t.beside(),
            );
        }
    }
    Ok(())
}

/// How a plan computes; none where its backend cannot.
pub(crate) fn prepared(stream: &Stream, plan: &GemmPlan) -> Result<Option<String>> {
    match plan.prepare(stream) {
        Err(e) if e.is_unsupported() || e.is_unavailable() => return Ok(None),
        r => r?,
    }
    // One line, as it stands in a string.
    let explain = plan.explain().lines().last().unwrap_or_default().replace(['"', '\\'], "'");
    Ok(Some(explain))
}

/// The fastest of cuBLASLt's first algorithms for a product, by a first pass of a few runs each.
pub(crate) fn fastest<'a>(
    ctx: &CudaContext,
    stream: &'a Stream,
    d: &GemmDesc,
    operands: [&Tensor; 3],
) -> Result<Turn<'a>> {
    let workspace = lt_workspace(ctx)?;
    let mut best: Option<(f64, usize, Lt)> = None;
    for (i, lt) in Lt::all(ctx, d, operands, &workspace, ALGOS)?.into_iter().enumerate() {
        match times(ctx, stream, 5, || lt.launch(stream)).map(|us| us[2..].iter().sum::<f64>()) {
            Ok(us) if best.as_ref().is_none_or(|b| us < b.0) => best = Some((us, i, lt)),
            Err(e) if !e.is_unsupported() => return Err(e),
            _ => {}
        }
    }
    let (_, i, lt) =
        best.ok_or_else(|| Error::internal("no algorithm of cuBLASLt makes the product"))?;
    let explain = format!("number {i} of cuBLASLt's first {ALGOS} algorithms, from 0");
    Ok(Turn::new("cublaslt best of 16", explain, Box::new(move || lt.launch(stream))))
}

/// One product by one of cuBLASLt's algorithms.
pub(crate) struct Lt {
    lib: Arc<CublasLt>,
    desc: LtDesc,
    product: LtProduct,
    algo: LtAlgo,
    workspace: CudaMemory,
    /// A, B and D stay as long as this does.
    _operands: [Tensor; 3],
}

pub(crate) fn lt_workspace(ctx: &CudaContext) -> Result<CudaMemory> {
    CudaMemory::zeroed(ctx, 32 << 20)
}

impl Lt {
    /// The product by each of the first `top` algorithms, of A, B and D without gaps.
    pub(crate) fn all(
        ctx: &CudaContext,
        d: &GemmDesc,
        [a, b, out]: [&Tensor; 3],
        workspace: &CudaMemory,
        top: usize,
    ) -> Result<Vec<Self>> {
        let lib = CublasLt::on(ctx)?;
        let (a_turned, b_turned) = (d.a_order == AOrder::Km, d.b_order == BOrder::Kn);
        let (n, k) = (d.n, d.k);
        let desc = LtDesc { n, k, dtype: d.a, out: d.out, a_turned, b_turned, bias: false };
        let product = LtProduct {
            m: d.m,
            a: (a.cuda()?.addr(), if a_turned { d.m } else { k }),
            b: (b.cuda()?.addr(), if b_turned { n } else { k }),
            d: (out.cuda()?.addr(), n),
            bias: 0,
            accumulate: d.epilogue.accumulate,
        };
        let algos = lib.algos(&desc, &product, (16, workspace.len_bytes()), top)?;
        let one = |algo| Self {
            lib: lib.clone(),
            desc,
            product,
            algo,
            workspace: workspace.clone(),
            _operands: [a.clone(), b.clone(), out.clone()],
        };
        Ok(algos.into_iter().map(one).collect())
    }

    pub(crate) fn launch(&self, stream: &Stream) -> Result<()> {
        let what = (&self.desc, &self.product);
        // SAFETY: the operands have these shapes and live as long as this, which ends behind the
        // stream's work; nothing else runs on the device.
        unsafe { self.lib.launch(stream.cuda()?, what, &self.algo, Some(&self.workspace)) }
    }
}
