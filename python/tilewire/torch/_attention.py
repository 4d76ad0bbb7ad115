"""Attention: of tensors that are here, and of rows that are divided among ranks."""

import torch

from .. import _native
from .._errors import InvalidArgument
from . import _ops
from ._functions import _autocast_dtype, _needs_grad, _once
from ._nodes import Differentiable
from ._quant import QTensor
from ._world import handle_of


class _Attention(Differentiable):
    @staticmethod
    def forward(ctx, q, k, v, bias, sink, at_q, at_kv, world, *spec):
        ctx.set_materialize_grads(False)
        added = ctx.needs_input_grad[3:5]
        at = _both(at_q, at_kv)
        out, lse = _ops.attention(q, k, v, bias, sink, *at, world, True, *added, *spec)
        ctx.save_for_backward(q, k, v, bias, sink, at_q, at_kv, out, lse)
        ctx.args = (world, spec)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, d_out, _):
        _once()
        if d_out is None:
            return (None,) * len(ctx.needs_input_grad)
        world, spec = ctx.args
        needs_bias, needs_sink = ctx.needs_input_grad[3:5]
        *x, at_q, at_kv, out, lse = ctx.saved_tensors
        saved = (*x, *_both(at_q, at_kv), out, lse)
        dq, dk, dv, db, ds = _ops.attention_backward(
            d_out, *saved, world, needs_bias, needs_sink, *spec
        )
        if world:
            # Replicated parameters: each rank has what its queries contribute.
            db = _ops.all_reduce(db, world, "sum") if needs_bias else db
            ds = _ops.all_reduce(ds, world, "sum") if needs_sink else ds
        grads = (dq, dk, dv, db if needs_bias else None, ds if needs_sink else None)
        return *grads, None, None, None, *(None for _ in spec)


def _both(at_q, at_kv):
    """The offsets of queries and of keys, of which one tensor may serve for both: torch 2.15 does
    not compile an ``autograd.Function`` that is given it twice."""
    return at_q, at_q if at_kv is None else at_kv


def _offsets(cu, what, above=3):
    """Row offsets on the host. A tensor of a GPU would have to be waited for. The user's call is so
    many calls above this one."""
    if cu is None:
        return None
    if isinstance(cu, torch.Tensor):
        if cu.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                raise InvalidArgument(
                    f"`{what}` is on the GPU, and a capture cannot copy it: pass it on the host, or"
                    " to `attention` all offsets on the device of q"
                )
            import warnings

            text = f"`{what}` lies on the GPU: the call waits for it"
            warnings.warn(text, stacklevel=above + 1)
        cu = cu.tolist()
    return [int(n) for n in cu]


def _late(q, k, cu_q, cu_kv):
    """Row offsets in tensors beside q, which nobody waits for: those of queries, and of keys where
    they are others.

    None if they come from elsewhere.
    """
    given = [cu for cu in (cu_q, cu_kv) if cu is not None]
    if not given or not all(isinstance(c, torch.Tensor) and c.device == q.device for c in given):
        return None
    for x, cu, what in ((q, cu_q, "cu_seqlens_q"), (k, cu_kv, "cu_seqlens_kv")):
        if cu is None:
            continue
        if x.dim() == 4:
            raise InvalidArgument(f"`{what}` is for [tokens, heads, d], not for [b, s, heads, d]")
        if cu.dim() != 1 or cu.is_floating_point() or cu.is_complex() or cu.dtype == torch.bool:
            raise InvalidArgument(f"`{what}` must be integers, [sequences + 1]")
        if cu.shape[0] < 2:
            raise InvalidArgument(f"`{what}` has offsets of no sequence: pass [sequences + 1]")

    def plain(cu):
        # What does not fit 32 bits is seen on the CPU, where offsets are read at once.
        wide = cu.dtype == torch.int64 and not cu.is_cuda
        return (cu if wide else cu.to(torch.int32)).contiguous()

    if cu_q is None:
        cu_q = torch.arange(2, dtype=torch.int32, device=q.device) * q.shape[0]
    return plain(cu_q), None if cu_kv is None or cu_kv is cu_q else plain(cu_kv)


def _window(causal, window):
    """The most keys that are seen before and behind a query; None is no limit."""
    left, right = (None, None) if window is None else window
    left = None if left is None or left < 0 else int(left)
    right = None if right is None or right < 0 else int(right)
    return left, 0 if causal else right


def _packed(x, what):
    """[b, s, h, d] or [tokens, h, d] as the latter."""
    if x.dim() == 4:
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    if x.dim() != 3:
        raise InvalidArgument(f"`{what}` must be [tokens, heads, d] or [b, s, heads, d]")
    return x


