//! The whole model on one rank.

use std::ops::Range;
use std::sync::Arc;

use tilewire_core::{Error, Result};
use tilewire_device::Tracer;
use tilewire_symm::World;

use crate::comm::{Comm, SMALL_EXTRA};
use crate::config::{Coord, Grid, ModelCfg, VOCAB};
use crate::data::Data;
use crate::experts::Experts;
use crate::layer::Shared;
use crate::local::{linear, linear_dgrad, linear_wgrad};
use crate::math;
use crate::params::{self, EMBED, HEAD, Kind, NORM, Param};

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
    /// Communication.
    pub comm: Comm,
    pub(crate) experts: Experts,
    /// Position in its sequence of each row of attention.
    positions: Vec<usize>,
    /// Weight of the load-balancing loss.
    pub balance: f32,
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

/// What one pass over the global batch gave.
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
        cfg: ModelCfg,
        grid: Grid,
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
        let experts = experts_of(cfg.experts, world.rank().idx(), world.size());
        let params = params::make(&cfg, &grid, coord, experts.clone(), seed)?;
        let len = |k: Kind| params.iter().filter(|p| p.kind == k).map(Param::len).sum();
        let lens = (len(Kind::Replicated), len(Kind::Sharded));
        let comm = Comm::new(world, &cfg, &grid, lens, tracer)?;
        let positions = comm.rows.attn.iter().map(|t| t % cfg.seq).collect();
        let experts = Experts::new(&cfg, &comm.stream, comm.ep.desc().capacity, experts.len())?;
        Ok(Self { cfg, grid, coord, params, comm, experts, positions, balance: 0.01 })
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
            positions: &self.positions,
            balance: self.balance,
        }
    }

    fn embed(&self, tokens: &[u8]) -> Result<Vec<f32>> {
        let d = self.cfg.d_model;
        self.params[EMBED].w.read(|b| {
            let w: &[f32] = bytemuck::cast_slice(b);
            tokens.iter().flat_map(|&t| w[t as usize * d..][..d].iter().copied()).collect()
        })
    }

    /// Logits of this rank's rows. Collective.
    ///
    /// # Errors
    /// The fault of a team.
    pub fn logits(&self, tokens: &[u8]) -> Result<Vec<f32>> {
        let mut x = self.embed(tokens)?;
        for l in 0..self.cfg.layers {
            x = self.shared().forward(l, &self.params, x)?.0;
        }
        let h = math::rms_norm(&x, &self.params[NORM].w.to_f32()?);
        linear(&self.comm.stream, &h, &self.params[HEAD].w)
    }

    /// Forward and backward: sets the gradients of all parameters (of the mean loss plus the
    /// weighted load-balancing loss), not yet summed over ranks. Collective.
    ///
    /// # Errors
    /// The fault of a team.
    pub fn forward_backward(&mut self, b: &Batch) -> Result<Losses> {
        self.params.iter_mut().for_each(|p| p.g.fill(0.0));
        let (layers, d) = (self.cfg.layers, self.cfg.d_model);
        let mut x = self.embed(&b.tokens)?;
        let (mut saved, mut balance) = (Vec::new(), 0.0);
        for l in 0..layers {
            let (y, aux, s) = self.shared().forward(l, &self.params, x)?;
            x = y;
            balance += aux / layers as f64;
            saved.push(s);
        }
        let gain = self.params[NORM].w.to_f32()?;
        let h = math::rms_norm(&x, &gain);
        let logits = linear(&self.comm.stream, &h, &self.params[HEAD].w)?;
        let scale = 1.0 / b.num_targets as f32;
        let (sum, d_logits) = math::cross_entropy(&logits, &b.targets, VOCAB, scale);
        let stream = self.comm.stream.clone();
        linear_wgrad(&stream, &d_logits, &h, (VOCAB, d), &mut self.params[HEAD].g)?;
        let dh = linear_dgrad(&stream, &d_logits, &self.params[HEAD].w)?;
        let mut dx = math::rms_norm_bwd(&x, &gain, &dh, &mut self.params[NORM].g);
        // The parameters are taken out so that layers can read the rest of the model.
        let mut params = std::mem::take(&mut self.params);
        let mut back = || -> Result<()> {
            for (l, s) in saved.iter().enumerate().rev() {
                dx = self.shared().backward(l, &mut params, s, std::mem::take(&mut dx))?;
            }
            Ok(())
        };
        let done = back();
        self.params = params;
        done?;
        for (row, &t) in dx.chunks_exact(d).zip(&b.tokens) {
            let g = &mut self.params[EMBED].g[t as usize * d..][..d];
            g.iter_mut().zip(row).for_each(|(g, v)| *g += v);
        }
        let mut small = vec![0.0f32; self.cfg.experts + SMALL_EXTRA];
        small[0] = (sum / b.num_targets as f64) as f32;
        self.comm.sum_small.run(&stream, &mut small)?;
        Ok(Losses { loss: f64::from(small[0]), balance })
    }

    /// Sums gradients over the ranks that hold the same parameters, and returns the norm of the
    /// gradient of the whole model. Collective.
    ///
    /// # Errors
    /// The fault of a team.
    pub fn reduce_gradients(&mut self) -> Result<f64> {
        for (kind, sum) in
            [(Kind::Replicated, &self.comm.sum_all), (Kind::Sharded, &self.comm.sum_shard)]
        {
            let of_kind = |p: &&mut Param| p.kind == kind;
            let mut flat: Vec<f32> = self
                .params
                .iter()
                .filter(|p| p.kind == kind)
                .flat_map(|p| p.g.iter().copied())
                .collect();
            sum.run(&self.comm.stream, &mut flat)?;
            let mut at = 0;
            for p in self.params.iter_mut().filter(of_kind) {
                let n = p.len();
                p.g.copy_from_slice(&flat[at..at + n]);
                at += n;
            }
        }
        // Each element counts once: replicated ones on rank 0, shards on one rank of each tp
        // coordinate, experts where they live.
        let first = self.comm.world.rank().idx() == 0;
        let first_of_shard = (self.coord.dp, self.coord.cp) == (0, 0);
        let square = |p: &Param| p.g.iter().map(|&g| f64::from(g) * f64::from(g)).sum::<f64>();
        let mine: f64 = self
            .params
            .iter()
            .filter(|p| match p.kind {
                Kind::Replicated => first,
                Kind::Sharded => first_of_shard,
                Kind::Expert => true,
            })
            .map(square)
            .sum();
        // Two floats carry a double's worth of digits.
        let mut small = vec![0.0f32; self.cfg.experts + SMALL_EXTRA];
        small[0] = mine as f32;
        small[1] = (mine - f64::from(small[0])) as f32;
        self.comm.sum_small.run(&self.comm.stream, &mut small)?;
        let square = f64::from(small[0]) + f64::from(small[1]);
        // Rounding may leave a hair below zero; a NaN must stay one.
        Ok(if square < 0.0 { 0.0 } else { square.sqrt() })
    }
}
