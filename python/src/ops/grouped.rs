//! `grouped_gemm`: fprop, dgrad and wgrad of a family of experts. Local: no world.

use std::sync::Arc;

use pyo3::prelude::*;
use tilewire::device::Device;
use tilewire::ops::gemm::Operand;
use tilewire::ops::grouped_gemm::{
    GroupedDesc, GroupedDgrad, GroupedFprop, GroupedGemmPlan, GroupedWgrad, Splits, Weights,
};
use tilewire::prelude::*;

use crate::call::Place;
use crate::errors::OrRaise;
use crate::explain;
use crate::keys::rounded;
use crate::local::{self, LocalKey};
use crate::ops::Form;
use crate::ops::quant::scales_of;

type Object<'py> = Bound<'py, PyAny>;

fn plan(place: &Place, desc: GroupedDesc, stream: &Stream) -> Result<Arc<GroupedGemmPlan>> {
    local::plan(LocalKey::Grouped(desc), &place.device, stream, || {
        let plan = GroupedGemmPlan::new(desc)?;
        plan.prepare(stream).map(|()| plan)
    })
    .inspect(|p| explain::note("grouped_gemm", || p.desc().to_string()))
}

/// On the CPU the splits are looked at when the call has run; on a GPU nobody waits for that.
fn splits_fit(place: &Place, plan: &GroupedGemmPlan, stream: &Stream) -> Result<()> {
    if !matches!(place.device, Device::Host) {
        return Ok(());
    }
    plan.check().inspect_err(|_| {
        // The next call of this plan is another one.
        plan.reset(stream).and_then(|()| stream.synchronize()).ok();
    })
}

