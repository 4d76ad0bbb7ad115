"""Handlers of XLA's calls on two emulated devices of one process, eager and captured."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

JOB = pathlib.Path(__file__).with_name("jax_job.py")
SIZE, ROWS, N, K, TOKENS, EXPERTS = 2, 8, 16, 32, 6, 4


@pytest.fixture(scope="module")
def operands():
    """Random integers: every sum is exact, so that results are compared bit for bit."""
    rng = np.random.default_rng(21)
    draw = lambda *shape: rng.integers(-4, 5, shape).astype(np.float32)  # noqa: E731
    idx = np.stack([[rng.permutation(EXPERTS)[:2] for _ in range(TOKENS)] for _ in range(SIZE)])
    x, w, tokens = draw(2, SIZE, ROWS, K), draw(SIZE, N, K), draw(SIZE, TOKENS, K)
    return {"x": x, "w": w, "tokens": tokens, "idx": idx.astype(np.int32)}


@pytest.fixture(scope="module")
def results(operands, tmp_path_factory):
    if "TW_DEVICES" not in os.environ:
        pytest.skip("needs the driver whose devices are emulated")
    folder = tmp_path_factory.mktemp("job")
    np.savez(folder / "operands.npz", **operands)
    command = [sys.executable, str(JOB), str(folder)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    done = subprocess.run(command, timeout=150, **pipes)
    assert done.returncode == 0, done.stdout
    return np.load(folder / "results.npz")


@pytest.mark.parametrize("device", range(SIZE))
def test_calls_on_a_device(operands, results, device):
    """Two steps that were called, and the same two replayed."""
    assert str(results["kind"]) == "vmm" and int(results["used"]) > 0
    x, w = operands["x"], operands["w"]
    for i in range(4):
        whole = x[i % 2].reshape(-1, K)
        parts = [whole @ w[r].T @ w[r] for r in range(SIZE)]
        own = slice(device * ROWS, (device + 1) * ROWS)
        np.testing.assert_array_equal(results[f"whole{device}"][i], whole)
        np.testing.assert_array_equal(results[f"products{device}"][i], whole @ w[device].T)
        np.testing.assert_array_equal(results[f"sums{device}"][i], sum(parts)[own])
        # Each token went to two experts, whose rows came back as they were.
        np.testing.assert_array_equal(results[f"back{device}"][i], 2 * operands["tokens"][device])
