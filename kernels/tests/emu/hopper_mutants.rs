//! `hopper/sm90_gemm.cu`, broken on purpose: every mutant must fail its scenario.
//!
//! A library has one variant, so scenarios load their own of the same text.

use tilewire_kernels::hopper::{HOPPER_GEMM, HOPPER_SUM_PARTS, Variant};

use crate::gemm::Layout::{Nn, Nt, Tn};
use crate::gemm::{Case, DGELU, DSWIGLU, GELU, RELU, SWIGLU, Type, case};
use crate::hopper::{check_in_parts, check_on, lib, load, load_of, sums, variant};
use crate::host::Lib;
use crate::planted::{Scenario, all_are_killed};
use crate::{Test, scenarios, tests};

pub const TESTS: &[Test] = tests![
    hopper_scenarios,
    hopper_core_mutants,
    hopper_seam_mutants,
    hopper_map_mutants,
    hopper_order_mutants,
    hopper_epilogue_mutants,
    hopper_sum_mutants
];

/// Runs `c` by the text that `lib` was made of.
fn run(lib: &'static Lib, c: &Case, cols: usize, blocks: u32, seed: u64) {
    let v = variant(c, false, cols);
    check_on(load(lib.text().to_owned(), &v), c, &v, blocks, seed);
}

fn plain(layout: crate::gemm::Layout, m: usize, n: usize, k: usize) -> Case {
    Case { out: Type::Bf16, ..case(layout, m, n, k) }
}

/// More steps than stages, several tiles a block.
fn long_sums(lib: &'static Lib) {
    let c = plain(Nt, 392, 136, 640);
    let v = variant(&c, false, 128);
    for seed in 0..4 {
        check_on(lib, &c, &v, 2, seed);
    }
}

/// Tiles that overlap, several of a block, in the widths that do.
fn seams(lib: &'static Lib) {
    for (seed, (cols, layout)) in
        [(256, Nt), (320, Nn), (256, Tn), (224, Nt)].into_iter().enumerate()
    {
        run(lib, &plain(layout, 264, 520, 392), cols, 2, seed as u64);
    }
    run(lib, &Case { bias: true, ..plain(Nt, 264, 520, 264) }, 256, 2, 1);
}

/// Tiles of too few steps to overlap.
fn short_tiles(lib: &'static Lib) {
    run(lib, &plain(Nt, 264, 520, 136), 256, 2, 1);
    run(lib, &Case { bias: true, ..plain(Nt, 264, 520, 72) }, 256, 2, 1);
}

/// One step a tile, an odd row of tiles, three columns.
fn one_step(lib: &'static Lib) {
    let c = plain(Nt, 300, 264, 64);
    let v = variant(&c, false, 128);
    for seed in 0..4 {
        check_on(lib, &c, &v, 2, seed);
    }
}

/// One tile a block, many orders of its beginning.
fn beginnings(lib: &'static Lib) {
    let c = plain(Nt, 136, 8, 8);
    let v = variant(&c, false, 128);
    for seed in 0..48 {
        check_on(lib, &c, &v, 2, 2 * seed);
    }
}

/// Tiles that a counter hands out to two clusters.
fn counted(lib: &'static Lib) {
    let c = plain(Nt, 520, 392, 136);
    let v = variant(&c, false, 128);
    for seed in [1, 3, 5, 7] {
        check_on(lib, &c, &v, 4, seed);
    }
}

fn bands(lib: &'static Lib) {
    let c = plain(Nt, 128 * 19, 264, 8);
    check_on(lib, &c, &variant(&c, false, 128), 4, 1);
}

fn orders(lib: &'static Lib) {
    for layout in [Nt, Nn, Tn] {
        run(lib, &plain(layout, 136, 136, 104), 128, 2, 1);
    }
}

fn wide_results(lib: &'static Lib) {
    run(lib, &Case { pad: 8, ..case(Nt, 136, 136, 64) }, 128, 2, 1);
}

fn wide_bias(lib: &'static Lib) {
    run(lib, &Case { bias: true, pad: 8, ..plain(Nt, 24, 24, 24) }, 256, 2, 1);
}

/// Numbers whose exponentials, and products of them, are infinite.
fn large_numbers(lib: &'static Lib) {
    for act in [GELU, SWIGLU] {
        let c = Case { act, bias: true, large: true, ..plain(Nt, 40, 144, 72) };
        run(lib, &c, 256, 2, 1);
    }
}

fn epilogues(lib: &'static Lib) {
    let c = plain(Nn, 40, 144, 72);
    for act in [RELU, SWIGLU] {
        run(lib, &Case { act, bias: true, aux: true, ..c }, 256, 2, 1);
    }
    for act in [GELU, DGELU, DSWIGLU] {
        run(lib, &Case { act, ..c }, 256, 2, 1);
    }
    run(lib, &Case { bias: true, accumulate: true, ..c }, 256, 2, 1);
}

