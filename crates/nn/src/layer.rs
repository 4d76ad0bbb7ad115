//! One layer, forward and backward.

use tilewire_core::Result;
use tilewire_device::Tensor;
use tilewire_ops::layers::{AddNorm, Heads, LayersPlan, NormBwd, Router, RouterBwd, Work};

use crate::activations::{Activations, Both, Saved};
use crate::attn::Qkv;
use crate::comm::Comm;
use crate::config::ModelCfg;
use crate::experts::Experts;
use crate::local::{Linear, Product};
use crate::params::{self, Param};

/// The context that all layers share.
pub(crate) struct Shared<'a> {
    /// Sizes.
    pub cfg: &'a ModelCfg,
    /// Communication.
    pub comm: &'a Comm,
    /// Products of the experts.
    pub experts: &'a Experts,
    /// The plan of the work between products.
    pub works: &'a LayersPlan,
    /// Local products.
    pub local: &'a Local,
    /// Parameters.
    pub params: &'a [Param],
    /// Tensors.
    pub activations: &'a Activations,
    /// Weight of the load-balancing loss.
    pub balance: f32,
    /// Layer whose closest choice of experts is turned over.
    #[cfg(test)]
    pub flip: Option<usize>,
}

/// Local products of the model.
pub(crate) struct Local {
    pub router: Linear,
    pub head: Linear,
    /// Gradients of the projections' weights.
    pub qkv: Product,
    pub out: Product,
}

