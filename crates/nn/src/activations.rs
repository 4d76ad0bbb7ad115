//! Preallocated activations and gradients: a step allocates nothing, so that it can be captured.

use tilewire_core::{DType, Result, Shape};
use tilewire_device::Tensor;
use tilewire_ops::attention::AttnOut;
use tilewire_ops::ep::{EpDispatch, EpHandle};
use tilewire_ops::layers::math;

use crate::attn::Qkv;
use crate::comm::{Comm, SMALL};
use crate::config::{ModelCfg, VOCAB};
use crate::experts::{ExpertGrads, ExpertOut};
use crate::place::Place;

/// Rows that are kept in f32 and, for products, in the model's type; one tensor if that is f32.
#[derive(Clone)]
pub(crate) struct Both {
    pub wide: Tensor,
    pub narrow: Tensor,
}

impl Both {
    fn new(place: &Place, rows: usize, cols: usize) -> Result<Self> {
        let wide = place.wide(rows, cols)?;
        let narrow =
            if place.dtype == DType::F32 { wide.clone() } else { place.narrow(rows, cols)? };
        Ok(Self { wide, narrow })
    }

    /// The second tensor, if there are two.
    pub fn second(&self) -> Option<Tensor> {
        (self.narrow.dtype() != DType::F32).then(|| self.narrow.clone())
    }
}

/// The results that the forward pass of a layer keeps for its backward pass.
pub(crate) struct Saved {
    /// Input, `[own, d]` f32.
    pub x: Tensor,
    /// Normed rows of the tp team, `[n, d]`.
    pub gathered: Tensor,
    pub qkv: Qkv,
    pub attn: AttnOut,
    /// After attention, `[own, d]` f32.
    pub x1: Tensor,
    /// Its norm, `[own, d]`.
    pub h2: Tensor,
    /// `[own, experts]` f32.
    pub probs: Tensor,
    /// `[own, top_k]` i64.
    pub topk: Tensor,
    /// `[own, top_k]` f32.
    pub weights: Tensor,
    /// `[2 experts, 1]` f32, of this rank's rows and of all.
    pub stats: Tensor,
    pub load: Tensor,
    pub handle: EpHandle,
    pub recv: EpDispatch,
    /// The weights in it, `[capacity]` f32.
    pub recv_weights: Tensor,
    pub experts: ExpertOut,
}

impl Saved {
    fn new(c: &ModelCfg, comm: &Comm) -> Result<Self> {
        let (p, own, n) = (&comm.place, comm.rows.own.len(), comm.rows.attn.len());
        let (d, cap) = (c.d_model, comm.ep.desc().capacity);
        let f32s = |shape| Tensor::poisoned_on(&p.device, DType::F32, shape);
        let recv_weights = f32s(Shape::d1(cap))?;
        Ok(Self {
            x: p.wide(own, d)?,
            gathered: p.narrow(n, d)?,
            qkv: comm.attn.qkv(p)?,
            attn: comm.attn.out(p)?,
            x1: p.wide(own, d)?,
            h2: p.narrow(own, d)?,
            probs: p.wide(own, c.experts)?,
            topk: Tensor::poisoned_on(&p.device, DType::I64, Shape::d2(own, c.top_k))?,
            weights: p.wide(own, c.top_k)?,
            stats: p.wide(2 * c.experts, 1)?,
            load: p.wide(2 * c.experts, 1)?,
            handle: comm.ep.handle()?,
            recv: EpDispatch {
                x: p.narrow(cap, d)?,
                scales: None,
                weights: Some(recv_weights.clone()),
            },
            recv_weights,
            experts: ExpertOut::new(c, cap, p)?,
        })
    }
}

