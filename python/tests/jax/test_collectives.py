"""Collectives and their gradients: each device's array is a row of a global one."""

import numpy as np
import pytest
from dense import ALL, AXES, DTYPES, UNIT, equal, groups_of, put, randn, run_vjp, size_of, within

import tilewire.jax as tw


def per_rank(f):
    """``f`` on [1, rows, cols] of each device, as [rows, cols]."""
    return lambda *xs: f(*(x[0] for x in xs))[None]


def both(mesh, f, x, dy, dtype, check_vma=True):
    """``f`` on each device's slice of ``x``, and the gradient for those of ``dy``."""
    args = [put(mesh, x, ALL, dtype)]
    f = per_rank(f)
    return run_vjp(f, mesh, (ALL,), ALL, args, put(mesh, dy, ALL, dtype), check_vma)


def sums(x, groups):
    """[devices, ..]: the sum of a device's team, for each."""
    out = np.empty_like(x)
    for g in groups:
        out[g] = x[g].sum(0)
    return out


def bound_of(x, groups, dtype):
    return 8 * len(groups[0]) * UNIT["float32"] * sums(np.abs(x), groups) + UNIT[dtype] * 0


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_all_gather(world, mesh, rng, axes, dtype):
    n, size, groups = world.size, size_of(mesh, axes), groups_of(mesh, axes)
    x, dy = randn(rng, n, 3, 5, dtype=dtype), randn(rng, n, size * 3, 5, dtype=dtype)
    y, (dx,) = both(mesh, lambda x: tw.all_gather(x, axes), x, dy, dtype)
    want = np.empty((n, size * 3, 5))
    want_dx = np.empty((n, 3, 5))
    for g in groups:
        want[g] = x[g].reshape(size * 3, 5)
        want_dx[g] = dy[g].sum(0).reshape(size, 3, 5)
    equal(y, want, "y")
    within(dx, want_dx, 8 * size * UNIT["float32"] * np.abs(dy).sum(), "dx")


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_reduce_scatter(world, mesh, rng, axes, op):
    n, size, groups = world.size, size_of(mesh, axes), groups_of(mesh, axes)
    x, dy = randn(rng, n, size * 2, 5), randn(rng, n, 2, 5)
    y, (dx,) = both(mesh, lambda x: tw.reduce_scatter(x, axes, op=op), x, dy, "float32")
    scale = size if op == "avg" else 1
    want, want_dx = np.empty((n, 2, 5)), np.empty((n, size * 2, 5))
    for g in groups:
        want[g] = (x[g].sum(0) / scale).reshape(size, 2, 5)
        want_dx[g] = dy[g].reshape(size * 2, 5) / scale
    within(y, want, 8 * size * UNIT["float32"] * np.abs(x).max(), "y")
    within(dx, want_dx, UNIT["float32"] * np.abs(dy).max(), "dx")


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_all_reduce(world, mesh, rng, axes, op, check_vma):
    """Each device uses the sum in a loss of its own, so gradients are added over the team."""
    n, size, groups = world.size, size_of(mesh, axes), groups_of(mesh, axes)
    x, dy = randn(rng, n, 3, 5), randn(rng, n, 3, 5)
    f = lambda x: tw.all_reduce(x, axes, op=op)  # noqa: E731
    y, (dx,) = both(mesh, f, x, dy, "float32", check_vma)
    scale = size if op == "avg" else 1
    limit = 8 * size * UNIT["float32"]
    within(y, sums(x, groups) / scale, limit * np.abs(x).max(), "y")
    within(dx, sums(dy, groups) / scale, limit * np.abs(dy).max(), "dx")


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_all_to_all(world, mesh, rng, axes, dtype):
    n, size, groups = world.size, size_of(mesh, axes), groups_of(mesh, axes)
    x, dy = randn(rng, n, size * 2, 3, dtype=dtype), randn(rng, n, size * 2, 3, dtype=dtype)
    splits = [[2] * size for _ in range(size)]
    y, (dx,) = both(mesh, lambda x: tw.all_to_all(x, splits, axes), x, dy, dtype)
    want, want_dx = np.empty_like(x), np.empty_like(dy)

    def swap(t):
        return t.reshape(size, size, 2, 3).swapaxes(0, 1).reshape(size, size * 2, 3)

    for g in groups:
        want[g], want_dx[g] = swap(x[g]), swap(dy[g])
    equal(y, want, "y")
    equal(dx, want_dx, "dx")


