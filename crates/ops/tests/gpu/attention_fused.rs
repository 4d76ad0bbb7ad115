//! Attention for sm_90a whose gradients one kernel makes, against the oracle: on a GPU, or an
//! emulated device.

use tilewire_core::{DType, Rng, Shape};
use tilewire_device::{Buffer, Tensor};
use tilewire_ops::attention::{
    AttentionDesc, AttentionPlan, AttnBackend, AttnGrads, AttnInputs, AttnMask, AttnOffsets,
    AttnOut, AttnSaved, Sequences,
};

use crate::attention::{By, base, padded_sequences, replays_by, run_by};
use crate::common::{Gpu, random};
use crate::hopper::{hopper, is_emulated, pass_on_an_emulated_device};

/// What the plan says of the backward pass.
const ONE: &str = ", all gradients by one kernel";

fn run(g: &Gpu, d: &AttentionDesc) {
    let explain = run_by(g, d, By::Fused);
    assert!(explain.contains(ONE), "{explain}");
}

/// dq is added in any order; dk and dv have their bits all the same.
#[test]
fn gradients_in_any_order() {
    let Some(g) = hopper() else { return };
    let check = |d: &AttentionDesc| {
        let explain = run_by(&g, d, By::Unordered);
        assert!(explain.contains("dq added in any order"), "{explain}");
    };
    let packed = AttentionDesc { sequences: padded_sequences(), ..of(1, AttnMask::CAUSAL) };
    check(&AttentionDesc { sink: true, ..packed });
    if is_emulated() {
        return check(&base(131, 128, DType::F16, AttnMask::window(70, 3)));
    }
    for seq in [1, 65, 129, 515, 1100] {
        for mask in [AttnMask::CAUSAL, AttnMask::FULL, AttnMask::window(170, 3)] {
            check(&of(seq, mask));
            check(&base(seq, 128, DType::F16, mask));
        }
    }
    for (q, kv) in [(300, 170), (40, 0), (0, 40)] {
        let sequences = Sequences::packed(&[0, q], &[0, kv]).unwrap();
        check(&AttentionDesc { sequences, ..of(1, AttnMask::CAUSAL) });
    }
}

fn of(seq: usize, mask: AttnMask) -> AttentionDesc {
    base(seq, 128, DType::BF16, mask)
}

/// The gradients of one forward and one backward pass, on poison.
fn gradients(g: &Gpu, plan: &AttentionPlan, (x, d_out): (&AttnInputs, &Tensor)) -> AttnGrads {
    let (d, rows) = (plan.desc(), d_out.shape().dims()[0]);
    let poisoned = |t, shape| g.move_here(&Tensor::poisoned(t, shape));
    let like = |heads: usize| poisoned(d.dtype, Shape::d2(rows, heads * 128));
    let lse = poisoned(DType::F32, Shape::d2(d.heads_q, rows));
    let out = AttnOut { out: like(d.heads_q), lse };
    let grads = AttnGrads::new(like(d.heads_q), like(d.heads_kv), like(d.heads_kv));
    drop(plan.launch_fwd(&g.stream, x, out.clone()).unwrap());
    let saved = AttnSaved { out: out.out, lse: out.lse, d_out: d_out.clone() };
    drop(plan.launch_bwd(&g.stream, x, saved, grads.clone()).unwrap());
    g.stream.synchronize().unwrap();
    grads
}

/// The bits of these.
fn bits_of(g: &Gpu, plan: &AttentionPlan, with: (&AttnInputs, &Tensor)) -> [Vec<u8>; 3] {
    let grads = gradients(g, plan, with);
    [grads.dq, grads.dk, grads.dv].map(|t| t.download().unwrap())
}

