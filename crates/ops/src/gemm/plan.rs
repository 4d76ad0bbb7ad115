//! The plan of a GEMM.

use std::sync::Arc;

use tilewire_core::{DType, Error, Result};
use tilewire_device::{Node, Pending, Stream, Tensor};

use super::host;
use super::launch::{GemmInputs, INS};
use super::{AOrder, BOrder, GemmBackend, GemmDesc, device};
use crate::common::bias_type;
use crate::common::cuda::{Ready, together_on};
use crate::common::kernel::GemmChoice;
use crate::common::{apart, expect_tensor};

/// A prepared GEMM. Local: no team.
pub struct GemmPlan {
    desc: GemmDesc,
    choice: GemmChoice,
    ready: Ready<device::Prepared>,
}

impl GemmPlan {
    /// A plan for at most `desc.m` rows; what makes its products on a device is chosen at
    /// `prepare`.
    ///
    /// # Errors
    /// As [`GemmDesc::check`].
    pub fn new(desc: GemmDesc) -> Result<Self> {
        Self::with_backend(desc, GemmBackend::Auto)
    }

    /// As [`GemmPlan::new`], with products on CUDA devices made by `backend`.
    ///
    /// # Errors
    /// As [`GemmDesc::check`].
    pub fn with_backend(desc: GemmDesc, backend: GemmBackend) -> Result<Self> {
        desc.check().map_err(|e| e.op("gemm"))?;
        Ok(Self { desc, choice: backend.into(), ready: Ready::new() })
    }

    /// Sets the most multiprocessors of a launch on a GPU, at least 2, so that others are left for
    /// what runs beside it; to be called before [`GemmPlan::prepare`]. The core for sm_90a keeps to
    /// it, with the same bits whatever the number, and `auto` prefers it then. Where that does not
    /// fit, what takes its place has all multiprocessors, as [`GemmPlan::explain`] says; the
    /// backends `portable` and `cublaslt` are `Unsupported` at `prepare`.
    #[must_use]
    pub fn with_num_sms(mut self, num: usize) -> Self {
        self.choice = self.choice.with_num_sms(num);
        self
    }

    /// Sets into how many parts, at most, the core for sm_90a cuts the contraction of a product; to
    /// be called before [`GemmPlan::prepare`]. The sums of the parts are added in their order:
    /// those of up to 64 rows, with A as `[m, k]` and at most 8 parts, by the blocks that have
    /// them, others by a second kernel; these take 4 bytes for each part, row and column, for the
    /// plan and for each stream of a graph. Without it, products whose tiles are too few for the
    /// multiprocessors are cut by a model of the time, of rows, sizes and device: then bits depend
    /// on the number of rows. All numbers of rows up to 64, with A as `[m, k]`, are cut in one way:
    /// there they do not. With 1 the core's bits of an element depend on its row and column of the
    /// operands alone, whatever other rows there are. Other kernels take no notice.
    #[must_use]
    pub fn with_parts(mut self, parts: usize) -> Self {
        self.choice.parts = Some(parts.max(1));
        self
    }

    /// In words, what makes the products, and why it does: known after [`GemmPlan::prepare`].
    pub fn explain(&self) -> String {
        let how = self.ready.cuda().map_or_else(
            || "products: on the host, or not prepared yet".to_owned(),
            |(_, p)| p.explain(),
        );
        format!("gemm {}\n{how}", self.desc)
    }

    /// Returns the description.
    pub fn desc(&self) -> &GemmDesc {
        &self.desc
    }

