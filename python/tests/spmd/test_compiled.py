"""`torch.compile` of every family without a break, with its gradients."""

import pytest
import torch
from dense import leaf, randn
from test_frameworks import FAMILIES, families

import tilewire.torch as tw

# Its routing is in memory of ours, which no graph holds.
BROKEN = {"ep"}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", [n for n in FAMILIES if n not in BROKEN])
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
