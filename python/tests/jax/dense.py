"""What the tests compare with: dense arithmetic in f64 on global arrays, and the error bound."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def randn(rng, *shape, dtype="float32"):
    """Random values that ``dtype`` holds, as f64."""
    return rng.standard_normal(shape).astype(DTYPES[dtype]).astype(np.float64)


def put(mesh, x, spec, dtype=None):
    """A global array, of which each process makes its shards."""
    x = np.asarray(x)
    x = x.astype(DTYPES.get(dtype, dtype)) if dtype else x
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])


def shard_map(f, mesh, in_specs, out_specs, check_vma=True):
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


def run(f, mesh, in_specs, out_specs, *args, check_vma=True):
    """``f`` on the shards of ``args``, compiled."""
    return jax.jit(shard_map(f, mesh, in_specs, out_specs, check_vma))(*args)


def run_vjp(f, mesh, in_specs, out_specs, args, cotangents, check_vma=True):
    """Results of ``f``, and the gradients of ``args``."""
    g = shard_map(f, mesh, in_specs, out_specs, check_vma)

    @jax.jit
    def both(args, cotangents):
        out, back = jax.vjp(g, *args)
        return out, back(cotangents)

    return both(args, cotangents)


def dense_vjp(f, args, cotangents):
    """The same of a dense function, in f64."""
    with jax.enable_x64(True):
        args = [jnp.asarray(a, jnp.float64) for a in args]
        out, back = jax.vjp(f, *args)
        cotangents = jax.tree.map(lambda c: jnp.asarray(c, jnp.float64), cotangents)
        grads = back(cotangents)
        return jax.tree.map(np.asarray, (out, grads))


def product_bound(a, b, size, dtype):
    """The bound of a product a @ b whose partial results ``size`` ranks add."""
    k = a.shape[-1]
    wire = UNIT[dtype] if size > 1 else 0.0
    return (size * wire + 4 * UNIT["float32"] * k**0.5) * (np.abs(a) @ np.abs(b))


def shards_of(got, ref):
    """This process's pieces of a global array, and those of what it should be."""
    if got.shape != ref.shape:
        raise AssertionError(f"shape {got.shape}, not {ref.shape}")
    for s in got.addressable_shards:
        yield np.asarray(s.data).astype(np.float64), ref[s.index], s.index


def within(got, ref, bound, what):
    """Every element finite and within rounding of the output and ``bound``."""
    unit = UNIT[got.dtype.name]
    bound = np.broadcast_to(bound, ref.shape)
    for mine, want, index in shards_of(got, ref):
        if not np.isfinite(mine).all():
            raise AssertionError(f"{what}: {(~np.isfinite(mine)).sum()} elements are not finite")
        limit = unit * np.abs(want) + bound[index] + 1e-30
        worst = (np.abs(mine - want) / limit).max(initial=0.0)
        if worst > 1.0:
            raise AssertionError(f"{what}{index}: error is {worst:.3g} times the bound")


def close(got, ref, what, rtol=1e-4, atol=1e-4):
    """Every element near what it should be, on its own scale."""
    for mine, want, index in shards_of(got, ref):
        np.testing.assert_allclose(mine, want, rtol=rtol, atol=atol, err_msg=f"{what}{index}")


def equal(got, ref, what=""):
    for mine, want, index in shards_of(got, ref):
        np.testing.assert_array_equal(mine, want, err_msg=f"{what}{index}")


TOL = {"float32": (1e-4, 1e-4), "bfloat16": (4e-2, 1e-1)}


def size_of(mesh, axes):
    return int(np.prod([mesh.shape[a] for a in (axes if isinstance(axes, tuple) else (axes,))]))


def groups_of(mesh, axes):
    """Numbers of devices of the mesh, as [team, rank of it]."""
    axes = axes if isinstance(axes, tuple) else (axes,)
    names = list(mesh.axis_names)
    all_ids = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
    rest = [i for i, n in enumerate(names) if n not in axes]
    order = rest + [names.index(a) for a in axes]
    return all_ids.transpose(order).reshape(-1, size_of(mesh, axes))


AXES = ["tp", "dp", ("dp", "tp"), ("tp", "dp")]
ALL = P(("dp", "tp"))
act_of = {
    None: lambda z: z,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "swiglu": lambda z: jax.nn.silu(z[:, : z.shape[1] // 2]) * z[:, z.shape[1] // 2 :],
}
