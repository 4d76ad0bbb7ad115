"""The configurations of `faults`."""

from configs import (
    ALL_PLACES,
    NOT_WATCHED,
    TWO_GPUS,
    Config,
    can_watch,
    doctor_says,
    first_devices,
    program,
    ranks_of,
    tilewire,
    up_to,
    why_not,
)
from judges import (
    by_either,
    by_finding,
    by_hint,
    by_ran,
    by_refusal,
    by_rows,
    by_rows_that_say,
    by_shared_gpu,
    by_survivors,
    by_warning,
    rows_but,
)

# Operations whose rank is stopped, a set of processes for some of them; and those whose rank is
# killed, each with its own.
STOPPED_OPS = ["0-5", "6-14", "15-24", "25-31", "32-39"]
KILLED_OPS = ["0-5", "6-14", "15-18", "19-20"]


def bad_input(n):
    """Places that are not as they should be: each works, or says what to do."""
    verify = tilewire("verify --backend vmm --json --op all_gather --dtype bf16")
    devices = first_devices(n).split(",")
    # Numbers that are no power of two. Where there are fewer GPUs, ranks share them: as processes,
    # whose kernels take turns, so that one that waits keeps none of another from being loaded or
    # run.
    for ranks in [3, 5, 6, 7]:
        shared = by_rows if ranks <= n else by_shared_gpu
        if ranks <= n:
            yield Config(f"ranks-{ranks}", [*verify, "--ranks", str(ranks)], by_rows)
        for op in ODD_WORLDS:
            argv = tilewire("verify --backend vmm --json --op", op, "--dtype bf16 --timeout-s 40")
            yield Config(
                f"ranks-{ranks}-{op}", ranks_of(ranks, *argv), shared, jit=op == "cp_attention"
            )
    if n > 1:
        turned = {"CUDA_VISIBLE_DEVICES": ",".join(reversed(devices))}
        yield Config("devices-permuted", [*verify, "--ranks", str(n)], by_rows, env=turned)
        processes = ranks_of(n, *verify)
        yield Config("devices-permuted-processes", processes, by_rows, env=turned)
        mine = f"$(echo {first_devices(n)} | cut -d, -f$((RANK + 1)))"
        each = f'export CUDA_VISIBLE_DEVICES={mine}; exec "$@"'
        yield Config(
            "one-device-visible-to-each", ranks_of(n, "bash", "-c", each, "bash", *verify), by_rows
        )
    one = {"CUDA_VISIBLE_DEVICES": devices[0]}
    yield Config("two-ranks-on-one-gpu", [*verify, "--ranks", "2"], by_shared_gpu, env=one)
    yield Config(
        "no-device", [*verify, "--ranks", "1"], by_refusal, env={"CUDA_VISIBLE_DEVICES": ""}
    )
    few = ["bash", "-c", 'ulimit -n 20; exec "$@"', "bash", *verify, "--ranks", "1"]
    yield Config("few-descriptors", few, by_either, preload=False)
    # Away from the kernels that were built, so that the cache is asked.
    compiled = ["bash", "-c", AWAY, "bash", program("tilewire"), *verify[1:], "--ranks", "1"]
    yield Config(
        "cache-not-writable", compiled, by_rows_that_say("compiled in every run"), jit=True
    )
    off = {name: "1" for name in ["NCCL_NVLS_ENABLE"]} | {
        name: "0" for name in ["NVSHMEM_DISABLE_NVLS"]
    }
    # NVRTC that cannot be loaded: the program is away from the kernels that were built, and has to
    # compile.
    alone = ["bash", "-c", ALONE, "bash", program("tilewire"), *verify[1:], "--ranks", "1"]
    yield Config("nvrtc-broken", alone, by_hint("nvrtc", "pip install nvidia-cuda-nvrtc"), jit=True)
    yield from worse(n, verify)
    # Without the variables: what needs none works, and a library that would use multicast is not
    # opened.
    bare = ["env", *[word for name in NO_MULTICAST for word in ("-u", name)]]
    yield Config("multicast-not-set", [*bare, *verify, "--ranks", str(min(n, 2))], by_rows)
    nccl = tilewire("verify --json --backend nccl --op all_gather --dtype bf16")
    yield Config(
        "multicast-not-set-nccl",
        [*bare, *nccl, "--ranks", str(min(n, 2))],
        by_hint("NCCL", "NCCL_NVLS_ENABLE=0"),
    )
    registers = ["env", "-u", "NCCL_GRAPH_REGISTER", *nccl, "--ranks", str(min(n, 2))]
    yield Config("nccl-may-register", registers, by_hint("NCCL", "NCCL_GRAPH_REGISTER=0"))
    train = tilewire("train --backend vmm --task copy --steps 2 --ranks", str(min(n, 2)))
    yield Config("multicast-not-set-train", [*bare, *train], jit=True)
    yield Config(
        "multicast-not-off",
        tilewire("doctor"),
        by_warning("NVLink multicast"),
        env=off,
        jit=True,
    )


