"""Products of the experts that are here: one matrix each, rows by `m_splits` on the device."""

import functools

import jax
import jax.numpy as jnp

from .._errors import InvalidArgument
from ._call import call, vary
from ._quant import QTensor, without_gradient


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(s, x, w, bias, m_splits):
    rets = {"out": ((x.shape[0], w.shape[1]), x.dtype)}
    args = {"x": x, "w": w, "bias": bias, "m_splits": m_splits}
    return call("grouped_fprop", args, rets)["out"]


def _grouped_bwd(s, saved, dy):
    x, w, bias, m_splits = saved
    args = {"dy": dy, "w": w, "m_splits": m_splits}
    dx = call("grouped_dgrad", args, {"dx": (x.shape, x.dtype)})["dx"]
    rets = {"dw": (w.shape, w.dtype)}
    if bias is not None:
        rets["dbias"] = (bias.shape, jnp.float32)
    out = call("grouped_wgrad", {"x": x, "dy": dy, "m_splits": m_splits}, rets)
    dbias = None if bias is None else out["dbias"].astype(bias.dtype)
    return dx, out["dw"], dbias, None


_grouped.defvjp(lambda s, *args: (_grouped(s, *args), args), _grouped_bwd)


def _named(recipes, x, w, bias, m_splits):
    """Arrays of a product of QTensors by name: weights are one by one."""
    args = {"x": x[0], "x_scales": x[1], "bias": bias, "m_splits": m_splits}
    for i, (data, scales) in enumerate(w):
        args |= {f"w{i}": data, f"w{i}_scales": scales}
    rets = {"out": ((x[0].shape[0], w[0][0].shape[0]), jnp.bfloat16)}
    params = dict(recipe=recipes[0], recipes=list(recipes[1:]))
    return call("grouped_fprop", args, rets, params=params)["out"]


_grouped_fp8 = without_gradient("grouped_gemm", _named)


def _fp8(x, w, m_splits, bias):
    given = bool(w) and all(isinstance(t, QTensor) for t in (x, *w))
    if not given or m_splits.shape != (len(w),):
        raise InvalidArgument(
            "grouped_gemm: x and all weights must be QTensors, or none of them; one weight for"
            " each split"
        )
    for t in (x, *w):
        if len(t.shape) != 2 or t.dtype != x.dtype:
            raise InvalidArgument(
                f"grouped_gemm: QTensors must be matrices of one type, not {t.shape}"
                f" {t.dtype.name} beside {x.dtype.name}"
            )
    bias = None if bias is None else jnp.asarray(bias).astype(jnp.float32)
    recipes = tuple(t.recipe for t in (x, *w))
    pairs = [a for t in (x, *w) for a in (t.data, t.scales)]
    bias, m_splits, *pairs = vary((), bias, m_splits, *pairs)
    x, *weights = zip(pairs[::2], pairs[1::2])
    return _grouped_fp8(recipes, x, weights, bias, m_splits)


def grouped_gemm(x, w, m_splits, *, bias=None):
    """``y[rows of e] = x[rows of e] @ w[e].T + bias[e]`` for every expert e, in one launch.

    Local: needs no world, and may be called outside of shard_map. The splits stay on the device:
    nothing waits for them. Rows behind the last expert's are zero in the output and in the gradient
    of x.

    Args:
        x: [rows, k]; f32, bf16 or f16. Or a :class:`QTensor` of any recipe; then the result is
            bf16 and has no gradient.
        w: [experts, n, k], of x's dtype. A list of QTensors [n, k] if x is one.
        m_splits: rows of each expert, [experts] int32 or int64.
        bias: [experts, n].

    Returns:
        [rows, n].

    Raises:
        InvalidArgument: shapes or types do not fit. On the CPU splits that are negative or sum to
            more rows than there are fail when the call runs; a GPU leaves such rows out.
    """
    m_splits = jnp.asarray(m_splits)
    list_of = w if isinstance(w, (list, tuple)) else [w]
    if isinstance(x, QTensor) or any(isinstance(t, QTensor) for t in list_of):
        return _fp8(x, list_of, m_splits, bias)
    x, w = jnp.asarray(x), jnp.asarray(w)
    if x.ndim != 2 or w.ndim != 3 or m_splits.shape != w.shape[:1]:
        raise InvalidArgument(
            f"grouped_gemm: x {x.shape} must be [rows, k], w {w.shape} [experts, n, k], and"
            f" m_splits {m_splits.shape} one number for each expert"
        )
    if bias is not None:
        bias = jnp.asarray(bias)
        bias = bias if bias.dtype in (jnp.float32, x.dtype) else bias.astype(jnp.float32)
    return _grouped(None, *vary((), x, w, bias, m_splits))
