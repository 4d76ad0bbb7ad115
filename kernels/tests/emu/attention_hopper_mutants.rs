//! `attention/sm90_attention.cu`, broken on purpose: every mutant must fail its scenario.

use tilewire_kernels::attention::hopper::SM90_ATTENTION;

use crate::attention::{Case, case};
use crate::attention_hopper::{D64, D128, How, check_on, load};
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
];

fn one_block(seed: u64) -> How {
    How { blocks: 1, heads: 1 + (seed % 2) as u32, counted: seed.is_multiple_of(2) }
}

/// More tiles of keys than stages, two tiles of queries a head.
fn long_rows(lib: &'static Lib) {
    let c = Case { out: Type::Bf16, heads: (1, 1), scale: 3.0, ..case(130, 850) };
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
    run(&c.clone().window(109, 0), 5);
    run(&c.window(3, 17), 3);
    // The first rows see no key.
    run(&Case { heads: (1, 1), ..case(260, 100) }.causal(), 4);
}

fn packed(lib: &'static Lib) {
    let lens = [(40, 40), (0, 10), (170, 5), (3, 190), (10, 0), (165, 165)];
    let c = Case { heads: (4, 2), ..Case::packed(&lens) };
    let run = |c: &Case, seed| drop(check_on(lib, c, &D64, one_block(seed), seed));
    run(&c, 1);
    run(&Case { sink: true, out: Type::F16, ..c }.causal(), 2);
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

/// What fails with a mutant must pass without.
fn hopper_attention_scenarios() {
    let lib = base(SM90_ATTENTION.emu_text());
    for f in [beginnings, long_rows, short_rows, two_tiles, masks, packed, nan, orders, wide_heads]
    {
        f(lib);
    }
}

fn base(text: String) -> &'static Lib {
    load(text, &D64)
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
    killed(("attention/sm90_attention", "attend"), scenarios![long_rows, short_rows, wide_heads]);
}

fn hopper_attention_softmax_mutants() {
    killed(
        ("attention/sm90_attention", "softmax"),
        scenarios![long_rows, short_rows, masks, packed, nan],
    );
}

fn hopper_attention_end_mutants() {
    killed(("attention/sm90_attention", "end"), scenarios![short_rows, packed]);
}
