//! `layers/sm80_layers.cu` and `layers/sm80_optimizer.cu` against the oracle.

use std::sync::OnceLock;

use bytemuck::{Pod, Zeroable};
use tilewire_core::{DType, Rng};
use tilewire_kernels::Source;
use tilewire_kernels::portable::{LAYERS, LAYERS_MANTISSAS, OPTIMIZER, layers_defines};
use tilewire_oracle::{Mat, nn};

use crate::compile::Unit;
use crate::host::{Launch, Lib, RUNTIME};
use crate::memory::{ANY, Memory};
use crate::planted::{Planted, all_are_killed};
use crate::run::Run;
use crate::{Test, tests};

pub const TESTS: &[Test] = tests![
    layers_of_every_type_are_the_oracles,
    the_optimizer_is_the_oracles,
    mutants_of_layers_are_killed,
    mutants_of_the_optimizer_are_killed,
];

const TYPES: [DType; 2] = [DType::F32, DType::BF16];
/// Fewer threads than on a device: several rounds with few columns.
const THREADS: u32 = 64;
const WARPS: usize = THREADS as usize / 32;
const EPS: f64 = 1e-5;
/// Shared memory that is the most any test asks for.
const SMEM: usize = 16 << 10;

fn load(source: &Source, text: String, t: usize) -> &'static Lib {
    let value = |(n, (_, v)): (&&'static str, (String, u64))| match *n {
        "TW_LAYERS_THREADS" => (*n, u64::from(THREADS)),
        _ => (*n, v),
    };
    let defines = layers_defines(LAYERS_MANTISSAS[t]);
    RUNTIME.load(&Unit {
        name: source.name,
        text,
        defines: source.defines.iter().zip(defines).map(value).collect(),
        kernels: source.kernels.to_vec(),
        smem: SMEM,
    })
}

fn layers(t: usize) -> &'static Lib {
    static LIBS: [OnceLock<&'static Lib>; 2] = [const { OnceLock::new() }; 2];
    LIBS[t].get_or_init(|| load(&LAYERS, LAYERS.emu_text(), t))
}

fn optimizer(t: usize) -> &'static Lib {
    static LIBS: [OnceLock<&'static Lib>; 2] = [const { OnceLock::new() }; 2];
    LIBS[t].get_or_init(|| load(&OPTIMIZER, OPTIMIZER.emu_text(), t))
}

/// A tensor on the emulated device.
struct On {
    memory: Memory,
    dtype: DType,
    shape: (usize, usize),
}

impl On {
    fn put(dtype: DType, m: &Mat) -> Self {
        let on = Self::room(dtype, m.rows, m.cols);
        on.memory.write(&m.to_bytes(dtype));
        on
    }

    fn room(dtype: DType, rows: usize, cols: usize) -> Self {
        let memory = Memory::new("tensor", ANY, (rows * cols * dtype.size()).max(1));
        memory.write(&vec![DType::POISON; memory.len_bytes()]);
        Self { memory, dtype, shape: (rows, cols) }
    }

    fn addr(&self) -> u64 {
        self.memory.addr()
    }

    fn get(&self) -> Mat {
        let bytes = self.memory.read::<u8>();
        Mat::from_bytes(self.shape.0, self.shape.1, self.dtype, &bytes)
    }

