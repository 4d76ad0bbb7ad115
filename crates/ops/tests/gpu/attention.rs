//! `attention` against the oracle: every element of out, lse and all gradients.

use tilewire_core::{DType, Rng, Shape};
use tilewire_device::{Stream, Tensor};
use tilewire_ops::attention::{
    AttentionDesc, AttentionPlan, AttnBackend, AttnGrads, AttnInputs, AttnMask, AttnOffsets,
    AttnOperand, AttnOut, AttnSaved, BiasShape, Dropout, HeadScales, Sequences,
};
use tilewire_oracle::Mat;
use tilewire_oracle::attention as oracle;

use crate::common::{Gpu, Out, WIDE, gpu, random, refill};

/// Operands, as the oracle takes them.
struct Data {
    /// Of FP8: codes and scales of q, k and v.
    codes: Option<[(Mat, Mat); 3]>,
    q: Mat,
    k: Mat,
    v: Mat,
    d_out: Mat,
    bias: Option<oracle::Bias>,
    sink: Option<Vec<f64>>,
}

impl Data {
    fn new(d: &AttentionDesc, rng: &mut Rng) -> Self {
        let s = &d.sequences;
        let mut m = |rows, cols, t| random(rng, rows, cols, t);
        if d.dtype.is_fp8() {
            let scale = |v: f64| f64::from((0.2 + v.abs()) as f32);
            let tokens = match d.scales {
                HeadScales::Token => 1,
                HeadScales::Block128 => 128,
            };
            let mut coded = |rows: usize, heads, dim| {
                let scales = m(rows.div_ceil(tokens), heads, DType::F32).map(scale);
                (m(rows, heads * dim, d.dtype), scales)
            };
            let codes = [
                coded(s.tokens_q, d.heads_q, d.dqk),
                coded(s.tokens_kv, d.heads_kv, d.dqk),
                coded(s.tokens_kv, d.heads_kv, d.dv),
            ];
            let scales = HeadScales::Token;
            let wide = AttentionDesc { dtype: DType::F32, scales, ..d.clone() };
            let [q, k, v] = codes.each_ref().map(|(x, s)| {
                let dim = x.cols / s.cols;
                // Rounded once to f32, as every bit counts.
                Mat::from_fn(x.rows, x.cols, |i, j| {
                    f64::from(x.at(i, j) as f32 * s.at(i / tokens, j / dim) as f32)
                })
            });
            return Self { codes: Some(codes), q, k, v, ..Self::new(&wide, rng) };
        }
        let q = m(s.tokens_q, d.heads_q * d.dqk, d.dtype);
        let k = m(s.tokens_kv, d.heads_kv * d.dqk, d.dtype);
        let v = m(s.tokens_kv, d.heads_kv * d.dv, d.dtype);
        let d_out = m(s.tokens_q, d.heads_q * d.dv, d.out);
        let bias = d
            .bias
            .map(|b| oracle::Bias::new(b.heads, b.sq, b.skv, m(b.heads * b.sq, b.skv, DType::F32)));
        let sink = d.sink.then(|| m(1, d.heads_q, DType::F32).data);
        Self { codes: None, q, k, v, d_out, bias, sink }
    }

    /// As a plan by `by` computes: from codes, or from what they are widened to.
    fn by(self, d: &AttentionDesc, by: By) -> Self {
        if self.codes.is_none() || by.is_by_fp8_products(d) {
            return self;
        }
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|m| m.rounded(d.widened()));
        Self { q, k, v, ..self }
    }

    fn inputs(&self) -> oracle::AttnInputs<'_> {
        oracle::AttnInputs {
            bias: self.bias.as_ref(),
            sink: self.sink.as_deref(),
            ..oracle::AttnInputs::new(&self.q, &self.k, &self.v)
        }
    }
}

fn spec(d: &AttentionDesc) -> (oracle::AttnSpec, oracle::Sequences) {
    let spec = oracle::AttnSpec {
        heads_q: d.heads_q,
        heads_kv: d.heads_kv,
        scale: d.scale,
        mask: oracle::AttnMask { left: d.mask.left, right: d.mask.right },
        softcap: d.softcap,
        dropout: d.dropout.map(|x| oracle::Dropout { p: x.p, seed: x.seed }),
    };
    let seqs = oracle::Sequences { q: d.sequences.q.clone(), kv: d.sequences.kv.clone() };
    (spec, seqs)
}

