"""tilewire for PyTorch: communication hidden behind arithmetic, with gradients.

::

    import torch.distributed as dist
    import tilewire.torch as tw

    dist.init_process_group("gloo")
    tw.init()
    y = tw.ag_gemm(x, w)  # all_gather(x) @ w.T, overlapped

Tensors are positional, everything else is by keyword. ``group`` is a World, a ProcessGroup that has
one, or None for the first world. Operations run on the current stream and may be captured and
compiled; all ranks of a world call them in the same order.
"""

from .. import backends
from .._errors import Stale
from ._attention import attention, cp_attention, cp_shard, cp_unshard
from ._ep import EpBuffer, EpGroup, Pending, ep_combine, ep_dispatch
from ._functions import (
    ag_gemm,
    all_gather,
    all_reduce,
    all_to_all,
    gemm_ar,
    gemm_rs,
    reduce_scatter,
)
from ._grouped import grouped_gemm
from ._modules import ColumnParallelLinear, GroupedLinear, RowParallelLinear
from ._permute import RowMap, permute, unpermute
from ._plans import explain, memory, prepare
from ._quant import QTensor, quantize
from ._symm import SymmHandle, symm_adopt, symm_empty, symm_handle
from ._world import World, init

__all__ = [
    "ColumnParallelLinear",
    "EpBuffer",
    "EpGroup",
    "GroupedLinear",
    "Pending",
    "QTensor",
    "RowMap",
    "RowParallelLinear",
    "Stale",
    "SymmHandle",
    "World",
    "ag_gemm",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "attention",
    "backends",
    "cp_attention",
    "cp_shard",
    "cp_unshard",
    "ep_combine",
    "ep_dispatch",
    "explain",
    "gemm_ar",
    "gemm_rs",
    "grouped_gemm",
    "init",
    "memory",
    "permute",
    "prepare",
    "quantize",
    "reduce_scatter",
    "symm_adopt",
    "symm_empty",
    "symm_handle",
    "unpermute",
]