    /// Every element is `want` up to a rounding of the type and `tolerance` of its row's largest.
    fn close(&self, what: &str, want: &Mat, tolerance: f64) {
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

fn run(launches: Vec<Launch<'_>>, memory: &[&On]) {
    let all = memory.iter().map(|on| &on.memory);
    Run::new(3).memory(all).stream(0, launches).go().unwrap();
}

fn blocks(num: usize) -> ([u32; 3], [u32; 3]) {
    ([num as u32, 1, 1], [THREADS, 1, 1])
}

/// Test data: rows, columns, experts and choices of one size.
struct Case {
    t: usize,
    n: usize,
    d: usize,
    experts: usize,
    k: usize,
    rng: Rng,
}

fn cases(t: usize) -> Vec<Case> {
    [(50, 64, 8, 2), (3, 300, 40, 5), (9, 4, 3, 3)]
        .into_iter()
        .enumerate()
        .map(|(i, (n, d, experts, k))| Case { t, n, d, experts, k, rng: Rng::new(50 + i as u64) })
        .collect()
}

impl Case {
    fn dtype(&self) -> DType {
        TYPES[self.t]
    }

    fn random(&mut self, dtype: DType, rows: usize, cols: usize) -> Mat {
        Mat::random(&mut self.rng, rows, cols).rounded(dtype)
    }
}

fn embedding(lib: &'static Lib, c: &mut Case) {
    let (t, n, d) = (c.dtype(), c.n, c.d);
    let ids: Vec<usize> = (0..n).map(|_| c.rng.below(3) as usize * 100).collect();
    let tokens = Memory::new("tokens", ANY, n);
    tokens.write(&ids.iter().map(|&i| i as u8).collect::<Vec<u8>>());
    let tokens = On { memory: tokens, dtype: DType::U8, shape: (1, n) };
    let (table, dx) = (c.random(t, 256, d), c.random(DType::F32, n, d));
    let (at, dx_at) = (On::put(t, &table), On::put(DType::F32, &dx));
    let (x, g) = (On::room(DType::F32, n, d), On::room(DType::F32, 256, d));
    let (embed, bwd) = (lib.kernel("tw_embed"), lib.kernel("tw_embed_bwd"));
    let (grid, block) = blocks(n);
    let first = embed.grid(grid, block).arg(&tokens.addr()).arg(&at.addr()).arg(&x.addr());
    let splits = 3usize;
    let partial = On::room(DType::F32, splits, 256 * d);
    let (grid, block) = blocks(256 * d.div_ceil(4 * THREADS as usize) * splits);
    let second = bwd.grid(grid, block).arg(&tokens.addr()).arg(&dx_at.addr()).arg(&partial.addr());
    let second = second.arg(&(n as u32)).arg(&(d as u32)).arg(&(splits as u32));
    let sums = lib.kernel("tw_sum_rows");
    let (grid, block) = blocks((256 * d).div_ceil(32));
    let third = sums.grid(grid, block).arg(&partial.addr()).arg(&g.addr()).arg(&(splits as u32));
    let third = third.arg(&(256 * d as u32));
    let work = vec![first.arg(&(d as u32)), second, third];
    run(work, &[&tokens, &at, &dx_at, &x, &g, &partial]);
    x.close("embed", &nn::embedding(&table, &ids), 0.0);
    g.close("embed_bwd", &nn::embedding_bwd(&dx, &ids, 256), 1e-6);
}

/// `TwNorm`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Norm {
    at: [u64; 5],
    d: [u32; 2],
}

/// `TwNormBwd`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct NormBwd {
    at: [u64; 7],
    n: [u32; 2],
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
    let norm = Norm {
        at: [x_at.addr(), y_at.addr(), w_at.addr(), sum_at.addr(), out.addr()],
        d: [d as u32, 0],
    };
    let (sum_p, none) = (sum_at.addr(), 0u64);
    let bwd = NormBwd {
        at: [
            sum_p,
            w_at.addr(),
            dy_at.addr(),
            past_at.addr(),
            dx.addr(),
            if t == DType::F32 { none } else { narrow.addr() },
            partial.addr(),
        ],
        n: [n as u32, d as u32],
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

/// `TwHeads`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Heads {
    at: [u64; 6],
    sizes: [u32; 4],
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
        kernel.grid(grid, block).arg(&Heads {
            at: [rows.addr(), q.addr(), k.addr(), v.addr(), at.addr(), table_at.addr()],
            sizes: [heads as u32, kv as u32, dim as u32, join],
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

/// `TwRouter`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Router {
    at: [u64; 4],
    sizes: [u32; 4],
}

/// `TwRouterBwd`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RouterBwd {
    at: [u64; 6],
    scale: f32,
    sizes: [u32; 3],
}

fn router(lib: &'static Lib, c: &mut Case) {
    let (t, n, e, k) = (c.dtype(), c.n, c.experts, c.k);
    let mut logits = c.random(DType::F32, n, e);
    // Ties go to the lower expert.
    logits.row_mut(0).fill(0.5);
    let want = nn::router(&logits, k);
    let f32s = |rows, cols| On::room(DType::F32, rows, cols);
    let (at, probs, weights) = (On::put(DType::F32, &logits), f32s(n, e), f32s(n, k));
    let topk = On { memory: Memory::new("topk", ANY, 8 * n * k), dtype: DType::I64, shape: (n, k) };
    let (blocks_of_stats, d_w) = (2usize, c.random(DType::F32, n, k));
    let (partial, stats) = (f32s(blocks_of_stats, 2 * e), f32s(1, 2 * e));
    let (d_w_at, d_logits) = (On::put(DType::F32, &d_w), On::room(t, n, e));
    let sizes = [n as u32, e as u32, k as u32];
    let first = Router {
        at: [at.addr(), probs.addr(), topk.addr(), weights.addr()],
        sizes: [sizes[0], sizes[1], sizes[2], 0],
    };
    // d_aux E f_e / T, with f of all choices.
    let d_aux = 0.5;
    let bwd = RouterBwd {
        at: [
            probs.addr(),
            topk.addr(),
            weights.addr(),
            d_w_at.addr(),
            stats.addr(),
            d_logits.addr(),
        ],
        scale: (d_aux * e as f64 / (n * n * k) as f64) as f32,
        sizes,
    };
    let names = ["tw_router", "tw_router_stats", "tw_sum_rows", "tw_router_bwd"];
    let kernels = names.map(|k| lib.kernel(k));
    let launch = |i: usize, num: usize| {
        let (grid, block) = blocks(num);
        kernels[i].grid(grid, block)
    };
    let sums = launch(1, blocks_of_stats).smem((WARPS * 8 * e) as u32).arg(&probs.addr());
    let sums = sums.arg(&topk.addr()).arg(&partial.addr()).arg(&sizes[0]).arg(&sizes[1]);
    let all = launch(2, (2 * e).div_ceil(32)).arg(&partial.addr()).arg(&stats.addr());
    let work = vec![
        launch(0, n.div_ceil(WARPS)).arg(&first),
        sums.arg(&sizes[2]),
        all.arg(&(blocks_of_stats as u32)).arg(&(2 * e as u32)),
        launch(3, n.div_ceil(WARPS)).arg(&bwd),
    ];
    let memory = [&at, &probs, &weights, &topk, &partial, &stats, &d_w_at, &d_logits];
    run(work, &memory);
    assert_eq!(topk.memory.read::<i64>(), want.topk.idx, "choices");
    probs.close("probs", &want.probs, 2e-6);
    weights.close("weights", &want.weights, 2e-6);
    let counts = (0..e).map(|e| want.topk.idx.iter().filter(|&&i| i == e as i64).count() as f64);
    let sums = want.probs.col_sums();
    stats.close("stats", &Mat::new(1, 2 * e, counts.chain(sums).collect()), 1e-6);
    d_logits.close("router_bwd", &nn::router_bwd(&want, &d_w, d_aux), 2e-5);
}

/// `TwLoss`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Loss {
    at: [u64; 4],
    scale: f32,
    sizes: [u32; 3],
}

fn loss(lib: &'static Lib, c: &mut Case) {
    let (t, n, cols) = (c.dtype(), c.n, 37);
    let logits = c.random(DType::F32, n, cols).map(|v| 3.0 * v).rounded(DType::F32);
    // The first row does not count.
    let targets: Vec<i64> =
        (0..n).map(|r| if r == 0 { -1 } else { c.rng.below(cols as u64) as i64 }).collect();
    let want = nn::cross_entropy(&logits, &targets);
    let memory = Memory::new("targets", ANY, 4 * n);
    memory.write(&targets.iter().map(|&t| t as i32).collect::<Vec<i32>>());
    let at = On { memory, dtype: DType::I32, shape: (1, n) };
    let (logits_at, d_logits) = (On::put(DType::F32, &logits), On::room(t, n, cols));
    let (row_loss, total) = (On::room(DType::F32, 1, n), On::room(DType::F32, 1, 1));
    let scale = 1.0 / want.num_valid as f64;
    let p = Loss {
        at: [logits_at.addr(), at.addr(), row_loss.addr(), d_logits.addr()],
        scale: scale as f32,
        sizes: [n as u32, cols as u32, 0],
    };
    let kernels = ["tw_cross_entropy", "tw_total"].map(|k| lib.kernel(k));
    let ((grid, block), (one, _)) = (blocks(n.div_ceil(WARPS)), blocks(1));
    let first = kernels[0].grid(grid, block).arg(&p);
    let second = kernels[1].grid(one, block).arg(&row_loss.addr()).arg(&total.addr());
    let work = vec![first, second.arg(&scale).arg(&(n as u32))];
    run(work, &[&at, &logits_at, &d_logits, &row_loss, &total]);
    total.close("loss", &Mat::new(1, 1, vec![want.loss]), 2e-6);
    let grad = nn::cross_entropy_bwd(&logits, &targets, 1.0);
    d_logits.close("cross_entropy", &grad, 2e-6);
}

fn all_layers(lib: &'static Lib, t: usize) {
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

/// `TwAdamW`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Adam {
    at: [u64; 7],
    n: u64,
    hyper: [f64; 6],
    steps: [u32; 2],
}

const HYPER: [f64; 6] = [0.1, 0.9, 0.98, 1e-6, 0.01, 1.0];

/// Gradients' norm, a step from it, and the count: `loss` decides whether it is taken.
fn step(lib: &'static Lib, t: usize, (count, loss): (i32, f32)) {
    let (dtype, n, mut rng) = (TYPES[t], 131, Rng::new(8));
    let mut mat = |f: f64| Mat::random(&mut rng, 1, n).map(|v| f * v).rounded(DType::F32);
    let (w, g, m, v) = (mat(1.0), mat(2.0), mat(0.1), mat(0.1).map(|v| v * v).rounded(DType::F32));
    let put = |m: &Mat| On::put(DType::F32, m);
    let (w_at, master, g_at) = (On::put(dtype, &w.rounded(dtype)), put(&w), put(&g));
    let (m_at, v_at) = (put(&m), put(&v));
    let small = put(&Mat::new(1, 3, vec![f64::from(loss), 0.0, 0.0]));
    let counter = Memory::new("count", ANY, 4);
    counter.write(&[count]);
    let counter = On { memory: counter, dtype: DType::I32, shape: (1, 1) };
    let num = 3usize;
    let partial =
        On { memory: Memory::new("squares", ANY, 8 * num), dtype: DType::I64, shape: (1, num) };
    let p = Adam {
        at: [
            w_at.addr(),
            if dtype == DType::F32 { 0 } else { master.addr() },
            g_at.addr(),
            m_at.addr(),
            v_at.addr(),
            small.addr(),
            counter.addr(),
        ],
        n: n as u64,
        hyper: HYPER,
        steps: [10, 60],
    };
    let names = ["tw_square_sum", "tw_square_total", "tw_adamw", "tw_count_step"];
    let kernels = names.map(|k| lib.kernel(k));
    let launch = |i: usize, num: usize| {
        let (grid, block) = blocks(num);
        kernels[i].grid(grid, block)
    };
    let squares = launch(0, num).arg(&g_at.addr()).arg(&partial.addr()).arg(&(n as u64));
    let total = launch(1, 1).arg(&partial.addr()).arg(&(small.addr() + 4)).arg(&(num as u32));
    let counted = kernels[3].grid([1, 1, 1], [1, 1, 1]).arg(&small.addr()).arg(&counter.addr());
    let work = vec![squares, total, launch(2, 2).arg(&p), counted];
    let memory = [&w_at, &master, &g_at, &m_at, &v_at, &small, &counter, &partial];
    run(work, &memory);
    let norm = nn::grad_norm(std::slice::from_ref(&g));
    let sums = small.get();
    let have = (sums.at(0, 1) + sums.at(0, 2)).sqrt();
    assert!((have - norm).abs() < 1e-9 * norm, "norm {have} for {norm}");
    let own = if dtype == DType::F32 { &w_at } else { &master };
    if !loss.is_finite() {
        assert_eq!(own.get(), w, "no step is taken");
        assert_eq!((m_at.get(), v_at.get()), (m, v));
        assert_eq!(counter.memory.read::<i32>(), [count]);
        return;
    }
    let rate = match count {
        s if s < 10 => HYPER[0] * f64::from(s + 1) / 10.0,
        s => {
            let t = (f64::from(s - 10) / 50.0).min(1.0);
            HYPER[0] * (0.1 + 0.45 * (1.0 + (std::f64::consts::PI * t).cos()))
        }
    };
    let [_, beta1, beta2, eps, weight_decay, clip] = HYPER;
    let opt = nn::AdamW { lr: rate, beta1, beta2, eps, weight_decay };
    let before = nn::AdamWState { param: w, m, v, step: count as u32 };
    let after = nn::adamw_step(&opt, &before, &g.map(|g| g * (clip / norm).min(1.0)));
    own.close("weights", &after.param, 1e-6);
    m_at.close("first moment", &after.m, 1e-6);
    v_at.close("second moment", &after.v, 1e-6);
    assert_eq!(counter.memory.read::<i32>(), [count + 1]);
    if dtype != DType::F32 {
        w_at.close("narrow weights", &after.param, 1e-6);
    }
}

/// `TwInit`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Init {
    at: [u64; 2],
    n: u64,
    cols: u64,
    origin: [u64; 2],
    global_cols: u64,
    seed: u64,
    std: f64,
}

