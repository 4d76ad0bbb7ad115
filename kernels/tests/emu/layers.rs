//! `layers/sm80_layers.cu` against the oracle.

use bytemuck::Zeroable;
use std::sync::OnceLock;

use tilewire_core::{DType, Rng};
use tilewire_kernels::Source;
use tilewire_kernels::abi::{TwEmbedBwd, TwHeads, TwLoss, TwNorm, TwNormBwd};
use tilewire_kernels::portable::{
    LAYERS, LAYERS_KEPT, LAYERS_MANTISSAS, layers_defines, optimizer_defines,
};
use tilewire_oracle::{Mat, nn};

use crate::compile::Unit;
use crate::host::{Launch, Lib, RUNTIME};
use crate::layers_mutants::mutants_of_layers_are_killed;
use crate::layers_router::{poisoned_rows, router, routers_of_every_width};
use crate::memory::{ANY, Memory};
use crate::run::Run;
use crate::{Test, tests};

pub const TESTS: &[Test] = tests![
    layers_of_every_type_are_the_oracles,
    routers_of_every_width,
    mutants_of_layers_are_killed,
];

pub const TYPES: [DType; 2] = [DType::F32, DType::BF16];
/// Fewer threads than on a device: several rounds with few columns.
pub const THREADS: u32 = 64;
pub const WARPS: usize = THREADS as usize / 32;
/// Rows that a block sorts; of a chunk of a token; and chunks of a token from which on they grow.
const TOKENS: usize = 128;
const CHUNK: usize = 4;
const CHUNKS: usize = 3;
const EPS: f64 = 1e-5;
/// Shared memory that is the most any test asks for.
const SMEM: usize = 16 << 10;

pub fn load(source: &Source, text: String, t: usize) -> &'static Lib {
    let value = |(n, (_, v)): (&&'static str, (String, u64))| match *n {
        "TW_LAYERS_THREADS" => (*n, u64::from(THREADS)),
        "TW_LAYERS_TOKENS" => (*n, TOKENS as u64),
        "TW_LAYERS_CHUNK" => (*n, CHUNK as u64),
        "TW_LAYERS_CHUNKS" => (*n, CHUNKS as u64),
        _ => (*n, v),
    };
    let defines = match source.name == LAYERS.name {
        true => layers_defines(LAYERS_MANTISSAS[t]),
        false => optimizer_defines(LAYERS_MANTISSAS[t]),
    };
    RUNTIME.load(&Unit {
        name: source.name,
        text,
        defines: source.defines.iter().zip(defines).map(value).collect(),
        kernels: source.kernels.to_vec(),
        smem: SMEM,
    })
}

pub fn layers(t: usize) -> &'static Lib {
    static LIBS: [OnceLock<&'static Lib>; 2] = [const { OnceLock::new() }; 2];
    LIBS[t].get_or_init(|| load(&LAYERS, LAYERS.emu_text(), t))
}

/// A tensor on the emulated device.
pub struct On {
    pub memory: Memory,
    pub dtype: DType,
    pub shape: (usize, usize),
}

impl On {
    pub fn put(dtype: DType, m: &Mat) -> Self {
        let on = Self::room(dtype, m.rows, m.cols);
        on.memory.write(&m.to_bytes(dtype));
        on
    }

    pub fn room(dtype: DType, rows: usize, cols: usize) -> Self {
        let memory = Memory::new("tensor", ANY, (rows * cols * dtype.size()).max(1));
        memory.write(&vec![DType::POISON; memory.len_bytes()]);
        Self { memory, dtype, shape: (rows, cols) }
    }

    pub fn addr(&self) -> u64 {
        self.memory.addr()
    }

    pub fn get(&self) -> Mat {
        let bytes = self.memory.read::<u8>();
        Mat::from_bytes(self.shape.0, self.shape.1, self.dtype, &bytes)
    }

