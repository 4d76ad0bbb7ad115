//! The plan of an expert-parallel layer.

use std::sync::{Arc, Mutex, OnceLock};

use tilewire_core::{DType, Error, Result};
use tilewire_device::{Pending, Stream, Tensor};
use tilewire_symm::Heap;

use super::device::{self, Used, router};
use super::direct::Direct;
use super::host::{HostPart, Run};
use super::launch::{Base, COMBINE, COMBINE_BWD, DISPATCH, DISPATCH_BWD, Out, Push, ROUTE, Return};
use super::schedule::Schedule;
use super::{EpDesc, EpDispatch, EpHandle, EpLayout};
use crate::common::CollectiveBackend;
use crate::common::backend::{put_or_nccl, usual};
use crate::common::{Launch, PlanCore, apart, expect_tensor};

/// Bytes that a layer takes, before anything is allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EpMemory {
    /// Symmetric memory on each rank.
    pub symmetric: usize,
    /// Bytes that `dispatch` delivers: the caller's tensor.
    pub received: usize,
    /// Expert outputs, expert-major: the caller's tensor.
    pub expert_out: usize,
    /// One handle.
    pub handle: usize,
}

/// An expert-parallel layer with its receive areas.
pub struct EpPlan {
    pub(super) base: Base,
    /// On a heap in device memory, made by `prepare`.
    pub(super) device: OnceLock<Used>,
    pub(super) part: HostPart,
    /// Set by `prepare` on the host, once it has cleared the words that carry launch numbers.
    pub(super) cleared: OnceLock<()>,
    /// Receive buffers that peers write to, in the order in which they were made.
    pub(super) direct: Mutex<Vec<Direct>>,
}

/// An output, by the poison that it gets after a fault.
enum Poison {
    /// Values: NaN.
    Value(Tensor),
    /// Indices: -1.
    Index(Tensor),
    /// Counts: 0, so that operations behind it do nothing.
    Count(Tensor),
}

impl Poison {
    fn values(outs: impl IntoIterator<Item = Option<Tensor>>) -> Vec<Poison> {
        outs.into_iter().flatten().map(Poison::Value).collect()
    }

    fn apply(&self) {
        // Fails only while the caller accesses the tensor: then no reader needs the poison.
        let _done = match self {
            // All bits set is NaN, and -1.
            Poison::Value(t) | Poison::Index(t) => t.poison(),
            Poison::Count(t) => t.write(|b| b.fill(0)),
        };
    }
}

impl EpPlan {
    /// Returns the memory that a layer takes on each rank.
    pub fn memory(desc: &EpDesc) -> EpMemory {
        let (at, k) = (Schedule::new(desc), desc.top_k);
        EpMemory {
            symmetric: at.tokens_len() + at.returns_len() + at.counts_len() + at.flags_len(),
            received: desc.recv_rows() * (desc.hidden * desc.dtype.size() + 4 * desc.num_scales),
            expert_out: desc.capacity * desc.hidden * desc.out.size(),
            handle: desc.max_tokens * k * 8 + desc.capacity * 4 + desc.num_experts() * 8,
        }
    }

    /// Makes a layer on `heap`.
    ///
    /// # Errors
    /// `InvalidArgument` for a bad description, `Exhausted` if the heap is too small.
    pub fn new(desc: EpDesc, heap: &Heap) -> Result<Self> {
        Self::with_backend(desc, heap, usual(heap))
    }

    /// Makes a plan as [`EpPlan::new`], with transport `backend` on CUDA devices. By NCCL a phase
    /// is sequential, and moves `max_tokens` records between each two ranks whatever the routing,
    /// because captured sizes cannot change. Results have the same bits, except the bits of a NaN.
    ///
    /// With `fastest`, `prepare` runs routing, dispatch and combine by puts and by NCCL, and takes
    /// the one that is faster for the slowest rank. It uses `max_tokens` tokens on every rank,
    /// whose choices are spread over all experts. Meanwhile it takes the memory of both, and that
    /// of the received rows and expert outputs. On the host, and where NCCL is not there, the plan
    /// uses puts.
    ///
    /// # Errors
    /// As [`EpPlan::new`]; `Unsupported` for NCCL on a heap of the host, and for puts between GPUs
    /// that do not reach each other.
    pub fn with_backend(desc: EpDesc, heap: &Heap, backend: CollectiveBackend) -> Result<Self> {
        Self::with_cut(desc, heap, backend, false)
    }

