"""Attention, local and context-parallel, with gradients, beside dense arithmetic in f64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import TOL, close, dense_vjp, put, randn, run, run_vjp, size_of
from jax.sharding import PartitionSpec as P

import tilewire
import tilewire.jax as tw

HQ, HKV, D = 4, 2, 16


def dense(cu, *, causal=True, window=None, scale=None, softcap=None, dims=3):
    """Of packed rows [tokens, heads, d] with sequences at ``cu``; with a bias and a sink."""

    def f(q, k, v, bias=None, sink=None):
        shape = q.shape
        if dims == 4:
            q, k, v = (t.reshape(-1, *t.shape[2:]) for t in (q, k, v))
        out = []
        for a, b in zip(cu, cu[1:]):
            n = b - a
            kk, vv = (jnp.repeat(t[a:b], q.shape[1] // t.shape[1], 1) for t in (k, v))
            s = jnp.einsum("qhd,khd->hqk", q[a:b], kk) * (scale or q.shape[2] ** -0.5)
            if softcap:
                s = softcap * jnp.tanh(s / softcap)
            if bias is not None:
                s = s + bias[:, :n, :n]
            i, j = np.arange(n)[:, None], np.arange(n)[None]
            seen = (j <= i) if causal else np.ones((n, n), bool)
            if window is not None:
                seen = seen & (i - j <= window[0])
            s = jnp.where(seen, s, -jnp.inf)
            if sink is not None:
                s = jnp.concatenate(
                    [s, jnp.broadcast_to(sink[:, None, None], (*s.shape[:2], 1))], -1
                )
            p = jax.nn.softmax(s, -1)[..., :n]
            out.append(jnp.einsum("hqk,khd->qhd", p, vv))
        return jnp.concatenate(out).reshape(*shape[:-1], v.shape[-1])

    return f


def qkv(rng, *lead, dtype="float32"):
    heads = [(HQ, D), (HKV, D), (HKV, D), (HQ, D)]
    return [randn(rng, *lead, *h, dtype=dtype) for h in heads]


@pytest.mark.parametrize("dtype", list(TOL))
def test_local(rng, dtype):
    *x, dy = qkv(rng, 2, 12, dtype=dtype)
    ref, grads = dense_vjp(dense([0, 12, 24], dims=4), x, dy)
    args = [jnp.asarray(t, dtype) for t in x]
    y, back = jax.vjp(jax.jit(tw.attention), *args)
    rtol, atol = TOL[dtype]
    np.testing.assert_allclose(np.asarray(y, np.float64), ref, rtol=rtol, atol=atol)
    for got, want in zip(back(jnp.asarray(dy, dtype)), grads):
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=rtol, atol=2 * atol)


def test_local_with_everything(rng):
    cu = [0, 5, 12, 20]
    *x, dy = qkv(rng, 20)
    bias, sink = randn(rng, HQ, 8, 8), randn(rng, HQ)
    kw = dict(window=(4, -1), scale=0.3, softcap=5.0)
    ref, grads = dense_vjp(dense(cu, **kw), (*x, bias, sink), dy)

    def f(q, k, v, b, s):
        return tw.attention(q, k, v, cu_seqlens_q=cu, bias=b, sink=s, **kw)

    args = [jnp.asarray(t, jnp.float32) for t in (*x, bias, sink, dy)]

    @jax.jit
    def both(*args):
        y, back = jax.vjp(f, *args[:-1])
        return y, back(args[-1])

    y, all_got = both(*args)
    np.testing.assert_allclose(np.asarray(y), ref, rtol=1e-4, atol=1e-4)
    for got, want in zip(all_got, grads):
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-3, atol=1e-3)


def test_one_program_serves_documents_that_change(rng):
    """Offsets as an array of the program, empty sequences among them, with gradients."""
    *x, dy = qkv(rng, 20)
    bias, sink = randn(rng, HQ, 20, 20), randn(rng, HQ)
    kw = dict(window=(4, -1), scale=0.3, softcap=5.0)
    traces = []

    @jax.jit
    def both(cu, dy, *args):
        traces.append(cu)

        def f(q, k, v, b, s):
            return tw.attention(q, k, v, cu_seqlens_q=cu, bias=b, sink=s, **kw)

        y, back = jax.vjp(f, *args)
        return y, back(dy)

    args = [jnp.asarray(t, jnp.float32) for t in (dy, *x, bias, sink)]
    for cu in ([0, 5, 12, 20], [0, 0, 20, 20], [0, 1, 2, 20]):
        ref, grads = dense_vjp(dense(cu, **kw), (*x, bias, sink), dy)
        y, all_got = both(jnp.asarray(cu, jnp.int32), *args)
        np.testing.assert_allclose(np.asarray(y), ref, rtol=1e-4, atol=1e-4)
        for got, want in zip(all_got, grads):
            np.testing.assert_allclose(np.asarray(got), want, rtol=1e-3, atol=1e-3)
    assert len(traces) == 1


def test_offsets_in_arrays_and_rows_behind_the_last_sequence(rng):
    q, k, v, _ = (jnp.asarray(t, jnp.float32) for t in qkv(rng, 12))
    at = jnp.asarray([0, 3, 7])
    ref, _ = dense_vjp(dense([0, 3, 7]), [t[:7] for t in (q, k, v)], np.zeros((7, HQ, D)))
    out = np.asarray(tw.attention(q, k, v, cu_seqlens_q=at))
    np.testing.assert_allclose(out[:7], ref, rtol=1e-4, atol=1e-4)
    assert not out[7:].any()
    for bad in ([0, 99], [0, 5, 3], [1, 12]):
        if jax.default_backend() == "cpu":
            with pytest.raises(Exception, match="sequences|offset"):
                jax.block_until_ready(tw.attention(q, k, v, cu_seqlens_q=jnp.asarray(bad)))
        else:
            assert np.isnan(np.asarray(tw.attention(q, k, v, cu_seqlens_q=jnp.asarray(bad)))).all()
    whole = tw.attention(q, k, v, cu_seqlens_q=jnp.asarray([0, 12]))
    assert np.array_equal(whole, tw.attention(q, k, v)), "the next call is another one"
    for bad, why in (([0.0, 12.0], "integers"), ([[0, 12]], "integers"), ([12], "at least")):
        with pytest.raises(tilewire.InvalidArgument, match=why):
            tw.attention(q, k, v, cu_seqlens_q=jnp.asarray(bad))
    with pytest.raises(tilewire.InvalidArgument, match="not for"):
        jax.jit(lambda cu: tw.attention(q[None], k[None], v[None], cu_seqlens_q=cu)).lower(at)


def shards(world, mesh, cu=None, layout="zigzag_per_sequence", dim=0):
    """Global arrays to those of which each rank holds its part, and back."""
    kw = dict(cu_seqlens=cu, layout=layout, dim=dim)
    spec = P("tp") if dim == 0 else P(None, "tp")
    cut = lambda x: run(lambda x: tw.cp_shard(x, "tp", **kw), mesh, (P(),), spec, x)  # noqa: E731
    join = lambda x: run(  # noqa: E731
        lambda x: tw.cp_unshard(x, "tp", **kw), mesh, (spec,), P(), x, check_vma=False
    )
    return cut, join, spec


@pytest.mark.parametrize("strategy", [None, "get", "ring", "all_gather", "gated", "all_to_all"])
def test_each_strategy(world, mesh, rng, strategy):
    tp = size_of(mesh, "tp")
    if strategy == "all_to_all" and HKV % tp:
        pytest.skip("fewer heads than ranks")
    if strategy == "gated" and mesh.devices.flat[0].platform != "cpu":
        pytest.skip("of 16-bit inputs, which the suite of torch has")
    n = 8 * tp
    *x, dy = qkv(rng, n)
    ref, grads = dense_vjp(dense([0, n]), x, dy)
    cut, join, spec = shards(world, mesh)
    args = [cut(put(mesh, t, P(), "float32")) for t in (*x, dy)]
    f = lambda q, k, v: tw.cp_attention(q, k, v, "tp", strategy=strategy)  # noqa: E731
    y, got = run_vjp(f, mesh, (spec,) * 3, spec, args[:3], args[3])
    close(join(y), ref, "y")
    for g, want, name in zip(got, grads, ("dq", "dk", "dv")):
        close(join(g), want, name, 1e-3, 1e-3)


@pytest.mark.parametrize("dtype", list(TOL))
def test_batches(world, mesh, rng, dtype):
    tp = size_of(mesh, "tp")
    s = 4 * tp
    *x, dy = qkv(rng, 2, s, dtype=dtype)
    ref, grads = dense_vjp(dense([0, s, 2 * s], dims=4), x, dy)
    cut, join, spec = shards(world, mesh, dim=1)
    args = [cut(put(mesh, t, P(), dtype)) for t in (*x, dy)]
    f = lambda q, k, v: tw.cp_attention(q, k, v, "tp")  # noqa: E731
    y, got = run_vjp(f, mesh, (spec,) * 3, spec, args[:3], args[3])
    rtol, atol = TOL[dtype]
    close(join(y), ref, "y", rtol, atol)
    for g, want, name in zip(got, grads, ("dq", "dk", "dv")):
        close(join(g), want, name, rtol, 2 * atol)


@pytest.mark.parametrize("layout", ["zigzag_per_sequence", "zigzag", "contiguous", "balanced"])
def test_packed_sequences_with_a_sink(world, mesh, rng, layout):
    tp = size_of(mesh, "tp")
    cu = [0, 4 * tp, 6 * tp, 12 * tp]
    *x, dy = qkv(rng, cu[-1])
    sink = randn(rng, HQ)
    ref, grads = dense_vjp(lambda q, k, v, s: dense(cu)(q, k, v, None, s), (*x, sink), dy)
    cut, join, spec = shards(world, mesh, cu, layout)
    args = [cut(put(mesh, t, P(), "float32")) for t in (*x, dy)]
    kw = dict(cu_seqlens_q=cu, layout=layout)
    f = lambda q, k, v, s: tw.cp_attention(q, k, v, "tp", sink=s, **kw)  # noqa: E731
    sinks = put(mesh, sink, P(), "float32")
    y, got = run_vjp(f, mesh, (spec,) * 3 + (P(),), spec, [*args[:3], sinks], args[3])
    close(join(y), ref, "y")
    for g, want, name in zip(got, grads, ("dq", "dk", "dv")):
        close(join(g), want, name, 1e-3, 1e-3)
    # What every rank's queries contribute, added by JAX.
    close(got[3], grads[3], "dsink", 1e-3, 1e-3)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_one_divided_program_serves_documents_that_change(world, mesh, rng, layout):
    """Offsets as an array of the program; rows behind the last document are zero."""
    n = 12 * size_of(mesh, "tp")
    *x, dy = qkv(rng, n)
    cut, join, spec = shards(world, mesh, None, layout)
    args = [cut(put(mesh, t, P(), "float32")) for t in (*x, dy)]
    traces = []

    def f(cu, *x):
        traces.append(cu)
        return tw.cp_attention(*x, "tp", cu_seqlens_q=cu, layout=layout)

    @jax.jit
    def both(cu, q, k, v, dy):
        of = jax.shard_map(f, mesh=mesh, in_specs=(P(), *[spec] * 3), out_specs=spec)
        y, back = jax.vjp(lambda *x: of(cu, *x), q, k, v)
        return y, back(dy)

    for cu in ([0, 5, n - 1, n], [0, 0, n, n], [0, 1, 2, n - 3]):
        end = cu[-1]
        ref, grads = dense_vjp(dense(cu), [t[:end] for t in x], dy[:end])
        y, got = both(put(mesh, cu, P(), "int32"), *args)
        for g, want, name in zip((y, *got), (ref, *grads), ("y", "dq", "dk", "dv")):
            rest = np.zeros((n - end, *want.shape[1:]))
            close(join(g), np.concatenate([want, rest]), name, 1e-3, 1e-3)
    assert len(traces) == 1
    for kw, error, why in (
        (dict(), tilewire.InvalidArgument, "for the layouts"),
        (dict(layout=layout, strategy="ring"), tilewire.Unsupported, "travel by ring"),
    ):
        with pytest.raises(error, match=why):
            g = lambda cu, *x: tw.cp_attention(*x, "tp", cu_seqlens_q=cu, **kw)  # noqa: B023, E731
            run(g, mesh, (P(), *[spec] * 3), spec, put(mesh, [0, n], P(), "int32"), *args[:3])


def test_log_sum_exp_and_dropout(world, mesh, rng):
    """The mask of dropout follows from global rows: the same on any number of ranks."""
    tp = size_of(mesh, "tp")
    n = 4 * tp
    *x, _ = qkv(rng, n)
    cut, join, spec = shards(world, mesh)
    kw = dict(dropout_p=0.5, seed=7, return_lse=True)
    f = lambda q, k, v: tw.cp_attention(q, k, v, "tp", **kw)  # noqa: E731
    out = (spec, P(None, "tp"))
    args = [cut(put(mesh, t, P(), "float32")) for t in x]
    y, lse = run(f, mesh, (spec,) * 3, out, *args)
    ref, ref_lse = tw.attention(*(jnp.asarray(t, jnp.float32) for t in x), **kw)
    close(join(y), np.asarray(ref, np.float64), "y")
    _, join_lse, _ = shards(world, mesh, dim=1)
    close(join_lse(lse), np.asarray(ref_lse, np.float64), "lse")


def test_a_round_trip(world, mesh, rng):
    tp = size_of(mesh, "tp")
    x = rng.integers(0, 1000, (4 * tp, 3)).astype(np.float32)
    cut, join, _ = shards(world, mesh, [0, 2 * tp, 4 * tp])
    from dense import equal

    equal(join(cut(put(mesh, x, P()))), x)
