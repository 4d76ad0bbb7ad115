//! Quantisation of `tilewire bench`: to e4m3 in each layout, and back.

use tilewire::core::{QTensor, ScaleLayout};
use tilewire::device::Buffer;
use tilewire::ops::quant::{
    DequantDesc, DequantPlan, QuantDesc, QuantInputs, QuantPlan, Quantized, Scope, Sides,
};
use tilewire::prelude::*;
use tilewire_oracle::Mat;
use tilewire_oracle::quant as oracle;

use super::device::Bench;
use super::memory::{Judge, Pass};
use crate::rows::Row;

const LAYOUTS: [(&str, ScaleLayout); 5] = [
    ("tensor", ScaleLayout::Tensor),
    ("1x128", ScaleLayout::Block1x128),
    ("128x128", ScaleLayout::Block128x128),
    ("mx", ScaleLayout::Mx1x32),
    ("mx_swizzled", ScaleLayout::Mx1x32Swizzled),
];
const FP8: DType = DType::F8E4M3;

pub(super) fn matrix(t: &Tensor) -> Result<Mat> {
    let [rows, cols] = *t.shape().dims() else {
        return Err(Error::internal("a matrix has two dimensions"));
    };
    Ok(Mat::from_f32(rows, cols, &t.to_f32()?))
}

/// Codes and scales byte by byte.
fn same(j: &mut Judge, got: &Quantized, want: &QTensor) -> Result<()> {
    j.same(&got.data.download()?, &want.data);
    j.same(&got.scales.download()?, &want.scales);
    Ok(())
}

fn tensors(q: &Quantized) -> [Tensor; 2] {
    [q.data.clone(), q.scales.clone()]
}

impl Bench<'_> {
    /// Both sides in each layout, and back; one scale for all ranks.
    pub(super) fn quant_rows(&self) -> Result<Vec<Row>> {
        let (m, n, _) = self.sizes();
        let x = self.normal(0, self.o.dtype, m, n)?;
        let mut rows = Vec::new();
        for (name, layout) in LAYOUTS {
            rows.extend(self.quant_layout(name, layout, &x)?);
        }
        rows.extend(self.quant_team(&x)?);
        Ok(rows)
    }

    fn quant_desc(&self, layout: ScaleLayout) -> QuantDesc {
        let (m, n, _) = self.sizes();
        QuantDesc { sides: Sides::Both, ..QuantDesc::new(m, n, self.o.dtype, FP8, layout) }
    }

    fn quant_pass<'a>(
        &'a self,
        name: &str,
        plan: &'a QuantPlan,
        t: &'a QuantInputs,
        judge: impl Fn(&mut Judge, &Mat, [&Quantized; 2]) -> Result<()> + 'a,
    ) -> Result<Pass<'a>> {
        let (Some(row), Some(column)) = (&t.row, &t.column) else {
            return Err(Error::internal("both sides are asked for"));
        };
        let queue = || plan.launch(&self.stream, t.clone())?.join(&self.stream).map(|_| ());
        Ok(Pass {
            name: format!("quant/{name}"),
            reads: vec![t.x.clone()],
            writes: [tensors(row), tensors(column)].concat(),
            changes: Vec::new(),
            queue: Box::new(queue),
            judge: Box::new(move |j| judge(j, &matrix(&t.x)?, [row, column])),
        })
    }

    fn quant_layout(&self, name: &str, layout: ScaleLayout, x: &Tensor) -> Result<Vec<Row>> {
        let (rows, cols, _) = self.sizes();
        let (desc, out) = (self.quant_desc(layout), self.o.dtype);
        let plan = QuantPlan::new(desc, None)?;
        let back = DequantPlan::new(DequantDesc { rows, cols, src: FP8, layout, out })?;
        plan.prepare(&self.stream)?;
        back.prepare(&self.stream)?;
        let t = QuantInputs::new(&desc, x)?;
        let there = self.quant_pass(name, &plan, &t, |j, x, [row, column]| {
            let spec = oracle::QuantSpec::new(FP8, layout);
            same(j, row, &oracle::quantize(x, spec))?;
            same(j, column, &oracle::quantize_transposed(x, spec))
        })?;
        let Some(q) = &t.row else { return Err(Error::internal("both sides are asked for")) };
        let y = self.poisoned(out, Shape::d2(rows, cols))?;
        let to = y.clone();
        let again = Pass {
            name: format!("quant/{name}/dequant"),
            reads: tensors(q).to_vec(),
            writes: vec![y.clone()],
            changes: Vec::new(),
            queue: Box::new(move || {
                back.launch(&self.stream, q, &to)?.join(&self.stream).map(|_| ())
            }),
            judge: Box::new(move |j| {
                let spec = oracle::QuantSpec::new(FP8, layout);
                let want = oracle::dequantize(&oracle::quantize(&matrix(x)?, spec));
                j.same(&y.to_f32()?, &want.rounded(out).to_f32());
                Ok(())
            }),
        };
        self.by_memory(&format!("m={rows} n={cols}"), vec![there, again])
    }

    /// A scale for the tensors of all ranks.
    fn quant_team(&self, x: &Tensor) -> Result<Vec<Row>> {
        let layout = ScaleLayout::Tensor;
        let desc = QuantDesc { scope: Scope::Team, ..self.quant_desc(layout) };
        let plan = QuantPlan::new(desc, Some(&self.heap))?;
        plan.prepare(&self.stream)?;
        let amax = self.worst(oracle::amax(&matrix(x)?))?;
        let t = QuantInputs::new(&desc, x)?;
        let pass = self.quant_pass("team", &plan, &t, |j, x, [row, column]| {
            let scale = oracle::QuantSpec::new(FP8, layout).scale(amax) as f32;
            same(j, row, &oracle::quantize_with_scale(x, FP8, scale))?;
            same(j, column, &oracle::quantize_with_scale(&x.transpose(), FP8, scale))
        })?;
        self.by_memory(&format!("m={} n={}", desc.rows, desc.cols), vec![pass])
    }
}
