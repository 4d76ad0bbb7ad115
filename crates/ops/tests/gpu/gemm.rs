//! `gemm` against the oracle.

use tilewire_core::numerics::Bound;
use tilewire_core::{DType, QTensor, Rng, ScaleLayout, Shape};
use tilewire_device::{Buffer, Device, Stream, Tensor};
use tilewire_ops::gemm::{
    AOrder, Activation, BOrder, Epilogue, GemmBackend, GemmDesc, GemmInputs, GemmPlan, Operand,
};
use tilewire_oracle::gemm as oracle;
use tilewire_oracle::quant::{QuantSpec, dequantize, quantize};
use tilewire_oracle::{Mat, matmul, matmul_abs};
use tilewire_testing::{Lack, did_not_run};

use crate::common::{Gpu, Out, WIDE, gpu, random, refill};

const ORDERS: [(AOrder, BOrder); 4] = [
    (AOrder::Mk, BOrder::Nk),
    (AOrder::Mk, BOrder::Kn),
    (AOrder::Km, BOrder::Kn),
    (AOrder::Km, BOrder::Nk),
];

const SHAPES: [(usize, usize, usize); 11] = [
    (0, 8, 8),
    (8, 0, 8),
    (1, 1, 1),
    (7, 10, 0),
    (33, 26, 47),
    (128, 128, 64),
    (130, 258, 136),
    (1, 256, 129),
    (65, 200, 33),
    (129, 2, 31),
    (257, 72, 520),
];

pub fn epilogue(bias: bool, activation: Activation) -> Epilogue {
    Epilogue { bias, activation, ..Epilogue::NONE }
}

fn to_oracle(act: Activation) -> oracle::Activation {
    match act {
        Activation::Relu => oracle::Activation::Relu,
        Activation::Gelu | Activation::DGelu => oracle::Activation::Gelu,
        Activation::SwiGlu | Activation::DSwiGlu => oracle::Activation::SwiGlu,
        Activation::None => oracle::Activation::None,
    }
}

/// A product with its operands as they are, and the tensors of its launch.
pub struct Problem {
    pub desc: GemmDesc,
    m: usize,
    a: Mat,
    b: Mat,
    bias: Mat,
    c: Mat,
    aux_in: Mat,
    pub out: Out,
    aux_out: Out,
    bgrad: Out,
    pub inputs: GemmInputs,
}

impl Problem {
    pub fn new(g: &Gpu, rng: &mut Rng, desc: GemmDesc, m: usize) -> Self {
        let (n, k, e) = (desc.n, desc.k, desc.epilogue);
        let (a, b) = (random(rng, m, k, desc.a), random(rng, n, k, desc.b));
        let bias = random(rng, 1, n, DType::F32);
        let c = random(rng, m, n, desc.out);
        let turned = |x: &Mat, yes: bool| if yes { x.transpose() } else { x.clone() };
        let out = g.out(desc.out, m, e.activation.out_cols(n));
        if e.accumulate {
            out.t.write(|o| o.copy_from_slice(&c.to_bytes(desc.out))).unwrap();
        }
        let aux_in = random(rng, m, e.activation.aux_cols(n), desc.out);
        let aux_out = g.out(desc.out, m, n);
        // One sum a row, so that there is poison on both sides.
        let bgrad = g.out(DType::F32, m, 1);
        let inputs = GemmInputs {
            bias: e.bias.then(|| g.put_f32(&bias.data)),
            aux_in: e.activation.reads_aux().then(|| g.put_shifted(&aux_in, desc.out)),
            aux_out: e.aux.then(|| aux_out.t.clone()),
            bgrad: e.bgrad.then(|| bgrad.t.reshape(Shape::d1(m)).unwrap()),
            ..GemmInputs::new(
                g.put_shifted(&turned(&a, desc.a_order == AOrder::Km), desc.a),
                g.put_shifted(&turned(&b, desc.b_order == BOrder::Kn), desc.b),
                out.t.clone(),
            )
        };
        Self { desc, m, a, b, bias, c, aux_in, out, aux_out, bgrad, inputs }
    }

