"""One rank without torch: `_native` with pointers, streams and captures of the driver, by ctypes.

`rank.py NUMBERS`: reads operands from the folder of the job, and writes what each call gave there.
"""

import ctypes
import os
import sys
import threading
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint8, c_uint16
from ctypes import c_uint32, c_uint64, c_void_p, py_object

import numpy as np

from tilewire import _native
from tilewire._errors import NotPrepared

CUDA, RELAXED = 2, 2
CODES = {np.float32: 2, np.int32: 0}
cuda = ctypes.CDLL("libcuda.so.1")


def checked(name, *args):
    code = getattr(cuda, name)(*args)
    if code != 0:
        raise RuntimeError(f"{name}: error {code}")


# A framework, as DLPack's exchange interface 1.3 has it: a tensor is an address and a shape.


class DlTensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


View = ctypes.CFUNCTYPE(c_int, py_object, POINTER(DlTensor))
CurrentStream = ctypes.CFUNCTYPE(c_int, c_int32, c_int32, POINTER(c_void_p))


class ExchangeApi(ctypes.Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("prev", c_void_p),
        ("allocator", c_void_p),
        ("from_object", c_void_p),
        ("to_object", c_void_p),
        ("view", View),
        ("stream", CurrentStream),
    ]


class Raw:
    """An array of f32 or i32 in memory of ``cuMemAlloc``."""

    def __init__(self, shape, device, dtype=np.float32):
        self.dtype = dtype
        self.shape, self.device = (c_int64 * len(shape))(*shape), device
        self.dims, self.len = tuple(shape), 4 * int(np.prod(shape))
        address = c_uint64()
        checked("cuMemAlloc_v2", byref(address), c_size_t(self.len))
        self.address = address.value

    def write(self, values):
        values = np.ascontiguousarray(values, dtype=self.dtype)
        if values.shape != self.dims:
            raise ValueError(f"{values.shape} for {self.dims}")
        checked("cuMemcpyHtoD_v2", c_uint64(self.address), values.ctypes, c_size_t(self.len))
        return self

    def read(self):
        values = np.empty(self.dims, dtype=self.dtype)
        checked("cuMemcpyDtoH_v2", values.ctypes, c_uint64(self.address), c_size_t(self.len))
        return values


@View
def view(tensor, out):
    t = out.contents
    t.data, t.device_type, t.device_id = tensor.address, CUDA, tensor.device
    t.ndim, t.code, t.bits, t.lanes = len(tensor.dims), CODES[tensor.dtype], 32, 1
    # No strides: rows one behind the other.
    t.shape, t.strides, t.byte_offset = tensor.shape, None, 0
    return 0


# The current stream of each thread.
current = threading.local()


@CurrentStream
def current_stream(kind, ordinal, out):
    out[0] = getattr(current, "stream", 0)
    return 0


TABLE = ExchangeApi(1, 3, None, None, None, None, view, current_stream)
NAME = b"dlpack_exchange_api"
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = py_object, [c_void_p, c_char_p, c_void_p]
Raw.__dlpack_c_exchange_api__ = new_capsule(ctypes.addressof(TABLE), NAME, None)


def elsewhere(call, stream):
    """Runs ``call`` on a thread of its own, where ``stream`` is current and no context is."""
    failed = []

    def run():
        current.stream = stream
        try:
            call()
        except BaseException as e:  # raised by who waits for the thread
            failed.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


class Job:
    """The tensors of a rank, and the calls that its job makes."""

    def __init__(self, numbers, rank, world):
        self.numbers, self.world = numbers, world.handle
        self.rows = self.numbers["x"].shape[2]
        size, k = world.size, self.numbers["x"].shape[3]
        n = self.numbers["w"].shape[1]
        self.w = Raw((n, k), rank).write(self.numbers["w"][rank])
        self.x = Raw((self.rows, k), rank)
        self.whole = Raw((size * self.rows, k), rank)
        self.products = Raw((size * self.rows, n), rank)
        self.sums = Raw((self.rows, k), rank)
        self.rank = rank

    def calls(self):
        """What a step queues: rows of all, products with them, and back to sums of my rows."""
        _native.all_gather(self.world, self.x, self.whole, None, False)
        none = (None,) * 5
        args = (self.world, self.x, self.w, None, self.products, *none, False, None, False, False)
        _native.ag_gemm(*args)
        # The weight as it lies is [n, k]: products times it, added over the ranks.
        args = (self.world, self.products, self.w, None, None, self.sums, None, True)
        _native.gemm_rs(*args, None, None, False)

    def poison(self):
        for t in (self.whole, self.products, self.sums):
            t.write(np.full(t.dims, np.nan))

    def results(self):
        return [t.read() for t in (self.whole, self.products, self.sums)]


