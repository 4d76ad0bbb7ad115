"""Layers of tensor parallelism in JAX, beside the dense ones.

    python examples/python/jax_tp.py

On the CPU it divides them among 2 devices of this process; with JAX's own variables for several
processes (or `JAX_COORDINATOR`, `JAX_PROCESSES`, `JAX_PROCESS`) it does so among theirs. The gather
of the rows hides behind the first product of a layer, the sum of the results behind the second.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tilewire.jax as tw

# GPUs would round the inputs of the dense products to TF32.
jax.config.update("jax_default_matmul_precision", "highest")
LAYERS, HIDDEN, INNER, TOKENS = 4, 64, 256, 32
# Of x, and of the weights of all layers: rows of the first, columns of the second are divided.
SPECS = (P("tp"), P(None, "tp"), P(None, None, "tp"))


def layers(x, up, down):
    def layer(x, w):
        y = tw.ag_gemm(x, w[0], "tp", activation="gelu")  # all_gather(x) @ up.T, overlapped
        return x + tw.gemm_rs(y, w[1], "tp"), None  # reduce_scatter(y @ down.T), overlapped

    return jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, (up, down))[0]


def dense(x, up, down):
    for a, b in zip(up, down):
        x = x + jax.nn.gelu(x @ a.T, approximate=True) @ b.T
    return x


def main():
    if "JAX_COORDINATOR" in os.environ:
        env = os.environ
        place = env["JAX_COORDINATOR"], int(env["JAX_PROCESSES"]), int(env["JAX_PROCESS"])
        jax.distributed.initialize(*place)
    mesh = jax.sharding.Mesh(jax.devices(), ("tp",))
    with tw.init(mesh) as world:
        rng = np.random.default_rng(0)  # the same global arrays in all processes
        shapes = [(TOKENS * world.size, HIDDEN), (LAYERS, INNER, HIDDEN), (LAYERS, HIDDEN, INNER)]
        whole = [rng.standard_normal(s).astype(np.float32) / 8 for s in shapes]
        place = lambda x, spec: jax.make_array_from_callback(  # noqa: E731
            x.shape, NamedSharding(mesh, spec), lambda i: x[i]
        )
        f = jax.shard_map(layers, mesh=mesh, in_specs=SPECS, out_specs=P("tp"))
        loss = lambda f: lambda *args: jnp.square(f(*args)).mean()  # noqa: E731
        step = jax.jit(jax.value_and_grad(loss(f), argnums=(0, 1, 2)))
        value, grads = step(*map(place, whole, SPECS))
        want, wanted = jax.value_and_grad(loss(dense), argnums=(0, 1, 2))(*whole)
        np.testing.assert_allclose(value, want, rtol=1e-4)
        for got, ref in zip(grads, wanted):
            for shard in got.addressable_shards:
                mine = np.asarray(ref)[shard.index]
                np.testing.assert_allclose(np.asarray(shard.data), mine, rtol=1e-3, atol=1e-5)
        if jax.process_index() == 0:
            print(
                f"{world.size} devices of {jax.process_count()} processes agree with dense layers"
            )


if __name__ == "__main__":
    main()
