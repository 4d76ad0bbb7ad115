//! The plan of a quantisation.

use std::sync::Arc;

use tilewire_core::{DType, Error, Result, Shape};
use tilewire_device::{Node, Pending, Stream, Tensor};
use tilewire_symm::{Heap, LinkTraffic, Signals, SymBuf, Traffic};

use super::host::Run;
use super::launch::{CREDIT, DATA, QuantInputs, State};
use super::{QuantDesc, Quantized, Scaling, Scope, device};
use crate::common::CollectiveBackend;
use crate::common::backend::put_or_nccl;
use crate::common::cuda::{Ready, together_on, unsupported};
use crate::common::lanes::{Lanes, Slots};
use crate::common::{PlanCore, apart, expect_tensor};

/// Team, receive area and signals of a plan that compares magnitudes over ranks.
struct Shared {
    core: PlanCore,
    area: SymBuf,
    signals: Arc<Signals>,
}

/// A quantisation with its state.
pub struct QuantPlan {
    desc: QuantDesc,
    shared: Option<Shared>,
    state: Option<Arc<State>>,
    ready: Ready<device::Prepared>,
}

impl QuantPlan {
    /// Bytes of symmetric memory that a plan takes on each of `size` ranks.
    pub fn memory(desc: &QuantDesc, size: usize) -> usize {
        if desc.scope == Scope::Team { 4 * size } else { 0 }
    }

    /// A plan for at most `desc.rows` rows. The heap is used by [`Scope::Team`] only, and needed
    /// there.
    ///
    /// # Errors
    /// As [`QuantDesc::check`]; `InvalidArgument` for a team's scale without a heap; `Exhausted`
    /// if the heap is too small.
    pub fn new(desc: QuantDesc, heap: Option<&Heap>) -> Result<Self> {
        desc.check().map_err(|e| e.op("quant"))?;
        let shared = match (desc.scope, heap) {
            (Scope::Local, _) => None,
            (Scope::Team, None) => {
                return Err(Error::invalid(
                    "a plan with the scale of a team must be made with the team's heap",
                )
                .op("quant"));
            }
            (Scope::Team, Some(h)) => {
                put_or_nccl(h, CollectiveBackend::Put).map_err(|e| e.op("quant"))?;
                let bytes = Self::memory(&desc, h.team().size());
                let area = h.alloc(bytes, "quant").map_err(|e| e.op("quant"))?;
                let signals = Arc::new(h.team().signals(2, "quant")?);
                let core =
                    PlanCore::new("quant", h, desc)?.using([&area], [&signals]).lanes_in_turn();
                Some(Shared { core, area, signals })
            }
        };
        let state = match desc.scaling {
            Scaling::Current => None,
            Scaling::Delayed { window, .. } => Some(Arc::new(State {
                history: Tensor::zeros(DType::F32, Shape::d1(window)),
                scale: Tensor::from_slice(&[1.0f32], Shape::d1(1))?,
                steps: Tensor::zeros(DType::I64, Shape::d1(1)),
            })),
        };
        Ok(Self { desc, shared, state, ready: Ready::new() })
    }

    /// Returns the description.
    pub fn desc(&self) -> &QuantDesc {
        &self.desc
    }

    /// With delayed scaling: the scale of the coming step, `[1]` f32 on the device.
    pub fn scale(&self) -> Option<&Tensor> {
        match self.on_device() {
            Some(s) => Some(&s.scale),
            None => self.state.as_ref().map(|s| &s.scale),
        }
    }

    /// With delayed scaling: the magnitudes of the window, `[window]` f32 on the device. The step
    /// that is recorded next replaces element `steps mod window`.
    pub fn history(&self) -> Option<&Tensor> {
        match self.on_device() {
            Some(s) => Some(&s.history),
            None => self.state.as_ref().map(|s| &s.history),
        }
    }

    fn on_device(&self) -> Option<&device::State> {
        self.ready.cuda().and_then(|(_, p)| p.state.as_ref())
    }

    /// Makes what launches on streams of the device of `stream` need: nothing on the host, kernels,
    /// workspace and the state of delayed scaling on a CUDA device. Collective over the team with
    /// [`Scope::Team`].
    ///
    /// The workspace is shared by all launches: launches on several streams must be ordered.
    ///
    /// # Errors
    /// `InvalidArgument` during capture, or if the plan is prepared for another device;
    /// `Mismatch` if the ranks' plans differ; `Unsupported` for what no CUDA kernel does.
    pub fn prepare(&self, stream: &Stream) -> Result<()> {
        let hosts = self.shared.as_ref().is_some_and(|s| s.core.lane().is_none());
        if hosts && matches!(stream, Stream::Cuda(_)) {
            return Err(unsupported(
                "the plan compares magnitudes on the host, and cannot be prepared for a CUDA \
                 device",
                "make the heap on the backend `vmm`, or prepare for a stream of the host",
            )
            .op("quant"));
        }
        let make = |ctx: &_| device::Prepared::new(ctx, &self.desc);
        let mine = || self.ready.prepare(stream, make).map_err(|e| e.op("quant"));
        match &self.shared {
            Some(s) => s.core.prepare_with(stream, mine, |()| Ok(())),
            None => mine(),
        }
    }

