//! `ag_gemm`, `gemm_rs`, `gemm_ar`.

use std::sync::Arc;

use pyo3::prelude::*;
use tilewire::ops::Shards;
use tilewire::ops::ag_gemm::{AgGemmDesc, AgGemmInputs, AgGemmPlan};
use tilewire::ops::collective::{CollectiveDesc, CollectiveKind, ReduceOp};
use tilewire::ops::common::OverlapConfig;
use tilewire::ops::gemm::{Activation, BOrder, Epilogue};
use tilewire::ops::gemm_ar::{GemmArDesc, GemmArPlan};
use tilewire::ops::gemm_rs::{GemmRsDesc, GemmRsInputs, GemmRsPlan};
use tilewire::plans::Recipe;
use tilewire::prelude::*;

use crate::call::Call;
use crate::errors::OrRaise;
use crate::explain;
use crate::keys::{Key, rounded};
use crate::ops::{Form, collective};
use crate::world::Member;

pub fn ag_plan(
    member: &Member,
    key: (AgGemmDesc, Option<OverlapConfig>),
    stream: &Stream,
) -> Result<Arc<AgGemmPlan>> {
    let (desc, config) = key.clone();
    let plan = member.plan(&Key::AgGemm(key.0, key.1), stream, || Recipe {
        op: "ag_gemm",
        len_bytes: AgGemmPlan::memory(&desc),
        make: |heap: &Heap| AgGemmPlan::new(desc.clone(), heap, config),
        prepare: AgGemmPlan::prepare,
    });
    plan.inspect(|p| explain::note("ag_gemm", || p.explain()))
}

fn rs_plan(
    member: &Member,
    key: (GemmRsDesc, Option<OverlapConfig>),
    stream: &Stream,
) -> Result<Arc<GemmRsPlan>> {
    let (desc, config) = key.clone();
    let plan = member.plan(&Key::GemmRs(key.0, key.1), stream, || Recipe {
        op: "gemm_rs",
        len_bytes: GemmRsPlan::memory(&desc, member.team.size()),
        make: |heap: &Heap| GemmRsPlan::new(desc.clone(), heap, config),
        prepare: GemmRsPlan::prepare,
    });
    plan.inspect(|p| explain::note("gemm_rs", || p.explain()))
}

fn ar_plan(
    member: &Member,
    key: (GemmArDesc, Option<OverlapConfig>),
    stream: &Stream,
) -> Result<Arc<GemmArPlan>> {
    let (desc, config) = key.clone();
    let plan = member.plan(&Key::GemmAr(key.0, key.1), stream, || Recipe {
        op: "gemm_ar",
        len_bytes: match stream {
            Stream::Host(_) => GemmArPlan::host_memory(&desc, member.team.size()),
            Stream::Cuda(_) => GemmArPlan::memory(&desc, member.team.size()),
        },
        make: |heap: &Heap| GemmArPlan::new(desc.clone(), heap, config),
        prepare: GemmArPlan::prepare,
    });
    plan.inspect(|p| explain::note("gemm_ar", || p.explain()))
}

fn activation(name: Option<&str>) -> Result<Activation> {
    match name {
        None => Ok(Activation::None),
        Some("relu") => Ok(Activation::Relu),
        Some("gelu") => Ok(Activation::Gelu),
        Some("swiglu") => Ok(Activation::SwiGlu),
        Some(other) => Err(Error::invalid(format!("unknown activation `{other}`"))
            .expected("relu, gelu (tanh form) or swiglu")),
    }
}

/// Returns the order of the weight, and its outputs and inputs: `[n, k]`, or `[k, n]` if `kn`.
fn weight(w: Form, kn: bool) -> Result<(BOrder, usize, usize)> {
    let (rows, cols) = w.matrix("w")?;
    Ok(if kn { (BOrder::Kn, cols, rows) } else { (BOrder::Nk, rows, cols) })
}

/// A description, the rows of this launch, and how it is to be carried out, if the caller says.
pub type Described<D> = (D, usize, Option<OverlapConfig>);

/// The arguments of `ag_gemm` beside its tensors.
#[derive(Clone, Copy)]
pub struct AgParams<'a> {
    pub act: Option<&'a str>,
    pub rows: Option<&'a [usize]>,
    pub kn: bool,
    pub algo: Option<&'a str>,
    /// True if there is a bias; `aux`: true if the value before the activation is written.
    pub bias: bool,
    pub aux: bool,
}

impl AgParams<'_> {
    pub fn describe(
        &self,
        (x, w, out): (Form, Form, DType),
        size: usize,
    ) -> Result<Described<AgGemmDesc>> {
        let (order, n, k) = weight(w, self.kn)?;
        let (mine, _) = x.matrix("x")?;
        let m = self.rows.map_or(mine * size, |r| r.iter().sum());
        let most = if self.rows.is_some() { m } else { rounded(mine) * size };
        let shards = self.rows.map_or(Shards::Even, |r| Shards::Explicit(r.to_vec()));
        let activation = activation(self.act)?;
        let epilogue = Epilogue { bias: self.bias, activation, aux: self.aux, ..Epilogue::NONE };
        let new = AgGemmDesc::new(most, n, k, x.dtype);
        let desc = AgGemmDesc { w: w.dtype, out, w_order: order, shards, epilogue, ..new };
        Ok((desc, m, self.algo.map(str::parse).transpose()?))
    }
}

