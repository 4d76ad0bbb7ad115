"""What a call from Python costs: `python benches/py_overhead.py [--device cuda] [--json]`.

One rank, small shapes, so that the host's work is what is timed. Each line has two figures in
microseconds: the median of calls that are timed one by one, and the mean of calls in a row, without
a look at the clock between them (of the median row). All lines are timed in turn, and again, since
a processor has not the same rate all the time. On a GPU calls are queued and waited for in batches.
"""

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist

import tilewire
import tilewire.torch as tw
from tilewire import _native

ROUNDS = 12


class Timed:
    """A line: its call, and what was measured so far."""

    def __init__(self, what, call, under=torch.enable_grad):
        self.what, self.call, self.under = what, call, under
        self.all_us, self.rows_us = [], []

    def round(self, device, times):
        with self.under():
            self.alone(device, times)
            start = time.perf_counter_ns()
            for _ in range(times):
                self.call()
            self.rows_us.append((time.perf_counter_ns() - start) / 1e3 / times)
            waited(device)

    def alone(self, device, times):
        for i in range(times):
            start = time.perf_counter_ns()
            self.call()
            self.all_us.append((time.perf_counter_ns() - start) / 1e3)
            if i % 32 == 31:
                waited(device)
        waited(device)

    def figures(self):
        return statistics.median(self.all_us), statistics.median(self.rows_us)


class Launch(Timed):
    """As the others, timed in Rust."""

    def round(self, device, times):
        alone, row = self.call(times)
        self.all_us.append(alone)
        self.rows_us.append(row)


def waited(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


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


def lines(world, device):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    made = dict(device=device, dtype=dtype)
    x, w = torch.randn(16, 64, **made), torch.randn(32, 64, **made)
    experts, splits = torch.randn(4, 32, 64, **made), torch.tensor([4] * 4, device=device)
    out = torch.empty(16, 32, **made)
    args = (world.handle, x, w, None, out, *[None] * 5, False, None, False, False)
    xg, wg = (t.clone().requires_grad_() for t in (x, w))
    off = torch.no_grad
    tw.ag_gemm(x, w)
    yield Launch("ag_gemm: launch in Rust", lambda n: _native.launch_us(world.handle, x, w, out, n))
    yield Timed("ag_gemm: native call", lambda: _native.ag_gemm(*args))
    yield Timed("ag_gemm: call without grad", lambda: tw.ag_gemm(x, w), off)
    yield Timed("ag_gemm: call with grad, forward", lambda: tw.ag_gemm(xg, wg))
    yield Timed("an autograd.Function that makes its output", lambda: Empty.apply(xg, wg))
    yield Timed("torch.mm", lambda: x @ w.t(), off)
    yield Timed("grouped_gemm: call without grad", lambda: tw.grouped_gemm(x, experts, splits), off)
    if device.type == "cuda":
        ends = splits.cumsum(0, dtype=torch.int32)
        b = experts.transpose(1, 2)
        yield Timed("torch._grouped_mm", lambda: torch._grouped_mm(x, b, ends), off)
    yield Timed("all_gather: call without grad", lambda: tw.all_gather(x), off)
    if device.type == "cpu":
        alone = dict(store=dist.HashStore(), rank=0, world_size=1)
        dist.init_process_group("gloo", **alone)
        whole = torch.empty_like(x)
        yield Timed("gloo's all_gather", lambda: dist.all_gather_into_tensor(whole, x), off)


def rows(device, times):
    world = tw.init(device=device)
    timed = list(lines(world, device))
    for t in timed:
        t.round(device, 50)
        t.all_us, t.rows_us = [], []
    for _ in range(ROUNDS):
        for t in timed:
            t.round(device, max(times // ROUNDS, 1))
    found = {t.what: t.figures() for t in timed}
    yield from found.items()
    launch = found["ag_gemm: launch in Rust"]
    for what in ("call without grad", "call with grad, forward"):
        yield f"ag_gemm: {what}, over the launch", over(found[f"ag_gemm: {what}"], launch)
    world.finalize()


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--device", default="cpu")
    p.add_argument("--times", type=int, default=3000)
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
