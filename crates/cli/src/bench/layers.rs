//! A transformer's layers between its products, and its optimizer, of `tilewire bench`: `m` rows of
//! `n` elements, or parameters as many; heads are those of `attention`.

use tilewire::core::numerics::Bound;
use tilewire::core::{Rng, convert_from_f32};
use tilewire::device::Buffer;
use tilewire::ops::layers::{
    AdamStep, AdamW, AddNorm, CountStep, CrossEntropy, Embed, EmbedBwd, Heads as HeadRows, Init,
    LayersDesc, LayersPlan, NormBwd, SquareSum, Work, math,
};
use tilewire::prelude::*;
use tilewire_oracle::{Mat, nn};

use super::device::{Bench, Heads};
use super::memory::{Judge, Pass};
use super::quant::matrix;
use crate::rows::Row;

/// Values of a token.
const TOKENS: u64 = 256;
/// Guard of the norm.
const EPS: f64 = 1e-5;
/// Base of the rotary frequencies.
const BASE: f64 = 10_000.0;

/// A layer's plan on the stream of a benchmark.
pub(super) struct Layer<'a> {
    pub b: &'a Bench<'a>,
    pub plan: LayersPlan,
}

fn doubles(row: &[f32]) -> impl Iterator<Item = f64> + '_ {
    row.iter().map(|v| f64::from(*v))
}

fn one_row(row: &[f32]) -> Mat {
    Mat::from_f32(1, row.len(), row)
}

/// Returns the range of row `r` of `cols` elements.
pub(super) fn row_of(r: usize, cols: usize) -> std::ops::Range<usize> {
    r * cols..(r + 1) * cols
}

impl<'a> Layer<'a> {
    pub fn sizes(&self) -> (usize, usize) {
        let (m, n, _) = self.b.sizes();
        (m, n)
    }

    pub fn narrow(&self, seed: u64, rows: usize, cols: usize) -> Result<Tensor> {
        self.b.normal(seed, self.b.o.dtype, rows, cols)
    }

    pub fn wide(&self, seed: u64, rows: usize, cols: usize) -> Result<Tensor> {
        self.b.normal(seed, DType::F32, rows, cols)
    }

    pub fn empty(&self, dtype: DType, rows: usize, cols: usize) -> Result<Tensor> {
        self.b.poisoned(dtype, Shape::d2(rows, cols))
    }

    pub fn put(&self, t: Result<Tensor>) -> Result<Tensor> {
        t?.to(&self.b.device)
    }

