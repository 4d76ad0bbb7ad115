//! Times of attention on CUDA device 0, bf16, random inputs: causal, full and windowed masks,
//! several head dimensions, packed documents, softcap, bias and dropout. One JSON object a line,
//! both passes by each backend that the device has, and where there are such kernels gradients by
//! one (`hopper fused`) and the forward pass of the same numbers as e4m3 by FP8 products (`hopper
//! fp8`) and widened (`widened fp8`); rates count the pairs that the mask shows.
//!
//! `cargo run --release -p tilewire-ops --example rates attention [SEQ ...] [dDIM] [Q/KV] [PASS]
//! [sustained]`, for causal masks of those lengths alone, Q and KV heads of DIM columns, the pass
//! `forward` or `backward`.

use tilewire_core::{DType, Error, Result, ScaleLayout, Shape};
use tilewire_device::cuda::CudaContext;
use tilewire_device::{Device, Stream, Tensor};
use tilewire_ops::attention::{
    AttentionDesc, AttentionPlan, AttnBackend, AttnGrads, AttnInputs, AttnMask, AttnOperand,
    AttnOut, AttnSaved, BiasShape, Dropout, HeadScales, Sequences,
};
use tilewire_ops::quant::{QuantDesc, QuantInputs, QuantPlan};

use crate::{Launch, Turn, normal, take_turns};

/// One mask and shape.
#[derive(Clone, Copy)]
struct Case {
    seq: usize,
    /// Rows of each of the documents that the rows are of.
    document: usize,
    /// Query and key heads.
    heads: (usize, usize),
    dim: usize,
    mask: AttnMask,
    /// Its name, and the keys that each query sees at most.
    name: &'static str,
    window: usize,
    /// Softcap, bias or dropout, if any.
    extra: &'static str,
}

const CAUSAL: Case = Case {
    seq: 16384,
    document: 16384,
    heads: (32, 8),
    dim: 128,
    mask: AttnMask::CAUSAL,
    name: "causal",
    window: usize::MAX,
    extra: "",
};

const fn causal(seq: usize) -> Case {
    Case { seq, document: seq, ..CAUSAL }
}

fn cases() -> Vec<Case> {
    let mut all: Vec<Case> = [512, 1024, 2048, 4096, 8192, 16384, 32768].map(causal).to_vec();
    all.extend([
        Case { mask: AttnMask::FULL, name: "full", ..CAUSAL },
        Case { dim: 64, ..CAUSAL },
        Case { dim: 64, ..causal(2048) },
        Case { dim: 256, heads: (16, 4), ..causal(8192) },
        Case {
            mask: AttnMask::window(1023, 0),
            name: "window of 1024",
            window: 1024,
            dim: 64,
            heads: (64, 8),
            ..causal(32768)
        },
    ]);
    for extra in ["softcap", "bias", "dropout"] {
        all.extend([Case { extra, ..causal(4096) }, Case { extra, dim: 64, ..causal(8192) }]);
    }
    all.extend([64, 128, 256, 1024, 8192].map(|document| Case { document, ..causal(32768) }));
    all
}

pub(crate) fn main() -> Result<()> {
    let ctx = CudaContext::new(0)?;
    let words: Vec<String> = std::env::args().skip(2).collect();
    let seqs: Vec<usize> = words.iter().filter_map(|w| w.parse().ok()).collect();
    let mut cases = if seqs.is_empty() { cases() } else { seqs.into_iter().map(causal).collect() };
    if let Some(dim) = words.iter().find_map(|w| w.strip_prefix('d')?.parse().ok()) {
        cases.iter_mut().for_each(|c| c.dim = dim);
    }
    let heads = words.iter().find_map(|w| {
        let (q, kv) = w.split_once('/')?;
        Some((q.parse().ok()?, kv.parse().ok()?))
    });
    if let Some(heads) = heads {
        cases.iter_mut().for_each(|c| c.heads = heads);
    }
    let pass = words.iter().find(|w| ["forward", "backward"].contains(&&***w));
    cases.iter().try_for_each(|c| bench(&ctx, c, pass.map(String::as_str)))
}

