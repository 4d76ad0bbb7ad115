//! `attention/sm90_attention_grads.cu`, broken on purpose: every mutant must fail its scenario.

use tilewire_kernels::attention::hopper_fused::SM90_ATTENTION_GRADS;

use crate::attention::{Case, case};
use crate::attention_hopper_fused::{BF16, How, check_on, load};
use crate::gemm::Type;
use crate::host::Lib;
use crate::planted::{Scenario, all_are_killed};
use crate::{Test, scenarios, tests};

pub const TESTS: &[Test] = tests![
    fused_grad_scenarios,
    fused_grad_load_mutants,
    fused_grad_turns_mutants,
    fused_grad_multiply_mutants,
    fused_grad_end_mutants,
    fused_grad_unordered_mutants,
];

const ONE: How = How { blocks: 1, together: 1 };

fn run(lib: &'static Lib, c: &Case, how: How, seed: u64) {
    check_on(lib, c, &BF16, how, seed);
}

fn of(sq: usize, skv: usize) -> Case {
    Case { out: Type::Bf16, heads: (1, 1), ..case(sq, skv) }
}

/// Two tiles of queries, one of keys.
fn short(lib: &'static Lib) {
    (0..2).for_each(|seed| run(lib, &of(70, 90), ONE, seed));
}

fn floats(lib: &'static Lib) {
    run(lib, &Case { out: Type::F32, ..of(70, 90) }, ONE, 1);
}

/// More tiles of queries than stages, two tiles of keys.
fn long(lib: &'static Lib) {
    (0..3).for_each(|seed| run(lib, &of(300, 140), ONE, seed));
}

/// A chain of four tiles of keys, by several blocks and by one.
fn chain(lib: &'static Lib) {
    for (seed, blocks) in (0..).zip([3, 1, 4, 2]) {
        run(lib, &of(130, 400), How { blocks, together: 1 }, seed);
    }
}

/// Groups of heads.
fn groups(lib: &'static Lib) {
    let c = Case { heads: (4, 2), ..of(100, 140) };
    run(lib, &c, How { blocks: 2, together: 2 }, 1);
}

/// Five heads, of which some are done together.
fn orders(lib: &'static Lib) {
    let c = Case { heads: (5, 5), ..of(70, 140) };
    for (blocks, together) in [(1, 2), (4, 3)] {
        run(lib, &c, How { blocks, together }, u64::from(blocks));
    }
}

/// Few rows, many orders of the lanes.
fn many_orders(lib: &'static Lib) {
    (0..24).for_each(|seed| run(lib, &of(70, 130), How { blocks: 2, together: 1 }, seed));
}

/// Many tiles of queries for one of keys, many orders of the lanes.
fn many_tiles(lib: &'static Lib) {
    (0..12).for_each(|seed| run(lib, &of(400, 70), ONE, seed));
}

/// Keys that no query meets, between others.
fn alone(lib: &'static Lib) {
    let c = Case { heads: (1, 1), ..Case::packed(&[(0, 130), (20, 20), (0, 200), (20, 20)]) };
    (0..24).for_each(|seed| run(lib, &c, ONE, seed));
}

fn packed(lib: &'static Lib) {
    let lens = [(40, 40), (0, 10), (170, 5), (3, 190), (10, 0)];
    let c = Case { heads: (2, 1), ..Case::packed(&lens) };
    run(lib, &Case { out: Type::Bf16, ..c }.causal(), How { blocks: 2, together: 1 }, 2);
}

/// Keys of a sequence in several segments.
fn parts(lib: &'static Lib) {
    let whole = Case { heads: (1, 1), ..Case::packed(&[(300, 300), (44, 60)]) }.causal();
    let kv = vec![0..7, 7..180, 180..360];
    run(lib, &Case { kv, ..whole }, How { blocks: 2, together: 1 }, 1);
}

/// The same with a window: of some segments the queries see nothing.
fn far_parts(lib: &'static Lib) {
    let whole = Case { heads: (1, 1), ..Case::packed(&[(400, 400)]) }.window(30, 40);
    let kv = vec![0..60, 60..130, 130..150, 150..300, 300..400];
    run(lib, &Case { kv, ..whole }, How { blocks: 3, together: 1 }, 1);
}

