"""``transformer_engine.pytorch.ep`` of TransformerEngine 2.20: the same names, arguments and
results.

What differs:

- The process group may be of any backend and of any size, 1 included: only its store is used.
- All ranks of the group make the first :class:`EpBuffer` of each form (top_k, alignment, capacity,
  sizes, dtype) together. Forms may differ within a process.
- Tokens are of f32, bf16 or f16. Quantised tokens (``dispatch_fwd_quant_recipe``,
  ``combine_bwd_quant_recipe``) raise :class:`tilewire.Unsupported`.
- Overflow without ``drop_on_overflow`` raises :class:`tilewire.Exhausted` in place of a trap: at
  once on the CPU, by ``EpBuffer.check`` on a GPU.
- A buffer that is prepared again before the backward pass of its last use raises
  :class:`tilewire.Stale` there. ``EpBuffer.handle_mem`` does not exist.
- Every tensor may be sent or received into: memory of :func:`symm_mem_alloc` gains nothing. With
  ``zero_copy`` a buffer has memory of its own, where rows of peers come to without a copy, unless
  the caller gives ``recv_tokens`` or ``grad_out``; all ranks make each buffer together then.
- Received rows without a token are zero; with ``zero_copy`` those behind the last expert's may be
  what was there before.
"""

import torch

from ... import _native
from ..._errors import InvalidArgument, Stale, Unsupported
from .. import _ep
from .._functions import _once, _ordinary
from .._symm import symm_empty
from .._world import World, init, world_of
from ._ub import world_for

__all__ = [
    "EpBuffer",
    "ep_bootstrap",
    "is_ep_bootstrapped",
    "ep_finalize",
    "ep_dispatch",
    "ep_combine",
    "symm_mem_alloc",
    "release_symm_mem_pool",
    "is_symm_backed",
]

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Bootstrap:
    """What :func:`ep_bootstrap` was given, and the forms of layers that buffers have made since."""

    def __init__(self, world, owned, limits, layer, eager):
        self.world, self.owned = world, owned
        self.limits, self.layer, self.eager = limits, layer, eager
        self.groups = {}
        #: Where the memory of buffers with ``zero_copy`` begins.
        self.memory = set()

    def group(self, top_k, max_tokens, hidden, capacity, alignment, dtype):
        """The layer of experts of a form. The first call for a form is collective."""
        form = (top_k, max_tokens, hidden, capacity, alignment, dtype)
        if form not in self.groups:
            self.groups[form] = _ep.EpGroup(
                self.world,
                max_tokens=max_tokens,
                hidden=hidden,
                top_k=top_k,
                capacity=capacity,
                align=max(alignment, 1),
                dtype=dtype,
                **self.layer,
            )
        return self.groups[form]


_bootstrapped = None


def ep_bootstrap(
    ep_group,
    num_experts,
    max_tokens_per_rank,
    hidden_dim,
    num_topk,
    recv_capacity_per_rank=None,
    max_num_sms=0,
    zero_copy=False,
    drop_on_overflow=False,
    max_token_dtype=torch.bfloat16,
):
    """Collective: begins expert parallelism over the ranks of ``ep_group``. Once per process, until
    :func:`ep_finalize`.

    Args:
        ep_group: a ProcessGroup of any backend, or a World. A group without a World gets one, which
            :func:`ep_finalize` ends.
        num_experts: of all ranks.
        max_tokens_per_rank, hidden_dim, num_topk: the most that a buffer may ask for.
        recv_capacity_per_rank: the most rows that a rank receives in a step. ``None`` is eager
            mode: received tensors have as many rows as come, the host waits for that number in each
            step, and nothing can be captured.
        max_num_sms: multiprocessors that the kernels may take; 0 is tilewire's choice.
        zero_copy: rows of peers come straight to memory of the buffer's own; needs a capacity.
        drop_on_overflow: drop rows beyond the capacity in place of an error.
        max_token_dtype: the widest dtype of tokens.

    Raises:
        RuntimeError: expert parallelism has begun already.
        InvalidArgument: sizes do not fit each other; ``drop_on_overflow`` or ``zero_copy`` without
        a
            capacity.
        Unsupported: tokens of another dtype than f32, bf16 and f16.
    """
    global _bootstrapped
    if _bootstrapped is not None:
        raise RuntimeError("ep_bootstrap was already called in this process")
    if num_topk < 1:
        raise InvalidArgument(f"ep_bootstrap: num_topk must be at least 1, not {num_topk}")
    eager = recv_capacity_per_rank is None
    if eager and (zero_copy or drop_on_overflow):
        name = "zero_copy" if zero_copy else "drop_on_overflow"
        raise InvalidArgument(f"ep_bootstrap: {name} requires recv_capacity_per_rank")
    if max_token_dtype not in _TYPES:
        raise Unsupported(f"ep_bootstrap: max_token_dtype={max_token_dtype} is not f32/bf16/f16")
    world, owned = _world_for(ep_group)
    limits = {
        "top_k": int(num_topk),
        "max_tokens_per_rank": int(max_tokens_per_rank),
        "hidden_dim": int(hidden_dim),
        "recv_capacity_per_rank": None if eager else int(recv_capacity_per_rank),
        "payload_dtype": max_token_dtype,
    }
    layer = {
        "num_experts": int(num_experts),
        "overflow": "drop" if drop_on_overflow else "error",
        "num_sms": int(max_num_sms) or None,
        "zero_copy": bool(zero_copy),
    }
    _bootstrapped = _Bootstrap(world, owned, limits, layer, eager)


