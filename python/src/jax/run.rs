//! Launches: the tensors of a call, by their names, to the plan of its site.

use std::sync::Arc;

use tilewire::core::ScaleLayout;
use tilewire::device::Device;
use tilewire::ops::ag_gemm::AgGemmInputs;
use tilewire::ops::attention::{
    AttentionPlan, AttnGrads, AttnInputs, AttnOffsets, AttnOut, AttnSaved, Sequences,
};
use tilewire::ops::cp_attention::CpAttentionPlan;
use tilewire::ops::ep::{EpDispatch, EpHandle, EpPlan};
use tilewire::ops::gemm::Operand;
use tilewire::ops::gemm_rs::GemmRsInputs;
use tilewire::ops::grouped_gemm::{
    GroupedDgrad, GroupedFprop, GroupedGemmPlan, GroupedWgrad, Splits, Weights,
};
use tilewire::ops::permute::{
    PermuteMap, PermutePlan, Permuted, Tokens, UnpermuteGrads, WeightedGrads,
};
use tilewire::ops::quant::{DequantPlan, QuantInputs, QuantPlan, Quantized};
use tilewire::prelude::*;

use super::site::{Body, Site, Slot, lock};
use super::spec::{Op, Spec};
use crate::ops::collective::matrix;
use crate::ops::ep::copy_out;
use crate::ops::quant::layout;

/// The rest of a launch on the CPU: waits for it, and does what comes after.
pub type Rest = Box<dyn FnOnce() -> Result<()> + Send>;

/// Tensors of a call by their names.
pub struct Tensors {
    pub args: Vec<Tensor>,
    pub rets: Vec<Tensor>,
}

/// A launch with all that it needs.
struct Launch<'a> {
    spec: &'a Spec,
    slot: &'a Slot,
    stream: &'a Stream,
    t: Tensors,
}

impl Slot {
    /// Queues the call on `stream`. On a GPU everything is queued when it returns; on the CPU the
    /// rest is to be called.
    ///
    /// # Errors
    /// What the plan reports.
    pub fn launch(&self, site: &Site, stream: &Stream, t: Tensors) -> Result<Option<Rest>> {
        // The handle of a layer is read while its launch runs.
        let _order = lock(&self.order);
        let call = Launch { spec: &site.spec, slot: self, stream, t };
        match &self.body {
            Body::Collective(plan, m) => {
                let (x, out) = (call.mine("x", call.arg("x")?)?, call.ret("out")?);
                let out = call.mine("out", out)?;
                call.finish(plan.launch(stream, *m, &matrix(&x)?, &matrix(&out)?)?)
            }
            Body::AgGemm(plan, m) => {
                let x = call.mine("x", call.arg("x")?)?;
                let inputs = AgGemmInputs {
                    bias: call.optional("bias"),
                    scale: call.optional("scale"),
                    gathered: call.result("gathered"),
                    aux_out: call.result("aux"),
                    ..AgGemmInputs::new(x, call.arg("w")?, call.ret("out")?)
                };
                call.finish(plan.launch(stream, *m, inputs)?)
            }
            Body::GemmRs(plan, m) => {
                let out = call.mine("out", call.ret("out")?)?;
                call.finish(plan.launch(stream, *m, call.sum(out)?)?)
            }
            Body::GemmAr(plan, m) => {
                let out = call.ret("out")?;
                call.finish(plan.launch(stream, *m, call.sum(out)?)?)
            }
            Body::Grouped(plan) => call.grouped(plan),
            Body::Attention(plan, sequences) => {
                let (x, out) = call.attention(sequences.as_ref())?;
                let fits = call.checked(plan, AttentionPlan::check, AttentionPlan::reset);
                if site.spec.op == Op::Attention {
                    return call.then(plan.launch_fwd(stream, &x, out)?, fits);
                }
                let (saved, grads) = call.gradients(out)?;
                call.then(plan.launch_bwd(stream, &x, saved, grads)?, fits)
            }
            Body::CpAttention(plan, sequences) => {
                let (x, out) = call.attention(sequences.as_ref())?;
                let fits = call.checked(plan, CpAttentionPlan::check, CpAttentionPlan::reset);
                if site.spec.op == Op::CpAttention {
                    return call.then(plan.launch_fwd(stream, &x, out)?, fits);
                }
                let (saved, grads) = call.gradients(out)?;
                call.then(plan.launch_bwd(stream, &x, saved, grads)?, fits)
            }
            Body::Ep(plan, handle) => call.ep(plan, handle),
            Body::Permute(plan, map) => call.permute(plan, map),
            Body::Quant(plan) => call.quantize(plan),
            Body::Dequant(plan) => call.dequantize(plan),
        }
    }
}

