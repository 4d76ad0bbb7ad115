"""tilewire for JAX: communication hidden behind arithmetic, with gradients.

::

    import jax
    import tilewire.jax as tw

    mesh = jax.sharding.Mesh(jax.devices(), ("tp",))
    tw.init(mesh)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P("tp"), P("tp")), out_specs=P(None, "tp"))
    def column_parallel(x, w):
        return tw.ag_gemm(x, w, "tp")  # all_gather(x) @ w.T, overlapped

Operations are called under ``jax.shard_map`` over the mesh of a world, with all axes manual, and
name an axis, as ``jax.lax``'s collectives do. Arrays are positional, then the axis; everything else
is by keyword. ``grouped_gemm``, ``attention``, ``permute``, ``unpermute`` and ``quantize`` are
local: they need no world, and may be called anywhere.

The plan of a call is made when its program is compiled, together by all processes: all of them
compile the same programs in the same order. Shapes and types that do not fit raise
:class:`tilewire.InvalidArgument` when the call is traced. What goes wrong in a program that runs
comes through XLA as an exception of JAX's with our text; :func:`check` raises it as it is.

There are no forward-mode derivatives, no second derivatives but those of the collectives, and no
``jax.vmap``, and programs cannot be exported: all of these raise :class:`tilewire.Unsupported`. A
:class:`QTensor`, and what is computed from it, has no gradient.
"""

from .._errors import Stale
from ._attention import attention, cp_attention, cp_shard, cp_unshard
from ._ep import EpBuffer, EpGroup, EpHandle, ep_combine, ep_dispatch
from ._grouped import grouped_gemm
from ._ops import (
    ag_gemm,
    all_gather,
    all_reduce,
    all_to_all,
    gemm_ar,
    gemm_rs,
    reduce_scatter,
)
from ._permute import RowMap, permute, unpermute
from ._quant import QTensor, quantize
from ._world import World, check, init

__all__ = [
    "EpBuffer",
    "EpGroup",
    "EpHandle",
    "QTensor",
    "RowMap",
    "Stale",
    "World",
    "ag_gemm",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "attention",
    "check",
    "cp_attention",
    "cp_shard",
    "cp_unshard",
    "ep_combine",
    "ep_dispatch",
    "gemm_ar",
    "gemm_rs",
    "grouped_gemm",
    "init",
    "permute",
    "quantize",
    "reduce_scatter",
    "unpermute",
]
