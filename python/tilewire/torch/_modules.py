"""Layers of tensor parallelism: parameters are this rank's part of the whole."""

import math

import torch
from torch import nn

from ._functions import ag_gemm, gemm_ar, gemm_rs
from ._grouped import grouped_gemm
from ._world import World, world_of


def _accumulate_into(param):
    """Whether gradients of `param` go to its ``main_grad``, as Megatron wants it."""
    return getattr(param, "main_grad", None) is not None


class _MainGrad(torch.autograd.Function):
    """The weight itself; its gradient is added to ``main_grad`` instead of to ``grad``."""

    @staticmethod
    def forward(ctx, weight):
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, dw):
        weight = ctx.weight
        weight.main_grad.add_(dw)
        weight.grad_added_to_main_grad = True
        return None


class _Parallel(nn.Module):
    """A weight [out, in] of which this rank has a part, with the names of ``nn.Linear``."""

    def __init__(self, rows, cols, bias, group, device, dtype):
        super().__init__()
        # By its number only: a world belongs to its process, a module can be copied and saved.
        self.world = group if isinstance(group, World) else world_of(group)
        made = dict(device=device if device is not None else self.world.device, dtype=dtype)
        self.weight = nn.Parameter(torch.empty(rows, cols, **made))
        self.register_parameter("bias", nn.Parameter(torch.empty(bias, **made)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self):
        """As ``nn.Linear`` does, of the whole layer's number of inputs."""
        bound = 1 / math.sqrt(max(self.in_features, 1))
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def _weight(self):
        return _MainGrad.apply(self.weight) if _accumulate_into(self.weight) else self.weight

    def __deepcopy__(self, memo):
        world, self.__dict__["world"] = self.__dict__.pop("world"), None
        try:
            new = self.__class__.__new__(self.__class__)
            memo[id(self)] = new
            import copy

            new.__dict__ = copy.deepcopy(self.__dict__, memo)
        finally:
            self.__dict__["world"] = world
        new.__dict__["world"] = world
        return new

    def __getstate__(self):
        state = self.__dict__.copy()
        state["world"] = None
        return state

    def extra_repr(self):
        return (
            f"in_features={self.in_features}, out_features={self.out_features},"
            f" bias={self.bias is not None}, part={tuple(self.weight.shape)}"
        )


def _part(n, world, what):
    if n % world.size:
        raise ValueError(f"{what}={n} is not a multiple of the {world.size} ranks")
    return n // world.size


class ColumnParallelLinear(_Parallel):
    """``y = all_gather(x) @ W.T + b``, with this rank's columns of y: see :func:`ag_gemm`.

    Args:
        in_features, out_features: of the whole layer.
        bias: whether there is one.
        group: a World, a ProcessGroup that has one, or None for the first world.
        activation: None, "relu", "gelu" or "swiglu".
        device, dtype: of the parameters. Default: the world's device, torch's default dtype.

    Parameters: ``weight`` [out_features / P, in_features], ``bias`` [out_features / P]. A weight
    with a ``main_grad`` gets its gradient there, and ``grad_added_to_main_grad`` is set.
    """

    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        *,
        group=None,
        activation=None,
        device=None,
        dtype=None,
    ):
        world = world_of(group)
        self.__dict__.update(in_features=in_features, out_features=out_features)
        own = _part(out_features, world, "out_features")
        super().__init__(own, in_features, own if bias else 0, world, device, dtype)
        self.in_features, self.out_features = in_features, out_features
        self.activation = activation

    def forward(self, x):
        return ag_gemm(x, self._weight(), self.world, bias=self.bias, activation=self.activation)


class RowParallelLinear(_Parallel):
    """``y = reduce_scatter(x @ W.T) + b``, with this rank's rows of y: see :func:`gemm_rs`.

    With ``scatter=False`` all ranks have all rows: see :func:`gemm_ar`.

    Parameters: ``weight`` [out_features, in_features / P], ``bias`` [out_features], the same on all
    ranks, with the same gradient on all ranks.
    """

    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        *,
        group=None,
        scatter=True,
        device=None,
        dtype=None,
    ):
        world = world_of(group)
        self.__dict__.update(in_features=in_features, out_features=out_features)
        own = _part(in_features, world, "in_features")
        super().__init__(out_features, own, out_features if bias else 0, world, device, dtype)
        self.in_features, self.out_features = in_features, out_features
        self.scatter = scatter

    def reset_parameters(self):
        super().reset_parameters()
        if self.bias is not None:
            # Replicated: ranks whose random numbers differ must begin alike.
            nn.init.zeros_(self.bias)

    def forward(self, x):
        op = gemm_rs if self.scatter else gemm_ar
        return op(x, self._weight(), self.world, bias=self.bias)


class GroupedLinear(nn.Module):
    """A linear layer for each expert that is here: see :func:`grouped_gemm`.

    Parameters: ``weight0`` ... ``weight{n-1}`` [out_features, in_features] and ``bias`` [n,
    out_features]. Weights with a ``main_grad`` get their gradients there.
    """

    def __init__(
        self, num_gemms, in_features, out_features, bias=True, *, device=None, dtype=None
    ):
        super().__init__()
        made = dict(device=device, dtype=dtype)
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        for e in range(num_gemms):
            weight = nn.Parameter(torch.empty(out_features, in_features, **made))
            self.register_parameter(f"weight{e}", weight)
        bias = nn.Parameter(torch.empty(num_gemms, out_features, **made)) if bias else None
        self.register_parameter("bias", bias)
        self.reset_parameters()

    def reset_parameters(self):
        """As ``nn.Linear`` does, for each expert."""
        bound = 1 / math.sqrt(max(self.in_features, 1))
        for p in self.parameters():
            nn.init.uniform_(p, -bound, bound)

    def weights(self):
        """The weights of all experts."""
        return [getattr(self, f"weight{e}") for e in range(self.num_gemms)]

    def forward(self, x, m_splits):
        w = [_MainGrad.apply(p) if _accumulate_into(p) else p for p in self.weights()]
        return grouped_gemm(x, w, m_splits, bias=self.bias)

    def extra_repr(self):
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features},"
            f" out_features={self.out_features}, bias={self.bias is not None}"
        )
