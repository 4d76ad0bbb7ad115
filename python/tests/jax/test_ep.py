"""Expert parallelism with gradients, beside dense arithmetic on all tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import ALL, close, dense_vjp, equal, put, randn, run, shard_map, size_of

import tilewire
import tilewire.jax as tw

E_PER_RANK, H, K, T = 3, 16, 2, 10
BOTH = ("dp", "tp")
TOL = {"float32": (1e-4, 1e-4), "bfloat16": (6e-2, 1e-1)}


def routing(rng, size, experts):
    idx = np.stack([rng.permutation(experts)[:K] for _ in range(size * T)])
    w = rng.random((size * T, K))
    return idx.reshape(size, T, K).astype(np.int32), w.reshape(size, T, K).astype(np.float32)


def group_of(size, dtype="float32", axes=BOTH, **kw):
    args = dict(num_experts=E_PER_RANK * size, max_tokens=T, hidden=H, top_k=K, dtype=dtype)
    return tw.EpGroup(axes, **{**args, **kw})


def dense_moe(idx):
    """x [ranks, tokens, H], w [experts, H, H], weights [ranks, tokens, K]."""
    return lambda x, w, k: (jnp.einsum("rth,rtkgh->rtkg", x, w[idx]) * k[..., None]).sum(2)


def moe(buf, weigh="combine"):
    """A layer of experts on one rank: [1, tokens, H]."""

    def f(x, w, k, idx):
        rows, weights, splits, handle = tw.ep_dispatch(buf, x[0], idx[0], k[0])
        y = tw.grouped_gemm(rows, w, splits)
        if weigh == "combine":
            return tw.ep_combine(buf, y, handle, weights)[None]
        y = (y.astype(jnp.float32) * weights[:, None]).astype(y.dtype)
        return tw.ep_combine(buf, y, handle)[None]

    return f


def placed(mesh, x, w, k, idx, dtype):
    return [
        put(mesh, a, ALL, t) for a, t in ((x, dtype), (w, dtype), (k, "float32"), (idx, np.int32))
    ]


@pytest.mark.parametrize("dtype", list(TOL))
@pytest.mark.parametrize("weigh", ["combine", "rows"])
@pytest.mark.parametrize("align", [1, 4])
def test_a_layer_of_experts_and_its_gradients(world, mesh, rng, dtype, weigh, align):
    n = world.size
    idx, k = routing(rng, n, E_PER_RANK * n)
    x, dy = randn(rng, n, T, H, dtype=dtype), randn(rng, n, T, H, dtype=dtype)
    w = randn(rng, E_PER_RANK * n, H, H, dtype=dtype) * 0.25
    ref, grads = dense_vjp(dense_moe(idx), (x, w, k), dy)
    *args, ids = placed(mesh, x, w, k, idx, dtype)
    f = moe(group_of(n, dtype, align=align).buffer(), weigh)
    sm = shard_map(f, mesh, (ALL,) * 4, ALL)

    @jax.jit
    def both(x, w, k, idx, dy):
        y, back = jax.vjp(lambda *a: sm(*a, idx), x, w, k)
        return y, back(dy)

    y, got = both(*args, ids, put(mesh, dy, ALL, dtype))
    rtol, atol = TOL[dtype]
    close(y, ref, "y", rtol, atol)
    for g, r, name in zip(got, grads, ("dx", "dw", "dk")):
        close(g, r, name, rtol, 2 * atol)


def test_along_one_axis(world, mesh, rng):
    """Teams of the mesh's rows: experts of each row are a layer of their own."""
    tp, n = size_of(mesh, "tp"), world.size
    idx, k = routing(rng, n, E_PER_RANK * tp)
    x, w = randn(rng, n, T, H), randn(rng, n * E_PER_RANK, H, H) * 0.25
    buf = group_of(tp, axes="tp").buffer()
    y = run(moe(buf), mesh, (ALL,) * 4, ALL, *placed(mesh, x, w, k, idx, "float32"))
    part = lambda a, r: a[r * len(a) // (n // tp) : (r + 1) * len(a) // (n // tp)]  # noqa: E731
    refs = [
        dense_vjp(
            dense_moe(part(idx, r)), (part(x, r), part(w, r), part(k, r)), np.zeros((tp, T, H))
        )[0]
        for r in range(n // tp)
    ]
    close(y, np.concatenate(refs), "y")


@pytest.mark.parametrize("how", ["scan", "checkpoint", "scan of checkpoints"])
def test_layers_that_share_a_buffer(world, mesh, rng, how):
    """Each layer's routing is an array: the backward pass finds it however often the buffer was
    used since, and a recomputed dispatch routes as the first did."""
    n, layers = world.size, 3
    routes = [routing(rng, n, E_PER_RANK * n) for _ in range(layers)]
    idx, k = (np.stack([r[i] for r in routes]) for i in (0, 1))
    x, dy = randn(rng, n, T, H), randn(rng, n, T, H)
    w = randn(rng, layers, E_PER_RANK * n, H, H) * 0.25

    def dense(x, w, k):
        for i in range(layers):
            x = x + dense_moe(idx[i])(x, w[i], k[i])
        return x

    ref, grads = dense_vjp(dense, (x, w, k), dy)
    one = moe(group_of(n).buffer())
    body = lambda x, w, k, idx: x + one(x, w, k, idx)  # noqa: E731
    if "checkpoint" in how:
        body = jax.checkpoint(body, prevent_cse="scan" not in how)

    def f(x, w, k, idx):
        if "scan" in how:
            return jax.lax.scan(lambda x, a: (body(x, *a), None), x, (w, k, idx))[0]
        for i in range(layers):
            x = body(x, w[i], k[i], idx[i])
        return x

    from jax.sharding import PartitionSpec as P

    of_layers = P(None, BOTH)
    args = [put(mesh, x, ALL, "float32")]
    args += [put(mesh, a, of_layers, "float32") for a in (w, k)]
    ids = put(mesh, idx, of_layers)
    sm = shard_map(f, mesh, (ALL, of_layers, of_layers, of_layers), ALL)

    @jax.jit
    def both(x, w, k, idx, dy):
        y, back = jax.vjp(lambda *a: sm(*a, idx), x, w, k)
        return y, back(dy)

    y, got = both(*args, ids, put(mesh, dy, ALL, "float32"))
    close(y, ref, "y", 1e-3, 1e-3)
    for g, r, name in zip(got, grads, ("dx", "dw", "dk")):
        close(g, r, name, 1e-3, 2e-3)


def test_microbatches_in_flight(world, mesh, rng):
    """Forward of all, then backward of all, with a buffer for each and with one for all."""
    n = world.size
    group = group_of(n)
    bufs = [group.buffer() for _ in range(2)]
    many = [routing(rng, n, E_PER_RANK * n) for _ in range(4)]
    x = randn(rng, n, T, H)

    def f(x, *args):
        def loss(x):
            total = 0.0
            for i in range(4):
                k, idx = args[2 * i : 2 * i + 2]
                rows, w, _, handle = tw.ep_dispatch(bufs[i % 2], x[0], idx[0], k[0])
                total += (tw.ep_combine(bufs[i % 2], rows * (i + 1.0), handle, w) ** 2).sum() / 2
            return total

        return jax.grad(loss)(x)

    args = [put(mesh, a, ALL) for idx, k in many for a in (k, idx)]
    got = run(f, mesh, (ALL,) * 9, ALL, put(mesh, x, ALL, "float32"), *args)
    scale = sum(((i + 1.0) * k.sum(2).astype(np.float64)) ** 2 for i, (_, k) in enumerate(many))
    close(got, x * scale[..., None], "dx", 1e-3, 1e-3)


def test_any_subset_of_the_results_in_the_loss(world, mesh, rng):
    n = world.size
    idx, k = routing(rng, n, E_PER_RANK * n)
    x = randn(rng, n, T, H)
    for uses in ("rows", "weights"):
        buf = group_of(n).buffer()

        def f(x, k, idx):
            def loss(x, k):
                rows, w, _, _ = tw.ep_dispatch(buf, x[0], idx[0], k[0])  # noqa: B023
                return (rows if uses == "rows" else w).sum()  # noqa: B023

            return jax.grad(loss, (0, 1))(x, k)

        args = [put(mesh, x, ALL, "float32"), put(mesh, k, ALL), put(mesh, idx, ALL)]
        dx, dk = run(f, mesh, (ALL,) * 3, (ALL, ALL), *args)
        equal(dx, np.full(x.shape, float(K) if uses == "rows" else 0.0))
        equal(dk, np.full(k.shape, float(uses == "weights")))


@pytest.mark.parametrize("layout", ["rank_major", "flat"])
def test_a_row_for_each_token_and_rank(world, mesh, rng, layout):
    n = world.size
    idx, k = routing(rng, n, E_PER_RANK * n)
    values, total = randn(rng, n, T, H), k.sum(2, keepdims=True)
    x = values
    buf = group_of(n, layout=layout).buffer()

    def f(x, k, idx):
        rows, w, _, handle = tw.ep_dispatch(buf, x[0], idx[0], k[0])
        index = handle.row_index
        rows = jnp.where(index[:, None] >= 0, rows[jnp.clip(index, 0)], 0.0)
        return tw.ep_combine(buf, rows, handle, w)[None]

    x, k, idx = put(mesh, x, ALL, "float32"), put(mesh, k, ALL), put(mesh, idx, ALL)
    sm = shard_map(f, mesh, (ALL,) * 3, ALL)

    @jax.jit
    def both(x, k, idx, dy):
        y, back = jax.vjp(lambda x: sm(x, k, idx), x)
        return y, back(dy)[0]

    y, dx = both(x, k, idx, x)
    ref = np.asarray(values) * total
    close(y, ref, "y")
    close(dx, ref, "dx")


def test_numbers_of_the_handle(world, mesh, rng):
    n = world.size
    idx, _ = routing(rng, n, E_PER_RANK * n)
    buf = group_of(n, align=4).buffer()

    def f(x, idx):
        rows, none, splits, handle = tw.ep_dispatch(buf, x[0], idx[0])
        assert none is None
        used = jnp.arange(rows.shape[0]) < splits.sum()
        tail = jnp.where(used[:, None], 0, rows).any()
        return splits[None], handle.rows[None], handle.dropped[None], tail[None]

    args = [put(mesh, np.ones((n, T, H)), ALL, "float32"), put(mesh, idx, ALL)]
    splits, rows, dropped, tail = run(f, mesh, (ALL,) * 2, (ALL,) * 4, *args)
    counts = np.bincount(idx.reshape(-1), minlength=E_PER_RANK * n).reshape(n, E_PER_RANK)
    padded = -(-counts // 4) * 4
    equal(splits, padded)
    equal(rows, padded.sum(1))
    equal(dropped, np.zeros(n))
    equal(tail, np.zeros(n, bool))


def test_what_exceeds_the_capacity(world, mesh):
    n = world.size
    idx = np.zeros((n, T, K), np.int32)
    idx[..., 1] = 1
    buf = group_of(n, capacity=4).buffer()

    def f(x, idx):
        _, _, splits, handle = tw.ep_dispatch(buf, x[0], idx[0])
        return splits[None], handle.dropped[None]

    args = [put(mesh, np.ones((n, T, H)), ALL, "float32"), put(mesh, idx, ALL)]
    splits, dropped = run(f, mesh, (ALL,) * 2, (ALL,) * 2, *args)
    want = np.zeros((n, E_PER_RANK))
    want[0, 0] = 4
    equal(splits, want)
    lost = np.zeros(n)
    lost[0] = 2 * T * n - 4
    equal(dropped, lost)


def test_masked_choices(world, mesh):
    n = world.size
    idx = np.full((n, T, K), -1, np.int32)
    idx[:, 0, 0] = 0
    buf = group_of(n).buffer()

    def f(x, idx):
        rows, _, _, handle = tw.ep_dispatch(buf, x[0], idx[0])
        return tw.ep_combine(buf, rows, handle)[None]

    x = np.ones((n, T, H))
    y = run(f, mesh, (ALL,) * 2, ALL, put(mesh, x, ALL, "float32"), put(mesh, idx, ALL))
    x[:, 1:] = 0
    equal(y, x)


def test_what_does_not_fit(world, mesh):
    n = world.size
    group = group_of(n)
    buf, other = group.buffer(), group_of(n).buffer()
    x, idx = jnp.ones((T, H)), jnp.zeros((T, K), jnp.int32)

    def f(call):
        return lambda: jax.eval_shape(
            jax.shard_map(call, mesh=mesh, in_specs=(), out_specs=ALL, check_vma=False)
        )

    for bad in (
        f(lambda: tw.ep_dispatch(buf, x[:, :4], idx)[0]),
        f(lambda: tw.ep_dispatch(buf, x.astype(jnp.bfloat16), idx)[0]),
        f(lambda: tw.ep_dispatch(buf, x, idx[:4])[0]),
        f(lambda: tw.ep_dispatch(buf, x, idx.astype(jnp.float32))[0]),
        f(lambda: tw.ep_dispatch(buf, x, idx, jnp.ones((T, K + 1)))[0]),
        f(lambda: tw.ep_dispatch(buf, jnp.ones((T + 1, H)), jnp.zeros((T + 1, K), jnp.int32))[0]),
        f(lambda: tw.ep_combine(buf, x, None)),
        f(
            lambda: tw.ep_combine(
                other, jnp.ones((group.capacity, H)), tw.ep_dispatch(buf, x, idx)[3]
            )
        ),
        lambda: group_of(n, layout="spiral"),
        lambda: group_of(n, top_k=0),
        lambda: group_of(n, dtype="int32"),
        lambda: group_of(n, num_experts=3 * n + 1) if n > 1 else group_of(n, num_experts=0),
        lambda: group_of(n, axes="pp"),
    ):
        with pytest.raises(tilewire.InvalidArgument):
            bad()