/// Unit roundoff.
fn roundoff(t: DType) -> f64 {
    match t {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        _ => 2f64.powi(-24),
    }
}

/// What may be wrong with sums, before they are rounded: probabilities and the gradients of scores
/// are rounded to the inputs' type before their products, and `delta` is made of the rounded
/// output.
struct Magnitudes {
    lse: Mat,
    out: Mat,
    dq: Mat,
    dk: Mat,
    dv: Mat,
    /// By query heads, where the inputs have sinks: what rounded probabilities move, row by row.
    dsink: Vec<f64>,
}

/// Softmax and products in f32.
const SMALL: f64 = 3e-5;

fn magnitudes(d: &AttentionDesc, x: &Data, want: &oracle::AttnOut, by: By) -> Magnitudes {
    let (spec, seqs) = spec(d);
    let u = by.roundoff(d) * 1.1 + SMALL;
    let abs = |m: &Mat| m.map(f64::abs);
    let (v, d_out) = (abs(&x.v), abs(&x.d_out));
    let out = oracle::attention(&spec, &oracle::AttnInputs { v: &v, ..x.inputs() }, &seqs).o;
    let mut dv = oracle::attention_bwd(&spec, &x.inputs(), &seqs, &d_out).dv;
    let (mut dq, mut dk) = (Mat::zeros(x.q.rows, x.q.cols), Mat::zeros(x.k.rows, x.k.cols));
    let mut dsink = vec![0.0; d.heads_q];
    let group = d.heads_q / d.heads_kv;
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    for (h, s) in (0..d.heads_q).flat_map(|h| (0..seqs.q.len()).map(move |s| (h, s))) {
        let (sq, skv) = (&seqs.q[s], &seqs.kv[s]);
        let (qc, kc, oc, vc) = (h * d.dqk, h / group * d.dqk, h * d.dv, h / group * d.dv);
        for (i, r) in sq.clone().enumerate() {
            let g = &x.d_out.row(r)[oc..oc + d.dv];
            let o = &want.o.row(r)[oc..oc + d.dv];
            // How far `delta` may be off.
            let off = dot(&abs_of(g), &abs_of(o)) * (roundoff(d.out) * 1.1 + SMALL)
                + dot(&abs_of(g), &out.row(r)[oc..oc + d.dv]) * u;
            let delta = dot(g, o);
            let sink = x.sink.as_ref().map_or(0.0, |s| (s[h] - want.lse.at(h, r)).exp());
            for (j, c) in skv.clone().enumerate() {
                if !spec.mask.sees(i, j, sq.len(), skv.len()) {
                    continue;
                }
                let (qr, kr) = (&x.q.row(r)[qc..qc + d.dqk], &x.k.row(c)[kc..kc + d.dqk]);
                let mut z = dot(qr, kr) * d.scale;
                z = d.softcap.map_or(z, |cap| cap * (z / cap).tanh());
                let bias = x.bias.as_ref();
                z +=
                    bias.map_or(0.0, |b| b.data.at(if b.heads == 1 { i } else { h * b.sq + i }, j));
                let p = (z - want.lse.at(h, r)).exp();
                let keep = d.dropout.map_or(1.0, |x| 1.0 / (1.0 - x.p));
                let vr = &x.v.row(c)[vc..vc + d.dv];
                let dp = dot(&abs_of(g), &abs_of(vr)) * keep;
                dsink[h] += (u * sink * p * dot(g, vr)).powi(2);
                // Behind FP8 products scores are made anew of widened q and k.
                let moved = if by.is_by_fp8_products(d) {
                    let terms = dot(&abs_of(qr), &abs_of(kr)) * d.scale.abs();
                    (2.0 * roundoff(d.widened()) * terms).exp_m1()
                } else {
                    0.0
                };
                let e = p
                    * ((dot(g, vr).abs() * keep + delta.abs()) * (u + moved)
                        + (dp + delta.abs() + 1.0) * SMALL
                        + off);
                for (n, g) in g.iter().enumerate() {
                    *dv.at_mut(c, vc + n) += p * keep * moved * g.abs() / u;
                }
                for n in 0..d.dqk {
                    *dq.at_mut(r, qc + n) += e * kr[n].abs() * d.scale.abs();
                    *dk.at_mut(c, kc + n) += e * qr[n].abs() * d.scale.abs();
                }
            }
        }
    }
    let mut lse = want.lse.map(|l| 1e-5 * (4.0 + l.abs()));
    if by.is_by_fp8_products(d) {
        // Their sums have some 14 bits, the others are cut off.
        for (h, s) in (0..d.heads_q).flat_map(|h| (0..seqs.q.len()).map(move |s| (h, s))) {
            let (qc, kc) = (h * d.dqk, h / group * d.dqk);
            for r in seqs.q[s].clone() {
                let q = abs_of(&x.q.row(r)[qc..qc + d.dqk]);
                let of = |c| dot(&q, &abs_of(&x.k.row(c)[kc..kc + d.dqk]));
                let most = seqs.kv[s].clone().map(of).fold(0.0, f64::max);
                *lse.at_mut(h, r) += 8.0 * 2f64.powi(-13) * d.scale.abs() * most;
            }
        }
    }
    Magnitudes {
        lse,
        out: out.map(|x| x * u),
        dq,
        dk,
        dv: dv.map(|x| x * u),
        dsink: dsink.into_iter().map(f64::sqrt).collect(),
    }
}

