//! The plan of a local attention.

use std::sync::Arc;

use tilewire_core::{Error, Result};
use tilewire_device::cuda::CudaStream;
use tilewire_device::{Node, Pending, Stream};

use super::backend::Fusion;
use super::host::Run;
use super::launch::Given;
use super::offsets::{Refused, read_status};
use super::{
    AttentionDesc, AttnBackend, AttnConfig, AttnGrads, AttnInputs, AttnOperand, AttnOut, AttnSaved,
    LocalRows, Sequences, device,
};
use crate::common::cuda::{Ready, together_on};

/// A prepared attention. Local: no team.
pub struct AttentionPlan {
    desc: AttentionDesc,
    config: AttnConfig,
    backend: AttnBackend,
    fusion: Fusion,
    ready: Ready<device::Local>,
    /// On the host: why offsets of a launch could not be used, of the first such launch.
    refused: Refused,
}

impl AttentionPlan {
    /// A plan for at most the rows of `desc.sequences`; `config` of `None` takes the usual tiles.
    ///
    /// # Errors
    /// As [`AttentionDesc::check`] and [`AttnConfig::check`].
    pub fn new(desc: AttentionDesc, config: Option<AttnConfig>) -> Result<Self> {
        Self::with_backend(desc, config, AttnBackend::Auto)
    }

    /// As [`AttentionPlan::new`], by `backend` on CUDA devices.
    ///
    /// # Errors
    /// As [`AttentionPlan::new`].
    pub fn with_backend(
        desc: AttentionDesc,
        config: Option<AttnConfig>,
        backend: AttnBackend,
    ) -> Result<Self> {
        let config = config.unwrap_or_default();
        desc.check().and_then(|()| config.check()).map_err(|e| e.op("attention"))?;
        let (ready, refused) = (Ready::new(), Refused::default());
        Ok(Self { desc, config, backend, fusion: Fusion::OrderedIfFaster, ready, refused })
    }

    /// Makes dq, dk and dv of every launch by one kernel of five products, in place of two of
    /// seven: on sm_90a, for heads of 128, bf16 or f16 with gradients of the same type, a positive
    /// scale, no softcap, bias or dropout. Gradients have the same bits in every run, and others
    /// than those of two kernels. The sums of dq take 512 bytes for each query and head, which
    /// plans share. Call before [`AttentionPlan::prepare`], which fails with `Unsupported` where
    /// there is no such kernel; the host has one algorithm anyway.
    ///
    /// Without a call, launches take that kernel which it is faster for: without a window, with
    /// sequences on the host of 4096 queries on average and more, and so many keys and heads that
    /// two tiles of 128 are there for nearly each multiprocessor (on an H200 1.08 to 1.23 times the
    /// rate of two kernels; docs/lab/attention.md). A plan of as many rows has the sums beside its
    /// workspace.
    #[must_use]
    pub fn with_fused_backward(self) -> Self {
        Self { fusion: Fusion::Ordered, ..self }
    }

    /// Makes all gradients by two kernels, whatever is faster: without memory for sums of dq.
    #[must_use]
    pub fn without_fused_backward(self) -> Self {
        Self { fusion: Fusion::None, ..self }
    }

    /// As [`AttentionPlan::with_fused_backward`], with dq added in whatever order its parts are
    /// ready: none waits for another, and the last bits of dq differ from run to run. Those of dk
    /// and dv do not.
    #[must_use]
    pub fn with_unordered_backward(self) -> Self {
        Self { fusion: Fusion::Unordered, ..self }
    }

    /// Lets launches that take one kernel by default (see
    /// [`with_fused_backward`](AttentionPlan::with_fused_backward)) add dq [in any
    /// order](AttentionPlan::with_unordered_backward), which is faster by some twentieth. The
    /// gradients of other launches have the same bits in every run.
    #[must_use]
    pub fn allow_unordered_backward(self) -> Self {
        Self { fusion: Fusion::UnorderedIfFaster, ..self }
    }

    /// Returns the description.
    pub fn desc(&self) -> &AttentionDesc {
        &self.desc
    }

    /// Bytes of symmetric memory: none.
    pub fn memory(&self) -> usize {
        0
    }

    /// In words, what a launch does.
    pub fn explain(&self) -> String {
        let how = match self.ready.cuda() {
            Some((_, p)) => p.explain(),
            None => format!("tiles {}", self.config),
        };
        format!("attention {}\none rank, {how}, f32 arithmetic", self.desc)
    }

    /// Makes what launches on streams of the device of `stream` need: nothing on the host, kernels
    /// and workspace on a CUDA device. There each stream that this is called with gets a workspace
    /// of its own, up to four of them: launches on other streams are in order with some of these. A
    /// capture gets its own.
    ///
    /// # Errors
    /// `InvalidArgument` during capture, or if the plan is prepared for another device;
    /// `Unavailable` without a compiler; `Unsupported` for head dimensions above 256 on a CUDA
    /// device, and for what the backend that was asked for does not do.
    pub fn prepare(&self, stream: &Stream) -> Result<()> {
        let make = |ctx: &_| device::Local::new(ctx, &self.desc, (self.backend, self.fusion));
        let made = self.ready.prepare(stream, make).and_then(|()| match self.ready.on(stream)? {
            Some((s, p)) => p.prepare(s),
            None => Ok(()),
        });
        made.map_err(|e| e.op("attention"))
    }

