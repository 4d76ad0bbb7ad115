//! Attention for sm_90a against the oracle, forward and backward: on a GPU, or an emulated device.

use tilewire_core::DType;
use tilewire_ops::attention::{
    AttentionDesc, AttentionPlan, AttnBackend, AttnMask, BiasShape, Dropout, Sequences,
};

use crate::attention::{base, padded_sequences, replays_by, run_by};
use crate::common::Gpu;
use crate::hopper::{hopper, is_emulated, pass_on_an_emulated_device};

/// What the plan says of the backward pass.
const BACKWARD: &str = "; backward the kernels for sm_90a";
const PORTABLE: &str = "; backward the portable kernels (not those for sm_90a: ";

fn run(g: &Gpu, d: &AttentionDesc) {
    let explain = run_by(g, d, AttnBackend::Hopper);
    let (forward, _) = explain.split_once("; backward").unwrap();
    assert!(forward.contains("the kernel for sm_90a"), "{explain}");
    assert!(explain.contains(if d.out == d.dtype { BACKWARD } else { PORTABLE }), "{explain}");
}

#[test]
fn attention_for_sm_90a_of_masks_lengths_and_dimensions() {
    let Some(g) = hopper() else { return };
    if is_emulated() {
        run(&g, &base(65, 128, DType::BF16, AttnMask::CAUSAL));
        // dk and dv by two kernels.
        run(&g, &base(17, 256, DType::BF16, AttnMask::FULL));
        // Gradients of f32 are made by other kernels.
        run(&g, &AttentionDesc { out: DType::F32, ..base(33, 64, DType::BF16, AttnMask::FULL) });
        return run(&g, &base(131, 64, DType::F16, AttnMask::window(70, 3)));
    }
    for dtype in [DType::BF16, DType::F16] {
        for dim in [64, 128, 256] {
            for seq in [1, 63, 65, 127, 129, 200, 515] {
                run(&g, &base(seq, dim, dtype, AttnMask::CAUSAL));
                run(&g, &base(seq, dim, dtype, AttnMask::FULL));
            }
            run(&g, &base(600, dim, dtype, AttnMask::window(170, 3)));
        }
        run(&g, &AttentionDesc { dv: 128, ..base(450, 192, dtype, AttnMask::CAUSAL) });
        run(&g, &AttentionDesc { out: DType::F32, ..base(450, 128, dtype, AttnMask::CAUSAL) });
        let cross = AttentionDesc {
            sequences: Sequences::packed(&[0, 300], &[0, 170]).unwrap(),
            ..base(1, 128, dtype, AttnMask::CAUSAL)
        };
        run(&g, &cross);
    }
}

#[test]
fn attention_for_sm_90a_of_packed_rows_and_sinks() {
    let Some(g) = hopper() else { return };
    let dims: &[usize] = if is_emulated() { &[64] } else { &[64, 128, 256] };
    for &dim in dims {
        let packed = AttentionDesc {
            sequences: padded_sequences(),
            ..base(1, dim, DType::BF16, AttnMask::CAUSAL)
        };
        run(&g, &AttentionDesc { sink: true, ..packed.clone() });
        if !is_emulated() {
            run(&g, &packed);
            run(&g, &AttentionDesc { mask: AttnMask::window(50, 20), ..packed });
        }
    }
    for (q, kv) in [(40, 0), (0, 40)] {
        let sequences = Sequences::packed(&[0, q], &[0, kv]).unwrap();
        let d = base(1, 64, DType::BF16, AttnMask::FULL);
        run(&g, &AttentionDesc { sequences, ..d });
    }
}

