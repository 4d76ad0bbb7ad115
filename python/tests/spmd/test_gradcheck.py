"""Gradients of every operation beside finite differences of the operation itself, over all ranks.

In the manner of ``torch.autograd.gradcheck(fast_mode=True)``, for operations without f64: all ranks
move their inputs at once, and the change of the sum of all ranks' ``<outputs, w>`` is compared with
the sum of all ranks' ``<gradients, d>``. Both are one number of the whole job's Jacobian.

On one rank, where nobody else moves, torch's own ``gradcheck`` is run as well, of f64 tensors that
the operation takes as f32.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import CASES, Case, Draw, K, N
from torch.autograd.gradcheck import GradcheckError

import tilewire.torch as tw
from tilewire.torch import te


@pytest.fixture
def draw(world, device):
    return Draw(world, device)


# The checker.


def outputs(call, tensors):
    out = call(**tensors)
    return out if isinstance(out, tuple) else (out,)


def gradients(case, tensors, names, draw):
    """Random cotangents w of all outputs, and the gradients of ``<outputs, w>``."""
    leaves = {n: t.clone().requires_grad_(n in names) for n, t in tensors.items()}
    out = outputs(case.call, leaves)
    w = [(draw.same if case.same_out else draw.own)(*y.shape) for y in out]
    loss = sum((y * v).sum() for y, v in zip(out, w))
    inputs = [leaves[n] for n in names]
    grads = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    # What is accumulated in memory of the caller's does not come by autograd.
    return w, {n: getattr(t, "main_grad", g) for n, t, g in zip(names, inputs, grads)}


def direction(grad, same, draw):
    """Random, with the signs of the gradient: contributions do not cancel each other, so a part of
    the gradient that is wrong is seen in the sum."""
    d, g = draw.own(*grad.shape).cpu(), grad.cpu()
    d = torch.where(g == 0, d, torch.copysign(d, g))
    if same:
        dist.broadcast(d, 0)
    return d.to(draw.device)


def contributions(case, tensors, d, w):
    """Terms of the derivative along ``d``, one of each element of the outputs, in f64."""
    found = []
    for h in case.steps:
        ends = []
        for step in (h, -h):
            moved = {n: t + step * d[n] if n in d else t for n, t in tensors.items()}
            with torch.no_grad():
                ends.append([y.double() for y in outputs(case.call, moved)])
        parts = [(a - b) * v.double() / (2 * h) for a, b, v in zip(*ends, w)]
        found.append(torch.cat([p.flatten().cpu() for p in parts]))
    # Of steps h and h / 2: Richardson's extrapolation.
    return found[0] if len(found) == 1 else (4 * found[1] - found[0]) / 3


def sides(case, names, draw):
    """This rank's part of both sides, of the sum of absolute contributions and of their number."""
    # What all ranks have alike counts once, by shares that differ: so ranks that differ are seen.
    share = (2 * draw.rank + 1) / draw.size**2
    tensors = {**case.own, **case.same}
    w, grads = gradients(case, tensors, names, draw)
    d = {n: direction(g, n in case.same, draw) for n, g in grads.items()}
    terms = contributions(case, tensors, d, w) * (share if case.same_out else 1.0)
    analytic = sum(
        (g.double() * d[n].double()).sum().item() * (share if n in case.same else 1.0)
        for n, g in grads.items()
    )
    return [analytic, terms.sum().item(), terms.abs().sum().item(), float(terms.numel())]


def check(case, draw):
    """Each input alone, then all of them together. Sums of all ranks: they pass or fail alike."""
    names = (*case.own, *case.same)
    sets = dict.fromkeys([*((n,) for n in names if case.alone), names])
    sums = torch.tensor([sides(case, some, draw) for some in sets], dtype=torch.float64)
    dist.all_reduce(sums)
    for some, (analytic, numeric, size, count) in zip(sets, sums.tolist()):
        what = f"{', '.join(some)}: {analytic:.9g} by gradients, {numeric:.9g} by differences"
        assert abs(analytic - numeric) <= case.tol * abs(numeric), f"wrong gradient: {what}"
        assert abs(numeric) > 0.5 * size / count**0.5, f"nothing to compare: {what}"


HOST = pytest.mark.needs(gpu=False)  # on GPUs there is no fused kernel
NAMES = [pytest.param(n, marks=HOST) if n.endswith("by-fused") else n for n in CASES]


@pytest.mark.parametrize("name", NAMES)
def test_gradients(draw, name):
    check(CASES[name](draw), draw)


# Elements of inputs, by which a run of torch's check takes less than 10 s.
LARGE = 600


