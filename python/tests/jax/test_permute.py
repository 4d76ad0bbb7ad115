"""permute and unpermute beside dense arithmetic, inside and outside of jit, scan and shard_map."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import ALL, DTYPES, UNIT, close, dense_vjp, equal, put, randn
from jax import export
from jax.sharding import PartitionSpec as P

import tilewire
import tilewire.jax as tw

TOKENS, HIDDEN, EXPERTS, TOP_K = 13, 24, 6, 3


def routed(rng, tokens=TOKENS, experts=EXPERTS, top_k=TOP_K):
    """Choices of each token, of which some are left out."""
    idx = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
    idx[rng.random(idx.shape) < 0.2] = -1
    return idx


class Routing:
    """The map by its definition: the choice of each row, and the row of each choice; -1 is none."""

    def __init__(self, idx, experts=EXPERTS, capacity=None, align=1):
        source, ends = [], [0]
        for e in range(experts):
            mine = [i for i, chosen in enumerate(idx.reshape(-1)) if chosen == e]
            source += mine + [-1] * (-len(mine) % align)
            ends.append(len(source))
        if capacity is None:
            capacity = idx.size + experts * (align - 1)
        self.rows = len(source)
        self.dropped = sum(i >= 0 for i in source[capacity:])
        self.source = np.array((source + [-1] * capacity)[:capacity], dtype=int)
        self.splits = np.diff(np.minimum(ends, capacity))
        self.slot = np.full(idx.size, -1)
        for row, i in enumerate(self.source):
            if i >= 0:
                self.slot[i] = row
        self.shape = idx.shape

    def permute(self, x, w):
        i = self.source
        rows = jnp.where(i[:, None] >= 0, x[i // self.shape[1]], 0)
        return rows, jnp.where(i >= 0, w.reshape(-1)[i], 0)

    def unpermute(self, rows, w):
        s = self.slot
        own = jnp.where(s[:, None] >= 0, rows[s] * w.reshape(-1, 1), 0)
        return own.reshape(*self.shape, -1).sum(1)


def near(got, ref, dtype, what):
    """``got`` has rounded each row to its type, and added a few."""
    unit = 8 * UNIT[dtype]
    got = np.asarray(got).astype(np.float64)
    np.testing.assert_allclose(got, ref, rtol=unit, atol=unit * max(1, np.abs(ref).max()) * 2)
    if not np.abs(ref).max() > 0.1:
        raise AssertionError(f"{what} would be found right if it were zero")


def round_trip(x, w, idx, weighted=True, **kw):
    """There and back: each row is doubled there."""
    kw = dict(num_experts=EXPERTS, **kw)
    rows, row_w, splits, row_map = tw.permute(x, idx, w if weighted else None, **kw)
    y = tw.unpermute(rows * 2, row_map, w if weighted else None)
    return (y, row_w) if weighted else y


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize("capacity", [None, 17])
def test_rows_and_numbers(rng, dtype, align, capacity):
    idx = routed(rng)
    x, w = randn(rng, TOKENS, HIDDEN, dtype=dtype), rng.random((TOKENS, TOP_K), np.float32)
    ref = Routing(idx, capacity=capacity, align=align)
    kw = dict(num_experts=EXPERTS, capacity=capacity, align=align)
    for f in (functools.partial(tw.permute, **kw), jax.jit(functools.partial(tw.permute, **kw))):
        rows, row_w, splits, row_map = f(jnp.asarray(x, dtype), idx, w)
        want, want_w = ref.permute(x, w)
        assert rows.dtype == dtype and row_w.dtype == jnp.float32 and splits.dtype == jnp.int32
        np.testing.assert_array_equal(np.asarray(rows).astype(np.float64), want)
        np.testing.assert_array_equal(np.asarray(row_w), want_w)
        np.testing.assert_array_equal(np.asarray(splits), ref.splits)
        np.testing.assert_array_equal(np.asarray(row_map.m_splits), ref.splits)
        assert (int(row_map.rows), int(row_map.dropped)) == (ref.rows, ref.dropped)
        assert (capacity is None) == (ref.dropped == 0)
        y = tw.unpermute(rows, row_map, w)
        assert y.dtype == dtype
        near(y, ref.unpermute(np.asarray(want), w), dtype, "y")


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("how", ["eager", "jit", "checkpoint"])
def test_gradients(rng, dtype, weighted, how):
    idx, align, capacity = routed(rng), 4, 29
    x, dy = (randn(rng, TOKENS, HIDDEN, dtype=dtype) for _ in range(2))
    w, d_rows = rng.random((TOKENS, TOP_K)), rng.standard_normal(capacity)
    ref = Routing(idx, capacity=capacity, align=align)
    assert ref.dropped > 0

    def dense(x, w):
        ones = jnp.ones_like(w)
        rows, row_w = ref.permute(x, w)
        y = ref.unpermute(rows * 2, w if weighted else ones)
        return (y, row_w) if weighted else y

    f = lambda x, w: round_trip(  # noqa: E731
        x, w, idx, weighted, capacity=capacity, align=align
    )
    f = {"eager": lambda f: f, "jit": jax.jit, "checkpoint": jax.checkpoint}[how](f)
    cot = (dy, d_rows) if weighted else dy
    want, (dx, dw) = dense_vjp(dense, (x, w), cot)
    y, back = jax.vjp(f, jnp.asarray(x, dtype), jnp.asarray(w, jnp.float32))
    types = (dtype, "float32") if weighted else dtype
    cot = jax.tree.map(lambda c, t: jnp.asarray(c, t), cot, types)
    got = back(cot)
    near(y[0] if weighted else y, want[0] if weighted else want, dtype, "y")
    near(got[0], dx, dtype, "dx")
    if weighted:
        near(got[1], dw, dtype, "dw")
    else:
        assert not np.asarray(got[1]).any()


def test_gradients_of_rows_alone(rng):
    """Of unpermute without a permute before it, for each of its arguments by itself."""
    idx = routed(rng)
    ref = Routing(idx)
    rows, w = randn(rng, idx.size, HIDDEN), rng.random((TOKENS, TOP_K))
    dy = randn(rng, TOKENS, HIDDEN)
    _, (d_rows, dw) = dense_vjp(ref.unpermute, (rows, w), dy)
    x = jnp.zeros((TOKENS, HIDDEN))
    row_map = tw.permute(x, idx, num_experts=EXPERTS)[3]
    rows, w = jnp.asarray(rows, jnp.float32), jnp.asarray(w, jnp.float32)
    loss = lambda r, w: (tw.unpermute(r, row_map, w) * dy).sum()  # noqa: E731
    for g in (jax.grad, lambda *a: jax.jit(jax.grad(*a))):
        near(g(loss, 0)(rows, w), d_rows, "float32", "d_rows")
        near(g(loss, 1)(rows, w), dw, "float32", "dw")
    ones = np.ones((TOKENS, TOP_K))
    _, (d_rows, _) = dense_vjp(ref.unpermute, (rows, ones), dy)
    plain = lambda r: (tw.unpermute(r, row_map) * dy).sum()  # noqa: E731
    near(jax.grad(plain)(rows), d_rows, "float32", "d_rows without weights")


def test_indices_of_64_bits(rng):
    idx = routed(rng).astype(np.int64)
    x = randn(rng, TOKENS, HIDDEN)
    with jax.enable_x64(True):
        wide = jnp.asarray(idx)
        assert wide.dtype == jnp.int64
        rows, _, splits, row_map = tw.permute(jnp.asarray(x, jnp.float32), wide, num_experts=6)
        y = tw.unpermute(rows, row_map)
    np.testing.assert_array_equal(np.asarray(splits), Routing(idx).splits)
    near(y, x * (idx >= 0).sum(1, keepdims=True), "float32", "y")


def test_what_exceeds_the_capacity_and_no_tokens():
    idx = jnp.zeros((5, 1), jnp.int32)
    x = jnp.broadcast_to(jnp.arange(5.0)[:, None], (5, 8))
    rows, none, splits, row_map = tw.permute(x, idx, num_experts=2, capacity=3)
    assert none is None and np.asarray(rows)[:, 0].tolist() == [0, 1, 2]
    assert np.asarray(splits).tolist() == [3, 0]
    assert (int(row_map.rows), int(row_map.dropped)) == (5, 2)
    assert np.asarray(tw.unpermute(rows, row_map))[:, 0].tolist() == [0, 1, 2, 0, 0]
    rows, _, splits, row_map = tw.permute(x[:0], idx[:0], num_experts=2, capacity=4)
    assert rows.shape == (4, 8) and not np.asarray(rows).any() and not np.asarray(splits).any()
    assert tw.unpermute(rows, row_map).shape == (0, 8)


def test_nobody_is_routed():
    idx, x = jnp.full((4, 2), -1), jnp.ones((4, 8))
    y, back = jax.vjp(lambda x: round_trip(x, None, idx, False), x)
    assert not np.asarray(y).any() and not np.asarray(back(y + 1)[0]).any()


def test_in_a_scan(rng):
    """One call, a routing for each step: the map is data, and so is the order of the steps."""
    steps = 7
    idx = np.stack([routed(rng) for _ in range(steps)])
    x, w = randn(rng, TOKENS, HIDDEN), rng.random((steps, TOKENS, TOP_K)) / TOP_K
    dy = randn(rng, TOKENS, HIDDEN)

    def dense(x, w):
        for i in range(steps):
            r = Routing(idx[i])
            x = x + r.unpermute(r.permute(x, w[i])[0] * 2, w[i])
        return x

    def f(x, w):
        step = lambda x, iw: (x + round_trip(x, iw[1], iw[0])[0], None)  # noqa: E731
        return jax.lax.scan(step, x, (idx, w))[0]

    want, grads = dense_vjp(dense, (x, w), dy)

    @jax.jit
    def both(x, w, dy):
        y, back = jax.vjp(f, x, w)
        return y, back(dy)

    y, got = both(*(jnp.asarray(a, jnp.float32) for a in (x, w, dy)))
    # The values have grown by then.
    for mine, ref, what in ((y, want, "y"), (got[0], grads[0], "dx"), (got[1], grads[1], "dw")):
        np.testing.assert_allclose(np.asarray(mine), ref, rtol=1e-4, atol=1e-3, err_msg=what)


def test_maps_that_a_scan_carries(rng):
    """Each step goes back by the map of the step before it."""
    idx = np.stack([routed(rng) for _ in range(5)])
    x = randn(rng, TOKENS, HIDDEN)

    @jax.jit
    def f(x, idx):
        first = tw.permute(x, idx[0], num_experts=EXPERTS)

        def step(carry, i):
            rows, row_map = carry
            y = tw.unpermute(rows, row_map)
            rows, _, _, row_map = tw.permute(x, i, num_experts=EXPERTS)
            return (rows, row_map), (y, row_map)

        _, (ys, maps) = jax.lax.scan(step, (first[0], first[3]), idx[1:])
        return ys, jax.vmap(lambda m: m.m_splits)(maps)

    ys, splits = f(jnp.asarray(x, jnp.float32), idx)
    for i in range(4):
        near(ys[i], x * (idx[i] >= 0).sum(1, keepdims=True), "float32", "y")
        np.testing.assert_array_equal(np.asarray(splits[i]), Routing(idx[i + 1]).splits)


def test_many_at_once(rng):
    """Calls of equal shapes that XLA may run beside each other."""
    idx, x = np.stack([routed(rng) for _ in range(20)]), randn(rng, TOKENS, HIDDEN)

    @jax.jit
    def f(x, idx):
        made = [tw.permute(x, i, num_experts=EXPERTS) for i in idx]
        return [tw.unpermute(rows, row_map) for rows, _, _, row_map in made]

    for i, y in zip(idx, f(jnp.asarray(x, jnp.float32), idx)):
        near(y, x * (i >= 0).sum(1, keepdims=True), "float32", "y")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_on_each_device(world, mesh, rng, dtype, check_vma):
    """Each device has a routing of its own."""
    n = world.size
    idx = np.stack([routed(rng) for _ in range(n)])
    x, dy = (randn(rng, n, TOKENS, HIDDEN, dtype=dtype) for _ in range(2))
    w, d_rows = rng.random((n, TOKENS, TOP_K)), randn(rng, n, idx[0].size)
    mine = put(mesh, idx, ALL)

    def f(x, w, idx):
        return jax.tree.map(lambda a: a[None], round_trip(x[0], w[0], idx[0]))

    def dense(r):
        def g(x, w):
            rows, row_w = r.permute(x, w)
            return r.unpermute(rows * 2, w), row_w

        return g

    sm = jax.shard_map(f, mesh=mesh, in_specs=(ALL,) * 3, out_specs=ALL, check_vma=check_vma)
    args = put(mesh, x, ALL, dtype), put(mesh, w, ALL, "float32")
    cot = put(mesh, dy, ALL, dtype), put(mesh, d_rows, ALL, "float32")

    @jax.jit
    def both(args, idx, cot):
        y, back = jax.vjp(lambda *a: sm(*a, idx), *args)
        return y, back(cot)

    y, got = both(args, mine, cot)
    refs = [dense_vjp(dense(Routing(idx[r])), (x[r], w[r]), (dy[r], d_rows[r])) for r in range(n)]
    tol = 16 * UNIT[dtype], 64 * UNIT[dtype]
    close(y[0], np.stack([r[0][0] for r in refs]), "y", *tol)
    equal(y[1], np.stack([r[0][1] for r in refs]).astype(np.float32), "row weights")
    close(got[0], np.stack([r[1][0] for r in refs]), "dx", *tol)
    close(got[1], np.stack([r[1][1] for r in refs]), "dw", 16 * UNIT[dtype], 1e-4 + 4 * tol[1])


def test_tokens_that_are_the_same_everywhere(world, mesh, rng):
    """Where only the choices differ, gradients are the sum over the devices."""
    n = world.size
    idx = np.stack([routed(rng) for _ in range(n)])
    x, w = randn(rng, TOKENS, HIDDEN), rng.random((TOKENS, TOP_K))
    dy, d_rows = randn(rng, n, TOKENS, HIDDEN), np.zeros((n, idx[0].size))

    def f(x, w, idx):
        def g(x, w, idx):
            return jax.tree.map(lambda a: a[None], round_trip(x, w, idx[0]))

        specs = (P(), P(), ALL)
        return jax.shard_map(g, mesh=mesh, in_specs=specs, out_specs=ALL)(x, w, idx)

    def dense(x, w):
        made = [(r, *r.permute(x, w)) for r in map(Routing, idx)]
        back = jnp.stack([r.unpermute(rows * 2, w) for r, rows, _ in made])
        return back, jnp.stack([row_w for _, _, row_w in made])

    _, grads = dense_vjp(dense, (x, w), (dy, d_rows))
    args = put(mesh, x, P(), "float32"), put(mesh, w, P(), "float32")
    cot = put(mesh, dy, ALL, "float32"), put(mesh, d_rows, ALL, "float32")

    @jax.jit
    def gradients(args, idx, cot):
        return jax.vjp(lambda x, w: f(x, w, idx), *args)[1](cot)

    for got, ref in zip(gradients(args, put(mesh, idx, ALL), cot), grads):
        close(got, ref, "gradient", 1e-4, 1e-3)


def test_experts_between_them(world, mesh, rng):
    """A layer of experts on one device: the rows go to grouped_gemm as they come."""
    n, out = world.size, 16
    idx = np.stack([routed(rng) for _ in range(n)])
    x, w = randn(rng, n, TOKENS, HIDDEN), randn(rng, n, EXPERTS, out, HIDDEN) / 4
    gate, dy = rng.random((n, TOKENS, TOP_K)), randn(rng, n, TOKENS, out)

    def f(x, w, gate, idx):
        rows, _, splits, row_map = tw.permute(x[0], idx[0], num_experts=EXPERTS, align=4)
        return tw.unpermute(tw.grouped_gemm(rows, w[0], splits), row_map, gate[0])[None]

    def dense(idx):
        chosen = (idx[..., None] == np.arange(EXPERTS)).astype(np.float64)
        return lambda x, w, gate: jnp.einsum("nk,nke,eoh,nh->no", gate, chosen, w, x)

    args = [put(mesh, a, ALL, "float32") for a in (x, w, gate)]
    sm = jax.shard_map(f, mesh=mesh, in_specs=(ALL,) * 4, out_specs=ALL)

    @jax.jit
    def both(args, idx, dy):
        y, back = jax.vjp(lambda *a: sm(*a, idx), *args)
        return y, back(dy)

    y, got = both(args, put(mesh, idx, ALL), put(mesh, dy, ALL, "float32"))
    refs = [dense_vjp(dense(idx[r]), (x[r], w[r], gate[r]), dy[r]) for r in range(n)]
    close(y, np.stack([r[0] for r in refs]), "y")
    for i, what in enumerate(("dx", "dw", "dgate")):
        close(got[i], np.stack([r[1][i] for r in refs]), what, 1e-4, 1e-3)


F32, I32 = jnp.float32, jnp.int32
X, IDX = ((4, 8), F32), ((4, 2), I32)


def permuted(x, idx, w=None, **kw):
    return tw.permute(x, idx, w, **{"num_experts": 2, **kw})


BAD = [
    (permuted, [X, ((3, 2), I32)], "topk_idx"),
    (permuted, [X, ((4,), I32)], "topk_idx"),
    (permuted, [((4, 2, 8), F32), IDX], "matrix"),
    (permuted, [X, ((4, 2), F32)], "topk_idx.*f32"),
    (permuted, [((4, 8), I32), IDX], "i32"),
    (permuted, [((4, 8), jnp.float8_e4m3fn), IDX], "f8e4m3"),
    (permuted, [X, IDX, ((4, 3), F32)], "topk_weights"),
    (permuted, [X, ((4, 33), I32)], "top_k"),
    (functools.partial(permuted, num_experts=0), [X, IDX], "num_experts"),
    (functools.partial(permuted, align=0), [X, IDX], "align"),
    (functools.partial(permuted, capacity=-1), [X, IDX], "capacity"),
    (functools.partial(permuted, capacity=2**31), [X, IDX], "32-bit"),
    (lambda x, idx: tw.unpermute(x, permuted(x, idx)[3]), [X, IDX], "8 rows"),
    (lambda x, idx: tw.unpermute(permuted(x, idx)[0], idx), [X, IDX], "row_map"),
    (
        lambda x, idx, w: tw.unpermute(permuted(x, idx)[0], permuted(x, idx)[3], w),
        [X, IDX, ((4, 3), F32)],
        "weights",
    ),
    (lambda x, idx, r: tw.unpermute(r, permuted(x, idx)[3]), [X, IDX, ((8, 8), I32)], "i32"),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_what_does_not_fit(case):
    f, shapes, text = BAD[case]
    with pytest.raises(tilewire.InvalidArgument, match=text):
        jax.eval_shape(f, *(jax.ShapeDtypeStruct(s, d) for s, d in shapes))


@pytest.mark.parametrize("index", [2, -2, 2**30])
def test_an_index_that_is_no_expert(index):
    x, good = jnp.ones((4, 8)), jnp.zeros((4, 2), jnp.int32)
    bad = good.at[2, 1].set(index)
    if jax.default_backend() != "cpu":
        rows, _, _, row_map = tw.permute(x, bad, num_experts=2)
        assert np.isnan(np.asarray(tw.unpermute(rows, row_map))).all()
    else:
        with pytest.raises(Exception, match="permute.*names an expert that does not exist"):
            jax.block_until_ready(tw.permute(x, bad, num_experts=2))
    # It ends nothing but that call.
    f = jax.jit(lambda x, i: tw.unpermute(*[tw.permute(x, i, num_experts=2)[n] for n in (0, 3)]))
    np.testing.assert_array_equal(np.asarray(f(x, good)), 2 * np.ones((4, 8)))


def forward(x):
    return tw.permute(x, np.zeros((4, 2), np.int32), num_experts=2)[0]


def back(rows):
    row_map = tw.permute(jnp.ones((4, 8)), np.zeros((4, 2), np.int32), num_experts=2)[3]
    return tw.unpermute(rows, row_map)


def twice(f):
    """Second derivatives of ``f``."""
    once = jax.grad(lambda x: (f(x) ** 2).sum())
    return jax.grad(lambda x: once(x).sum())


REFUSED = {
    "vmap": (lambda f, x: jax.vmap(f)(x[None]), "{}.*vmap"),
    "jvp": (lambda f, x: jax.jvp(f, (x,), (x,)), "forward-mode"),
    "second derivatives": (lambda f, x: twice(f)(x), "second derivatives"),
    "export": (
        lambda f, x: export.export(jax.jit(f))(jax.ShapeDtypeStruct(x.shape, x.dtype)),
        "permute cannot be exported",
    ),
}


@pytest.mark.parametrize("how", list(REFUSED))
@pytest.mark.parametrize("what", ["permute", "unpermute"])
def test_what_is_refused_by_name(how, what):
    call, text = REFUSED[how]
    f, rows = {"permute": (forward, 4), "unpermute": (back, 8)}[what]
    with pytest.raises((tilewire.Unsupported, TypeError), match=text.format(what)):
        call(f, jnp.ones((rows, 8)))


def test_the_map_is_a_pytree_of_arrays(rng):
    idx = routed(rng)
    row_map = tw.permute(jnp.ones((TOKENS, 8)), idx, num_experts=EXPERTS, align=4)[3]
    leaves, tree = jax.tree.flatten(row_map)
    assert len(leaves) == 2 and all(isinstance(a, jax.Array) for a in leaves)
    again = jax.tree.unflatten(tree, leaves)
    assert (again.num_experts, again.capacity, again.align) == (EXPERTS, idx.size + 18, 4)
    np.testing.assert_array_equal(np.asarray(again.topk_idx), idx)