def _world_for(group):
    """The World of a process group, and whether it was made here."""
    if isinstance(group, World):
        return group, False
    try:
        return world_of(group), False
    except Stale:
        return init(group), True


def is_ep_bootstrapped():
    """Whether expert parallelism has begun in this process."""
    return _bootstrapped is not None


def ep_finalize():
    """Ends expert parallelism on this rank; its buffers raise :class:`tilewire.Stale` from now on.

    May be called twice, and in any order with ``torch.distributed.destroy_process_group``. A World
    that :func:`ep_bootstrap` did not make goes on.
    """
    global _bootstrapped
    ended, _bootstrapped = _bootstrapped, None
    if ended is not None and ended.owned:
        ended.world.finalize()


class EpBuffer:
    """State of one microbatch, from its dispatch to the end of its backward pass.

    Take a buffer for each microbatch in flight. All ranks make the first buffer of each form
    together.

    Args:
        top_k: choices of a token.
        max_tokens_per_rank: the most tokens of a rank.
        hidden_dim: elements of a token.
        num_local_experts: experts of this rank.
        recv_capacity_per_rank: rows of the received tensors; required unless in eager mode.
        alignment: rows of each expert are padded to a multiple: 0, 1 or a power of two.
        payload_dtype: of tokens and results: f32, bf16 or f16.
        device: must be the World's; default.
        dispatch_fwd_quant_recipe, combine_bwd_quant_recipe: unsupported.

    Attributes: the arguments, and
        tokens_per_expert: rows of each local expert, padding included, [num_local_experts] int64.
        total_recv_tokens: rows that this rank needs, padding and dropped ones included, [1] int64;
            on the host in eager mode.
        eager, zero_copy: the modes of :func:`ep_bootstrap`.

    Raises:
        RuntimeError: before :func:`ep_bootstrap`.
        InvalidArgument: sizes do not fit, or exceed those of :func:`ep_bootstrap`.
        Unsupported: quantisation.
    """

    def __init__(
        self,
        top_k,
        max_tokens_per_rank,
        hidden_dim,
        num_local_experts,
        recv_capacity_per_rank=None,
        alignment=0,
        payload_dtype=torch.bfloat16,
        device=None,
        dispatch_fwd_quant_recipe=None,
        combine_bwd_quant_recipe=None,
    ):
        began = _bootstrapped
        if began is None:
            raise RuntimeError("EpBuffer requires ep_bootstrap() to be called first")
        for name, recipe in (
            ("dispatch_fwd_quant_recipe", dispatch_fwd_quant_recipe),
            ("combine_bwd_quant_recipe", combine_bwd_quant_recipe),
        ):
            if recipe is not None:
                raise Unsupported(f"EpBuffer: {name}: tokens are sent in {payload_dtype} only")
        alignment = int(alignment)
        if alignment < 0 or alignment & (alignment - 1):
            raise InvalidArgument(f"EpBuffer: alignment={alignment} is not 0, 1 or a power of two")
        if not began.eager and recv_capacity_per_rank is None:
            raise InvalidArgument("EpBuffer: eager mode alone works without recv_capacity_per_rank")
        world_device = began.world.device
        named = (None, world_device, torch.device(world_device.type))
        if (None if device is None else torch.device(device)) not in named:
            raise InvalidArgument(f"EpBuffer: device={device}, but the ranks use {world_device}")
        self.top_k, self.alignment = int(top_k), alignment
        self.max_tokens_per_rank, self.hidden_dim = int(max_tokens_per_rank), int(hidden_dim)
        self.num_local_experts = int(num_local_experts)
        self.recv_capacity_per_rank = None if began.eager else int(recv_capacity_per_rank)
        self.payload_dtype, self.device = payload_dtype, world_device
        self.eager, self.zero_copy = began.eager, began.layer["zero_copy"]
        self.dispatch_fwd_quant_recipe = self.combine_bwd_quant_recipe = None
        self._check_limits(began.limits)
        self._group = began.group(
            self.top_k,
            self.max_tokens_per_rank,
            self.hidden_dim,
            self.recv_capacity_per_rank,
            alignment,
            payload_dtype,
        )
        if self._group.num_local_experts != self.num_local_experts:
            raise InvalidArgument(
                f"EpBuffer: num_local_experts={num_local_experts}, but this rank has"
                f" {self._group.num_local_experts}"
            )
        own = self._group.buffer()
        self._native, self._recv, self._grad = own._native, own._recv, own._grad
        began.memory.update(t.data_ptr() for t in (own._recv, own._grad) if t is not None)
        self._began = began
        self._generation, self._tokens, self._rows, self._given = 0, None, None, set()
        made = dict(dtype=torch.int64, device=world_device)
        self.tokens_per_expert = torch.zeros(self.num_local_experts, **made)
        self._total = torch.zeros(1, **made)
        self.total_recv_tokens = self._total
        if self.eager:
            self.total_recv_tokens = torch.zeros(1, dtype=torch.int64, device="cpu")

    def _check_limits(self, limits):
        if self.payload_dtype not in _TYPES:
            raise Unsupported(f"EpBuffer: payload_dtype={self.payload_dtype} is not f32/bf16/f16")
        for name, most in limits.items():
            asked = getattr(self, name)
            if name == "payload_dtype":
                asked, most = asked.itemsize, most.itemsize
            if most is not None and asked > most:
                raise InvalidArgument(f"EpBuffer: {name} exceeds that of ep_bootstrap: {most}")

    def __reduce__(self):
        raise TypeError("an EpBuffer belongs to its process and cannot be pickled")

    def check(self):
        """Raises :class:`tilewire.Exhausted` if rows were dropped anywhere that must not be. Waits
        for the device."""
        self._native.totals()

    def _usable(self, op):
        if self._began is not _bootstrapped:
            raise Stale(f"{op}: ep_finalize() was called since this buffer was made")

    def _mark(self):
        """The generation as autograd saves it: a checkpoint that runs the forward pass again puts
        the new one in its place."""
        return torch.tensor(self._generation, device="cpu")

    def _once_a_generation(self, t):
        """Memory for a gradient, unless one is there already: the gradient of another combine may
        be waiting there to be added."""
        if t is None or t.data_ptr() in self._given:
            return None
        self._given.add(t.data_ptr())
        return t

    def _same(self, mark):
        generation = int(mark)
        if generation != self._generation:
            raise Stale(
                f"the buffer was prepared again: generation {self._generation}, and this belongs to"
                f" {generation}; take a buffer for each microbatch in flight"
            )


