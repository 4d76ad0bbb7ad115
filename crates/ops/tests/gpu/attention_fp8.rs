//! Attention by FP8 products against the oracle: on a GPU, or an emulated device.

use tilewire_core::{DType, Rng, Shape};
use tilewire_device::Tensor;
use tilewire_ops::attention::{
    AttentionDesc, AttentionPlan, AttnBackend, AttnInputs, AttnMask, AttnOperand, AttnOut, Dropout,
    HeadScales, Sequences,
};

use crate::attention::{By, base, launches_by, padded_sequences, replays_by, run_by};
use crate::common::Gpu;
use crate::hopper::{hopper, is_emulated, pass_on_an_emulated_device};

/// What the plan says of the kernels.
const PRODUCTS: &str = "FP8 products";

fn of(seq: usize, heads: (usize, usize), mask: AttnMask) -> AttentionDesc {
    AttentionDesc {
        scales: HeadScales::Block128,
        heads_q: heads.0,
        heads_kv: heads.1,
        ..base(seq, 128, DType::F8E4M3, mask)
    }
}

fn run(g: &Gpu, d: &AttentionDesc) {
    let explain = run_by(g, d, AttnBackend::Hopper);
    assert!(explain.contains(PRODUCTS), "{explain}");
}

/// So many sequences of a few rows each.
fn many(num: usize) -> Sequences {
    let ends: Vec<usize> = (0..=num).map(|i| i * (i + 5) / 2).collect();
    Sequences::packed(&ends, &ends).unwrap()
}

#[test]
fn fp8_products_of_one_sequence() {
    let Some(g) = hopper() else { return };
    if is_emulated() {
        let d = of(63, (3, 1), AttnMask::window(21, 5));
        run(&g, &AttentionDesc { sink: true, out: DType::F32, ..d });
        return run(&g, &of(140, (2, 1), AttnMask::CAUSAL));
    }
    for seq in [1, 63, 127, 128, 129, 300, 1000] {
        for heads in [(4, 2), (3, 1), (2, 2)] {
            run(&g, &of(seq, heads, AttnMask::CAUSAL));
            run(&g, &of(seq, heads, AttnMask::FULL));
            let d = of(seq, heads, AttnMask::window(seq / 3, 5));
            run(&g, &AttentionDesc { sink: true, out: DType::F32, ..d });
        }
    }
    let d = of(1, (4, 2), AttnMask::CAUSAL);
    run(&g, &AttentionDesc { sequences: Sequences::one(300, 1100), out: DType::F16, ..d.clone() });
    // Rows that see no key.
    run(&g, &AttentionDesc { sequences: Sequences::one(300, 100), ..d });
}

#[test]
fn fp8_products_of_packed_rows() {
    let Some(g) = hopper() else { return };
    let d = AttentionDesc { sequences: padded_sequences(), ..of(1, (2, 1), AttnMask::CAUSAL) };
    if !is_emulated() {
        run(&g, &AttentionDesc { sink: true, ..d.clone() });
        run(&g, &AttentionDesc { heads_q: 8, sequences: many(60), ..d.clone() });
    }
    // More segments than a launch contains.
    run(&g, &AttentionDesc { sequences: many(12), ..d });
}

#[test]
fn fp8_products_replay_with_the_same_bits() {
    let Some(g) = hopper() else { return };
    replays_by(&g, &of(if is_emulated() { 130 } else { 900 }, (2, 1), AttnMask::CAUSAL), {
        AttnBackend::Hopper
    });
}

/// With a scale for each token, and where another plan asks for it, codes become bf16, and the
/// other kernels take that: for sm_90a, too.
#[test]
fn fp8_is_widened_to_bf16() {
    let Some(g) = hopper() else { return };
    let t = DType::F8E4M3;
    let wide = |d: &AttentionDesc, by, kernels: &str| {
        let explain = run_by(&g, d, by);
        assert!(explain.contains("widened to bf16") && explain.contains(kernels), "{explain}");
    };
    // Few queries over many keys.
    let few = Sequences::packed(&[0, 3, 3, 10], &[0, 300, 340, 700]).unwrap();
    let few = AttentionDesc { sequences: few, ..base(1, 128, t, AttnMask::CAUSAL) };
    wide(&few, AttnBackend::Auto, "kernels that cut their keys");
    let seqs: &[usize] = if is_emulated() { &[70] } else { &[1, 129, 700] };
    for seq in seqs {
        for dim in [64, 128, 256] {
            wide(&base(*seq, dim, t, AttnMask::CAUSAL), AttnBackend::Hopper, "sm_90a (dq");
        }
        wide(&base(*seq, 40, t, AttnMask::window(30, 2)), AttnBackend::Auto, "tiles");
        wide(&of(*seq, (2, 1), AttnMask::FULL), AttnBackend::Portable, "tiles");
        let d = base(*seq, 64, t, AttnMask::CAUSAL);
        let more = Some(Dropout { p: 0.2, seed: 9 });
        wide(
            &AttentionDesc { dropout: more, softcap: Some(5.0), ..d.clone() },
            AttnBackend::Hopper,
            "sm_90a (dq",
        );
        // Results of f32 are of f32 arithmetic, and so are heads that matrix instructions lack.
        for d in [AttentionDesc { out: DType::F32, ..d }, base(*seq, 33, t, AttnMask::FULL)] {
            let explain = run_by(&g, &d, AttnBackend::Auto);
            assert!(explain.contains("widened to f32"), "{explain}");
        }
    }
}

