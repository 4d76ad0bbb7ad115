//! The experts of a rank: their products, forward and backward, on rows that `ep_dispatch` brings.

use tilewire_core::{DType, Result};
use tilewire_device::{Stream, Tensor};
use tilewire_ops::gemm::Activation;
use tilewire_ops::grouped_gemm::{
    GroupedDesc, GroupedDgrad, GroupedFprop, GroupedGemmPlan, GroupedWgrad, Splits,
};

use crate::config::ModelCfg;
use crate::place::Place;

/// Plans, made once, used by every layer.
pub struct Experts {
    up: GroupedGemmPlan,
    down: GroupedGemmPlan,
}

/// The received rows, and the weights of gate with up, and of down.
pub(crate) type ExpertIn<'a> = (&'a Tensor, (&'a Tensor, &'a Tensor));

/// The outputs of the forward pass: a row for each received copy.
pub(crate) struct ExpertOut {
    /// Before the activation, `[capacity, 2 d_ff]`.
    pub aux: Tensor,
    /// After it, `[capacity, d_ff]`.
    pub act: Tensor,
    /// `[capacity, d_model]`.
    pub y: Tensor,
}

impl ExpertOut {
    pub fn new(c: &ModelCfg, capacity: usize, place: &Place) -> Result<Self> {
        let rows = |n| place.narrow(capacity, n);
        Ok(Self { aux: rows(2 * c.d_ff)?, act: rows(c.d_ff)?, y: rows(c.d_model)? })
    }
}

/// The outputs of the backward pass beside the gradients of the weights.
pub(crate) struct ExpertGrads {
    /// Gradient of the received rows, `[capacity, d_model]`.
    pub x: Tensor,
    act: Tensor,
    aux: Tensor,
}

impl ExpertGrads {
    pub fn new(c: &ModelCfg, capacity: usize, place: &Place) -> Result<Self> {
        let rows = |n| place.narrow(capacity, n);
        Ok(Self { x: rows(c.d_model)?, act: rows(c.d_ff)?, aux: rows(2 * c.d_ff)? })
    }
}

impl Experts {
    /// Plans for the `local` experts of this rank, and at most `capacity` rows of them.
    ///
    /// # Errors
    /// What making plans gives.
    pub fn new(
        m: &ModelCfg,
        (stream, dtype): (&Stream, DType),
        capacity: usize,
        local: usize,
    ) -> Result<Self> {
        let up = GroupedDesc {
            activation: Activation::SwiGlu,
            zero_tail: true,
            ..GroupedDesc::new(local, capacity, 2 * m.d_ff, m.d_model, dtype)
        };
        let down = GroupedDesc {
            zero_tail: true,
            ..GroupedDesc::new(local, capacity, m.d_model, m.d_ff, dtype)
        };
        let (up, down) = (GroupedGemmPlan::new(up)?, GroupedGemmPlan::new(down)?);
        up.prepare(stream)?;
        down.prepare(stream)?;
        Ok(Self { up, down })
    }

    /// Queues the forward pass; `splits` are the rows of each expert.
    ///
    /// # Errors
    /// What the products give.
    pub(crate) fn forward(
        &self,
        s: &Stream,
        splits: &Tensor,
        (x, w): ExpertIn<'_>,
        out: &ExpertOut,
    ) -> Result<()> {
        let fprop = |x: &Tensor, w: &Tensor, out: &Tensor, aux_out| GroupedFprop {
            x: x.into(),
            w: w.into(),
            bias: None,
            splits: Splits::counts(splits),
            out: out.clone(),
            aux_out,
        };
        let up = fprop(x, w.0, &out.act, Some(out.aux.clone()));
        self.up.fprop(s, up)?.join(s)?;
        self.down.fprop(s, fprop(&out.act, w.1, &out.y, None))?.join(s).map(|_| ())
    }

    /// Queues the backward pass, from the forward pass and the gradient of its `y`; `dw` receive
    /// the gradients of the weights.
    ///
    /// # Errors
    /// What the products give.
    pub(crate) fn backward(
        &self,
        s: &Stream,
        splits: &Tensor,
        (x, w): ExpertIn<'_>,
        (out, dy): (&ExpertOut, &Tensor),
        (g, dw): (&ExpertGrads, (&Tensor, &Tensor)),
    ) -> Result<()> {
        let wgrad = |x: &Tensor, dy: &Tensor, dw: &Tensor| GroupedWgrad {
            x: x.into(),
            dy: dy.into(),
            splits: Splits::counts(splits),
            dw: dw.into(),
            mask: None,
            dbias: None,
        };
        let dgrad = |dy: &Tensor, w: &Tensor, dx: &Tensor| GroupedDgrad {
            dy: dy.into(),
            w: w.into(),
            splits: Splits::counts(splits),
            dx: dx.clone(),
        };
        self.down.wgrad(s, wgrad(&out.act, dy, dw.1))?.join(s)?;
        self.down.dgrad(s, dgrad(dy, w.1, &g.act))?.join(s)?;
        let splits = Splits::counts(splits);
        self.up.dactivation(s, &splits, &g.act, &out.aux, &g.aux)?.join(s)?;
        self.up.wgrad(s, wgrad(x, &g.aux, dw.0))?.join(s)?;
        self.up.dgrad(s, dgrad(&g.aux, w.0, &g.x))?.join(s).map(|_| ())
    }
}
