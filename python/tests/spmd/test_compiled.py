"""`torch.compile` of every family without a break, with its gradients."""

import pytest
import torch
from dense import leaf, randn
from test_frameworks import FAMILIES, families

import tilewire
import tilewire.torch as tw

@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_compiles_whole(world, device, gen, name):
    call = families(world, device, gen)[name]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    x = randn(gen, 4, 8)
    got, ref = (leaf(x, torch.float32, device) for _ in range(2))
    y, z = compiled(got), call(ref)
    assert torch.equal(y, z)
    y.square().sum().backward()
    z.square().sum().backward()
    assert ref.grad.any() and torch.equal(got.grad, ref.grad)
    with torch.no_grad():
        assert torch.equal(compiled(got), z)


def test_attention_with_all_it_takes_compiles_whole(world, device, gen):
    size, heads, d = world.size, 2, 16
    qkv, bias = randn(gen, 3, 4, heads, d), randn(gen, heads, 4 * size, 4 * size)
    sink = randn(gen, heads)
    kw = dict(window=(3, -1), scale=0.2, softcap=5.0, cu_seqlens_q=[0, 4 * size])

    def call(q, k, v, bias, sink):
        return tw.cp_attention(q, k, v, bias=bias, sink=sink, return_lse=True, **kw)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found = []
    for f in (compiled, call):
        args = [leaf(t, torch.float32, device) for t in (*qkv, bias, sink)]
        out, lse = f(*args)
        out.square().sum().backward()
        found.append([out, lse, *(a.grad for a in args)])
    for a, b in zip(*found):
        assert b.any() and torch.equal(a, b)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_of_attention_serves_documents_that_change(device, gen, backend, twice):
    counts = []

    def count(graph, args):
        counts.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, args)

    def call(q, k, v, cu):
        return tw.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu if twice else None)

    compiled = torch.compile(call, fullgraph=True, backend=count)
    x = randn(gen, 3, 24, 2, 16)
    for lens in ([0, 7, 7, 24], [0, 2, 20, 24], [0, 24, 24, 24]):
        cu = torch.tensor(lens, dtype=torch.int32, device=device)
        found = []
        for f, given in ((compiled, cu), (call, lens)):
            args = [leaf(t, torch.float32, device) for t in x]
            out = f(*args, given)
            out.square().sum().backward()
            found.append([out, *(a.grad for a in args)])
        for a, b in zip(*found):
            assert b.any() and torch.equal(a, b)
    assert len(counts) == 1


def test_a_permutation_with_weights_compiles_whole(world, device, gen):
    experts, hidden = 4, 16

    def call(x, w, idx):
        rows, row_w, splits, m = tw.permute(x, idx, w, num_experts=experts, align=4, capacity=28)
        return tw.unpermute(rows * 2, m, w), rows, row_w, splits, m

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for tokens in (12, 10, 14):
        idx = torch.randint(-1, experts, (tokens, 2), generator=gen).to(device)
        x, w = randn(gen, tokens, hidden), randn(gen, tokens, 2)
        found = []
        for f in (compiled, call):
            mx, mw = leaf(x, torch.float32, device), leaf(w, torch.float32, device)
            y, rows, row_w, splits, m = f(mx, mw, idx)
            (y.square().sum() + 3 * row_w.sum()).backward()
            again = tw.unpermute(rows.detach(), m)
            found.append([y, rows, row_w, splits, mx.grad, mw.grad, again])
            found[-1].append(torch.tensor(list(m.totals(mx).values())))
        for a, b in zip(*found):
            assert torch.equal(a, b)
        assert found[0][4].any() and found[0][5].any()


def experts(world, **kw):
    args = dict(num_experts=2 * world.size, max_tokens=16, hidden=128, top_k=2, dtype=torch.float32)
    return tw.EpGroup(world, **{**args, **kw})


def tokens_of(world, device, gen, num):
    """My tokens, their weights and their experts."""
    x = randn(gen, world.size, num, 128)[world.rank]
    w = randn(gen, world.size, num, 2).abs()[world.rank]
    idx = torch.randint(-1, 2 * world.size, (world.size, num, 2), generator=gen)[world.rank]
    return x, w, idx.to(device)


