//! `attention/sm90_attention_bwd.cu` against an f64 reference: masks, tails, packed rows, groups.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

use bytemuck::Zeroable;

use tilewire_kernels::abi::{TwAttn, TwAttnOrder, TwTensorMap};
use tilewire_kernels::attention::hopper::{
    HopperGrad, SM90_ATTENTION_BWD, STORE_ROWS, THREADS, TILE_M,
};
use tilewire_kernels::attention::{Tile, delta_rows};

use crate::attention::{Build, Case, Tiles, case};
use crate::attention_grad::check_by;
use crate::attention_hopper::{How, each_extra};
use crate::compile::Unit;
use crate::gemm::Type;
use crate::hopper::ragged;
use crate::host::{Lib, RUNTIME};
use crate::{Test, tests};

pub const TESTS: &[Test] = tests![
    hopper_grads_of_every_tail,
    hopper_grads_masks,
    hopper_grads_packed_rows_and_groups,
    hopper_grads_heads_and_types,
    hopper_grads_of_parts,
    hopper_grads_extras,
    hopper_grads_bits_do_not_depend_on_the_launch,
];

pub fn load(text: String, v: &HopperGrad) -> &'static Lib {
    let defines = v.defines().into_iter().map(|(name, value)| (&*name.leak(), value)).collect();
    RUNTIME.load(&Unit {
        name: SM90_ATTENTION_BWD.name,
        text,
        defines,
        kernels: [SM90_ATTENTION_BWD.kernels, v.of_keys()].concat(),
        smem: v.dq_shared_bytes().max(v.dkv_shared_bytes()) as usize,
    })
}

/// Libraries of the text as it is, by their definitions.
static LIBS: LazyLock<Mutex<HashMap<String, &'static Lib>>> = LazyLock::new(Mutex::default);

pub fn lib(v: &HopperGrad) -> &'static Lib {
    let mut libs = LIBS.lock().unwrap();
    libs.entry(format!("{v:?}")).or_insert_with(|| load(SM90_ATTENTION_BWD.emu_text(), v))
}

pub const D128: HopperGrad = HopperGrad::of(false, (128, 128), false);
/// With extras.
pub const E64: HopperGrad = HopperGrad::of(false, (64, 64), true);
pub const D64: HopperGrad = HopperGrad::of(false, (64, 64), false);

/// Maps of boxes of so many rows: of q, d_out and dq, or of k, v, dk and dv.
fn maps_of_queries(c: &Case, v: &HopperGrad, p: &TwAttn, rows: usize) -> [TwTensorMap; 3] {
    let of = |at, dim, ld, rows| ragged(at, c.heads.0 * dim, ld, rows);
    [
        of(p.q, v.dqk, p.ld_q, rows),
        of(p.d_out, v.dv, p.ld_o, rows),
        of(p.dq, v.dqk, p.ld_q, STORE_ROWS),
    ]
}

fn maps_of_keys(c: &Case, v: &HopperGrad, p: &TwAttn, rows: usize) -> [TwTensorMap; 4] {
    let of = |at, dim, ld, rows| ragged(at, c.heads.1 * dim, ld, rows);
    [
        of(p.k, v.dqk, p.ld_k, rows),
        of(p.v, v.dv, p.ld_v, rows),
        of(p.dk, v.dqk, p.ld_k, STORE_ROWS),
        of(p.dv, v.dv, p.ld_v, STORE_ROWS),
    ]
}

/// Runs the kernels of the library; the bytes of dq, dk and dv.
pub fn check_on(lib: &'static Lib, c: &Case, v: &HopperGrad, how: How, seed: u64) -> [Vec<u8>; 3] {
    let tile = |m, n| Tile { m: m as u64, n: n as u64, warps: 12 };
    let (dq, dkv) = (tile(TILE_M, v.keys.rows), tile(v.queries.rows, TILE_M));
    let on = Build {
        lib: Some(lib),
        input: if v.f16 { Type::F16 } else { Type::Bf16 },
        plain: false,
        dqk: v.dqk,
        dv: v.dv,
        tiles: Tiles { fwd: dq, dq, dkv, split: false, pairs: false },
    };
    let [make_delta, make_dq] = ["tw_attn_delta", "tw_hopper_attn_dq"].map(|n| on.kernel(n));
    let of_keys: Vec<_> = v.of_keys().iter().map(|n| on.kernel(n)).collect();
    check_by(c, &on, (seed, f32::NAN), |[of_q, of_kv], counter, _| {
        let counter = if how.counted { counter } else { 0 };
        let order = TwAttnOrder { counter, heads: how.heads, ..TwAttnOrder::zeroed() };
        let (grid, block) = ([how.blocks, 1, 1], [THREADS, 1, 1]);
        let blocks = (of_q.tokens_q * of_q.heads_q).div_ceil(delta_rows(v.dv) as u32);
        let delta = make_delta.grid([blocks, 1, 1], [256, 1, 1]).arg(of_q);
        let [q, d_out, dq] = maps_of_queries(c, v, of_q, TILE_M);
        let [k, v_, ..] = maps_of_keys(c, v, of_q, v.keys.rows);
        let first = make_dq.grid(grid, block).smem(v.dq_shared_bytes()).arg(of_q).arg(&order);
        let first = [q, d_out, k, v_, dq].iter().fold(first, |l, m| l.arg(m));
        let [q, d_out, _] = maps_of_queries(c, v, of_kv, v.queries.rows);
        let [k, v_, dk, dv] = maps_of_keys(c, v, of_kv, TILE_M);
        let others = of_keys.iter().map(|kernel| {
            let launch = kernel.grid(grid, block).smem(v.dkv_shared_bytes()).arg(of_kv).arg(&order);
            [k, v_, q, d_out, dk, dv].iter().fold(launch, |l, m| l.arg(m))
        });
        [delta, first].into_iter().chain(others).collect()
    })
}

