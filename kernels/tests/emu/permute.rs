//! `permute/sm80_permute.cu`: maps against the oracle, rows against the arithmetic of the host
//! operation, to the bit.

use std::sync::OnceLock;

use bytemuck::Pod;
use tilewire_core::{DType, Rng, convert_from_f32, convert_to_f32};
use tilewire_kernels::abi::TwRoute;
use tilewire_kernels::portable::{
    PERMUTE, PERMUTE_BAD_INDEX, PERMUTE_CHUNK, PERMUTE_THREADS, WIDE_MANTISSAS, permute_defines,
};
use tilewire_oracle::permute::{Permutation, TopK};

use crate::compile::Unit;
use crate::host::{Lib, RUNTIME};
use crate::memory::{ANY, Memory};
use crate::planted::all_are_killed;
use crate::run::Run;
use crate::{Test, scenarios, tests};

pub const TESTS: &[Test] = tests![
    rows_and_gradients_of_every_type_and_size,
    a_routing_of_many_chunks,
    an_index_that_is_no_expert,
    mutants_of_permutation_are_killed,
];

/// In the order of `WIDE_MANTISSAS`.
const WIDE: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
const POISON: u8 = 0xA5;
/// Threads and choices of a block in most tests: several rounds and chunks with few tokens.
const SMALL: [u64; 2] = [64, 128];

/// The kernels, and how many threads and choices a block has.
#[derive(Clone, Copy)]
struct Blocks {
    lib: &'static Lib,
    src: usize,
    threads: u32,
    chunk: u32,
}

fn load(text: String, src: usize, [threads, chunk]: [u64; 2]) -> &'static Lib {
    let value = |(n, (_, v)): (&&'static str, (String, u64))| match *n {
        "TW_PERMUTE_THREADS" => (*n, threads),
        "TW_PERMUTE_CHUNK" => (*n, chunk),
        _ => (*n, v),
    };
    RUNTIME.load(&Unit {
        name: PERMUTE.name,
        text,
        defines: PERMUTE
            .defines
            .iter()
            .zip(permute_defines(WIDE_MANTISSAS[src]))
            .map(value)
            .collect(),
        kernels: PERMUTE.kernels.to_vec(),
        smem: 0,
    })
}

