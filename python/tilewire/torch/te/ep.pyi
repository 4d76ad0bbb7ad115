"""``transformer_engine.pytorch.ep`` of TransformerEngine 2.20, over :mod:`tilewire.torch`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import World

__all__ = [
    "EpBuffer",
    "ep_bootstrap",
    "is_ep_bootstrapped",
    "ep_finalize",
    "ep_dispatch",
    "ep_combine",
    "symm_mem_alloc",
    "release_symm_mem_pool",
    "is_symm_backed",
]

def ep_bootstrap(
    ep_group: World | ProcessGroup,
    num_experts: int,
    max_tokens_per_rank: int,
    hidden_dim: int,
    num_topk: int,
    recv_capacity_per_rank: int | None = None,
    max_num_sms: int = 0,
    zero_copy: bool = False,
    drop_on_overflow: bool = False,
    max_token_dtype: torch.dtype = ...,
) -> None:
    """Collective: begins expert parallelism over the ranks of ``ep_group``."""

def is_ep_bootstrapped() -> bool:
    """Whether expert parallelism has begun in this process."""

def ep_finalize() -> None:
    """Ends expert parallelism on this rank."""

class EpBuffer:
    """State of one microbatch, from its dispatch to the end of its backward pass."""

    top_k: int
    alignment: int
    max_tokens_per_rank: int
    recv_capacity_per_rank: int | None
    hidden_dim: int
    num_local_experts: int
    payload_dtype: torch.dtype
    device: torch.device
    eager: bool
    zero_copy: bool
    tokens_per_expert: Tensor
    total_recv_tokens: Tensor
    dispatch_fwd_quant_recipe: None
    combine_bwd_quant_recipe: None
    def __init__(
        self,
        top_k: int,
        max_tokens_per_rank: int,
        hidden_dim: int,
        num_local_experts: int,
        recv_capacity_per_rank: int | None = None,
        alignment: int = 0,
        payload_dtype: torch.dtype = ...,
        device: torch.device | str | None = None,
        dispatch_fwd_quant_recipe: Any = None,
        combine_bwd_quant_recipe: Any = None,
    ) -> None: ...
    def check(self) -> None:
        """Raises if rows were dropped anywhere that must not be. Waits for the device."""

def ep_prepare(buffer: EpBuffer, topk_idx: Tensor) -> Tensor:
    """Routes: who receives which rows; the rows of each local expert."""

def ep_dispatch(
    buffer: EpBuffer,
    tokens: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    *,
    recv_tokens: Tensor | None = None,
    recv_topk_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Routes, and sends each token to the ranks of its experts."""

def ep_combine(
    buffer: EpBuffer,
    expert_out: Tensor,
    *,
    num_local_tokens: int | None = None,
    grad_out: Tensor | None = None,
) -> Tensor:
    """The sum of the experts' rows of each token, back at the token's rank."""

def symm_mem_alloc(
    shape: Sequence[int],
    dtype: torch.dtype,
    ep_group: World | ProcessGroup,
    device: torch.device | str | None = None,
    use_pool: bool = False,
    backend: str = "NCCL",
) -> Tensor:
    """Collective: a tensor in memory that all ranks have at the same place."""

def release_symm_mem_pool() -> None:
    """Does nothing: there is no pool."""

def is_symm_backed(t: Tensor) -> bool:
    """Whether peers reach the memory of ``t``."""
