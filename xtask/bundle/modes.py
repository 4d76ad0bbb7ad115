"""The configurations of `smoke` and `conformance`."""

import shutil
import subprocess

from configs import (
    ALL_PLACES,
    HERE,
    LIMIT_S,
    NOT_WATCHED,
    TWO_GPUS,
    Config,
    can_watch,
    doctor_says,
    program,
    ranks_of,
    search,
    tilewire,
    up_to,
    why_not,
)
from judges import (
    TRACKS,
    by_backends,
    by_doctor,
    by_launches,
    by_litmus,
    by_ran,
    by_rows,
    by_sanitizer,
    by_shared_gpu,
    by_tests,
    by_trace,
)

CASES = [
    "put_signal_wait",
    "put_flag",
    "get_after_signal",
    "barrier",
    "graph_replay",
    "growth",
    "timeout_and_reform",
    "abort_and_reform",
]
# Operations of `verify` that share a configuration, which must end in a minute; others have one
# together.
GROUPS = {
    "moves": ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "quant", "permute"],
    "products": ["gemm", "grouped_gemm", "ag_gemm", "gemm_rs", "gemm_ar", "bulk"],
    "ep": ["ep"],
    "attention": ["attention", "cp_attention"],
    "nccl": ["nccl"],
}
# Types of the cases of cp_attention, in two parts of about as many.
CP_DTYPES = {"f32": "f32", "short": "bf16,f16,f8e4m3"}
TEAM_TESTS = {"replays": "replays_with", "silent": "is_named_and_outputs", "left": "left_in_any"}
TEAM_TESTS_NCCL = {"replays": "replays_by_nccl", "silent": "named_by_nccl"}
# Operations of the team tests that share a process: an error of the device ends only that.
TEAM_OPS = ["0-5", "6-13", "14-17", "18-20", "21-24", "25-29", "30-39"]
TEAM_OPS_NCCL = ["40-45", "46-54"]
# The same under a sanitizer, where eight of them take a minute.
SANITIZED_OPS = [
    "0-5",
    "6-9",
    "10-13",
    "14-17",
    "18-20",
    "21-24",
    "25-27",
    "28-29",
    "30-34",
    "35-39",
]
# By `nvshmem`, of ranks that share a GPU: eight have time for `ep` alone.
NVSHMEM_OPS = {
    "moves": "all_gather,reduce_scatter,all_reduce,all_to_all",
    "ep": "ep",
    "fused": "ag_gemm,gemm_rs,gemm_ar,bulk",
    "cp_attention": "cp_attention",
}
# Tests of `gpu` that a sanitizer looks at: a minute each.
SANITIZED_TESTS = [
    "grouped_gemm::passes_of_bf16",
    "grouped_gemm::passes_of_fp8",
    "grouped_gemm::bad_splits",
    "layers::",
    "attention::attention_of_packed",
    "attention::attention_of_fp8",
]
LITMUS = ["bulk_store_flag", "copy_push_flag", "counter_flag", "credit"]


def smoke(n):
    yield Config("doctor", tilewire("doctor"), by_doctor, jit=True)
    yield Config("topo", tilewire("topo"), jit=True)
    yield Config("kernels-list", tilewire("kernels list"))
    tiny = ["--backend", "vmm", "--json", "--op", "gemm", "--shape", "m=64,n=64,k=64"]
    yield Config("verify-tiny", tilewire("verify --ranks 1", *tiny), by_rows)
    if n > 1:
        gather = ["--backend", "vmm", "--json", "--op", "all_gather"]
        yield Config("verify-tiny-2", tilewire("verify --ranks 2", *gather), by_rows)


def verify_groups():
    """The operations that the program knows, by group; GROUPS where there is no program, to list
    configurations."""
    try:
        argv = tilewire("verify --op ?")
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except OSError:
        return GROUPS
    text = done.stderr.split("one of ", 1)
    known = [w.strip() for w in text[1].splitlines()[0].split(",")] if len(text) == 2 else []
    groups = {name: [op for op in ops if op in known] for name, ops in GROUPS.items()}
    groups["others"] = [op for op in known if not any(op in ops for ops in GROUPS.values())]
    return {name: ops for name, ops in groups.items() if ops} if known else GROUPS


