//! The experts: dispatch to all ranks, products, combine.

use tilewire_core::{DType, Result, Shape};
use tilewire_device::Tensor;
use tilewire_ops::ep::{EpDispatch, EpHandle};

use super::{Clock, Times};
use crate::experts::{ExpertGrads, ExpertIn, ExpertOut};
use crate::model::Model;
use crate::params;

/// Collective. The forward pass, and the backward pass unless the model has no experts.
pub(super) fn measure(clock: &Clock<'_>, m: &Model) -> Result<Vec<Times>> {
    let l = Layer::new(m)?;
    let mut times = vec![clock.measure(
        &|| {
            l.dispatch()?;
            l.forward()?;
            l.combine()
        },
        &|| l.forward(),
        &|| {
            l.dispatch()?;
            l.combine()
        },
    )?];
    if !m.cfg.no_experts {
        times.push(clock.measure(
            &|| {
                l.combine_bwd()?;
                l.backward()?;
                l.dispatch_bwd()
            },
            &|| l.backward(),
            &|| {
                l.combine_bwd()?;
                l.dispatch_bwd()
            },
        )?);
    }
    Ok(times)
}

/// One rank's side of the experts of the first layer: what a step launches, on tensors that stay.
struct Layer<'a> {
    m: &'a Model,
    handle: EpHandle,
    topk: Tensor,
    weights: Tensor,
    d_weights: Tensor,
    /// Rows of this rank; forward and backward write one like it.
    x: Tensor,
    back: Tensor,
    /// Rows of its experts.
    recv: EpDispatch,
    recv_weights: Tensor,
    d_recv_weights: Tensor,
    out: ExpertOut,
    dy: Tensor,
    grads: ExpertGrads,
    d_up: Tensor,
    d_down: Tensor,
}

impl<'a> Layer<'a> {
    fn new(m: &'a Model) -> Result<Self> {
        let (c, comm, i) = (&m.cfg, &m.comm, params::layer(0));
        let (cap, rows) = (comm.ep.desc().capacity, comm.rows.own.len());
        // The ranks' rows one after the other, so that all experts get equally many.
        let (me, size) = (comm.world.rank().idx(), comm.world.size());
        let choices = 0..rows * c.top_k;
        let topk: Vec<i64> =
            choices.map(|n| ((n + me * c.experts / size) % c.experts) as i64).collect();
        let p = &comm.place;
        let d2 = |rows, cols| p.zeros(p.dtype, rows, cols);
        let wide = |rows, cols| p.zeros(DType::F32, rows, cols);
        let d1 = |len| Tensor::zeros_on(&p.device, DType::F32, Shape::d1(len));
        let like = |w: &Tensor| wide(w.shape().dim(0), w.shape().dim(1));
        let recv_weights = d1(cap)?;
        Ok(Self {
            m,
            handle: comm.ep.handle()?,
            topk: p.put(&Tensor::from_slice(&topk, Shape::d2(rows, c.top_k))?)?,
            weights: wide(rows, c.top_k)?,
            d_weights: wide(rows, c.top_k)?,
            x: d2(rows, c.d_model)?,
            back: d2(rows, c.d_model)?,
            recv: EpDispatch {
                x: d2(cap, c.d_model)?,
                scales: None,
                weights: Some(recv_weights.clone()),
            },
            recv_weights,
            d_recv_weights: d1(cap)?,
            out: ExpertOut::new(c, cap, p)?,
            dy: d2(cap, c.d_model)?,
            grads: ExpertGrads::new(c, cap, p)?,
            d_up: like(&m.params[i.up].w)?,
            d_down: like(&m.params[i.down].w)?,
        })
    }

    fn input(&self) -> ExpertIn<'_> {
        let i = params::layer(0);
        (&self.recv.x, (&self.m.params[i.up].w, &self.m.params[i.down].w))
    }

    fn dispatch(&self) -> Result<()> {
        let (ep, s) = (&self.m.comm.ep, &self.m.comm.stream);
        ep.route(s, &self.topk, None, &self.handle)?.wait()?;
        let weights = (Some(&self.weights), None);
        ep.dispatch(s, &self.handle, &self.x, weights, &self.recv)?.wait().map(|_| ())
    }

    fn forward(&self) -> Result<()> {
        let (s, splits) = (&self.m.comm.stream, self.handle.m_splits());
        self.m.experts.forward(s, splits, self.input(), &self.out)?;
        s.synchronize()
    }

    fn combine(&self) -> Result<()> {
        let (ep, s) = (&self.m.comm.ep, &self.m.comm.stream);
        let weights = Some(&self.recv_weights);
        ep.combine(s, &self.handle, &self.out.y, weights, &self.back)?.wait().map(|_| ())
    }

    fn combine_bwd(&self) -> Result<()> {
        let (ep, s) = (&self.m.comm.ep, &self.m.comm.stream);
        let weights = Some((&self.recv_weights, &self.out.y, &self.d_recv_weights));
        ep.combine_bwd(s, &self.handle, &self.x, weights, &self.dy)?.join(s).map(|_| ())
    }

    fn backward(&self) -> Result<()> {
        let (s, splits) = (&self.m.comm.stream, self.handle.m_splits());
        let grads = (&self.grads, (&self.d_up, &self.d_down));
        self.m.experts.backward(s, splits, self.input(), (&self.out, &self.dy), grads)?;
        s.synchronize()
    }

    fn dispatch_bwd(&self) -> Result<()> {
        let (ep, s) = (&self.m.comm.ep, &self.m.comm.stream);
        let (recv, mine) =
            ((&self.grads.x, Some(&self.d_recv_weights)), (&self.back, Some(&self.d_weights)));
        ep.dispatch_bwd(s, &self.handle, recv, mine)?.wait().map(|_| ())
    }
}
