//! `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`.

use std::sync::Arc;

use crate::call::Call;
use crate::errors::OrRaise;
use crate::explain;
use crate::keys::{Key, rounded};
use crate::ops::Form;
use crate::world::Member;
use pyo3::prelude::*;
use tilewire::ops::Shards;
use tilewire::ops::collective::{CollectiveDesc, CollectiveKind, CollectivePlan, ReduceOp};
use tilewire::plans::Recipe;
use tilewire::prelude::*;

/// The plan of `desc` on `stream`.
pub fn plan(
    member: &Member,
    desc: &CollectiveDesc,
    stream: &Stream,
) -> Result<Arc<CollectivePlan>> {
    let plan = member.plan(&Key::Collective(desc.clone()), stream, || Recipe {
        op: desc.kind.name(),
        len_bytes: CollectivePlan::memory(desc, member.team.size()),
        make: |heap: &Heap| CollectivePlan::new(desc.clone(), heap),
        prepare: CollectivePlan::prepare,
    });
    plan.inspect(|p| explain::note(desc.kind.name(), || p.explain()))
}

/// Rows of the first dimension, and the elements of each.
pub fn rows_of(shape: Shape) -> Result<(usize, usize)> {
    if shape.ndim() == 0 {
        return Err(Error::invalid("a tensor without dimensions has no rows to move")
            .hint("pass `x.reshape(1)`"));
    }
    Ok((shape.dim(0), shape.dims()[1..].iter().product()))
}

/// A tensor as a matrix: rows of the first dimension.
pub fn matrix(t: &Tensor) -> Result<Tensor> {
    let (rows, cols) = rows_of(t.shape())?;
    t.reshape(Shape::d2(rows, cols))
}

/// The movement of a launch: the collective, its rows in all, the rows that the plan is made for,
/// and the collective that the backward pass needs.
pub struct Move {
    kind: CollectiveKind,
    m: usize,
    most: usize,
    mirror: Option<CollectiveKind>,
}

impl Move {
    /// Of `mine` rows to all ranks; `rows` of each rank where they differ.
    pub fn gather(mine: usize, size: usize, rows: Option<Vec<usize>>) -> Self {
        let m = rows.as_ref().map_or(mine * size, |r| r.iter().sum());
        let most = if rows.is_some() { m } else { rounded(mine) * size };
        let shards = rows.map_or(Shards::Even, Shards::Explicit);
        let mirror = Some(CollectiveKind::ReduceScatter(shards.clone(), ReduceOp::Sum));
        Self { kind: CollectiveKind::AllGather(shards), m, most, mirror }
    }

    /// Of the sum of `m` rows, to each rank its part: `rows` of each rank where they differ.
    pub fn scatter(m: usize, size: usize, rows: Option<Vec<usize>>, op: ReduceOp) -> Self {
        let most = if rows.is_some() { m } else { rounded(m.div_ceil(size)) * size };
        let shards = rows.map_or(Shards::Even, Shards::Explicit);
        let mirror = Some(CollectiveKind::AllGather(shards.clone()));
        Self { kind: CollectiveKind::ReduceScatter(shards, op), m, most, mirror }
    }

    /// Of the sum of `m` rows, to all ranks. Its mirror is itself.
    pub fn reduce(m: usize, op: ReduceOp) -> Self {
        Self { kind: CollectiveKind::AllReduce(op), m, most: rounded(m), mirror: None }
    }

    /// Of `splits[i][j]` rows from rank `i` to rank `j`.
    pub fn exchange(splits: Vec<Vec<usize>>, size: usize) -> Self {
        let m = splits.iter().flatten().sum();
        let back = |to: usize| splits.iter().map(|s| s.get(to).copied().unwrap_or(0)).collect();
        let mirror = Some(CollectiveKind::AllToAll((0..size).map(back).collect()));
        Self { kind: CollectiveKind::AllToAll(splits), m, most: m, mirror }
    }

    /// The description for a tensor `x`, and the rows of this launch.
    pub fn describe(self, x: Form) -> Result<(CollectiveDesc, usize)> {
        let (_, cols) = rows_of(x.shape)?;
        let desc = CollectiveDesc { kind: self.kind, m: self.most, cols, dtype: x.dtype };
        Ok((desc, self.m))
    }
}

/// Launches what `describe` says of the rows of `x` and the size of the team.
fn launch(
    call: &Call,
    (x, out): (&Bound<'_, PyAny>, &Bound<'_, PyAny>),
    grad: bool,
    of: impl FnOnce(usize, usize) -> Move,
) -> PyResult<()> {
    let py = x.py();
    let (x, out) = (call.tensor("x", x)?, call.tensor("out", out)?);
    let matrices = || {
        let (rows, _) = rows_of(x.shape())?;
        let mut of = of(rows, call.size());
        let mirror = of.mirror.take().filter(|_| grad);
        let (desc, m) = of.describe(Form::from(&x))?;
        let mirror = mirror.map(|kind| CollectiveDesc { kind, ..desc.clone() });
        Ok((matrix(&x)?, matrix(&out)?, mirror, desc, m))
    };
    let (x, out, mirror, desc, m) = matrices().map_err(|e: Error| e.op(call.op)).or_raise(py)?;
    call.run(py, |stream| {
        if let Some(mirror) = mirror {
            plan(&call.member, &mirror, stream)?;
        }
        plan(&call.member, &desc, stream)?.launch(stream, m, &x, &out)
    })
}

pub fn reduction(op: &str) -> Result<ReduceOp> {
    op.parse()
}

/// `out [m, ...]`: the rows of all ranks, in their order. With `grad`, the plan that the backward
/// pass needs is made, too, here as below.
#[pyfunction]
pub fn all_gather(
    py: Python<'_>,
    world: u64,
    x: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    rows: Option<Vec<usize>>,
    grad: bool,
) -> PyResult<()> {
    let call = Call::new(py, "all_gather", world)?;
    launch(&call, (x, out), grad, |mine, size| Move::gather(mine, size, rows))
}

/// `out [rows of me, ...]`: my rows of the sum (or `avg`) of all ranks' `x [m, ...]`.
#[pyfunction]
pub fn reduce_scatter(
    py: Python<'_>,
    world: u64,
    x: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    op: &str,
    rows: Option<Vec<usize>>,
    grad: bool,
) -> PyResult<()> {
    let call = Call::new(py, "reduce_scatter", world)?;
    let op = reduction(op).or_raise(py)?;
    launch(&call, (x, out), grad, |m, size| Move::scatter(m, size, rows, op))
}

/// `out`: the sum (or `avg`) of all ranks' `x`. The backward pass is the same collective.
#[pyfunction]
pub fn all_reduce(
    py: Python<'_>,
    world: u64,
    x: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    op: &str,
) -> PyResult<()> {
    let call = Call::new(py, "all_reduce", world)?;
    let op = reduction(op).or_raise(py)?;
    launch(&call, (x, out), false, |m, _| Move::reduce(m, op))
}

/// `out`: the rows that each rank has for me. `splits[i][j]` rows go from rank `i` to rank `j`.
#[pyfunction]
pub fn all_to_all(
    py: Python<'_>,
    world: u64,
    x: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    splits: Vec<Vec<usize>>,
    grad: bool,
) -> PyResult<()> {
    let call = Call::new(py, "all_to_all", world)?;
    launch(&call, (x, out), grad, |_, size| Move::exchange(splits, size))
}