def _not_of_batches(x, layout, size):
    """Refuses a batch where a rank's rows are not the same ones of each entry.

    All rows together are divided then, and those of the first entries would be one rank's.
    """
    if x.dim() != 4 or size == 1 or layout == "zigzag_per_sequence":
        return
    if layout == "balanced" or x.shape[0] > 1:
        raise InvalidArgument(
            f"the layout `{layout}` divides all rows of [tokens, heads, d] together, not each "
            "entry of [b, s, heads, d]: use `zigzag_per_sequence`"
        )


def _lengths(x, cu, size, what):
    """Offsets of all sequences in the global rows, of which each rank holds a part."""
    if cu is not None:
        if x.dim() == 4:
            raise InvalidArgument(f"`{what}` is for [tokens, heads, d], not for [b, s, heads, d]")
        return cu
    if x.dim() == 4:
        return [b * x.shape[1] * size for b in range(x.shape[0] + 1)]
    return [0, x.shape[0] * size]


def _numbers(tokens):
    """Rows of queries and of keys."""
    both = list(tokens) if isinstance(tokens, (tuple, list)) else [tokens, tokens]
    if len(both) != 2 or not all(isinstance(n, (int, torch.SymInt)) and n >= 0 for n in both):
        raise InvalidArgument(f"`tokens` must be a number of rows, or those of q and k: {tokens}")
    return both


def _arguments(q, k, world, size, kw):
    """Offsets in tensors (none, twice, if they are on the host), and the rest beside tensors."""
    left, right = _window(kw["causal"], kw["window"])
    late, tokens, strategy = None, kw.get("tokens"), kw["strategy"]
    if not world or tokens is not None:
        late = _late(q, k, kw["cu_seqlens_q"], kw["cu_seqlens_kv"])
    if tokens is not None:
        if late is None or kw["cu_seqlens_q"] is None:
            raise InvalidArgument("`tokens` is for `cu_seqlens_q` in a tensor on the device of q")
        tokens = _numbers(tokens)
        strategy = strategy or "all_gather"
    if late is None:
        given_q = _offsets(kw["cu_seqlens_q"], "cu_seqlens_q")
        given_kv = _offsets(kw["cu_seqlens_kv"], "cu_seqlens_kv")
        cu_q = _lengths(q, given_q, size, "cu_seqlens_q")
        cu_kv = _lengths(k, given_q if given_kv is None else given_kv, size, "cu_seqlens_kv")
        late = None, None
    else:
        cu_q = cu_kv = []
    softcap = kw["softcap"] or None
    spec = (cu_q, cu_kv, left, right, kw["scale"], softcap, float(kw["dropout_p"]))
    spec += (int(kw["seed"]), kw["layout"], strategy, kw["a2a_size"] or 1)
    return late, spec + (bool(kw.get("deterministic", True)), tokens)


def _run(q, k, v, world, size, kw):
    _not_of_batches(q, kw["layout"], size)
    late, spec = _arguments(q, k, world, size, kw)
    bias, sink = kw["bias"], kw["sink"]
    dtype = _autocast_dtype(q)
    if dtype is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    flat = [_packed(x, n) for x, n in ((q, "q"), (k, "k"), (v, "v"))]
    if _needs_grad(q, k, v, bias, sink):
        out, lse = _Attention.run(*flat, bias, sink, *late, world, *spec)
    else:
        at = _both(*late)
        out, lse = _ops.attention(*flat, bias, sink, *at, world, False, False, False, *spec)
    if q.dim() == 4:
        out = out.view(*q.shape[:3], v.shape[3])
        lse = lse.view(q.shape[2], *q.shape[:2])
    return (out, lse) if kw["return_lse"] else out


def _heads(x, what):
    """The codes of a QTensor by heads, and its scales."""
    fits = isinstance(x, QTensor) and x.recipe == "block128x128"
    if not (fits and x.dtype == torch.float8_e4m3fn and x.shape[1] % 128 == 0):
        raise InvalidArgument(
            f'attention: q, k and v must all be tensors, or all `quantize(x, "block128x128")` of'
            f" [tokens, heads * 128] as float8_e4m3fn; `{what}` is {x!r}"
            if isinstance(x, QTensor)
            else "attention: q, k and v must all be QTensors, or none of them"
        )
    return x.data.reshape(x.shape[0], -1, 128), x.scales