/// A plan takes one kernel for long sequences alone, in order or, if it may, in any; where there is
/// no such kernel it has two.
#[test]
fn long_sequences_take_one_kernel() {
    const ROWS: usize = 4160;
    let Some(g) = hopper() else { return };
    let d = AttentionDesc::new(ROWS, (8, 8), 128, DType::BF16, AttnMask::CAUSAL);
    let made = |d: &AttentionDesc| AttentionPlan::new(d.clone(), None).unwrap();
    let prepared = |plan: AttentionPlan| {
        plan.prepare(&g.stream).unwrap();
        plan
    };
    let free = prepared(made(&d).allow_unordered_backward());
    assert!(free.explain().contains("any order, of 4096 queries and more"), "{}", free.explain());
    for other in [
        AttentionDesc { mask: AttnMask::window(64, 0), ..d.clone() },
        AttentionDesc { softcap: Some(2.0), ..d.clone() },
        AttentionDesc::new(ROWS, (2, 1), 64, DType::BF16, AttnMask::CAUSAL),
        of(4000, AttnMask::CAUSAL),
    ] {
        let all = [made(&other), made(&other).allow_unordered_backward()];
        let [plain, free] = all.map(|plan| prepared(plan).explain());
        let two = prepared(made(&other).without_fused_backward()).explain();
        assert!(plain == free && plain == two && !plain.contains(ONE), "{free}");
    }
    let plain = prepared(made(&d));
    let why = plain.explain();
    assert!(why.contains("of 4096 queries and more") && !why.contains("any order"), "{why}");
    let two = prepared(made(&d).without_fused_backward());
    assert!(!two.explain().contains(ONE), "{}", two.explain());
    let [ordered, one] = [made(&d).with_fused_backward(), made(&d).with_unordered_backward()];
    let (ordered, one) = (prepared(ordered), prepared(one));
    let compare = |cu: &[usize], long: bool| {
        let (rows, mut rng) = (cu[cu.len() - 1], Rng::new(11));
        let mut put = |heads: usize| g.put(&random(&mut rng, rows, heads * 128, d.dtype), d.dtype);
        let x = AttnInputs::new(put(d.heads_q), put(d.heads_kv), put(d.heads_kv));
        let sequences = Some(Sequences::packed(cu, cu).unwrap());
        let (x, d_out) = (AttnInputs { sequences, ..x }, put(d.heads_q));
        let want = if long { &ordered } else { &two };
        let [got, want] = [&plain, want].map(|plan| bits_of(&g, plan, (&x, &d_out)));
        assert!(got == want, "{rows} rows: {long}, the default");
        let [free, two, one] = [&free, &two, &one].map(|plan| gradients(&g, plan, (&x, &d_out)));
        let bits = |t: &Tensor| t.download().unwrap();
        assert!(!long || bits(&one.dk) != bits(&two.dk), "the order of sums is another");
        let same = |a: &AttnGrads| bits(&a.dk) == bits(&free.dk) && bits(&a.dv) == bits(&free.dv);
        assert!(same(if long { &one } else { &two }), "{rows} rows: {long}");
        if !long {
            assert_eq!(bits(&two.dq), bits(&free.dq), "{rows} rows");
            return;
        }
        let [got, want] = [&free.dq, &two.dq].map(|t| t.to_f32().unwrap());
        let most = want.iter().fold(0.0, |m: f32, v| m.max(v.abs()));
        let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 0.02 * most;
        assert!(most > 0.0 && got.iter().zip(&want).all(near), "{rows} rows: dq");
    };
    compare(&[0, 100, 150], false);
    if !is_emulated() {
        compare(&[0, 2080, ROWS], false);
        compare(&[0, ROWS], true);
    }
}

#[test]
fn fused_gradients_of_masks_and_lengths() {
    let Some(g) = hopper() else { return };
    if is_emulated() {
        run(&g, &base(131, 128, DType::F16, AttnMask::window(70, 3)));
        return run(&g, &of(190, AttnMask::CAUSAL));
    }
    for seq in [1, 63, 65, 127, 129, 200, 515, 1100] {
        for mask in [AttnMask::CAUSAL, AttnMask::FULL, AttnMask::window(170, 3)] {
            run(&g, &of(seq, mask));
            run(&g, &base(seq, 128, DType::F16, mask));
        }
    }
    for heads in [(1, 1), (8, 1), (6, 3)] {
        let d = AttentionDesc::new(700, heads, 128, DType::BF16, AttnMask::CAUSAL);
        run(&g, &d);
    }
    for (q, kv) in [(300, 170), (170, 300)] {
        let sequences = Sequences::packed(&[0, q], &[0, kv]).unwrap();
        run(&g, &AttentionDesc { sequences, ..of(1, AttnMask::CAUSAL) });
    }
}

#[test]
fn fused_gradients_of_packed_rows_and_sinks() {
    let Some(g) = hopper() else { return };
    let packed = AttentionDesc { sequences: padded_sequences(), ..of(1, AttnMask::CAUSAL) };
    run(&g, &AttentionDesc { sink: true, ..packed.clone() });
    if !is_emulated() {
        run(&g, &packed);
        run(&g, &AttentionDesc { mask: AttnMask::window(50, 20), ..packed });
    }
    for (q, kv) in [(40, 0), (0, 40)] {
        let sequences = Sequences::packed(&[0, q], &[0, kv]).unwrap();
        run(&g, &AttentionDesc { sequences, ..of(1, AttnMask::FULL) });
    }
    // Keys that are not there, beside scores so far below 0 that theirs would have an infinite
    // probability.
    let sequences = Sequences::packed(&[0, 130], &[0, 1]).unwrap();
    let d = base(1, 128, DType::F16, AttnMask::FULL);
    run(&g, &AttentionDesc { sequences, scale: 12.0, ..d });
}

#[test]
fn fused_gradients_replay_with_the_same_bits() {
    let Some(g) = hopper() else { return };
    let seq = if is_emulated() { 150 } else { 1500 };
    replays_by(&g, &of(seq, AttnMask::CAUSAL), By::Fused);
}

