//! `quantize` and `dequantize`: FP8 tensors with scales.

use pyo3::prelude::*;
use tilewire::core::ScaleLayout;
use tilewire::ops::quant::{
    DequantDesc, DequantPlan, QuantDesc, QuantInputs, QuantPlan, Quantized, Scope,
};
use tilewire::plans::Recipe;
use tilewire::prelude::*;

use crate::call::{Call, Place};
use crate::errors::OrRaise;
use crate::keys::{Key, rounded};
use crate::local::{self, LocalKey};

type Object<'py> = Bound<'py, PyAny>;

/// Returns the layout of scales by the name of the recipe.
pub fn layout(recipe: &str) -> Result<ScaleLayout> {
    match recipe {
        "tensor" => Ok(ScaleLayout::Tensor),
        "block1x128" => Ok(ScaleLayout::Block1x128),
        "block128x128" => Ok(ScaleLayout::Block128x128),
        "mx1x32" => Ok(ScaleLayout::Mx1x32),
        other => Err(Error::invalid(format!("unknown recipe `{other}`"))
            .expected("tensor, block1x128, block128x128 or mx1x32")),
    }
}

/// Scales of `what`, as a launch takes them.
pub fn scales_of(
    place: &Place,
    what: &str,
    scales: &Object<'_>,
    recipe: &str,
) -> PyResult<(Tensor, ScaleLayout)> {
    let py = scales.py();
    let t = place.tensor(&format!("scales of {what}"), scales)?;
    let flat = t.reshape(Shape::d1(t.shape().num_elems())).or_raise(py)?;
    Ok((flat, layout(recipe).map_err(|e| e.op(place.op)).or_raise(py)?))
}

/// Codes and scales, as a launch takes them.
fn quantized(
    place: &Place,
    what: &str,
    (data, scales): (&Object<'_>, &Object<'_>),
    recipe: &str,
) -> PyResult<Quantized> {
    let (scales, layout) = scales_of(place, what, scales, recipe)?;
    Ok(Quantized { data: place.tensor(what, data)?, scales, layout })
}

/// Rows that a plan of matrices with `cols` columns is made for: any number, as nothing is
/// allocated for them, so that ranks with different numbers of rows make the same plan. Launches
/// count in 32 bits.
fn most_rows(rows: usize, cols: usize) -> usize {
    rounded(rows).max((1 << 40) / cols.max(1 << 16))
}

fn matrix(t: &Tensor) -> Result<(usize, usize)> {
    match t.shape().dims() {
        [rows, cols] => Ok((*rows, *cols)),
        _ => Err(Error::invalid("`x` must be a matrix").seen(t.shape())),
    }
}

/// Fills `data` with the codes of `x` and `scales` with their scales; with a world, whose number is
/// not 0, the scale is that of all ranks' tensors.
#[pyfunction]
pub fn quantize(
    py: Python<'_>,
    world: u64,
    x: &Object<'_>,
    data: &Object<'_>,
    scales: &Object<'_>,
    recipe: &str,
    pow2_scales: bool,
) -> PyResult<()> {
    const OP: &str = "quantize";
    let describe = |x: &Tensor, q: &Quantized| -> Result<QuantDesc> {
        let (rows, cols) = matrix(x)?;
        let new = QuantDesc::new(most_rows(rows, cols), cols, x.dtype(), q.data.dtype(), q.layout);
        Ok(QuantDesc { pow2_scales, ..new })
    };
    if world == 0 {
        let place = Place::of(OP, x, "x")?;
        let x = place.tensor("x", x)?;
        let q = quantized(&place, "data", (data, scales), recipe)?;
        return place.run(py, |stream| {
            let desc = describe(&x, &q)?;
            let plan = local::plan(LocalKey::Quant(desc), &place.device, stream, || {
                let plan = QuantPlan::new(desc, None)?;
                plan.prepare(stream).map(|()| plan)
            })?;
            plan.launch(stream, QuantInputs { x, row: Some(q), column: None })
        });
    }
    let call = Call::new(py, OP, world)?;
    let x = call.tensor("x", x)?;
    let q = quantized(&call, "data", (data, scales), recipe)?;
    call.run(py, |stream| {
        // Ranks may have different numbers of rows: their scale is one all the same.
        let desc = QuantDesc { scope: Scope::Team, ..describe(&x, &q)? };
        let plan = call.member.plan(&Key::Quant(desc), stream, || Recipe {
            op: OP,
            len_bytes: QuantPlan::memory(&desc, call.size()),
            make: |heap: &Heap| QuantPlan::new(desc, Some(heap)),
            prepare: QuantPlan::prepare,
        })?;
        plan.launch(stream, QuantInputs { x, row: Some(q), column: None })
    })
}

/// `out = data * scales`.
#[pyfunction]
pub fn dequantize(
    py: Python<'_>,
    data: &Object<'_>,
    scales: &Object<'_>,
    recipe: &str,
    out: &Object<'_>,
) -> PyResult<()> {
    let place = Place::of("dequantize", data, "data")?;
    let q = quantized(&place, "data", (data, scales), recipe)?;
    let out = place.tensor("out", out)?;
    place.run(py, |stream| {
        let (rows, cols) = matrix(&out)?;
        let (src, layout) = (q.data.dtype(), q.layout);
        let desc = DequantDesc { rows: most_rows(rows, cols), cols, src, layout, out: out.dtype() };
        let plan = local::plan(LocalKey::Dequant(desc), &place.device, stream, || {
            let plan = DequantPlan::new(desc)?;
            plan.prepare(stream).map(|()| plan)
        })?;
        plan.launch(stream, &q, &out)
    })
}
