//! `attention/sm90_attention.cu` against an f64 reference: masks, tails, packed rows, groups.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

use bytemuck::Zeroable;
use tilewire_kernels::abi::TwAttnOrder;
use tilewire_kernels::attention::Tile;
use tilewire_kernels::attention::hopper::{FEW, HopperVariant, SM90_ATTENTION, STORE_ROWS};

use crate::attention::{Build, Case, Tiles, case};
use crate::compile::Unit;
use crate::gemm::Type;
use crate::hopper::ragged;
use crate::host::{Lib, RUNTIME};
use crate::{Test, tests};

pub const TESTS: &[Test] = tests![
    hopper_attention_of_every_tail,
    hopper_attention_masks,
    hopper_attention_packed_rows_and_groups,
    hopper_attention_heads_and_types,
    hopper_attention_parts_are_exact,
    hopper_attention_nan_stays_in_its_row,
    hopper_attention_extras,
    hopper_attention_bits_do_not_depend_on_the_launch,
];

pub fn load(text: String, v: &HopperVariant) -> &'static Lib {
    let defines = v.defines().into_iter().map(|(name, value)| (&*name.leak(), value)).collect();
    RUNTIME.load(&Unit {
        name: SM90_ATTENTION.name,
        text,
        defines,
        kernels: SM90_ATTENTION.kernels.to_vec(),
        smem: v.shared_bytes() as usize,
    })
}

/// Libraries of the text as it is, by their definitions.
static LIBS: LazyLock<Mutex<HashMap<String, &'static Lib>>> = LazyLock::new(Mutex::default);

pub fn lib(v: &HopperVariant) -> &'static Lib {
    let mut libs = LIBS.lock().unwrap();
    libs.entry(format!("{v:?}")).or_insert_with(|| load(SM90_ATTENTION.emu_text(), v))
}

pub const D128: HopperVariant = HopperVariant { f16: false, dqk: 128, dv: 128, extra: false };
/// With extras.
pub const E64: HopperVariant = HopperVariant { extra: true, ..D64 };
pub const D64: HopperVariant = HopperVariant { f16: false, dqk: 64, dv: 64, extra: false };

/// How a launch takes its tiles: blocks, heads that are done together, by a counter or not.
#[derive(Clone, Copy)]
pub struct How {
    pub blocks: u32,
    pub heads: u32,
    pub counted: bool,
}

/// Runs `c` by the library; the bytes of the output and lse.
pub fn check_on(
    lib: &'static Lib,
    c: &Case,
    v: &HopperVariant,
    how: How,
    seed: u64,
) -> (Vec<u8>, Vec<f32>) {
    let warps = u64::from(v.threads()) / 32;
    let fwd = Tile { m: v.rows() as u64, n: v.keys() as u64, warps };
    let on = Build {
        lib: Some(lib),
        input: if v.f16 { Type::F16 } else { Type::Bf16 },
        plain: false,
        dqk: v.dqk,
        dv: v.dv,
        tiles: Tiles { fwd, dq: fwd, dkv: fwd, split: false, pairs: false },
    };
    let kernel = on.kernel("tw_hopper_attn_fwd");
    c.check_by(&on, seed, |p, segs, counter| {
        let (hq, hkv) = c.heads;
        let counter = if how.counted { counter } else { 0 };
        let (mut p, mut order) =
            (*p, TwAttnOrder { counter, heads: how.heads, ..TwAttnOrder::zeroed() });
        // Few segments: in the launch itself by some seeds, which then has no others.
        if seed % 4 < 2 && segs.iter().all(|s| s.len() <= FEW) {
            (order.few, p.own, p.other) = (1, 0, 0);
            for (to, from) in [&mut order.own, &mut order.other].into_iter().zip(segs) {
                to[..from.len()].copy_from_slice(from);
            }
        }
        let maps = [
            ragged(p.q, hq * v.dqk, p.ld_q, v.rows()),
            ragged(p.k, hkv * v.dqk, p.ld_k, v.keys()),
            ragged(p.v, hkv * v.dv, p.ld_v, v.keys()),
            ragged(p.out, hq * v.dv, p.ld_o, STORE_ROWS),
        ];
        let launch = kernel.grid([how.blocks, 1, 1], [v.threads(), 1, 1]).smem(v.shared_bytes());
        maps.iter().fold(launch.arg(&p).arg(&order), |l, m| l.arg(m))
    })
}

/// By one block or two, with and without a counter, as the seed says.
fn check(c: &Case, v: &HopperVariant, seed: u64) {
    let how = How {
        blocks: 1 + (seed / 2 % 2) as u32,
        heads: 1 + (seed % 3) as u32,
        counted: seed % 2 == 1,
    };
    check_on(lib(v), c, v, how, seed);
}

