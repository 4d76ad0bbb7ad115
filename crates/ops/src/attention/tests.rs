//! Validation, reproducibility, speed. Numbers against the oracle: `tilewire verify`.

use std::time::Instant;

use tilewire_core::{DType, Rng, Shape};
use tilewire_device::{Stream, Tensor};

use super::*;

fn random(rng: &mut Rng, shape: Shape) -> Tensor {
    let v: Vec<f32> = (0..shape.num_elems()).map(|_| rng.normal()).collect();
    Tensor::from_f32(&v, DType::F32, shape).unwrap()
}

fn text(r: tilewire_core::Result<impl Sized>) -> String {
    r.err().expect("an error").to_string()
}

#[test]
fn bad_sequences_and_descriptions_are_refused() {
    let p = |q: &[usize], kv: &[usize]| Sequences::packed(q, kv);
    assert!(text(p(&[0, 5, 3], &[0, 5, 6])).contains("must not decrease"));
    assert!(text(p(&[1, 5], &[0, 5])).contains("must be 0"));
    assert!(text(p(&[], &[])).contains("must be 0"));
    assert!(text(p(&[0, 5], &[0, 2, 5])).contains("must be equal"));
    let short = Sequences::padded((&[0, 4], &[0, 3]), (&[0, 4], &[0, 8]));
    assert!(text(short).contains("does not fit"));
    assert_eq!(Sequences::padded((&[0, 4], &[0, 6]), (&[0, 4], &[0, 8])).unwrap().tokens_kv, 8);

    let good = AttentionDesc::new(8, (4, 2), 16, DType::F32, AttnMask::CAUSAL);
    good.check().unwrap();
    let bad = |f: fn(&mut AttentionDesc)| {
        let mut d = good.clone();
        f(&mut d);
        text(AttentionPlan::new(d, None))
    };
    assert!(bad(|d| d.heads_q = 5).contains("a multiple of 2"));
    assert!(bad(|d| d.dqk = 0).contains("must be positive"));
    assert!(bad(|d| d.dtype = DType::I32).contains("f8e4m3"));
    assert!(bad(|d| d.out = DType::F8E4M3).contains("f32, bf16 or f16"));
    assert!(bad(|d| d.softcap = Some(0.0)).contains("softcap"));
    assert!(bad(|d| d.scale = f64::NAN).contains("scale"));
    // No f32 is so small, or so large.
    assert!(bad(|d| d.softcap = Some(1e-50)).contains("softcap"));
    assert!(bad(|d| d.softcap = Some(1e39)).contains("softcap"));
    assert!(bad(|d| d.scale = -1e39).contains("scale"));
    assert!(bad(|d| d.dropout = Some(Dropout { p: 1.0, seed: 0 })).contains("[0, 1)"));
    assert!(bad(|d| d.bias = Some(BiasShape { heads: 3, sq: 8, skv: 8 })).contains("1 or 4"));
    assert!(bad(|d| d.bias = Some(BiasShape { heads: 1, sq: 7, skv: 8 })).contains("7 x 8"));
    assert!(bad(|d| d.sequences.q[0].end = 9).contains("must ascend"));
    let zero = Some(AttnConfig { block_q: 0, block_kv: 1 });
    assert!(text(AttentionPlan::new(good.clone(), zero)).contains("tile sizes"));
}

#[test]
fn wrong_tensors_are_refused_and_nothing_runs_before_prepare() {
    let desc = AttentionDesc::new(8, (4, 2), 16, DType::F32, AttnMask::CAUSAL);
    let plan = AttentionPlan::new(desc, None).unwrap();
    let stream = Stream::new("s").unwrap();
    let zeros = |h: usize| Tensor::zeros(DType::F32, Shape::d2(8, h * 16));
    let out = || AttnOut { out: zeros(4), lse: Tensor::zeros(DType::F32, Shape::d2(4, 8)) };
    let x = AttnInputs::new(zeros(4), zeros(2), zeros(2));
    assert!(text(plan.launch_fwd(&stream, &x, out())).contains("not prepared"));
    plan.prepare(&stream).unwrap();
    let refuse = |x: AttnInputs| text(plan.launch_fwd(&stream, &x, out()));
    assert!(refuse(AttnInputs { k: zeros(4).into(), ..x.clone() }).contains("`k`"));
    let bf16 = Tensor::zeros(DType::BF16, Shape::d2(8, 64));
    assert!(refuse(AttnInputs { q: bf16.into(), ..x.clone() }).contains("got bf16"));
    let scales = Some(Tensor::zeros(DType::F32, Shape::d2(8, 4)));
    let q = AttnOperand { data: zeros(4), scales };
    assert!(refuse(AttnInputs { q, ..x.clone() }).contains("no scales"));
    let sink = Some(Tensor::zeros(DType::F32, Shape::d1(4)));
    assert!(refuse(AttnInputs { sink, ..x.clone() }).contains("`sink`"));
    let long = Some(Sequences::one(9, 8));
    assert!(refuse(AttnInputs { sequences: long, ..x.clone() }).contains("more rows"));
    let cu = |v: &[i32]| Tensor::from_slice(v, Shape::d1(v.len())).unwrap();
    let by = |o: AttnOffsets| AttnInputs { offsets: Some(o), ..x.clone() };
    let both = by(AttnOffsets::packed(cu(&[0, 8]), cu(&[0, 8])));
    let both = AttnInputs { sequences: Some(Sequences::one(8, 8)), ..both };
    assert!(refuse(both).contains("not both"));
    assert!(refuse(by(AttnOffsets::packed(cu(&[0]), cu(&[0])))).contains("no sequence"));
    let uneven = AttnOffsets::packed(cu(&[0, 8]), cu(&[0, 4, 8]));
    assert!(refuse(by(uneven)).contains("cu_seqlens_kv"));
    let wide = Tensor::from_slice(&[0i64, 8], Shape::d1(2)).unwrap();
    let wide = AttnOffsets::padded((cu(&[0, 8]), cu(&[0, 8])), (cu(&[0, 8]), wide));
    assert!(refuse(by(wide)).contains("cu_seqlens_kv_padded"));
    plan.launch_fwd(&stream, &x, out()).unwrap().wait().unwrap();
}

