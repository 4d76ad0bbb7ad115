"""The operations with their gradients.

A gradient is that of the sum of all ranks' losses, which is what a sharded tensor needs: shards of
one global tensor get the shards of its gradient. ``gemm_ar`` alone differs, as tensor parallelism
wants it: its output is the same on all ranks, and so must its gradient be.
"""

import torch
from torch.autograd import forward_ad

from .. import _native
from .._errors import InvalidArgument, Unsupported
from . import _ops
from ._nodes import Differentiable, QuickType
from ._quant import QTensor, fp8_operands
from ._world import handle_of


# Calls that nothing else watches go the shortest way, in Rust: `_native.quick_*` return None where
# a function of `watching` is truthy, where a forward-mode level is open, and for tensors that are
# not plain.
_guards = torch._C._dynamo.guards
_native.use_torch(
    {
        "tensor": torch.Tensor,
        "parameter": torch.nn.Parameter,
        "grad_enabled": torch.is_grad_enabled,
        "watching": [
            torch._C._len_torch_dispatch_stack,
            torch._C._are_functorch_transforms_active,
            torch._C._is_any_autocast_enabled,
            torch.autograd._profiler_enabled,
        ],
        "forward_ad": forward_ad,
        # Only in torch with CUDA.
        "current_device": getattr(torch._C, "_cuda_getDevice", None),
        "current_stream": getattr(torch._C, "_cuda_getCurrentStream", None),
        # What inductor makes tensors with.
        "empty_cpu": getattr(_guards, "_empty_strided_cpu", None),
        "empty_cuda": getattr(_guards, "_empty_strided_cuda", None),
    }
)
# Fake tensors, which all other compilers pass, are not plain: `_native.quick_*` leave them alone.
_compiling = torch.compiler.is_dynamo_compiling


def _once():
    """Second derivatives would be wrong without an error: backward passes call kernels."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(
            "tilewire operations have no second derivatives: use create_graph=False"
        )


def _needs_grad(*tensors):
    if forward_ad._current_level >= 0 and not torch.compiler.is_compiling():
        _no_tangents(tensors)
    if not torch.is_grad_enabled():
        return False
    for t in tensors:
        if t is not None and t.requires_grad:
            # Inside a transform of torch.func the operation itself raises, with its name.
            return not torch._C._are_functorch_transforms_active()
    return False


def _no_tangents(tensors):
    if torch._C._are_functorch_transforms_active():
        return
    real = [t for t in tensors if isinstance(t, torch.Tensor)]
    if any(forward_ad.unpack_dual(t).tangent is not None for t in real):
        raise Unsupported("tilewire operations have no forward-mode derivatives")


def _ordinary(op, *tensors):
    """Raises for tensors that stand for others: a call without an operation of torch's sees no more
    than their memory."""
    if torch._C._are_functorch_transforms_active():
        raise Unsupported(f"tilewire.{op} has no transforms of torch.func (vmap, grad, jvp, ...)")
    for t in tensors:
        if hasattr(t, "device_mesh"):
            raise Unsupported(f"tilewire.{op} takes no DTensor: pass `tensor.to_local()`")
    if forward_ad._current_level >= 0:
        _no_tangents(tensors)


def _check(x, w):
    """What the shapes of fake tensors are made of must be there; the rest is checked below."""
    if not (isinstance(x, torch.Tensor) and isinstance(w, torch.Tensor)):
        raise TypeError(f"`x` and `w` must be tensors, not {type(x).__name__}, {type(w).__name__}")
    if x.dim() < 2 or w.dim() != 2:
        raise InvalidArgument(
            f"`x` must have rows and columns and `w` be a matrix, not {tuple(x.shape)} and"
            f" {tuple(w.shape)}: a dimension is missing"
        )


def _flat(x):
    """Rows of a tensor: all dimensions but the last are one."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _folded(out, x):
    """``out`` [rows, n] with the inner dimensions of ``x`` [.., .., k]."""
    return out if x.dim() == 2 else out.view(-1, *x.shape[1:-1], out.shape[-1])


def _rows_of(x, rows):
    """``rows`` along the first dimension as rows of the flat matrix."""
    if rows is None:
        return None
    inner = 1
    for n in x.shape[1:-1]:
        inner *= n
    return [int(r) * inner for r in rows]


def _even_rows(x, world):
    """Shards of the first dimension; none where all are equal, which needs no plan of its own."""
    size = _ops.size_of(world)
    m = x.shape[0]
    if m % size == 0:
        return None
    return _rows_of(x, _even_split(m, size))