def ep_prepare(buffer, topk_idx):
    """Routes: who receives which rows. :func:`ep_dispatch` does this itself.

    Args:
        buffer: its next generation begins.
        topk_idx: [tokens, top_k] int32 or int64, experts of all ranks; -1 leaves a choice out.

    Returns:
        ``buffer.tokens_per_expert``; ``buffer.total_recv_tokens`` is filled, too.

    Raises:
        InvalidArgument: ``topk_idx`` does not fit. Unsupported: eager mode in a capture. Exhausted:
        on the CPU, more rows than the capacity without ``drop_on_overflow``.
    """
    buffer._usable("ep_prepare")
    if buffer.eager and buffer.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise Unsupported(
            "ep_prepare: eager mode reads the number of rows on the host and cannot be captured:"
            " pass recv_capacity_per_rank to ep_bootstrap and EpBuffer"
        )
    topk_idx = topk_idx.contiguous()
    # Before the call: one that fails may have routed already.
    buffer._generation += 1
    buffer._given.clear()
    buffer._native.route(topk_idx, buffer.tokens_per_expert, buffer._total)
    # Written behind autograd's back: whoever saved the last splits must not use these for them.
    torch.autograd.graph.increment_version((buffer.tokens_per_expert, buffer._total))
    buffer._tokens = topk_idx.shape[0]
    if buffer.eager:
        buffer.total_recv_tokens.copy_(buffer._total)
        buffer._rows = int(buffer.total_recv_tokens)
    else:
        buffer._rows = buffer.recv_capacity_per_rank
    return buffer.tokens_per_expert