/// First values of a piece are those of the whole at its place.
fn init(lib: &'static Lib, t: usize) {
    let (rng, (rows, cols), (row0, col0, wide)) =
        (Rng::new(77), (7, 11), (5usize, 3usize, 29usize));
    let kernel = lib.kernel("tw_init");
    for std in [0.0, 0.5] {
        let (w, master) = (On::room(TYPES[t], rows, cols), On::room(DType::F32, rows, cols));
        let p = Init {
            at: [w.addr(), master.addr()],
            n: (rows * cols) as u64,
            cols: cols as u64,
            origin: [row0 as u64, col0 as u64],
            global_cols: wide as u64,
            seed: rng.key(),
            std,
        };
        let (grid, block) = blocks(1);
        run(vec![kernel.grid(grid, block).arg(&p)], &[&w, &master]);
        let normal = |i: u64| {
            let u = 1.0 - rng.f64_at(2 * i);
            (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * rng.f64_at(2 * i + 1)).cos()
        };
        let want = Mat::from_fn(rows, cols, |r, c| {
            let at = ((row0 + r) * wide + col0 + c) as u64;
            if std == 0.0 { 1.0 } else { std * normal(at) }
        });
        master.close("master", &want, 1e-7);
        w.close("first values", &want, 1e-7);
    }
}