/// Weights of all groups: one tensor `[groups, n, k]`, or a list of `[n, k]`.
fn weights(place: &Place, what: &str, w: &[Object<'_>]) -> PyResult<Weights> {
    let tensors = w.iter().map(|w| place.tensor(what, w)).collect::<PyResult<Vec<_>>>()?;
    if let [all] = &tensors[..]
        && let [groups, n, k] = *all.shape().dims()
    {
        let flat = all.reshape(Shape::d2(groups * n, k)).or_raise_in(w)?;
        return Ok(Weights::Packed(flat.into()));
    }
    Ok(Weights::Discrete(tensors.into_iter().map(Operand::from).collect()))
}

trait OrRaiseIn<T> {
    fn or_raise_in(self, list: &[Object<'_>]) -> PyResult<T>;
}

impl<T> OrRaiseIn<T> for Result<T> {
    fn or_raise_in(self, list: &[Object<'_>]) -> PyResult<T> {
        match list.first() {
            Some(obj) => self.or_raise(obj.py()),
            None => Python::attach(|py| self.or_raise(py)),
        }
    }
}

pub fn describe(groups: usize, (rows, n, k): (usize, usize, usize), dtype: DType) -> GroupedDesc {
    GroupedDesc { zero_tail: true, ..GroupedDesc::new(groups, rows, n, k, dtype) }
}

fn matrix(what: &str, t: &Tensor) -> Result<(usize, usize)> {
    Form::from(t).matrix(what)
}

/// Scales of FP8 operands and the recipes by which they lie: of x, and of each weight.
#[derive(FromPyObject)]
pub struct GroupedScales<'py> {
    #[pyo3(item)]
    x: (Object<'py>, String),
    #[pyo3(item)]
    w: Vec<(Object<'py>, String)>,
}

impl GroupedScales<'_> {
    fn of_weights(&self, place: &Place, w: &mut Weights) -> PyResult<()> {
        let Weights::Discrete(list) = w else { return Ok(()) };
        for (w, s) in list.iter_mut().zip(&self.w) {
            w.scales = Some(scales_of(place, "w", &s.0, &s.1)?);
        }
        Ok(())
    }
}

/// `out[rows of e] = x[rows of e] w_e^T + bias_e`; rows behind the last group's are zero.
#[pyfunction]
pub fn grouped_fprop(
    py: Python<'_>,
    x: &Object<'_>,
    w: Vec<Object<'_>>,
    bias: Option<&Object<'_>>,
    splits: &Object<'_>,
    out: &Object<'_>,
    scales: Option<GroupedScales<'_>>,
) -> PyResult<()> {
    let place = Place::of("grouped_gemm", x, "x")?;
    let (x, mut w) = (Operand::from(place.tensor("x", x)?), weights(&place, "w", &w)?);
    let x = match &scales {
        None => x,
        Some(s) => {
            s.of_weights(&place, &mut w)?;
            Operand { scales: Some(scales_of(&place, "x", &s.x.0, &s.x.1)?), ..x }
        }
    };
    let (bias, splits) = (place.optional("bias", bias)?, place.tensor("m_splits", splits)?);
    let out = place.tensor("out", out)?;
    place.run(py, |stream| {
        let ((rows, k), (_, n)) = (matrix("x", &x.data)?, matrix("out", &out)?);
        let groups = splits.shape().num_elems();
        let desc = describe(groups, (rows, n, k), x.data.dtype());
        let plan = plan(&place, desc, stream)?;
        let splits = Splits::counts(&splits);
        let t = GroupedFprop { x, w, bias, splits, out, aux_out: None };
        finish(&place, &plan, stream, plan.fprop(stream, t)?)
    })
}

/// On the CPU waits, and looks at the splits.
fn finish<T>(
    place: &Place,
    plan: &GroupedGemmPlan,
    stream: &Stream,
    pending: Pending<T>,
) -> Result<Pending<()>> {
    if matches!(place.device, Device::Host) {
        pending.wait()?;
        splits_fit(place, plan, stream)?;
    }
    Pending::new((), stream, None)
}

/// `dx[rows of e] = dy[rows of e] w_e`.
#[pyfunction]
pub fn grouped_dgrad(
    py: Python<'_>,
    dy: &Object<'_>,
    w: Vec<Object<'_>>,
    splits: &Object<'_>,
    dx: &Object<'_>,
) -> PyResult<()> {
    let place = Place::of("grouped_gemm_dgrad", dy, "dy")?;
    let (dy, w) = (place.tensor("dy", dy)?, weights(&place, "w", &w)?);
    let (splits, dx) = (place.tensor("m_splits", splits)?, place.tensor("dx", dx)?);
    place.run(py, |stream| {
        let ((rows, n), (_, k)) = (matrix("dy", &dy)?, matrix("dx", &dx)?);
        let groups = splits.shape().num_elems();
        let plan = plan(&place, describe(groups, (rows, n, k), dy.dtype()), stream)?;
        let t = GroupedDgrad { dy: dy.into(), w, splits: Splits::counts(&splits), dx };
        finish(&place, &plan, stream, plan.dgrad(stream, t)?)
    })
}

/// `dw_e (+)= dy[rows of e]^T x[rows of e]`; added where `mask` is not zero. `dbias` is
/// overwritten.
#[pyfunction]
pub fn grouped_wgrad(
    py: Python<'_>,
    x: &Object<'_>,
    dy: &Object<'_>,
    splits: &Object<'_>,
    dw: Vec<Object<'_>>,
    mask: Option<&Object<'_>>,
    dbias: Option<&Object<'_>>,
) -> PyResult<()> {
    let place = Place::of("grouped_gemm_wgrad", dy, "dy")?;
    let (x, dy) = (place.tensor("x", x)?, place.tensor("dy", dy)?);
    let (splits, dw) = (place.tensor("m_splits", splits)?, weights(&place, "dw", &dw)?);
    let (mask, dbias) = (place.optional("mask", mask)?, place.optional("dbias", dbias)?);
    place.run(py, |stream| {
        let ((rows, k), (_, n)) = (matrix("x", &x)?, matrix("dy", &dy)?);
        let groups = splits.shape().num_elems();
        let grad = match &dw {
            Weights::Packed(w) => w.data.dtype(),
            Weights::Discrete(list) => list.first().map_or(DType::F32, |w| w.data.dtype()),
        };
        let desc = GroupedDesc { grad, ..describe(groups, (rows, n, k), x.dtype()) };
        let plan = plan(&place, desc, stream)?;
        let splits = Splits::counts(&splits);
        let t = GroupedWgrad { x: x.into(), dy: dy.into(), splits, dw, mask, dbias };
        finish(&place, &plan, stream, plan.wgrad(stream, t)?)
    })
}

/// Rows that one plan of attention serves.
pub(super) fn tokens(rows: usize, multiple: usize) -> usize {
    rounded(rows.div_ceil(multiple)) * multiple
}