def _whole(buffer, t):
    """``t`` with as many rows as the kernels take: eager tensors have only those that came."""
    rows = buffer._group.capacity
    if t.shape[0] == rows:
        return t.contiguous()
    whole = t.new_zeros(rows, *t.shape[1:])
    whole[: t.shape[0]] = t
    return whole


def _cut(buffer, t):
    """The rows of ``t`` that came, without holding on to the rest."""
    return t if t.shape[0] == buffer._rows else t[: buffer._rows].clone()


def _target(given, own, shape, dtype, device):
    """Where rows come: the caller's tensor, the buffer's memory, or a new tensor. Zero, because
    rows without a token are not written."""
    if given is not None:
        return given.zero_()
    if own is None:
        return torch.zeros(*shape, dtype=dtype, device=device)
    # Written behind autograd's back: what it saved of an earlier use is stale.
    torch.autograd.graph.increment_version(own)
    return own


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, topk_weights, buffer, recv, recv_weights):
        ctx.set_materialize_grads(False)
        rows, device = buffer._group.capacity, tokens.device
        recv = _target(recv, buffer._recv, (rows, buffer.hidden_dim), tokens.dtype, device)
        recv_weights = _target(recv_weights, None, (rows,), torch.float32, device)
        _dispatch_into(buffer, tokens, topk_weights, recv, recv_weights)
        ctx.save_for_backward(buffer._mark())
        ctx.buffer = buffer
        ctx.top_k = topk_weights.shape[1]
        # Not tensors that outlive the call themselves: those must not become part of the graph.
        return _cut(buffer, recv).detach(), _cut(buffer, recv_weights).detach()

    @staticmethod
    def backward(ctx, d_recv, d_weights):
        _once()
        buffer = ctx.buffer
        buffer._same(*ctx.saved_tensors)
        rows, made = buffer._group.capacity, dict(device=buffer.device)
        dtype, hidden = buffer.payload_dtype, buffer.hidden_dim
        if d_recv is None:
            d_recv = torch.zeros(rows, hidden, dtype=dtype, **made)
        dx = torch.empty(buffer._tokens, hidden, dtype=dtype, **made)
        dw = None
        if d_weights is not None:
            d_weights = _whole(buffer, d_weights)
            dw = torch.empty(buffer._tokens, ctx.top_k, dtype=torch.float32, **made)
        buffer._native.dispatch_bwd(_whole(buffer, d_recv), d_weights, dx, dw)
        return dx, dw, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, expert_out, buffer, num_tokens, grad_out):
        out = expert_out.new_zeros(num_tokens, buffer.hidden_dim)
        buffer._native.combine(_whole(buffer, expert_out), None, out[: buffer._tokens])
        ctx.save_for_backward(buffer._mark())
        ctx.buffer = buffer
        # Written by the backward pass, and read by nobody: no tensor that autograd should watch.
        ctx.grad_out = grad_out
        return out

    @staticmethod
    def backward(ctx, d_out):
        _once()
        buffer = ctx.buffer
        buffer._same(*ctx.saved_tensors)
        shape = (buffer._group.capacity, buffer.hidden_dim)
        given = buffer._once_a_generation(ctx.grad_out)
        own = buffer._once_a_generation(buffer._grad) if given is None else None
        dy = _target(given, own, shape, buffer.payload_dtype, buffer.device)
        buffer._native.combine_bwd(d_out[: buffer._tokens].contiguous(), None, dy)
        return _cut(buffer, dy), None, None, None


