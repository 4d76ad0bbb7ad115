"""Plans ahead of time, and what they say of themselves."""

import torch

from .. import _native
from .._errors import InvalidArgument, Stale
from ._ep import EpBuffer
from ._quant import QTensor
from ._world import World, world_of


def _real(t, device):
    """A tensor to call with: zeros. The caller's own are neither read nor written."""
    if isinstance(t, torch.Tensor):
        on = device if t.is_meta else t.device
        return torch.zeros_like(t, device=on, requires_grad=t.requires_grad)
    if isinstance(t, QTensor):
        return QTensor(_real(t.data, device), _real(t.scales, device), t.recipe, t.world)
    if isinstance(t, EpBuffer):
        raise InvalidArgument("an EpGroup has made the plan of its calls: there is none to prepare")
    if isinstance(t, (list, tuple)) and any(isinstance(e, torch.Tensor) for e in t):
        return [_real(e, device) for e in t]
    return t


def _leaves(args):
    for a in args:
        if isinstance(a, torch.Tensor) and a.requires_grad:
            yield a
        elif isinstance(a, (list, tuple)):
            yield from _leaves(a)


def _device(values):
    """Where a call with these arguments runs."""
    for v in values:
        if isinstance(v, torch.Tensor) and not v.is_meta:
            return v.device
        if isinstance(v, (World, torch.distributed.ProcessGroup)):
            return world_of(v).device
    try:
        return world_of(None).device
    except Stale:  # an operation without a world
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _call(op, args, kwargs):
    device = _device([*args, *kwargs.values()])
    args = [_real(a, device) for a in args]
    kwargs = {k: _real(v, device) for k, v in kwargs.items()}
    outs = op(*args, **kwargs)
    outs = outs if isinstance(outs, tuple) else (outs,)
    outs = [o for o in outs if isinstance(o, torch.Tensor) and o.requires_grad]
    inputs = list(_leaves([*args, *kwargs.values()]))
    if outs and inputs:
        zeros = [torch.zeros_like(o) for o in outs]
        torch.autograd.grad(outs, inputs, zeros, allow_unused=True)


def prepare(op, *args, **kwargs):
    """Collective: makes the plans that a call of ``op`` with tensors like these needs, before its
    first call or a capture.

    It calls the operation once, and its backward pass where tensors require gradients, on zeros in
    place of the tensors, which may lie on the ``meta`` device; the zeros take memory only during
    this call. Calls whose rows round up to the same power of two find the plans.

    ::

        x = torch.empty(4096, 8192, dtype=torch.bfloat16, device="meta", requires_grad=True)
        w = torch.empty(14336, 8192, dtype=torch.bfloat16, device="meta", requires_grad=True)
        tw.prepare(tw.ag_gemm, x, w)
    """
    _check(op)
    _call(op, args, kwargs)


def explain(op, *args, **kwargs):
    """Collective: what the plans of such a call do, in words: candidates with their predicted
    times, what was chosen, memory. Arguments and effects are those of :func:`prepare`."""
    _check(op)
    _native.explain_begin()
    try:
        _call(op, args, kwargs)
    finally:
        texts = _native.explain_end()
    return "\n\n".join(texts)


def memory(group=None):
    """Plans and bytes of symmetric memory in use, as a dict: that of the world's
    :meth:`World.memory`."""
    return world_of(group).memory()


def _check(op):
    if not callable(op) or not getattr(op, "__module__", "").startswith("tilewire."):
        raise InvalidArgument(f"an operation of tilewire.torch is expected, not {op!r}")
