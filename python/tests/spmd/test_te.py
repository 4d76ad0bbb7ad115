"""``tilewire.torch.te.ep``: the cases of TransformerEngine's ``run_ep.py``, with random tokens."""

import inspect
import pickle

import pytest
import torch
import torch.distributed as dist
from dense import leaf, randn

import tilewire
import tilewire.torch as tw
from tilewire.torch import te
from tilewire.torch.te.ep import _ep_combine_raw, _ep_dispatch_raw

LOCAL, HIDDEN, TOP_K, TOKENS = 2, 32, 2, 12
BF16 = dict(rtol=5e-2, atol=5e-2)
F32 = dict(rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def ep_world(world, device):
    """A World for the process group that these tests use, as an application would have it."""
    group = dist.new_group(backend="gloo")
    with tw.init(group, device=device, timeout_s=60) as w:
        yield w


@pytest.fixture
def begin(ep_world):
    """Begins expert parallelism as a test wants it; ends it behind the test."""

    def bootstrap(**kw):
        args = dict(num_experts=LOCAL * ep_world.size, max_tokens_per_rank=TOKENS)
        args.update(hidden_dim=HIDDEN, num_topk=TOP_K, max_token_dtype=torch.float32)
        te.ep_bootstrap(ep_world, **{**args, **kw})

    yield bootstrap
    te.ep_finalize()


def capacity_of(world):
    """Rows that are enough for any routing here."""
    return world.size * TOKENS * TOP_K + LOCAL * 8


def buffer(capacity=None, dtype=torch.float32, **kw):
    return te.EpBuffer(TOP_K, TOKENS, HIDDEN, LOCAL, capacity, payload_dtype=dtype, **kw)


def identity(world, device):
    """Consecutive experts: every rank receives equally many."""
    flat = torch.arange(TOKENS * TOP_K) + world.rank * TOKENS * TOP_K
    return (flat % (LOCAL * world.size)).view(TOKENS, TOP_K).to(device)


def inputs(gen, world, device, dtype=torch.float32):
    """The same random routing and tokens of all ranks everywhere, and this rank's."""
    experts = LOCAL * world.size
    rows = world.size * TOKENS
    idx = torch.stack([torch.randperm(experts, generator=gen)[:TOP_K] for _ in range(rows)])
    idx = idx.view(world.size, TOKENS, TOP_K)
    tokens = randn(gen, world.size, TOKENS, HIDDEN, dtype=dtype)
    weights = torch.softmax(torch.randn(world.size, TOKENS, TOP_K, generator=gen), -1)
    me = world.rank
    return (idx, tokens, weights), (
        idx[me].to(device),
        tokens[me].to(device, dtype),
        weights[me].to(device),
    )


def weighted(rows, weights):
    return (rows.float() * weights[:, None]).to(rows.dtype)


def step(buf, idx, tokens, weights):
    recv, w, _ = te.ep_dispatch(buf, tokens, idx, weights)
    return te.ep_combine(buf, weighted(recv, w))


@pytest.mark.parametrize("alignment", [0, 1, 8])
@pytest.mark.parametrize("eager", [False, True])
def test_prepare_counts_what_comes(ep_world, device, gen, begin, alignment, eager):
    capacity = None if eager else capacity_of(ep_world)
    begin(recv_capacity_per_rank=capacity)
    buf = buffer(capacity, alignment=alignment)
    (idx, _, _), (mine, _, _) = inputs(gen, ep_world, device)
    for kind in (torch.int64, torch.int32):
        counts = te.ep_prepare(buf, mine.to(kind))
        first = LOCAL * ep_world.rank
        true = torch.bincount(idx.flatten(), minlength=LOCAL * ep_world.size)[first : first + LOCAL]
        step = max(alignment, 1)
        assert counts.tolist() == ((true + step - 1) // step * step).tolist()
        assert counts is buf.tokens_per_expert and counts.dtype == torch.int64
        assert buf.total_recv_tokens.tolist() == [int(counts.sum())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tokens_come_back_by_the_primitives(ep_world, device, gen, begin, dtype):
    rows = capacity_of(ep_world)
    begin(recv_capacity_per_rank=rows)
    buf = buffer(rows, dtype)
    _, (_, tokens, _) = inputs(gen, ep_world, device, dtype)
    idx, weights = identity(ep_world, device), torch.full((TOKENS, TOP_K), 1 / TOP_K, device=device)
    recv = torch.full((rows, HIDDEN), float("nan"), dtype=dtype, device=device)
    recv_w, out = torch.full((rows,), float("nan"), device=device), torch.empty_like(tokens)
    te.ep_prepare(buf, idx)
    _ep_dispatch_raw(buf, idx, tokens, weights, recv, recv_w)
    _ep_combine_raw(buf, weighted(recv, recv_w), out)
    # Two equal rows with weights of a half: no rounding.
    assert torch.equal(out, tokens)


@pytest.mark.parametrize("mode", ["static", "eager", "zero_copy"])
def test_a_layer_of_experts_equals_the_dense_one(ep_world, device, gen, begin, mode):
    capacity = None if mode == "eager" else capacity_of(ep_world)
    begin(recv_capacity_per_rank=capacity, zero_copy=mode == "zero_copy")
    (idx, x, weights), (my_idx, _, _) = inputs(gen, ep_world, device)
    w = randn(gen, LOCAL * ep_world.size, HIDDEN, HIDDEN) * 0.25
    dy = randn(gen, ep_world.size, TOKENS, HIDDEN)
    refs = [t.double().clone().requires_grad_() for t in (x, weights, w)]
    ref = (torch.einsum("rth,rtkgh->rtkg", refs[0], refs[2][idx]) * refs[1][..., None]).sum(2)
    ref.backward(dy)

    me, mine = ep_world.rank, slice(LOCAL * ep_world.rank, LOCAL * ep_world.rank + LOCAL)
    layer = te.GroupedLinear(LOCAL, HIDDEN, HIDDEN, bias=False, device=device)
    layer.load_state_dict({f"weight{e}": p.float() for e, p in enumerate(w[mine])})
    tokens, probs = leaf(x[me], torch.float32, device), leaf(weights[me], torch.float32, device)
    buf = buffer(capacity)
    recv, recv_w, splits = te.ep_dispatch(buf, tokens, my_idx, probs)
    assert te.is_symm_backed(recv) == (mode == "zero_copy")
    out = te.ep_combine(buf, weighted(layer(recv, splits), recv_w))
    tol = dict(rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.detach().cpu().double(), ref[me].detach(), **tol)
    out.backward(dy[me].to(out))
    torch.testing.assert_close(tokens.grad.cpu().double(), refs[0].grad[me], **tol)
    torch.testing.assert_close(probs.grad.cpu().double(), refs[1].grad[me], **tol)
    for e, p in enumerate(layer.parameters()):
        torch.testing.assert_close(p.grad.cpu().double(), refs[2].grad[mine][e], **tol)


@pytest.mark.parametrize("given", [False, True])
def test_gradients_of_a_dispatch(ep_world, device, gen, begin, given):
    """Of half the square of what came: each token's row went to TOP_K places."""
    rows = capacity_of(ep_world)
    begin(recv_capacity_per_rank=rows)
    buf = buffer(rows)
    _, (idx, tokens, weights) = inputs(gen, ep_world, device)
    tokens.requires_grad_()
    recv = torch.full((rows, HIDDEN), float("nan"), device=device) if given else None
    recv_w = torch.full((rows,), float("nan"), device=device) if given else None
    got, got_w, _ = te.ep_dispatch(
        buf, tokens, idx, weights, recv_tokens=recv, recv_topk_weights=recv_w
    )
    if given:
        assert got.data_ptr() == recv.data_ptr() and got_w.data_ptr() == recv_w.data_ptr()
        assert got.requires_grad and not recv.requires_grad and recv.grad_fn is None
    (0.5 * got.square().sum()).backward()
    torch.testing.assert_close(tokens.grad, TOP_K * tokens.detach(), **F32)


@pytest.mark.parametrize("eager", [False, True])
def test_gradients_of_a_combine(ep_world, device, gen, begin, eager):
    capacity = None if eager else capacity_of(ep_world)
    begin(recv_capacity_per_rank=capacity)
    buf = buffer(capacity)
    _, (_, tokens, _) = inputs(gen, ep_world, device)
    idx, weights = identity(ep_world, device), torch.full((TOKENS, TOP_K), 1 / TOP_K, device=device)
    tokens.requires_grad_()
    out = step(buf, idx, tokens, weights)
    (0.5 * out.square().sum()).backward()
    assert torch.equal(out, tokens)
    torch.testing.assert_close(tokens.grad, tokens.detach(), **F32)


@pytest.mark.parametrize("eager", [False, True])
def test_five_iterations_have_the_same_bits(ep_world, device, gen, begin, eager):
    capacity = None if eager else capacity_of(ep_world)
    begin(recv_capacity_per_rank=capacity)
    buf = buffer(capacity, torch.bfloat16)
    _, (idx, tokens, weights) = inputs(gen, ep_world, device, torch.bfloat16)
    runs = []
    for _ in range(5):
        x = tokens.clone().requires_grad_()
        out = step(buf, idx, x, weights)
        (0.5 * out.float().square().sum()).backward()
        runs.append((out.detach(), x.grad))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0]))
    assert runs[0][0].any() and runs[0][1].any()