impl Shared<'_> {
    pub fn run(&self, work: &impl Work) -> Result<()> {
        self.works.run(&self.comm.stream, work)
    }

    fn product(&self, p: &Product, (a, b): (&Tensor, &Tensor), out: &Tensor) -> Result<()> {
        p.run(&self.comm.stream, a, b, out)
    }

    /// Queues `sum = x + y` and its norm by parameter `w`; returns what was normed: `x` itself
    /// where nothing is added.
    pub fn add_norm<'t>(
        &self,
        (x, y): (&'t Tensor, Option<&Tensor>),
        sum: &'t Tensor,
        (w, out): (usize, &Tensor),
    ) -> Result<&'t Tensor> {
        let add = y.map(|y| (y.clone(), sum.clone()));
        let normed = if add.is_some() { sum } else { x };
        let w = self.params[w].w.clone();
        self.run(&AddNorm { x: x.clone(), add, w, out: out.clone() })?;
        Ok(normed)
    }

    /// Queues `to = residual + ` the gradient of the norm of `x` by parameter `w`, from `dy`.
    pub fn norm_bwd(
        &self,
        (x, w): (&Tensor, usize),
        dy: &Tensor,
        residual: Option<&Both>,
        to: &Both,
    ) -> Result<()> {
        let p = &self.params[w];
        self.run(&NormBwd {
            x: x.clone(),
            w: p.w.clone(),
            dy: dy.clone(),
            residual: residual.map(|r| r.wide.clone()),
            dx: to.wide.clone(),
            narrow: to.second(),
            dw: p.part.clone(),
        })
    }

    fn heads(&self, rows: &Tensor, qkv: &Qkv, join: bool) -> Result<()> {
        self.run(&Heads {
            rows: rows.clone(),
            q: qkv.q.clone(),
            k: qkv.k.clone(),
            v: qkv.v.clone(),
            positions: self.activations.positions.clone(),
            table: self.activations.rope.clone(),
            join,
        })
    }

    /// Returns what lies before layer `l` and is added to it: the input's place, and what is added
    /// there.
    fn input(&self, l: usize) -> (&Tensor, Option<&Tensor>) {
        match l.checked_sub(1) {
            None => (&self.activations.layers[0].x, None),
            Some(before) => self.output(before),
        }
    }

    /// The two parts of the output of layer `l`.
    pub fn output(&self, l: usize) -> (&Tensor, Option<&Tensor>) {
        (self.after_attention(l), (!self.cfg.no_experts).then_some(&self.activations.scratch.moe))
    }

    /// Returns what layer `l` makes of its input by attention: `x1`, or the input where there is
    /// none.
    fn after_attention(&self, l: usize) -> &Tensor {
        let s = &self.activations.layers[l];
        if self.cfg.no_attention { self.before_attention(l) } else { &s.x1 }
    }

    /// Returns what the first norm of layer `l` has normed.
    fn before_attention(&self, l: usize) -> &Tensor {
        match l {
            0 => &self.activations.layers[0].x,
            _ if self.cfg.no_experts => self.after_attention(l - 1),
            _ => &self.activations.layers[l].x,
        }
    }

    /// Queues the forward pass of layer `l` on this rank's rows.
    ///
    /// # Errors
    /// The fault of a team.
    pub fn forward(&self, l: usize) -> Result<()> {
        let (comm, i, p) = (self.comm, params::layer(l), self.params);
        let (s, r) = (&self.activations.layers[l], &self.activations.scratch);
        let x = self.add_norm(self.input(l), &s.x, (i.norm1, &r.h))?;
        comm.gather_gemm(&comm.proj.qkv, (&r.h, &p[i.qkv].w), (&r.rows, &s.gathered))?;
        self.heads(&r.rows, &s.qkv, false)?;
        comm.attn.forward(&comm.stream, &s.qkv, &s.attn)?;
        comm.gemm_scatter(&comm.proj.out, (&s.attn.out, &p[i.out].w), &r.proj)?;
        let attended = (!self.cfg.no_attention).then_some(&r.proj);
        self.add_norm((x, attended), &s.x1, (i.norm2, &s.h2))?;

        self.product(&self.local.router.fwd, (&s.h2, &p[i.router].w), &r.logits)?;
        self.run(&Router {
            logits: r.logits.clone(),
            probs: s.probs.clone(),
            topk: s.topk.clone(),
            weights: s.weights.clone(),
            stats: s.stats.clone(),
        })?;
        #[cfg(test)]
        if self.flip == Some(l) {
            comm.stream.synchronize()?;
            crate::flips::turn_over(s)?;
        }
        comm.sum_stats.run(&comm.stream, &s.stats, &s.load)?;
        self.expert_forward(i, s)
    }

    fn expert_forward(&self, i: params::LayerIdx, s: &Saved) -> Result<()> {
        let (comm, st, p) = (self.comm, &self.comm.stream, self.params);
        comm.ep.route(st, &s.topk, None, &s.handle)?.join(st)?;
        let weights = (Some(&s.weights), None);
        comm.ep.dispatch(st, &s.handle, &s.h2, weights, &s.recv)?.join(st)?;
        let x = (&s.recv.x, (&p[i.up].w, &p[i.down].w));
        self.experts.forward(st, s.handle.m_splits(), x, &s.experts)?;
        let (y, out) = (&s.experts.y, &self.activations.scratch.moe);
        comm.ep.combine(st, &s.handle, y, Some(&s.recv_weights), out)?.join(st).map(|_| ())
    }

    /// Queues the backward pass of layer `l`: from the gradient of its output to that of its input.
    /// The parts of its parameters' gradients are written.
    ///
    /// # Errors
    /// The fault of a team.
    pub fn backward(&self, l: usize, dx2: &Both, dx1: &Both) -> Result<()> {
        let (c, comm, i, p) = (self.cfg, self.comm, params::layer(l), self.params);
        let (s, r, st) =
            (&self.activations.layers[l], &self.activations.scratch, &self.comm.stream);
        if !c.no_experts {
            self.expert_backward(i, s, &dx2.narrow)?;
        }
        self.run(&RouterBwd {
            probs: s.probs.clone(),
            topk: s.topk.clone(),
            weights: s.weights.clone(),
            d_weights: (!c.no_experts).then(|| r.d_weights.clone()),
            load: s.load.clone(),
            // E sum_e f_e p_e, with f of choices and p of tokens.
            scale: self.balance * c.experts as f32
                / (c.tokens() as f32 * (c.tokens() * c.top_k) as f32),
            d_logits: r.d_logits.clone(),
        })?;
        let router = &self.local.router;
        self.product(&router.wgrad, (&r.d_logits, &s.h2), &p[i.router].part)?;
        let dgrad = if c.no_experts { &router.dgrad } else { &router.dgrad_add };
        self.product(dgrad, (&r.d_logits, &p[i.router].w), &r.dh)?;
        self.norm_bwd((self.after_attention(l), i.norm2), &r.dh, Some(dx2), dx1)?;
        if c.no_attention {
            return Ok(());
        }
        let proj = &comm.proj;
        let out = (&r.d_o, &r.gathered);
        comm.gather_gemm(&proj.out_bwd, (&dx1.narrow, &p[i.out].w), out)?;
        self.product(&self.local.out, (&r.gathered, &s.attn.out), &p[i.out].part)?;
        comm.attn.backward(st, (&s.qkv, &s.attn), &r.d_o, &r.d_qkv)?;
        self.heads(&r.rows, &r.d_qkv, true)?;
        self.product(&self.local.qkv, (&r.rows, &s.gathered), &p[i.qkv].part)?;
        comm.gemm_scatter(&proj.qkv_bwd, (&r.rows, &p[i.qkv].w), &r.dh)?;
        self.norm_bwd((self.before_attention(l), i.norm1), &r.dh, Some(dx1), dx2)
    }

    /// Gradients of the dispatched rows, of the routing weights and of the experts' weights.
    fn expert_backward(&self, i: params::LayerIdx, s: &Saved, d_out: &Tensor) -> Result<()> {
        let (comm, st, p) = (self.comm, &self.comm.stream, self.params);
        let r = &self.activations.scratch;
        let weights = Some((&s.recv_weights, &s.experts.y, &r.d_recv_weights));
        comm.ep.combine_bwd(st, &s.handle, d_out, weights, &r.dy)?.join(st)?;
        let x = (&s.recv.x, (&p[i.up].w, &p[i.down].w));
        let grads = (&r.experts, (&p[i.up].part, &p[i.down].part));
        self.experts.backward(st, s.handle.m_splits(), x, (&s.experts, &r.dy), grads)?;
        let from = (&r.experts.x, Some(&r.d_recv_weights));
        let to = (&r.dh, Some(&r.d_weights));
        comm.ep.dispatch_bwd(st, &s.handle, from, to)?.join(st).map(|_| ())
    }
}