    pub fn run(&self, g: &Gpu, plan: &GemmPlan) -> Tensor {
        plan.launch(&g.stream, self.inputs.clone()).unwrap().wait().unwrap()
    }

    /// The result, its pre-activation's magnitude, and what an error of that becomes.
    pub fn check(&self) {
        let (d, e) = (&self.desc, self.desc.epilogue);
        let want = oracle::gemm(&oracle::Gemm {
            bias: e.bias.then_some(&self.bias.data[..]),
            act: if e.activation.reads_aux() {
                oracle::Activation::None
            } else {
                to_oracle(e.activation)
            },
            c: e.accumulate.then_some(&self.c),
            ..oracle::Gemm::new(&self.a, &self.b)
        });
        let product = matmul_abs(&self.a, &self.b.transpose());
        let z = Mat::from_fn(self.m, d.n, |i, j| {
            let bias = if e.bias { self.bias.data[j].abs() } else { 0.0 };
            let c = if e.accumulate { self.c.at(i, j).abs() } else { 0.0 };
            product.at(i, j) + bias + c
        });
        let what = format!("{d} with {} rows", self.m);
        let bound = Bound::local(d.out, d.k);
        let want_d = match e.activation.reads_aux() {
            true => oracle::activate_bwd(to_oracle(e.activation), &self.aux_in, &want.d),
            false => want.d.clone(),
        };
        self.out.check(&what, &want_d, &self.magnitude(&z, &want.aux), &bound);
        if e.aux {
            self.aux_out.check(&format!("aux of {what}"), &want.aux, &z, &bound);
        }
        if e.bgrad {
            let sums = |f: fn(f64) -> f64| {
                let sum = |i: usize| self.a.row(i).iter().map(|v| f(*v)).sum();
                Mat::new(self.m, 1, (0..self.m).map(sum).collect())
            };
            let bound = Bound::local(DType::F32, d.k);
            self.bgrad.check(&format!("bgrad of {what}"), &sums(|v| v), &sums(f64::abs), &bound);
        }
    }

    /// What errors of the pre-activation, whose magnitude is `mag`, and of the activation become.
    fn magnitude(&self, mag: &Mat, z: &Mat) -> Mat {
        let (n, half) = (self.desc.n, self.desc.n / 2);
        let aux = |i: usize, j: usize| self.aux_in.at(i, j).abs();
        match self.desc.epilogue.activation {
            // Slopes below 1.2, and a few roundings of the function itself.
            Activation::Gelu | Activation::DGelu => mag.map(|v| 1.2 * v + 1.0),
            Activation::SwiGlu => Mat::from_fn(self.m, half, |i, j| {
                let (gate, up) = (z.at(i, j).abs(), z.at(i, half + j).abs());
                1.2 * up * mag.at(i, j) + gate * mag.at(i, half + j) + gate * up + 1.0
            }),
            Activation::DSwiGlu => Mat::from_fn(self.m, 2 * n, |i, j| {
                let (gate, up) = (aux(i, j % n), aux(i, n + j % n));
                2.0 * (1.0 + gate) * (1.0 + up) * mag.at(i, j % n)
            }),
            _ => mag.clone(),
        }
    }
}

fn plan(g: &Gpu, desc: GemmDesc) -> GemmPlan {
    plan_by(g, desc, GemmBackend::Portable)
}

pub fn plan_by(g: &Gpu, desc: GemmDesc, backend: GemmBackend) -> GemmPlan {
    let plan = GemmPlan::with_backend(desc, backend).unwrap();
    plan.prepare(&g.stream).unwrap();
    plan
}

