//! Grouped GEMM on the host: a loop over the groups that the splits in memory name.

use std::ops::Range;

use tilewire_core::memory::filled;
use tilewire_core::{DType, Result, convert_from_f32};
use tilewire_device::Tensor;

use super::launch::{GroupedDgrad, GroupedFprop, GroupedWgrad};
use super::ranges::{BadSplits, ranges};
use super::{GroupedDesc, Splits, Weights};
use crate::common::Mat;
use crate::common::{narrow_into, wide};
use crate::gemm::Activation;
use crate::gemm::host::{activate_row, add_bias, matmul};

/// Row ranges of the groups, or the status code of splits that cannot be used.
fn groups(d: &GroupedDesc, s: &Splits) -> Result<std::result::Result<Vec<Range<usize>>, i32>> {
    let values: Vec<i64> = match s.values.dtype() {
        DType::I64 => s.values.to_vec::<i64>()?,
        _ => s.values.to_vec::<i32>()?.into_iter().map(i64::from).collect(),
    };
    Ok(ranges(&values, s.kind, d.capacity).map_err(|bad| match bad {
        BadSplits::Negative => 1,
        BadSplits::Capacity => 2,
    }))
}

/// Runs `f` on the weights of one group, `[n, k]` f32.
fn with_weight<R>(
    d: &GroupedDesc,
    w: &Weights,
    e: usize,
    f: impl FnOnce(&[f32]) -> R,
) -> Result<R> {
    let len = d.n * d.k;
    match w {
        Weights::Discrete(list) => list[e].with_wide(f),
        Weights::Packed(w) if w.scales.is_none() => {
            let size = w.data.dtype().size();
            w.data.read(|b| f(&wide(w.data.dtype(), &b[e * len * size..][..len * size])))
        }
        Weights::Packed(w) => w.with_wide(|all| f(&all[e * len..][..len])),
    }
}

fn zero_tail(d: &GroupedDesc, rows: &[Range<usize>], t: &Tensor, cols: usize) -> Result<()> {
    if !d.zero_tail {
        return Ok(());
    }
    let end = rows.last().map_or(0, |r| r.end);
    t.write(|b| b[end * cols * t.dtype().size()..].fill(0))
}

macro_rules! ranges_or_return {
    ($d:expr, $s:expr) => {
        match groups($d, $s)? {
            Ok(r) => r,
            Err(code) => return Ok(code),
        }
    };
}

pub(super) fn fprop(d: &GroupedDesc, t: &GroupedFprop) -> Result<i32> {
    let rows = ranges_or_return!(d, &t.splits);
    let bias = t.bias.as_ref().map(Tensor::to_f32).transpose()?;
    t.x.with_wide(|x| -> Result<()> {
        for (e, r) in rows.iter().enumerate().filter(|(_, r)| !r.is_empty()) {
            let mut acc = filled(0.0, r.len() * d.n)?;
            with_weight(d, &t.w, e, |w| {
                let a = Mat::rows(&x[r.start * d.k..r.end * d.k], d.k);
                matmul((r.len(), d.n, d.k), a, Mat::rows(w, d.k).t(), &mut acc, false);
            })?;
            if let Some(b) = &bias {
                add_bias(&mut acc, &b[e * d.n..][..d.n]);
            }
            if let Some(a) = &t.aux_out {
                a.write(|o| narrow_into(o, d.out, (r.start, 0, d.n), &acc))?;
            }
            let cols = d.out_cols();
            let mut y = filled(0.0, r.len() * cols)?;
            for (i, row) in acc.chunks_exact(d.n.max(1)).enumerate() {
                activate_row(d.activation, row, &[], &mut y[i * cols..][..cols]);
            }
            t.out.write(|o| narrow_into(o, d.out, (r.start, 0, cols), &y))?;
        }
        Ok(())
    })??;
    if let Some(a) = &t.aux_out {
        zero_tail(d, &rows, a, d.n)?;
    }
    zero_tail(d, &rows, &t.out, d.out_cols()).map(|()| 0)
}

