//! The attention kernels, broken on purpose: every mutant must fail its scenario.

use tilewire_kernels::attention::{PLAIN_ATTENTION, SM80_ATTENTION};

use crate::attention::{
    Build, Case, EXTRA, F32, ODD, PAIRED, PAIRS, PLAIN, SMALL, Sizes, case, load, load_plain,
};
use crate::attention_grad::check;
use crate::gemm::Type;
use crate::host::Lib;
use crate::planted::{Planted, all_are_killed};
use crate::{Test, tests};

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

const MUTANTS: &[Planted] = &[
    Planted(
        "causal off by one",
        "min(own + a.right, (int)num - 1) - lane",
        "min(own + a.right + 1, (int)num - 1) - lane",
        masks,
    ),
    Planted(
        "window off by one",
        "const int first = own - a.left - lane",
        "const int first = own - a.left - lane + 1",
        masks,
    ),
    Planted("keys behind the tile's are seen", ", (int)num - 1) - lane", ", 999) - lane", masks),
    Planted("tiles at the edge are taken for whole", "t.num == TW_FN && t.pos", "t.pos", masks),
    Planted(
        "the mask's edge is taken for whole",
        "t.pos + (int)TW_FN - 1 <= b.at + a.right",
        "t.pos <= b.at + a.right",
        masks,
    ),
    Planted(
        "the window's edge is taken for whole",
        "t.pos >= b.at_last - a.left && t.pos + (int)TW_FN",
        "t.pos >= b.at - a.left && t.pos + (int)TW_FN",
        masks,
    ),
    Planted(
        "the last tile is left out",
        "b.at_last + a.right + 1, head",
        "b.at_last + a.right, head",
        masks,
    ),
    Planted("no rescale of the output", "*= shrink, o", "*= 1.0f, o", masks),
    Planted(
        "no rescale of the sum",
        "fmaf(r.sum[i][half], shrink, sum)",
        "r.sum[i][half] + sum",
        masks,
    ),
    Planted("lse in base 2", "(base + log2f(total)) * TW_LN2", "base + log2f(total)", masks),
    Planted("the maximum of one lane", "top = tw_quad_max(top);", "", masks),
    Planted(
        "the sum of one lane",
        "sum = tw_quad_sum(r.sum[i][half])",
        "sum = r.sum[i][half]",
        masks,
    ),
    Planted("-inf less -inf", "top == -TW_INF ? 0.0f : top * factor", "top * factor", masks),
    Planted(
        "another group",
        "b.kv_head = head / (a.heads_q / a.heads_kv);",
        "b.kv_head = head % a.heads_kv;",
        packed,
    ),
    Planted(
        "the sink of another head",
        "a.sink[a.first_head + head] * TW_LOG2E",
        "a.sink[0] * TW_LOG2E",
        packed,
    ),
    Planted(
        "the sink is for rows between sequences too",
        "a.sink && own.shift != TW_ATTN_GAP",
        "a.sink",
        packed,
    ),
    Planted(
        "the first segment of all tiles",
        "if (a.own[mid].tile <= t) lo = mid;",
        "if (a.own[mid].tile < t) lo = mid;",
        packed,
    ),
    Planted("rows behind a segment", "if (row < num)\n            *(uint4*)", "*(uint4*)", packed),
    Planted(
        "stores beside the swizzle",
        "stage + tw_at<DP>(row, c));",
        "stage + tw_at<DP>(row, c ^ 1));",
        packed,
    ),
    Planted(
        "rows behind the other tile are not zeros",
        "const bool there = r + r0 < num &&",
        "const bool there =",
        masks,
    ),
    Planted(
        "fragments in another order",
        "(thread % 32 / 16 * 8 + thread % 8, thread % 16 / 8)",
        "(thread % 16 / 8 * 8 + thread % 8, thread % 32 / 16)",
        masks,
    ),
    Planted(
        "values are not transposed",
        "ldmatrix_x4_trans_b16(f, tw_place",
        "ldmatrix_x4_b16(f, tw_place",
        masks,
    ),
    Planted(
        "forward: no wait for copies",
        "for (u32 n = 0; b.walk.tiles[n % 4].num > 0; n++) {\n        cp_async_wait_group<0>();\n        // Everybody's copies are there, and nobody reads the stage that is next filled.\n        __syncthreads();\n        if (b.walk.tiles[(n + 1) % 4].num > 0) tw_f_load",
        "for (u32 n = 0; b.walk.tiles[n % 4].num > 0; n++) {\n        __syncthreads();\n        if (b.walk.tiles[(n + 1) % 4].num > 0) tw_f_load",
        many_orders,
    ),
    Planted(
        "forward: no meeting",
        "__syncthreads();\n        if (b.walk.tiles[(n + 1) % 4].num > 0) tw_f_load",
        "if (b.walk.tiles[(n + 1) % 4].num > 0) tw_f_load",
        many_orders,
    ),
    Planted(
        "forward: one stage",
        "TW_F_Q_BYTES + n % 2 * TW_F_STAGE;\n    const TwTile",
        "TW_F_Q_BYTES;\n    const TwTile",
        many_orders,
    ),
    Planted(
        "a tile is skipped",
        "b.walk.step<TW_FN>(a, b.own, n + 2);",
        "b.walk.step<TW_FN>(a, b.own, n + 2), b.walk.step<TW_FN>(a, b.own, n + 2);",
        many_orders,
    ),
    Planted(
        "backward: mask off by one",
        "min(own + behind(a), (int)t.num - 1) - lane",
        "min(own + behind(a) - 1, (int)t.num - 1) - lane",
        grads,
    ),
    Planted(
        "backward: window off by one",
        "const int first = own - before(a) - lane",
        "const int first = own - before(a) - lane + 1",
        grads,
    ),
    Planted(
        "backward: edges are taken for whole",
        "t.pos >= b.at_last - before(a) && t.pos + (int)Y - 1 <= b.at + behind(a)",
        "true",
        grads,
    ),
    Planted(
        "backward: the window is not turned",
        "return QUERIES ? a.left : a.right;",
        "return a.left;",
        grads,
    ),
    Planted(
        "backward: the shift is not turned",
        "own.shift : -own.shift",
        "own.shift : own.shift",
        grads,
    ),
    Planted("no delta", "(d - (e % 2 ? delta.y : delta.x))", "d", grads),
    Planted("the row's delta for columns", "[Y / 2 + 4 * j", "[4 * j", grads),
    Planted("lse in base e", "TW_INF : lse * TW_LOG2E", "TW_INF : lse", grads),
    Planted(
        "no scale of the gradients",
        "f1[i][0] = f1[i][1] = a.scale",
        "f1[i][0] = f1[i][1] = 1.0f",
        grads,
    ),
    Planted("one head of the group", "QUERIES ? 1 : group)", "1)", grads),
    Planted(
        "the group's first head for all",
        "heads--, t.head++, seg = own.first;",
        "heads--, seg = own.first;",
        grads,
    ),
    Planted(
        "backward: another group",
        "b.kv_head = QUERIES ? head / group : head;",
        "b.kv_head = QUERIES ? head % a.heads_kv : head;",
        grads,
    ),
    Planted(
        "delta of another head",
        "a.delta[(i64)head * a.tokens_q + row] = sum",
        "a.delta[(i64)row * a.heads_q + head] = sum",
        grads,
    ),
    Planted(
        "backward: no wait for copies",
        "cp_async_wait_group<0>();\n        // Everybody's copies are there, and nobody reads the stage that is next filled.\n        __syncthreads();\n        if (b.walk.tiles[(n + 1) % 4].num > 0) T::",
        "__syncthreads();\n        if (b.walk.tiles[(n + 1) % 4].num > 0) T::",
        grad_orders,
    ),
    Planted(
        "backward: no meeting",
        "__syncthreads();\n        if (b.walk.tiles[(n + 1) % 4].num > 0) T::",
        "if (b.walk.tiles[(n + 1) % 4].num > 0) T::",
        grad_orders,
    ),
];

