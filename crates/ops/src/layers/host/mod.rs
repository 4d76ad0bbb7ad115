//! The works on the host: [`math`] on copies of the rows.

use tilewire_core::{Result, Rng, convert_from_f32};
use tilewire_device::Tensor;

use super::AdamParam;
use super::desc::{
    AdamStep, AddNorm, CountStep, CrossEntropy, Embed, EmbedBwd, Heads, Init, NormBwd, Router,
    RouterBwd, SquareSum,
};
use super::math::{self, RopeLayout, Routed};

/// Rounds `values` into the front of `t`.
fn put(t: &Tensor, values: &[f32]) -> Result<()> {
    let (dtype, len) = (t.dtype(), values.len() * t.dtype().size());
    t.write(|b| convert_from_f32(dtype, values, &mut b[..len]))
}

fn cols(t: &Tensor) -> usize {
    t.shape().dim(1)
}

pub(super) fn embed(a: &Embed) -> Result<()> {
    let (table, d) = (a.table.to_f32()?, cols(&a.x));
    let row = |t: u8| table[usize::from(t) * d..][..d].iter().copied();
    let x: Vec<f32> = a.tokens.to_vec::<u8>()?.into_iter().flat_map(row).collect();
    put(&a.x, &x)
}

pub(super) fn embed_bwd(a: &EmbedBwd) -> Result<()> {
    let (tokens, dx, d) = (a.tokens.to_vec::<u8>()?, a.dx.to_f32()?, cols(&a.dx));
    let mut grad = vec![0.0f32; 256 * d];
    for (row, &t) in dx.chunks_exact(d).zip(&tokens) {
        let g = &mut grad[usize::from(t) * d..][..d];
        g.iter_mut().zip(row).for_each(|(g, v)| *g += v);
    }
    put(&a.grad, &grad)
}

pub(super) fn add_norm(a: &AddNorm) -> Result<()> {
    let mut x = a.x.to_f32()?;
    if let Some((y, sum)) = &a.add {
        x.iter_mut().zip(y.to_f32()?).for_each(|(x, y)| *x += y);
        put(sum, &x)?;
    }
    put(&a.out, &math::rms_norm(&x, &a.w.to_f32()?))
}

pub(super) fn norm_bwd(a: &NormBwd) -> Result<()> {
    let mut dw = vec![0.0; cols(&a.x)];
    let mut dx = math::rms_norm_bwd(&a.x.to_f32()?, &a.w.to_f32()?, &a.dy.to_f32()?, &mut dw);
    if let Some(r) = &a.residual {
        dx.iter_mut().zip(r.to_f32()?).for_each(|(x, r)| *x += r);
    }
    put(&a.dw, &dw)?;
    put(&a.dx, &dx)?;
    a.narrow.as_ref().map_or(Ok(()), |n| put(n, &dx))
}

pub(super) fn heads(a: &Heads) -> Result<()> {
    let (heads, kv, dim) = a.sizes()?;
    let (q, kv_cols, width) = (heads * dim, kv * dim, (heads + 2 * kv) * dim);
    let (positions, table) = (a.positions.to_vec::<i32>()?, a.table.to_f32()?);
    let layout = RopeLayout { width, at: 0, heads: heads + kv, dim };
    let parts = [(&a.q, 0, q), (&a.k, q, kv_cols), (&a.v, q + kv_cols, kv_cols)];
    if a.join {
        let mut rows = vec![0.0f32; positions.len() * width];
        for (t, at, n) in parts {
            for (row, part) in rows.chunks_exact_mut(width).zip(t.to_f32()?.chunks_exact(n)) {
                row[at..at + n].copy_from_slice(part);
            }
        }
        math::rope(&mut rows, &positions, &table, layout, -1.0);
        return put(&a.rows, &rows);
    }
    let mut rows = a.rows.to_f32()?;
    math::rope(&mut rows, &positions, &table, layout, 1.0);
    for (t, at, n) in parts {
        let part: Vec<f32> =
            rows.chunks_exact(width).flat_map(|r| r[at..at + n].iter().copied()).collect();
        put(t, &part)?;
    }
    Ok(())
}

