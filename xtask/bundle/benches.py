"""The configurations of `bench`."""

import functools
import importlib.util
import shutil
import subprocess
import sys

from configs import HERE, LIMIT_S, TWO_GPUS, Config, program, ranks_of, search, tilewire
from judges import by_bench, by_limits

TIMINGS = [
    "signal, in one kernel",
    "signal + wait, eager",
    "signal + wait, graph",
    "put bandwidth",
    "cost of a flag",
    "1000 graph replays",
    "hundred heaps",
]
MOVES = [
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "ep_dispatch",
    "ep_combine",
    "ep_dispatch_bwd",
    "ep_combine_bwd",
]
# Expert parallelism: fewer multiprocessors, rows that come straight to where they stay, a step of
# inference.
EXPERTS = [
    ("ep_dispatch", "16", "--sms 16"),
    ("ep_combine", "16", "--sms 16"),
    ("ep_dispatch", "zero_copy", "--zero-copy"),
    ("ep_dispatch", "zero_copy-16", "--zero-copy --sms 16"),
    ("ep_dispatch", "rank_major-16", "--layout rank-major --sms 16"),
    ("ep_dispatch", "rank_major-zero_copy", "--layout rank-major --zero-copy"),
    ("ep_dispatch", "rank_major-zero_copy-16", "--layout rank-major --zero-copy --sms 16"),
    ("ep_dispatch_bwd", "16", "--sms 16"),
    ("ep_dispatch_bwd", "rank_major-16", "--layout rank-major --sms 16"),
    ("ep_combine_bwd", "16", "--sms 16"),
    ("ep_combine_bwd", "zero_copy-16", "--zero-copy --sms 16"),
    ("ep_dispatch", "few", "--tokens 128 --align 16 --zero-copy"),
    ("ep_combine", "few", "--tokens 128 --align 16"),
]
CUBE = "--m 8192 --n 8192 --k 8192"
PRODUCTS = {
    "gemm": CUBE,
    "ag_gemm": CUBE,
    "gemm_rs": CUBE,
    "gemm_ar": CUBE,
    "bulk": CUBE,
    "cp_attention": "--m 16384",
}
# Layers of 70 and 175 billion parameters: rows, and columns and contraction of all ranks together,
# of which a rank has its part of the one that is cut.
LAYERS = {
    "ag_gemm": [
        ("gate_up", [8192, 2048, 256], 57344, 8192),
        ("qkv", [8192, 2048, 256], 10240, 8192),
        ("fc1", [8192, 2048, 256], 49152, 12288),
    ],
    "gemm_rs": [
        ("down", [8192, 2048, 256], 8192, 28672),
        ("o_proj", [8192, 2048, 256], 8192, 8192),
        ("fc2", [8192, 2048, 256], 12288, 49152),
    ],
    "gemm_ar": [("down", [8192, 256], 8192, 28672), ("o_proj", [8192], 8192, 8192)],
}
# Causal attention over all ranks: one document, and documents of 8192 rows.
LONG = {
    "32k": "--m 32768",
    "64k": "--m 65536",
    "64k-documents": "--m 65536 --documents 8",
}
# Of the program `rates`: all on one GPU.
RATES = ["layers", "gemm", "drawn", "cold", "parts", "grouped", "attention", "decode", "shares"]
# What memory bounds: a rank alone, whose references are computed by its CPU.
BY_MEMORY = {
    "quant": "--m 4096 --n 4096",
    "permute": "--tokens 2048 --hidden 4096 --experts 64 --align 16",
    "embed,norm,optimizer": "--m 4096 --n 4096",
    "cross_entropy": "--m 32768 --n 256",
    "heads,router": "--m 4096 --experts 64",
}


def train_rates(ranks, part=None):
    """Ranks divide the batch, or what `part` says. The share of communication that is hidden is
    measured where there is any."""
    # Any text will do: what is learned is not what is measured.
    train = tilewire("train --backend vmm --preset h200 --data", HERE / "run.py")
    train += ["--ranks", str(ranks), *"--layers 1 --steps 20".split()]
    name = f"train-{ranks}" + (f"-{part}" if part else "")
    train += ["--metrics", f"{name}.jsonl", *(["--calibrate"] if ranks > 1 else [])]
    train += [f"--{part}", str(ranks)] if part else []
    # Its rows behind what it says on the way, not among that.
    argv = ["bash", "-c", f'"$@" && cat {name}.jsonl', "bash", *train]
    return Config(name, argv, by_bench, jit=True)