    /// The pass of one work: what it reads and writes, and what judges it.
    pub fn pass<W: Work>(
        &'a self,
        name: &str,
        work: &W,
        (reads, writes): (Vec<&Tensor>, Vec<&Tensor>),
        judge: impl Fn(&mut Judge) -> Result<()> + 'a,
    ) -> Pass<'a> {
        let work = work.clone();
        let all = |of: Vec<&Tensor>| of.into_iter().cloned().collect();
        Pass {
            name: name.to_owned(),
            reads: all(reads),
            writes: all(writes),
            changes: Vec::new(),
            queue: Box::new(move || self.plan.run(&self.b.stream, &work)),
            judge: Box::new(judge),
        }
    }

    fn embed(&'a self) -> Result<Vec<Pass<'a>>> {
        let (m, n) = self.sizes();
        let mut rng = Rng::new(3);
        let ids: Vec<u8> = (0..m).map(|_| rng.below(TOKENS) as u8).collect();
        let tokens = self.put(Tensor::from_slice(&ids, Shape::d1(m)))?;
        let (table, x) = (self.narrow(1, TOKENS as usize, n)?, self.empty(DType::F32, m, n)?);
        let (dx, grad) = (self.wide(2, m, n)?, self.empty(DType::F32, TOKENS as usize, n)?);
        let fwd = Embed { tokens: tokens.clone(), table, x };
        let bwd = EmbedBwd { tokens, dx, grad };
        let (f, g, of) = (fwd.clone(), bwd.clone(), ids.clone());
        let copied = move |j: &mut Judge| {
            let (table, x) = (f.table.to_f32()?, f.x.to_f32()?);
            for (row, id) in x.chunks(n).zip(&of) {
                j.same(row, &table[row_of(usize::from(*id), n)]);
            }
            Ok(())
        };
        let summed = move |j: &mut Judge| {
            let ids: Vec<usize> = ids.iter().map(|id| usize::from(*id)).collect();
            let dx = matrix(&g.dx)?;
            let want = nn::embedding_bwd(&dx, &ids, TOKENS as usize);
            let mag = nn::embedding_bwd(&dx.map(f64::abs), &ids, TOKENS as usize);
            j.all(&g.grad, &want, &mag, &Bound::local(DType::F32, m));
            Ok(())
        };
        let (a, b) = (&fwd, &bwd);
        Ok(vec![
            self.pass("embed/fwd", a, (vec![&a.tokens, &a.table], vec![&a.x]), copied),
            self.pass("embed/bwd", b, (vec![&b.tokens, &b.dx], vec![&b.grad]), summed),
        ])
    }

    /// With the sum of the residual in front, and its gradient behind.
    fn norm(&'a self) -> Result<Vec<Pass<'a>>> {
        let ((m, n), t) = (self.sizes(), self.b.o.dtype);
        let (x, y, w) = (self.wide(1, m, n)?, self.narrow(2, m, n)?, self.narrow(3, 1, n)?);
        let (sum, out) = (self.empty(DType::F32, m, n)?, self.empty(t, m, n)?);
        let fwd = AddNorm {
            x: x.clone(),
            add: Some((y.clone(), sum.clone())),
            w: w.clone(),
            out: out.clone(),
        };
        let bwd = NormBwd {
            x: x.clone(),
            w: w.clone(),
            dy: self.narrow(4, m, n)?,
            residual: Some(self.wide(5, m, n)?),
            dx: self.empty(DType::F32, m, n)?,
            narrow: (t != DType::F32).then(|| self.empty(t, m, n)).transpose()?,
            dw: self.empty(DType::F32, 1, n)?,
        };
        let (reads, writes) = (vec![&x, &y, &w], vec![&sum, &out]);
        let (f, g) = (fwd.clone(), bwd.clone());
        let there = move |j: &mut Judge| {
            let Some((y, sum)) = &f.add else { return Err(Error::internal("no addend")) };
            let (x, y, w) = (f.x.to_f32()?, y.to_f32()?, matrix(&f.w)?);
            let want: Vec<f32> = x.iter().zip(y).map(|(x, y)| x + y).collect();
            j.same(&sum.to_f32()?, &want);
            j.rows(&f.out, n, &Bound::local(t, n), &|r, out, mag| {
                out.copy_from_slice(
                    &nn::rms_norm(&one_row(&want[row_of(r, n)]), &w.data, EPS).data,
                );
                mag.iter_mut().zip(out.iter()).for_each(|(m, v)| *m = v.abs());
            });
            Ok(())
        };
        let b = &bwd;
        let reads_bwd = [&b.x, &b.w, &b.dy].into_iter().chain(&b.residual).collect();
        let writes_bwd = [&b.dx, &b.dw].into_iter().chain(&b.narrow).collect();
        Ok(vec![
            self.pass("norm/fwd", &fwd, (reads, writes), there),
            self.pass("norm/bwd", b, (reads_bwd, writes_bwd), move |j| judge_norm_bwd(j, &g)),
        ])
    }

    fn heads(&'a self) -> Result<Vec<Pass<'a>>> {
        let ((m, _), t, h) = (self.sizes(), self.b.o.dtype, Heads::of(self.b.o.backend));
        let (q, kv) = (h.q * h.width, h.kv * h.width);
        let positions: Vec<i32> = (0..m as i32).collect();
        let positions = self.put(Tensor::from_slice(&positions, Shape::d1(m)))?;
        let table = math::rope_table(m, h.width);
        let table = self.put(Tensor::from_slice(&table, Shape::d2(m, h.width)))?;
        let apart = HeadRows {
            rows: self.narrow(1, m, q + 2 * kv)?,
            q: self.empty(t, m, q)?,
            k: self.empty(t, m, kv)?,
            v: self.empty(t, m, kv)?,
            positions: positions.clone(),
            table: table.clone(),
            join: false,
        };
        let join = HeadRows {
            rows: self.empty(t, m, q + 2 * kv)?,
            q: self.narrow(2, m, q)?,
            k: self.narrow(3, m, kv)?,
            v: self.narrow(4, m, kv)?,
            positions,
            table,
            join: true,
        };
        let pass = |name, w: &HeadRows| {
            let parts = vec![&w.q, &w.k, &w.v];
            let both = if w.join { (parts, vec![&w.rows]) } else { (vec![&w.rows], parts) };
            let (mut reads, writes) = both;
            reads.extend([&w.positions, &w.table]);
            let of = w.clone();
            self.pass(name, w, (reads, writes), move |j| judge_heads(j, &of, h.width))
        };
        Ok(vec![pass("heads/fwd", &apart), pass("heads/bwd", &join)])
    }

    /// The loss and its gradient are one work.
    fn cross_entropy(&'a self) -> Result<Vec<Pass<'a>>> {
        let ((m, n), t) = (self.sizes(), self.b.o.dtype);
        let mut rng = Rng::new(5);
        // Some rows have no target.
        let ids: Vec<i32> = (0..m).map(|_| rng.below(n as u64 + 1) as i32 - 1).collect();
        let valid = ids.iter().filter(|t| **t >= 0).count().max(1);
        let work = CrossEntropy {
            logits: self.wide(1, m, n)?,
            targets: self.put(Tensor::from_slice(&ids, Shape::d1(m)))?,
            scale: 1.0 / valid as f64,
            d_logits: self.empty(t, m, n)?,
            loss: self.empty(DType::F32, 1, 1)?,
        };
        let w = work.clone();
        let judge = move |j: &mut Judge| {
            let (logits, mut loss) = (w.logits.to_f32()?, 0.0);
            for (r, id) in ids.iter().enumerate() {
                let row = one_row(&logits[row_of(r, n)]);
                loss += nn::cross_entropy(&row, &[i64::from(*id)]).loss / valid as f64;
            }
            let one = Mat::new(1, 1, vec![loss]);
            j.all(&w.loss, &one, &one, &Bound::local(DType::F32, m + n));
            j.rows(&w.d_logits, n, &Bound::local(t, n), &|r, want, mag| {
                let row = one_row(&logits[row_of(r, n)]);
                let d = nn::cross_entropy_bwd(&row, &[i64::from(ids[r])], 1.0 / valid as f64);
                want.copy_from_slice(&d.data);
                // Where the target is all but sure, one is subtracted from one.
                mag.fill(2.0 / valid as f64);
            });
            Ok(())
        };
        let tensors = (vec![&work.logits, &work.targets], vec![&work.d_logits, &work.loss]);
        Ok(vec![self.pass("cross_entropy", &work, tensors, judge)])
    }

    fn square_sum(&'a self) -> Result<Pass<'a>> {
        let (m, n) = self.sizes();
        let (g, out) = (self.wide(1, m, n)?, self.empty(DType::F32, 1, 2)?);
        let work = SquareSum { of: vec![g.clone()], out: out.clone() };
        let (of, got) = (g.clone(), out.clone());
        Ok(self.pass("optimizer/square_sum", &work, (vec![&g], vec![&out]), move |j| {
            let want: f64 = doubles(&of.to_f32()?).map(|v| v * v).sum();
            let sum = doubles(&got.to_f32()?).sum::<f64>();
            // Terms are added in pairs of floats.
            j.near(sum, want, 1e-6 * want);
            Ok(())
        }))
    }

    /// A step and its count.
    fn adam_step(&'a self) -> Result<Pass<'a>> {
        let ((m, n), t) = (self.sizes(), self.b.o.dtype);
        let (w, g, mean) = (self.wide(1, m, n)?, self.wide(2, m, n)?, self.wide(3, m, n)?);
        let square: Vec<f32> = mean.to_f32()?.iter().map(|m| m * m + 0.1).collect();
        let square = self.put(Tensor::from_slice(&square, Shape::d2(m, n)))?;
        let mut narrow = vec![0; m * n * t.size()];
        convert_from_f32(t, &w.to_f32()?, &mut narrow);
        let low = self.empty(t, m, n)?;
        low.upload(&narrow)?;
        let cfg = AdamW::default();
        // The last step of the warm-up is of the full rate; of this norm a fourth is left.
        let (before, small) = (cfg.warmup as i32 - 1, [1.0f32, 16.0, 0.0, 1.0]);
        let small = self.put(Tensor::from_slice(&small, Shape::d1(4)))?;
        let count = self.put(Tensor::from_slice(&[before], Shape::d1(1)))?;
        let step = AdamStep {
            cfg,
            decay: true,
            w: if t == DType::F32 { w.clone() } else { low },
            master: (t != DType::F32).then(|| w.clone()),
            g: g.clone(),
            m: mean.clone(),
            v: square.clone(),
            small: small.clone(),
            count: count.clone(),
        };
        let counted = CountStep { small: small.clone(), count: count.clone() };
        let first = [&w, &mean, &square].map(matrix);
        let [w, mean, square] = first;
        let state = nn::AdamWState { param: w?, m: mean?, v: square?, step: before as u32 };
        let (s, c) = (step.clone(), counted.clone());
        let mut changes = vec![step.m.clone(), step.v.clone(), count];
        changes.extend(step.master.clone());
        let mut writes = Vec::new();
        // A narrow copy is written alone.
        if t == DType::F32 { &mut changes } else { &mut writes }.push(step.w.clone());
        Ok(Pass {
            name: "optimizer/adamw".to_owned(),
            reads: vec![g, small],
            writes,
            changes,
            queue: Box::new(move || {
                self.plan.run(&self.b.stream, &step)?;
                self.plan.run(&self.b.stream, &counted)
            }),
            judge: Box::new(move |j| {
                j.same(&c.count.to_vec::<i32>()?, &[before + 1]);
                judge_step(j, &s, &state)
            }),
        })
    }

    /// First values of a parameter, from the position of each.
    fn init(&'a self) -> Result<Pass<'a>> {
        let ((m, n), t, std, seed) = (self.sizes(), self.b.o.dtype, 0.5, 4);
        let work = Init {
            w: self.empty(t, m, n)?,
            master: (t != DType::F32).then(|| self.empty(DType::F32, m, n)).transpose()?,
            origin: (0, 0),
            global_cols: n,
            seed,
            std,
        };
        let w = work.clone();
        let judge = move |j: &mut Judge| {
            let rng = Rng::new(seed);
            // Box and Muller, 1958: two uniform numbers of a position make a normal one.
            let value = |i: u64| {
                let radius = (-2.0 * (1.0 - rng.f64_at(2 * i)).ln()).sqrt();
                std * radius * (std::f64::consts::TAU * rng.f64_at(2 * i + 1)).cos()
            };
            for got in std::iter::once(&w.w).chain(&w.master) {
                j.rows(got, n, &Bound::local(got.dtype(), 16), &|r, want, mag| {
                    want.iter_mut().enumerate().for_each(|(c, v)| *v = value((r * n + c) as u64));
                    mag.fill(1.0);
                });
            }
            Ok(())
        };
        let tensors = (Vec::new(), std::iter::once(&work.w).chain(&work.master).collect());
        Ok(self.pass("optimizer/init", &work, tensors, judge))
    }
}

fn judge_norm_bwd(j: &mut Judge, g: &NormBwd) -> Result<()> {
    let (m, n) = (g.x.shape().dim(0), g.x.shape().dim(1));
    let (x, dy, w) = (g.x.to_f32()?, g.dy.to_f32()?, matrix(&g.w)?.data);
    let past = g.residual.as_ref().map(Tensor::to_f32).transpose()?;
    let ones = vec![1.0; n];
    let gradients = |r: usize, x: &[f32], dy: &[f32]| {
        let at = row_of(r, n);
        nn::rms_norm_bwd(&one_row(&x[at.clone()]), &w, EPS, &one_row(&dy[at]))
    };
    for got in std::iter::once(&g.dx).chain(&g.narrow) {
        j.rows(got, n, &Bound::local(got.dtype(), n), &|r, want, mag| {
            want.copy_from_slice(&gradients(r, &x, &dy).0.data);
            let (x, dy) = (&x[row_of(r, n)], &dy[row_of(r, n)]);
            let scale = nn::rms_norm(&one_row(x), &ones, EPS).data;
            let terms = doubles(dy).zip(&w).zip(&scale).map(|((d, w), s)| (d * w * s).abs());
            let mean = terms.sum::<f64>() / n as f64;
            // 1 / rms of the row, from any element that is not zero.
            let rms = x.iter().zip(&scale).find(|(x, _)| **x != 0.0);
            let rms = rms.map_or(1.0 / EPS.sqrt(), |(x, s)| s / f64::from(*x));
            for c in 0..n {
                let beside = past.as_ref().map_or(0.0, |p| f64::from(p[r * n + c]));
                mag[c] = (f64::from(dy[c]) * w[c] * rms).abs() + (scale[c] * rms * mean).abs();
                mag[c] += beside.abs();
                want[c] += beside;
            }
        });
    }
    let (mut want, mut mag) = (Mat::zeros(1, n), Mat::zeros(1, n));
    for r in 0..m {
        let dw = gradients(r, &x, &dy).1;
        want.data.iter_mut().zip(&dw).for_each(|(sum, v)| *sum += v);
        mag.data.iter_mut().zip(&dw).for_each(|(sum, v)| *sum += v.abs());
    }
    j.all(&g.dw, &want, &mag, &Bound::local(DType::F32, m.max(n)));
    Ok(())
}

/// Both ways: `rows` against `q`, `k` and `v`, turned or turned back.
fn judge_heads(j: &mut Judge, w: &HeadRows, dim: usize) -> Result<()> {
    let widths = [&w.q, &w.k, &w.v].map(|t| t.shape().dim(1));
    let spec = nn::RopeSpec { head_dim: dim, base: BASE, style: nn::RopeStyle::HalfSplit };
    let parts = [w.q.to_f32()?, w.k.to_f32()?, w.v.to_f32()?];
    let (rows, width) = (w.rows.to_f32()?, widths.iter().sum());
    // The part of row `r` on the side that is read.
    let given = |r: usize, part: usize| -> Mat {
        let start = r * width + widths[..part].iter().sum::<usize>();
        one_row(match w.join {
            true => &parts[part][row_of(r, widths[part])],
            false => &rows[start..start + widths[part]],
        })
    };
    let turned = |r: usize, part: usize, want: &mut [f64], mag: &mut [f64]| {
        let x = given(r, part);
        let y = match (part, w.join) {
            (2, _) => x.clone(),
            (_, false) => nn::rope(&x, &[r], spec),
            (_, true) => nn::rope_bwd(&x, &[r], spec),
        };
        want.copy_from_slice(&y.data);
        for (c, m) in mag.iter_mut().enumerate() {
            let other = c - c % dim + (c % dim + dim / 2) % dim;
            *m = if part == 2 { 0.0 } else { x.at(0, c).abs() + x.at(0, other).abs() };
        }
    };
    let bound = Bound::local(w.rows.dtype(), 4);
    if w.join {
        j.rows(&w.rows, width, &bound, &|r, want, mag| {
            let mut at = 0;
            for (part, n) in widths.into_iter().enumerate() {
                turned(r, part, &mut want[at..at + n], &mut mag[at..at + n]);
                at += n;
            }
        });
    } else {
        for (part, got) in [&w.q, &w.k, &w.v].into_iter().enumerate() {
            j.rows(got, widths[part], &bound, &|r, want, mag| turned(r, part, want, mag));
        }
    }
    Ok(())
}

/// Compares a step's results with those of the oracle from `state`.
fn judge_step(j: &mut Judge, s: &AdamStep, state: &nn::AdamWState) -> Result<()> {
    let AdamW { lr, beta1, beta2, eps, weight_decay, clip, .. } = s.cfg;
    let norm = doubles(&s.small.to_f32()?[1..3]).sum::<f64>().sqrt();
    let grad = matrix(&s.g)?.map(|g| g * (clip / (norm + 1e-6)).min(1.0));
    let cfg = nn::AdamW { lr, beta1, beta2, eps, weight_decay };
    let want = nn::adamw_step(&cfg, state, &grad);
    let sum = |a: &Mat, b: &Mat| a.zip(b, |a, b| a.abs() + b.abs());
    let bound = |t: &Tensor| Bound::local(t.dtype(), 16);
    let mag = sum(&state.param, &want.param);
    for w in std::iter::once(&s.w).chain(&s.master) {
        j.all(w, &want.param, &mag, &bound(w));
    }
    j.all(&s.m, &want.m, &sum(&state.m, &grad), &bound(&s.m));
    j.all(&s.v, &want.v, &sum(&state.v, &grad.map(|g| g * g)), &bound(&s.v));
    Ok(())
}

impl Bench<'_> {
    /// Both passes of a layer, or the works of the optimizer.
    pub(super) fn layer_rows(&self, op: &str) -> Result<Vec<Row>> {
        let (rows, cols, _) = self.sizes();
        let (experts, k) = self.o.experts;
        let desc = LayersDesc { dtype: self.o.dtype, rows, cols, experts };
        let layer = Layer { b: self, plan: LayersPlan::new(desc)? };
        layer.plan.prepare(&self.stream)?;
        let h = Heads::of(self.o.backend);
        let shape = match op {
            "heads" => format!("m={rows} heads={}/{} d={}", h.q, h.kv, h.width),
            "router" => format!("m={rows} experts={experts} top_k={k}"),
            _ => format!("m={rows} n={cols}"),
        };
        let passes = match op {
            "embed" => layer.embed()?,
            "norm" => layer.norm()?,
            "heads" => layer.heads()?,
            "router" => layer.router()?,
            "cross_entropy" => layer.cross_entropy()?,
            _ => vec![layer.square_sum()?, layer.adam_step()?, layer.init()?],
        };
        self.by_memory(&shape, passes)
    }
}
