//! `attention/sm80_attention_split.cu` against an f64 reference: masks, tails, packed heads, any
//! number of pieces; and the text broken on purpose.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

use bytemuck::Zeroable;
use tilewire_kernels::abi::{TwSeg, TwSplit};
use tilewire_kernels::attention::Tile;
use tilewire_kernels::attention::split::{
    SM80_ATTENTION_SPLIT, SPLIT_FEW, SPLIT_KEYS, SPLIT_THREADS, Split,
};

use crate::attention::{Build, Case, Tiles, case};
use crate::compile::Unit;
use crate::gemm::Type;
use crate::host::{Lib, RUNTIME};
use crate::memory::{ANY, Memory};
use crate::planted::{Scenario, all_are_killed};
use crate::{Test, scenarios, tests};

pub const TESTS: &[Test] = tests![
    split_attention_of_every_tail,
    split_attention_heads_and_types,
    split_attention_many_sequences,
    split_attention_bits_depend_on_pieces_alone,
    split_scenarios,
    split_mutants,
    split_row_mutants,
];

fn load(text: String, v: &Split) -> &'static Lib {
    let defines = v.defines().into_iter().map(|(name, value)| (&*name.leak(), value)).collect();
    RUNTIME.load(&Unit {
        name: SM80_ATTENTION_SPLIT.name,
        text,
        defines,
        kernels: SM80_ATTENTION_SPLIT.kernels.to_vec(),
        smem: v.shared_bytes() as usize,
    })
}

/// Libraries of the text as it is, by their definitions.
static LIBS: LazyLock<Mutex<HashMap<String, &'static Lib>>> = LazyLock::new(Mutex::default);

fn lib(v: &Split) -> &'static Lib {
    let mut libs = LIBS.lock().unwrap();
    libs.entry(format!("{v:?}")).or_insert_with(|| load(SM80_ATTENTION_SPLIT.emu_text(), v))
}

/// Two matrix instructions of rows, so that both are at work.
const D64: Split = Split { f16: false, dqk: 64, dv: 64, rows: 32, stages: 3 };
const D128: Split = Split { f16: false, dqk: 128, dv: 128, rows: 16, stages: 3 };
/// A warp has rows of its own.
const ROWS: Split = Split { rows: 64, ..D64 };
/// Neither dimension is a multiple of 16, and they differ.
const ODD: Split = Split { f16: true, dqk: 40, dv: 24, rows: 16, stages: 2 };

/// The tables of a launch in which segment `i` has `pieces[i % len]` pieces: segments with several
/// come first. Also the tiles of these.
fn tables(c: &Case, v: &Split, pieces: &[u32]) -> (Vec<TwSeg>, Vec<TwSeg>, u32, u32) {
    let (own, other, _) = c.tables(true, 1);
    // Rows of no sequence have no keys that could be cut.
    let of =
        |(i, s): (usize, TwSeg)| (s, if s.first == s.end { 1 } else { pieces[i % pieces.len()] });
    let mut own: Vec<_> = own.into_iter().enumerate().map(of).collect();
    own.sort_by_key(|(_, pieces)| *pieces == 1);
    let (mut tiles, mut several) = (0, 0);
    for (s, pieces) in &mut own {
        s.tile = tiles;
        let rows = s.len * (c.heads.0 / c.heads.1) as u32;
        tiles += rows.div_ceil(v.rows as u32) * *pieces;
        if *pieces > 1 {
            several = tiles;
        }
    }
    (own.into_iter().map(|(s, _)| s).collect(), other, tiles, several)
}

