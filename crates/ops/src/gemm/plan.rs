//! The plan of a GEMM.

use std::borrow::Cow;
use std::sync::Arc;

use tilewire_core::{DType, Error, Result, ScaleLayout, convert_from_f32, convert_to_f32};
use tilewire_device::{Node, Pending, Stream, Tensor};

use super::host::{Mat, activate_row, add_bias, matmul, row_sums};
use super::{AOrder, BOrder, GemmBackend, GemmDesc, cuda};
use crate::common::bias_type;
use crate::common::cuda::{Ready, together_on};
use crate::common::{Named, apart, expect_tensor, wide};

/// An operand: a plain tensor, or FP8 data with its scales (`value = data * scale`).
#[derive(Clone, Debug)]
pub struct Operand {
    /// The elements.
    pub data: Tensor,
    /// Scales of FP8 data and how they lie. Without them the scale is 1.
    pub scales: Option<(Tensor, ScaleLayout)>,
}

impl From<Tensor> for Operand {
    fn from(data: Tensor) -> Self {
        Self { data, scales: None }
    }
}

impl From<&Tensor> for Operand {
    fn from(data: &Tensor) -> Self {
        data.clone().into()
    }
}

impl Operand {
    /// Checks data and scales against a `[rows, cols]` matrix of `dtype`.
    pub(crate) fn check(&self, what: &str, dtype: DType, rows: usize, cols: usize) -> Result<()> {
        expect_tensor(what, &self.data, dtype, &[rows, cols])?;
        if let Some((s, layout)) = &self.scales {
            if !dtype.is_fp8() {
                return Err(Error::invalid(format!("`{what}` is {dtype} and has no scales")));
            }
            let n = layout.num_scales(rows, cols);
            if s.dtype() != layout.dtype() || s.shape().num_elems() != n {
                return Err(Error::invalid(format!("`{what}` has the wrong scales"))
                    .expected(format_args!("{n} {} for {layout:?}", layout.dtype()))
                    .seen(format_args!("{} {}", s.shape().num_elems(), s.dtype())));
            }
        }
        Ok(())
    }

    /// Its tensors with their name.
    pub(crate) fn named(&self, what: &'static str) -> [Named<'_>; 2] {
        [(what, Some(&self.data)), (what, self.scales.as_ref().map(|(s, _)| s))]
    }

    /// Runs `f` on the values as f32, row-major as they lie.
    pub(crate) fn with_wide<R>(&self, f: impl FnOnce(&[f32]) -> R) -> Result<R> {
        let Some((scales, layout)) = &self.scales else {
            return self.data.read(|b| f(&wide(self.data.dtype(), b)));
        };
        let (rows, cols) = (self.data.shape().dim(0), self.data.shape().dim(1));
        let mut v = vec![0.0; rows * cols];
        self.data.read(|b| convert_to_f32(self.data.dtype(), b, &mut v))?;
        let s = scales.to_f32()?;
        for (i, x) in v.iter_mut().enumerate() {
            *x *= s[layout.scale_idx(i / cols, i % cols, cols)];
        }
        Ok(f(&v))
    }
}

/// Tensors of one launch. Shapes as [`GemmDesc`] says, with the `m` of `out` (at most the plan's).
#[derive(Clone, Debug)]
pub struct GemmInputs {
    /// A.
    pub a: Operand,
    /// B.
    pub b: Operand,
    /// Bias `[n]`: f32, or of the type of the output.
    pub bias: Option<Tensor>,
    /// Saved pre-activation `[m, aux_cols]` for the backward activations.
    pub aux_in: Option<Tensor>,
    /// Output `[m, out_cols]`; read as well with `accumulate`.
    pub out: Tensor,
    /// Pre-activation output `[m, n]`.
    pub aux_out: Option<Tensor>,
    /// Row sums of `op(A)`, `[m]` f32.
    pub bgrad: Option<Tensor>,
}

impl GemmInputs {
    /// The plain product: no bias, no second output.
    pub fn new(a: impl Into<Operand>, b: impl Into<Operand>, out: Tensor) -> Self {
        Self { a: a.into(), b: b.into(), bias: None, aux_in: None, out, aux_out: None, bgrad: None }
    }

    /// Every tensor with its name, those that are read before the others.
    fn named(&self) -> [Named<'_>; 9] {
        let ([a, a_scales], [b, b_scales]) = (self.a.named("a"), self.b.named("b"));
        [
            a,
            a_scales,
            b,
            b_scales,
            ("bias", self.bias.as_ref()),
            ("aux_in", self.aux_in.as_ref()),
            ("out", Some(&self.out)),
            ("aux_out", self.aux_out.as_ref()),
            ("bgrad", self.bgrad.as_ref()),
        ]
    }
}