/// Softcap, bias, dropout and negative scales, alone and together.
#[test]
fn attention_for_sm_90a_with_extras() {
    let Some(g) = hopper() else { return };
    let sizes: &[_] =
        if is_emulated() { &[(140, 64)] } else { &[(140, 64), (515, 128), (300, 256)] };
    for &(seq, dim) in sizes {
        let d = base(seq, dim, DType::BF16, AttnMask::CAUSAL);
        let bias = |heads| Some(BiasShape { heads, sq: seq, skv: seq });
        let dropout = Some(Dropout { p: 0.2, seed: 9 });
        let softcap = Some(2.0);
        let heads = d.heads_q;
        run(&g, &AttentionDesc { softcap, bias: bias(heads), dropout, sink: true, ..d.clone() });
        if !is_emulated() {
            run(&g, &AttentionDesc { softcap, ..d.clone() });
            run(&g, &AttentionDesc { bias: bias(1), ..d.clone() });
            run(&g, &AttentionDesc { dropout, ..d.clone() });
            run(&g, &AttentionDesc { scale: -1.0, ..d.clone() });
            let window = AttnMask::window(170, 3);
            run(&g, &AttentionDesc { softcap, dropout, mask: window, ..d.clone() });
            let of_f16 = base(seq, dim, DType::F16, AttnMask::FULL);
            run(&g, &AttentionDesc { bias: bias(1), dropout, ..of_f16 });
        }
    }
    // `auto` takes it for them, too, where there are multiprocessors enough.
    let d = base(200, 64, DType::BF16, AttnMask::CAUSAL);
    let plan = AttentionPlan::new(AttentionDesc { softcap: Some(2.0), ..d }, None).unwrap();
    plan.prepare(&g.stream).unwrap();
    let takes = plan.explain().contains("kernels for sm_90a (dq");
    assert_eq!(takes, !is_emulated(), "{}", plan.explain());
}

#[test]
fn attention_for_sm_90a_replays_with_the_same_bits() {
    let Some(g) = hopper() else { return };
    let (seq, dim) = if is_emulated() { (70, 64) } else { (700, 128) };
    replays_by(&g, &base(seq, dim, DType::BF16, AttnMask::CAUSAL), AttnBackend::Hopper);
}

/// What it does not do is an error of it alone, with the reason; `auto` does not take it.
#[test]
fn what_the_attention_kernel_for_sm_90a_does_not_take() {
    let Some(g) = hopper() else { return };
    let d = base(20, 64, DType::BF16, AttnMask::CAUSAL);
    for (bad, why) in [
        (base(20, 40, DType::BF16, AttnMask::FULL), "40 and 40"),
        (base(20, 64, DType::F32, AttnMask::FULL), "f32"),
        (AttentionDesc { out: DType::F32, ..base(20, 64, DType::F8E4M3, AttnMask::FULL) }, "f32"),
    ] {
        let plan = AttentionPlan::with_backend(bad, None, AttnBackend::Hopper).unwrap();
        let e = plan.prepare(&g.stream).unwrap_err();
        assert!(e.is_unsupported() && e.get_hint().is_some() && e.to_string().contains(why), "{e}");
    }
    for by in [AttnBackend::Auto, AttnBackend::Portable] {
        let plan = AttentionPlan::with_backend(d.clone(), None, by).unwrap();
        plan.prepare(&g.stream).unwrap();
        // Emulated devices are too small for `auto` to take it.
        let takes = by == AttnBackend::Auto && !is_emulated();
        assert_eq!(
            plan.explain().contains("kernels for sm_90a (dq"),
            takes,
            "{by}: {}",
            plan.explain()
        );
    }
}

#[test]
fn the_attention_kernel_for_sm_90a_runs_on_emulated_devices() {
    pass_on_an_emulated_device(
        4,
        &[
            "attention_hopper::attention_for_sm_90a_of_masks_lengths_and_dimensions",
            "attention_hopper::attention_for_sm_90a_of_packed_rows_and_sinks",
            "attention_hopper::attention_for_sm_90a_with_extras",
            "attention_hopper::attention_for_sm_90a_replays_with_the_same_bits",
            "attention_hopper::what_the_attention_kernel_for_sm_90a_does_not_take",
        ],
    );
}