    /// Makes a plan as [`EpPlan::new`], for tests: on the host, too, a rank's records are cut into
    /// chunks as small as those of devices. All ranks must use it alike.
    ///
    /// # Errors
    /// As [`EpPlan::new`].
    #[doc(hidden)]
    pub fn with_fine_chunks(desc: EpDesc, heap: &Heap) -> Result<Self> {
        Self::with_cut(desc, heap, usual(heap), true)
    }

    fn with_cut(desc: EpDesc, heap: &Heap, backend: CollectiveBackend, fine: bool) -> Result<Self> {
        desc.check(heap.team().size())?;
        put_or_nccl(heap, backend).map_err(|e| e.op("ep"))?;
        let at = Schedule::new(&desc);
        let alloc = |bytes, tag| heap.alloc(bytes, tag).map_err(|e| e.op("ep"));
        let names = ["ep_route", "ep_dispatch", "ep_combine", "ep_dispatch_bwd", "ep_combine_bwd"];
        let chunks = if fine { " fine chunks" } else { "" };
        let text = format!("{desc} {backend}{chunks}");
        let first = PlanCore::new("ep", heap, &text)?;
        if first.lane().is_some() {
            router(&desc).map_err(|e| e.op("ep"))?;
        }
        let counts = alloc(at.counts_len(), "ep counts")?;
        let tokens = alloc(at.tokens_len(), "ep tokens")?;
        let returns = alloc(at.returns_len(), "ep returns")?;
        let flags = alloc(at.flags_len(), "ep flags")?;
        let signals = Arc::new(heap.team().signals(6, "ep")?);
        let bufs = [&counts, &tokens, &returns, &flags];
        let core = |n| {
            let core = PlanCore::new(n, heap, &text)?.share_order(&first);
            Ok(core.using(bufs, [&signals]))
        };
        let [a, b, c, d, e] = names.map(core);
        let part = HostPart::new(&desc, fine);
        let base = Base {
            desc,
            backend,
            cores: [a?, b?, c?, d?, e?],
            counts,
            tokens,
            returns,
            flags,
            signals,
            num_sms: device::NUM_SMS,
        };
        let (device, cleared, direct) = (OnceLock::new(), OnceLock::new(), Mutex::default());
        Ok(Self { base, device, part, cleared, direct })
    }

    /// Sets the multiprocessors of a GPU that a phase may take (default: 32), at least one. A
    /// phase's blocks wait for those of peers, so phases of several plans that ranks begin in
    /// different orders must fit side by side. Ranks may use different numbers. It has no effect on
    /// the host.
    #[must_use]
    pub fn with_num_sms(mut self, num: usize) -> Self {
        self.base.num_sms = num.max(1);
        self
    }

    /// Returns the description.
    pub fn desc(&self) -> &EpDesc {
        &self.base.desc
    }

    /// Makes a handle for one microbatch.
    ///
    /// # Errors
    /// `Exhausted` if the device has not enough memory.
    pub fn handle(&self) -> Result<EpHandle> {
        let heap = self.base.cores[0].heap();
        EpHandle::new(&self.base.desc, heap.team().rank().idx(), &heap.device())
    }

    /// Describes the plan as text: its memory and its transport.
    pub fn explain(&self) -> String {
        let (m, at) = (Self::memory(&self.base.desc), Schedule::new(&self.base.desc));
        let s = at.strides();
        format!(
            "ep {}\npush, one row per (token, rank) of {} bytes, one returned row of {} bytes; symmetric {} bytes, \
             received {}, expert outputs {}, handle {}",
            self.base.desc,
            s.row + s.meta,
            s.returns,
            m.symmetric,
            m.received,
            m.expert_out,
            m.handle
        ) + &self.device.get().map_or(String::new(), Used::explain)
    }

    fn run(
        &self,
        which: usize,
        stream: &Stream,
        launch: Launch,
        run: impl Fn(&Launch) -> Result<()> + Send + Sync + 'static,
        outs: Vec<Poison>,
    ) -> Result<()> {
        let (core, seq) = (&self.base.cores[which], launch.ctx.seq());
        core.run(
            stream,
            || Ok(()),
            move || run(&launch),
            move || outs.iter().for_each(Poison::apply),
            seq,
        )
    }