impl Case {
    fn desc(&self) -> Result<AttentionDesc> {
        let ends: Vec<usize> = (0..=self.seq).step_by(self.document).collect();
        Ok(AttentionDesc {
            sequences: Sequences::packed(&ends, &ends)?,
            softcap: (self.extra == "softcap").then_some(30.0),
            bias: self.bias(),
            dropout: (self.extra == "dropout").then_some(Dropout { p: 0.1, seed: 7 }),
            ..AttentionDesc::new(self.seq, self.heads, self.dim, DType::BF16, self.mask)
        })
    }

    /// One for all heads.
    fn bias(&self) -> Option<BiasShape> {
        let all = BiasShape { heads: 1, sq: self.seq, skv: self.seq };
        (self.extra == "bias").then_some(all)
    }

    /// Of the two products of the forward pass. A causal mask counts half of its square.
    fn flops(&self) -> f64 {
        let len = self.document as f64;
        let pairs = match self.name {
            "full" => len * len,
            "causal" => len * len / 2.0,
            _ => len * self.window as f64 - (self.window * self.window) as f64 / 2.0,
        };
        4.0 * pairs * (self.seq / self.document * self.dim * self.heads.0) as f64
    }
}

/// Heads that there are FP8 products for.
const FP8_DIM: usize = 128;

/// FP8 products, of scales of 128 rows, and widened codes, of a scale for each row.
const FP8: [(&str, HeadScales, ScaleLayout); 2] = [
    ("hopper fp8", HeadScales::Block128, ScaleLayout::Block128x128),
    ("widened fp8", HeadScales::Token, ScaleLayout::Block1x128),
];

fn fp8_plan(case: &Case, scales: HeadScales) -> Result<AttentionPlan> {
    let desc = AttentionDesc { dtype: DType::F8E4M3, scales, ..case.desc()? };
    AttentionPlan::with_backend(desc, None, AttnBackend::Hopper)
}

/// The same numbers as e4m3, with the scales of a layout.
fn fp8_inputs(stream: &Stream, x: &AttnInputs, layout: ScaleLayout) -> Result<AttnInputs> {
    let coded = |o: &AttnOperand| -> Result<AttnOperand> {
        let (seq, width) = (o.data.shape().dims()[0], o.data.shape().num_elems());
        let desc = QuantDesc::new(seq, width / seq, o.data.dtype(), DType::F8E4M3, layout);
        let plan = QuantPlan::new(desc, None)?;
        plan.prepare(stream)?;
        let x = o.data.reshape(Shape::d2(desc.rows, desc.cols))?;
        let done = plan.launch(stream, QuantInputs::new(&desc, &x)?)?.wait()?;
        let q = done.row.ok_or_else(|| Error::internal("rows were asked for"))?;
        let heads = width / seq / FP8_DIM;
        let scales = Shape::d2(q.scales.shape().num_elems() / heads, heads);
        Ok(AttnOperand { data: q.data, scales: Some(q.scales.reshape(scales)?) })
    };
    Ok(AttnInputs::new(coded(&x.q)?, coded(&x.k)?, coded(&x.v)?))
}