# One of each family.
ODD_WORLDS = ["all_gather", "gemm_rs", "ep", "cp_attention"]
# A copy of the program without the folder of kernels, and no folder for those that it compiles.
AWAY = """mkdir -p away && cp "$1" away/tilewire && cd away || exit 9
shift
exec env TILEWIRE_CACHE_DIR=/proc/none ./tilewire "$@\""""
# The same, where the first NVRTC that is found is no library.
ALONE = """mkdir -p alone/broken/lib64 && echo none > alone/broken/lib64/libnvrtc.so.13 || exit 9
cp "$1" alone/tilewire && cd alone || exit 9
shift
exec env -u VIRTUAL_ENV -u CONDA_PREFIX HOME="$PWD" PATH=/none CUDA_HOME="$PWD/broken" \\
    TILEWIRE_CACHE_DIR="$PWD/cache" ./tilewire "$@\""""
NO_MULTICAST = [
    "NCCL_NVLS_ENABLE",
    "NVSHMEM_DISABLE_NVLS",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
    "CUBLASMP_DISABLE_MULTICAST",
]


SHARE, TAKE = "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"
OLD, FAR, REFUSED = ("too old", "580"), ("do not reach each other", "nccl"), "--gpus all"
NOT_SHARED = ("FAIL", "sharing memory", REFUSED)
# Machines that are worse: name, environment, what `verify` on two ranks says, and what `doctor`
# finds. CUDA's codes: 1 a bad value, 217 no peers, 800 not permitted, 801 not supported.
WORSE = [
    ("old-driver", {"TW_DRIVER_VERSION": "12000"}, OLD, ("warn", *OLD)),
    (
        "old-gpu",
        {"TW_COMPUTE_CAPABILITY": "75"},
        ("too old", "CUDA_VISIBLE_DEVICES"),
        ("warn", "older than sm_80", "CUDA_VISIBLE_DEVICES"),
    ),
    ("no-peers", {"TW_NO_PEERS": "217"}, FAR, ("warn", "peer access", "topo -p2p")),
    ("no-export", {"TW_FAIL": f"{SHARE}=800"}, (SHARE, REFUSED), NOT_SHARED),
    ("no-export-at-all", {"TW_FAIL": f"{SHARE}=801"}, (SHARE, REFUSED), None),
    ("no-import", {"TW_FAIL": f"{TAKE}=800"}, (TAKE, REFUSED), NOT_SHARED),
    ("no-import-value", {"TW_FAIL": f"{TAKE}=1"}, (TAKE, REFUSED), None),
]


