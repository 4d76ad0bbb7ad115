//! `attention/hopper_fused.cuh` against an f64 reference: five products, dq by turns.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{LazyLock, Mutex};

use tilewire_kernels::abi::{TwAttn, TwTensorMap};
use tilewire_kernels::attention::hopper::{HopperGrad, STORE_ROWS, THREADS, TILE_M};
use tilewire_kernels::attention::hopper_fused::{
    FUSED_ROWS, HopperFused, SM90_ATTENTION_GRADS, SUMS_THREADS,
};
use tilewire_kernels::attention::{Tile, delta_rows};

use crate::attention::{Build, Case, Tiles, case};
use crate::attention_grad::check_by;
use crate::attention_hopper_grad;
use crate::compile::Unit;
use crate::gemm::Type;
use crate::hopper::ragged;
use crate::host::{Lib, RUNTIME};
use crate::{Test, tests};

pub const TESTS: &[Test] = tests![
    fused_grads_of_every_tail,
    fused_grads_masks,
    fused_grads_packed_rows_and_groups,
    fused_grads_of_parts,
    fused_grads_bits_do_not_depend_on_the_launch,
    fused_grads_in_any_order,
];

pub const BF16: HopperFused = HopperFused::of(false);
const F16: HopperFused = HopperFused::of(true);

pub fn load(text: String, v: &HopperFused) -> &'static Lib {
    let defines = v.defines().into_iter().map(|(name, value)| (&*name.leak(), value)).collect();
    RUNTIME.load(&Unit {
        name: SM90_ATTENTION_GRADS.name,
        text,
        defines,
        kernels: SM90_ATTENTION_GRADS.kernels.to_vec(),
        smem: v.shared_bytes() as usize,
    })
}

/// Libraries of the text as it is, by their definitions.
static LIBS: LazyLock<Mutex<HashMap<String, &'static Lib>>> = LazyLock::new(Mutex::default);

fn lib(v: &HopperFused) -> &'static Lib {
    let mut libs = LIBS.lock().unwrap();
    libs.entry(format!("{v:?}")).or_insert_with(|| load(SM90_ATTENTION_GRADS.emu_text(), v))
}

/// How a launch takes its tiles: blocks, and heads that are done together.
#[derive(Clone, Copy)]
pub struct How {
    pub blocks: u32,
    pub together: u32,
}

/// The maps of k, v, q, d_out, dk and dv.
fn maps(c: &Case, on: &Build, p: &TwAttn) -> [TwTensorMap; 6] {
    let (hq, hkv) = c.heads;
    [
        ragged(p.k, hkv * on.dqk, p.ld_k, TILE_M),
        ragged(p.v, hkv * on.dv, p.ld_v, TILE_M),
        ragged(p.q, hq * on.dqk, p.ld_q, FUSED_ROWS),
        ragged(p.d_out, hq * on.dv, p.ld_o, FUSED_ROWS),
        ragged(p.dk, hkv * on.dqk, p.ld_k, STORE_ROWS),
        ragged(p.dv, hkv * on.dv, p.ld_v, STORE_ROWS),
    ]
}

/// Runs the kernels of the library; the bytes of dq, dk and dv.
pub fn check_on(lib: &'static Lib, c: &Case, v: &HopperFused, how: How, seed: u64) -> [Vec<u8>; 3] {
    let tile = |m, n| Tile { m: m as u64, n: n as u64, warps: 12 };
    let (dq, dkv) = (tile(TILE_M, TILE_M), tile(FUSED_ROWS, TILE_M));
    let of = |lib| Build {
        lib: Some(lib),
        input: if v.f16 { Type::F16 } else { Type::Bf16 },
        plain: false,
        dqk: 128,
        dv: 128,
        tiles: Tiles { fwd: dq, dq, dkv, split: false, pairs: false },
    };
    let on = of(lib);
    let make_delta = of(attention_hopper_grad::lib(&HopperGrad::of(v.f16, (128, 128), false)));
    let make_delta = make_delta.kernel("tw_attn_delta");
    let [make_grads, make_dq] =
        ["tw_hopper_attn_grads", "tw_attn_dq_of_sums"].map(|name| on.kernel(name));
    let sums = if v.unordered { 0.0 } else { f32::NAN };
    check_by(c, &on, (seed, sums), |[of_q, of_kv], _, to| {
        let blocks = (of_q.tokens_q * of_q.heads_q).div_ceil(delta_rows(on.dv) as u32);
        let delta = make_delta.grid([blocks, 1, 1], [256, 1, 1]).arg(of_q);
        // The table of queries has the numbers of tiles.
        let p = TwAttn { other: of_q.own, ..*of_kv };
        let (grid, block) = ([how.blocks, 1, 1], [THREADS, 1, 1]);
        let grads = make_grads.grid(grid, block).smem(v.shared_bytes());
        let grads = grads.arg(&p).arg(to).arg(&how.together);
        let grads = maps(c, &on, &p).iter().fold(grads, |l, m| l.arg(m));
        let grid = [of_q.tiles * of_q.heads_q, 1, 1];
        let dq = make_dq.grid(grid, [SUMS_THREADS, 1, 1]).arg(of_q).arg(to);
        vec![delta, grads, dq]
    })
}

