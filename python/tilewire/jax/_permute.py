"""Tokens of one rank in the order of their experts, and back.

XLA schedules by data alone, so the routing is data here: each call gets the choices and makes the
map of rows from them, on the device. Nothing is kept beside the arrays, so a map can be recomputed,
carried through ``lax.scan`` and divided by ``shard_map`` as other values are.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from .._errors import InvalidArgument
from ._call import call, vary


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["topk_idx", "counts"],
    meta_fields=["num_experts", "capacity", "align"],
)
@dataclasses.dataclass(frozen=True)
class RowMap:
    """Which row each choice of a token has: made by :func:`permute`, used by :func:`unpermute`. A
    pytree of two arrays.

    Attributes:
        topk_idx: [tokens, top_k], the choices that were routed.
        counts: int32 numbers of the routing; not to be changed.
        num_experts, capacity, align: as :func:`permute` got them.
    """

    topk_idx: jax.Array
    counts: jax.Array
    num_experts: int
    capacity: int
    align: int

    @property
    def m_splits(self):
        """Rows of each expert, padding included: [num_experts] int32."""
        return self.counts[: self.num_experts, 0]

    @property
    def rows(self):
        """Rows that are needed to drop nothing, padding included: int32."""
        return self.counts[self.num_experts, 0]

    @property
    def dropped(self):
        """Choices that were dropped: int32."""
        return self.counts[self.num_experts + 1, 0]


def _more(s):
    num_experts, capacity, align = s
    return {"params": dict(num_experts=num_experts, capacity=capacity, align=align)}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _permute(s, x, weights, idx):
    num_experts, capacity, _ = s
    rets = {"rows": ((capacity, x.shape[1]), x.dtype)}
    if weights is not None:
        rets["row_weights"] = ((capacity,), jnp.float32)
    # Numbers of 64 bits, as two words each.
    rets["counts"] = ((num_experts + 2, 2), jnp.int32)
    args = {"topk_idx": idx, "x": x, "topk_weights": weights}
    out = call("permute", args, rets, **_more(s))
    return out["rows"], out.get("row_weights"), out["counts"]


def _permute_bwd(s, saved, d):
    weights, idx = saved
    d_rows, d_weights, _ = d
    rets = {"dx": ((idx.shape[0], d_rows.shape[1]), d_rows.dtype)}
    if weights is not None:
        rets["dw"] = (idx.shape, jnp.float32)
    args = {"topk_idx": idx, "d_rows": d_rows, "d_row_weights": d_weights}
    out = call("permute_bwd", args, rets, **_more(s))
    return out["dx"], out.get("dw"), None


_permute.defvjp(lambda s, x, w, idx: (_permute(s, x, w, idx), (w, idx)), _permute_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unpermute(s, rows, weights, idx):
    rets = {"out": ((idx.shape[0], rows.shape[1]), rows.dtype)}
    args = {"topk_idx": idx, "rows": rows, "weights": weights}
    return call("unpermute", args, rets, **_more(s))["out"]


def _unpermute_fwd(s, rows, weights, idx):
    kept = rows if weights is not None else None
    return _unpermute(s, rows, weights, idx), (kept, weights, idx)


def _unpermute_bwd(s, saved, d_out):
    rows, weights, idx = saved
    rets = {"d_rows": ((s[1], d_out.shape[1]), d_out.dtype)}
    if weights is not None:
        rets["dw"] = (weights.shape, jnp.float32)
    args = {"topk_idx": idx, "d_out": d_out, "weights": weights, "rows": rows}
    out = call("unpermute_bwd", args, rets, **_more(s))
    return out["d_rows"], out.get("dw"), None


_unpermute.defvjp(_unpermute_fwd, _unpermute_bwd)


def permute(x, topk_idx, topk_weights=None, *, num_experts, capacity=None, align=1):
    """Tokens in the order of their experts: a row for each choice, expert after expert, inside an
    expert by token.

    Local: needs no world, and may be called outside of shard_map. Nothing waits for the numbers of
    rows, which stay on the device.

    Args:
        x: [tokens, hidden]; f32, bf16 or f16.
        topk_idx: [tokens, top_k] int32 or int64; -1 leaves a choice out.
        topk_weights: [tokens, top_k], as f32; they come to their rows and have a gradient.
        num_experts: number of experts.
        capacity: rows of the result; choices beyond it are dropped. Default: enough for any
            routing.
        align: rows of each expert are padded with zeros to a multiple of this.

    Returns:
        (rows [capacity, hidden], weights of the rows [capacity] f32 or None, m_splits [num_experts]
        int32, as :func:`grouped_gemm` takes them, and the :class:`RowMap` for :func:`unpermute`).
        Rows behind the last expert's are zero.

    Raises:
        InvalidArgument: shapes or types do not fit. On the CPU an index that is no expert fails
            when the call runs; on a GPU it makes the results NaN.
    """
    x, idx = jnp.asarray(x), jnp.asarray(topk_idx)
    if x.ndim != 2 or idx.ndim != 2 or idx.shape[0] != x.shape[0]:
        raise InvalidArgument(
            f"permute: x {x.shape} must be a matrix, topk_idx {idx.shape} have a row for each of"
            " its rows"
        )
    tokens, top_k = idx.shape
    if capacity is None:
        capacity = tokens * top_k + num_experts * (align - 1)
    s = (int(num_experts), int(capacity), int(align))
    if s[0] < 1 or s[1] < 0 or s[2] < 1:
        raise InvalidArgument(
            f"permute: num_experts {s[0]} and align {s[2]} must be positive, capacity {s[1]} not"
            " negative"
        )
    if topk_weights is not None:
        topk_weights = jnp.asarray(topk_weights).astype(jnp.float32)
    x, weights, idx = vary((), x, topk_weights, idx)
    rows, row_weights, counts = _permute(s, x, weights, idx)
    row_map = RowMap(idx, counts, *s)
    return rows, row_weights, row_map.m_splits, row_map


def unpermute(rows, row_map, weights=None):
    """The sum over each token's choices of (weight times) its row, in f32 in the order of the
    choices.

    Args:
        rows: [capacity, hidden], in the order of :func:`permute`; f32, bf16 or f16.
        row_map: its map.
        weights: [tokens, top_k], as f32; 1 if not given. They have a gradient.

    Returns:
        [tokens, hidden].

    Raises:
        InvalidArgument: shapes or types do not fit.
    """
    if not isinstance(row_map, RowMap):
        raise InvalidArgument("unpermute: `row_map` must be what `permute` returned")
    rows, m = jnp.asarray(rows), row_map
    if rows.ndim != 2 or rows.shape[0] != m.capacity:
        raise InvalidArgument(
            f"unpermute: rows {rows.shape} must be a matrix of {m.capacity} rows, as the map has"
        )
    if weights is not None:
        weights = jnp.asarray(weights).astype(jnp.float32)
    s = (m.num_experts, m.capacity, m.align)
    return _unpermute(s, *vary((), rows, weights, m.topk_idx))
