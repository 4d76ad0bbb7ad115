"""Products of the experts that are here: one matrix each, rows by `m_splits` on the device."""

import functools

import jax
import jax.numpy as jnp

from .._errors import InvalidArgument
from ._call import call, vary


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


def grouped_gemm(x, w, m_splits, *, bias=None):
    """``y[rows of e] = x[rows of e] @ w[e].T + bias[e]`` for every expert e, in one launch.

    Local: needs no world, and may be called outside of shard_map. The splits stay on the device:
    nothing waits for them. Rows behind the last expert's are zero in the output and in the gradient
    of x.

    Args:
        x: [rows, k]; f32, bf16 or f16.
        w: [experts, n, k], of x's dtype.
        m_splits: rows of each expert, [experts] int32 or int64.
        bias: [experts, n].

    Returns:
        [rows, n].

    Raises:
        InvalidArgument: shapes or types do not fit. On the CPU splits that are negative or sum to
            more rows than there are fail when the call runs; a GPU leaves such rows out.
    """
    x, w, m_splits = jnp.asarray(x), jnp.asarray(w), jnp.asarray(m_splits)
    if x.ndim != 2 or w.ndim != 3 or m_splits.shape != w.shape[:1]:
        raise InvalidArgument(
            f"grouped_gemm: x {x.shape} must be [rows, k], w {w.shape} [experts, n, k], and"
            f" m_splits {m_splits.shape} one number for each expert"
        )
    if bias is not None:
        bias = jnp.asarray(bias)
        bias = bias if bias.dtype in (jnp.float32, x.dtype) else bias.astype(jnp.float32)
    return _grouped(None, *vary((), x, w, bias, m_splits))