/// Each extra alone, and all together.
pub fn each_extra(check: impl Fn(&Case, u64)) {
    for (i, c) in [
        case(133, 150).causal(),
        Case::packed(&[(20, 30), (170, 99)]),
        case(140, 140).window(99, 3),
    ]
    .into_iter()
    .enumerate()
    {
        let c = Case { out: [Type::F16, Type::F32, Type::Bf16][i], pad: 8, ..c };
        check(&Case { softcap: 3.0, ..c.clone() }, 1);
        check(&Case { bias: 1, ..c.clone() }, 2);
        check(&Case { drop: 0.3, ..c.clone() }, 3);
        check(&Case { sink: true, scale: -0.7, ..c.clone() }, 4);
        check(&Case { softcap: 2.0, bias: 2, sink: true, drop: 0.2, ..c }, 5);
    }
}

fn hopper_attention_of_every_tail() {
    let tails =
        [(1, 1), (63, 65), (65, 127), (127, 129), (129, 63), (191, 193), (193, 191), (200, 330)];
    for (i, (sq, skv)) in tails.into_iter().enumerate() {
        let out = [Type::Bf16, Type::F32, Type::F16][i % 3];
        let c = Case { out, pad: 8 * (i % 2), ..case(sq, skv) };
        check(&c, &D128, i as u64);
        check(&c.causal(), &D64, i as u64 + 1);
    }
}

fn hopper_attention_masks() {
    let c = Case { out: Type::Bf16, ..case(200, 400) };
    check(&c.clone().causal(), &D64, 1);
    // Keys in front of all windows, rows that see none, and windows within one tile of keys.
    check(&c.clone().window(40, 0), &D64, 2);
    check(&c.window(3, 17), &D64, 3);
    check(&Case { out: Type::Bf16, ..case(300, 100) }.causal(), &D64, 4);
    check(&case(330, 330).window(170, 0), &D128, 5);
}

fn hopper_attention_packed_rows_and_groups() {
    let lens = [(40, 40), (0, 10), (170, 5), (3, 190), (10, 0), (165, 165)];
    let c = Case { heads: (4, 2), ..Case::packed(&lens) };
    check(&c, &D64, 1);
    check(&Case { out: Type::Bf16, ..c.clone() }.causal(), &D64, 2);
    check(&c.clone().window(20, 5), &D64, 3);
    check(&Case { sink: true, out: Type::Bf16, pad: 8, ..c.causal() }, &D64, 4);
}

fn hopper_attention_heads_and_types() {
    // The type and extras do not meet in the text.
    let all = HopperVariant::all().into_iter().filter(|v| !(v.extra && v.f16));
    for (i, v) in all.enumerate() {
        let out = if v.f16 { Type::F16 } else { Type::Bf16 };
        let heads = [(3, 1), (2, 2), (4, 2)][i % 3];
        let (softcap, bias, drop) = if v.extra { (2.0, heads.0, 0.2) } else { (0.0, 0, 0.0) };
        let c = Case { out, heads, softcap, bias, drop, ..case(130, 250) };
        check(&c.causal(), &v, i as u64);
    }
}

/// The rows of a rank of context parallelism: chunks of sequences, at their global positions.
fn hopper_attention_parts_are_exact() {
    let whole = Case { heads: (2, 1), ..Case::packed(&[(400, 400), (44, 60)]) }.causal();
    let (rows_q, rows_kv) = (whole.q[0].end, whole.kv[0].end);
    let zigzag = |n: usize| vec![n / 4..n / 2 - 3, n * 3 / 4..n];
    let mut c = Case { q: zigzag(rows_q), ..whole };
    c.kv = vec![0..7, 7..rows_kv / 2, rows_kv / 2..rows_kv];
    check(&c, &D64, 1);
    // Some of the keys only: a part that is merged with others.
    c.kv = zigzag(rows_kv);
    check(&c, &D64, 2);
}

/// A row of NaN gives NaN, and neither its neighbours nor the tiles behind it do.
fn hopper_attention_nan_stays_in_its_row() {
    for (i, (row, out)) in [(200, Type::Bf16), (299, Type::F32)].into_iter().enumerate() {
        let c = Case { nan: Some(row), out, ..case(300, 200) };
        check(&c.causal(), &D64, i as u64);
    }
}

fn hopper_attention_extras() {
    each_extra(|c, seed| check(c, &E64, seed));
}

/// Blocks, their order and the counter change no bit, nor does the order of threads.
fn hopper_attention_bits_do_not_depend_on_the_launch() {
    let c = Case { heads: (4, 2), out: Type::Bf16, ..case(300, 340) }.causal();
    let all =
        [(1, 1, false, 0), (3, 4, true, 1), (5, 3, true, 2), (12, 2, false, 3), (20, 9, true, 5)];
    let all = all.map(|(blocks, heads, counted, seed)| {
        let (out, lse) = check_on(lib(&D64), &c, &D64, How { blocks, heads, counted }, seed);
        (out, lse.into_iter().map(f32::to_bits).collect::<Vec<_>>())
    });
    assert!(all.iter().all(|x| *x == all[0]), "bits of the output and lse");
}
