"""Symmetric tensors: views of peers' memory, transfers, signals, and operations that use them."""

import gc

import pytest
import torch

import tilewire
import tilewire.torch as tw


def value(rank, shape, dtype=torch.float32):
    """Values that tell whose they are: exact in bf16 and FP8."""
    return (torch.arange(torch.Size(shape).numel()) % 7 + 8 * (rank % 2)).view(shape).to(dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.uint8], ids=str
)
def test_peers_read_and_write_each_other(world, device, dtype):
    size, me = world.size, world.rank
    t = tw.symm_empty(3, 5, dtype=dtype)
    assert t.shape == (3, 5) and t.dtype == dtype and t.device == world.device
    h = tw.symm_handle(t)
    assert (h.rank, h.size) == (me, size)
    t.copy_(value(me, (3, 5), dtype))
    h.barrier()
    every = h.contiguous_view()
    assert every.shape == (size, 3, 5)
    for r in range(size):
        ref = value(r, (3, 5), dtype).float()
        assert torch.equal(h.get_tensor(r).float().cpu(), ref)
        assert torch.equal(h.get(r).float().cpu(), ref)
        assert torch.equal(every[r].float().cpu(), ref)
    h.barrier()
    # To the right-hand neighbour, by plain stores of torch's.
    h.get_tensor((me + 1) % size).copy_(value(me + 1, (3, 5), dtype).to(device))
    h.barrier()
    assert torch.equal(t.float().cpu(), value((me - 1) % size + 1, (3, 5), dtype).float())
    h.barrier()


def test_a_signal_follows_what_was_put(world, device):
    """Around the ring, many times: each rank passes on what it got, one larger."""
    size, me = world.size, world.rank
    left, right = (me - 1) % size, (me + 1) % size
    inbox = tw.symm_empty(1000, dtype=torch.int32)
    credit = tw.symm_handle(tw.symm_empty(1, dtype=torch.uint8))
    h, word = tw.symm_handle(inbox), torch.zeros(1, dtype=torch.uint8, device=device)
    out = torch.full((1000,), me, dtype=torch.int32, device=device)
    for step in range(20):
        if step:
            # The right-hand neighbour has read what came before.
            credit.wait_signal(right)
        h.put_signal(out, right)
        h.wait_signal(left)
        out = inbox + 1
        credit.put_signal(word, left)
        hops = step + 1
        assert bool((out == (me - hops) % size + hops).all()), step
    credit.wait_signal(right)
    h.barrier()
    world.check()


def test_parts_of_a_symmetric_tensor(world, device):
    t = tw.symm_empty(4, 8)
    t.zero_()
    h = tw.symm_handle(t[2])
    h.barrier()
    peer = (world.rank + 1) % world.size
    h.put(torch.full((8,), 1.0 + world.rank, device=device), peer)
    h.barrier()
    left = (world.rank - 1) % world.size
    ref = torch.zeros(4, 8)
    ref[2] = 1.0 + left
    assert torch.equal(t.cpu(), ref)
    assert torch.equal(h.get_tensor(peer).cpu(), torch.full((8,), 1.0 + world.rank))
    h.barrier()


def test_operations_take_symmetric_tensors(world, device, gen):
    size, me = world.size, world.rank
    x = torch.randn(4 * size, 16, generator=gen).to(device)
    w = torch.randn(8, 16, generator=gen).to(device)
    own = tw.symm_empty(4, 16)
    own.copy_(x[4 * me : 4 * me + 4])
    assert torch.equal(tw.ag_gemm(own, w), tw.ag_gemm(x[4 * me : 4 * me + 4], w))
    y = tw.all_reduce(own)
    torch.testing.assert_close(y, x.view(size, 4, 16).sum(0), rtol=1e-5, atol=1e-5)
    # It may require gradients like any leaf.
    own.requires_grad_()
    tw.ag_gemm(own, w).sum().backward()
    ref = size * w.sum(0).expand(4, 16)
    torch.testing.assert_close(own.grad, ref, rtol=1e-4, atol=1e-4)


