"""Expert parallelism with gradients, beside dense torch on all tokens."""

import copy

import pytest
import torch
from dense import leaf, randn

import tilewire
import tilewire.torch as tw

E_PER_RANK, H, K, T = 3, 16, 2, 10
TOL = {
    torch.float32: dict(rtol=1e-4, atol=1e-4),
    torch.bfloat16: dict(rtol=6e-2, atol=1e-1),
    torch.float16: dict(rtol=2e-2, atol=2e-2),
}


def routing(gen, size, tokens=T, experts=None):
    experts = experts or E_PER_RANK * size
    idx = torch.stack([torch.randperm(experts, generator=gen)[:K] for _ in range(size * tokens)])
    w = torch.softmax(torch.randn(size * tokens, K, generator=gen), 1)
    return idx.view(size, tokens, K), w.view(size, tokens, K)


def group_of(world, dtype=torch.float32, **kw):
    args = dict(num_experts=E_PER_RANK * world.size, max_tokens=T, hidden=H, top_k=K, dtype=dtype)
    return tw.EpGroup(world, **{**args, **kw})


def dense_moe(x, w, idx, weights):
    """x [ranks, tokens, H], w [experts, H, H]."""
    rows = torch.einsum("rth,rtkgh->rtkg", x, w[idx])
    return (rows * weights[..., None]).sum(2)


@pytest.mark.parametrize("dtype", list(TOL), ids=str)
@pytest.mark.parametrize("align", [1, 4])
@pytest.mark.parametrize("weigh", ["combine", "rows"])
def test_a_layer_of_experts_and_its_gradients(world, device, gen, dtype, align, weigh):
    size, me = world.size, world.rank
    idx, weights = routing(gen, size)
    x, dy = randn(gen, size, T, H, dtype=dtype), randn(gen, size, T, H, dtype=dtype)
    w = randn(gen, E_PER_RANK * size, H, H, dtype=dtype) * 0.25
    refs = [t.double().clone().requires_grad_() for t in (x, w, weights)]
    ref = dense_moe(refs[0], refs[1], idx, refs[2])
    ref.backward(dy)

    buf = group_of(world, dtype, align=align).buffer()
    local = slice(me * E_PER_RANK, (me + 1) * E_PER_RANK)
    mx, mw = leaf(x[me], dtype, device), leaf(w[local], dtype, device)
    mk = leaf(weights[me], torch.float32, device)
    recv, recv_w, splits = tw.ep_dispatch(buf, mx, idx[me].to(device), mk)
    assert not splits.requires_grad and int(splits.sum()) % align == 0
    y = tw.grouped_gemm(recv, mw, splits)
    if weigh == "combine":
        out = tw.ep_combine(buf, y, recv_w)
    else:
        out = tw.ep_combine(buf, (y.float() * recv_w[:, None]).to(dtype))
    torch.testing.assert_close(out.cpu().double(), ref[me], **TOL[dtype])
    out.backward(dy[me].to(out))
    torch.testing.assert_close(mx.grad.cpu().double(), refs[0].grad[me], **TOL[dtype])
    torch.testing.assert_close(mw.grad.cpu().double(), refs[1].grad[local], **TOL[dtype])
    torch.testing.assert_close(mk.grad.cpu().double(), refs[2].grad[me], **TOL[dtype])
    counts = torch.bincount(idx.flatten(), minlength=E_PER_RANK * size)[local]
    assert buf.totals()["counts"] == counts.tolist()


def test_any_subset_of_the_outputs_in_the_loss(world, device, gen):
    idx, weights = routing(gen, world.size)
    group = group_of(world)
    for use_rows, use_weights in [(True, False), (False, True)]:
        buf = group.buffer()
        x = leaf(randn(gen, T, H), torch.float32, device)
        w = leaf(weights[world.rank], torch.float32, device)
        recv, recv_w, _ = tw.ep_dispatch(buf, x, idx[world.rank].to(device), w)
        loss = recv.sum() if use_rows else recv_w.sum()
        loss.backward()
        # Each token goes to each rank at most once in a row, and once for each choice here.
        if use_rows:
            torch.testing.assert_close(x.grad, torch.full_like(x, float(K)))
            assert w.grad is None or not w.grad.any()
        else:
            torch.testing.assert_close(w.grad, torch.ones_like(w))
            assert not x.grad.any()


