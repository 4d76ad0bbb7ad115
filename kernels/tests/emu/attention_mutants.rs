//! The attention kernels, broken on purpose: every mutant must fail its scenario.

use tilewire_kernels::attention::{PLAIN_ATTENTION, SM80_ATTENTION};

use crate::attention::{
    Build, Case, EXTRA, F32, ODD, PAIRED, PAIRS, PLAIN, SMALL, Sizes, case, load, load_plain,
};
use crate::attention_grad::check;
use crate::gemm::Type;
use crate::host::Lib;
use crate::planted::all_are_killed;
use crate::{Test, scenarios, tests};

pub const TESTS: &[Test] = tests![
    attention_scenarios,
    attention_mutants,
    attention_pair_mutants,
    attention_extra_mutants,
    attention_plain_mutants
];

fn plain(lib: &'static Lib) -> Build {
    Build { lib: Some(lib), ..*SMALL }
}
fn odd(lib: &'static Lib) -> Build {
    Build { lib: Some(lib), ..*ODD }
}
fn f32s(lib: &'static Lib) -> Build {
    Build { lib: Some(lib), ..*F32 }
}

fn masks(lib: &'static Lib) {
    let b = &plain(lib);
    let c = Case { heads: (1, 1), ..case(65, 70) };
    c.clone().check(b, 1);
    c.clone().causal().check(b, 1);
    c.clone().window(33, 2).check(b, 1);
    c.window(50, 40).check(b, 1);
}

fn packed(lib: &'static Lib) {
    let b = &plain(lib);
    let c = Case { heads: (4, 2), ..Case::packed(&[(40, 50), (3, 5), (30, 33)]) };
    c.clone().check(b, 1);
    Case { out: Type::Bf16, sink: true, ..c }.causal().check(b, 2);
}

fn many_orders(lib: &'static Lib) {
    let b = &plain(lib);
    for seed in 1..7 {
        case(64, 200).check(b, seed);
    }
}

fn extras(lib: &'static Lib) {
    let b = &odd(lib);
    let c = Case { softcap: 2.0, bias: 2, drop: 0.2, out: Type::F16, ..case(33, 40) };
    c.causal().check(b, 1);
}

fn grads(lib: &'static Lib) {
    let b = &plain(lib);
    let c = Case { heads: (4, 2), ..Case::packed(&[(70, 40), (3, 5), (20, 33)]) };
    check(&c.clone().causal(), b, 1);
    check(&c.window(9, 2), b, 1);
}

fn grad_orders(lib: &'static Lib) {
    let b = &plain(lib);
    for seed in 1..7 {
        check(&case(70, 70), b, seed);
    }
}

fn paired(lib: &'static Lib) -> Build {
    Build { lib: Some(lib), ..*PAIRED }
}

/// Keys and queries at edges, packed, of groups.
fn pair_grads(lib: &'static Lib) {
    let b = &paired(lib);
    let c = Case { heads: (4, 2), ..Case::packed(&[(70, 40), (3, 5), (20, 73)]) };
    check(&c.clone().causal(), b, 1);
    check(&Case { out: Type::Bf16, ..c }.window(9, 2), b, 1);
}

/// Many tiles in a row, and seeds for which warps are far apart.
fn pair_orders(lib: &'static Lib) {
    let b = &paired(lib);
    for seed in 1..13 {
        check(&case(150, 70), b, seed);
    }
}

fn extra_grads(lib: &'static Lib) {
    let c = Case { softcap: 2.0, bias: 2, drop: 0.2, out: Type::F16, ..case(33, 40) };
    check(&c.causal(), &odd(lib), 1);
}

fn plain_all(lib: &'static Lib) {
    let c = Case { heads: (4, 2), bias: 4, drop: 0.2, softcap: 2.0, sink: true, ..case(33, 40) };
    c.clone().causal().check(&f32s(lib), 1);
    check(&c.causal(), &f32s(lib), 1);
}

/// What fails with a mutant must pass without.
fn attention_scenarios() {
    for f in [masks, packed, many_orders, grads, grad_orders] {
        f(SMALL.lib.unwrap());
    }
    pair_grads(PAIRED.lib.unwrap());
    pair_orders(PAIRED.lib.unwrap());
    extras(ODD.lib.unwrap());
    extra_grads(ODD.lib.unwrap());
    plain_all(F32.lib.unwrap());
}

fn build(text: String, sizes: Sizes) -> &'static Lib {
    load(text, sizes).lib.unwrap()
}

fn attention_mutants() {
    all_are_killed(
        &SM80_ATTENTION.emu_text(),
        |text| build(text, PLAIN),
        ("attention/sm80_attention", "tiles"),
        scenarios![grad_orders, grads, many_orders, masks, packed],
    );
}

fn attention_pair_mutants() {
    all_are_killed(
        &SM80_ATTENTION.emu_text(),
        |text| build(text, PAIRS),
        ("attention/sm80_attention", "pairs"),
        scenarios![pair_grads, pair_orders],
    );
}

fn attention_extra_mutants() {
    all_are_killed(
        &SM80_ATTENTION.emu_text(),
        |text| build(text, EXTRA),
        ("attention/sm80_attention", "extras"),
        scenarios![extra_grads, extras],
    );
}

fn attention_plain_mutants() {
    let build = |text| load_plain(text, (40, 37, Type::F32, Type::F32)).lib.unwrap();
    all_are_killed(
        &PLAIN_ATTENTION.emu_text(),
        build,
        ("attention/plain_attention", "plain"),
        scenarios![plain_all],
    );
}
