//! `gemm/sm80_gemm.cu`, broken on purpose: every mutant must fail its scenario.

use tilewire_kernels::SM80_GEMM;

use crate::gemm::Layout::{Nn, Nt, Tn};
use crate::gemm::{Build, Case, F16, GELU, NONE, RELU, SMALL, SWIGLU, Type, case, load};
use crate::host::Lib;
use crate::planted::{Planted, all_are_killed};
use crate::{Test, tests};

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

/// Not here: the meeting between the last stage and the epilogue. Warps do not get far enough apart.
const MUTANTS: &[Planted] = &[
    Planted(
        "chunks are stored elsewhere than they are read",
        "tile + tw_place<K_MAJOR, EXTENT>(r, c)",
        "tile + tw_place<K_MAJOR, EXTENT>(r, c ^ 1)",
        edges,
    ),
    Planted(
        "swizzle by another row on one side",
        "a + tw_place<false, TW_BM>(k + row8, m / 8)",
        "a + tw_place<false, TW_BM>(k + row8, (m / 8) ^ (k >> 3 & 1))",
        edges,
    ),
    Planted("no wait for copies", "cp_async_wait_group<TW_STAGES - 2>();", "", many_orders),
    Planted(
        "wait for one group too few",
        "cp_async_wait_group<TW_STAGES - 2>();",
        "cp_async_wait_group<TW_STAGES - 1>();",
        many_orders,
    ),
    Planted(
        "no meeting before a stage is read",
        "next filled.\n        __syncthreads();",
        "next filled.",
        many_orders,
    ),
    Planted(
        "a stage is filled while it is read",
        "copy(s + TW_STAGES - 1);\n",
        "copy(s + TW_STAGES);\n",
        many_orders,
    ),
    Planted(
        "no meeting before the accumulators are there",
        "acc[i][j][e];\n        __syncthreads();",
        "acc[i][j][e];",
        epilogue_orders,
    ),
    Planted(
        "no meeting before the next accumulators",
        "end, col0);\n        __syncthreads();",
        "end, col0);",
        epilogue_orders,
    ),
    Planted("direct: rows of D behind m", "if (row + 8 * i >= end) break;", "", direct),
    Planted("direct: columns of D behind n", "if (col + 8 * j < g.n) to[4", "to[4", direct),
    Planted("direct: nothing is added", "y[j].x += old.x, y[j].y += old.y;", "", direct),
    Planted("direct: half of a pair is there", "(g.n | g.ldd) % 2 == 0", "g.ldd % 2 == 0", direct),
    Planted("direct: the bias", "if (g.bias || g.aux", "if (g.aux", direct),
    Planted("direct 16: is added to", "return !(g.flags & TW_ACCUMULATE) && ", "return ", direct),
    Planted("direct 16: not all of eight", "(g.n | g.ldd) % 8 == 0", "g.ldd % 8 == 0", direct),
    Planted("direct 16: rows of D behind m", "if (row + 8 * i < end && ", "if (", direct),
    Planted("direct 16: columns behind n", " && col + 8 * (j + lane) < g.n)", ")", direct),
    Planted("direct 16: the wrong word", "odd ? w[0] : w[1], 1)", "odd ? w[1] : w[0], 1)", direct),
    Planted(
        "direct 16: the wrong pair",
        "high ? w[0] : w[2], 2)",
        "high ? w[2] : w[0], 2)",
        direct,
    ),
    Planted("the edge of k is not zeroed", "k - min(kk, k)", "8u", edges),
    Planted("rows behind k are not zeroed", ": kk < k;", ": true;", edges),
    Planted("the edge of columns is not zeroed", "o.extent - min(x, o.extent)", "8u", edges),
    Planted(
        "fragments of A in another order",
        "m0 + 16 * i + part % 2 * 8, k = kk + part / 2 * 8",
        "m0 + 16 * i + part / 2 * 8, k = kk + part % 2 * 8",
        edges,
    ),
    Planted(
        "fragments of B in another order",
        "n0 + 8 * j + part / 2 * 8, k = kk + part % 2 * 8",
        "n0 + 8 * j + part % 2 * 8, k = kk + part / 2 * 8",
        edges,
    ),
    Planted("rows of D behind m", "if (row >= end || ", "if (", edges),
    Planted(
        "columns of D behind n",
        "const u32 num = min(cols - col, 8u);",
        "const u32 num = 8;",
        edges,
    ),
    Planted("rows of 16 bytes taken for aligned", "ld % 8 == 0 && ", "", edges),
    Planted("pairs taken for aligned", "!pairs || extent % 8 == 0", "true", swiglu),
    Planted("column of the bias", "g.bias, col + i, bias", "g.bias, i, bias", epilogues),
    Planted("every bias is f32", "TW_BIAS_OUT ? type : 2", "TW_BIAS_OUT ? 2 : 2", epilogues),
    Planted("halves of SwiGLU swapped", "row, col, x, x + 8", "row, col, x + 8, x", swiglu),
    Planted("nothing is accumulated", "if (g.flags & TW_ACCUMULATE)", "if (false)", epilogues),
    Planted(
        "f32: no meeting before the next step",
        "acc[i / 4][i % 4]);\n        __syncthreads();",
        "acc[i / 4][i % 4]);",
        f32_edges,
    ),
];

/// What fails with a mutant must pass without.
fn gemm_scenarios() {
    for f in [edges, many_orders, epilogue_orders, direct, epilogues, swiglu, f32_edges] {
        f(F16.lib);
    }
}

fn gemm_mutants() {
    let build = |text| load(&SM80_GEMM, text, SMALL, &[]).lib;
    all_are_killed(&SM80_GEMM.emu_text(), build, MUTANTS);
}
