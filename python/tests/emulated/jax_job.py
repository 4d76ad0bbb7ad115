"""Calls of JAX on two emulated devices of one process, without JAX: `jax_job.py NUMBERS`.

A thread for each device, as XLA has them; every call once eagerly and then replayed from a capture.
"""

import ctypes
import json
import os
import sys
import threading
from ctypes import byref, c_size_t, c_uint64, c_void_p

import numpy as np
from xla import TYPES, Xla

from tilewire import _native

SIZE, RELAXED = 2, 2
cuda = ctypes.CDLL("libcuda.so.1")
NUMPY = {"f32": np.float32, "i32": np.int32, "u8": np.uint8, "f8e4m3": np.uint8}


def checked(name, *args):
    code = getattr(cuda, name)(*args)
    if code != 0:
        raise RuntimeError(f"{name}: error {code}")


class Raw:
    """An array in memory of ``cuMemAlloc``, of the device whose context is current."""

    def __init__(self, dtype, shape):
        self.dtype, self.dims = dtype, tuple(shape)
        self.len = TYPES[dtype][1] * int(np.prod(shape))
        address = c_uint64()
        checked("cuMemAlloc_v2", byref(address), c_size_t(self.len))
        self.address = address.value

    def write(self, values):
        values = np.ascontiguousarray(values, dtype=NUMPY[self.dtype]).reshape(self.dims)
        checked("cuMemcpyHtoD_v2", c_uint64(self.address), values.ctypes, c_size_t(self.len))

    def read(self):
        values = np.empty(self.dims, dtype=NUMPY[self.dtype])
        checked("cuMemcpyDtoH_v2", values.ctypes, c_uint64(self.address), c_size_t(self.len))
        return values


