"""What torch does around operations: data parallelism, checkpoints, hooks, autocast, transforms."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dense import leaf, randn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import tilewire
import tilewire.torch as tw
from tilewire.torch import te

TOL = dict(rtol=1e-4, atol=1e-4)
HIDDEN, TOKENS, TOP_K = 16, 6, 2


def close(got, ref):
    torch.testing.assert_close(got.detach().cpu().double(), ref.detach(), **TOL)


# Data parallelism around tensor parallelism.


@pytest.fixture(scope="module")
def grid(world, device):
    """The ranks as replicas of tensor-parallel groups: a mesh of torch, and the World of my
    group."""
    from torch.distributed.device_mesh import init_device_mesh

    tp = max(1, world.size // 2)
    shape = (world.size // tp, tp)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicas", "tensor"))
    first = world.rank // tp * tp
    yield mesh, world.team(range(first, first + tp))


class Block(torch.nn.Module):
    """A layer of each kind that has parameters; ``grid``'s World holds parts of them."""

    def __init__(self, tensor, device):
        super().__init__()
        self.up = tw.ColumnParallelLinear(HIDDEN, 2 * HIDDEN, group=tensor, activation="gelu")
        self.down = te.Linear(
            2 * HIDDEN,
            HIDDEN,
            sequence_parallel=True,
            tp_group=tensor,
            parallel_mode="row",
            bias=False,
            device=device,
        )
        self.experts = tw.GroupedLinear(2, HIDDEN, HIDDEN, device=device)
        self.sink = torch.nn.Parameter(torch.zeros(2, device=device))
        self.tensor = tensor

    def forward(self, x):
        y = self.down(self.up(x))
        first = y.shape[0] // 2
        y = self.experts(y, torch.tensor([first, y.shape[0] - first], device=y.device))
        q = y.view(-1, 2, HIDDEN // 2)
        y = y + tw.cp_attention(q, q, q, self.tensor, sink=self.sink).reshape_as(y)
        return y


def dense_block(x, w1, b1, w2, experts, bias, sink, parts):
    """The same of the rows of all ``parts`` of a tensor-parallel group, in f64."""
    y = F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh"), w2)
    rows, outs = y.shape[0] // parts, []
    for p in range(parts):
        own = y[p * rows : p * rows + rows]
        first = rows // 2
        outs += [F.linear(own[:first], experts[0], bias[0])]
        outs += [F.linear(own[first:], experts[1], bias[1])]
    y = torch.cat(outs)
    q = y.view(len(y), 2, -1).transpose(0, 1)
    # Rows in the order of the global sequence, of which the ranks hold zigzag parts.
    chunk = rows // 2
    order = [c for p in range(parts) for c in (p, 2 * parts - 1 - p)]
    at = torch.cat([torch.arange(c * chunk, c * chunk + chunk) for c in order])
    scores = q @ q.transpose(1, 2) * q.shape[-1] ** -0.5
    seen = at[:, None] >= at[None, :]
    scores = scores.masked_fill(~seen, float("-inf"))
    scores = torch.cat((scores, sink[:, None, None].expand(-1, len(y), 1)), -1)
    probs = torch.softmax(scores, -1)[..., :-1]
    return y + (probs @ q).transpose(0, 1).reshape_as(y)


def whole_gradients(model, tensor):
    """Gradients of the whole parameters, in the order of ``dense_block``'s."""
    grads = {n: p.grad for n, p in model.named_parameters()}
    grads = {n.removeprefix("module."): g for n, g in grads.items()}
    full = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}
    # Parameters that all ranks of a tensor-parallel group have alike get what each rank's rows add.
    summed = {n: tw.all_reduce(full[n], tensor) for n in full if n.startswith(("experts", "sink"))}
    return [
        tw.all_gather(full["up.weight"], tensor),
        tw.all_gather(full["up.bias"], tensor),
        tw.all_gather(full["down.weight"].t(), tensor).t(),
        torch.stack([summed["experts.weight0"], summed["experts.weight1"]]),
        summed["experts.bias"],
        # cp_attention has added the ranks' parts already.
        summed["sink"] / tensor.size,
    ]


# gloo gathers no CUDA tensors, and NCCL takes one rank for each GPU.
FSDP2 = pytest.param("fsdp2", marks=pytest.mark.needs(gpu=False))