/// Runs `c` by the library; the bytes of the output and lse.
fn check_on(
    lib: &'static Lib,
    c: &Case,
    v: &Split,
    pieces: &[u32],
    seed: u64,
) -> (Vec<u8>, Vec<f32>) {
    let fwd = Tile { m: v.rows as u64, n: SPLIT_KEYS as u64, warps: 4 };
    let on = Build {
        lib: Some(lib),
        input: if v.f16 { Type::F16 } else { Type::Bf16 },
        plain: false,
        dqk: v.dqk,
        dv: v.dv,
        tiles: Tiles { fwd, dq: fwd, dkv: fwd, split: false, pairs: false },
    };
    let (own, other, tiles, several) = tables(c, v, pieces);
    let hkv = c.heads.1 as u32;
    let (part, end) = v.part_bytes();
    let slots = (several * hkv) as usize;
    let parts = Memory::new("parts", ANY, slots * part);
    let ends = Memory::new("ends", ANY, slots * end);
    parts.write(&vec![f32::NAN; slots * part / 4]);
    ends.write(&vec![f32::NAN; slots * end / 4]);
    let kernels = ["tw_attn_split", "tw_attn_split_merge"].map(|name| on.kernel(name));
    c.check_tables(&on, seed, (&own, &other, tiles), &[&parts, &ends], |p, _| {
        let mut p = *p;
        let mut s =
            TwSplit { parts: parts.addr(), ends: ends.addr(), tiles: several, ..TwSplit::zeroed() };
        // Few segments: in the launch itself by some seeds, which then has no others.
        if seed % 4 < 2 && own.len().max(other.len()) <= SPLIT_FEW {
            (s.few, p.own, p.other) = (1, 0, 0);
            s.own[..own.len()].copy_from_slice(&own);
            s.other[..other.len()].copy_from_slice(&other);
        }
        let all = kernels.iter().zip([(tiles, v.shared_bytes()), (several, 0)]);
        all.filter(|(_, (tiles, _))| *tiles > 0)
            .map(|(kernel, (tiles, smem))| {
                let grid = [tiles * hkv, 1, 1];
                kernel.grid(grid, [SPLIT_THREADS, 1, 1]).smem(smem).arg(&p).arg(&s)
            })
            .collect()
    })
}

fn check(c: &Case, v: &Split, pieces: &[u32], seed: u64) {
    check_on(lib(v), c, v, pieces, seed);
}

/// Lengths at the edges of tiles, by fewer and by more pieces than there are tiles.
fn split_attention_of_every_tail() {
    let tails = [(1, 1), (1, 64), (2, 65), (1, 127), (3, 200), (5, 333)];
    for (i, (sq, skv)) in tails.into_iter().enumerate() {
        let seed = i as u64;
        let out = [Type::Bf16, Type::F32, Type::F16][i % 3];
        let c = Case { out, pad: 8 * (i % 2), heads: (4, 1), ..case(sq, skv) };
        check(&c, &D128, &[1], seed);
        check(&c, &D128, &[2], seed + 1);
        check(&c.clone().causal(), &D64, &[1 + i as u32], seed + 2);
        check(&c.clone().window(70, 0), &D64, &[2], seed);
        check(&c.window(3, 17), &ODD, &[7], seed + 3);
    }
    for (i, (sq, skv)) in [(16, 200), (13, 65), (5, 333)].into_iter().enumerate() {
        let c = Case { out: Type::Bf16, heads: (8, 1), ..case(sq, skv) };
        check(&c.clone().causal(), &ROWS, &[1 + i as u32], i as u64);
        check(&c.window(70, 3), &ROWS, &[2], 1);
    }
    // More queries than keys: rows that see none.
    let c = Case { out: Type::Bf16, sink: true, ..case(12, 7) };
    check(&c.clone().causal(), &D64, &[1], 1);
    check(&c.causal(), &D64, &[3], 2);
    check(&Case { scale: 0.1, ..case(3, 90) }, &ODD, &[2], 1);
}

/// The usual variants, and groups of every kind.
fn split_attention_heads_and_types() {
    for (i, v) in Split::all().iter().chain([&ODD]).enumerate() {
        let heads = [(8, 1), (3, 3), (8, 2), (32, 1)][i % 4];
        let out = if v.f16 { Type::F16 } else { Type::Bf16 };
        let c = Case { out, heads, ..case(3, 260) };
        check(&c.causal(), v, &[1 + i as u32 % 4], i as u64);
    }
}

/// Sequences of a batch, each with pieces of its own, rows of no sequence, sequences without keys,
/// NaN that stays in its row.
fn split_attention_many_sequences() {
    let lens = [(1, 400), (1, 7), (0, 10), (4, 0), (2, 190), (1, 64), (9, 300), (1, 129)];
    let c = Case { heads: (4, 2), ..Case::packed(&lens) };
    check(&c, &D64, &[1, 3, 2], 1);
    check(&Case { heads: (8, 2), ..c.clone() }.causal(), &ROWS, &[2, 1, 5], 1);
    check(&Case { out: Type::Bf16, ..c.clone() }.causal(), &D64, &[4, 1, 1, 3], 2);
    check(&c.clone().window(100, 0), &D64, &[2], 3);
    check(&Case { sink: true, out: Type::Bf16, pad: 8, ..c.clone() }.causal(), &D64, &[1, 2], 4);
    // More segments than a launch contains.
    let lens: Vec<_> = (0..SPLIT_FEW / 2 + 3).map(|i| (1, 1 + 17 * i % 150)).collect();
    check(&Case { heads: (2, 1), ..Case::packed(&lens) }, &ODD, &[1, 2], 0);
    for row in [1, 7] {
        check(&Case { nan: Some(row), ..c.clone() }.causal(), &D64, &[2, 1], 1);
    }
}