def test_memory_returns_when_tensors_are_gone(world, device):
    """Many times the heap's limit, through a team with a small one."""
    import torch.distributed as dist

    group = dist.new_group(backend="gloo")
    w = tw.init(group, device=device, heap_bytes=64 << 20)
    view = None
    for i in range(12):
        t = tw.symm_empty(24 << 20, dtype=torch.uint8, group=w)
        t.fill_(i)
        # A view of a peer's part keeps the memory, too.
        view = tw.symm_handle(t).get_tensor((w.rank + 1) % w.size)
        # A barrier of the world is one of the hosts: the peer's fill must have run before it.
        if device.type == "cuda":
            torch.cuda.synchronize()
        w.barrier()
        assert int(view[-1]) == i
        w.barrier()
        del t
        gc.collect()
    assert w.memory()["total_bytes"] <= 64 << 20
    with pytest.raises(tilewire.Exhausted, match="symm_empty"):
        tw.symm_empty(65 << 20, dtype=torch.uint8, group=w)
    del view
    # Finalized before its tensors: they stay readable, calls are refused.
    t = tw.symm_empty(16, group=w)
    t.fill_(3.0)
    h = tw.symm_handle(t)
    w.finalize()
    assert float(t.sum()) == 48.0
    with pytest.raises(tilewire.Stale):
        h.barrier()


def test_what_is_not_symmetric_is_refused(world, device):
    with pytest.raises(tilewire.InvalidArgument, match="not symmetric"):
        tw.symm_handle(torch.zeros(4, device=device))
    t = tw.symm_empty((4, 4))
    with pytest.raises(tilewire.InvalidArgument, match="contiguous"):
        tw.symm_handle(t.t())
    h = tw.symm_handle(t)
    with pytest.raises(tilewire.InvalidArgument, match="rank 99"):
        h.get_tensor(99)
    with pytest.raises(tilewire.InvalidArgument, match="does not fit"):
        h.put(torch.zeros(17, device=device), 0)
    with pytest.raises(tilewire.InvalidArgument, match="does not fit"):
        h.put(torch.zeros(4, device=device, dtype=torch.float64), 0)
    with pytest.raises(tilewire.InvalidArgument):
        tw.symm_empty(-1)
    with pytest.raises(TypeError, match="pickled"):
        import pickle

        pickle.dumps(h)
    world.barrier()


def test_memory_of_torch_becomes_symmetric(world, device, gen):
    """torch's own symmetric memory, used by both; experts receive there."""
    if device.type == "cpu":
        with pytest.raises(tilewire.Unsupported, match="adopt|vmm"):
            tw.symm_adopt(torch.zeros(4))
        return
    with pytest.raises(tilewire.Unsupported, match="symm_empty"):
        tw.symm_adopt(torch.zeros(4, device=device))
    import torch.distributed._symmetric_memory as torch_symm

    size, me = world.size, world.rank
    theirs = torch_symm.empty(64, 16, dtype=torch.bfloat16, device=device)
    theirs.copy_(value(me, (64, 16), torch.bfloat16))
    ours = tw.symm_adopt(theirs)
    assert torch.equal(ours, theirs) and ours.data_ptr() != theirs.data_ptr()
    h = tw.symm_handle(ours)
    h.barrier()
    for r in range(size):
        assert torch.equal(h.get_tensor(r).float().cpu(), value(r, (64, 16)))
    h.barrier()
    h.put(torch.full((16,), 5.0 + me, device=device, dtype=torch.bfloat16), (me + 1) % size)
    h.barrier()
    assert bool((theirs[0] == 5.0 + (me - 1) % size).all())
    group = tw.EpGroup(
        num_experts=size, max_tokens=8, hidden=16, top_k=1, capacity=64, zero_copy=True
    )
    idx = torch.randint(size, (size, 8, 1), generator=gen)[me].to(device)
    x = torch.randn(size, 8, 16, generator=gen)[me].to(device, torch.bfloat16)
    plain = group.buffer()
    rows, _, splits = tw.ep_dispatch(plain, x, idx)
    num = int(splits.sum())
    kept = rows[:num].clone()
    buf = group.buffer(ours)
    straight, _, _ = tw.ep_dispatch(buf, x, idx)
    torch.cuda.synchronize()
    assert torch.equal(theirs[:num], kept) and straight.data_ptr() == ours.data_ptr()
    assert torch.equal(tw.ep_combine(buf, straight * 2), x * 2)


@pytest.mark.needs(gpu=True)
def test_transfers_are_captured(world, device):
    size, me = world.size, world.rank
    t = tw.symm_empty(256, dtype=torch.float32)
    src = torch.zeros(256, device=device)
    h = tw.symm_handle(t)
    out = torch.empty_like(t)
    h.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        h.put_signal(src, (me + 1) % size)
        h.wait_signal((me - 1) % size)
        out.copy_(t)
        h.barrier()
    for step in range(50):
        src.fill_(float(1000 * step + me))
        graph.replay()
        torch.cuda.synchronize()
        assert bool((out == 1000 * step + (me - 1) % size).all()), step
    world.check()