@pytest.mark.parametrize("weigh", ["combine", "rows"])
def test_layers_of_experts_compile_whole(world, device, gen, weigh):
    """Two microbatches in one buffer, and one in another: a graph keeps what each has routed."""
    group = experts(world, align=2)
    bufs = [group.buffer() for _ in range(2)]

    def layer(buf, x, w, idx):
        rows, row_w, splits = tw.ep_dispatch(buf, x, idx, w)
        y = rows * 2 + splits.sum()
        if weigh == "combine":
            return tw.ep_combine(buf, y, row_w)
        return tw.ep_combine(buf, y * row_w[:, None])

    def call(x, w, idx):
        first = layer(bufs[0], x, w, idx)
        second = layer(bufs[0], x + first, w * 2, idx.flip(0))
        return layer(bufs[1], second - x, w, idx.flip(1)) + first

    def apart(x, w, idx):
        # A buffer for each: backward passes outside of graphs need all three routings.
        own = [group.buffer() for _ in range(3)]
        first = layer(own[0], x, w, idx)
        second = layer(own[1], x + first, w * 2, idx.flip(0))
        return layer(own[2], second - x, w, idx.flip(1)) + first

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for num in (12, 10, 14):
        x, w, idx = tokens_of(world, device, gen, num)
        found = []
        for f in (compiled, apart):
            mx, mw = leaf(x, torch.float32, device), leaf(w, torch.float32, device)
            y = f(mx, mw, idx)
            y.square().sum().backward()
            found.append([y, mx.grad, mw.grad])
        for a, b in zip(*found):
            assert b.any()
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


def test_what_a_graph_has_dispatched_is_combined_outside(world, device, gen):
    group = experts(world)
    buf, other = group.buffer(), group.buffer()
    x, w, idx = tokens_of(world, device, gen, 9)
    x, w = x.float().to(device), w.float().to(device)
    dispatch = torch.compile(
        lambda x: tw.ep_dispatch(buf, x, idx, w), fullgraph=True, backend="aot_eager"
    )
    rows, row_w, splits = dispatch(x)
    want = tw.ep_dispatch(other, x, idx, w)
    for a, b in zip((rows, row_w, splits), want):
        assert torch.equal(a, b)
    assert torch.equal(tw.ep_combine(buf, rows, row_w), tw.ep_combine(other, *want[:2]))
    # The next dispatch outside of a graph is the one that counts.
    again = tw.ep_dispatch(buf, 2 * x, idx, w)
    assert torch.equal(tw.ep_combine(buf, *again[:2]), 2 * tw.ep_combine(other, *want[:2]))


@pytest.mark.parametrize("num_sms", [None, 3])
def test_a_routing_is_used_again_in_a_graph(world, device, gen, num_sms):
    """By the graph that made it, by another, and by calls outside; on few multiprocessors."""
    group = experts(world, align=2)

    def first(buf, x, w, idx):
        rows, row_w, _ = tw.ep_dispatch(buf, x, idx, w, num_sms=num_sms)
        y = tw.ep_combine(buf, rows * 3, row_w)
        again, _, splits = tw.ep_dispatch(buf.reuse(), x + y, None, num_sms=num_sms)
        return tw.ep_combine(buf, again + splits.sum())

    def second(buf, x):
        rows, _, splits = tw.ep_dispatch(buf.reuse(), x, None)
        return tw.ep_combine(buf, rows * 5 + splits.argmax() + splits.sum())

    whole = [torch.compile(f, fullgraph=True, backend="aot_eager") for f in (first, second)]
    for num in (12, 9):
        x, w, idx = tokens_of(world, device, gen, num)
        found = []
        for f, g, h in ((*whole, whole[1]), (*whole, second), (first, second, second)):
            buf = group.buffer()
            mx, mw = leaf(x, torch.float32, device), leaf(w, torch.float32, device)
            y = f(buf, mx, mw, idx)
            z = h(buf, g(buf, y))
            z.square().sum().backward()
            found.append([y, z, mx.grad, mw.grad])
            text = f"was of {num} tokens, x has {num - 1}"
            with pytest.raises(tilewire.InvalidArgument, match=text):
                second(buf, y[1:])
        for other in found[:2]:
            for a, b in zip(other, found[2]):
                assert b.any()
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