/// The arguments of `gemm_rs` and `gemm_ar` beside their tensors.
#[derive(Clone, Copy)]
pub struct SumParams<'a> {
    pub rows: Option<&'a [usize]>,
    pub kn: bool,
    pub wire: Option<&'a str>,
    pub algo: Option<&'a str>,
    pub bias: bool,
}

impl SumParams<'_> {
    pub fn describe(
        &self,
        (x, w, out): (Form, Form, DType),
        size: usize,
    ) -> Result<Described<GemmRsDesc>> {
        let (order, n, k) = weight(w, self.kn)?;
        let (m, _) = x.matrix("x")?;
        let most = if self.rows.is_some() { m } else { rounded(m.div_ceil(size)) * size };
        let mut desc = GemmRsDesc {
            w: w.dtype,
            out,
            w_order: order,
            shards: self.rows.map_or(Shards::Even, |r| Shards::Explicit(r.to_vec())),
            bias: self.bias,
            ..GemmRsDesc::new(most, n, k, x.dtype)
        };
        if let Some(wire) = self.wire {
            desc.wire = wire.parse()?;
        }
        Ok((desc, m, self.algo.map(str::parse).transpose()?))
    }

    fn of(self, py: Python<'_>, call: &Call, t: &GemmRsInputs) -> PyResult<Described<GemmRsDesc>> {
        let forms = (Form::from(&t.x), Form::from(&t.w), t.out.dtype());
        self.describe(forms, call.size()).map_err(|e| e.op(call.op)).or_raise(py)
    }
}

/// `out [m, n] = act(all_gather(x [m/P, k]) w^T + bias)`; `gathered [m, k]` and `aux [m, n]`
/// (before the activation) where given; `scale` [1] f32 multiplies the product. With `grad`, the
/// plans that the backward pass needs are made, too.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "called by position from one Python function")]
pub fn ag_gemm(
    py: Python<'_>,
    world: u64,
    x: &Bound<'_, PyAny>,
    w: &Bound<'_, PyAny>,
    bias: Option<&Bound<'_, PyAny>>,
    out: &Bound<'_, PyAny>,
    gathered: Option<&Bound<'_, PyAny>>,
    aux: Option<&Bound<'_, PyAny>>,
    scale: Option<&Bound<'_, PyAny>>,
    act: Option<&str>,
    rows: Option<Vec<usize>>,
    kn: bool,
    algo: Option<&str>,
    grad: bool,
    returns_gathered: bool,
) -> PyResult<()> {
    let call = Call::new(py, "ag_gemm", world)?;
    let (x, w) = (call.tensor("x", x)?, call.tensor("w", w)?);
    let (bias, out) = (call.optional("bias", bias)?, call.tensor("out", out)?);
    let (gathered, aux) = (call.optional("gathered", gathered)?, call.optional("aux", aux)?);
    let scale = call.optional("scale", scale)?;
    let rows = rows.as_deref();
    let params = AgParams { act, rows, kn, algo, bias: bias.is_some(), aux: aux.is_some() };
    let new = AgGemmInputs::new(x, w, out);
    let inputs = AgGemmInputs { bias, scale, aux_out: aux, gathered, ..new };
    run_ag(py, &call, inputs, params, Backward { needed: grad, returns_gathered })
}

/// The plans of a backward pass that a forward call makes, too.
#[derive(Clone, Copy)]
pub struct Backward {
    pub needed: bool,
    /// True if the caller gets the gathered X, which it may use in other ways.
    pub returns_gathered: bool,
}

/// Launches `ag_gemm`.
pub fn run_ag(
    py: Python<'_>,
    call: &Call,
    inputs: AgGemmInputs,
    params: AgParams<'_>,
    backward: Backward,
) -> PyResult<()> {
    let forms = (Form::from(&inputs.x), Form::from(&inputs.w), inputs.out.dtype());
    let (desc, m, algo) =
        params.describe(forms, call.size()).map_err(|e| e.op(call.op)).or_raise(py)?;
    // The gradient of X: the mirrored product, with the weight in the other order.
    let mirror = backward.needed.then(|| GemmRsDesc {
        w_order: if params.kn { BOrder::Nk } else { BOrder::Kn },
        shards: desc.shards.clone(),
        ..GemmRsDesc::new(desc.m, desc.k, desc.n, desc.x)
    });
    // And of the gathered X.
    let (k, most, dtype) = (desc.k, desc.m, desc.x);
    let scatter = (backward.needed && backward.returns_gathered)
        .then(|| CollectiveKind::ReduceScatter(desc.shards.clone(), ReduceOp::Sum));
    call.run(py, |stream| {
        if let Some(mirror) = mirror {
            rs_plan(&call.member, (mirror, algo), stream)?;
        }
        if let Some(kind) = scatter {
            let desc = CollectiveDesc { kind, m: most, cols: k, dtype };
            collective::plan(&call.member, &desc, stream)?;
        }
        ag_plan(&call.member, (desc, algo), stream)?.launch(stream, m, inputs)
    })
}

