//! Rates of the works of `layers` on CUDA device 0, against a copy on the same device.
//!
//! `cargo run --release -p tilewire-ops --example rates layers`. One JSON object a line: microseconds
//! (median of 20 runs after a warm-up), bytes that must be read and written once, and their rate
//! as a share of that of a copy between two buffers of 1 GiB. 32768 rows of 4096, 64 experts, bf16.

use tilewire_core::{DType, Result, Rng, Shape};
use tilewire_device::cuda::{CudaContext, CudaEvent};
use tilewire_device::{Device, Queue, Stream, Tensor};
use tilewire_ops::layers::{
    AdamStep, AdamW, AddNorm, CrossEntropy, Embed, EmbedBwd, Heads, LayersDesc, LayersPlan,
    NormBwd, Router, RouterBwd, SquareSum, Work, math,
};

const RUNS: usize = 20;
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
    copy_gb_s: f64,
}

pub(crate) fn main() -> Result<()> {
    let ctx = CudaContext::new(0)?;
    let stream = Stream::on(&ctx)?;
    let desc = LayersDesc { dtype: DType::BF16, rows: ROWS, cols: COLS, experts: EXPERTS };
    let plan = LayersPlan::new(desc)?;
    plan.prepare(&stream)?;
    let mut rng = Rng::new(1);
    // They repeat after a while: what they are does not matter to time.
    let few = (0..65_521).map(|_| rng.normal()).collect();
    let device = Device::Cuda(ctx.clone());
    let mut b = Bench { ctx, stream, device, plan, few, copy_gb_s: 0.0 };
    b.copy()?;
    b.rows()?;
    b.router()?;
    b.tokens()?;
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

    /// Median microseconds.
    fn median(&self, launch: impl Fn() -> Result<()>) -> Result<f64> {
        let s = self.stream.cuda()?;
        (0..5).try_for_each(|_| launch())?;
        let mut us = Vec::new();
        for _ in 0..RUNS {
            let (a, b) = (CudaEvent::new(&self.ctx, true)?, CudaEvent::new(&self.ctx, true)?);
            s.record(&a)?;
            launch()?;
            s.record(&b)?;
            self.stream.synchronize()?;
            us.push(b.us_since(&a)?);
        }
        us.sort_by(f64::total_cmp);
        Ok(us[RUNS / 2])
    }

    fn copy(&mut self) -> Result<()> {
        let (a, b) = (self.room(DType::U8, 1, 1 << 30)?, self.room(DType::U8, 1, 1 << 30)?);
        let us = self.median(|| self.stream.cuda()?.copy_memory(&b.cuda()?, &a.cuda()?))?;
        self.copy_gb_s = 2.0 * f64::from(1u32 << 30) / us / 1e3;
        let (name, gb_s) = (self.ctx.name()?, self.copy_gb_s);
        println!("{{\"device\":\"{name}\",\"work\":\"copy\",\"us\":{us:.1},\"gb_s\":{gb_s:.0}}}");
        Ok(())
    }

    /// Times `work`, which must move `bytes`.
    fn show<W: Work>(&self, name: &str, work: &W, bytes: usize) -> Result<()> {
        let us = self.median(|| self.plan.run(&self.stream, work))?;
        let gb_s = bytes as f64 / us / 1e3;
        let share = gb_s / self.copy_gb_s;
        println!(
            "{{\"work\":\"{name}\",\"bytes\":{bytes},\"us\":{us:.1},\"gb_s\":{gb_s:.0},\"of_copy\":{share:.3}}}"
        );
        Ok(())
    }

    fn rows(&self) -> Result<()> {
        let (t, w32) = (DType::BF16, DType::F32);
        let x = self.filled(w32, ROWS, COLS)?;
        let (y, w) = (self.filled(t, ROWS, COLS)?, self.filled(t, 1, COLS)?);
        let (sum, out) = (self.room(w32, ROWS, COLS)?, self.room(t, ROWS, COLS)?);
        let add = Some((y.clone(), sum.clone()));
        let work = AddNorm { x: x.clone(), add, w: w.clone(), out: out.clone() };
        let n = ROWS * COLS;
        self.show("add_norm", &work, n * (4 + 2 + 4 + 2))?;
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
        self.show("norm_bwd", &work, n * (4 + 2 + 4 + 4 + 2))?;
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
        self.show("heads", &work, bytes)?;
        self.show("heads_join", &Heads { join: true, ..work }, bytes)
    }

    fn router(&self) -> Result<()> {
        let (t, w32) = (DType::BF16, DType::F32);
        let work = Router {
            logits: self.filled(w32, ROWS, EXPERTS)?,
            probs: self.room(w32, ROWS, EXPERTS)?,
            topk: self.room(DType::I64, ROWS, K)?,
            weights: self.room(w32, ROWS, K)?,
            stats: self.room(w32, 1, 2 * EXPERTS)?,
        };
        self.show("router", &work, ROWS * (8 * EXPERTS + 12 * K))?;
        let bwd = RouterBwd {
            probs: work.probs,
            topk: work.topk,
            weights: work.weights,
            d_weights: Some(self.filled(w32, ROWS, K)?),
            load: work.stats,
            scale: 1e-3,
            d_logits: self.room(t, ROWS, EXPERTS)?,
        };
        self.show("router_bwd", &bwd, ROWS * (6 * EXPERTS + 16 * K))?;
        let targets: Vec<i32> = (0..ROWS).map(|i| (i * 37 % VOCAB) as i32).collect();
        let work = CrossEntropy {
            logits: self.filled(w32, ROWS, VOCAB)?,
            targets: Tensor::from_slice(&targets, Shape::d1(ROWS))?.to(&self.device)?,
            scale: 1.0 / ROWS as f64,
            d_logits: self.room(t, ROWS, VOCAB)?,
            loss: self.room(w32, 1, 1)?,
        };
        self.show("cross_entropy", &work, ROWS * (6 * VOCAB + 4))
    }

    fn tokens(&self) -> Result<()> {
        let ids: Vec<u8> = (0..ROWS).map(|i| b"the quick brown fox "[i * 7 % 20]).collect();
        let tokens = Tensor::from_slice(&ids, Shape::d1(ROWS))?.to(&self.device)?;
        let x = self.room(DType::F32, ROWS, COLS)?;
        let table = self.filled(DType::BF16, VOCAB, COLS)?;
        let bytes = ROWS * (4 * COLS + 1);
        self.show("embed", &Embed { tokens: tokens.clone(), table, x: x.clone() }, bytes)?;
        let grad = self.room(DType::F32, VOCAB, COLS)?;
        self.show("embed_bwd", &EmbedBwd { tokens, dx: x, grad }, bytes + VOCAB * COLS * 4)
    }

    fn optimizer(&self) -> Result<()> {
        let w32 = DType::F32;
        let g = self.filled(w32, ROWS, COLS)?;
        let n = ROWS * COLS;
        let small = Tensor::from_slice(&[1.0f32, 4.0, 0.0], Shape::d1(3))?.to(&self.device)?;
        let sum = SquareSum { of: vec![g.clone()], out: self.room(w32, 1, 2)? };
        self.show("square_sum", &sum, 4 * n)?;
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
        self.show("adamw", &work, n * (4 * 4 + 3 * 4 + 2))
    }
}
