//! The plan of a grouped GEMM.

use std::sync::Arc;

use tilewire_core::{DType, Error, Result, Shape};
use tilewire_device::cuda::CudaStream;
use tilewire_device::{Node, Pending, Stream, Tensor};

use super::launch::{GroupedDgrad, GroupedFprop, GroupedWgrad};
use super::{GroupedDesc, Splits, Weights};
use super::{device, host};
use crate::common::bias_type;
use crate::common::cuda::{Ready, together_on};
use crate::common::kernel::GemmChoice;
use crate::common::{Named, apart, each_apart, expect_tensor};
use crate::gemm::GemmBackend;

/// Grouped products of one family of experts. Local: no team. Launches on several streams may run
/// side by side ([`GroupedGemmPlan::prepare`]); one status tells of all of them.
pub struct GroupedGemmPlan {
    desc: GroupedDesc,
    choice: GemmChoice,
    status: Tensor,
    ready: Ready<device::Prepared>,
}

impl GroupedGemmPlan {
    /// A plan, whose products on a CUDA device are made by the core for sm_90a where that fits,
    /// else by the portable kernels.
    ///
    /// # Errors
    /// As [`GroupedDesc::check`].
    pub fn new(desc: GroupedDesc) -> Result<Self> {
        Self::with_backend(desc, GemmBackend::Auto)
    }

    /// As [`GroupedGemmPlan::new`], with products on CUDA devices made by `backend`:
    /// [`GemmBackend::Hopper`] for the core for sm_90a, which takes bf16 and f16, and features that
    /// are multiples of 8. Its launches with [`Weights::Discrete`] find the tensors by a table that
    /// is made when a list is first seen: a list that is new during a capture is `NotPrepared`.
    ///
    /// # Errors
    /// As [`GroupedDesc::check`].
    pub fn with_backend(desc: GroupedDesc, backend: GemmBackend) -> Result<Self> {
        desc.check().map_err(|e| e.op("grouped_gemm"))?;
        let status = Tensor::zeros(DType::I32, Shape::d1(1));
        Ok(Self { desc, choice: backend.into(), status, ready: Ready::new() })
    }

    /// Sets the most multiprocessors of a launch on a GPU, at least 2, so that others are left for
    /// what runs beside it, such as dispatch and combine; to be called before
    /// [`GroupedGemmPlan::prepare`]. The core for sm_90a keeps to it, with the same bits whatever
    /// the number. Where that does not fit, the portable kernels have all multiprocessors, as
    /// [`GroupedGemmPlan::explain`] says; asked for by name they are `Unsupported` at `prepare`.
    #[must_use]
    pub fn with_num_sms(mut self, num: usize) -> Self {
        self.choice = self.choice.with_num_sms(num);
        self
    }

    /// In words, what makes the products, and why it does: known after
    /// [`GroupedGemmPlan::prepare`].
    pub fn explain(&self) -> String {
        self.ready.cuda().map_or_else(
            || "products: on the host, or not prepared yet".to_owned(),
            |(_, p)| p.explain(),
        )
    }

    /// Returns the description.
    pub fn desc(&self) -> &GroupedDesc {
        &self.desc
    }

    /// Makes what launches on streams of the device of `stream` need: nothing on the host; on a
    /// CUDA device kernels, and a workspace for `stream`, which launches with [`Weights::Discrete`]
    /// (8 bytes for each group) or FP8 operands (f32 of all of them) use. Call it again for every
    /// other stream whose launches are to run beside these; up to four have a workspace of their
    /// own.
    ///
    /// Launches on any streams, by any threads, are right side by side. One on a stream without a
    /// workspace takes one that is not in use, or runs on the device behind the launch that has
    /// used one first. Only a captured launch allocates: a graph owns a workspace for each of its
    /// streams.
    ///
    /// # Errors
    /// `InvalidArgument` during capture, or if the plan is prepared for another device;
    /// `Unsupported` for what no CUDA kernel does, or not the backend that was asked for;
    /// `Unavailable` without a compiler.
    pub fn prepare(&self, stream: &Stream) -> Result<()> {
        let make = |ctx: &_| device::Prepared::new(ctx, &self.desc, self.choice);
        let ready =
            self.ready.prepare(stream, make).and_then(|()| match self.ready.on(stream)? {
                Some((s, p)) => p.prepare(s),
                None => Ok(()),
            });
        ready.map_err(|e| e.op("grouped_gemm"))
    }

    /// Status on the device, `[1]` i32: 0 good, 1 a negative split, 2 splits above the capacity.
    /// Set by the work of any launch; stays until [`GroupedGemmPlan::reset`].
    pub fn status(&self) -> &Tensor {
        self.ready.cuda().map_or(&self.status, |(_, p)| &p.status)
    }