    /// Raises what launches by offsets have found in these; call after waiting for them.
    ///
    /// # Errors
    /// `InvalidArgument` if offsets of a launch could not be used since [`AttentionPlan::reset`];
    /// its results are NaN.
    pub fn check(&self) -> Result<()> {
        let checked = match self.ready.cuda() {
            Some((_, p)) => read_status(p.status()),
            None => self.refused.check(),
        };
        checked.map_err(|e| e.op("attention"))
    }

    /// Forgets what [`AttentionPlan::check`] would raise, in stream order.
    ///
    /// # Errors
    /// As [`Stream::launch`].
    pub fn reset(&self, stream: &Stream) -> Result<()> {
        if let Some((s, p)) = self.ready.on(stream)? {
            return p.reset(s);
        }
        let refused = self.refused.clone();
        stream.launch(Node::new("attention", move || {
            refused.forget();
            Ok(())
        }))
    }

    /// The sequences of a launch, and its rows.
    fn begin(&self, stream: &Stream, x: &AttnInputs) -> Result<(Sequences, LocalRows)> {
        self.ready.on(stream)?;
        let s = match (&x.offsets, &x.sequences) {
            (None, s) => s.as_ref().unwrap_or(&self.desc.sequences).clone(),
            (Some(_), Some(_)) => {
                return Err(Error::invalid("a launch has sequences or offsets, not both"));
            }
            // Those of the sequences are known when the launch runs.
            (Some(o), None) => {
                o.check(&self.desc)?;
                let rows = |t: &AttnOperand| t.data.shape().dims().first().copied().unwrap_or(0);
                let (tokens_q, tokens_kv) = (rows(&x.q), rows(&x.k));
                Sequences { tokens_q, tokens_kv, q: Vec::new(), kv: Vec::new() }
            }
        };
        self.desc.check_launch(&s)?;
        let rows = LocalRows { q: s.tokens_q, kv: s.tokens_kv };
        x.check(&self.desc, rows)?;
        together_on(stream, &x.named())?;
        Ok((s, rows))
    }

    /// Queues the forward pass.
    ///
    /// # Errors
    /// `NotPrepared`; `InvalidArgument` for a tensor that does not fit the description.
    pub fn launch_fwd(
        &self,
        stream: &Stream,
        inputs: &AttnInputs,
        out: AttnOut,
    ) -> Result<Pending<AttnOut>> {
        let (seqs, rows) = self.begin(stream, inputs).map_err(|e| e.op("attention"))?;
        out.check(&self.desc, rows, inputs).map_err(|e| e.op("attention"))?;
        let fwd = |s: &CudaStream, p: &device::Local| {
            together_on(stream, &[("out", Some(&out.out)), ("lse", Some(&out.lse))])?;
            p.launch_fwd(s, &self.desc, Given { x: inputs, seqs: &seqs, rows }, &out)
        };
        if let Some((s, p)) = self.ready.on(stream)? {
            return s.in_launch(|| {
                let _span = s.span("attention");
                fwd(s, p).map_err(|e| e.op("attention"))?;
                Pending::new(out.clone(), stream, None)
            });
        }
        let (run, o) = (self.run(inputs, seqs, rows), out.clone());
        let refused = self.refused.clone();
        let forward = move || match run.now() {
            Ok(run) => run.forward(&o),
            Err(e) => {
                o.poison();
                refused.keep(e);
                Ok(())
            }
        };
        stream.launch(Node::new("attention", forward))?;
        Pending::new(out, stream, None)
    }

    /// Queues the backward pass.
    ///
    /// # Errors
    /// As [`AttentionPlan::launch_fwd`].
    pub fn launch_bwd(
        &self,
        stream: &Stream,
        inputs: &AttnInputs,
        saved: AttnSaved,
        grads: AttnGrads,
    ) -> Result<Pending<AttnGrads>> {
        let (seqs, rows) = self.begin(stream, inputs).map_err(|e| e.op("attention"))?;
        grads.check(&self.desc, rows, inputs, &saved).map_err(|e| e.op("attention"))?;
        let bwd = |s: &CudaStream, p: &device::Local| {
            together_on(stream, &grads.named())?;
            together_on(stream, &saved.named())?;
            let given = Given { x: inputs, seqs: &seqs, rows };
            p.launch_bwd(s, &self.desc, given, (&saved, &grads))
        };
        if let Some((s, p)) = self.ready.on(stream)? {
            return s.in_launch(|| {
                let _span = s.span("attention_bwd");
                bwd(s, p).map_err(|e| e.op("attention"))?;
                Pending::new(grads.clone(), stream, None)
            });
        }
        let (run, g) = (self.run(inputs, seqs, rows), grads.clone());
        let refused = self.refused.clone();
        let backward = move || match run.now() {
            Ok(run) => run.backward(&saved, &g),
            Err(e) => {
                g.poison();
                refused.keep(e);
                Ok(())
            }
        };
        stream.launch(Node::new("attention", backward))?;
        Pending::new(grads, stream, None)
    }

    fn run(&self, inputs: &AttnInputs, seqs: Sequences, rows: LocalRows) -> Arc<Run> {
        let (desc, config) = (self.desc.clone(), self.config);
        Arc::new(Run { desc, config, seqs, rows, x: inputs.clone() })
    }
}
