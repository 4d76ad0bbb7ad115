"""Calls of every operation, with random inputs that gradients are checked at."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.func import functional_call

import tilewire.torch as tw
from tilewire.torch import te

# Linear in each input, so of second order in two: a central difference has no error but rounding,
# which a long step makes small.
EXACT = dict(steps=(0.5,), tol=1e-5)
# A polynomial of third order, which two steps cancel.
CUBIC = dict(steps=(0.5, 0.25), tol=1e-5)
# Two steps leave the fourth power of the step, 1e-6, beside rounding of 2**-24 over the step.
SMOOTH = dict(steps=(2.0**-5, 2.0**-6), tol=1e-4)


class Case(NamedTuple):
    """A call by keywords, and its inputs: this rank's own, and those that all ranks have alike."""

    call: Callable[..., Any]
    own: dict
    same: dict = {}
    # Whether all ranks have the same outputs and compute the same loss of them.
    same_out: bool = False
    # Whether inputs are moved one by one, too.
    alone: bool = True
    steps: tuple = EXACT["steps"]
    tol: float = EXACT["tol"]


class Draw:
    """Random tensors of a rank: of its own, or the same on all ranks."""

    def __init__(self, world, device, apart=False):
        self.world, self.device, self.apart = world, device, apart
        self.rank, self.size = world.rank, world.size
        self.mine = torch.Generator().manual_seed(1000 + world.rank)
        self.shared = torch.Generator().manual_seed(999)

    def _from(self, gen, shape, scale):
        # Few bits: an input and a step of a power of two are added without rounding.
        t = torch.randn(*shape, generator=gen) * scale
        return (t * 256).round().div(256).to(self.device)

    def own(self, *shape, scale=1.0):
        return self._from(self.mine, shape, scale)

    def same(self, *shape, scale=1.0):
        return self._from(self.shared, shape, scale)

    def splits(self, *rows):
        """Rows of each expert, other ones on each rank."""
        return torch.tensor(rows, device=self.device).roll(self.rank)

    def routing(self, tokens, experts, top_k=2):
        """Experts of each token, some of them left out."""
        order = torch.rand(tokens, experts, generator=self.mine).argsort(1)[:, :top_k]
        left_out = torch.rand(tokens, top_k, generator=self.mine) < 0.2
        return order.masked_fill(left_out, -1).to(self.device)

    def buffer(self, buf):
        """The buffer of a dispatch; ``apart``: one of its own, as others come before its backward
        pass."""
        return buf.group.buffer() if self.apart else buf


def of_a_draw(make):
    """Lets ``make(t, ..)`` be called without its Draw: the result is a function of the Draw."""
    return lambda *args, **kw: lambda t: make(t, *args, **kw)


def odd(t):
    """Rows of each rank, all different."""
    return [2 * r + 1 for r in range(t.size)]


def mine(t):
    return odd(t)[t.rank]


def few(_):
    return 6


def all_rows(t):
    return 3 * t.size


def exchange(t):
    """Rows from each rank to each, some none."""
    return [[(i + 2 * j + 1) % 3 for j in range(t.size)] for i in range(t.size)]


def documents(t, layout="balanced"):
    """Offsets of packed sequences that a layout divides, evenly or not."""
    return [0, 4 * t.size, 6 * t.size + (layout == "balanced")]


def part(t, layout="balanced", **mask):
    """Rows of these sequences that this rank has."""
    cu = documents(t, layout)
    return len(tw.cp_shard(torch.arange(cu[-1]), cu_seqlens=cu, layout=layout, **mask))


def given(t, kw):
    """Keywords, of which those that are functions of the Draw are called."""
    return {n: v(t) if callable(v) else v for n, v in kw.items()}


@of_a_draw
def moved(t, call, shape, **kw):
    return Case(partial(call, **given(t, kw)), dict(x=t.own(*shape(t))))


