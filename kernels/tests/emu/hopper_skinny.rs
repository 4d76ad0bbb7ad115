//! `hopper/sm90_skinny_gemm.cu` against an f64 reference: rows, edges, types, epilogues, parts.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

use tilewire_kernels::abi::TwGemm;
use tilewire_kernels::hopper::{
    BOX_COLS, Epilogue, HOPPER_SKINNY_GEMM, SKINNY_THREADS, Skinny, TILE_K,
};

use crate::gemm::Layout::{Nn, Nt};
use crate::gemm::{Case, SWIGLU, Type, case};
use crate::hopper::{epilogue_cases, in_parts, load_by, map, product, variant, whole};
use crate::host::Lib;
use crate::planted::all_are_killed;
use crate::{Test, scenarios, tests};

pub const TESTS: &[Test] = tests![
    skinny_products_of_every_row_and_edge,
    skinny_epilogues,
    skinny_bits_are_those_of_parts,
    skinny_scenarios,
    skinny_mutants,
];

/// The variant of a case.
fn skinny(c: &Case) -> Skinny {
    variant(c, c.out == Type::F16, 256).skinny().unwrap()
}

fn load(text: String, v: &Skinny) -> &'static Lib {
    load_by(&HOPPER_SKINNY_GEMM, text, v.defines(), v.shared_bytes())
}

/// Libraries of the text as it is, by their variants.
static LIBS: LazyLock<Mutex<HashMap<String, &'static Lib>>> = LazyLock::new(Mutex::default);

fn lib(v: &Skinny) -> &'static Lib {
    let mut libs = LIBS.lock().unwrap();
    libs.entry(format!("{v:?}")).or_insert_with(|| load(HOPPER_SKINNY_GEMM.emu_text(), v))
}

/// Runs `c` by `clusters` clusters, with the contraction cut into parts of `steps` stages; D.
fn check_on(lib: &'static Lib, c: &Case, (clusters, steps): (u32, usize), seed: u64) -> Vec<u8> {
    let (m, n, k, v) = (c.m, c.n, c.k, skinny(c));
    let parts = k.div_ceil(steps * TILE_K);
    let kernel = lib.kernel("tw_hopper_skinny");
    let launch = kernel.grid([clusters * parts as u32, 1, 1], [SKINNY_THREADS, 1, 1]);
    let launch = launch.cluster(parts as u32).smem(v.shared_bytes());
    let of = variant(c, false, 256);
    let type_of_a = if c.out == Type::F16 { Type::F16 } else { Type::Bf16 };
    c.check_by(type_of_a, seed, |p: &TwGemm, _| {
        let b = if of.order.mn_major().1 { [n, k, 1] } else { [k, n, 1] };
        let of_a = map(p.a, [k, m, 1], whole(p.lda, m), Skinny::a_rows(m));
        let of_b = map(p.b, b, whole(p.ldb, b[1]), BOX_COLS);
        launch.arg(&product(p, 0, [parts, steps])).arg(&of_a).arg(&of_b)
    })
}

fn check(c: &Case, launch: (u32, usize), seed: u64) -> Vec<u8> {
    check_on(lib(&skinny(c)), c, launch, seed)
}

fn bf16(layout: crate::gemm::Layout, m: usize, n: usize, k: usize) -> Case {
    Case { out: Type::Bf16, ..case(layout, m, n, k) }
}

/// Rows of each width of the products, columns and a contraction that fill no tile, one part and
/// several, of which the last is short, a cluster for each tile and one for all.
fn skinny_products_of_every_row_and_edge() {
    for layout in [Nt, Nn] {
        for (i, m) in [1, 16, 17, 32, 33, 63, 64].into_iter().enumerate() {
            let c = Case { pad: 8 * (i % 2), ..bf16(layout, m, 264, 328) };
            check(&c, (1 + 2 * (i as u32 % 2), [6, 2, 1][i % 3]), i as u64);
        }
        check(&bf16(layout, 5, 8, 8), (1, 1), 1);
        check(&Case { exact: true, ..bf16(layout, 40, 136, 600) }, (1, 2), 2);
        check(&Case { out: Type::F16, ..case(layout, 24, 136, 136) }, (2, 2), 3);
    }
    assert_eq!([1, 16, 17, 33, 64].map(Skinny::a_rows), [16, 16, 32, 64, 64]);
}

