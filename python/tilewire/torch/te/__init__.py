"""TransformerEngine 2.20's names, argument orders and meanings, over :mod:`tilewire.torch`.

::

    from tilewire.torch import te  # for: import transformer_engine.pytorch as te

    te.initialize_ub([tokens, hidden], tp_size)
    layer = te.Linear(hidden, 4 * hidden, parallel_mode="column", sequence_parallel=True,
    tp_group=group)

:mod:`tilewire.torch.te.ep` stands for ``transformer_engine.pytorch.ep``. What has no counterpart
raises :class:`tilewire.Unsupported` with the argument's name; what only tunes their implementation
is accepted. There is no LayerNormLinear, LayerNormMLP or TransformerLayer, and no FP8 recipe.
"""

from ._grouped import GroupedLinear
from ._linear import Linear
from ._ub import UserBufferQuantizationMode, destroy_ub, initialize_ub
from .ep import (
    EpBuffer,
    ep_bootstrap,
    ep_combine,
    ep_dispatch,
    ep_finalize,
    ep_prepare,
    is_ep_bootstrapped,
    is_symm_backed,
    release_symm_mem_pool,
    symm_mem_alloc,
)

__all__ = [
    "EpBuffer",
    "GroupedLinear",
    "Linear",
    "UserBufferQuantizationMode",
    "destroy_ub",
    "ep_bootstrap",
    "ep_combine",
    "ep_dispatch",
    "ep_finalize",
    "ep_prepare",
    "initialize_ub",
    "is_ep_bootstrapped",
    "is_symm_backed",
    "release_symm_mem_pool",
    "symm_mem_alloc",
]