    /// Makes what launches on streams of the device of `stream` need: nothing on the host, kernels
    /// on a CUDA device, and for FP8 operands workspace to widen them to f32. That workspace is
    /// shared by all launches: with FP8, launches on several streams must be ordered. What cuBLASLt
    /// needs beside is shared, too: launches order themselves, replays of several graphs must be
    /// ordered. Launches of the core with its contraction in parts order themselves; graphs have
    /// sums of their own.
    ///
    /// # Errors
    /// `InvalidArgument` during capture, or if the plan is prepared for another device;
    /// `Unsupported` for what no CUDA kernel does, or not the backend that was asked for;
    /// `Unavailable` without a compiler, or without that backend.
    pub fn prepare(&self, stream: &Stream) -> Result<()> {
        let make = |ctx: &_| device::Prepared::new(ctx, &self.desc, self.choice);
        self.ready.prepare(stream, make).map_err(|e| e.op("gemm"))
    }

    fn check_inputs(&self, t: &GemmInputs) -> Result<usize> {
        let (d, e) = (&self.desc, &self.desc.epilogue);
        let m = if t.out.shape().ndim() == 2 { t.out.shape().dim(0) } else { 0 };
        if m > d.m {
            return Err(Error::invalid("the launch has more rows than the plan was made for")
                .expected(format_args!("at most {}", d.m))
                .seen(m));
        }
        match d.a_order {
            AOrder::Mk => t.a.check("a", d.a, m, d.k)?,
            AOrder::Km => t.a.check("a", d.a, d.k, m)?,
        }
        match d.b_order {
            BOrder::Nk => t.b.check("b", d.b, d.n, d.k)?,
            BOrder::Kn => t.b.check("b", d.b, d.k, d.n)?,
        }
        expect_tensor("out", &t.out, d.out, &[m, e.activation.out_cols(d.n)])?;
        let optional = |what: &str, want: bool, t: &Option<Tensor>, dt: DType, shape: &[usize]| {
            match (want, t) {
                (true, Some(t)) => expect_tensor(what, t, dt, shape),
                (false, None) => Ok(()),
                (true, None) => {
                    Err(Error::invalid(format!("`{what}` is missing: the epilogue needs it")))
                }
                (false, Some(_)) => Err(Error::invalid(format!(
                    "`{what}` was given, but the epilogue does not use it"
                ))),
            }
        };
        optional("bias", e.bias, &t.bias, bias_type(t.bias.as_ref(), d.out), &[d.n])?;
        let aux = [m, e.activation.aux_cols(d.n)];
        optional("aux_in", e.activation.reads_aux(), &t.aux_in, d.out, &aux)?;
        optional("aux_out", e.aux, &t.aux_out, d.out, &aux)?;
        optional("bgrad", e.bgrad, &t.bgrad, DType::F32, &[m])?;
        apart(
            &[("out", Some(&t.out)), ("aux_out", t.aux_out.as_ref()), ("bgrad", t.bgrad.as_ref())],
            &t.named()[..INS],
        )?;
        Ok(m)
    }

    /// The rows of a launch with these tensors; fails where the launch would.
    pub(crate) fn check(&self, stream: &Stream, inputs: &GemmInputs) -> Result<usize> {
        let check = || {
            self.ready.on(stream)?;
            let m = self.check_inputs(inputs)?;
            together_on(stream, &inputs.named()).map(|()| m)
        };
        check().map_err(|e| e.op("gemm"))
    }

    /// Queues the product on `stream`; `m` is that of `out`.
    ///
    /// # Errors
    /// `NotPrepared`; `InvalidArgument` for a tensor that does not fit the description, or lies on
    /// another device than `stream`.
    pub fn launch(&self, stream: &Stream, inputs: GemmInputs) -> Result<Pending<Tensor>> {
        let m = self.check(stream, &inputs)?;
        let (desc, out) = (self.desc, inputs.out.clone());
        if let Some((s, p)) = self.ready.on(stream)? {
            return s.in_launch(|| {
                let _span = s.span("gemm");
                p.launch(s, m, inputs).map_err(|e| e.op("gemm"))?;
                Pending::new(out, stream, None)
            });
        }
        let t = Arc::new(inputs);
        stream.launch(Node::new("gemm", move || host::run(&desc, m, &t)))?;
        Pending::new(out, stream, None)
    }
}
