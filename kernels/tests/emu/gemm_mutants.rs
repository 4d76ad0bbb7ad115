//! `gemm/sm80_gemm.cu`, broken on purpose: every mutant must fail its scenario.

use tilewire_kernels::SM80_GEMM;

use crate::gemm::Layout::{Nn, Nt, Tn};
use crate::gemm::{Build, Case, F16, GELU, NONE, RELU, SMALL, SWIGLU, Type, case, load};
use crate::host::Lib;
use crate::planted::all_are_killed;
use crate::{Test, scenarios, tests};

pub const TESTS: &[Test] = tests![gemm_scenarios, gemm_mutants];

/// Edges in each direction, padded rows, more of k than stages.
fn edges(lib: &'static Lib) {
    let b = &Build { lib, ..*F16 };
    for layout in [Nt, Nn, Tn] {
        Case { pad: 8, ..case(layout, 72, 72, 76) }.check(b, false, 1);
        Case { bias: true, pad: 3, ..case(layout, 70, 37, 33) }.check(b, false, 1);
    }
}

fn many_orders(lib: &'static Lib) {
    let b = &Build { lib, ..*F16 };
    for seed in 1..7 {
        Case { pad: 8, ..case(Nt, 64, 64, 256) }.check(b, false, seed);
    }
}

/// One step: its stage is where the epilogue begins.
fn epilogue_orders(lib: &'static Lib) {
    let b = &Build { lib, ..*F16 };
    for seed in 1..9 {
        Case { bias: true, ..case(Nt, 64, 64, 32) }.check(b, false, seed);
    }
}

/// Products that go from registers to D, with edges, and those that nearly do.
fn direct(lib: &'static Lib) {
    let b = &Build { lib, ..*F16 };
    for out in [Type::F32, Type::F16, Type::Bf16] {
        for (m, n, pad) in [(70, 72, 8), (61, 136, 0), (9, 42, 6), (70, 37, 3), (16, 40, 5)] {
            let c = Case { out, pad, ..case(Tn, m, n, 40) };
            c.check(b, false, 1);
            Case { accumulate: true, ..c }.check(b, false, 1);
            Case { bias: true, ..c }.check(b, false, 1);
        }
    }
}

fn epilogues(lib: &'static Lib) {
    let b = &Build { lib, ..*F16 };
    let c = Case { bias: true, out: Type::F16, ..case(Nt, 30, 48, 40) };
    for act in [NONE, RELU, GELU, SWIGLU] {
        Case { act, ..c }.check(b, false, 1);
    }
    Case { accumulate: true, ..c }.check(b, false, 1);
}

fn swiglu(lib: &'static Lib) {
    let b = &Build { lib, ..*F16 };
    for (n, pad) in [(44, 4), (144, 0)] {
        Case { act: SWIGLU, pad, ..case(Nn, 20, n, 40) }.check(b, false, 1);
    }
}

fn f32_edges(lib: &'static Lib) {
    let b = &Build { lib, ..*F16 };
    for layout in [Nt, Nn, Tn] {
        Case { pad: 3, ..case(layout, 70, 37, 33) }.check(b, true, 2);
    }
}

/// What fails with a mutant must pass without.
fn gemm_scenarios() {
    for f in [edges, many_orders, epilogue_orders, direct, epilogues, swiglu, f32_edges] {
        f(F16.lib);
    }
}

fn gemm_mutants() {
    let build = |text| load(&SM80_GEMM, text, SMALL, &[]).lib;
    all_are_killed(
        &SM80_GEMM.emu_text(),
        build,
        ("gemm/sm80_gemm", "products"),
        scenarios![direct, edges, epilogue_orders, epilogues, f32_edges, many_orders, swiglu],
    );
}