    /// Every element is `want` up to a rounding of the type and `tolerance` of its row's largest.
    pub fn close(&self, what: &str, want: &Mat, tolerance: f64) {
        let got = self.get();
        let unit = if self.dtype == DType::BF16 { 2f64.powi(-7) } else { 0.0 };
        for r in 0..want.rows {
            let most = want.row(r).iter().fold(0.0f64, |m, v| m.max(v.abs()));
            for c in 0..want.cols {
                let (g, w) = (got.at(r, c), want.at(r, c));
                let bound = tolerance * most + unit * w.abs() + 1e-12;
                assert!((g - w).abs() <= bound, "{what} [{r}, {c}]: {g} for {w}");
            }
        }
    }
}

pub fn run(launches: Vec<Launch<'_>>, memory: &[&On]) {
    let all = memory.iter().map(|on| &on.memory);
    Run::new(3).memory(all).stream(0, launches).go().unwrap();
}

pub fn blocks(num: usize) -> ([u32; 3], [u32; 3]) {
    ([num as u32, 1, 1], [THREADS, 1, 1])
}

/// Test data: rows, columns, experts and choices of one size.
pub struct Case {
    pub t: usize,
    pub n: usize,
    pub d: usize,
    pub experts: usize,
    pub k: usize,
    pub rng: Rng,
}

fn cases(t: usize) -> Vec<Case> {
    // Fewer and more choices than a row has lanes; rows in whole quads, and not.
    [
        (50, 64, 8, 2),
        (3, 300, 70, 5),
        (9, 4, 3, 3),
        (2, 8, 300, 4),
        (20, 8, 12, 7),
        (11, 4, 200, 18),
    ]
    .into_iter()
    .enumerate()
    .map(|(i, (n, d, experts, k))| Case { t, n, d, experts, k, rng: Rng::new(50 + i as u64) })
    .collect()
}

impl Case {
    pub fn dtype(&self) -> DType {
        TYPES[self.t]
    }

    pub fn random(&mut self, dtype: DType, rows: usize, cols: usize) -> Mat {
        Mat::random(&mut self.rng, rows, cols).rounded(dtype)
    }
}

fn embedding(lib: &'static Lib, c: &mut Case) {
    let (t, n, d) = (c.dtype(), c.n, c.d);
    // Of the first there are so many that they are added in several turns, where there are many
    // rows.
    let ids: Vec<usize> = (0..n).map(|_| c.rng.below(8).saturating_sub(5) as usize * 100).collect();
    let tokens = Memory::new("tokens", ANY, n);
    tokens.write(&ids.iter().map(|&i| i as u8).collect::<Vec<u8>>());
    let tokens = On { memory: tokens, dtype: DType::U8, shape: (1, n) };
    let (table, dx) = (c.random(t, 256, d), c.random(DType::F32, n, d));
    let (at, dx_at) = (On::put(t, &table), On::put(DType::F32, &dx));
    let (x, g) = (On::room(DType::F32, n, d), On::room(DType::F32, 256, d));
    // Once more, with the tickets as the first launch leaves them.
    let again = On::room(DType::F32, 256, d);
    let embed = lib.kernel("tw_embed");
    let (grid, block) = blocks(n);
    let first = embed.grid(grid, block).arg(&tokens.addr()).arg(&at.addr()).arg(&x.addr());
    let (sorters, chunks) = (n.div_ceil(TOKENS), n / CHUNK + 256);
    let parts = d.div_ceil(4 * THREADS as usize);
    let partial = On::room(DType::F32, chunks, d);
    let words = |num: usize| On::room(DType::I32, 1, num);
    let (counts, order, starts) = (words(256 * sorters), words(n), words(2 * 257));
    let tickets = words(256 * parts);
    tickets.memory.write(&vec![0u8; tickets.memory.len_bytes()]);
    let with = |grad: &On| TwEmbedBwd {
        tokens: tokens.addr(),
        dx: dx_at.addr(),
        grad: grad.addr(),
        partial: partial.addr(),
        counts: counts.addr(),
        order: order.addr(),
        starts: starts.addr(),
        tickets: tickets.addr(),
        n: n as u32,
        d: d as u32,
    };
    let mut work = vec![first.arg(&(d as u32))];
    let kernels = ["tw_embed_count", "tw_embed_place", "tw_embed_bwd"].map(|k| lib.kernel(k));
    for p in [with(&g), with(&again)] {
        for (kernel, num) in kernels.iter().zip([sorters, sorters, chunks * parts]) {
            let (grid, block) = blocks(num);
            work.push(kernel.grid(grid, block).arg(&p));
        }
    }
    let scratch = [&partial, &counts, &order, &starts, &tickets];
    run(work, &[&[&tokens, &at, &dx_at, &x, &g, &again][..], &scratch].concat());
    x.close("embed", &nn::embedding(&table, &ids), 0.0);
    g.close("embed_bwd", &nn::embedding_bwd(&dx, &ids, 256), 1e-6);
    assert_eq!(g.memory.read::<u8>(), again.memory.read::<u8>(), "embed_bwd again");
    assert_eq!(tickets.memory.read::<u32>(), vec![0; 256 * parts]);
}

