"""Products of QTensors beside f64 arithmetic of the values that they stand for."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dense import ALL, groups_of, product_bound, put, randn, shards_of, size_of, within
from jax.sharding import PartitionSpec as P

import tilewire
import tilewire.jax as tw

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
BF16 = "bfloat16"
FP8 = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=lambda d: np.dtype(d).name)
RECIPES = ["tensor", "block1x128", "block128x128", "mx1x32"]


def value(x, recipe="tensor", dtype=E4M3):
    """What a QTensor of ``x`` stands for, in f64."""
    q = tw.quantize(jnp.asarray(x, jnp.float32), recipe, dtype=dtype)
    return np.asarray(q.dequantize(jnp.float32)).astype(np.float64)


def values(xs, **kw):
    return np.stack([value(x, **kw) for x in xs])


@FP8
@pytest.mark.parametrize("algo", [None, "ring", "sequential"])
def test_ag_gemm(world, mesh, rng, dtype, algo):
    """The ranks of a team have one scale, as their rows meet each other's weights."""
    tp, n, k = size_of(mesh, "tp"), 24, 64
    x = randn(rng, world.size, 4, k) * 2.0 ** rng.permutation(world.size)[:, None, None]
    w, b = randn(rng, world.size, n, k), randn(rng, world.size, n)

    def f(x, w, b):
        x = tw.quantize(x[0], dtype=dtype, axis_name="tp")
        w = tw.quantize(w[0], dtype=dtype)
        return tw.ag_gemm(x, w, "tp", bias=b[0], activation="relu", algo=algo)[None]

    sm = jax.shard_map(f, mesh=mesh, in_specs=(ALL,) * 3, out_specs=ALL)
    y = jax.jit(sm)(*(put(mesh, a, ALL, "float32") for a in (x, w, b)))
    assert y.dtype == jnp.bfloat16
    want, bound = np.empty((2, world.size, 4 * tp, n))
    for team in groups_of(mesh, "tp"):
        rows = value(x[team].reshape(-1, k), dtype=dtype)
        for r in team:
            own = value(w[r], dtype=dtype).T
            want[r] = np.maximum(rows @ own + b[r], 0)
            bound[r] = product_bound(rows, own, 1, BF16) + 1e-5
    within(y, want, bound, "y")
    world.check()


@FP8
@pytest.mark.parametrize("op", ["gemm_rs", "gemm_ar"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_sums(world, mesh, rng, dtype, op, check_vma):
    """Each rank's product has scales of its own."""
    tp, n, k = size_of(mesh, "tp"), 24, 64
    m = 4 * tp
    x = randn(rng, world.size, m, k) * 2.0 ** rng.permutation(world.size)[:, None, None]
    w, b = randn(rng, world.size, n, k), randn(rng, n)

    def f(x, w, b):
        x, w = (tw.quantize(a[0], dtype=dtype) for a in (x, w))
        return getattr(tw, op)(x, w, "tp", bias=b)[None]

    specs = (ALL, ALL, P())
    out = ALL if op == "gemm_rs" or not check_vma else P("dp")
    sm = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma)
    args = [put(mesh, a, s, "float32") for a, s in zip((x, w, b), specs)]
    y = jax.jit(sm)(*args)
    assert y.dtype == jnp.bfloat16
    xs, ws = values(x, dtype=dtype), values(w, dtype=dtype)
    parts = np.einsum("rmk,rnk->rmn", xs, ws)
    bounds = np.stack([product_bound(a, b.T, tp, BF16) for a, b in zip(xs, ws)])
    want, bound = [], []
    for team in groups_of(mesh, "tp"):
        whole = parts[team].sum(0) + b, bounds[team].sum(0) + 1e-5
        for r in range(len(team)):
            rows = slice(4 * r, 4 * r + 4) if op == "gemm_rs" else slice(None)
            if out == P("dp") and r > 0:
                continue
            want.append(whole[0][rows])
            bound.append(whole[1][rows])
    within(y, np.stack(want), np.stack(bound), "y")


@FP8
@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_gemm(rng, dtype, recipe):
    """x of a recipe, by weights of all recipes: one after the other."""
    rows, n, k, splits = 12, 16, 256, [3, 0, 5, 2]
    x, w, b = randn(rng, rows, k), randn(rng, 4, n, k), randn(rng, 4, n)

    def f(x, w, b, s):
        qw = [tw.quantize(a, r, dtype=dtype) for a, r in zip(w, RECIPES)]
        return tw.grouped_gemm(tw.quantize(x, recipe, dtype=dtype), qw, s, bias=b)

    a = [jnp.asarray(t, jnp.float32) for t in (x, w, b)]
    xv = value(x, recipe, dtype)
    want, bound, at = np.zeros((rows, n)), np.zeros((rows, n)), 0
    for e, (num, r) in enumerate(zip(splits, RECIPES)):
        own, mine = value(w[e], r, dtype).T, slice(at, at + num)
        want[mine] = xv[mine] @ own + b[e]
        bound[mine] = product_bound(xv[mine], own, 1, BF16) + 1e-5
        at += num
    for g in (f, jax.jit(f)):
        y = g(*a, jnp.array(splits))
        assert y.dtype == jnp.bfloat16
        within(y, want, bound, "y")
    assert np.abs(want[:at]).min() > 0 and not want[at:].any()


def test_experts_on_each_device(world, mesh, rng):
    """Rows of permute as FP8, in a scan over layers, under shard_map."""
    n, tokens, d, experts, top_k, layers = world.size, 9, 128, 4, 2, 3
    idx = np.stack([[rng.permutation(experts)[:top_k] for _ in range(tokens)] for _ in range(n)])
    x, w = randn(rng, n, tokens, d), randn(rng, layers, experts, d, d) / 16

    def layer(x, w, idx):
        rows, _, splits, row_map = tw.permute(x, idx, num_experts=experts)
        ws = [tw.quantize(w[e], "block128x128") for e in range(experts)]
        y = tw.grouped_gemm(tw.quantize(rows, "block1x128"), ws, splits)
        return x + tw.unpermute(y.astype(x.dtype), row_map)

    def f(x, w, idx):
        step = lambda x, w: (layer(x, w, idx[0]), None)  # noqa: E731
        x, w = x[0], jax.lax.pcast(w, ("dp", "tp"), to="varying")
        return jax.lax.scan(step, x, w)[0][None]

    specs = (ALL, P(), ALL)
    args = put(mesh, x, ALL, "float32"), put(mesh, w, P(), "float32"), put(mesh, idx, ALL, np.int32)
    y = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=ALL))(*args)
    want = x.copy()
    for i in range(layers):
        chosen = (idx[..., None] == np.arange(experts)).sum(2)
        want = want + np.einsum("rne,eoh,rnh->rno", chosen, w[i], want)
    # Codes have 4 bits: elements that almost cancel are off by much, all together are not.
    for mine, ref, _ in shards_of(y, want):
        err = np.sqrt(((mine - ref) ** 2).mean() / (ref**2).mean())
        assert err < 0.05, err