    fn host_run(&self) -> Run {
        Run {
            desc: self.base.desc.clone(),
            counts: self.base.counts.clone(),
            tokens: self.base.tokens.clone(),
            returns: self.base.returns.clone(),
            flags: self.base.flags.clone(),
            signals: self.base.signals.clone(),
            part: self.part.clone(),
        }
    }

    /// Queues the exchange of counts and fills `handle` from `topk_idx` (`[tokens, top_k]` i32 or
    /// i64, -1 = masked), for at most `capacity` expert-major rows on every rank (`None`: the
    /// layer's). Collective in stream order, like everything below.
    ///
    /// # Errors
    /// `NotPrepared`; `InvalidArgument` for a wrong tensor or a capacity above the layer's. An
    /// index that is no expert becomes the fault of the team when the work runs.
    pub fn route(
        &self,
        stream: &Stream,
        topk_idx: &Tensor,
        capacity: Option<usize>,
        handle: &EpHandle,
    ) -> Result<Pending<EpHandle>> {
        let d = &self.base.desc;
        let capacity = capacity.unwrap_or(d.capacity);
        if capacity > d.capacity {
            return Err(Error::invalid("the capacity is larger than the layer's")
                .op("ep_route")
                .expected(format_args!("at most {}", d.capacity))
                .seen(capacity));
        }
        let shape = topk_idx.shape();
        let fits = shape.ndim() == 2 && shape.dim(1) == d.top_k && shape.dim(0) <= d.max_tokens;
        if !fits || !matches!(topk_idx.dtype(), DType::I32 | DType::I64) {
            return Err(Error::invalid("`topk_idx` has the wrong shape or dtype")
                .op("ep_route")
                .expected(format_args!("i32 or i64 [at most {}, {}]", d.max_tokens, d.top_k))
                .seen(format_args!("{} {shape}", topk_idx.dtype())));
        }
        handle.check_layer(d).map_err(|e| e.op("ep_route"))?;
        handle.set_tokens(shape.dim(0), capacity);
        if let Some(phase) = self.phase(ROUTE, handle)? {
            let given = [("topk_idx", Some(topk_idx))];
            phase.together(stream, &given).map_err(|e| e.op("ep_route"))?;
            return stream.in_launch(|| {
                let detail = format_args!("capacity={capacity}");
                let at = self.base.cores[ROUTE].begin_on(stream, detail)?;
                handle.set_routing(at.seq);
                phase.route(at, topk_idx, capacity)?;
                self.base.cores[ROUTE].pending(handle.clone(), at)
            });
        }
        let launch = self.base.cores[ROUTE].begin(stream, format_args!("capacity={capacity}"))?;
        handle.set_routing(launch.ctx.seq());
        let (run, idx, h) = (self.host_run(), topk_idx.clone(), handle.clone());
        let outs = vec![Poison::Index(handle.row_index().clone())];
        let counts = [handle.m_splits(), handle.total(), handle.dropped()];
        let outs = outs.into_iter().chain(counts.map(|t| Poison::Count(t.clone()))).collect();
        self.run(ROUTE, stream, launch, move |l| run.route(l, &idx, capacity, &h), outs)?;
        self.pending(handle.clone(), stream)
    }

    /// Queues a combine-type phase on a heap in device memory; nothing on the host.
    fn return_on_device(
        &self,
        which: usize,
        stream: &Stream,
        handle: &EpHandle,
        detail: &std::fmt::Arguments<'_>,
        back: &Return,
    ) -> Result<Option<Pending<Tensor>>> {
        let Some(phase) = self.phase(which, handle)? else { return Ok(None) };
        handle.check_tokens(back.out.shape().dim(0))?;
        let given = [
            ("y", Some(&back.y)),
            ("weights", back.weights.as_ref()),
            ("d_weights", back.dw.as_ref()),
            ("out", Some(&back.out)),
            ("dw", back.dw_out.as_ref()),
        ];
        phase.together(stream, &given)?;
        stream.in_launch(|| {
            let at = self.base.cores[which].begin_on(stream, detail)?;
            phase.return_rows(at, back)?;
            self.base.cores[which].pending(back.out.clone(), at).map(Some)
        })
    }