def one_forward_one_backward(ep_world, device, gen, capture):
    """Three microbatches, F0 F1 B0 F2 B1 B2, each in a buffer of its own."""
    rows = capacity_of(ep_world)
    bufs = [buffer(rows) for _ in range(3)]
    data = [inputs(gen, ep_world, device)[1] for _ in range(3)]
    leaves = [d[1].clone().requires_grad_() for d in data]
    recv = [None] * 3

    def forward(i):
        idx, _, weights = data[i]
        recv[i] = te.ep_dispatch(bufs[i], leaves[i], idx, weights)[0]

    def backward(i):
        (0.5 * recv[i].square().sum() * (i + 1.0)).backward()

    def schedule():
        forward(0), forward(1), backward(0), forward(2), backward(1), backward(2)

    if capture:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                schedule()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            schedule()
        for x in leaves:
            x.grad.zero_()
        graph.replay()
        torch.cuda.synchronize()
    else:
        schedule()
    for i, x in enumerate(leaves):
        torch.testing.assert_close(x.grad, (i + 1.0) * TOP_K * x.detach(), **F32)


ON_A_GPU = pytest.mark.needs(gpu=True)


@pytest.mark.parametrize("capture", [False, pytest.param(True, marks=ON_A_GPU)])
def test_three_microbatches_in_1f1b(ep_world, device, gen, begin, capture):
    begin(recv_capacity_per_rank=capacity_of(ep_world))
    one_forward_one_backward(ep_world, device, gen, capture)


