//! Cases of the local GEMM: layouts, dtypes, epilogues.

use tilewire::core::numerics::Bound;
use tilewire::core::{QTensor, ScaleLayout};
use tilewire::ops::gemm::{
    AOrder, Activation, BOrder, Epilogue, GemmDesc, GemmInputs, GemmPlan, Operand,
};
use tilewire::prelude::*;
use tilewire_oracle::Mat;
use tilewire_oracle::gemm as oracle;
use tilewire_oracle::quant::{QuantSpec, dequantize, quantize};

use super::ctx::tensor;
use super::{CORE, Case, Ctx};

const VARIANTS: [&str; 9] =
    ["plain", "bias", "relu", "gelu", "swiglu", "dgelu", "dswiglu", "accumulate", "bgrad"];

pub(super) fn cases() -> Vec<Case> {
    let mut v = Vec::new();
    for variant in VARIANTS {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let shape = [("m", 33), ("n", 26), ("k", 47)];
            v.push(Case::new(format!("gemm/{variant}"), dtype, &shape, run));
        }
    }
    for dtype in [DType::F8E4M3, DType::F8E5M2] {
        v.push(Case::new("gemm/fp8", dtype, &[("m", 130), ("n", 140), ("k", 150)], run_fp8));
    }
    // Rows that cuBLASLt takes, if the heap is on a GPU that has it.
    for variant in ["plain", "accumulate", "bgrad"] {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let shape = [("m", 72), ("n", 136), ("k", 264)];
            v.push(Case::new(format!("gemm/{variant}"), dtype, &shape, run));
        }
    }
    // More rows than a tile, and tails of everything.
    for (variant, dtypes) in VARIANTS.iter().map(|v| (v, [DType::BF16, DType::F16])) {
        let num = if *variant == "plain" { 2 } else { 1 };
        for dtype in &dtypes[..num] {
            let shape = [("m", 136), ("n", 272), ("k", 72)];
            v.push(Case::new(format!("gemm/{variant}{CORE}"), *dtype, &shape, run));
        }
    }
    for (m, n, k) in [(1, 1, 1), (1, 64, 64), (64, 1, 3), (7, 9, 0)] {
        v.push(Case::new("gemm/plain", DType::F32, &[("m", m), ("n", n), ("k", k)], run));
    }
    v
}

fn to_oracle(act: Activation) -> oracle::Activation {
    match act {
        Activation::Relu => oracle::Activation::Relu,
        Activation::Gelu | Activation::DGelu => oracle::Activation::Gelu,
        Activation::SwiGlu | Activation::DSwiGlu => oracle::Activation::SwiGlu,
        Activation::None => oracle::Activation::None,
    }
}

fn epilogue(variant: &str) -> Epilogue {
    let activation = match variant {
        "relu" => Activation::Relu,
        "gelu" => Activation::Gelu,
        "swiglu" => Activation::SwiGlu,
        "dgelu" => Activation::DGelu,
        "dswiglu" => Activation::DSwiGlu,
        _ => Activation::None,
    };
    Epilogue {
        bias: matches!(variant, "bias" | "gelu" | "swiglu"),
        activation,
        aux: matches!(variant, "relu" | "gelu" | "swiglu"),
        accumulate: variant == "accumulate",
        bgrad: variant == "bgrad",
    }
}

/// Largest slope of the activation at the values seen: what turns an error of the
/// pre-activation into one of the output.
fn amplify(act: Activation, aux: &Mat, mag: &Mat) -> f64 {
    let most = |m: &Mat| m.data.iter().fold(1.0f64, |a, &b| a.max(b.abs()));
    match act {
        Activation::None | Activation::Relu => 1.0,
        Activation::Gelu | Activation::DGelu => 1.2,
        Activation::SwiGlu => 1.2 * most(mag),
        Activation::DSwiGlu => 1.2 * most(aux),
    }
}