fn abs_of(x: &[f64]) -> Vec<f64> {
    x.iter().map(|x| x.abs()).collect()
}

/// Every element within the unit roundoff of its type and `off`.
fn check(what: &str, got: &Out, want: &Mat, off: &Mat) {
    got.alone(what);
    close(what, &got.t, want, off);
}

fn close(what: &str, got: &Tensor, want: &Mat, off: &Mat) {
    let (u, tiny) = (roundoff(got.dtype()), if got.dtype() == DType::F16 { 1e-6 } else { 1e-9 });
    let values = got.to_f32().unwrap();
    assert_eq!(values.len(), want.data.len(), "{what}");
    let mut worst = 0.0f64;
    for (i, (g, y)) in values.iter().zip(&want.data).enumerate() {
        if f64::from(*g) == *y {
            continue;
        }
        let (err, allowed) =
            ((f64::from(*g) - y).abs(), u * y.abs() + (1.0 + u) * off.data[i] + tiny);
        assert!(y.is_finite() && err <= allowed, "{what}: {g}, not {y} +- {allowed} at {i}");
        worst = worst.max(err / allowed);
    }
    assert!(worst <= 1.0, "{what}");
}

/// How a plan computes.
#[derive(Clone, Copy)]
pub enum By {
    Backend(AttnBackend),
    /// For sm_90a, all gradients by one kernel.
    Fused,
    /// The same, with dq added in any order.
    Unordered,
    /// As a plan may choose, which multiplies the codes of FP8.
    AutoProducts,
}

impl From<AttnBackend> for By {
    fn from(backend: AttnBackend) -> By {
        By::Backend(backend)
    }
}

impl By {
    fn plan(self, d: &AttentionDesc) -> AttentionPlan {
        let of = |by| AttentionPlan::with_backend(d.clone(), None, by).unwrap();
        match self {
            By::Backend(by) => of(by),
            By::AutoProducts => of(AttnBackend::Auto),
            By::Fused => of(AttnBackend::Hopper).with_fused_backward(),
            By::Unordered => of(AttnBackend::Hopper).with_unordered_backward(),
        }
    }

    /// Of the type that kernels round probabilities and the gradients of scores to.
    fn roundoff(self, d: &AttentionDesc) -> f64 {
        match d.dtype.is_fp8() {
            true if self.is_by_fp8_products(d) => 2f64.powi(-4),
            true => roundoff(d.widened()),
            false => roundoff(d.dtype),
        }
    }

    fn is_by_fp8_products(self, d: &AttentionDesc) -> bool {
        matches!(self, By::Backend(AttnBackend::Hopper) | By::AutoProducts)
            && d.scales == HeadScales::Block128
    }
}