@pytest.mark.parametrize("way", ["ddp", FSDP2])
def test_parameters_under_data_parallelism(grid, device, gen, way):
    """Each replica has rows of its own; the gradient is the mean of theirs, as both ways define
    it."""
    mesh, tensor = grid
    replicas, tp = mesh["replicas"].size(), tensor.size
    rows = 4
    x = randn(gen, replicas, rows * tp, HIDDEN)
    dy = randn(gen, replicas, rows * tp, HIDDEN)
    shapes = [(2 * HIDDEN, HIDDEN), (2 * HIDDEN,), (HIDDEN, 2 * HIDDEN)]
    shapes += [(2, HIDDEN, HIDDEN), (2, HIDDEN), (2,)]
    refs = [(randn(gen, *s) * 0.3).requires_grad_() for s in shapes]
    ref = torch.stack([dense_block(rep, *refs, tp) for rep in x])
    (ref * dy).sum().div(replicas).backward()

    model = Block(tensor, device)
    part = slice(2 * HIDDEN // tp * tensor.rank, 2 * HIDDEN // tp * (tensor.rank + 1))
    w1, b1, w2, experts, bias, sink = (r.detach().float().to(device) for r in refs)
    model.load_state_dict(
        {
            "up.weight": w1[part],
            "up.bias": b1[part],
            "down.weight": w2[:, part],
            "experts.weight0": experts[0],
            "experts.weight1": experts[1],
            "experts.bias": bias,
            "sink": sink,
        }
    )
    if way == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(model, process_group=mesh["replicas"].get_group())
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in (model.up, model.down, model.experts):
            fully_shard(layer, mesh=mesh["replicas"])
        fully_shard(model, mesh=mesh["replicas"])
    me = mesh["replicas"].get_local_rank()
    own = slice(rows * tensor.rank, rows * tensor.rank + rows)
    for _ in range(2):
        model.zero_grad()
        y = model(x[me, own].float().to(device))
        close(y, ref[me, own])
        (y * dy[me, own].to(y)).sum().backward()
        for got, r in zip(whole_gradients(model, tensor), refs):
            close(got, r.grad)


# Activation checkpoints.


def moe(world, device, gen, ours):
    """A layer of experts: of ``tilewire.torch``, or with TransformerEngine's names."""
    experts = 2 * world.size
    idx = torch.stack([torch.randperm(experts, generator=gen)[:TOP_K] for _ in range(TOKENS)])
    idx = idx.to(device)
    layer = te.GroupedLinear(2, HIDDEN, HIDDEN, device=device)
    f32 = torch.float32
    if ours:
        group = tw.EpGroup(
            world, num_experts=experts, max_tokens=TOKENS, hidden=HIDDEN, top_k=TOP_K, dtype=f32
        )
        buf = group.buffer()
    else:
        rows = world.size * TOKENS * TOP_K
        te.ep_bootstrap(world, experts, TOKENS, HIDDEN, TOP_K, rows, max_token_dtype=f32)
        buf = te.EpBuffer(TOP_K, TOKENS, HIDDEN, 2, rows, payload_dtype=f32)

    def run(x, weights):
        if ours:
            recv, w, splits = tw.ep_dispatch(buf, x, idx, weights)
            return tw.ep_combine(buf, layer(recv, splits), w)
        recv, w, splits = te.ep_dispatch(buf, x, idx, weights)
        return te.ep_combine(buf, layer(recv, splits) * w[:, None])

    return run, layer, buf


@contextlib.contextmanager
def ended():
    try:
        yield
    finally:
        te.ep_finalize()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("ours", [True, False], ids=["tw", "te"])
def test_a_layer_of_experts_that_is_recomputed(world, device, gen, ours, reentrant):
    with ended():
        run, layer, _ = moe(world, device, gen, ours)
        x, w = randn(gen, TOKENS, HIDDEN), randn(gen, TOKENS, TOP_K)
        results = []
        for recompute in (False, True, True):
            layer.zero_grad()
            mx, mw = leaf(x, torch.float32, device), leaf(w, torch.float32, device)
            if recompute:
                out = checkpoint(run, mx, mw, use_reentrant=reentrant)
            else:
                out = run(mx, mw)
            out.square().sum().backward()
            grads = [mx.grad, mw.grad, *(p.grad for p in layer.parameters())]
            results.append([out.detach(), *(g.clone() for g in grads)])
        for again in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], again))


@pytest.mark.needs(most_ranks=1)  # each rank compiles the same
@pytest.mark.parametrize("ours", [True, False], ids=["tw", "te"])
def test_a_layer_of_experts_in_compiled_code(world, device, gen, ours):
    """The compiler cannot see a buffer's routing: it breaks its graph there, and gives the same."""
    with ended():
        run, layer, _ = moe(world, device, gen, ours)
        x, w = randn(gen, TOKENS, HIDDEN), randn(gen, TOKENS, TOP_K)
        results = []
        for call in (run, torch.compile(run, backend="eager")):
            layer.zero_grad()
            mx, mw = leaf(x, torch.float32, device), leaf(w, torch.float32, device)
            out = call(mx, mw)
            out.square().sum().backward()
            grads = [mx.grad, mw.grad, *(p.grad for p in layer.parameters())]
            results.append([out.detach(), *(g.clone() for g in grads)])
        assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("local", [True, False])