fn small(src: usize) -> Blocks {
    static LIBS: [OnceLock<&'static Lib>; 3] = [const { OnceLock::new() }; 3];
    unit(LIBS[src].get_or_init(|| load(PERMUTE.emu_text(), src, SMALL)), src, SMALL)
}

fn unit(lib: &'static Lib, src: usize, [threads, chunk]: [u64; 2]) -> Blocks {
    Blocks { lib, src, threads: threads as u32, chunk: chunk as u32 }
}

/// A permutation with its indices.
#[derive(Clone)]
struct Case {
    tokens: usize,
    hidden: usize,
    experts: usize,
    k: usize,
    align: usize,
    capacity: usize,
    /// i64 indices.
    wide: bool,
    /// Elements from an aligned address to the first one, of tokens and rows.
    shift: usize,
    idx: Vec<i64>,
}

impl Case {
    /// Random experts, some masked, some twice for one token; room for all but `cut` rows.
    fn new(seed: u64, [tokens, hidden, experts, k, align]: [usize; 5], cut: usize) -> Self {
        let mut rng = Rng::new(seed);
        let mut one = || match rng.below(5) {
            0 => -1,
            _ => rng.below(experts as u64) as i64,
        };
        let idx: Vec<i64> = (0..tokens * k).map(|_| one()).collect();
        let rows =
            Permutation::new(&TopK::new(tokens, k, idx.clone()), experts, align).sources.len();
        let capacity = (rows + 3).saturating_sub(cut);
        Self {
            tokens,
            hidden,
            experts,
            k,
            align,
            capacity,
            wide: seed.is_multiple_of(2),
            shift: 0,
            idx,
        }
    }
}

/// The map of a case: slots, sources, m_splits, total, dropped.
#[derive(PartialEq, Debug)]
struct Map {
    slots: Vec<i32>,
    sources: Vec<i32>,
    m_splits: Vec<i64>,
    totals: [i64; 2],
}

fn map_of(c: &Case) -> Map {
    let p = Permutation::new(&TopK::new(c.tokens, c.k, c.idx.clone()), c.experts, c.align);
    let kept = |s: &Option<usize>| s.filter(|r| *r < c.capacity).map_or(-1, |r| r as i32);
    let mut sources: Vec<i32> =
        p.sources.iter().map(|s| s.map_or(-1, |(t, j)| (t * c.k + j) as i32)).collect();
    sources.resize(c.capacity, -1);
    let clamp = |o: usize| o.min(c.capacity) as i64;
    let lost = p.slots.iter().flatten().filter(|r| **r >= c.capacity).count();
    Map {
        slots: p.slots.iter().map(kept).collect(),
        sources,
        m_splits: p.offsets.windows(2).map(|w| clamp(w[1]) - clamp(w[0])).collect(),
        totals: [p.sources.len() as i64, lost as i64],
    }
}

fn poisoned(len: usize) -> Memory {
    let m = Memory::new("result", ANY, len.next_multiple_of(16) + 16);
    m.write(&vec![POISON; m.len_bytes()]);
    m
}

/// The first `len` bytes of a result; what follows must be as it was.
fn result(m: &Memory, skip: usize, len: usize) -> Vec<u8> {
    let all = m.read::<u8>();
    let mut around = all[..skip].iter().chain(&all[skip + len..]);
    assert!(around.all(|b| *b == POISON), "bytes around a result");
    all[skip..skip + len].to_vec()
}

fn numbers<T: Pod>(m: &Memory, len: usize) -> Vec<T> {
    bytemuck::pod_collect_to_vec(&result(m, 0, len * size_of::<T>()))
}

/// The map in device memory.
struct DeviceMap {
    memory: [Memory; 7],
    args: TwRoute,
}

impl DeviceMap {
    fn new(u: Blocks, c: &Case) -> Self {
        let choices = c.idx.len();
        let chunks = choices.div_ceil(u.chunk as usize).max(1);
        let idx = Memory::new("idx", ANY, 8 * choices);
        match c.wide {
            true => idx.write(&c.idx),
            false => idx.write(&c.idx.iter().map(|e| *e as i32).collect::<Vec<_>>()),
        }
        let memory = [
            idx,
            poisoned(4 * chunks * (c.experts + 1)),
            poisoned(8 * c.experts),
            poisoned(4 * choices),
            poisoned(4 * c.capacity),
            poisoned(8 * c.experts),
            poisoned(24),
        ];
        let at = memory.each_ref().map(Memory::addr);
        let args = TwRoute {
            idx: at[0],
            counts: at[1],
            first: at[2],
            slots: at[3],
            sources: at[4],
            m_splits: at[5],
            total: at[6],
            dropped: at[6] + 8,
            status: at[6] + 16,
            choices: choices as u32,
            experts: c.experts as u32,
            capacity: c.capacity as u32,
            align: c.align as u32,
            wide: u32::from(c.wide),
            chunks: chunks as u32,
        };
        Self { memory, args }
    }

    fn route(&self, u: Blocks) {
        let [count, scan, place] =
            ["tw_route_count", "tw_route_scan", "tw_route_place"].map(|k| u.lib.kernel(k));
        let block = [u.threads, 1, 1];
        let mut l = vec![
            count.grid([self.args.chunks, 1, 1], block).arg(&self.args),
            scan.grid([1, 1, 1], block).arg(&self.args),
        ];
        if self.args.choices > 0 {
            l.push(place.grid([self.args.chunks, 1, 1], block).arg(&self.args));
        }
        Run::new(1).memory(&self.memory).stream(0, l).go().unwrap();
    }

    fn status(&self) -> i32 {
        self.memory[6].read::<i32>()[4]
    }

    fn read(&self, c: &Case) -> Map {
        let totals = self.memory[6].read::<i64>();
        Map {
            slots: numbers(&self.memory[3], c.idx.len()),
            sources: numbers(&self.memory[4], c.capacity),
            m_splits: numbers(&self.memory[5], c.experts),
            totals: [totals[0], totals[1]],
        }
    }
}

/// `values` rounded to `dtype`: bytes, and what they are.
fn rounded(dtype: DType, values: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let (mut bytes, mut wide) = (vec![0; values.len() * dtype.size()], vec![0.0; values.len()]);
    convert_from_f32(dtype, values, &mut bytes);
    convert_to_f32(dtype, &bytes, &mut wide);
    (bytes, wide)
}

/// Inputs of every kernel for rows, with their values.
struct Data {
    x: (Vec<u8>, Vec<f32>),
    rows: (Vec<u8>, Vec<f32>),
    weights: Vec<f32>,
    row_weights: Vec<f32>,
}

impl Data {
    fn new(c: &Case, dtype: DType) -> Self {
        let mut rng = Rng::new(77);
        let mut some = |n: usize| -> Vec<f32> { (0..n).map(|_| rng.normal()).collect() };
        Self {
            x: rounded(dtype, &some(c.tokens * c.hidden)),
            rows: rounded(dtype, &some(c.capacity * c.hidden)),
            weights: some(c.tokens * c.k),
            row_weights: some(c.capacity),
        }
    }
}

/// Results of the kernels for rows: permuted x and weights, y with and without weights, gradients
/// of permuted weights, of rows (with weights and without), and of weights.
type Results = [Vec<u8>; 8];

/// As the host operation does it: products and sums in f32, each rounded, in the order of choices.
fn expected(c: &Case, m: &Map, d: &Data, dtype: DType) -> Results {
    let (h, size) = (c.hidden, dtype.size());
    let (mut x, mut w, mut d_w) =
        (vec![0; c.capacity * h * size], vec![0.0f32; c.capacity], vec![0.0f32; c.idx.len()]);
    let (mut y, mut y1) = (vec![0.0f32; c.tokens * h], vec![0.0f32; c.tokens * h]);
    let (mut d_rows, mut d_rows1) = (vec![0.0f32; c.capacity * h], vec![0.0f32; c.capacity * h]);
    let mut d_weights = vec![0.0f32; c.idx.len()];
    for (i, slot) in m.slots.iter().enumerate().filter(|(_, s)| **s >= 0) {
        let (t, r) = (i / c.k, *slot as usize);
        x[r * h * size..][..h * size].copy_from_slice(&d.x.0[t * h * size..][..h * size]);
        w[r] = d.weights[i];
        d_w[i] = d.row_weights[r];
        for n in 0..h {
            let (v, dy) = (d.rows.1[r * h + n], d.x.1[t * h + n]);
            y[t * h + n] += d.weights[i] * v;
            y1[t * h + n] += v;
            d_rows[r * h + n] = d.weights[i] * dy;
            d_rows1[r * h + n] = dy;
        }
        d_weights[i] = inner(&d.x.1[t * h..][..h], &d.rows.1[r * h..][..h]);
    }
    let bytes = |v: &[f32]| rounded(dtype, v).0;
    let plain = |v: &[f32]| bytemuck::cast_slice::<f32, u8>(v).to_vec();
    [
        x,
        plain(&w),
        bytes(&y),
        bytes(&y1),
        plain(&d_w),
        bytes(&d_rows),
        bytes(&d_rows1),
        plain(&d_weights),
    ]
}

/// The inner product in the kernel's order, which must be near the exact one.
fn inner(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 32];
    for (n, (a, b)) in a.iter().zip(b).enumerate() {
        let lane = &mut lanes[n / 4 % 32];
        *lane = a.mul_add(*b, *lane);
    }
    for by in [16, 8, 4, 2, 1] {
        lanes = std::array::from_fn(|l| lanes[l] + lanes[l ^ by]);
    }
    let terms = || a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
    let bound = terms().map(f64::abs).sum::<f64>() * 1e-6;
    assert!((terms().sum::<f64>() - f64::from(lanes[0])).abs() <= bound);
    lanes[0]
}