fn whole_optimizer(lib: &'static Lib, t: usize) {
    for at in [(0, 1.0), (9, 2.0), (10, 2.0), (35, 0.5), (90, 0.5), (3, f32::NAN)] {
        step(lib, t, at);
    }
    init(lib, t);
}

fn the_optimizer_is_the_oracles() {
    (0..2).for_each(|t| whole_optimizer(optimizer(t), t));
}

fn planted_layers(lib: &'static Lib) {
    all_layers(lib, 1);
}

fn planted_optimizer(lib: &'static Lib) {
    whole_optimizer(lib, 1);
}

const OF_LAYERS: &[Planted] = &[
    Planted(
        "a token's first row only",
        "mine && i < num; i++",
        "mine && i < min(num, 1u); i++",
        planted_layers,
    ),
    Planted(
        "columns of the first block",
        "blockIdx.x / 256 % parts * THREADS + threadIdx.x",
        "threadIdx.x",
        planted_layers,
    ),
    Planted("the sum is not stored", "((float4*)(a.sum + at))[i] = v;", "", planted_layers),
    Planted(
        "the norm of x alone",
        "keep[i] = v;",
        "keep[i] = ((const float4*)(a.x + at))[i];",
        planted_layers,
    ),
    Planted(
        "the gradient past the norm is lost",
        "if (a.residual) o =",
        "if (false) o =",
        planted_layers,
    ),
    Planted(
        "a block's first row only",
        "row += gridDim.x) {\n        u64 at",
        "row += a.n) {\n        u64 at",
        planted_layers,
    ),
    Planted(
        "sums of another row's columns",
        "partial[r * cols + c]",
        "partial[r * cols + lane]",
        planted_layers,
    ),
    Planted(
        "warps are not added",
        "for (u32 w = 1; w < WARPS; w++) sum += sums[w][lane];",
        "",
        planted_layers,
    ),
    Planted(
        "joining turns again",
        "float t = a.join ? -s[n] : s[n], first",
        "float t = s[n], first",
        planted_layers,
    ),
    Planted(
        "keys lie among queries",
        "(row * a.kv_heads + h - a.heads)",
        "(row * a.kv_heads + h - a.heads + 1)",
        planted_layers,
    ),
    Planted(
        "values are not copied",
        "u32 values = a.kv_heads * a.dim / 8;",
        "u32 values = 0;",
        planted_layers,
    ),
    Planted(
        "ties go to the higher",
        "(p == best && e < expert)",
        "(p == best && e > expert)",
        planted_layers,
    ),
    Planted("a tie is chosen once", "(p == last && e > at)", "false", planted_layers),
    Planted("weights are not scaled", "weights[j] /= sum;", "weights[j] /= 1;", planted_layers),
    Planted(
        "one warp's choices",
        "for (u32 w = 0; w < WARPS; w++) sum += all[w * cols + c];",
        "sum = all[c];",
        planted_layers,
    ),
    Planted(
        "choices are not counted",
        "mine[topk[row * k + j]] += 1;",
        "mine[topk[row * k + j]] += 0;",
        planted_layers,
    ),
    Planted("the load does not matter", "d = a.load[e] * a.scale;", "d = 0;", planted_layers),
    Planted(
        "the mean is not taken off",
        "(d_weights[j] - mean) / sum",
        "d_weights[j] / sum",
        planted_layers,
    ),
    Planted("the softmax is not differentiated", "p * (d - dot)", "p * d", planted_layers),
    Planted("rows that do not count", "target < 0 ? 0.0f : a.scale", "a.scale", planted_layers),
    Planted(
        "the target's own gradient",
        "((int)c == target ? 1.0f : 0.0f)",
        "0.0f",
        planted_layers,
    ),
    Planted(
        "one thread's losses",
        "if (threadIdx.x < half) sums",
        "if (false) sums",
        planted_layers,
    ),
];

