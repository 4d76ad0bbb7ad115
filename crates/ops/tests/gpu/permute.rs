//! `permute` against the host plan, to the bit; gradients of weights against f64.

use tilewire_core::numerics::Bound;
use tilewire_core::{DType, Rng, Shape};
use tilewire_device::{Buffer, Stream, Tensor};
use tilewire_ops::permute::{
    PermuteDesc, PermuteMap, PermutePlan, Permuted, Tokens, UnpermuteGrads, WeightedGrads,
};
use tilewire_oracle::Mat;

use crate::common::{Gpu, WIDE, check, gpu, same};

/// One device's plan, map and tensors.
struct Side {
    stream: Stream,
    plan: PermutePlan,
    map: PermuteMap,
    idx: Tensor,
    x: Tokens,
    permuted: Permuted,
    /// Rows that are unpermuted: the gradients of permuted tokens, too.
    rows: Tensor,
    row_weights: Tensor,
    y: Tensor,
    y_plain: Tensor,
    back: Tokens,
    grads: UnpermuteGrads,
    grads_plain: UnpermuteGrads,
}

/// Tensors of the host, from which those of the device are copied.
struct Data {
    idx: Tensor,
    x: Tokens,
    rows: Tensor,
    row_weights: Tensor,
    d_out: Tensor,
}

fn f32s(rng: &mut Rng, dtype: DType, shape: Shape) -> Tensor {
    let v: Vec<f32> = (0..shape.num_elems()).map(|_| rng.normal()).collect();
    Tensor::from_f32(&v, dtype, shape).unwrap()
}

/// Random experts, some masked.
fn choices(rng: &mut Rng, d: &PermuteDesc, tokens: usize, wide: bool) -> Tensor {
    let shape = Shape::d2(tokens, d.top_k);
    let mut one = || match rng.below(6) {
        0 => -1,
        _ => rng.below(d.num_experts as u64) as i64,
    };
    let v: Vec<i64> = (0..tokens * d.top_k).map(|_| one()).collect();
    let narrow: Vec<i32> = v.iter().map(|&e| e as i32).collect();
    if wide { Tensor::from_slice(&v, shape) } else { Tensor::from_slice(&narrow, shape) }.unwrap()
}

impl Data {
    fn new(rng: &mut Rng, d: &PermuteDesc, tokens: usize, wide: bool) -> Self {
        let scales =
            (d.num_scales > 0).then(|| f32s(rng, DType::F32, Shape::d2(tokens, d.num_scales)));
        Self {
            idx: choices(rng, d, tokens, wide),
            x: Tokens {
                x: f32s(rng, d.dtype, Shape::d2(tokens, d.hidden)),
                weights: Some(f32s(rng, DType::F32, Shape::d2(tokens, d.top_k))),
                scales,
            },
            rows: f32s(rng, d.out, Shape::d2(d.capacity, d.hidden)),
            row_weights: f32s(rng, DType::F32, Shape::d1(d.capacity)),
            d_out: f32s(rng, d.out, Shape::d2(tokens, d.hidden)),
        }
    }
}

impl Side {
    fn new(stream: &Stream, data: &Data, d: &PermuteDesc, put: impl Fn(&Tensor) -> Tensor) -> Self {
        let plan = PermutePlan::new(*d).unwrap();
        plan.prepare(stream).unwrap();
        let tokens = data.idx.shape().dim(0);
        let out = |dtype, shape| put(&Tensor::poisoned(dtype, shape));
        let all = |t: &Tokens| Tokens {
            x: put(&t.x),
            weights: t.weights.as_ref().map(&put),
            scales: t.scales.as_ref().map(&put),
        };
        let x = all(&data.x);
        let grads = |weighted| UnpermuteGrads {
            d_out: put(&data.d_out),
            d_rows: out(d.out, Shape::d2(d.capacity, d.hidden)),
            weighted,
        };
        let choice_words = || out(DType::F32, Shape::d2(tokens, d.top_k));
        let weighted = WeightedGrads {
            weights: x.weights.clone().unwrap(),
            rows: put(&data.rows),
            d_weights: choice_words(),
        };
        let results = || out(d.out, Shape::d2(tokens, d.hidden));
        Self {
            stream: stream.clone(),
            map: plan.map(tokens).unwrap(),
            plan,
            idx: put(&data.idx),
            permuted: Permuted {
                x: out(d.dtype, Shape::d2(d.capacity, d.hidden)),
                weights: Some(out(DType::F32, Shape::d1(d.capacity))),
                scales: (d.num_scales > 0)
                    .then(|| out(DType::F32, Shape::d2(d.capacity, d.num_scales))),
            },
            rows: put(&data.rows),
            row_weights: put(&data.row_weights),
            y: results(),
            y_plain: results(),
            back: Tokens { x: results(), weights: Some(choice_words()), scales: None },
            grads: grads(Some(weighted)),
            grads_plain: grads(None),
            x,
        }
    }

