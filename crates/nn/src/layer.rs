//! One layer, forward and backward.

use tilewire_core::{DType, Result, Shape};
use tilewire_device::Tensor;
use tilewire_ops::attention::AttnOut;
use tilewire_ops::ep::{EpDispatch, EpHandle};

use crate::attn::Qkv;
use crate::comm::{Comm, SMALL_EXTRA};
use crate::config::ModelCfg;
use crate::experts::{ExpertGrads, ExpertOut, Experts};
use crate::local::{linear, linear_dgrad, linear_wgrad};
use crate::math::{self, Routed};
use crate::params::{self, Param};

/// What the forward pass of a layer keeps for its backward pass.
pub struct Saved {
    x: Vec<f32>,
    gathered: Vec<f32>,
    qkv: Qkv,
    attn: AttnOut,
    x1: Vec<f32>,
    h2: Vec<f32>,
    routed: Routed,
    /// Share of the global choices that went to each expert.
    load: Vec<f32>,
    handle: EpHandle,
    recv: EpDispatch,
    experts: ExpertOut,
}

/// What all layers share.
pub struct Shared<'a> {
    /// Sizes.
    pub cfg: &'a ModelCfg,
    /// Communication.
    pub comm: &'a Comm,
    /// Products of the experts.
    pub experts: &'a Experts,
    /// Position in its sequence of each row that attention sees here.
    pub positions: &'a [usize],
    /// Weight of the load-balancing loss.
    pub balance: f32,
}

fn add(a: &mut [f32], b: &[f32]) {
    a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
}