def conformance(n):
    yield from one_sided(n)
    # A process for each rank, and more than one GPU of them.
    nvshmem = why_not("nvshmem", doctor_says()) if n > 1 else TWO_GPUS
    # The communicator of a caller's, and NCCL's own puts, are with that backend.
    nccl = why_not("nccl", doctor_says()) if n > 1 else TWO_GPUS
    yield from by_libraries(n, nvshmem, nccl)
    yield from of_one_gpu(n)
    yield from of_teams(n, nccl)
    yield from verified(n, nccl)
    yield from sharing(n)
    ranks = max(up_to(n, [1, 2, 4, 8]))
    train = f'"$0" train --backend vmm --task copy --steps 5 --ranks {ranks} --trace t.json'
    train += ' && "$0" trace t.json --html t.html'
    argv = ["bash", "-c", f'{train} && python3 -c "$1"', program("tilewire"), TRACKS]
    yield Config(f"train-trace-{ranks}", argv, by_trace(ranks), jit=True)
    yield from sanitized(n)


def one_sided(n):
    """Symmetric memory, and what each backend of it says of itself."""
    tests = program("conformance")
    yield Config("one-sided-threads-1", [tests, "vmm_alone"], by_tests, takes=1)
    if n > 1:
        threads = ["--test-threads", "1", "--nocapture"]
        yield Config("one-sided-threads-vmm", [tests, "vmm_threads::", *threads], by_ran)
        yield Config(
            "one-sided-threads-nccl",
            [tests, "nccl_threads::", *threads],
            by_ran,
            needs=why_not("nccl", doctor_says()),
        )
    for ranks in up_to(n, [2, 3, 4, 5, 8]):
        yield Config(
            f"one-sided-processes-{ranks}", ranks_of(ranks, program("symm_checks"), *CASES)
        )
    if n > 1:
        yield Config("backends", tilewire("doctor"), by_backends("nvshmem", "nccl"), jit=True)


def by_libraries(n, needs, two):
    """Operations on NVSHMEM's memory, which `needs` says why it is left out, and through NCCL."""
    for ranks in up_to(n, [2, 4, 8]) or [2]:
        yield Config(
            f"one-sided-nvshmem-{ranks}",
            ranks_of(ranks, program("symm_checks"), "nvshmem"),
            needs=needs,
        )
    for i, ops in enumerate(
        [
            "all_gather,reduce_scatter,ag_gemm,gemm_rs",
            "all_reduce,all_to_all,gemm_ar,ep",
            "cp_attention,bulk",
        ]
    ):
        moves = tilewire("verify --backend nvshmem --json --op", ops)
        yield Config(f"verify-nvshmem-{i}", ranks_of(2, *moves), by_rows, i == 2, needs=needs)
    # Of more than two ranks NVSHMEM may map the parts in uneven steps.
    for ranks in up_to(n, [4, 8]):
        moves = tilewire("verify --backend nvshmem --json --op all_reduce,all_to_all,ep")
        yield Config(f"verify-nvshmem-ranks-{ranks}", ranks_of(ranks, *moves), by_rows, needs=needs)
    yield Config("one-sided-nccl-2", ranks_of(2, program("symm_checks"), "nccl"), needs=two)
    for i, ops in enumerate(
        ["all_gather,reduce_scatter,all_reduce", "all_to_all,ag_gemm,gemm_rs,gemm_ar", "ep"]
    ):
        moves = tilewire("verify --backend nccl --json --op", ops)
        yield Config(f"verify-nccl-{i}", [*moves, "--ranks", "2"], by_rows, needs=two)
    steps = ["train", "--task", "copy", "--steps", "5", "--backend"]
    yield Config("train-nccl", tilewire(*steps, "nccl --ranks 2"), jit=True, needs=two)
    yield Config(
        "train-nvshmem", ranks_of(2, program("tilewire"), *steps, "nvshmem"), jit=True, needs=needs
    )
    for backend in ["nccl", "nvshmem"]:
        argv = tilewire(
            "verify --json --dtype bf16 --ranks 1 --backend", backend, "--op all_gather,gemm_rs,ep"
        )
        yield Config(
            f"verify-{backend}-alone", argv, by_rows, needs=why_not(backend, doctor_says())
        )


def of_one_gpu(n):
    """Orders of memory, and operations of one rank."""
    for part in LITMUS:
        yield Config(
            f"litmus-{part}",
            [program("symm_checks"), "litmus", part],
            by_litmus,
            needs=None if n > 1 else TWO_GPUS,
        )
    # Attention, also through NCCL, has a kernel for each pair of head dimensions: the rare ones are
    # compiled.
    # Tensor maps of tests have a kernel of their own.
    skips = ["--skip", "attention", "--skip", "emulated", "--skip", "maps::"]
    core = ["hopper::", "parts::"]
    others = [*skips, *(word for test in core for word in ("--skip", test))]
    yield Config("ops", [program("gpu"), *others], by_tests, takes=1)
    # 24 s on a quick host, 60 on a slow one: references of the CPU.
    hopper = [program("gpu"), *core, *skips]
    yield Config("ops-hopper", hopper, by_tests, takes=1, limit_s=2 * LIMIT_S)
    maps = [program("gpu"), "maps::", "--skip", "emulated"]
    yield Config("tensor-maps", maps, by_tests, jit=True)
    attention = [program("gpu"), "attention", "--skip", "emulated"]
    yield Config("ops-attention", attention, by_tests, jit=True, takes=1)