const OF_OPTIMIZER: &[Planted] = &[
    Planted(
        "squares of whole quads only",
        "for (u64 i = n / 4 * 4 + first;",
        "for (u64 i = n;",
        planted_optimizer,
    ),
    Planted(
        "a block's squares only",
        "for (u32 i = threadIdx.x; i < n; i += THREADS) sum += partial[i];",
        "sum = partial[0];",
        planted_optimizer,
    ),
    Planted(
        "no low part",
        "out[1] = (float)(sum - (double)out[0]);",
        "out[1] = 0;",
        planted_optimizer,
    ),
    Planted("poison is learned", "if (!tw_step_is_taken(a.small)) return;", "", planted_optimizer),
    Planted(
        "poison is counted",
        "if (tw_step_is_taken(small)) *count",
        "*count",
        planted_optimizer,
    ),
    Planted("no clipping", "clip < 1.0 ? clip : 1.0", "1.0", planted_optimizer),
    Planted("no warm-up", "if (step < a.warmup) return", "if (false) return", planted_optimizer),
    Planted("no end of the decay", "(t < 1.0 ? t : 1.0)", "t", planted_optimizer),
    Planted("bias of the first moment", "m * f.first", "m", planted_optimizer),
    Planted("bias of the second moment", "sqrtf(v * f.second)", "sqrtf(v)", planted_optimizer),
    Planted("weights do not decay", "+ decay * w", "", planted_optimizer),
    Planted(
        "the master is forgotten",
        "        master[i] = w;\n        if",
        "        if",
        planted_optimizer,
    ),
    Planted(
        "weights are forgotten",
        "if (a.master) a.w[i] =",
        "if (false) a.w[i] =",
        planted_optimizer,
    ),
    Planted(
        "another place",
        "(a.row0 + i / a.cols) * a.global_cols + a.col0",
        "i / a.cols * a.cols",
        planted_optimizer,
    ),
    Planted("ones are random", "if (a.std != 0) {", "if (true) {", planted_optimizer),
];

fn broken_layers(text: String) -> &'static Lib {
    load(&LAYERS, text, 1)
}

fn broken_optimizer(text: String) -> &'static Lib {
    load(&OPTIMIZER, text, 1)
}

fn mutants_of_layers_are_killed() {
    all_are_killed(&LAYERS.emu_text(), broken_layers, OF_LAYERS);
}

fn mutants_of_the_optimizer_are_killed() {
    all_are_killed(&OPTIMIZER.emu_text(), broken_optimizer, OF_OPTIMIZER);
}
