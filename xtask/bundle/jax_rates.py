#!/usr/bin/env python3
"""What JAX makes of the shapes of `rates attention` and `rates grouped`: the baseline of the same
call, a line of JSON each.

Attention by cuDNN (bf16) and by the kernel in Pallas that JAX ships, which takes f16 alone
(forward, causal); products of groups by that of `ragged_dot` in Pallas (bf16), with the faster of
two tiles. A time is that of ten calls behind one another, after a rest and a warm-up, by the host's
clock, a tenth of it; the median of five. Random inputs. Takes `attention` or `grouped`.
"""

import functools
import json
import os
import sys
import time
from statistics import median

# Memory as it is needed: others may use the GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
from shapes import GROUPED, sizes

ROUNDS, RUNS, WARM, REST_S = 5, 10, 3, 0.1


def time_us(launch):
    """Of a call. The host is ahead of the device: a call takes longer there than its launch."""
    times = []
    for _ in range(ROUNDS):
        time.sleep(REST_S)
        jax.block_until_ready([launch() for _ in range(WARM)])
        start = time.perf_counter()
        jax.block_until_ready([launch() for _ in range(RUNS)])
        times.append((time.perf_counter() - start) * 1e6 / RUNS)
    return median(times)


def tell(flops, launch, **what):
    us = time_us(launch)
    row = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, **what}
    print(json.dumps({**row, "us": round(us, 1), "tflops": round(flops / us / 1e6, 1)}), flush=True)


def random(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def by_cudnn(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def by_pallas(block_kv, q, k, v):
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    config = attention_mgpu.TuningConfig(
        block_q=64, block_kv=block_kv, max_concurrent_steps=2, causal=True
    )
    # The kernel does not scale its scores.
    return attention_mgpu.attention(q * q.shape[-1] ** -0.5, k, v, config)


def attention(seq, heads=32, kv_heads=8, dim=128):
    bf16 = random(1, 1, seq, heads, dim), *(random(i, 1, seq, kv_heads, dim) for i in [2, 3])
    f16 = tuple(x.astype(jnp.float16) for x in bf16)
    flops = 2.0 * seq * seq * dim * heads
    ways = {"cudnn": (by_cudnn, bf16)}
    for block_kv in [128, 64]:
        ways[f"pallas, {block_kv} keys, f16"] = functools.partial(by_pallas, block_kv), f16
    want = None
    for name, (way, inputs) in ways.items():
        compiled = jax.jit(way)
        out = compiled(*inputs).astype(jnp.float32)
        want = out if want is None else want
        worst = float(jnp.max(jnp.abs(out - want)))
        tell(
            flops,
            lambda: compiled(*inputs),
            work=f"jax {name}",
            seq=seq,
            apart=round(worst, 4),
            **{"pass": "forward"},
        )


def grouped(groups, rows, n, k, even):
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    x, w = random(1, rows, k), random(2, groups, k, n)
    splits = jnp.array(sizes(groups, rows, even), jnp.int32)
    best = None
    for block_m, block_n in [(128, 128), (64, 256)]:
        run = jax.jit(
            functools.partial(
                ragged_dot_mgpu.ragged_dot,
                block_m=block_m,
                block_n=block_n,
                block_k=64,
                max_concurrent_steps=4,
                grid_block_n=8,
            )
        )
        launch = lambda run=run: run(x, w, group_sizes=splits)
        try:
            us = time_us(launch)
        except Exception as e:  # Tiles that do not fit.
            print(f"tiles {block_m} x {block_n}: {str(e)[:200]}", file=sys.stderr)
            continue
        if best is None or us < best[0]:
            best = (us, launch, f"{block_m}x{block_n}")
    if best is None:
        print(f"{groups} groups of {rows} rows: no tiles fit", file=sys.stderr)
        return
    tell(
        2.0 * rows * n * k,
        best[1],
        work="jax ragged_dot in Pallas",
        groups=groups,
        rows=rows,
        n=n,
        k=k,
        even=even,
        tiles=best[2],
        **{"pass": "fprop"},
    )


def main():
    if sys.argv[1:] == ["attention"]:
        for seq in [4096, 16384, 32768]:
            attention(seq)
    elif sys.argv[1:] == ["grouped"]:
        # The others take it a minute each.
        for shape in GROUPED[:4]:
            for even in [True, False]:
                grouped(*shape, even)
    else:
        sys.exit("jax_rates.py attention|grouped")


if __name__ == "__main__":
    main()
