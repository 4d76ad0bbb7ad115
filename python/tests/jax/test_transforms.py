"""What JAX does to programs: loops over layers, recomputation, donation, gradients inside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import ALL, close, dense_vjp, equal, put, randn, run, shard_map, size_of
from jax.sharding import PartitionSpec as P

import tilewire
import tilewire.jax as tw

LAYERS = 3


def tp_layers(mesh, rng):
    tp, dp = size_of(mesh, "tp"), size_of(mesh, "dp")
    m, d, h = 2 * tp * dp, 8, 6 * tp
    x = randn(rng, m, d)
    w1, w2 = randn(rng, LAYERS, h, d) / 4, randn(rng, LAYERS, d, h) / 4
    dy = randn(rng, m, d)
    specs = (P(("dp", "tp")), P(None, "tp"), P(None, None, "tp"))
    return (x, w1, w2), specs, dy


def layer(x, w):
    y = tw.ag_gemm(x, w[0], "tp", activation="gelu")
    return x + tw.gemm_rs(y, w[1], "tp")


def dense_layers(x, w1, w2):
    for i in range(LAYERS):
        x = x + jax.nn.gelu(x @ w1[i].T, approximate=True) @ w2[i].T
    return x


def variants():
    def scanned(body, **kw):
        return lambda x, w1, w2: jax.lax.scan(lambda x, w: (body(x, w), None), x, (w1, w2), **kw)[0]

    def unrolled(body):
        def f(x, w1, w2):
            for i in range(LAYERS):
                x = body(x, (w1[i], w2[i]))
            return x

        return f

    no_cse = functools.partial(jax.checkpoint, prevent_cse=False)
    keep = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
    return {
        "scan": scanned(layer),
        "scan, unrolled by 2": scanned(layer, unroll=2),
        "scan of checkpoints": scanned(no_cse(layer)),
        "checkpoints": unrolled(jax.checkpoint(layer)),
        "checkpoints without prevent_cse": unrolled(no_cse(layer)),
        "checkpoints with a policy": unrolled(keep(layer)),
        "one function": unrolled(jax.jit(layer)),
    }


@pytest.mark.parametrize("how", list(variants()))
def test_layers_and_their_gradients(world, mesh, rng, how):
    args, specs, dy = tp_layers(mesh, rng)
    ref, grads = dense_vjp(dense_layers, args, dy)
    from dense import run_vjp

    put_args = [put(mesh, a, s, "float32") for a, s in zip(args, specs)]
    cot = put(mesh, dy, specs[0], "float32")
    y, got = run_vjp(variants()[how], mesh, specs, specs[0], put_args, cot)
    close(y, ref, "y", 1e-3, 1e-3)
    for g, r, name in zip(got, grads, ("dx", "dw1", "dw2")):
        close(g, r, name, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_inside_of_shard_map(world, mesh, rng, check_vma):
    """Each rank's loss is of its own rows. Weights that are alike along "dp" get the sum of their
    gradients where JAX tracks that; elsewhere each rank has its part."""
    args, specs, _ = tp_layers(mesh, rng)
    dp = size_of(mesh, "dp")

    def f(x, w1, w2):
        loss = lambda *a: (variants()["scan"](*a) ** 2).sum()  # noqa: E731
        dx, d1, d2 = jax.grad(loss, (0, 1, 2))(x, w1, w2)
        return dx, d1[None], d2[None]

    put_args = [put(mesh, a, s, "float32") for a, s in zip(args, specs)]
    out = (specs[0], P("dp", None, "tp"), P("dp", None, None, "tp"))
    if check_vma:
        out = (specs[0], P(None, None, "tp"), P(None, None, None, "tp"))
    dx, d1, d2 = run(f, mesh, specs, out, *put_args, check_vma=check_vma)
    _, grads = dense_vjp(lambda *a: (dense_layers(*a) ** 2).sum(), args, np.ones(()))
    close(dx, grads[0], "dx", 1e-3, 5e-3)
    for got, ref in ((d1, grads[1]), (d2, grads[2])):
        if not check_vma:
            total = jax.jit(lambda t: t.sum(0, keepdims=True))(got)
            assert got.shape[0] == dp
            got = total
        close(got, ref[None], "dw", 1e-3, 2e-2)


def test_donation(world, mesh, rng):
    """An operand's memory may be a result's: the call has read it before."""
    n = world.size
    x = rng.integers(0, 9, (n, 4, 64)).astype(np.float32)
    f = shard_map(lambda x: tw.all_reduce(x, ("dp", "tp")), mesh, (ALL,), ALL, check_vma=False)
    g = jax.jit(f, donate_argnums=0)
    want = np.broadcast_to(x.sum(0, keepdims=True), x.shape)
    arg = put(mesh, x, ALL)
    for i in range(5):
        out = g(arg)
        assert arg.is_deleted()
        equal(out, want * float(n) ** i)
        arg = out


def test_without_jit(world, mesh, rng):
    x = rng.integers(0, 9, (world.size, 3)).astype(np.float32)
    f = shard_map(lambda x: 2 * tw.all_gather(x, ("dp", "tp")), mesh, (ALL,), ALL)
    equal(f(put(mesh, x, ALL)), np.tile(2 * x, (world.size, 1)))


def test_a_mesh_that_is_entered(world, mesh, rng):
    """`jax.set_mesh` in place of the argument, with arrays whose shardings are typed."""
    x = rng.integers(0, 9, (world.size, 3)).astype(np.float32)
    both = ("dp", "tp")
    with jax.set_mesh(mesh):
        f = jax.shard_map(lambda x: tw.all_gather(x, both), in_specs=ALL, out_specs=ALL)
        equal(jax.jit(f)(put(mesh, x, ALL)), np.tile(x, (world.size, 1)))


def test_what_jax_calls_abstract(world, mesh):
    """Shapes without execution make no plan."""
    f = shard_map(lambda x: tw.all_gather(x, ("dp", "tp")), mesh, (ALL,), P(), check_vma=False)
    used = world.used_bytes()
    out = jax.eval_shape(f, jax.ShapeDtypeStruct((world.size * 2, 3), jnp.bfloat16))
    assert out.shape == (world.size * 2, 3) and out.dtype == jnp.bfloat16
    jax.make_jaxpr(f)(jnp.zeros((world.size, 3)))
    jax.jit(f).lower(jnp.zeros((world.size, 3)))
    # Programs of other tests may go meanwhile.
    assert world.used_bytes() <= used


def per_shard(f):
    return lambda mesh, x: run(f, mesh, (ALL,), ALL, x)


REFUSED = {
    "vmap": (per_shard(jax.vmap(lambda x: tw.all_gather(x[None], "tp"))), "all_gather.*vmap"),
    "jvp": (
        per_shard(lambda x: jax.jvp(lambda x: tw.all_reduce(x, "tp"), (x,), (x,))[1]),
        "forward-mode",
    ),
    "second derivatives": (
        per_shard(
            lambda x: jax.grad(
                lambda x: jax.grad(lambda x: (tw.ag_gemm(x, x, "tp") ** 2).sum())(x).sum()
            )(x)
        ),
        "second derivatives",
    ),
}


@pytest.mark.parametrize("how", list(REFUSED))
def test_what_is_refused_by_name(world, mesh, how):
    call, text = REFUSED[how]
    with pytest.raises((tilewire.Unsupported, TypeError), match=text):
        call(mesh, put(mesh, np.ones((2 * world.size, 3), np.float32), ALL))
    world.check()


def test_export_is_refused_by_name(world, mesh):
    f = jax.jit(shard_map(lambda x: tw.all_gather(x, "tp"), mesh, (ALL,), ALL, check_vma=False))
    from jax import export

    with pytest.raises(tilewire.Unsupported, match="all_gather cannot be exported"):
        export.export(f)(jax.ShapeDtypeStruct((world.size, 3), jnp.float32))
