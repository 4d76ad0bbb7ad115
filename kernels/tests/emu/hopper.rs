//! `hopper/sm90_gemm.cu` against an f64 reference: orders, edges, types, epilogues, clusters.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

use tilewire_kernels::Source;
use tilewire_kernels::abi::{TwGemm, TwHopper, TwTensorMap};
use tilewire_kernels::hopper::{
    BOX_COLS, CLUSTER, D_HAS_MAP, Epilogue, HOPPER_GEMM, HOPPER_SUM_PARTS, Order, STORE_ROWS,
    SUM_BOX, SUM_THREADS, THREADS, TILE_K, Variant, fits_sum_rows, sum_rows,
};

use crate::compile::Unit;
use crate::gemm::Layout::{Nn, Nt, Tn};
use crate::gemm::{Case, DERIVATIVE, DGELU, DSWIGLU, GELU, Layout, NONE, RELU, SWIGLU, Type, case};
use crate::host::{Lib, RUNTIME};
use crate::memory::{ANY, Memory};
use crate::{Test, tests};

pub const TESTS: &[Test] = tests![
    hopper_products_of_every_order_and_edge,
    hopper_products_of_one_step,
    hopper_widths_and_types,
    hopper_epilogues,
    hopper_sums_by_map,
    hopper_bits_do_not_depend_on_the_launch,
    hopper_sums_in_parts,
];

/// What `EmuTensorMap` of `emu/abi.h` begins with.
const MARK: u64 = 0x7061_6d2d_726f_7374;
const SWIZZLE: u8 = 128;
/// `EMU_F32`.
const F32: u64 = 1;

/// A tensor map, from the innermost dimension on: sizes, bytes from index to index of the outer
/// ones, and the rows of a box of 64 columns. Elements are of 16 bits.
pub fn map<const N: usize, const OUTER: usize>(
    addr: u64,
    dims: [usize; N],
    strides: [i64; OUTER],
    rows: usize,
) -> TwTensorMap {
    map_of(2, addr, (&dims, &strides), rows)
}

/// The same of elements of `size` bytes: a box has 128 bytes of columns.
fn map_of(size: u64, addr: u64, (dims, strides): (&[usize], &[i64]), rows: usize) -> TwTensorMap {
    let mut words = [0u64; 16];
    words[0] = MARK;
    words[1] = addr;
    for (i, d) in dims.iter().enumerate() {
        words[2 + i] = *d as u64;
    }
    for (i, s) in strides.iter().enumerate() {
        words[7 + i] = *s as u64;
    }
    // Box, dimensions, bytes, type (only sums look at it), swizzle.
    words[11] = (2 * BOX_COLS as u64 / size) | (rows as u64) << 16 | 1 << 32 | 1 << 48;
    words[12] = 1 | (dims.len() as u64) << 16 | size << 24 | u64::from(SWIZZLE) << 40;
    TwTensorMap { words }
}

/// The map of `rows` x `cols` f32 that are added to.
pub fn map_of_sums(addr: u64, [rows, cols]: [usize; 2], ld: usize) -> TwTensorMap {
    let (dims, strides) = sum_rows([rows, cols], ld);
    let mut dims = dims;
    dims.reverse();
    let strides: Vec<i64> = strides.iter().rev().map(|s| 4 * *s as i64).collect();
    let mut map = map_of(4, addr, (&dims, &strides), 1);
    map.words[11] = SUM_BOX.iter().fold(0, |words, n| words << 16 | *n as u64);
    map.words[12] |= F32 << 32;
    map
}

/// [`map`] of bytes, in boxes of 128 columns.
pub fn map_of_bytes<const N: usize, const OUTER: usize>(
    addr: u64,
    dims: [usize; N],
    strides: [i64; OUTER],
    rows: usize,
) -> TwTensorMap {
    map_of(1, addr, (&dims, &strides), rows)
}

/// [`ragged`] of bytes.
pub fn ragged_bytes(addr: u64, cols: usize, ld: i64, rows: usize) -> TwTensorMap {
    let end = (1 << 31) - (1 << 16);
    map_of_bytes(addr, [cols, 1 << 30, end, end], [ld, ld, (1 << 34) - ld], rows)
}

/// A ragged map of rows of `cols` elements, `ld` apart (`TensorMapDesc::ragged`).
pub fn ragged(addr: u64, cols: usize, ld: i64, rows: usize) -> TwTensorMap {
    let end = (1 << 31) - (1 << 16);
    map(addr, [cols, 1 << 30, end, end], [2 * ld, 2 * ld, (2 << 34) - 2 * ld], rows)
}