/// Tensors of a plan on the device.
struct Side {
    plan: AttentionPlan,
    x: AttnInputs,
    d_out: Tensor,
    out: Out,
    lse: Out,
    grads: [Out; 3],
    dbias: Option<Tensor>,
    dsink: Option<Tensor>,
}

impl Side {
    fn new(g: &Gpu, d: &AttentionDesc, x: &Data, by: By) -> Self {
        let plan = by.plan(d);
        plan.prepare(&g.stream).unwrap();
        let put = |m: &Mat| g.put(m, d.dtype);
        let mut inputs = AttnInputs::new(put(&x.q), put(&x.k), put(&x.v));
        if let Some(codes) = &x.codes {
            let [q, k, v] = codes
                .each_ref()
                .map(|(x, s)| AttnOperand { data: put(x), scales: Some(g.put(s, DType::F32)) });
            (inputs.q, inputs.k, inputs.v) = (q, k, v);
        }
        inputs.bias = x.bias.as_ref().map(|b| g.put(&b.data, DType::F32));
        inputs.sink = x.sink.as_ref().map(|s| g.put_f32(s));
        let like = |m: &Mat| g.out(d.out, m.rows, m.cols);
        let poisoned = |t: &Tensor| g.move_here(&Tensor::poisoned(DType::F32, t.shape()));
        Self {
            plan,
            d_out: g.put(&x.d_out, d.out),
            out: like(&x.d_out),
            lse: g.out(DType::F32, d.heads_q, d.sequences.tokens_q),
            grads: [like(&x.q), like(&x.k), like(&x.v)],
            dbias: inputs.bias.as_ref().map(poisoned),
            dsink: inputs.sink.as_ref().map(poisoned),
            x: inputs,
        }
    }

    fn launch(&self, stream: &Stream) {
        let out = AttnOut { out: self.out.t.clone(), lse: self.lse.t.clone() };
        let _out = self.plan.launch_fwd(stream, &self.x, out).unwrap();
        let [dq, dk, dv] = self.grads.each_ref().map(|g| g.t.clone());
        let (dbias, dsink) = (self.dbias.clone(), self.dsink.clone());
        let (out, lse, d_out) = (self.out.t.clone(), self.lse.t.clone(), self.d_out.clone());
        let saved = AttnSaved { out, lse, d_out };
        let grads = AttnGrads { dbias, dsink, ..AttnGrads::new(dq, dk, dv) };
        let _grads = self.plan.launch_bwd(stream, &self.x, saved, grads).unwrap();
    }

    fn results(&self) -> Vec<&Tensor> {
        let all = [&self.out, &self.lse].into_iter().chain(&self.grads).map(|o| &o.t);
        all.chain(&self.dbias).chain(&self.dsink).collect()
    }
}

/// Forward and backward of one description, against the oracle.
fn run(g: &Gpu, d: &AttentionDesc) {
    run_by(g, d, AttnBackend::Auto);
}

/// The same by a backend or kernel; what the plan says of itself.
pub fn run_by(g: &Gpu, d: &AttentionDesc, by: impl Into<By>) -> String {
    let (what, by) = (format!("{d}"), by.into());
    let x = Data::new(d, &mut Rng::new(11)).by(d, by);
    let side = Side::new(g, d, &x, by);
    side.launch(&g.stream);
    g.stream.synchronize().unwrap();
    let (spec, seqs) = spec(d);
    let want = oracle::attention(&spec, &x.inputs(), &seqs);
    let off = magnitudes(d, &x, &want, by);
    check(&format!("{what} lse"), &side.lse, &want.lse, &off.lse);
    check(&format!("{what} out"), &side.out, &want.o, &off.out);
    let grads = oracle::attention_bwd(&spec, &x.inputs(), &seqs, &x.d_out);
    let all = [(&grads.dq, &off.dq), (&grads.dk, &off.dk), (&grads.dv, &off.dv)];
    for ((got, (want, off)), name) in side.grads.iter().zip(all).zip(["dq", "dk", "dv"]) {
        check(&format!("{what} {name}"), got, want, off);
    }
    // Sums over rows of what the rounding of the output moves.
    let loose = |n: usize| (4.0 * roundoff(d.out) + 1e-4) * (n as f64).sqrt() * 4.0;
    let rows = d.sequences.tokens_q * d.heads_q;
    if let (Some(got), Some(want)) = (&side.dbias, &grads.dbias) {
        close(
            &format!("{what} dbias"),
            got,
            &want.data,
            &want.data.map(|_| loose(d.heads_q * d.dv)),
        );
    }
    if let (Some(got), Some(want)) = (&side.dsink, &grads.dsink) {
        let want = Mat::new(1, want.len(), want.clone());
        // Those of rounded probabilities are independent: twice the root of the squares of what
        // they are at most is five times their standard deviation.
        let allowed = off.dsink.iter().map(|by_p| loose(rows * d.dv) + 2.0 * by_p);
        close(&format!("{what} dsink"), got, &want, &Mat::new(1, d.heads_q, allowed.collect()));
    }
    side.plan.explain()
}