/// A plan with other sequences than its own; by offsets codes are widened.
#[test]
fn plans_of_fp8_products_take_other_sequences() {
    let Some(g) = hopper() else { return };
    let mut plan = Sequences::one(200, 200);
    // Empty ones only say how many there may be.
    plan.q.extend(vec![200..200; 7]);
    plan.kv.extend(vec![200..200; 7]);
    let plan = AttentionDesc { sequences: plan, ..of(1, (2, 1), AttnMask::CAUSAL) };
    for ends in [vec![0, 150], vec![0, 3, 3, 140, 141], vec![0, 20, 40, 50, 60, 70, 90]] {
        let seqs = Sequences::packed(&ends, &ends).unwrap();
        launches_by(&g, &plan, AttnBackend::Hopper, seqs);
    }
}

/// A plan that may choose takes FP8 products where they fit, for launches that they take.
#[test]
fn plans_that_may_choose_multiply_codes() {
    let Some(g) = hopper() else { return };
    let seqs: &[usize] = if is_emulated() { &[140] } else { &[20, 129, 700] };
    for seq in seqs {
        let explain = run_by(&g, &of(*seq, (2, 1), AttnMask::CAUSAL), By::AutoProducts);
        assert!(explain.contains(PRODUCTS), "{explain}");
    }
    let d = of(200, (2, 1), AttnMask::CAUSAL);
    let explain = |d: &AttentionDesc| {
        let plan = AttentionPlan::with_backend(d.clone(), None, AttnBackend::Auto).unwrap();
        plan.prepare(&g.stream).unwrap();
        plan.explain()
    };
    for other in [
        AttentionDesc { softcap: Some(2.0), ..d.clone() },
        AttentionDesc { scales: HeadScales::Token, ..d.clone() },
        // Few queries over many keys.
        AttentionDesc { sequences: Sequences::one(3, 300), ..d.clone() },
    ] {
        let text = explain(&other);
        assert!(text.contains("widened to bf16") && !text.contains(PRODUCTS), "{text}");
    }
    // More sequences than the plan was made for.
    launches_by(&g, &of(MANY, (2, 1), AttnMask::CAUSAL), AttnBackend::Auto, each_row(MANY));
    odd_addresses(&g, &d);
}

/// More sequences than a plan takes that is made for fewer.
const MANY: usize = 600;

fn each_row(num: usize) -> Sequences {
    let ends: Vec<usize> = (0..=num).collect();
    Sequences::packed(&ends, &ends).unwrap()
}

/// Codes at no multiple of 16 bytes, by a plan that may choose: near what the portable kernels make
/// of the same ones.
fn odd_addresses(g: &Gpu, d: &AttentionDesc) {
    let mut rng = Rng::new(3);
    let mut random = |t, rows: usize, cols: usize| {
        let values: Vec<f32> = (0..rows * cols).map(|_| rng.normal()).collect();
        Tensor::from_f32(&values, t, Shape::d2(rows, cols)).unwrap().to(&g.device).unwrap()
    };
    let rows = d.sequences.tokens_q;
    let mut late = |heads: usize| {
        let num = rows * heads * 128;
        let data = random(DType::F8E4M3, num + 1, 1).rows(1, num).unwrap();
        let data = data.reshape(Shape::d2(rows, heads * 128)).unwrap();
        let scales = vec![0.3f32; rows.div_ceil(128) * heads];
        let scales = Tensor::from_slice(&scales, Shape::d2(rows.div_ceil(128), heads)).unwrap();
        AttnOperand { data, scales: Some(scales.to(&g.device).unwrap()) }
    };
    let x = AttnInputs::new(late(d.heads_q), late(d.heads_kv), late(d.heads_kv));
    let run = |by| {
        let plan = AttentionPlan::with_backend(d.clone(), None, by).unwrap();
        plan.prepare(&g.stream).unwrap();
        let out = Tensor::poisoned(DType::BF16, Shape::d2(rows, d.heads_q * 128));
        let lse = Tensor::poisoned(DType::F32, Shape::d2(d.heads_q, rows));
        let [out, lse] = [out, lse].map(|t| t.to(&g.device).unwrap());
        let done = plan.launch_fwd(&g.stream, &x, AttnOut { out, lse }).unwrap().wait().unwrap();
        done.out.to_f32().unwrap()
    };
    let (got, want) = (run(AttnBackend::Auto), run(AttnBackend::Portable));
    assert!(want.iter().any(|v| *v != 0.0), "values");
    for (a, b) in got.iter().zip(&want) {
        // Both round probabilities, and results, to bf16: values are at most 1.2 or so.
        assert!((a - b).abs() <= 2.5e-2, "{a}, not {b}");
    }
}