fn every_shape(dtype: DType) {
    let Some(g) = gpu() else { return };
    let mut rng = Rng::new(1);
    let epilogues = [
        Epilogue::NONE,
        epilogue(true, Activation::None),
        epilogue(true, Activation::Relu),
        epilogue(false, Activation::Gelu),
        epilogue(true, Activation::SwiGlu),
        Epilogue { accumulate: true, bias: true, ..Epilogue::NONE },
        Epilogue { aux: true, ..epilogue(true, Activation::SwiGlu) },
        Epilogue { aux: true, bgrad: true, ..epilogue(true, Activation::Gelu) },
        epilogue(false, Activation::DGelu),
        epilogue(false, Activation::DSwiGlu),
        Epilogue { bgrad: true, ..Epilogue::NONE },
    ];
    let outs = [dtype, DType::F32];
    for (s, (m, n, k)) in SHAPES.into_iter().enumerate() {
        for (i, (a_order, b_order)) in ORDERS.into_iter().enumerate() {
            for (j, epilogue) in epilogues.into_iter().enumerate() {
                // Each pair of order and epilogue with many shapes.
                let odd = epilogue.activation == Activation::SwiGlu && n % 2 == 1;
                if odd || ((s + i + j) % 2 == 1 && s > 3) {
                    continue;
                }
                let out = outs[(s + j) % 2];
                let desc = GemmDesc {
                    a_order,
                    b_order,
                    epilogue,
                    out,
                    ..GemmDesc::nt(m + 3, n, k, dtype)
                };
                let p = Problem::new(&g, &mut rng, desc, m);
                p.run(&g, &plan(&g, desc));
                p.check();
            }
        }
    }
}

/// As [`Problem::check`], by cuBLASLt; none if it is not there, which is said with a hint.
fn with_cublaslt(g: &Gpu) -> Option<()> {
    // Fewer rows are the core's.
    let desc = GemmDesc::nt(48, 16, 16, DType::BF16);
    let forced = GemmPlan::with_backend(desc, GemmBackend::CublasLt).unwrap();
    let auto = plan_by(g, desc, GemmBackend::Auto).explain();
    match forced.prepare(&g.stream) {
        Ok(()) => {
            assert!(
                forced.explain().contains("cuBLASLt 1") && auto.contains("cuBLASLt 1"),
                "{auto}"
            );
            Some(())
        }
        Err(e) => {
            assert!(e.is_unavailable() && e.get_hint().is_some(), "{e}");
            assert!(auto.contains("because"), "{auto}");
            did_not_run(Lack::CublasLt, e);
            None
        }
    }
}

/// Every order, type, result, accumulation and bias that the library takes, with the plan's most
/// rows and with fewer.
#[test]
fn products_by_cublaslt() {
    let Some(g) = gpu() else { return };
    let Some(()) = with_cublaslt(&g) else { return };
    let mut rng = Rng::new(21);
    let with = |bias, accumulate| Epilogue { bias, accumulate, ..Epilogue::NONE };
    let shapes = [(16, 8, 8), (136, 264, 72), (256, 64, 2048), (1, 256, 128), (250, 96, 520)];
    for dtype in WIDE {
        for (m, n, k) in shapes {
            for (a_order, b_order) in ORDERS {
                for out in [dtype, DType::F32] {
                    for e in
                        [with(false, false), with(false, true), with(true, false), with(true, true)]
                    {
                        let base =
                            GemmDesc { a_order, b_order, out, ..GemmDesc::nt(m, n, k, dtype) };
                        let desc = GemmDesc { epilogue: e, ..base };
                        let turned = a_order == AOrder::Km;
                        // Its stride is the number of rows, and each row must be aligned.
                        if ((e.bias || e.accumulate) && out != DType::F32) || (turned && m % 8 != 0)
                        {
                            continue;
                        }
                        let plan = plan_by(&g, desc, GemmBackend::CublasLt);
                        for m in [m, m.div_ceil(24) * 8] {
                            let p = Problem::new(&g, &mut rng, desc, m.min(desc.m));
                            p.run(&g, &plan);
                            p.check();
                        }
                    }
                }
            }
        }
    }
}

