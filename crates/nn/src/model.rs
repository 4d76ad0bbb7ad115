//! The whole model on one rank.

use std::ops::Range;
use std::sync::Arc;

use tilewire_core::{Error, Result};
use tilewire_device::{Stream, Tensor, Tracer};
use tilewire_ops::layers::{
    AdamStep, AdamW, CountStep, CrossEntropy, Embed, EmbedBwd, LayersDesc, LayersPlan, SquareSum,
};
use tilewire_symm::World;

use crate::activations::{Activations, Both};
use crate::comm::Comm;
use crate::config::{Coord, Grid, ModelCfg, VOCAB};
use crate::data::Data;
use crate::experts::Experts;
use crate::fault_propagation::FaultPropagation;
use crate::layer::{Local, Shared};
use crate::local::{Linear, Product};
use crate::params::{self, EMBED, Flat, HEAD, Kind, NORM, Param, Params};
use crate::place::Target;

/// One rank's part of the model.
pub struct Model {
    /// Sizes.
    pub cfg: ModelCfg,
    /// Division over ranks.
    pub grid: Grid,
    /// Place of this rank.
    pub coord: Coord,
    /// Parameters of this rank.
    pub params: Vec<Param>,
    flats: [Flat; 3],
    /// Communication.
    pub comm: Comm,
    pub(crate) experts: Experts,
    works: LayersPlan,
    local: Local,
    pub(crate) activations: Activations,
    /// Weight of the load-balancing loss.
    pub balance: f32,
    together: Arc<FaultPropagation>,
    /// Layer whose closest choice of experts is turned over.
    #[cfg(test)]
    pub(crate) flip: Option<usize>,
}

/// Tokens and targets of this rank's rows.
pub struct Batch {
    /// Input bytes.
    pub tokens: Vec<u8>,
    /// Next bytes, -1 where they do not count.
    pub targets: Vec<i64>,
    /// Targets that count, in the whole global batch.
    pub num_targets: usize,
}

/// The losses of one pass over the global batch.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Losses {
    /// Mean cross-entropy in nats.
    pub loss: f64,
    /// Mean load-balancing loss of the layers (1 is perfect balance).
    pub balance: f64,
}

/// Global numbers of the experts of rank `r` of `size`: as evenly as possible.
pub fn experts_of(experts: usize, r: usize, size: usize) -> Range<usize> {
    let at = |r: usize| r * (experts / size) + r.min(experts % size);
    at(r)..at(r + 1)
}

impl Model {
    /// Collective over the world.
    ///
    /// # Errors
    /// `InvalidArgument` if the model does not fit the grid; what forming teams gives.
    pub fn new(
        world: &World,
        (cfg, grid): (ModelCfg, Grid),
        target: Target,
        seed: u64,
        tracer: Option<Arc<Tracer>>,
    ) -> Result<Self> {
        grid.check(&cfg)?;
        if grid.size() != world.size() {
            return Err(Error::invalid("the grid is for another number of ranks")
                .expected(world.size())
                .seen(grid.size()));
        }
        let coord = grid.coord(world.rank());
        let mine = experts_of(cfg.experts, world.rank().idx(), world.size());
        let specs = params::specs(&cfg, &grid, coord, mine.clone());
        let len = |kind| params::len_of(&specs, kind);
        let lens = (len(Kind::Replicated), len(Kind::Sharded));
        let comm = Comm::new(world, (&cfg, &grid), target, lens, tracer)?;
        let stream = &comm.stream;
        let works = LayersPlan::new(LayersDesc {
            dtype: target.dtype,
            rows: comm.rows.attn.len(),
            cols: cfg.d_model,
            experts: cfg.experts,
        })?;
        works.prepare(stream)?;
        let Params { all, flats } = params::make(&specs, &comm.place, (&works, stream), seed)?;
        let capacity = comm.ep.desc().capacity;
        let experts = Experts::new(&cfg, (stream, target.dtype), capacity, mine.len())?;
        let local = local(&cfg, &comm, &all)?;
        let activations = Activations::new(&cfg, &comm)?;
        stream.synchronize()?;
        let balance = 0.01;
        let together = FaultPropagation::new(comm.teams(), &comm.place.device);
        Ok(Self {
            cfg,
            grid,
            coord,
            params: all,
            flats,
            comm,
            experts,
            works,
            local,
            activations,
            balance,
            together,
            #[cfg(test)]
            flip: None,
        })
    }

