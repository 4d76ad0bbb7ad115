"""Jobs of JAX whose processes end, differ, or stop in unusual ways: each test starts its own."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

BEGIN = """
import os, sys, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
import tilewire, tilewire.jax as tw
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if size > 1:
    jax.distributed.initialize(os.environ["PLACE"], size, rank)
mesh = jax.sharding.Mesh(jax.devices(), ("x",))
def begin(**more):
    return tw.init(mesh, **{"timeout_s": 60, **more})
def program(f, *args):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P("x"), check_vma=False))
def gather(x):
    return tw.all_gather(x, "x")[None]
"""

README = pathlib.Path(__file__).parents[2].joinpath("README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.S)


def job(size, text, limit=90, devices=1):
    """Runs a program in `size` processes: their exit codes and what they printed."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{s.getsockname()[1]}"
    flags = f"--xla_force_host_platform_device_count={devices}"
    more = dict(PLACE=place, WORLD_SIZE=str(size), JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BEGIN + text],
            env=dict(os.environ, RANK=str(r), **more),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for r in range(size)
    ]
    end = time.monotonic() + limit
    done = []
    try:
        for p in processes:
            out, _ = p.communicate(timeout=max(0.1, end - time.monotonic()))
            done.append((p.returncode, out))
    except subprocess.TimeoutExpired:
        for p in processes:
            if p.poll() is None:
                os.killpg(p.pid, signal.SIGKILL)
        rest = "\n".join(p.communicate()[0] or "" for p in processes)
        pytest.fail(f"the job did not end in {limit} s:\n{rest}")
    return done


def all_good(done):
    for code, out in done:
        assert code == 0, out
    return [out for _, out in done]


def test_a_process_that_compiles_something_else_is_named():
    done = job(
        2,
        """
begin()
shape = (4, 8) if rank == 0 else (4, 9)
start = time.monotonic()
try:
    program(gather)(jnp.zeros(shape)).block_until_ready()
except Exception as e:
    took = time.monotonic() - start
    text = str(e)
try:
    tw.check()
except (tilewire.Mismatch, tilewire.Aborted) as e:
    print(type(e).__name__, took, text)
    os._exit(0)
""",
    )
    # XLA may have said before that it compiled slowly.
    texts = all_good(done)
    lines = [line for text in texts for line in text.splitlines()]
    outs = [line for line in lines if line.startswith(("Mismatch", "Aborted"))]
    assert len(outs) == 2 and any(o.startswith("Mismatch") for o in outs), texts
    assert any("4,8" in o.replace(" ", "") and "4,9" in o.replace(" ", "") for o in texts), texts
    assert all(float(o.split()[1]) < 10 for o in outs), texts


def test_a_killed_process_is_named_within_two_seconds():
    done = job(
        3,
        """
begin()
g = program(gather)
x = jnp.ones((2, 3))
g(x).block_until_ready()
if rank == 1:
    time.sleep(0.5)
    os.kill(os.getpid(), 9)
start = time.monotonic()
try:
    while True:
        g(x).block_until_ready()
        start = time.monotonic()
except Exception as e:
    took = time.monotonic() - start
    try:
        tw.check()
    except tilewire.PeerDead as dead:
        print("peer", dead.peer, "after", took, "in", type(e).__name__, flush=True)
        os._exit(0)
""",
    )
    for r in (0, 2):
        code, out = done[r]
        # A program of one device runs in the caller's thread, and fails with another type.
        found = re.search(r"peer 1 after ([\d.]+) in (JaxRuntimeError|ValueError)", out)
        assert code == 0 and found, out
        assert float(found[1]) < 2


