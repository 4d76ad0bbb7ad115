//! Training steps.

use std::time::Instant;

use serde::Serialize;
use tilewire_core::{Error, Result};
use tilewire_device::jit::KernelTimes;
use tilewire_device::{Device, GraphExec};
use tilewire_ops::layers::AdamW;

use crate::data::Data;
use crate::model::Model;

/// The parameters of a training run.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TrainCfg {
    /// Seed of parameters and batches.
    pub seed: u64,
    /// Optimizer.
    pub optim: AdamW,
}

/// One line of the metrics file.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct StepReport {
    /// Number of the step, from 0.
    pub step: usize,
    /// Mean cross-entropy over the global batch, nats per byte.
    pub loss: f64,
    /// Mean load-balancing loss of the layers; 1 is perfect balance.
    pub balance: f64,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Tokens of the global batch per second.
    pub tokens_per_s: f64,
    /// Share of communication that was hidden; `null` where the machine is not calibrated.
    pub hidden: Option<f64>,
    /// Seconds that this rank's device has spent so far on finding, compiling and loading kernels;
    /// `null` on the host, which has none.
    pub kernels_s: Option<f64>,
}

/// Runs steps.
pub struct Trainer {
    /// The model.
    pub model: Model,
    /// The parameters of the run.
    pub cfg: TrainCfg,
    /// Number of the next step.
    pub step: usize,
    /// Share of communication that is hidden, once calibrated.
    pub hidden: Option<f64>,
    /// Replay one graph from the second step on; the default on GPUs.
    pub use_graph: bool,
    /// A checkpoint was found damaged while it was restored: parameters of two steps are mixed.
    pub(crate) half_restored: bool,
    graph: Option<(Captured, GraphExec)>,
    /// Of the step before: who changes numbers at every step is not to capture every step.
    last: Option<Captured>,
}

/// The values that a captured step holds as arguments of its kernels: targets of the batch, the
/// optimizer's and the balance's weight.
type Captured = (usize, AdamW, f32);

impl Trainer {
    /// A trainer at step 0.
    pub fn new(model: Model, cfg: TrainCfg) -> Self {
        let use_graph = matches!(model.comm.place.device, Device::Cuda(_));
        let (graph, last, half_restored) = (None, None, false);
        Self { model, cfg, step: 0, hidden: None, use_graph, half_restored, graph, last }
    }

    /// Collective: measures the share of communication that is hidden (see
    /// [`crate::calibrate::hidden_share`]); later reports carry it.
    ///
    /// # Errors
    /// The fault of a team.
    pub fn calibrate(&mut self) -> Result<()> {
        self.hidden = crate::calibrate::hidden_share(&self.model)?;
        Ok(())
    }

    /// Returns how many kernels the model's device was asked for so far, and how long that took;
    /// none on the host.
    pub fn kernel_times(&self) -> Option<KernelTimes> {
        match &self.model.comm.place.device {
            Device::Host => None,
            Device::Cuda(ctx) => Some(ctx.kernel_times()),
        }
    }

    /// Queues a whole step on the batch that was loaded.
    fn queue(&self, num_targets: usize) -> Result<()> {
        self.model.queue_forward_backward(num_targets)?;
        self.model.queue_reduce()?;
        self.model.queue_optimizer(&self.cfg.optim)
    }

    /// Runs a step on the batch that was loaded: the first directly, the others as one graph.
    fn run(&mut self, num_targets: usize) -> Result<()> {
        let stream = self.model.stream().clone();
        let captured = (num_targets, self.cfg.optim, self.model.balance);
        let last = self.last.replace(captured);
        let is_other = self.graph.as_ref().is_none_or(|(c, _)| *c != captured);
        // The first step is not captured: it is what a graph is compared with. Nor is one that has
        // other numbers than the one before.
        if !self.use_graph || self.step == 0 || is_other && last != Some(captured) {
            return self.queue(num_targets);
        }
        if is_other {
            stream.begin_capture()?;
            let queued = self.queue(num_targets);
            let graph = stream.end_capture();
            queued?;
            self.graph = Some((captured, graph?.instantiate()?));
        }
        self.graph.as_ref().map_or(Ok(()), |(_, g)| stream.replay(g))
    }

