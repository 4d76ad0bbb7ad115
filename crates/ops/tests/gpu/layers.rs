//! `layers` against the host works on the same values, rounded to the same type.

use tilewire_core::{DType, Rng, Shape};
use tilewire_device::{Buffer, Device, Stream, Tensor};
use tilewire_ops::layers::{
    AdamStep, AdamW, AddNorm, CountStep, CrossEntropy, Embed, EmbedBwd, Heads, Init, LayersDesc,
    LayersPlan, NormBwd, Router, RouterBwd, SquareSum, Work, math,
};

use crate::common::{Gpu, gpu};

/// A work's tensors on one device: made on the host, moved where `put` says.
type Move<'a> = &'a dyn Fn(&Tensor) -> Tensor;

struct Sizes {
    n: usize,
    d: usize,
    experts: usize,
    k: usize,
}

const SIZES: [Sizes; 7] = [
    Sizes { n: 37, d: 64, experts: 8, k: 2 },
    Sizes { n: 1, d: 1028, experts: 3, k: 3 },
    Sizes { n: 700, d: 4096, experts: 64, k: 6 },
    Sizes { n: 0, d: 128, experts: 5, k: 1 },
    // Rows for several turns of a block; rows of classes that no quads fill, and more choices than
    // lanes of a row.
    Sizes { n: 9001, d: 64, experts: 201, k: 18 },
    // The most experts of a group of 16 lanes, and one more.
    Sizes { n: 4500, d: 64, experts: 256, k: 8 },
    Sizes { n: 2300, d: 64, experts: 257, k: 8 },
];

fn plan(stream: &Stream, dtype: DType, s: &Sizes) -> LayersPlan {
    let desc = LayersDesc { dtype, rows: s.n, cols: s.d, experts: s.experts };
    let p = LayersPlan::new(desc).unwrap();
    p.prepare(stream).unwrap();
    p
}

fn random(rng: &mut Rng, dtype: DType, rows: usize, cols: usize) -> Tensor {
    let v: Vec<f32> = (0..rows * cols).map(|_| rng.normal()).collect();
    Tensor::from_f32(&v, dtype, Shape::d2(rows, cols)).unwrap()
}

/// Every element of `got` is `want` up to roundings of its type and `tolerance` of the largest of
/// its row.
fn close(what: &str, got: &Tensor, want: &Tensor, tolerance: f64) {
    assert_eq!(got.shape(), want.shape(), "{what}");
    if matches!(got.dtype(), DType::I32 | DType::I64) {
        assert_eq!(got.download().unwrap(), want.download().unwrap(), "{what}");
        return;
    }
    let cols = got.shape().dims().last().copied().unwrap_or(1).max(1);
    let (g, w) = (got.to_f32().unwrap(), want.to_f32().unwrap());
    let rounding = match got.dtype() {
        DType::BF16 => 2f64.powi(-8),
        _ => 0.0,
    };
    for (r, (g, w)) in g.chunks(cols).zip(w.chunks(cols)).enumerate() {
        let most = w.iter().fold(0.0f64, |m, v| m.max(f64::from(v.abs())));
        for (c, (&g, &w)) in g.iter().zip(w).enumerate() {
            let (g, w) = (f64::from(g), f64::from(w));
            let bound = tolerance * most + 2.0 * rounding * w.abs() + 1e-37;
            assert!((g - w).abs() <= bound, "{what} [{r}, {c}]: {g} for {w} (bound {bound:e})");
        }
    }
}

