//! Top-k router of a mixture of experts, with its load-balancing loss.

use super::loss::softmax;
use crate::Mat;
use crate::mat::total;
use crate::permute::TopK;

/// Result of [`router`].
#[derive(Clone, PartialEq, Debug)]
pub struct RouterOut {
    /// Chosen experts, most probable first.
    pub topk: TopK,
    /// Their weights, `[T, k]`; each row sums to 1.
    pub weights: Mat,
    /// Softmax over all experts, `[T, E]`.
    pub probs: Mat,
    /// [`load_balancing_loss`] of the choices.
    pub aux_loss: f64,
}

/// `probs = softmax(logits)` over all experts; the `k` largest are chosen (of equals the lower
/// expert number) and their probabilities divided by their sum (Mixtral, Qwen3-MoE
/// `norm_topk_prob`). `logits` is `[T, E]` of the global batch.
///
/// # Panics
/// If there are fewer than `k` experts.
pub fn router(logits: &Mat, k: usize) -> RouterOut {
    assert!(k <= logits.cols, "{k} of {} experts", logits.cols);
    let probs = softmax(logits);
    let mut idx = Vec::new();
    for t in 0..logits.rows {
        let mut order: Vec<usize> = (0..logits.cols).collect();
        // Stable, so equals stay in expert order. By logit: softmax may round different ones
        // together. Adding 0 makes -0 the equal of +0.
        order.sort_by(|&a, &b| (logits.at(t, b) + 0.0).total_cmp(&(logits.at(t, a) + 0.0)));
        idx.extend(order[..k].iter().map(|&e| e as i64));
    }
    let topk = TopK::new(logits.rows, k, idx);
    let chosen =
        Mat::from_fn(logits.rows, k, |t, j| topk.expert(t, j).map_or(0.0, |e| probs.at(t, e)));
    let weights =
        Mat::from_fn(logits.rows, k, |t, j| chosen.at(t, j) / total(chosen.row(t).iter().copied()));
    let aux_loss = load_balancing_loss(&probs, &topk);
    RouterOut { topk, weights, probs, aux_loss }
}

/// Share `f_e` of the `T k` choices that went to each expert; zeros without tokens.
fn shares(topk: &TopK, num_experts: usize) -> Vec<f64> {
    let n = (topk.num_tokens * topk.k).max(1) as f64;
    topk.counts(num_experts).into_iter().map(|c| c as f64 / n).collect()
}

/// `E sum_e f_e p_e` over the global batch: `f_e` is the share of the `T k` choices that went to
/// expert `e`, `p_e` the mean of `probs[t, e]` over the tokens; 1 when both are uniform (Fedus et
/// al. 2021, Switch Transformer, eq. 4-6, with the `k` choices of GShard counted as `1/k` each).
///
/// # Panics
/// If shapes do not fit.
pub fn load_balancing_loss(probs: &Mat, topk: &TopK) -> f64 {
    assert_eq!(probs.rows, topk.num_tokens, "one row for each token");
    let (f, p_sum) = (shares(topk, probs.cols), probs.col_sums());
    let scale = probs.cols as f64 / probs.rows.max(1) as f64;
    scale * total(f.iter().zip(&p_sum).map(|(f, p)| f * p))
}

/// Gradient of the logits given those of the weights (`[T, k]`) and of the auxiliary loss. The
/// choice, and with it `f_e`, counts as constant.
///
/// With `S_t` the sum of the chosen probabilities:
/// `dprob[t, e] = d_aux E f_e / T + [e = topk(t, j)] (d_w[t, j] - sum_i d_w[t, i] w[t, i]) / S_t`,
/// then the softmax: `dlogit = prob (dprob - sum_e prob dprob)`.
///
/// # Panics
/// If shapes do not fit.
pub fn router_bwd(out: &RouterOut, d_weights: &Mat, d_aux: f64) -> Mat {
    let (w, p) = (&out.weights, &out.probs);
    assert_eq!((d_weights.rows, d_weights.cols), (w.rows, w.cols), "weights are [T, k]");
    let f = shares(&out.topk, p.cols);
    let mut dprobs =
        Mat::from_fn(p.rows, p.cols, |_, e| d_aux * p.cols as f64 * f[e] / p.rows as f64);
    for t in 0..p.rows {
        let chosen = |j: usize| out.topk.expert(t, j);
        let sum = total((0..w.cols).filter_map(chosen).map(|e| p.at(t, e)));
        let mean = total((0..w.cols).map(|j| d_weights.at(t, j) * w.at(t, j)));
        for j in 0..w.cols {
            if let Some(e) = chosen(j) {
                *dprobs.at_mut(t, e) += (d_weights.at(t, j) - mean) / sum;
            }
        }
    }
    let inner: Vec<f64> =
        (0..p.rows).map(|t| total((0..p.cols).map(|e| p.at(t, e) * dprobs.at(t, e)))).collect();
    Mat::from_fn(p.rows, p.cols, |t, e| p.at(t, e) * (dprobs.at(t, e) - inner[t]))
}
