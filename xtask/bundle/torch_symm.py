#!/usr/bin/env python3
"""What torch's fused operations of symmetric memory make of comm+GEMM shapes: a line of JSON each.

Takes the number of ranks, and shapes as `ag_gemm|gemm_rs,M,N,K`: columns and contraction of one
rank. Each rank is a process with a GPU of its own; medians of 20 after a warm-up, of the slowest
rank; random inputs, bf16. NVLink multicast must be off (run.sh sees to it).
"""

import json
import os
import sys
from statistics import median

RUNS, WARM = 20, 5


def time_us(torch, launch):
    """The median over runs of the slowest rank's time."""
    for _ in range(WARM):
        launch()
    times = []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        torch.distributed.barrier()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        launch()
        b.record()
        torch.cuda.synchronize()
        slowest = torch.tensor([a.elapsed_time(b) * 1e3], device="cuda")
        torch.distributed.all_reduce(slowest, op=torch.distributed.ReduceOp.MAX)
        times.append(slowest.item())
    return median(times)


def run(rank, ranks, port, shapes):
    import torch
    import torch.distributed._symmetric_memory as symm

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=ranks)
    group = torch.distributed.group.WORLD.group_name
    symm.enable_symm_mem_for_group(group)
    for shape in shapes:
        op, *sizes = shape.split(",")
        m, n, k = (int(s) for s in sizes)
        w = torch.randn(k, n, dtype=torch.bfloat16, device="cuda")
        if op == "ag_gemm":
            x = torch.randn(m // ranks, k, dtype=torch.bfloat16, device="cuda")
            fused = lambda: torch.ops.symm_mem.fused_all_gather_matmul(x, [w], 0, group)
        else:
            x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
            fused = lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, group)
        us = time_us(torch, fused)
        if rank == 0:
            row = {
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "work": f"torch fused {op}",
                "ranks": ranks,
                "m": m,
                "n": n,
                "k": k,
                "us": round(us, 1),
                "tflops": round(2.0 * m * n * k / us / 1e6, 1),
            }
            print(json.dumps(row), flush=True)
    torch.distributed.destroy_process_group()


def main():
    if len(sys.argv) < 3:
        sys.exit("torch_symm.py RANKS ag_gemm|gemm_rs,M,N,K ...")
    import socket

    import torch.multiprocessing

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = int(sys.argv[1])
    torch.multiprocessing.spawn(run, (ranks, port, sys.argv[2:]), nprocs=ranks)


if __name__ == "__main__":
    main()
