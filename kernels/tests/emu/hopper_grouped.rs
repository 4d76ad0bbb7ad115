//! `hopper/sm90_grouped_gemm.cu` against an f64 reference: groups, tails, bad splits.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

use tilewire_kernels::abi::{TwGrouped, TwHopper, TwHopperGrouped, TwTensorMap};
use tilewire_kernels::hopper::{
    CLUSTER, D_HAS_MAP, Epilogue, HOPPER_GROUPED_GEMM, Order, STORE_ROWS, THREADS, TILE_K, Variant,
    fits_sum_rows,
};

use crate::gemm::{GELU, RELU, SWIGLU, Type};
use crate::grouped::{Case, Dgrad, Fprop, Pass, Wgrad, bad_ends, bad_splits, case, many};
use crate::hopper::{load_by, map, map_of_sums, ragged};
use crate::host::Lib;
use crate::memory::Memory;
use crate::planted::all_are_killed;
use crate::{Test, scenarios, tests};

pub const TESTS: &[Test] = tests![
    hopper_groups_by_rows,
    hopper_groups_by_columns,
    hopper_groups_that_cannot_be_used_write_nothing,
    hopper_groups_mutants,
];

fn variant(c: &Case, cols: usize) -> Variant {
    let order = match c.pass {
        Fprop => Order::Nt,
        Dgrad => Order::Nn,
        Wgrad => Order::Tn,
    };
    let epilogue = match c.act {
        RELU => Epilogue::Relu,
        GELU => Epilogue::Gelu,
        SWIGLU => Epilogue::SwiGlu,
        _ if c.bias || c.accumulate => Epilogue::Linear,
        _ => Epilogue::Plain,
    };
    let cols = if epilogue == Epilogue::Plain { cols } else { 256 };
    let f16 = c.input == Type::F16;
    Variant { order, f16, out_f32: c.out == Type::F32, epilogue, cols }
}

/// At most `most` groups are sorted.
fn load(text: String, v: &Variant, most: u64) -> &'static Lib {
    let mut defines = v.defines();
    defines.push(("TW_HG_MAX_SORTED".to_owned(), most));
    load_by(&HOPPER_GROUPED_GEMM, text, defines, v.grouped_shared_bytes())
}

/// Libraries of the text as it is, by their variants.
static LIBS: LazyLock<Mutex<HashMap<String, &'static Lib>>> = LazyLock::new(Mutex::default);

fn of_text(lib: &'static Lib, v: &Variant) -> &'static Lib {
    let text = HOPPER_GROUPED_GEMM.emu_text();
    if lib.text() != text {
        return load(lib.text().to_owned(), v, 448);
    }
    let mut libs = LIBS.lock().unwrap();
    libs.entry(format!("{v:?}")).or_insert_with(|| load(text, v, 448))
}

/// The plain product of rows, for its text.
fn base(text: String) -> &'static Lib {
    load(text, &variant(&narrow(Fprop, &[], 8, 8, 8), 128), 448)
}

/// The parameters and maps of the products `p`; those of a tensor for each group go to `maps`.
fn params(
    c: &Case,
    v: &Variant,
    p: &TwGrouped,
    (counter, maps): (u64, &Memory),
) -> (TwHopperGrouped, [TwTensorMap; 3]) {
    let g = &p.g;
    let product = TwHopper {
        d: g.d,
        bias: g.bias,
        aux: g.aux,
        counter,
        ldd: g.ldd,
        ldaux: g.ldaux,
        m: g.m,
        n: g.n,
        k: g.k,
        flags: g.flags,
        parts: 0,
        steps: 0,
    };
    let grouped = TwHopperGrouped {
        g: product,
        splits: p.splits,
        status: p.status,
        accumulate: p.accumulate,
        stride: p.stride,
        groups: p.groups,
        pad: 0,
        maps: if c.table { maps.addr() } else { 0 },
        addresses: p.table,
    };
    let (n, k, groups) = (c.n, c.k, c.splits.len());
    let planes = |addr, rows: usize, cols: usize, boxes| {
        let pitch = 2 * cols as i64;
        let all = |addr, num| map(addr, [cols, rows, num], [pitch, pitch * rows as i64], boxes);
        if !c.table {
            return all(addr, groups.max(1));
        }
        // As `run_by` has them: the last group's first.
        let at = |e: usize| addr + ((groups - 1 - e) * 2 * rows * cols) as u64;
        let own: Vec<u64> = (0..groups).flat_map(|e| all(at(e), 1).words).collect();
        maps.write(&own);
        all(addr, 0)
    };
    let packed = |addr, cols: usize, rows| ragged(addr, cols, cols as i64, rows);
    let a = packed(g.a, k, TILE_K);
    // Gradients of f32 that are added to.
    let sums = |addr| {
        if !c.table {
            return map_of_sums(addr, [groups * k, n], n);
        }
        let at = |e: usize| addr + ((groups - 1 - e) * 4 * n * k) as u64;
        let own: Vec<u64> = (0..groups).flat_map(|e| map_of_sums(at(e), [k, n], n).words).collect();
        maps.write(&own);
        map_of_sums(addr, [k, n], n)
    };
    let by_map = c.pass == Wgrad && v.out_f32 && c.accumulate && fits_sum_rows(g.d, [k, n], n);
    let grouped = TwHopperGrouped {
        g: TwHopper { flags: grouped.g.flags | if by_map { D_HAS_MAP } else { 0 }, ..grouped.g },
        ..grouped
    };
    let [b, d] = match c.pass {
        Wgrad if by_map => [packed(g.b, n, TILE_K), sums(g.d)],
        Fprop => [planes(g.b, n, k, v.b_rows()), packed(g.d, c.cols(), STORE_ROWS)],
        Dgrad => [planes(g.b, k, n, v.b_rows()), packed(g.d, n, STORE_ROWS)],
        Wgrad => [packed(g.b, n, TILE_K), planes(g.d, k, n, STORE_ROWS)],
    };
    (grouped, [a, b, d])
}