def test_three_microbatches_in_flight_and_a_stale_one(world, device, gen):
    """1F1B: forward 0 1 2, backward 0, forward 3 in the buffer of 0, backward 1 2 3."""
    group, size, me = group_of(world), world.size, world.rank
    bufs = [group.buffer() for _ in range(3)]
    runs = []

    def forward(i, buf):
        idx, weights = routing(gen, size)
        x = randn(gen, size, T, H)
        mx = leaf(x[me], torch.float32, device)
        recv, w, _ = tw.ep_dispatch(buf, mx, idx[me].to(device), weights[me].to(device))
        runs.append((mx, tw.ep_combine(buf, recv * (i + 1.0), w), weights))

    def backward(i):
        mx, out, weights = runs[i]
        out.sum().backward()
        ref = (i + 1.0) * weights[me].sum(1)[:, None].expand(-1, H)
        torch.testing.assert_close(mx.grad.cpu(), ref, rtol=1e-4, atol=1e-4)

    for i in range(3):
        forward(i, bufs[i])
    backward(0)
    forward(3, bufs[0])
    for i in (1, 2, 3):
        backward(i)
    forward(4, bufs[1])
    forward(5, bufs[1])
    with pytest.raises(tw.Stale, match="generation"):
        runs[4][1].sum().backward()
    backward(5)


def test_the_last_routing_again(world, device, gen):
    idx, _ = routing(gen, world.size)
    buf = group_of(world).buffer()
    with pytest.raises(tw.Stale):
        buf.reuse()
    x = randn(gen, T, H).float().to(device)
    first = tw.ep_dispatch(buf, x, idx[world.rank].to(device))
    again = tw.ep_dispatch(buf.reuse(), 2 * x, None)
    n = int(first[2].sum())
    torch.testing.assert_close(again[0][:n], 2 * first[0][:n], rtol=0, atol=0)
    torch.testing.assert_close(tw.ep_combine(buf, again[0]), 2 * K * x)


def test_a_refused_dispatch_changes_nothing_that_counts(world, device, gen):
    """What was asked for by `reuse` is forgotten, and what belongs to an older routing is stale."""
    me, size = world.rank, world.size
    idx, w = routing(gen, size)
    other, _ = routing(gen, size)
    idx, other, w = (t[me].to(device) for t in (idx, other, w))
    buf = group_of(world).buffer()
    x = randn(gen, size, T, H)[me].to(device, torch.float32).requires_grad_()
    tw.ep_dispatch(buf, x, idx)
    for bad in (
        lambda: tw.ep_dispatch(buf.reuse(), x[:, :3], idx),
        lambda: tw.ep_dispatch(buf.reuse(), x[:4], None),
        lambda: tw.ep_dispatch(buf, x, idx, w.bfloat16()),
        lambda: tw.ep_dispatch(buf, x, idx, w[:, :1]),
    ):
        with pytest.raises(tilewire.InvalidArgument):
            bad()
    _, _, splits = tw.ep_dispatch(buf, x, other)
    fresh = group_of(world).buffer()
    assert torch.equal(splits, tw.ep_dispatch(fresh, x, other)[2])
    recv, _, _ = tw.ep_dispatch(buf.reuse(), x, None)
    tw.ep_combine(buf, recv).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, float(w.shape[1])))
    world.check()


@pytest.mark.parametrize("layout", ["rank_major", "flat"])
def test_a_row_for_each_token_and_rank(world, device, gen, layout):
    idx, weights = routing(gen, world.size)
    buf = group_of(world, layout=layout).buffer()
    x = leaf(randn(gen, T, H), torch.float32, device)
    w = weights[world.rank].to(device)
    recv, recv_w, splits = tw.ep_dispatch(buf, x, idx[world.rank].to(device), w)
    index = buf.row_index()
    rows = torch.where(index[:, None] >= 0, recv[index.clamp(min=0).long()], 0.0)
    out = tw.ep_combine(buf, rows, recv_w)
    torch.testing.assert_close(out, x * w.sum(1, keepdim=True), rtol=1e-4, atol=1e-4)
    out.sum().backward()
    torch.testing.assert_close(x.grad, w.sum(1, keepdim=True).expand(-1, H), rtol=1e-4, atol=1e-4)


