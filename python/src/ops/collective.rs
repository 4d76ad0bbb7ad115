//! `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`.

use std::sync::Arc;

use crate::call::Call;
use crate::errors::OrRaise;
use crate::keys::{Key, rounded};
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
    member.plans.get(&Key::Collective(desc.clone()), stream, || Recipe {
        op: desc.kind.name(),
        len_bytes: CollectivePlan::memory(desc, member.team.size()),
        make: |heap: &Heap| CollectivePlan::new(desc.clone(), heap),
        prepare: CollectivePlan::prepare,
    })
}

/// A tensor as a matrix: rows of the first dimension.
fn matrix(t: &Tensor) -> Result<(Tensor, usize, usize)> {
    let dims = t.shape();
    if dims.ndim() == 0 {
        return Err(Error::invalid("a tensor without dimensions has no rows to move")
            .hint("pass `x.reshape(1)`"));
    }
    let rows = dims.dim(0);
    let cols = dims.dims()[1..].iter().product();
    Ok((t.reshape(Shape::d2(rows, cols))?, rows, cols))
}

/// What a launch moves: the collective, its rows in all, the rows that the plan is made for, and the
/// collective that the backward pass needs.
struct Move {
    kind: CollectiveKind,
    m: usize,
    most: usize,
    mirror: Option<CollectiveKind>,
}

/// Launches what `describe` says of the rows of `x` and the size of the team.
fn launch(
    call: &Call,
    (x, out): (&Bound<'_, PyAny>, &Bound<'_, PyAny>),
    describe: impl FnOnce(usize, usize) -> Result<Move>,
) -> PyResult<()> {
    let py = x.py();
    let (x, out) = (call.tensor("x", x)?, call.tensor("out", out)?);
    let matrices = || {
        let ((x, rows, cols), (out, _, _)) = (matrix(&x)?, matrix(&out)?);
        let Move { kind, m, most, mirror } = describe(rows, call.size())?;
        let dtype = x.dtype();
        let of = |kind| CollectiveDesc { kind, m: most, cols, dtype };
        Ok((x, out, mirror.map(of), of(kind), m))
    };
    let (x, out, mirror, desc, m) = matrices().map_err(|e: Error| e.op(call.op)).or_raise(py)?;
    call.run(py, |stream| {
        if let Some(mirror) = mirror {
            plan(&call.member, &mirror, stream)?;
        }
        plan(&call.member, &desc, stream)?.launch(stream, m, &x, &out)
    })
}

fn reduction(op: &str) -> Result<ReduceOp> {
    op.parse()
}

/// `out [m, ...]`: the rows of all ranks, in their order. With `grad`, the plan that the backward pass
/// needs is made, too, here as below.
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
    launch(&call, (x, out), |mine, size| {
        let m = rows.as_ref().map_or(mine * size, |r| r.iter().sum());
        let most = if rows.is_some() { m } else { rounded(mine) * size };
        let shards = rows.map_or(Shards::Even, Shards::Explicit);
        let mirror = grad.then(|| CollectiveKind::ReduceScatter(shards.clone(), ReduceOp::Sum));
        Ok(Move { kind: CollectiveKind::AllGather(shards), m, most, mirror })
    })
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
    launch(&call, (x, out), |m, size| {
        let most = if rows.is_some() { m } else { rounded(m.div_ceil(size)) * size };
        let shards = rows.map_or(Shards::Even, Shards::Explicit);
        let mirror = grad.then(|| CollectiveKind::AllGather(shards.clone()));
        Ok(Move { kind: CollectiveKind::ReduceScatter(shards, op), m, most, mirror })
    })
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
    launch(&call, (x, out), |m, _| {
        Ok(Move { kind: CollectiveKind::AllReduce(op), m, most: rounded(m), mirror: None })
    })
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
    launch(&call, (x, out), |_, size| {
        let m = splits.iter().flatten().sum();
        let back = |to: usize| splits.iter().map(|s| s.get(to).copied().unwrap_or(0)).collect();
        let mirror = grad.then(|| CollectiveKind::AllToAll((0..size).map(back).collect()));
        Ok(Move { kind: CollectiveKind::AllToAll(splits), m, most: m, mirror })
    })
}