    /// Raises what the work has found in the splits; call after waiting for it.
    ///
    /// # Errors
    /// `InvalidArgument` if splits were negative or above the capacity; nothing was written then.
    pub fn check(&self) -> Result<()> {
        match self.status().to_vec::<i32>()?[0] {
            0 => Ok(()),
            1 => Err(Error::invalid("a split is negative").op("grouped_gemm")),
            _ => Err(Error::invalid("the splits sum to more rows than there are")
                .op("grouped_gemm")
                .expected(format_args!("at most {}", self.desc.capacity))
                .seen("more")),
        }
    }

    /// Forgets what was found, in stream order: after a fault of the layer that gave the splits,
    /// for instance.
    ///
    /// # Errors
    /// As [`Stream::launch`].
    pub fn reset(&self, stream: &Stream) -> Result<()> {
        if let (Some((_, p)), Stream::Cuda(s)) = (self.ready.cuda(), stream) {
            return p.reset(s);
        }
        let status = self.status.clone();
        stream.launch(Node::new("grouped_gemm", move || status.write(|b| b.fill(0))))
    }

    /// Queues one pass, of which each device has its form. `tensors` and `weights` must lie on that
    /// of `stream`.
    fn queue<T>(
        &self,
        stream: &Stream,
        (tensors, weights): (&[Named<'_>], Option<&Weights>),
        (out, cuda): (T, impl FnOnce(&device::Run<'_>, &CudaStream) -> Result<()>),
        run: impl Fn(&GroupedDesc) -> Result<i32> + Send + Sync + 'static,
    ) -> Result<Pending<T>> {
        let on = || {
            let ready = self.ready.on(stream)?;
            together_on(stream, tensors)?;
            for w in weights.into_iter().flat_map(Weights::all) {
                together_on(stream, &w.named("weights"))?;
            }
            Ok(ready)
        };
        if let Some((s, p)) = on().map_err(|e: Error| e.op("grouped_gemm"))? {
            let discrete = weights.is_some_and(|w| matches!(w, Weights::Discrete(_)));
            let needs = discrete || self.desc.dtype.is_fp8();
            return s.in_launch(|| {
                let _span = s.span("grouped_gemm");
                p.run(s, needs, |p| cuda(p, s)).map_err(|e| e.op("grouped_gemm"))?;
                Pending::new(out, stream, None)
            });
        }
        let (desc, status) = (self.desc, self.status.clone());
        stream.launch(Node::new("grouped_gemm", move || match run(&desc)? {
            0 => Ok(()),
            bad => status.write(|b| b.copy_from_slice(&bad.to_ne_bytes())),
        }))?;
        Pending::new(out, stream, None)
    }

    /// Queues `Y_e = act(X_e W_e^T + b_e)`.
    ///
    /// # Errors
    /// `NotPrepared`; `InvalidArgument` for tensors that do not fit.
    pub fn fprop(&self, stream: &Stream, t: GroupedFprop) -> Result<Pending<Tensor>> {
        let d = &self.desc;
        let check = || -> Result<()> {
            t.x.check("x", d.dtype, d.capacity, d.k)?;
            d.check_weights("w", &t.w, d.dtype)?;
            d.check_splits(&t.splits)?;
            expect_tensor("out", &t.out, d.out, &[d.capacity, d.out_cols()])?;
            if let Some(b) = &t.bias {
                expect_tensor("bias", b, bias_type(Some(b), d.out), &[d.groups, d.n])?;
            }
            if let Some(a) = &t.aux_out {
                expect_tensor("aux_out", a, d.out, &[d.capacity, d.n])?;
            }
            let outs = [("out", Some(&t.out)), ("aux_out", t.aux_out.as_ref())];
            let ins = [
                ("x", Some(&t.x.data)),
                ("bias", t.bias.as_ref()),
                ("splits", Some(&t.splits.values)),
            ];
            apart(&outs, &ins)?;
            t.w.all().try_for_each(|w| apart(&outs, &[("w", Some(&w.data))]))
        };
        check().map_err(|e| e.op("grouped_gemm"))?;
        let t = Arc::new(t);
        let tensors = [
            &t.x.named("x")[..],
            &t.splits.named(),
            &[("out", Some(&t.out)), ("bias", t.bias.as_ref()), ("aux_out", t.aux_out.as_ref())],
        ]
        .concat();
        let out = (t.out.clone(), |p: &device::Run<'_>, s: &_| p.fprop(s, &t));
        let run = t.clone();
        self.queue(stream, (&tensors, Some(&t.w)), out, move |d| host::fprop(d, &run))
    }

    /// Queues `dX_e = dY_e W_e`. The derivative of the activation is not part of it: feed `dy` as
    /// the gradient of the pre-activation, which [`GroupedGemmPlan::dactivation`] gives.
    ///
    /// # Errors
    /// As [`GroupedGemmPlan::fprop`].
    pub fn dgrad(&self, stream: &Stream, t: GroupedDgrad) -> Result<Pending<Tensor>> {
        let d = &self.desc;
        let check = || -> Result<()> {
            t.dy.check("dy", d.dtype, d.capacity, d.n)?;
            d.check_weights("w", &t.w, d.dtype)?;
            d.check_splits(&t.splits)?;
            expect_tensor("dx", &t.dx, d.out, &[d.capacity, d.k])?;
            let outs = [("dx", Some(&t.dx))];
            apart(&outs, &[("dy", Some(&t.dy.data)), ("splits", Some(&t.splits.values))])?;
            t.w.all().try_for_each(|w| apart(&outs, &[("w", Some(&w.data))]))
        };
        check().map_err(|e| e.op("grouped_gemm"))?;
        let t = Arc::new(t);
        let tensors = [&t.dy.named("dy")[..], &t.splits.named(), &[("dx", Some(&t.dx))]].concat();
        let out = (t.dx.clone(), |p: &device::Run<'_>, s: &_| p.dgrad(s, &t));
        let run = t.clone();
        self.queue(stream, (&tensors, Some(&t.w)), out, move |d| host::dgrad(d, &run))
    }

    /// Queues `dZ = dY * act'(aux)` for the rows of the groups: `dy` is `[capacity, out_cols]`,
    /// `aux` and `dz` are `[capacity, n]`.
    ///
    /// # Errors
    /// As [`GroupedGemmPlan::fprop`].
    pub fn dactivation(
        &self,
        stream: &Stream,
        splits: &Splits,
        dy: &Tensor,
        aux: &Tensor,
        dz: &Tensor,
    ) -> Result<Pending<Tensor>> {
        let d = &self.desc;
        let check = || -> Result<()> {
            d.check_splits(splits)?;
            expect_tensor("dy", dy, d.out, &[d.capacity, d.out_cols()])?;
            expect_tensor("aux", aux, d.out, &[d.capacity, d.n])?;
            expect_tensor("dz", dz, d.out, &[d.capacity, d.n])?;
            apart(&[("dz", Some(dz))], &[("dy", Some(dy)), ("aux", Some(aux))])
        };
        check().map_err(|e| e.op("grouped_gemm"))?;
        let tensors =
            [&splits.named()[..], &[("dy", Some(dy)), ("aux", Some(aux)), ("dz", Some(dz))]]
                .concat();
        let cuda = |p: &device::Run<'_>, s: &_| p.dactivation(s, splits, (dy, aux, dz));
        let (copy, dy, aux, to) = (splits.clone(), dy.clone(), aux.clone(), dz.clone());
        let run = move |d: &GroupedDesc| host::dactivation(d, &copy, &dy, &aux, &to);
        self.queue(stream, (&tensors, None), (dz.clone(), cuda), run)
    }

    /// Queues `dW_e (+)= dY_e^T X_e` and, if asked, the bias gradient.
    ///
    /// # Errors
    /// As [`GroupedGemmPlan::fprop`].
    pub fn wgrad(&self, stream: &Stream, t: GroupedWgrad) -> Result<Pending<Weights>> {
        let d = &self.desc;
        let check = || -> Result<()> {
            t.x.check("x", d.dtype, d.capacity, d.k)?;
            t.dy.check("dy", d.dtype, d.capacity, d.n)?;
            d.check_splits(&t.splits)?;
            d.check_weights("dw", &t.dw, d.grad)?;
            if let Some(m) = &t.mask {
                expect_tensor("mask", m, DType::U8, &[d.groups])?;
            }
            if let Some(b) = &t.dbias {
                expect_tensor("dbias", b, DType::F32, &[d.groups, d.n])?;
            }
            let ins = [
                ("x", Some(&t.x.data)),
                ("dy", Some(&t.dy.data)),
                ("splits", Some(&t.splits.values)),
                ("mask", t.mask.as_ref()),
            ];
            let dbias = ("dbias", t.dbias.as_ref());
            apart(&[dbias], &ins)?;
            t.dw.all().try_for_each(|w| apart(&[("dw", Some(&w.data)), dbias], &ins))?;
            each_apart("dw", t.dw.all().map(|w| &w.data))
        };
        check().map_err(|e| e.op("grouped_gemm"))?;
        let t = Arc::new(t);
        let tensors = [
            &t.x.named("x")[..],
            &t.dy.named("dy"),
            &t.splits.named(),
            &[("mask", t.mask.as_ref()), ("dbias", t.dbias.as_ref())],
        ]
        .concat();
        let out = (t.dw.clone(), |p: &device::Run<'_>, s: &_| p.wgrad(s, &t));
        let run = t.clone();
        self.queue(stream, (&tensors, Some(&t.dw)), out, move |d| host::wgrad(d, &run))
    }
}
