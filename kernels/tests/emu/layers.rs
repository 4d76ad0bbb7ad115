//! `layers/sm80_layers.cu` against the oracle.

use std::sync::OnceLock;

use bytemuck::{Pod, Zeroable};
use tilewire_core::{DType, Rng};
use tilewire_kernels::Source;
use tilewire_kernels::portable::{LAYERS, LAYERS_MANTISSAS, layers_defines};
use tilewire_oracle::{Mat, nn};

use crate::compile::Unit;
use crate::host::{Launch, Lib, RUNTIME};
use crate::memory::{ANY, Memory};
use crate::planted::{Planted, all_are_killed};
use crate::run::Run;
use crate::{Test, tests};

pub const TESTS: &[Test] =
    tests![layers_of_every_type_are_the_oracles, mutants_of_layers_are_killed,];

pub const TYPES: [DType; 2] = [DType::F32, DType::BF16];
/// Fewer threads than on a device: several rounds with few columns.
pub const THREADS: u32 = 64;
const WARPS: usize = THREADS as usize / 32;
const EPS: f64 = 1e-5;
/// Shared memory that is the most any test asks for.
const SMEM: usize = 16 << 10;

pub fn load(source: &Source, text: String, t: usize) -> &'static Lib {
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
struct Case {
    t: usize,
    n: usize,
    d: usize,
    experts: usize,
    k: usize,
    rng: Rng,
}

fn cases(t: usize) -> Vec<Case> {
    [(50, 64, 8, 2), (3, 300, 70, 5), (9, 4, 3, 3), (2, 8, 300, 4)]
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
    // Of the first there are so many that they are added in several turns, where there are many rows.
    let ids: Vec<usize> = (0..n).map(|_| c.rng.below(8).saturating_sub(5) as usize * 100).collect();
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
    let rows_blocks = n.div_ceil(if e <= 64 { 4 * WARPS } else { WARPS });
    let sums = launch(1, blocks_of_stats).smem((WARPS * 8 * e) as u32).arg(&probs.addr());
    let sums = sums.arg(&topk.addr()).arg(&partial.addr()).arg(&sizes[0]).arg(&sizes[1]);
    let all = launch(2, (2 * e).div_ceil(32)).arg(&partial.addr()).arg(&stats.addr());
    let work = vec![
        launch(0, rows_blocks).arg(&first),
        sums.arg(&sizes[2]),
        all.arg(&(blocks_of_stats as u32)).arg(&(2 * e as u32)),
        launch(3, rows_blocks).arg(&bwd),
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
    let (t, n, cols) = (c.dtype(), c.n, c.experts.max(37));
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

/// Rows of one token by the hundred.
fn many_rows(lib: &'static Lib, t: usize) {
    let c = Case { t, n: 2000, d: 4, experts: 3, k: 1, rng: Rng::new(60) };
    embedding(lib, &mut { c });
}

fn all_layers(lib: &'static Lib, t: usize) {
    many_rows(lib, t);
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

fn planted_layers(lib: &'static Lib) {
    all_layers(lib, 1);
}

const OF_LAYERS: &[Planted] = &[
    Planted(
        "a token's first row only",
        "mine && i < num; i += AHEAD",
        "mine && i < min(num, 1u); i += LIST",
        planted_layers,
    ),
    Planted(
        "a full list goes on",
        "num + ROUND <= LIST && r0 + ROUND < end",
        "r0 + ROUND < end",
        planted_layers,
    ),
    Planted("a list is added again", "num = 0;\n        // The list is read.", "", planted_layers),
    Planted(
        "tokens of one lane in turn",
        "rows[at++] = r + j;",
        "rows[at] = r + j;",
        planted_layers,
    ),
    Planted("a row of a warp", "threadIdx.x) / LANES", "threadIdx.x) / 32", planted_layers),
    Planted("rows beyond the end", "is && lane < k ?", "lane < k ?", planted_layers),
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
        "mine[pick[r]] += 1;",
        "mine[pick[r]] += 0;",
        planted_layers,
    ),
    Planted("the load does not matter", "a.load[e] * a.scale :", "0.0f :", planted_layers),
    Planted(
        "the mean is not taken off",
        "(d_weights[j] - mean) / sum",
        "d_weights[j] / sum",
        planted_layers,
    ),
    Planted(
        "the softmax is not differentiated",
        "p[i] * (d[i] - dot)",
        "p[i] * d[i]",
        planted_layers,
    ),
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

fn broken_layers(text: String) -> &'static Lib {
    load(&LAYERS, text, 1)
}

fn mutants_of_layers_are_killed() {
    all_are_killed(&LAYERS.emu_text(), broken_layers, OF_LAYERS);
}
