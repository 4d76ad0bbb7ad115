//! `quant` against the host plan, to the bit.

use tilewire_core::{DType, Rng, ScaleLayout, Shape};
use tilewire_device::{Buffer, Device, Stream, Tensor};
use tilewire_ops::quant::{
    DequantDesc, DequantPlan, QuantDesc, QuantInputs, QuantPlan, Quantized, Scaling, Sides,
};
use tilewire_oracle::Mat;

use crate::common::{Gpu, WIDE, gpu, same};

const FP8: [DType; 2] = [DType::F8E4M3, DType::F8E5M2];
const LAYOUTS: [ScaleLayout; 5] = [
    ScaleLayout::Tensor,
    ScaleLayout::Block1x128,
    ScaleLayout::Block128x128,
    ScaleLayout::Mx1x32,
    ScaleLayout::Mx1x32Swizzled,
];
const SHAPES: [(usize, usize); 9] =
    [(0, 7), (7, 0), (1, 1), (3, 33), (128, 132), (5, 129), (130, 31), (131, 261), (256, 512)];

/// Magnitudes from 2^-12 to 2^12, so that blocks differ; a few that are special.
fn data(rng: &mut Rng, rows: usize, cols: usize) -> Mat {
    let x = Mat::random(rng, rows, cols);
    Mat::from_fn(rows, cols, |i, j| match (i * 131 + j * 7) % 1009 {
        17 => f64::NAN,
        18 => -0.0,
        19 => 1e-30,
        _ => x.at(i, j) * 2f64.powi(((i / 3 * 7 + j / 16 * 5) % 25) as i32 - 12),
    })
}

fn each(t: &QuantInputs, mut f: impl FnMut(&Quantized)) {
    t.row.iter().chain(&t.column).for_each(&mut f);
}

fn compare(what: &str, got: &QuantInputs, want: &QuantInputs) {
    let mut list = Vec::new();
    each(want, |q| list.push(q.clone()));
    let mut want = list.into_iter();
    each(got, |q| {
        let w = want.next().unwrap();
        same(&format!("{what}: scales"), &q.scales, &w.scales);
        same(&format!("{what}: codes"), &q.data, &w.data);
    });
    assert!(want.next().is_none());
}

/// One plan of the device and one of the host.
struct Both {
    host: Stream,
    here: QuantPlan,
    there: QuantPlan,
}

impl Both {
    fn new(g: &Gpu, desc: QuantDesc) -> Self {
        let host = Stream::new("host").unwrap();
        let (here, there) =
            (QuantPlan::new(desc, None).unwrap(), QuantPlan::new(desc, None).unwrap());
        here.prepare(&host).unwrap();
        there.prepare(&g.stream).unwrap();
        Self { host, here, there }
    }

    fn check(&self, g: &Gpu, x: &Tensor) {
        let want = QuantInputs::new(self.here.desc(), x).unwrap();
        self.here.launch(&self.host, want.clone()).unwrap().wait().unwrap();
        let got = QuantInputs::new(self.there.desc(), &g.move_here(x)).unwrap();
        self.there.launch(&g.stream, got.clone()).unwrap().wait().unwrap();
        let what = format!("{} of {}", self.here.desc(), x.shape());
        compare(&what, &got, &want);
    }
}

fn tensor(x: &Mat, dtype: DType) -> Tensor {
    Tensor::from_f32(&x.to_f32(), dtype, Shape::d2(x.rows, x.cols)).unwrap()
}

fn every_layout(src: DType) {
    let Some(g) = gpu() else { return };
    let mut rng = Rng::new(5);
    for dst in FP8 {
        for (i, layout) in LAYOUTS.into_iter().enumerate() {
            for (j, (rows, cols)) in SHAPES.into_iter().enumerate() {
                let desc = QuantDesc {
                    sides: [Sides::Both, Sides::Row, Sides::Both, Sides::Column][(i + j) % 4],
                    pow2_scales: j % 2 == 1,
                    ..QuantDesc::new(rows + 5, cols, src, dst, layout)
                };
                let x = tensor(&data(&mut rng, rows, cols), src);
                let both = Both::new(&g, desc);
                both.check(&g, &x);
                back(&g, &both, &x);
            }
        }
    }
}