/// Times all passes, or that of a name.
fn bench(ctx: &CudaContext, case: &Case, pass: Option<&str>) -> Result<()> {
    let (stream, device) = (Stream::on(ctx)?, Device::Cuda(ctx.clone()));
    let Case { seq, dim, heads, .. } = *case;
    let desc = case.desc()?;
    let plan = AttentionPlan::with_backend(desc.clone(), None, AttnBackend::Portable)?;
    let hopper = AttentionPlan::with_backend(desc.clone(), None, AttnBackend::Hopper)?;
    let hopper = hopper.without_fused_backward();
    let fused = AttentionPlan::with_backend(desc.clone(), None, AttnBackend::Hopper)?;
    let fused = fused.with_fused_backward();
    let unordered = AttentionPlan::with_backend(desc, None, AttnBackend::Hopper)?;
    let unordered = unordered.with_unordered_backward();
    plan.prepare(&stream)?;
    let random =
        |heads: usize| normal(ctx, &stream, seq, heads * dim)?.reshape(Shape::d3(seq, heads, dim));
    let bias =
        case.bias().map(|b| Tensor::zeros_on(&device, DType::F32, Shape::d3(b.heads, b.sq, b.skv)));
    let x = AttnInputs::new(random(heads.0)?, random(heads.1)?, random(heads.1)?);
    let x = AttnInputs { bias: bias.transpose()?, ..x };
    let d_out = random(heads.0)?;
    let empty = |dtype, shape| Tensor::zeros(dtype, shape).to(&device);
    let like = |h: usize| empty(DType::BF16, Shape::d3(seq, h, dim));
    let (out, lse) = (like(heads.0)?, empty(DType::F32, Shape::d2(heads.0, seq))?);
    let grads = AttnGrads::new(like(heads.0)?, like(heads.1)?, like(heads.1)?);
    let fits = FP8_DIM == dim && case.extra.is_empty();
    let coded = FP8.iter().filter(|_| fits).map(|(name, scales, layout)| {
        Ok((name, fp8_plan(case, *scales)?, fp8_inputs(&stream, &x, *layout)?))
    });
    let coded = coded.collect::<Result<Vec<_>>>()?;
    let fwd = |plan: &AttentionPlan, x: &AttnInputs| {
        let out = AttnOut { out: out.clone(), lse: lse.clone() };
        plan.launch_fwd(&stream, x, out).map(drop)
    };
    let bwd = |plan: &AttentionPlan| {
        let saved = AttnSaved { out: out.clone(), lse: lse.clone(), d_out: d_out.clone() };
        plan.launch_bwd(&stream, &x, saved, grads.clone()).map(drop)
    };
    let portable = AttnBackend::Portable;
    let mut turns = vec![Turn::new(portable, "forward", Box::new(|| fwd(&plan, &x)) as Launch<'_>)];
    match hopper.prepare(&stream) {
        Err(e) if e.is_unsupported() => {}
        r => {
            r?;
            turns.push(Turn::new(AttnBackend::Hopper, "forward", Box::new(|| fwd(&hopper, &x))));
            turns.push(Turn::new(AttnBackend::Hopper, "backward", Box::new(|| bwd(&hopper))));
        }
    }
    // All gradients by one kernel, where there is one.
    match fused.prepare(&stream) {
        Err(e) if e.is_unsupported() => {}
        r => {
            r?;
            turns.push(Turn::new("hopper fused", "backward", Box::new(|| bwd(&fused))));
            unordered.prepare(&stream)?;
            turns.push(Turn::new("hopper unordered", "backward", Box::new(|| bwd(&unordered))));
        }
    }
    for (name, plan, x) in &coded {
        match plan.prepare(&stream) {
            Err(e) if e.is_unsupported() => {}
            r => {
                r?;
                turns.push(Turn::new(*name, "forward", Box::new(move || fwd(plan, x))));
            }
        }
    }
    turns.push(Turn::new(portable, "backward", Box::new(|| bwd(&plan))));
    turns.retain(|t| pass.is_none_or(|pass| t.explain == pass));
    // Gradients are of this output, whatever is timed.
    fwd(&plan, &x)?;
    take_turns(ctx, &stream, &mut turns)?;
    for t in turns {
        let (us, backend, pass) = (t.median(), &t.by, &t.explain);
        let products = if pass == "forward" { 1.0 } else { 2.5 };
        let tflops = case.flops() * products / us / 1e6;
        println!(
            "{{\"device\":\"{}\",\"work\":\"attention\",\"seq\":{seq},\"document\":{},\
             \"heads\":\"{}/{}\",\"dim\":{dim},\"mask\":\"{}\",\"extra\":\"{}\",\"pass\":\"{pass}\",\
             \"backend\":\"{backend}\",\"us\":{us:.1},\"tflops\":{tflops:.1}{}}}",
            ctx.name()?,
            case.document,
            heads.0,
            heads.1,
            case.name,
            case.extra,
            t.beside(),
        );
    }
    Ok(())
}