    /// Queues all there is.
    fn run(&self) {
        let (s, p, m) = (&self.stream, &self.plan, &self.map);
        p.route(s, &self.idx, m).unwrap().join(s).unwrap();
        p.permute(s, m, &self.x, &self.permuted).unwrap().join(s).unwrap();
        let weights = self.x.weights.as_ref();
        p.unpermute(s, m, (&self.rows, weights), &self.y).unwrap().join(s).unwrap();
        p.unpermute(s, m, (&self.rows, None), &self.y_plain).unwrap().join(s).unwrap();
        let g = Permuted {
            x: self.rows.clone(),
            weights: Some(self.row_weights.clone()),
            scales: None,
        };
        p.permute_bwd(s, m, &g, &self.back).unwrap().join(s).unwrap();
        p.unpermute_bwd(s, m, &self.grads).unwrap().join(s).unwrap();
        p.unpermute_bwd(s, m, &self.grads_plain).unwrap().join(s).unwrap();
    }

    fn d_weights(&self) -> &Tensor {
        &self.grads.weighted.as_ref().unwrap().d_weights
    }

    /// Every result but the gradients of weights, with its name.
    fn outs(&self) -> Vec<(&'static str, &Tensor)> {
        let mut v = vec![
            ("slots", self.map.slots()),
            ("sources", self.map.sources()),
            ("m_splits", self.map.m_splits()),
            ("total", self.map.total()),
            ("dropped", self.map.dropped()),
            ("status", self.map.status()),
            ("permuted", &self.permuted.x),
            ("y", &self.y),
            ("y without weights", &self.y_plain),
            ("permute_bwd", &self.back.x),
            ("d_rows", &self.grads.d_rows),
            ("d_rows without weights", &self.grads_plain.d_rows),
        ];
        v.extend(self.permuted.weights.as_ref().map(|t| ("permuted weights", t)));
        v.extend(self.permuted.scales.as_ref().map(|t| ("permuted scales", t)));
        v.extend(self.back.weights.as_ref().map(|t| ("gradients of permuted weights", t)));
        v
    }
}

/// The gradients of the weights of `side` against f64.
fn check_d_weights(what: &str, d: &PermuteDesc, data: &Data, side: &Side) {
    let slots = side.map.slots().to_vec::<i32>().unwrap();
    let (dy, rows) = (data.d_out.to_f32().unwrap(), data.rows.to_f32().unwrap());
    let sum = |abs: bool| {
        let one = |(i, &slot): (usize, &i32)| {
            let Ok(r) = usize::try_from(slot) else { return 0.0 };
            let (a, b) = (&dy[i / d.top_k * d.hidden..][..d.hidden], &rows[r * d.hidden..]);
            let terms = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
            if abs { terms.map(f64::abs).sum() } else { terms.sum::<f64>() }
        };
        Mat::new(1, slots.len(), slots.iter().enumerate().map(one).collect())
    };
    check(what, side.d_weights(), &sum(false), &sum(true), &Bound::local(DType::F32, d.hidden));
}

fn desc(dtype: DType, [tokens, hidden, experts, k, align]: [usize; 5], cut: usize) -> PermuteDesc {
    let mut d = PermuteDesc { align, ..PermuteDesc::new(tokens, hidden, experts, k, dtype) };
    d.capacity = d.worst_case().saturating_sub(cut);
    d
}

/// Runs on both devices and compares.
fn both(g: &Gpu, d: &PermuteDesc, data: &Data) {
    let host = Side::new(&Stream::new("host").unwrap(), data, d, Tensor::clone);
    let there = Side::new(&g.stream, data, d, |t| g.move_here(t));
    host.run();
    host.stream.synchronize().unwrap();
    there.run();
    g.stream.synchronize().unwrap();
    for ((what, a), (_, b)) in there.outs().into_iter().zip(host.outs()) {
        same(&format!("{d}: {what}"), a, b);
    }
    check_d_weights(&format!("{d}: d_weights"), d, data, &there);
}

