//! Times of grouped products on CUDA device 0: by the core for sm_90a, by the portable kernels, and
//! as one cuBLASLt product for each group, whose splits the host knows, by cuBLASLt's first choice;
//! random inputs, bf16. One JSON object a line.
//!
//! `cargo run --release -p tilewire-ops --example rates grouped [WAY ...] [GROUPS,ROWS,N,K ...]`.

use tilewire_core::{DType, Error, Result, Shape};
use tilewire_device::cuda::CudaContext;
use tilewire_device::{Device, Stream, Tensor};
use tilewire_ops::gemm::{AOrder, BOrder, Epilogue, GemmBackend, GemmDesc};
use tilewire_ops::grouped_gemm::{
    GroupedDesc, GroupedDgrad, GroupedFprop, GroupedGemmPlan, GroupedWgrad, Splits,
};

use crate::gemm::{Lt, lt_workspace};
use crate::{Launch, Turn, normal, take_turns};

/// Groups, rows of all of them, and features of the results and operands.
const SHAPES: [[usize; 4]; 6] = [
    [32, 32768, 4096, 7168],
    [32, 32768, 7168, 2048],
    [8, 32768, 4096, 7168],
    [32, 8192, 4096, 7168],
    [128, 16384, 2048, 5120],
    [64, 512, 4096, 7168],
];

/// Ways to the products.
const WAYS: [&str; 3] = ["hopper", "sequential", "portable"];

pub(crate) fn main() -> Result<()> {
    let ctx = CudaContext::new(0)?;
    let shape = |a: String| {
        let v: Vec<usize> = a.split(',').filter_map(|x| x.parse().ok()).collect();
        <[usize; 4]>::try_from(v).ok()
    };
    let given: Vec<[usize; 4]> = std::env::args().skip(2).filter_map(shape).collect();
    let only: Vec<String> = std::env::args().skip(2).filter(|a| !a.contains(',')).collect();
    for s in if given.is_empty() { &SHAPES[..] } else { &given } {
        for sizes in ["even", "uneven", "zipf"] {
            Case::new(&ctx, *s, sizes)?.print(&ctx, &only)?;
        }
    }
    Ok(())
}

/// Where groups end: `even` ones, `uneven` ones of 1 : 3 : 5 ... rows in a mixed order, both as in
/// `torch_rates.py`, or by Zipf's law, 1 : 1/2 : 1/3 ..., in the same order.
fn ends(groups: usize, rows: usize, sizes: &str) -> Vec<i64> {
    let mut end = 0;
    let harmonic = |n: usize| (1..=n).map(|i| 1.0 / i as f64).sum::<f64>();
    let zipf = |n: usize| (rows as f64 * harmonic(n) / harmonic(groups)).round() as usize;
    let size = |e: usize| {
        let i = (e * 5 + 3) % groups;
        match sizes {
            "even" => rows * (e + 1) / groups - rows * e / groups,
            "zipf" => zipf(i + 1) - zipf(i),
            _ => rows * (i + 1) * (i + 1) / (groups * groups) - rows * i * i / (groups * groups),
        }
    };
    (0..groups)
        .map(|e| {
            end += size(e) as i64;
            end
        })
        .collect()
}

struct Case {
    shape: [usize; 4],
    sizes: &'static str,
    ends: Vec<i64>,
    splits: Splits,
    stream: Stream,
    x: Tensor,
    dy: Tensor,
    w: Tensor,
    y: Tensor,
    dx: Tensor,
    /// Gradients of bf16, which are stored, and of f32, which are added to.
    dw: [Tensor; 2],
    mask: Tensor,
}

/// The gradient of weights has a type.
#[derive(Clone, Copy, PartialEq)]
enum Pass {
    Fprop,
    Dgrad,
    Wgrad(DType),
}

impl Case {
    fn new(ctx: &CudaContext, shape: [usize; 4], sizes: &'static str) -> Result<Self> {
        let [groups, rows, n, k] = shape;
        let (device, stream) = (Device::Cuda(ctx.clone()), Stream::on(ctx)?);
        let random = |rows, cols| normal(ctx, &stream, rows, cols);
        let zeros = |dtype, rows, cols| Tensor::zeros_on(&device, dtype, Shape::d2(rows, cols));
        let ends = ends(groups, rows, sizes);
        Ok(Self {
            shape,
            sizes,
            splits: Splits::ends(&Tensor::from_slice(&ends, Shape::d1(groups))?.to(&device)?),
            ends,
            x: random(rows, k)?,
            dy: random(rows, n)?,
            w: random(groups * n, k)?,
            y: zeros(DType::BF16, rows, n)?,
            dx: zeros(DType::BF16, rows, k)?,
            dw: [zeros(DType::BF16, groups * n, k)?, zeros(DType::F32, groups * n, k)?],
            mask: Tensor::from_slice(&vec![1u8; groups], Shape::d1(groups))?.to(&device)?,
            stream,
        })
    }