def _dispatch_into(buffer, tokens, topk_weights, recv, recv_weights):
    unused = torch.empty_like(buffer.tokens_per_expert)
    # Without scales, which FP8 tokens have.
    buffer._native.dispatch(None, tokens, topk_weights, None, recv, recv_weights, None, unused)


def _check_buffer(op, name, given, shape, dtype, device):
    """A tensor of the caller's that a call writes to."""
    if given is None:
        return
    if given.requires_grad:
        raise InvalidArgument(
            f"{op}: `{name}` is written by the call and must not require a gradient: pass"
            f" `{name}.detach()`"
        )
    fits = tuple(given.shape) == shape and given.dtype == dtype and given.device == device
    if not fits or not given.is_contiguous():
        raise InvalidArgument(
            f"{op}: `{name}` must be contiguous, {dtype} {shape} on {device}, not {given.dtype}"
            f" {tuple(given.shape)} on {given.device}"
        )


def _payload(op, name, t, buffer):
    if t.dtype is not buffer.payload_dtype:
        raise Unsupported(f"{op}: `{name}` is {t.dtype}, not the buffer's {buffer.payload_dtype}")
    if t.dim() != 2 or t.shape[1] != buffer.hidden_dim:
        raise InvalidArgument(
            f"{op}: `{name}` must be [rows, {buffer.hidden_dim}], not {tuple(t.shape)}"
        )


def ep_dispatch(
    buffer,
    tokens,
    topk_idx,
    topk_weights,
    *,
    recv_tokens=None,
    recv_topk_weights=None,
):
    """Routes, and sends each token to the ranks of its experts; with gradients.

    Args:
        buffer: an :class:`EpBuffer`; its next generation begins.
        tokens: [tokens, hidden_dim] of the buffer's payload_dtype.
        topk_idx: [tokens, top_k] int32 or int64, experts of all ranks; -1 leaves a choice out.
        topk_weights: [tokens, top_k] float32.
        recv_tokens, recv_topk_weights: tensors of the caller's to receive into,
            [recv_capacity_per_rank, hidden_dim] and [recv_capacity_per_rank]; not in eager mode.
            They are overwritten and must not require gradients; what is returned shares their
            memory.

    Returns:
        (rows received, in the order of the local experts; their weights; tokens_per_expert). In
        eager mode as many rows as came, else recv_capacity_per_rank.

    Raises:
        TypeError: ``topk_weights`` is not float32. Unsupported: tokens of another dtype.
        InvalidArgument: tensors do not fit; buffers of the caller's in eager mode.
    """
    _ordinary("ep_dispatch", tokens, topk_weights)
    buffer._usable("ep_dispatch")
    if topk_weights.dtype is not torch.float32:
        raise TypeError(f"ep_dispatch: topk_weights must be float32, not {topk_weights.dtype}")
    _payload("ep_dispatch", "tokens", tokens, buffer)
    given = (recv_tokens, recv_topk_weights)
    if buffer.eager and given != (None, None):
        raise InvalidArgument(
            "ep_dispatch: eager mode sizes what it receives, and cannot take recv_tokens or"
            " recv_topk_weights"
        )
    rows, device = buffer._group.capacity, buffer.device
    shape = (rows, buffer.hidden_dim)
    _check_buffer("ep_dispatch", "recv_tokens", recv_tokens, shape, buffer.payload_dtype, device)
    f32 = torch.float32
    _check_buffer("ep_dispatch", "recv_topk_weights", recv_topk_weights, (rows,), f32, device)
    pairs = (tokens.shape[0], buffer.top_k)
    if tuple(topk_idx.shape) != pairs or tuple(topk_weights.shape) != pairs:
        raise InvalidArgument(
            f"ep_dispatch: topk_idx and topk_weights must be {list(pairs)}, not"
            f" {list(topk_idx.shape)} and {list(topk_weights.shape)}"
        )
    splits = ep_prepare(buffer, topk_idx)
    received = _Dispatch.apply(tokens.contiguous(), topk_weights.contiguous(), buffer, *given)
    return *received, splits


