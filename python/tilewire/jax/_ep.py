"""Expert parallelism: tokens travel to the ranks of their experts and back.

XLA schedules by data alone, so a routing is an array here: dispatch returns it as part of its
handle, and combine and both backward passes take it. It may be kept, recomputed by
``jax.checkpoint`` and carried through ``lax.scan`` as other values are.
"""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp

from .. import _native
from .._errors import InvalidArgument
from ._call import call, dtype_name, vary
from ._quant import QTensor, without_gradient
from ._world import names_of, team_of, world_of

_TOKENS = ("float32", "bfloat16", "float16")
_FP8 = ("float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True, eq=False)
class EpGroup:
    """A layer of experts over an axis of a world's mesh. Nothing is allocated here: the plans are
    made when a program that uses it is compiled.

    Args:
        axis_name: an axis of the world's mesh, or a tuple of axes.
        num_experts: of all ranks; a multiple of their number. Those of a rank lie together, in the
            order of the ranks.
        max_tokens: the most tokens of a rank in one call.
        hidden: elements of a token.
        top_k: choices of a token.
        capacity: the most rows that a rank receives, in the order of the experts. Default: enough
            for any routing.
        align: rows of each expert are padded with zeros to a multiple of this.
        layout: order of the received rows: "expert_major" (a row for each choice, as
            :func:`grouped_gemm` takes them), "rank_major" or "flat" (a row for each token and
            rank).
        overflow: "drop" leaves out what exceeds the capacity; "error" fails the call on the CPU,
            which ends the world.
        dtype: of tokens and results: float32, bfloat16 or float16. With float8_e4m3fn or
            float8_e5m2 tokens are a :class:`QTensor` of recipe "block1x128" and have no gradient.
        out_dtype: with FP8 tokens, the type of the experts' results: float32, bfloat16 or float16.
        num_sms: multiprocessors that the kernels may take.
        world: a World; None is the first one.

    Raises:
        InvalidArgument: sizes do not fit.
    """

    axis_name: str | tuple
    _: dataclasses.KW_ONLY
    num_experts: int
    max_tokens: int
    hidden: int
    top_k: int
    capacity: int | None = None
    align: int = 1
    layout: str = "expert_major"
    overflow: str = "drop"
    dtype: object = jnp.bfloat16
    out_dtype: object = None
    num_sms: int | None = None
    world: object = None

    def __post_init__(self):
        world = world_of(self.world)
        axes = names_of(self.axis_name)
        missing = [a for a in axes if a not in world.shape]
        if missing:
            raise InvalidArgument(
                f"ep: the world has no axis {missing}; it has {list(world.shape)}"
            )
        size = 1
        for a in axes:
            size *= world.shape[a]
        dtype = jnp.dtype(self.dtype)
        fp8 = dtype.name in _FP8
        out = jnp.dtype(self.out_dtype or (jnp.bfloat16 if fp8 else dtype))
        if dtype.name not in _TOKENS + _FP8 or out.name not in _TOKENS or not (fp8 or out == dtype):
            raise InvalidArgument(
                f"ep: tokens cannot be {dtype} with results of {out}: one of {_TOKENS} for both, or"
                f" one of {_FP8} for tokens is expected"
            )
        if self.num_experts % size:
            raise InvalidArgument(
                f"ep: {self.num_experts} experts do not divide among {size} ranks"
            )
        spec = dict(
            num_experts=self.num_experts,
            max_tokens=self.max_tokens,
            hidden=self.hidden,
            top_k=self.top_k,
            capacity=self.capacity,
            align=self.align,
            layout=self.layout,
            overflow=self.overflow,
            dtype=dtype_name(dtype, "dtype"),
            num_scales=-(-self.hidden // 128) if fp8 else 0,
            out=dtype_name(out, "out_dtype"),
            num_sms=self.num_sms,
        )
        probe = dict(op="ep_combine_bwd", world=0, site=0, axes=[], args=[], rets=[], ep=spec)
        recv_rows, capacity, state = _native.jax_layer(json.dumps(probe), size)
        init = functools.partial(object.__setattr__, self)
        init("world", world)
        init("dtype", dtype)
        init("out_dtype", out)
        init("_spec", spec)
        init("_state_bytes", state)
        init("_numbers", itertools.count())
        #: Rows of a received array; of one in the order of the experts.
        init("recv_rows", recv_rows)
        init("capacity", capacity)
        #: Experts of each rank.
        init("num_local_experts", self.num_experts // size)

    def buffer(self):
        """A buffer for one microbatch: static, like the group. On a GPU calls with one buffer share
        its memory and run one after the other."""
        return EpBuffer(self, next(self._numbers))


@dataclasses.dataclass(frozen=True)
class EpBuffer:
    """Receive memory for the microbatches that use it, one at a time. Made by
    :meth:`EpGroup.buffer`."""

    group: EpGroup
    number: int


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["state"], meta_fields=["buf", "tokens"]
)
@dataclasses.dataclass(frozen=True)
class EpHandle:
    """The routing of one microbatch on this rank. A pytree of one array.

    Attributes:
        state: uint8; for :func:`ep_combine`, not to be changed.
        buf, tokens: the buffer, and the number of tokens that were routed.
    """

    state: jax.Array
    buf: EpBuffer
    tokens: int

    def _ints(self, first, num, words):
        """int32 numbers, each the first of ``words`` in the state."""
        part = self.state[first : first + 4 * words * num].reshape(num, words, 4)
        return jax.lax.bitcast_convert_type(part, jnp.int32)[:, 0]

    @property
    def m_splits(self):
        """Rows of each expert here, padding included: [local experts] int32."""
        return self._ints(0, self.buf.group.num_local_experts, 2)

    @property
    def rows(self):
        """Rows that this rank needs to drop nothing, padding included: int32."""
        return self._ints(8 * self.buf.group.num_local_experts, 1, 2)[0]

    @property
    def dropped(self):
        """Copies that were dropped at this rank: int32."""
        return self._ints(8 * self.buf.group.num_local_experts + 8, 1, 2)[0]

    @property
    def row_index(self):
        """The received row that feeds each expert-major row, [capacity] int32, -1 in padding: for
        the layouts "rank_major" and "flat"."""
        return self._ints(8 * self.buf.group.num_local_experts + 16, self.buf.group.capacity, 1)


def _more(s):
    team, buf = s
    return dict(team=team, ep=buf.group._spec, params={"buffer": buf.number})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dispatch(s, x, weights, idx):
    g = s[1].group
    rets = {"rows": ((g.recv_rows, g.hidden), x.dtype)}
    if weights is not None:
        rets["weights"] = ((g.capacity,), jnp.float32)
    rets["handle"] = ((g._state_bytes,), jnp.uint8)
    args = {"topk_idx": idx, "x": x, "topk_weights": weights}
    out = call("ep_dispatch", args, rets, **_more(s))
    return out["rows"], out.get("weights"), out["handle"]


def _with_scales(s, x, scales, weights, idx):
    g = s[1].group
    rets = {"rows": ((g.recv_rows, g.hidden), x.dtype)}
    rets["row_scales"] = ((g.recv_rows, scales.shape[1]), jnp.float32)
    if weights is not None:
        rets["weights"] = ((g.capacity,), jnp.float32)
    rets["handle"] = ((g._state_bytes,), jnp.uint8)
    args = {"topk_idx": idx, "x": x, "x_scales": scales, "topk_weights": weights}
    out = call("ep_dispatch", args, rets, **_more(s))
    return out["rows"], out["row_scales"], out.get("weights"), out["handle"]


_dispatch_fp8 = without_gradient(
    "ep_dispatch", _with_scales, "FP8 tokens have no gradient: use jax.lax.stop_gradient"
)


def _dispatch_fwd(s, x, weights, idx):
    out = _dispatch(s, x, weights, idx)
    return out, (x, weights, out[2])


def _dispatch_bwd(s, saved, d):
    x, weights, handle = saved
    d_rows, d_weights, _ = d
    rets = {"dx": (x.shape, x.dtype)}
    if weights is not None:
        rets["dw"] = (weights.shape, jnp.float32)
    args = {"handle": handle, "d_recv": d_rows, "d_weights": d_weights}
    out = call("ep_dispatch_bwd", args, rets, **_more(s))
    return out["dx"], out.get("dw"), None


_dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _combine(s, tokens, y, weights, handle):
    rets = {"out": ((tokens, y.shape[1]), y.dtype)}
    args = {"handle": handle, "y": y, "weights": weights}
    return call("ep_combine", args, rets, **_more(s))["out"]


def _combine_fwd(s, tokens, y, weights, handle):
    kept = y if weights is not None else None
    return _combine(s, tokens, y, weights, handle), (kept, weights, handle)


def _combine_bwd(s, tokens, saved, d_out):
    y, weights, handle = saved
    g = s[1].group
    rets = {"dy": ((g.capacity, g.hidden), d_out.dtype)}
    if weights is not None:
        rets["dw"] = ((g.capacity,), jnp.float32)
    args = {"handle": handle, "d_out": d_out, "weights": weights, "y": y}
    out = call("ep_combine_bwd", args, rets, **_more(s))
    return out["dy"], out.get("dw"), None


_combine.defvjp(_combine_fwd, _combine_bwd)


def ep_dispatch(buf, x, topk_idx, topk_weights=None):
    """Sends each token to the ranks of its experts.

    Args:
        buf: a buffer of :meth:`EpGroup.buffer`. Calls that do not depend on each other take buffers
            of their own.
        x: [tokens, hidden] of the group's dtype; at most max_tokens. With FP8 a :class:`QTensor` of
            recipe "block1x128"; then neither it nor the weights have a gradient.
        topk_idx: [tokens, top_k] int32 or int64, experts of all ranks; -1 leaves a choice out.
        topk_weights: [tokens, top_k] f32; they travel along and have a gradient.

    Returns:
        (rows received [recv_rows, hidden], their weights [capacity] or None, m_splits [local
        experts] int32, :class:`EpHandle`): rows that no expert has are zero. With FP8 the rows are
        a QTensor, as :func:`grouped_gemm` takes it.

    Raises:
        InvalidArgument: shapes, types or axes do not fit. An expert that does not exist ends the
        world: the call fails when it runs.
    """
    g = buf.group
    team = team_of(g.axis_name, g.world)
    fp8 = g.dtype.name in _FP8
    if isinstance(x, QTensor) != fp8 or (fp8 and x.recipe != "block1x128"):
        what = 'a QTensor of recipe "block1x128"' if fp8 else "an array"
        raise InvalidArgument(f"ep_dispatch: x must be {what} [tokens, {g.hidden}] {g.dtype.name}")
    x, idx = x if fp8 else jnp.asarray(x), jnp.asarray(topk_idx)
    if len(x.shape) != 2 or x.shape[1] != g.hidden or x.dtype != g.dtype:
        raise InvalidArgument(
            f"ep_dispatch: x must be [tokens, {g.hidden}] {g.dtype.name}, not {x.shape}"
            f" {x.dtype.name}"
        )
    if idx.shape != (x.shape[0], g.top_k) or idx.dtype.name not in ("int32", "int64"):
        raise InvalidArgument(
            f"ep_dispatch: topk_idx must be [{x.shape[0]}, {g.top_k}] int32 or int64, not"
            f" {idx.shape} {idx.dtype.name}"
        )
    if topk_weights is not None:
        topk_weights = jnp.asarray(topk_weights).astype(jnp.float32)
    s = (team, buf)
    if fp8:
        arrays = vary(team[1], x.data, x.scales, topk_weights, idx)
        data, scales, weights, state = _dispatch_fp8(s, *arrays)
        rows = QTensor(data, scales, "block1x128")
    else:
        rows, weights, state = _dispatch(s, *vary(team[1], x, topk_weights, idx))
    handle = EpHandle(state, buf, x.shape[0])
    return rows, weights, handle.m_splits, handle


def ep_combine(buf, y, handle, weights=None):
    """The results of the experts, back at their tokens: the sum of a token's choices.

    Args:
        buf: a buffer of the same group as the dispatch's.
        y: [capacity, hidden], in the order of the experts.
        handle: what the dispatch returned.
        weights: [capacity] f32, as the dispatch gave them; without them rows are added as they are.

    Returns:
        [tokens, hidden]. Added in f32 in the order of the choices.

    Raises:
        As :func:`ep_dispatch`.
    """
    g = buf.group
    if not isinstance(handle, EpHandle) or handle.buf.group is not g:
        raise InvalidArgument("ep_combine: `handle` must be what a dispatch of this group returned")
    team = team_of(g.axis_name, g.world)
    y = jnp.asarray(y)
    if weights is not None:
        weights = jnp.asarray(weights).astype(jnp.float32)
    y, weights, state = vary(team[1], y, weights, handle.state)
    return _combine((team, buf), handle.tokens, y, weights, state)