    fn pending<T>(&self, out: T, stream: &Stream) -> Result<Pending<T>> {
        Pending::new(out, stream, Some(self.base.cores[0].team().fault().clone()))
    }

    /// Checks a tensor `[tokens, cols]` and returns the tokens of this rank.
    fn rows(&self, what: &str, t: &Tensor, dtype: DType, cols: usize) -> Result<usize> {
        let rows = if t.shape().ndim() == 2 { t.shape().dim(0) } else { 0 };
        if rows > self.base.desc.max_tokens {
            return Err(Error::invalid(format!("`{what}` has too many tokens"))
                .expected(format_args!("at most {}", self.base.desc.max_tokens))
                .seen(rows));
        }
        expect_tensor(what, t, dtype, &[rows, cols]).map(|()| rows)
    }

    fn check_recv(&self, d: &EpDispatch, dtype: DType, weights: bool, scales: bool) -> Result<()> {
        let rows = self.base.desc.recv_rows();
        expect_tensor("received x", &d.x, dtype, &[rows, self.base.desc.hidden])?;
        let pair = |what: &str, want: bool, t: &Option<Tensor>, shape: &[usize]| match t {
            Some(t) if want => expect_tensor(what, t, DType::F32, shape),
            None if !want => Ok(()),
            _ => Err(Error::invalid(format!(
                "received `{what}` must be given if and only if it is sent"
            ))),
        };
        pair("weights", weights, &d.weights, &[self.base.desc.capacity])?;
        pair("scales", scales, &d.scales, &[rows, self.base.desc.num_scales])
    }

    /// Queues the dispatch of `x` (`[tokens, hidden]`), with `topk_weights` (`[tokens, top_k]`
    /// f32) and FP8 scales (`[tokens, num_scales]` f32) if given, into `out`.
    ///
    /// # Errors
    /// `NotPrepared`; `InvalidArgument` for tensors that do not fit; the fault of the team. If the
    /// number of tokens is not that of the routing, that is found when the work runs.
    pub fn dispatch(
        &self,
        stream: &Stream,
        handle: &EpHandle,
        x: &Tensor,
        (topk_weights, scales): (Option<&Tensor>, Option<&Tensor>),
        out: &EpDispatch,
    ) -> Result<Pending<EpDispatch>> {
        let d = &self.base.desc;
        let op = |e: Error| e.op("ep_dispatch");
        let rows = self.rows("x", x, d.dtype, d.hidden).map_err(op)?;
        if let Some(w) = topk_weights {
            expect_tensor("topk_weights", w, DType::F32, &[rows, d.top_k]).map_err(op)?;
        }
        if scales.is_some() != (d.num_scales > 0) {
            return Err(Error::invalid("`scales` must be given if and only if the layer has them")
                .op("ep_dispatch"));
        }
        if let Some(s) = scales {
            expect_tensor("scales", s, DType::F32, &[rows, d.num_scales]).map_err(op)?;
        }
        self.check_recv(out, d.dtype, topk_weights.is_some(), scales.is_some()).map_err(op)?;
        let outs = [
            ("received x", Some(&out.x)),
            ("received weights", out.weights.as_ref()),
            ("received scales", out.scales.as_ref()),
        ];
        apart(&outs, &[("x", Some(x)), ("topk_weights", topk_weights), ("scales", scales)])
            .map_err(op)?;
        let routing = handle.routing(d).map_err(op)?;
        let buffer = self.buffer_of(&out.x).map_err(op)?;
        let detail =
            format_args!("routing={routing} weights={} buffer={buffer}", topk_weights.is_some());
        let send = Push { x: x.clone(), weights: topk_weights.cloned(), scales: scales.cloned() };
        if let Some(phase) = self.phase(DISPATCH, handle)? {
            handle.check_tokens(rows).map_err(op)?;
            let given = [
                ("x", Some(x)),
                ("topk_weights", topk_weights),
                ("scales", scales),
                ("received x", Some(&out.x)),
                ("received weights", out.weights.as_ref()),
                ("received scales", out.scales.as_ref()),
            ];
            phase.together(stream, &given).map_err(op)?;
            return stream.in_launch(|| {
                let at = self.base.cores[DISPATCH].begin_on(stream, detail)?;
                phase.dispatch(at, &send, out, buffer)?;
                self.base.cores[DISPATCH].pending(out.clone(), at)
            });
        }
        let launch = self.base.cores[DISPATCH].begin(stream, detail)?;
        let (run, h, o) = (self.host_run(), handle.clone(), Out::Dispatch(out.clone()));
        let to = self.straight(buffer);
        let mut outs =
            Poison::values([Some(out.x.clone()), out.weights.clone(), out.scales.clone()]);
        outs.push(Poison::Index(handle.row_index().clone()));
        self.run(
            DISPATCH,
            stream,
            launch,
            move |l| run.push_rows(l, &h, (&send, &o), to.as_ref()),
            outs,
        )?;
        self.pending(out.clone(), stream)
    }