def test_routings_of_one_graph_are_used_again_in_any_order(world, device, gen):
    """Their group's graphs share a native buffer, which holds the last routing."""
    group = experts(world)
    x, _, idx = tokens_of(world, device, gen, 9)
    x, other = x.float().to(device), idx.clamp(max=0)

    def call(a, b, x):
        found = [tw.ep_dispatch(buf, x, i)[::2] for buf, i in ((a, idx), (b, other))]
        return found + [tw.ep_dispatch(buf.reuse(), x, None)[::2] for buf in (a, b)]

    bufs = [group.buffer() for _ in range(2)]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        (rows_a, a), (rows_b, b), (again_a, of_a), (again_b, of_b) = compiled(*bufs, x)
        assert torch.equal(a, of_a) and torch.equal(b, of_b) and not torch.equal(a, b)
        assert torch.equal(rows_a, again_a) and torch.equal(rows_b, again_b)
        # Outside, by what the graph has routed.
        outside = [tw.ep_dispatch(buf.reuse(), x, None)[::2] for buf in bufs[::-1]][::-1]
        for (rows, splits), want, of in zip(outside, (rows_a, rows_b), (a, b)):
            assert torch.equal(rows, want) and torch.equal(splits, of)


def test_codes_of_experts_compile_whole(world, device, gen):
    group = experts(world, dtype=torch.float8_e4m3fn, out_dtype=torch.float32)
    buf, other = group.buffer(), group.buffer()
    x, w, idx = tokens_of(world, device, gen, 11)
    x, w = x.float().to(device), w.float().to(device)

    def call(buf, x):
        rows, row_w, _ = tw.ep_dispatch(buf, tw.quantize(x, "block1x128"), idx, w)
        return rows.data.float(), rows.scales, tw.ep_combine(buf, rows.data.float(), row_w)

    compiled = torch.compile(lambda x: call(buf, x), fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(x), call(other, x)):
        assert b.any() and torch.equal(a, b)


def test_what_has_no_meaning_in_a_graph_is_refused(world, device, gen):
    group = experts(world)
    x, w, idx = tokens_of(world, device, gen, 5)
    x = x.float().to(device)
    filled, zero_copy = group.buffer(), experts(world, zero_copy=True).buffer()
    tw.ep_dispatch(filled, x, idx)
    for call, text in (
        (lambda: tw.ep_dispatch(zero_copy, x, idx), "zero_copy in a compiled"),
        (lambda: tw.ep_dispatch(filled.reuse(), x, idx), "reuse.. in a compiled graph of what"),
        (lambda: tw.ep_dispatch(filled, x, idx, async_op=True), "async_op in a compiled"),
        (lambda: tw.ep_combine(filled, x), "what a graph has dispatched"),
    ):
        with pytest.raises(Exception, match=text):
            torch.compile(call, fullgraph=True, backend="aot_eager")()


@pytest.mark.parametrize("layout", ["zigzag_per_sequence", "contiguous", "balanced"])
def test_rows_are_divided_and_put_together_in_a_graph(world, device, gen, layout):
    size = world.size

    def call(x, cu):
        mine = tw.cp_shard(x, cu_seqlens=cu, layout=layout)
        return mine, tw.cp_unshard(mine * 2, cu_seqlens=cu, layout=layout)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for n in (4, 6, 10):
        cu = [0, 2 * size * n, 4 * size * n] if layout != "contiguous" else [0, 4 * size * n]
        x = randn(gen, cu[-1], 3)
        got, ref = (leaf(x, torch.float32, device) for _ in range(2))
        for a, b in zip(compiled(got, cu), call(ref, cu)):
            assert torch.equal(a, b)
        compiled(got, cu)[1].square().sum().backward()
        call(ref, cu)[1].square().sum().backward()
        assert ref.grad.any() and torch.equal(got.grad, ref.grad)


def test_a_quantised_matrix_compiles_whole(world, device, gen):
    x = randn(gen, 256, 256).float().to(device)

    def call(x):
        q = tw.quantize(x, "block1x128")
        return q.data.float(), q.scales

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(x), call(x)):
        assert torch.equal(a, b)
