//! Row-wise functions of a transformer and their gradients, in f32 on the host.
//!
//! Definitions and sources are those of `tilewire_oracle::nn`, against which they are tested.

/// Guard of RMSNorm.
pub const NORM_EPS: f32 = 1e-5;

/// `y = x * w / rms(x)` for each row of `w.len()` elements.
pub fn rms_norm(x: &[f32], w: &[f32]) -> Vec<f32> {
    let mut y = vec![0.0; x.len()];
    for (x, y) in x.chunks_exact(w.len()).zip(y.chunks_exact_mut(w.len())) {
        let r = inv_rms(x);
        for ((y, &x), &w) in y.iter_mut().zip(x).zip(w) {
            *y = x * r * w;
        }
    }
    y
}

fn inv_rms(x: &[f32]) -> f32 {
    let mean = x.iter().map(|v| v * v).sum::<f32>() / x.len() as f32;
    1.0 / (mean + NORM_EPS).sqrt()
}

/// Gradients of [`rms_norm`]: returns dx, adds to `dw`.
pub fn rms_norm_bwd(x: &[f32], w: &[f32], dy: &[f32], dw: &mut [f32]) -> Vec<f32> {
    let n = w.len();
    let mut dx = vec![0.0; x.len()];
    for ((x, dy), dx) in x.chunks_exact(n).zip(dy.chunks_exact(n)).zip(dx.chunks_exact_mut(n)) {
        let r = inv_rms(x);
        let dot: f32 = x.iter().zip(dy).zip(w).map(|((x, d), w)| x * d * w).sum();
        let c = dot * r * r * r / n as f32;
        for i in 0..n {
            dx[i] = dy[i] * w[i] * r - x[i] * c;
            dw[i] += dy[i] * x[i] * r;
        }
    }
    dx
}

/// Cosines and then sines of `position * base^(-2i/dim)`, `[positions, dim]`: i runs over half a
/// head.
pub fn rope_table(positions: usize, dim: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(positions * dim);
    let angle = |p: usize, i: usize| p as f64 * ROPE_BASE.powf(-2.0 * i as f64 / dim as f64);
    for p in 0..positions {
        out.extend((0..dim / 2).map(|i| angle(p, i).cos() as f32));
        out.extend((0..dim / 2).map(|i| angle(p, i).sin() as f32));
    }
    out
}

/// Rotates pairs `(i, i + d/2)` of each head by its position's row of `table` ([`rope_table`]), in
/// place; `sign` -1 undoes it (and is the gradient). Rows have `heads * dim` elements from `at` on,
/// `width` in all.
pub fn rope(x: &mut [f32], positions: &[i32], table: &[f32], layout: RopeLayout, sign: f32) {
    let half = layout.dim / 2;
    for (row, &p) in x.chunks_exact_mut(layout.width).zip(positions) {
        let (cos, sin) = table[p as usize * layout.dim..][..layout.dim].split_at(half);
        for h in 0..layout.heads {
            let head = &mut row[layout.at + h * layout.dim..][..layout.dim];
            let (a, b) = head.split_at_mut(half);
            for i in 0..half {
                let (sin, cos) = (sign * sin[i], cos[i]);
                (a[i], b[i]) = (a[i] * cos - b[i] * sin, a[i] * sin + b[i] * cos);
            }
        }
    }
}

/// Base of the rotary frequencies.
pub const ROPE_BASE: f64 = 10_000.0;

/// The place of the heads to rotate in a row.
#[derive(Clone, Copy, Debug)]
pub struct RopeLayout {
    /// Elements of a row.
    pub width: usize,
    /// First element of the first head.
    pub at: usize,
    /// Number of heads.
    pub heads: usize,
    /// Elements of a head.
    pub dim: usize,
}

/// In-place softmax of each row of `n` elements.
pub fn softmax_rows(x: &mut [f32], n: usize) {
    for row in x.chunks_exact_mut(n) {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0;
        for v in row.iter_mut() {
            *v = (*v - max).exp();
            sum += *v;
        }
        row.iter_mut().for_each(|v| *v /= sum);
    }
}

/// Sum of `-log p[target]` over the rows (targets below 0 are left out), and the gradient of
/// `scale` times it with respect to the logits.
pub fn cross_entropy(logits: &[f32], targets: &[i64], n: usize, scale: f32) -> (f64, Vec<f32>) {
    let mut grad = logits.to_vec();
    softmax_rows(&mut grad, n);
    let mut sum = 0.0f64;
    for (row, &t) in grad.chunks_exact_mut(n).zip(targets) {
        if t < 0 {
            row.fill(0.0);
            continue;
        }
        let p = row[t as usize];
        // Not `f32::max`: it would turn a NaN into a number.
        sum -= f64::from(if p < f32::MIN_POSITIVE { f32::MIN_POSITIVE } else { p }).ln();
        row[t as usize] -= 1.0;
        row.iter_mut().for_each(|v| *v *= scale);
    }
    (sum, grad)
}

/// Routing of rows: probabilities, the `k` most likely experts (ties to the lower), and their
/// probabilities scaled to sum to one.
#[derive(Clone, Debug, Default)]
pub struct Routed {
    /// `[rows, experts]`.
    pub probs: Vec<f32>,
    /// `[rows, k]`.
    pub topk: Vec<i64>,
    /// `[rows, k]`.
    pub weights: Vec<f32>,
}

