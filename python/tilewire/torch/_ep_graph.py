"""Dispatch and combine of compiled graphs, which hold tensors alone.

A routing is a tensor here, as it is in :mod:`tilewire.jax`: a dispatch writes it, and all that
follows reads it, so a compiler that orders operations by their data orders these. They share one
native buffer of their group, into which each of them loads its routing first, and its number of
multiprocessors: graphs of one group run on one stream at a time. Buffers of calls outside of graphs
are left alone.
"""

import itertools
import weakref

import torch

from .._errors import Unsupported
from ._functions import _once
from ._nodes import Differentiable
from ._ops import _define

_groups = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def enroll(group):
    """The number of a group, by which operations know it."""
    number = next(_numbers)
    _groups[number] = group
    return number


def _buffer(number, state, tokens, num_sms):
    """The native buffer of a group's graphs, for a call by the routing ``state`` if any."""
    g = _groups[number]
    if g._graph is None:
        g._graph = g._native.buffer()
    g._graph.set_num_sms(num_sms)
    if state is not None:
        g._graph.load(state, tokens)
    return g._graph


def _zeros_like(metas):
    # Rows that no expert has are not written: whoever multiplies all rows must not meet NaN there.
    return tuple(torch.zeros_like(t) for t in metas)


def _dispatch_meta(number, x, w, scales, idx, state, num_sms):
    g = _groups[number]
    f32 = torch.float32
    recv = x.new_empty(g.recv_rows, g.hidden)
    recv_w = x.new_empty(0 if w is None else g.capacity, dtype=f32)
    recv_scales = x.new_empty((0, 0) if scales is None else (g.recv_rows, g._num_scales), dtype=f32)
    splits = x.new_empty(g.num_local_experts, dtype=torch.int64)
    return recv, recv_w, recv_scales, splits, x.new_empty(g._native.state_bytes, dtype=torch.uint8)


def _dispatch(number, x, w, scales, idx, state, num_sms):
    """By ``idx``, or by the routing ``state`` of an earlier dispatch again."""
    native = _buffer(number, state, x.shape[0], num_sms)
    outs = _zeros_like(_dispatch_meta(number, x, w, scales, idx, state, num_sms))
    recv, recv_w, recv_scales, splits, made = outs
    recv_w, recv_scales = None if w is None else recv_w, None if scales is None else recv_scales
    native.dispatch(idx, x, w, scales, recv, recv_w, recv_scales, splits)
    native.save(made)
    return outs


def _dispatch_bwd_meta(number, state, d_recv, d_w, tokens, num_sms):
    g = _groups[number]
    dw = d_recv.new_empty((0, 0) if d_w is None else (tokens, g.top_k), dtype=torch.float32)
    return d_recv.new_empty(tokens, g.hidden), dw


def _dispatch_bwd(number, state, d_recv, d_w, tokens, num_sms):
    dx, dw = _dispatch_bwd_meta(number, state, d_recv, d_w, tokens, num_sms)
    native = _buffer(number, state, tokens, num_sms)
    native.dispatch_bwd(d_recv, d_w, dx, None if d_w is None else dw)
    return dx, dw


def _combine_meta(number, state, y, w, tokens, num_sms):
    return y.new_empty(tokens, y.shape[1])


def _combine(number, state, y, w, tokens, num_sms):
    out = _combine_meta(number, state, y, w, tokens, num_sms)
    _buffer(number, state, tokens, num_sms).combine(y, w, out)
    return out


def _combine_bwd_meta(number, state, d_out, w, y, num_sms):
    g = _groups[number]
    dw = d_out.new_empty(0 if w is None else g.capacity, dtype=torch.float32)
    return d_out.new_empty(g.capacity, g.hidden), dw


def _combine_bwd(number, state, d_out, w, y, num_sms):
    dy, dw = _zeros_like(_combine_bwd_meta(number, state, d_out, w, y, num_sms))
    native = _buffer(number, state, d_out.shape[0], num_sms)
    native.combine_bwd(d_out, None if w is None else (w, y, dw), dy)
    return dy, dw


