"""The same session on every rank: `torchrun --nproc-per-node N -m pytest tests/spmd`.

All ranks run the same tests in the same order; a test is what one rank does of a job. With
TW_TEST_DEVICE=cuda the ranks share the GPUs there are.
"""

import os

import pytest
import torch
import torch.distributed as dist

import tilewire.torch as tw

# What a wait for a peer may last: ranks take turns on few cores, and the first call on a GPU
# compiles.
TIMEOUT_S = 120.0 if os.environ.get("TW_TEST_DEVICE") == "cuda" else 30.0


def pytest_configure(config):
    words = "needs(gpu, least_ranks, most_ranks, even): where a test applies; else it is left out"
    config.addinivalue_line("markers", words)


def applies(item, gpu, ranks):
    """Whether the marks of a test allow this device and number of ranks."""
    for mark in item.iter_markers("needs"):
        want = mark.kwargs
        if want.get("gpu", gpu) != gpu or (want.get("even") and ranks % 2):
            return False
        if not want.get("least_ranks", 1) <= ranks <= want.get("most_ranks", ranks):
            return False
    return True


def pytest_collection_modifyitems(config, items):
    """Leaves out what does not apply here. What applies and cannot run is skipped, and counted."""
    gpu = os.environ.get("TW_TEST_DEVICE") == "cuda"
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    out = [item for item in items if not applies(item, gpu, ranks)]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in out]


@pytest.fixture(scope="session")
def device():
    kind = os.environ.get("TW_TEST_DEVICE", "cpu")
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(kind)


@pytest.fixture(scope="session")
def world(device):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    w = tw.init(device=device, timeout_s=TIMEOUT_S)
    yield w
    w.finalize()
    dist.destroy_process_group()


@pytest.fixture
def gen():
    """Random numbers, the same on all ranks."""
    return torch.Generator().manual_seed(1234)