/// Plans of as many rows have one workspace of sums: launches that take turns leave it as each
/// needs it.
#[test]
fn plans_that_share_sums_take_turns() {
    const ROWS: usize = 190;
    let Some(g) = hopper() else { return };
    let mut rng = Rng::new(13);
    let d = of(ROWS, AttnMask::CAUSAL);
    let mut put = |heads: usize| g.put(&random(&mut rng, ROWS, heads * 128, d.dtype), d.dtype);
    let x = AttnInputs::new(put(d.heads_q), put(d.heads_kv), put(d.heads_kv));
    let d_out = put(d.heads_q);
    let made = |mask| {
        let d = AttentionDesc { mask, ..d.clone() };
        let plan = AttentionPlan::with_backend(d, None, AttnBackend::Hopper).unwrap();
        let plan = plan.with_fused_backward();
        plan.prepare(&g.stream).unwrap();
        plan
    };
    let bits_of = |plan: &AttentionPlan| bits_of(&g, plan, (&x, &d_out));
    let masks = [AttnMask::CAUSAL, AttnMask::FULL];
    let alone = masks.map(|mask| bits_of(&made(mask)));
    let both = masks.map(made);
    for turn in [0, 1, 0, 0, 1] {
        assert!(bits_of(&both[turn]) == alone[turn], "{turn}");
    }
    assert!(alone[0] != alone[1]);
}

/// Offsets in device memory: the bits of sequences that the host knows, and NaN if they are none.
#[test]
fn fused_gradients_by_offsets_in_device_memory() {
    const ROWS: usize = 149;
    let Some(g) = hopper() else { return };
    let mut rng = Rng::new(7);
    let cu = [0, 20, 20, 149];
    let sequences = Sequences::packed(&cu, &cu).unwrap();
    let d = AttentionDesc { sequences, ..of(ROWS, AttnMask::CAUSAL) };
    let plan = AttentionPlan::with_backend(d.clone(), None, AttnBackend::Hopper).unwrap();
    let plan = plan.with_fused_backward();
    plan.prepare(&g.stream).unwrap();
    let mut put = |heads: usize| g.put(&random(&mut rng, ROWS, heads * 128, d.dtype), d.dtype);
    let x = AttnInputs::new(put(d.heads_q), put(d.heads_kv), put(d.heads_kv));
    let d_out = put(d.heads_q);
    let bits_of = |x: &AttnInputs| bits_of(&g, &plan, (x, &d_out));
    let by_offsets = |cu: &[i32]| {
        let cu = || {
            let host = Tensor::from_slice(cu, Shape::d1(cu.len())).unwrap();
            g.move_here(&host)
        };
        let offsets = Some(AttnOffsets::packed(cu(), cu()));
        bits_of(&AttnInputs { offsets, ..x.clone() })
    };
    let found = by_offsets(&[0, 20, 20, 149]);
    let refused = by_offsets(&[0, 30, 20, 149]);
    let again = by_offsets(&[0, 20, 20, 149]);
    assert!(refused.iter().flatten().all(|b| *b == 0xff), "NaN");
    let want = bits_of(&AttnInputs { sequences: Some(d.sequences.clone()), ..x });
    assert!(found == want && again == want, "bits");
}

/// What it does not do is an error of it, with the reason.
#[test]
fn what_has_no_fused_gradients() {
    let Some(g) = hopper() else { return };
    let d = of(20, AttnMask::CAUSAL);
    for (bad, by) in [
        (base(20, 64, DType::BF16, AttnMask::FULL), AttnBackend::Hopper),
        (AttentionDesc { softcap: Some(2.0), ..d.clone() }, AttnBackend::Hopper),
        (AttentionDesc { out: DType::F32, ..d.clone() }, AttnBackend::Hopper),
        (base(20, 128, DType::F8E4M3, AttnMask::FULL), AttnBackend::Auto),
        (d, AttnBackend::Portable),
    ] {
        let plan = AttentionPlan::with_backend(bad, None, by).unwrap().with_fused_backward();
        let e = plan.prepare(&g.stream).unwrap_err();
        let text = e.to_string();
        assert!(e.is_unsupported() && e.get_hint().is_some() && text.contains("at once"), "{e}");
    }
}

#[test]
fn fused_gradients_run_on_emulated_devices() {
    pass_on_an_emulated_device(
        4,
        &[
            "attention_fused::fused_gradients_of_masks_and_lengths",
            "attention_fused::fused_gradients_of_packed_rows_and_sinks",
            "attention_fused::gradients_in_any_order",
            "attention_fused::fused_gradients_replay_with_the_same_bits",
            "attention_fused::plans_that_share_sums_take_turns",
            "attention_fused::fused_gradients_by_offsets_in_device_memory",
            "attention_fused::what_has_no_fused_gradients",
        ],
    );
    // Plans that may choose take the kernels for sm_90a on devices of eight multiprocessors.
    let long = "attention_fused::long_sequences_take_one_kernel";
    pass_on_an_emulated_device(8, &[long]);
}