/// Every code and scale of `x` back to `src`, on both devices.
fn back(g: &Gpu, both: &Both, x: &Tensor) {
    let d = *both.here.desc();
    let want = QuantInputs::new(&d, x).unwrap();
    both.here.launch(&both.host, want.clone()).unwrap().wait().unwrap();
    each(&want, |q| {
        let shape = q.data.shape();
        let desc = DequantDesc {
            rows: shape.dim(0) + 1,
            cols: shape.dim(1),
            src: d.dst,
            layout: d.layout,
            out: d.src,
        };
        let plan = |stream: &Stream| {
            let p = DequantPlan::new(desc).unwrap();
            p.prepare(stream).unwrap();
            p
        };
        let here = Tensor::poisoned(d.src, shape);
        plan(&both.host).launch(&both.host, q, &here).unwrap().wait().unwrap();
        let out = g.out(d.src, shape.dim(0), shape.dim(1));
        let moved = Quantized {
            data: g.move_here(&q.data),
            scales: g.move_here(&q.scales),
            layout: q.layout,
        };
        plan(&g.stream).launch(&g.stream, &moved, &out.t).unwrap().wait().unwrap();
        out.alone("dequantisation");
        same(&format!("dequantisation {desc}"), &out.t, &here);
    });
}

#[test]
fn codes_of_f32() {
    every_layout(WIDE[0]);
}

#[test]
fn codes_of_bf16() {
    every_layout(WIDE[1]);
}

#[test]
fn codes_of_f16() {
    every_layout(WIDE[2]);
}

/// More elements than `tw_amax` has threads; rows that do not begin at a multiple of 16 bytes.
#[test]
fn a_large_tensor_and_one_that_is_not_aligned() {
    let Some(g) = gpu() else { return };
    let mut rng = Rng::new(6);
    let desc = QuantDesc::new(2100, 2049, DType::BF16, FP8[0], ScaleLayout::Tensor);
    let both = Both::new(&g, desc);
    both.check(&g, &tensor(&data(&mut rng, 2100, 2049), DType::BF16));
    for layout in LAYOUTS {
        let desc = QuantDesc {
            layout,
            sides: Sides::Both,
            ..QuantDesc::new(64, 99, DType::BF16, FP8[0], layout)
        };
        let whole = tensor(&data(&mut rng, 65, 99), DType::BF16);
        let both = Both::new(&g, desc);
        let want = QuantInputs::new(&desc, &whole.rows(1, 64).unwrap()).unwrap();
        both.here.launch(&both.host, want.clone()).unwrap().wait().unwrap();
        let got = QuantInputs::new(&desc, &g.move_here(&whole).rows(1, 64).unwrap()).unwrap();
        both.there.launch(&g.stream, got.clone()).unwrap().wait().unwrap();
        compare(&format!("{desc}"), &got, &want);
    }
}

#[test]
fn replays_are_as_eager() {
    let Some(g) = gpu() else { return };
    let mut rng = Rng::new(7);
    for layout in LAYOUTS {
        let desc = QuantDesc {
            sides: Sides::Both,
            ..QuantDesc::new(140, 200, DType::F16, FP8[1], layout)
        };
        let plan = QuantPlan::new(desc, None).unwrap();
        plan.prepare(&g.stream).unwrap();
        let x = g.move_here(&tensor(&data(&mut rng, 135, 200), DType::F16));
        let t = QuantInputs::new(&desc, &x).unwrap();
        let mut outs = Vec::new();
        each(&t, |q| outs.extend([q.data.clone(), q.scales.clone()]));
        let outs: Vec<&Tensor> = outs.iter().collect();
        let change = |_| x.upload(&data(&mut rng, 135, 200).to_bytes(DType::F16)).unwrap();
        let reset = || outs.iter().for_each(|t| t.poison().unwrap());
        let launch = || {
            plan.launch(&g.stream, t.clone()).unwrap().join(&g.stream).unwrap();
        };
        g.replays(&outs, change, reset, launch);
    }
}