/// Routes rows of `experts` logits.
pub fn router(mut logits: Vec<f32>, experts: usize, k: usize) -> Routed {
    softmax_rows(&mut logits, experts);
    let (mut topk, mut weights) = (Vec::new(), Vec::new());
    for row in logits.chunks_exact(experts) {
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
        let sum: f32 = order[..k].iter().map(|&e| row[e]).sum();
        for &e in &order[..k] {
            topk.push(e as i64);
            weights.push(row[e] / sum);
        }
    }
    Routed { probs: logits, topk, weights }
}

/// Gradient of the logits from those of the weights, plus `d_prob[e]` for every probability of
/// expert `e` (the load-balancing loss).
pub fn router_bwd(r: &Routed, d_weights: &[f32], d_prob: &[f32], k: usize) -> Vec<f32> {
    let n = d_prob.len();
    let mut out = vec![0.0; r.probs.len()];
    for (i, p) in r.probs.chunks_exact(n).enumerate() {
        let (top, w, dw) =
            (&r.topk[i * k..][..k], &r.weights[i * k..][..k], &d_weights[i * k..][..k]);
        let sum: f32 = top.iter().map(|&e| p[e as usize]).sum();
        let mean: f32 = w.iter().zip(dw).map(|(w, d)| w * d).sum();
        let mut dp = d_prob.to_vec();
        for (&e, &d) in top.iter().zip(dw) {
            // w = p / sum: dw/dp = (1 - w) / sum for its own, -w / sum for the others.
            dp[e as usize] += (d - mean) / sum;
        }
        let dot: f32 = p.iter().zip(&dp).map(|(p, d)| p * d).sum();
        for ((o, &p), &d) in out[i * n..][..n].iter_mut().zip(p).zip(&dp) {
            *o = p * (d - dot);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use tilewire_core::Rng;
    use tilewire_oracle::Mat;
    use tilewire_oracle::nn as oracle;

    fn close(got: &[f32], want: &[f64]) {
        assert_eq!(got.len(), want.len());
        for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
            assert!((f64::from(g) - w).abs() <= 2e-5 * (1.0 + w.abs()), "element {i}: {g} for {w}");
        }
    }

    fn random(rng: &mut Rng, r: usize, c: usize) -> Mat {
        Mat::random(rng, r, c).rounded(tilewire_core::DType::F32)
    }

    #[test]
    fn norm_and_its_gradient_are_the_oracles() {
        let mut rng = Rng::new(1);
        let (x, w, dy) = (random(&mut rng, 5, 8), random(&mut rng, 1, 8), random(&mut rng, 5, 8));
        let eps = f64::from(NORM_EPS);
        close(&rms_norm(&x.to_f32(), &w.to_f32()), &oracle::rms_norm(&x, &w.data, eps).data);
        let mut dw = vec![0.0; 8];
        let dx = rms_norm_bwd(&x.to_f32(), &w.to_f32(), &dy.to_f32(), &mut dw);
        let (want_dx, want_dw) = oracle::rms_norm_bwd(&x, &w.data, eps, &dy);
        close(&dx, &want_dx.data);
        close(&dw, &want_dw);
    }

    #[test]
    fn rope_is_the_oracles_and_undoes_itself() {
        let mut rng = Rng::new(2);
        let x = random(&mut rng, 4, 16);
        let positions = [0i32, 3, 100, 255];
        let table = rope_table(256, 8);
        let layout = RopeLayout { width: 16, at: 0, heads: 2, dim: 8 };
        let mut got = x.to_f32();
        rope(&mut got, &positions, &table, layout, 1.0);
        let spec =
            oracle::RopeSpec { head_dim: 8, base: ROPE_BASE, style: oracle::RopeStyle::HalfSplit };
        let p: Vec<_> = positions.iter().map(|&p| p as _).collect();
        close(&got, &oracle::rope(&x, &p, spec).data);
        rope(&mut got, &positions, &table, layout, -1.0);
        close(&got, &x.data);
    }

    #[test]
    fn loss_and_router_are_the_oracles() {
        let mut rng = Rng::new(3);
        let logits = random(&mut rng, 6, 7).map(|v| 3.0 * v);
        let targets = [0, 6, -1, 3, 3, 2];
        let want = oracle::cross_entropy(&logits, &targets);
        let (sum, grad) = cross_entropy(&logits.to_f32(), &targets, 7, 0.2);
        assert!((sum / 5.0 - want.loss).abs() < 1e-5);
        close(&grad, &oracle::cross_entropy_bwd(&logits, &targets, 1.0).data);

        let want = oracle::router(&logits, 3);
        let got = router(logits.to_f32(), 7, 3);
        assert_eq!(got.topk, want.topk.idx);
        close(&got.weights, &want.weights.data);
        let dw = random(&mut rng, 6, 3);
        let d_logits = router_bwd(&got, &dw.to_f32(), &[0.0; 7], 3);
        close(&d_logits, &oracle::router_bwd(&want, &dw, 0.0).data);
        // The auxiliary loss: E sum f p, with f constant.
        let mut f = [0.0f32; 7];
        got.topk.iter().for_each(|&e| f[e as usize] += 1.0 / 18.0);
        let d_prob: Vec<f32> = f.iter().map(|f| 7.0 * f / 6.0).collect();
        let zero = Mat::zeros(6, 3);
        let d_logits = router_bwd(&got, &zero.to_f32(), &d_prob, 3);
        close(&d_logits, &oracle::router_bwd(&want, &zero, 1.0).data);
    }
}