/// The tensors that every layer overwrites.
pub(crate) struct Scratch {
    /// `[own, d]`: norms.
    pub h: Tensor,
    /// `[n, qkv columns]`, and its gradient.
    pub rows: Tensor,
    /// `[own, d]`: what attention adds.
    pub proj: Tensor,
    /// `[own, d]`: what the experts add.
    pub moe: Tensor,
    /// `[own, experts]` f32.
    pub logits: Tensor,
    /// Gradients of layers' outputs, by turns.
    pub dx: [Both; 2],
    /// Gradients of normed rows, `[own, d]`.
    pub dh: Tensor,
    /// Gradients of the weights of choices, `[own, top_k]` f32.
    pub d_weights: Tensor,
    /// `[own, experts]`.
    pub d_logits: Tensor,
    /// Gradients of expert outputs, `[capacity, d]`.
    pub dy: Tensor,
    /// `[capacity]` f32.
    pub d_recv_weights: Tensor,
    pub experts: ExpertGrads,
    /// Gathered gradients of the projection's output, `[n, d]`.
    pub gathered: Tensor,
    /// Gradients of attention's output, `[n, q columns]`.
    pub d_o: Tensor,
    pub d_qkv: Qkv,
}

impl Scratch {
    fn new(c: &ModelCfg, comm: &Comm) -> Result<Self> {
        let (p, own, n) = (&comm.place, comm.rows.own.len(), comm.rows.attn.len());
        let (d, cap) = (c.d_model, comm.ep.desc().capacity);
        let d_qkv = comm.attn.qkv(p)?;
        let (q, kv) = (d_qkv.q.shape().dim(1), d_qkv.k.shape().dim(1));
        let own_rows = || p.narrow(own, d);
        Ok(Self {
            h: own_rows()?,
            rows: p.narrow(n, q + 2 * kv)?,
            proj: own_rows()?,
            moe: own_rows()?,
            logits: p.wide(own, c.experts)?,
            dx: [Both::new(p, own, d)?, Both::new(p, own, d)?],
            dh: own_rows()?,
            d_weights: p.wide(own, c.top_k)?,
            d_logits: p.narrow(own, c.experts)?,
            dy: p.narrow(cap, d)?,
            d_recv_weights: Tensor::poisoned_on(&p.device, DType::F32, Shape::d1(cap))?,
            experts: ExpertGrads::new(c, cap, p)?,
            gathered: p.narrow(n, d)?,
            d_o: p.narrow(n, q)?,
            d_qkv,
        })
    }
}

/// All tensors of a step.
pub(crate) struct Activations {
    /// Tokens of this rank's rows, `[own]` u8.
    pub tokens: Tensor,
    /// Targets, `[own]` i32, -1 where they do not count.
    pub targets: Tensor,
    /// Position in its sequence of each row of attention, `[n]` i32.
    pub positions: Tensor,
    /// Rotary table.
    pub rope: Tensor,
    pub layers: Vec<Saved>,
    pub scratch: Scratch,
    /// The output of the last layer, `[own, d]` f32.
    pub x: Tensor,
    /// Logits and their gradient, `[own, 256]`.
    pub logits: Tensor,
    pub d_logits: Tensor,
    /// Loss and norm of this rank, and of all: `[SMALL, 1]` f32.
    pub small: Tensor,
    pub small_sum: Tensor,
    /// Steps taken, `[1]` i32.
    pub count: Tensor,
}

impl Activations {
    pub fn new(c: &ModelCfg, comm: &Comm) -> Result<Self> {
        let (p, own) = (&comm.place, comm.rows.own.len());
        let positions: Vec<i32> = comm.rows.attn.iter().map(|t| (t % c.seq) as i32).collect();
        let positions = Tensor::from_slice(&positions, Shape::d1(positions.len()))?;
        let table = math::rope_table(c.seq, c.head_dim);
        let zeros = |dtype, len| Tensor::zeros_on(&p.device, dtype, Shape::d1(len));
        Ok(Self {
            tokens: zeros(DType::U8, own)?,
            targets: zeros(DType::I32, own)?,
            positions: p.put(&positions)?,
            rope: p.put(&Tensor::from_slice(&table, Shape::d2(c.seq, c.head_dim))?)?,
            layers: (0..c.layers).map(|_| Saved::new(c, comm)).collect::<Result<_>>()?,
            scratch: Scratch::new(c, comm)?,
            x: p.wide(own, c.d_model)?,
            logits: p.wide(own, VOCAB)?,
            d_logits: p.narrow(own, VOCAB)?,
            small: p.zeros(DType::F32, SMALL, 1)?,
            small_sum: p.zeros(DType::F32, SMALL, 1)?,
            count: zeros(DType::I32, 1)?,
        })
    }
}
