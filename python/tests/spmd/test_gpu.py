"""What only a GPU has: graphs, streams, and memory that follows the stream's order."""

import copy

import pytest
import torch
from dense import leaf, randn

import tilewire
import tilewire.torch as tw


# The host backend has no graphs of torch.
pytestmark = pytest.mark.needs(gpu=True)


def block(x, w1, w2):
    return tw.gemm_rs(torch.relu(tw.ag_gemm(x, w1)), w2)


def operands(world, device, gen, rows=16, k=64, n=32, dtype=torch.bfloat16):
    me = world.rank
    x = randn(gen, rows * world.size, k)[rows * me : rows * me + rows]
    w1, w2 = randn(gen, world.size, n, k)[me], randn(gen, world.size, k, n)[me]
    return [leaf(t, dtype, device) for t in (x, w1, w2)]


def test_a_hundred_replays_equal_the_eager_call_bit_for_bit(world, device, gen):
    args = operands(world, device, gen)
    eager = block(*args)
    eager.sum().backward()
    grads = [a.grad.clone() for a in args]
    static = [a.detach().clone().requires_grad_() for a in args]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # warm up, as torch wants it
        block(*static).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    for a in static:
        a.grad = None
    with torch.cuda.graph(graph):
        y = block(*static)
        y.sum().backward()
    for i in range(100):
        y.zero_()
        for a in static:
            a.grad.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, eager), i
        assert all(torch.equal(a.grad, g) for a, g in zip(static, grads)), i
    world.check()


def test_a_shape_that_was_not_called_before_is_refused_in_a_capture(world, device):
    x, w = torch.zeros(7, 24, device=device), torch.zeros(4, 24, device=device)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(tilewire.NotPrepared):
        with torch.cuda.graph(graph):
            tw.ag_gemm(x, w)
    torch.cuda.synchronize()
    tw.ag_gemm(x, w)


def test_graphed_callables_over_forward_and_backward(world, device, gen):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = tw.ColumnParallelLinear(32, 32 * world.size, group=world)
            self.down = tw.RowParallelLinear(32 * world.size, 32, group=world)

        def forward(self, x):
            return self.down(torch.relu(self.up(x)))

    torch.manual_seed(world.rank)
    model = Block()
    x = torch.randn(8, 32, device=device, requires_grad=True)
    # A copy: nodes that autograd keeps for the parameters belong to the stream of their first use.
    eager = copy.deepcopy(model)
    ref = eager(x)
    ref.square().sum().backward()
    grads = [p.grad.clone() for p in eager.parameters()]
    graphed = torch.cuda.make_graphed_callables(model, (torch.zeros_like(x, requires_grad=True),))
    for _ in range(3):
        model.zero_grad()
        y = graphed(x)
        y.square().sum().backward()
        torch.testing.assert_close(y, ref, rtol=0, atol=0)
        for p, g in zip(model.parameters(), grads):
            torch.testing.assert_close(p.grad, g, rtol=1e-6, atol=1e-6)


def test_other_streams_and_memory_that_is_freed_at_once(world, device, gen):
    """Tensors of a call die before its work ran; the allocator may reuse them in stream order."""
    args = [a.detach() for a in operands(world, device, gen, rows=64, k=256, n=256)]
    ref = block(*args)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        outs = []
        for _ in range(20):
            y = block(*[a.clone() for a in args])
            torch.full((64, 256), float("nan"), device=device)
            outs.append(y)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    assert all(torch.equal(y, ref) for y in outs)


def test_peak_memory_of_a_hundred_steps_is_that_of_dense_torch_and_a_shard(world, device, gen):
    """On the same rows and weights; plans lie in symmetric memory, outside of torch's."""
    args = operands(world, device, gen, rows=256, k=512, n=512)
    rows, size = args[0].shape[0], world.size

    def dense(x, w1, w2):
        # This rank's part of the arithmetic; the sum over ranks is left out.
        y = torch.relu(x.repeat(size, 1) @ w1.t()) @ w2.t()
        return y.view(size, rows, -1).sum(0)

    def peak(f, steps):
        for a in args:
            a.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, marks = torch.cuda.memory_allocated(), []
        for i in range(steps):
            f(*args).float().square().mean().backward()
            if i in (10, steps - 1):
                torch.cuda.synchronize()
                marks.append(torch.cuda.max_memory_allocated() - before)
        assert marks[0] == marks[1], marks
        return marks[1]

    block(*args).sum().backward()
    # Gathered gradients hold this rank's rows a second time.
    assert peak(block, 100) <= peak(dense, 20) + args[0].nbytes


def test_a_graph_of_local_attention_follows_offsets_that_change(device):
    """No copy, no warning: 100 replays, each with documents of its own."""
    import random
    import warnings

    draw = random.Random(24)
    q, k, v = (
        torch.randn(600, h, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        for h in (4, 2, 2)
    )
    cu = torch.zeros(9, dtype=torch.int32, device=device)

    def step():
        out = tw.attention(q, k, v, cu_seqlens_q=cu)
        return out, torch.autograd.grad(out.float().square().sum(), (q, k, v))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, grads = step()
    for _ in range(100):
        lens = [0, *sorted(draw.randint(0, 600) for _ in range(7)), 600]
        cu.copy_(torch.tensor(lens, dtype=torch.int32))
        graph.replay()
        known = tw.attention(q, k, v, cu_seqlens_q=lens)
        ref = torch.autograd.grad(known.float().square().sum(), (q, k, v))
        for a, b in zip((out, *grads), (known, *ref)):
            assert torch.equal(a, b) and b.any()


def test_offsets_on_the_device_are_copied_once_with_a_warning_and_refused_in_a_capture(
    world, device
):
    q = torch.randn(8, 2, 32, device=device, dtype=torch.bfloat16)
    cu = torch.tensor([0, 8 * world.size], dtype=torch.int32, device=device)
    with pytest.warns(UserWarning, match="`cu_seqlens_q` lies on the GPU") as seen:
        y = tw.cp_attention(q, q, q, cu_seqlens_q=cu)
    assert len(seen) == 1 and seen[0].filename == __file__, [str(w) for w in seen]
    assert torch.equal(y, tw.cp_attention(q, q, q, cu_seqlens_q=cu.tolist()))
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(tilewire.InvalidArgument, match="a capture cannot copy it"):
        with torch.cuda.graph(graph):
            tw.cp_attention(q, q, q, cu_seqlens_q=cu)
    torch.cuda.synchronize()


@pytest.mark.needs(least_ranks=2)
def test_rows_of_another_rank_are_a_mismatch_with_check(world, device):
    import torch.distributed as dist

    group = dist.new_group(backend="gloo")
    w = tw.init(group, device=device, check=True, timeout_s=60)
    x, weight = torch.ones(4, 8, device=device), torch.ones(2, 8, device=device)
    tw.ag_gemm(x, weight, w)
    # Whoever compares first names both words; the others hear of it.
    with pytest.raises((tilewire.Mismatch, tilewire.Aborted), match="disagree"):
        tw.ag_gemm(x[: 3 + (world.rank == 0)], weight, w)
    w.finalize()