/// Runs every kernel for rows with the map.
fn rows(u: Blocks, c: &Case, map: &DeviceMap, d: &Data) -> Results {
    let size = WIDE[u.src].size();
    let skip = c.shift * size;
    let input = |bytes: &[u8], skip: usize| {
        let m = Memory::new("in", ANY, bytes.len() + skip);
        m.write(&[vec![0; skip], bytes.to_vec()].concat());
        m
    };
    let (x, given) = (input(&d.x.0, skip), input(&d.rows.0, skip));
    let (w, row_w) = (
        input(bytemuck::cast_slice(&d.weights), 0),
        input(bytemuck::cast_slice(&d.row_weights), 0),
    );
    let (tokens, rows, choices) =
        (c.tokens * c.hidden * size, c.capacity * c.hidden * size, 4 * c.idx.len());
    let lens = [rows, 4 * c.capacity, tokens, tokens, choices, rows, rows, choices];
    let skips = [skip, 0, skip, skip, 0, skip, skip, 0];
    let outs: [Memory; 8] = std::array::from_fn(|i| poisoned(skips[i] + lens[i]));
    let at = |i: usize| outs[i].addr() + skips[i] as u64;
    let (x_at, given_at) = (x.addr() + skip as u64, given.addr() + skip as u64);
    let (k, h, a) = (c.k as u32, c.hidden as u32, &map.args);
    let names = [
        "tw_permute",
        "tw_permute_words",
        "tw_unpermute",
        "tw_unpermute_bwd",
        "tw_unpermute_bwd_weights",
    ];
    let [permute, words, unpermute, bwd, bwd_weights] = names.map(|n| u.lib.kernel(n));
    let grid = |n: usize, per: u32| [(n as u32).div_ceil(per), 1, 1];
    let block = [u.threads, 1, 1];
    let mut all = Vec::new();
    if c.capacity > 0 {
        let l = permute.grid(grid(c.capacity, 1), block).arg(&a.sources).arg(&a.status).arg(&k);
        all.push(l.arg(&x_at).arg(&at(0)).arg(&((c.hidden * size) as u64)));
        let l = words.grid(grid(c.capacity, u.threads), block).arg(&a.sources).arg(&a.status);
        all.push(l.arg(&(c.capacity as u32)).arg(&w.addr()).arg(&at(1)));
        for (i, weights) in [(5, w.addr()), (6, 0)] {
            let l = bwd.grid(grid(c.capacity, 1), block).arg(&a.sources).arg(&a.status).arg(&k);
            all.push(l.arg(&x_at).arg(&weights).arg(&at(i)).arg(&h));
        }
    }
    if !c.idx.is_empty() {
        for (i, weights) in [(2, w.addr()), (3, 0)] {
            let l = unpermute.grid(grid(c.tokens, 1), block).arg(&a.slots).arg(&a.status).arg(&k);
            all.push(l.arg(&given_at).arg(&weights).arg(&at(i)).arg(&h));
        }
        let l = words.grid(grid(c.idx.len(), u.threads), block).arg(&a.slots).arg(&a.status);
        all.push(l.arg(&a.choices).arg(&row_w.addr()).arg(&at(4)));
        let l = bwd_weights.grid(grid(c.idx.len(), u.threads / 32), block).arg(&a.slots);
        let l = l.arg(&a.status).arg(&k).arg(&a.choices).arg(&x_at).arg(&given_at);
        all.push(l.arg(&at(7)).arg(&h));
    }
    if !all.is_empty() {
        let memory = map.memory.iter().chain(&outs).chain([&x, &given, &w, &row_w]);
        Run::new(2).memory(memory).stream(0, all).go().unwrap();
    }
    std::array::from_fn(|i| result(&outs[i], skips[i], lens[i]))
}

