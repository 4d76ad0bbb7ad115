"""FP8 arrays with their scales."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._errors import InvalidArgument
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantize(s, x):
    rets = {"data": (x.shape, s.dtype), "scales": _scales_of(s.recipe, *x.shape)}
    params = dict(recipe=s.recipe, pow2_scales=s.pow2_scales)
    out = call("quantize", {"x": x}, rets, team=s.team, params=params)
    return out["data"], out["scales"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dequantize(s, data, scales):
    rets = {"out": (data.shape, s.dtype)}
    args = {"data": data, "scales": scales}
    return call("dequantize", args, rets, params=dict(recipe=s.recipe))["out"]


def _refuses(name, text):
    """The forward pass of a derivative: JAX asks for it only where one is needed."""

    def fwd(*_):
        raise InvalidArgument(f"{name}: a QTensor has no gradient: {text}")

    return fwd


def _never(*_):
    raise AssertionError("the forward pass has raised")


_quantize.defvjp(_refuses("quantize", "pass jax.lax.stop_gradient(x)"), _never)
_dequantize.defvjp(_refuses("dequantize", "pass jax.lax.stop_gradient of its arrays"), _never)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["data", "scales"], meta_fields=["recipe"]
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
    """

    data: jax.Array
    scales: jax.Array
    recipe: str

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
            two).
        dtype: jnp.float8_e4m3fn or jnp.float8_e5m2.
        pow2_scales: f32 scales are powers of two.
        axis_name: with "tensor": one scale for the arrays of all ranks along this axis of the
            world's mesh, or tuple of axes. Collective then.
        world: a World; None is the first one.

    Returns:
        QTensor: it has no gradient.

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
    return QTensor(data, scales, recipe)
