"""permute and unpermute beside dense torch."""

import pytest
import torch
from dense import within

import tilewire
import tilewire.torch as tw


def routed(gen, tokens, experts, top_k, masked=True):
    idx = torch.stack([torch.randperm(experts, generator=gen)[:top_k] for _ in range(tokens)])
    if masked:
        idx[torch.rand(idx.shape, generator=gen) < 0.2] = -1
    return idx


def dense_rows(idx, experts, capacity, align):
    """Token and choice of each row, and rows of each expert, by the definition."""
    rows, splits = [], []
    for e in range(experts):
        mine = [(t, j) for t in range(idx.shape[0]) for j in range(idx.shape[1]) if idx[t, j] == e]
        pad = -len(mine) % align
        rows += mine + [None] * pad
        splits.append(len(mine) + pad)
    rows = (rows + [None] * capacity)[:capacity]
    return rows, splits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_forward_and_gradients(device, gen, dtype, align, index):
    tokens, hidden, experts, top_k = 13, 24, 6, 3
    idx = routed(gen, tokens, experts, top_k)
    x = torch.randn(tokens, hidden, generator=gen).to(dtype)
    w = torch.rand(tokens, top_k, generator=gen)
    mx, mw = x.to(device).requires_grad_(), w.to(device).requires_grad_()
    rows, row_w, splits, row_map = tw.permute(
        mx, idx.to(device, index), mw, num_experts=experts, align=align
    )
    where, counts = dense_rows(idx, experts, rows.shape[0], align)
    assert splits.tolist() == counts
    want = torch.stack([x[r[0]] if r else torch.zeros(hidden, dtype=dtype) for r in where])
    assert torch.equal(rows.detach().cpu(), want)
    want_w = torch.tensor([w[r] if r else 0.0 for r in where])
    assert torch.equal(row_w.detach().cpu(), want_w)
    y = tw.unpermute(rows * 2, row_map, mw)
    own = (idx >= 0).double() * w.double()
    ref = 2 * x.double() * own.sum(1, keepdim=True)
    within(y, ref, 8 * 2.0**-24 * ref.abs() + 1e-6, "y")
    dy = torch.randn(tokens, hidden, generator=gen).to(dtype)
    dw_rows = torch.randn(rows.shape[0], generator=gen)
    (y * dy.to(device)).sum().add((row_w * dw_rows.to(device)).sum()).backward()
    # The gradient of a row is rounded to its type on the way.
    unit = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    ref = 2 * own.sum(1, keepdim=True) * dy.double()
    within(mx.grad, ref, 4 * unit * (2 * own.sum(1, keepdim=True) * dy.double().abs()), "dx")
    dw = (idx >= 0).double() * (2 * x.double() * dy.double()).sum(1, keepdim=True)
    for at, r in enumerate(where):
        if r:
            dw[r] += dw_rows[at].double()
    bound = 1e-5 * ((2 * x.double() * dy.double()).abs().sum(1, keepdim=True) + 1)
    within(mw.grad, dw, bound.expand_as(dw), "dw")


def test_what_exceeds_the_capacity_and_no_tokens(device, gen):
    idx = torch.zeros(5, 1, dtype=torch.int64, device=device)
    x = torch.arange(5.0, device=device).view(5, 1).expand(5, 8)
    rows, _, splits, row_map = tw.permute(x, idx, num_experts=2, capacity=3)
    assert rows[:, 0].tolist() == [0, 1, 2] and splits.tolist() == [3, 0]
    assert row_map.totals(x) == {"rows": 5, "dropped": 2}
    assert tw.unpermute(rows, row_map)[:, 0].tolist() == [0, 1, 2, 0, 0]
    rows, _, splits, row_map = tw.permute(x[:0], idx[:0], num_experts=2, capacity=4)
    assert rows.shape == (4, 8) and not rows.any() and not splits.any()
    assert tw.unpermute(rows, row_map).shape == (0, 8)


def test_maps_in_flight_do_not_disturb_each_other(device, gen):
    x = torch.randn(9, 16, generator=gen).to(device).requires_grad_()
    maps = [routed(gen, 9, 4, 2).to(device) for _ in range(4)]
    made = [tw.permute(x, idx, num_experts=4) for idx in maps]
    for idx, (rows, _, _, row_map) in zip(maps, made):
        y = tw.unpermute(rows, row_map)
        torch.testing.assert_close(y, x * (idx >= 0).sum(1, keepdim=True), rtol=1e-6, atol=1e-6)
        (g,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(g, (idx >= 0).sum(1, keepdim=True).expand_as(x).to(g))


def test_what_does_not_fit_is_refused(device):
    x = torch.zeros(4, 8, device=device)
    idx = torch.zeros(4, 2, dtype=torch.int64, device=device)
    for bad in (
        lambda: tw.permute(x, idx[:3], num_experts=2),
        lambda: tw.permute(x, idx.float(), num_experts=2),
        lambda: tw.permute(x, idx, num_experts=0),
        lambda: tw.permute(x.double(), idx, num_experts=2),
        lambda: tw.unpermute(x, tw.permute(x, idx, num_experts=2)[3]),
    ):
        with pytest.raises(tilewire.InvalidArgument):
            bad()
    if device.type == "cpu":
        with pytest.raises(tilewire.InvalidArgument, match="expert"):
            tw.permute(x, idx + 7, num_experts=2)


@pytest.mark.needs(gpu=True)
def test_captured(device, gen):
    x = torch.randn(32, 64, generator=gen).to(device)
    idx = routed(gen, 32, 4, 2).to(device)

    def call():
        rows, _, splits, row_map = tw.permute(x, idx, num_experts=4)
        return tw.unpermute(rows, row_map), splits

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, splits = call()
    for _ in range(20):
        x.copy_(torch.randn(32, 64, generator=gen))
        idx.copy_(routed(gen, 32, 4, 2))
        # A call beside it must not take the graph's map.
        call()
        graph.replay()
        torch.cuda.synchronize()
        num = (idx >= 0).sum(1, keepdim=True)
        torch.testing.assert_close(y, x * num, rtol=1e-6, atol=1e-6)
        assert int(splits.sum()) == int(num.sum())
