"""What a call from Python costs: `python benches/py_overhead.py [--device cuda] [--json]`.

One rank, small shapes, so that the host's work is what is timed. Each row is the median of many
calls in microseconds; on a GPU calls are queued and waited for in batches.
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
    return statistics.median(all_us)


def rows(device, times):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    made = dict(device=device, dtype=dtype)
    x, w = torch.randn(16, 64, **made), torch.randn(32, 64, **made)
    experts, splits = torch.randn(4, 32, 64, **made), torch.tensor([4] * 4, device=device)
    out = torch.empty(16, 32, **made)
    world = tw.init(device=device)
    tw.ag_gemm(x, w)
    launch = _native.launch_us(world.handle, x, w, out, None, times)
    yield "ag_gemm: launch in Rust", launch
    with torch.no_grad():
        plain = timed(lambda: tw.ag_gemm(x, w), device, times)
        yield "ag_gemm: call without grad", plain
        yield "ag_gemm: over the launch, without grad", plain - launch
    xg, wg = (t.clone().requires_grad_() for t in (x, w))
    # With grad it also writes the gathered x.
    gathered = torch.empty(16, 64, **made)
    launch = _native.launch_us(world.handle, x, w, out, gathered, times)
    yield "ag_gemm: launch in Rust that writes the gathered x", launch
    grad = timed(lambda: tw.ag_gemm(xg, wg), device, times)
    yield "ag_gemm: call with grad, forward", grad
    yield "ag_gemm: over the launch, forward with grad", grad - launch
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
    for what, us in rows(device, args.times):
        if args.json:
            print(json.dumps({"what": what, "us": round(us, 2), **about}))
        else:
            print(f"{us:9.2f} us  {what}")


if __name__ == "__main__":
    main()