fn norms(lib: &'static Lib, c: &mut Case) {
    let (t, n, d) = (c.dtype(), c.n, c.d);
    let (x, y, w) = (c.random(DType::F32, n, d), c.random(t, n, d), c.random(t, 1, d));
    let (dy, past) = (c.random(t, n, d), c.random(DType::F32, n, d));
    let sum = x.add(&y).rounded(DType::F32);
    let (want_dx, want_dw) = nn::rms_norm_bwd(&sum, &w.data, EPS, &dy);
    let (x_at, y_at, w_at) = (On::put(DType::F32, &x), On::put(t, &y), On::put(t, &w));
    let (dy_at, past_at) = (On::put(t, &dy), On::put(DType::F32, &past));
    let (sum_at, out) = (On::room(DType::F32, n, d), On::room(t, n, d));
    let (dx, narrow) = (On::room(DType::F32, n, d), On::room(t, n, d));
    // Fewer blocks than rows: a block sums over several.
    let num = 2;
    let (partial, dw) = (On::room(DType::F32, num, d), On::room(DType::F32, 1, d));
    let norm = TwNorm {
        x: x_at.addr(),
        y: y_at.addr(),
        w: w_at.addr(),
        sum: sum_at.addr(),
        out: out.addr(),
        d: d as u32,
        pad: 0,
    };
    let bwd = TwNormBwd {
        x: sum_at.addr(),
        w: w_at.addr(),
        dy: dy_at.addr(),
        residual: past_at.addr(),
        dx: dx.addr(),
        narrow: if t == DType::F32 { 0 } else { narrow.addr() },
        partial: partial.addr(),
        n: n as u32,
        d: d as u32,
    };
    let kernels = ["tw_add_norm", "tw_norm_bwd", "tw_sum_rows"].map(|k| lib.kernel(k));
    let launch = |i: usize, num: usize| {
        let (grid, block) = blocks(num);
        kernels[i].grid(grid, block)
    };
    let sums = launch(2, d.div_ceil(32)).arg(&partial.addr()).arg(&dw.addr());
    let work = vec![
        launch(0, n).smem(4 * d as u32).arg(&norm),
        launch(1, num).smem((d * (8 + t.size())) as u32).arg(&bwd),
        sums.arg(&(num as u32)).arg(&(d as u32)),
    ];
    let memory =
        [&x_at, &y_at, &w_at, &dy_at, &past_at, &sum_at, &out, &dx, &narrow, &partial, &dw];
    run(work, &memory);
    sum_at.close("sum", &sum, 1e-7);
    out.close("norm", &nn::rms_norm(&sum, &w.data, EPS), 3e-6);
    dx.close("norm_bwd", &want_dx.add(&past), 5e-6);
    dw.close("dw", &Mat::new(1, d, want_dw), 5e-6);
    if t != DType::F32 {
        narrow.close("narrow", &want_dx.add(&past), 5e-6);
    }
}