/// Not here: p that is overwritten before it is read. Warps do not get far enough apart.
const PAIR_MUTANTS: &[Planted] = &[
    Planted(
        "p of another pair",
        "thread / 32 % PAIRS * (MT * NT * 32) + thread % 32",
        "thread % 32",
        pair_grads,
    ),
    Planted("both halves of the pair load q", "(FIRST ? a.d_out : a.q)", "(a.q)", pair_grads),
    Planted("lse for delta", "(FIRST ? a.lse : a.delta)", "(a.lse)", pair_grads),
    Planted("numbers behind the tile's", "i < t.num ? 4 : 0);", "4);", pair_grads),
    Planted(
        "pairs: edges are taken for whole",
        "if (!TwDkv::whole(a, b, t)) TwDkv::mask",
        "if (false) TwDkv::mask",
        pair_grads,
    ),
    Planted("pairs: no delta", "p.y * (s[i][j][1] - delta.y)", "p.y * s[i][j][1]", pair_grads),
    Planted(
        "pairs: delta of the next tile",
        "numbers(n)) + Y / 2 + thread % 4",
        "numbers(n + 1)) + Y / 2 + thread % 4",
        pair_grads,
    ),
    Planted("pairs: dv is scaled", "FIRST ? 1.0f : a.scale", "a.scale", pair_grads),
    Planted("pairs: rows behind the keys", "b.num + (FIRST ? 0 : X)", "2 * X", pair_grads),
    Planted("pairs: dk for dv", "FIRST ? a.dv : a.dk", "FIRST ? a.dk : a.dv", pair_grads),
    Planted(
        "the last tile is not finished",
        "if (n > 0) finish(n - 1, more);",
        "if (n > 0 && more) finish(n - 1, more);",
        pair_grads,
    ),
    Planted(
        "pairs: no wait for copies",
        "cp_async_wait_group<0>();\n        if (FIRST) bar_sync",
        "if (FIRST) bar_sync",
        pair_orders,
    ),
    Planted(
        "first warps begin when they like",
        "if (FIRST) bar_sync(TwPairs::BEGIN",
        "if (FIRST) bar_arrive(TwPairs::BEGIN",
        pair_orders,
    ),
    Planted(
        "p is read before it is there",
        "bar_sync(GIVEN + thread / 32 % PAIRS, 64);",
        "bar_arrive(GIVEN + thread / 32 % PAIRS, 64);",
        pair_orders,
    ),
    Planted(
        "d_out is read before it is there",
        "bar_sync(THERE, 2 * HALF);",
        "bar_arrive(THERE, 2 * HALF);",
        pair_orders,
    ),
    Planted(
        "somebody comes once more",
        "if (more) bar_arrive(TAKEN",
        "bar_arrive(TAKEN",
        pair_orders,
    ),
    Planted(
        "pairs: a stage for all tiles",
        "X_BYTES + n % 2 * TwDkv::STAGE",
        "X_BYTES",
        pair_orders,
    ),
];

