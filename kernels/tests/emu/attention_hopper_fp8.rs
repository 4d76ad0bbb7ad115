//! `attention/sm90_attention_fp8.cu` against an f64 reference: masks, tails, packed rows, groups,
//! scales; and broken on purpose: every mutant must fail its scenario.

use std::sync::LazyLock;

use bytemuck::Zeroable;
use tilewire_kernels::abi::{TwAttnOrder, TwFp8, TwSeg};
use tilewire_kernels::attention::Tile;
use tilewire_kernels::attention::hopper::{FEW, STORE_ROWS};
use tilewire_kernels::attention::hopper_fp8::{
    FP8_DIM, FP8_KEYS, FP8_ROWS, FP8_THREADS, SM90_ATTENTION_FP8, TURN_THREADS, defines,
    shared_bytes,
};

use crate::attention::{Build, Case, Tiles, case};
use crate::compile::Unit;
use crate::gemm::Type;
use crate::hopper::{map_of_bytes, ragged, ragged_bytes};
use crate::host::{Lib, RUNTIME};
use crate::planted::{Scenario, all_are_killed};
use crate::{Test, scenarios, tests};

pub const TESTS: &[Test] = tests![
    fp8_attention_of_every_tail,
    fp8_attention_masks,
    fp8_attention_packed_rows_and_groups,
    fp8_attention_parts_are_exact,
    fp8_attention_nan_stays_in_its_row,
    fp8_attention_of_equal_scores_is_the_mean,
    fp8_attention_bits_do_not_depend_on_the_launch,
    fp8_attention_scenarios,
    fp8_attention_load_mutants,
    fp8_attention_attend_mutants,
    fp8_attention_softmax_mutants,
    fp8_attention_values_mutants,
];

fn load(text: String) -> &'static Lib {
    let defines = defines().into_iter().map(|(name, value)| (&*name.leak(), value)).collect();
    RUNTIME.load(&Unit {
        name: SM90_ATTENTION_FP8.name,
        text,
        defines,
        kernels: SM90_ATTENTION_FP8.kernels.to_vec(),
        smem: shared_bytes() as usize,
    })
}

static LIB: LazyLock<&'static Lib> = LazyLock::new(|| load(SM90_ATTENTION_FP8.emu_text()));

fn build(lib: &'static Lib) -> Build {
    let fwd = Tile { m: FP8_ROWS as u64, n: FP8_KEYS as u64, warps: 16 };
    Build {
        lib: Some(lib),
        input: Type::E4m3,
        plain: false,
        dqk: FP8_DIM,
        dv: FP8_DIM,
        tiles: Tiles { fwd, dq: fwd, dkv: fwd, split: false, pairs: false },
    }
}

/// How a launch takes its tiles: blocks, heads that are done together, by a counter or not.
#[derive(Clone, Copy)]
struct How {
    blocks: u32,
    heads: u32,
    counted: bool,
}

impl How {
    /// One block or two, with and without a counter.
    fn of(seed: u64) -> Self {
        let (blocks, heads) = (1 + (seed / 2 % 2) as u32, 1 + (seed % 3) as u32);
        Self { blocks, heads, counted: seed % 2 == 1 }
    }
}

