"""`_native` on emulated devices, without torch: run by stage `python` where these are built.

Memory, streams and captures are the driver's own, made through ctypes; calls come from a thread
that did not make them. Two ranks are two processes, each on a device of its own.
"""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

RANK = pathlib.Path(__file__).with_name("rank.py")
SIZE, STEPS, ROWS, N, K = 2, 3, 8, 16, 32


def free_port():
    """The store of a job listens behind the port that is named."""
    while True:
        with socket.socket() as s, socket.socket() as behind:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
            try:
                behind.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return str(port)


@pytest.fixture(scope="module")
def operands():
    """Random integers: every sum is exact, so that results are compared bit for bit."""
    rng = np.random.default_rng(20)
    draw = lambda *shape: rng.integers(-4, 5, shape).astype(np.float32)  # noqa: E731
    documents = np.array([[0, 4, 4, 13], [0, 4, 5, 14], [0, 13, 13, 13], [0, 1, 6, 9]], np.int32)
    qkv = rng.standard_normal((3, 13, 2, 8)).astype(np.float32)
    return dict(x=draw(STEPS, SIZE, ROWS, K), w=draw(SIZE, N, K), documents=documents, qkv=qkv)


@pytest.fixture(scope="module")
def results(operands, tmp_path_factory):
    """What each rank of one job found."""
    if "TW_DEVICES" not in os.environ:
        pytest.skip("needs the driver whose devices are emulated")
    folder = tmp_path_factory.mktemp("job")
    np.savez(folder / "operands.npz", **operands)
    port, ranks = free_port(), []
    for r in range(SIZE):
        env = dict(os.environ, RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE=str(SIZE))
        env.update(LOCAL_WORLD_SIZE=str(SIZE), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        command = [sys.executable, str(RANK), str(folder)]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        ranks.append(subprocess.Popen(command, env=env, **pipes))
    try:
        said = [p.communicate(timeout=150)[0] for p in ranks]
    finally:
        for p in ranks:
            p.kill()
    for p, text in zip(ranks, said):
        assert p.returncode == 0, text
    return [np.load(folder / f"rank{r}.npz") for r in range(SIZE)]


def dense(operands, rank):
    """The whole x, this rank's products with it, and the rows of all products that it gets."""
    x = operands["x"].astype(np.float64).reshape(STEPS, SIZE * ROWS, K)
    products = [x @ w.T for w in operands["w"].astype(np.float64)]
    sums = sum(p @ w for p, w in zip(products, operands["w"].astype(np.float64)))
    return x, products[rank], sums[:, ROWS * rank : ROWS * rank + ROWS]


@pytest.mark.parametrize("way", ["eager", "replayed"])
def test_calls_by_raw_pointers_from_another_thread(operands, results, way):
    for rank, found in enumerate(results):
        for name, ref in zip(("whole", "products", "sums"), dense(operands, rank)):
            got = found[f"{way}_{name}"]
            assert got.dtype == np.float32 and np.array_equal(got, ref), (rank, name)


def test_a_replay_has_the_bits_of_the_eager_call(results):
    for found in results:
        for name in ("whole", "products", "sums"):
            assert found[f"replayed_{name}"].tobytes() == found[f"eager_{name}"].tobytes(), name


def attended(qkv, cu):
    """Causal attention of the documents in f64; zero behind the last one."""
    q, k, v = qkv.astype(np.float64)
    out = np.zeros_like(q)
    for a, b in zip(cu, cu[1:]):
        s = np.einsum("qhd,khd->hqk", q[a:b], k[a:b]) * q.shape[2] ** -0.5
        p = np.exp(np.where(np.tri(b - a, dtype=bool), s, -np.inf))
        out[a:b] = np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v[a:b])
    return out


@pytest.mark.parametrize("name", ["attention", "divided"])
def test_a_graph_of_attention_follows_its_offsets(operands, results, name):
    documents, rows = operands["documents"], operands["qkv"].shape[1]
    # By each rank, or by both, which have half of the rows each.
    outs, lses = ([found[f"{name}_{n}"] for found in results] for n in ("out", "lse"))
    if name == "divided":
        outs, lses = [np.concatenate(outs, 1)], [np.concatenate(lses, 2)]
    for out, lse in zip(outs, lses):
        eager, replayed = np.split(out, 2)
        lse, replayed_lse = np.split(lse, 2)
        for i, cu in enumerate(documents):
            if cu[-1] > rows:
                assert np.isnan(replayed[i]).all() and np.isnan(replayed_lse[i]).all()
                continue
            ref = attended(operands["qkv"], cu)
            np.testing.assert_allclose(replayed[i], ref, rtol=1e-5, atol=1e-5)
            if cu[-1] == rows:
                assert replayed[i].tobytes() == eager[i].tobytes()
                assert replayed_lse[i].tobytes() == lse[i].tobytes()
            else:
                assert not replayed[i][cu[-1] :].any()


def test_a_capture_made_no_plan(results):
    assert [int(found["plans"]) for found in results] == [5] * SIZE


WITHOUT = """
import tilewire
from tilewire import _native
def opened():
    with open("/proc/self/maps") as maps:
        return any("libcuda" in line for line in maps)
w = _native.world_of_environment("auto", None, None, 20.0, False)
w.finalize()
print("a world on the CPU:", opened())
tilewire.backends()
print("a look at what there is:", opened())
"""


def test_a_world_on_the_cpu_opens_no_library_of_cuda():
    """Here one could be opened, as a look at the backends shows."""
    if "TW_DEVICES" not in os.environ:
        pytest.skip("needs the driver whose devices are emulated")
    command = [sys.executable, "-c", WITHOUT]
    out = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert out.stdout == "a world on the CPU: False\na look at what there is: True\n", out