COLLECTIVES = {
    "all_gather": moved(tw.all_gather, lambda t: (3, 4, 2)),
    "all_gather-rows": moved(tw.all_gather, lambda t: (mine(t), 4), rows=odd),
    "reduce_scatter": moved(tw.reduce_scatter, lambda t: (3 * t.size, 4, 2)),
    "reduce_scatter-avg": moved(tw.reduce_scatter, lambda t: (3 * t.size + 1, 4), op="avg"),
    "reduce_scatter-rows": moved(tw.reduce_scatter, lambda t: (sum(odd(t)), 4), rows=odd),
    "all_reduce": moved(tw.all_reduce, lambda t: (5, 3)),
    "all_reduce-avg": moved(tw.all_reduce, lambda t: (5, 3), op="avg"),
    "all_to_all": moved(tw.all_to_all, lambda t: (sum(exchange(t)[t.rank]), 3), splits=exchange),
    "cp_shard": moved(tw.cp_shard, lambda t: (4 * t.size, 3)),
    "cp_unshard": moved(tw.cp_unshard, lambda t: (2, 4, 3), dim=1),
    "cp_unshard-rows": moved(
        tw.cp_unshard, lambda t: (part(t), 3), layout="balanced", cu_seqlens=documents
    ),
}

# Columns of x and of the result.
K, N = 16, 12


@of_a_draw
def product(t, op, m=few, bias=True, turned=False, scale=1.0, precision=EXACT, **kw):
    """A product whose bias is this rank's in ag_gemm, a parameter of all ranks elsewhere.

    ``turned``: rows with an inner dimension, and a weight [k, n] of which a view is taken.
    """
    own = dict(x=t.own(m(t), 3, K) if turned else t.own(m(t), K, scale=scale))
    own["w"] = t.own(K, N) if turned else t.own(N, K, scale=scale)
    gathers, more = op is tw.ag_gemm, given(t, kw)
    own.update(dict(bias=t.own(N)) if bias and gathers else {})
    same = dict(bias=t.same(N)) if bias and not gathers else {}

    def call(w, **inputs):
        return op(w=w.t() if turned else w, **inputs, **more)

    return Case(call, own, same, op is tw.gemm_ar, **precision)


def rectified(t):
    """Biases far from the kink, on both sides of it: no sign changes by a step as short as this."""
    own = dict(x=t.own(5, K, scale=0.5), w=t.own(N, K, scale=0.25))
    own["bias"] = torch.where(t.own(N) > 0, 4.0, -4.0)
    return Case(partial(tw.ag_gemm, activation="relu"), own, steps=(2.0**-4,))


@of_a_draw
def watched(t, make):
    """A product inside of a forward-mode level: its nodes are not those of the short way."""
    case = make(t)

    def call(**inputs):
        with forward_ad.dual_level():
            return case.call(**inputs)

    return case._replace(call=call)


ag, rs, ar = (partial(product, op) for op in (tw.ag_gemm, tw.gemm_rs, tw.gemm_ar))
CURVED = dict(scale=0.5, precision=SMOOTH)
PRODUCTS = {
    "ag_gemm": ag(bias=False),
    "ag_gemm-bias": ag(),
    "ag_gemm-turned": ag(turned=True),
    "ag_gemm-rows": ag(mine, rows=odd),
    "ag_gemm-gathered": ag(return_gathered=True),
    "ag_gemm-gathered-alone": moved(
        lambda x: tw.ag_gemm(x, x.new_ones(N, K), return_gathered=True)[1], lambda t: (5, K)
    ),
    "ag_gemm-relu": rectified,
    "ag_gemm-gelu": ag(activation="gelu", **CURVED),
    "ag_gemm-swiglu": ag(mine, rows=odd, activation="swiglu", return_gathered=True, **CURVED),
    "gemm_rs": rs(all_rows, bias=False),
    "gemm_rs-bias": rs(all_rows),
    "gemm_rs-turned": rs(all_rows, turned=True),
    "gemm_rs-not-divided": rs(lambda t: 3 * t.size + 1),
    "gemm_rs-rows": rs(lambda t: sum(odd(t)), rows=odd),
    "gemm_ar": ar(bias=False),
    "gemm_ar-bias": ar(),
    "gemm_ar-turned": ar(turned=True),
    "ag_gemm-watched": watched(ag()),
    "gemm_rs-watched": watched(rs(all_rows)),
    "gemm_ar-watched": watched(ar()),
    "ag_gemm-by-ring": ag(algo="ring"),
    **{
        f"{op.__name__}-by-{algo}": product(op, all_rows, algo=algo)
        for op in (tw.ag_gemm, tw.gemm_rs, tw.gemm_ar)
        for algo in ("fused", "pipelined", "sequential")
    },
}


