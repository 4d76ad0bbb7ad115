"""XLA runs calls that do not depend on each other in any order: each must meet its own peers."""

import collections
import functools
import gc
import time

import jax
import jax.numpy as jnp
import numpy as np
from dense import ALL, equal, put, run, shard_map
from jax.sharding import PartitionSpec as P

import tilewire.jax as tw

BOTH = ("dp", "tp")
# Large enough that the CPU's runtime does not run everything in the order of the program.
COLS = 512


class Delays:
    """Callbacks that sleep for a while that depends on device and step, and note their order."""

    def __init__(self):
        self.order = collections.defaultdict(list)

    def at(self, which, x, step):
        """``x``, whole numbers below 2**24, after a while."""

        def sleep(x, device, step):
            self.order[int(device), int(step)].append(which)
            time.sleep(((7919 * int(device) + 104729 * which + 1299709 * int(step)) % 97) * 3e-6)
            return np.asarray(x) - 1

        device = jax.lax.axis_index(BOTH)
        # Programs for several GPUs do not compile in jax 0.11 where a callback's operand is a
        # slice: XLA's rewriter of slices refuses its tuple of results.
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(sleep, out, x + 1, device, step)

    def check(self, mesh):
        """Devices of this process came to the calls in different orders: else nothing was tested.
        Two devices alone may keep in step."""
        orders = collections.defaultdict(set)
        for (_, step), order in self.order.items():
            orders[step].add(tuple(order))
        if len(mesh.local_devices) > 2:
            assert any(len(o) > 1 for o in orders.values())


def test_a_thousand_pairs_of_equal_calls(world, mesh, rng):
    """The calls of a pair have the same shapes and neither needs the other; each device comes to
    them at its own time. What one of them gets of the other's would be seen: all values differ."""
    n, steps, pairs = world.size, 40, 25
    delays = Delays()
    start = rng.permutation(2 * pairs * n * COLS).astype(np.float32).reshape(n, pairs, 2, COLS)

    def f(late, x, step):
        out = []
        for p in range(pairs):
            pair = [delays.at(2 * p + i, x[0, p, i], step) if late else x[0, p, i] for i in (0, 1)]
            out.append([tw.all_gather(t[None] + 1.0, BOTH) for t in pair])
        out = jnp.stack([jnp.stack(o) for o in out])
        mine = jax.lax.dynamic_index_in_dim(out, jax.lax.axis_index(BOTH), 2, False)
        return mine[None], out[None]

    # Not in a loop of the program, whose body XLA runs in the order in which it is written. A
    # callback costs more than a call, so that a tenth of the steps has them.
    part = lambda late: functools.partial(f, late)  # noqa: E731
    specs = (ALL, P()), (ALL, ALL)
    fast, slow = (jax.jit(shard_map(part(late), mesh, *specs, False)) for late in (False, True))
    x = put(mesh, start, ALL)
    for step in range(steps):
        x, seen = (slow if step % 10 == 0 else fast)(x, step)
        want = start.transpose(1, 2, 0, 3) + step + 1
        equal(seen, np.broadcast_to(want, (n, *want.shape)))
    equal(x, start + steps)
    delays.check(mesh)
    world.check()


def test_many_calls_at_once(world, mesh, rng):
    """Dozens of independent calls in one program: more than XLA has threads."""
    n, num = world.size, 48
    delays = Delays()
    x = rng.integers(0, 1 << 20, (n, num, COLS)).astype(np.float32)

    def f(x):
        rows = [delays.at(i, x[0, i], 0) for i in range(num)]
        return jnp.stack([tw.all_gather(r[None], BOTH) for r in rows])[None]

    y = run(f, mesh, (ALL,), ALL, put(mesh, x, ALL), check_vma=False)
    equal(y, np.broadcast_to(x.swapaxes(0, 1), (n, num, n, COLS)))
    delays.check(mesh)
    world.check()


def test_slices_as_operands_and_results(world, mesh, rng):
    """XLA on GPUs reads slices and writes parts of an array in place where a call allows it."""
    n, num = world.size, 8
    x = rng.integers(0, 1 << 20, (n, num, COLS)).astype(np.float32)

    def f(x, out):
        for i in range(num):
            part = jax.lax.dynamic_slice_in_dim(x, num - 1 - i, 1, 1)
            out = jax.lax.dynamic_update_slice_in_dim(out, tw.all_reduce(part, BOTH), i, 1)
        return out

    zeros = np.zeros_like(x)
    y = run(f, mesh, (ALL, ALL), ALL, put(mesh, x, ALL), put(mesh, zeros, ALL), check_vma=False)
    equal(y, np.broadcast_to(x.sum(0, keepdims=True)[:, ::-1], x.shape))
    world.check()


