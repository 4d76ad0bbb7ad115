"""Zero copy of experts: the memory of a buffer, and what autograd must not do with it."""

import pytest
import torch
from dense import leaf, randn
from test_ep import E_PER_RANK, H, T, group_of, routing

import tilewire
import tilewire.torch as tw


def layer(buf, x, w, idx, weights=None):
    recv, recv_w, splits = tw.ep_dispatch(buf, x, idx, weights)
    return recv, tw.ep_combine(buf, tw.grouped_gemm(recv, w, splits), recv_w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_bits_are_those_of_copies(world, device, gen, dtype, weighted):
    """Also when a buffer is used again and again, with tokens that change in number."""
    me, size = world.rank, world.size
    bufs = [group_of(world, dtype, zero_copy=z).buffer() for z in (True, False)]
    w = randn(gen, E_PER_RANK * size, H, H, dtype=dtype)[me * E_PER_RANK : (me + 1) * E_PER_RANK]
    for tokens in (T, 3, 7):
        idx, weights = routing(gen, size, tokens)
        x = randn(gen, size, tokens, H, dtype=dtype)
        dy = randn(gen, size, tokens, H, dtype=dtype)[me].to(device, dtype)
        results = []
        for buf in bufs:
            mx, mw = leaf(x[me], dtype, device), leaf(w, dtype, device)
            mk = leaf(weights[me], torch.float32, device) if weighted else None
            _, out = layer(buf, mx, mw, idx[me].to(device), mk)
            out.backward(dy)
            results.append([out.detach(), mx.grad, mw.grad] + ([mk.grad] if weighted else []))
        for a, b in zip(*results):
            assert torch.equal(a, b)


def test_the_memory_is_the_buffers_own_and_stale_rows_raise(world, device, gen):
    me, size = world.rank, world.size
    buf = group_of(world, zero_copy=True).buffer()
    idx, _ = routing(gen, size)
    x, w = randn(gen, size, T, H), randn(gen, E_PER_RANK, H, H)
    mx, mw = leaf(x[me], torch.float32, device), leaf(w, torch.float32, device)
    first, out = layer(buf, mx, mw, idx[me].to(device))
    second, again = layer(buf, mx, mw, idx[me].to(device))
    assert first.data_ptr() == second.data_ptr()
    # The first rows were overwritten: the gradient of the weights would be wrong.
    with pytest.raises((tilewire.Stale, RuntimeError), match="generation|modified by an inplace"):
        out.sum().backward()
    again.sum().backward()


def test_gradients_that_are_leaves_are_copies(world, device, gen):
    """The gradient of a combine comes into the buffer's memory; a leaf must not keep that."""
    me, size = world.rank, world.size
    buf = group_of(world, zero_copy=True).buffer()
    idx, _ = routing(gen, size)
    x = randn(gen, size, T, H)[me].to(device, torch.float32)
    grads = []
    for factor in (1.0, 3.0):
        recv, _, _ = tw.ep_dispatch(buf, x, idx[me].to(device))
        y = recv.detach().clone().requires_grad_()
        (tw.ep_combine(buf, y).sum() * factor).backward()
        grads.append(y.grad)
    assert grads[0].data_ptr() != grads[1].data_ptr()
    rows = buf.totals()["rows"]
    assert torch.equal(grads[0][:rows] * 3, grads[1][:rows])


def test_two_combines_in_one_graph_do_not_share_the_memory_of_a_gradient(world, device, gen):
    me, size = world.rank, world.size
    idx, _ = routing(gen, size)
    x = randn(gen, size, T, H)[me].to(device, torch.float32)
    sums = []
    for zero_copy in (True, False):
        buf = group_of(world, zero_copy=zero_copy).buffer()
        recv, _, _ = tw.ep_dispatch(buf, x, idx[me].to(device))
        y = recv.detach().clone().requires_grad_()
        out = tw.ep_combine(buf, y) * 2 + tw.ep_combine(buf, y * 3) * 5
        (first,) = torch.autograd.grad(out.sum(), y, retain_graph=True)
        kept = first.clone()
        (again,) = torch.autograd.grad(out.sum() * 2, y)
        assert torch.equal(first, kept)
        rows = buf.totals()["rows"]
        sums.append((first[:rows], again[:rows]))
    assert all(torch.equal(a, b) for a, b in zip(*sums))
    assert torch.equal(sums[0][0], torch.full_like(sums[0][0], 17.0))


@pytest.mark.parametrize("layout", ["rank_major", "flat"])
def test_other_layouts(world, device, gen, layout):
    if layout == "flat":
        with pytest.raises(tilewire.Unsupported):
            group_of(world, layout=layout, zero_copy=True).buffer()
        return
    me, size = world.rank, world.size
    idx, _ = routing(gen, size)
    x = randn(gen, size, T, H)[me].to(device, torch.float32)
    bufs = [group_of(world, layout=layout, zero_copy=z).buffer() for z in (True, False)]
    rows = [tw.ep_dispatch(b, x, idx[me].to(device))[0] for b in bufs]
    index = [b.row_index() for b in bufs]
    assert torch.equal(*index)
    used = index[0][index[0] >= 0].long()
    assert torch.equal(rows[0][used], rows[1][used])


def test_memory_of_the_callers(world, device, gen):
    me, size = world.rank, world.size
    group = group_of(world, zero_copy=True)
    idx, _ = routing(gen, size)
    x = randn(gen, size, T, H)[me].to(device, torch.float32)
    # Not at the beginning of the memory.
    mine = tw.symm_empty(group.recv_rows + 2, H)[2:].zero_()
    bufs = [group.buffer(mine), group.buffer()]
    rows = [tw.ep_dispatch(b, x, idx[me].to(device))[0] for b in bufs]
    assert rows[0].data_ptr() == mine.data_ptr()
    num = bufs[0].totals()["rows"]
    assert torch.equal(rows[0][:num], rows[1][:num]) and torch.equal(mine[:num], rows[1][:num])
    for bad in (mine[1:], mine.view(-1), torch.zeros_like(mine)):
        with pytest.raises(tilewire.InvalidArgument):
            group.buffer(bad)
    with pytest.raises(tilewire.InvalidArgument, match="require a gradient"):
        group.buffer(mine.detach().requires_grad_())
    with pytest.raises(tilewire.InvalidArgument, match="zero_copy"):
        group_of(world).buffer(mine)


def test_fewer_multiprocessors_give_the_same_bits(world, device, gen):
    me, size = world.rank, world.size
    idx, _ = routing(gen, size)
    x = randn(gen, size, T, H)[me].to(device, torch.float32)
    buf = group_of(world, zero_copy=True).buffer()
    outs = []
    for num in (None, 1, 8):
        recv, _, _ = tw.ep_dispatch(buf, x, idx[me].to(device), num_sms=num)
        outs.append(tw.ep_combine(buf, recv * 2))
    assert all(torch.equal(o, outs[0]) for o in outs)
    with pytest.raises(tilewire.InvalidArgument, match="num_sms"):
        tw.ep_dispatch(buf, x, idx[me].to(device), num_sms=0)


@pytest.mark.needs(gpu=True)
def test_captured_replays(world, device, gen):
    me, size = world.rank, world.size
    buf = group_of(world, torch.bfloat16, zero_copy=True).buffer()
    x = torch.zeros(T, H, device=device, dtype=torch.bfloat16)
    idx = routing(gen, size)[0][me].to(device)
    w = randn(gen, E_PER_RANK, H, H, dtype=torch.bfloat16).to(device, torch.bfloat16)
    layer(buf, x, w, idx)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, out = layer(buf, x, w, idx)
    other = group_of(world, torch.bfloat16).buffer()
    for _ in range(20):
        x.copy_(randn(gen, size, T, H, dtype=torch.bfloat16)[me])
        idx.copy_(routing(gen, size)[0][me])
        graph.replay()
        torch.cuda.synchronize()
        _, ref = layer(other, x, w, idx)
        assert torch.equal(out, ref)
    world.check()
