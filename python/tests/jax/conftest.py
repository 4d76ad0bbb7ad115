"""The same session on 1, 2, 4 or 8 devices of one process, or on several processes.

TW_JAX_DEVICES says how many devices each process has (default: 2). Under `tests/run.py N` the session
runs in N processes, which meet through jax.distributed: then every process runs the same tests in
the same order, and looks at its own shards.
"""

import os

DEVICES = int(os.environ.get("TW_JAX_DEVICES", 2))
PROCESSES = int(os.environ.get("WORLD_SIZE", 1))
os.environ["JAX_PLATFORMS"] = os.environ.get("TW_JAX_PLATFORM", "cpu")
flags = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={DEVICES}"

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

import tilewire.jax as tw  # noqa: E402

# What a wait for a peer may last: ranks take turns on few cores.
TIMEOUT_S = 60.0

if PROCESSES > 1:
    jax.distributed.initialize(
        coordinator_address=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        num_processes=PROCESSES,
        process_id=int(os.environ["RANK"]),
    )


def pytest_collection_modifyitems(config, items):
    """With TW_JAX_QUICK only what differs with the number of devices: float32, and no local calls."""
    if os.environ.get("TW_JAX_QUICK"):
        left = ("float16", "test_errors.py", "test_local", "outside_of_shard_map", "refused_by_name")
        out = [i for i in items if any(word in i.nodeid for word in left)]
        config.hook.pytest_deselected(items=out)
        items[:] = [i for i in items if i not in out]


def pytest_report_header(config):
    return f"jax {jax.__version__}: {PROCESSES} processes, {DEVICES} devices each"


@pytest.fixture(scope="session")
def mesh():
    """Two axes, so that teams are parts of the world where there are enough devices."""
    devices = np.array(jax.devices())
    rows = 2 if len(devices) >= 4 else 1
    return jax.sharding.Mesh(devices.reshape(rows, -1), ("dp", "tp"))


@pytest.fixture(scope="session")
def world(mesh):
    with tw.init(mesh, timeout_s=TIMEOUT_S) as w:
        yield w


@pytest.fixture
def rng():
    """Random numbers, the same in all processes."""
    return np.random.default_rng(1234)