    fn print(&self, ctx: &CudaContext, only: &[String]) -> Result<()> {
        let [groups, rows, n, k] = self.shape;
        let passes = [
            ("fprop", Pass::Fprop),
            ("dgrad", Pass::Dgrad),
            ("wgrad -> bf16", Pass::Wgrad(DType::BF16)),
            ("wgrad += f32", Pass::Wgrad(DType::F32)),
        ];
        for (name, pass) in passes {
            let mut turns = Vec::new();
            for by in WAYS.into_iter().filter(|by| only.is_empty() || only.iter().any(|o| o == by))
            {
                let launch = match by {
                    "sequential" => self.sequential(ctx, pass)?,
                    _ => self.grouped(pass, by.parse()?)?,
                };
                turns.push(Turn::new(by, "", launch));
            }
            take_turns(ctx, &self.stream, &mut turns)?;
            for t in turns {
                let (us, by) = (t.median(), &t.by);
                let tflops = 2.0 * (rows * n) as f64 * k as f64 / us / 1e6;
                println!(
                    "{{\"device\":\"{}\",\"work\":\"grouped_gemm\",\"groups\":{groups},\
                     \"rows\":{rows},\"n\":{n},\"k\":{k},\"even\":{},\"sizes\":\"{}\",\"pass\":\"{name}\",\
                     \"backend\":\"{by}\",\"us\":{us:.1},\"tflops\":{tflops:.1}}}",
                    ctx.name()?,
                    self.sizes == "even",
                    self.sizes,
                );
            }
        }
        Ok(())
    }

    fn grouped(&self, pass: Pass, by: GemmBackend) -> Result<Launch<'_>> {
        let [groups, rows, n, k] = self.shape;
        let desc = GroupedDesc::new(groups, rows, n, k, DType::BF16);
        let desc = match pass {
            Pass::Wgrad(grad) => GroupedDesc { grad, ..desc },
            _ => desc,
        };
        let plan = GroupedGemmPlan::with_backend(desc, by)?;
        plan.prepare(&self.stream)?;
        Ok(Box::new(move || {
            let (s, splits) = (&self.stream, self.splits.clone());
            let (x, dy, w) = ((&self.x).into(), (&self.dy).into(), (&self.w).into());
            match pass {
                Pass::Fprop => {
                    let out = self.y.clone();
                    let t = GroupedFprop { x, w, bias: None, splits, out, aux_out: None };
                    plan.fprop(s, t).map(drop)
                }
                Pass::Dgrad => {
                    let t = GroupedDgrad { dy, w, splits, dx: self.dx.clone() };
                    plan.dgrad(s, t).map(drop)
                }
                Pass::Wgrad(grad) => {
                    let mask = (grad == DType::F32).then(|| self.mask.clone());
                    let dw = (&self.dw[usize::from(grad == DType::F32)]).into();
                    let t = GroupedWgrad { x, dy, splits, dw, mask, dbias: None };
                    plan.wgrad(s, t).map(drop)
                }
            }
        }))
    }

    /// One product for each group that has rows.
    fn sequential(&self, ctx: &CudaContext, pass: Pass) -> Result<Launch<'_>> {
        let [_, _, n, k] = self.shape;
        let (workspace, mut all) = (lt_workspace(ctx)?, Vec::new());
        let mut first = 0;
        for (e, end) in self.ends.iter().enumerate() {
            let (start, num) = (first, *end as usize - first);
            first = *end as usize;
            if num == 0 {
                continue;
            }
            let rows = |t: &Tensor| t.rows(start, num);
            let own = |t: &Tensor| t.rows(e * n, n);
            let nt = GemmDesc::nt(num, n, k, DType::BF16);
            let (desc, a, b, d) = match pass {
                Pass::Fprop => (nt, rows(&self.x)?, own(&self.w)?, rows(&self.y)?),
                Pass::Dgrad => {
                    let desc =
                        GemmDesc { b_order: BOrder::Kn, ..GemmDesc::nt(num, k, n, DType::BF16) };
                    (desc, rows(&self.dy)?, own(&self.w)?, rows(&self.dx)?)
                }
                Pass::Wgrad(grad) => {
                    let accumulate = grad == DType::F32;
                    let dw = &self.dw[usize::from(accumulate)];
                    let desc = GemmDesc {
                        a_order: AOrder::Km,
                        b_order: BOrder::Kn,
                        out: grad,
                        epilogue: Epilogue { accumulate, ..Epilogue::NONE },
                        ..GemmDesc::nt(n, k, num, DType::BF16)
                    };
                    (desc, rows(&self.dy)?, rows(&self.x)?, own(dw)?)
                }
            };
            let by = Lt::all(ctx, &desc, [&a, &b, &d], &workspace, 1)?.pop();
            all.push(by.ok_or_else(|| Error::internal("cuBLASLt has no algorithm"))?);
        }
        Ok(Box::new(move || all.iter().try_for_each(|lt| lt.launch(&self.stream))))
    }
}