fn skinny_epilogues() {
    for layout in [Nt, Nn] {
        for (i, c) in epilogue_cases(layout).into_iter().enumerate() {
            check(&Case { m: [40, 9][i % 2], k: 200, ..c }, (1 + i as u32 % 2, 2), i as u64);
        }
    }
}

/// The parts of one product, added by the core's second kernel or in a cluster: the same bits, and
/// those of the whole if there is one part.
fn skinny_bits_are_those_of_parts() {
    for (layout, out) in [(Nt, Type::F32), (Nn, Type::Bf16)] {
        let c = Case { out, ..case(layout, 40, 136, 520) };
        for steps in [2, 9] {
            let two = in_parts(&c, 128, (2, steps), 1);
            for clusters in [1, 2] {
                assert!(check(&c, (clusters, steps), 1) == two, "bits of {steps} steps");
            }
        }
    }
    let of = variant(&bf16(Nt, 8, 8, 8), false, 256);
    assert!(of.epilogue == Epilogue::Plain && of.skinny().is_some());
}

/// Runs `c` by the text that `by` was made of.
fn run(by: &'static Lib, c: &Case, launch: (u32, usize), seed: u64) -> Vec<u8> {
    check_on(load(by.text().to_owned(), &skinny(c)), c, launch, seed)
}

/// More steps than stages, several tiles a block.
fn long_sums(by: &'static Lib) {
    for seed in 0..4 {
        run(by, &bf16(Nt, 40, 264, 1160), (1, 19), seed);
    }
}

/// One tile a block, many orders of its beginning.
fn beginnings(by: &'static Lib) {
    for seed in 0..48 {
        run(by, &bf16(Nt, 8, 8, 8), (1, 1), seed);
    }
}

fn edges(by: &'static Lib) {
    for (seed, m) in [(1, 7), (2, 25), (3, 50)] {
        run(by, &Case { pad: 6, ..case(Nt, m, 138, 136) }, (2, 3), seed);
    }
}

fn orders(by: &'static Lib) {
    run(by, &bf16(Nn, 24, 136, 200), (1, 2), 1);
}

/// Five parts, of which the last is short, and several tiles a cluster.
fn parts(by: &'static Lib) {
    for seed in 0..4 {
        run(by, &bf16(Nt, 24, 392, 584), (1, 2), seed);
    }
}

fn parts_in_order(by: &'static Lib) {
    let c = case(Nt, 40, 136, 520);
    assert!(run(by, &c, (2, 2), 1) == in_parts(&c, 128, (2, 2), 1), "bits of D");
}

fn halves(by: &'static Lib) {
    run(by, &Case { act: SWIGLU, bias: true, ..bf16(Nt, 24, 144, 200) }, (1, 2), 1);
}

fn base(text: String) -> &'static Lib {
    load(text, &skinny(&bf16(Nt, 8, 8, 8)))
}

/// What fails with a mutant must pass without.
fn skinny_scenarios() {
    let by = base(HOPPER_SKINNY_GEMM.emu_text());
    for f in [long_sums, beginnings, edges, orders, parts, parts_in_order, halves] {
        f(by);
    }
}

fn skinny_mutants() {
    let of = ("hopper/sm90_skinny_gemm", "skinny");
    let all = scenarios![long_sums, beginnings, edges, orders, parts, parts_in_order, halves];
    all_are_killed(&HOPPER_SKINNY_GEMM.emu_text(), base, of, all);
}