def _even_split(m, size):
    return [m // size + (1 if r < m % size else 0) for r in range(size)]


def _autocast_dtype(x):
    """The type of an autocast region on the device of ``x``; None outside of one."""
    if not torch._C._is_any_autocast_enabled():
        return None
    kind = x.device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return None
    if x.dtype == torch.float64:
        # As torch: what asks for so much precision keeps it.
        return None
    return torch.get_autocast_dtype(kind)


def _autocast(x, w, bias):
    """Operands in the type of an autocast region, as linear layers take them."""
    dtype = _autocast_dtype(x)
    if dtype is None:
        return x, w, bias
    # The sums are made in f32 either way; a bias in f32 costs nothing.
    return x.to(dtype), w.to(dtype), bias


def _bias_of(bias, x):
    """A bias in a type that kernels take: f32, or that of the result."""
    return bias if bias is None or bias.dtype in (torch.float32, x.dtype) else bias.float()


def _activation_backward(dy, aux, act):
    if act is None:
        return dy
    if act == "relu":
        return torch.ops.aten.threshold_backward(dy, aux, 0)
    if act == "gelu":
        return torch.ops.aten.gelu_backward(dy, aux, approximate="tanh")
    gate, up = aux.chunk(2, dim=-1)
    gate, up, d = gate.float(), up.float(), dy.float()
    s = torch.sigmoid(gate)
    silu = gate * s
    d_gate = d * up * (s + silu * (1 - s))
    return torch.cat((d_gate, d * silu), dim=-1).to(dy.dtype)


def _grad_bias(dz, bias_dtype):
    return None if bias_dtype is None else dz.sum(0, dtype=torch.float32).to(bias_dtype)


def _quick_bias(needs, dz, bias_dtype):
    """The gradient of a bias as a tuple: empty where the node has none."""
    return tuple(_grad_bias(dz, bias_dtype) if needed else None for needed in needs)


class _AgGemm(Differentiable):
    @staticmethod
    def forward(ctx, x, w, bias, world, act, rows, algo, returned):
        ctx.set_materialize_grads(False)
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        base, kn = _ops.weight_order(w)
        args = (x, base, _bias_of(bias, x), world, act, rows, kn, algo, needs_x)
        aux = None
        if act is not None:
            out, gathered, aux = _ops.ag_gemm_aux(*args, returned)
        elif returned or needs_w and _ops.size_of(world) > 1:
            out, gathered = _ops.ag_gemm_gather(*args, returned)
        else:
            # One rank has gathered its own rows: nothing is copied for the gradient of w.
            out, gathered = _ops.ag_gemm(*args), x
        ctx.save_for_backward(base, gathered if needs_w else None, aux)
        ctx.args = (world, act, rows, kn, algo)
        ctx.bias_dtype = bias.dtype if needs_bias else None
        return (out, gathered) if returned else out

    @staticmethod
    def backward(ctx, dy, dg=None):
        _once()
        w, gathered, aux = ctx.saved_tensors
        world, act, rows, kn, algo = ctx.args
        needs_x, needs_w, _ = ctx.needs_input_grad[:3]
        dx = dw = dbias = None
        if dy is not None:
            dz = _activation_backward(dy.contiguous(), aux, act)
            if needs_x:
                dx = _ops.gemm_rs(dz, w, None, world, rows, not kn, None, algo, False)
            if needs_w:
                dw = dz.t() @ gathered
            dbias = _grad_bias(dz, ctx.bias_dtype)
        if dg is not None and needs_x:
            d = _ops.reduce_scatter(dg.contiguous(), world, "sum", rows, False)
            dx = d if dx is None else dx + d
        return dx, dw, dbias, None, None, None, None, None


class _QuickAgGemm(Differentiable, metaclass=QuickType):
    """Without activation, uneven rows and returned rows. Tensors keep their inner dimensions.
    ``_native.quick_ag_gemm`` keeps the other arguments, as for all ``_Quick`` nodes."""

    forward = _native.quick_ag_gemm_node

    @staticmethod
    def backward(ctx, dy):
        _once()
        w, gathered = ctx.saved_tensors
        world, algo, bias_dtype = ctx.args
        needs_x, needs_w, *rest = ctx.needs_input_grad
        dz = _flat(dy.contiguous())
        dx = dw = None
        if needs_x:
            w, kn = _ops.weight_order(w)
            dx = _ops.gemm_rs(dz, w, None, world, None, not kn, None, algo, False)
            dx = _folded(dx, dy)
        if needs_w:
            dw = dz.t() @ _flat(gathered)
        return dx, dw, *_quick_bias(rest, dz, bias_dtype)


_ag_gemm_node = _QuickAgGemm._apply


def ag_gemm(
    x,
    w,
    group=None,
    *,
    bias=None,
    activation=None,
    rows=None,
    return_gathered=False,
    algo=None,
):
    """``act(all_gather(x) @ w.T + bias)``: the column-parallel linear layer.

    Each rank sends its rows in chunks and multiplies those of the others as they come.

    Args:
        x: my rows, [m / P, k] or [m / P, ..., k]; f32, bf16 or f16. Or a :class:`QTensor` [m / P,
            k] with one scale for the tensors of this group; then the result is bf16.
        w: my part of the weight, [n, k], of x's dtype; a transposed view of [k, n] is used as it
            lies. A QTensor with one scale if x is one.
        group: a World, a ProcessGroup that has one, or None for the first world.
        bias: [n].
        activation: None, "relu", "gelu" (tanh form) or "swiglu" (halves of n: silu(first) *
            second).
        rows: rows of each rank along the first dimension, where they differ.
        return_gathered: return the gathered x [m, ..., k], too; it has a gradient.
        algo: "fused", "pipelined", "ring" or "sequential". Default: what is predicted fastest.

    Returns:
        [m, ..., n] ([m, ..., n / 2] for swiglu), or (that, gathered x).

    Raises:
        InvalidArgument: shapes, dtypes or devices do not fit.
        Mismatch: another rank called something else.
        NotPrepared: a capture is in progress, and this shape was not called before it.
    """
    world = handle_of(group)
    if rows is None and not return_gathered and not _compiling():
        y = _native.quick_ag_gemm(world, x, w, bias, activation, algo)
        if y is True:
            return _ag_gemm_node(x, w) if bias is None else _ag_gemm_node(x, w, bias)
        if y is not None:
            return y
    if isinstance(x, QTensor) or isinstance(w, QTensor):
        if return_gathered:
            raise InvalidArgument("ag_gemm: a gathered QTensor is not returned: use all_gather")
        x, w, bias, scale = fp8_operands("ag_gemm", x, w, bias, world)
        rows = _rows_of(x, rows)
        return _ops.ag_gemm(x, w, bias, world, activation, rows, False, algo, False, scale)
    _check(x, w)
    x, w, bias = _autocast(x, w, bias)
    flat, rows_flat = _flat(x), _rows_of(x, rows)
    if _needs_grad(x, w, bias):
        y = _AgGemm.run(flat, w, bias, world, activation, rows_flat, algo, return_gathered)
        y, gathered = y if return_gathered else (y, None)
    else:
        base, kn = _ops.weight_order(w)
        args = (flat, base, _bias_of(bias, x), world, activation, rows_flat, kn, algo, False)
        if return_gathered:
            y, gathered = _ops.ag_gemm_gather(*args, True)
        else:
            y, gathered = _ops.ag_gemm(*args), None
    y = _folded(y, x)
    return (y, _folded(gathered, x)) if return_gathered else y


class _GemmRs(Differentiable):
    @staticmethod
    def forward(ctx, x, w, bias, world, rows, wire, algo):
        ctx.set_materialize_grads(False)
        base, kn = _ops.weight_order(w)
        out = _ops.gemm_rs(x, base, _bias_of(bias, x), world, rows, kn, wire, algo, True)
        _, needs_w, needs_bias = ctx.needs_input_grad[:3]
        ctx.save_for_backward(base, x if needs_w else None)
        ctx.args = (world, rows, kn, algo)
        ctx.bias_dtype = bias.dtype if needs_bias else None
        return out

    @staticmethod
    def backward(ctx, dy):
        _once()
        w, x = ctx.saved_tensors
        world, rows, kn, algo = ctx.args
        if dy is None:
            return None, None, None, None, None, None, None
        dx, dy_all = _ops.ag_gemm_gather(
            dy.contiguous(), w, None, world, None, rows, not kn, algo, False, False
        )
        dw = dy_all.t() @ x if ctx.needs_input_grad[1] else None
        return dx, dw, _grad_bias(dy_all, ctx.bias_dtype), None, None, None, None


class _QuickGemmRs(Differentiable, metaclass=QuickType):
    """With as many rows for each rank. Tensors keep their inner dimensions."""

    forward = _native.quick_gemm_rs_node

    @staticmethod
    def backward(ctx, dy):
        _once()
        w, x = ctx.saved_tensors
        world, algo, bias_dtype = ctx.args
        _, needs_w, *rest = ctx.needs_input_grad
        w, kn = _ops.weight_order(w)
        dx, dy_all = _ops.ag_gemm_gather(
            _flat(dy.contiguous()), w, None, world, None, None, not kn, algo, False, False
        )
        dw = dy_all.t() @ _flat(x) if needs_w else None
        return _folded(dx, dy), dw, *_quick_bias(rest, dy_all, bias_dtype)


_gemm_rs_node = _QuickGemmRs._apply


def gemm_rs(x, w, group=None, *, bias=None, rows=None, wire=None, algo=None):
    """``reduce_scatter(x @ w.T) + bias``: the row-parallel linear layer.

    Partial results travel while others are computed; they are added in f32 in the order of the
    ranks, so the same call gives the same bits each time.

    Args:
        x: [m, k] or [m, ..., k], k the part of this rank; or a :class:`QTensor` [m, k] with one
            scale, which may be this rank's own; then the result is bf16.
        w: [n, k]; a QTensor with one scale if x is one.
        bias: [n], the same on all ranks; its gradient is that of all rows.
        rows: rows that each rank gets along the first dimension. Default: as even as possible.
        wire: element type of partial results, "f32", "bf16" or "f16". Default: that of the output.
        group, algo: as :func:`ag_gemm`.

    Returns:
        [rows of me, ..., n].

    Raises:
        As :func:`ag_gemm`.
    """
    world = handle_of(group)
    if rows is None and not _compiling():
        y = _native.quick_gemm_rs(world, x, w, bias, wire, algo)
        if y is True:
            return _gemm_rs_node(x, w) if bias is None else _gemm_rs_node(x, w, bias)
        if y is not None:
            return y
    if isinstance(x, QTensor) or isinstance(w, QTensor):
        x, w, bias, scale = fp8_operands("gemm_rs", x, w, bias)
        rows = _even_rows(x, world) if rows is None else _rows_of(x, rows)
        return _ops.gemm_rs(x, w, bias, world, rows, False, wire, algo, False, scale)
    _check(x, w)
    x, w, bias = _autocast(x, w, bias)
    flat, rows = _flat(x), _rows_of(x, rows)
    if rows is None:
        rows = _even_rows(x, world)
    if _needs_grad(x, w, bias):
        y = _GemmRs.run(flat, w, bias, world, rows, wire, algo)
    else:
        base, kn = _ops.weight_order(w)
        y = _ops.gemm_rs(flat, base, _bias_of(bias, x), world, rows, kn, wire, algo, False)
    return _folded(y, x)


class _GemmAr(Differentiable):
    @staticmethod
    def forward(ctx, x, w, bias, world, wire, algo):
        ctx.set_materialize_grads(False)
        base, kn = _ops.weight_order(w)
        out = _ops.gemm_ar(x, base, _bias_of(bias, x), world, kn, wire, algo)
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        ctx.save_for_backward(w if needs_x else None, x if needs_w else None)
        ctx.bias_dtype = bias.dtype if needs_bias else None
        return out

    @staticmethod
    def backward(ctx, dy):
        _once()
        w, x = ctx.saved_tensors
        if dy is None:
            return None, None, None, None, None, None
        dx = None if w is None else dy @ w
        dw = None if x is None else dy.t() @ x
        return dx, dw, _grad_bias(dy, ctx.bias_dtype), None, None, None


class _QuickGemmAr(Differentiable, metaclass=QuickType):
    """Tensors keep their inner dimensions."""

    forward = _native.quick_gemm_ar_node

    @staticmethod
    def backward(ctx, dy):
        _once()
        w, x = ctx.saved_tensors
        rest = ctx.needs_input_grad[2:]
        dz = _flat(dy)
        dx = None if w is None else dy @ w
        dw = None if x is None else dz.t() @ _flat(x)
        return dx, dw, *_quick_bias(rest, dz, ctx.args[2])


_gemm_ar_node = _QuickGemmAr._apply
_native.use_nodes([_QuickAgGemm, _QuickGemmRs, _QuickGemmAr])


def gemm_ar(x, w, group=None, *, bias=None, wire=None, algo=None):
    """``all_reduce(x @ w.T) + bias``: the row-parallel linear layer with whole outputs.

    As in tensor parallelism, the gradient of the output must be the same on all ranks (each
    computes the same loss); then the backward pass moves nothing.

    Args:
        x: [m, k] or [m, ..., k]; w: [n, k]; bias: [n]; wire, group, algo: as :func:`gemm_rs`.

    Returns:
        [m, ..., n] on every rank.

    Raises:
        As :func:`ag_gemm`.
    """
    world = handle_of(group)
    if not _compiling():
        y = _native.quick_gemm_ar(world, x, w, bias, wire, algo)
        if y is True:
            return _gemm_ar_node(x, w) if bias is None else _gemm_ar_node(x, w, bias)
        if y is not None:
            return y
    if isinstance(x, QTensor) or isinstance(w, QTensor):
        x, w, bias, scale = fp8_operands("gemm_ar", x, w, bias)
        return _ops.gemm_ar(x, w, bias, world, False, wire, algo, scale)
    _check(x, w)
    x, w, bias = _autocast(x, w, bias)
    flat = _flat(x)
    if _needs_grad(x, w, bias):
        y = _GemmAr.run(flat, w, bias, world, wire, algo)
    else:
        base, kn = _ops.weight_order(w)
        y = _ops.gemm_ar(flat, base, _bias_of(bias, x), world, kn, wire, algo)
    return _folded(y, x)


class _AllGather(Differentiable):
    @staticmethod
    def forward(ctx, x, world, rows):
        ctx.args = (world, rows)
        return _ops.all_gather(x, world, rows, True)

    @staticmethod
    def backward(ctx, dy):
        _once()
        dx = _ops.reduce_scatter(dy.contiguous(), ctx.args[0], "sum", ctx.args[1], False)
        return dx, None, None


def all_gather(x, group=None, *, rows=None):
    """All ranks' rows, in the order of the ranks: [m / P, ...] -> [m, ...].

    ``rows`` gives the rows of each rank where they differ. Any dtype; gradients (f32, bf16, f16)
    are added over the ranks and scattered.
    """
    world = handle_of(group)
    rows = None if rows is None else [int(r) for r in rows]
    if _needs_grad(x):
        return _AllGather.run(x, world, rows)
    return _ops.all_gather(x, world, rows, False)


class _ReduceScatter(Differentiable):
    @staticmethod
    def forward(ctx, x, world, op, rows):
        ctx.args = (world, op, rows)
        return _ops.reduce_scatter(x, world, op, rows, True)

    @staticmethod
    def backward(ctx, dy):
        _once()
        world, op, rows = ctx.args
        dx = _ops.all_gather(dy.contiguous(), world, rows, False)
        return (dx / _ops.size_of(world) if op == "avg" else dx), None, None, None


def reduce_scatter(x, group=None, *, op="sum", rows=None):
    """My rows of the sum over the ranks: [m, ...] -> [rows of me, ...].

    ``op`` is "sum" or "avg"; ``rows`` the rows that each rank gets. f32, bf16 or f16, added in f32
    in the order of the ranks.
    """
    world = handle_of(group)
    if rows is None and x.dim() and x.shape[0] % _ops.size_of(world):
        rows = _even_split(x.shape[0], _ops.size_of(world))
    rows = None if rows is None else [int(r) for r in rows]
    if _needs_grad(x):
        return _ReduceScatter.run(x, world, op, rows)
    return _ops.reduce_scatter(x, world, op, rows, False)


class _AllReduce(Differentiable):
    @staticmethod
    def forward(ctx, x, world, op):
        ctx.args = (world, op)
        return _ops.all_reduce(x, world, op)

    @staticmethod
    def backward(ctx, dy):
        _once()
        return _ops.all_reduce(dy.contiguous(), *ctx.args), None, None


def all_reduce(x, group=None, *, op="sum"):
    """The sum (``op="avg"``: mean) over the ranks, on every rank; the gradients are added, too.

    f32, bf16 or f16, added in f32 in the order of the ranks: every rank has the same bits.
    """
    world = handle_of(group)
    if _needs_grad(x):
        return _AllReduce.run(x, world, op)
    return _ops.all_reduce(x, world, op)


class _AllToAll(Differentiable):
    @staticmethod
    def forward(ctx, x, splits, world):
        ctx.args = (splits, world)
        return _ops.all_to_all(x, splits, world, True)

    @staticmethod
    def backward(ctx, dy):
        _once()
        splits, world = ctx.args
        size = _ops.size_of(world)
        back = [splits[j * size + i] for i in range(size) for j in range(size)]
        return _ops.all_to_all(dy.contiguous(), back, world, False), None, None


def all_to_all(x, splits, group=None):
    """Rows to and from every rank: ``splits[i][j]`` rows go from rank i to rank j.

    ``splits`` is on the host, P x P, the same on all ranks, and part of the plan: other splits make
    another plan. Each rank's rows lie in the order of the receivers; what comes, in the order of
    the senders.
    """
    world = handle_of(group)
    flat = [int(n) for row in splits for n in row]
    if _needs_grad(x):
        return _AllToAll.run(x, flat, world)
    return _ops.all_to_all(x, flat, world, False)