impl Launch<'_> {
    fn is_host(&self) -> bool {
        matches!(self.slot.device, Device::Host)
    }

    fn optional(&self, name: &str) -> Option<Tensor> {
        self.spec.arg(name).and_then(|i| self.t.args.get(i)).cloned()
    }

    fn arg(&self, name: &str) -> Result<Tensor> {
        self.optional(name).ok_or_else(|| Error::internal(format!("the call lacks `{name}`")))
    }

    fn result(&self, name: &str) -> Option<Tensor> {
        self.spec.ret(name).and_then(|i| self.t.rets.get(i)).cloned()
    }

    fn ret(&self, name: &str) -> Result<Tensor> {
        self.result(name).ok_or_else(|| Error::internal(format!("the call lacks `{name}`")))
    }

    /// Returns the rows of this rank, where rows differ from rank to rank: the first of `t`, which
    /// has as many as the largest.
    fn mine(&self, name: &str, t: Tensor) -> Result<Tensor> {
        let Some(me) = self.slot.team.as_ref().map(|t| t.rank().idx()) else { return Ok(t) };
        let p = &self.spec.params;
        let rows = match (self.spec.op, name, &p.rows, &p.splits) {
            (Op::AllGather | Op::AgGemm, "x", Some(rows), _)
            | (Op::ReduceScatter | Op::GemmRs, "out", Some(rows), _) => rows.get(me).copied(),
            (Op::AllToAll, "x", _, Some(s)) => s.get(me).map(|to| to.iter().sum()),
            (Op::AllToAll, "out", _, Some(s)) => {
                Some(s.iter().map(|from| from.get(me).copied().unwrap_or(0)).sum())
            }
            _ => return Ok(t),
        };
        matrix(&t)?.rows(0, rows.unwrap_or(0))
    }

    /// On a GPU there is nothing to wait for: what follows in the stream's order is behind it.
    fn finish<T: Send + 'static>(&self, pending: Pending<T>) -> Result<Option<Rest>> {
        self.then(pending, || Ok(()))
    }

    fn then<T: Send + 'static>(
        &self,
        pending: Pending<T>,
        after: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Result<Option<Rest>> {
        if !self.is_host() {
            drop(pending);
            return after().map(|()| None);
        }
        Ok(Some(Box::new(move || pending.wait().map(drop).and_then(|()| after()))))
    }

    /// Returns a check of numbers that a launch has read on the CPU, for when it has run; on a GPU
    /// nobody waits for that.
    fn checked<P: Send + Sync + 'static>(
        &self,
        plan: &Arc<P>,
        check: fn(&P) -> Result<()>,
        reset: fn(&P, &Stream) -> Result<()>,
    ) -> impl FnOnce() -> Result<()> + Send + 'static {
        let (host, of, on) = (self.is_host(), plan.clone(), self.stream.clone());
        move || match host {
            false => Ok(()),
            true => check(&of).inspect_err(|_| {
                // The next call of this plan is another one.
                reset(&of, &on).and_then(|()| on.synchronize()).ok();
            }),
        }
    }

    fn sum(&self, out: Tensor) -> Result<GemmRsInputs> {
        let (bias, scale) = (self.optional("bias"), self.optional("scale"));
        Ok(GemmRsInputs { bias, scale, ..GemmRsInputs::new(self.arg("x")?, self.arg("w")?, out) })
    }

    /// Weights of all groups, `[groups, n, k]`.
    fn packed(&self, w: &Tensor) -> Result<Weights> {
        let flat = match w.shape().dims() {
            [groups, n, k] => w.reshape(Shape::d2(groups * n, *k))?,
            _ => w.clone(),
        };
        Ok(Weights::Packed(Operand::from(flat)))
    }

    /// Scales of `recipe`, as a launch takes them.
    fn scales(scales: &Tensor, recipe: &str) -> Result<(Tensor, ScaleLayout)> {
        Ok((scales.reshape(Shape::d1(scales.shape().num_elems()))?, layout(recipe)?))
    }

    /// Operand `name`, with its scales where it is of FP8.
    fn operand(&self, name: &str, recipe: &str) -> Result<Operand> {
        let scales = self.optional(&format!("{name}_scales"));
        let scales = scales.map(|s| Self::scales(&s, recipe)).transpose()?;
        Ok(Operand { data: self.arg(name)?, scales })
    }

    /// Weights of all groups, of FP8 one by one.
    fn weights(&self) -> Result<Weights> {
        let recipes = &self.spec.params.recipes;
        if recipes.is_empty() {
            return self.packed(&self.arg("w")?);
        }
        let each = recipes.iter().enumerate().map(|(i, r)| self.operand(&format!("w{i}"), r));
        Ok(Weights::Discrete(each.collect::<Result<_>>()?))
    }

    fn grouped(&self, plan: &Arc<GroupedGemmPlan>) -> Result<Option<Rest>> {
        let (stream, counts) = (self.stream, self.arg("m_splits")?);
        let splits = Splits::counts(&counts);
        let fits = self.checked(plan, GroupedGemmPlan::check, GroupedGemmPlan::reset);
        match self.spec.op {
            Op::GroupedFprop => {
                let (w, x) = (self.weights()?, self.operand("x", &self.spec.params.recipe)?);
                let bias = self.optional("bias");
                let t = GroupedFprop { x, w, bias, splits, out: self.ret("out")?, aux_out: None };
                self.then(plan.fprop(stream, t)?, fits)
            }
            Op::GroupedDgrad => {
                let w = self.packed(&self.arg("w")?)?;
                let t = GroupedDgrad { dy: self.arg("dy")?.into(), w, splits, dx: self.ret("dx")? };
                self.then(plan.dgrad(stream, t)?, fits)
            }
            _ => {
                let dw = self.packed(&self.ret("dw")?)?;
                let (x, dy) = (self.arg("x")?.into(), self.arg("dy")?.into());
                let dbias = self.result("dbias");
                let t = GroupedWgrad { x, dy, splits, dw, mask: None, dbias };
                self.then(plan.wgrad(stream, t)?, fits)
            }
        }
    }

    /// The tensors of an attention of these sequences, or of those of offsets among the arguments.
    fn attention(&self, sequences: Option<&Sequences>) -> Result<(AttnInputs, AttnOut)> {
        let mut x = AttnInputs::new(self.arg("q")?, self.arg("k")?, self.arg("v")?);
        x.sequences = sequences.cloned();
        if sequences.is_none() {
            x.offsets = Some(AttnOffsets::packed(self.arg("cu_q")?, self.arg("cu_kv")?));
        }
        x.bias = self.optional("bias");
        x.sink = self.optional("sink");
        let given = |name| self.optional(name).or_else(|| self.result(name));
        let missing = || Error::internal("the attention has no result");
        let (out, lse) = (given("out").ok_or_else(missing)?, given("lse").ok_or_else(missing)?);
        Ok((x, AttnOut { out, lse }))
    }

    fn gradients(&self, o: AttnOut) -> Result<(AttnSaved, AttnGrads)> {
        let saved = AttnSaved { out: o.out, lse: o.lse, d_out: self.arg("d_out")? };
        let mut grads = AttnGrads::new(self.ret("dq")?, self.ret("dk")?, self.ret("dv")?);
        grads.dbias = self.result("dbias");
        grads.dsink = self.result("dsink");
        Ok((saved, grads))
    }

    /// Rows that no expert has are not written, and XLA's memory is not cleared: whoever multiplies
    /// all rows must not meet NaN there.
    fn clear(&self, t: &Tensor) -> Result<()> {
        match &self.slot.device {
            Device::Host => t.write(|b| b.fill(0)),
            Device::Cuda(_) => self.stream.cuda()?.fill_memory(&t.cuda()?, 0),
        }
    }

    fn ep(&self, plan: &EpPlan, handle: &EpHandle) -> Result<Option<Rest>> {
        let stream = self.stream;
        // On the CPU a launch reads it when it runs, which may be while the next one is queued.
        let handle = &if self.is_host() { plan.handle()? } else { handle.clone() };
        if self.spec.op != Op::EpDispatch {
            let tokens = match self.spec.op {
                Op::EpCombine => self.ret("out")?,
                Op::EpDispatchBwd => self.ret("dx")?,
                _ => self.arg("d_out")?,
            };
            handle.load(stream, &self.arg("handle")?, tokens.shape().dim(0))?;
        }
        match self.spec.op {
            Op::EpDispatch => self.dispatch(plan, handle),
            Op::EpCombine => {
                let (y, w, out) = (self.arg("y")?, self.optional("weights"), self.ret("out")?);
                self.finish(plan.combine(stream, handle, &y, w.as_ref(), &out)?)
            }
            Op::EpDispatchBwd => {
                let (d, dw) = (self.arg("d_recv")?, self.optional("d_weights"));
                let (dx, out) = (self.ret("dx")?, self.result("dw"));
                let given = (&d, dw.as_ref());
                self.finish(plan.dispatch_bwd(stream, handle, given, (&dx, out.as_ref()))?)
            }
            _ => {
                let (d_out, dy) = (self.arg("d_out")?, self.ret("dy")?);
                self.clear(&dy)?;
                let weighted = match (self.optional("weights"), self.optional("y")) {
                    (Some(w), Some(y)) => {
                        let dw = self.ret("dw")?;
                        self.clear(&dw)?;
                        Some((w, y, dw))
                    }
                    _ => None,
                };
                let weighted = weighted.as_ref().map(|(w, y, dw)| (w, y, dw));
                self.finish(plan.combine_bwd(stream, handle, &d_out, weighted, &dy)?)
            }
        }
    }

    /// Routes, dispatches, and writes the routing to the handle array.
    fn dispatch(&self, plan: &EpPlan, handle: &EpHandle) -> Result<Option<Rest>> {
        let stream = self.stream;
        let (idx, x, w) = (self.arg("topk_idx")?, self.arg("x")?, self.optional("topk_weights"));
        let scales = self.optional("x_scales");
        let out = EpDispatch {
            x: self.ret("rows")?,
            scales: self.result("row_scales"),
            weights: self.result("weights"),
        };
        self.clear(&out.x)?;
        [&out.scales, &out.weights].into_iter().flatten().try_for_each(|t| self.clear(t))?;
        // Behind it in the stream's order: nobody waits here.
        let _routed = plan.route(stream, &idx, None, handle)?;
        let done = plan.dispatch(stream, handle, &x, (w.as_ref(), scales.as_ref()), &out)?;
        let (state, host) = (self.ret("handle")?, self.is_host());
        let (handle, stream) = (handle.clone(), stream.clone());
        let after = move || {
            if host {
                handle.check()?;
            }
            handle.save(&stream, &state)
        };
        self.then(done, after)
    }

    /// Routes, and does what the call asks for with that map. On the CPU an index that is no expert
    /// fails the call; on a GPU it makes the results NaN.
    fn permute(&self, plan: &PermutePlan, map: &PermuteMap) -> Result<Option<Rest>> {
        let (stream, host) = (self.stream, self.is_host());
        // On the CPU a map is looked at when the launch has run, and the next one may have begun.
        let map = if host { plan.map(map.tokens())? } else { map.clone() };
        // Behind it in the stream's order: nobody waits here.
        let _routed = plan.route(stream, &self.arg("topk_idx")?, &map)?;
        let of = map.clone();
        let fits = move || if host { of.check() } else { Ok(()) };
        match self.spec.op {
            Op::Permute => {
                let t = self.tokens("topk_weights", self.arg("x")?, true);
                let out = self.permuted("row_weights", self.ret("rows")?, false);
                let done = plan.permute(stream, &map, &t, &out)?;
                let (counts, stream) = (self.ret("counts")?, stream.clone());
                self.then(done, move || fits().and_then(|()| count(&stream, &map, &counts)))
            }
            Op::PermuteBwd => {
                let g = self.permuted("d_row_weights", self.arg("d_rows")?, true);
                let out = self.tokens("dw", self.ret("dx")?, false);
                self.then(plan.permute_bwd(stream, &map, &g, &out)?, fits)
            }
            Op::Unpermute => {
                let (rows, w) = (self.arg("rows")?, self.optional("weights"));
                let given = (&rows, w.as_ref());
                self.then(plan.unpermute(stream, &map, given, &self.ret("out")?)?, fits)
            }
            _ => {
                let weighted = match self.optional("weights") {
                    None => None,
                    Some(weights) => {
                        let (rows, d_weights) = (self.arg("rows")?, self.ret("dw")?);
                        Some(WeightedGrads { weights, rows, d_weights })
                    }
                };
                let (d_out, d_rows) = (self.arg("d_out")?, self.ret("d_rows")?);
                let g = UnpermuteGrads { d_out, d_rows, weighted };
                self.then(plan.unpermute_bwd(stream, &map, &g)?, fits)
            }
        }
    }

    /// `x` with the weights `name`, operands or results.
    fn tokens(&self, name: &str, x: Tensor, given: bool) -> Tokens {
        let weights = if given { self.optional(name) } else { self.result(name) };
        Tokens { x, weights, scales: None }
    }

    fn permuted(&self, name: &str, x: Tensor, given: bool) -> Permuted {
        let weights = if given { self.optional(name) } else { self.result(name) };
        Permuted { x, weights, scales: None }
    }

    /// Codes and scales, as a launch takes them.
    fn quantized(&self, data: Tensor, scales: &Tensor) -> Result<Quantized> {
        let (scales, layout) = Self::scales(scales, &self.spec.params.recipe)?;
        Ok(Quantized { data, scales, layout })
    }

    fn quantize(&self, plan: &QuantPlan) -> Result<Option<Rest>> {
        let row = Some(self.quantized(self.ret("data")?, &self.ret("scales")?)?);
        let t = QuantInputs { x: self.arg("x")?, row, column: None };
        self.finish(plan.launch(self.stream, t)?)
    }

    fn dequantize(&self, plan: &DequantPlan) -> Result<Option<Rest>> {
        let q = self.quantized(self.arg("data")?, &self.arg("data_scales")?)?;
        self.finish(plan.launch(self.stream, &q, &self.ret("out")?)?)
    }
}

/// Writes the numbers of a map to `out [experts + 2, 2]` i32, a 64-bit number in each row: rows of
/// each expert, rows needed, copies dropped. JAX has no such numbers by default, and takes the
/// first word of each.
fn count(stream: &Stream, map: &PermuteMap, out: &Tensor) -> Result<()> {
    let experts = map.m_splits().shape().num_elems();
    copy_out(stream, &out.rows(0, experts)?, map.m_splits())?;
    copy_out(stream, &out.rows(experts, 1)?, map.total())?;
    copy_out(stream, &out.rows(experts + 1, 1)?, map.dropped())
}
