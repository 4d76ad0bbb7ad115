"""all_gather, reduce_scatter, all_reduce, all_to_all, sub-teams, and their gradients."""

import pytest
import torch
from dense import leaf, randn, rows_of

import tilewire.torch as tw


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gather_and_scatter(world, device, gen, dtype):
    size, me = world.size, world.rank
    for rows in (None, [r * 2 + 1 for r in range(size)]):
        m = 3 * size if rows is None else sum(rows)
        first, num = rows_of(m, size, rows)[me]
        x, dy = randn(gen, m, 4, 2, dtype=dtype), randn(gen, size, m, 4, 2, dtype=dtype)
        mx = leaf(x[first : first + num], dtype, device)
        y = tw.all_gather(mx, rows=rows)
        assert torch.equal(y.cpu().double(), x)
        y.backward(dy[me].to(device, dtype))
        tol = dict(rtol=2e-2, atol=2e-2) if dtype != torch.float32 else dict(rtol=1e-5, atol=1e-5)
        ref = dy.sum(0)[first : first + num]
        torch.testing.assert_close(mx.grad.cpu().double(), ref, **tol)
        for op in ("sum", "avg"):
            mx = leaf(dy[me], dtype, device)
            scale = 1 if op == "sum" else 1 / size
            z = tw.reduce_scatter(mx, op=op, rows=rows)
            torch.testing.assert_close(z.cpu().double(), ref * scale, **tol)
            z.backward(x[first : first + num].to(device, dtype))
            torch.testing.assert_close(mx.grad.cpu().double(), x * scale, **tol)


def test_all_reduce(world, device, gen):
    x, dy = randn(gen, world.size, 5, 3), randn(gen, world.size, 5, 3)
    for op in ("sum", "avg"):
        scale = 1 if op == "sum" else 1 / world.size
        mx = leaf(x[world.rank], torch.float32, device)
        y = tw.all_reduce(mx, op=op)
        torch.testing.assert_close(y.cpu().double(), x.sum(0) * scale, rtol=1e-5, atol=1e-5)
        y.backward(dy[world.rank].to(y))
        torch.testing.assert_close(mx.grad.cpu().double(), dy.sum(0) * scale, rtol=1e-5, atol=1e-5)


def test_all_to_all(world, device, gen):
    size, me = world.size, world.rank
    splits = [[(i + 2 * j) % 3 for j in range(size)] for i in range(size)]
    x = [randn(gen, sum(s), 3) for s in splits]
    mx = leaf(x[me], torch.float32, device)
    y = tw.all_to_all(mx, splits)
    parts = [x[i][sum(splits[i][:me]) : sum(splits[i][: me + 1])] for i in range(size)]
    assert torch.equal(y.cpu().double(), torch.cat(parts))
    (y * (me + 1)).sum().backward()
    ref = torch.cat([torch.full((n, 3), float(j + 1)) for j, n in enumerate(splits[me])])
    assert torch.equal(mx.grad.cpu(), ref)


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int64, torch.uint8, torch.bool, torch.float64], ids=str
)
def test_any_type_is_gathered(world, device, dtype):
    x = torch.full((2, 3), world.rank % 2, device=device).to(dtype)
    y = tw.all_gather(x)
    ref = torch.arange(world.size).repeat_interleave(2).remainder(2)[:, None].expand(-1, 3)
    assert y.dtype == dtype and torch.equal(y.cpu(), ref.to(dtype))


def test_no_rows(world, device):
    y = tw.all_gather(torch.zeros(0, 3, device=device))
    assert y.shape == (0, 3)
    x, w = torch.zeros(0, 8, device=device), torch.zeros(4, 8, device=device)
    assert tw.ag_gemm(x, w).shape == (0, 4)


def test_teams_of_a_world(world, device):
    """Two teams of every second rank; a rank that is in neither waits for nobody."""
    size, me = world.size, world.rank
    even, odd = world.team(range(0, size, 2)), world.team(range(1, size, 2)) if size > 1 else None
    assert (even is not None) == (me % 2 == 0)
    mine = even if even is not None else odd
    y = tw.all_gather(torch.full((1,), float(me), device=device), mine)
    assert y.tolist() == [float(r) for r in range(me % 2, size, 2)]
    mine.finalize()
    with pytest.raises(tw.Stale):
        tw.all_gather(torch.zeros(1, device=device), mine)


def test_plans_are_kept_and_counted(world, device):
    x, w = torch.randn(3, 8, device=device), torch.randn(4, 8, device=device)
    tw.ag_gemm(x, w)
    made = world.memory()["plans_made"]
    for rows in (3, 4, 3):  # one plan serves up to the next power of two
        tw.ag_gemm(torch.randn(rows, 8, device=device), w)
    assert world.memory()["plans_made"] == made
    tw.ag_gemm(torch.randn(5, 8, device=device), w)
    assert world.memory()["plans_made"] == made + 1