fn windows(lib: &'static Lib) {
    run(lib, &of(330, 330).window(170, 0), How { blocks: 3, together: 1 }, 1);
    run(lib, &of(200, 400).window(49, 70), ONE, 2);
}

/// Queries that see no key in front of others, in another tile of rows, and lengths that differ.
fn cross(lib: &'static Lib) {
    run(lib, &of(300, 100).causal(), ONE, 1);
    run(lib, &of(100, 300).causal(), How { blocks: 2, together: 1 }, 2);
}

/// The first 64 queries of a tile see no key.
fn hidden(lib: &'static Lib) {
    run(lib, &of(128, 64).causal(), ONE, 1);
}

fn hidden_orders(lib: &'static Lib) {
    (0..24).for_each(|seed| run(lib, &of(100, 30).causal(), ONE, seed));
}

/// One tile of queries, whose end comes right behind it.
fn ends(lib: &'static Lib) {
    (0..80).for_each(|seed| run(lib, &of(30, 20), ONE, seed));
}

/// Keys that are not there, beside scores so far below 0 that theirs would have an infinite
/// probability.
fn far_scores(lib: &'static Lib) {
    run(lib, &Case { scale: 40.0, out: Type::F32, ..of(130, 1) }, ONE, 1);
}

/// Three tiles of keys, whose blocks add at once.
fn at_once(lib: &'static Lib) {
    let v = BF16.unordered();
    for seed in 0..6 {
        check_on(lib, &of(130, 300), &v, How { blocks: 3, together: 1 }, seed);
    }
}

/// One tile of each side, without turns.
fn at_once_alone(lib: &'static Lib) {
    let v = BF16.unordered();
    (0..12).for_each(|seed| drop(check_on(lib, &of(70, 20), &v, ONE, seed)));
}

/// What fails with a mutant must pass without.
fn fused_grad_scenarios() {
    let lib = base(SM90_ATTENTION_GRADS.emu_text());
    let all = [short, floats, long, chain, groups, orders, many_orders, alone, packed, parts];
    all.iter().for_each(|f| f(lib));
    let lib = any_order(SM90_ATTENTION_GRADS.emu_text());
    [at_once, at_once_alone].iter().for_each(|f| f(lib));
    let lib = base(SM90_ATTENTION_GRADS.emu_text());
    [far_parts, windows, cross, hidden, hidden_orders, many_tiles, far_scores, ends]
        .iter()
        .for_each(|f| f(lib));
}

fn base(text: String) -> &'static Lib {
    load(text, &BF16)
}

fn any_order(text: String) -> &'static Lib {
    load(text, &BF16.unordered())
}

fn fused_grad_unordered_mutants() {
    all_are_killed(
        &SM90_ATTENTION_GRADS.emu_text(),
        any_order,
        ("attention/sm90_attention_grads", "unordered"),
        scenarios![at_once, at_once_alone],
    );
}

fn killed(of: (&str, &str), scenarios: &[Scenario]) {
    all_are_killed(&SM90_ATTENTION_GRADS.emu_text(), base, of, scenarios);
}

fn fused_grad_load_mutants() {
    killed(
        ("attention/sm90_attention_grads", "load"),
        scenarios![short, long, chain, groups, orders, packed, parts, windows, cross],
    );
}

fn fused_grad_turns_mutants() {
    killed(
        ("attention/sm90_attention_grads", "turns"),
        scenarios![short, long, chain, groups, parts, far_parts, windows, many_tiles],
    );
}

fn fused_grad_multiply_mutants() {
    killed(
        ("attention/sm90_attention_grads", "multiply"),
        scenarios![short, long, chain, many_orders, many_tiles, ends, far_scores],
    );
}

fn fused_grad_end_mutants() {
    killed(
        ("attention/sm90_attention_grads", "end"),
        scenarios![short, floats, packed, cross, hidden, hidden_orders],
    );
}