const SIZES: [[usize; 5]; 8] = [
    [0, 8, 3, 2, 1],
    [1, 1, 1, 1, 1],
    [5, 0, 3, 2, 1],
    [7, 33, 5, 3, 4],
    [64, 128, 8, 2, 16],
    [131, 257, 300, 8, 1],
    [1500, 16, 7, 4, 3],
    [40, 1028, 64, 32, 128],
];

fn every_size(dtype: DType) {
    let Some(g) = gpu() else { return };
    let mut rng = Rng::new(9);
    for (i, size) in SIZES.into_iter().enumerate() {
        for cut in [0, 11] {
            let mut d = desc(dtype, size, cut);
            d.num_scales = if dtype.is_fp8() { 3 } else { 0 };
            let tokens = size[0] - size[0] / 7;
            both(&g, &d, &Data::new(&mut rng, &d, tokens, i % 2 == 0));
        }
    }
}

#[test]
fn rows_of_f32() {
    every_size(WIDE[0]);
}

#[test]
fn rows_of_bf16() {
    every_size(WIDE[1]);
}

#[test]
fn rows_of_f16() {
    every_size(WIDE[2]);
}

#[test]
fn rows_of_fp8_with_scales() {
    every_size(DType::F8E4M3);
}

/// An index that is no expert: the map says so, and what is made from it is poison. So is what is
/// made from a map without a routing.
#[test]
fn a_bad_index_poisons() {
    let Some(g) = gpu() else { return };
    let d = desc(DType::BF16, [20, 10, 4, 2, 1], 0);
    let mut data = Data::new(&mut Rng::new(10), &d, 20, true);
    let mut idx = data.idx.to_vec::<i64>().unwrap();
    idx[13] = 4;
    data.idx = Tensor::from_slice(&idx, Shape::d2(20, 2)).unwrap();
    let host = Side::new(&Stream::new("host").unwrap(), &data, &d, Tensor::clone);
    let there = Side::new(&g.stream, &data, &d, |t| g.move_here(t));
    assert!(there.map.check().is_err(), "not routed");
    there
        .plan
        .unpermute(&g.stream, &there.map, (&there.rows, None), &there.y)
        .unwrap()
        .wait()
        .unwrap();
    assert!(there.y.download().unwrap().iter().all(|&b| b == DType::POISON));
    host.run();
    there.run();
    g.stream.synchronize().unwrap();
    host.stream.synchronize().unwrap();
    assert!(there.map.check().unwrap_err().to_string().contains("expert"));
    for ((what, a), (_, b)) in there.outs().into_iter().zip(host.outs()) {
        same(what, a, b);
    }
    same("d_weights", there.d_weights(), host.d_weights());
}

#[test]
fn replays_follow_the_routing() {
    let Some(g) = gpu() else { return };
    let mut rng = Rng::new(11);
    let d = desc(DType::BF16, [300, 72, 9, 4, 8], 500);
    let data = Data::new(&mut rng, &d, 290, true);
    let there = Side::new(&g.stream, &data, &d, |t| g.move_here(t));
    let outs: Vec<&Tensor> =
        there.outs().into_iter().map(|(_, t)| t).chain([there.d_weights()]).collect();
    let change = |_| {
        let new = choices(&mut rng, &d, 290, true);
        there.idx.upload(&new.download().unwrap()).unwrap();
        crate::common::refill(&there.x.x, &mut rng);
        crate::common::refill(&there.rows, &mut rng);
    };
    let reset = || outs.iter().for_each(|t| t.poison().unwrap());
    g.replays(&outs, change, reset, || there.run());
}

#[test]
fn a_map_of_the_host_is_refused() {
    let Some(g) = gpu() else { return };
    let d = desc(DType::F32, [8, 4, 2, 1, 1], 0);
    let data = Data::new(&mut Rng::new(12), &d, 8, true);
    let plan = PermutePlan::new(d).unwrap();
    let map = plan.map(8).unwrap();
    plan.prepare(&g.stream).unwrap();
    let idx = g.move_here(&data.idx);
    let e = plan.route(&g.stream, &idx, &map).err().unwrap();
    assert!(e.to_string().contains("`map`") && e.get_hint().is_some(), "{e}");
    let map = plan.map(8).unwrap();
    assert!(plan.route(&g.stream, &data.idx, &map).is_err());
}