/// Status and D of one run; tiles go out by a counter for odd seeds.
fn run_on(lib: &'static Lib, c: &Case, v: &Variant, blocks: u32, seed: u64) -> (u32, Vec<u8>) {
    let kernel = lib.kernel("tw_hopper_grouped");
    let launch = kernel.grid([blocks, 1, 1], [THREADS, 1, 1]).cluster(CLUSTER);
    let launch = launch.smem(v.grouped_shared_bytes());
    c.run_by(seed, &|p, counter, maps| {
        let counter = if seed % 2 == 1 { counter } else { 0 };
        let (g, [a, b, d]) = params(c, v, p, (counter, maps));
        launch.clone().arg(&g).arg(&a).arg(&b).arg(&d)
    })
}

/// By the text that `lib` was made of, in the variant of the case.
fn check(lib: &'static Lib, c: &Case, cols: usize, blocks: u32) {
    let v = variant(c, cols);
    let lib = of_text(lib, &v);
    c.check_runs(&|seed| run_on(lib, c, &v, blocks, seed));
}

/// A case whose results have the operands' type.
fn narrow(pass: Pass, splits: &[i64], capacity: usize, k: usize, n: usize) -> Case {
    Case { out: Type::F16, ..case(pass, splits, capacity, k, n) }
}

fn rows(lib: &'static Lib) {
    check(lib, &narrow(Fprop, &[3, 0, 270, 1, 129, 0], 420, 72, 136), 128, 2);
    check(lib, &case(Fprop, &[3, 0, 70, 1, 0], 74, 40, 72), 128, 4);
}

fn columns(lib: &'static Lib) {
    check(lib, &narrow(Wgrad, &[3, 0, 270, 1, 65, 0], 400, 136, 264), 128, 2);
    // Tiles that overlap, and groups that keep their gradients between them.
    let long = narrow(Wgrad, &[260, 0, 270, 1, 300, 0], 840, 136, 392);
    check(lib, &long, 256, 2);
    check(lib, &Case { accumulate: true, ..long }, 256, 2);
    check(lib, &case(Wgrad, &[3, 0, 70, 1, 0], 80, 72, 40), 128, 4);
    let add = Case { accumulate: true, exact: true, ..case(Wgrad, &[9, 0, 0, 33], 42, 24, 72) };
    check(lib, &add, 256, 2);
    check(lib, &case(Wgrad, &[], 5, 16, 16), 128, 2);
}

/// Gradients that are added to by their map: edges, groups without rows, and those that are stored.
fn sums(lib: &'static Lib) {
    let add = |splits: &[i64], capacity, k, n| Case {
        accumulate: true,
        ..case(Wgrad, splits, capacity, k, n)
    };
    check(lib, &add(&[3, 70, 0, 0, 1, 65, 130], 280, 144, 264), 256, 2);
    let exact = Case { exact: true, ..add(&[9, 0, 0, 33, 64, 1], 110, 272, 40) };
    check(lib, &exact, 256, 4);
    check(lib, &Case { table: true, ..exact }, 256, 2);
}