@functools.cache
def no_torch():
    """Why torch cannot be asked."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not there"
    ask = "import torch; torch._grouped_mm; torch.zeros(1, device='cuda')"
    done = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    return None if done.returncode == 0 else f"torch: {done.stderr.strip().splitlines()[-1:]}"


def bench_of_one():
    """One GPU, and what torch makes of the same shapes."""
    for rates in RATES:
        argv = [program("rates"), rates]
        yield Config(f"rates-{rates}", argv, by_bench, jit=True, limit_s=2 * LIMIT_S, takes=1)
    for ops, shape in BY_MEMORY.items():
        argv = tilewire("bench --backend vmm --dtype bf16 --json --ranks 1 --op", ops, shape)
        yield Config(f"op-{ops.replace(',', '-')}", argv, by_bench, takes=1)
    needs = no_torch()
    for rates in ["grouped", "attention", "masks", "decode"]:
        yield Config(
            f"rates-torch-{rates}",
            ["python3", str(HERE / "torch_rates.py"), rates],
            by_bench,
            preload=False,
            needs=needs,
            takes=1,
            # flex_attention is compiled there.
            limit_s=2 * LIMIT_S,
        )
    needs = None if importlib.util.find_spec("jax") else "jax is not there"
    for rates in ["attention", "grouped"]:
        yield Config(
            f"rates-jax-{rates}",
            ["python3", str(HERE / "jax_rates.py"), rates],
            by_bench,
            preload=False,
            needs=needs,
            takes=1,
            limit_s=3 * LIMIT_S,
        )
    yield train_rates(1)


def bench(n):
    yield from bench_of_one()
    if n < 2:
        yield Config("links", [], needs=TWO_GPUS)
        return
    yield from limits(n)
    for ranks in sorted({2, n}):
        # Those of all GPUs are compared with what limits.cu says in the same call.
        argv = tilewire("bench links --json --ranks", str(ranks))
        behind = "limits" if ranks == n else None
        yield Config(f"links-{ranks}", argv, by_bench, behind=behind)
    for ranks in sorted({n, 8}):
        argv = ranks_of(ranks, program("symm_checks"), "rendezvous")
        yield Config(f"rendezvous-{ranks}", argv, jit=True)
    for part in TIMINGS:
        name = "spike-" + "-".join(part.replace(",", "").replace("+ ", "").split())
        yield Config(name, [program("symm_checks"), part], jit=True)
    yield from (train_rates(n, part) for part in [None, "cp", "tp"])
    bench = "bench --backend vmm --dtype bf16 --json"
    for op in MOVES:
        yield Config(f"op-{op}", tilewire(bench, "--op", op, "--ranks", str(n)), by_bench)
    for op, name, flags in EXPERTS:
        argv = tilewire(bench, "--op", op, flags, "--ranks", str(n))
        yield Config(f"op-{op}-{name}", argv, by_bench)
    for op, shape in PRODUCTS.items():
        argv = tilewire(bench, "--iters 9 --op", op, shape, "--ranks", str(n))
        yield Config(f"op-{op}", argv, by_bench)
    for op, name, (m, cols, inner) in layers(n):
        shape = f"--m {m} --n {cols} --k {inner}"
        argv = tilewire(bench, "--iters 31 --op", op, shape, "--ranks", str(n))
        yield Config(f"layer-{op}-{name}-{m}", argv, by_bench)
    for name, shape in LONG.items():
        argv = tilewire(bench, "--iters 15 --op cp_attention", shape, "--ranks", str(n))
        # Inputs and checks of the host take most of it.
        yield Config(f"cp-{name}", argv, by_bench, limit_s=3 * LIMIT_S)
    yield Config(
        f"rates-torch-symm-{n}",
        ["python3", str(HERE / "torch_symm.py"), str(n), *torch_shapes(n)],
        by_bench,
        preload=False,
        needs=no_torch(),
    )


def layers(n):
    """Operation, name and product of one of n ranks (rows, columns, contraction) of LAYERS."""
    for op, all_of in LAYERS.items():
        for name, rows, cols, inner in all_of:
            part = (cols // n, inner) if op == "ag_gemm" else (cols, inner // n)
            for m in rows:
                yield op, name, (m, *part)


def torch_shapes(n):
    """Those that torch has a fused operation for, as torch_symm.py takes them."""
    for op, _, product in layers(n):
        if op != "gemm_ar":
            yield ",".join([op, *map(str, product)])


def limits(n):
    """A program that is not ours and says what links can do, where it is."""
    text = HERE / "limits.cu"
    if not text.exists():
        return
    nvcc = shutil.which("nvcc", path=search("/usr/local/cuda/bin"))
    needs = None if nvcc else "nvcc is not there"
    build = [
        nvcc or "nvcc",
        *"-O3 -std=c++20 -arch=sm_90a -o limits".split(),
        str(text),
        "-lcublas",
    ]
    yield Config("limits-build", build, preload=False, needs=needs)
    argv = ["./limits", str(n)]
    yield Config("limits", argv, by_limits, preload=False, needs=needs, behind="limits-build")