/// The first problem is kept; a launch that can be used says nothing of it.
#[test]
fn offsets_that_cannot_be_used_are_reported() {
    let desc = AttentionDesc::new(8, (1, 1), 4, DType::F32, AttnMask::CAUSAL);
    let (plan, stream) = (AttentionPlan::new(desc, None).unwrap(), Stream::new("s").unwrap());
    plan.prepare(&stream).unwrap();
    let mut rng = Rng::new(9);
    let mut t = || random(&mut rng, Shape::d3(8, 1, 4));
    let x = AttnInputs::new(t(), t(), t());
    let cu = |v: &[i32]| Tensor::from_slice(v, Shape::d1(v.len())).unwrap();
    let launch = |q: &[i32], kv: &[i32]| {
        let x = AttnInputs { offsets: Some(AttnOffsets::packed(cu(q), cu(kv))), ..x.clone() };
        let lse = Tensor::poisoned(DType::F32, Shape::d2(1, 8));
        let out = Tensor::poisoned(DType::F32, Shape::d2(8, 4));
        let o = plan.launch_fwd(&stream, &x, AttnOut { out, lse }).unwrap().wait().unwrap();
        (o.out.to_f32().unwrap(), plan.check().err().map(|e| e.to_string()).unwrap_or_default())
    };
    for (bad, why) in [
        ([0, 9, 9], "more rows"),
        ([0, -1, 8], "negative"),
        ([1, 5, 8], "0"),
        ([0, 5, 3], "decrease"),
    ] {
        let (out, said) = launch(&bad, &[0, 4, 8]);
        assert!(out.iter().all(|v| v.is_nan()) && said.contains(why), "{bad:?}: {said}");
        let (out, said) = launch(&[0, 3, 7], &[0, 4, 8]);
        assert!(said.contains(why) && out[..28].iter().all(|v| v.is_finite()), "{said}");
        assert_eq!(out[28..], [0.0; 4], "a row of no sequence");
        plan.reset(&stream).unwrap();
        stream.synchronize().unwrap();
        assert!(plan.check().is_ok());
    }
}

/// A training step's attention takes milliseconds on a CPU, and gives the same bits each time.
#[test]
fn fast_enough_to_train_with_and_reproducible() {
    let (seq, h, d) = (256, 4, 32);
    let desc = AttentionDesc::new(seq, (h, h), d, DType::F32, AttnMask::CAUSAL);
    let plan = AttentionPlan::new(desc, None).unwrap();
    let stream = Stream::new("s").unwrap();
    plan.prepare(&stream).unwrap();
    let mut rng = Rng::new(5);
    let mut t = || random(&mut rng, Shape::d3(seq, h, d));
    let (x, d_out) = (AttnInputs::new(t(), t(), t()), t());
    let empty = || Tensor::poisoned(DType::F32, Shape::d3(seq, h, d));
    let step = || {
        let lse = Tensor::poisoned(DType::F32, Shape::d2(h, seq));
        let o = plan.launch_fwd(&stream, &x, AttnOut { out: empty(), lse }).unwrap();
        let o = o.wait().unwrap();
        let saved = AttnSaved { out: o.out.clone(), lse: o.lse, d_out: d_out.clone() };
        let g = AttnGrads::new(empty(), empty(), empty());
        let g = plan.launch_bwd(&stream, &x, saved, g).unwrap().wait().unwrap();
        [o.out, g.dq, g.dk, g.dv].map(|t| t.to_vec::<f32>().unwrap())
    };
    let first = step();
    let (mut best, mut same) = (f64::INFINITY, true);
    for _ in 0..10 {
        let start = Instant::now();
        let again = step();
        best = best.min(start.elapsed().as_secs_f64());
        same &= again == first;
    }
    assert!(same, "bits differ from run to run");
    assert!(best < 0.2, "{best} s");
}

/// As many sequences as the tables of a plan hold, whatever the parts of rows that a rank has.
#[test]
fn offsets_of_more_sequences_than_a_plan_takes_are_refused() {
    let d = AttentionDesc::new(8, (2, 2), 4, DType::F32, AttnMask::CAUSAL);
    let of = |num: usize| Tensor::zeros(DType::I32, Shape::d1(num + 1));
    let both = |num| (of(num), of(num));
    let check = |o: AttnOffsets| o.check(&d).map_err(|e| e.to_string());
    for num in [1, 600, 1024] {
        check(AttnOffsets::packed(of(num), of(num))).unwrap();
    }
    let e = check(AttnOffsets::packed(of(1025), of(1025))).unwrap_err();
    assert!(e.contains("at most 1024, got 1025"), "{e}");
    check(AttnOffsets::padded(both(512), both(512))).unwrap();
    let e = check(AttnOffsets::padded(both(513), both(513))).unwrap_err();
    assert!(e.contains("at most 512, got 513"), "{e}");
    assert!(check(AttnOffsets::packed(of(0), of(0))).unwrap_err().contains("no sequence"));
}