@FP8
@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
def test_experts_get_codes_and_scales(world, mesh, rng, dtype, layout):
    """Rows come as they were sent; combined, they are the weighted values of the codes."""
    n, tokens, d, top_k = world.size, 7, 256, 2
    axes, experts = ("dp", "tp"), 3 * world.size
    idx = np.stack([[rng.permutation(experts)[:top_k] for _ in range(tokens)] for _ in range(n)])
    gate = rng.random((n, tokens, top_k))
    x = randn(rng, n, tokens, d) * 2.0 ** rng.integers(-4, 5, (n, tokens, 1))
    args = dict(num_experts=experts, max_tokens=tokens, hidden=d, top_k=top_k, layout=layout)
    buf = tw.EpGroup(axes, dtype=dtype, out_dtype=jnp.float32, **args).buffer()

    def f(x, idx, gate):
        sent = tw.quantize(x[0], "block1x128", dtype=dtype)
        rows, w, _, handle = tw.ep_dispatch(buf, sent, idx[0], gate[0])
        y = rows.dequantize(jnp.float32)
        if layout == "rank_major":
            y = jnp.where(handle.row_index[:, None] < 0, 0, y[handle.row_index])
        return tw.ep_combine(buf, y, handle, w)[None]

    given = [put(mesh, x, ALL, "float32"), put(mesh, idx, ALL, np.int32)]
    given.append(put(mesh, gate, ALL, "float32"))
    y = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(ALL,) * 3, out_specs=ALL))(*given)
    assert y.dtype == jnp.float32
    sent = values(x, recipe="block1x128", dtype=dtype)
    want = sent * gate.astype(np.float32).astype(np.float64).sum(2, keepdims=True)
    assert np.abs(sent - x).max() > 0
    within(y, want, 4e-7 * np.abs(want), "y")
    plain = tw.EpGroup(axes, dtype=jnp.float32, **args).buffer()
    for group, of, text in (
        (buf, lambda x: x, "QTensor"),
        (plain, lambda x: tw.quantize(x, "block1x128"), "an array"),
        (buf, lambda x: tw.quantize(x, "tensor", dtype=dtype), "block1x128"),
    ):
        bad = lambda x, idx: tw.ep_dispatch(group, of(x), idx)[2]  # noqa: B023, E731
        with pytest.raises(tilewire.InvalidArgument, match=text):
            traced(mesh, bad, [((tokens, d), jnp.float32), ((tokens, top_k), jnp.int32)])
    with pytest.raises(tilewire.InvalidArgument, match="tokens cannot be"):
        tw.EpGroup(axes, dtype=jnp.float32, out_dtype=jnp.bfloat16, **args)

    def loss(gate, x, idx):
        return f(x, idx, gate).sum()[None]

    grad = jax.grad(lambda *a: loss(*a)[0])
    g = jax.shard_map(grad, mesh=mesh, in_specs=(ALL,) * 3, out_specs=ALL)
    with pytest.raises(tilewire.InvalidArgument, match="ep_dispatch.*no gradient"):
        jax.jit(g)(given[2], given[0], given[1])
    world.check()