/// Three parts of the contraction, of which the last is short.
fn parts(by: &'static Lib) {
    let c = Case { bias: true, ..plain(Nt, 136, 136, 328) };
    let v = variant(&c, false, 128);
    let products = load(by.text().to_owned(), &v.of_parts());
    check_in_parts([products, sums(&v)], &c, &v, (4, 2), 1);
}

/// Runs `c` with its contraction in parts that are added by the text that `by` was made of.
fn added(by: &'static Lib, c: &Case) {
    let v = variant(c, false, 128);
    let adds = load_of(&HOPPER_SUM_PARTS, by.text().to_owned(), &v.of_sums());
    check_in_parts([lib(&v.of_parts()), adds], c, &v, (4, 2), 1);
}

fn sums_of_parts(by: &'static Lib) {
    added(by, &Case { bias: true, pad: 8, ..plain(Nt, 40, 72, 328) });
}

fn wide_sums(by: &'static Lib) {
    added(by, &plain(Nt, 8, 264, 200));
}

fn halves(by: &'static Lib) {
    let c = plain(Nn, 40, 144, 200);
    for act in [SWIGLU, DSWIGLU] {
        added(by, &Case { act, ..c });
    }
}

/// Sums that D holds: several tiles a block, rows that fill some warps' boxes alone, one step and
/// many.
fn many_sums(lib: &'static Lib) {
    let c = |k| Case { accumulate: true, pad: 8, ..case(Tn, 400, 520, k) };
    for (seed, k) in [(1, 64), (2, 200), (3, 400)] {
        run(lib, &c(k), 256, 2, seed);
    }
    // Rows that fill no boxes.
    run(lib, &Case { accumulate: true, ..case(Tn, 40, 72, 64) }, 256, 2, 1);
}

/// The same of a product of many steps, of which L2 adds more.
fn long_added(lib: &'static Lib) {
    for (seed, cols) in [(1, 256), (2, 320)] {
        run(lib, &Case { accumulate: true, ..case(Tn, 144, 264, 2056) }, cols, 2, seed);
    }
}

/// What fails with a mutant must pass without.
fn hopper_scenarios() {
    let lib = base(HOPPER_GEMM.emu_text());
    for f in [
        long_sums,
        seams,
        short_tiles,
        long_added,
        one_step,
        beginnings,
        counted,
        bands,
        orders,
        wide_results,
        wide_bias,
        epilogues,
        large_numbers,
        many_sums,
        parts,
    ] {
        f(lib);
    }
    let lib = base_of_sums(HOPPER_SUM_PARTS.emu_text());
    sums_of_parts(lib);
    wide_sums(lib);
    halves(lib);
}

/// The plain product of narrow tiles.
fn base(text: String) -> &'static Lib {
    let v: Variant = variant(&plain(Nt, 8, 8, 8), false, 128);
    load(text, &v)
}

/// What ends a product with a bias.
fn base_of_sums(text: String) -> &'static Lib {
    let c = Case { bias: true, ..plain(Nt, 8, 8, 8) };
    load_of(&HOPPER_SUM_PARTS, text, &variant(&c, false, 128).of_sums())
}

fn killed(of: (&str, &str), scenarios: &[Scenario]) {
    all_are_killed(&HOPPER_GEMM.emu_text(), base, of, scenarios);
}

fn hopper_core_mutants() {
    killed(("hopper/sm90_gemm", "core"), scenarios![beginnings, long_sums, one_step, orders]);
    killed(("hopper/sm90_gemm", "store"), scenarios![one_step, wide_results]);
    killed(("hopper/sm90_gemm", "tickets"), scenarios![counted]);
    killed(("hopper/sm90_gemm", "parts"), scenarios![parts]);
}

fn hopper_seam_mutants() {
    killed(("hopper/sm90_gemm", "seams"), scenarios![seams, short_tiles]);
}

fn hopper_map_mutants() {
    killed(("hopper/sm90_gemm", "sums"), scenarios![many_sums, long_added]);
}

fn hopper_order_mutants() {
    killed(("hopper/sm90_gemm", "order"), scenarios![bands, one_step]);
}

fn hopper_epilogue_mutants() {
    killed(("hopper/sm90_gemm", "epilogue"), scenarios![epilogues, large_numbers, wide_bias]);
}

fn hopper_sum_mutants() {
    let of = ("hopper/sm90_sum_parts", "sums");
    let text = HOPPER_SUM_PARTS.emu_text();
    all_are_killed(&text, base_of_sums, of, scenarios![sums_of_parts, wide_sums, halves]);
}
