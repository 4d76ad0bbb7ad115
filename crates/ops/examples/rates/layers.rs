//! Rates of the works of `layers` on CUDA device 0, against a copy on the same device.
//!
//! `cargo run --release -p tilewire-ops --example rates layers [WORK ...]`. One JSON object a line,
//! of every work or of those whose name begins so: microseconds of a launch in a graph of at least
//! 20 (median of 9 replays) and of an eager launch (median of 20), bytes that must be read and
//! written once, and the graph's rate as a share of that of a copy between two buffers of 1 GiB,
//! and of that of copies, in a graph too, of as many bytes (of at most 256 MiB each). 32768 rows of
//! 4096, 64 experts, top-2, 256 classes, bf16; `_8x` has 8 times as many rows.
//!
//! Launches of a graph take their tensors in turn from so many sets that one's have left the L2
//! cache when it comes again.

use tilewire_core::{DType, Result, Rng, Shape};
use tilewire_device::cuda::{CudaContext, CudaEvent};
use tilewire_device::{Device, Queue, Stream, Tensor};
use tilewire_ops::layers::{
    AdamStep, AdamW, AddNorm, CrossEntropy, Embed, EmbedBwd, Heads, LayersDesc, LayersPlan,
    NormBwd, Router, RouterBwd, SquareSum, Work, math,
};

const RUNS: usize = 20;
const REPLAYS: usize = 9;
/// Bytes of all sets of a work's tensors together: several times an L2 cache.
const COLD: usize = 256 << 20;
/// What is copied.
const COPIED: usize = 1 << 30;
const ROWS: usize = 32_768;
const COLS: usize = 4096;
const EXPERTS: usize = 64;
const K: usize = 2;
const VOCAB: usize = 256;
const HEADS: (usize, usize, usize) = (32, 8, 128);

struct Bench {
    ctx: CudaContext,
    stream: Stream,
    device: Device,
    plan: LayersPlan,
    few: Vec<f32>,
    /// Two buffers for copies, and their rate.
    buffers: [Tensor; 2],
    copy_gb_s: f64,
    /// Works to time; all if empty.
    only: Vec<String>,
}

fn median(mut us: Vec<f64>) -> f64 {
    us.sort_by(f64::total_cmp);
    us[us.len() / 2]
}

pub(crate) fn main() -> Result<()> {
    let ctx = CudaContext::new(0)?;
    let stream = Stream::on(&ctx)?;
    let desc = LayersDesc { dtype: DType::BF16, rows: 8 * ROWS, cols: COLS, experts: EXPERTS };
    let plan = LayersPlan::new(desc)?;
    plan.prepare(&stream)?;
    let mut rng = Rng::new(1);
    // They repeat after a while: what they are does not matter to time.
    let few = (0..65_521).map(|_| rng.normal()).collect();
    let device = Device::Cuda(ctx.clone());
    let buffer = || Tensor::zeros_on(&device, DType::U8, Shape::d2(1, COPIED));
    let buffers = [buffer()?, buffer()?];
    let only = std::env::args().skip(2).collect();
    let mut b = Bench { ctx, stream, device, plan, few, buffers, copy_gb_s: 0.0, only };
    b.copy()?;
    b.router(ROWS, "")?;
    b.router(8 * ROWS, "_8x")?;
    b.tokens()?;
    b.rows()?;
    b.optimizer()
}

impl Bench {
    fn filled(&self, dtype: DType, rows: usize, cols: usize) -> Result<Tensor> {
        let v: Vec<f32> = (0..rows * cols).map(|i| self.few[i % self.few.len()]).collect();
        Tensor::from_f32(&v, dtype, Shape::d2(rows, cols))?.to(&self.device)
    }

    fn room(&self, dtype: DType, rows: usize, cols: usize) -> Result<Tensor> {
        Tensor::zeros_on(&self.device, dtype, Shape::d2(rows, cols))
    }