def on_all(f):
    """``f(device)`` on a thread for each device."""
    failed = []

    def run(device):
        try:
            f(device)
        except BaseException as e:  # raised by who waits for the threads
            failed.append(e)

    threads = [threading.Thread(target=run, args=(d,)) for d in range(SIZE)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    if failed:
        raise failed[0]


CAPACITY, EXPERTS = 16, 4


def local_shapes(tokens, k):
    """Of the calls that need no other device, and of the gradients."""
    f32 = lambda *shape: ("f32", shape)  # noqa: E731
    shapes = {"own": f32(CAPACITY, k), "own_w": f32(CAPACITY), "gate": f32(tokens, 2)}
    shapes |= {"counts": ("i32", (EXPERTS + 2, 2)), "again": f32(tokens, k)}
    shapes |= {"dx": f32(tokens, k), "dw": f32(tokens, 2), "d_own": f32(CAPACITY, k)}
    shapes |= {"d_gate": f32(tokens, 2), "codes": ("f8e4m3", (tokens, k)), "scale": f32(1)}
    shapes |= {"scales": f32(tokens, 1), "fine": ("f8e4m3", (tokens, k))}
    return shapes | {"values": f32(tokens, k)}


def local_calls(program):
    """There and back with a map that each call makes anew, and FP8: of all devices, and of one."""
    p = dict(axes=[], params=dict(num_experts=EXPERTS, capacity=CAPACITY, align=2))
    idx, fine = {"topk_idx": "idx"}, dict(recipe="block1x128")
    there = {**idx, "x": "tokens", "topk_weights": "gate"}
    own = {"rows": "own", "row_weights": "own_w", "counts": "counts"}
    back = {**idx, "rows": "own", "weights": "gate"}
    return [
        program("permute", there, own, **p),
        program("unpermute", back, {"out": "again"}, **p),
        program(
            "permute_bwd",
            {**idx, "d_rows": "own", "d_row_weights": "own_w"},
            {"dx": "dx", "dw": "dw"},
            **p,
        ),
        program(
            "unpermute_bwd",
            {**idx, "d_out": "tokens", "weights": "gate", "rows": "own"},
            {"d_rows": "d_own", "dw": "d_gate"},
            **p,
        ),
        program(
            "quantize",
            {"x": "tokens"},
            {"data": "codes", "scales": "scale"},
            params=dict(recipe="tensor"),
        ),
        program(
            "quantize",
            {"x": "tokens"},
            {"data": "fine", "scales": "scales"},
            axes=[],
            params=fine,
        ),
        program(
            "dequantize",
            {"data": "fine", "data_scales": "scales"},
            {"out": "values"},
            axes=[],
            params=fine,
        ),
    ]


RESULTS = ("whole", "products", "sums", "back", "own", "own_w", "again", "dx", "dw", "d_own")
RESULTS += ("d_gate", "scale", "scales", "values", "counts")


def programs(xla, numbers):
    """Shapes of all arrays by name, and what a step calls: programs and the names of their
    arrays."""
    rows, k = numbers["x"].shape[2:]
    n, tokens = numbers["w"].shape[1], numbers["idx"].shape[1]
    layer = dict(num_experts=4, max_tokens=tokens, hidden=k, top_k=2, capacity=None, align=1)
    layer |= dict(layout="expert_major", overflow="drop", dtype="f32", out="f32", num_scales=0)
    layer |= dict(num_sms=None)
    probe = dict(op="ep_combine_bwd", world=0, site=0, axes=[], args=[], rets=[], ep=layer)
    recv, capacity, state = _native.jax_layer(json.dumps(probe), SIZE)
    f32 = lambda *shape: ("f32", shape)  # noqa: E731
    shapes = {"x": f32(rows, k), "w": f32(n, k), "whole": f32(SIZE * rows, k)}
    shapes |= {"products": f32(SIZE * rows, n), "sums": f32(rows, k), "tokens": f32(tokens, k)}
    shapes |= {"idx": ("i32", (tokens, 2)), "rows": f32(recv, k), "handle": ("u8", (state,))}
    shapes |= {"back": f32(tokens, k)}

    def program(op, args, rets, **more):
        of = lambda names: {n: shapes[a] for n, a in names.items()}  # noqa: E731
        run = xla.compiled(op, of(args), of(rets), **more)
        return run, [*args.values(), *rets.values()]

    calls = [
        program("all_gather", {"x": "x"}, {"out": "whole"}),
        program("ag_gemm", {"x": "x", "w": "w"}, {"out": "products"}),
        program("gemm_rs", {"x": "products", "w": "w"}, {"out": "sums"}, params={"kn": True}),
        program(
            "ep_dispatch",
            {"topk_idx": "idx", "x": "tokens"},
            {"rows": "rows", "handle": "handle"},
            ep=layer,
        ),
        # By another plan, which knows the routing from the handle alone.
        program(
            "ep_combine",
            {"handle": "handle", "y": "rows"},
            {"out": "back"},
            ep=layer,
            params={"buffer": 1},
        ),
    ]
    shapes |= local_shapes(tokens, k)
    calls += local_calls(program)
    if capacity != recv:
        raise RuntimeError("expert-major rows are those that come")
    return shapes, calls


def main():
    folder = sys.argv[1]
    numbers = np.load(os.path.join(folder, "operands.npz"))
    contexts, streams = [c_void_p() for _ in range(SIZE)], [c_void_p() for _ in range(SIZE)]
    checked("cuInit", 0)
    for d in range(SIZE):
        checked("cuDevicePrimaryCtxRetain", byref(contexts[d]), d)
        checked("cuCtxSetCurrent", contexts[d])
        checked("cuStreamCreate", byref(streams[d]), 1)
    place = [("x", SIZE)], [(d, d) for d in range(SIZE)], None, "jax.1"
    kind = _native.jax_init(1, *place, "auto", True, 64 << 20, 120.0)
    xla = Xla([s.value for s in streams])
    shapes, calls = programs(xla, numbers)
    arrays, out = [None] * SIZE, {}

    def step(device):
        for run, names in calls:
            run(device, *(arrays[device][n] for n in names))

    def rank(device):
        checked("cuCtxSetCurrent", contexts[device])
        mine = arrays[device] = {n: Raw(*s) for n, s in shapes.items()}
        mine["w"].write(numbers["w"][device])
        mine["tokens"].write(numbers["tokens"][device])
        mine["gate"].write(numbers["gate"][device])
        graph, exec_, stream = c_void_p(), c_void_p(), streams[device]

        def look(i, how):
            mine["x"].write(numbers["x"][i, device])
            mine["idx"].write(numbers["idx"][device] if i == 0 else numbers["idx"][device][::-1])
            for n in RESULTS:
                nothing = np.nan if mine[n].dtype == "f32" else -1
                mine[n].write(np.full(mine[n].dims, nothing))
            how()
            checked("cuStreamSynchronize", stream)
            return {n: mine[n].read() for n in RESULTS}

        found = [look(i, lambda: step(device)) for i in range(2)]
        checked("cuStreamBeginCapture_v2", stream, RELAXED)
        step(device)
        checked("cuStreamEndCapture", stream, byref(graph))
        checked("cuGraphInstantiateWithFlags", byref(exec_), graph, c_uint64(0))
        found += [look(i, lambda: checked("cuGraphLaunch", exec_, stream)) for i in range(2)]
        for n in RESULTS:
            out[f"{n}{device}"] = np.stack([f[n] for f in found])

    on_all(rank)
    _native.jax_check(1)
    used = _native.jax_used_bytes(1)
    _native.jax_finalize(1)
    np.savez(os.path.join(folder, "results.npz"), kind=kind, used=used, **out)
    # As at the end of any program of JAX's.
    _native.jax_leave_all()


if __name__ == "__main__":
    main()