/// By one to four blocks, as the seed says.
fn check(c: &Case, v: &HopperFused, seed: u64) {
    let how = How { blocks: 1 + (seed % 4) as u32, together: 1 + (seed % 3) as u32 };
    check_on(lib(v), c, v, how, seed);
}

fn fused_grads_of_every_tail() {
    let tails = [(1, 1), (63, 65), (65, 127), (127, 129), (129, 63), (200, 330)];
    for (i, (sq, skv)) in tails.into_iter().enumerate() {
        let out = [Type::Bf16, Type::F32, Type::F16][i % 3];
        let c = Case { out, pad: 8 * (i % 2), heads: (1 + i % 2, 1), ..case(sq, skv) };
        check(&c, &BF16, i as u64);
        check(&c.causal(), &F16, i as u64 + 1);
    }
}

fn fused_grads_masks() {
    let c = Case { out: Type::Bf16, heads: (1, 1), ..case(200, 400) };
    check(&c.clone().causal(), &BF16, 1);
    // Rows of the other side in front of all windows, rows that see none, and windows within one
    // tile.
    check(&c.clone().window(40, 0), &BF16, 2);
    check(&c.window(3, 17), &BF16, 3);
    check(&Case { out: Type::Bf16, ..case(300, 100) }.causal(), &BF16, 4);
    check(&Case { heads: (1, 1), ..case(330, 330) }.window(170, 0), &BF16, 5);
}

fn fused_grads_packed_rows_and_groups() {
    let lens = [(40, 40), (0, 10), (170, 5), (3, 190), (10, 0), (165, 165)];
    let c = Case { heads: (4, 2), ..Case::packed(&lens) };
    check(&c, &BF16, 1);
    check(&Case { out: Type::Bf16, ..c.clone() }.causal(), &BF16, 2);
    check(&c.clone().window(20, 5), &BF16, 3);
    check(&Case { sink: true, out: Type::Bf16, pad: 8, ..c.causal() }, &BF16, 4);
}

/// The rows of a rank of context parallelism: chunks of sequences, at their global positions.
fn fused_grads_of_parts() {
    let whole = Case { heads: (2, 1), ..Case::packed(&[(400, 400), (44, 60)]) }.causal();
    let (rows_q, rows_kv) = (whole.q[0].end, whole.kv[0].end);
    let zigzag = |n: usize| -> Vec<Range<usize>> { vec![n / 4..n / 2 - 3, n * 3 / 4..n] };
    let mut c = Case { q: zigzag(rows_q), ..whole };
    c.kv = vec![0..7, 7..rows_kv / 2, rows_kv / 2..rows_kv];
    check(&c, &BF16, 1);
    // Some of the keys only.
    c.kv = zigzag(rows_kv);
    check(&c, &BF16, 2);
}

/// Without turns dq is as right, and dk and dv have their bits.
fn fused_grads_in_any_order() {
    for v in [BF16, F16] {
        let lens = [(40, 40), (0, 10), (170, 5), (3, 190), (10, 0), (165, 165)];
        let c = Case { heads: (4, 2), out: Type::F32, ..Case::packed(&lens) };
        for (c, seed) in [(c.clone(), 1), (c.clone().causal(), 2), (c.window(20, 5), 3)] {
            let how = How { blocks: 4, together: 1 };
            let of = |v: HopperFused, seed| check_on(lib(&v), &c, &v, how, seed);
            let (ordered, any) = (of(v, seed), of(v.unordered(), seed + 4));
            assert!(ordered[1..] == any[1..], "{c:?}: bits of dk and dv");
        }
    }
    for (sq, skv) in [(1, 1), (65, 127), (300, 400)] {
        check(&Case { out: Type::F32, ..case(sq, skv) }, &BF16.unordered(), 2);
        check(&case(sq, skv).causal(), &F16.unordered(), 3);
    }
}

/// Blocks, the order of heads, and the order of threads change no bit.
fn fused_grads_bits_do_not_depend_on_the_launch() {
    let c = Case { heads: (4, 2), out: Type::Bf16, ..case(200, 270) }.causal();
    let all = [(1, 1, 0), (3, 2, 1), (5, 1, 2), (9, 2, 5)];
    let all = all.map(|(blocks, together, seed)| {
        check_on(lib(&BF16), &c, &BF16, How { blocks, together }, seed)
    });
    assert!(all.iter().all(|x| *x == all[0]), "bits of the gradients");
}
