"""Layers beside dense ones: values, gradients, state_dict, main_grad, DDP."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dense import leaf, randn

import tilewire.torch as tw


def whole(gen, n, k):
    return randn(gen, n, k), randn(gen, n)


@pytest.mark.parametrize("scatter", [True, False])
def test_a_block_of_two_layers_equals_the_dense_one(world, device, gen, scatter):
    size, me, h, inner = world.size, world.rank, 12, 8 * world.size
    m = 4 * size
    (w1, b1), (w2, b2) = whole(gen, inner, h), whole(gen, h, inner)
    x, dy = randn(gen, m, h), randn(gen, m, h)
    refs = [t.clone().requires_grad_() for t in (x, w1, b1, w2, b2)]
    ref = F.linear(F.relu(F.linear(refs[0], refs[1], refs[2])), refs[3], refs[4])
    ref.backward(dy)

    up = tw.ColumnParallelLinear(h, inner, activation="relu", group=world)
    down = tw.RowParallelLinear(inner, h, scatter=scatter, group=world)
    assert set(up.state_dict()) == {"weight", "bias"} == set(torch.nn.Linear(1, 1).state_dict())
    part = slice(8 * me, 8 * me + 8)
    up.load_state_dict({"weight": w1[part].float(), "bias": b1[part].float()})
    down.load_state_dict({"weight": w2[:, part].float(), "bias": b2.float()})
    own = slice(4 * me, 4 * me + 4) if scatter else slice(0, m)
    mx = leaf(x[4 * me : 4 * me + 4], torch.float32, device)
    y = down(up(mx))
    tol = dict(rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(y.cpu().double(), ref[own], **tol)
    y.backward(dy[own].to(y))
    if scatter:
        torch.testing.assert_close(mx.grad.cpu().double(), refs[0].grad[4 * me : 4 * me + 4], **tol)
    torch.testing.assert_close(up.weight.grad.cpu().double(), refs[1].grad[part], **tol)
    torch.testing.assert_close(up.bias.grad.cpu().double(), refs[2].grad[part], **tol)
    torch.testing.assert_close(down.weight.grad.cpu().double(), refs[3].grad[:, part], **tol)
    torch.testing.assert_close(down.bias.grad.cpu().double(), refs[4].grad, **tol)


def test_gradients_go_to_main_grad_where_there_is_one(world, device):
    layer = tw.ColumnParallelLinear(8, 4 * world.size, bias=False, group=world)
    x = torch.randn(2, 8, device=device)
    layer(x).sum().backward()
    ref = layer.weight.grad.clone()
    layer.weight.grad = None
    layer.weight.main_grad = torch.ones_like(ref)
    layer(x).sum().backward()
    assert layer.weight.grad is None and layer.weight.grad_added_to_main_grad
    torch.testing.assert_close(layer.weight.main_grad, ref + 1)

    grouped = tw.GroupedLinear(2, 8, 4, device=device)
    m = torch.tensor([1, 1], device=device)
    for p in grouped.weights():
        p.main_grad = torch.zeros_like(p)
    for _ in range(2):
        grouped(x, m).sum().backward()
    for e, p in enumerate(grouped.weights()):
        torch.testing.assert_close(p.main_grad, 2 * x[e].expand(4, 8))
        assert p.grad is None


def test_copied_saved_and_moved(world, device, tmp_path):
    layer = tw.ColumnParallelLinear(8, 4 * world.size, group=world)
    x = torch.randn(2, 8, device=device)
    again = copy.deepcopy(layer)
    torch.testing.assert_close(again(x), layer(x), rtol=0, atol=0)
    torch.save(layer.state_dict(), tmp_path / "layer")
    again.load_state_dict(torch.load(tmp_path / "layer"))
    assert again.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
    if world.size > 1:
        with pytest.raises(ValueError, match="multiple"):
            tw.ColumnParallelLinear(8, 4 * world.size + 1, group=world)


def test_under_data_parallelism(world, device):
    """Each rank a replica: DDP adds the gradients of layers that have a world of their own."""
    alone = dist.new_group([0]), *(dist.new_group([r]) for r in range(1, world.size))
    with tw.init(alone[world.rank], device=device) as solo:
        torch.manual_seed(0)
        layer = tw.ColumnParallelLinear(8, 4, group=solo)
        model = torch.nn.parallel.DistributedDataParallel(layer)
        x = torch.full((2, 8), float(world.rank), device=device)
        model(x).sum().backward()
        mean = sum(2.0 * r for r in range(world.size)) / world.size
        torch.testing.assert_close(layer.weight.grad, torch.full_like(layer.weight, mean))