/// Runs `c` by the library; the bytes of the output and lse.
fn check_on(lib: &'static Lib, c: &Case, how: How, seed: u64) -> (Vec<u8>, Vec<f32>) {
    let on = build(lib);
    let (hq, hkv) = c.heads;
    let (own, mut other, tiles) = c.tables(true, FP8_ROWS as u64);
    let blocks = other.iter_mut().fold(0, |blocks, s| {
        s.tile = blocks;
        blocks + (s.row + s.len).div_ceil(FP8_KEYS as u32) - s.row / FP8_KEYS as u32
    });
    let scales = [(1, &c.q, hq), (2, &c.kv, hkv), (3, &c.kv, hkv)].map(|(t, spans, heads)| {
        let mut scales = Case::scales(t, Case::rows(spans), heads);
        // Nobody has written those of rows that are of no sequence.
        let segs = c.segs(t == 1);
        for (block, scales) in scales.chunks_mut(heads).enumerate() {
            let rows = (block * FP8_KEYS) as u32..((block + 1) * FP8_KEYS) as u32;
            let meets = |s: &TwSeg| s.row < rows.end && s.row + s.len > rows.start;
            if !segs.iter().any(|(s, seq)| seq.is_some() && meets(s)) {
                scales.fill(f32::NAN);
            }
        }
        Case::memory("scales", Type::F32, &scales, 1, 0)
    });
    // NaN, as poison.
    let width = hkv * FP8_DIM * FP8_KEYS;
    let turned = vec![f32::NAN; blocks as usize * width];
    let values = Case::memory("transposed values", Type::E4m3, &turned, width, 0);
    let (turn, attend) = (on.kernel("tw_attn_fp8_values"), on.kernel("tw_hopper_attn_fp8_fwd"));
    let more = [&scales[0], &scales[1], &scales[2], &values];
    c.check_tables(&on, seed, (&own, &other, tiles), &more, |p, counter| {
        let counter = if how.counted { counter } else { 0 };
        let mut order = TwAttnOrder { counter, heads: how.heads, ..TwAttnOrder::zeroed() };
        let mut p = *p;
        if seed % 4 < 2 && [&own, &other].iter().all(|s| s.len() <= FEW) {
            (order.few, p.own, p.other) = (1, 0, 0);
            let put = |to: &mut [TwSeg], from: &[TwSeg]| to[..from.len()].copy_from_slice(from);
            put(&mut order.own, &own);
            put(&mut order.other, &other);
        }
        let f = TwFp8 {
            q_scales: scales[0].addr(),
            k_scales: scales[1].addr(),
            v_scales: scales[2].addr(),
            values: values.addr(),
            num_other: other.len() as u32,
            pad: 0,
        };
        let dims = [FP8_KEYS, hkv * FP8_DIM, (blocks as usize).max(1)];
        let strides = [FP8_KEYS as i64, width as i64];
        let maps = [
            ragged_bytes(p.q, hq * FP8_DIM, p.ld_q, FP8_ROWS),
            ragged_bytes(p.k, hkv * FP8_DIM, p.ld_k, FP8_KEYS),
            map_of_bytes(values.addr(), dims, strides, FP8_DIM),
            ragged(p.out, hq * FP8_DIM, p.ld_o, STORE_ROWS),
        ];
        let turn = turn.grid([blocks * hkv as u32, 1, 1], [TURN_THREADS, 1, 1]);
        let attend = attend.grid([how.blocks, 1, 1], [FP8_THREADS, 1, 1]).smem(shared_bytes());
        let attend = attend.arg(&p).arg(&f).arg(&order);
        let attend = maps.iter().fold(attend, |l, m| l.arg(m));
        let turn = (blocks > 0).then(|| turn.arg(&p).arg(&f).arg(&order));
        turn.into_iter().chain([attend]).collect()
    })
}

fn check(c: &Case, seed: u64) {
    check_on(*LIB, c, How::of(seed), seed);
}

/// Scores of some magnitude, whose probabilities are of all sizes.
fn scores(sq: usize, skv: usize) -> Case {
    Case { scale: 0.2, out: Type::Bf16, ..case(sq, skv) }
}

fn fp8_attention_of_every_tail() {
    let tails =
        [(1, 1), (63, 65), (65, 127), (127, 129), (129, 63), (191, 193), (193, 191), (200, 330)];
    for (i, (sq, skv)) in tails.into_iter().enumerate() {
        let out = [Type::Bf16, Type::F32, Type::F16][i % 3];
        let c = Case { out, pad: 16 * (i % 2), ..scores(sq, skv) };
        check(&c, i as u64);
        check(&c.causal(), i as u64 + 1);
    }
}

fn fp8_attention_masks() {
    let c = scores(200, 400);
    check(&c.clone().causal(), 1);
    // Keys in front of all windows, rows that see none, and windows within one tile of keys.
    check(&c.clone().window(40, 0), 2);
    check(&c.window(3, 17), 3);
    check(&scores(300, 100).causal(), 4);
    check(&scores(330, 330).window(170, 0), 5);
}