/// Runs a work on both devices, made by `make` from the same host tensors, twice on the device; its
/// outputs (last) are compared, and the two runs are equal to the bit.
fn both<W: Work>(
    (gpu, dtype, s): (&Gpu, DType, &Sizes),
    what: &str,
    tolerance: f64,
    make: impl Fn(Move<'_>) -> (W, Vec<Tensor>),
) {
    let host = Stream::new("host").unwrap();
    let (work, want) = make(&|t| t.to(&Device::Host).unwrap());
    plan(&host, dtype, s).run(&host, &work).unwrap();
    host.synchronize().unwrap();
    let on_gpu = plan(&gpu.stream, dtype, s);
    let run = || {
        let (work, got) = make(&|t| t.to(&gpu.device).unwrap());
        on_gpu.run(&gpu.stream, &work).unwrap();
        gpu.stream.synchronize().unwrap();
        got
    };
    let (first, second) = (run(), run());
    for (i, (a, b)) in first.iter().zip(&second).enumerate() {
        let what = format!("{what} {dtype} n={} d={} output {i}", s.n, s.d);
        close(&what, a, &want[i], tolerance);
        assert_eq!(a.download().unwrap(), b.download().unwrap(), "{what}: two runs differ");
    }
}

#[track_caller]
fn each(test: impl Fn((&Gpu, DType, &Sizes), &mut Rng)) {
    let Some(gpu) = gpu() else { return };
    let mut rng = Rng::new(9);
    for dtype in [DType::F32, DType::BF16] {
        for s in &SIZES {
            test((&gpu, dtype, s), &mut rng);
        }
    }
}

fn room(dtype: DType, rows: usize, cols: usize) -> Tensor {
    Tensor::poisoned(dtype, Shape::d2(rows, cols))
}

#[test]
fn embedding_and_its_gradient() {
    each(|at, rng| {
        let (_, t, s) = at;
        let tokens: Vec<u8> = (0..s.n).map(|_| (rng.below(7) * 37) as u8).collect();
        let tokens = Tensor::from_slice(&tokens, Shape::d1(s.n)).unwrap();
        let (table, dx) = (random(rng, t, 256, s.d), random(rng, DType::F32, s.n, s.d));
        both(at, "embed", 0.0, |put| {
            let x = put(&room(DType::F32, s.n, s.d));
            (Embed { tokens: put(&tokens), table: put(&table), x: x.clone() }, vec![x])
        });
        // Of many rows the host's own sum, one after the other, is not more exact.
        let tolerance = if s.n > 1000 { 4e-6 } else { 1e-6 };
        both(at, "embed_bwd", tolerance, |put| {
            let grad = put(&room(DType::F32, 256, s.d));
            (EmbedBwd { tokens: put(&tokens), dx: put(&dx), grad: grad.clone() }, vec![grad])
        });
    });
}

#[test]
fn norm_and_its_gradient() {
    each(|at, rng| {
        let (_, t, s) = at;
        let wide = |rng: &mut Rng| random(rng, DType::F32, s.n, s.d);
        let (x, y, w) = (wide(rng), random(rng, t, s.n, s.d), random(rng, t, 1, s.d));
        let (dy, residual) = (random(rng, t, s.n, s.d), wide(rng));
        for add in [true, false] {
            both(at, "add_norm", 2e-6, |put| {
                let (sum, out) = (put(&room(DType::F32, s.n, s.d)), put(&room(t, s.n, s.d)));
                let with = add.then(|| (put(&y), sum.clone()));
                let outs = if add { vec![sum, out.clone()] } else { vec![out.clone()] };
                (AddNorm { x: put(&x), add: with, w: put(&w), out }, outs)
            });
            both(at, "norm_bwd", 4e-6, |put| {
                let (dx, dw) = (put(&room(DType::F32, s.n, s.d)), put(&room(DType::F32, 1, s.d)));
                let narrow = (t != DType::F32).then(|| put(&room(t, s.n, s.d)));
                let work = NormBwd {
                    x: put(&x),
                    w: put(&w),
                    dy: put(&dy),
                    residual: add.then(|| put(&residual)),
                    dx: dx.clone(),
                    narrow: narrow.clone(),
                    dw: dw.clone(),
                };
                (work, [dx, dw].into_iter().chain(narrow).collect())
            });
        }
    });
}

#[test]
fn heads_apart_and_joined() {
    each(|at, rng| {
        let (_, t, s) = at;
        let (heads, kv, dim) = (4, 2, if s.n > 500 { 128 } else { 16 });
        let width = (heads + 2 * kv) * dim;
        let positions: Vec<i32> = (0..s.n).map(|_| rng.below(40) as i32).collect();
        let positions = Tensor::from_slice(&positions, Shape::d1(s.n)).unwrap();
        let table = Tensor::from_slice(&math::rope_table(40, dim), Shape::d2(40, dim)).unwrap();
        let rows = random(rng, t, s.n, width);
        let [q, k, v] = [heads, kv, kv].map(|h| random(rng, t, s.n, h * dim));
        for join in [false, true] {
            both(at, "heads", 2e-7, |put| {
                let given = |yes: bool, t: &Tensor| {
                    put(&if yes { t.clone() } else { room(t.dtype(), s.n, t.shape().dim(1)) })
                };
                let r = given(!join, &rows);
                let [q, k, v] = [&q, &k, &v].map(|t| given(join, t));
                let outs =
                    if join { vec![r.clone()] } else { vec![q.clone(), k.clone(), v.clone()] };
                let (positions, table) = (put(&positions), put(&table));
                (Heads { rows: r, q, k, v, positions, table, join }, outs)
            });
        }
    });
}

#[test]
fn router_and_its_gradient() {
    each(|at, rng| {
        let (_, t, s) = at;
        let (e, k) = (s.experts, s.k);
        let mut values: Vec<f32> = (0..s.n * e).map(|_| 2.0 * rng.normal()).collect();
        // Ties go to the lower expert.
        values.chunks_mut(e).step_by(3).for_each(|row| row.fill(0.25));
        let logits = Tensor::from_slice(&values, Shape::d2(s.n, e)).unwrap();
        let f32s = |rows, cols| room(DType::F32, rows, cols);
        both(at, "router", 2e-6, |put| {
            let (probs, weights, stats) =
                (put(&f32s(s.n, e)), put(&f32s(s.n, k)), put(&f32s(1, 2 * e)));
            let topk = put(&room(DType::I64, s.n, k));
            let work = Router {
                logits: put(&logits),
                probs: probs.clone(),
                topk: topk.clone(),
                weights: weights.clone(),
                stats: stats.clone(),
            };
            (work, vec![topk, probs, weights, stats])
        });
        let r = math::router(values, e, k);
        let (d_weights, load) = (random(rng, DType::F32, s.n, k), random(rng, DType::F32, 1, e));
        for with in [true, false] {
            both(at, "router_bwd", 2e-5, |put| {
                let d_logits = put(&room(t, s.n, e));
                let of =
                    |v: &[f32], cols| put(&Tensor::from_slice(v, Shape::d2(s.n, cols)).unwrap());
                let work = RouterBwd {
                    probs: of(&r.probs, e),
                    topk: put(&Tensor::from_slice(&r.topk, Shape::d2(s.n, k)).unwrap()),
                    weights: of(&r.weights, k),
                    d_weights: with.then(|| put(&d_weights)),
                    load: put(&load),
                    scale: 0.125,
                    d_logits: d_logits.clone(),
                };
                (work, vec![d_logits])
            });
        }
    });
}

#[test]
fn loss_and_its_gradient() {
    each(|at, rng| {
        let (_, t, s) = at;
        for cols in [256, 27, 500] {
            let logits = random(rng, DType::F32, s.n, cols);
            let targets: Vec<i32> =
                (0..s.n).map(|_| rng.below(cols as u64 + 1) as i32 - 1).collect();
            let targets = Tensor::from_slice(&targets, Shape::d1(s.n)).unwrap();
            both(at, "cross_entropy", 2e-6, |put| {
                let (d_logits, loss) = (put(&room(t, s.n, cols)), put(&room(DType::F32, 1, 1)));
                let work = CrossEntropy {
                    logits: put(&logits),
                    targets: put(&targets),
                    scale: 1.0 / 700.0,
                    d_logits: d_logits.clone(),
                    loss: loss.clone(),
                };
                (work, vec![d_logits, loss])
            });
        }
    });
}

#[test]
fn norm_of_gradients_and_optimizer() {
    each(|at, rng| {
        let (_, t, s) = at;
        let wide = |rng: &mut Rng| random(rng, DType::F32, s.n, s.d);
        let parts = [wide(rng), random(rng, DType::F32, 1, 5), wide(rng)];
        both(at, "square_sum", 1e-6, |put| {
            let out = put(&room(DType::F32, 1, 2));
            let work = SquareSum { of: parts.iter().map(put).collect(), out: out.clone() };
            // Compared relative to the first: the second holds what that has lost.
            (work, vec![out])
        });
        if s.n == 0 {
            return;
        }
        let (w, g, m) = (wide(rng), wide(rng), wide(rng));
        let v: Vec<f32> = m.to_f32().unwrap().iter().map(|m| m * m + 0.1).collect();
        let v = Tensor::from_slice(&v, Shape::d2(s.n, s.d)).unwrap();
        let narrow = Tensor::from_f32(&w.to_f32().unwrap(), t, w.shape()).unwrap();
        let bad = f32::from_bits(0x7fc0_0000);
        let smalls = [
            (0, [1.0, 0.25, 0.0, 1.0]),
            (30, [2.0, 900.0, 0.5, 0.0]),
            (7, [bad, 1.0, 0.0, 0.0]),
            (9, [1.0, 1.0, 0.0, bad]),
        ];
        for (step, small) in smalls {
            let small = Tensor::from_slice(&small, Shape::d1(4)).unwrap();
            let count = Tensor::from_slice(&[step], Shape::d1(1)).unwrap();
            let cfg = AdamW { total: 60, ..AdamW::default() };
            both(at, "adamw", 2e-6, |put| {
                let (w, m, v) = (put(&w), put(&m), put(&v));
                let master = (t != DType::F32).then(|| w.clone());
                let w = if t == DType::F32 { w } else { put(&narrow) };
                let work = AdamStep {
                    cfg,
                    decay: true,
                    w: w.clone(),
                    master: master.clone(),
                    g: put(&g),
                    m: m.clone(),
                    v: v.clone(),
                    small: put(&small),
                    count: put(&count),
                };
                (work, [w, m, v].into_iter().chain(master).collect())
            });
            both(at, "count", 0.0, |put| {
                let c = put(&count);
                (CountStep { small: put(&small), count: c.clone() }, vec![c])
            });
        }
    });
}

#[test]
fn first_values_are_those_of_the_host() {
    each(|at, _| {
        let (_, t, s) = at;
        for std in [0.0, 0.5] {
            both(at, "init", 1e-6, |put| {
                let w = put(&room(t, s.n, s.d));
                let master = (t != DType::F32).then(|| put(&room(DType::F32, s.n, s.d)));
                let (origin, global_cols) = ((3, 5), s.d + 9);
                let work = Init {
                    w: w.clone(),
                    master: master.clone(),
                    origin,
                    global_cols,
                    seed: 4,
                    std,
                };
                (work, std::iter::once(w).chain(master).collect())
            });
        }
    });
}

/// Captured once, replayed with other values: the bits of a launch.
#[test]
fn a_replayed_work_is_the_launched_work() {
    let Some(gpu) = gpu() else { return };
    let (mut rng, s) = (Rng::new(3), &SIZES[0]);
    let p = plan(&gpu.stream, DType::BF16, s);
    let on = |t: &Tensor| t.to(&gpu.device).unwrap();
    let (x, w) =
        (on(&random(&mut rng, DType::F32, s.n, s.d)), random(&mut rng, DType::BF16, 1, s.d));
    let out = on(&room(DType::BF16, s.n, s.d));
    let work = AddNorm { x: x.clone(), add: None, w: on(&w), out: out.clone() };
    gpu.stream.begin_capture().unwrap();
    p.run(&gpu.stream, &work).unwrap();
    let graph = gpu.stream.end_capture().unwrap().instantiate().unwrap();
    for _ in 0..5 {
        x.upload(&random(&mut rng, DType::F32, s.n, s.d).download().unwrap()).unwrap();
        out.poison().unwrap();
        gpu.stream.replay(&graph).unwrap();
        gpu.stream.synchronize().unwrap();
        let replayed = out.download().unwrap();
        out.poison().unwrap();
        p.run(&gpu.stream, &work).unwrap();
        gpu.stream.synchronize().unwrap();
        assert_eq!(replayed, out.download().unwrap());
    }
}