def test_what_exceeds_the_capacity(world, device, gen):
    size = world.size
    idx = torch.zeros(T, K, dtype=torch.int64, device=device)
    idx[:, 1] = 1
    x = torch.ones(T, H, device=device)
    buf = group_of(world, capacity=4).buffer()
    recv, _, splits = tw.ep_dispatch(buf, x, idx)
    assert int(splits.sum()) <= 4
    totals = buf.totals()
    assert sum(totals["dropped"]) == 2 * T * size - 4
    strict = group_of(world, capacity=4, overflow="error").buffer()
    with pytest.raises(tilewire.Exhausted):
        tw.ep_dispatch(strict, x, idx)
        strict.totals()


def test_beside_the_stream_and_no_tokens(world, device, gen):
    buf = group_of(world).buffer()
    tokens = 0 if world.rank == 0 else T
    idx, _ = routing(gen, world.size)
    x = leaf(randn(gen, T, H)[:tokens], torch.float32, device)
    pending = tw.ep_dispatch(buf, x, idx[world.rank][:tokens].to(device), async_op=True)
    shared = x * 3.0
    recv, _, _ = pending.wait()
    out = tw.ep_combine(buf, recv, async_op=True).wait() + shared
    torch.testing.assert_close(out, (K + 3.0) * x)
    out.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, K + 3.0))


def test_masked_choices(world, device):
    buf = group_of(world).buffer()
    idx = torch.full((T, K), -1, device=device)
    idx[0, 0] = 0
    x = torch.ones(T, H, device=device)
    recv, _, splits = tw.ep_dispatch(buf, x, idx)
    assert int(splits.sum()) == (world.size if world.rank == 0 else 0)
    out = tw.ep_combine(buf, recv)
    assert torch.equal(out[0], x[0]) and not out[1:].any()


def test_what_does_not_fit_is_refused(world, device):
    group = group_of(world)
    buf = group.buffer()
    x, idx = torch.ones(T, H, device=device), torch.zeros(T, K, dtype=torch.int64, device=device)
    for bad in (
        lambda: tw.ep_dispatch(buf, x[:, :4], idx),
        lambda: tw.ep_dispatch(buf, x.double(), idx),
        lambda: tw.ep_dispatch(buf, x, idx[:4]),
        lambda: tw.ep_dispatch(buf, x, idx.float()),
        lambda: tw.ep_dispatch(buf, x, idx, torch.ones(T, K + 1, device=device)),
        lambda: tw.ep_dispatch(buf, torch.ones(T + 1, H, device=device), idx.new_zeros(T + 1, K)),
        lambda: group_of(world, layout="spiral"),
        lambda: group_of(world, top_k=0),
        lambda: group_of(world, dtype=torch.int32),
    ):
        with pytest.raises(tilewire.InvalidArgument):
            bad()
    with pytest.raises(tw.Stale):
        tw.ep_combine(group.buffer(), torch.zeros(group.capacity, H, device=device))
    with pytest.raises(TypeError):
        copy.copy(buf)


def test_handles_are_not_seen_by_hooks_of_saved_tensors(world, device, gen):
    """Offloading packs what autograd saves: values only, never a routing."""
    idx, weights = routing(gen, world.size)
    seen = []

    def pack(t):
        seen.append(t)
        return t.cpu()

    buf = group_of(world).buffer()
    x = leaf(randn(gen, T, H), torch.float32, device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.to(device)):
        mine = (idx[world.rank].to(device), weights[world.rank].to(device))
        recv, w, _ = tw.ep_dispatch(buf, x, *mine)
        out = tw.ep_combine(buf, recv, w)
    out.sum().backward()
    # And the number of a generation, which a checkpoint must be able to replace.
    assert seen and all(t.is_floating_point() or t.dim() == 0 for t in seen)
    ref = weights[world.rank].sum(1)[:, None].expand(-1, H)
    torch.testing.assert_close(x.grad.cpu(), ref, rtol=1e-4, atol=1e-4)