#[test]
fn what_fp8_products_do_not_do_is_refused() {
    let Some(g) = hopper() else { return };
    let d = of(200, (2, 1), AttnMask::CAUSAL);
    for (bad, why) in [
        (AttentionDesc { softcap: Some(2.0), ..d.clone() }, "softcap"),
        (AttentionDesc { dropout: Some(Dropout { p: 0.1, seed: 1 }), ..d.clone() }, "dropout"),
    ] {
        let of = |by| AttentionPlan::with_backend(bad.clone(), None, by).unwrap();
        let e = of(AttnBackend::Hopper).prepare(&g.stream).unwrap_err();
        assert!(e.is_unsupported() && e.get_hint().is_some(), "{e}");
        assert!(e.to_string().contains(why), "{e}");
        let auto = of(AttnBackend::Auto);
        auto.prepare(&g.stream).unwrap();
        assert!(auto.explain().contains("widened"), "{}", auto.explain());
    }
    let plan = AttentionPlan::with_backend(d, None, AttnBackend::Hopper).unwrap();
    plan.prepare(&g.stream).unwrap();
    let place = |t: Tensor| t.to(&g.device).unwrap();
    let zeros = |t, rows, cols| place(Tensor::zeros(t, Shape::d2(rows, cols)));
    let coded = |heads, scales| AttnOperand {
        data: zeros(DType::F8E4M3, 200, heads * 128),
        scales: Some(zeros(DType::F32, scales, heads)),
    };
    let launch = |x: &AttnInputs| {
        let out = zeros(DType::BF16, 200, 256);
        plan.launch_fwd(&g.stream, x, AttnOut { out, lse: zeros(DType::F32, 2, 200) }).map(drop)
    };
    let x = AttnInputs::new(coded(2, 2), coded(1, 2), coded(1, 2));
    launch(&x).unwrap();
    // A scale for each token; a tensor that begins one byte late; more sequences than blocks.
    let e = launch(&AttnInputs { k: coded(1, 200), ..x.clone() }).unwrap_err();
    assert!(e.to_string().contains("k scales"), "{e}");
    let late = zeros(DType::F8E4M3, 200 * 128 + 1, 1).rows(1, 200 * 128).unwrap();
    let late = AttnOperand { data: late.reshape(Shape::d2(200, 128)).unwrap(), ..coded(1, 2) };
    let e = launch(&AttnInputs { v: late, ..x.clone() }).unwrap_err();
    assert!(e.to_string().contains("multiple of 16 bytes"), "{e}");
    let each = each_row(MANY);
    let plan = AttentionPlan::with_backend(of(MANY, (2, 1), AttnMask::CAUSAL), None, {
        AttnBackend::Hopper
    });
    let plan = plan.unwrap();
    plan.prepare(&g.stream).unwrap();
    let coded = |heads| AttnOperand {
        data: zeros(DType::F8E4M3, MANY, heads * 128),
        scales: Some(zeros(DType::F32, MANY.div_ceil(128), heads)),
    };
    let x = AttnInputs::new(coded(2), coded(1), coded(1));
    let to = AttnOut { out: zeros(DType::BF16, MANY, 256), lse: zeros(DType::F32, 2, MANY) };
    let e = plan.launch_fwd(&g.stream, &AttnInputs { sequences: Some(each), ..x }, to).map(drop);
    let e = e.unwrap_err();
    assert!(e.to_string().contains("more sequences"), "{e}");
    g.stream.synchronize().unwrap();
}

#[test]
fn the_attention_kernels_of_fp8_run_on_emulated_devices() {
    pass_on_an_emulated_device(
        4,
        &[
            "attention_fp8::fp8_products_of_one_sequence",
            "attention_fp8::fp8_products_of_packed_rows",
            "attention_fp8::fp8_products_replay_with_the_same_bits",
            "attention_fp8::fp8_is_widened_to_bf16",
            "attention_fp8::plans_of_fp8_products_take_other_sequences",
            "attention_fp8::what_fp8_products_do_not_do_is_refused",
        ],
    );
    // As many multiprocessors as `auto` wants for kernels for sm_90a.
    pass_on_an_emulated_device(8, &["attention_fp8::plans_that_may_choose_multiply_codes"]);
}