def test_gradients_are_refused(world, mesh, rng):
    x, w, b = jnp.ones((2, 64)), jnp.ones((8, 64)), jnp.ones(8)

    def product(op):
        def f(b):
            xq = tw.quantize(x, axis_name="tp")
            return getattr(tw, op)(xq, tw.quantize(w), "tp", bias=b).sum()

        return f

    for op in ("ag_gemm", "gemm_ar"):
        g = jax.shard_map(
            jax.grad(product(op)), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
        )
        with pytest.raises(tilewire.InvalidArgument, match=f"{op}.*no gradients"):
            jax.jit(g)(b)
    q, splits = tw.quantize(x), jnp.array([2])
    f = lambda b: tw.grouped_gemm(q, [tw.quantize(w)], splits, bias=b).sum()  # noqa: E731
    with pytest.raises(tilewire.InvalidArgument, match="grouped_gemm.*no gradients"):
        jax.grad(f)(b[None])
    world.check()


def q(x, recipe="tensor", **kw):
    return tw.quantize(x, recipe, **kw)


X, W, M = ((4, 128), jnp.float32), ((8, 128), jnp.float32), ((1,), jnp.int32)
INVALID, MISMATCH = tilewire.InvalidArgument, tilewire.Mismatch
BAD = [
    (lambda x, w: tw.ag_gemm(q(x, axis_name="tp"), w, "tp"), [X, W], INVALID, "both"),
    (lambda x, w: tw.gemm_rs(x, q(w), "tp"), [X, W], INVALID, "both"),
    (lambda x, w: tw.gemm_ar(q(x, "mx1x32"), q(w), "tp"), [X, W], INVALID, "mx1x32"),
    (
        lambda x, w: tw.ag_gemm(q(x, axis_name="tp"), q(w), "tp", return_gathered=True),
        [X, W],
        INVALID,
        "gathered",
    ),
    (lambda x, w: tw.gemm_ar(q(x), q(w), "tp"), [X, ((8, 64), jnp.float32)], INVALID, "columns"),
    (lambda x, w, m: tw.grouped_gemm(q(x), w, m), [X, W, M], INVALID, "QTensors"),
    (lambda x, w, m: tw.grouped_gemm(q(x), [q(w), q(w)], m), [X, W, M], INVALID, "each split"),
    (lambda x, w, m: tw.grouped_gemm(q(x), [], m[:0]), [X, W, M], INVALID, "QTensors"),
    (
        lambda x, w, m: tw.grouped_gemm(q(x), [q(w, dtype=E5M2)], m),
        [X, W, M],
        INVALID,
        "one type",
    ),
    (
        lambda x, w, m: tw.grouped_gemm(q(x), [q(w)], m),
        [X, ((8, 64), jnp.float32), M],
        INVALID,
        "w0",
    ),
    (
        lambda x, w, m: tw.grouped_gemm(tw.QTensor(q(x).data, w, "tensor"), [q(w)], m),
        [X, W, M],
        INVALID,
        "scales of `x`",
    ),
]


def traced(mesh, f, shapes):
    args = [jax.ShapeDtypeStruct(s, d) for s, d in shapes]
    sm = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.eval_shape(sm, *args)


@pytest.mark.parametrize("case", range(len(BAD)))
def test_what_does_not_fit(world, mesh, case):
    f, shapes, kind, text = BAD[case]
    with pytest.raises(kind, match=text):
        traced(mesh, f, shapes)


def test_a_scale_that_is_not_of_all_ranks(world, mesh):
    """One rank's rows would be multiplied by another's scale."""
    own = lambda x, w: tw.ag_gemm(q(x), q(w), ("dp", "tp"))  # noqa: E731
    tp = lambda x, w: tw.ag_gemm(q(x, axis_name="tp"), q(w), ("dp", "tp"))  # noqa: E731
    if world.size == 1:
        assert traced(mesh, own, [X, W]).shape == (4, 8)
        return
    for f in (own, tp):
        with pytest.raises(MISMATCH, match="axis_name"):
            traced(mesh, f, [X, W])
    wide = lambda x, w: tw.ag_gemm(q(x, axis_name=("dp", "tp")), q(w), "tp")  # noqa: E731
    assert traced(mesh, wide, [X, W]).shape == (4 * mesh.shape["tp"], 8)
