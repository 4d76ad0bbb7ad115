//! Times of grouped products on CUDA device 0: by the core for sm_90a, by the portable kernels, and
//! as one cuBLASLt product for each group, whose splits the host knows. Medians of 20 runs, the
//! card at rest before each turn; random inputs, bf16. One JSON object a line.
//!
//! `cargo run --release -p tilewire-ops --example rates grouped [GROUPS,ROWS,N,K ...]`.

use std::thread;
use std::time::Duration;

use tilewire_core::{DType, Result, Shape};
use tilewire_device::cuda::CudaContext;
use tilewire_device::{Device, Stream, Tensor};
use tilewire_ops::gemm::{AOrder, BOrder, Epilogue, GemmBackend, GemmDesc, GemmInputs, GemmPlan};
use tilewire_ops::grouped_gemm::{
    GroupedDesc, GroupedDgrad, GroupedFprop, GroupedGemmPlan, GroupedWgrad, Splits,
};

use crate::gemm::median;
use crate::{Launch, normal};

/// Groups, rows of all of them, and features of the results and operands.
const SHAPES: [[usize; 4]; 6] = [
    [32, 32768, 4096, 7168],
    [32, 32768, 7168, 2048],
    [8, 32768, 4096, 7168],
    [32, 8192, 4096, 7168],
    [128, 16384, 2048, 5120],
    [64, 512, 4096, 7168],
];
const REST: Duration = Duration::from_millis(80);

pub(crate) fn main() -> Result<()> {
    let ctx = CudaContext::new(0)?;
    let shape = |a: String| {
        let v: Vec<usize> = a.split(',').filter_map(|x| x.parse().ok()).collect();
        <[usize; 4]>::try_from(v).ok()
    };
    let given: Vec<[usize; 4]> = std::env::args().skip(2).filter_map(shape).collect();
    for s in if given.is_empty() { &SHAPES[..] } else { &given } {
        for even in [true, false] {
            for grad in [DType::BF16, DType::F32] {
                Case::new(&ctx, *s, even, grad)?.print(&ctx)?;
            }
        }
    }
    Ok(())
}

/// Where groups end: equal ones, or ones of 1 : 3 : 5 ... rows in a mixed order. As in
/// `torch_rates.py`.
fn ends(groups: usize, rows: usize, even: bool) -> Vec<i64> {
    let mut end = 0;
    let size = |e: usize| {
        if even {
            return rows * (e + 1) / groups - rows * e / groups;
        }
        let i = (e * 5 + 3) % groups;
        rows * (i + 1) * (i + 1) / (groups * groups) - rows * i * i / (groups * groups)
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
    even: bool,
    grad: DType,
    ends: Vec<i64>,
    splits: Splits,
    stream: Stream,
    x: Tensor,
    dy: Tensor,
    w: Tensor,
    y: Tensor,
    dx: Tensor,
    dw: Tensor,
    mask: Tensor,
}

#[derive(Clone, Copy, PartialEq)]
enum Pass {
    Fprop,
    Dgrad,
    Wgrad,
}

impl Case {
    fn new(ctx: &CudaContext, shape: [usize; 4], even: bool, grad: DType) -> Result<Self> {
        let [groups, rows, n, k] = shape;
        let (device, stream) = (Device::Cuda(ctx.clone()), Stream::on(ctx)?);
        let random = |rows, cols| normal(ctx, &stream, rows, cols);
        let zeros = |dtype, rows, cols| Tensor::zeros_on(&device, dtype, Shape::d2(rows, cols));
        let ends = ends(groups, rows, even);
        // The f32 gradients are added to, those of bf16 stored.
        let added = vec![u8::from(grad == DType::F32); groups];
        Ok(Self {
            shape,
            even,
            grad,
            splits: Splits::ends(&Tensor::from_slice(&ends, Shape::d1(groups))?.to(&device)?),
            ends,
            x: random(rows, k)?,
            dy: random(rows, n)?,
            w: random(groups * n, k)?,
            y: zeros(DType::BF16, rows, n)?,
            dx: zeros(DType::BF16, rows, k)?,
            dw: zeros(grad, groups * n, k)?,
            mask: Tensor::from_slice(&added, Shape::d1(groups))?.to(&device)?,
            stream,
        })
    }

    fn print(&self, ctx: &CudaContext) -> Result<()> {
        let [groups, rows, n, k] = self.shape;
        for (name, pass) in [("fprop", Pass::Fprop), ("dgrad", Pass::Dgrad), ("wgrad", Pass::Wgrad)]
        {
            if self.grad == DType::F32 && pass != Pass::Wgrad {
                continue;
            }
            let mut turns: Vec<(&str, Launch<'_>, Vec<f64>)> = vec![
                ("hopper", self.grouped(pass, GemmBackend::Hopper)?, Vec::new()),
                ("sequential", self.sequential(pass)?, Vec::new()),
                ("portable", self.grouped(pass, GemmBackend::Portable)?, Vec::new()),
            ];
            // Twice, the second time in the other order.
            for _ in 0..2 {
                for (_, launch, us) in &mut turns {
                    thread::sleep(REST);
                    us.push(median(ctx, &self.stream, &**launch)?);
                }
                turns.reverse();
            }
            for (by, _, us) in turns {
                let us = us.iter().copied().fold(f64::INFINITY, f64::min);
                let tflops = 2.0 * (rows * n) as f64 * k as f64 / us / 1e6;
                println!(
                    "{{\"device\":\"{}\",\"work\":\"grouped_gemm\",\"groups\":{groups},\
                     \"rows\":{rows},\"n\":{n},\"k\":{k},\"even\":{},\"pass\":\"{name}\",\
                     \"grad\":\"{}\",\"backend\":\"{by}\",\"us\":{us:.1},\"tflops\":{tflops:.1}}}",
                    ctx.name()?,
                    self.even,
                    self.grad,
                );
            }
        }
        Ok(())
    }

    fn grouped(&self, pass: Pass, by: GemmBackend) -> Result<Launch<'_>> {
        let [groups, rows, n, k] = self.shape;
        let desc =
            GroupedDesc { grad: self.grad, ..GroupedDesc::new(groups, rows, n, k, DType::BF16) };
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
                Pass::Wgrad => {
                    let mask = (self.grad == DType::F32).then(|| self.mask.clone());
                    let dw = (&self.dw).into();
                    let t = GroupedWgrad { x, dy, splits, dw, mask, dbias: None };
                    plan.wgrad(s, t).map(drop)
                }
            }
        }))
    }

    /// One product for each group that has rows.
    fn sequential(&self, pass: Pass) -> Result<Launch<'_>> {
        let [_, _, n, k] = self.shape;
        let mut all = Vec::new();
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
                Pass::Wgrad => {
                    let accumulate = self.grad == DType::F32;
                    let desc = GemmDesc {
                        a_order: AOrder::Km,
                        b_order: BOrder::Kn,
                        out: self.grad,
                        epilogue: Epilogue { accumulate, ..Epilogue::NONE },
                        ..GemmDesc::nt(n, k, num, DType::BF16)
                    };
                    (desc, rows(&self.dy)?, rows(&self.x)?, own(&self.dw)?)
                }
            };
            let plan = GemmPlan::with_backend(desc, GemmBackend::CublasLt)?;
            plan.prepare(&self.stream)?;
            all.push((plan, a, b, d));
        }
        Ok(Box::new(move || {
            for (plan, a, b, d) in &all {
                let inputs = GemmInputs::new(a.clone(), b.clone(), d.clone());
                plan.launch(&self.stream, inputs).map(drop)?;
            }
            Ok(())
        }))
    }
}