/// The tensors of `gemm_rs` and `gemm_ar` in Python.
struct SumArgs<'a, 'py> {
    x: &'a Bound<'py, PyAny>,
    w: &'a Bound<'py, PyAny>,
    bias: Option<&'a Bound<'py, PyAny>>,
    scale: Option<&'a Bound<'py, PyAny>>,
    out: &'a Bound<'py, PyAny>,
}

impl SumArgs<'_, '_> {
    fn inputs(&self, call: &Call) -> PyResult<GemmRsInputs> {
        let (x, w) = (call.tensor("x", self.x)?, call.tensor("w", self.w)?);
        let (bias, out) = (call.optional("bias", self.bias)?, call.tensor("out", self.out)?);
        let scale = call.optional("scale", self.scale)?;
        Ok(GemmRsInputs { bias, scale, ..GemmRsInputs::new(x, w, out) })
    }
}

/// Launches `gemm_rs`. With `grad`, the plan that the backward pass needs is made, too.
pub fn run_rs(
    py: Python<'_>,
    call: &Call,
    inputs: GemmRsInputs,
    params: SumParams<'_>,
    grad: bool,
) -> PyResult<()> {
    let (d, m, algo) = params.of(py, call, &inputs)?;
    let mirror = grad.then(|| AgGemmDesc {
        w_order: if params.kn { BOrder::Nk } else { BOrder::Kn },
        shards: d.shards.clone(),
        ..AgGemmDesc::new(d.m, d.k, d.n, d.x)
    });
    call.run(py, |stream| {
        if let Some(mirror) = mirror {
            ag_plan(&call.member, (mirror, algo), stream)?;
        }
        rs_plan(&call.member, (d, algo), stream)?.launch(stream, m, inputs)
    })
}

/// Launches `gemm_ar`.
pub fn run_ar(
    py: Python<'_>,
    call: &Call,
    inputs: GemmRsInputs,
    params: SumParams<'_>,
) -> PyResult<()> {
    let (d, m, algo) = params.of(py, call, &inputs)?;
    call.run(py, |stream| {
        ar_plan(&call.member, (GemmArDesc(d), algo), stream)?.launch(stream, m, inputs)
    })
}

/// `out [m/P, n] = reduce_scatter(x [m, k] w^T) + bias`. With `grad`, the plan that the backward
/// pass needs is made, too.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "called by position from one Python function")]
pub fn gemm_rs<'py>(
    py: Python<'py>,
    world: u64,
    x: &Bound<'py, PyAny>,
    w: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    scale: Option<&Bound<'py, PyAny>>,
    out: &Bound<'py, PyAny>,
    rows: Option<Vec<usize>>,
    kn: bool,
    wire: Option<&str>,
    algo: Option<&str>,
    grad: bool,
) -> PyResult<()> {
    let call = Call::new(py, "gemm_rs", world)?;
    let inputs = SumArgs { x, w, bias, scale, out }.inputs(&call)?;
    let params = SumParams { rows: rows.as_deref(), kn, wire, algo, bias: bias.is_some() };
    run_rs(py, &call, inputs, params, grad)
}

/// `out [m, n] = all_reduce(x [m, k] w^T) + bias`.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "called by position from one Python function")]
pub fn gemm_ar<'py>(
    py: Python<'py>,
    world: u64,
    x: &Bound<'py, PyAny>,
    w: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    scale: Option<&Bound<'py, PyAny>>,
    out: &Bound<'py, PyAny>,
    kn: bool,
    wire: Option<&str>,
    algo: Option<&str>,
) -> PyResult<()> {
    let call = Call::new(py, "gemm_ar", world)?;
    let inputs = SumArgs { x, w, bias, scale, out }.inputs(&call)?;
    run_ar(py, &call, inputs, SumParams { rows: None, kn, wire, algo, bias: bias.is_some() })
}

/// Makes the plan of a [`gemm_ar`] with tensors like these, of which it reads nothing.
#[pyfunction]
pub fn prepare_gemm_ar(
    py: Python<'_>,
    world: u64,
    x: &Bound<'_, PyAny>,
    w: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    kn: bool,
) -> PyResult<()> {
    let call = Call::new(py, "gemm_ar", world)?;
    let inputs = SumArgs { x, w, bias: None, scale: None, out }.inputs(&call)?;
    let params = SumParams { rows: None, kn, wire: None, algo: None, bias: false };
    let (d, _, algo) = params.of(py, &call, &inputs)?;
    call.prepare(py, |stream| ar_plan(&call.member, (GemmArDesc(d), algo), stream).map(drop))
}
