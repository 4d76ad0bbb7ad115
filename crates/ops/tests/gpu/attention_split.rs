//! Attention of few queries over many keys against the oracle: on a GPU, or an emulated device.

use tilewire_core::DType;
use tilewire_ops::attention::{AttentionDesc, AttentionPlan, AttnBackend, AttnMask, Sequences};

use crate::attention::{base, launches_by, padded_sequences, replays_by, run_by};
use crate::common::Gpu;
use crate::hopper::{hopper, is_emulated, pass_on_an_emulated_device};

/// What the plan says of the kernels.
const CUT: &str = "kernels that cut their keys";

fn run(g: &Gpu, d: &AttentionDesc) {
    let explain = run_by(g, d, AttnBackend::Auto);
    assert!(explain.contains(CUT), "{explain}");
}

fn sums(of: impl IntoIterator<Item = usize>) -> Vec<usize> {
    let mut all = vec![0];
    of.into_iter().for_each(|n| all.push(all[all.len() - 1] + n));
    all
}

/// Sequences of so many queries and keys, with `gap` rows behind each.
fn batch(lens: &[(usize, usize)], gap: usize) -> Sequences {
    let of = |f: fn(&(usize, usize)) -> usize, gap| sums(lens.iter().map(|x| f(x) + gap));
    let (q, kv) = ((of(|x| x.0, 0), of(|x| x.0, gap)), (of(|x| x.1, 0), of(|x| x.1, gap)));
    Sequences::padded((&q.0, &q.1), (&kv.0, &kv.1)).unwrap()
}

fn of(s: Sequences, heads: (usize, usize), dim: usize, mask: AttnMask) -> AttentionDesc {
    AttentionDesc { sequences: s, ..AttentionDesc::new(1, heads, dim, DType::BF16, mask) }
}

#[test]
fn few_queries_of_one_sequence() {
    let Some(g) = hopper() else { return };
    let one = |q, kv| batch(&[(q, kv)], 0);
    if is_emulated() {
        run(&g, &of(one(1, 700), (8, 2), 64, AttnMask::CAUSAL));
        run(&g, &of(one(16, 300), (4, 1), 128, AttnMask::window(150, 0)));
        return run(&g, &of(one(3, 65), (2, 2), 40, AttnMask::FULL));
    }
    for dtype in [DType::BF16, DType::F16] {
        for dim in [64, 128, 256, 40] {
            for (q, kv) in [(1, 1), (1, 63), (2, 65), (5, 1000), (16, 4099), (1, 20_000)] {
                for heads in [(4, 2), (8, 1), (3, 3)] {
                    let d = AttentionDesc {
                        dtype,
                        out: dtype,
                        ..of(one(q, kv), heads, dim, AttnMask::CAUSAL)
                    };
                    run(&g, &d);
                }
            }
            let d = of(one(7, 3000), (8, 2), dim, AttnMask::window(700, 0));
            run(&g, &AttentionDesc { dtype, out: DType::F32, ..d });
        }
        let d = of(one(4, 2000), (16, 1), 192, AttnMask::FULL);
        run(&g, &AttentionDesc { dtype, out: dtype, dv: 128, ..d });
    }
}

#[test]
fn few_queries_of_many_sequences() {
    let Some(g) = hopper() else { return };
    let lens = |num: usize, most: usize| -> Vec<_> {
        (0..num).map(|i| ([1, 3, 0, 16, 2][i % 5], i * i * 37 % most)).collect()
    };
    let (few, many, most) = if is_emulated() { (7, 60, 150) } else { (20, 100, 5000) };
    let d = of(batch(&lens(few, most), 2), (8, 2), 64, AttnMask::CAUSAL);
    run(&g, &d);
    run(&g, &AttentionDesc { sink: true, ..d });
    // More segments than a launch contains.
    let d = of(batch(&lens(many, most / 2), 1), (4, 1), 64, AttnMask::window(most / 4, 0));
    run(&g, &d);
    if !is_emulated() {
        run(&g, &of(batch(&lens(600, 700), 0), (8, 1), 128, AttnMask::FULL));
    }
}

/// A plan of few queries with other sequences: longer ones, of more queries than a tile of the plan
/// has rows for, and too long for its kernels; and with offsets, which these do not take.
#[test]
fn plans_of_few_queries_take_other_sequences() {
    let Some(g) = hopper() else { return };
    let d = of(batch(&[(2, 90), (1, 300), (2, 0), (19, 60)], 0), (8, 1), 64, AttnMask::CAUSAL);
    let of_plan = Sequences { q: vec![0..2, 2..2], kv: vec![0..450, 450..450], ..d.sequences };
    let plan = AttentionDesc { sequences: of_plan, ..d };
    for lens in [
        vec![(2, 90), (1, 300), (2, 0)],
        vec![(16, 150), (3, 200)],
        vec![(19, 150), (3, 100)],
        vec![(0, 5)],
    ] {
        launches_by(&g, &plan, AttnBackend::Auto, batch(&lens, 0));
    }
}

#[test]
fn few_queries_replay_with_the_same_bits() {
    let Some(g) = hopper() else { return };
    let (kv, heads) = if is_emulated() { (150, (2, 1)) } else { (30_000, (8, 2)) };
    let d = of(batch(&[(1, kv), (2, 100), (4, kv / 2)], 1), heads, 64, AttnMask::CAUSAL);
    replays_by(&g, &d, AttnBackend::Auto);
}

/// Longer sequences, other types and other backends.
#[test]
fn other_kernels_attend_to_what_is_not_few() {
    let Some(g) = hopper() else { return };
    let few = of(batch(&[(16, 100)], 0), (4, 2), 64, AttnMask::CAUSAL);
    for (d, by, cut) in [
        (few.clone(), AttnBackend::Auto, true),
        (few.clone(), AttnBackend::Portable, false),
        (few.clone(), AttnBackend::Hopper, false),
        (AttentionDesc { softcap: Some(2.0), ..few.clone() }, AttnBackend::Auto, false),
        (base(17, 64, DType::BF16, AttnMask::CAUSAL), AttnBackend::Auto, false),
        (base(16, 64, DType::F32, AttnMask::CAUSAL), AttnBackend::Auto, false),
        (AttentionDesc { sequences: padded_sequences(), ..few }, AttnBackend::Auto, false),
    ] {
        let plan = AttentionPlan::with_backend(d, None, by).unwrap();
        plan.prepare(&g.stream).unwrap();
        assert_eq!(plan.explain().contains(CUT), cut, "{by}: {}", plan.explain());
    }
}

#[test]
fn the_attention_kernels_of_few_queries_run_on_emulated_devices() {
    pass_on_an_emulated_device(
        4,
        &[
            "attention_split::few_queries_of_one_sequence",
            "attention_split::few_queries_of_many_sequences",
            "attention_split::few_queries_replay_with_the_same_bits",
            "attention_split::plans_of_few_queries_take_other_sequences",
            "attention_split::other_kernels_attend_to_what_is_not_few",
        ],
    );
}