/// What is not aligned, or fused, takes a kernel of our own with `auto`, and is an error of the
/// library alone: at prepare where the description says it, else at launch.
#[test]
fn what_cublaslt_does_not_take() {
    let Some(g) = gpu() else { return };
    let Some(()) = with_cublaslt(&g) else { return };
    let mut rng = Rng::new(22);
    let odd = GemmDesc::nt(40, 30, 33, DType::BF16);
    let gelu = GemmDesc {
        epilogue: epilogue(true, Activation::Gelu),
        ..GemmDesc::nt(8, 8, 8, DType::BF16)
    };
    for desc in [odd, gelu] {
        let e = GemmPlan::with_backend(desc, GemmBackend::CublasLt).unwrap();
        let e = e.prepare(&g.stream).unwrap_err();
        assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
        let auto = plan_by(&g, desc, GemmBackend::Auto);
        assert!(auto.explain().contains("because"), "{}", auto.explain());
        let p = Problem::new(&g, &mut rng, desc, desc.m);
        p.run(&g, &auto);
        p.check();
    }
    // 41 rows of [k, m]: known at launch only.
    let desc = GemmDesc {
        a_order: AOrder::Km,
        b_order: BOrder::Kn,
        ..GemmDesc::nt(48, 64, 32, DType::BF16)
    };
    let p = Problem::new(&g, &mut rng, desc, 41);
    let forced = plan_by(&g, desc, GemmBackend::CublasLt);
    let e = forced.launch(&g.stream, p.inputs.clone()).err().unwrap();
    assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
    p.run(&g, &plan_by(&g, desc, GemmBackend::Auto));
    p.check();
}

/// Launches of `plan` side by side on two streams, `rounds` times `num`: each gives the bits of its
/// own operands, and they are right.
pub fn same_bits(g: &Gpu, streams: &[Stream; 2], plan: &GemmPlan, (rounds, num): (usize, usize)) {
    let mut rng = Rng::new(23);
    let problems = [0, 1].map(|_| Problem::new(g, &mut rng, *plan.desc(), plan.desc().m));
    let mut first: Vec<Vec<u8>> = Vec::new();
    for round in 0..rounds {
        for i in 0..num {
            drop(plan.launch(&streams[i % 2], problems[i % 2].inputs.clone()).unwrap());
        }
        streams.iter().for_each(|s| s.synchronize().unwrap());
        let bits: Vec<_> = problems.iter().map(|p| p.out.t.download().unwrap()).collect();
        assert!(round == 0 || bits == first, "round {round}");
        first = bits;
    }
    problems.iter().for_each(Problem::check);
}

/// A contraction that the library cuts in parts: its workspace is used by one launch at a time, on
/// whatever streams; each launch gives the same bits.
#[test]
fn cublaslt_gives_the_same_bits_on_two_streams() {
    let Some(g) = gpu() else { return };
    let Some(()) = with_cublaslt(&g) else { return };
    let Device::Cuda(ctx) = &g.device else { return };
    let streams = [g.stream.clone(), Stream::on(ctx).unwrap()];
    let desc = GemmDesc { out: DType::F32, ..GemmDesc::nt(64, 64, 65536, DType::BF16) };
    let plan = plan_by(&g, desc, GemmBackend::CublasLt);
    same_bits(&g, &streams, &plan, (20, 8));
}

#[test]
fn products_of_f32() {
    every_shape(DType::F32);
}

#[test]
fn products_of_bf16() {
    every_shape(DType::BF16);
}

#[test]
fn products_of_f16() {
    every_shape(DType::F16);
}

