"""The classes of nodes of autograd: operations with a backward pass."""

import torch

from .. import _native


class Differentiable(torch.autograd.Function):
    """An operation with a backward pass."""

    def __init_subclass__(cls, **kw):
        super().__init_subclass__(**kw)
        # `apply` without its Python part, which binds defaults and looks for transforms of
        # torch.func: ours have none and meet none (`_needs_grad`). A third of the cost.
        cls._apply = super(torch.autograd.Function, cls).apply
        # torch looks these up in each call, without a cache: here they are in the class itself.
        for name in ("setup_context", "clear_saved_tensors_on_access"):
            if hasattr(cls, name):
                setattr(cls, name, getattr(cls, name))

    @classmethod
    def run(cls, *args):
        """``apply``, as fast as it goes."""
        return (cls.apply if torch.compiler.is_compiling() else cls._apply)(*args)


class QuickType(_native.node_type(type(torch.autograd.Function))):  # type: ignore[misc]
    """The type of classes that `apply` reads fast, with a place for `args` in their nodes, which
    spares each a dictionary."""

    def __init__(cls, name, bases, attrs):
        super().__init__(name, bases, attrs)
        own = {"_forward_cls": cls, "__slots__": ("args",)}
        cls._backward_cls = type(cls._backward_cls.__name__, (cls._backward_cls,), own)
