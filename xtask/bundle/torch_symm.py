#!/usr/bin/env python3
"""What torch's fused operations of symmetric memory make of comm+GEMM shapes: a line of JSON each.

Takes the number of ranks, and shapes as `ag_gemm|gemm_rs,M,N,K`: columns and contraction of one
rank. Each rank is a process with a GPU of its own; medians of 9 samples after a warm-up, each of
launches that follow each other for 10 ms, as `tilewire bench` times ours, of the slowest rank;
random inputs, bf16. `us`: weights (K, N) in memory; `us_nt`: (N, K), as `torch.nn.Linear` has them
and ours are; `ours_us`, where `tilewire.torch` can be imported: our operation as `prepare` chooses
it, on those weights, with the elements of its result that differ from torch's. All of them are
sampled in turn. NVLink multicast must be off (run.sh sees to it).
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


def times_us(torch, ways):
    """The medians over samples, which ways take in turn. All ranks have the same launches."""
    once = {name: sample_us(torch, launch, WARM) for name, launch in ways.items()}
    samples = {name: [] for name in ways}
    for i in range(SAMPLES):
        for name in list(ways) if i % 2 == 0 else reversed(ways):
            num = max(1, round(SAMPLE_US / once[name]))
            samples[name].append(sample_us(torch, ways[name], num))
    return {name: round(median(all_of), 1) for name, all_of in samples.items()}


def ours(rank):
    """Our operations in a world of all ranks, or none where the package is not there."""
    try:
        import tilewire.torch as tw
    except ImportError:
        return None
    tw.init(device=f"cuda:{rank}")
    return {"ag_gemm": tw.ag_gemm, "gemm_rs": tw.gemm_rs}


def run(rank, ranks, port, shapes):
    import torch
    import torch.distributed._symmetric_memory as symm

    torch.cuda.set_device(rank)
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    torch.distributed.init_process_group("nccl", store=store, rank=rank, world_size=ranks)
    group = torch.distributed.group.WORLD.group_name
    symm.enable_symm_mem_for_group(group)
    of_tilewire = ours(rank)
    for shape in shapes:
        op, *sizes = shape.split(",")
        m, n, k = (int(s) for s in sizes)
        w = torch.randn(k, n, dtype=torch.bfloat16, device="cuda")
        nt = w.t().contiguous()
        rows = m // ranks if op == "ag_gemm" else m
        x = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")
        fused = {
            "ag_gemm": lambda x, w: torch.ops.symm_mem.fused_all_gather_matmul(x, [w], 0, group)[1],
            "gemm_rs": lambda x, w: [
                torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, group)
            ],
        }[op]
        ways = {"us": lambda: fused(x, w), "us_nt": lambda: fused(x, nt.t())}
        wrong = {}
        with torch.no_grad():
            if of_tilewire:
                ways["ours_us"] = lambda: of_tilewire[op](x, nt)
                got, want = ways["ours_us"]().float(), ways["us_nt"]()[0].float()
                # Both are rounded to bf16, sums of several ranks on their way, too.
                most = 0.02 * want.abs() + 0.02 * k**0.5
                bad = ((got - want).abs() <= most).logical_not().sum()
                torch.distributed.all_reduce(bad)
                wrong = {"wrong": bad.item()}
                del got, want, most
            us = times_us(torch, ways)
        if rank == 0:
            row = {
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "work": f"torch fused {op}",
                "ranks": ranks,
                "m": m,
                "n": n,
                "k": k,
                **us,
                **wrong,
                "tflops": round(2.0 * m * n * k / us["us"] / 1e6, 1),
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
