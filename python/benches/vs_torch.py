"""Operations beside what torch has for the same work: `python benches/vs_torch.py [--json]`.

On one GPU, one rank: what is compared is the local part of each operation as torch users call it,
with gradients off. Both sides run in turns on inputs that rotate, each call timed by CUDA events; a
row has the medians and their ratio. On the CPU (`--device cpu`) shapes are small and the clock is
the host's: that shows that it runs, nothing else.
"""

import argparse
import itertools
import json
import statistics
import time

import torch
import torch.nn.functional as F

import tilewire
import tilewire.torch as tw

# Inputs of a case, so that one call's are not in the cache of the next.
ROTATED = 4


def case(what, make, ours, theirs, flops=0, bytes_=0):
    return dict(what=what, make=make, ours=ours, theirs=theirs, flops=flops, bytes=bytes_)


def matmuls(made, big):
    for m, n, k in [(8192, 8192, 8192), (2048, 28672, 8192)] if big else [(64, 32, 48)]:
        yield case(
            f"ag_gemm, one rank, {m}x{n}x{k}; torch: F.linear",
            lambda m=m, n=n, k=k: (torch.randn(m, k, **made), torch.randn(n, k, **made)),
            lambda x, w: tw.ag_gemm(x, w),
            lambda x, w: F.linear(x, w),
            flops=2 * m * n * k,
        )


def grouped(made, big):
    shapes = [(64, 32768, 2048, 7168), (8, 8192, 14336, 4096)] if big else [(4, 64, 32, 48)]
    for groups, rows, n, k in shapes:

        def make(groups=groups, rows=rows, n=n, k=k):
            # Experts as a router fills them: about as many rows each, never the same number.
            cuts = torch.sort(torch.randint(rows, (groups - 1,)))[0]
            ends = torch.cat([cuts, torch.tensor([rows])])
            splits = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.int64))
            to = made["device"]
            x, w = torch.randn(rows, k, **made), torch.randn(groups, n, k, **made)
            return x, w, splits.to(to), ends.to(to, torch.int32)

        yield case(
            f"grouped_gemm, {groups} experts, {rows}x{n}x{k}; torch: _grouped_mm",
            make,
            lambda x, w, splits, ends: tw.grouped_gemm(x, w, splits),
            lambda x, w, splits, ends: torch._grouped_mm(x, w.transpose(1, 2), ends),
            flops=2 * rows * n * k,
        )


def attentions(made, big):
    shapes = [(16384, 32, 8, 128), (4096, 32, 8, 128)] if big else [(64, 4, 2, 16)]
    for tokens, heads, kv_heads, d in shapes:

        def make(tokens=tokens, heads=heads, kv_heads=kv_heads, d=d):
            q = torch.randn(1, tokens, heads, d, **made)
            return q, *(torch.randn(1, tokens, kv_heads, d, **made) for _ in range(2))

        def theirs(q, k, v):
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        yield case(
            f"attention, causal, {tokens} tokens, {heads}:{kv_heads} heads of {d}; torch: SDPA",
            make,
            lambda q, k, v: tw.attention(q, k, v, causal=True),
            theirs,
            flops=2 * tokens * tokens * heads * d,
        )


def movers(made, big):
    tokens, hidden, top_k, experts = (4096, 7168, 8, 64) if big else (16, 32, 2, 4)

    def make():
        x = torch.randn(tokens, hidden, **made)
        scores = torch.rand(tokens, experts, device=made["device"])
        return x, scores.topk(top_k, dim=1).indices

    def sorted_rows(x, idx):
        order = torch.sort(idx.view(-1), stable=True).indices
        counts = torch.bincount(idx.view(-1), minlength=experts)
        return x[order // top_k], counts

    size = made["dtype"].itemsize
    yield case(
        f"permute, {tokens} tokens of {hidden}, top {top_k} of {experts}; torch: sort and index",
        make,
        lambda x, idx: tw.permute(x, idx, num_experts=experts),
        sorted_rows,
        bytes_=tokens * hidden * size * (1 + top_k),
    )
    rows = tokens * top_k

    # Blocks of 128 where rows have them.
    recipe, wide = ("block1x128", 128) if hidden % 128 == 0 else ("mx1x32", 32)

    def by_blocks(x):
        blocks = x.view(rows, hidden // wide, wide).float()
        scales = blocks.abs().amax(-1, keepdim=True) / 448.0
        return (blocks / scales).to(torch.float8_e4m3fn), scales

    yield case(
        f"quantize {recipe}, {rows}x{hidden}; torch: amax, division, cast",
        lambda: (torch.randn(rows, hidden, **made),),
        lambda x: tw.quantize(x, recipe),
        by_blocks,
        bytes_=rows * hidden * (size + 1),
    )


def measured(call, args, device):
    if device.type == "cpu":
        start = time.perf_counter()
        call(*args)
        return (time.perf_counter() - start) * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call(*args)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def run(c, device, times):
    inputs = [c["make"]() for _ in range(ROTATED)]
    sides = {"ours": c["ours"], "torch": c["theirs"]}
    all_us = {name: [] for name in sides}
    for i, args in zip(range(times + 5), itertools.cycle(inputs)):
        for name, call in sides.items():
            us = measured(call, args, device)
            if i >= 5:
                all_us[name].append(us)
    medians = {f"{n}_us": round(statistics.median(v), 1) for n, v in all_us.items()}
    row = {"what": c["what"], **medians}
    row["ratio"] = round(row["torch_us"] / row["ours_us"], 3)
    if c["flops"]:
        row["ours_tflops"] = round(c["flops"] / row["ours_us"] / 1e6, 1)
    if c["bytes"]:
        row["ours_gb_s"] = round(c["bytes"] / row["ours_us"] / 1e3, 1)
    return row


@torch.no_grad()
def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--device", default="cuda")
    p.add_argument("--times", type=int, default=50)
    p.add_argument("--json", action="store_true", help="a line of JSON for each row")
    args = p.parse_args()
    device = torch.device(args.device)
    big = device.type == "cuda"
    made = dict(device=device, dtype=torch.bfloat16 if big else torch.float32)
    name = torch.cuda.get_device_name() if big else "cpu"
    about = {"torch": torch.__version__, "tilewire": tilewire.__version__, "device": name}
    torch.manual_seed(0)
    with tw.init(device=device):
        for c in itertools.chain(*(f(made, big) for f in (matmuls, grouped, attentions, movers))):
            row = run(c, device, args.times)
            if args.json:
                print(json.dumps({**row, **about}), flush=True)
            else:
                times = f"{row['ours_us']:10.1f} {row['torch_us']:10.1f} us"
                print(f"{times}  {row['ratio']:6.3f}  {row['what']}")


if __name__ == "__main__":
    main()