    /// Whether a work of this name, or one that begins so, is to be timed.
    fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|o| name.starts_with(o.as_str()))
    }

    /// Microseconds between two events around `launch`.
    fn once(&self, launch: impl Fn() -> Result<()>) -> Result<f64> {
        let s = self.stream.cuda()?;
        let (a, b) = (CudaEvent::new(&self.ctx, true)?, CudaEvent::new(&self.ctx, true)?);
        s.record(&a)?;
        launch()?;
        s.record(&b)?;
        self.stream.synchronize()?;
        b.us_since(&a)
    }

    /// Median microseconds of a launch alone.
    fn eager(&self, launch: impl Fn() -> Result<()>) -> Result<f64> {
        (0..5).try_for_each(|_| launch())?;
        Ok(median((0..RUNS).map(|_| self.once(&launch)).collect::<Result<_>>()?))
    }

    /// Median microseconds of a launch in a graph of `num`; the `i`-th is `launch(i)`.
    fn in_graph(&self, num: usize, launch: impl Fn(usize) -> Result<()>) -> Result<f64> {
        self.stream.begin_capture()?;
        (0..num).try_for_each(&launch)?;
        let graph = self.stream.end_capture()?.instantiate()?;
        self.stream.replay(&graph)?;
        let us = (0..REPLAYS).map(|_| self.once(|| self.stream.replay(&graph)));
        Ok(median(us.collect::<Result<_>>()?) / num as f64)
    }

    /// Median microseconds of a copy of `len` bytes in a graph, of another place each time.
    fn copy_us(&self, len: usize) -> Result<f64> {
        let [a, b] = [self.buffers[0].cuda()?, self.buffers[1].cuda()?];
        let sets = (COPIED / len).min(COLD.div_ceil(2 * len)).max(1);
        self.in_graph(RUNS.next_multiple_of(sets), |i| {
            let at = i % sets * len;
            self.stream.cuda()?.copy_memory(&b.slice(at, len)?, &a.slice(at, len)?)
        })
    }

    fn copy(&mut self) -> Result<()> {
        let [a, b] = [self.buffers[0].cuda()?, self.buffers[1].cuda()?];
        // Not in a graph: there, so large a copy is one of a slower engine.
        let us = self.eager(|| self.stream.cuda()?.copy_memory(&b, &a))?;
        self.copy_gb_s = 2.0 * COPIED as f64 / us / 1e3;
        let (name, gb_s) = (self.ctx.name()?, self.copy_gb_s);
        println!("{{\"device\":\"{name}\",\"work\":\"copy\",\"us\":{us:.1},\"gb_s\":{gb_s:.0}}}");
        Ok(())
    }

    /// Times the work that `make` makes, which must move `bytes`.
    fn show<W: Work>(&self, name: &str, bytes: usize, make: impl Fn() -> Result<W>) -> Result<()> {
        if !self.wants(name) {
            return Ok(());
        }
        let sets = COLD.div_ceil(bytes);
        let works: Vec<W> = (0..sets).map(|_| make()).collect::<Result<_>>()?;
        let eager = self.eager(|| self.plan.run(&self.stream, &works[0]))?;
        let num = RUNS.next_multiple_of(sets);
        let us = self.in_graph(num, |i| self.plan.run(&self.stream, &works[i % sets]))?;
        let part = bytes.div_ceil(bytes.div_ceil(COPIED / 2));
        let same = self.copy_us((part / 2) & !0xff)? * (bytes as f64 / part as f64);
        let gb_s = bytes as f64 / us / 1e3;
        let (share, of_same) = (gb_s / self.copy_gb_s, same / us);
        println!(
            "{{\"work\":\"{name}\",\"bytes\":{bytes},\"us\":{us:.1},\"us_eager\":{eager:.1},\"gb_s\":{gb_s:.0},\
             \"of_copy\":{share:.3},\"copy_us\":{same:.1},\"of_same_copy\":{of_same:.3}}}"
        );
        Ok(())
    }

    fn rows(&self) -> Result<()> {
        if !["add_norm", "norm_bwd", "heads"].iter().any(|name| self.wants(name)) {
            return Ok(());
        }
        let (t, w32) = (DType::BF16, DType::F32);
        let x = self.filled(w32, ROWS, COLS)?;
        let (y, w) = (self.filled(t, ROWS, COLS)?, self.filled(t, 1, COLS)?);
        let (sum, out) = (self.room(w32, ROWS, COLS)?, self.room(t, ROWS, COLS)?);
        let add = Some((y.clone(), sum.clone()));
        let work = AddNorm { x: x.clone(), add, w: w.clone(), out: out.clone() };
        let n = ROWS * COLS;
        self.show("add_norm", n * (4 + 2 + 4 + 2), || Ok(work.clone()))?;
        let dx = self.room(w32, ROWS, COLS)?;
        let work = NormBwd {
            x,
            w,
            dy: y,
            residual: Some(sum),
            dx,
            narrow: Some(out),
            dw: self.room(w32, 1, COLS)?,
        };
        self.show("norm_bwd", n * (4 + 2 + 4 + 4 + 2), || Ok(work.clone()))?;
        let (heads, kv, dim) = HEADS;
        let positions: Vec<i32> = (0..ROWS).map(|i| (i % 4096) as i32).collect();
        let work = Heads {
            rows: self.filled(t, ROWS, (heads + 2 * kv) * dim)?,
            q: self.room(t, ROWS, heads * dim)?,
            k: self.room(t, ROWS, kv * dim)?,
            v: self.room(t, ROWS, kv * dim)?,
            positions: Tensor::from_slice(&positions, Shape::d1(ROWS))?.to(&self.device)?,
            table: Tensor::from_slice(&math::rope_table(4096, dim), Shape::d2(4096, dim))?
                .to(&self.device)?,
            join: false,
        };
        let bytes = 2 * work.rows.len_bytes();
        self.show("heads", bytes, || Ok(work.clone()))?;
        self.show("heads_join", bytes, || Ok(Heads { join: true, ..work.clone() }))
    }

    fn router(&self, n: usize, suffix: &str) -> Result<()> {
        let (t, w32) = (DType::BF16, DType::F32);
        let make = || {
            Ok(Router {
                logits: self.filled(w32, n, EXPERTS)?,
                probs: self.room(w32, n, EXPERTS)?,
                topk: self.room(DType::I64, n, K)?,
                weights: self.room(w32, n, K)?,
                stats: self.room(w32, 1, 2 * EXPERTS)?,
            })
        };
        self.show(&format!("router{suffix}"), n * (8 * EXPERTS + 12 * K), make)?;
        let bwd = || {
            let work = make()?;
            self.plan.run(&self.stream, &work)?;
            Ok(RouterBwd {
                probs: work.probs,
                topk: work.topk,
                weights: work.weights,
                d_weights: Some(self.filled(w32, n, K)?),
                load: work.stats,
                scale: 1e-3,
                d_logits: self.room(t, n, EXPERTS)?,
            })
        };
        self.show(&format!("router_bwd{suffix}"), n * (6 * EXPERTS + 16 * K), bwd)?;
        let targets: Vec<i32> = (0..n).map(|i| (i * 37 % VOCAB) as i32).collect();
        self.show(&format!("cross_entropy{suffix}"), n * (6 * VOCAB + 4), || {
            Ok(CrossEntropy {
                logits: self.filled(w32, n, VOCAB)?,
                targets: Tensor::from_slice(&targets, Shape::d1(n))?.to(&self.device)?,
                scale: 1.0 / n as f64,
                d_logits: self.room(t, n, VOCAB)?,
                loss: self.room(w32, 1, 1)?,
            })
        })
    }

    fn tokens(&self) -> Result<()> {
        let x = self.room(DType::F32, ROWS, COLS)?;
        let table = self.filled(DType::BF16, VOCAB, COLS)?;
        let grad = self.room(DType::F32, VOCAB, COLS)?;
        let bytes = ROWS * (4 * COLS + 1);
        let mut rng = Rng::new(2);
        let words: Vec<u8> = (0..ROWS).map(|i| b"the quick brown fox "[i * 7 % 20]).collect();
        let uniform: Vec<u8> = (0..ROWS).map(|_| rng.below(256) as u8).collect();
        for (ids, what) in [(words, ""), (uniform, "_uniform"), (vec![7; ROWS], "_one")] {
            let tokens = Tensor::from_slice(&ids, Shape::d1(ROWS))?.to(&self.device)?;
            let work = Embed { tokens: tokens.clone(), table: table.clone(), x: x.clone() };
            if what.is_empty() {
                self.show("embed", bytes, || Ok(work.clone()))?;
            }
            let work = EmbedBwd { tokens, dx: x.clone(), grad: grad.clone() };
            let bytes = bytes + VOCAB * COLS * 4;
            self.show(&format!("embed_bwd{what}"), bytes, || Ok(work.clone()))?;
        }
        Ok(())
    }

    fn optimizer(&self) -> Result<()> {
        if !["square_sum", "adamw"].iter().any(|name| self.wants(name)) {
            return Ok(());
        }
        let w32 = DType::F32;
        let g = self.filled(w32, ROWS, COLS)?;
        let n = ROWS * COLS;
        let small = Tensor::from_slice(&[1.0f32, 4.0, 0.0, 1.0], Shape::d1(4))?.to(&self.device)?;
        let sum = SquareSum { of: vec![g.clone()], out: self.room(w32, 1, 2)? };
        self.show("square_sum", 4 * n, || Ok(sum.clone()))?;
        let work = AdamStep {
            cfg: AdamW::default(),
            decay: true,
            w: self.room(DType::BF16, ROWS, COLS)?,
            master: Some(self.filled(w32, ROWS, COLS)?),
            g,
            m: self.room(w32, ROWS, COLS)?,
            v: self.room(w32, ROWS, COLS)?,
            small,
            count: Tensor::zeros_on(&self.device, DType::I32, Shape::d1(1))?,
        };
        self.show("adamw", n * (4 * 4 + 3 * 4 + 2), || Ok(work.clone()))
    }
}
