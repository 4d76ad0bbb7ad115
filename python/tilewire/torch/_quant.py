"""FP8 tensors with their scales: what matmuls, grouped products and experts take."""

import torch

from .._errors import InvalidArgument, Mismatch
from . import _ops
from ._world import handle_of

_RECIPES = ("tensor", "block1x128", "block128x128", "mx1x32")
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class QTensor:
    """An FP8 matrix with scales: ``value = data * scale``. Made by :func:`quantize`; has no
    gradient.

    Attributes:
        data: [rows, cols] float8_e4m3fn or float8_e5m2.
        scales: [1] f32 ("tensor"); [rows, ceil(cols / 128)] f32 ("block1x128"); [ceil(rows / 128),
            ceil(cols / 128)] f32 ("block128x128"); [rows, ceil(cols / 32)] float8_e8m0fnu
            ("mx1x32").
        recipe: one of these names.
        world: number of the world whose ranks share the scale; 0 if it is this tensor's own.
    """

    __slots__ = ("data", "scales", "recipe", "world")

    def __init__(self, data, scales, recipe, world=0):
        if data.dtype not in _FP8 or data.dim() != 2 or recipe not in _RECIPES:
            raise InvalidArgument(
                f"QTensor: an FP8 matrix and one of {', '.join(_RECIPES)} are expected, not"
                f" {tuple(data.shape)} {data.dtype} and {recipe!r}"
            )
        self.data, self.scales, self.recipe, self.world = data, scales, recipe, world

    def __repr__(self):
        return f"QTensor({tuple(self.shape)}, {self.dtype}, {self.recipe}, {self.device})"

    @property
    def shape(self):
        return self.data.shape

    @property
    def dtype(self):
        return self.data.dtype

    @property
    def device(self):
        return self.data.device

    def dequantize(self, dtype=torch.bfloat16):
        """The values, rounded once to ``dtype``: torch.float32, bfloat16 or float16."""
        return _ops.dequantize(self.data, self.scales, self.recipe, dtype)


def quantize(x, recipe="tensor", *, dtype=torch.float8_e4m3fn, pow2_scales=False, group=None):
    """``x`` as FP8 with scales from its own magnitudes: ``amax / max`` of each block, rounded to
    nearest even, saturating.

    Args:
        x: [rows, cols]; f32, bf16 or f16.
        recipe: "tensor" (one f32 scale), "block1x128", "block128x128" (f32), or "mx1x32" (powers of
            two). The comm+GEMM operations take "tensor", the dispatch of experts "block1x128", and
            :func:`grouped_gemm` takes all.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        pow2_scales: f32 scales are powers of two.
        group: with "tensor": one scale for the tensors of all ranks of this group, as
            :func:`ag_gemm` needs. Collective then; ranks may have different numbers of rows.

    Returns:
        QTensor: it has no gradient, and neither has what is computed from it.

    Raises:
        InvalidArgument: ``x`` is no matrix, or requires a gradient; the recipe or dtype is unknown.
    """
    if not isinstance(x, torch.Tensor) or x.dim() != 2:
        raise InvalidArgument("quantize: a matrix is expected: flatten the outer dimensions")
    if recipe not in _RECIPES or dtype not in _FP8:
        raise InvalidArgument(
            f"quantize: recipe {recipe!r} to {dtype}: one of {', '.join(_RECIPES)} to float8_e4m3fn"
            " or float8_e5m2 is expected"
        )
    if group is not None and recipe != "tensor":
        raise InvalidArgument(f"quantize: {recipe} has a scale for each block: a group shares none")
    if torch.is_grad_enabled() and x.requires_grad:
        raise InvalidArgument("quantize: a QTensor has no gradient: pass x.detach()")
    world = 0 if group is None else handle_of(group)
    data, scales = _ops.quantize(x, world, recipe, dtype, pow2_scales)
    return QTensor(data, scales, recipe, world)


def fp8_operands(op, x, w, bias, world=0):
    """Codes and the product of the scales of a matmul's operands; ``world`` is that of all ranks
    whose rows meet one weight."""
    if not (isinstance(x, QTensor) and isinstance(w, QTensor)):
        raise InvalidArgument(f"{op}: x and w must both be QTensors, or none of them")
    for what, t in (("x", x), ("w", w)):
        if t.recipe != "tensor":
            raise InvalidArgument(
                f"{op}: {what} has {t.recipe} scales; one for the tensor is expected: "
                'quantize(..., "tensor")'
            )
    if world and _ops.size_of(world) > 1 and x.world != world:
        raise Mismatch(
            f"{op}: x has a scale of its own, and its rows meet those of other ranks: quantize it"
            " with this group"
        )
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument(f"{op}: products of QTensors have no gradients: pass bias.detach()")
    bias = None if bias is None else bias.float()
    return x.data, w.data, bias, x.scales * w.scales