def test_an_expert_that_does_not_exist_ends_the_world_on_all_devices():
    """One rank's call fails while it runs: the others hear of it, also in later calls."""
    done = job(
        1,
        """
begin()
group = tw.EpGroup("x", num_experts=4, max_tokens=2, hidden=4, top_k=1, dtype=jnp.float32)
buf = group.buffer()
def f(x):
    idx = jnp.where(jax.lax.axis_index("x") == 1, 99, 0) * jnp.ones((2, 1), jnp.int32)
    rows, _, _, handle = tw.ep_dispatch(buf, x, idx)
    return tw.all_reduce(tw.ep_combine(buf, rows, handle), "x")[None]
start = time.monotonic()
try:
    program(f)(jnp.ones((2, 4))).block_until_ready()
except jax.errors.JaxRuntimeError as e:
    assert "ep" in str(e), e
    took = time.monotonic() - start
try:
    tw.check()
except tilewire.InvalidArgument as e:
    assert took < 20, took
    print(e.rank, str(e))
""",
        devices=2,
    )
    assert "99" in all_good(done)[0]


def test_a_local_call_that_fails_ends_the_world_too():
    """Else the other ranks would wait for this one in the call behind it."""
    done = job(
        1,
        """
begin()
def f(x):
    n = jnp.where(jax.lax.axis_index("x") == 1, 99, 1)
    y = tw.grouped_gemm(x, jnp.ones((2, 4, 4)), jnp.stack([n, n]))
    return tw.all_reduce(y, "x")[None]
start = time.monotonic()
try:
    program(f)(jnp.ones((2, 4))).block_until_ready()
except Exception as e:
    took = time.monotonic() - start
try:
    tw.check()
except tilewire.Error as e:
    assert took < 20, took
    print(e.op, str(e))
""",
        devices=2,
    )
    assert all_good(done)[0].startswith("grouped_gemm")


def test_processes_that_end_without_a_word_do_not_hang():
    for text in (
        "begin()\nprint(program(gather)(jnp.ones((2, 3))).sum())",
        "begin()\nprogram(gather)(jnp.ones((2, 3)))",
        "w = begin()\nprogram(gather)(jnp.ones((2, 3))).block_until_ready()\nw.finalize()",
    ):
        all_good(job(2, text, devices=2))


def test_a_fork_is_refused():
    done = job(
        1,
        """
w = begin()
program(gather)(jnp.ones((2, 3))).block_until_ready()
pid = os.fork()
if pid == 0:
    try:
        w.check()
    except tilewire.Stale:
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
program(gather)(jnp.ones((2, 4))).block_until_ready()
""",
        devices=2,
    )
    all_good(done)


def test_before_there_is_a_world():
    done = job(
        1,
        """
try:
    program(gather)(jnp.ones((2, 3)))
except tw.Stale as e:
    assert "init" in str(e)
    print("stale")
begin().finalize()
try:
    tw.check()
except tw.Stale:
    print("stale")
""",
    )
    assert all_good(done)[0].split() == ["stale", "stale"]


def test_a_compilation_that_comes_from_the_cache():
    """The text of a call holds nothing of the run: a second job finds its programs compiled."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        text = f"""
