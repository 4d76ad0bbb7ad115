"""Tokens of one rank in the order of their experts, and back."""

import torch

from .. import _native
from .._errors import InvalidArgument
from ._functions import _needs_grad, _once, _ordinary


class RowMap:
    """Which row each choice of a token has: made by :func:`permute`, used by :func:`unpermute`."""

    def __init__(self, native, tokens, top_k, capacity, hidden):
        self._native = native
        self.tokens, self.top_k, self.capacity, self.hidden = tokens, top_k, capacity, hidden

    def __reduce__(self):
        raise TypeError("a RowMap belongs to its process and cannot be pickled")

    def totals(self, like):
        """True numbers of the routing, as a dict: rows needed to drop nothing, copies dropped.
        Waits for the device of ``like``, a tensor there."""
        return self._native.totals(like)


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
    spec = dict(num_experts=num_experts, top_k=top_k, capacity=capacity, align=align)
    x = x.contiguous()
    w = None if topk_weights is None else topk_weights.contiguous()
    native = _native.RowMap(x.detach(), topk_idx.contiguous(), spec)
    row_map = RowMap(native, tokens, top_k, capacity, x.shape[1])
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
    return _Unpermute.apply(rows.contiguous(), w, row_map)