_dispatch_op = _define(
    "ep_dispatch(int group, Tensor x, Tensor? w, Tensor? scales, Tensor? idx, Tensor? state,"
    " int? num_sms) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _dispatch,
    _dispatch_meta,
    direct=False,
)
_dispatch_bwd_op = _define(
    "ep_dispatch_bwd(int group, Tensor state, Tensor d_recv, Tensor? d_w, SymInt tokens,"
    " int? num_sms) -> (Tensor, Tensor)",
    _dispatch_bwd,
    _dispatch_bwd_meta,
    direct=False,
)
_combine_op = _define(
    "ep_combine(int group, Tensor state, Tensor y, Tensor? w, SymInt tokens, int? num_sms)"
    " -> Tensor",
    _combine,
    _combine_meta,
    direct=False,
)
_combine_bwd_op = _define(
    "ep_combine_bwd(int group, Tensor state, Tensor d_out, Tensor? w, Tensor? y, int? num_sms)"
    " -> (Tensor, Tensor)",
    _combine_bwd,
    _combine_bwd_meta,
    direct=False,
)


class _Dispatch(Differentiable):
    @staticmethod
    def forward(ctx, x, w, idx, state, group, num_sms):
        ctx.set_materialize_grads(False)
        recv, recv_w, _, splits, made = _dispatch_op(group, x, w, None, idx, state, num_sms)
        ctx.save_for_backward(made)
        ctx.args = (group, x.shape[0], w is not None, recv.shape, x.dtype, x.device, num_sms)
        ctx.mark_non_differentiable(splits, made)
        return recv, recv_w, splits, made

    @staticmethod
    def backward(ctx, d_recv, d_w, *_):
        _once()
        (state,) = ctx.saved_tensors
        group, tokens, is_weighted, shape, dtype, device, num_sms = ctx.args
        if d_recv is None:
            d_recv = torch.zeros(shape, dtype=dtype, device=device)
        d_w = d_w.contiguous() if is_weighted and d_w is not None else None
        dx, dw = _dispatch_bwd_op(group, state, d_recv.contiguous(), d_w, tokens, num_sms)
        return dx, None if d_w is None else dw, None, None, None, None


class _Combine(Differentiable):
    @staticmethod
    def forward(ctx, y, w, state, group, tokens, num_sms):
        ctx.save_for_backward(y if w is not None else None, w, state)
        ctx.args = group, num_sms
        return _combine_op(group, state, y, w, tokens, num_sms)

    @staticmethod
    def backward(ctx, d_out):
        _once()
        y, w, state = ctx.saved_tensors
        group, num_sms = ctx.args
        dy, dw = _combine_bwd_op(group, state, d_out.contiguous(), w, y, num_sms)
        return dy, None if w is None else dw, None, None, None, None


def dispatch(buf, x, scales, w, idx, num_sms, refused):
    """A dispatch in a graph, without ``idx`` by the last routing again: the rows and their scales,
    weights and splits. ``refused`` are arguments that have no meaning there, by name."""
    for name, value in refused.items():
        if value:
            raise Unsupported(f"ep_dispatch: {name} in a compiled graph")
    state = None
    if idx is None:
        if buf._routed is None:
            raise Unsupported("ep_dispatch: reuse() in a compiled graph of what none has routed")
        state = buf._routed[0]
    group = buf.group._number
    if scales is not None:
        args = (group, x, w, scales, idx, state, num_sms)
        recv, recv_w, recv_scales, splits, made = _dispatch_op(*args)
    else:
        recv, recv_w, splits, made = _Dispatch.run(x, w, idx, state, group, num_sms)
        recv_scales = None
    buf._routed = (made, x.shape[0], num_sms)
    return recv, recv_scales, None if w is None else recv_w, splits


def combine(buf, y, w):
    """A combine of what a graph has dispatched."""
    state, tokens, num_sms = buf._routed
    return _Combine.run(y, w, state, buf.group._number, tokens, num_sms)
