"""FP8 arrays with their scales."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._errors import InvalidArgument, Mismatch
from ._call import call, vary
from ._world import team_of

_RECIPES = ("tensor", "block1x128", "block128x128", "mx1x32")
_FP8 = ("float8_e4m3fn", "float8_e5m2")


class _Static(NamedTuple):
    team: tuple | None
    recipe: str
    dtype: str
    pow2_scales: bool = False


def _scales_of(recipe, rows, cols):
    """Shape and type of the scales of a matrix."""
    if recipe == "mx1x32":
        return (rows, -(-cols // 32)), jnp.float8_e8m0fnu
    wide = -(-cols // 128)
    shapes = {"tensor": (1,), "block1x128": (rows, wide), "block128x128": (-(-rows // 128), wide)}
    return shapes[recipe], jnp.float32


def without_gradient(name, f, text="products of QTensors have no gradients"):
    """``f(static, *arrays)``, which raises where a derivative of it is needed."""

    def fwd(*_):
        raise InvalidArgument(f"{name}: {text}")

    def bwd(*_):
        raise AssertionError("the forward pass has raised")

    g = jax.custom_vjp(f, nondiff_argnums=(0,))
    g.defvjp(fwd, bwd)
    return g


def _codes(s, x):
    rets = {"data": (x.shape, s.dtype), "scales": _scales_of(s.recipe, *x.shape)}
    params = dict(recipe=s.recipe, pow2_scales=s.pow2_scales)
    out = call("quantize", {"x": x}, rets, team=s.team, params=params)
    return out["data"], out["scales"]


def _values(s, data, scales):
    rets = {"out": (data.shape, s.dtype)}
    args = {"data": data, "data_scales": scales}
    return call("dequantize", args, rets, params=dict(recipe=s.recipe))["out"]


_quantize = without_gradient(
    "quantize", _codes, "a QTensor has no gradient: pass jax.lax.stop_gradient(x)"
)
_dequantize = without_gradient(
    "dequantize", _values, "a QTensor has no gradient: use jax.lax.stop_gradient"
)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["data", "scales"],
    meta_fields=["recipe", "axes"],
)
@dataclasses.dataclass(frozen=True)
class QTensor:
    """An FP8 matrix with scales: ``value = data * scale``. Made by :func:`quantize`; has no
    gradient. A pytree of two arrays.

    Attributes:
        data: [rows, cols] float8_e4m3fn or float8_e5m2.
        scales: [1] f32 ("tensor"); [rows, ceil(cols / 128)] f32 ("block1x128"); [ceil(rows / 128),
            ceil(cols / 128)] f32 ("block128x128"); [rows, ceil(cols / 32)] float8_e8m0fnu
            ("mx1x32").
        recipe: one of these names.
        axes: axes of the world's mesh along which all ranks have this scale; empty if it is this
            array's own.
    """

    data: jax.Array
    scales: jax.Array
    recipe: str
    axes: tuple = ()

    @property
    def shape(self):
        return self.data.shape

    @property
    def dtype(self):
        return self.data.dtype

    def dequantize(self, dtype=jnp.bfloat16):
        """The values, rounded once to ``dtype``: float32, bfloat16 or float16.

        Raises:
            InvalidArgument: codes, scales or types are not those of the recipe.
        """
        data, scales = vary((), self.data, self.scales)
        return _dequantize(_Static(None, self.recipe, jnp.dtype(dtype).name), data, scales)


def quantize(
    x, recipe="tensor", *, dtype=jnp.float8_e4m3fn, pow2_scales=False, axis_name=None, world=None
):
    """``x`` as FP8 with scales from its own magnitudes: ``amax / max`` of each block, rounded to
    nearest even, saturating.

    Local unless an axis is named: needs no world, and may be called outside of shard_map.

    Args:
        x: [rows, cols]; f32, bf16 or f16.
        recipe: "tensor" (one f32 scale), "block1x128", "block128x128" (f32), or "mx1x32" (powers of
            two). The comm+GEMM operations take "tensor", and :func:`grouped_gemm` takes all.
        dtype: jnp.float8_e4m3fn or jnp.float8_e5m2.
        pow2_scales: f32 scales are powers of two.
        axis_name: with "tensor": one scale for the arrays of all ranks along this axis of the
            world's mesh, or tuple of axes, as :func:`ag_gemm` needs. Collective then; each rank has
            as many rows.
        world: a World; None is the first one.

    Returns:
        QTensor: it has no gradient, and neither has what is computed from it.

    Raises:
        InvalidArgument: ``x`` is no matrix, or its gradient is asked for; the recipe or type is
            unknown.
    """
    x = jnp.asarray(x)
    if x.ndim != 2:
        raise InvalidArgument(
            f"quantize: a matrix is expected, not {x.shape}: flatten the outer dimensions"
        )
    name = jnp.dtype(dtype).name
    if recipe not in _RECIPES or name not in _FP8:
        raise InvalidArgument(
            f"quantize: recipe {recipe!r} to {name}: one of {', '.join(_RECIPES)} to"
            f" {' or '.join(_FP8)} is expected"
        )
    if axis_name is not None and recipe != "tensor":
        raise InvalidArgument(f"quantize: {recipe} has a scale for each block: ranks share none")
    team = None if axis_name is None else team_of(axis_name, world)
    (x,) = vary(() if team is None else team[1], x)
    data, scales = _quantize(_Static(team, recipe, name, bool(pow2_scales)), x)
    return QTensor(data, scales, recipe, () if team is None else tuple(team[1]))


def fp8_operands(op, x, w, bias, axes=()):
    """Codes and bias of a matmul's operands, and the product of their scales; ``axes`` are those
    whose ranks' rows meet one weight."""
    if not (isinstance(x, QTensor) and isinstance(w, QTensor)):
        raise InvalidArgument(f"{op}: x and w must both be QTensors, or none of them")
    for what, t in (("x", x), ("w", w)):
        if t.recipe != "tensor" or t.scales.shape != (1,) or t.dtype.name not in _FP8:
            raise InvalidArgument(
                f"{op}: {what} has {t.recipe} scales {t.scales.shape} of {t.dtype.name}; FP8 with"
                ' one for the array is expected: quantize(..., "tensor")'
            )
    if not set(axes) <= set(x.axes):
        raise Mismatch(
            f"{op}: x has a scale of its own, and its rows meet those of other ranks: quantize it"
            f" with axis_name={axes if len(axes) > 1 else axes[0]!r}"
        )
    bias = None if bias is None else jnp.asarray(bias).astype(jnp.float32)
    return x.data, w.data, bias, x.scales * w.scales