/// The order of threads changes no bit.
fn split_attention_bits_depend_on_pieces_alone() {
    let c = Case { heads: (4, 2), out: Type::Bf16, ..Case::packed(&[(2, 300), (1, 450)]) };
    let of = |pieces: &[u32], seed| {
        let (out, lse) = check_on(lib(&D64), &c, &D64, pieces, seed);
        (out, lse.into_iter().map(f32::to_bits).collect::<Vec<_>>())
    };
    let first = of(&[3], 0);
    assert!((1..5).all(|seed| of(&[3], seed) == first), "bits of the output and lse");
}

/// Masks and tails of two rows of tiles.
fn masks(lib: &'static Lib) {
    let c = Case { heads: (8, 2), out: Type::Bf16, ..case(9, 200) };
    check_on(lib, &c, &D64, &[1], 1);
    check_on(lib, &c.clone().causal(), &D64, &[2], 2);
    check_on(lib, &c.clone().window(65, 0), &D64, &[1], 1);
    check_on(lib, &c.window(20, 3), &D64, &[2], 2);
    check_on(lib, &Case { heads: (2, 1), ..case(3, 320) }.window(253, 0), &D64, &[1], 2);
    // All keys of a tile are visible to the last row, and not to the first.
    check_on(lib, &Case { heads: (8, 1), ..case(4, 64) }.causal(), &D64, &[1], 1);
}

/// Sequences with different pieces, in the launch and in tables.
fn sequences(lib: &'static Lib) {
    let c = Case { heads: (4, 2), ..Case::packed(&[(1, 400), (2, 70), (9, 300), (3, 0), (1, 30)]) };
    check_on(lib, &c, &D64, &[3, 1], 1);
    let c = Case { out: Type::Bf16, sink: true, pad: 8, ..c };
    check_on(lib, &c, &D64, &[5, 1, 2], 2);
}

/// Many pieces of many tiles, and seeds for which warps are far apart.
fn many_orders(lib: &'static Lib) {
    for seed in 1..7 {
        check_on(lib, &Case { heads: (2, 1), ..case(1, 500) }, &D64, &[1], seed);
        check_on(lib, &Case { heads: (4, 1), ..case(3, 700) }, &D64, &[6], seed);
        check_on(lib, &Case { heads: (4, 1), ..case(1, 700) }, &D64, &[6], seed);
    }
}

/// More pieces than a warp has lanes.
fn many_pieces(lib: &'static Lib) {
    check_on(lib, &Case { heads: (2, 1), ..case(3, 2600) }, &D64, &[40], 1);
}

/// More rows than pieces, and more pieces than tiles of keys.
fn many_rows(lib: &'static Lib) {
    for seed in 1..5 {
        check_on(lib, &Case { heads: (16, 1), ..case(2, 130) }, &D64, &[2], seed);
        check_on(lib, &Case { heads: (16, 1), ..case(2, 130) }, &D64, &[5], seed);
    }
}

/// Rows of warps at edges of masks, of tiles and of pieces.
fn rows_of_warps(lib: &'static Lib) {
    let c = Case { heads: (8, 2), out: Type::Bf16, ..case(15, 200) };
    check_on(lib, &c.clone().causal(), &ROWS, &[2], 1);
    check_on(lib, &c.window(70, 3), &ROWS, &[1], 2);
}

const SCENARIOS: &[Scenario] = scenarios![many_orders, many_pieces, many_rows, masks, sequences];
const OF_ROWS: &[Scenario] = scenarios![rows_of_warps];

/// What fails with a mutant must pass without.
fn split_scenarios() {
    for (_, scenario) in SCENARIOS {
        scenario(lib(&D64));
    }
    for (_, scenario) in OF_ROWS {
        scenario(lib(&ROWS));
    }
}

fn split_mutants() {
    all_are_killed(
        &SM80_ATTENTION_SPLIT.emu_text(),
        |text| load(text, &D64),
        ("attention/sm80_attention_split", "split"),
        SCENARIOS,
    );
}

fn split_row_mutants() {
    all_are_killed(
        &SM80_ATTENTION_SPLIT.emu_text(),
        |text| load(text, &ROWS),
        ("attention/sm80_attention_split", "rows"),
        OF_ROWS,
    );
}