def torch_gradcheck(case):
    """Torch's own check, undefined gradients and second backward passes among it: of each element
    of the Jacobian, of large ones by random vectors on both sides."""
    tensors = {**case.own, **case.same}

    def call(*inputs):
        out = outputs(case.call, {n: t.float() for n, t in zip(tensors, inputs)})
        return tuple(y.double() for y in out)

    leaves = [t.double().requires_grad_() for t in tensors.values()]
    # Of the mean of f32 roundings over the step, or of what a single step leaves of the third
    # derivative.
    rough = dict(atol=1e-5, rtol=1e-5) if len(case.steps) == 1 else dict(atol=1e-3, rtol=1e-3)
    large = sum(t.numel() for t in leaves) > LARGE
    return torch.autograd.gradcheck(call, leaves, eps=case.steps[-1], fast_mode=large, **rough)


# Gradients that come in memory of the caller's are not autograd's to see.
ELSEWHERE = ("-into", "-main_grad", "-sequence", "te-GroupedLinear")


@pytest.mark.needs(most_ranks=1)
@pytest.mark.parametrize("name", [n for n in NAMES if not str(n).endswith(ELSEWHERE)])
def test_torch_finds_the_same_gradients(world, device, name):
    assert torch_gradcheck(CASES[name](Draw(world, device, apart=True)))


@pytest.mark.parametrize("mode", ["static", "eager", "zero_copy"])
def test_gradients_of_experts_of_te(draw, mode):
    capacity = None if mode == "eager" else 16 * draw.size
    more = dict(zero_copy=mode == "zero_copy", max_token_dtype=torch.float32)
    te.ep_bootstrap(draw.world, 2 * draw.size, 6, 8, 2, capacity, **more)
    try:
        buf = te.EpBuffer(2, 6, 8, 2, capacity, payload_dtype=torch.float32)
        idx = draw.routing(6, 2 * draw.size)

        def call(x, weights):
            rows, row_weights, _ = te.ep_dispatch(buf, x, idx, weights)
            return te.ep_combine(buf, rows * row_weights[:, None]), row_weights

        check(Case(call, dict(x=draw.own(6, 8), weights=draw.own(6, 2))), draw)
    finally:
        te.ep_finalize()


# The checker itself.


class Wrong(torch.autograd.Function):
    """Its argument, with a gradient that ``fault`` changes."""

    @staticmethod
    def forward(ctx, x, fault):
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.fault(grad), None


FAULTS = {
    "percent": lambda g: g * 1.01,
    "rows": lambda g: torch.cat((g[:2], g[2:] * 1.01)),
    "order": lambda g: g.flip(0),
    "none": lambda g: None,
    "nan": lambda g: g * float("nan"),
}


@pytest.mark.parametrize("fault", list(FAULTS))
@pytest.mark.parametrize("name", ["all_gather", "ag_gemm-gelu", "ep", "attention-causal"])
def test_a_wrong_gradient_of_one_rank_is_refused_by_all(draw, name, fault):
    case = CASES[name](draw)
    first, x = next(iter(case.own.items()))
    wrong = FAULTS[fault] if draw.rank == draw.size - 1 else lambda g: g

    def call(x):
        return case.call(**{**case.own, first: Wrong.apply(x, wrong)})

    with pytest.raises(AssertionError, match="wrong gradient"):
        check(case._replace(call=call, own=dict(x=x)), draw)


@pytest.mark.needs(most_ranks=1)
@pytest.mark.parametrize("fault", list(FAULTS))
def test_torch_refuses_the_same_gradients(draw, fault):
    case = CASES["ag_gemm"](draw)

    def call(x, w):
        return case.call(x=Wrong.apply(x, FAULTS[fault]), w=w)

    with pytest.raises(GradcheckError, match="mismatch|none"):
        torch_gradcheck(case._replace(call=call))


def gathered_without_sum(x, draw):
    parts = tw.all_gather(x).chunk(draw.size)
    return torch.cat([x if r == draw.rank else p.detach() for r, p in enumerate(parts)])


@pytest.mark.needs(least_ranks=2)
def test_sums_over_ranks_that_are_missing_or_made_twice_are_refused(draw):
    own, bias = dict(x=draw.own(3 * draw.size, K), w=draw.own(N, K)), dict(bias=draw.same(N))
    for case in (
        Case(partial(gathered_without_sum, draw=draw), dict(x=draw.own(3, 4))),
        # The gradient of the bias is that of the rows here, not of all.
        Case(lambda x, w, bias: tw.gemm_rs(x, w) + bias, own, bias),
        # A loss that all ranks compute, counted by each.
        Case(tw.all_reduce, dict(x=draw.own(5, 3)), same_out=True),
    ):
        with pytest.raises(AssertionError, match="wrong gradient"):
            check(case, draw)


def test_a_check_with_nothing_to_compare_is_refused(draw):
    with pytest.raises(AssertionError, match="nothing to compare"):
        check(Case(lambda x: x * 0.0, dict(x=draw.own(3, 4))), draw)