def _of_codes(q, k, v, kw):
    bias, sink = kw["bias"], kw["sink"]
    if _needs_grad(bias, sink):
        raise InvalidArgument("attention of QTensors has no gradient: pass bias and sink detached")
    (q, q_scales), (k, k_scales), (v, v_scales) = (
        _heads(x, what) for x, what in ((q, "q"), (k, "k"), (v, "v"))
    )
    late, spec = _arguments(q, k, 0, 1, kw)
    at = _both(*late)
    out, lse = _ops.attention_fp8(
        q, k, v, q_scales, k_scales, v_scales, bias, sink, *at, *spec
    )
    return (out, lse) if kw["return_lse"] else out


def attention(
    q,
    k,
    v,
    *,
    causal=True,
    window=None,
    cu_seqlens_q=None,
    cu_seqlens_kv=None,
    scale=None,
    bias=None,
    softcap=None,
    sink=None,
    dropout_p=0.0,
    seed=0,
    deterministic=True,
    return_lse=False,
):
    """``softmax(scale q k^T + bias) v`` of tensors that are here; no world is needed.

    The last query sees the last key under a causal mask. Other keywords as :func:`cp_attention`.

    Args:
        q: [tokens, heads, d] or [b, s, heads, d]; f32, bf16 or f16. Or a :class:`QTensor` of
            [tokens, heads * 128], float8_e4m3fn of recipe "block128x128": without gradients.
        k, v: the same, with heads that divide q's; v may have another d. With a QTensor q QTensors.
        cu_seqlens_q, cu_seqlens_kv: row offsets of packed sequences, [sequences + 1]; those of the
            queries serve for the keys, too. Integer tensors on q's device are read when the call
            runs: nobody waits for them, and a CUDA graph follows offsets that change, as many as it
            was captured with (repeat the last one for sequences that are not there). There may be
            rows behind the last sequence, which are zero. On a GPU, offsets that do not begin with
            0, descend or go beyond the rows, and sequences longer than the bias, make all results
            NaN. Lists, and tensors of the CPU beside a q on a GPU, are of all rows.
        deterministic: gradients have the same bits in every run. False lets a GPU add those of q in
            any order, 1.05 times as fast: on sm_90a, with heads of 128, no window, softcap, bias or
            dropout, sequences of 4096 queries and more on average, offsets in lists, and keys and
            heads for all multiprocessors. Such gradients take 512 bytes of workspace for each query
            and head, in order, too.

    Returns:
        of q's form with v's d; with ``return_lse`` also the log-sum-exp [heads, tokens] (or [heads,
        b, s]) f32, which has no gradient. Of QTensors [tokens, heads, 128] bf16: on sm_90a the
        codes are multiplied as they are, with probabilities rounded to e4m3 (a relative 2^-4 each),
        where there is no softcap, bias or dropout and the offsets are lists; else they are widened.

    Raises:
        InvalidArgument: shapes, dtypes, devices or offsets do not fit.
    """
    # By their names: a compiler does not trace `locals`.
    kw = dict(causal=causal, window=window, scale=scale, bias=bias, softcap=softcap, sink=sink)
    kw.update(cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, return_lse=return_lse)
    kw.update(dropout_p=dropout_p, seed=seed, layout="contiguous", strategy=None, a2a_size=None)
    kw["deterministic"] = deterministic
    if any(isinstance(x, QTensor) for x in (q, k, v)):
        return _of_codes(q, k, v, kw)
    return _run(q, k, v, 0, 1, kw)