const EXTRA_MUTANTS: &[Planted] = &[
    Planted("softcap without its derivative", "slope = 1.0f - t * t", "slope = 1.0f", extra_grads),
    Planted("scores without softcap", "z = a.softcap * t, ", "", extras),
    Planted("the bias of another query", "* a.bias_sq + i)", "* a.bias_sq + i + 1)", extras),
    Planted(
        "the first head's bias",
        "const u32 h = a.bias_heads == 1 ? 0 : a.first_head + head;",
        "const u32 h = 0;",
        extras,
    ),
    Planted(
        "dropout of other pairs",
        "(u64)q_row << 24 | kv_row",
        "(u64)kv_row << 24 | q_row",
        extras,
    ),
    Planted(
        "dropout's seed as it is",
        "return tw_mix(a.drop_seed ^ 0x9e3779b97f4a7c15ull);",
        "return a.drop_seed;",
        extras,
    ),
    Planted("dropout of the sum", "if (TW_ATTN_EXTRA) f *= a.keep;", "", extras),
    Planted(
        "dv without dropout",
        "kept(a, b, t, seed, i, j, e) ? p[i][j][e] : 0.0f",
        "p[i][j][e]",
        extra_grads,
    ),
    Planted("dv without the factor", "TW_ATTN_EXTRA ? a.keep : 1.0f", "1.0f", extra_grads),
    Planted("dp without dropout", "? d * a.keep : 0.0f", "? d * a.keep : d", extra_grads),
    Planted(
        "dz without the slope",
        "if (TW_ATTN_EXTRA) g[i][j][e] *= slope[i][j][e];",
        "",
        extra_grads,
    ),
    Planted(
        "the transposed bias",
        "QUERIES ? own : other, QUERIES ? other : own);\n    }\n\n    // Probabilities",
        "own, other);\n    }\n\n    // Probabilities",
        extra_grads,
    ),
    Planted(
        "padding columns are copied",
        "const bool there = r < num && c < D / 8;",
        "const bool there = r < num;",
        extras,
    ),
];

const PLAIN_MUTANTS: &[Planted] = &[
    Planted(
        "causal off by one",
        "(int)s.len - 1);\n        for",
        "(int)s.len - 2);\n        for",
        plain_all,
    ),
    Planted("lanes behind the last are seen", "mine <= last, (u32)", "true, (u32)", plain_all),
    Planted("no rescale", "acc[i] *= shrink;", "", plain_all),
    Planted(
        "lse without its maximum",
        "-TW_INF : base + logf(total);\n    const float f",
        "-TW_INF : logf(total);\n    const float f",
        plain_all,
    ),
    Planted("delta is left out", "(dp * keep - a.delta[at])", "(dp * keep)", plain_all),
    Planted(
        "one head of the group",
        "head < (m.head + 1) * group",
        "head < m.head * group + 1",
        plain_all,
    ),
    Planted("dk without scale", "dk[i] * a.scale", "dk[i]", plain_all),
    Planted("columns behind 32", "v + 32 * i), acc[i]", "v), acc[i]", plain_all),
];

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
    all_are_killed(&SM80_ATTENTION.emu_text(), |text| build(text, PLAIN), MUTANTS);
}

fn attention_pair_mutants() {
    all_are_killed(&SM80_ATTENTION.emu_text(), |text| build(text, PAIRS), PAIR_MUTANTS);
}

fn attention_extra_mutants() {
    all_are_killed(&SM80_ATTENTION.emu_text(), |text| build(text, EXTRA), EXTRA_MUTANTS);
}

fn attention_plain_mutants() {
    let build = |text| load_plain(text, (40, 37, Type::F32, Type::F32)).lib.unwrap();
    all_are_killed(&PLAIN_ATTENTION.emu_text(), build, PLAIN_MUTANTS);
}
