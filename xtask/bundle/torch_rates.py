#!/usr/bin/env python3
"""What torch makes of the shapes of `rates attention`, `rates decode` and `rates grouped`: the
baseline of the same call, a line of JSON each.

FlashAttention-2 and cuDNN by scaled_dot_product_attention; a window and packed documents by
FlashAttention-2 itself and by flex_attention, compiled; products of groups by torch._grouped_mm.
Medians of 20, ten behind one another after a rest and a warm-up, and ten once more; random inputs,
bf16. Takes `attention`, `masks`, `decode` or `grouped`; with `sustained` behind it each way runs
for a second and a half, of which the second half counts, as in `rates ... sustained`.
"""

import json
import sys
import time
from statistics import median

import torch
from shapes import GROUPED, sizes
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

ROUNDS, RUNS, WARM, REST_S = 2, 10, 3, 0.1


HALF_US = 750e3


def sustained_us(launch):
    """The mean of a launch in the second half of a second and a half."""

    def some(num):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(num):
            launch()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3 / num

    num = max(1, round(HALF_US / [some(WARM) for _ in range(2)][1]))
    return [some(num) for _ in range(2)][1]


def time_us(launch):
    if "sustained" in sys.argv:
        return sustained_us(launch)
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        time.sleep(REST_S)
        for _ in range(WARM):
            launch()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(RUNS + 1)]
        events[0].record()
        for e in events[1:]:
            launch()
            e.record()
        torch.cuda.synchronize()
        times += [a.elapsed_time(b) * 1e3 for a, b in zip(events, events[1:])]
    return median(times)


def tell(flops, launch, **what):
    us = time_us(launch)
    row = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        **what,
        "us": round(us, 1),
    }
    row["tflops"] = round(flops / us / 1e6, 1)
    if "sustained" in sys.argv:
        row["sustained"] = True
    print(json.dumps(row), flush=True)


def random(*shape, grad=False):
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda", requires_grad=grad)


def attention(seq, heads=32, kv_heads=8, dim=128):
    q, k, v = (
        random(1, heads, seq, dim, grad=True),
        *(random(1, kv_heads, seq, dim, grad=True) for _ in range(2)),
    )
    d_out = random(1, heads, seq, dim)
    flops = 2.0 * seq * seq * dim * heads
    for name, backend in [
        ("flash attention", SDPBackend.FLASH_ATTENTION),
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
    ]:
        what = {"work": f"torch {name}", "seq": seq}
        if name == "cudnn":
            what["cudnn"] = torch.backends.cudnn.version()
        with sdpa_kernel([backend]):
            fwd = lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            with torch.no_grad():
                tell(flops, fwd, **what, **{"pass": "forward"})
            out = fwd()
            bwd = lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)
            tell(2.5 * flops, bwd, **what, **{"pass": "backward"})