/// The forward pass of `seqs` by a plan of `d`, which has as many rows and more; also by offsets.
pub fn launches_by(g: &Gpu, d: &AttentionDesc, by: AttnBackend, seqs: Sequences) {
    let by = By::from(by);
    let plan = by.plan(d);
    plan.prepare(&g.stream).unwrap();
    let d = AttentionDesc { sequences: seqs, ..d.clone() };
    let (what, x) = (format!("{d}"), Data::new(&d, &mut Rng::new(12)));
    let x = x.by(&d, by);
    let (spec, seqs) = spec(&d);
    let side = Side::new(g, &d, &x, by);
    let wants = |x: &Data, by| {
        let want = oracle::attention(&spec, &x.inputs(), &seqs);
        let off = magnitudes(&d, x, &want, by);
        (want, off)
    };
    let first = wants(&x, by);
    // By offsets codes are widened.
    let wide = By::from(AttnBackend::Auto);
    let second = by.is_by_fp8_products(&d).then(|| wants(&x.by(&d, wide), wide));
    let cu = |of: &[std::ops::Range<usize>]| {
        let all: Vec<i32> = [0].into_iter().chain(of.iter().map(|r| r.end as i32)).collect();
        g.move_here(&Tensor::from_slice(&all, Shape::d1(all.len())).unwrap())
    };
    let offsets = AttnOffsets::packed(cu(&seqs.q), cu(&seqs.kv));
    for (x, (want, off)) in [
        (AttnInputs { sequences: Some(d.sequences.clone()), ..side.x.clone() }, &first),
        (
            AttnInputs { offsets: Some(offsets), ..side.x.clone() },
            second.as_ref().unwrap_or(&first),
        ),
    ] {
        let out = AttnOut { out: side.out.t.clone(), lse: side.lse.t.clone() };
        [&out.out, &out.lse].iter().for_each(|t| t.poison().unwrap());
        let _out = plan.launch_fwd(&g.stream, &x, out).unwrap();
        g.stream.synchronize().unwrap();
        plan.check().unwrap();
        check(&format!("{what} lse"), &side.lse, &want.lse, &off.lse);
        check(&format!("{what} out"), &side.out, &want.o, &off.out);
    }
}

pub fn base(seq: usize, d: usize, dtype: DType, mask: AttnMask) -> AttentionDesc {
    AttentionDesc::new(seq, (4, 2), d, dtype, mask)
}

#[test]
fn attention_of_masks_lengths_and_dimensions() {
    let Some(g) = gpu() else { return };
    for dtype in WIDE {
        for (seq, d) in [(1, 64), (63, 64), (65, 128), (200, 128), (130, 256), (77, 40), (50, 33)] {
            run(&g, &base(seq, d, dtype, AttnMask::CAUSAL));
            run(&g, &base(seq, d, dtype, AttnMask::FULL));
        }
        run(&g, &base(300, 64, dtype, AttnMask::window(70, 3)));
        run(&g, &AttentionDesc { dv: 128, ..base(150, 192, dtype, AttnMask::CAUSAL) });
        run(&g, &AttentionDesc { out: DType::F32, ..base(150, 64, dtype, AttnMask::CAUSAL) });
    }
}

