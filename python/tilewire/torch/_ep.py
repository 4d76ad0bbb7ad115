"""Expert parallelism: tokens travel to the ranks of their experts and back."""

import functools

import torch

from .. import _native
from .._errors import InvalidArgument, Stale, Unsupported
from . import _ep_graph
from ._functions import _needs_grad, _once, _ordinary
from ._nodes import Differentiable
from ._quant import QTensor
from ._symm import symm_handle
from ._world import handle_of, world_of

_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_FP8 = {torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2"}


class Pending:
    """Results of a call that runs beside the current stream; :meth:`wait` joins it."""

    def __init__(self, result, event, device=None):
        self._result, self._event, self._device = result, event, device

    def wait(self):
        """The results, for use on the current stream; the host does not wait."""
        if self._event is not None:
            now = torch.cuda.current_stream(self._device)
            now.wait_event(self._event)
            for t in self._result if isinstance(self._result, tuple) else (self._result,):
                for part in (t.data, t.scales) if isinstance(t, QTensor) else (t,):
                    if isinstance(part, torch.Tensor):
                        part.record_stream(now)
            self._event = None
        return self._result


class EpGroup:
    """A layer of experts over the ranks of a world. Collective: all ranks make it alike.

    Args:
        group: a World, a ProcessGroup that has one, or None for the first world.
        num_experts: of all ranks; divided as evenly as possible, in the order of the ranks.
        max_tokens: the most tokens of a rank in one call.
        hidden: elements of a token.
        top_k: choices of a token.
        capacity: the most rows that a rank receives, in the order of the experts. Default: enough
            for any routing.
        align: rows of each expert are padded with zeros to a multiple of this.
        layout: order of the received rows: "expert_major" (a row for each choice, as
            :func:`grouped_gemm` takes them), "rank_major" or "flat" (a row for each token and
            rank).
        overflow: "drop" leaves out what exceeds the capacity; "error" raises when it is looked at.
        dtype: of tokens and results: torch.float32, bfloat16 or float16. With float8_e4m3fn or
            float8_e5m2 tokens are :class:`QTensor` of recipe "block1x128" and have no gradient.
        out_dtype: with FP8 tokens, the type of the experts' results: float32, bfloat16 or float16.
        zero_copy: rows come straight to where they stay, in memory of the buffer's own: the next
            dispatch into the buffer overwrites them (autograd notices). For the layouts
            "expert_major" and "rank_major". Then a buffer is made by all ranks together.
        num_sms: multiprocessors that the kernels may take.

    Raises:
        InvalidArgument: sizes do not fit; Mismatch: another rank asks for something else.
    """

    def __init__(
        self,
        group=None,
        *,
        num_experts,
        max_tokens,
        hidden,
        top_k,
        capacity=None,
        align=1,
        layout="expert_major",
        overflow="drop",
        dtype=torch.bfloat16,
        out_dtype=None,
        zero_copy=False,
        num_sms=None,
    ):
        fp8 = dtype in _FP8
        out_dtype = out_dtype or (torch.bfloat16 if fp8 else dtype)
        tokens, results = fp8 or dtype in _NAMES, fp8 or out_dtype == dtype
        if not tokens or out_dtype not in _NAMES or not results:
            raise InvalidArgument(
                f"ep: tokens of {dtype} and results of {out_dtype}: f32, bf16, f16 for both, or FP8"
                " tokens and results of another type are expected"
            )
        spec = dict(
            num_experts=num_experts,
            max_tokens=max_tokens,
            hidden=hidden,
            top_k=top_k,
            capacity=capacity,
            align=align,
            layout=layout,
            overflow=overflow,
            dtype=(_FP8 if fp8 else _NAMES)[dtype],
            num_scales=-(-hidden // 128) if fp8 else 0,
            out=_NAMES[out_dtype],
            num_sms=num_sms,
        )
        self._native = _native.EpGroup(handle_of(group), spec)
        world = world_of(group)
        self.dtype, self.out_dtype, self.hidden, self.top_k = dtype, out_dtype, hidden, top_k
        self.zero_copy, self.layout, self._num_scales = zero_copy, layout, spec["num_scales"]
        self.device, self.rank = world.device, world.rank
        #: Rows of a received tensor; of one in the order of the experts.
        self.recv_rows, self.capacity = self._native.recv_rows, self._native.capacity
        #: Experts that are here.
        self.num_local_experts = self._native.experts_per_rank[world.rank]
        # Of compiled graphs: this group among all, and their buffer, made by the first.
        self._number, self._graph = _ep_graph.enroll(self), None

    def buffer(self, recv=None):
        """A buffer for one microbatch: its routing, and with ``zero_copy`` the memory of its rows,
        which all ranks make together and the layer keeps. Several may be in flight.

        Args:
            recv: memory for the rows in place of the buffer's own: a contiguous tensor [recv_rows,
                hidden] of the group's dtype from :func:`symm_empty` or :func:`symm_adopt`, the same
                on all ranks, for one buffer at a time. Needs ``zero_copy``.
        """
        return EpBuffer(self, recv)

    def explain(self):
        """What it takes and does, in words."""
        return self._native.explain()


class EpBuffer:
    """The routing of one microbatch, from its dispatch to the end of its backward pass.

    A dispatch gives it a new generation; what belongs to an older one raises :class:`Stale`.
    """

    def __init__(self, group, recv=None):
        self.group = group
        self._made = None
        self._generation = 0
        self._reuse = False
        self._tokens = None
        # The routing, where a compiled graph has made it, its tokens and multiprocessors.
        self._routed = None
        self._side = None
        self._recv = self._grad = None
        # Whether the memory for the gradient of a combine is in use.
        self._given = False
        if recv is not None and not group.zero_copy:
            raise InvalidArgument("EpGroup.buffer: memory for the rows needs zero_copy=True")
        if group.zero_copy:
            shape = (group.recv_rows, group.hidden)
            self._recv = self._memory(False, shape, group.dtype) if recv is None else self._in(recv)
            if group.layout == "expert_major":
                self._grad = self._memory(True, (group.capacity, group.hidden), group.out_dtype)

    @property
    def _native(self):
        """Made by the first call that is not of a compiled graph, which may make buffers itself."""
        if self._made is None:
            self._made = self.group._native.buffer()
        return self._made

    def _in(self, recv):
        """The caller's symmetric memory for the rows."""
        g, handle = self.group, symm_handle(recv)
        if tuple(recv.shape) != (g.recv_rows, g.hidden) or recv.dtype != g.dtype:
            raise InvalidArgument(
                f"EpGroup.buffer: recv must be [{g.recv_rows}, {g.hidden}] {g.dtype}, not"
                f" {tuple(recv.shape)} {recv.dtype}"
            )
        if recv.requires_grad:
            raise InvalidArgument("EpGroup.buffer: memory for the rows cannot require a gradient")
        g._native.receive_in(handle._native, handle._at)
        return recv

    def _memory(self, grad, shape, dtype):
        """Memory that peers write to."""
        flat = torch.utils.dlpack.from_dlpack(self.group._native.zero_copy(grad))
        t = flat.view(-1)[: shape[0] * shape[1] * dtype.itemsize].view(dtype).view(shape)
        return t.zero_()

    def __reduce__(self):
        raise TypeError("an EpBuffer belongs to its process and cannot be pickled")

    def totals(self):
        """True numbers of the last routing: counts of the local experts, rows, dropped by rank.

        Waits for the device. With ``overflow="error"`` raises :class:`Exhausted` if copies were
        dropped anywhere.
        """
        return self._native.totals()

    def reuse(self):
        """The next dispatch takes the last routing again: its ``topk_idx`` is not looked at."""
        if self._generation == 0 and self._routed is None:
            raise Stale("the buffer has no routing yet")
        self._reuse = True
        return self

    def row_index(self):
        """The received row that feeds each expert-major row, [capacity] int32, -1 in padding: for
        the layouts "rank_major" and "flat"."""
        out = torch.empty(self.group.capacity, dtype=torch.int32, device=self.group.device)
        self._native.row_index(out)
        return out

    def _mark(self):
        """The generation as autograd saves it: a checkpoint that runs the forward pass again puts
        the new one in its place."""
        return torch.tensor(self._generation, device="cpu")

    def _check(self, mark):
        generation = int(mark)
        if generation != self._generation:
            raise Stale(
                f"the buffer was dispatched into again: generation {self._generation}, and this"
                f" belongs to {generation}; take a buffer for each microbatch in flight"
            )


def _zeros(*shape, dtype, like):
    # Rows that no expert has are not written: whoever multiplies all rows must not meet NaN there.
    return torch.zeros(*shape, dtype=dtype, device=like.device)


def _overwritten(t):
    """The buffer's own memory as the output of a call that writes it: what autograd saved of it for
    an earlier one is stale."""
    torch.autograd.graph.increment_version(t)
    return t.view_as(t)


def _dispatch(buf, x, scales, weights, idx):
    """A dispatch into tensors of its own, or into the buffer's memory."""
    g = buf.group
    if buf._recv is None:
        recv = _zeros(g.recv_rows, g.hidden, dtype=x.dtype, like=x)
    else:
        recv = _overwritten(buf._recv)
    recv_w = recv_scales = None
    if weights is not None:
        recv_w = _zeros(g.capacity, dtype=torch.float32, like=x)
    if scales is not None:
        recv_scales = _zeros(g.recv_rows, g._num_scales, dtype=torch.float32, like=x)
    splits = torch.empty(g.num_local_experts, dtype=torch.int64, device=x.device)
    if idx is not None or buf._routed is not None:
        # Before the call: one that fails may have routed already.
        buf._generation += 1
        buf._given = False
        if idx is None:
            _load(buf)
        buf._routed = None
    buf._native.dispatch(idx, x, weights, scales, recv, recv_w, recv_scales, splits)
    buf._tokens = x.shape[0]
    if scales is not None:
        recv = QTensor(recv, recv_scales, "block1x128")
    return recv, recv_w, splits


def _load(buf):
    """Takes the routing that a graph has made."""
    state, tokens, _ = buf._routed
    if buf._side is not None:
        # A call beside another stream may still read the routing before.
        torch.cuda.current_stream(buf.group.device).wait_stream(buf._side)
    buf._native.load(state, tokens)
    buf._tokens = tokens


class _Dispatch(Differentiable):
    @staticmethod
    def forward(ctx, x, weights, idx, buf):
        ctx.set_materialize_grads(False)
        recv, recv_w, splits = _dispatch(buf, x, None, weights, idx)
        ctx.save_for_backward(buf._mark())
        ctx.buf, ctx.tokens = buf, x.shape[0]
        ctx.weights = None if weights is None else weights.dtype
        ctx.mark_non_differentiable(splits)
        return recv, recv_w, splits

    @staticmethod
    def backward(ctx, d_recv, d_weights, _):
        _once()
        buf = ctx.buf
        buf._check(*ctx.saved_tensors)
        g = buf.group
        if d_recv is None:
            d_recv = torch.zeros(g.recv_rows, g.hidden, dtype=g.out_dtype, device=g.device)
        dx = torch.empty(ctx.tokens, g.hidden, dtype=g.out_dtype, device=g.device)
        dw = None
        if d_weights is not None:
            dw = torch.empty(ctx.tokens, g.top_k, dtype=torch.float32, device=g.device)
            d_weights = d_weights.contiguous()
        buf._native.dispatch_bwd(d_recv.contiguous(), d_weights, dx, dw)
        return dx, dw, None, None


class _Combine(Differentiable):
    @staticmethod
    def forward(ctx, y, weights, buf):
        g = buf.group
        out = torch.empty(buf._tokens, g.hidden, dtype=y.dtype, device=y.device)
        buf._native.combine(y, weights, out)
        ctx.save_for_backward(y if weights is not None else None, weights, buf._mark())
        ctx.buf = buf
        return out

    @staticmethod
    def backward(ctx, d_out):
        _once()
        y, weights, mark = ctx.saved_tensors
        buf = ctx.buf
        buf._check(mark)
        g = buf.group
        weighted = dw = None
        dy = None
        if weights is None and not buf._given:
            # The memory itself, not a view: autograd must not take it for its own. Once for each
            # dispatch: the gradient of another combine may be waiting there to be added.
            dy, buf._given = buf._grad, True
        if dy is None:
            dy = torch.zeros(g.capacity, g.hidden, dtype=g.out_dtype, device=g.device)
        if weights is not None:
            dw = torch.zeros(g.capacity, dtype=torch.float32, device=g.device)
            weighted = (weights, y, dw)
        buf._native.combine_bwd(d_out.contiguous(), weighted, dy)
        return dy, dw, None


def _beside(buf, async_op, call, *inputs):
    """Runs a call, on a stream of the buffer's own if it is to run beside the current one."""
    if not async_op:
        return call()
    if buf.group.device.type != "cuda":
        return Pending(call(), None)
    if buf._side is None:
        buf._side = torch.cuda.Stream(buf.group.device)
    buf._side.wait_stream(torch.cuda.current_stream(buf.group.device))
    for t in inputs:
        if t is not None:
            # The caller may let go of it at once; the allocator must not reuse it before the call
            # ran.
            t.record_stream(buf._side)
    with torch.cuda.stream(buf._side):
        result = call()
        event = torch.cuda.Event()
        event.record()
    return Pending(result, event, buf.group.device)


def _again(buf, x):
    """The last routing of a buffer where a graph has made it, for one that takes it again."""
    state, last = (None, buf._tokens) if buf._routed is None else buf._routed[:2]
    if x.shape[0] != last:
        raise InvalidArgument(
            f"ep_dispatch: the last routing was of {last} tokens, x has {x.shape[0]}"
        )
    return state


def ep_dispatch(buf, x, topk_idx, topk_weights=None, *, num_sms=None, async_op=False):
    """Sends each token to the ranks of its experts.

    Args:
        buf: a buffer of :meth:`EpGroup.buffer`; its next generation begins.
        x: [tokens, hidden] of the group's dtype; at most max_tokens. With FP8 a :class:`QTensor` of
            recipe "block1x128"; then neither it nor the weights have a gradient.
        topk_idx: [tokens, top_k] int32 or int64, experts of all ranks; -1 leaves a choice out.
        topk_weights: [tokens, top_k] f32; they travel along and have a gradient.
        num_sms: multiprocessors that this and the later calls of this microbatch may take. Default:
            the group's number.
        async_op: run beside the current stream; returns a :class:`Pending`.

    Returns:
        (rows received [recv_rows, hidden], their weights [capacity] or None, m_splits [local
        experts] int64): the splits lie on the device and nothing waits for them. With FP8 the rows
        are a QTensor, as :func:`grouped_gemm` takes it.

    Raises:
        InvalidArgument: shapes, dtypes or devices do not fit. An expert that does not exist ends
            the team: the next call raises it.
    """
    # Asked for once, also where this call is refused.
    reuse, buf._reuse = buf._reuse, False
    _ordinary("ep_dispatch", x, topk_weights)
    g = buf.group
    fp8 = g._num_scales > 0
    if isinstance(x, QTensor) != fp8 or (fp8 and x.recipe != "block1x128"):
        what = 'a QTensor of recipe "block1x128"' if fp8 else "a tensor"
        raise InvalidArgument(f"ep_dispatch: x must be {what} [tokens, {g.hidden}] {g.dtype}")
    if len(x.shape) != 2 or x.shape[1] != g.hidden or x.dtype != g.dtype:
        raise InvalidArgument(
            f"ep_dispatch: x must be [tokens, {g.hidden}] {g.dtype}, not {tuple(x.shape)} {x.dtype}"
        )
    choices = (x.shape[0], g.top_k)
    # Looked at here alone: a compiler would guard what it has read.
    state = _again(buf, x) if reuse else None
    if not reuse and tuple(topk_idx.shape) != choices:
        raise InvalidArgument(
            f"ep_dispatch: topk_idx must be {list(choices)}, not {tuple(topk_idx.shape)}"
        )
    w = topk_weights
    if w is not None and (tuple(w.shape) != choices or w.dtype != torch.float32):
        raise InvalidArgument(
            f"ep_dispatch: topk_weights must be {list(choices)} f32, not {tuple(w.shape)} {w.dtype}"
        )
    if num_sms is not None and num_sms < 1:
        raise InvalidArgument(f"ep_dispatch: num_sms is {num_sms}, but must be at least 1")
    idx = None if reuse else topk_idx.contiguous()
    w = None if w is None else w.contiguous()
    if torch.compiler.is_compiling():
        refused = {"async_op": async_op, "zero_copy": g.zero_copy}
        return _in_graph(buf, x, w, idx, num_sms, refused)
    buf._native.set_num_sms(num_sms)
    if fp8:
        data, scales = x.data.contiguous(), x.scales.contiguous()
        call = functools.partial(_dispatch, buf, data, scales, w, idx)
        return _beside(buf, async_op, call, data, scales, idx, w, state)
    x = x.contiguous()

    def call():
        if _needs_grad(x, w):
            return _Dispatch.run(x, w, idx, buf)
        return _dispatch(buf, x, None, w, idx)

    return _beside(buf, async_op, call, x, idx, w, state)


def _in_graph(buf, x, w, idx, num_sms, refused):
    data, scales = x, None
    if buf.group._num_scales:
        data, scales = x.data, x.scales.contiguous()
    args = (buf, data.contiguous(), scales, w, idx, num_sms, refused)
    recv, recv_scales, recv_w, splits = _ep_graph.dispatch(*args)
    if scales is not None:
        recv = QTensor(recv, recv_scales, "block1x128")
    return recv, recv_w, splits


def ep_combine(buf, y, weights=None, *, async_op=False):
    """The results of the experts, back at their tokens: the sum of a token's choices.

    Args:
        buf: the buffer of the dispatch.
        y: [capacity, hidden], in the order of the experts.
        weights: [capacity] f32, as the dispatch gave them; without them rows are added as they are.
        async_op: as :func:`ep_dispatch`.

    Returns:
        [tokens, hidden], or a :class:`Pending` of it. Added in f32 in the order of the choices.

    Raises:
        Stale: the buffer has no routing; otherwise as :func:`ep_dispatch`.
    """
    _ordinary("ep_combine", y, weights)
    y = y.contiguous()
    w = None if weights is None else weights.contiguous()
    if buf._routed is not None:
        if async_op:
            raise Unsupported("ep_combine: async_op behind a dispatch of a compiled graph")
        return _ep_graph.combine(buf, y, w)
    if torch.compiler.is_compiling():
        raise Unsupported("ep_combine: a compiled graph combines what a graph has dispatched")
    if buf._generation == 0:
        raise Stale("ep_combine: the buffer has no routing: dispatch into it first")
    return _beside(buf, async_op, lambda: _Combine.run(y, w, buf), y, w)
