"""``GroupedLinear`` of TransformerEngine 2.20."""

import torch

from ... import _native
from ..._errors import InvalidArgument
from .. import _ops
from .._functions import _autocast_dtype, _bias_of, _once
from ._base import Module, accumulated, main_of, overwrites, part
from ._ub import refuse


class _Grouped(torch.autograd.Function):
    """Products into tensors of the caller's, gradients into ``main_grad``."""

    @staticmethod
    def forward(ctx, x, bias, m_splits, out, dgrad_out, mains, *w):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, m_splits, *w)
        ctx.dgrad_out, ctx.mains = dgrad_out, mains
        ctx.bias = None if bias is None else bias.dtype
        if out is None:
            return _ops.grouped_fprop(x, list(w), _bias_of(bias, x), m_splits)
        _native.grouped_fprop(x, _ops._weights(w), _bias_of(bias, x), m_splits, out, None)
        torch.autograd.graph.increment_version(out)
        # Not the caller's tensor itself: that must not become part of the graph.
        return out.detach()

    @staticmethod
    def backward(ctx, dy):
        _once()
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        x, m_splits, *w = ctx.saved_tensors
        needs_x, needs_bias = ctx.needs_input_grad[:2]
        needs_bias = needs_bias and ctx.bias is not None
        dy = dy.contiguous()
        dx = dbias = None
        dw = [None] * len(w)
        if needs_x and ctx.dgrad_out is None:
            dx = _ops.grouped_dgrad(dy, w, m_splits)
        elif needs_x:
            dx = ctx.dgrad_out
            _native.grouped_dgrad(dy, _ops._weights(w), m_splits, dx)
            torch.autograd.graph.increment_version(dx)
        if any(ctx.needs_input_grad[6:]) and ctx.mains is not None:
            dbias = _wgrad_into(ctx, x, dy, m_splits, needs_bias)
            dw = [accumulated(p) for p, _ in ctx.mains]
        elif any(ctx.needs_input_grad[6:]) or needs_bias:
            grads, dbias = _ops.grouped_wgrad(x, dy, m_splits, needs_bias)
            if any(ctx.needs_input_grad[6:]):
                dw = list(grads.unbind())
        dbias = dbias.to(ctx.bias) if needs_bias else None
        return dx, dbias, None, None, None, None, *dw


def _wgrad_into(ctx, x, dy, m_splits, needs_bias):
    """Gradients of the weights where they are accumulated."""
    targets = [main_of(p) for p, _ in ctx.mains]
    overwrites = {o for _, o in ctx.mains}
    if len(overwrites) == 1:
        # Filled on the device: nothing waits, and it can be captured.
        adds = x.new_full((len(targets),), 0 if overwrites.pop() else 1, dtype=torch.uint8)
    else:
        adds = torch.tensor([not o for _, o in ctx.mains], dtype=torch.uint8).to(x.device)
    return _ops.grouped_wgrad_into(x, dy, m_splits, targets, adds, needs_bias)


def _check(name, t, shape, like):
    """A tensor of the caller's that a pass writes to."""
    if t is None:
        return
    fits = tuple(t.shape) == shape and t.dtype == like.dtype and t.device == like.device
    if t.requires_grad or not fits or not t.is_contiguous():
        raise InvalidArgument(
            f"GroupedLinear: `{name}` must be contiguous, {like.dtype} {shape}, and not require a"
            f" gradient; it is {t.dtype} {tuple(t.shape)}, requires_grad={t.requires_grad}"
        )


