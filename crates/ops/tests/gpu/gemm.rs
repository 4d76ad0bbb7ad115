//! `gemm` against the oracle.

use tilewire_core::numerics::Bound;
use tilewire_core::{DType, Rng};
use tilewire_device::Tensor;
use tilewire_ops::gemm::{AOrder, Activation, BOrder, Epilogue, GemmDesc, GemmInputs, GemmPlan};
use tilewire_oracle::gemm as oracle;
use tilewire_oracle::{Mat, matmul_abs};

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

fn epilogue(bias: bool, activation: Activation) -> Epilogue {
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
struct Problem {
    desc: GemmDesc,
    m: usize,
    a: Mat,
    b: Mat,
    bias: Mat,
    c: Mat,
    out: Out,
    inputs: GemmInputs,
}

impl Problem {
    fn new(g: &Gpu, rng: &mut Rng, desc: GemmDesc, m: usize) -> Self {
        let (n, k, e) = (desc.n, desc.k, desc.epilogue);
        let (a, b) = (random(rng, m, k, desc.a), random(rng, n, k, desc.b));
        let bias = random(rng, 1, n, DType::F32);
        let c = random(rng, m, n, desc.out);
        let turned = |x: &Mat, yes: bool| if yes { x.transpose() } else { x.clone() };
        let out = g.out(desc.out, m, e.activation.out_cols(n));
        if e.accumulate {
            out.t.write(|o| o.copy_from_slice(&c.to_bytes(desc.out))).unwrap();
        }
        let inputs = GemmInputs {
            bias: e.bias.then(|| g.put_f32(&bias.data)),
            ..GemmInputs::new(
                g.put_shifted(&turned(&a, desc.a_order == AOrder::Km), desc.a),
                g.put_shifted(&turned(&b, desc.b_order == BOrder::Kn), desc.b),
                out.t.clone(),
            )
        };
        Self { desc, m, a, b, bias, c, out, inputs }
    }

    fn run(&self, g: &Gpu, plan: &GemmPlan) -> Tensor {
        plan.launch(&g.stream, self.inputs.clone()).unwrap().wait().unwrap()
    }

    /// The result, its pre-activation's magnitude, and what an error of that becomes.
    fn check(&self) {
        let (d, e) = (&self.desc, self.desc.epilogue);
        let want = oracle::gemm(&oracle::Gemm {
            bias: e.bias.then_some(&self.bias.data[..]),
            act: to_oracle(e.activation),
            c: e.accumulate.then_some(&self.c),
            ..oracle::Gemm::new(&self.a, &self.b)
        });
        let product = matmul_abs(&self.a, &self.b.transpose());
        let z = Mat::from_fn(self.m, d.n, |i, j| {
            let bias = if e.bias { self.bias.data[j].abs() } else { 0.0 };
            let c = if e.accumulate { self.c.at(i, j).abs() } else { 0.0 };
            product.at(i, j) + bias + c
        });
        let half = d.n / 2;
        let mag = match e.activation {
            // Slopes below 1.2, and a few roundings of the function itself.
            Activation::Gelu => z.map(|v| 1.2 * v + 1.0),
            Activation::SwiGlu => Mat::from_fn(self.m, half, |i, j| {
                let (gate, up) = (want.aux.at(i, j).abs(), want.aux.at(i, half + j).abs());
                1.2 * up * z.at(i, j) + gate * z.at(i, half + j) + gate * up + 1.0
            }),
            _ => z.clone(),
        };
        let what = format!("{d} with {} rows", self.m);
        self.out.check(&what, &want.d, &mag, &Bound::local(d.out, d.k));
    }
}

fn plan(g: &Gpu, desc: GemmDesc) -> GemmPlan {
    let plan = GemmPlan::new(desc).unwrap();
    plan.prepare(&g.stream).unwrap();
    plan
}

fn every_shape(dtype: DType) {
    let Some(g) = gpu("gemm") else { return };
    let mut rng = Rng::new(1);
    let epilogues = [
        Epilogue::NONE,
        epilogue(true, Activation::None),
        epilogue(true, Activation::Relu),
        epilogue(false, Activation::Gelu),
        epilogue(true, Activation::SwiGlu),
        Epilogue { accumulate: true, bias: true, ..Epilogue::NONE },
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
    let Some(g) = gpu("gemm") else { return };
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

#[test]
fn replays_are_as_eager() {
    let Some(g) = gpu("gemm") else { return };
    let mut rng = Rng::new(3);
    let descs = [
        GemmDesc::nt(200, 130, 70, DType::F32),
        GemmDesc {
            epilogue: epilogue(true, Activation::SwiGlu),
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
    for desc in descs {
        let p = Problem::new(&g, &mut rng, desc, 190);
        let plan = plan(&g, desc);
        let before = p.c.to_bytes(desc.out);
        let reset = || match desc.epilogue.accumulate {
            true => p.out.t.write(|o| o.copy_from_slice(&before)).unwrap(),
            false => p.out.t.poison().unwrap(),
        };
        let change = |_| {
            refill(&p.inputs.a.data, &mut rng);
            refill(&p.inputs.b.data, &mut rng);
        };
        let launch = || {
            plan.launch(&g.stream, p.inputs.clone()).unwrap().join(&g.stream).unwrap();
        };
        g.replays(&[&p.out.t], change, reset, launch);
        p.out.alone("replays");
    }
}

/// What no kernel does is refused at prepare; what lies elsewhere, at launch: both with a hint.
#[test]
fn what_cannot_run_is_said() {
    let Some(g) = gpu("gemm") else { return };
    let bad = GemmPlan::new(GemmDesc::nt(8, 8, 8, DType::F8E4M3)).unwrap();
    let e = bad.prepare(&g.stream).unwrap_err();
    assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
    let desc = GemmDesc::nt(8, 8, 8, DType::BF16);
    let (p, there) = (plan(&g, desc), Problem::new(&g, &mut Rng::new(4), desc, 8));
    let b = there.inputs.b.data.to(&tilewire_device::Device::Host).unwrap();
    let inputs = GemmInputs { b: b.into(), ..there.inputs.clone() };
    let e = p.launch(&g.stream, inputs).err().unwrap();
    assert!(e.to_string().contains("`b`") && e.get_hint().is_some(), "{e}");
    let host = tilewire_device::Stream::new("host").unwrap();
    assert!(p.prepare(&host).is_err() && p.launch(&host, there.inputs.clone()).is_err());
}
