"""What the layers have in common: parameters, groups, gradients that are accumulated elsewhere."""

import copy

import torch
from torch import nn

from ..._errors import InvalidArgument, Unsupported
from ._ub import ranks_of

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def part(n, size, what):
    """A rank's part of ``n``."""
    if n % size:
        raise InvalidArgument(f"{what}={n} is not a multiple of the {size} ranks")
    return n // size


def accumulated(weight):
    """What a backward pass returns for a weight whose gradient lies in ``main_grad``.

    None leaves the weight's hooks alone. Who gave it ``grad_added_to_main_grad`` (Megatron) waits
    for the hooks, so a gradient of zeros comes, which changes nothing.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return weight.new_zeros(()).expand_as(weight)


def main_of(weight):
    """Where the gradient of a weight is accumulated."""
    main = getattr(weight, "main_grad", None)
    if main is None:
        raise InvalidArgument("fuse_wgrad_accumulation: the weight has no `main_grad` to add to")
    return main


class _MainGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, overwrite):
        ctx.weight, ctx.overwrite = weight, overwrite
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, dw):
        main = main_of(ctx.weight)
        if ctx.overwrite:
            main.copy_(dw)
        else:
            main.add_(dw)
        return accumulated(ctx.weight), None


def overwrites(weight, first_microbatch):
    """Whether a gradient replaces what ``main_grad`` holds."""
    return bool(first_microbatch) or getattr(weight, "overwrite_main_grad", False)


def main_grad(weight, first_microbatch):
    """The weight; its gradient goes to ``weight.main_grad``."""
    return _MainGrad.apply(weight, overwrites(weight, first_microbatch))


class Module(nn.Module):
    """Parameters that begin as TransformerEngine's do, and a tensor-parallel group."""

    def __init__(self, get_rng_state_tracker, rng_tracker_name, init_method):
        super().__init__()
        self.get_rng_state_tracker, self.rng_tracker_name = get_rng_state_tracker, rng_tracker_name
        self.init_method = init_method
        self.tp_group = None

    def _place(self, tp_group, tp_size, parallel_mode, params_dtype, device):
        """Takes the group, and says how parameters are made."""
        if parallel_mode not in ("row", "column", None):
            raise InvalidArgument(f"parallel_mode={parallel_mode!r} is not 'row', 'column' or None")
        dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        if dtype not in _TYPES:
            raise Unsupported(f"params_dtype={dtype} is not supported: f32, bf16 or f16 is")
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.parallel_mode = parallel_mode
        self.tp_group = tp_group
        self.tp_size = tp_size if tp_group is None else ranks_of(tp_group)
        return {"device": device, "dtype": dtype}

    def _set_group(self, layer, tp_group):
        if ranks_of(tp_group) != self.tp_size:
            raise InvalidArgument(
                f"{layer}: the group has {ranks_of(tp_group)} ranks, but tp_size={self.tp_size}"
            )
        self.tp_group = tp_group

    def _parameter(self, name, shape, made):
        self.register_parameter(name, nn.Parameter(torch.empty(*shape, **made)))

    def reset_parameters(self, defer_init=False):
        """Gives parameters the values that they begin with; those on "meta" get memory, unless
        ``defer_init``, which does nothing."""
        if defer_init:
            return
        for name, p in list(self.named_parameters(recurse=False)):
            if p.device.type == "meta":
                device = "cuda" if torch.cuda.is_available() else "cpu"
                p = nn.Parameter(torch.empty_like(p, device=device))
                setattr(self, name, p)
            self._begin(p)
            self._mark(p)

    @torch.no_grad()
    def _begin(self, p):
        if p.dim() == 1:
            p.zero_()
            return
        init = self.init_method or (lambda w: nn.init.normal_(w, mean=0.0, std=0.023))
        tracker = self.get_rng_state_tracker
        if tracker is None:
            init(p)
            return
        name = self.rng_tracker_name
        with tracker().fork(name) if name else tracker().fork():
            init(p)

    def _mark(self, p):
        """Megatron's attributes of parameters that ranks have parts of."""
        if p.dim() == 1 and self.parallel_mode == "row":
            p.sequence_parallel = self.sequence_parallel
        elif p.dim() > 1 or self.parallel_mode == "column":
            p.tensor_model_parallel, p.partition_stride = True, 1
            p.partition_dim = 1 if self.parallel_mode == "row" else 0

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        # What their modules save of FP8; none of it is here.
        state_dict.pop(prefix + "_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __deepcopy__(self, memo):
        # A group belongs to the process: a copy of the layer has the same one.
        memo[id(self.tp_group)] = self.tp_group
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        new.__dict__ = copy.deepcopy(self.__dict__, memo)
        return new

    def __getstate__(self):
        # Saved without its group: `set_tensor_parallel_group` gives it one again.
        return {**self.__dict__, "tp_group": None}
