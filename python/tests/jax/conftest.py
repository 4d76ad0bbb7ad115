"""The same session on 1, 2, 4 or 8 devices of one process, or on several processes.

TW_JAX_DEVICES says how many devices each process has (default: 2). Under `tests/run.py N` the
session runs in N processes, which meet through jax.distributed: then every process runs the same
tests in the same order, and looks at its own shards.
"""

import os

DEVICES = int(os.environ.get("TW_JAX_DEVICES", 2))
PROCESSES = int(os.environ.get("WORLD_SIZE", 1))
PLATFORM = os.environ.get("TW_JAX_PLATFORM", "cpu")
# Callbacks to Python need the CPU's devices beside a GPU's.
os.environ["JAX_PLATFORMS"] = PLATFORM if PLATFORM == "cpu" else f"{PLATFORM},cpu"
flags = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={DEVICES}"

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

import tilewire.jax as tw  # noqa: E402

# On a GPU XLA's own products of f32 are of TF32 by default.
jax.config.update("jax_default_matmul_precision", "highest")

# What a wait for a peer may last: ranks take turns on few cores.
TIMEOUT_S = 60.0

if PROCESSES > 1:
    # Processes of one host have its GPUs in turn.
    first = int(os.environ["RANK"]) * DEVICES
    own = None if PLATFORM == "cpu" else list(range(first, first + DEVICES))
    jax.distributed.initialize(
        coordinator_address=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        num_processes=PROCESSES,
        process_id=int(os.environ["RANK"]),
        local_device_ids=own,
    )


# What differs most with the number of devices, one for each part; in float32.
QUICK = (
    "test_all_gather[",
    "test_all_reduce[tp-sum",
    "test_all_to_all[tp-",
    "test_rows_that_differ",
    "test_ag_gemm_and_its_gradients[float32-True",
    "test_gemm_rs_and_its_gradients[float32-True",
    "test_gemm_ar_and_its_gradients[float32-",
    "test_order.py",
    "test_layers_and_their_gradients[scan]",
    "test_donation",
    "test_a_layer_of_experts_and_its_gradients[4-combine-float32",
    "test_microbatches_in_flight",
    "test_on_each_device[float32",
    "test_each_strategy[None",
    "test_a_second_world",
)


def pytest_collection_modifyitems(config, items):
    """With TW_JAX_QUICK a choice of the tests."""
    if os.environ.get("TW_JAX_QUICK"):

        def chosen(i):
            return any(q in i.nodeid for q in QUICK) and "float16" not in i.nodeid

        out = [i for i in items if not chosen(i)]
        config.hook.pytest_deselected(items=out)
        items[:] = [i for i in items if chosen(i)]


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