pub(super) fn router(a: &Router) -> Result<()> {
    let (e, k) = (cols(&a.logits), cols(&a.topk));
    let r = math::router(a.logits.to_f32()?, e, k);
    let mut stats = vec![0.0f32; 2 * e];
    r.topk.iter().for_each(|&t| stats[t as usize] += 1.0);
    for row in r.probs.chunks_exact(e) {
        stats[e..].iter_mut().zip(row).for_each(|(s, p)| *s += p);
    }
    put(&a.probs, &r.probs)?;
    put(&a.weights, &r.weights)?;
    put(&a.stats, &stats)?;
    a.topk.write(|b| b.copy_from_slice(bytemuck::cast_slice(&r.topk)))
}

pub(super) fn router_bwd(a: &RouterBwd) -> Result<()> {
    let (e, k) = (cols(&a.probs), cols(&a.topk));
    let topk = a.topk.to_vec::<i64>()?;
    let d_weights = match &a.d_weights {
        Some(d) => d.to_f32()?,
        None => vec![0.0; topk.len()],
    };
    let routed = Routed { probs: a.probs.to_f32()?, topk, weights: a.weights.to_f32()? };
    let d_prob: Vec<f32> = a.load.to_f32()?[..e].iter().map(|l| l * a.scale).collect();
    put(&a.d_logits, &math::router_bwd(&routed, &d_weights, &d_prob, k))
}

pub(super) fn cross_entropy(a: &CrossEntropy) -> Result<()> {
    let targets: Vec<i64> = a.targets.to_vec::<i32>()?.into_iter().map(i64::from).collect();
    let (logits, n) = (a.logits.to_f32()?, cols(&a.logits));
    let (sum, grad) = math::cross_entropy(&logits, &targets, n, a.scale as f32);
    put(&a.loss, &[(sum * a.scale) as f32])?;
    put(&a.d_logits, &grad)
}

pub(super) fn square_sum(a: &SquareSum) -> Result<()> {
    let mut sum = 0.0f64;
    for t in &a.of {
        sum += t.to_f32()?.iter().map(|&g| f64::from(g) * f64::from(g)).sum::<f64>();
    }
    // Two floats carry a double's worth of digits.
    let high = sum as f32;
    put(&a.out, &[high, (sum - f64::from(high)) as f32])
}

/// The first four of `small`, if a step is to be taken.
fn taken(small: &Tensor) -> Result<Option<[f32; 4]>> {
    let v = small.to_f32()?;
    let v = [v[0], v[1], v[2], v[3]];
    Ok(v.iter().all(|v| v.is_finite()).then_some(v))
}

pub(super) fn adam_step(a: &AdamStep) -> Result<()> {
    let Some([_, high, low, _]) = taken(&a.small)? else { return Ok(()) };
    let step = a.count.to_vec::<i32>()?[0] as usize;
    let square = f64::from(high) + f64::from(low);
    // Rounding may leave a hair below zero.
    let scale = a.cfg.clip_factor(square.max(0.0).sqrt());
    let master = a.master.as_ref().unwrap_or(&a.w);
    let (mut w, g) = (master.to_f32()?, a.g.to_f32()?);
    let (mut m, mut v) = (a.m.to_f32()?, a.v.to_f32()?);
    let p = AdamParam { w: &mut w, grad: &g, m: &mut m, v: &mut v };
    a.cfg.step(step, scale, a.decay, p);
    put(&a.m, &m)?;
    put(&a.v, &v)?;
    put(&a.w, &w)?;
    a.master.as_ref().map_or(Ok(()), |t| put(t, &w))
}

pub(super) fn count_step(a: &CountStep) -> Result<()> {
    if taken(&a.small)?.is_none() {
        return Ok(());
    }
    let next = a.count.to_vec::<i32>()?[0] + 1;
    a.count.write(|b| b.copy_from_slice(&next.to_ne_bytes()))
}

/// Standard normal of position `i` (Box and Muller, 1958).
fn normal_at(rng: &Rng, i: u64) -> f64 {
    let u = 1.0 - rng.f64_at(2 * i);
    (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * rng.f64_at(2 * i + 1)).cos()
}

pub(super) fn init(a: &Init) -> Result<()> {
    let (rng, n) = (Rng::new(a.seed), cols(&a.w));
    let value = |i: usize| {
        let at = (a.origin.0 + i / n) * a.global_cols + a.origin.1 + i % n;
        if a.std == 0.0 { 1.0 } else { (a.std * normal_at(&rng, at as u64)) as f32 }
    };
    let w: Vec<f32> = (0..a.w.shape().num_elems()).map(value).collect();
    put(&a.w, &w)?;
    a.master.as_ref().map_or(Ok(()), |t| put(t, &w))
}
