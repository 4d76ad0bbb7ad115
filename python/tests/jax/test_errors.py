"""What does not fit raises when it is traced, by its type and with the reason; the world goes
on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import ALL, equal, put, run, shard_map
from jax.sharding import PartitionSpec as P

import tilewire
import tilewire.jax as tw

BOTH = ("dp", "tp")


@pytest.fixture(autouse=True)
def goes_on(world, mesh):
    yield
    x = np.arange(world.size, dtype=np.float32)
    equal(
        run(lambda x: tw.all_gather(x, BOTH), mesh, (ALL,), ALL, put(mesh, x, ALL)),
        np.tile(x, world.size),
    )
    world.check()


def traced(mesh, f, *shapes):
    """Traces ``f`` with arrays of these shapes on each rank."""
    args = [jax.ShapeDtypeStruct(s, d) for s, d in shapes]
    specs = tuple(P() for _ in args)
    return jax.eval_shape(shard_map(f, mesh, specs, P(), check_vma=False), *args)


F32, BF16, F64, I32 = jnp.float32, jnp.bfloat16, jnp.float64, jnp.int32
BAD = [
    (lambda x, w: tw.ag_gemm(x, w, "tp"), [((2, 8), F32), ((4, 6), F32)], "columns"),
    (lambda x, w: tw.ag_gemm(x, w, "tp"), [((2, 8), F32), ((4, 8), BF16)], "bf16"),
    (lambda x, w: tw.ag_gemm(x, w, "tp"), [((2, 8), I32), ((4, 8), I32)], "i32"),
    (
        lambda x, w: tw.ag_gemm(x, w, "tp", activation="sine"),
        [((2, 8), F32), ((4, 8), F32)],
        "sine",
    ),
    (
        lambda x, w: tw.ag_gemm(x, w, "tp", algo="fastest"),
        [((2, 8), F32), ((4, 8), F32)],
        "fastest",
    ),
    (lambda x, w: tw.ag_gemm(x, w, "tp", rows=[9] * 99), [((2, 8), F32), ((4, 8), F32)], "rows"),
    (lambda x, w: tw.ag_gemm(x, w, "tp", bias=jnp.ones(5)), [((2, 8), F32), ((4, 8), F32)], "bias"),
    (lambda x, w: tw.gemm_rs(x, w, "tp", wire="i8"), [((8, 8), F32), ((4, 8), F32)], "i8"),
    (lambda x, w: tw.gemm_ar(x, w, "tp"), [((8,), F32), ((4, 8), F32)], "dimensions"),
    (lambda x: tw.all_reduce(x, "tp"), [((8,), I32)], "i32"),
    (lambda x: tw.all_reduce(x, "tp", op="max"), [((8,), F32)], "max"),
    (lambda x: tw.reduce_scatter(x, "tp", rows=[1]), [((999,), F32)], "rows"),
    (lambda x: tw.all_gather(x, "tp"), [((), F32)], "dimensions"),
    (lambda x: tw.all_gather(x, "tp"), [((2,), jnp.complex64)], "complex64"),
    (lambda x: tw.all_gather(x, "pp"), [((2,), F32)], "no axis 'pp'"),
    (lambda x: tw.all_gather(x, ("tp", "tp")), [((2,), F32)], "axis_name"),
    (lambda x: tw.all_to_all(x, [[1]] * 99, "tp"), [((2,), F32)], "splits"),
    (lambda q: tw.cp_attention(q, q, q, "tp"), [((3,), F32)], "heads"),
    (lambda q: tw.cp_attention(q, q, q, "tp", layout="spiral"), [((8, 2, 8), F32)], "spiral"),
    (lambda q: tw.attention(q, q, q, cu_seqlens_q=[0, 99]), [((8, 2, 8), F32)], "99|offset|row"),
    (
        lambda x, w, m: tw.grouped_gemm(x, w, m),
        [((4, 8), F32), ((2, 4, 8), F32), ((3,), I32)],
        "splits",
    ),
    (
        lambda x, w, m: tw.grouped_gemm(x, w, m),
        [((4, 8), F32), ((2, 4, 6), F32), ((2,), I32)],
        "shape",
    ),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_what_does_not_fit(world, mesh, case):
    f, shapes, text = BAD[case]
    with pytest.raises(tilewire.Error, match=text) as e:
        traced(mesh, f, *shapes)
    assert isinstance(e.value, (ValueError, tilewire.Unsupported))


def test_errors_say_what_and_where(world, mesh):
    with pytest.raises(tilewire.InvalidArgument) as e:
        traced(mesh, lambda x: tw.all_reduce(x, "tp"), ((4,), I32))
    assert isinstance(e.value, ValueError) and e.value.op == "all_reduce" and "i32" in str(e.value)


def test_outside_of_shard_map(world):
    with pytest.raises(tilewire.InvalidArgument, match="shard_map"):
        tw.all_gather(jnp.ones(2), "tp")
    with pytest.raises(tilewire.InvalidArgument, match="shard_map"):
        jax.jit(lambda x: tw.all_gather(x, "tp"))(jnp.ones(2))


def test_only_some_axes_are_manual(world, mesh):
    f = jax.shard_map(
        lambda x: tw.all_gather(x, "tp"),
        mesh=mesh,
        in_specs=P("tp"),
        out_specs=P(),
        axis_names={"tp"},
        check_vma=False,
    )
    with pytest.raises(tilewire.InvalidArgument, match="not manual"):
        jax.jit(f)(jnp.ones(mesh.shape["tp"]))


def test_another_mesh(world, mesh):
    devices = mesh.devices.reshape(-1)
    f = lambda x: tw.all_gather(x, "tp")  # noqa: E731
    other = jax.sharding.Mesh(devices, ("tp",))
    with pytest.raises(tilewire.InvalidArgument, match="this mesh is"):
        run(f, other, (P(),), P(), np.ones(2, np.float32), check_vma=False)
    if len(devices) > 1:
        turned = jax.sharding.Mesh(mesh.devices[:, ::-1], mesh.axis_names)
        with pytest.raises(tilewire.InvalidArgument, match="devices"):
            run(f, turned, (P(),), P(), np.ones(2, np.float32), check_vma=False)


def test_worlds_that_cannot_be_made(world, mesh):
    with pytest.raises(tilewire.InvalidArgument, match="Mesh"):
        tw.init(jax.devices())
    with pytest.raises(tilewire.InvalidArgument):
        tw.init(mesh, backend="vmm" if mesh.devices.flat[0].platform == "cpu" else "host")
    with pytest.raises(tilewire.InvalidArgument):
        tw.init(mesh, timeout_s=0)
    with pytest.raises(TypeError):
        import pickle

        pickle.dumps(world)


def test_a_call_that_needs_too_much_memory(world, mesh):
    """Refused when the program is compiled, on all ranks alike; the world goes on."""
    x = np.arange(world.size * 2, dtype=np.float32).reshape(-1, 2)
    with tw.init(mesh, heap_bytes=1 << 16, timeout_s=60) as small:
        f = lambda x: tw.all_reduce(x, BOTH, world=small)  # noqa: E731
        with pytest.raises(Exception, match="heap_bytes"):
            run(f, mesh, (P(),), P(), np.zeros((1 << 16, 4), np.float32), check_vma=False)
        small.check()
        y = run(f, mesh, (ALL,), ALL, put(mesh, x, ALL), check_vma=False)
        total = x.reshape(world.size, -1, 2).sum(0)
        equal(y, np.tile(total, (world.size, 1)))
        small.check()


def test_a_second_world_and_its_end(world, mesh):
    """Programs that were traced for a world that has ended say so, and can be traced again."""
    x = np.arange(world.size, dtype=np.float32)
    arg = put(mesh, x, ALL)
    for _ in range(3):
        with tw.init(mesh, timeout_s=60) as other:
            g = jax.jit(shard_map(lambda x: tw.all_gather(x, BOTH, world=other), mesh, (ALL,), ALL))
            equal(g(arg), np.tile(x, world.size))
        other.finalize()
        with pytest.raises(Exception, match="finalised"):
            g(arg).block_until_ready()
        with pytest.raises(tw.Stale):
            call = lambda x: tw.all_gather(x + 1, BOTH, world=other)  # noqa: B023, E731
            run(call, mesh, (ALL,), ALL, arg)


def test_splits_that_are_too_long_fail_when_they_run(world, mesh):
    """A call without other ranks: nothing ends but the program."""
    if mesh.devices.flat[0].platform != "cpu":
        pytest.skip("a GPU leaves out the rows that are too many: nobody waits for the splits")
    x, w = jnp.ones((4, 8)), jnp.ones((2, 3, 8))
    with pytest.raises(Exception, match="grouped_gemm"):
        tw.grouped_gemm(x, w, jnp.array([3, 3])).block_until_ready()
    y = tw.grouped_gemm(x, w, jnp.array([2, 1]))
    np.testing.assert_allclose(np.asarray(y), [[8.0] * 3] * 3 + [[0.0] * 3])
