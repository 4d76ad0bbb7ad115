"""``Linear`` of TransformerEngine 2.20."""

import torch
import torch.nn.functional as F

from ..._errors import InvalidArgument
from .. import _ops
from .._functions import (
    Differentiable,
    _autocast,
    _bias_of,
    _check,
    _flat,
    _folded,
    _grad_bias,
    _needs_grad,
    _once,
    ag_gemm,
    gemm_ar,
    gemm_rs,
)
from ._base import Module, main_grad, part
from ._ub import refuse, world_for

_SYMMETRIC = (None, "multimem_all_reduce", "two_shot", "one_shot")


class _Column(Differentiable):
    """``x @ w.T + bias`` of an x that all ranks have alike; the gradient of x is the sum of all
    ranks', by gemm_ar."""

    @staticmethod
    def forward(ctx, x, w, bias, world):
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w)
        ctx.world = world
        ctx.bias = bias.dtype if bias is not None and ctx.needs_input_grad[2] else None
        return _ops.column(x, w, bias, world, ctx.needs_input_grad[0])

    @staticmethod
    def backward(ctx, dy):
        _once()
        x, w = ctx.saved_tensors
        dy = dy.contiguous()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            base, kn = _ops.weight_order(w.t())
            dx = _ops.gemm_ar(dy, base, None, ctx.world, kn, None, None)
        if ctx.needs_input_grad[1]:
            dw = dy.t() @ x
        return dx, dw, _grad_bias(dy, ctx.bias), None


def _replicated_column(x, w, world, bias):
    _check(x, w)
    x, w, bias = _autocast(x, w, bias)
    flat = _flat(x)
    bias = None if bias is None else bias.to(x.dtype)
    if _needs_grad(x, w, bias):
        y = _Column.run(flat, w, bias, world.handle)
    else:
        y = F.linear(flat, w, bias)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], w.shape[0])