/// By one block or two, with and without a counter, as the seed says.
fn check(c: &Case, v: &HopperGrad, seed: u64) {
    let how = How {
        blocks: 1 + (seed / 2 % 2) as u32,
        heads: 1 + (seed % 3) as u32,
        counted: seed % 2 == 1,
    };
    check_on(lib(v), c, v, how, seed);
}

fn hopper_grads_of_every_tail() {
    let tails = [(1, 1), (63, 65), (65, 127), (127, 129), (129, 63), (200, 330)];
    for (i, (sq, skv)) in tails.into_iter().enumerate() {
        let out = [Type::Bf16, Type::F32, Type::F16][i % 3];
        let c = Case { out, pad: 8 * (i % 2), heads: (1 + i % 2, 1), ..case(sq, skv) };
        check(&c, &D128, i as u64);
        check(&c.causal(), &D64, i as u64 + 1);
    }
}

fn hopper_grads_masks() {
    let c = Case { out: Type::Bf16, heads: (1, 1), ..case(200, 400) };
    check(&c.clone().causal(), &D64, 1);
    // Rows of the other side in front of all windows, rows that see none, and windows within one
    // tile.
    check(&c.clone().window(40, 0), &D64, 2);
    check(&c.window(3, 17), &D64, 3);
    check(&Case { out: Type::Bf16, ..case(300, 100) }.causal(), &D64, 4);
    check(&Case { heads: (1, 1), ..case(330, 330) }.window(170, 0), &D128, 5);
}

fn hopper_grads_packed_rows_and_groups() {
    let lens = [(40, 40), (0, 10), (170, 5), (3, 190), (10, 0), (165, 165)];
    let c = Case { heads: (4, 2), ..Case::packed(&lens) };
    check(&c, &D64, 1);
    check(&Case { out: Type::Bf16, ..c.clone() }.causal(), &D64, 2);
    check(&c.clone().window(20, 5), &D64, 3);
    check(&Case { sink: true, out: Type::Bf16, pad: 8, ..c.causal() }, &D64, 4);
}

fn hopper_grads_heads_and_types() {
    // The type and extras do not meet in the text.
    let all = HopperGrad::all().into_iter().filter(|v| !(v.extra && v.f16));
    for (i, v) in all.enumerate() {
        let out = if v.f16 { Type::F16 } else { Type::Bf16 };
        let heads = [(3, 1), (2, 2), (4, 2)][i % 3];
        let (softcap, bias, drop) = if v.extra { (2.0, heads.0, 0.2) } else { (0.0, 0, 0.0) };
        let c = Case { out, heads, softcap, bias, drop, ..case(130, 140) };
        check(&c.causal(), &v, i as u64);
    }
}

/// The rows of a rank of context parallelism: chunks of sequences, at their global positions.
fn hopper_grads_of_parts() {
    let whole = Case { heads: (2, 1), ..Case::packed(&[(400, 400), (44, 60)]) }.causal();
    let (rows_q, rows_kv) = (whole.q[0].end, whole.kv[0].end);
    let zigzag = |n: usize| vec![n / 4..n / 2 - 3, n * 3 / 4..n];
    let mut c = Case { q: zigzag(rows_q), ..whole };
    c.kv = vec![0..7, 7..rows_kv / 2, rows_kv / 2..rows_kv];
    check(&c, &D64, 1);
    // Some of the keys only.
    c.kv = zigzag(rows_kv);
    check(&c, &D64, 2);
}

fn hopper_grads_extras() {
    each_extra(|c, seed| check(c, &E64, seed));
}

/// Blocks, their order and the counter change no bit, nor does the order of threads.
fn hopper_grads_bits_do_not_depend_on_the_launch() {
    let c = Case { heads: (4, 2), out: Type::Bf16, ..case(300, 340) }.causal();
    let all = [(1, 1, false, 0), (3, 4, true, 1), (5, 3, true, 2), (20, 9, true, 5)];
    let all = all.map(|(blocks, heads, counted, seed)| {
        check_on(lib(&D64), &c, &D64, How { blocks, heads, counted }, seed)
    });
    assert!(all.iter().all(|x| *x == all[0]), "bits of the gradients");
}