/// So many of the named tensors are read.
const INS: usize = 6;

/// A prepared GEMM. Local: no team.
pub struct GemmPlan {
    desc: GemmDesc,
    backend: GemmBackend,
    ready: Ready<cuda::Prepared>,
}

impl GemmPlan {
    /// A plan for at most `desc.m` rows; what makes its products on a device is chosen at `prepare`.
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
        Ok(Self { desc, backend, ready: Ready::new() })
    }

    /// In words, what makes the products, and why it does: known after [`GemmPlan::prepare`].
    pub fn explain(&self) -> String {
        let how = self.ready.cuda().map_or_else(
            || "products: on the host, or not prepared yet".to_owned(),
            |(_, p)| p.explain(),
        );
        format!("gemm {}\n{how}", self.desc)
    }

    /// What it computes.
    pub fn desc(&self) -> &GemmDesc {
        &self.desc
    }

    /// Makes what launches on streams of the device of `stream` need: nothing on the host, kernels
    /// on a CUDA device, and for FP8 operands room to widen them to f32. That workspace is shared by
    /// all launches: with FP8, launches on several streams must be ordered. What cuBLASLt needs beside
    /// is shared, too: launches order themselves, replays of several graphs must be ordered.
    ///
    /// # Errors
    /// `InvalidArgument` during capture, or if the plan is prepared for another device;
    /// `Unsupported` for what no CUDA kernel does, or not the backend that was asked for;
    /// `Unavailable` without a compiler, or without that backend.
    pub fn prepare(&self, stream: &Stream) -> Result<()> {
        let make = |ctx: &_| cuda::Prepared::new(ctx, &self.desc, self.backend);
        self.ready.prepare(stream, make).map_err(|e| e.op("gemm"))
    }

    fn check_inputs(&self, t: &GemmInputs) -> Result<usize> {
        let (d, e) = (&self.desc, &self.desc.epilogue);
        let m = if t.out.shape().ndim() == 2 { t.out.shape().dim(0) } else { 0 };
        if m > d.m {
            return Err(Error::invalid("more rows than the plan was made for")
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
        stream.launch(Node::new("gemm", move || run(&desc, m, &t)))?;
        Pending::new(out, stream, None)
    }
}

/// The whole product with its epilogue, on this thread.
fn run(d: &GemmDesc, m: usize, t: &GemmInputs) -> Result<()> {
    let mut acc = vec![0.0; m * d.n];
    t.a.with_wide(|a| {
        let a = match d.a_order {
            AOrder::Mk => Mat::rows(a, d.k),
            AOrder::Km => Mat::rows(a, m).t(),
        };
        if let Some(bgrad) = &t.bgrad {
            let mut sums = vec![0.0; m];
            row_sums(m, d.k, a, &mut sums);
            bgrad.write(|b| b.copy_from_slice(bytemuck::cast_slice(&sums)))?;
        }
        t.b.with_wide(|b| {
            let b = match d.b_order {
                BOrder::Nk => Mat::rows(b, d.k).t(),
                BOrder::Kn => Mat::rows(b, d.n),
            };
            matmul((m, d.n, d.k), a, b, &mut acc, false);
        })
    })??;
    finish(d, m, t, &mut acc)
}

/// Bias, activation, aux, accumulation and rounding.
fn finish(d: &GemmDesc, m: usize, t: &GemmInputs, acc: &mut [f32]) -> Result<()> {
    let act = d.epilogue.activation;
    if let Some(bias) = &t.bias {
        add_bias(acc, &bias.to_f32()?);
    }
    if let Some(aux) = &t.aux_out {
        aux.write(|b| convert_from_f32(d.out, acc, b))?;
    }
    let aux = match &t.aux_in {
        Some(a) => Cow::Owned(a.to_f32()?),
        None => Cow::Borrowed(&[][..]),
    };
    let (cols, aux_cols) = (act.out_cols(d.n), act.aux_cols(d.n));
    let mut rows = vec![0.0; m * cols];
    for i in 0..m {
        let saved = if aux.is_empty() { &[] } else { &aux[i * aux_cols..][..aux_cols] };
        activate_row(act, &acc[i * d.n..][..d.n], saved, &mut rows[i * cols..][..cols]);
    }
    if d.epilogue.accumulate {
        for (r, o) in rows.iter_mut().zip(t.out.to_f32()?) {
            *r += o;
        }
    }
    t.out.write(|b| convert_from_f32(d.out, &rows, b))
}