class Linear(Module):
    """``y = x @ weight.T + bias``, of which tensor parallelism gives this rank a part.

    - ``parallel_mode="column"``, ``sequence_parallel``: :func:`tilewire.torch.ag_gemm`; x is this
      rank's rows (the first dimension), y all rows and this rank's columns.
    - ``parallel_mode="column"``: x is the same on all ranks; its gradient is summed over them.
    - ``parallel_mode="row"``, ``sequence_parallel``: :func:`tilewire.torch.gemm_rs`.
    - ``parallel_mode="row"``: :func:`tilewire.torch.gemm_ar`.
    - ``parallel_mode=None``, or one rank: a local product.

    Args:
        in_features, out_features: of the whole layer.
        sequence_parallel: activations between layers are divided along the first dimension.
        fuse_wgrad_accumulation: the weight's gradient is added to ``weight.main_grad`` (it replaces
            it if ``weight.overwrite_main_grad``); ``weight.grad`` stays as it is.
        tp_group: a ProcessGroup of any backend, or a World. The first layer of a group makes its
            World: all ranks of the group make their layers together.
        tp_size: ranks, where ``set_tensor_parallel_group`` gives the group later.
        get_rng_state_tracker, rng_tracker_name, init_method: how weights begin. Default: normal
            with mean 0 and deviation 0.023; biases begin at 0.
        bias: whether there is one. With "row" it is the same on all ranks, and its gradient is that
            of this rank's rows; ``bias.sequence_parallel`` says whether ranks must add theirs.
        return_bias: do not add the bias; ``forward`` returns (y, bias).
        params_dtype: of the parameters: f32, bf16 or f16. Default: torch's default.
        parallel_mode: "column", "row" or None.
        parameters_split: names of parts of the weight, or a dict of their rows: ``NAME_weight``,
            ``NAME_bias``.
        device: of the parameters. Default: a GPU if there is one, else the CPU.
        ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad, ub_name,
            symmetric_ar_type: accepted without effect: tilewire overlaps whatever it predicts to be
            faster, and needs no ``initialize_ub``.
        name: accepted without effect.
        delay_wgrad_compute, save_original_input: unsupported.

    Parameters: ``weight`` [out_features, in_features] and ``bias`` [out_features] of this rank's
    part, with Megatron's attributes (``tensor_model_parallel``, ``partition_dim``,
    ``partition_stride``).

    Raises:
        Unsupported: naming the argument. InvalidArgument: sizes do not fit.
    """

    def __init__(
        self,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        parameters_split=None,
        device=None,
        ub_overlap_ag=False,
        ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False,
        ub_bulk_dgrad=False,
        ub_bulk_wgrad=False,
        ub_name=None,
        delay_wgrad_compute=False,
        symmetric_ar_type=None,
        save_original_input=False,
        name=None,
    ):
        super().__init__(get_rng_state_tracker, rng_tracker_name, init_method)
        refuse(
            "Linear",
            delay_wgrad_compute=delay_wgrad_compute,
            save_original_input=save_original_input,
        )
        if symmetric_ar_type not in _SYMMETRIC:
            raise InvalidArgument(f"Linear: symmetric_ar_type={symmetric_ar_type!r} is not known")
        made = self._place(tp_group, tp_size, parallel_mode, params_dtype, device)
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.in_features, self.out_features = in_features, out_features
        if parallel_mode == "column":
            self.out_features = part(out_features, self.tp_size, "out_features")
        elif parallel_mode == "row":
            self.in_features = part(in_features, self.tp_size, "in_features")
        self._register(_splits(parameters_split, out_features), made)
        self.reset_parameters(defer_init=torch.device(made["device"]).type == "meta")
        self._join()

    def _register(self, splits, made):
        self.weight_names = [f"{s}weight" for s, _ in splits]
        self.bias_names = [f"{s}bias" for s, _ in splits]
        rows = [n for _, n in splits]
        if self.parallel_mode == "column":
            rows = [part(n, self.tp_size, "parameters_split") for n in rows]
        for name, n in zip(self.weight_names, rows):
            self._parameter(name, (n, self.in_features), made)
        for name, n in zip(self.bias_names, rows):
            if self.use_bias:
                self._parameter(name, (n,), made)
            else:
                setattr(self, name, torch.empty(0, **made))

    def set_tensor_parallel_group(self, tp_group):
        """Sets the group, where the layer was made with ``tp_size`` alone."""
        self._set_group("Linear", tp_group)
        self._join()

    def _join(self):
        """The World that the forward pass needs; None where it moves nothing, or no group is there
        yet."""
        if self.tp_size == 1 or self.parallel_mode is None or self.tp_group is None:
            return None
        device = getattr(self, self.weight_names[0]).device
        return world_for(self.tp_group, None if device.type == "meta" else device)

    def _whole(self, names, first_microbatch=None):
        """A parameter of all parts; gradients of weights go where they are accumulated."""
        tensors = [getattr(self, n) for n in names]
        if names is self.weight_names and self.fuse_wgrad_accumulation:
            tensors = [main_grad(t, first_microbatch) for t in tensors]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        """The product, for inp [.., in_features of this rank].

        Args:
            inp: any number of dimensions before the last one; the first of them is what
                ``sequence_parallel`` divides.
            is_first_microbatch: with ``fuse_wgrad_accumulation``, True overwrites ``main_grad`` in
                place of adding to it. Weights are not cached, so there is no other effect.
            fp8_output, fp8_grad: unsupported.

        Returns:
            y, or (y, bias) with ``return_bias``.
        """
        refuse("Linear.forward", fp8_output=fp8_output, fp8_grad=fp8_grad)
        weight = self._whole(self.weight_names, is_first_microbatch)
        bias = self._whole(self.bias_names)
        # Behind the reduction, where ranks have it alike; so its gradient is that of the rows here.
        later = self.parallel_mode == "row" and self.tp_size > 1
        own = bias if self.use_bias and not self.return_bias else None
        out = self._product(inp, weight, None if later else own)
        if later and own is not None:
            out = out + own.to(out.dtype)
        return (out, bias.to(out.dtype)) if self.return_bias else out

    def _product(self, x, weight, bias):
        if self.tp_size == 1 or self.parallel_mode is None:
            return F.linear(x, weight, bias)
        world = self._join()
        if world is None:
            raise InvalidArgument("Linear: set_tensor_parallel_group() must give the group first")
        if self.parallel_mode == "column":
            if self.sequence_parallel:
                return ag_gemm(x, weight, world, bias=bias)
            return _replicated_column(x, weight, world, bias)
        return (gemm_rs if self.sequence_parallel else gemm_ar)(x, weight, world)

    def extra_repr(self):
        return (
            f"in_features={self.in_features}, out_features={self.out_features},"
            f" bias={self.use_bias}, parallel_mode={self.parallel_mode}, tp_size={self.tp_size}"
        )


def _splits(given, out_features):
    """Prefixes and rows of the parameters that the weight is split into."""
    if given is None:
        return [("", out_features)]
    names = list(given)
    if not names or not all(isinstance(n, str) for n in names):
        raise InvalidArgument(f"Linear: parameters_split={given!r} must name at least one part")
    even = [out_features // len(names)] * len(names)
    rows = [given[n] for n in names] if isinstance(given, dict) else even
    if sum(rows) != out_features:
        raise InvalidArgument(f"Linear: parameters_split: {rows} do not add up to {out_features}")
    return [(n.rstrip("_") + "_", r) for n, r in zip(names, rows)]