def worse(n, verify):
    """A machine that the interposer makes worse than it is."""
    gcc = None if can_watch() else NOT_WATCHED
    two, doctor = [*verify, "--ranks", "2"], tilewire("doctor")
    for name, env, said, found in WORSE:
        # One GPU does not reach itself.
        alone = name == "no-peers" and n == 1
        words = ("cuMemSetAccess", "topo -p2p") if alone else said
        yield Config(f"{name}-verify", two, by_hint(*words), env=env, needs=gcc)
        if found and not alone:
            yield Config(f"{name}-doctor", doctor, by_finding(*found), env=env, jit=True, needs=gcc)
    # As on sm_86, sm_89 and sm_120: other tiles, or the plain kernels. Cases that name that of
    # sm_90a are refused.
    attention = tilewire("verify --backend vmm --json --op attention --ranks 1")
    bytes_of_block = "101376"
    env = {"TW_SHARED_BYTES": bytes_of_block}
    refused = rows_but("/hopper", why=f"which this device limits to {bytes_of_block}")
    yield Config("little-shared-memory", attention, refused, True, env, takes=1, needs=gcc)
    # Through NCCL it works.
    if n > 1:
        nccl = tilewire("verify --backend vmm --json --op nccl --dtype bf16 --ranks 2")
        needs = gcc or why_not("nccl", doctor_says())
        yield Config("no-peers-nccl", nccl, by_rows, True, {"TW_NO_PEERS": "217"}, needs=needs)


def faults(n):
    yield from bad_input(n)
    spike = program("symm_checks")
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    # Where there are fewer GPUs, ranks share them.
    for ranks in [2, 4]:
        many = ranks if ranks <= n else f"shared-{ranks}"
        for extra, tag in [({}, ""), (one, "-one-connection")]:
            for case in ["timeout", "abort"]:
                yield Config(f"{case}-{many}{tag}", ranks_of(ranks, spike, case), env=extra)
            # The launcher ends the ranks that are left when one fails: they ignore that.
            stay = ["bash", "-c", f'trap "" TERM; exec "{spike}" killed']
            yield Config(
                f"killed-{many}{tag}", ranks_of(ranks, *stay), by_survivors(ranks - 1), env=extra
            )
            yield Config(
                f"after-{many}{tag}",
                ranks_of(ranks, spike, "put_signal_wait"),
                env=extra,
                behind=f"killed-{many}{tag}",
            )
        yield Config(f"leaks-{many}", ranks_of(ranks, spike, "hundred heaps"), ranks=ALL_PLACES)
    orders = [program("gpu_team"), "--test-threads", "1", "--nocapture"]
    if n > 1:
        yield Config("parked-between", [*orders, "stops_between"], by_ran, jit=True)
        argv = [program("gpu_team"), "a_rank_without_memory", "--nocapture"]
        yield Config(
            "lacking-memory", argv, by_ran, jit=True, needs=None if can_watch() else NOT_WATCHED
        )
        yield Config("parked-copies", [*orders, "copies_hang"], by_ran, jit=True)
        yield Config("opposite-orders", [*orders, "opposite_orders"], by_ran, jit=True)
        # The streams of a device are one queue then: ranks must launch in one order.
        yield Config("one-order-one-connection", [*orders, "one_order"], by_ran, jit=True, env=one)
    # Two that share a GPU are threads: their kernels run beside each other.
    for part in ["before", "behind"]:
        argv = [program("gpu_model"), f"that_is_silent_{part}", "--nocapture"]
        for ranks in up_to(n, [2, 4]) or [2]:
            many = ranks if ranks <= n else f"shared-{ranks}"
            yield Config(
                f"silent-in-training-{part}-{many}",
                argv,
                by_ran,
                jit=True,
                env={"TW_GRID_RANKS": str(ranks)},
            )
    # Ranks are processes, at least three: the rest is a team. Two GPUs are shared, and one by four.
    some = {"TW_RANKS": "4"} if n < 2 else {}
    for ops in STOPPED_OPS:
        yield Config(
            f"stopped-in-{ops}",
            [*orders, "a_stopped_process"],
            by_ran,
            jit=True,
            env={"TW_TEAM_OPS": ops, **some},
        )
    for ops in KILLED_OPS:
        for way, test in [("killed", "a_killed_process"), ("left", "a_process_that_leaves")]:
            yield Config(
                f"{way}-in-{ops}",
                [*orders, test],
                by_ran,
                jit=True,
                env={"TW_TEAM_OPS": ops, **some},
            )
    if n < 2:
        yield Config("peers", [], needs=TWO_GPUS)