    /// One step on global batch number `self.step`. Collective. No rank takes the
    /// optimizer's step from sums that are not whole on all ranks.
    ///
    /// # Errors
    /// The fault of a team; `InvalidArgument` if the loss is not finite: the rate or the data are
    /// not what the model can learn from, or a checkpoint was restored in part.
    pub fn step(&mut self, data: &Data) -> Result<StepReport> {
        if self.half_restored {
            let text = "the parameters are of two steps: a checkpoint was restored in part";
            return Err(Error::invalid(text).hint("resume from one that is whole"));
        }
        self.take_step(data).map_err(|e| self.model.cause_of(e))
    }

    fn take_step(&mut self, data: &Data) -> Result<StepReport> {
        let start = Instant::now();
        let batch = self.model.batch(data, self.cfg.seed, self.step);
        self.model.load(&batch)?;
        self.run(batch.num_targets)?;
        self.model.finish()?;
        let (losses, norm) = self.model.losses()?;
        // The optimizer looks at the same numbers, which have the same bits on every rank.
        let good = losses.loss.is_finite() && norm.is_finite();
        if !self.model.comm.world.agree(good)? {
            return Err(Error::invalid(format!(
                "step {}: loss {} or gradient norm {norm} is not finite",
                self.step, losses.loss
            ))
            .hint(
                "the training diverges: lower the learning rate (`--lr`), look at the data, or resume from an earlier \
                 checkpoint with a lower rate",
            ));
        }
        let report = StepReport {
            step: self.step,
            loss: losses.loss,
            balance: losses.balance,
            grad_norm: norm,
            lr: self.cfg.optim.rate(self.step),
            tokens_per_s: self.model.cfg.tokens() as f64 / start.elapsed().as_secs_f64(),
            hidden: self.hidden,
            kernels_s: self.kernel_times().map(|t| t.took.as_secs_f64()),
        };
        self.step += 1;
        Ok(report)
    }

    /// Sets the number of the next step, as a checkpoint says.
    ///
    /// # Errors
    /// What the device reports.
    pub(crate) fn resume_at(&mut self, step: usize) -> Result<()> {
        self.step = step;
        self.model.set_count(step)
    }

    /// Continues `prompt` by `num` bytes, each the most likely one. Collective; all ranks return
    /// the same text.
    ///
    /// # Errors
    /// `InvalidArgument` for an empty prompt; the fault of a team.
    pub fn generate(&self, prompt: &[u8], num: usize) -> Result<Vec<u8>> {
        if prompt.is_empty() {
            return Err(Error::invalid("the prompt is empty"));
        }
        let (m, mut text) = (&self.model, prompt.to_vec());
        let seq = m.cfg.seq;
        for _ in 0..num {
            // The window that ends with the last byte, at the front of the first sequence.
            let window = &text[text.len().saturating_sub(seq)..];
            let own = &m.comm.rows.attn[m.comm.rows.own.clone()];
            let byte = |t: &usize| window.get(t % seq).copied().unwrap_or(b' ');
            let logits = m.logits(&own.iter().map(byte).collect::<Vec<_>>())?;
            // Exactly one rank of the first dp part has the row of the last byte.
            let want = window.len() - 1;
            let mine = own.iter().position(|&t| t == want).filter(|_| m.coord.dp == 0);
            let best = mine.map(|r| {
                let row = &logits[r * 256..][..256];
                (0..256).fold(0, |b, i| if row[i] > row[b] { i } else { b }) as u8
            });
            let all = m.comm.world.exchange("generate", &best.map_or(vec![], |b| vec![b]))?;
            let next = all.iter().find_map(|a| a.first().copied());
            text.push(next.ok_or_else(|| Error::internal("no rank has the last row"))?);
        }
        Ok(text.split_off(prompt.len()))
    }
}
