"""Tokens of one rank in the order of their experts, and back.

Outside of compiled graphs a map of rows is made once, and all calls of its batch read it. A graph
holds tensors alone: there each call makes the map anew, of the choices.
"""

import torch

from .. import _native
from .._errors import InvalidArgument
from ._functions import _needs_grad, _once, _ordinary
from ._nodes import Differentiable
from ._ops import _define


class RowMap:
    """Which row each choice of a token has: made by :func:`permute`, used by :func:`unpermute`."""

    def __init__(self, native, idx, num_experts, capacity, align, hidden):
        # None where a graph has made it.
        self._native, self._idx = native, idx
        self._routing = (num_experts, capacity, align)
        self.tokens, self.top_k = idx.shape
        self.capacity, self.hidden = capacity, hidden

    def __reduce__(self):
        raise TypeError("a RowMap belongs to its process and cannot be pickled")

    def totals(self, like):
        """True numbers of the routing, as a dict: rows needed to drop nothing, copies dropped.
        Waits for the device of ``like``, a tensor there."""
        native = self._native
        if native is None:
            x = like.new_empty(self.tokens, self.hidden, dtype=torch.float32)
            native = _map_of(x, self._idx, *self._routing)
        return native.totals(like)


def _map_of(x, idx, num_experts, capacity, align):
    spec = dict(num_experts=num_experts, top_k=idx.shape[1], capacity=capacity, align=align)
    return _native.RowMap(x.detach(), idx, spec)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, row_map, num_experts):
        ctx.set_materialize_grads(False)
        m = row_map
        rows = x.new_empty((m.capacity, m.hidden))
        row_weights = None
        if weights is not None:
            row_weights = x.new_empty(m.capacity, dtype=torch.float32)
        splits = x.new_empty(num_experts, dtype=torch.int64)
        m._native.permute((x, weights), (rows, row_weights), splits)
        ctx.row_map, ctx.like = m, (x.dtype, x.device)
        ctx.mark_non_differentiable(splits)
        return rows, row_weights, splits

    @staticmethod
    def backward(ctx, d_rows, d_row_weights, _):
        _once()
        m, (dtype, device) = ctx.row_map, ctx.like
        if d_rows is None:
            d_rows = torch.zeros(m.capacity, m.hidden, dtype=dtype, device=device)
        dx = torch.empty(m.tokens, m.hidden, dtype=dtype, device=device)
        dw = None
        if d_row_weights is not None:
            dw = torch.empty(m.tokens, m.top_k, dtype=torch.float32, device=device)
            d_row_weights = d_row_weights.contiguous()
        m._native.permute_bwd((d_rows.contiguous(), d_row_weights), (dx, dw))
        return dx, dw, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights, row_map):
        m = row_map
        out = rows.new_empty((m.tokens, m.hidden))
        m._native.unpermute((rows, weights), out)
        ctx.save_for_backward(rows if weights is not None else None, weights)
        ctx.row_map = m
        return out

    @staticmethod
    def backward(ctx, d_out):
        _once()
        rows, weights = ctx.saved_tensors
        m = ctx.row_map
        d_rows = d_out.new_empty((m.capacity, m.hidden))
        weighted = dw = None
        if weights is not None:
            dw = torch.empty_like(weights)
            weighted = (weights, rows, dw)
        m._native.unpermute_bwd(d_out.contiguous(), d_rows, weighted)
        return d_rows, dw, None


# Of graphs: operations of tensors alone.


def _rows_meta(x, w, idx, num_experts, capacity, align):
    rows = x.new_empty(capacity, x.shape[1])
    row_w = x.new_empty(0 if w is None else capacity, dtype=torch.float32)
    return rows, row_w, x.new_empty(num_experts, dtype=torch.int64)


def _rows(x, w, idx, *routing):
    rows, row_w, splits = _rows_meta(x, w, idx, *routing)
    native = _map_of(x, idx, *routing)
    native.permute((x, w), (rows, None if w is None else row_w), splits)
    return rows, row_w, splits


def _rows_bwd_meta(d_rows, d_row_w, idx, num_experts, capacity, align):
    dx = d_rows.new_empty(idx.shape[0], d_rows.shape[1])
    return dx, d_rows.new_empty((0, 0) if d_row_w is None else idx.shape, dtype=torch.float32)


def _rows_bwd(d_rows, d_row_w, idx, *routing):
    dx, dw = _rows_bwd_meta(d_rows, d_row_w, idx, *routing)
    native = _map_of(dx, idx, *routing)
    native.permute_bwd((d_rows, d_row_w), (dx, None if d_row_w is None else dw))
    return dx, dw


def _tokens_meta(rows, w, idx, num_experts, capacity, align):
    return rows.new_empty(idx.shape[0], rows.shape[1])


def _tokens(rows, w, idx, *routing):
    out = _tokens_meta(rows, w, idx, *routing)
    _map_of(out, idx, *routing).unpermute((rows, w), out)
    return out


def _tokens_bwd_meta(d_out, w, rows, idx, num_experts, capacity, align):
    dw = d_out.new_empty((0, 0) if w is None else w.shape, dtype=torch.float32)
    return d_out.new_empty(capacity, d_out.shape[1]), dw


def _tokens_bwd(d_out, w, rows, idx, *routing):
    d_rows, dw = _tokens_bwd_meta(d_out, w, rows, idx, *routing)
    native = _map_of(d_out, idx, *routing)
    native.unpermute_bwd(d_out, d_rows, None if w is None else (w, rows, dw))
    return d_rows, dw