@ON_A_GPU
def test_a_captured_dispatch_and_combine(ep_world, device, gen, begin):
    rows = capacity_of(ep_world)
    begin(recv_capacity_per_rank=rows)
    buf = buffer(rows)
    _, (idx, tokens, weights) = inputs(gen, ep_world, device)
    recv, recv_w = torch.empty(rows, HIDDEN, device=device), torch.empty(rows, device=device)
    out = torch.empty_like(tokens)

    def run():
        _ep_dispatch_raw(buf, idx, tokens, weights, recv, recv_w)
        _ep_combine_raw(buf, weighted(recv, recv_w), out)

    te.ep_prepare(buf, idx)
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    ref = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(5):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, ref)


@ON_A_GPU
def test_an_eager_step_cannot_be_captured(ep_world, device, gen, begin):
    begin()
    buf = buffer()
    _, (idx, tokens, weights) = inputs(gen, ep_world, device)
    step(buf, idx, tokens, weights)
    torch.cuda.synchronize()
    with pytest.raises(tilewire.Unsupported, match="recv_capacity_per_rank"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            step(buf, idx, tokens, weights)
    torch.cuda.synchronize()
    step(buf, idx, tokens, weights)


@pytest.mark.parametrize("alignment", [0, 8])
def test_eager_mode_receives_as_many_rows_as_come(ep_world, device, gen, begin, alignment):
    begin()
    buf = buffer(alignment=alignment)
    assert buf.eager and buf.recv_capacity_per_rank is None
    _, (idx, tokens, weights) = inputs(gen, ep_world, device)
    recv, recv_w, splits = te.ep_dispatch(buf, tokens, idx, weights)
    total = int(buf.total_recv_tokens)
    assert buf.total_recv_tokens.device.type == "cpu" and total == int(splits.sum())
    assert recv.shape == (total, HIDDEN) and recv_w.shape == (total,)
    with pytest.raises(tilewire.InvalidArgument, match="eager"):
        te.ep_dispatch(buf, tokens, idx, weights, recv_tokens=recv)
    with pytest.raises(tilewire.InvalidArgument, match="eager"):
        te.ep_combine(buf, recv, grad_out=recv)


def test_a_rank_that_receives_nothing(ep_world, device, gen, begin):
    begin()
    buf = buffer()
    _, (_, tokens, _) = inputs(gen, ep_world, device)
    idx = torch.arange(TOP_K, device=device).repeat(TOKENS, 1)  # all of rank 0
    weights = torch.full((TOKENS, TOP_K), 1 / TOP_K, device=device)
    x = tokens.clone().requires_grad_()
    recv, recv_w, splits = te.ep_dispatch(buf, x, idx, weights)
    rows = ep_world.size * TOKENS * TOP_K if ep_world.rank == 0 else 0
    assert recv.shape == (rows, HIDDEN) and recv_w.shape == (rows,) and int(splits.sum()) == rows
    assert rows or recv.data_ptr() == 0
    out = te.ep_combine(buf, weighted(recv, recv_w), num_local_tokens=TOKENS)
    (0.5 * out.square().sum()).backward()
    torch.testing.assert_close(out.detach(), tokens, **F32)
    torch.testing.assert_close(x.grad, tokens, **F32)


def test_rows_beyond_the_capacity(ep_world, device, gen, begin):
    _, (_, tokens, weights) = inputs(gen, ep_world, device)
    idx, capacity = identity(ep_world, device), TOKENS
    begin(recv_capacity_per_rank=capacity, drop_on_overflow=True)
    buf = buffer(capacity)
    counts = te.ep_prepare(buf, idx)
    assert buf.total_recv_tokens.tolist() == [TOKENS * TOP_K] and int(counts.sum()) == capacity
    recv, recv_w, _ = te.ep_dispatch(buf, tokens, idx, weights)
    assert recv.shape == (capacity, HIDDEN) and recv_w.shape == (capacity,)
    assert recv.abs().sum(1).bool().all()
    buf.check()
    te.ep_finalize()

    begin(recv_capacity_per_rank=capacity)
    buf = buffer(capacity)
    with pytest.raises(tilewire.Exhausted, match="capacity"):
        te.ep_prepare(buf, idx)
        buf.check()


def test_gradient_buffers_are_only_written(ep_world, device, gen, begin):
    """What lies in ``grad_out`` before the backward pass is never read, and may be changed by
    anyone."""
    rows = capacity_of(ep_world)
    begin(recv_capacity_per_rank=rows)
    _, (idx, tokens, weights) = inputs(gen, ep_world, device)
    target = torch.full((rows, HIDDEN), float("nan"), device=device)
    grads = []
    for grad_out in (None, target):
        buf, x = buffer(rows), tokens.clone().requires_grad_()
        recv, recv_w, splits = te.ep_dispatch(buf, x, idx, weights)
        y = weighted(recv, recv_w)
        y.retain_grad()
        out = te.ep_combine(buf, y, grad_out=grad_out)
        if grad_out is not None:
            grad_out.fill_(float("nan"))  # autograd does not watch it
        (0.5 * out.square().sum()).backward()
        grads.append((out.detach(), y.grad, x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    assert torch.equal(target, grads[0][1]) and target[: int(splits.sum())].any()


def test_receive_buffers_that_require_gradients_are_refused(ep_world, device, gen, begin):
    rows = capacity_of(ep_world)
    begin(recv_capacity_per_rank=rows)
    buf = buffer(rows)
    _, (idx, tokens, weights) = inputs(gen, ep_world, device)
    recv = torch.zeros(rows, HIDDEN, device=device, requires_grad=True)
    recv_w = torch.zeros(rows, device=device, requires_grad=True)
    for bad in (
        lambda: te.ep_dispatch(buf, tokens, idx, weights, recv_tokens=recv),
        lambda: te.ep_dispatch(buf, tokens, idx, weights, recv_topk_weights=recv_w),
        # The result of an earlier call, in place of what was given to it:
        lambda: te.ep_dispatch(buf, tokens, idx, weights, recv_tokens=recv * 1),
    ):
        with pytest.raises(tilewire.InvalidArgument, match="require a gradient"):
            bad()
    te.ep_dispatch(buf, tokens, idx, weights, recv_tokens=recv.detach())
    with pytest.raises(tilewire.InvalidArgument, match="grad_out"):
        te.ep_combine(buf, recv.detach(), grad_out=recv)
    with pytest.raises(tilewire.InvalidArgument, match="recv_tokens"):
        te.ep_dispatch(buf, tokens, idx, weights, recv_tokens=recv.detach()[1:])


def test_a_receive_buffer_that_is_reused_too_early_is_an_error(ep_world, device, gen, begin):
    """Two microbatches in one tensor of the caller's: autograd sees that the first was
    overwritten."""
    rows = capacity_of(ep_world)
    begin(recv_capacity_per_rank=rows)
    _, (idx, tokens, weights) = inputs(gen, ep_world, device)
    recv, x = torch.zeros(rows, HIDDEN, device=device), tokens.clone().requires_grad_()
    first = te.ep_dispatch(buffer(rows), x, idx, weights, recv_tokens=recv)[0].square().sum()
    te.ep_dispatch(buffer(rows), x, idx, weights, recv_tokens=recv)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()


def test_memory_of_a_zero_copy_buffer_is_reused_by_its_next_dispatch(ep_world, device, gen, begin):
    rows = capacity_of(ep_world)
    begin(recv_capacity_per_rank=rows, zero_copy=True)
    _, (idx, tokens, weights) = inputs(gen, ep_world, device)
    x, buf = tokens.clone().requires_grad_(), buffer(rows)
    for _ in range(2):
        x.grad = None
        recv, _, splits = te.ep_dispatch(buf, x, idx, weights)
        (0.5 * recv[: int(splits.sum())].square().sum()).backward()
        torch.testing.assert_close(x.grad, TOP_K * tokens, **F32)
    first = te.ep_dispatch(buf, x, idx, weights)[0].square().sum()
    te.ep_dispatch(buf, x, idx, weights)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()


@pytest.mark.parametrize("zero_copy", [False, True])
def test_symmetric_memory_of_the_callers(ep_world, device, gen, begin, zero_copy):
    rows = capacity_of(ep_world)
    begin(recv_capacity_per_rank=rows, zero_copy=zero_copy)
    _, (idx, tokens, weights) = inputs(gen, ep_world, device)
    recv = te.symm_mem_alloc((rows, HIDDEN), torch.float32, ep_world)
    grad = te.symm_mem_alloc((rows, HIDDEN), torch.float32, ep_world, device=device, use_pool=True)
    assert te.is_symm_backed(recv) and te.is_symm_backed(grad[1:]) and not te.is_symm_backed(tokens)
    x, buf = tokens.clone().requires_grad_(), buffer(rows)
    got, w, _ = te.ep_dispatch(buf, x, idx, weights, recv_tokens=recv)
    assert got.data_ptr() == recv.data_ptr()
    out = te.ep_combine(buf, got, grad_out=grad)
    (0.5 * out.square().sum()).backward()
    torch.testing.assert_close(out.detach(), TOP_K * tokens, **F32)
    torch.testing.assert_close(x.grad, TOP_K**2 * tokens, **F32)
    assert grad.any()
    with pytest.raises(tilewire.InvalidArgument, match="device"):
        te.symm_mem_alloc((1,), torch.float32, ep_world, device="meta")
    te.release_symm_mem_pool()


def test_a_buffer_that_is_prepared_too_early_is_stale(ep_world, device, gen, begin):
    begin()
    buf = buffer()
    _, (idx, tokens, weights) = inputs(gen, ep_world, device)
    x = tokens.clone().requires_grad_()
    out = step(buf, idx, x, weights)
    te.ep_prepare(buf, idx)
    with pytest.raises(tw.Stale, match="generation"):
        out.sum().backward()
    te.ep_finalize()
    with pytest.raises(tw.Stale, match="ep_finalize"):
        step(buf, idx, x, weights)
    te.ep_finalize()


def test_fewer_tokens_than_the_most(ep_world, device, gen, begin):
    rows = capacity_of(ep_world)
    begin(recv_capacity_per_rank=rows)
    buf = buffer(rows)
    _, (idx, tokens, weights) = inputs(gen, ep_world, device)
    num = TOKENS - 1 - ep_world.rank
    x = tokens[:num].clone().requires_grad_()
    recv, _, _ = te.ep_dispatch(buf, x, idx[:num], weights[:num])
    out = te.ep_combine(buf, recv)
    assert out.shape == (TOKENS, HIDDEN) and not out[num:].any()
    torch.testing.assert_close(out[:num], TOP_K * x, **F32)
    out.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, float(TOP_K)))
    te.ep_dispatch(buf, tokens, idx, weights)
    with pytest.raises(tilewire.InvalidArgument, match="num_local_tokens"):
        te.ep_combine(buf, recv.detach(), num_local_tokens=TOKENS - 1)


def test_a_group_of_one_rank_and_of_several_forms(world, device, gen):
    """Their own refuses one rank; and it has one top_k and one alignment for a process."""
    alone = [dist.new_group([r], backend="gloo") for r in range(world.size)][world.rank]
    with tw.init(alone, device=device) as solo:
        te.ep_bootstrap(alone, 4, 8, 16, 3, max_token_dtype=torch.float32)
        assert te.is_ep_bootstrapped()
        for top_k, alignment, hidden in [(3, 0, 16), (1, 4, 8), (3, 2, 16)]:
            buf = te.EpBuffer(top_k, 8, hidden, 4, alignment=alignment, payload_dtype=torch.float32)
            idx = torch.stack([torch.randperm(4, generator=gen)[:top_k] for _ in range(8)])
            idx = idx.to(device)
            x = randn(gen, 8, hidden).float().to(device)
            recv, _, splits = te.ep_dispatch(buf, x, idx, torch.ones(8, top_k, device=device))
            assert (splits % max(alignment, 1) == 0).all()
            torch.testing.assert_close(te.ep_combine(buf, recv), top_k * x, **F32)
        te.ep_finalize()
        assert not te.is_ep_bootstrapped()
        assert tw.all_gather(torch.ones(1, device=device), solo).numel() == 1  # it was there before


def test_bootstrap_makes_a_world_and_finalize_ends_it(world, device):
    if device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("the World of a group is on the GPU if there is one")
    group = dist.new_group(backend="gloo")
    te.ep_bootstrap(group, LOCAL * world.size, TOKENS, HIDDEN, TOP_K)
    assert tw.all_gather(torch.ones(1, device=device), group).numel() == world.size
    with pytest.raises(RuntimeError, match="already"):
        te.ep_bootstrap(group, LOCAL * world.size, TOKENS, HIDDEN, TOP_K)
    te.ep_finalize()
    with pytest.raises(tw.Stale):
        tw.all_gather(torch.ones(1, device=device), group)
    with pytest.raises(RuntimeError, match="ep_bootstrap"):
        buffer()


def test_what_does_not_fit_or_has_no_counterpart(ep_world, device, gen, begin):
    rows = capacity_of(ep_world)
    for kw, error, text in [
        (dict(zero_copy=True), tilewire.InvalidArgument, "zero_copy"),
        (dict(drop_on_overflow=True), tilewire.InvalidArgument, "drop_on_overflow"),
        (dict(num_topk=0), tilewire.InvalidArgument, "num_topk"),
        (dict(max_token_dtype=torch.float8_e4m3fn), tilewire.Unsupported, "max_token_dtype"),
    ]:
        with pytest.raises(error, match=text):
            begin(**kw)
    begin(recv_capacity_per_rank=rows, max_token_dtype=torch.bfloat16)
    bf16 = torch.bfloat16
    for kw, error, text in [
        (dict(capacity=None), tilewire.InvalidArgument, "recv_capacity_per_rank"),
        (dict(capacity=rows + 1), tilewire.InvalidArgument, "recv_capacity_per_rank"),
        (dict(dtype=torch.float32), tilewire.InvalidArgument, "payload_dtype"),
        (dict(alignment=3), tilewire.InvalidArgument, "alignment"),
        (dict(device="meta"), tilewire.InvalidArgument, "device"),
        (dict(dispatch_fwd_quant_recipe=1), tilewire.Unsupported, "dispatch_fwd_quant_recipe"),
        (dict(combine_bwd_quant_recipe=1), tilewire.Unsupported, "combine_bwd_quant_recipe"),
    ]:
        with pytest.raises(error, match=text):
            buffer(**{**dict(capacity=rows, dtype=bf16), **kw})
    with pytest.raises(tilewire.InvalidArgument, match="num_local_experts"):
        te.EpBuffer(TOP_K, TOKENS, HIDDEN, LOCAL + 1, rows)
    buf = buffer(rows, bf16)
    _, (idx, tokens, weights) = inputs(gen, ep_world, device, bf16)
    with pytest.raises(TypeError, match="float32"):
        te.ep_dispatch(buf, tokens, idx, weights.double())
    with pytest.raises(tilewire.Unsupported, match="float32"):
        te.ep_dispatch(buf, tokens.float(), idx, weights)
    te.ep_prepare(buf, idx)
    for bad in (
        lambda: te.ep_dispatch(buf, tokens[:, :4], idx, weights),
        lambda: te.ep_dispatch(buf, tokens, idx[1:], weights),
        lambda: te.ep_dispatch(buf, tokens, idx.float(), weights),
        lambda: te.ep_dispatch(buf, tokens, idx, weights[:, :1]),
        lambda: te.ep_combine(buf, tokens),
    ):
        with pytest.raises(tilewire.InvalidArgument):
            bad()
    with pytest.raises(tw.Stale):
        te.ep_combine(buffer(rows, bf16), torch.zeros(rows, HIDDEN, dtype=bf16, device=device))
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(buf)


# Names and orders of TransformerEngine 2.20's `pytorch/ep.py` (main, 2026-08-22).
NAMES = {
    "EpBuffer": "top_k max_tokens_per_rank hidden_dim num_local_experts recv_capacity_per_rank"
    " alignment payload_dtype device dispatch_fwd_quant_recipe combine_bwd_quant_recipe",
    "ep_bootstrap": "ep_group num_experts max_tokens_per_rank hidden_dim num_topk"
    " recv_capacity_per_rank max_num_sms zero_copy drop_on_overflow max_token_dtype",
    "is_ep_bootstrapped": "",
    "ep_finalize": "",
    "ep_dispatch": "buffer tokens topk_idx topk_weights recv_tokens recv_topk_weights",
    "ep_combine": "buffer expert_out num_local_tokens grad_out",
    "symm_mem_alloc": "shape dtype ep_group device use_pool backend",
    "release_symm_mem_pool": "",
    "is_symm_backed": "t",
}


def test_the_names_are_transformer_engines():
    assert sorted(te.ep.__all__) == sorted(NAMES)
    for name, words in NAMES.items():
        args = list(inspect.signature(getattr(te.ep, name)).parameters)
        assert args == words.split(), name
        assert getattr(te, name) is getattr(te.ep, name)
