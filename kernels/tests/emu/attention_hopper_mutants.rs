//! `attention/sm90_attention.cu`, broken on purpose: every mutant must fail its scenario.

use tilewire_kernels::attention::hopper::SM90_ATTENTION;

use crate::attention::{Case, case};
use crate::attention_hopper::{D64, D128, E64, How, check_on, load};
use crate::gemm::Type;
use crate::host::Lib;
use crate::planted::{Scenario, all_are_killed};
use crate::{Test, scenarios, tests};

pub const TESTS: &[Test] = tests![
    hopper_attention_scenarios,
    hopper_attention_load_mutants,
    hopper_attention_order_mutants,
    hopper_attention_attend_mutants,
    hopper_attention_softmax_mutants,
    hopper_attention_end_mutants,
    hopper_attention_extras_mutants,
];

fn one_block(seed: u64) -> How {
    How { blocks: 1, heads: 1 + (seed % 2) as u32, counted: seed.is_multiple_of(2) }
}

/// More tiles of keys than stages, two tiles of queries a head.
fn long_rows(lib: &'static Lib) {
    let c = Case { out: Type::Bf16, heads: (1, 1), scale: 3.0, ..case(200, 850) };
    for seed in 0..4 {
        check_on(lib, &c, &D64, one_block(seed), seed);
    }
}

/// One tile of keys for each of many tiles of queries.
fn short_rows(lib: &'static Lib) {
    let c = Case { out: Type::Bf16, heads: (4, 2), ..case(260, 100) };
    for seed in 0..6 {
        check_on(lib, &c, &D64, one_block(seed), seed);
    }
}

/// A block of two tiles, whose end comes right behind them.
fn two_tiles(lib: &'static Lib) {
    for seed in 0..8 {
        check_on(lib, &case(1, 1), &D64, one_block(seed), seed);
    }
}

/// One tile, many orders of its beginning.
fn beginnings(lib: &'static Lib) {
    let c = Case { heads: (1, 1), ..case(1, 1) };
    for seed in 0..48 {
        check_on(lib, &c, &D64, one_block(seed), seed);
    }
}

fn masks(lib: &'static Lib) {
    let c = Case { heads: (1, 1), out: Type::F32, ..case(260, 400) };
    let run = |c: &Case, seed| drop(check_on(lib, c, &D64, one_block(seed), seed));
    run(&c.clone().causal(), 1);
    run(&c.clone().window(175, 0), 2);
    // The first key of the second tile's first row is the last of a tile.
    run(&c.clone().window(77, 0), 5);
    run(&c.window(3, 17), 3);
    // The first rows see no key.
    run(&Case { heads: (1, 1), ..case(260, 100) }.causal(), 4);
}

fn packed(lib: &'static Lib) {
    let lens = [(40, 40), (0, 10), (230, 5), (3, 190), (10, 0), (165, 165)];
    let c = Case { heads: (4, 2), ..Case::packed(&lens) };
    let run = |c: &Case, seed| drop(check_on(lib, c, &D64, one_block(seed), seed));
    run(&c, 1);
    run(&Case { sink: true, out: Type::F16, ..c }.causal(), 2);
}

/// A warp whose rows 8 to 15 see nothing of the first tile of keys, and one whose rows all do,
/// three keys each: in some of the heads products of one half are all below zero, those of the
/// other not.
fn halves(lib: &'static Lib) {
    for skv in [10, 2] {
        let c = Case { heads: (32, 32), scale: 40.0, ..case(16, D64.keys() + skv) };
        check_on(lib, &c.window(2, 0), &D64, one_block(1), 1);
    }
}

/// A row of NaN, in a block that computes others behind it.
fn nan(lib: &'static Lib) {
    let c = Case { nan: Some(326), out: Type::Bf16, heads: (1, 1), ..case(400, 200) };
    check_on(lib, &c, &D64, one_block(1), 1);
}

/// Tiles of five heads, by several blocks.
fn orders(lib: &'static Lib) {
    let c = Case { heads: (5, 1), out: Type::Bf16, ..case(260, 70) };
    for (blocks, heads, counted) in [(1, 2, true), (4, 3, true), (2, 2, false), (20, 1, true)] {
        check_on(lib, &c, &D64, How { blocks, heads, counted }, u64::from(blocks));
    }
}

/// Two pieces of 64 columns, by the text that `lib` was made of.
fn wide_heads(lib: &'static Lib) {
    let lib = load(lib.text().to_owned(), &D128);
    let c = Case { out: Type::Bf16, ..case(100, 170) };
    check_on(lib, &c, &D128, one_block(1), 1);
}

/// The same, of several tiles of queries and of keys: warps ask for the next keys ahead there.
fn wide_rows(lib: &'static Lib) {
    let lib = load(lib.text().to_owned(), &D128);
    let c = Case { out: Type::Bf16, heads: (1, 1), ..case(260, 500) };
    for seed in 0..3 {
        check_on(lib, &c, &D128, one_block(seed), seed);
    }
}

/// Softcap, bias, dropout and a sink at once: two tiles of queries, several of keys.
fn all_extras(lib: &'static Lib) {
    let c = Case { softcap: 2.0, bias: 2, drop: 0.2, sink: true, ..case(200, 210) };
    let c = Case { heads: (2, 1), out: Type::Bf16, ..c };
    check_on(lib, &c.causal(), &E64, one_block(1), 1);
}

/// Dropout of local rows, which are others among all.
fn of_parts(lib: &'static Lib) {
    let whole = Case { heads: (1, 1), drop: 0.3, ..Case::packed(&[(30, 40), (250, 300)]) };
    let c = Case { q: vec![10..20, 40..250], kv: vec![20..40, 60..290], ..whole };
    check_on(lib, &c, &E64, one_block(2), 2);
}

/// What fails with a mutant must pass without.
fn hopper_attention_scenarios() {
    let lib = base(SM90_ATTENTION.emu_text());
    let all = [
        beginnings, long_rows, short_rows, two_tiles, masks, packed, halves, nan, orders,
        wide_heads, wide_rows,
    ];
    for f in all {
        f(lib);
    }
    let lib = extra(SM90_ATTENTION.emu_text());
    all_extras(lib);
    of_parts(lib);
}

fn base(text: String) -> &'static Lib {
    load(text, &D64)
}

fn extra(text: String) -> &'static Lib {
    load(text, &E64)
}

fn killed(of: (&str, &str), scenarios: &[Scenario]) {
    all_are_killed(&SM90_ATTENTION.emu_text(), base, of, scenarios);
}

fn hopper_attention_load_mutants() {
    killed(
        ("attention/sm90_attention", "load"),
        scenarios![beginnings, long_rows, short_rows, two_tiles, packed],
    );
}

fn hopper_attention_order_mutants() {
    killed(("attention/sm90_attention", "order"), scenarios![orders, packed, masks]);
}

fn hopper_attention_attend_mutants() {
    killed(
        ("attention/sm90_attention", "attend"),
        scenarios![long_rows, short_rows, wide_heads, wide_rows],
    );
}

fn hopper_attention_softmax_mutants() {
    killed(
        ("attention/sm90_attention", "softmax"),
        scenarios![long_rows, short_rows, masks, packed, halves, nan],
    );
}

fn hopper_attention_end_mutants() {
    killed(("attention/sm90_attention", "end"), scenarios![short_rows, packed]);
}

fn hopper_attention_extras_mutants() {
    let of = ("attention/sm90_attention", "extras");
    all_are_killed(&SM90_ATTENTION.emu_text(), extra, of, scenarios![all_extras, of_parts]);
}
