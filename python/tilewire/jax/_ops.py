"""Collectives, and products that move data while they compute, with their gradients.

A gradient is that of the sum of all ranks' losses, each rank's inputs being its own. Where JAX
tracks along which axes values differ (``check_vma`` of shard_map, on by default), inputs that are
the same on all ranks get the sum of their gradients, as with JAX's own operations, and so do inputs
with ``P()`` specs where the gradient is taken outside of shard_map.

Results of ``all_reduce`` and ``gemm_ar`` are the same on all ranks. Where JAX tracks that, so are
their gradients, and the backward pass moves nothing; elsewhere it adds them over the ranks, as that
of ``jax.lax.psum`` does.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._errors import InvalidArgument
from ._call import call, is_tracked, mask_rows, vary
from ._quant import QTensor, fp8_operands, without_gradient
from ._world import team_of


class _Static(NamedTuple):
    """What a call is asked to do beside its arrays; hashable."""

    team: tuple
    params: tuple = ()
    tracked: bool = False

    def more(self, **other):
        params = {k: _thawed(v) for k, v in self.params}
        return {k: v for k, v in {**params, **other}.items() if v is not None}


def _thawed(value):
    return [_thawed(v) for v in value] if isinstance(value, tuple) else value


def _frozen(value):
    return tuple(_frozen(v) for v in value) if isinstance(value, (list, tuple)) else value


def static(team, tracked=False, **params):
    return _Static(team, tuple((k, _frozen(v)) for k, v in sorted(params.items())), tracked)


def needs_array(x, what, least=0):
    """``x`` as an array of at least ``least`` dimensions."""
    x = jnp.asarray(x)
    if x.ndim < least:
        raise InvalidArgument(
            f"`{what}` must have at least {least} dimensions, not shape {x.shape}"
        )
    return x


def _rows(rows, size, most, what):
    """Rows of each rank, checked; None where all are equal."""
    if rows is None:
        return None
    rows = [int(r) for r in rows]
    if len(rows) != size or min(rows) < 0 or max(rows) != most:
        raise InvalidArgument(
            f"`rows` must be {size} numbers, the largest of which is the {most} rows of {what}, not"
            f" {rows}"
        )
    return None if len(set(rows)) == 1 else rows


def _own_rows(m, size, rows):
    """The most rows that a rank gets of ``m``, and those of each rank where they differ."""
    if rows is not None:
        rows = [int(r) for r in rows]
        if len(rows) != size or min(rows) < 0 or sum(rows) != m:
            raise InvalidArgument(f"`rows` must be {size} numbers with the sum {m}, not {rows}")
    elif m % size:
        rows = [m // size + (1 if r < m % size else 0) for r in range(size)]
    most = m // size if rows is None else max(rows)
    return most, None if rows is None or len(set(rows)) == 1 else rows


def _masked(out, rows, team):
    return out if rows is None else mask_rows(out, rows, team[1])


# Collectives.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_gather(s, x):
    rows = s.more().get("rows")
    m = x.shape[0] * s.team[2] if rows is None else sum(rows)
    rets = {"out": ((m, *x.shape[1:]), x.dtype)}
    return call("all_gather", {"x": x}, rets, team=s.team, params=s.more())["out"]


def _all_gather_bwd(s, _, dy):
    rows = s.more().get("rows")
    return (_scatter(static(s.team, reduce="sum", rows=rows), dy),)


_all_gather.defvjp(lambda s, x: (_all_gather(s, x), None), _all_gather_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scatter(s, x):
    rows = s.more().get("rows")
    most = x.shape[0] // s.team[2] if rows is None else max(rows)
    rets = {"out": ((most, *x.shape[1:]), x.dtype)}
    out = call("reduce_scatter", {"x": x}, rets, team=s.team, params=s.more())["out"]
    return _masked(out, rows, s.team)


def _scatter_bwd(s, _, dy):
    params = s.more()
    dx = _all_gather(static(s.team, rows=params.get("rows")), dy)
    return (dx / s.team[2] if params["reduce"] == "avg" else dx,)


_scatter.defvjp(lambda s, x: (_scatter(s, x), None), _scatter_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_reduce(s, x):
    rets = {"out": (x.shape, x.dtype)}
    more = dict(team=s.team, params=s.more(), invariant=s.tracked)
    return call("all_reduce", {"x": x}, rets, **more)["out"]


def _all_reduce_bwd(s, _, dy):
    if not s.tracked:
        return (_all_reduce(s, dy),)
    (dy,) = vary(s.team[1], dy)
    return (dy / s.team[2] if s.more()["reduce"] == "avg" else dy,)


_all_reduce.defvjp(lambda s, x: (_all_reduce(s, x), None), _all_reduce_bwd)


def _columns(splits):
    return [sum(row[j] for row in splits) for j in range(len(splits))]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_to_all(s, x):
    got = _columns(s.more()["splits"])
    rets = {"out": ((max(got), *x.shape[1:]), x.dtype)}
    out = call("all_to_all", {"x": x}, rets, team=s.team, params=s.more())["out"]
    return _masked(out, got if len(set(got)) > 1 else None, s.team)


def _all_to_all_bwd(s, _, dy):
    splits = s.more()["splits"]
    back = [list(column) for column in zip(*splits)]
    return (_all_to_all(static(s.team, splits=back), dy),)


_all_to_all.defvjp(lambda s, x: (_all_to_all(s, x), None), _all_to_all_bwd)


def all_gather(x, axis_name, *, rows=None, world=None):
    """All ranks' rows, in their order along the axis: [m / P, ...] -> [m, ...].

    Args:
        x: my rows; any element type. Gradients (f32, bf16, f16) are added over the ranks and
            scattered.
        axis_name: an axis of the world's mesh, or a tuple of axes, as in ``jax.lax``.
        rows: rows of each rank, where they differ. Every rank's ``x`` has as many rows as the
            largest, of which the first are taken.
        world: a World; None is the first one.

    Returns:
        [m, ...], m the sum of ``rows`` or P times the rows of ``x``.

    Raises:
        InvalidArgument: shapes, types or axes do not fit.
    """
    team = team_of(axis_name, world)
    (x,) = vary(team[1], needs_array(x, "x", 1))
    rows = _rows(rows, team[2], x.shape[0], "`x`")
    return _all_gather(static(team, rows=rows), x)


def reduce_scatter(x, axis_name, *, op="sum", rows=None, world=None):
    """My rows of the sum over the ranks: [m, ...] -> [rows of me, ...].

    Args:
        x: f32, bf16 or f16; added in f32 in the order of the ranks.
        op: "sum" or "avg".
        rows: rows that each rank gets. Default: as even as possible. Where they differ, the result
            has as many rows as the largest, and is zero behind those of this rank.
        axis_name, world: as :func:`all_gather`.

    Raises:
        As :func:`all_gather`.
    """
    team = team_of(axis_name, world)
    (x,) = vary(team[1], needs_array(x, "x", 1))
    _, rows = _own_rows(x.shape[0], team[2], rows)
    return _scatter(static(team, reduce=op, rows=rows), x)


def all_reduce(x, axis_name, *, op="sum", world=None):
    """The sum (``op="avg"``: mean) over the ranks, on every rank, with the same bits.

    f32, bf16 or f16, added in f32 in the order of the ranks. Keywords as :func:`all_gather`.
    """
    team = team_of(axis_name, world)
    (x,) = vary(team[1], needs_array(x, "x"))
    flat = x.reshape(1) if x.ndim == 0 else x
    y = _all_reduce(static(team, is_tracked(team[1], x), reduce=op), flat)
    return y.reshape(x.shape)


def all_to_all(x, splits, axis_name, *, world=None):
    """Rows to and from every rank: ``splits[i][j]`` rows go from rank i to rank j.

    Args:
        x: my rows in the order of the receivers, any element type: as many as the largest sum of a
            row of ``splits``, of which the first are sent.
        splits: on the host, P x P, part of the program: other splits make another program.
        axis_name, world: as :func:`all_gather`.

    Returns:
        what comes in the order of the senders, with as many rows as the rank has that gets most,
        and zero behind those of this rank.

    Raises:
        As :func:`all_gather`.
    """
    team = team_of(axis_name, world)
    (x,) = vary(team[1], needs_array(x, "x", 1))
    splits = [[int(n) for n in row] for row in splits]
    size = team[2]
    if len(splits) != size or any(len(row) != size or min(row) < 0 for row in splits):
        raise InvalidArgument(f"`splits` must be {size} x {size} numbers of rows, not {splits}")
    most = max(map(sum, splits))
    if x.shape[0] != most:
        raise InvalidArgument(
            f"`x` must have {most} rows, as many as the largest sum of a row of `splits`, not"
            f" {x.shape[0]}"
        )
    return _all_to_all(static(team, splits=splits), x)


# Products.


def flat(x):
    """Rows of an array: all dimensions but the last are one."""
    return x.reshape(-1, x.shape[-1])


def _folded(out, shape):
    """``out`` [rows, n] with the inner dimensions of ``shape`` [.., .., k]."""
    return out.reshape(-1, *shape[1:-1], out.shape[-1])


def _inner(shape):
    inner = 1
    for n in shape[1:-1]:
        inner *= n
    return inner


def _operands(x, w, bias):
    x, w = needs_array(x, "x", 2), needs_array(w, "w")
    if w.ndim != 2:
        raise InvalidArgument(f"`w` must be a matrix, not {w.shape}")
    if w.shape[1] != x.shape[-1]:
        raise InvalidArgument(
            f"`w` {w.shape} must have as many columns as `x` {x.shape}: the product is x w^T"
        )
    if bias is not None:
        bias = jnp.asarray(bias)
        # Kernels take f32, or the type of the result.
        bias = bias if bias.dtype in (jnp.float32, x.dtype) else bias.astype(jnp.float32)
    return x, w, bias


def _scaled(op, x, w, bias, axes=()):
    """Operands and, of QTensors, what multiplies their product; else None."""
    scale = None
    if isinstance(x, QTensor) or isinstance(w, QTensor):
        x, w, bias, scale = fp8_operands(op, x, w, bias, axes)
    return (*_operands(x, w, bias), scale)


def matmul(a, b, dtype):
    """``a @ b``, added in f32."""
    return jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(dtype)


def _bias_gradient(dz, bias):
    return None if bias is None else dz.sum(0, dtype=jnp.float32).astype(bias.dtype)


def _act_of(name):
    def swiglu(z):
        gate, up = jnp.split(z, 2, axis=-1)
        return jax.nn.silu(gate) * up

    acts = {"relu": jax.nn.relu, "gelu": functools.partial(jax.nn.gelu, approximate=True)}
    return {**acts, "swiglu": swiglu}[name]


def _act_gradient(dy, aux, act):
    if act is None:
        return dy
    z = aux.astype(jnp.float32)
    (dz,) = jax.vjp(_act_of(act), z)[1](dy.astype(jnp.float32))
    return dz.astype(dy.dtype)


def _product_type(x):
    """The type of products: codes of FP8 are multiplied to bf16."""
    return jnp.bfloat16 if x.dtype.itemsize == 1 else x.dtype


def _ag(s, x, w, bias, gathered, aux, scale=None):
    params = s.more()
    m = x.shape[0] * s.team[2] if "rows" not in params else sum(params["rows"])
    n = w.shape[0]
    rets = {"out": ((m, n // 2 if params.get("act") == "swiglu" else n), _product_type(x))}
    if gathered:
        rets["gathered"] = ((m, x.shape[1]), x.dtype)
    if aux:
        rets["aux"] = ((m, n), x.dtype)
    params.pop("returned", None)
    args = {"x": x, "w": w, "bias": bias, "scale": scale}
    return call("ag_gemm", args, rets, team=s.team, params=params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ag_gemm(s, x, w, bias):
    returned = s.more()["returned"]
    out = _ag(s, x, w, bias, returned, False)
    return (out["out"], out["gathered"]) if returned else out["out"]


def _ag_gemm_fwd(s, x, w, bias):
    params = s.more()
    out = _ag(s, x, w, bias, True, "act" in params)
    y = (out["out"], out["gathered"]) if params["returned"] else out["out"]
    return y, (w, bias, out["gathered"], out.get("aux"))


def _ag_gemm_bwd(s, saved, d):
    w, bias, gathered, aux = saved
    params = s.more()
    dy, dg = d if params["returned"] else (d, None)
    dz = _act_gradient(dy, aux, params.get("act"))
    rows = params.get("rows")
    back = static(s.team, rows=rows, kn=True, algo=params.get("algo"))
    dx = _rs(back, dz, w, None)
    if dg is not None:
        dx = dx + _scatter(static(s.team, reduce="sum", rows=rows), dg)
    return dx, matmul(dz.T, gathered, w.dtype), _bias_gradient(dz, bias)


_ag_gemm.defvjp(_ag_gemm_fwd, _ag_gemm_bwd)
_ag_fp8 = without_gradient("ag_gemm", lambda s, x, w, b, q: _ag(s, x, w, b, False, False, q)["out"])


def ag_gemm(
    x,
    w,
    axis_name,
    *,
    bias=None,
    activation=None,
    rows=None,
    return_gathered=False,
    algo=None,
    world=None,
):
    """``act(all_gather(x) @ w.T + bias)``: the column-parallel linear layer.

    Each rank sends its rows in chunks and multiplies those of the others as they come.

    Args:
        x: my rows, [m / P, k] or [m / P, ..., k]; f32, bf16 or f16. Or a :class:`QTensor` [m / P,
            k], quantized with this axis; then the result is bf16 and has no gradient.
        w: my part of the weight, [n, k], of x's dtype. A QTensor with one scale if x is one.
        axis_name: an axis of the world's mesh, or a tuple of axes, as in ``jax.lax``.
        bias: [n].
        activation: None, "relu", "gelu" (tanh form) or "swiglu" (halves of n: silu(first) *
            second).
        rows: rows of each rank along the first dimension, where they differ. Every rank's ``x`` has
            as many as the largest, of which the first are taken.
        return_gathered: return the gathered x [m, ..., k], too; it has a gradient.
        algo: "fused", "pipelined", "ring" or "sequential". Default: what is predicted fastest.
        world: a World; None is the first one.

    Returns:
        [m, ..., n] ([m, ..., n / 2] for swiglu), or (that, gathered x).

    Raises:
        InvalidArgument: shapes, types or axes do not fit; when the call is traced.
    """
    team = team_of(axis_name, world)
    # The rows of all ranks meet my weight, and are multiplied by the product of my scales.
    shared = team[1] if team[2] > 1 else ()
    x, w, bias, scale = vary(team[1], *_scaled("ag_gemm", x, w, bias, shared))
    if scale is not None and return_gathered:
        raise InvalidArgument("ag_gemm: a gathered QTensor is not returned: use all_gather")
    shape = x.shape
    rows = _rows(rows, team[2], shape[0], "`x`")
    rows = None if rows is None else [r * _inner(shape) for r in rows]
    params = dict(act=activation, rows=rows, algo=algo, returned=return_gathered)
    if scale is not None:
        return _ag_fp8(static(team, **params), x, w, bias, scale)
    y = _ag_gemm(static(team, **params), flat(x), w, bias)
    y, gathered = y if return_gathered else (y, None)
    y = _folded(y, shape)
    return (y, _folded(gathered, shape)) if return_gathered else y


def _rs(s, x, w, bias, scale=None):
    params = s.more()
    n = w.shape[1] if params.get("kn") else w.shape[0]
    rows = params.get("rows")
    most = x.shape[0] // s.team[2] if rows is None else max(rows)
    rets = {"out": ((most, n), _product_type(x))}
    args = {"x": x, "w": w, "bias": bias, "scale": scale}
    out = call("gemm_rs", args, rets, team=s.team, params=params)
    return _masked(out["out"], rows, s.team)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gemm_rs(s, x, w, bias):
    return _rs(s, x, w, bias)


def _gemm_rs_bwd(s, saved, dy):
    x, w, bias = saved
    params = s.more()
    back = static(s.team, rows=params.get("rows"), kn=True, algo=params.get("algo"))
    out = _ag_kn(back, dy, w)
    # Each rank added its bias to its own rows.
    return out["out"], matmul(out["gathered"].T, x, w.dtype), _bias_gradient(dy, bias)


def _ag_kn(s, x, w):
    """``all_gather(x) w``, and the gathered x."""
    params = s.more()
    m = x.shape[0] * s.team[2] if "rows" not in params else sum(params["rows"])
    rets = {"out": ((m, w.shape[1]), x.dtype), "gathered": ((m, x.shape[1]), x.dtype)}
    return call("ag_gemm", {"x": x, "w": w}, rets, team=s.team, params=params)


_gemm_rs.defvjp(lambda s, x, w, b: (_rs(s, x, w, b), (x, w, b)), _gemm_rs_bwd)
_rs_fp8 = without_gradient("gemm_rs", _rs)


def gemm_rs(x, w, axis_name, *, bias=None, rows=None, wire=None, algo=None, world=None):
    """``reduce_scatter(x @ w.T) + bias``: the row-parallel linear layer.

    Partial results travel while others are computed; they are added in f32 in the order of the
    ranks, so the same call gives the same bits each time.

    Args:
        x: [m, k] or [m, ..., k], k the part of this rank. Or a :class:`QTensor` [m, k] with one
            scale; then the result is bf16 and has no gradient.
        w: [n, k]. A QTensor with one scale if x is one.
        bias: [n], which each rank adds to its own rows.
        rows: rows that each rank gets along the first dimension. Default: as even as possible.
            Where they differ, the result has as many rows as the largest, and is zero behind those
            of this rank.
        wire: element type of partial results, "f32", "bf16" or "f16". Default: that of the output.
        axis_name, algo, world: as :func:`ag_gemm`.

    Returns:
        [rows of me, ..., n].

    Raises:
        As :func:`ag_gemm`.
    """
    team = team_of(axis_name, world)
    x, w, bias, scale = vary(team[1], *_scaled("gemm_rs", x, w, bias))
    shape = x.shape
    _, rows = _own_rows(shape[0], team[2], rows)
    rows = None if rows is None else [r * _inner(shape) for r in rows]
    s = static(team, rows=rows, wire=wire, algo=algo)
    if scale is not None:
        return _rs_fp8(s, x, w, bias, scale)
    return _folded(_gemm_rs(s, flat(x), w, bias), shape)


def _ar(s, x, w, bias, scale=None):
    rets = {"out": ((x.shape[0], w.shape[0]), _product_type(x))}
    more = dict(team=s.team, params=s.more(), invariant=s.tracked)
    args = {"x": x, "w": w, "bias": bias, "scale": scale}
    return call("gemm_ar", args, rets, **more)["out"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gemm_ar(s, x, w, bias):
    return _ar(s, x, w, bias)


def _gemm_ar_bwd(s, saved, dy):
    x, w, bias = saved
    db = _bias_gradient(dy, bias)
    if not s.tracked:
        dy = _all_reduce(static(s.team, reduce="sum"), dy)
    elif db is not None:
        # All ranks have the whole gradient, and the bias came as theirs: JAX will add their parts.
        (db,) = vary(s.team[1], (db / s.team[2]).astype(bias.dtype))
    (dy,) = vary(s.team[1], dy)
    return matmul(dy, w, x.dtype), matmul(dy.T, x, w.dtype), db


_gemm_ar.defvjp(lambda s, x, w, b: (_ar(s, x, w, b), (x, w, b)), _gemm_ar_bwd)
_ar_fp8 = without_gradient("gemm_ar", _ar)


def gemm_ar(x, w, axis_name, *, bias=None, wire=None, algo=None, world=None):
    """``all_reduce(x @ w.T) + bias``: the row-parallel linear layer with whole outputs.

    Args:
        x: [m, k] or [m, ..., k]; w: [n, k]; wire, axis_name, algo, world: as :func:`gemm_rs`.
        bias: [n], the same on all ranks.

    Returns:
        [m, ..., n], the same on every rank.

    Raises:
        As :func:`ag_gemm`.
    """
    team = team_of(axis_name, world)
    x, w, bias, scale = vary(team[1], *_scaled("gemm_ar", x, w, bias))
    s = static(team, is_tracked(team[1], x), wire=wire, algo=algo)
    if scale is not None:
        return _ar_fp8(s, x, w, bias, scale)
    return _folded(_gemm_ar(s, flat(x), w, bias), x.shape)