fn heads(lib: &'static Lib, c: &mut Case) {
    let (t, n, (heads, kv, dim)) = (c.dtype(), c.n, (4, 2, 16));
    let width = (heads + 2 * kv) * dim;
    let positions: Vec<usize> = (0..n).map(|_| c.rng.below(9) as usize).collect();
    let rows = c.random(t, n, width);
    let spec = nn::RopeSpec { head_dim: dim, base: 1e4, style: nn::RopeStyle::HalfSplit };
    let turned = nn::rope(&rows.slice_cols(0..(heads + kv) * dim), &positions, spec);
    let angle = |p: usize, i: usize| p as f64 * 1e4f64.powf(-2.0 * i as f64 / dim as f64);
    let table = Mat::from_fn(9, dim, |p, i| match i < dim / 2 {
        true => angle(p, i).cos(),
        false => angle(p, i - dim / 2).sin(),
    });
    let at = Memory::new("positions", ANY, 4 * n);
    at.write(&positions.iter().map(|&p| p as i32).collect::<Vec<i32>>());
    let at = On { memory: at, dtype: DType::I32, shape: (1, n) };
    let (rows_at, table_at) = (On::put(t, &rows), On::put(DType::F32, &table));
    let [q, k, v] = [heads, kv, kv].map(|h| On::room(t, n, h * dim));
    let back = On::room(t, n, width);
    let kernel = lib.kernel("tw_heads");
    let launch = |rows: &On, join: u32| {
        let (grid, block) = blocks(n);
        kernel.grid(grid, block).arg(&TwHeads {
            rows: rows.addr(),
            q: q.addr(),
            k: k.addr(),
            v: v.addr(),
            positions: at.addr(),
            table: table_at.addr(),
            heads: heads as u32,
            kv_heads: kv as u32,
            dim: dim as u32,
            join,
        })
    };
    let memory = [&at, &rows_at, &table_at, &q, &k, &v, &back];
    run(vec![launch(&rows_at, 0), launch(&back, 1)], &memory);
    let end = heads * dim;
    q.close("q", &turned.slice_cols(0..end), 1e-6);
    k.close("k", &turned.slice_cols(end..end + kv * dim), 1e-6);
    v.close("v", &rows.slice_cols(end + kv * dim..width), 0.0);
    // Twice rounded in bf16.
    back.close("joined", &rows, if t == DType::F32 { 1e-6 } else { 1e-2 });
}

/// Lanes of a row of so many classes.
pub fn lanes(classes: usize) -> u32 {
    classes.div_ceil(LAYERS_KEPT as usize).next_power_of_two().max(4) as u32
}

/// A ticket that no block has taken.
fn ticket() -> On {
    let on = On::room(DType::I32, 1, 1);
    on.memory.write(&[0u8; 4]);
    on
}

/// Blocks of router, its gradient and loss: fewer than there are rows for.
pub const BLOCKS: usize = 2;

/// The losses of two launches in turn, and the gradient.
fn losses(lib: &'static Lib, t: DType, logits: &Mat, targets: &[i64], scale: f64) -> ([On; 2], On) {
    let (n, cols) = (logits.rows, logits.cols);
    let memory = Memory::new("targets", ANY, 4 * n);
    memory.write(&targets.iter().map(|&t| t as i32).collect::<Vec<i32>>());
    let at = On { memory, dtype: DType::I32, shape: (1, n) };
    let (logits_at, d_logits) = (On::put(DType::F32, logits), On::room(t, n, cols));
    let (partial, ticket) = (On::room(DType::I64, 1, BLOCKS), ticket());
    let totals = [0, 1].map(|_| On::room(DType::F32, 1, 1));
    let kernel = lib.kernel("tw_cross_entropy");
    let launch = |total: &On| {
        let (grid, block) = blocks(BLOCKS);
        let p = TwLoss {
            logits: logits_at.addr(),
            targets: at.addr(),
            d_logits: d_logits.addr(),
            loss: total.addr(),
            partial: partial.addr(),
            ticket: ticket.addr(),
            scale,
            n: n as u32,
            cols: cols as u32,
            lanes: lanes(cols),
            pad: 0,
        };
        kernel.grid(grid, block).arg(&p)
    };
    let work = totals.iter().map(launch).collect();
    run(work, &[&at, &logits_at, &d_logits, &partial, &ticket, &totals[0], &totals[1]]);
    (totals, d_logits)
}