def of_teams(n, two):
    """Operations of a team. `two`: why those through NCCL are left out."""
    # With the interposer, it and `gpu` count what launches ask of the driver.
    more = None if n > 1 else TWO_GPUS
    launches = more or (None if can_watch() else NOT_WATCHED)
    for ops, needs in [
        *((ops, launches) for ops in TEAM_OPS),
        *((ops, launches or two) for ops in TEAM_OPS_NCCL),
    ]:
        argv = [program("gpu_team"), "launches_neither", "--nocapture"]
        env = {"TW_TEAM_OPS": ops}
        yield Config(
            f"launch-calls-{ops}",
            argv,
            by_launches,
            jit=True,
            needs=needs,
            env=env,
            takes=2 if n > 2 else None,
        )
    for test in sorted(HERE.glob("gpu_*")):
        if test.name not in ("symm_checks", "gpu_team"):
            # Silence takes its time: `faults` has it.
            argv = [str(test), "--test-threads", "1", "--skip", "that_is_silent"]
            yield Config(f"ops-{test.name}", argv, by_tests, jit=True)
    for name, part in TEAM_TESTS.items():
        for ops in TEAM_OPS:
            argv = [program("gpu_team"), part, "--nocapture"]
            yield Config(
                f"ops-gpu_team-{name}-{ops}",
                argv,
                by_ran,
                jit=True,
                env={"TW_TEAM_OPS": ops},
                needs=more,
            )
    for name, part in TEAM_TESTS_NCCL.items():
        yield Config(
            f"ops-gpu_team-nccl-{name}",
            [program("gpu_team"), part, "--nocapture"],
            by_ran,
            jit=True,
            needs=two,
        )
    # GPUs as if they did not reach each other.
    yield Config(
        "ops-gpu_team-dropped",
        [program("gpu_team"), "dropped_plans", "--nocapture"],
        by_ran,
        jit=True,
        needs=more,
        ranks=ALL_PLACES,
    )
    yield Config(
        "ops-gpu_team-far",
        [program("gpu_team"), "far_gpus", "--nocapture"],
        by_ran,
        jit=True,
        needs=two,
    )
    yield documents(more)
    # Sizes, a zero copy into a product, two backends in one process; heaps left in any order are
    # above.
    heaps = [program("gpu_team"), "heaps::", "--skip", "left_in_any", "--nocapture"]
    yield Config("ops-gpu_team-heaps", heaps, by_ran, jit=True, needs=two)
    # NVTX of CUDA 13 is a wheel that stage `libraries` of CI installs: its test has nothing here.
    device = [program("device"), "cuda", "--skip", "ranges_of_cuda_13", "--nocapture"]
    yield Config("device", device, by_ran, jit=True)


def documents(needs):
    """Documents over ranks, and tiles that wait for keys."""
    argv = [program("gpu_team"), "documents::", "--test-threads", "1", "--nocapture"]
    # The idle driver's.
    argv += ["--skip", "who_needs_no_other_keys"]
    return Config("ops-gpu_team-documents", argv, by_ran, jit=True, needs=needs)


def verified(n, two):
    """Every operation against the oracle, on threads and on processes."""
    for name, ops in verify_groups().items():
        flags = ["verify", "--backend", "vmm", "--json", "--op", ",".join(ops)]
        for ranks in up_to(n, [1, 2, 4, 8]):
            if name == "nccl" and ranks == 1:
                continue
            threads, takes = (
                tilewire(*flags, "--ranks", str(ranks)),
                ranks if ranks < n else None,
            )
            lacks, compiles = two if name == "nccl" else None, name in ["attention", "nccl"]
            # NCCL makes its communicators anew for each case: 50 s on a slow host.
            limit_s = (2 if name == "nccl" else 1) * LIMIT_S
            yield Config(
                f"verify-threads-{ranks}-{name}",
                threads,
                by_rows,
                compiles,
                takes=takes,
                needs=lacks,
                limit_s=limit_s,
            )
            if ranks > 1:
                processes = ranks_of(ranks, program("tilewire"), *flags)
                yield Config(
                    f"verify-processes-{ranks}-{name}",
                    processes,
                    by_rows,
                    compiles,
                    takes=takes,
                    needs=lacks,
                    limit_s=limit_s,
                )


