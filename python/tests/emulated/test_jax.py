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
    gate = rng.integers(1, 4, (SIZE, TOKENS, 2)).astype(np.float32)
    return {"x": x, "w": w, "tokens": tokens, "idx": idx.astype(np.int32), "gate": gate}


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


@pytest.mark.parametrize("device", range(SIZE))
def test_permutations_on_a_device(operands, results, device):
    """There and back and the gradients, each by a map that its call has made from the choices."""
    x, gate = operands["tokens"][device], operands["gate"][device]
    for i in range(4):
        idx = operands["idx"][device][:: 1 - 2 * (i % 2)]
        rows = []
        for e in range(EXPERTS):
            mine = [tuple(at) for at in np.argwhere(idx == e)]
            rows += mine + [None] * (len(mine) % 2)
        splits = [((idx == e).sum() + 1) // 2 * 2 for e in range(EXPERTS)]
        own, own_w, d_own = np.zeros((16, K)), np.zeros(16), np.zeros((16, K))
        for r, at in enumerate(rows):
            if at is not None and r < 16:
                own[r], own_w[r], d_own[r] = x[at[0]], gate[at], gate[at] * x[at[0]]
        kept = np.zeros_like(gate)
        for at in filter(None, rows[:16]):
            kept[at] = 1
        got = {n: v[i] for n, v in results.items() if v.ndim and n.endswith(str(device))}
        found = lambda name: got[f"{name}{device}"]  # noqa: B023, E731
        np.testing.assert_array_equal(found("own"), own)
        np.testing.assert_array_equal(found("own_w"), own_w)
        ends = np.minimum(np.cumsum([0, *splits]), 16)
        dropped = (kept == 0).sum()
        numbers = [*np.diff(ends), len(rows), dropped]
        np.testing.assert_array_equal(found("counts"), [[n, 0] for n in numbers])
        weight = (kept * gate).sum(1, keepdims=True)
        np.testing.assert_array_equal(found("again"), weight * x)
        np.testing.assert_array_equal(found("dx"), kept.sum(1, keepdims=True) * x)
        np.testing.assert_array_equal(found("dw"), kept * gate)
        np.testing.assert_array_equal(found("d_own"), d_own)
        np.testing.assert_array_equal(found("d_gate"), kept * (x * x).sum(1, keepdims=True))


@pytest.mark.parametrize("device", range(SIZE))
def test_scales_on_a_device(operands, results, device):
    """One of all devices, those of each row, and the values again."""
    tokens = operands["tokens"]
    largest = np.abs(tokens).max()
    for i in range(4):
        np.testing.assert_array_equal(results[f"scale{device}"][i], [largest / np.float32(448)])
        rows = np.abs(tokens[device]).max(1, keepdims=True) / np.float32(448)
        np.testing.assert_array_equal(results[f"scales{device}"][i], rows)
        # Four bits hold 448 times a half, a quarter and three quarters.
        np.testing.assert_allclose(results[f"values{device}"][i], tokens[device], rtol=2.0**-4)