/// The variant of a case.
pub fn variant(c: &Case, f16: bool, cols: usize) -> Variant {
    let order = match c.layout {
        Nt => Order::Nt,
        Nn => Order::Nn,
        _ => Order::Tn,
    };
    let epilogue = match c.act {
        NONE if c.bias || c.accumulate => Epilogue::Linear,
        NONE => Epilogue::Plain,
        RELU => Epilogue::Relu,
        GELU => Epilogue::Gelu,
        SWIGLU => Epilogue::SwiGlu,
        DGELU => Epilogue::DGelu,
        _ => Epilogue::DSwiGlu,
    };
    Variant { order, f16, out_f32: c.out == Type::F32, epilogue, cols }
}

pub fn load(text: String, v: &Variant) -> &'static Lib {
    load_of(&HOPPER_GEMM, text, v)
}

/// The variant `v` of `source`, whose text is `text`.
pub fn load_of(source: &Source, text: String, v: &Variant) -> &'static Lib {
    load_by(source, text, v.defines(), v.shared_bytes())
}

/// That of these definitions, which has so many bytes of shared memory.
pub fn load_by(
    source: &Source,
    text: String,
    defines: Vec<(String, u64)>,
    bytes: u32,
) -> &'static Lib {
    let defines = defines.into_iter().map(|(name, value)| (&*name.leak(), value)).collect();
    let (name, kernels) = (source.name, source.kernels.to_vec());
    RUNTIME.load(&Unit { name, text, defines, kernels, smem: bytes as usize })
}

/// Libraries of the text as it is, by their definitions.
static LIBS: LazyLock<Mutex<HashMap<String, &'static Lib>>> = LazyLock::new(Mutex::default);

pub fn lib(v: &Variant) -> &'static Lib {
    let mut libs = LIBS.lock().unwrap();
    libs.entry(format!("{v:?}")).or_insert_with(|| load(HOPPER_GEMM.emu_text(), v))
}

/// That of [`HOPPER_SUM_PARTS`] which ends products of `v`.
pub fn sums(v: &Variant) -> &'static Lib {
    let (v, mut libs) = (v.of_sums(), LIBS.lock().unwrap());
    let load = || load_of(&HOPPER_SUM_PARTS, HOPPER_SUM_PARTS.emu_text(), &v);
    libs.entry(format!("sums {v:?}")).or_insert_with(load)
}

/// Runs `c` by `blocks` blocks of the library; D. Tiles go out by a counter for odd seeds.
pub fn check_on(lib: &'static Lib, c: &Case, v: &Variant, blocks: u32, seed: u64) -> Vec<u8> {
    let kernel = lib.kernel("tw_hopper_gemm");
    let launch = kernel.grid([blocks, 1, 1], [THREADS, 1, 1]).cluster(CLUSTER);
    let launch = launch.smem(v.shared_bytes());
    c.check_by(if v.f16 { Type::F16 } else { Type::Bf16 }, seed, |p: &TwGemm, counter| {
        let (m, n) = (c.m, c.n);
        let [a, b] = operands(c, v, p);
        let by_map =
            c.accumulate && v.out_f32 && !c.bias && fits_sum_rows(p.d, [m, n], p.ldd as usize);
        let d = match v.epilogue {
            Epilogue::SwiGlu => map(p.d, [n / 2, m, 1], whole(p.ldd, m), STORE_ROWS),
            Epilogue::DSwiGlu => map(p.d, [n, m, 2], [2 * p.ldd, 2 * n as i64], STORE_ROWS),
            _ if by_map => map_of_sums(p.d, [m, n], p.ldd as usize),
            _ => map(p.d, [n, m, 1], whole(p.ldd, m), STORE_ROWS),
        };
        let counter = if seed % 2 == 1 { counter } else { 0 };
        let g = product(p, counter, [1, c.k.div_ceil(TILE_K)]);
        let g = TwHopper { flags: g.flags | if by_map { D_HAS_MAP } else { 0 }, ..g };
        launch.arg(&g).arg(&a).arg(&b).arg(&d)
    })
}

/// Bytes from row to row, and from matrix to matrix.
pub fn whole(ld: i64, rows: usize) -> [i64; 2] {
    [2 * ld, 2 * ld * rows as i64]
}

/// The tensor maps of A and B.
fn operands(c: &Case, v: &Variant, p: &TwGemm) -> [TwTensorMap; 2] {
    let (m, n, k) = (c.m, c.n, c.k);
    let (a_mn, b_mn) = v.order.mn_major();
    let a = if a_mn { [m, k, 1] } else { [k, m, 1] };
    let b = if b_mn { [n, k, 1] } else { [k, n, 1] };
    let of_a = map(p.a, a, whole(p.lda, a[1]), TILE_K);
    [of_a, map(p.b, b, whole(p.ldb, b[1]), v.b_rows())]
}