pub(super) fn dgrad(d: &GroupedDesc, t: &GroupedDgrad) -> Result<i32> {
    let rows = ranges_or_return!(d, &t.splits);
    t.dy.with_wide(|dy| -> Result<()> {
        for (e, r) in rows.iter().enumerate().filter(|(_, r)| !r.is_empty()) {
            let mut acc = filled(0.0, r.len() * d.k)?;
            with_weight(d, &t.w, e, |w| {
                let a = Mat::rows(&dy[r.start * d.n..r.end * d.n], d.n);
                matmul((r.len(), d.k, d.n), a, Mat::rows(w, d.k), &mut acc, false);
            })?;
            t.dx.write(|o| narrow_into(o, d.out, (r.start, 0, d.k), &acc))?;
        }
        Ok(())
    })??;
    zero_tail(d, &rows, &t.dx, d.k).map(|()| 0)
}

pub(super) fn dactivation(
    d: &GroupedDesc,
    splits: &Splits,
    dy: &Tensor,
    aux: &Tensor,
    dz: &Tensor,
) -> Result<i32> {
    let rows = ranges_or_return!(d, splits);
    let (cols, end) = (d.out_cols(), rows.last().map_or(0, |r| r.end));
    let act = match d.activation {
        Activation::Gelu => Activation::DGelu,
        Activation::SwiGlu => Activation::DSwiGlu,
        other => other,
    };
    let (dy, aux) = (dy.to_f32()?, aux.to_f32()?);
    let mut out = filled(0.0, end * d.n)?;
    for i in 0..end {
        let (g, a, o) =
            (&dy[i * cols..][..cols], &aux[i * d.n..][..d.n], &mut out[i * d.n..][..d.n]);
        match act {
            Activation::Relu => {
                for ((o, &g), &a) in o.iter_mut().zip(g).zip(a) {
                    *o = if a > 0.0 { g } else { 0.0 };
                }
            }
            act => activate_row(act, g, a, o),
        }
    }
    dz.write(|b| narrow_into(b, d.out, (0, 0, d.n), &out))?;
    zero_tail(d, &rows, dz, d.n).map(|()| 0)
}

pub(super) fn wgrad(d: &GroupedDesc, t: &GroupedWgrad) -> Result<i32> {
    let rows = ranges_or_return!(d, &t.splits);
    let mask = t.mask.as_ref().map(|m| m.to_vec::<u8>()).transpose()?;
    let add = |e: usize| mask.as_ref().is_some_and(|m| m[e] != 0);
    let mut dbias = filled(0.0, d.groups * d.n)?;
    t.x.with_wide(|x| -> Result<()> {
        t.dy.with_wide(|dy| -> Result<()> {
            for (e, r) in rows.iter().enumerate() {
                if r.is_empty() && add(e) {
                    continue;
                }
                let (x, dy) = (&x[r.start * d.k..r.end * d.k], &dy[r.start * d.n..r.end * d.n]);
                let mut acc = filled(0.0, d.n * d.k)?;
                let (a, b) = (Mat::rows(dy, d.n).t(), Mat::rows(x, d.k));
                matmul((d.n, d.k, r.len()), a, b, &mut acc, false);
                store_grad(d, &t.dw, e, &acc, add(e))?;
                for row in dy.chunks_exact(d.n.max(1)) {
                    dbias[e * d.n..][..d.n].iter_mut().zip(row).for_each(|(s, v)| *s += v);
                }
            }
            Ok(())
        })?
    })??;
    if let Some(b) = &t.dbias {
        b.write(|o| o.copy_from_slice(bytemuck::cast_slice(&dbias)))?;
    }
    Ok(0)
}

fn store_grad(d: &GroupedDesc, dw: &Weights, e: usize, grad: &[f32], add: bool) -> Result<()> {
    let (t, at) = match dw {
        Weights::Packed(w) => (&w.data, e * d.n * d.k * d.grad.size()),
        Weights::Discrete(list) => (&list[e].data, 0),
    };
    let mut sum = filled(0.0, if add { grad.len() } else { 0 })?;
    t.write(|b| {
        let b = &mut b[at..at + grad.len() * d.grad.size()];
        if !add {
            convert_from_f32(d.grad, grad, b);
            return;
        }
        let old = wide(d.grad, b);
        for ((s, o), g) in sum.iter_mut().zip(old.iter()).zip(grad) {
            *s = o + g;
        }
        drop(old);
        convert_from_f32(d.grad, &sum, b);
    })
}