fn loss(lib: &'static Lib, c: &mut Case) {
    let (t, n, cols) = (c.dtype(), c.n, c.experts.max(37));
    let logits = c.random(DType::F32, n, cols).map(|v| 3.0 * v).rounded(DType::F32);
    // The first row does not count.
    let targets: Vec<i64> =
        (0..n).map(|r| if r == 0 { -1 } else { c.rng.below(cols as u64) as i64 }).collect();
    let want = nn::cross_entropy(&logits, &targets);
    let scale = 1.0 / want.num_valid as f64;
    let (totals, d_logits) = losses(lib, t, &logits, &targets, scale);
    for total in totals {
        total.close("loss", &Mat::new(1, 1, vec![want.loss]), 2e-6);
    }
    let grad = nn::cross_entropy_bwd(&logits, &targets, 1.0);
    d_logits.close("cross_entropy", &grad, 2e-6);
}

/// A row that does not count may be no number; of one that counts the loss is none either, nor of a
/// target that is no class.
pub fn poisoned_losses(lib: &'static Lib) {
    let (mut rng, n, cols) = (Rng::new(71), 40, 60);
    let good = Mat::random(&mut rng, n, cols).rounded(DType::F32);
    let mut bad = good.clone();
    bad.row_mut(5)[59] = f64::NAN;
    let mut targets: Vec<i64> = (0..n).map(|r| r as i64).collect();
    targets[5] = -1;
    let want = nn::cross_entropy(&good, &targets);
    let scale = 1.0 / want.num_valid as f64;
    let (totals, d_logits) = losses(lib, DType::BF16, &bad, &targets, scale);
    totals[0].close("loss", &Mat::new(1, 1, vec![want.loss]), 2e-6);
    d_logits.close("gradient", &nn::cross_entropy_bwd(&good, &targets, 1.0), 2e-6);
    for (wrong, logits) in [(5, &bad), (60, &good)] {
        targets[5] = wrong;
        let (totals, _) = losses(lib, DType::BF16, logits, &targets, scale);
        assert!(totals[0].get().at(0, 0).is_nan(), "target {wrong}");
    }
}

/// Rows of one token by the hundred.
fn many_rows(lib: &'static Lib, t: usize) {
    // Of many columns, too.
    for (n, d) in [(2000, 4), (60, 300)] {
        embedding(lib, &mut Case { t, n, d, experts: 3, k: 1, rng: Rng::new(60) });
    }
}

pub fn all_layers(lib: &'static Lib, t: usize) {
    many_rows(lib, t);
    few_chunks(lib);
    poisoned_rows(lib);
    if TYPES[t] == DType::BF16 {
        poisoned_losses(lib);
    }
    for mut c in cases(t) {
        embedding(lib, &mut c);
        norms(lib, &mut c);
        heads(lib, &mut c);
        router(lib, &mut c);
        loss(lib, &mut c);
    }
}

fn layers_of_every_type_are_the_oracles() {
    (0..2).for_each(|t| all_layers(layers(t), t));
}

/// A token with many rows has few chunks: more would not find room where the blocks end.
pub fn few_chunks(lib: &'static Lib) {
    let rows = 100usize;
    let words = |num: usize| On::room(DType::I32, 1, num);
    let (tokens, counts, order) = (words(rows.div_ceil(4)), words(256), words(rows));
    let starts = words(2 * 257);
    tokens.memory.write(&vec![9u8; tokens.memory.len_bytes()]);
    let p = TwEmbedBwd {
        tokens: tokens.addr(),
        counts: counts.addr(),
        order: order.addr(),
        starts: starts.addr(),
        n: rows as u32,
        d: 4,
        ..TwEmbedBwd::zeroed()
    };
    let kernels = ["tw_embed_count", "tw_embed_place"].map(|k| lib.kernel(k));
    let (grid, block) = blocks(1);
    let work = kernels.iter().map(|k| k.grid(grid, block).arg(&p)).collect();
    run(work, &[&tokens, &counts, &order, &starts]);
    let starts = starts.memory.read::<u64>();
    assert_eq!(starts[9], 9 << 32);
    assert_eq!(starts[10], (9 + CHUNKS as u64) << 32 | rows as u64);
    assert_eq!(order.memory.read::<u32>(), (0..rows as u32).collect::<Vec<_>>());
}
