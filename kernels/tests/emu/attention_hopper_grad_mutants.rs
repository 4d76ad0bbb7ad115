//! `attention/sm90_attention_bwd.cu`, broken on purpose: every mutant must fail its scenario.

use tilewire_kernels::attention::hopper::{HopperGrad, Others, SM90_ATTENTION_BWD};

use crate::attention::{Case, case};
use crate::attention_hopper::How;
use crate::attention_hopper_grad::{D64, D128, E64, check_on, load};
use crate::gemm::Type;
use crate::host::Lib;
use crate::planted::{Scenario, all_are_killed};
use crate::{Test, scenarios, tests};

pub const TESTS: &[Test] = tests![
    hopper_grad_scenarios,
    hopper_grad_load_mutants,
    hopper_grad_order_mutants,
    hopper_grad_multiply_mutants,
    hopper_grad_slope_mutants,
    hopper_grad_end_mutants,
    hopper_grad_extras_mutants,
];

/// Small tiles of the other side: few rows go round all stages.
const FEW: Others = Others { rows: 32, stages: 2, slots: 2 };
const SMALL: HopperGrad = HopperGrad { keys: FEW, queries: FEW, ..D64 };
const WIDE: HopperGrad = HopperGrad { keys: FEW, queries: FEW, ..D128 };
/// One slot of own rows.
const ALONE: Others = Others { slots: 1, ..FEW };
const SINGLE: HopperGrad = HopperGrad { keys: ALONE, queries: ALONE, ..D64 };

fn one_block(seed: u64) -> How {
    How { blocks: 1, heads: 1 + (seed % 2) as u32, counted: seed.is_multiple_of(2) }
}

fn run(lib: &'static Lib, c: &Case, seed: u64) {
    check_on(lib, c, &SMALL, one_block(seed), seed);
}

/// More tiles of the other side than stages, two own tiles of each side.
fn long_rows(lib: &'static Lib) {
    let c = Case { out: Type::Bf16, heads: (1, 1), ..case(130, 170) };
    (0..4).for_each(|seed| run(lib, &c, seed));
}

/// Few rows, many orders of the lanes.
fn many_orders(lib: &'static Lib) {
    let c = Case { out: Type::Bf16, heads: (1, 1), ..case(70, 90) };
    (0..48).for_each(|seed| run(lib, &c, seed));
}

/// One tile of the other side for each of many own tiles.
fn short_rows(lib: &'static Lib) {
    let c = Case { out: Type::Bf16, heads: (4, 4), ..case(30, 20) };
    (0..6).for_each(|seed| run(lib, &c, seed));
}

/// A block of two tiles, whose end comes right behind them: with others, and of no sequence.
fn two_tiles(lib: &'static Lib) {
    (0..4).for_each(|seed| run(lib, &Case { heads: (2, 2), ..case(1, 1) }, seed));
    let c = Case { heads: (2, 2), ..Case::packed(&[(0, 0)]) };
    (0..80).for_each(|seed| run(lib, &c, seed));
}

fn masks(lib: &'static Lib) {
    let c = Case { heads: (1, 1), out: Type::F32, ..case(160, 240) };
    run(lib, &c.clone().causal(), 1);
    // The first visible row of the first own row is the last of a tile, and the last one of the
    // last own row the first of a tile: of queries and of keys.
    run(lib, &c.clone().window(49, 17), 2);
    run(lib, &c.window(3, 40), 3);
    // The first rows see no key.
    run(lib, &Case { heads: (1, 1), ..case(160, 60) }.causal(), 4);
}

fn packed(lib: &'static Lib) {
    let lens = [(40, 40), (0, 10), (140, 5), (3, 150), (10, 0)];
    let c = Case { heads: (4, 2), ..Case::packed(&lens) };
    run(lib, &c, 1);
    run(lib, &Case { sink: true, out: Type::F16, ..c }.causal(), 2);
}

/// Scores so far below 0 that a product of 0 beside them would have an infinite probability.
fn far_scores(lib: &'static Lib) {
    let c = Case { heads: (1, 1), scale: 40.0, out: Type::F32, ..case(130, 1) };
    run(lib, &c, 1);
}