def test_attention_that_is_recomputed(world, device, gen, local, reentrant):
    q, k, v = (randn(gen, 4, 2, 8) for _ in range(3))
    kw = dict(dropout_p=0.3, seed=5)

    def run(q, k, v):
        return tw.attention(q, k, v, **kw) if local else tw.cp_attention(q, k, v, world, **kw)

    results = []
    for recompute in (False, True):
        args = [leaf(t, torch.float32, device) for t in (q, k, v)]
        out = checkpoint(run, *args, use_reentrant=reentrant) if recompute else run(*args)
        out.square().sum().backward()
        results.append([out.detach(), *(a.grad for a in args)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_any_subset_of_what_a_dispatch_gives_in_the_loss(world, device, gen):
    with ended():
        _, _, buf = moe(world, device, gen, False)
        experts = 2 * world.size
        idx = torch.stack([torch.randperm(experts, generator=gen)[:TOP_K] for _ in range(TOKENS)])
        x, w = randn(gen, TOKENS, HIDDEN), randn(gen, TOKENS, TOP_K)
        for use_rows, use_weights in [(True, False), (False, True), (True, True)]:
            mx, mw = leaf(x, torch.float32, device), leaf(w, torch.float32, device)
            rows, weights, _ = te.ep_dispatch(buf, mx, idx.to(device), mw)
            loss = rows.sum() if use_rows else 0.0
            (loss + weights.sum() if use_weights else loss).backward()
            zero = torch.zeros(1, device=device)
            want_x = torch.full_like(mx, float(TOP_K)) if use_rows else zero
            want_w = torch.ones_like(mw) if use_weights else zero
            for got, want in ((mx.grad, want_x), (mw.grad, want_w)):
                got = zero if got is None else got
                torch.testing.assert_close(got, want.expand_as(got))


def test_routings_of_te_are_not_seen_by_hooks_of_saved_tensors(world, device, gen):
    """Offloading packs what autograd saves: values and numbers of generations, never a routing."""
    with ended():
        run, _, _ = moe(world, device, gen, False)
        x = leaf(randn(gen, TOKENS, HIDDEN), torch.float32, device)
        w = leaf(randn(gen, TOKENS, TOP_K), torch.float32, device)
        run(x, w).sum().backward()
        refs, seen = (x.grad.clone(), w.grad.clone()), []
        x.grad = w.grad = None

        def pack(t):
            seen.append(t)
            return t.device, t.cpu()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda p: p[1].to(p[0])):
            out = run(x, w)
        out.sum().backward()
        assert seen and all(t.dtype != torch.uint8 for t in seen)
        # The splits of the experts' products are values, too.
        numbers = [t for t in seen if not t.is_floating_point()]
        assert all(t.dtype == torch.int64 and t.numel() <= 2 for t in numbers)
        assert torch.equal(x.grad, refs[0]) and torch.equal(w.grad, refs[1])


# Checkpoints on disk.


def test_state_dicts_of_nn_linear_both_ways(world, device):
    """With one rank a layer holds all of it; with more, parts that lie one behind the other."""
    size, me = world.size, world.rank
    whole = torch.nn.Linear(8, 4 * size, device=device)
    for p in whole.parameters():
        torch.manual_seed(3)
        torch.nn.init.normal_(p)
    part = slice(4 * me, 4 * me + 4)
    ours = tw.ColumnParallelLinear(8, 4 * size, group=world)
    ours.load_state_dict({n: t[part] for n, t in whole.state_dict().items()})
    again = torch.nn.Linear(8, 4 * size, device=device)
    again.load_state_dict({n: tw.all_gather(t) for n, t in ours.state_dict().items()})
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), whole.parameters()))
    row = tw.RowParallelLinear(8 * size, 4, group=world)
    plain = torch.nn.Linear(8, 4, device=device)
    plain.load_state_dict(row.state_dict())
    row.load_state_dict(plain.state_dict())


# What autograd does with the nodes.