fn run(ctx: &mut Ctx, case: &Case) -> Result<()> {
    let (m, n, k, dtype) = (case.dim("m"), case.dim("n"), case.dim("k"), case.dtype);
    let variant = case.op.split('/').nth(1).unwrap_or("plain");
    let e = epilogue(variant);
    // What is right is the same however operands are stored.
    let (a, b) = (ctx.random(m, k, dtype), ctx.random(n, k, dtype));
    let bias = ctx.random(1, n, DType::F32);
    let aux_in = ctx.random(m, e.activation.aux_cols(n), dtype);
    let c = ctx.random(m, n, dtype);
    let w = want(e, (&a, &b), &bias, &aux_in, &c);
    for (a_order, b_order) in [
        (AOrder::Mk, BOrder::Nk),
        (AOrder::Mk, BOrder::Kn),
        (AOrder::Km, BOrder::Nk),
        (AOrder::Km, BOrder::Kn),
    ] {
        if case.by_core() && (a_order, b_order) == (AOrder::Km, BOrder::Nk) {
            continue;
        }
        let desc = GemmDesc { a_order, b_order, epilogue: e, ..GemmDesc::nt(m + 3, n, k, dtype) };
        let plan = GemmPlan::with_backend(desc, case.gemm_backend())?;
        plan.prepare(&ctx.stream)?;
        let out_shape = Shape::d2(m, e.activation.out_cols(n));
        let aux_shape = Shape::d2(m, e.activation.aux_cols(n));
        let stored = |x: &Mat, t: bool| tensor(&if t { x.transpose() } else { x.clone() }, dtype);
        let inputs = ctx.place(GemmInputs {
            a: stored(&a, a_order == AOrder::Km)?.into(),
            b: stored(&b, b_order == BOrder::Kn)?.into(),
            bias: e
                .bias
                .then(|| Tensor::from_f32(&bias.to_f32(), DType::F32, Shape::d1(n)))
                .transpose()?,
            aux_in: e.activation.reads_aux().then(|| tensor(&aux_in, dtype)).transpose()?,
            out: if e.accumulate { tensor(&c, dtype)? } else { Tensor::poisoned(dtype, out_shape) },
            aux_out: e.aux.then(|| Tensor::poisoned(dtype, aux_shape)),
            bgrad: e.bgrad.then(|| Tensor::poisoned(DType::F32, Shape::d1(m))),
        })?;
        let (aux_out, bgrad) = (inputs.aux_out.clone(), inputs.bgrad.clone());
        let out = ctx.timed(|s| plan.launch(s, inputs))?;
        ctx.compare(&case.op, &out, &w.d, &w.d_mag, &Bound::local(dtype, k))?;
        if let Some(aux) = aux_out {
            ctx.compare("aux", &aux, &w.aux, &w.z_mag, &Bound::local(dtype, k))?;
        }
        if let Some(g) = bgrad {
            let sums = |f: fn(f64) -> f64| {
                Mat::from_rows(m, 1, |i, out| out[0] = a.row(i).iter().map(|v| f(*v)).sum())
            };
            let (sums, mag) = (sums(|v| v), sums(f64::abs));
            ctx.compare("bgrad", &g, &sums, &mag, &Bound::local(DType::F32, k))?;
        }
    }
    Ok(())
}

/// The oracle's results, and the magnitudes of the error bound.
struct Want {
    d: Mat,
    aux: Mat,
    d_mag: Mat,
    z_mag: Mat,
}

fn want(e: Epilogue, (a, b): (&Mat, &Mat), bias: &Mat, aux_in: &Mat, c: &Mat) -> Want {
    let g = oracle::Gemm {
        bias: e.bias.then_some(&bias.data[..]),
        act: match e.activation.reads_aux() {
            true => oracle::Activation::None,
            false => to_oracle(e.activation),
        },
        c: e.accumulate.then_some(c),
        ..oracle::Gemm::new(a, b)
    };
    let oracle::GemmOut { d, aux } = oracle::gemm(&g);
    let z_mag = g.magnitude().map(|v| v + 2.0);
    let d = match e.activation.reads_aux() {
        true => oracle::activate_bwd(to_oracle(e.activation), aux_in, &d),
        false => d,
    };
    let slope = amplify(e.activation, aux_in, &z_mag);
    let most = z_mag.data.iter().fold(0.0f64, |x, &y| x.max(y)) * slope;
    let d_mag = if e.activation == Activation::None { z_mag.clone() } else { d.map(|_| most) };
    Want { d, aux, d_mag, z_mag }
}

fn quantised(q: &QTensor) -> Result<Operand> {
    let data = Tensor::over(tilewire::device::Memory::from_bytes(&q.data), 0, q.dtype, q.shape)?;
    let n = q.scales.len() / q.layout.dtype().size();
    let scales = Tensor::over(
        tilewire::device::Memory::from_bytes(&q.scales),
        0,
        q.layout.dtype(),
        Shape::d1(n),
    )?;
    Ok(Operand { data, scales: Some((scales, q.layout)) })
}

/// FP8 with every scale layout, both operand types, against the product of the dequantised.
fn run_fp8(ctx: &mut Ctx, case: &Case) -> Result<()> {
    let (m, n, k) = (case.dim("m"), case.dim("n"), case.dim("k"));
    for layout in [
        ScaleLayout::Tensor,
        ScaleLayout::Block1x128,
        ScaleLayout::Block128x128,
        ScaleLayout::Mx1x32,
        ScaleLayout::Mx1x32Swizzled,
    ] {
        let (a, b) = (ctx.random(m, k, DType::F32), ctx.random(n, k, DType::F32));
        let qa = quantize(&a, QuantSpec::new(case.dtype, layout));
        let qb = quantize(&b, QuantSpec::new(DType::F8E4M3, layout));
        let (da, db) = (dequantize(&qa), dequantize(&qb));
        let desc =
            GemmDesc { a: case.dtype, b: DType::F8E4M3, ..GemmDesc::nt(m, n, k, case.dtype) };
        let plan = GemmPlan::new(desc)?;
        plan.prepare(&ctx.stream)?;
        let out = Tensor::poisoned(DType::BF16, Shape::d2(m, n));
        let inputs = ctx.place(GemmInputs::new(quantised(&qa)?, quantised(&qb)?, out))?;
        let out = ctx.timed(|s| plan.launch(s, inputs))?;
        let g = oracle::Gemm::new(&da, &db);
        let (want, mag) = (oracle::gemm(&g).d, g.magnitude());
        ctx.compare(&case.op, &out, &want, &mag, &Bound::local(DType::BF16, k))?;
    }
    Ok(())
}