    /// Number of parameters of the whole model.
    pub fn num_params(&self) -> usize {
        self.params.iter().map(|p| p.global.0 * p.global.1).sum()
    }

    /// This rank's rows of global batch number `step`.
    pub fn batch(&self, data: &Data, seed: u64, step: usize) -> Batch {
        let (c, per) = (&self.cfg, self.cfg.batch / self.grid.dp);
        let all: Vec<(Vec<u8>, usize)> =
            (0..per).map(|b| data.sequence(seed, step, self.coord.dp * per + b, c.seq)).collect();
        let mut batch = Batch { tokens: Vec::new(), targets: Vec::new(), num_targets: 0 };
        for &t in &self.comm.rows.attn[self.comm.rows.own.clone()] {
            let (seq, free) = &all[t / c.seq];
            let i = t % c.seq;
            batch.tokens.push(seq[i]);
            // The target of row i is byte i + 1; the first `free` targets do not count.
            batch.targets.push(if i + 1 < *free { -1 } else { i64::from(seq[i + 1]) });
        }
        let free = all.first().map_or(0, |s| s.1);
        batch.num_targets = c.batch * (c.seq - free.saturating_sub(1));
        batch
    }

    fn shared(&self) -> Shared<'_> {
        Shared {
            cfg: &self.cfg,
            comm: &self.comm,
            experts: &self.experts,
            works: &self.works,
            local: &self.local,
            params: &self.params,
            activations: &self.activations,
            balance: self.balance,
            #[cfg(test)]
            flip: self.flip,
        }
    }

    /// Puts a batch where the next step reads it. No step may be in flight.
    ///
    /// # Errors
    /// `InvalidArgument` for another number of rows; what the device reports.
    pub fn load(&self, b: &Batch) -> Result<()> {
        let targets: Vec<i32> = b.targets.iter().map(|&t| t as i32).collect();
        upload(&self.activations.tokens, &b.tokens)?;
        upload(&self.activations.targets, bytemuck::cast_slice(&targets))
    }

    /// Queues the forward pass up to the logits.
    fn queue_forward(&self) -> Result<()> {
        let (s, r, layers) = (self.shared(), &self.activations, self.cfg.layers);
        s.run(&Embed {
            tokens: r.tokens.clone(),
            table: self.params[EMBED].w.clone(),
            x: r.layers[0].x.clone(),
        })?;
        (0..layers).try_for_each(|l| s.forward(l))?;
        s.add_norm(s.output(layers - 1), &r.x, (NORM, &r.scratch.h))?;
        let w = &self.params[HEAD].w;
        self.local.head.fwd.run(&self.comm.stream, &r.scratch.h, w, &r.logits)
    }

    /// Queues forward and backward of the batch that was loaded: writes this rank's parts of the
    /// gradients of all parameters, of the mean loss over `num_targets` plus the weighted
    /// load-balancing loss. Collective.
    ///
    /// # Errors
    /// The fault of a team.
    pub fn queue_forward_backward(&self, num_targets: usize) -> Result<()> {
        self.queue_forward()?;
        let (s, r, p, stream) = (self.shared(), &self.activations, &self.params, &self.comm.stream);
        s.run(&CrossEntropy {
            logits: r.logits.clone(),
            targets: r.targets.clone(),
            scale: 1.0 / num_targets as f64,
            d_logits: r.d_logits.clone(),
            loss: r.small.clone(),
        })?;
        let head = &self.local.head;
        head.wgrad.run(stream, &r.d_logits, &r.scratch.h, &p[HEAD].part)?;
        head.dgrad.run(stream, &r.d_logits, &p[HEAD].w, &r.scratch.dh)?;
        let [mut dx, mut other]: [&Both; 2] = r.scratch.dx.each_ref();
        // What was normed last: the last layer's output.
        let last = if self.cfg.no_experts { s.output(self.cfg.layers - 1).0 } else { &r.x };
        s.norm_bwd((last, NORM), &r.scratch.dh, None, dx)?;
        for l in (0..self.cfg.layers).rev() {
            s.backward(l, dx, other)?;
            if self.cfg.no_attention {
                (dx, other) = (other, dx);
            }
        }
        let grad = p[EMBED].part.clone();
        s.run(&EmbedBwd { tokens: r.tokens.clone(), dx: dx.wide.clone(), grad })
    }

    /// Queues the sums of gradients over the ranks that hold the same parameters, and then those of
    /// the loss and of the squares of the gradient of the whole model. Collective.
    ///
    /// # Errors
    /// The fault of a team.
    pub fn queue_reduce(&self) -> Result<()> {
        self.queue_sums()?;
        self.queue_small()
    }

    /// Queues the sums of gradients over the ranks that hold the same parameters.
    fn queue_sums(&self) -> Result<()> {
        let (comm, stream) = (&self.comm, &self.comm.stream);
        let [replicated, sharded, _] = &self.flats;
        comm.sum_all.run(stream, &replicated.part, &replicated.sum)?;
        comm.sum_shard.run(stream, &sharded.part, &sharded.sum)
    }

    /// Queues the sums of scalars over all ranks, which the optimizer looks at.
    fn queue_small(&self) -> Result<()> {
        let (comm, stream) = (&self.comm, &self.comm.stream);
        let [replicated, sharded, experts] = &self.flats;
        // Each element counts once: replicated ones on rank 0, shards on one rank of each tp
        // coordinate, experts where they live.
        let first = comm.world.rank().idx() == 0;
        let first_of_shard = (self.coord.dp, self.coord.cp) == (0, 0);
        let counted = [(replicated, first), (sharded, first_of_shard), (experts, true)];
        let of = counted.iter().filter(|c| c.1).map(|c| c.0.sum.clone()).collect();
        self.shared().run(&SquareSum { of, out: self.activations.small.rows(1, 2)? })?;
        // A sum that has failed is NaN from its first element on. Not every rank's sums are
        // counted, but what any of them lacks keeps all from the step.
        let sums = [replicated, sharded].map(|f| &f.sum).into_iter();
        let first = sums.filter(|t| t.shape().num_elems() > 0).map(|t| t.rows(0, 1));
        let of = first.collect::<Result<_>>()?;
        self.shared().run(&SquareSum { of, out: self.activations.small.rows(3, 2)? })?;
        comm.sum_small.run(stream, &self.activations.small, &self.activations.small_sum)
    }

    /// Queues the optimizer's step, which no rank takes unless all have whole sums of gradients.
    ///
    /// # Errors
    /// What queueing gives.
    pub fn queue_optimizer(&self, cfg: &AdamW) -> Result<()> {
        let (small, count) = (&self.activations.small_sum, &self.activations.count);
        for p in self.params.iter().filter(|p| !p.is_empty()) {
            self.shared().run(&AdamStep {
                cfg: *cfg,
                decay: p.decay,
                w: p.w.clone(),
                master: p.master.clone(),
                g: p.g.clone(),
                m: p.m.clone(),
                v: p.v.clone(),
                small: small.clone(),
                count: count.clone(),
            })?;
        }
        self.shared().run(&CountStep { small: small.clone(), count: count.clone() })
    }

    /// Waits for what is queued.
    ///
    /// # Errors
    /// The fault of a team; what the device reports.
    pub fn finish(&self) -> Result<()> {
        let done = self.comm.stream.synchronize();
        // The first fault says more than its consequence for the team that the stream met.
        self.together.check().and(done)
    }

    /// Returns the first fault of a team of this model, if `e` is a fault that may be its
    /// consequence; otherwise `e`.
    pub fn cause_of(&self, e: Error) -> Error {
        let first = if e.is_team_fault() { self.together.check().err() } else { None };
        first.unwrap_or(e)
    }

    /// Sets the number of steps taken.
    pub(crate) fn set_count(&self, steps: usize) -> Result<()> {
        upload(&self.activations.count, &(steps as i32).to_ne_bytes())
    }

    /// The losses of the last step that has run, and the norm of its gradient.
    ///
    /// # Errors
    /// What the device reports.
    pub fn losses(&self) -> Result<(Losses, f64)> {
        let small = self.activations.small_sum.to_f32()?;
        let square = f64::from(small[1]) + f64::from(small[2]);
        // Rounding may leave a hair below zero; a NaN must stay one.
        let norm = if square < 0.0 { 0.0 } else { square.sqrt() };
        Ok((Losses { loss: f64::from(small[0]), balance: self.balance_loss()? }, norm))
    }

    /// The mean over layers of `E sum_e f_e p_e` over the global batch (Fedus et al., Switch
    /// Transformers, eq. 4).
    fn balance_loss(&self) -> Result<f64> {
        let (c, e) = (&self.cfg, self.cfg.experts);
        let (choices, tokens) = ((c.tokens() * c.top_k) as f64, c.tokens() as f64);
        let mut sum = 0.0;
        for l in &self.activations.layers {
            let load = l.load.to_f32()?;
            let share = |i: usize| f64::from(load[i]) / choices * f64::from(load[e + i]) / tokens;
            sum += e as f64 * (0..e).map(share).sum::<f64>();
        }
        Ok(sum / c.layers as f64)
    }

    /// Logits of this rank's rows. Collective.
    ///
    /// # Errors
    /// The fault of a team.
    pub fn logits(&self, tokens: &[u8]) -> Result<Vec<f32>> {
        upload(&self.activations.tokens, tokens)?;
        self.queue_forward()?;
        self.finish()?;
        self.activations.logits.to_f32()
    }

    /// Forward, backward and the sums over ranks, to their end; returns losses and the norm of the
    /// gradient. Collective.
    ///
    /// # Errors
    /// The fault of a team.
    pub fn gradients(&self, b: &Batch) -> Result<(Losses, f64)> {
        self.load(b)?;
        self.queue_forward_backward(b.num_targets)?;
        self.queue_reduce()?;
        self.finish()?;
        self.losses()
    }

    /// The stream that everything runs on.
    pub fn stream(&self) -> &Stream {
        &self.comm.stream
    }
}

