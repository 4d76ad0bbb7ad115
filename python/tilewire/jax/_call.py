"""Calls of the operations as JAX sees them: one primitive, lowered to one custom call.

What is asked for is a text, which XLA hands to the native side when it compiles the program; there
the plan is made. The text is equal in all processes, and has no address or number of this run in
it, so that the compilation cache keeps working.
"""

import functools
import json

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec as P

from .. import _native
from .._errors import InvalidArgument, Unsupported
from . import _world

_NAMES = {
    "float64": "f64",
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
    "float8_e8m0fnu": "e8m0",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "bool": "u8",
}

_call_p = Primitive("tilewire")
_call_p.multiple_results = True


def dtype_name(dtype, what):
    """Our name of an element type."""
    name = _NAMES.get(jnp.dtype(dtype).name)
    if name is None:
        raise InvalidArgument(
            f"`{what}` is {jnp.dtype(dtype).name}: tilewire does not know this type"
        )
    return name


def varying(x):
    """Manual axes of the mesh along which a value may differ, as far as JAX knows."""
    aval = jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)
    return kind.varying if kind is not None else getattr(aval, "vma", frozenset())


def vary(axes, *arrays):
    """The arrays, as values that may differ along ``axes`` and along each other's axes.

    Where JAX tracks that, the gradient of a value that was the same on all ranks is the sum of
    theirs, as it is for JAX's own operations. None stays None.
    """
    arrays = [None if x is None else jnp.asarray(x) for x in arrays]
    all_axes = frozenset(axes).union(*(varying(x) for x in arrays if x is not None))

    def one(x):
        missing = tuple(a for a in all_axes if a not in varying(x)) if x is not None else ()
        # The order of names in a set differs from process to process.
        return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return tuple(map(one, arrays))


def is_tracked(axes, x):
    """Whether JAX tracks along which axes values differ (``check_vma`` of shard_map); ``x`` has
    been through :func:`vary`."""
    return bool(axes) and varying(x).issuperset(axes)


def operands(named):
    return [
        {"name": n, "dtype": dtype_name(d, n), "shape": [int(s) for s in shape]}
        for n, (shape, d) in named.items()
    ]


def spec_of(op, args, rets, *, world=0, axes=(), size=1, **more):
    """The text of a call, checked: ``args`` and ``rets`` are (shape, dtype) by name."""
    spec = dict(op=op, world=world, site=0, axes=list(axes), **more)
    spec.update(args=operands(args), rets=operands(rets))
    text = json.dumps(spec, sort_keys=True)
    _native.jax_check_call(text, size)
    return text


def call(op, args, rets, *, team=None, invariant=False, **more):
    """Calls an operation.

    Args:
        args: arrays by name, which have been through :func:`vary`; those that are None are left
            out.
        rets: (shape, dtype) of each result by name.
        team: what :func:`team_of` gave; None for an operation without other ranks.
        invariant: results are the same on all ranks of the team.
        more: parts of the text.

    Returns:
        The results by name.
    """
    args = {n: x for n, x in args.items() if x is not None}
    world, axes, size = team or (None, (), 1)
    number = _world.around() if world is None else world._number
    shapes = {n: (x.shape, x.dtype) for n, x in args.items()}
    text = spec_of(op, shapes, rets, world=number, axes=axes, size=size, **more)
    out = _call_p.bind(
        *args.values(),
        op=op,
        spec=text,
        world=number,
        axes=axes,
        rets=tuple((tuple(map(int, s)), jnp.dtype(d)) for s, d in rets.values()),
        invariant=invariant,
    )
    return dict(zip(rets, out))


@_call_p.def_abstract_eval
def _abstract(*avals, rets, axes, invariant, **_):
    first = avals[0]
    outs = []
    for shape, dtype in rets:
        aval = first.update(
            shape=shape,
            dtype=dtype,
            weak_type=False,
            sharding=first.sharding.update(spec=P(*(None for _ in shape))),
        )
        kind = getattr(first, "manual_axis_type", None)
        if kind is not None and kind.varying:
            all_axes = frozenset().union(*(a.manual_axis_type.varying for a in avals))
            kind = kind.update(varying=all_axes - frozenset(axes) if invariant else all_axes)
            aval = aval.update(manual_axis_type=kind)
        outs.append(aval)
    return outs


@functools.lru_cache(maxsize=256)
def _compiled(params):
    return jax.jit(functools.partial(_call_p.bind, **dict(params)))


@_call_p.def_impl
def _eager(*args, **params):
    return _compiled(tuple(params.items()))(*args)


def _lower(ctx, *args, op, spec, world, axes, **_):
    module = ctx.module_context
    if module.lowering_parameters.for_export:
        raise Unsupported(f"tilewire.jax.{op} cannot be exported: its plan belongs to this process")
    if axes:
        _world.check_devices(world, getattr(module.axis_context, "mesh", None))
    text = dict(json.loads(spec), site=_site(module))
    rule = jax.ffi.ffi_lowering(_world._TARGET)
    return rule(ctx, *args, spec=json.dumps(text, sort_keys=True))


def _site(module):
    """Number of the call in its module: equal in all processes, whatever else each of them has
    traced."""
    attributes = module.module.operation.attributes
    from jax.interpreters.mlir import ir

    name = "tilewire.calls"
    count = ir.IntegerAttr(attributes[name]).value + 1 if name in attributes else 1
    attributes[name] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), count)
    return count


# Each call is lowered by itself, so that none shares the number of another one.
mlir.register_lowering(_call_p, _lower, cacheable=False)


def _no_vmap(args, dims, *, op, **_):
    raise Unsupported(
        f"tilewire.jax.{op} cannot be mapped by jax.vmap: it is one operation of all ranks; fold"
        " the dimension into the rows"
    )


batching.primitive_batchers[_call_p] = _no_vmap


def _no_jvp(primals, tangents, *, op, **_):
    raise Unsupported(f"tilewire.jax.{op} has no forward-mode and no second derivatives")


ad.primitive_jvps[_call_p] = _no_jvp


def mask_rows(out, rows, axes):
    """``out``, whose first rows belong to this rank, as many as ``rows`` says; zero behind them."""
    mine = jnp.asarray(rows)[jax.lax.axis_index(axes)]
    index = jnp.arange(out.shape[0]).reshape(-1, *(1 for _ in out.shape[1:]))
    return jnp.where(index < mine, out, jnp.zeros((), out.dtype))
