"""Attention: of arrays that are here, and of rows that are divided among ranks."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _native
from .._errors import InvalidArgument
from ._call import call, vary
from ._ops import all_gather
from ._world import team_of


class _Static(NamedTuple):
    team: tuple | None
    # The text's part for an attention, as pairs.
    spec: tuple

    def more(self):
        def thawed(v):
            return [thawed(i) for i in v] if isinstance(v, tuple) else v

        return {k: thawed(v) for k, v in self.spec}


def _forward(s, q, k, v, bias, sink, at_q, at_kv, grad):
    rets = {
        "out": ((q.shape[0], q.shape[1], v.shape[2]), q.dtype),
        "lse": ((q.shape[1], q.shape[0]), jnp.float32),
    }
    args = {"q": q, "k": k, "v": v, "bias": bias, "sink": sink, "cu_q": at_q, "cu_kv": at_kv}
    more = dict(attention=s.more(), params={"grad": grad})
    op = "attention" if s.team is None else "cp_attention"
    out = call(op, args, rets, team=s.team, **more)
    return out["out"], out["lse"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(s, q, k, v, bias, sink, at_q, at_kv):
    return _forward(s, q, k, v, bias, sink, at_q, at_kv, False)


def _attention_fwd(s, q, k, v, bias, sink, at_q, at_kv):
    out, lse = _forward(s, q, k, v, bias, sink, at_q, at_kv, True)
    return (out, lse), (q, k, v, bias, sink, at_q, at_kv, out, lse)


def _attention_bwd(s, saved, d):
    q, k, v, bias, sink, at_q, at_kv, out, lse = saved
    rets = {"dq": (q.shape, q.dtype), "dk": (k.shape, k.dtype), "dv": (v.shape, v.dtype)}
    if bias is not None:
        rets["dbias"] = (bias.shape, jnp.float32)
    if sink is not None:
        rets["dsink"] = (sink.shape, jnp.float32)
    args = {"d_out": d[0], "q": q, "k": k, "v": v, "bias": bias, "sink": sink}
    args.update(out=out, lse=lse, cu_q=at_q, cu_kv=at_kv)
    more = dict(attention=s.more(), params={"grad": True})
    op = "attention_bwd" if s.team is None else "cp_attention_bwd"
    g = call(op, args, rets, team=s.team, **more)
    return g["dq"], g["dk"], g["dv"], g.get("dbias"), g.get("dsink"), None, None


_attention.defvjp(_attention_fwd, _attention_bwd)


def _offsets(cu, what):
    """Row offsets on the host: they are part of the program."""
    if cu is None:
        return None
    if isinstance(cu, jax.core.Tracer):
        raise InvalidArgument(f"`{what}` is traced: pass it as numbers of the host (a list, numpy)")
    return [int(n) for n in np.asarray(cu).reshape(-1)]


def _late(q, k, cu_q, cu_kv, size):
    """Row offsets that are arrays of the program: those of queries and of keys.

    None if the program has them as numbers.
    """
    given = [cu for cu in (cu_q, cu_kv) if cu is not None]
    if not any(isinstance(cu, jax.Array) for cu in given):
        return None
    for x, cu, what in ((q, cu_q, "cu_seqlens_q"), (k, cu_kv, "cu_seqlens_kv")):
        if x.ndim == 4:
            raise InvalidArgument(f"`{what}` is for [tokens, heads, d], not for [b, s, heads, d]")
        if cu is None:
            continue
        cu = jnp.asarray(cu)
        if cu.ndim != 1 or not jnp.issubdtype(cu.dtype, jnp.integer):
            raise InvalidArgument(f"`{what}` must be integers, [sequences + 1]")
    cu_q = [0, q.shape[0] * size] if cu_q is None else cu_q
    return [jnp.asarray(c).astype(jnp.int32) for c in (cu_q, cu_q if cu_kv is None else cu_kv)]


def _window(causal, window):
    """The most keys that are seen before and behind a query; None is no limit."""
    left, right = (None, None) if window is None else window
    left = None if left is None or left < 0 else int(left)
    right = None if right is None or right < 0 else int(right)
    return left, 0 if causal else right


def _packed(x, what):
    """[b, s, h, d] or [tokens, h, d] as the latter."""
    if x.ndim == 4:
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    if x.ndim != 3:
        raise InvalidArgument(
            f"`{what}` must be [tokens, heads, d] or [b, s, heads, d], not {x.shape}"
        )
    return x


def _not_of_batches(x, layout, size):
    """Refuses a batch where a rank's rows are not the same ones of each entry.

    All rows together are divided then, and those of the first entries would be one rank's.
    """
    if x.ndim != 4 or size == 1 or layout == "zigzag_per_sequence":
        return
    if layout == "balanced" or x.shape[0] > 1:
        raise InvalidArgument(
            f"the layout `{layout}` divides all rows of [tokens, heads, d] together, not each "
            "entry of [b, s, heads, d]: use `zigzag_per_sequence`"
        )


def _lengths(x, cu, size, what):
    """Offsets of all sequences in the global rows, of which each rank holds a part."""
    if cu is not None:
        if x.ndim == 4:
            raise InvalidArgument(f"`{what}` is for [tokens, heads, d], not for [b, s, heads, d]")
        return cu
    if x.ndim == 4:
        return [b * x.shape[1] * size for b in range(x.shape[0] + 1)]
    return [0, x.shape[0] * size]


def _run(q, k, v, team, kw):
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    size = 1 if team is None else team[2]
    _not_of_batches(q, kw["layout"], size)
    left, right = _window(kw["causal"], kw["window"])
    packed = [_packed(x, n) for x, n in ((q, "q"), (k, "k"), (v, "v"))]
    late, at = None, (kw["cu_seqlens_q"], kw["cu_seqlens_kv"])
    # A divided program has offsets that are known when it is traced as numbers.
    if team is None or any(isinstance(cu, jax.core.Tracer) for cu in at):
        late = _late(q, k, *at, size)
    strategy, tokens = kw["strategy"], None
    if late is None:
        given_q = _offsets(kw["cu_seqlens_q"], "cu_seqlens_q")
        given_kv = _offsets(kw["cu_seqlens_kv"], "cu_seqlens_kv")
        cu_q = _lengths(q, given_q, size, "cu_seqlens_q")
        cu_kv = _lengths(k, given_q if given_kv is None else given_kv, size, "cu_seqlens_kv")
        late = None, None
    else:
        cu_q = cu_kv = []
        if team is not None:
            strategy, tokens = strategy or "all_gather", [q.shape[0] * size, k.shape[0] * size]
            if kw["layout"] not in ("zigzag", "contiguous"):
                raise InvalidArgument(
                    "`cu_seqlens_q` in an array is for the layouts `zigzag` and `contiguous`, whose"
                    f" rows do not depend on it, not for `{kw['layout']}`"
                )
    spec = dict(
        cu_q=cu_q,
        cu_kv=cu_kv,
        left=left,
        right=right,
        scale=None if kw["scale"] is None else float(kw["scale"]),
        softcap=float(kw["softcap"]) if kw["softcap"] else None,
        dropout_p=float(kw["dropout_p"]),
        seed=int(kw["seed"]),
        layout=kw["layout"],
        strategy=strategy,
        tokens=tokens,
        a2a_size=kw["a2a_size"] or 1,
        deterministic=bool(kw.get("deterministic", True)),
    )
    bias, sink = (None if x is None else jnp.asarray(x) for x in (kw["bias"], kw["sink"]))
    static = tuple((n, tuple(x) if isinstance(x, list) else x) for n, x in sorted(spec.items()))
    inputs = vary(() if team is None else team[1], *packed, bias, sink, *late)
    out, lse = _attention(_Static(team, static), *inputs)
    lse = jax.lax.stop_gradient(lse)
    if q.ndim == 4:
        out = out.reshape(*q.shape[:3], v.shape[3])
        lse = lse.reshape(q.shape[2], *q.shape[:2])
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
    """``softmax(scale q k^T + bias) v`` of arrays that are here; no world is needed.

    The last query sees the last key under a causal mask. Other keywords as :func:`cp_attention`.
    May be called outside of shard_map.

    Args:
        q: [tokens, heads, d] or [b, s, heads, d]; f32, bf16 or f16.
        k, v: the same, with heads that divide q's; v may have another d.
        cu_seqlens_q, cu_seqlens_kv: row offsets of packed sequences, [sequences + 1]; those of the
            queries serve for the keys, too. Lists and numpy's arrays are part of the program and of
            all rows. JAX's arrays, traced or not, are read when the program runs, so that one
            program serves as many documents, whatever their lengths (repeat the last offset for
            sequences that are not there). There may be rows behind the last one, which are zero.
            On a GPU, offsets that do not begin with 0, descend or go beyond the rows, and sequences
            longer than the bias, make all results NaN.
        deterministic: gradients have the same bits in every run. False lets a GPU add those of q in
            any order, 1.05 times as fast: on sm_90a, with heads of 128, no window, softcap, bias or
            dropout, sequences of 4096 queries and more on average, offsets that are no arrays of
            JAX, and keys and heads for all multiprocessors. Such gradients take 512 bytes of
            workspace for each query and head, in order, too.

    Returns:
        of q's form with v's d; with ``return_lse`` also the log-sum-exp [heads, tokens] (or [heads,
        b, s]) f32, which has no gradient.

    Raises:
        InvalidArgument: shapes, types or offsets do not fit.
    """
    kw = dict(locals())
    for name in ("q", "k", "v"):
        del kw[name]
    return _run(q, k, v, None, dict(kw, layout="contiguous", strategy=None, a2a_size=None))


def cp_attention(
    q,
    k,
    v,
    axis_name,
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
    return_lse=False,
    world=None,
):
    """Attention of rows that are divided among the ranks: each holds a part of every sequence.

    Args:
        q: my rows, [tokens / P, heads, d], or of a batch [b, s / P, heads, d].
        k, v: the same, with heads that divide q's; v may have another d.
        axis_name: an axis of the world's mesh, or a tuple of axes, as in ``jax.lax``.
        causal: queries see themselves and what came before.
        window: (left, right): the most keys seen before and behind; -1 or None is no limit.
        cu_seqlens_q, cu_seqlens_kv: global row offsets of packed sequences, [sequences + 1]; those
            of the queries serve for the keys, too. Numbers are part of the program. Traced arrays,
            equal on all ranks, are read when it runs, as in :func:`attention` (on the CPU bad ones
            end the team): with the layouts "zigzag" and "contiguous" and the strategies
            "all_gather" (the default then) and "gated", of at most 32 ranks whose GPUs reach each
            other. All rows of keys travel then. :func:`cp_shard` needs no offsets there.
        scale: of the scores. Default: d ** -0.5.
        bias: [1 or heads, sq, skv] f32, added to the scores of every sequence; the gradient of a
            rank is what its queries contribute.
        softcap: bound of the scores: softcap * tanh(scores / softcap).
        sink: [heads] f32: a logit of each head that takes part in the softmax and has no value.
        dropout_p, seed: dropout of the probabilities; the mask follows from global rows and the
            seed, so it is the same on any number of ranks. Each seed is a program of its own.
        strategy: "get", "ring", "all_gather", "all_to_all" or "hybrid". Default: what is predicted
            fastest, which is "gated" where that fits and no two ranks share a GPU. "gated" is
            "all_gather" whose forward pass is one kernel, which waits for each rank's keys where it
            meets them: on sm_90a, of 16-bit inputs and heads of 64, 128, 256, or 192 with values of
            128, at most 32 ranks; refused elsewhere on GPUs. On the CPU it is "all_gather".
        a2a_size: ranks of a group in which "hybrid" scatters heads.
        layout: "zigzag_per_sequence" (each sequence in 2 P chunks, of which rank r holds r and
            2 P - 1 - r), "zigzag" (the same of all rows together), "contiguous", or "balanced"
            (equal rows and equal work of any documents, whole ones where that balances; not of [b,
            s, heads, d]). :func:`cp_shard` divides.
        return_lse: also return the log-sum-exp of my rows.
        world: a World; None is the first one.

    Returns:
        as :func:`attention`.

    Raises:
        InvalidArgument: shapes, types, axes or offsets do not fit; when the call is traced.
    """
    kw = dict(locals())
    for name in ("q", "k", "v", "axis_name", "world"):
        del kw[name]
    return _run(q, k, v, team_of(axis_name, world), kw)


def _rows(cu, layout, size, mask):
    """Global rows of each rank, in the order of its arrays."""
    spans = [_native.cp_rows(cu, layout, (r, size), mask) for r in range(size)]
    rows = [np.concatenate([np.arange(a, b) for a, b in s] or [np.arange(0)]) for s in spans]
    if len({len(r) for r in rows}) != 1:
        raise InvalidArgument(
            f"the rows of {cu} do not divide evenly among {size} ranks: pad the sequences"
        )
    return np.stack(rows)


def cp_shard(
    x,
    axis_name,
    *,
    cu_seqlens=None,
    layout="zigzag_per_sequence",
    dim=None,
    causal=True,
    window=None,
    world=None,
):
    """My part of a global array that every rank has, for :func:`cp_attention`.

    ``dim`` is the dimension of the tokens: 0 of [tokens, ...], 1 of [b, s, ...] (dim=1 divides each
    entry of the batch alike). ``causal`` and ``window`` are those of :func:`cp_attention`: the
    layout "balanced" divides by the work under the mask.
    """
    _, axes, size = team_of(axis_name, world)
    dim = 0 if dim is None else dim
    cu = _offsets(cu_seqlens, "cu_seqlens") or [0, x.shape[dim]]
    mine = jnp.asarray(_rows(cu, layout, size, _window(causal, window)))[jax.lax.axis_index(axes)]
    (x,) = vary(axes, x)
    return jnp.take(x, mine, axis=dim)


def cp_unshard(
    x,
    axis_name,
    *,
    cu_seqlens=None,
    layout="zigzag_per_sequence",
    dim=None,
    causal=True,
    window=None,
    world=None,
):
    """The global array of all ranks' parts: the inverse of :func:`cp_shard`."""
    _, _, size = team_of(axis_name, world)
    dim = 0 if dim is None else dim
    cu = _offsets(cu_seqlens, "cu_seqlens") or [0, x.shape[dim] * size]
    parts = all_gather(jnp.moveaxis(x, dim, 0), axis_name, world=world)
    back = np.argsort(_rows(cu, layout, size, _window(causal, window)).reshape(-1))
    return jnp.moveaxis(jnp.take(parts, back, axis=0), 0, dim)