pub fn product(p: &TwGemm, counter: u64, [parts, steps]: [usize; 2]) -> TwHopper {
    TwHopper {
        d: p.d,
        bias: p.bias,
        aux: p.aux,
        counter,
        ldd: p.ldd,
        ldaux: p.ldaux,
        m: p.m,
        n: p.n,
        k: p.k,
        flags: p.flags,
        parts: parts as u32,
        steps: steps as u32,
    }
}

/// Runs `c` with the contraction cut into parts of `steps` stages, by a kernel for their sums and
/// one that adds and finishes them; D.
pub fn check_in_parts(
    libs: [&'static Lib; 2],
    c: &Case,
    v: &Variant,
    (blocks, steps): (u32, usize),
    seed: u64,
) -> Vec<u8> {
    let parts = c.k.div_ceil(steps * TILE_K);
    let space = Memory::new("sums", ANY, 4 * parts * c.m * c.n);
    let kernels = [libs[0].kernel("tw_hopper_gemm"), libs[1].kernel("tw_hopper_sum_parts")];
    c.check_launches(
        if v.f16 { Type::F16 } else { Type::Bf16 },
        seed,
        Some(&space),
        |p, counter| {
            let of_parts = v.of_parts();
            let launch = kernels[0].grid([blocks, 1, 1], [THREADS, 1, 1]).cluster(CLUSTER);
            let [a, b] = operands(c, v, p);
            let counter = if seed % 2 == 1 { counter } else { 0 };
            let g = product(p, counter, [parts, steps]);
            let sums =
                TwHopper { d: space.addr(), bias: 0, aux: 0, ldd: c.n as i64, flags: 0, ..g };
            let first = launch.smem(of_parts.shared_bytes()).arg(&sums).arg(&a).arg(&b).arg(&a);
            let grid = [blocks + 1, 1, 1];
            let second = kernels[1].grid(grid, [SUM_THREADS, 1, 1]).arg(&g).arg(&space.addr());
            vec![first, second]
        },
    )
}

pub fn in_parts(c: &Case, cols: usize, launch: (u32, usize), seed: u64) -> Vec<u8> {
    let v = variant(c, c.out == Type::F16, cols);
    check_in_parts([lib(&v.of_parts()), sums(&v)], c, &v, launch, seed)
}

fn check(c: &Case, f16: bool, cols: usize, blocks: u32, seed: u64) -> Vec<u8> {
    let v = variant(c, f16, cols);
    check_on(lib(&v), c, &v, blocks, seed)
}

fn hopper_products_of_every_order_and_edge() {
    let shapes = [(1, 8, 8), (63, 136, 72), (129, 128, 64), (200, 264, 328), (300, 40, 128)];
    for layout in [Nt, Nn, Tn] {
        for (i, (m, n, k)) in shapes.into_iter().enumerate() {
            let m = if layout == Tn { usize::next_multiple_of(m, 8) } else { m };
            let c = Case { out: Type::Bf16, pad: 8 * (i % 2), ..case(layout, m, n, k) };
            check(&c, false, 128, 2 + 2 * (i as u32 % 2), i as u64);
        }
    }
}

/// One step of the contraction a tile: what a tile leaves behind meets the next one at once.
fn hopper_products_of_one_step() {
    for seed in 0..4 {
        let c = Case { out: Type::Bf16, ..case(Nt, 520, 264, 64) };
        check(&c, false, 128, 2, seed);
    }
}

fn hopper_widths_and_types() {
    for (cols, f16) in [(256, false), (192, false), (128, true)] {
        for layout in [Nt, Nn] {
            let out = if f16 { Type::F16 } else { Type::Bf16 };
            check(&Case { out, ..case(layout, 136, 264, 136) }, f16, cols, 2, 3);
            check(&case(layout, 72, 72, 136), f16, cols, 2, 4);
        }
    }
    let exact = Case { out: Type::Bf16, exact: true, ..case(Tn, 264, 136, 200) };
    check(&exact, false, 128, 4, 5);
    // Tiles that overlap: of as many steps as that takes, one more, and fewer.
    for (cols, k) in [(256, 256), (256, 264), (224, 264), (320, 128), (320, 136), (320, 64)] {
        for layout in [Nt, Nn, Tn] {
            if cols == 224 && layout != Nt {
                continue;
            }
            let c = Case { out: Type::Bf16, pad: 8, ..case(layout, 136, 392, k) };
            check(&c, false, cols, 2, 3);
        }
    }
}

pub fn epilogue_cases(layout: Layout) -> Vec<Case> {
    let c = Case { out: Type::Bf16, ..case(layout, 136, 144, 72) };
    let mut all = vec![
        Case { bias: true, ..c },
        Case { accumulate: true, pad: 8, ..c },
        Case { bias: true, accumulate: true, ..c },
        Case { accumulate: true, out: Type::F32, ..c },
        Case { bias: true, out: Type::F32, pad: 8, ..c },
    ];
    for act in [RELU, GELU, SWIGLU] {
        all.push(Case { act, bias: true, aux: true, ..c });
        all.push(Case { act, pad: 8, ..c });
        all.push(Case { act, bias: true, large: true, ..c });
    }
    all.extend([DGELU, DSWIGLU].map(|act| Case { act, ..c }));
    all.push(Case { act: DSWIGLU, pad: 8, ..c });
    all
}

fn hopper_epilogues() {
    for layout in [Nt, Nn] {
        for c in epilogue_cases(layout) {
            assert!(c.act < DERIVATIVE || !c.aux, "derivatives read aux");
            check(&c, false, 256, 2, 1);
        }
    }
    // Tiles that load their bias late, and overlap.
    let wide = Case { bias: true, out: Type::Bf16, ..case(Nt, 136, 392, 136) };
    for c in [
        wide,
        Case { accumulate: true, ..wide },
        Case { act: RELU, pad: 8, ..wide },
        Case { act: GELU, aux: true, ..wide },
    ] {
        check(&c, false, 320, 2, 1);
    }
    for act in [SWIGLU, DSWIGLU] {
        check(
            &Case { act, out: Type::F16, bias: act == SWIGLU, ..case(Tn, 40, 272, 72) },
            true,
            256,
            2,
            2,
        );
    }
}

/// f32 results that are added to, whose rows fill boxes: every order, edges, several tiles of a
/// block, one step and many; columns and rows of D that are not the product's stay.
fn hopper_sums_by_map() {
    let c = |layout, m, n, k| Case { accumulate: true, ..case(layout, m, n, k) };
    for (i, layout) in [Nt, Nn, Tn].into_iter().enumerate() {
        check(&c(layout, 144, 264, 72), false, 256, 2, i as u64);
        check(&Case { pad: 8, ..c(layout, 400, 520, 328) }, false, 256, 2 + 2 * (i as u32), 1);
    }
    check(&Case { exact: true, ..c(Tn, 16, 40, 200) }, true, 256, 2, 2);
    check(&Case { exact: true, ..c(Tn, 272, 1032, 64) }, false, 256, 2, 3);
    // L2 adds more of many steps, and of wide tiles: the same bits.
    let long = Case { pad: 8, ..c(Tn, 144, 392, 2056) };
    let [a, b] = [256, 320].map(|cols| check(&long, false, cols, 2, 1));
    assert!(a == b, "bits of D");
    check(&c(Nt, 272, 648, 136), false, 320, 2, 1);
    // Wide tiles that no map fits, with a bias and with rows that fill no boxes.
    check(&Case { bias: true, ..case(Nt, 136, 648, 136) }, false, 320, 2, 1);
    check(&c(Nn, 136, 648, 136), false, 320, 2, 2);
}

/// Tile, order and number of blocks change no bit.
fn hopper_bits_do_not_depend_on_the_launch() {
    let c = case(Nt, 264, 264, 200);
    let all = [(128, 2, 0), (128, 6, 1), (192, 4, 2), (256, 2, 3), (320, 2, 4), (224, 4, 5)];
    let all = all.map(|(cols, blocks, seed)| check(&c, false, cols, blocks, seed));
    assert!(all.iter().all(|d| *d == all[0]), "bits of D");
}

/// Each function of the sums, orders, edges, and parts of which the last is short.
fn hopper_sums_in_parts() {
    for (i, c) in epilogue_cases(Nt).into_iter().enumerate() {
        in_parts(&Case { k: 200, ..c }, 128, (2 + 2 * (i as u32 % 2), 2), i as u64);
    }
    let f16 = Case { out: Type::F16, ..case(Nn, 72, 136, 328) };
    in_parts(&f16, 128, (4, 1), 1);
    in_parts(&Case { act: SWIGLU, bias: true, ..f16 }, 256, (4, 2), 2);
    // All parts by one cluster, and in order whatever the launch.
    let c = Case { out: Type::Bf16, ..case(Tn, 264, 136, 328) };
    let all = [(128, (2, 2), 1), (128, (6, 2), 2), (256, (4, 2), 3)];
    let all = all.map(|(cols, launch, seed)| in_parts(&c, cols, launch, seed));
    assert!(all.iter().all(|d| *d == all[0]), "bits of D");
    let exact = Case { exact: true, ..c };
    in_parts(&exact, 128, (4, 3), 5);
    in_parts(&Case { out: Type::F32, ..exact }, 128, (4, 3), 6);
    // One part is the product itself, in every bit.
    let one = Case { out: Type::F32, ..case(Nt, 136, 144, 200) };
    assert!(in_parts(&one, 128, (2, 4), 1) == check(&one, false, 128, 2, 1), "bits of one part");
}