    /// Queues `out[t] = sum over choices of (weight) * y[row]`: `y` is `[capacity, hidden]`
    /// expert-major, `weights` (`[capacity]` f32, as dispatched) is optional, `out` is
    /// `[tokens, hidden]`.
    ///
    /// # Errors
    /// As [`EpPlan::dispatch`].
    pub fn combine(
        &self,
        stream: &Stream,
        handle: &EpHandle,
        y: &Tensor,
        weights: Option<&Tensor>,
        out: &Tensor,
    ) -> Result<Pending<Tensor>> {
        let d = &self.base.desc;
        let op = |e: Error| e.op("ep_combine");
        expect_tensor("y", y, d.out, &[d.capacity, d.hidden]).map_err(op)?;
        if let Some(w) = weights {
            expect_tensor("weights", w, DType::F32, &[d.capacity]).map_err(op)?;
        }
        self.rows("out", out, d.out, d.hidden).map_err(op)?;
        let routing = handle.routing(d).map_err(op)?;
        let detail = format_args!("routing={routing} weighted={}", weights.is_some());
        let back = Return {
            y: y.clone(),
            weights: weights.cloned(),
            expert_major: true,
            dw: None,
            out: out.clone(),
            dw_out: None,
        };
        if let Some(queued) =
            self.return_on_device(COMBINE, stream, handle, &detail, &back).map_err(op)?
        {
            return Ok(queued);
        }
        let launch = self.base.cores[COMBINE].begin(stream, detail)?;
        let (run, h) = (self.host_run(), handle.clone());
        let outs = Poison::values([Some(out.clone())]);
        self.run(COMBINE, stream, launch, move |l| run.return_rows(l, &h, &back), outs)?;
        self.pending(out.clone(), stream)
    }

    /// Queues the backward of dispatch: `d_recv` is the gradient of the received rows (in the
    /// layer's layout, type `out`), `d_weights` that of the received weights (`[capacity]` f32);
    /// `dx` is `[tokens, hidden]`, `dw` `[tokens, top_k]` f32 (0 for copies that were dropped).
    ///
    /// # Errors
    /// As [`EpPlan::dispatch`].
    pub fn dispatch_bwd(
        &self,
        stream: &Stream,
        handle: &EpHandle,
        (d_recv, d_weights): (&Tensor, Option<&Tensor>),
        (dx, dw): (&Tensor, Option<&Tensor>),
    ) -> Result<Pending<Tensor>> {
        let d = &self.base.desc;
        let op = |e: Error| e.op("ep_dispatch_bwd");
        expect_tensor("d_recv", d_recv, d.out, &[d.recv_rows(), d.hidden]).map_err(op)?;
        let rows = self.rows("dx", dx, d.out, d.hidden).map_err(op)?;
        if d_weights.is_some() != dw.is_some() {
            return Err(op(Error::invalid("`d_weights` and `dw` go together")));
        }
        if let (Some(g), Some(w)) = (d_weights, dw) {
            expect_tensor("d_weights", g, DType::F32, &[d.capacity]).map_err(op)?;
            expect_tensor("dw", w, DType::F32, &[rows, d.top_k]).map_err(op)?;
        }
        let routing = handle.routing(d).map_err(op)?;
        let detail = format_args!("routing={routing} weights={}", dw.is_some());
        let back = Return {
            y: d_recv.clone(),
            weights: None,
            expert_major: matches!(d.layout, EpLayout::ExpertMajor { .. }),
            dw: d_weights.cloned(),
            out: dx.clone(),
            dw_out: dw.cloned(),
        };
        if let Some(queued) =
            self.return_on_device(DISPATCH_BWD, stream, handle, &detail, &back).map_err(op)?
        {
            return Ok(queued);
        }
        let launch = self.base.cores[DISPATCH_BWD].begin(stream, detail)?;
        let (run, h) = (self.host_run(), handle.clone());
        let outs = Poison::values([Some(dx.clone()), dw.cloned()]);
        self.run(DISPATCH_BWD, stream, launch, move |l| run.return_rows(l, &h, &back), outs)?;
        self.pending(dx.clone(), stream)
    }