/// Sequences that begin at any row: blocks of scales that several have a part of.
fn fp8_attention_packed_rows_and_groups() {
    let lens = [(40, 40), (0, 10), (170, 5), (3, 190), (10, 0), (165, 165)];
    let c = Case { heads: (4, 2), scale: 0.2, ..Case::packed(&lens) };
    check(&c, 1);
    check(&Case { out: Type::Bf16, ..c.clone() }.causal(), 2);
    check(&c.clone().window(20, 5), 3);
    check(&Case { sink: true, out: Type::Bf16, pad: 16, ..c.causal() }, 4);
}

/// Some rows of a sequence, in pieces, at their global positions.
fn fp8_attention_parts_are_exact() {
    let whole = Case { heads: (2, 1), scale: 0.2, ..Case::packed(&[(400, 400), (44, 60)]) };
    let whole = whole.causal();
    let (rows_q, rows_kv) = (whole.q[0].end, whole.kv[0].end);
    let zigzag = |n: usize| vec![n / 4..n / 2 - 3, n * 3 / 4..n];
    let mut c = Case { q: zigzag(rows_q), ..whole };
    c.kv = vec![0..7, 7..rows_kv / 2, rows_kv / 2..rows_kv];
    check(&c, 1);
    c.kv = zigzag(rows_kv);
    check(&c, 2);
}

/// A row of NaN gives NaN, and neither its neighbours nor the tiles behind it do.
fn fp8_attention_nan_stays_in_its_row() {
    for (i, (row, out)) in [(200, Type::Bf16), (299, Type::F32)].into_iter().enumerate() {
        let c = Case { nan: Some(row), out, ..scores(300, 200) };
        check(&c.causal(), i as u64);
    }
}

/// Where all scores are nearly equal, probabilities are rounded to one and the same: the result is
/// the mean of the values that are seen, much closer than the bound of e4m3.
fn mean(lib: &'static Lib) {
    let c = Case { scale: 1e-5, heads: (2, 1), ..case(140, 300) }.causal();
    let (bytes, _) = check_on(lib, &c, How::of(1), 1);
    let (on, got) = (build(lib), Type::F32.values(&bytes));
    let [_, _, v] = c.inputs(&on);
    for (row, got) in got.chunks_exact(2 * FP8_DIM).enumerate() {
        let seen = row + 161;
        for (col, got) in got.iter().enumerate() {
            let all = (0..seen).map(|j| f64::from(v[j * FP8_DIM + col % FP8_DIM]));
            let want = all.sum::<f64>() / seen as f64;
            let off = (f64::from(*got) - want).abs();
            assert!(off < 2e-3, "{got}, not {want}, at row {row} column {col}");
        }
    }
}

fn fp8_attention_of_equal_scores_is_the_mean() {
    mean(*LIB);
}

/// Blocks, their order and the counter change no bit, nor does the order of threads.
fn fp8_attention_bits_do_not_depend_on_the_launch() {
    let c = Case { heads: (4, 2), ..scores(300, 340) }.causal();
    let all =
        [(1, 1, false, 0), (3, 4, true, 1), (5, 3, true, 2), (12, 2, false, 3), (20, 9, true, 5)];
    let all = all.map(|(blocks, heads, counted, seed)| {
        let (out, lse) = check_on(*LIB, &c, How { blocks, heads, counted }, seed);
        (out, lse.into_iter().map(f32::to_bits).collect::<Vec<_>>())
    });
    assert!(all.iter().all(|x| *x == all[0]), "bits of the output and lse");
}

fn one_block(seed: u64) -> How {
    How { blocks: 1, heads: 1 + (seed % 2) as u32, counted: seed.is_multiple_of(2) }
}

/// More tiles of keys than stages, two tiles of queries a head.
fn long_rows(lib: &'static Lib) {
    let c = Case { heads: (1, 1), ..scores(200, 850) };
    for seed in 0..4 {
        check_on(lib, &c, one_block(seed), seed);
    }
}