@pytest.mark.parametrize("axes", ["tp", ("dp", "tp")], ids=str)
def test_rows_that_differ_from_rank_to_rank(world, mesh, rng, axes):
    n, size, groups = world.size, size_of(mesh, axes), groups_of(mesh, axes)
    rows = [(3 * r + 1) % 5 for r in range(size)]
    most, m = max(rows), sum(rows)
    starts = np.cumsum([0, *rows])
    x, dy = randn(rng, n, most, 4), randn(rng, n, m, 4)
    y, (dx,) = both(mesh, lambda x: tw.all_gather(x, axes, rows=rows), x, dy, "float32")
    want, want_dx = np.empty((n, m, 4)), np.zeros((n, most, 4))
    for g in groups:
        want[g] = np.concatenate([x[d, : rows[r]] for r, d in enumerate(g)])
        total = dy[g].sum(0)
        for r, d in enumerate(g):
            want_dx[d, : rows[r]] = total[starts[r] : starts[r + 1]]
    equal(y, want, "gathered")
    within(dx, want_dx, 8 * size * UNIT["float32"] * np.abs(dy).max(), "dx of gathered")

    x, dy = randn(rng, n, m, 4), randn(rng, n, most, 4)
    y, (dx,) = both(mesh, lambda x: tw.reduce_scatter(x, axes, rows=rows), x, dy, "float32")
    want, want_dx = np.zeros((n, most, 4)), np.empty((n, m, 4))
    for g in groups:
        total = x[g].sum(0)
        for r, d in enumerate(g):
            want[d, : rows[r]] = total[starts[r] : starts[r + 1]]
        want_dx[g] = np.concatenate([dy[d, : rows[r]] for r, d in enumerate(g)])
    within(y, want, 8 * size * UNIT["float32"] * np.abs(x).max(), "scattered")
    equal(dx, want_dx, "dx of scattered")


def test_splits_that_differ_from_rank_to_rank(world, mesh, rng):
    axes, n, size, groups = "tp", world.size, size_of(mesh, "tp"), groups_of(mesh, "tp")
    splits = rng.integers(0, 4, (size, size)).tolist()
    splits[0][0] += 1
    sent, got = [sum(r) for r in splits], [sum(c) for c in zip(*splits)]
    x, dy = randn(rng, n, max(sent), 2), randn(rng, n, max(got), 2)
    y, (dx,) = both(mesh, lambda x: tw.all_to_all(x, splits, axes), x, dy, "float32")
    want, want_dx = np.zeros((n, max(got), 2)), np.zeros((n, max(sent), 2))
    to = np.cumsum([[0, *r] for r in splits], 1)
    of = np.cumsum([[0, *c] for c in zip(*splits)], 1)
    for g in groups:
        for i, a in enumerate(g):
            for j, b in enumerate(g):
                want[b, of[j][i] : of[j][i + 1]] = x[a, to[i][j] : to[i][j + 1]]
                want_dx[a, to[i][j] : to[i][j + 1]] = dy[b, of[j][i] : of[j][i + 1]]
    equal(y, want, "y")
    equal(dx, want_dx, "dx")


@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_any_type_moves(world, mesh, rng, dtype):
    from dense import run

    x = rng.integers(0, 100, (world.size, 2, 3)).astype(dtype)
    f = per_rank(lambda x: tw.all_gather(x, ("dp", "tp")))
    y = run(f, mesh, (ALL,), ALL, put(mesh, x, ALL))
    equal(y, np.broadcast_to(x.reshape(1, -1, 3), (world.size, 2 * world.size, 3)))


def test_a_number(world, mesh, rng):
    from jax.sharding import PartitionSpec as P

    from dense import run

    x = np.arange(world.size, dtype=np.float32)
    y = run(lambda x: tw.all_reduce(x[0], ("dp", "tp")), mesh, (ALL,), P(), put(mesh, x, ALL))
    equal(y, np.asarray(x.sum(), np.float64))