fn check(u: Blocks, c: &Case) {
    let map = DeviceMap::new(u, c);
    map.route(u);
    let want = map_of(c);
    assert_eq!(map.read(c), want);
    assert_eq!(map.status(), 0);
    let d = Data::new(c, WIDE[u.src]);
    let (got, want) = (rows(u, c, &map, &d), expected(c, &want, &d, WIDE[u.src]));
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        let bad = got.iter().zip(want).position(|(a, b)| a != b);
        assert_eq!(bad, None, "result {i} of {} {}x{}", WIDE[u.src], c.tokens, c.hidden);
    }
}

fn every_size(u: Blocks) {
    let sizes =
        [[9, 8, 4, 2, 1], [1, 3, 1, 1, 4], [0, 4, 3, 2, 8], [90, 5, 7, 3, 8], [33, 136, 70, 4, 1]];
    for (seed, size) in sizes.into_iter().enumerate() {
        for cut in [0, 9] {
            check(u, &Case::new(2 * seed as u64 + u64::from(cut == 0), size, cut));
        }
    }
    // Rows that would be aligned, from an address that is not.
    check(u, &Case { shift: 1, ..Case::new(4, [9, 16, 4, 2, 2], 0) });
}

fn rows_and_gradients_of_every_type_and_size() {
    (0..3).for_each(|src| every_size(small(src)));
}

/// With the numbers of threads and choices that devices get.
fn a_routing_of_many_chunks() {
    let sizes = [PERMUTE_THREADS, PERMUTE_CHUNK];
    let u = unit(load(PERMUTE.emu_text(), 2, sizes), 2, sizes);
    check(u, &Case::new(1, [350, 2, 300, 7, 16], 100));
}

/// Whatever is made from a bad routing is 0xFF; the map is empty, and good again with the next.
fn bad_index(u: Blocks) {
    for bad in [5i64, -2, 1 << 40, i64::MIN] {
        let mut c = Case::new(2, [40, 6, 5, 4, 2], 0);
        c.wide = c.wide || i32::try_from(bad).is_err();
        c.idx[131] = bad;
        let map = DeviceMap::new(u, &c);
        map.route(u);
        assert_eq!(map.status(), PERMUTE_BAD_INDEX as i32);
        let (slots, sources) = (vec![-1; c.idx.len()], vec![-1; c.capacity]);
        let empty = Map { slots, sources, m_splits: vec![0; c.experts], totals: [0; 2] };
        assert_eq!(map.read(&c), empty);
        let d = Data::new(&c, WIDE[u.src]);
        for (i, out) in rows(u, &c, &map, &d).iter().enumerate() {
            assert!(out.iter().all(|b| *b == 0xff), "result {i} of a bad routing");
        }
    }
}

fn an_index_that_is_no_expert() {
    bad_index(small(1));
}

/// Mutants are of f32.
fn broken(text: String) -> &'static Lib {
    load(text, 0, SMALL)
}

fn sizes_f32(lib: &'static Lib) {
    every_size(unit(lib, 0, SMALL));
}

fn bad_f32(lib: &'static Lib) {
    bad_index(unit(lib, 0, SMALL));
}

fn mutants_of_permutation_are_killed() {
    all_are_killed(
        &PERMUTE.emu_text(),
        broken,
        ("permute/sm80_permute", "permute"),
        scenarios![bad_f32, sizes_f32],
    );
}