def cp_attention(
    q,
    k,
    v,
    group=None,
    *,
    causal=True,
    window=None,
    cu_seqlens_q=None,
    cu_seqlens_kv=None,
    scale=None,
    bias=None,
    softcap=None,
    sink=None,
    dropout_p=0.0,
    seed=0,
    strategy=None,
    a2a_size=None,
    layout="zigzag_per_sequence",
    tokens=None,
    return_lse=False,
):
    """Attention of rows that are divided among the ranks: each holds a part of every sequence.

    Args:
        q: my rows, [tokens / P, heads, d], or of a batch [b, s / P, heads, d].
        k, v: the same, with heads that divide q's; v may have another d.
        group: a World, a ProcessGroup that has one, or None for the first world.
        causal: queries see themselves and what came before.
        window: (left, right): the most keys seen before and behind; -1 or None is no limit.
        cu_seqlens_q, cu_seqlens_kv: global row offsets of packed sequences, [sequences + 1], lists
            or tensors on the host; those of the queries serve for the keys, too. On a GPU they are
            copied, with a warning, and refused during a capture, unless ``tokens`` says how many
            rows there are. The longest sequence (``max_seqlen`` elsewhere) follows from them.
        scale: of the scores. Default: d ** -0.5.
        bias: [1 or heads, sq, skv] f32, added to the scores of every sequence.
        softcap: bound of the scores: softcap * tanh(scores / softcap).
        sink: [heads] f32: a logit of each head that takes part in the softmax and has no value.
        dropout_p, seed: dropout of the probabilities; the mask follows from global rows and the
            seed, so it is the same on any number of ranks. Each seed is a plan of its own.
        strategy: "get", "ring", "all_gather", "all_to_all" or "hybrid". Default: what is predicted
            fastest, which is "gated" where that fits and no two ranks share a GPU. "gated" is
            "all_gather" whose forward pass is one kernel, which waits for each rank's keys where it
            meets them: on sm_90a, of 16-bit inputs and heads of 64, 128, 256, or 192 with values of
            128, at most 32 ranks; refused elsewhere on GPUs. On the CPU it is "all_gather".
        a2a_size: ranks of a group in which "hybrid" scatters heads.
        layout: "zigzag_per_sequence" (each sequence in 2 P chunks, of which rank r holds r and
            2 P - 1 - r, as TransformerEngine and Megatron divide), "zigzag" (the same of all rows
            together), "contiguous", or "balanced" (equal rows and equal work of any documents,
            whole ones where that balances; not of [b, s, heads, d]). :func:`cp_shard` divides.
        tokens: the rows of all ranks together (of queries and of keys, if these differ). With it
            offsets are tensors on q's device, equal on all ranks, which are read when the call
            runs: nobody waits for them, and a CUDA graph follows offsets that change, as in
            :func:`attention`. On a GPU this is for the layouts "zigzag" and "contiguous" (not the
            default) and the strategies "all_gather" (the default then) and "gated", of at most 32
            ranks whose GPUs reach each other. Each number is a plan, made outside of a capture.
        return_lse: also return the log-sum-exp of my rows.

    Returns:
        as :func:`attention`.

    Raises:
        As :func:`ag_gemm`.
    """
    kw = dict(causal=causal, window=window, scale=scale, bias=bias, softcap=softcap, sink=sink)
    kw.update(cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, return_lse=return_lse)
    kw.update(dropout_p=dropout_p, seed=seed, layout=layout, strategy=strategy, a2a_size=a2a_size)
    world = handle_of(group)
    kw["tokens"] = tokens
    return _run(q, k, v, world, _ops.size_of(world), kw)


def _rows(cu, layout, world, mask):
    if torch.compiler.is_compiling():
        # Rows are part of a graph, which is of these offsets alone: a symbol has no text.
        cu = [int(f"{n}") for n in cu]
    return _rows_of(cu, layout, _ops.size_of(world), mask)


@torch.compiler.assume_constant_result
def _rows_of(cu, layout, size, mask):
    return [_native.cp_rows(cu, layout, (r, size), mask) for r in range(size)]


def cp_shard(
    x,
    group=None,
    *,
    cu_seqlens=None,
    layout="zigzag_per_sequence",
    dim=None,
    causal=True,
    window=None,
):
    """My part of a global tensor, for :func:`cp_attention`.

    ``dim`` is the dimension of the tokens: 0 of [tokens, ...], 1 of [b, s, ...] (dim=1 divides each
    entry of the batch alike). ``causal`` and ``window`` are those of :func:`cp_attention`: the
    layout "balanced" divides by the work under the mask.
    """
    world = handle_of(group)
    dim = 0 if dim is None else dim
    cu = _offsets(cu_seqlens, "cu_seqlens", 2) or [0, x.shape[dim]]
    spans = _rows(cu, layout, world, _window(causal, window))[_ops.rank_of(world)]
    return torch.cat([x.narrow(dim, a, b - a) for a, b in spans], dim).contiguous()


def cp_unshard(
    x,
    group=None,
    *,
    cu_seqlens=None,
    layout="zigzag_per_sequence",
    dim=None,
    causal=True,
    window=None,
):
    """The global tensor of all ranks' parts: the inverse of :func:`cp_shard`. Collective."""
    from ._functions import all_gather

    world = handle_of(group)
    dim = 0 if dim is None else dim
    size = _ops.size_of(world)
    first = x.movedim(dim, 0).contiguous()
    # Parts may differ in rows by what the layout says.
    cu = _offsets(cu_seqlens, "cu_seqlens", 2) or [0, x.shape[dim] * size]
    spans = _rows(cu, layout, world, _window(causal, window))
    rows = [sum(b - a for a, b in s) for s in spans]
    parts = all_gather(first, group, rows=None if len(set(rows)) == 1 else rows)
    index = torch.cat([torch.arange(a, b) for s in spans for a, b in s])
    back = torch.empty_like(index)
    back[index] = torch.arange(len(index))
    return parts.index_select(0, back.to(x.device)).movedim(0, dim)