def ep_combine(buffer, expert_out, *, num_local_tokens=None, grad_out=None):
    """The sum of the experts' rows of each token, back at the token's rank; with gradients.

    Rows are added as they are, in f32, in the order of the choices: multiply them with their
    weights first.

    Args:
        buffer: the buffer of the dispatch.
        expert_out: as many rows as the dispatch gave, [rows, hidden_dim], of the payload_dtype.
        num_local_tokens: rows of the result. Default: max_tokens_per_rank; rows behind the tokens
            that were dispatched are zero.
        grad_out: a tensor of the caller's, like ``expert_out``, where the backward pass writes the
            gradient of ``expert_out``; not in eager mode.

    Returns:
        [num_local_tokens, hidden_dim].

    Raises:
        Stale: nothing was dispatched. Unsupported: rows of another dtype.
        InvalidArgument: tensors do not fit, or fewer rows than tokens are asked for.
    """
    _ordinary("ep_combine", expert_out)
    buffer._usable("ep_combine")
    if buffer._generation == 0:
        raise Stale("ep_combine: the buffer has no routing: dispatch into it first")
    _payload("ep_combine", "expert_out", expert_out, buffer)
    if expert_out.shape[0] != buffer._rows:
        raise InvalidArgument(
            f"ep_combine: expert_out has {expert_out.shape[0]} rows, not the {buffer._rows} of the"
            " dispatch"
        )
    if buffer.eager and grad_out is not None:
        raise InvalidArgument("ep_combine: eager mode sizes the gradient, and cannot take grad_out")
    num = buffer.max_tokens_per_rank if num_local_tokens is None else int(num_local_tokens)
    if num < buffer._tokens:
        raise InvalidArgument(
            f"ep_combine: num_local_tokens={num}, but {buffer._tokens} tokens were dispatched"
        )
    shape = tuple(expert_out.shape)
    _check_buffer("ep_combine", "grad_out", grad_out, shape, buffer.payload_dtype, buffer.device)
    return _Combine.apply(expert_out.contiguous(), buffer, num, grad_out)


def _ep_dispatch_raw(buffer, topk_idx, tokens, topk_weights, recv_tokens, recv_topk_weights):
    """Dispatches by the routing of :func:`ep_prepare` into tensors of the caller's, without
    gradients; ``topk_idx`` is not looked at."""
    buffer._usable("ep_dispatch")
    recv_tokens.zero_(), recv_topk_weights.zero_()
    _dispatch_into(buffer, tokens, topk_weights, recv_tokens, recv_topk_weights)


def _ep_combine_raw(buffer, expert_out, result):
    """Combines into a tensor of the caller's, [tokens, hidden_dim], without gradients."""
    buffer._usable("ep_combine")
    buffer._native.combine(_whole(buffer, expert_out), None, result)


def symm_mem_alloc(shape, dtype, ep_group, device=None, use_pool=False, backend="NCCL"):
    """Collective: a tensor in memory that all ranks of ``ep_group`` have at the same place, as
    :func:`tilewire.torch.symm_empty` makes it. Dispatch and combine take any tensor as well.

    Args:
        shape, dtype: of the tensor, the same on all ranks.
        ep_group: a ProcessGroup, or a World. A group without a World gets one.
        device: must be the World's; default.
        use_pool, backend: accepted without effect.

    Raises:
        InvalidArgument: another device. Exhausted: the memory of the World does not hold it.
    """
    world = world_for(ep_group, device)
    if device is not None and torch.device(device).type != world.device.type:
        raise InvalidArgument(f"symm_mem_alloc: device={device}, but the ranks use {world.device}")
    return symm_empty(*shape, dtype=dtype, group=world)


def release_symm_mem_pool():
    """Does nothing: there is no pool. Memory returns with the last tensor over it."""


def is_symm_backed(t):
    """Whether peers reach the memory of ``t``: it is of :func:`symm_mem_alloc` or
    :func:`tilewire.torch.symm_empty`, or of a buffer with ``zero_copy``."""
    start = t.untyped_storage().data_ptr()
    if start == 0:
        return False
    zero_copy = _bootstrapped is not None and start in _bootstrapped.memory
    return zero_copy or _native.SymmBuffer.at(start) is not None