def flex(seq, heads, kv_heads, dim, visible):
    """A forward and a backward pass by flex_attention, of a mask of queries and keys."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q = random(1, heads, seq, dim, grad=True)
    k, v = (random(1, kv_heads, seq, dim, grad=True) for _ in range(2))
    d_out = random(1, heads, seq, dim)
    seen = create_block_mask(visible, None, None, seq, seq, device="cuda", _compile=True)
    compiled = torch.compile(flex_attention, dynamic=False)
    fwd = lambda: compiled(q, k, v, block_mask=seen, enable_gqa=True)
    out = fwd()
    return fwd, lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)


def flash(seq, heads, kv_heads, dim, document, window):
    """The same by FlashAttention-2 as torch ships it, of packed documents, or a window."""
    q, d_out = random(seq, heads, dim), random(seq, heads, dim)
    k, v = random(seq, kv_heads, dim), random(seq, kv_heads, dim)
    ends = torch.arange(0, seq + 1, document, dtype=torch.int32, device="cuda")
    mask = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
    packed = (ends, ends, document, document, 0.0, True)
    fwd = lambda: torch.ops.aten._flash_attention_forward(q, k, v, *packed, False, **mask)
    out, lse, state, unused, _ = fwd()
    bwd = lambda: torch.ops.aten._flash_attention_backward(
        d_out, q, k, v, out, lse, *packed, state, unused, **mask
    )
    return fwd, bwd


def masks(seq=32768):
    """A window of 1024 keys, and documents of equal rows, as `rates attention` has them."""
    cases = [(seq, 1024, 64, 8, 64)] + [(d, 0, 32, 8, 128) for d in [256, 1024, 8192]]
    for document, window, heads, kv_heads, dim in cases:
        if window:
            pairs = seq * window - window * window / 2
            visible = lambda b, h, q, kv, w=window: (q >= kv) & (q - kv < w)
        else:
            pairs = seq * document / 2
            visible = lambda b, h, q, kv, d=document: (q >= kv) & (q // d == kv // d)
        shape = (seq, heads, kv_heads, dim)
        for name, passes in [
            ("flex_attention", lambda: flex(*shape, visible)),
            ("flash attention", lambda: flash(*shape, document, window)),
        ]:
            what = {"work": f"torch {name}", "seq": seq, "document": document, "window": window}
            what |= {"heads": f"{heads}/{kv_heads}", "dim": dim}
            fwd, bwd = passes()
            flops = 4.0 * pairs * dim * heads
            with torch.no_grad():
                tell(flops, fwd, **what, **{"pass": "forward"})
            tell(2.5 * flops, bwd, **what, **{"pass": "backward"})


COLD_BYTES, LAUNCHES = 400 << 20, 8


def decode(num, queries, keys, heads=32, kv_heads=8, dim=128):
    """Few queries, which see all keys: graphs whose launches take copies of these in turn."""
    count = 4 * num * keys * kv_heads * dim
    copies = -(-COLD_BYTES // count) + 1
    q = random(num, heads, queries, dim)
    k, v = ([random(num, kv_heads, keys, dim) for _ in range(copies)] for _ in range(2))
    launches = -(-LAUNCHES // copies) * copies
    for name, backend in [
        ("flash attention", SDPBackend.FLASH_ATTENTION),
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
    ]:
        attend = lambda i: scaled_dot_product_attention(q, k[i], v[i], enable_gqa=True)
        with torch.no_grad(), sdpa_kernel([backend]):
            attend(0)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for i in range(launches):
                    attend(i % copies)
        us = time_us(graph.replay) / launches
        row = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "work": f"torch {name}",
            "sequences": num,
            "queries": queries,
            "keys": num * keys,
            "heads": f"{heads}/{kv_heads}",
            "us": round(us, 2),
            "tb_per_s": round(count / us / 1e6, 3),
        }
        print(json.dumps(row), flush=True)


DECODE = [(1, q, kib << 10, 32, 8) for kib in [1, 4, 16, 64, 128] for q in [1, 4, 16]] + [
    (1, 1, 128 << 10, 64, 8),
    (1, 4, 128 << 10, 64, 8),
    (8, 1, 4 << 10, 32, 32),
    (16, 1, 32 << 10, 8, 1),
    (16, 1, 8 << 10, 32, 8),
    (64, 1, 4 << 10, 32, 8),
]


def grouped(groups, rows, n, k, even):
    ends = torch.tensor(sizes(groups, rows, even)).cumsum(0).to(device="cuda", dtype=torch.int32)
    x, dy, w = random(rows, k), random(rows, n), random(groups, n, k)
    passes = {
        "fprop": lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends),
        "dgrad": lambda: torch._grouped_mm(dy, w, offs=ends),
        "wgrad": lambda: torch._grouped_mm(dy.t(), x, offs=ends),
    }
    for name, launch in passes.items():
        shape = {"groups": groups, "rows": rows, "n": n, "k": k, "even": even, "pass": name}
        tell(2.0 * rows * n * k, launch, work="torch._grouped_mm", **shape)


def main():
    torch.manual_seed(1)
    what = [a for a in sys.argv[1:] if a != "sustained"]
    if what == ["attention"]:
        for seq in [4096, 8192, 16384, 32768]:
            attention(seq)
    elif what == ["masks"]:
        masks()
    elif what == ["decode"]:
        for shape in DECODE:
            decode(*shape)
    elif what == ["grouped"]:
        for shape in GROUPED:
            for even in [True, False]:
                grouped(*shape, even)
    else:
        sys.exit("torch_rates.py attention|masks|decode|grouped [sustained]")


if __name__ == "__main__":
    main()
