"""quantize and dequantize: codes and scales by their definition, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dense import ALL, AXES, DTYPES, equal, groups_of, put
from jax import export

import tilewire
import tilewire.jax as tw

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
LARGEST = {E4M3: np.float32(448.0), E5M2: np.float32(57344.0)}
BLOCKS = {
    "tensor": (None, None),
    "block1x128": (1, 128),
    "block128x128": (128, 128),
    "mx1x32": (1, 32),
}
RECIPES = list(BLOCKS)


def scale_of(amax, dtype, pow2):
    """The scale of elements whose largest magnitude is ``amax``."""
    if amax == 0 or np.isinf(amax):
        return np.float32(1.0)
    if pow2:
        e = np.ceil(np.log2(np.float64(amax) / np.float64(LARGEST[dtype])))
        return np.float32(2.0**e)
    return np.float32(amax) / LARGEST[dtype]


def quantized(x, recipe, dtype, pow2=False):
    """Codes, scales, and the scale of each element."""
    x = np.asarray(x).astype(np.float32)
    high, wide = (b or n for b, n in zip(BLOCKS[recipe], x.shape))
    pow2 = pow2 or recipe == "mx1x32"
    starts = [range(0, n, b) for n, b in zip(x.shape, (high, wide))]
    scales = np.empty([len(s) for s in starts], np.float32)
    each = np.empty_like(x)
    for a, i in enumerate(starts[0]):
        for b, j in enumerate(starts[1]):
            block = x[i : i + high, j : j + wide]
            finite = np.abs(block[~np.isnan(block)])
            scales[a, b] = scale_of(finite.max(initial=0), dtype, pow2)
            each[i : i + high, j : j + wide] = scales[a, b]
    codes = np.clip(x / each, -LARGEST[dtype], LARGEST[dtype]).astype(dtype)
    return codes, scales.reshape(-1) if recipe == "tensor" else scales, each


def bits(a):
    return np.asarray(a).view(np.uint8)


def wide_range(rng, rows=130, cols=200):
    """Magnitudes of many sizes, so that blocks differ much."""
    return rng.standard_normal((rows, cols)) * np.logspace(-3, 3, cols)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("src", list(DTYPES))
def test_codes_scales_and_back(rng, recipe, dtype, src):
    x = wide_range(rng).astype(DTYPES[src])
    codes, scales, each = quantized(x, recipe, dtype)
    f = functools.partial(tw.quantize, recipe=recipe, dtype=dtype)
    for g in (f, jax.jit(f)):
        q = g(jnp.asarray(x))
        assert q.shape == x.shape and q.dtype == dtype and q.recipe == recipe
        want = jnp.float8_e8m0fnu if recipe == "mx1x32" else jnp.float32
        assert q.scales.dtype == want and q.scales.shape == scales.shape
        np.testing.assert_array_equal(np.asarray(q.scales).astype(np.float32), scales)
        np.testing.assert_array_equal(bits(q.data), bits(codes))
        for out in DTYPES.values():
            got = np.asarray(jax.jit(lambda q: q.dequantize(out))(q))  # noqa: B023
            values = codes.astype(np.float32) * each
            with np.errstate(over="ignore"):
                values = values.astype(out)
            np.testing.assert_array_equal(got.view(np.uint8), values.view(np.uint8))
    assert q.dequantize().dtype == jnp.bfloat16


@pytest.mark.parametrize("recipe", ["tensor", "block1x128", "block128x128"])
def test_powers_of_two(rng, recipe):
    x = wide_range(rng).astype(np.float32)
    codes, scales, _ = quantized(x, recipe, E4M3, pow2=True)
    q = tw.quantize(jnp.asarray(x), recipe, pow2_scales=True)
    np.testing.assert_array_equal(np.asarray(q.scales), scales)
    np.testing.assert_array_equal(bits(q.data), bits(codes))
    plain = tw.quantize(jnp.asarray(x), recipe)
    assert (np.asarray(plain.scales) != scales).any()


def test_numbers_that_are_not_finite_and_zeros():
    x = np.zeros((4, 128), np.float32)
    x[1, :3] = [np.nan, 2.0, -4.0]
    x[2, :3] = [np.inf, 1.0, -np.inf]
    q = tw.quantize(jnp.asarray(x), "block1x128")
    np.testing.assert_array_equal(
        np.asarray(q.scales)[:, 0], np.float32([1.0, np.float32(4.0) / np.float32(448.0), 1.0, 1.0])
    )
    data = np.asarray(q.data)
    assert not bits(data[0]).any() and not bits(data[3]).any()
    assert bits(data)[1, 0] == 0x7F and data[1, 1:3].astype(float).tolist() == [224.0, -448.0]
    assert data[2, :3].astype(float).tolist() == [448.0, 1.0, -448.0]


def test_in_a_scan(rng):
    xs = np.stack([wide_range(rng, 8, 64) * 2.0**i for i in range(5)]).astype(np.float32)

    @jax.jit
    def f(xs):
        first = tw.quantize(xs[0], "mx1x32")

        def step(q, x):
            # A QTensor is carried as other values are.
            return tw.quantize(x, "mx1x32"), (q, q.dequantize(jnp.float32))

        return jax.lax.scan(step, first, xs[1:])[1]

    qs, back = f(jnp.asarray(xs))
    for i in range(4):
        codes, scales, each = quantized(xs[i], "mx1x32", E4M3)
        np.testing.assert_array_equal(bits(qs.data[i]), bits(codes))
        np.testing.assert_array_equal(np.asarray(qs.scales[i]).astype(np.float32), scales)
        np.testing.assert_array_equal(np.asarray(back[i]), codes.astype(np.float32) * each)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_on_each_device(world, mesh, rng, recipe, check_vma):
    """Without an axis each device has scales of its own."""
    x = np.stack([wide_range(rng, 6, 160) * 3.0**i for i in range(world.size)]).astype(np.float32)

    def f(x):
        q = tw.quantize(x[0], recipe)
        return q.data[None], q.scales.astype(jnp.float32)[None], q.dequantize(jnp.float32)[None]

    sm = jax.shard_map(f, mesh=mesh, in_specs=ALL, out_specs=ALL, check_vma=check_vma)
    data, scales, back = jax.jit(sm)(put(mesh, x, ALL))
    refs = [quantized(a, recipe, E4M3) for a in x]
    equal(data.astype(jnp.float32), np.stack([r[0] for r in refs]).astype(np.float32), "codes")
    equal(scales, np.stack([r[1] for r in refs]), "scales")
    equal(back, np.stack([r[0].astype(np.float32) * r[2] for r in refs]), "values")


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_one_scale_for_the_arrays_of_all_ranks(world, mesh, rng, axes, dtype):
    """Of each team along the axes: twice, with other numbers, in one program."""
    n = world.size
    factors = 2.0 ** rng.permutation(n)[:, None, None]
    xs = [(rng.standard_normal((n, 6, 40)) * factors * s).astype(np.float32) for s in (1, 100)]

    def f(x):
        q = tw.quantize(x[0], dtype=dtype, axis_name=axes)
        return q.data[None], q.scales[None], q.dequantize(jnp.float32)[None]

    g = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=ALL, out_specs=ALL))
    for x in xs:
        data, scales, back = g(put(mesh, x, ALL))
        for team in groups_of(mesh, axes):
            whole = x[team].reshape(-1, 40)
            codes, scale, each = quantized(whole, "tensor", dtype)
            shape = (len(team), 6, 40)
            for got, want, what in (
                (data.astype(jnp.float32), codes.astype(np.float32), "codes"),
                (back, codes.astype(np.float32) * each, "values"),
            ):
                part = np.full(x.shape, np.nan, np.float32)
                part[team] = want.reshape(shape)
                team_equal(got, part, team, what)
            every = np.full((n, 1), np.nan, np.float32)
            every[team] = scale
            team_equal(scales, every, team, "scales")
    world.check()


def team_equal(got, ref, team, what):
    """Shards of the devices of a team, those of this process."""
    for s in got.addressable_shards:
        if s.index[0].start in team or len(ref) == 1:
            np.testing.assert_array_equal(np.asarray(s.data), ref[s.index], err_msg=what)


def test_gradients_are_refused(rng):
    x = jnp.asarray(wide_range(rng, 4, 32), jnp.float32)
    f = lambda x: tw.quantize(x).dequantize(jnp.float32).sum()  # noqa: E731
    for g in (jax.grad(f), jax.jit(jax.grad(f)), jax.grad(jax.jit(f))):
        with pytest.raises(tilewire.InvalidArgument, match="quantize.*stop_gradient"):
            g(x)
    q = tw.quantize(x)
    with pytest.raises(tilewire.InvalidArgument, match="dequantize.*no gradient"):
        of = lambda s: tw.QTensor(q.data, s, "tensor").dequantize().sum()  # noqa: E731
        jax.grad(of)(q.scales)
    # What needs no gradient of it goes on.
    of = lambda x: tw.quantize(jax.lax.stop_gradient(x)).dequantize(x.dtype)  # noqa: E731
    still = lambda x: (of(x) * x).sum()  # noqa: E731
    for g in (jax.grad(still), jax.jit(jax.grad(still))):
        codes, _, each = quantized(x, "tensor", E4M3)
        np.testing.assert_array_equal(np.asarray(g(x)), codes.astype(np.float32) * each)
    by = jax.grad(lambda w: (w * tw.quantize(x).dequantize(x.dtype)).sum())
    np.testing.assert_array_equal(np.asarray(by(jnp.ones_like(x))), np.asarray(g(x)))


X = ((4, 256), jnp.float32)
BAD = [
    (tw.quantize, [((4,), jnp.float32)], "matrix"),
    (tw.quantize, [((4, 8), jnp.int32)], "i32"),
    (functools.partial(tw.quantize, recipe="block"), [X], "block"),
    (functools.partial(tw.quantize, dtype=jnp.int8), [X], "int8"),
    (functools.partial(tw.quantize, recipe="mx1x32", axis_name="tp"), [X], "ranks share none"),
    (lambda x: tw.quantize(x).dequantize(jnp.int32), [X], "i32"),
    (lambda d, s: tw.QTensor(d, s, "tensor").dequantize(), [X, ((1,), jnp.float32)], "codes.*f32"),
    (
        lambda d, s: tw.QTensor(d, s, "block1x128").dequantize(),
        [((4, 256), jnp.float8_e4m3fn), ((4, 3), jnp.float32)],
        "scales",
    ),
    (
        lambda d, s: tw.QTensor(d, s, "mx1x32").dequantize(),
        [((4, 256), jnp.float8_e4m3fn), ((4, 8), jnp.float32)],
        "scales",
    ),
    (
        lambda d, s: tw.QTensor(d, s, "rows").dequantize(),
        [((4, 256), jnp.float8_e4m3fn), ((4, 8), jnp.float32)],
        "rows",
    ),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_what_does_not_fit(case):
    f, shapes, text = BAD[case]
    with pytest.raises(tilewire.InvalidArgument, match=text):
        jax.eval_shape(f, *(jax.ShapeDtypeStruct(s, d) for s, d in shapes))


def test_an_axis_outside_of_shard_map(world):
    with pytest.raises(tilewire.InvalidArgument, match="shard_map"):
        tw.quantize(jnp.ones((2, 2)), axis_name="tp")


def codes_of(x):
    return tw.quantize(x).data


def values_of(x):
    return tw.QTensor(x.astype(jnp.float8_e4m3fn), jnp.ones(1), "tensor").dequantize()


REFUSED = {
    "vmap": (lambda f, x: jax.vmap(f)(x[None]), "{}.*vmap"),
    "jvp": (lambda f, x: jax.jvp(f, (x,), (x,)), "{}: a QTensor has no gradient"),
    "export": (
        lambda f, x: export.export(jax.jit(f))(jax.ShapeDtypeStruct(x.shape, x.dtype)),
        "{} cannot be exported",
    ),
}


@pytest.mark.parametrize("how", list(REFUSED))
@pytest.mark.parametrize("what", ["quantize", "dequantize"])
def test_what_is_refused_by_name(how, what):
    call, text = REFUSED[how]
    f = {"quantize": codes_of, "dequantize": values_of}[what]
    refused = (tilewire.Unsupported, tilewire.InvalidArgument, TypeError)
    with pytest.raises(refused, match=text.format(what)):
        call(f, jnp.ones((4, 8)))
