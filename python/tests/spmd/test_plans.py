"""Plans made ahead of calls, and what they say."""

import pytest
import torch

import tilewire
import tilewire.torch as tw
from tilewire.torch import te


def test_a_prepared_call_makes_no_plan(world, device):
    size = world.size
    x = torch.empty(24, 40, device="meta", requires_grad=True)
    w = torch.empty(16, 40, device="meta", requires_grad=True)
    before = tw.memory()["plans_made"]
    tw.prepare(tw.ag_gemm, x, w)
    made = tw.memory()["plans_made"]
    assert made == before + 2  # the product and its mirror
    for rows in (24, 17, 32):
        mx = torch.randn(rows, 40, device=device, requires_grad=True)
        mw = torch.randn(16, 40, device=device, requires_grad=True)
        y = tw.ag_gemm(mx, mw)
        assert y.shape == (rows * size, 16)
        y.sum().backward()
    assert tw.memory()["plans_made"] == made
    # What was prepared can be captured at once.
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tw.ag_gemm(mx.detach(), mw.detach())
        graph.replay()
        torch.cuda.synchronize()


def calls(team, size):
    """Calls with gradients on a world of ``size``: of a rank's x [4, 8]."""
    ones, f32 = torch.ones, torch.float32
    made = dict(device=team.device, dtype=f32, requires_grad=True)
    w, bias, sink = ones(6, 8, **made), ones(1, 4 * size, 4 * size, **made), ones(1, **made)
    column = te.Linear(8, 6 * size, tp_group=team, parallel_mode="column", params_dtype=f32)
    group = tw.EpGroup(team, num_experts=size, max_tokens=4, hidden=8, top_k=1, dtype=f32)
    idx = torch.zeros(4, 1, dtype=torch.int64, device=team.device)
    splits = [[4 if i == j else 0 for j in range(size)] for i in range(size)]
    buf = group.buffer()

    def attention(x, **kw):
        x = x.unsqueeze(1)
        return tw.cp_attention(x, x, x, team, **kw)

    return {
        "ag_gemm": lambda x: tw.ag_gemm(x, w, team),
        "gathered": lambda x: torch.cat(tw.ag_gemm(x, w, team, return_gathered=True), 1),
        "swiglu": lambda x: tw.ag_gemm(x, w, team, activation="swiglu"),
        "gemm_rs": lambda x: tw.gemm_rs(x.repeat(size, 1), w, team),
        "gemm_ar": lambda x: tw.gemm_ar(x, w, team),
        "all_gather": lambda x: tw.all_gather(x, team),
        "reduce_scatter": lambda x: tw.reduce_scatter(x.repeat(size, 1), team),
        "all_reduce": lambda x: tw.all_reduce(x, team),
        "all_to_all": lambda x: tw.all_to_all(x, splits, team),
        "cp_attention": attention,
        "bias": lambda x: attention(x, bias=bias),
        "sink": lambda x: attention(x, sink=sink),
        "te.Linear": column,
        "ep": lambda x: tw.ep_combine(buf, tw.ep_dispatch(buf, x, idx)[0]),
    }


NAMES = "ag_gemm gathered swiglu gemm_rs gemm_ar all_gather reduce_scatter all_reduce all_to_all"
NAMES += " cp_attention bias sink te.Linear ep"


@pytest.mark.parametrize("name", NAMES.split())
def test_a_backward_pass_meets_nobody(world, device, name):
    """The forward pass has made all plans, so the ranks' backward passes need not begin
    together."""
    with world.team(range(world.size)) as team:
        x = torch.ones(4, 8, device=device, requires_grad=True)
        call = calls(team, world.size)[name]
        y = call(x)
        made = tw.memory(team)["plans_made"]
        assert made > 0 or name == "ep" or world.size == 1 and name == "te.Linear"
        y.sum().backward()
        assert x.grad is not None and tw.memory(team)["plans_made"] == made


def test_other_operations(world, device):
    meta = dict(device="meta", dtype=torch.bfloat16)
    q = torch.empty(2 * 16, 4, 32, requires_grad=True, **meta)
    tw.prepare(tw.cp_attention, q, q, q, causal=True, cu_seqlens_q=[0, 32 * world.size])
    tw.prepare(tw.all_reduce, torch.empty(7, 3, device="meta"), group=world)
    splits = torch.empty(2, device="meta", dtype=torch.int64)
    experts = torch.empty(2, 8, 16, requires_grad=True, **meta)
    tw.prepare(tw.grouped_gemm, torch.empty(5, 16, **meta), experts, splits)


def test_the_callers_tensors_are_left_as_they_are(world, device):
    x, w = torch.ones(4, 8, device=device), torch.ones(2, 3, 8, device=device, requires_grad=True)
    mains, splits = torch.full((2, 3, 8), 7.0, device=device), torch.tensor([1, 3], device=device)
    tw.prepare(tw.grouped_gemm, x, w, splits, out=mains)
    assert bool((mains == 7.0).all()) and w.grad is None
    buf = tw.EpGroup(num_experts=world.size, max_tokens=4, hidden=8, top_k=1).buffer()
    with pytest.raises(tilewire.InvalidArgument, match="EpGroup"):
        tw.prepare(tw.ep_dispatch, buf, x.bfloat16(), torch.zeros(4, 1, dtype=torch.int64))


def test_explained(world, device):
    x, w = torch.empty(32, 64, device="meta"), torch.empty(16, 64, device="meta")
    text = tw.explain(tw.ag_gemm, x, w)
    assert "ag_gemm" in text and "m=%d" % (32 * world.size) in text, text
    # Of a plan that is there, too; only what this call uses.
    assert tw.explain(tw.ag_gemm, x, w) == text
    both = tw.explain(tw.ag_gemm, x.requires_grad_(), w)
    assert "gemm_rs" in both and text in both
    # Nothing is noted when nobody asks.
    tw.all_reduce(torch.zeros(4, device=device))
    assert "all_reduce" in tw.explain(tw.all_reduce, torch.zeros(4, device=device))
    splits = torch.tensor([1, 1], device=device)
    a = torch.zeros(2, 16, device=device)
    b = torch.zeros(2, 8, 16, device=device)
    assert "grouped_gemm" in tw.explain(tw.grouped_gemm, a, b, splits)


def test_what_is_no_operation_is_refused(world):
    for bad in (print, "ag_gemm", torch.add):
        with pytest.raises(tilewire.InvalidArgument):
            tw.prepare(bad, torch.zeros(1))
    assert tw.memory(world)["limit_bytes"] > 0
    assert [b[0] for b in tw.backends()][0] == "host"