def sharing(n):
    """More ranks than GPUs: processes whose kernels take turns. What many ranks do is seen, not in
    which order a link brings it."""
    # The program is asked once.
    groups, nvshmem = verify_groups(), why_not("nvshmem", doctor_says())
    for ranks in [r for r in [2, 4, 8] if r > n]:
        yield Config(
            f"one-sided-nvshmem-shared-{ranks}",
            ranks_of(ranks, program("symm_checks"), "nvshmem"),
            needs=nvshmem,
            ranks=ranks,
        )
        for name, ops in NVSHMEM_OPS.items() if ranks < 8 else [("ep", "ep")]:
            flags = ["verify", "--backend", "nvshmem", "--json", "--timeout-s", "40", "--op", ops]
            processes = ranks_of(ranks, program("tilewire"), *flags)
            yield Config(
                f"verify-nvshmem-shared-{ranks}-{name}",
                processes,
                by_shared_gpu,
                name == "cp_attention",
                needs=nvshmem,
                ranks=ranks,
            )
        yield Config(
            f"one-sided-shared-{ranks}",
            ranks_of(ranks, program("symm_checks"), *CASES),
            ranks=ranks,
        )
        # Eight that take turns need more than a minute for a whole group.
        parts = {op: [op] for ops in groups.values() for op in ops} if ranks == 8 else groups
        if ranks == 8:
            # All of its cases take longer than a minute.
            del parts["cp_attention"]
            for name, dtypes in CP_DTYPES.items():
                parts[f"cp_attention-{name}"] = [f"cp_attention --dtype {dtypes}"]
        for name, ops in parts.items():
            flags = ["verify", "--backend", "vmm", "--json", "--timeout-s", "40", "--op"]
            flags += ",".join(ops).split()
            if name != "nccl":
                yield Config(
                    f"verify-shared-{ranks}-{name}",
                    ranks_of(ranks, program("tilewire"), *flags),
                    by_shared_gpu,
                    "attention" in name,
                    ranks=ranks,
                )
        steps = ["train", "--backend", "vmm", "--task", "copy", "--steps", "5", "--timeout-s", "40"]
        yield Config(
            f"train-shared-{ranks}",
            ranks_of(ranks, program("tilewire"), *steps),
            jit=True,
            ranks=ranks,
        )


def sanitized(n):
    for tool in ["memcheck", "synccheck"]:
        yield from sanitized_verify(n, tool)
        # Operations of one rank, against the oracle. Replays are a matter of speed and bits, not of
        # memory.
        for part in SANITIZED_TESTS:
            test = [program("gpu"), part, "--nocapture", "--skip", "replay"]
            name = f"{tool}-1-{part.strip(':').replace('::', '-')}"
            yield under(tool, name, test, jit=True, takes=1)
        # Every operation of a team, once.
        for ops in SANITIZED_OPS if n > 1 else []:
            test = [program("gpu_team"), "every_operation_computes", "--nocapture"]
            env = {"CUDA_MODULE_LOADING": "EAGER", "TW_TEAM_OPS": ops}
            yield under(tool, f"{tool}-2-team-{ops}", test, jit=True, env=env, takes=2)


def sanitized_verify(n, tool):
    # GPUs, ranks, operation: ranks that share a GPU are virtual ones.
    small = [(1, 1, op) for op in ["gemm", "quant", "permute"]]
    small += [(1, 2, op) for op in ["all_gather", "ep"]]
    small += [(2, 2, op) for op in ["all_gather", "reduce_scatter", "ep"]]
    for devices, ranks, op in small:
        if devices > n:
            continue
        name = f"{tool}-{devices}{'-virtual' if ranks > devices else ''}-{op}"
        verify = tilewire("verify --backend vmm --op", op, "--dtype bf16 --timeout-s 50")
        verify += ["--shape", "m=64,n=64,k=64"] if op == "gemm" else []
        # Ranks of one process share the queues of a GPU: a kernel that waits may stand before the
        # one that it waits for.
        shared = ranks > devices
        verify = ranks_of(ranks, *verify) if shared else [*verify, "--ranks", str(ranks)]
        # Kernels that are loaded while a rank on the same GPU waits would wait for it.
        env = {"CUDA_MODULE_LOADING": "EAGER"}
        yield under(tool, name, verify, ["--target-processes", "all"], env=env, takes=devices)


def under(tool, name, argv, flags=(), **more):
    """A program under a tool of the sanitizer."""
    places = search("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
    sanitizer = shutil.which("compute-sanitizer", path=places)
    checked = [sanitizer or "compute-sanitizer", "--tool", tool, *flags, "--error-exitcode", "99"]
    needs = None if sanitizer else "compute-sanitizer is not there"
    return Config(name, [*checked, *argv], by_sanitizer, preload=False, needs=needs, **more)