def test_a_function_that_is_called_twice(world, mesh, rng):
    """JAX lowers it once; the compiled program has two calls, and each has its own peers."""
    n = world.size
    delays = Delays()
    inner = jax.jit(lambda x: tw.all_reduce(x, BOTH))
    x, y = (rng.integers(0, 1 << 10, (n, 1, COLS)).astype(np.float32) for _ in range(2))

    def f(x, y):
        a, b = inner(delays.at(0, x, 0)), inner(delays.at(1, y, 0))
        return a, b

    g = jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=(ALL, ALL), out_specs=(ALL, ALL), check_vma=False)
    )
    args = put(mesh, x, ALL), put(mesh, y, ALL)
    lowered = g.lower(*args)
    assert lowered.as_text().count("@tilewire") == 1
    assert lowered.compile().as_text().count('custom_call_target="tilewire"') == 2
    for _ in range(20):
        a, b = g(*args)
        equal(a, np.broadcast_to(x.sum(0, keepdims=True), x.shape))
        equal(b, np.broadcast_to(y.sum(0, keepdims=True), y.shape))


def settled(world):
    """Bytes that are in use when all programs are gone, which they are once nobody runs them."""
    jax.clear_caches()
    gc.collect()
    used, end = world.used_bytes(), time.monotonic() + 10
    while time.monotonic() < end:
        time.sleep(0.3)
        if world.used_bytes() == used:
            break
        used = world.used_bytes()
    return used


def test_programs_that_go_give_their_memory_back(world, mesh, rng):
    x = put(mesh, rng.integers(0, 8, (world.size, 1000)).astype(np.float32), ALL)
    g = jax.jit(shard_map(lambda x: tw.all_reduce(x, BOTH), mesh, (ALL,), ALL, check_vma=False))
    # On a GPU that of layers of experts stays as long as the world.
    before = settled(world)
    g(x).block_until_ready()
    assert world.used_bytes() > before
    del g
    assert settled(world) == before


def test_calls_in_both_branches_and_loops(world, mesh, rng):
    n = world.size
    x = rng.integers(0, 8, (n, 2, 16)).astype(np.float32)

    def f(x):
        def step(i, v):
            more = lambda v: tw.all_reduce(v, BOTH)  # noqa: E731
            less = lambda v: -tw.all_reduce(v, BOTH) / n  # noqa: E731
            return jax.lax.cond(i % 2 == 0, more, less, v) / n

        return jax.lax.fori_loop(0, 5, step, x)

    y = run(f, mesh, (ALL,), ALL, put(mesh, x, ALL), check_vma=False)
    v = x.astype(np.float64)
    for i in range(5):
        total = np.broadcast_to(v.sum(0, keepdims=True), v.shape)
        v = (total if i % 2 == 0 else -total / n) / n
    from dense import close

    close(y, v, "y", 1e-5, 1e-6)


def test_programs_in_flight_while_others_are_compiled(world, mesh, rng):
    """Executions go on in the background while the next program's plans are made."""
    n = world.size
    x = rng.integers(0, 8, (n, 4)).astype(np.float32)
    arg = put(mesh, x, ALL)
    delays = Delays()
    outs = []

    def slow(x):
        def step(v, i):
            return tw.all_reduce(delays.at(0, v, i), BOTH) / n, None

        return jax.lax.scan(step, x, jnp.arange(20))[0]

    long = jax.jit(jax.shard_map(slow, mesh=mesh, in_specs=ALL, out_specs=ALL, check_vma=False))
    long(arg).block_until_ready()
    for i in range(6):
        outs.append(long(arg))
        f = lambda x: tw.all_gather(x + i, BOTH)  # noqa: E731, B023
        y = run(f, mesh, (ALL,), ALL, arg)
        equal(y, np.tile(x + i, (n, 1)))
    want = np.broadcast_to(x.sum(0, keepdims=True) / n, x.shape)
    for out in outs:
        from dense import close

        close(out, want, "long", 1e-5, 1e-5)


def test_collectives_of_jax_beside_ours(world, mesh, rng):
    n = world.size
    x = rng.integers(0, 8, (n, 4, COLS)).astype(np.float32)

    def f(x):
        def step(v, _):
            a = tw.all_reduce(v, BOTH) / n
            b = jax.lax.psum(v, BOTH) / n
            return (a + b) / 2, None

        return jax.lax.scan(step, x, None, length=30)[0]

    y = run(f, mesh, (ALL,), ALL, put(mesh, x, ALL), check_vma=False)
    from dense import close

    close(y, np.broadcast_to(x.astype(float).mean(0, keepdims=True), x.shape), "y", 1e-4, 1e-4)


def test_results_are_the_same_bits_each_time(world, mesh, rng):
    n = world.size
    x = rng.standard_normal((n * 8, 33)).astype(np.float32)
    w = rng.standard_normal((7, 33)).astype(np.float32)
    g = jax.jit(
        jax.shard_map(
            lambda x, w: tw.gemm_rs(x, w, BOTH), mesh=mesh, in_specs=(P(), P()), out_specs=P(BOTH)
        )
    )
    first = g(put(mesh, x, P()), put(mesh, w, P()))
    for _ in range(5):
        again = g(put(mesh, x, P()), put(mesh, w, P()))
        for a, b in zip(first.addressable_shards, again.addressable_shards):
            np.testing.assert_array_equal(np.asarray(a.data), np.asarray(b.data))