impl Shared<'_> {
    fn rope(&self, rows: &mut [f32], sign: f32) {
        math::rope(rows, self.positions, self.comm.attn.rope_layout(), sign);
    }

    fn tensor(&self, v: &[f32], cols: usize) -> Result<Tensor> {
        Tensor::from_slice(v, Shape::d2(v.len() / cols, cols))
    }

    /// Forward of layer `l` on this rank's rows; also the layer's load-balancing loss.
    ///
    /// # Errors
    /// The fault of a team.
    pub fn forward(&self, l: usize, p: &[Param], x: Vec<f32>) -> Result<(Vec<f32>, f64, Saved)> {
        let (c, comm, i) = (self.cfg, self.comm, params::layer(l));
        let w = |n: usize| p[n].w.to_f32();
        let h1 = math::rms_norm(&x, &w(i.norm1)?);
        let (cols, q) = (p[i.qkv].w.shape().dim(0), p[i.out].w.shape().dim(1));
        let shape = (cols, c.d_model);
        let (mut qkv, gathered) = comm.gather_gemm(&comm.qkv, &h1, &p[i.qkv].w, shape)?;
        self.rope(&mut qkv, 1.0);
        let qkv = comm.attn.split(&qkv)?;
        let attn = comm.attn.forward(&comm.stream, &qkv)?;
        let o = attn.out.to_f32()?;
        let mut x1 = comm.gemm_scatter(&comm.out, &o, &p[i.out].w, (c.d_model, q))?;
        if c.no_attention {
            x1.fill(0.0);
        }
        add(&mut x1, &x);

        let h2 = math::rms_norm(&x1, &w(i.norm2)?);
        let logits = linear(&comm.stream, &h2, &p[i.router].w)?;
        let routed = math::router(logits, c.experts, c.top_k);
        let (load, aux_loss) = self.balance(&routed)?;
        let (handle, recv) = self.dispatch(&h2, &routed)?;
        let experts = ExpertOut::new(c, comm.ep.desc().capacity);
        let w = (&p[i.up].w, &p[i.down].w);
        self.experts.forward(&comm.stream, handle.m_splits(), (&recv.x, w), &experts)?;
        let rows = self.comm.rows.own.len();
        let out = Tensor::poisoned(DType::F32, Shape::d2(rows, c.d_model));
        let weights = recv.weights.as_ref();
        let moe = comm.ep.combine(&comm.stream, &handle, &experts.y, weights, &out)?.wait()?;
        let mut x2 = moe.to_f32()?;
        if c.no_experts {
            x2.fill(0.0);
        }
        add(&mut x2, &x1);
        let saved = Saved { x, gathered, qkv, attn, x1, h2, routed, load, handle, recv, experts };
        Ok((x2, aux_loss, saved))
    }

    /// Share of each expert in the global choices, and the load-balancing loss
    /// `E sum_e f_e p_e` over the global batch (Fedus et al., Switch Transformers, eq. 4).
    fn balance(&self, r: &Routed) -> Result<(Vec<f32>, f64)> {
        let (c, e) = (self.cfg, self.cfg.experts);
        // Two rounds: choices, then probabilities, in one vector each.
        let mut counts = vec![0.0f32; e + SMALL_EXTRA];
        r.topk.iter().for_each(|&t| counts[t as usize] += 1.0);
        self.comm.sum_small.run(&self.comm.stream, &mut counts)?;
        let mut probs = vec![0.0f32; e + SMALL_EXTRA];
        for row in r.probs.chunks_exact(e) {
            add(&mut probs[..e], row);
        }
        self.comm.sum_small.run(&self.comm.stream, &mut probs)?;
        let choices = (c.tokens() * c.top_k) as f32;
        let load: Vec<f32> = counts[..e].iter().map(|n| n / choices).collect();
        let mean = |p: f32| f64::from(p) / c.tokens() as f64;
        let loss =
            e as f64 * load.iter().zip(&probs).map(|(&f, &p)| f64::from(f) * mean(p)).sum::<f64>();
        Ok((load, loss))
    }

    fn dispatch(&self, h: &[f32], r: &Routed) -> Result<(EpHandle, EpDispatch)> {
        let (c, comm) = (self.cfg, self.comm);
        let (rows, cap) = (comm.rows.own.len(), comm.ep.desc().capacity);
        let idx = Tensor::from_slice(&r.topk, Shape::d2(rows, c.top_k))?;
        let handle = comm.ep.route(&comm.stream, &idx, None, &comm.ep.handle()?)?.wait()?;
        let recv = EpDispatch {
            x: Tensor::poisoned(DType::F32, Shape::d2(cap, c.d_model)),
            scales: None,
            weights: Some(Tensor::poisoned(DType::F32, Shape::d1(cap))),
        };
        let (x, w) = (self.tensor(h, c.d_model)?, self.tensor(&r.weights, c.top_k)?);
        let recv = comm.ep.dispatch(&comm.stream, &handle, &x, (Some(&w), None), &recv)?.wait()?;
        Ok((handle, recv))
    }

    /// Backward of layer `l`: takes the gradient of its output, returns that of its input, adds
    /// to the parameters' gradients.
    ///
    /// # Errors
    /// The fault of a team.
    pub fn backward(
        &self,
        l: usize,
        p: &mut [Param],
        s: &Saved,
        dx2: Vec<f32>,
    ) -> Result<Vec<f32>> {
        let (c, comm, i) = (self.cfg, self.comm, params::layer(l));
        let d = c.d_model;
        let mut dx1 = dx2.clone();
        let (dh2, dw) = if c.no_experts {
            (vec![0.0; dx2.len()], vec![0.0; s.routed.weights.len()])
        } else {
            self.expert_backward(p, i, s, &dx2)?
        };
        let per_prob = self.balance * c.experts as f32 / c.tokens() as f32;
        let d_prob: Vec<f32> = s.load.iter().map(|f| f * per_prob).collect();
        let d_logits = math::router_bwd(&s.routed, &dw, &d_prob, c.top_k);
        linear_wgrad(&comm.stream, &d_logits, &s.h2, (c.experts, d), &mut p[i.router].g)?;
        let mut dh2 = dh2;
        add(&mut dh2, &linear_dgrad(&comm.stream, &d_logits, &p[i.router].w)?);
        let w = p[i.norm2].w.to_f32()?;
        add(&mut dx1, &math::rms_norm_bwd(&s.x1, &w, &dh2, &mut p[i.norm2].g));

        let mut dx = dx1.clone();
        if c.no_attention {
            return Ok(dx);
        }
        let cols = p[i.out].w.shape().dim(1);
        let (d_o, gathered) = comm.gather_gemm(&comm.out_bwd, &dx1, &p[i.out].w, (cols, d))?;
        linear_wgrad(&comm.stream, &gathered, &s.attn.out.to_f32()?, (d, cols), &mut p[i.out].g)?;
        let mut dqkv = comm.attn.backward(&comm.stream, &s.qkv, &s.attn, &d_o)?;
        self.rope(&mut dqkv, -1.0);
        let width = p[i.qkv].w.shape().dim(0);
        linear_wgrad(&comm.stream, &dqkv, &s.gathered, (width, d), &mut p[i.qkv].g)?;
        let dh1 = comm.gemm_scatter(&comm.qkv_bwd, &dqkv, &p[i.qkv].w, (d, width))?;
        let w = p[i.norm1].w.to_f32()?;
        add(&mut dx, &math::rms_norm_bwd(&s.x, &w, &dh1, &mut p[i.norm1].g));
        Ok(dx)
    }

    /// Gradients of the dispatched rows and of the routing weights.
    fn expert_backward(
        &self,
        p: &mut [Param],
        i: params::LayerIdx,
        s: &Saved,
        d_out: &[f32],
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        let (c, comm, st) = (self.cfg, self.comm, &self.comm.stream);
        let cap = comm.ep.desc().capacity;
        let dy = Tensor::poisoned(DType::F32, Shape::d2(cap, c.d_model));
        let d_weights = Tensor::poisoned(DType::F32, Shape::d1(cap));
        let d_out = self.tensor(d_out, c.d_model)?;
        let weights = s.recv.weights.as_ref().map(|w| (w, &s.experts.y, &d_weights));
        let dy = comm.ep.combine_bwd(st, &s.handle, &d_out, weights, &dy)?.join(st)?;

        let w = (&p[i.up].w, &p[i.down].w);
        let g = ExpertGrads::new(c, cap, w);
        let (splits, x) = (s.handle.m_splits(), (&s.recv.x, w));
        self.experts.backward(st, splits, x, (&s.experts, &dy), &g)?;
        add(&mut p[i.up].g, &g.up.to_f32()?);
        add(&mut p[i.down].g, &g.down.to_f32()?);

        let rows = comm.rows.own.len();
        let dx = Tensor::poisoned(DType::F32, Shape::d2(rows, c.d_model));
        let dw = Tensor::poisoned(DType::F32, Shape::d2(rows, c.top_k));
        let dx = comm
            .ep
            .dispatch_bwd(st, &s.handle, (&g.x, Some(&d_weights)), (&dx, Some(&dw)))?
            .wait()?;
        Ok((dx.to_f32()?, dw.to_f32()?))
    }
}