def families(world, device, gen):
    """A differentiable call of each family of operations, and what it takes."""
    size = world.size
    group = tw.EpGroup(
        world, num_experts=size, max_tokens=4, hidden=8, top_k=1, dtype=torch.float32
    )
    idx = torch.arange(4, device=device).view(4, 1) % size
    m = torch.tensor([1, 3], device=device)
    w = leaf(randn(gen, 4, 8), torch.float32, device)
    w2 = leaf(randn(gen, 2, 4, 8), torch.float32, device)
    splits = [[4 if i == j else 0 for j in range(size)] for i in range(size)]

    def experts(x):
        buf = group.buffer()
        return tw.ep_combine(buf, tw.ep_dispatch(buf, x, idx)[0])

    def permuted(x):
        rows, _, _, row_map = tw.permute(x, idx, num_experts=size)
        return tw.unpermute(rows, row_map)

    def heads(x):
        return x if x.dim() == 3 else x.unsqueeze(1)

    return {
        "ag_gemm": lambda x: tw.ag_gemm(x, w),
        "gemm_rs": lambda x: tw.gemm_rs(x.repeat(size, 1), w),
        "gemm_ar": lambda x: tw.gemm_ar(x, w),
        "all_gather": tw.all_gather,
        "reduce_scatter": lambda x: tw.reduce_scatter(x.repeat(size, 1)),
        "all_reduce": tw.all_reduce,
        "all_to_all": lambda x: tw.all_to_all(x, splits),
        "grouped_gemm": lambda x: tw.grouped_gemm(x, w2, m),
        "ep": experts,
        "permute": permuted,
        "attention": lambda x: tw.attention(heads(x), heads(x), heads(x)),
        "cp_attention": lambda x: tw.cp_attention(heads(x), heads(x), heads(x)),
    }


FAMILIES = [
    "ag_gemm",
    "gemm_rs",
    "gemm_ar",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "grouped_gemm",
    "ep",
    "permute",
    "attention",
    "cp_attention",
]


@pytest.mark.parametrize("name", FAMILIES)
def test_two_backwards_over_a_graph_that_is_retained(world, device, gen, name):
    call = families(world, device, gen)[name]
    x = leaf(randn(gen, 4, 8), torch.float32, device)
    loss = call(x).square().sum()
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    assert once.any() and torch.equal(x.grad, 2 * once)


@pytest.mark.parametrize("name", FAMILIES)
def test_autocast_of_every_family(world, device, gen, name):
    """Products and attention take its type; what only moves or adds rows leaves them as they
    are."""
    call = families(world, device, gen)[name]
    x = leaf(randn(gen, 4, 8, dtype=torch.bfloat16), torch.float32, device)
    ref = call(x)
    (ref.square().sum()).backward()
    grad = x.grad.clone()
    x.grad = None
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = call(x)
    casts = "gemm" in name or "attention" in name
    assert y.dtype == (torch.bfloat16 if casts else torch.float32)
    share = 3e-2 if casts else 0.0
    torch.testing.assert_close(y.float(), ref, rtol=0, atol=share * ref.abs().max().item())
    y.float().square().sum().backward()
    assert x.grad.dtype == torch.float32
    torch.testing.assert_close(x.grad, grad, rtol=0, atol=share * grad.abs().max().item())


@pytest.mark.parametrize("name", FAMILIES)
def test_second_derivatives_are_refused_by_every_family(world, device, gen, name):
    call = families(world, device, gen)[name]
    x = leaf(randn(gen, 4, 8), torch.float32, device)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(call(x).square().sum(), x, create_graph=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_transforms_are_refused_by_name(world, device, gen, name):
    """Of torch.func: jvp would lose the tangent, vmap would call once for each entry of the
    batch."""
    call = families(world, device, gen)[name]
    x = randn(gen, 4, 8).float().to(device)
    batch, ones = torch.stack((x, x)), torch.ones_like(x)
    word = {"grouped_gemm": "grouped", "cp_attention": "attention"}.get(name, name)
    for transform in (
        lambda: torch.func.vmap(call)(batch),
        lambda: torch.func.vmap(call)(batch.clone().requires_grad_()),
        lambda: torch.func.grad(lambda t: call(t).sum())(x),
        lambda: torch.func.vjp(call, x),
        lambda: torch.func.jvp(call, (x,), (ones,)),
        lambda: torch.func.jacrev(call)(x),
    ):
        with pytest.raises(tilewire.Unsupported, match=f"tilewire.*{word}"):
            transform()
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="tilewire"):
            call(forward_ad.make_dual(x, ones))
    call(x)


@pytest.mark.parametrize("name", FAMILIES)
def test_dtensors_are_refused_by_name(world, device, gen, name):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    call = families(world, device, gen)[name]
    mesh = init_device_mesh(device.type, (world.size,))
    word = {"grouped_gemm": "grouped", "cp_attention": "attention"}.get(name, name)
    for needs in (False, True):
        local = randn(gen, 4, 8).float().to(device).requires_grad_(needs)
        # Replicated: torch's collectives over gloo end the process on tensors of a GPU (2.11).
        x = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
        x = x.view(-1, 1, 8) if "attention" in name else x
        with pytest.raises((NotImplementedError, RuntimeError), match=f"tilewire.*{word}"):
            call(x)
