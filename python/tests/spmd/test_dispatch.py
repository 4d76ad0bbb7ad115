"""Calls that skip torch's dispatcher are seen all the same by whoever watches operations."""

import contextlib
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import tilewire.torch as tw
from tilewire import _native
from tilewire.torch import _functions


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_modes_profilers_and_fake_tensors_see_operations(world, device):
    x, w = torch.ones(4, 8, device=device), torch.ones(2, 8, device=device)
    ref = tw.ag_gemm(x, w)
    with Names() as mode:
        y = tw.ag_gemm(x, w)
    assert "tilewire::ag_gemm" in mode.names and torch.equal(y, ref)
    with torch.profiler.profile() as p:
        y = tw.ag_gemm(x, w)
    assert any(e.name == "tilewire::ag_gemm" for e in p.events()) and torch.equal(y, ref)
    with FakeTensorMode() as fake:
        y = tw.ag_gemm(fake.from_tensor(x), fake.from_tensor(w))
    assert y.shape == ref.shape and isinstance(y, torch._subclasses.FakeTensor)
    y = tw.ag_gemm(x.to("meta"), w.to("meta"))
    assert y.is_meta and y.shape == ref.shape


def test_subclasses_in_lists_and_negated_views_go_through_the_dispatcher(world, device):
    class Seen(torch.Tensor):
        names = []

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.names.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    x, w = torch.ones(4, 8, device=device), torch.ones(3, 8, device=device)
    splits = torch.tensor([1, 3], device=device)
    tw.grouped_gemm(x, [w.as_subclass(Seen), w.as_subclass(Seen)], splits)
    assert any("grouped_fprop" in n for n in Seen.names)
    minus = torch._neg_view(x)
    assert bool((tw.all_reduce(minus) == -world.size).all())


def dispatched(call):
    """How often ``call`` goes through torch's dispatcher."""
    num, file = 0, torch._ops.__file__

    def seen(frame, event, arg):
        nonlocal num
        num += event == "call" and frame.f_code.co_filename == file

    sys.setprofile(seen)
    try:
        call()
    finally:
        sys.setprofile(None)
    return num


def test_nothing_else_is_called_where_nothing_watches(world, device):
    """Without the dispatcher the bits are the same."""
    x, w = torch.ones(4, 8, device=device), torch.ones(2, 8, device=device)
    assert dispatched(lambda: tw.ag_gemm(x, w)) == 0
    with Names():
        assert dispatched(lambda: tw.ag_gemm(x, w)) > 0
    x, w = torch.randn(4, 8, device=device), torch.randn(2, 8, device=device)
    args = (x, w, None, world.handle, None, None, False, None, False)
    assert torch.equal(tw.ag_gemm(x, w), torch.ops.tilewire.ag_gemm(*args))
    experts, splits = torch.randn(2, 3, 8, device=device), torch.tensor([1, 3], device=device)
    direct = tw.grouped_gemm(x, experts, splits)
    assert torch.equal(direct, torch.ops.tilewire.grouped_fprop(x, [experts], None, splits))


def products(size):
    """Each product, the x of a rank and its w in f32; x with inner dimensions, w as it lies and
    transposed."""
    for op in (tw.ag_gemm, tw.gemm_rs, tw.gemm_ar):
        for inner in ((), (3, 2)):
            for turned in (False, True):
                x = torch.randn(2 * size, *inner, 8)
                w = torch.randn(8, 5).t() if turned else torch.randn(5, 8)
                yield op, x, w


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_shortest_way_has_the_bits_of_the_dispatchers(world, device, dtype):
    """Outputs and gradients, whichever inputs need one; a mode makes calls take the other way."""
    torch.manual_seed(world.rank)
    num = 0
    for op, x, w in products(world.size):
        bias = torch.randn(5, dtype=[torch.float32, dtype][num % 2]).to(device)
        for needs in [(), (0,), (1,), (2,), (0, 1), (0, 1, 2)]:
            num += 1
            results = []
            for watched in (False, True):
                made = [x.to(device, dtype), w.to(device, dtype), bias.clone()]
                assert made[1].is_contiguous() == w.is_contiguous()
                for i in needs:
                    made[i].requires_grad_()
                given = made[2] if num % 3 or 2 in needs else None
                with Names() if watched else contextlib.nullcontext() as mode:
                    y = op(made[0], made[1], bias=given)
                assert y.shape[1:] == (*x.shape[1:-1], 5) and y.requires_grad == bool(needs)
                assert not watched or any("tilewire::" in n for n in mode.names)
                if needs:
                    dy = torch.ones_like(y) * torch.arange(5, device=device)
                    y.backward(dy)
                results.append([y.detach(), *(t.grad for t in made)])
            for a, b in zip(*results):
                assert (a is None) == (b is None)
                assert a is None or torch.equal(a, b) and a.shape == b.shape


