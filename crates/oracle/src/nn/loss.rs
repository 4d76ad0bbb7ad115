//! Softmax and cross-entropy.

use crate::Mat;
use crate::mat::total;

/// Target of a token that does not count.
pub const IGNORE: i64 = -1;

/// `ln softmax` of every row: `x[t, c] - ln(sum_i exp(x[t, i]))`, shifted by the row's maximum.
pub fn log_softmax(x: &Mat) -> Mat {
    let lse: Vec<f64> = (0..x.rows)
        .map(|t| {
            let max = x.row(t).iter().fold(f64::NEG_INFINITY, |m, &v| m.max(v));
            max + total(x.row(t).iter().map(|v| (v - max).exp())).ln()
        })
        .collect();
    Mat::from_fn(x.rows, x.cols, |t, c| x.at(t, c) - lse[t])
}

/// Softmax of every row.
pub fn softmax(x: &Mat) -> Mat {
    log_softmax(x).map(f64::exp)
}

/// Result of [`cross_entropy`].
#[derive(Clone, PartialEq, Debug)]
pub struct CrossEntropy {
    /// Mean over the tokens that count; 0 if none does.
    pub loss: f64,
    /// Loss of each token, 0 where ignored, `[T]`.
    pub per_token: Vec<f64>,
    /// Tokens that count.
    pub num_valid: usize,
}

fn target(targets: &[i64], t: usize, vocab: usize) -> Option<usize> {
    if targets[t] == IGNORE {
        return None;
    }
    let id = usize::try_from(targets[t]).unwrap_or(usize::MAX);
    assert!(id < vocab, "target {} of a vocabulary of {vocab}", targets[t]);
    Some(id)
}

/// `loss = mean_t -ln softmax(logits[t])[targets[t]]` over the tokens whose target is not
/// [`IGNORE`]. `logits` is `[T, V]`.
///
/// # Panics
/// If a target is neither a column nor [`IGNORE`], or there is not one for each row.
pub fn cross_entropy(logits: &Mat, targets: &[i64]) -> CrossEntropy {
    assert_eq!(targets.len(), logits.rows, "one target for each row");
    let logp = log_softmax(logits);
    let valid = |t: usize| target(targets, t, logits.cols);
    let per_token: Vec<f64> =
        (0..logits.rows).map(|t| valid(t).map_or(0.0, |id| -logp.at(t, id))).collect();
    let num_valid = (0..logits.rows).filter(|&t| valid(t).is_some()).count();
    let loss = total(per_token.iter().copied()) / num_valid.max(1) as f64;
    CrossEntropy { loss, per_token, num_valid }
}

/// Gradient of the logits given `d_loss`: `(softmax(logits[t]) - onehot(targets[t])) d_loss / n`
/// for the `n` tokens that count, 0 for the others.
///
/// # Panics
/// As [`cross_entropy`].
pub fn cross_entropy_bwd(logits: &Mat, targets: &[i64], d_loss: f64) -> Mat {
    let n = cross_entropy(logits, targets).num_valid.max(1) as f64;
    let p = softmax(logits);
    Mat::from_fn(logits.rows, logits.cols, |t, c| match target(targets, t, logits.cols) {
        Some(id) => (p.at(t, c) - f64::from(u8::from(c == id))) * d_loss / n,
        None => 0.0,
    })
}
