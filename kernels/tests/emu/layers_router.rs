//! Router and its gradient against the oracle.

use tilewire_core::{DType, Rng};
use tilewire_kernels::abi::{TwRouter, TwRouterBwd};
use tilewire_kernels::portable::LAYERS_KEPT;
use tilewire_oracle::{Mat, nn};

use crate::host::{Launch, Lib};
use crate::layers::{BLOCKS, Case, On, WARPS, blocks, lanes, layers, run};
use crate::memory::{ANY, Memory};

/// So many words of 64 bits that are 0.
fn zeros(n: usize) -> On {
    let on = On { memory: Memory::new("sums", ANY, 8 * n), dtype: DType::I64, shape: (1, n) };
    on.memory.write(&vec![0u8; 8 * n]);
    on
}

/// What a router leaves: probabilities, choices, weights, and sums of two launches in turn.
struct Routed {
    n: usize,
    e: usize,
    /// Elements of memory before the first of `at` and `probs`.
    skip: usize,
    at: On,
    probs: On,
    topk: On,
    weights: On,
    stats: [On; 2],
    sums: On,
}

impl Routed {
    fn room(logits: &Mat, k: usize) -> Self {
        Self::skipping(0, logits, k)
    }

    fn skipping(skip: usize, logits: &Mat, k: usize) -> Self {
        let (n, e) = (logits.rows, logits.cols);
        let before = (0..skip).map(|_| 0.0).chain(logits.data.iter().copied());
        let f32s = |rows, cols| On::room(DType::F32, rows, cols);
        let topk =
            On { memory: Memory::new("topk", ANY, 8 * n * k), dtype: DType::I64, shape: (n, k) };
        Self {
            n,
            e,
            skip,
            at: On::put(DType::F32, &Mat::new(1, skip + n * e, before.collect())),
            probs: f32s(1, skip + n * e),
            topk,
            weights: f32s(n, k),
            stats: [f32s(1, 2 * e), f32s(1, 2 * e)],
            sums: zeros(2 * e),
        }
    }

    fn all(&self) -> [&On; 7] {
        let [a, b] = &self.stats;
        [&self.at, &self.probs, &self.topk, &self.weights, a, b, &self.sums]
    }