def test_the_shortest_way_is_taken_where_nothing_else_is_asked(world, device):
    """`True` asks for a node of autograd, `None` for the way in Python."""
    x, w = torch.ones(4, 8, device=device), torch.ones(2, 8, device=device)
    parameter = torch.nn.Parameter(w)

    class Own(torch.Tensor):
        pass

    def way(x=x, w=w, bias=None):
        seen = [
            quick(world.handle, x, w, bias, None, None)
            for quick in (_native.quick_ag_gemm, _native.quick_gemm_rs, _native.quick_gemm_ar)
        ]
        kinds = {y if y is None or y is True else "tensor" for y in seen}
        assert len(kinds) == 1
        return kinds.pop()

    assert way(x, w) == "tensor" and way(x, w.t().contiguous().t()) == "tensor"
    assert way(w=parameter) is True and way(x.clone().requires_grad_()) is True
    with torch.no_grad():
        assert way(w=parameter) == "tensor"
    with Names():
        assert way() is None and way(w=parameter) is None
    with torch.profiler.profile():
        assert way() is None
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert way() is None
    with torch.autograd.forward_ad.dual_level():
        assert way() is None
    torch.func.vmap(lambda t: (assert_none(way()), t)[1])(x)
    for other in (x.as_subclass(Own), torch._neg_view(x), x.t(), x[:, ::2], x[0], x.to("meta")):
        assert way(other) is None
    for other in (w.as_subclass(Own), torch._neg_view(w), w[:, ::2], w[None], w.to("meta")):
        assert way(w=other) is None
    two = torch.ones(2, device=device)
    assert way(bias=two) == "tensor" and way(bias=two.requires_grad_()) is True
    for other in (two.half(), torch.ones(4, device=device)[::2], two.as_subclass(Own)):
        assert way(bias=other) is None


def test_quick_nodes_have_the_attributes_of_every_class(world):
    """Four of them come from a table (``node.rs``)."""
    for cls in (_functions._QuickAgGemm, _functions._QuickGemmRs, _functions._QuickGemmAr):
        assert cls.forward is cls.__dict__["forward"]
        assert cls.setup_context is torch.autograd.Function.setup_context
        assert cls.clear_saved_tensors_on_access is False
        assert cls._backward_cls._forward_cls is cls and cls.__name__.startswith("_Quick")
        assert getattr(cls, "lone \ud800 surrogate", None) is None
        with pytest.raises(AttributeError, match="nothing_of_this_name"):
            cls.nothing_of_this_name  # noqa: B018
    with pytest.raises(TypeError, match="not of the type of quick nodes"):
        _native.use_nodes([torch.autograd.Function])


def test_an_attribute_of_a_node_needs_no_dictionary(world, device):
    x, w = torch.ones(4, 8, device=device, requires_grad=True), torch.ones(2, 8, device=device)
    node = tw.ag_gemm(x, w).grad_fn
    assert node.args[0] == world.handle and node.__dict__ == {}


def assert_none(x):
    assert x is None


def test_negated_views_are_negated(world, device):
    x, w = torch.ones(4 * world.size, 8, device=device), torch.ones(2, 8, device=device)
    for op, num in ((tw.ag_gemm, 1), (tw.gemm_rs, world.size), (tw.gemm_ar, world.size)):
        for args in ((torch._neg_view(x), w), (x, torch._neg_view(w))):
            assert bool((op(*args) == -8 * num).all())