/// Small integers: every partial sum is exact, so every element is.
#[test]
fn integers_are_exact() {
    let Some(g) = gpu() else { return };
    let mut rng = Rng::new(2);
    for dtype in WIDE {
        for (a_order, b_order) in ORDERS {
            let desc = GemmDesc { a_order, b_order, ..GemmDesc::nt(150, 90, 77, dtype) };
            let desc = GemmDesc { out: DType::F32, ..desc };
            let (a, b) =
                (Mat::random_ints(&mut rng, 150, 77, 9), Mat::random_ints(&mut rng, 90, 77, 9));
            let stored =
                |x: &Mat, t: bool| g.put(&if t { x.transpose() } else { x.clone() }, dtype);
            let out = g.out(DType::F32, 150, 90);
            let inputs = GemmInputs::new(
                stored(&a, a_order == AOrder::Km),
                stored(&b, b_order == BOrder::Kn),
                out.t.clone(),
            );
            plan(&g, desc).launch(&g.stream, inputs).unwrap().wait().unwrap();
            let want = oracle::gemm(&oracle::Gemm::new(&a, &b)).d;
            assert_eq!(out.t.to_f32().unwrap(), want.to_f32(), "{desc}");
        }
    }
}

fn quantised(g: &Gpu, q: &QTensor, scales: bool) -> Operand {
    let over = |bytes: &[u8], dtype: DType, shape| {
        let t = Tensor::zeros(dtype, shape);
        t.write(|b| b.copy_from_slice(bytes)).unwrap();
        g.move_here(&t)
    };
    let data = over(&q.data, q.dtype, q.shape);
    let dtype = q.layout.dtype();
    let num = q.scales.len() / dtype.size();
    let s = scales.then(|| (over(&q.scales, dtype, Shape::d1(num)), q.layout));
    Operand { data, scales: s }
}

/// FP8 of both types with every layout of scales, in every order.
#[test]
fn products_of_fp8() {
    let Some(g) = gpu() else { return };
    let mut rng = Rng::new(18);
    let (m, n, k) = (70, 140, 150);
    let layouts = [
        ScaleLayout::Tensor,
        ScaleLayout::Block1x128,
        ScaleLayout::Block128x128,
        ScaleLayout::Mx1x32,
        ScaleLayout::Mx1x32Swizzled,
    ];
    for (i, layout) in layouts.into_iter().enumerate() {
        for (a_order, b_order) in ORDERS {
            let types = [DType::F8E4M3, DType::F8E5M2];
            let desc = GemmDesc {
                a: types[i % 2],
                b: types[1 - i % 2],
                a_order,
                b_order,
                epilogue: Epilogue { bgrad: true, ..Epilogue::NONE },
                ..GemmDesc::nt(m + 2, n, k, DType::F8E4M3)
            };
            let turned = |x: Mat, yes: bool| if yes { x.transpose() } else { x };
            let (ta, tb) = (a_order == AOrder::Km, b_order == BOrder::Kn);
            let a = turned(random(&mut rng, m, k, DType::F32), ta);
            let b = turned(random(&mut rng, n, k, DType::F32), tb);
            let qa = quantize(&a, QuantSpec::new(desc.a, layout));
            let qb = quantize(&b, QuantSpec::new(desc.b, layout));
            let scaled = layout != ScaleLayout::Tensor || ta;
            let value = |q: &QTensor, x: &Mat| match scaled {
                true => dequantize(q),
                false => Mat::from_bytes(x.rows, x.cols, q.dtype, &q.data),
            };
            let (da, db) = (turned(value(&qa, &a), ta), turned(value(&qb, &b), !tb));
            let (out, sums) = (g.out(desc.out, m, n), g.out(DType::F32, m, 1));
            let inputs = GemmInputs {
                bgrad: Some(sums.t.reshape(Shape::d1(m)).unwrap()),
                ..GemmInputs::new(
                    quantised(&g, &qa, scaled),
                    quantised(&g, &qb, scaled),
                    out.t.clone(),
                )
            };
            plan(&g, desc).launch(&g.stream, inputs).unwrap().wait().unwrap();
            let what = format!("{desc} {layout:?}");
            out.check(&what, &matmul(&da, &db), &matmul_abs(&da, &db), &Bound::local(desc.out, k));
            let sum = |f: fn(f64) -> f64| {
                Mat::from_fn(m, 1, |i, _| da.row(i).iter().map(|v| f(*v)).sum())
            };
            sums.check(&what, &sum(|v| v), &sum(f64::abs), &Bound::local(DType::F32, k));
        }
    }
}