class Attention:
    """An attention of packed rows, by lists or by offsets in memory of the device: local, or of
    rows that are divided among two ranks of a world."""

    def __init__(self, numbers, rank, world=None):
        qkv, self.world, self.tokens = numbers["qkv"], world, numbers["qkv"].shape[1]
        if world:
            half = (self.tokens + 1) // 2
            qkv = qkv[:, rank * half : (rank + 1) * half]
        self.q, self.k, self.v = (Raw(a.shape, rank).write(a) for a in qkv)
        rows, heads, _ = self.q.dims
        self.out, self.lse = Raw(self.q.dims, rank), Raw((heads, rows), rank)
        self.cu = Raw(numbers["documents"].shape[1:], rank, np.int32)
        self.cu.write(np.zeros(self.cu.dims))

    def call(self, cu=None):
        spec = dict(left=None, right=0, scale=None, softcap=None, dropout_p=0.0, seed=0)
        spec.update(layout="contiguous", strategy=None, a2a_size=1, deterministic=True, tokens=None)
        lists = [] if cu is None else [int(n) for n in cu]
        spec.update(cu_q=lists, cu_kv=lists)
        tensors = dict(q=self.q, k=self.k, v=self.v, bias=None, sink=None)
        at = self.cu if cu is None else None
        tensors.update(out=self.out, lse=self.lse, cu_q=at, cu_kv=at, scales=None)
        if self.world is None:
            return _native.attention_fwd(spec, tensors)
        spec.update(strategy="all_gather", tokens=[self.tokens] * 2 if cu is None else None)
        _native.cp_attention_fwd(self.world.handle, spec, tensors, False, False, False)

    def poison(self):
        for t in (self.out, self.lse):
            t.write(np.full(t.dims, np.nan))

    def results(self):
        return [t.read() for t in (self.out, self.lse)]


def follow(attention, documents, stream):
    """What eager calls by lists give where these are of all rows, and replays of one graph whose
    offsets change."""
    found = []
    for cu in documents:
        attention.poison()
        if cu[-1] != attention.tokens:
            found.append(attention.results())
            continue
        elsewhere(lambda cu=cu: attention.call(cu), stream.value)
        checked("cuStreamSynchronize", stream)
        found.append(attention.results())
    if attention.world:
        # Its plan is of exactly so many rows, and none is made in a capture.
        elsewhere(attention.call, stream.value)
        checked("cuStreamSynchronize", stream)
    graph, exec_ = c_void_p(), c_void_p()
    checked("cuStreamBeginCapture_v2", stream, RELAXED)
    elsewhere(attention.call, stream.value)
    checked("cuStreamEndCapture", stream, byref(graph))
    checked("cuGraphInstantiateWithFlags", byref(exec_), graph, c_uint64(0))
    for cu in documents:
        attention.poison()
        attention.cu.write(cu)
        checked("cuGraphLaunch", exec_, stream)
        checked("cuStreamSynchronize", stream)
        found.append(attention.results())
    name = "divided" if attention.world else "attention"
    return {f"{name}_{n}": np.stack([f[i] for f in found]) for i, n in enumerate(("out", "lse"))}


def main():
    folder, rank = sys.argv[1], int(os.environ["RANK"])
    numbers = np.load(os.path.join(folder, "operands.npz"))
    context, stream = c_void_p(), c_void_p()
    checked("cuInit", 0)
    checked("cuDevicePrimaryCtxRetain", byref(context), rank)
    checked("cuCtxSetCurrent", context)
    checked("cuStreamCreate", byref(stream), 1)
    _native.use_exchange_api(Raw)
    world = _native.world_of_environment("vmm", rank, 64 << 20, 120.0, False)
    job = Job(numbers, rank, world)
    raw = stream.value

    # A capture that needs a plan is refused, and goes on.
    checked("cuStreamBeginCapture_v2", stream, RELAXED)
    try:
        elsewhere(job.calls, raw)
        raise SystemExit("a capture made a plan")
    except NotPrepared:
        pass
    graph, exec_ = c_void_p(), c_void_p()
    checked("cuStreamEndCapture", stream, byref(graph))

    eager = []
    for x in numbers["x"]:
        job.x.write(x[rank])
        job.poison()
        elsewhere(job.calls, raw)
        checked("cuStreamSynchronize", stream)
        eager.append(job.results())

    checked("cuStreamBeginCapture_v2", stream, RELAXED)
    elsewhere(job.calls, raw)
    checked("cuStreamEndCapture", stream, byref(graph))
    checked("cuGraphInstantiateWithFlags", byref(exec_), graph, c_uint64(0))
    replayed = []
    for x in numbers["x"]:
        job.x.write(x[rank])
        job.poison()
        checked("cuGraphLaunch", exec_, stream)
        checked("cuStreamSynchronize", stream)
        replayed.append(job.results())
    followed = {}
    for of in (None, world):
        followed |= follow(Attention(numbers, rank, of), numbers["documents"], stream)
    world.check()
    memory = world.memory()
    # Who leaves first ends what others wait for; nobody leaves before all have looked.
    world.barrier()
    world.finalize()

    names = ("whole", "products", "sums")
    out = {f"eager_{n}": np.stack([e[i] for e in eager]) for i, n in enumerate(names)}
    out.update({f"replayed_{n}": np.stack([r[i] for r in replayed]) for i, n in enumerate(names)})
    np.savez(os.path.join(folder, f"rank{rank}.npz"), plans=memory["plans"], **out, **followed)


if __name__ == "__main__":
    main()
