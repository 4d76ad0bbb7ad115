"""ag_gemm, gemm_rs, gemm_ar and their gradients beside dense arithmetic in f64.

Activations are divided along "tp" and, as other rows, along "dp"; weights along "tp" only. So the
gradients of weights and biases are sums over "dp", which JAX adds.
"""

import os

import jax
import numpy as np
import pytest
from dense import (
    TOL,
    UNIT,
    act_of,
    close,
    dense_vjp,
    product_bound,
    put,
    randn,
    run_vjp,
    size_of,
    within,
)
from jax.sharding import PartitionSpec as P

import tilewire.jax as tw

ROWS = P(("dp", "tp"))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dtype", list(UNIT))
def test_ag_gemm_and_its_gradients(world, mesh, rng, dtype, check_vma):
    dp, tp = size_of(mesh, "dp"), size_of(mesh, "tp")
    m, n, k = 5 * dp * tp, 24 * tp, 40
    x, w, dy = (randn(rng, *s, dtype=dtype) for s in ((m, k), (n, k), (m, n)))
    b = randn(rng, n)
    f = lambda x, w, b: tw.ag_gemm(x, w, "tp", bias=b)  # noqa: E731
    args = [
        put(mesh, x, ROWS, dtype),
        put(mesh, w, P("tp"), dtype),
        put(mesh, b, P("tp"), "float32"),
    ]
    out = P("dp", "tp")
    specs = (ROWS, P("tp"), P("tp"))
    cot = put(mesh, dy, out, dtype)
    y, (dx, dw, db) = run_vjp(f, mesh, specs, out, args, cot, check_vma)
    within(y, x @ w.T + b, product_bound(x, w.T, 1, dtype), "y")
    within(dx, dy @ w, product_bound(dy, w, tp, dtype), "dx")
    # The parts of "dp" are rounded to the weight's type before they are added.
    bound = product_bound(dy.T, x, dp, dtype) + 2 * dp * UNIT[dtype] * (np.abs(dy.T) @ np.abs(x))
    within(dw, dy.T @ x, bound, "dw")
    within(db, dy.sum(0), 1e-5 * np.abs(dy).sum(0), "db")


