"""TransformerEngine 2.20's names, argument orders and meanings, over :mod:`tilewire.torch`."""

import enum
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .. import World
from .ep import EpBuffer as EpBuffer
from .ep import ep_bootstrap as ep_bootstrap
from .ep import ep_combine as ep_combine
from .ep import ep_dispatch as ep_dispatch
from .ep import ep_finalize as ep_finalize
from .ep import ep_prepare as ep_prepare
from .ep import is_ep_bootstrapped as is_ep_bootstrapped
from .ep import is_symm_backed as is_symm_backed
from .ep import release_symm_mem_pool as release_symm_mem_pool
from .ep import symm_mem_alloc as symm_mem_alloc

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

_Group: TypeAlias = World | ProcessGroup | None
_Device: TypeAlias = torch.device | str | None
_Mode: TypeAlias = Literal["column", "row"] | None
_Init: TypeAlias = Callable[[Tensor], Any] | None
_Tracker: TypeAlias = Callable[[], Any] | None

class UserBufferQuantizationMode(enum.Enum):
    """What :func:`initialize_ub` takes in ``quantization_modes``."""

    NONE = "none"
    FP8 = "fp8"

def initialize_ub(
    shape: Sequence[int],
    tp_size: int,
    use_fp8: bool = False,
    quantization_modes: Sequence[UserBufferQuantizationMode] | None = None,
    dtype: torch.dtype = ...,
    ub_cfgs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
    bootstrap_backend: str | None = None,
    with_cublasmp: bool = False,
) -> None:
    """Collective over all ranks: makes the Worlds of tensor-parallel groups."""

def destroy_ub() -> None:
    """Ends, on this rank, the Worlds that :func:`initialize_ub` and :class:`Linear` made."""

class _Module(nn.Module):
    tp_group: _Group
    tp_size: int
    parallel_mode: _Mode
    sequence_parallel: bool
    fuse_wgrad_accumulation: bool
    use_bias: bool
    return_bias: bool
    in_features: int
    out_features: int
    def reset_parameters(self, defer_init: bool = False) -> None: ...
    def set_tensor_parallel_group(self, tp_group: _Group) -> None:
        """Sets the group, where the layer was made with ``tp_size`` alone."""

    def extra_repr(self) -> str: ...

class Linear(_Module):
    """``y = x @ weight.T + bias``, of which tensor parallelism gives this rank a part."""

    weight_names: list[str]
    bias_names: list[str]
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: _Group = None,
        tp_size: int = 1,
        get_rng_state_tracker: _Tracker = None,
        rng_tracker_name: str | None = None,
        init_method: _Init = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: _Mode = None,
        parameters_split: Sequence[str] | dict[str, int] | None = None,
        device: _Device = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None: ...
    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Tensor | tuple[Tensor, Tensor]: ...

class GroupedLinear(_Module):
    """A linear layer for each expert that is here."""

    num_gemms: int
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: _Group = None,
        tp_size: int = 1,
        get_rng_state_tracker: _Tracker = None,
        rng_tracker_name: str | None = None,
        init_method: _Init = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: _Mode = None,
        device: _Device = None,
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None: ...
    def forward(
        self,
        inp: Tensor,
        m_splits: Tensor | Sequence[int],
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, list[Tensor]]: ...