/// Sequences with rows behind them that belong to none, and some that are empty.
pub fn padded_sequences() -> Sequences {
    let (q, room_q) = ([0, 70, 70, 203, 210], [0, 72, 72, 205, 220]);
    let (kv, room_kv) = ([0, 90, 100, 233, 233], [0, 90, 104, 240, 240]);
    Sequences::padded((&q, &room_q), (&kv, &room_kv)).unwrap()
}

#[test]
fn attention_of_packed_rows_with_extras() {
    let Some(g) = gpu() else { return };
    for dtype in WIDE {
        let packed =
            AttentionDesc { sequences: padded_sequences(), ..base(1, 64, dtype, AttnMask::CAUSAL) };
        run(&g, &packed);
        run(&g, &AttentionDesc { sink: true, ..packed.clone() });
        run(&g, &AttentionDesc { softcap: Some(3.0), scale: -0.3, ..packed.clone() });
        let dropout = Some(Dropout { p: 0.2, seed: 9 });
        run(&g, &AttentionDesc { dropout, ..packed.clone() });
        for heads in [1, 4] {
            let bias = Some(BiasShape { heads, sq: 140, skv: 133 });
            run(
                &g,
                &AttentionDesc { bias, sink: true, dropout, softcap: Some(5.0), ..packed.clone() },
            );
        }
    }
}

#[test]
fn attention_of_fp8() {
    let Some(g) = gpu() else { return };
    let t = DType::F8E4M3;
    for (seq, d) in [(1, 64), (65, 128), (50, 33), (40, 256)] {
        run(&g, &base(seq, d, t, AttnMask::CAUSAL));
    }
    let packed = Sequences::packed(&[0, 40, 40, 103, 110], &[0, 30, 60, 133, 133]).unwrap();
    let packed = AttentionDesc { sequences: packed, ..base(1, 64, t, AttnMask::window(50, 3)) };
    run(&g, &packed);
    let dropout = Some(Dropout { p: 0.2, seed: 9 });
    let bias = Some(BiasShape { heads: 4, sq: 63, skv: 73 });
    run(&g, &AttentionDesc { bias, sink: true, dropout, softcap: Some(5.0), ..packed.clone() });
    run(&g, &AttentionDesc { dv: 40, out: DType::F32, ..packed });
}

/// Graphs that are replayed with changed inputs give the bits of eager launches.
pub fn replays_by(g: &Gpu, d: &AttentionDesc, by: impl Into<By>) {
    let x = Data::new(d, &mut Rng::new(3));
    let side = Side::new(g, d, &x, by.into());
    let results = side.results();
    let change = |round| {
        let mut rng = Rng::new(100 + round);
        let all = [&side.x.q.data, &side.x.k.data, &side.x.v.data, &side.d_out];
        all.iter().for_each(|t| refill(t, &mut rng));
    };
    let reset = || results.iter().for_each(|t| t.poison().unwrap());
    g.replays(&results, change, reset, || side.launch(&g.stream));
}

#[test]
fn attention_replays_with_changed_inputs_and_the_same_bits() {
    let Some(g) = gpu() else { return };
    for dtype in WIDE.into_iter().chain([DType::F8E4M3]) {
        replays_by(&g, &base(190, 128, dtype, AttnMask::CAUSAL), AttnBackend::Auto);
    }
}

#[test]
fn attention_refuses_what_it_cannot_do() {
    let Some(g) = gpu() else { return };
    for (d, dtype) in [(264, DType::F8E4M3), (264, DType::BF16)] {
        let plan = AttentionPlan::new(base(8, d, dtype, AttnMask::FULL), None).unwrap();
        let e = plan.prepare(&g.stream).unwrap_err();
        assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
    }
    let plan = AttentionPlan::new(base(8, 64, DType::BF16, AttnMask::FULL), None).unwrap();
    plan.prepare(&g.stream).unwrap();
    assert!(plan.explain().contains("CUDA"), "{}", plan.explain());
    let host = |h: usize| Tensor::zeros(DType::BF16, Shape::d2(8, h * 64));
    let x = AttnInputs::new(host(4), host(2), host(2));
    let out = AttnOut { out: host(4), lse: Tensor::zeros(DType::F32, Shape::d2(4, 8)) };
    assert!(plan.launch_fwd(&g.stream, &x, out).is_err(), "tensors of the host");
}