/// Quantised and back in one graph.
#[test]
fn replays_of_dequantisation_are_as_eager() {
    let Some(g) = gpu() else { return };
    let mut rng = Rng::new(17);
    for layout in LAYOUTS {
        let desc = QuantDesc::new(140, 200, DType::BF16, FP8[0], layout);
        let plan = QuantPlan::new(desc, None).unwrap();
        plan.prepare(&g.stream).unwrap();
        let back = DequantDesc { rows: 140, cols: 200, src: FP8[0], layout, out: DType::F16 };
        let back = DequantPlan::new(back).unwrap();
        back.prepare(&g.stream).unwrap();
        let x = g.move_here(&tensor(&data(&mut rng, 135, 200), DType::BF16));
        let t = QuantInputs::new(&desc, &x).unwrap();
        let out = g.out(DType::F16, 135, 200);
        let change = |_| x.upload(&data(&mut rng, 135, 200).to_bytes(DType::BF16)).unwrap();
        let launch = || {
            plan.launch(&g.stream, t.clone()).unwrap().join(&g.stream).unwrap();
            let q = t.row.as_ref().unwrap();
            back.launch(&g.stream, q, &out.t).unwrap().join(&g.stream).unwrap();
        };
        g.replays(&[&out.t], change, || out.t.poison().unwrap(), launch);
        out.alone("replays");
    }
}

/// The state lies on the device: a replay moves it on as a launch of the host plan does.
#[test]
fn replays_move_delayed_scaling_on() {
    let Some(g) = gpu() else { return };
    let mut rng = Rng::new(8);
    let scaling = Scaling::Delayed { window: 3, margin: 1 };
    let desc =
        QuantDesc { scaling, ..QuantDesc::new(50, 70, DType::F32, FP8[0], ScaleLayout::Tensor) };
    let both = Both::new(&g, desc);
    let host = tensor(&data(&mut rng, 50, 70), DType::F32);
    let x = g.move_here(&host);
    let (want, got) =
        (QuantInputs::new(&desc, &host).unwrap(), QuantInputs::new(&desc, &x).unwrap());
    g.stream.begin_capture().unwrap();
    both.there.launch(&g.stream, got.clone()).unwrap().join(&g.stream).unwrap();
    let graph = g.stream.end_capture().unwrap().instantiate().unwrap();
    for round in 0..20 {
        let size = 2f64.powi(round % 7 * 3 - 9);
        let new = data(&mut rng, 50, 70).map(|v| if round == 11 { 0.0 } else { v * size });
        host.upload(&new.to_bytes(DType::F32)).unwrap();
        x.upload(&new.to_bytes(DType::F32)).unwrap();
        both.here.launch(&both.host, want.clone()).unwrap().wait().unwrap();
        g.stream.replay(&graph).unwrap();
        g.stream.synchronize().unwrap();
        compare(&format!("step {round}"), &got, &want);
        same("scale", both.there.scale().unwrap(), both.here.scale().unwrap());
        same("history", both.there.history().unwrap(), both.here.history().unwrap());
    }
}

#[test]
fn what_lies_elsewhere_is_refused() {
    let Some(g) = gpu() else { return };
    let desc = QuantDesc::new(4, 4, DType::F32, FP8[0], ScaleLayout::Tensor);
    let both = Both::new(&g, desc);
    let t = QuantInputs::new(&desc, &tensor(&Mat::zeros(4, 4), DType::F32)).unwrap();
    let e = both.there.launch(&g.stream, t).err().unwrap();
    assert!(e.to_string().contains("`x`") && e.get_hint().is_some(), "{e}");
    assert!(matches!(both.there.desc().sides, Sides::Row));
    assert!(matches!(g.device, Device::Cuda(_)));
}