/// Tiles of five heads, by several blocks.
fn orders(lib: &'static Lib) {
    let c = Case { heads: (5, 5), out: Type::Bf16, ..case(140, 20) };
    for (blocks, heads, counted) in [(1, 2, true), (4, 3, true), (2, 2, false)] {
        check_on(lib, &c, &SMALL, How { blocks, heads, counted }, u64::from(blocks));
    }
}

/// Two pieces of 64 columns, by the text that `lib` was made of.
fn wide_heads(lib: &'static Lib) {
    let lib = load(lib.text().to_owned(), &WIDE);
    let c = Case { out: Type::Bf16, heads: (1, 1), ..case(70, 90) };
    check_on(lib, &c, &WIDE, one_block(1), 1);
}

/// One slot of own rows, by the text that `lib` was made of.
fn one_slot(lib: &'static Lib) {
    let lib = load(lib.text().to_owned(), &SINGLE);
    for (seed, out) in (0..).zip([Type::Bf16, Type::F32, Type::F16, Type::F32]) {
        let c = Case { out, heads: (4, 4), ..case(30, 20) };
        check_on(lib, &c, &SINGLE, one_block(seed), seed);
    }
}

/// Softcap, bias, dropout and a sink at once: two tiles of queries, several of keys.
fn all_extras(lib: &'static Lib) {
    let c = Case { softcap: 2.0, bias: 2, drop: 0.2, sink: true, ..case(150, 210) };
    let c = Case { heads: (2, 1), out: Type::Bf16, ..c };
    check_on(lib, &c.causal(), &E64, one_block(1), 1);
}

/// Dropout of local rows, which are others among all.
fn of_parts(lib: &'static Lib) {
    let whole = Case { heads: (1, 1), drop: 0.3, ..Case::packed(&[(30, 40), (190, 300)]) };
    let c = Case { q: vec![10..20, 40..190], kv: vec![20..40, 60..290], ..whole };
    check_on(lib, &c, &E64, one_block(2), 2);
}

/// What fails with a mutant must pass without.
fn hopper_grad_scenarios() {
    let lib = base(SM90_ATTENTION_BWD.emu_text());
    let all = [long_rows, short_rows, two_tiles, masks, packed, far_scores, orders, wide_heads];
    all.iter().chain(&[one_slot as fn(&'static Lib), many_orders]).for_each(|f| f(lib));
    let lib = extra(SM90_ATTENTION_BWD.emu_text());
    all_extras(lib);
    of_parts(lib);
}

fn base(text: String) -> &'static Lib {
    load(text, &SMALL)
}

fn killed(of: (&str, &str), scenarios: &[Scenario]) {
    all_are_killed(&SM90_ATTENTION_BWD.emu_text(), base, of, scenarios);
}

fn hopper_grad_load_mutants() {
    killed(
        ("attention/sm90_attention_bwd", "load"),
        scenarios![long_rows, many_orders, short_rows, two_tiles, packed, masks],
    );
}

fn hopper_grad_order_mutants() {
    killed(("attention/sm90_attention_bwd", "order"), scenarios![orders, packed, masks]);
}

fn hopper_grad_multiply_mutants() {
    killed(
        ("attention/sm90_attention_bwd", "multiply"),
        scenarios![long_rows, short_rows, wide_heads, packed, one_slot],
    );
}

fn hopper_grad_slope_mutants() {
    killed(("attention/sm90_attention_bwd", "slope"), scenarios![long_rows, masks, far_scores]);
}

fn hopper_grad_end_mutants() {
    killed(("attention/sm90_attention_bwd", "end"), scenarios![short_rows, packed, wide_heads]);
}

fn extra(text: String) -> &'static Lib {
    load(text, &E64)
}

fn hopper_grad_extras_mutants() {
    let of = ("attention/sm90_attention_bwd", "extras");
    all_are_killed(&SM90_ATTENTION_BWD.emu_text(), extra, of, scenarios![all_extras, of_parts]);
}