@pytest.mark.parametrize("act", ["relu", "gelu", "swiglu"])
def test_activations(world, mesh, rng, act):
    dp, tp = size_of(mesh, "dp"), size_of(mesh, "tp")
    m, n, k = 4 * dp * tp, 16, 24
    n_out = n // 2 if act == "swiglu" else n
    x, w, b = randn(rng, m, k), randn(rng, tp, n, k), randn(rng, tp, n)
    dy = randn(rng, tp, m, n_out)

    def dense(x, w, b):
        return jax.numpy.stack([act_of[act](x @ w[r].T + b[r]) for r in range(tp)])

    ref, grads = dense_vjp(dense, (x, w, b), dy)
    f = lambda x, w, b: tw.ag_gemm(x, w[0], "tp", bias=b[0], activation=act)[None]  # noqa: E731
    args = [put(mesh, a, s, "float32") for a, s in ((x, ROWS), (w, P("tp")), (b, P("tp")))]
    specs, out = (ROWS, P("tp"), P("tp")), P("tp", "dp")
    y, got = run_vjp(f, mesh, specs, out, args, put(mesh, dy, out, "float32"))
    close(y, ref, "y")
    for g, r, name in zip(got, grads, ("dx", "dw", "db")):
        close(g, r, name, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("uses", [("y", "g"), ("y",), ("g",)])
def test_gathered_x_has_a_gradient_of_its_own(world, mesh, rng, uses):
    """Any subset of the results in the loss."""
    dp, tp = size_of(mesh, "dp"), size_of(mesh, "tp")
    m, n, k = 3 * dp * tp, 8 * tp, 16
    x, w, dy, dg = randn(rng, m, k), randn(rng, n, k), randn(rng, m, n), randn(rng, tp, m, k)

    def f(x, w):
        y, g = tw.ag_gemm(x, w, "tp", return_gathered=True)
        return y if "y" in uses else 0 * y, g[None] if "g" in uses else 0 * g[None]

    out = (P("dp", "tp"), P("tp", "dp"))
    args = [put(mesh, x, ROWS, "float32"), put(mesh, w, P("tp"), "float32")]
    cot = tuple(put(mesh, c, s, "float32") for c, s in zip((dy, dg), out))
    (y, g), (dx, dw) = run_vjp(f, mesh, (ROWS, P("tp")), out, args, cot)
    zero = np.zeros((m, k))
    ref = (dy @ w if "y" in uses else zero) + (dg.sum(0) if "g" in uses else zero)
    close(dx, ref, "dx", rtol=1e-3, atol=1e-3)
    close(dw, dy.T @ x if "y" in uses else np.zeros((n, k)), "dw", rtol=1e-3, atol=1e-3)
    if "g" in uses:
        close(g, np.broadcast_to(x, (tp, m, k)), "g", 0, 1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dtype", list(TOL))
def test_gemm_rs_and_its_gradients(world, mesh, rng, dtype, check_vma):
    dp, tp = size_of(mesh, "dp"), size_of(mesh, "tp")
    m, n, k = 4 * dp * tp, 24, 16 * tp
    x, w, dy = (randn(rng, *s, dtype=dtype) for s in ((m, k), (n, k), (m, n)))
    b = randn(rng, n)
    f = lambda x, w, b: tw.gemm_rs(x, w, "tp", bias=b)  # noqa: E731
    specs = (P("dp", "tp"), P(None, "tp"), P())
    args = [put(mesh, a, s, t) for a, s, t in zip((x, w, b), specs, (dtype, dtype, "float32"))]
    y, (dx, dw, db) = run_vjp(f, mesh, specs, ROWS, args, put(mesh, dy, ROWS, dtype), check_vma)
    within(y, x @ w.T + b, product_bound(x, w.T, tp, dtype), "y")
    within(dx, dy @ w, product_bound(dy, w, 1, dtype), "dx")
    bound = product_bound(dy.T, x, dp, dtype) + 2 * dp * UNIT[dtype] * (np.abs(dy.T) @ np.abs(x))
    within(dw, dy.T @ x, bound, "dw")
    within(db, dy.sum(0), 1e-5 * np.abs(dy).sum(0), "db")


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dtype", list(TOL))
def test_gemm_ar_and_its_gradients(world, mesh, rng, dtype, check_vma):
    """As `lax.psum` of the product, where JAX knows that the result is the same on all ranks and
    where it does not."""
    dp, tp = size_of(mesh, "dp"), size_of(mesh, "tp")
    m, n, k = 3 * dp, 24, 16 * tp
    x, w, dy = (randn(rng, *s, dtype=dtype) for s in ((m, k), (n, k), (m, n)))
    b = randn(rng, n)
    f = lambda x, w, b: tw.gemm_ar(x, w, "tp", bias=b)  # noqa: E731
    specs, out = (P("dp", "tp"), P(None, "tp"), P()), P("dp")
    args = [put(mesh, a, s, t) for a, s, t in zip((x, w, b), specs, (dtype, dtype, "float32"))]
    y, (dx, dw, db) = run_vjp(f, mesh, specs, out, args, put(mesh, dy, out, dtype), check_vma)
    within(
        y, x @ w.T + b, product_bound(x, w.T, tp, dtype) + 2 * UNIT[dtype] * np.abs(x @ w.T), "y"
    )
    within(dx, dy @ w, 2 * product_bound(dy, w, tp, dtype), "dx")
    bound = product_bound(dy.T, x, dp, dtype) + 2 * dp * UNIT[dtype] * (np.abs(dy.T) @ np.abs(x))
    within(dw, dy.T @ x, 2 * bound, "dw")
    within(db, dy.sum(0), 1e-5 * np.abs(dy).sum(0), "db")


def test_rows_that_differ_from_rank_to_rank(world, mesh, rng):
    """Shards of as many rows as the largest: x[:rows] of each rank, zero behind them elsewhere."""
    tp = size_of(mesh, "tp")
    dp = size_of(mesh, "dp")
    rows = [r + 2 for r in range(tp)]
    most, k, n = max(rows), 12, 6
    x = randn(rng, dp, tp, most, k)
    w, w2 = randn(rng, tp * n, k), randn(rng, 5, tp * n)
    dy = randn(rng, dp, tp, most, 5)

    def f(x, w, w2):
        y = tw.ag_gemm(x[0, 0], w, "tp", rows=rows)
        return tw.gemm_rs(y, w2, "tp", rows=rows)[None, None]

    def dense(x, w, w2):
        out = []
        for d in range(dp):
            full = jax.numpy.concatenate([x[d, r, : rows[r]] for r in range(tp)])
            z = full @ w.T @ w2.T
            at, parts = 0, []
            for r in rows:
                parts.append(jax.numpy.pad(z[at : at + r], ((0, most - r), (0, 0))))
                at += r
            out.append(jax.numpy.stack(parts))
        return jax.numpy.stack(out)

    ref, grads = dense_vjp(dense, (x, w, w2), dy)
    specs = (P("dp", "tp"), P("tp"), P(None, "tp"))
    args = [put(mesh, a, s, "float32") for a, s in zip((x, w, w2), specs)]
    cot = put(mesh, dy, specs[0], "float32")
    y, got = run_vjp(f, mesh, specs, specs[0], args, cot)
    close(y, ref, "y", 1e-3, 1e-3)
    for g, r, name in zip(got, grads, ("dx", "dw", "dw2")):
        close(g, r, name, rtol=1e-3, atol=2e-3)


def test_rows_that_do_not_divide(world, mesh, rng):
    """Rows of gemm_rs are divided as evenly as possible."""
    tp, dp = size_of(mesh, "tp"), size_of(mesh, "dp")
    m = 3 * tp + 1 if tp > 1 else 4
    x, w = randn(rng, dp, m, 8 * tp), randn(rng, 6, 8 * tp)
    f = lambda x, w: tw.gemm_rs(x[0], w, "tp")[None]  # noqa: E731
    from dense import run

    specs = (P("dp", None, "tp"), P(None, "tp"))
    args = [put(mesh, a, s, "float32") for a, s in zip((x, w), specs)]
    y = run(f, mesh, specs, P("dp", "tp"), *args)
    most = -(-m // tp)
    ref = np.zeros((dp, tp * most, 6))
    at = 0
    for r in range(tp):
        num = m // tp + (1 if r < m % tp else 0)
        ref[:, r * most : r * most + num] = (x @ w.T)[:, at : at + num]
        at += num
    close(y, ref, "y", 1e-4, 1e-4)


# No GPU has a fused kernel yet: asking for it there is an error.
ON_CPU = os.environ.get("TW_JAX_PLATFORM", "cpu") == "cpu"
ALGOS = ["fused", "pipelined", "sequential"] if ON_CPU else ["pipelined", "sequential"]


@pytest.mark.parametrize("algo", ALGOS)
def test_algorithms_agree_bit_for_bit_on_integers(world, mesh, rng, algo):
    """Integers that every partial sum holds: no rounding, so any order gives the same bits."""
    from dense import equal, run

    n = world.size
    x = rng.integers(-4, 5, (4 * n, 16)).astype(np.float64)
    w = rng.integers(-2, 3, (8 * n, 16)).astype(np.float64)
    w2 = rng.integers(-1, 2, (5, 8 * n)).astype(np.float64)
    both = ("dp", "tp")

    def f(x, w, w2):
        y = tw.ag_gemm(x, w, both, algo=algo)
        return y, tw.gemm_rs(y, w2, both, algo=algo, wire="f32")

    specs = (P(both), P(both), P(None, both))
    args = [put(mesh, a, s, "float32") for a, s in zip((x, w, w2), specs)]
    y, z = run(f, mesh, specs, (P(None, both), P(both)), *args)
    equal(y, x @ w.T)
    equal(z, x @ w.T @ w2.T)


def test_more_dimensions(world, mesh, rng):
    """[rows, inner, k]: rows are divided, the others are not."""
    from dense import run

    tp = size_of(mesh, "tp")
    x, w = randn(rng, 2 * tp, 3, 8), randn(rng, 4 * tp, 8)
    f = lambda x, w: tw.ag_gemm(x, w, "tp")  # noqa: E731
    args = [put(mesh, x, P("tp"), "float32"), put(mesh, w, P("tp"), "float32")]
    y = run(f, mesh, (P("tp"), P("tp")), P(None, None, "tp"), *args)
    close(y, x @ w.T, "y")