#[test]
fn replays_are_as_eager() {
    let Some(g) = gpu() else { return };
    let mut rng = Rng::new(3);
    let descs = [
        GemmDesc::nt(200, 130, 70, DType::F32),
        GemmDesc::nt(200, 130, 70, DType::F8E4M3),
        GemmDesc {
            epilogue: epilogue(true, Activation::SwiGlu),
            ..GemmDesc::nt(200, 130, 70, DType::BF16)
        },
        GemmDesc {
            epilogue: Epilogue { aux: true, bgrad: true, ..epilogue(true, Activation::Gelu) },
            ..GemmDesc::nt(200, 130, 70, DType::BF16)
        },
        GemmDesc {
            a_order: AOrder::Km,
            b_order: BOrder::Kn,
            out: DType::F32,
            epilogue: Epilogue { accumulate: true, ..Epilogue::NONE },
            ..GemmDesc::nt(200, 130, 70, DType::F16)
        },
    ];
    let aligned = [
        GemmDesc::nt(200, 128, 4096, DType::BF16),
        GemmDesc { a_order: AOrder::Km, ..GemmDesc::nt(200, 128, 80, DType::F16) },
    ];
    let by = |backend| move |desc| (desc, backend);
    let all = descs.map(by(GemmBackend::Portable)).into_iter();
    for (desc, backend) in all.chain(aligned.map(by(GemmBackend::Auto))) {
        let p = Problem::new(&g, &mut rng, desc, 192);
        let plan = plan_by(&g, desc, backend);
        let before = p.c.to_bytes(desc.out);
        let mut outs = vec![&p.out.t];
        if desc.epilogue.aux {
            outs.extend([&p.aux_out.t, &p.bgrad.t]);
        }
        let reset = || match desc.epilogue.accumulate {
            true => p.out.t.write(|o| o.copy_from_slice(&before)).unwrap(),
            false => outs.iter().for_each(|t| t.poison().unwrap()),
        };
        let change = |_| {
            refill(&p.inputs.a.data, &mut rng);
            refill(&p.inputs.b.data, &mut rng);
        };
        let launch = || {
            plan.launch(&g.stream, p.inputs.clone()).unwrap().join(&g.stream).unwrap();
        };
        g.replays(&outs, change, reset, launch);
        p.out.alone("replays");
    }
}

/// What no kernel does is refused at prepare; what lies elsewhere, at launch: both with a hint.
#[test]
fn what_cannot_run_is_said() {
    let Some(g) = gpu() else { return };
    let bad = GemmDesc { out: DType::F8E4M3, ..GemmDesc::nt(8, 8, 8, DType::BF16) };
    let bad = GemmPlan::new(bad).unwrap();
    let e = bad.prepare(&g.stream).unwrap_err();
    assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
    let desc = GemmDesc::nt(8, 8, 8, DType::BF16);
    let (p, there) = (plan(&g, desc), Problem::new(&g, &mut Rng::new(4), desc, 8));
    let b = there.inputs.b.data.to(&Device::Host).unwrap();
    let inputs = GemmInputs { b: b.into(), ..there.inputs.clone() };
    let e = p.launch(&g.stream, inputs).err().unwrap();
    assert!(e.to_string().contains("`b`") && e.get_hint().is_some(), "{e}");
    let host = Stream::new("host").unwrap();
    assert!(p.prepare(&host).is_err() && p.launch(&host, there.inputs.clone()).is_err());
}