    fn launches(&self, lib: &'static Lib) -> Vec<Launch<'static>> {
        let (n, e, k) = (self.n, self.e, self.topk.shape.1);
        let kernel: &'static _ = Box::leak(Box::new(lib.kernel("tw_router")));
        let launch = |stats: &On| {
            let skipped = 4 * self.skip as u64;
            let p = TwRouter {
                logits: self.at.addr() + skipped,
                probs: self.probs.addr() + skipped,
                topk: self.topk.addr(),
                weights: self.weights.addr(),
                sums: self.sums.addr(),
                stats: stats.addr(),
                n: n as u32,
                experts: e as u32,
                k: k as u32,
                lanes: lanes(e),
            };
            let (grid, block) = blocks(BLOCKS);
            kernel.grid(grid, block).smem((4 * (1 + WARPS) * e) as u32).arg(&p)
        };
        self.stats.iter().map(launch).collect()
    }

    fn probs(&self) -> Mat {
        Mat::new(self.n, self.e, self.probs.get().data[self.skip..].to_vec())
    }

    fn check(&self, want: &nn::RouterOut) {
        let e = self.e;
        assert_eq!(self.topk.memory.read::<i64>(), want.topk.idx, "choices");
        On::put(DType::F32, &self.probs()).close("probs", &want.probs, 2e-6);
        // The sum of many choices is taken in turn.
        let of_sum = 2e-8 * self.weights.shape.1 as f64;
        self.weights.close("weights", &want.weights, of_sum.max(2e-6));
        let count = |e: usize| want.topk.idx.iter().filter(|&&i| i == e as i64).count() as f64;
        let stats = (0..e).map(count).chain(want.probs.col_sums()).collect();
        self.stats[0].close("stats", &Mat::new(1, 2 * e, stats), 1e-6);
        let [once, again] = self.stats.each_ref().map(|s| s.memory.read::<u8>());
        assert_eq!(once, again, "stats again");
    }
}

/// The router and its gradient.
pub fn router(lib: &'static Lib, c: &mut Case) {
    let (t, n, e, k) = (c.dtype(), c.n, c.experts, c.k);
    let mut logits = c.random(DType::F32, n, e);
    // Ties go to the lower expert.
    logits.row_mut(0).fill(0.5);
    let want = nn::router(&logits, k);
    let (r, d_w) = (Routed::room(&logits, k), c.random(DType::F32, n, k));
    let (d_w_at, d_logits) = (On::put(DType::F32, &d_w), On::room(t, n, e));
    // d_aux E f_e / T, with f of all choices.
    let d_aux = 0.5;
    let bwd = TwRouterBwd {
        probs: r.probs.addr(),
        topk: r.topk.addr(),
        weights: r.weights.addr(),
        d_weights: d_w_at.addr(),
        load: r.stats[0].addr(),
        d_logits: d_logits.addr(),
        scale: (d_aux * e as f64 / (n * n * k) as f64) as f32,
        n: n as u32,
        experts: e as u32,
        k: k as u32,
        lanes: lanes(e),
        pad: 0,
    };
    // The balancing loss alone.
    let d_even = On::room(t, n, e);
    let mut even = bwd;
    (even.d_weights, even.d_logits) = (0, d_even.addr());
    let kernel = lib.kernel("tw_router_bwd");
    let (grid, block) = blocks(BLOCKS);
    let mut work = r.launches(lib);
    let shared = 4 * LAYERS_KEPT as u32 * lanes(e);
    work.extend([bwd, even].iter().map(|p| kernel.grid(grid, block).smem(shared).arg(p)));
    run(work, &[&r.all()[..], &[&d_w_at, &d_logits, &d_even]].concat());
    r.check(&want);
    d_logits.close("router_bwd", &nn::router_bwd(&want, &d_w, d_aux), 2e-5);
    let none = Mat::zeros(n, k);
    // Of equal loads there is no gradient but roundings.
    if k < e {
        d_even.close("router_bwd, even", &nn::router_bwd(&want, &none, d_aux), 2e-5);
    }
}

/// Rows that are no numbers go to the first experts; the others do not change.
pub fn poisoned_rows(lib: &'static Lib) {
    poisoned_rows_of(lib, 24, 5);
}

fn poisoned_rows_of(lib: &'static Lib, e: usize, k: usize) {
    let (mut rng, n) = (Rng::new(70), 21);
    let good = Mat::random(&mut rng, n, e).rounded(DType::F32);
    let mut bad = good.clone();
    bad.row_mut(3)[e - 1] = f64::NAN;
    bad.row_mut(20)[1] = f64::INFINITY;
    bad.row_mut(7).fill(f64::NEG_INFINITY);
    let r = Routed::room(&bad, k);
    run(r.launches(lib), &r.all());
    let want = nn::router(&good, k);
    let (topk, probs, weights) = (r.topk.memory.read::<i64>(), r.probs(), r.weights.get());
    for row in 0..n {
        let poisoned = [3, 7, 20].contains(&row);
        let first: Vec<i64> = (0..k as i64).collect();
        let to = if poisoned { &first } else { &want.topk.idx[row * k..][..k] };
        assert_eq!(&topk[row * k..][..k], to, "row {row}");
        let sound = probs.row(row).iter().chain(weights.row(row));
        assert!(sound.into_iter().all(|v| v.is_nan() == poisoned), "row {row}");
    }
    let stats = r.stats[0].get();
    assert_eq!(stats.row(0)[..e].iter().sum::<f64>(), (n * k) as f64);
    assert!(stats.row(0)[e..].iter().all(|v| v.is_nan()));
}

/// Logits of a grid: many are equal, and no rounding makes others so.
fn ties(lib: &'static Lib, (e, k): (usize, usize), skip: usize) {
    // Rows for a second turn; of many choices few, which take long.
    let (mut rng, n) = (Rng::new((e * k + skip) as u64), if k > 64 { 5 } else { 37 });
    let mut logits = Mat::random(&mut rng, n, e).map(|v| (8.0 * v).round() / 8.0);
    logits.row_mut(n - 1).fill(-0.5);
    let r = Routed::skipping(skip, &logits, k);
    run(r.launches(lib), &r.all());
    r.check(&nn::router(&logits, k));
}

/// Rows that lanes fill, and not; that are quads, aligned, and not.
pub fn routers_of_every_width() {
    let lib = layers(1);
    for e in [1, 7, 64, 65, 255, 256, 257, 300, 512] {
        let ks = [1, 2, 8, e].into_iter().filter(|&k| k <= e);
        let skips: &[usize] = if e == 64 || e == 512 { &[0, 1, 3] } else { &[0] };
        for (k, &skip) in ks.flat_map(|k| skips.iter().map(move |s| (k, s))) {
            ties(lib, (e, k), skip);
        }
        if e > 2 {
            poisoned_rows_of(lib, e, 8.min(e - 1));
        }
    }
}
