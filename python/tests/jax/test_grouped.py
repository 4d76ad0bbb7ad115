"""grouped_gemm and its gradients, inside and outside of shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import ALL, TOL, close, dense_vjp, put, randn

import tilewire.jax as tw


def dense(splits):
    """Of a device's rows, [rows, k], by matrices [experts, n, k]."""

    def f(x, w, b):
        out, at = [], 0
        for e, n in enumerate(splits):
            out.append(x[at : at + n] @ w[e].T + b[e])
            at += n
        return jnp.concatenate([*out, jnp.zeros((x.shape[0] - at, w.shape[1]))])

    return f


@pytest.mark.parametrize("dtype", list(TOL))
def test_on_each_device(world, mesh, rng, dtype):
    n, experts = world.size, 3
    splits = rng.integers(0, 5, (n, experts))
    x, w = randn(rng, n, 12, 16, dtype=dtype), randn(rng, n, experts, 8, 16, dtype=dtype)
    b, dy = randn(rng, n, experts, 8), randn(rng, n, 12, 8, dtype=dtype)
    f = lambda x, w, b, s: tw.grouped_gemm(x[0], w[0], s[0], bias=b[0])[None]  # noqa: E731
    args = [
        put(mesh, a, ALL, t)
        for a, t in ((x, dtype), (w, dtype), (b, "float32"), (splits, np.int32))
    ]

    sm = jax.shard_map(f, mesh=mesh, in_specs=(ALL,) * 4, out_specs=ALL)

    @jax.jit
    def both(x, w, b, s, dy):
        y, back = jax.vjp(lambda *a: sm(*a, s), x, w, b)
        return y, back(dy)

    y, got = both(*args, put(mesh, dy, ALL, dtype))
    refs = [dense_vjp(dense(splits[r]), (x[r], w[r], b[r]), dy[r]) for r in range(n)]
    rtol, atol = TOL[dtype]
    close(y, np.stack([r[0] for r in refs]), "y", rtol, atol)
    for i, name in enumerate(("dx", "dw", "db")):
        close(got[i], np.stack([r[1][i] for r in refs]), name, rtol, 2 * atol)


def test_outside_of_shard_map(rng):
    splits, x, w = [2, 0, 3], randn(rng, 6, 16), randn(rng, 3, 8, 16)
    dy = randn(rng, 6, 8)
    b = np.zeros((3, 8))
    ref, (dx, dw, _) = dense_vjp(dense(splits), (x, w, b), dy)
    f = lambda x, w: tw.grouped_gemm(x, w, jnp.array(splits))  # noqa: E731
    for g in (f, jax.jit(f)):
        y, back = jax.vjp(g, jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32))
        np.testing.assert_allclose(np.asarray(y), ref, rtol=1e-4, atol=1e-4)
        got = back(jnp.asarray(dy, jnp.float32))
        np.testing.assert_allclose(np.asarray(got[0]), dx, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(np.asarray(got[1]), dw, rtol=1e-4, atol=1e-4)


def test_many_at_once(rng):
    """Calls of equal shapes that XLA may run beside each other."""
    xs, w = randn(rng, 40, 8, 512), randn(rng, 2, 64, 512)

    @jax.jit
    def f(xs, w):
        return [tw.grouped_gemm(xs[i], w, jnp.array([3, 5])) for i in range(40)]

    for y, x in zip(f(jnp.asarray(xs, jnp.float32), jnp.asarray(w, jnp.float32)), xs):
        ref = np.concatenate([x[:3] @ w[0].T, x[3:] @ w[1].T])
        np.testing.assert_allclose(np.asarray(y), ref, rtol=1e-3, atol=1e-3)