fn upload(t: &Tensor, bytes: &[u8]) -> Result<()> {
    tilewire_device::Buffer::upload(t, bytes)
}

fn local(c: &ModelCfg, comm: &Comm, p: &[Param]) -> Result<Local> {
    let (s, t, i) = (&comm.stream, comm.place.dtype, params::layer(0));
    let (own, n, d) = (comm.rows.own.len(), comm.rows.attn.len(), c.d_model);
    let dims = |i: usize| (p[i].w.shape().dim(0), p[i].w.shape().dim(1));
    let (qkv, out) = (dims(i.qkv), dims(i.out));
    Ok(Local {
        router: Linear::new(s, (own, c.experts, d), t)?,
        head: Linear::new(s, (own, VOCAB, d), t)?,
        qkv: Product::wgrad(s, (n, qkv.0, qkv.1), t)?,
        out: Product::wgrad(s, (n, out.0, out.1), t)?,
    })
}

#[cfg(test)]
mod tests {
    use tilewire_symm::WorldCfg;

    use super::*;

    /// The sum over shards fails on one rank only, whose sums the norm does not count: nobody takes
    /// the step.
    #[test]
    fn what_one_rank_lacks_keeps_all_from_the_step() {
        let cfg = ModelCfg {
            layers: 1,
            d_model: 16,
            heads: 4,
            kv_heads: 2,
            head_dim: 8,
            experts: 6,
            top_k: 2,
            d_ff: 12,
            seq: 20,
            batch: 4,
            no_attention: false,
            no_experts: false,
        };
        World::run_threads(2, WorldCfg::for_tests(), |world| {
            let grid = Grid { dp: 2, cp: 1, tp: 1 };
            let model = Model::new(&world, (cfg, grid), Target::default(), 7, None)?;
            let values = || -> Result<Vec<Vec<f32>>> {
                model.params.iter().map(|p| p.values().to_f32()).collect()
            };
            let data = Data::Text((0..2000u32).map(|i| (i % 97) as u8).collect());
            for bad in [true, false] {
                let batch = model.batch(&data, 7, 0);
                model.load(&batch)?;
                model.queue_forward_backward(batch.num_targets)?;
                model.queue_sums()?;
                model.finish()?;
                let before = values()?;
                if bad && world.rank().get() == 1 {
                    model.flats[1].sum.poison()?;
                }
                model.queue_small()?;
                model.queue_optimizer(&AdamW::default())?;
                model.finish()?;
                assert_eq!(values()? == before, bad, "rank {}, poison: {bad}", world.rank());
            }
            model.comm.world.agree(true)?;
            Ok(())
        })
        .unwrap();
    }
}
