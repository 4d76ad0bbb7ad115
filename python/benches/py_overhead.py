"""What a call from Python costs: `python benches/py_overhead.py [--device cuda] [--json]`.

One rank, small shapes, so that the host's work is what is timed. Each line has two figures in
microseconds: the median of calls that are timed one by one, and the mean of calls in a row, without
a look at the clock between them (the fastest of seven rows). On a GPU calls are queued and waited
for in batches.
"""

import argparse
import json
import statistics
import time

import torch

import tilewire
import tilewire.torch as tw
from tilewire import _native


def timed(call, device, times):
    for _ in range(50):
        call()
    all_us = []
    for i in range(times):
        start = time.perf_counter_ns()
        call()
        all_us.append((time.perf_counter_ns() - start) / 1e3)
        if i % 32 == 31 and device.type == "cuda":
            torch.cuda.synchronize()
    best, num = float("inf"), max(times // 8, 1)
    for _ in range(7):
        start = time.perf_counter_ns()
        for _ in range(num):
            call()
        best = min(best, (time.perf_counter_ns() - start) / 1e3 / num)
        if device.type == "cuda":
            torch.cuda.synchronize()
    return statistics.median(all_us), best


class Empty(torch.autograd.Function):
    """The least that a node of autograd written in Python costs."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x.new_empty(x.shape[0], w.shape[0])

    @staticmethod
    def backward(ctx, dy):
        return None, None


def over(a, b):
    return tuple(x - y for x, y in zip(a, b))


def rows(device, times):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    made = dict(device=device, dtype=dtype)
    x, w = torch.randn(16, 64, **made), torch.randn(32, 64, **made)
    experts, splits = torch.randn(4, 32, 64, **made), torch.tensor([4] * 4, device=device)
    out = torch.empty(16, 32, **made)
    world = tw.init(device=device)
    tw.ag_gemm(x, w)
    launch = _native.launch_us(world.handle, x, w, out, times)
    yield "ag_gemm: launch in Rust", launch
    args = (world.handle, x, w, None, out, *[None] * 5, False, None, False, False)
    yield "ag_gemm: native call", timed(lambda: _native.ag_gemm(*args), device, times)
    with torch.no_grad():
        plain = timed(lambda: tw.ag_gemm(x, w), device, times)
        yield "ag_gemm: call without grad", plain
        yield "ag_gemm: over the launch, without grad", over(plain, launch)
    xg, wg = (t.clone().requires_grad_() for t in (x, w))
    grad = timed(lambda: tw.ag_gemm(xg, wg), device, times)
    yield "ag_gemm: call with grad, forward", grad
    yield "ag_gemm: over the launch, forward with grad", over(grad, launch)
    yield "an autograd.Function that makes its output", timed(
        lambda: Empty.apply(xg, wg), device, times
    )
    with torch.no_grad():
        yield "torch.mm", timed(lambda: x @ w.t(), device, times)
        yield "grouped_gemm: call without grad", timed(
            lambda: tw.grouped_gemm(x, experts, splits), device, times
        )
        if device.type == "cuda":
            ends = splits.cumsum(0, dtype=torch.int32)
            b = experts.transpose(1, 2)
            yield "torch._grouped_mm", timed(lambda: torch._grouped_mm(x, b, ends), device, times)
        yield "all_gather: call without grad", timed(lambda: tw.all_gather(x), device, times)
    world.finalize()


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--device", default="cpu")
    p.add_argument("--times", type=int, default=2000)
    p.add_argument("--json", action="store_true", help="a line of JSON for each row")
    args = p.parse_args()
    device = torch.device(args.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    about = {"torch": torch.__version__, "tilewire": tilewire.__version__, "device": name}
    for what, (alone, row) in rows(device, args.times):
        if args.json:
            us = {"alone_us": round(alone, 2), "in_a_row_us": round(row, 2)}
            print(json.dumps({"what": what, **us, **about}))
        else:
            print(f"{alone:9.2f} {row:9.2f} us  {what}")


if __name__ == "__main__":
    main()
