"""Calls that skip torch's dispatcher are seen all the same by whoever watches operations."""

import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import tilewire.torch as tw


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
