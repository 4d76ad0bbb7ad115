"""Products of the experts that are here: one matrix each, rows by `m_splits` on the device."""

import torch

from .._errors import InvalidArgument
from . import _ops
from ._functions import _autocast_dtype, _bias_of, _needs_grad, _once
from ._nodes import Differentiable
from ._quant import QTensor


class _GroupedGemm(Differentiable):
    @staticmethod
    def forward(ctx, x, bias, m_splits, mains, mask, *w):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, m_splits, *w)
        ctx.mains, ctx.mask = mains, mask
        ctx.bias = None if bias is None else bias.dtype
        return _ops.grouped_fprop(x, list(w), _bias_of(bias, x), m_splits)

    @staticmethod
    def backward(ctx, dy):
        _once()
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        x, m_splits, *w = ctx.saved_tensors
        needs_x, needs_bias = ctx.needs_input_grad[:2]
        needs_bias = needs_bias and ctx.bias is not None
        needs_w = any(ctx.needs_input_grad[5:])
        dy = dy.contiguous()
        dx = dbias = None
        dw = [None] * len(w)
        if needs_x:
            dx = _ops.grouped_dgrad(dy, w, m_splits)
        if needs_w and ctx.mains is not None:
            dbias = _ops.grouped_wgrad_into(x, dy, m_splits, ctx.mains, ctx.mask, needs_bias)
        elif needs_w or needs_bias:
            grads, dbias = _ops.grouped_wgrad(x, dy, m_splits, needs_bias)
            if needs_w:
                dw = [grads] if w[0].dim() == 3 else list(grads.unbind())
        dbias = dbias.to(ctx.bias) if needs_bias else None
        return dx, dbias, None, None, None, *dw


def _fp8(x, w, m_splits, bias):
    if not all(isinstance(t, QTensor) for t in (x, *w)) or len(w) != m_splits.numel():
        raise InvalidArgument(
            "grouped_gemm: x and all weights must be QTensors, or none of them;"
            " one weight for each split"
        )
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument(
            "grouped_gemm: products of QTensors have no gradients: detach the bias"
        )
    bias = None if bias is None else bias.float()
    data, scales, recipes = ([getattr(t, n) for t in w] for n in ("data", "scales", "recipe"))
    return _ops.grouped_fp8(x.data, x.scales, x.recipe, data, scales, recipes, bias, m_splits)


def grouped_gemm(x, w, m_splits, *, bias=None, out=None, wgrad_accumulation_mask=None):
    """``y[rows of e] = x[rows of e] @ w[e].T + bias[e]`` for every expert e, in one launch.

    The splits stay on the device: nothing waits for them. Rows behind the last expert's are zero in
    the output and in the gradient of x.

    Args:
        x: [rows, k]; f32, bf16 or f16. Or a :class:`QTensor` of any recipe; then the result is
            bf16.
        w: [experts, n, k], or a list of [n, k]; a list of QTensors if x is one.
        m_splits: rows of each expert, [experts] int32 or int64, on x's device.
        bias: [experts, n].
        out: where the gradients of the weights go in place of ``.grad``: f32, bf16 or f16 tensors
            of w's form (``main_grad``).
        wgrad_accumulation_mask: [experts] uint8: gradients in ``out`` are added to where it is not
            zero, and overwritten where it is zero. Default: overwritten.

    Returns:
        [rows, n].

    Raises:
        InvalidArgument: shapes, dtypes or devices do not fit; on the CPU also for splits that are
            negative or sum to more rows than there are (a GPU leaves such rows out).
    """
    list_of = [w] if isinstance(w, torch.Tensor) else list(w)
    if isinstance(x, QTensor) or any(isinstance(t, QTensor) for t in list_of):
        if out is not None:
            raise InvalidArgument("grouped_gemm: products of QTensors have no gradients for `out`")
        return _fp8(x, list_of, m_splits, bias)
    groups = m_splits.shape[0] if m_splits.dim() == 1 else -1
    n = list_of[0].shape[0] if list_of and list_of[0].dim() == 3 else len(list_of)
    if x.dim() != 2 or groups < 0 or n != groups:
        raise InvalidArgument(
            f"grouped_gemm: x {tuple(x.shape)} must be a matrix, m_splits {tuple(m_splits.shape)}"
            f" one number for each of the {n} weights"
        )
    mains = None if out is None else ([out] if isinstance(out, torch.Tensor) else list(out))
    if wgrad_accumulation_mask is not None and mains is None:
        raise InvalidArgument("grouped_gemm: wgrad_accumulation_mask needs `out` to add to")
    dtype = _autocast_dtype(x)
    if dtype is not None:
        x, list_of = x.to(dtype), [t.to(dtype) for t in list_of]
    if _needs_grad(x, bias, *list_of):
        return _GroupedGemm.run(x, bias, m_splits, mains, wgrad_accumulation_mask, *list_of)
    return _ops.grouped_fprop(x, list_of, _bias_of(bias, x), m_splits)
