//! The router of `tilewire bench`, and its gradient.

use tilewire::core::Rng;
use tilewire::ops::layers::{Router, RouterBwd};
use tilewire::prelude::*;
use tilewire_oracle::{Mat, nn};

use super::layers::{Layer, row_of};
use super::memory::{Judge, Pass};
use super::quant::matrix;

/// Allowed error of the forward pass, as a share of the largest of a row: exponentials are of f32.
const FORWARD: f64 = 2e-6;
/// The same of the gradient, which divides by the sum of the chosen probabilities.
const BACKWARD: f64 = 2e-5;

/// Compares each row up to a share of its largest.
fn near_rows(j: &mut Judge, got: &Tensor, want: &Mat, share: f64) -> Result<()> {
    let (cols, u) = (want.cols, got.dtype().unit_roundoff());
    j.same(&[got.shape().num_elems()], &[want.data.len()]);
    for (r, row) in got.to_f32()?.chunks(cols).enumerate() {
        let most = want.row(r).iter().fold(0.0f64, |m, v| m.max(v.abs()));
        for (g, w) in row.iter().zip(want.row(r)) {
            j.near(f64::from(*g), *w, share * most + u * w.abs());
        }
    }
    Ok(())
}

impl<'a> Layer<'a> {
    /// The gradient is of what the router left.
    pub fn router(&'a self) -> Result<Vec<Pass<'a>>> {
        let ((m, _), t, (e, k)) = (self.sizes(), self.b.o.dtype, self.b.o.experts);
        if k > e {
            return Err(Error::invalid("more choices than experts").expected(e).seen(k));
        }
        let mut rng = Rng::new(6 + self.b.team.rank().idx() as u64);
        // On a grid, so that only equal ones are near each other: they go to the lower expert.
        let grid = |rng: &mut Rng| rng.below(2048) as f32 / 256.0 - 4.0;
        let logits: Vec<f32> = (0..m * e).map(|_| grid(&mut rng)).collect();
        let logits = self.put(Tensor::from_slice(&logits, Shape::d2(m, e)))?;
        let f32s = |cols| self.empty(DType::F32, m, cols);
        let fwd = Router {
            logits,
            probs: f32s(e)?,
            topk: self.empty(DType::I64, m, k)?,
            weights: f32s(k)?,
            stats: self.empty(DType::F32, 1, 2 * e)?,
        };
        let bwd = RouterBwd {
            probs: fwd.probs.clone(),
            topk: fwd.topk.clone(),
            weights: fwd.weights.clone(),
            d_weights: Some(self.wide(1, m, k)?),
            load: fwd.stats.clone(),
            // The gradient of the balancing loss, E / T times the sum of shares times
            // probabilities, where a share is a load over T k.
            scale: e as f32 / (m * m * k) as f32,
            d_logits: self.empty(t, m, e)?,
        };
        let (a, b) = (&fwd, &bwd);
        let reads = [&b.probs, &b.topk, &b.weights, &b.load].into_iter().chain(&b.d_weights);
        let reads = reads.collect();
        let (f, g) = (fwd.clone(), (fwd.logits.clone(), bwd.clone()));
        let there = move |j: &mut Judge| judge_router(j, &f);
        let back = move |j: &mut Judge| {
            let (logits, work) = &g;
            let Some(d) = &work.d_weights else { return Err(Error::internal("no gradient")) };
            let out = nn::router(&matrix(logits)?, k);
            near_rows(j, &work.d_logits, &nn::router_bwd(&out, &matrix(d)?, 1.0), BACKWARD)
        };
        let writes = vec![&a.probs, &a.topk, &a.weights, &a.stats];
        Ok(vec![
            self.pass("router/fwd", a, (vec![&a.logits], writes), there),
            self.pass("router/bwd", b, (reads, vec![&b.d_logits]), back),
        ])
    }
}

fn judge_router(j: &mut Judge, work: &Router) -> Result<()> {
    let (logits, k) = (matrix(&work.logits)?, work.topk.shape().dim(1));
    let out = nn::router(&logits, k);
    j.same(&work.topk.to_vec::<i64>()?, &out.topk.idx);
    near_rows(j, &work.probs, &out.probs, FORWARD)?;
    near_rows(j, &work.weights, &out.weights, FORWARD)?;
    let e = logits.cols;
    let counts = out.topk.counts(e).into_iter().map(|c| c as f32);
    let stats = work.stats.to_f32()?;
    j.same(&stats[row_of(0, e)], &counts.collect::<Vec<_>>());
    for (got, want) in stats[row_of(1, e)].iter().zip(out.probs.col_sums()) {
        j.near(f64::from(*got), want, 1e-6 * want * (logits.rows as f64).sqrt());
    }
    Ok(())
}
