#!/usr/bin/env python3
"""What torch's fused operations of symmetric memory make of comm+GEMM shapes: a line of JSON each.

Takes the number of ranks, and shapes as `ag_gemm|gemm_rs,M,N,K`: columns and contraction of one
rank. Each rank is a process with a GPU of its own; medians of 9 samples after a warm-up, each of
launches that follow each other for 10 ms, as `tilewire bench` times ours, of the slowest rank;
random inputs, bf16. NVLink multicast must be off (run.sh sees to it).
"""

import json
import sys
from statistics import median

SAMPLES, SAMPLE_US, WARM = 9, 10e3, 5


def sample_us(torch, launch, num):
    """The slowest rank's time of one of `num` launches behind each other."""
    torch.cuda.synchronize()
    torch.distributed.barrier()
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(num):
        launch()
    b.record()
    torch.cuda.synchronize()
    slowest = torch.tensor([a.elapsed_time(b) * 1e3 / num], device="cuda")
    torch.distributed.all_reduce(slowest, op=torch.distributed.ReduceOp.MAX)
    return slowest.item()


def time_us(torch, launch):
    """The median over samples. All ranks have the same number of launches in each."""
    once = sample_us(torch, launch, WARM)
    num = max(1, round(SAMPLE_US / once))
    return median(sample_us(torch, launch, num) for _ in range(SAMPLES))


def run(rank, ranks, port, shapes):
    import torch
    import torch.distributed._symmetric_memory as symm

    torch.cuda.set_device(rank)
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    torch.distributed.init_process_group("nccl", store=store, rank=rank, world_size=ranks)
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
    import torch.distributed
    import torch.multiprocessing

    # The server chooses its port and keeps it: a port that was free a moment ago may be taken.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = int(sys.argv[1])
    torch.multiprocessing.spawn(run, (ranks, store.port, sys.argv[2:]), nprocs=ranks)


if __name__ == "__main__":
    main()