@of_a_draw
def grouped(t, packed=True, bias=True, into=False):
    """Experts with and without rows, and rows of no expert; weights in one tensor or each in its
    own, then also with memory for their gradients."""
    splits, add = t.splits(3, 0 if packed else 1, 5, 2), t.splits(1, 0, 0, 1).to(torch.uint8)

    def call(x, bias=None, **w):
        w, more = list(w.values()), {}
        if into:
            for p, old in zip(w, add.tolist()):
                # What is not added to is overwritten.
                p.main_grad = torch.full_like(p, 0.0 if old else 7.0)
            more = dict(out=[p.main_grad for p in w], wgrad_accumulation_mask=add)
        return tw.grouped_gemm(x, w[0] if packed else w, splits, bias=bias, **more)

    w = dict(w=t.own(4, N, K)) if packed else {f"w{e}": t.own(N, K) for e in range(4)}
    return Case(call, dict(x=t.own(12, K), **w, **(dict(bias=t.own(4, N)) if bias else {})))


@of_a_draw
def permuted(t, weigh=True, **kw):
    idx = t.routing(7, 4)

    def call(x, weights=None):
        return tw.permute(x, idx, weights, num_experts=4, **kw)[: 2 if weigh else 1]

    return Case(call, dict(x=t.own(7, 8), **(dict(weights=t.own(7, 2)) if weigh else {})))


@of_a_draw
def unpermuted(t, weigh=True, **kw):
    rows, _, _, row_map = tw.permute(t.own(7, 8), t.routing(7, 4), num_experts=4, **kw)
    own = dict(rows=t.own(*rows.shape), **(dict(weights=t.own(7, 2)) if weigh else {}))
    return Case(partial(tw.unpermute, row_map=row_map), own)


def experts(t, tokens=few, **kw):
    """A buffer of two experts a rank, and a routing."""
    form = dict(num_experts=2 * t.size, max_tokens=6, hidden=8, top_k=2, dtype=torch.float32)
    return tw.EpGroup(t.world, **form, **kw).buffer(), t.routing(tokens(t), 2 * t.size)


@of_a_draw
def dispatched(t, weigh=True, reuse=False, **kw):
    buf, idx = experts(t, **kw)
    x = t.own(len(idx), 8)
    if reuse:
        tw.ep_dispatch(buf, x, idx)

    def call(x, weights=None):
        taken = (buf.reuse(), x, None) if reuse else (t.buffer(buf), x, idx)
        return tw.ep_dispatch(*taken, weights)[: 2 if weigh else 1]

    return Case(call, dict(x=x, **(dict(weights=t.own(*idx.shape)) if weigh else {})))


@of_a_draw
def combined(t, weigh=True, **kw):
    buf, idx = experts(t, **kw)
    tw.ep_dispatch(buf, t.own(len(idx), 8), idx)
    rows = buf.group.capacity
    own = dict(y=t.own(rows, 8), **(dict(weights=t.own(rows)) if weigh else {}))
    return Case(partial(tw.ep_combine, buf), own)


@of_a_draw
def layer_of_experts(t, **kw):
    """Tokens to their experts, a product there, and back with the weights."""
    first, idx = experts(t, **kw)

    def call(x, w, weights):
        buf = t.buffer(first)
        rows, row_weights, splits = tw.ep_dispatch(buf, x, idx, weights, async_op=True).wait()
        if buf.group.layout != "expert_major":
            index = buf.row_index().long()
            rows = torch.where(index[:, None] >= 0, rows[index.clamp(min=0)], 0.0)
        y = tw.grouped_gemm(rows, w, splits)
        return tw.ep_combine(buf, y, row_weights, async_op=True).wait()

    own = dict(x=t.own(len(idx), 8), w=t.own(2, 8, 8), weights=t.own(*idx.shape))
    return Case(call, own, **CUBIC)