fn many_groups(lib: &'static Lib) {
    let c = Case { narrow: true, zero_tail: true, ..narrow(Fprop, &many(), 60, 16, 24) };
    check(lib, &c, 128, 2);
}

fn ends(lib: &'static Lib) {
    check(lib, &Case { ends: true, ..narrow(Fprop, &[5, 0, 130, 2], 140, 24, 48) }, 128, 2);
}

/// What follows the sums of rows, and rows behind the groups.
fn functions(lib: &'static Lib) {
    let c = narrow(Fprop, &[5, 0, 130], 140, 24, 48);
    for act in [RELU, SWIGLU] {
        let c = Case { act, bias: true, aux: true, zero_tail: true, ..c.clone() };
        check(lib, &c, 256, 2);
    }
}

/// A tensor for each group.
fn tables(lib: &'static Lib) {
    for pass in [Fprop, Wgrad] {
        check(lib, &Case { table: true, ..narrow(pass, &[9, 0, 130, 33], 172, 24, 72) }, 128, 2);
    }
    check(lib, &Case { table: true, ..narrow(Wgrad, &[259, 0, 270, 3], 540, 24, 72) }, 256, 2);
    let add = Case { accumulate: true, ..case(Wgrad, &[9, 0, 0, 33], 42, 24, 72) };
    check(lib, &Case { table: true, ..add }, 256, 2);
}

/// As many groups as a block sorts, and one more: 7, so that few tiles are enough.
fn around_the_limit(lib: &'static Lib) {
    for num in [7, 8] {
        let splits: Vec<i64> = (0..num).map(|e| e * 7 % 5 * (e % 3)).collect();
        let c = narrow(Wgrad, &splits, splits.iter().sum::<i64>() as usize + 3, 8, 8);
        let (c, v) = (Case { ends: num == 8, ..c.clone() }, variant(&c, 128));
        let lib = load(lib.text().to_owned(), &v, 7);
        c.check_runs(&|seed| run_on(lib, &c, &v, 2, seed));
    }
}

fn bad(lib: &'static Lib) {
    let once = |c: &Case| {
        let v = variant(c, 128);
        run_on(of_text(lib, &v), c, &v, 4, 3)
    };
    bad_splits(&once);
    bad_ends(&once);
}

fn hopper_groups_by_rows() {
    let lib = base(HOPPER_GROUPED_GEMM.emu_text());
    for f in [rows, many_groups, ends, functions, tables] {
        f(lib);
    }
    for pass in [Fprop, Dgrad] {
        let zero = Case { zero_tail: true, ..narrow(pass, &[0, 65, 2], 90, 40, 24) };
        check(lib, &zero, 256, 2);
        check(lib, &Case { out: Type::F32, input: Type::Bf16, ends: true, ..zero }, 128, 4);
        check(lib, &Case { zero_tail: true, ..narrow(pass, &[0, 0], 5, 16, 16) }, 128, 2);
        check(lib, &narrow(pass, &[], 7, 16, 16), 128, 2);
        check(lib, &narrow(pass, &[0], 0, 8, 8), 128, 2);
    }
    check(lib, &narrow(Dgrad, &[3, 0, 270, 1, 129, 0], 420, 72, 136), 128, 2);
    let exact = Case { bias: true, exact: true, ..case(Fprop, &[5, 0, 130], 140, 24, 48) };
    check(lib, &exact, 256, 2);
}

fn hopper_groups_by_columns() {
    let lib = base(HOPPER_GROUPED_GEMM.emu_text());
    columns(lib);
    sums(lib);
    around_the_limit(lib);
    let add = Case { accumulate: true, ..case(Wgrad, &[9, 0, 0, 33], 42, 24, 72) };
    check(lib, &Case { out: Type::F16, ..add.clone() }, 256, 2);
    check(lib, &Case { ends: true, narrow: true, exact: true, ..add }, 256, 4);
    check(lib, &case(Wgrad, &[0, 0], 5, 16, 16), 128, 2);
}

fn hopper_groups_that_cannot_be_used_write_nothing() {
    bad(base(HOPPER_GROUPED_GEMM.emu_text()));
}

fn hopper_groups_mutants() {
    all_are_killed(
        &HOPPER_GROUPED_GEMM.emu_text(),
        base,
        ("hopper/sm90_grouped_gemm", "groups"),
        scenarios![
            rows,
            columns,
            sums,
            many_groups,
            ends,
            functions,
            tables,
            around_the_limit,
            bad
        ],
    );
}
