//! AdamW and gradient clipping.

use crate::Mat;
use crate::mat::total;

/// Parameters of [`adamw_step`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AdamW {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

/// A parameter with its moments.
#[derive(Clone, PartialEq, Debug)]
pub struct AdamWState {
    /// The parameter.
    pub param: Mat,
    /// First moment.
    pub m: Mat,
    /// Second moment.
    pub v: Mat,
    /// Steps done.
    pub step: u32,
}

impl AdamWState {
    /// A parameter before its first step.
    pub fn new(param: Mat) -> Self {
        let zeros = Mat::zeros(param.rows, param.cols);
        Self { param, m: zeros.clone(), v: zeros, step: 0 }
    }
}

/// One step of AdamW with bias correction (Loshchilov and Hutter 2019, as `torch.optim.AdamW`):
///
/// ```text
/// w <- w - lr wd w          m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) g^2
/// w <- w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
/// ```
///
/// # Panics
/// If the gradient has another shape than the parameter.
pub fn adamw_step(opt: &AdamW, state: &AdamWState, grad: &Mat) -> AdamWState {
    let step = state.step + 1;
    let m = state.m.zip(grad, |m, g| opt.beta1 * m + (1.0 - opt.beta1) * g);
    let v = state.v.zip(grad, |v, g| opt.beta2 * v + (1.0 - opt.beta2) * g * g);
    let (fix_m, fix_v) =
        (1.0 - opt.beta1.powf(f64::from(step)), 1.0 - opt.beta2.powf(f64::from(step)));
    let update = m.zip(&v, |m, v| (m / fix_m) / ((v / fix_v).sqrt() + opt.eps));
    let decayed = state.param.map(|w| w - opt.lr * opt.weight_decay * w);
    AdamWState { param: decayed.zip(&update, |w, u| w - opt.lr * u), m, v, step }
}

/// Euclidean norm of all gradients together.
pub fn grad_norm(grads: &[Mat]) -> f64 {
    total(grads.iter().map(|g| g.dot(g))).sqrt()
}

/// All gradients times `min(1, max_norm / (norm + 1e-6))`, and the norm before
/// (`torch.nn.utils.clip_grad_norm_`).
pub fn clip_grad_norm(grads: &[Mat], max_norm: f64) -> (Vec<Mat>, f64) {
    let norm = grad_norm(grads);
    let factor = (max_norm / (norm + 1e-6)).min(1.0);
    (grads.iter().map(|g| g.map(|v| v * factor)).collect(), norm)
}