FORMS = {"": {}, "-rows": dict(weigh=False, align=4), "-dropped": dict(capacity=5)}
PLACES = {
    "-tokens": dict(tokens=lambda t: 6 - t.rank),
    "-rank_major": dict(layout="rank_major"),
    "-flat": dict(layout="flat"),
    "-zero_copy": dict(zero_copy=True),
    "-zero_copy-rank_major": dict(zero_copy=True, layout="rank_major"),
}
EXPERTS = {
    "grouped_gemm": grouped(bias=False),
    "grouped_gemm-bias": grouped(),
    "grouped_gemm-list": grouped(packed=False),
    "grouped_gemm-into": grouped(packed=False, into=True),
    **{f"permute{n}": permuted(**kw) for n, kw in FORMS.items()},
    **{f"unpermute{n}": unpermuted(**kw) for n, kw in FORMS.items()},
    **{f"ep_dispatch{n}": dispatched(**kw) for n, kw in {**FORMS, **PLACES}.items()},
    **{f"ep_combine{n}": combined(**kw) for n, kw in {**FORMS, **PLACES}.items()},
    **{f"ep{n}": layer_of_experts(**kw) for n, kw in {"": dict(align=4), **PLACES}.items()},
    "ep_dispatch-reuse": dispatched(reuse=True),
    "ep_combine-zero_copy-rows": combined(weigh=False, zero_copy=True),
}

# What is done to the scores. `bias` and `sink` are numbers of heads here.
MASKS = {
    "causal": {},
    "full": dict(causal=False),
    "window": dict(window=(3, 0)),
    "both-sides": dict(causal=False, window=(3, 2)),
    "softcap": dict(softcap=2.0, scale=0.5),
    "bias": dict(bias=8),
    "sink": dict(sink=8),
    "dropout": dict(dropout_p=0.3, seed=5),
    "all": dict(window=(5, 0), softcap=2.0, bias=1, sink=8, dropout_p=0.2, seed=6),
}


def parameters(of, mask, longest):
    """The arguments of a mask, and its inputs: drawn by ``of``."""
    shapes = dict(bias=lambda heads: (heads, longest, longest), sink=lambda heads: (heads,))
    kw = {n: v for n, v in MASKS[mask].items() if n not in shapes}
    return kw, {n: of(*shapes[n](v)) for n, v in MASKS[mask].items() if n in shapes}


@of_a_draw
def attended(t, mask):
    """Heads in groups of two, values of another size than keys, two sequences and an empty one."""
    kw, extra = parameters(t.own, mask, 7)
    own = dict(q=t.own(12, 8, 8), k=t.own(12, 4, 8), v=t.own(12, 4, 16), **extra)
    return Case(partial(tw.attention, cu_seqlens_q=[0, 5, 5, 12], **kw), own, **SMOOTH)


@of_a_draw
def divided(t, strategy, layout, mask="causal", alone=True):
    """Packed sequences in parts; a bias and a sink are parameters of all ranks."""
    kw, same = parameters(t.same, mask, 4 * t.size)
    rows = part(t, layout, **{n: v for n, v in kw.items() if n in ("causal", "window")})
    kw.update(strategy=strategy, layout=layout, cu_seqlens_q=documents(t, layout))
    if strategy == "hybrid":
        kw["a2a_size"] = min(2, t.size)
    own = dict(q=t.own(rows, 8, 8), k=t.own(rows, 4, 8), v=t.own(rows, 4, 8))
    return Case(partial(tw.cp_attention, **kw), own, same, alone=alone, **SMOOTH)


@of_a_draw
def attended_by(t, call, q, kv):
    return Case(call, dict(q=t.own(*q), k=t.own(*kv), v=t.own(*kv)), **SMOOTH)


