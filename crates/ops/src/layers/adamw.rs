//! AdamW with global gradient clipping and a warm-up + cosine schedule.

/// Hyperparameters.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AdamW {
    /// Largest learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Guard against division by zero.
    pub eps: f64,
    /// Decoupled weight decay (matrices only).
    pub weight_decay: f64,
    /// Largest norm of the gradient of all parameters.
    pub clip: f64,
    /// Steps until the learning rate is reached.
    pub warmup: usize,
    /// Steps after which the learning rate is a tenth.
    pub total: usize,
}

impl Default for AdamW {
    /// The rate is a third of what learns fastest: at 3e-3 one choice of experts that turns over by
    /// rounding moves the loss of `train` by up to 2e-3 within 60 steps, at 1e-3 by a tenth of
    /// that.
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.98,
            eps: 1e-8,
            weight_decay: 0.01,
            clip: 1.0,
            warmup: 10,
            total: 1000,
        }
    }
}

/// A parameter of [`AdamW::step`], element by element.
pub struct AdamParam<'a> {
    /// Its values.
    pub w: &'a mut [f32],
    /// Its gradient, already summed over ranks.
    pub grad: &'a [f32],
    /// The running mean of its gradients.
    pub m: &'a mut [f32],
    /// The running mean of their squares.
    pub v: &'a mut [f32],
}

impl AdamW {
    /// Learning rate of step `step` (from 0): linear warm-up, cosine down to a tenth.
    pub fn rate(&self, step: usize) -> f64 {
        if step < self.warmup {
            return self.lr * (step + 1) as f64 / self.warmup as f64;
        }
        let span = self.total.saturating_sub(self.warmup).max(1);
        let t = ((step - self.warmup) as f64 / span as f64).min(1.0);
        self.lr * (0.1 + 0.45 * (1.0 + (std::f64::consts::PI * t).cos()))
    }

    /// Factor that brings a gradient of norm `norm` down to the clipping norm.
    pub fn clip_factor(&self, norm: f64) -> f64 {
        (self.clip / (norm + 1e-6)).min(1.0)
    }

    /// Makes one step of a parameter.
    pub fn step(&self, step: usize, scale: f64, decay: bool, p: AdamParam<'_>) {
        let AdamParam { w, grad: g, m, v } = p;
        let (b1, b2) = (self.beta1, self.beta2);
        let (c1, c2) = (1.0 - b1.powi(step as i32 + 1), 1.0 - b2.powi(step as i32 + 1));
        let lr = self.rate(step);
        let wd = if decay { self.weight_decay } else { 0.0 };
        for i in 0..w.len() {
            let grad = f64::from(g[i]) * scale;
            let m1 = b1 * f64::from(m[i]) + (1.0 - b1) * grad;
            let v1 = b2 * f64::from(v[i]) + (1.0 - b2) * grad * grad;
            (m[i], v[i]) = (m1 as f32, v1 as f32);
            let old = f64::from(w[i]);
            w[i] = (old - lr * (m1 / c1 / ((v1 / c2).sqrt() + self.eps) + wd * old)) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_rises_and_falls() {
        let a = AdamW { warmup: 4, total: 24, lr: 1.0, ..AdamW::default() };
        assert_eq!((a.rate(0), a.rate(3), a.rate(4)), (0.25, 1.0, 1.0));
        assert!(a.rate(14) < 0.6 && (a.rate(24) - 0.1).abs() < 1e-12 && a.rate(99) == a.rate(24));
        assert_eq!(a.clip_factor(0.5), 1.0);
        assert!((a.clip_factor(4.0) - 0.25).abs() < 1e-6);
    }

    #[test]
    fn it_finds_the_minimum_of_a_parabola() {
        let a = AdamW { lr: 0.1, weight_decay: 0.0, warmup: 1, total: 300, ..AdamW::default() };
        let (mut w, mut m, mut v) = ([5.0f32], [0.0], [0.0]);
        for s in 0..300 {
            let g = [2.0 * (w[0] - 1.5)];
            let p = AdamParam { w: &mut w, grad: &g, m: &mut m, v: &mut v };
            a.step(s, 1.0, true, p);
        }
        assert!((w[0] - 1.5).abs() < 0.02, "{}", w[0]);
    }
}