    /// Queues the backward of combine: `d_out` is `[tokens, hidden]`, `dy` `[capacity, hidden]`
    /// expert-major (padding zero; rows behind the last expert's may be left as they are). With the
    /// weights of the combine and its `y`, also the gradient of the received weights, `d_weights`
    /// `[capacity]` f32.
    ///
    /// Without weights, rows are put directly to a `dy` of [`EpPlan::zero_copy_grad`].
    ///
    /// # Errors
    /// As [`EpPlan::dispatch`].
    pub fn combine_bwd(
        &self,
        stream: &Stream,
        handle: &EpHandle,
        d_out: &Tensor,
        weighted: Option<(&Tensor, &Tensor, &Tensor)>,
        dy: &Tensor,
    ) -> Result<Pending<Tensor>> {
        let d = &self.base.desc;
        let op = |e: Error| e.op("ep_combine_bwd");
        self.rows("d_out", d_out, d.out, d.hidden).map_err(op)?;
        expect_tensor("dy", dy, d.out, &[d.capacity, d.hidden]).map_err(op)?;
        if let Some((weights, y, d_weights)) = weighted {
            expect_tensor("weights", weights, DType::F32, &[d.capacity]).map_err(op)?;
            expect_tensor("y", y, d.out, &[d.capacity, d.hidden]).map_err(op)?;
            expect_tensor("d_weights", d_weights, DType::F32, &[d.capacity]).map_err(op)?;
        }
        let (w, y) = (weighted.map(|w| w.0), weighted.map(|w| w.1));
        let outs = [("dy", Some(dy)), ("d_weights", weighted.map(|w| w.2))];
        let ins = [("d_out", Some(d_out)), ("weights", w), ("y", y)];
        apart(&outs, &ins).map_err(op)?;
        let routing = handle.routing(d).map_err(op)?;
        // With weights, or in another order, peers cannot write the rows of `dy`.
        let straight = weighted.is_none() && matches!(d.layout, EpLayout::ExpertMajor { .. });
        let buffer = if straight { self.buffer_of(dy).map_err(op)? } else { 0 };
        let detail =
            format_args!("routing={routing} weighted={} buffer={buffer}", weighted.is_some());
        let send = Push { x: d_out.clone(), weights: None, scales: None };
        if let Some(phase) = self.phase(COMBINE_BWD, handle)? {
            handle.check_tokens(d_out.shape().dim(0)).map_err(op)?;
            phase.together(stream, &outs).map_err(op)?;
            phase.together(stream, &ins).map_err(op)?;
            return stream.in_launch(|| {
                let at = self.base.cores[COMBINE_BWD].begin_on(stream, detail)?;
                phase.combine_bwd(at, &send, weighted, (dy, buffer))?;
                self.base.cores[COMBINE_BWD].pending(dy.clone(), at)
            });
        }
        let launch = self.base.cores[COMBINE_BWD].begin(stream, detail)?;
        let out = Out::CombineBwd {
            dy: dy.clone(),
            weighted: weighted.map(|(w, y, g)| (w.clone(), y.clone(), g.clone())),
        };
        let (run, h, to) = (self.host_run(), handle.clone(), self.straight(buffer));
        let outs = Poison::values([Some(dy.clone()), weighted.map(|w| w.2.clone())]);
        let run = move |l: &Launch| run.push_rows(l, &h, (&send, &out), to.as_ref());
        self.run(COMBINE_BWD, stream, launch, run, outs)?;
        self.pending(dy.clone(), stream)
    }
}