CROSS = partial(tw.attention, cu_seqlens_q=[0, 3, 8], cu_seqlens_kv=[0, 5, 12])
STRATEGIES = ["get", "ring", "all_gather", "all_to_all", "hybrid"]
LAYOUTS = ["zigzag_per_sequence", "zigzag", "contiguous", "balanced"]
ATTENTION = {
    **{f"attention-{mask}": attended(mask) for mask in MASKS},
    "attention-batch": attended_by(tw.attention, (2, 6, 4, 8), (2, 6, 2, 8)),
    "attention-across": attended_by(CROSS, (8, 4, 8), (12, 4, 8)),
    "cp_attention-batch": attended_by(tw.cp_attention, (2, 4, 4, 8), (2, 4, 2, 8)),
    **{f"cp_attention-{s}-{x}": divided(s, x, alone=False) for s in STRATEGIES for x in LAYOUTS},
    **{f"cp_attention-{s}-all": divided(s, x, "all") for s, x in zip(STRATEGIES, LAYOUTS * 2)},
    **{f"cp_attention-{m}": divided(None, x, m) for m, x in zip(MASKS, LAYOUTS * 3)},
}


@of_a_draw
def layer(t, make, m=few, same=(), same_out=False, splits=(), accumulate=False):
    """A layer as a function of its parameters; those in ``same`` all ranks have alike.

    ``accumulate``: the gradients of its weights go to ``main_grad``.
    """
    module = make(t).to(t.device)
    shapes = {"x": (m(t), K), **{n: p.shape for n, p in module.named_parameters()}}
    inputs = {n: (t.same if n in same else t.own)(*s) for n, s in shapes.items()}
    more = (t.splits(*splits),) if splits else ()

    def call(x, **p):
        for n in p if accumulate else ():
            if n.startswith("weight"):
                p[n].main_grad = torch.zeros_like(p[n])
        return functional_call(module, p, (x, *more))

    own = {n: inputs.pop(n) for n in shapes if n not in same}
    return Case(call, own, inputs, same_out)


@of_a_draw
def linear(t, cls, columns, rows, mode=None, **kw):
    """A layer of which this rank has a part; the divided side is given as 0."""
    group = dict(tp_group=t.world, parallel_mode=mode) if mode else dict(group=t.world)
    return cls(columns or K * t.size, rows or N * t.size, device=t.device, **group, **kw)


Column, Row = tw.ColumnParallelLinear, tw.RowParallelLinear
INTO = dict(sequence_parallel=True, fuse_wgrad_accumulation=True)
MODULES = {
    "ColumnParallelLinear": layer(linear(Column, K, 0)),
    "ColumnParallelLinear-main_grad": layer(linear(Column, K, 0), accumulate=True),
    "RowParallelLinear": layer(linear(Row, 0, N), all_rows, ["bias"]),
    "RowParallelLinear-main_grad": layer(linear(Row, 0, N), all_rows, ["bias"], accumulate=True),
    "RowParallelLinear-whole": layer(linear(Row, 0, N, scatter=False), few, ["bias"], True),
    "GroupedLinear": layer(lambda t: tw.GroupedLinear(3, K, N), splits=(2, 1, 3)),
    "te-column": layer(linear(te.Linear, K, 0, "column"), few, ["x"]),
    "te-column-sequence": layer(linear(te.Linear, K, 0, "column", **INTO), accumulate=True),
    "te-row": layer(linear(te.Linear, 0, N, "row"), few, ["bias"], True),
    # Its bias is added to the rows that are here; others add its gradients.
    "te-row-sequence": layer(linear(te.Linear, 0, N, "row", **INTO), all_rows, accumulate=True),
    "te-GroupedLinear": layer(
        lambda t: te.GroupedLinear(3, K, N, **INTO), splits=(2, 1, 3), accumulate=True
    ),
}
CASES = {**COLLECTIVES, **PRODUCTS, **EXPERTS, **ATTENTION, **MODULES}