/// One tile of keys for each of many tiles of queries.
fn short_rows(lib: &'static Lib) {
    let c = Case { heads: (4, 2), ..scores(260, 100) };
    for seed in 0..6 {
        check_on(lib, &c, one_block(seed), seed);
    }
}

/// A block of two tiles, whose end comes right behind them.
fn two_tiles(lib: &'static Lib) {
    for seed in 0..8 {
        check_on(lib, &case(1, 1), one_block(seed), seed);
    }
}

/// One tile, many orders of its beginning.
fn beginnings(lib: &'static Lib) {
    let c = Case { heads: (1, 1), ..case(1, 1) };
    for seed in 0..48 {
        check_on(lib, &c, one_block(seed), seed);
    }
}

fn masks(lib: &'static Lib) {
    let c = Case { heads: (1, 1), out: Type::F32, ..scores(260, 400) };
    check_on(lib, &c.clone().causal(), one_block(1), 1);
    check_on(lib, &c.clone().window(175, 0), one_block(2), 2);
    check_on(lib, &c.window(3, 17), one_block(3), 3);
    // The first rows see no key.
    check_on(lib, &Case { heads: (1, 1), ..scores(260, 100) }.causal(), one_block(4), 4);
}

fn packed(lib: &'static Lib) {
    let lens = [(40, 40), (0, 10), (230, 5), (3, 190), (10, 0), (165, 165)];
    let c = Case { heads: (4, 2), scale: 0.2, ..Case::packed(&lens) };
    check_on(lib, &c, one_block(1), 1);
    check_on(lib, &Case { sink: true, out: Type::F16, ..c }.causal(), one_block(2), 2);
}

/// Scores so far apart that probabilities of another maximum are too large or too small.
fn far_scores(lib: &'static Lib) {
    let c = Case { heads: (1, 1), scale: 3.0, ..scores(130, 400) };
    check_on(lib, &c, one_block(1), 1);
    // Rows whose few products are all below zero, beside others.
    check_on(lib, &Case { heads: (4, 2), ..c }.window(2, 0), one_block(2), 2);
}

/// A warp whose rows 8 to 15 see nothing of the first tile of keys, and one whose rows all do,
/// three keys each: in some of the heads products of one half are all below zero, those of the
/// other not.
fn halves(lib: &'static Lib) {
    for skv in [138, 130] {
        let c = Case { heads: (32, 32), scale: 40.0, out: Type::F32, ..scores(16, skv) };
        check_on(lib, &c.window(2, 0), one_block(1), 1);
    }
}

/// Rows behind the last sequence, of queries and of keys.
fn gaps(lib: &'static Lib) {
    let c =
        Case { heads: (2, 1), q: vec![0..70, 70..400], kv: vec![0..90, 90..300], ..scores(70, 90) };
    check_on(lib, &c, one_block(1), 1);
}

fn no_keys(lib: &'static Lib) {
    check_on(lib, &case(40, 0), one_block(1), 1);
}

/// What fails with a mutant must pass without.
fn fp8_attention_scenarios() {
    let all = [beginnings, long_rows, short_rows, two_tiles, masks, packed, far_scores, halves];
    all.iter().chain(&[no_keys, gaps]).for_each(|f| f(*LIB));
}

fn killed(of: (&str, &str), scenarios: &[Scenario]) {
    all_are_killed(&SM90_ATTENTION_FP8.emu_text(), load, of, scenarios);
}

fn fp8_attention_load_mutants() {
    killed(
        ("attention/sm90_attention_fp8", "load"),
        scenarios![beginnings, long_rows, short_rows, two_tiles, packed, masks, no_keys, mean],
    );
}

fn fp8_attention_attend_mutants() {
    killed(("attention/sm90_attention_fp8", "attend"), scenarios![long_rows, short_rows, mean]);
}

fn fp8_attention_softmax_mutants() {
    killed(
        ("attention/sm90_attention_fp8", "softmax"),
        scenarios![long_rows, short_rows, masks, packed, far_scores, halves, gaps],
    );
}

fn fp8_attention_values_mutants() {
    killed(("attention/sm90_attention_fp8", "values"), scenarios![mean, packed, long_rows]);
}
