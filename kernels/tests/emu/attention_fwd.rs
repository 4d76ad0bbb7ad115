//! The forward pass of attention against an f64 reference: masks, packed rows, groups, extras.

use tilewire_kernels::abi::TwMerge;
use tilewire_kernels::attention::{PLAIN_ATTENTION, SM80_ATTENTION, Variant};

use crate::attention::{Case, F32, ODD, SMALL, Tiles, case, load, load_plain};
use crate::gemm::Type;
use crate::run::Run;
use crate::{Test, tests};

pub const TESTS: &[Test] = tests![
    attention_masks_and_lengths,
    attention_packed_rows_and_groups,
    attention_extras,
    attention_of_usual_tiles,
    attention_parts_are_exact,
    attention_plain,
    attention_parts_merge,
];

fn attention_masks_and_lengths() {
    for (i, (sq, skv)) in [(1, 1), (63, 65), (65, 200), (200, 63), (64, 64)].into_iter().enumerate()
    {
        let out = [Type::F32, Type::Bf16, Type::F16][i % 3];
        let c = Case { out, pad: [0, 8][i % 2], ..case(sq, skv) };
        let c = Case { heads: [(2, 1), (1, 1), (2, 2)][i % 3], ..c };
        c.clone().check(&SMALL, 1);
        c.clone().causal().check(&SMALL, 2);
        c.clone().window(40, 0).check(&SMALL, 1);
        c.window(3, 17).check(&SMALL, 2);
    }
}

fn attention_packed_rows_and_groups() {
    let lens = [(40, 40), (0, 10), (70, 5), (3, 90), (10, 0), (65, 65)];
    let c = Case { heads: (4, 2), ..Case::packed(&lens) };
    c.clone().check(&SMALL, 1);
    c.clone().causal().check(&SMALL, 2);
    c.clone().window(20, 5).check(&SMALL, 3);
    Case { sink: true, out: Type::Bf16, ..c.causal() }.check(&SMALL, 4);
}

fn attention_extras() {
    for (i, c) in
        [case(33, 50).causal(), Case::packed(&[(20, 30), (17, 9)]), case(40, 40).window(9, 3)]
            .into_iter()
            .enumerate()
    {
        let c = Case { out: [Type::F16, Type::F32, Type::Bf16][i], pad: 8, ..c };
        Case { softcap: 3.0, ..c.clone() }.check(&ODD, 1);
        Case { bias: 1, ..c.clone() }.check(&ODD, 2);
        Case { drop: 0.3, ..c.clone() }.check(&ODD, 1);
        Case { sink: true, scale: -0.7, ..c.clone() }.check(&ODD, 1);
        Case { softcap: 2.0, bias: 2, sink: true, drop: 0.2, ..c }.check(&ODD, 1);
    }
}

/// The tiles that are used on GPUs.
fn attention_of_usual_tiles() {
    let v = Variant { f16: false, dqk: 128, dv: 128, extra: false };
    let tiles =
        Tiles { fwd: v.forward(), dq: v.dq(), dkv: v.dkv(), split: v.split(), pairs: v.pairs() };
    let b = load(SM80_ATTENTION.emu_text(), (128, 128, false, false, tiles));
    let ours = [v.forward_shared_bytes(), v.dq_shared_bytes(), v.dkv_shared_bytes()];
    assert_eq!([b.fwd_smem(), b.dq_smem(), b.dkv_smem()].map(|x| x as u64), ours);
    Case { out: Type::Bf16, heads: (1, 1), ..case(150, 170) }.causal().check(&b, 1);
}

/// The plain kernels: everything at once, and types that differ.
fn attention_plain() {
    for (i, (sq, skv)) in [(1, 1), (33, 65), (65, 31)].into_iter().enumerate() {
        let c = Case { pad: i, ..case(sq, skv) };
        c.clone().check(&F32, 1);
        c.clone().causal().check(&F32, 2);
        let c = Case { softcap: 2.0, bias: 2, sink: true, drop: 0.2, scale: -0.7, ..c };
        c.window(20, 3).check(&F32, 1);
    }
    let c = Case { heads: (4, 2), sink: true, ..Case::packed(&[(20, 30), (0, 3), (17, 9)]) };
    c.clone().causal().check(&F32, 3);
    let b = load_plain(PLAIN_ATTENTION.emu_text(), (20, 33, Type::Bf16, Type::F16));
    Case { out: Type::F16, ..c }.check(&b, 1);
}

/// The rows of a rank of context parallelism: chunks of sequences, at their global positions.
fn attention_parts_are_exact() {
    let whole = Case { heads: (2, 1), ..Case::packed(&[(100, 100), (44, 60)]) }.causal();
    let (rows_q, rows_kv) = (whole.q[0].end, whole.kv[0].end);
    let zigzag = |n: usize| vec![n / 4..n / 2 - 3, n * 3 / 4..n];
    let mut c = Case { q: zigzag(rows_q), ..whole.clone() };
    // All keys, in another split.
    c.kv = vec![0..7, 7..rows_kv / 2, rows_kv / 2..rows_kv];
    c.check(&SMALL, 1);
    c.drop = 0.25;
    c.heads = (2, 2);
    c.check(&ODD, 2);
    // Some of the keys only: a part that is merged with others.
    c.kv = zigzag(rows_kv);
    c.check(&ODD, 1);
}

/// Results over parts of the keys, merged, are the result over all keys.
fn attention_parts_merge() {
    let whole = Case { heads: (2, 1), ..Case::packed(&[(33, 40), (9, 20)]) }.causal();
    let (on, rows, hq) = (&*F32, Case::rows(&whole.q), whole.heads.0);
    let (mut parts, mut lses) = (Vec::new(), Vec::new());
    // Some rows see nothing of some parts.
    for kv in [30..whole.kv[0].end, 0..17, 17..30] {
        let (bytes, lse) = Case { kv: vec![kv], ..whole.clone() }.check(on, 1);
        parts.extend(Type::F32.values(&bytes));
        lses.extend(lse);
    }
    let f32s = |name, v: &[f32]| Case::memory(name, Type::F32, v, 1, 0);
    let (parts, lses) = (f32s("parts", &parts), f32s("lses", &lses));
    let out = f32s("out", &vec![f32::NAN; rows * hq * on.dv]);
    let lse = f32s("lse", &vec![f32::NAN; rows * hq]);
    let p = TwMerge {
        parts: parts.addr(),
        lses: lses.addr(),
        out: out.addr(),
        lse: lse.addr(),
        num: 3,
        tokens_q: rows as u32,
        heads_q: hq as u32,
        pad: 0,
    };
    let kernel = on.kernel("tw_attn_merge");
    let launch = kernel.grid([(rows * hq).div_ceil(8) as u32, 1, 1], [256, 1, 1]).arg(&p);
    Run::new(1).memory([&parts, &lses, &out, &lse]).stream(0, vec![launch]).go().unwrap();
    whole.compare(on, &out.read::<u8>(), &lse.read::<f32>());
}