jax.config.update("jax_compilation_cache_dir", {folder!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
from jax._src import monitoring
hits = []
monitoring.register_event_listener(lambda name, **_: hits.append(name))
begin()
y = program(gather)(jnp.arange(6.0).reshape(2, 3))
for shard in y.addressable_shards:
    np.testing.assert_array_equal(np.asarray(shard.data)[0, -1], [3.0, 4.0, 5.0])
print("hits", sum("cache_hits" in n for n in hits))
"""
        for _ in range(2):
            outs = all_good(job(1, text, devices=2))
        assert int(outs[0].split()[-1]) >= 1, outs


def test_nothing_of_the_framework_moves_data_in_an_operation():
    import ast

    import tilewire

    root = pathlib.Path(tilewire.__file__).parent / "jax"
    banned = {"psum", "psum_scatter", "pmean", "ppermute", "pshuffle", "process_allgather"}
    sources = sorted(root.glob("*.py"))
    assert len(sources) >= 7
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value)
                assert node.attr not in banned, (path, node.lineno)
                lax = {"all_gather", "all_to_all"} if owner.endswith("lax") else set()
                assert node.attr not in lax, (path, node.lineno)


def test_arrays_are_positional_and_the_rest_by_keyword():
    import inspect

    import tilewire.jax as tw

    data = {"x", "w", "q", "k", "v", "y", "buf", "topk_idx", "topk_weights", "handle", "weights"}
    data |= {"rows", "row_map"}
    for name in tw.__all__:
        f = getattr(tw, name)
        if not inspect.isfunction(f):
            continue
        kinds = inspect.Parameter
        parameters = inspect.signature(f).parameters.values()
        positional = [p.name for p in parameters if p.kind == kinds.POSITIONAL_OR_KEYWORD]
        more = {"axis_name", "splits", "m_splits", "mesh", "world", "recipe"}
        assert set(positional) <= data | more, (name, positional)


def test_worlds_of_other_devices_do_not_meet():
    """Two halves of a job at a time, and a world of one half more than of the other before that."""
    done = job(
        4,
        """
half = [d for d in jax.devices() if d.process_index // 2 == rank // 2]
mesh = jax.sharding.Mesh(np.array(half), ("x",))
if rank < 2:
    begin().finalize()
with begin() as world:
    x = jax.make_array_from_callback(
        (2, 4),
        jax.sharding.NamedSharding(mesh, P("x")),
        lambda at: np.full((1, 4), rank, np.float32),
    )
    f = jax.shard_map(gather, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    y = np.asarray(jax.jit(f)(x).addressable_shards[0].data)
    print("rows", y[0, :, 0].tolist())
mesh = jax.sharding.Mesh(jax.devices(), ("x",))
with begin() as world:
    print("all", world.size)
""",
    )
    outs = all_good(done)
    for rank, out in enumerate(outs):
        first = rank // 2 * 2
        assert f"rows [{first}.0, {first + 1}.0]" in out and "all 4" in out, out


def test_a_coordinator_that_is_stopped_is_a_timeout_that_names_it():
    done = job(
        2,
        """
import signal, subprocess
from jax._src import distributed
store = distributed.global_state.client
if rank == 0:
    store.key_value_set("server", str(os.getpid()))
    store.blocking_key_value_get("stop now", 60_000)
    # The answer to the other rank's `set` comes from this process, and is on its way.
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGSTOP)
server = int(store.blocking_key_value_get("server", 60_000))
# Killed once this process has ended.
killer = subprocess.Popen(["sh", "-c", f"read line; kill -KILL {server}"], stdin=subprocess.PIPE)
store.key_value_set("stop now", "")
while open(f"/proc/{server}/stat").read().rsplit(")", 1)[1].split()[0] != "T":
    time.sleep(0.01)
start = time.monotonic()
try:
    begin(timeout_s=4)
except tilewire.Timeout as e:
    print("after", time.monotonic() - start, e.phase, e, flush=True)
# What JAX does at the end waits for the coordinator, too.
os._exit(0)
""",
    )
    assert done[0][0] == -9
    (out,) = all_good(done[1:])
    found = re.search(r"after ([0-9.]+) rendezvous (.*)", out)
    assert found and 3 < float(found[1]) < 8, out
    assert "coordinator of jax.distributed at 127.0.0.1" in found[2], out


def test_the_example_of_the_readme():
    (example,) = [e for e in EXAMPLES if "import tilewire.jax" in e]
    behind = """
draw = lambda *shape: jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32) / 4
x, up, down = draw(8, 16), draw(32, 16), draw(16, 32)
want = x + jax.nn.gelu(x @ up.T) @ down.T
print("error", float(jnp.abs(f(x, up, down) - want).max()))
"""
    ((code, out),) = job(1, example + behind, devices=2)
    assert code == 0 and float(re.search(r"error (\S+)", out)[1]) < 1e-5, out