class GroupedLinear(Module):
    """A linear layer for each expert that is here: ``y[rows of e] = x[rows of e] @ weight_e.T +
    bias_e``.

    Moves nothing between ranks: ``tp_size`` and ``parallel_mode`` say the shapes of the parameters.

    Args:
        num_gemms: experts.
        in_features, out_features: of the whole layer.
        fuse_wgrad_accumulation: gradients are added to ``weight{i}.main_grad`` (they replace it if
            ``overwrite_main_grad``).
        tp_group, tp_size, parallel_mode: as :class:`Linear`; no bias with several ranks.
        get_rng_state_tracker, rng_tracker_name, init_method, params_dtype, device: as
            :class:`Linear`.
        bias: whether there are biases.
        return_bias: do not add them; ``forward`` returns (y, list of biases).
        sequence_parallel, ub_name, name, use_grouped_tensor: accepted without effect.
        ub_overlap_rs, ub_overlap_ag, delay_wgrad_compute, save_original_input,
        single_grouped_weight,
            single_grouped_bias: unsupported.

    Parameters: ``weight0`` ... [out_features, in_features], ``bias0`` ... [out_features].

    Raises:
        Unsupported: naming the argument. InvalidArgument: sizes do not fit.
    """

    def __init__(
        self,
        num_gemms,
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
        device=None,
        ub_overlap_rs=False,
        ub_overlap_ag=False,
        ub_name=None,
        delay_wgrad_compute=False,
        save_original_input=False,
        single_grouped_weight=False,
        single_grouped_bias=False,
        name=None,
        use_grouped_tensor=None,
    ):
        super().__init__(get_rng_state_tracker, rng_tracker_name, init_method)
        refuse(
            "GroupedLinear",
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_ag=ub_overlap_ag,
            delay_wgrad_compute=delay_wgrad_compute,
            save_original_input=save_original_input,
            single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_bias,
        )
        made = self._place(tp_group, tp_size, parallel_mode, params_dtype, device)
        if self.tp_size > 1 and bias:
            raise InvalidArgument("GroupedLinear: several tensor-parallel ranks allow no bias")
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        if parallel_mode == "column":
            self.out_features = part(out_features, self.tp_size, "out_features")
        elif parallel_mode == "row":
            self.in_features = part(in_features, self.tp_size, "in_features")
        for e in range(num_gemms):
            self._parameter(f"weight{e}", (self.out_features, self.in_features), made)
            if bias:
                self._parameter(f"bias{e}", (self.out_features,), made)
            else:
                setattr(self, f"bias{e}", torch.empty(0, **made))
        self.reset_parameters(defer_init=torch.device(made["device"]).type == "meta")

    def set_tensor_parallel_group(self, tp_group):
        """Sets the group, where the layer was made with ``tp_size`` alone."""
        self._set_group("GroupedLinear", tp_group)

    def forward(self, inp, m_splits, is_first_microbatch=None, out=None, dgrad_out=None):
        """The products of all experts.

        Args:
            inp: [rows, in_features].
            m_splits: rows of each expert, [num_gemms]: a list, or an integer tensor; on inp's
                device nothing waits for it.
            is_first_microbatch: as :class:`Linear`.
            out: a tensor of the caller's for the result, [rows, out_features], which must not
                require a gradient; what is returned shares its memory.
            dgrad_out: the same for the gradient of ``inp``, [rows, in_features]; for one call of a
                graph.

        Rows behind the last expert's are zero, in tensors of the caller's, too.

        Returns:
            [rows, out_features], or (that, list of biases) with ``return_bias``.

        Raises:
            InvalidArgument: shapes, dtypes or devices do not fit.
        """
        if not isinstance(m_splits, torch.Tensor):
            m_splits = torch.tensor(m_splits, dtype=torch.int64)
        if tuple(m_splits.shape) != (self.num_gemms,) or inp.dim() != 2:
            raise InvalidArgument(
                f"GroupedLinear: inp {tuple(inp.shape)} must be a matrix, and m_splits"
                f" {tuple(m_splits.shape)} a number for each of {self.num_gemms} experts"
            )
        m_splits = m_splits.to(inp.device, torch.int64)
        weights = [getattr(self, f"weight{e}") for e in range(self.num_gemms)]
        biases = [getattr(self, f"bias{e}") for e in range(self.num_gemms)]
        added = torch.stack(biases) if self.use_bias and not self.return_bias else None
        dtype, products = _autocast_dtype(inp), weights
        if dtype is not None:
            inp, products = inp.to(dtype), [w.to(dtype) for w in weights]
        inp = inp.contiguous()
        _check("out", out, (inp.shape[0], self.out_features), inp)
        _check("dgrad_out", dgrad_out, tuple(inp.shape), inp)
        mains = None
        if self.fuse_wgrad_accumulation:
            mains = [(w, overwrites(w, is_first_microbatch)) for w in weights]
        y = _Grouped.apply(inp, added, m_splits, out, dgrad_out, mains, *products)
        return (y, [b.to(y.dtype) for b in biases]) if self.return_bias else y

    def extra_repr(self):
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features},"
            f" out_features={self.out_features}, bias={self.use_bias}"
        )