_ROUTING = "Tensor idx, int num_experts, int capacity, int align"
_permute_op = _define(
    f"permute(Tensor x, Tensor? w, {_ROUTING}) -> (Tensor, Tensor, Tensor)",
    _rows,
    _rows_meta,
    direct=False,
)
_permute_bwd_op = _define(
    f"permute_bwd(Tensor d_rows, Tensor? d_row_w, {_ROUTING}) -> (Tensor, Tensor)",
    _rows_bwd,
    _rows_bwd_meta,
    direct=False,
)
_unpermute_op = _define(
    f"unpermute(Tensor rows, Tensor? w, {_ROUTING}) -> Tensor",
    _tokens,
    _tokens_meta,
    direct=False,
)
_unpermute_bwd_op = _define(
    f"unpermute_bwd(Tensor d_out, Tensor? w, Tensor? rows, {_ROUTING}) -> (Tensor, Tensor)",
    _tokens_bwd,
    _tokens_bwd_meta,
    direct=False,
)


class _PermuteInGraph(Differentiable):
    @staticmethod
    def forward(ctx, x, w, idx, *routing):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(idx)
        ctx.routing, ctx.is_weighted = routing, w is not None
        ctx.like = (x.dtype, x.device, x.shape[1])
        rows, row_w, splits = _permute_op(x, w, idx, *routing)
        ctx.mark_non_differentiable(splits)
        return rows, row_w, splits

    @staticmethod
    def backward(ctx, d_rows, d_row_w, _):
        _once()
        (idx,) = ctx.saved_tensors
        if d_rows is None:
            dtype, device, hidden = ctx.like
            d_rows = torch.zeros(ctx.routing[1], hidden, dtype=dtype, device=device)
        d_row_w = d_row_w.contiguous() if ctx.is_weighted and d_row_w is not None else None
        dx, dw = _permute_bwd_op(d_rows.contiguous(), d_row_w, idx, *ctx.routing)
        return dx, None if d_row_w is None else dw, None, None, None, None


class _UnpermuteInGraph(Differentiable):
    @staticmethod
    def forward(ctx, rows, w, idx, *routing):
        ctx.save_for_backward(rows if w is not None else None, w, idx)
        ctx.routing = routing
        return _unpermute_op(rows, w, idx, *routing)

    @staticmethod
    def backward(ctx, d_out):
        _once()
        rows, w, idx = ctx.saved_tensors
        d_rows, dw = _unpermute_bwd_op(d_out.contiguous(), w, rows, idx, *ctx.routing)
        return d_rows, None if w is None else dw, None, None, None, None


def permute(x, topk_idx, topk_weights=None, *, num_experts, capacity=None, align=1):
    """Tokens in the order of their experts: a row for each choice, expert after expert, inside an
    expert by token. Nothing waits for the numbers of rows, which stay on the device.

    Args:
        x: [tokens, hidden]; f32, bf16 or f16.
        topk_idx: [tokens, top_k] int32 or int64; -1 leaves a choice out.
        topk_weights: [tokens, top_k] f32; they come to their rows and have a gradient.
        num_experts: number of experts.
        capacity: rows of the result; choices beyond it are dropped. Default: enough for any
            routing.
        align: rows of each expert are padded with zeros to a multiple of this.

    Returns:
        (rows [capacity, hidden], weights of the rows [capacity] f32 or None, m_splits [num_experts]
        int64, as :func:`grouped_gemm` takes them, and the map for :func:`unpermute`). Rows behind
        the last expert's are zero.

    Raises:
        InvalidArgument: shapes, dtypes or devices do not fit; on the CPU also an index that is no
            expert (on a GPU it makes the results NaN, and ``RowMap.totals`` raises it).
    """
    _ordinary("permute", x, topk_weights)
    if x.dim() != 2 or topk_idx.dim() != 2 or topk_idx.shape[0] != x.shape[0]:
        raise InvalidArgument(
            f"permute: x {tuple(x.shape)} must be a matrix, topk_idx {tuple(topk_idx.shape)} have"
            " a row for each of its rows"
        )
    tokens, top_k = topk_idx.shape
    if capacity is None:
        capacity = tokens * top_k + num_experts * (align - 1)
    routing = (num_experts, capacity, align)
    x, idx = x.contiguous(), topk_idx.contiguous()
    w = None if topk_weights is None else topk_weights.contiguous()
    if torch.compiler.is_compiling():
        rows, row_weights, m_splits = _PermuteInGraph.run(x, w, idx, *routing)
        row_map = RowMap(None, idx, *routing, x.shape[1])
        return rows, None if w is None else row_weights, m_splits, row_map
    row_map = RowMap(_map_of(x, idx, *routing), idx, *routing, x.shape[1])
    with torch.set_grad_enabled(_needs_grad(x, w)):
        rows, row_weights, m_splits = _Permute.apply(x, w, row_map, num_experts)
    return rows, row_weights, m_splits, row_map


def unpermute(rows, row_map, weights=None):
    """The sum over each token's choices of (weight times) its row, in f32 in the order of the
    choices.

    Args:
        rows: [capacity, hidden], in the order of :func:`permute`.
        row_map: its map.
        weights: [tokens, top_k] f32; 1 if not given.

    Returns:
        [tokens, hidden].

    Raises:
        InvalidArgument: shapes, dtypes or devices do not fit.
    """
    _ordinary("unpermute", rows, weights)
    if tuple(rows.shape) != (row_map.capacity, row_map.hidden):
        raise InvalidArgument(
            f"unpermute: rows {tuple(rows.shape)}, and the map is of"
            f" {(row_map.capacity, row_map.hidden)}"
        )
    w = None if weights is None else weights.contiguous()
    if row_map._native is None or torch.compiler.is_compiling():
        return _UnpermuteInGraph.run(rows.contiguous(), w, row_map._idx, *row_map._routing)
    return _Unpermute.apply(rows.contiguous(), w, row_map)