    /// In words, what a launch does.
    pub fn explain(&self) -> String {
        let how = match &self.shared {
            Some(s) => format!(
                "amax pushed to {} peers, one f32 each; symmetric {} bytes",
                s.core.team().size() - 1,
                Self::memory(&self.desc, s.core.team().size())
            ),
            None => "local".to_owned(),
        };
        format!("quant {}\n{how}", self.desc)
    }

    /// Returns what one launch moves from this rank to each peer. Empty without a team.
    pub fn predict(&self) -> Traffic {
        let Some(s) = &self.shared else { return Traffic::new() };
        let team = s.core.team();
        let mut t = vec![LinkTraffic::default(); team.size()];
        for p in team.peers() {
            // A credit and an arrival around one f32.
            t[p.idx()] = LinkTraffic { puts: 1, put_bytes: 4, signals: 2, ..t[p.idx()] };
        }
        t
    }

    fn check_inputs(&self, t: &QuantInputs) -> Result<usize> {
        let d = &self.desc;
        let rows = if t.x.shape().ndim() == 2 { t.x.shape().dim(0) } else { 0 };
        if rows > d.rows {
            return Err(Error::invalid("the launch has more rows than the plan was made for")
                .expected(format_args!("at most {}", d.rows))
                .seen(rows));
        }
        expect_tensor("x", &t.x, d.src, &[rows, d.cols])?;
        let result = |what: &str, want: bool, q: &Option<Quantized>, shape| match q {
            Some(q) if want && q.layout == d.layout => q.check(what, d.dst, shape),
            Some(q) if want => Err(Error::invalid(format!("`{what}` has another layout"))
                .expected(format_args!("{:?}", d.layout))
                .seen(format_args!("{:?}", q.layout))),
            None if !want => Ok(()),
            _ => Err(Error::invalid(format!("`{what}` and the description do not agree"))
                .expected(if want { "a result" } else { "none" })
                .seen(if want { "none" } else { "a result" })),
        };
        result("row", d.sides.row(), &t.row, (rows, d.cols))?;
        result("column", d.sides.column(), &t.column, (d.cols, rows))?;
        let [x, outs @ ..] = t.named();
        apart(&outs, &[x])?;
        Ok(rows)
    }

    /// Queues the quantisation of `t.x`. Collective in stream order with [`Scope::Team`]; the ranks
    /// may have different numbers of rows.
    ///
    /// # Errors
    /// `NotPrepared`; `InvalidArgument` for tensors that do not fit; the fault of the team.
    pub fn launch(&self, stream: &Stream, t: QuantInputs) -> Result<Pending<QuantInputs>> {
        let check = || {
            let ready = self.ready.on(stream)?;
            self.check_inputs(&t)?;
            together_on(stream, &t.named()).map(|()| ready)
        };
        if let Some((s, p)) = check().map_err(|e| e.op("quant"))? {
            return s.in_launch(|| {
                if let Some(shared) = &self.shared {
                    return self.launch_team(stream, shared, p, t);
                }
                let _span = s.span("quant");
                p.launch(s, &t).map_err(|e| e.op("quant"))?;
                Pending::new(t, stream, None)
            });
        }
        self.launch_host(stream, t)
    }

    /// Over the ranks' devices.
    fn launch_team(
        &self,
        stream: &Stream,
        s: &Shared,
        p: &device::Prepared,
        t: QuantInputs,
    ) -> Result<Pending<QuantInputs>> {
        let no_lane = || Error::internal("a plan of a team on the host was prepared for a device");
        let lane = s.core.lane().ok_or_else(no_lane)?;
        let outs = p.poisons(&t).map_err(|e| e.op("quant"))?;
        let at = s.core.begin_on(stream, "")?;
        let enter = Slots { signals: &s.signals, credit: CREDIT, flags: DATA..DATA + 1 };
        let run = |l: &Lanes<'_>| p.launch_team(l, (&s.area, &s.signals), &t);
        s.core.run_on(lane, at, &enter, &outs, run)?;
        s.core.pending(t, at)
    }

    fn launch_host(&self, stream: &Stream, t: QuantInputs) -> Result<Pending<QuantInputs>> {
        let (desc, state) = (self.desc, self.state.clone());
        let Some(s) = &self.shared else {
            let run = Run { desc, t: t.clone(), state, team: None };
            stream.launch(Node::new("quant", move || run.run()))?;
            return Pending::new(t, stream, None);
        };
        let launch = s.core.begin(stream, "")?;
        let seq = launch.ctx.seq();
        let team = Some((launch, s.area.clone(), s.signals.clone()));
        let (run, outs) = (Run { desc, t: t.clone(), state, team }, t.clone());
        let poison = move || outs.row.iter().chain(&outs.column).for_each(Quantized::poison);
        s.core.run(stream, || Ok(()), move || run.run(), poison, seq)?;
        Pending::new(t, stream, Some(s.core.team().fault().clone()))
    }
}
