"""tilewire for PyTorch: communication hidden behind arithmetic, with gradients."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, overload

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .. import backends as backends
from .._errors import Stale as Stale

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

# A World, a process group that has one, or None for the first world.
_Group: TypeAlias = World | ProcessGroup | None
_Device: TypeAlias = torch.device | str | int | None
_Algo: TypeAlias = Literal["fused", "pipelined", "ring", "sequential"] | None
_Activation: TypeAlias = Literal["relu", "gelu", "swiglu"] | None
_Wire: TypeAlias = Literal["f32", "bf16", "f16"] | None
_Sum: TypeAlias = Literal["sum", "avg"]
_Recipe: TypeAlias = Literal["tensor", "block1x128", "block128x128", "mx1x32"]
_Layout: TypeAlias = Literal["zigzag_per_sequence", "zigzag", "contiguous", "balanced"]
_Strategy: TypeAlias = Literal["get", "ring", "all_gather", "gated", "all_to_all", "hybrid"] | None
_Window: TypeAlias = tuple[int | None, int | None] | None
_Offsets: TypeAlias = Sequence[int] | Tensor | None

class World:
    """The ranks of one process group, with their shared memory. Made by :func:`init`."""

    handle: int
    rank: int
    size: int
    device: torch.device
    backend: str
    def __init__(
        self, native: Any, parent: World | None = None, group: ProcessGroup | None = None
    ) -> None: ...
    def __enter__(self) -> World: ...
    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None: ...
    def team(self, ranks: Sequence[int], name: str | None = None) -> World | None:
        """Collective over ``ranks``: a world of them; None for others."""

    def check(self) -> None:
        """Raises what ended the team, if anything did."""

    def barrier(self) -> None:
        """Waits until all ranks have come here."""

    def memory(self) -> dict[str, int]:
        """Plans and bytes of symmetric memory in use."""

    def finalize(self) -> None:
        """Ends the world and its teams on this rank."""

def init(
    group: ProcessGroup | None = None,
    *,
    device: _Device = None,
    backend: str = "auto",
    heap_bytes: int | None = None,
    timeout_s: float = 600.0,
    check: bool = False,
) -> World:
    """Collective: makes the world of a process group."""

def memory(group: _Group = None) -> dict[str, int]:
    """Plans and bytes of symmetric memory in use."""

def prepare(op: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Collective: makes the plans that a call of ``op`` with tensors like these needs."""

def explain(op: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Collective: what the plans of such a call do, in words."""

class QTensor:
    """An FP8 matrix with scales: ``value = data * scale``. Made by :func:`quantize`."""

    data: Tensor
    scales: Tensor
    recipe: _Recipe
    world: int
    def __init__(self, data: Tensor, scales: Tensor, recipe: _Recipe, world: int = 0) -> None: ...
    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def dequantize(self, dtype: torch.dtype = ...) -> Tensor:
        """The values, rounded once to ``dtype``."""

def quantize(
    x: Tensor,
    recipe: _Recipe = "tensor",
    *,
    dtype: torch.dtype = ...,
    pow2_scales: bool = False,
    group: _Group = None,
) -> QTensor:
    """``x`` [rows, cols] as FP8 with scales from its own magnitudes."""

@overload
def ag_gemm(
    x: Tensor | QTensor,
    w: Tensor | QTensor,
    group: _Group = None,
    *,
    bias: Tensor | None = None,
    activation: _Activation = None,
    rows: Sequence[int] | None = None,
    return_gathered: Literal[False] = False,
    algo: _Algo = None,
) -> Tensor: ...
@overload
def ag_gemm(
    x: Tensor,
    w: Tensor,
    group: _Group = None,
    *,
    bias: Tensor | None = None,
    activation: _Activation = None,
    rows: Sequence[int] | None = None,
    return_gathered: Literal[True],
    algo: _Algo = None,
) -> tuple[Tensor, Tensor]:
    """``act(all_gather(x) @ w.T + bias)``: the column-parallel linear layer."""

def gemm_rs(
    x: Tensor | QTensor,
    w: Tensor | QTensor,
    group: _Group = None,
    *,
    bias: Tensor | None = None,
    rows: Sequence[int] | None = None,
    wire: _Wire = None,
    algo: _Algo = None,
) -> Tensor:
    """``reduce_scatter(x @ w.T) + bias``: the row-parallel linear layer."""

def gemm_ar(
    x: Tensor | QTensor,
    w: Tensor | QTensor,
    group: _Group = None,
    *,
    bias: Tensor | None = None,
    wire: _Wire = None,
    algo: _Algo = None,
) -> Tensor:
    """``all_reduce(x @ w.T) + bias``: the row-parallel linear layer with whole outputs."""

def all_gather(x: Tensor, group: _Group = None, *, rows: Sequence[int] | None = None) -> Tensor:
    """All ranks' rows, in the order of the ranks: [m / P, ...] -> [m, ...]."""

def reduce_scatter(
    x: Tensor, group: _Group = None, *, op: _Sum = "sum", rows: Sequence[int] | None = None
) -> Tensor:
    """My rows of the sum over the ranks: [m, ...] -> [rows of me, ...]."""

def all_reduce(x: Tensor, group: _Group = None, *, op: _Sum = "sum") -> Tensor:
    """The sum (``op="avg"``: mean) over the ranks, on every rank."""

def all_to_all(x: Tensor, splits: Sequence[Sequence[int]], group: _Group = None) -> Tensor:
    """Rows to and from every rank: ``splits[i][j]`` rows go from rank i to rank j."""

class _Parallel(nn.Module):
    weight: nn.Parameter
    bias: nn.Parameter | None
    in_features: int
    out_features: int
    world: World
    def reset_parameters(self) -> None: ...
    def forward(self, x: Tensor) -> Tensor: ...
    def extra_repr(self) -> str: ...

class ColumnParallelLinear(_Parallel):
    """``y = all_gather(x) @ W.T + b``, with this rank's columns of y."""

    activation: _Activation
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: _Group = None,
        activation: _Activation = None,
        device: _Device = None,
        dtype: torch.dtype | None = None,
    ) -> None: ...
    def forward(self, x: Tensor) -> Tensor: ...

class RowParallelLinear(_Parallel):
    """``y = reduce_scatter(x @ W.T) + b``, with this rank's rows of y; all with ``scatter=False``."""

    scatter: bool
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: _Group = None,
        scatter: bool = True,
        device: _Device = None,
        dtype: torch.dtype | None = None,
    ) -> None: ...
    def reset_parameters(self) -> None: ...
    def forward(self, x: Tensor) -> Tensor: ...

class GroupedLinear(nn.Module):
    """A linear layer for each expert that is here: ``weight0`` ..., and ``bias`` [n, out]."""

    num_gemms: int
    in_features: int
    out_features: int
    bias: nn.Parameter | None
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: _Device = None,
        dtype: torch.dtype | None = None,
    ) -> None: ...
    def reset_parameters(self) -> None: ...
    def weights(self) -> list[nn.Parameter]: ...
    def forward(self, x: Tensor, m_splits: Tensor) -> Tensor: ...
    def extra_repr(self) -> str: ...

def grouped_gemm(
    x: Tensor | QTensor,
    w: Tensor | Sequence[Tensor] | Sequence[QTensor],
    m_splits: Tensor,
    *,
    bias: Tensor | None = None,
    out: Tensor | Sequence[Tensor] | None = None,
    wgrad_accumulation_mask: Tensor | None = None,
) -> Tensor:
    """``y[rows of e] = x[rows of e] @ w[e].T + bias[e]`` for every expert e, in one launch."""

class RowMap:
    """Which row each choice of a token has: made by :func:`permute`."""

    tokens: int
    top_k: int
    capacity: int
    hidden: int
    def __init__(
        self,
        native: Any,
        idx: Tensor,
        num_experts: int,
        capacity: int,
        align: int,
        hidden: int,
    ) -> None: ...
    def totals(self, like: Tensor) -> dict[str, int]:
        """Rows needed to drop nothing, copies dropped."""

def permute(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None = None,
    *,
    num_experts: int,
    capacity: int | None = None,
    align: int = 1,
) -> tuple[Tensor, Tensor | None, Tensor, RowMap]:
    """Tokens in the order of their experts: (rows, weights of the rows, m_splits, map)."""

def unpermute(rows: Tensor, row_map: RowMap, weights: Tensor | None = None) -> Tensor:
    """The sum over each token's choices of (weight times) its row."""

class Pending:
    """Results of a call that runs beside the current stream."""

    def __init__(self, result: Any, event: Any, device: torch.device | None = None) -> None: ...
    def wait(self) -> Any:
        """The results, for use on the current stream."""

class EpGroup:
    """A layer of experts over the ranks of a world. Collective: all ranks make it alike."""

    dtype: torch.dtype
    out_dtype: torch.dtype
    hidden: int
    top_k: int
    zero_copy: bool
    layout: str
    device: torch.device
    rank: int
    recv_rows: int
    capacity: int
    num_local_experts: int
    def __init__(
        self,
        group: _Group = None,
        *,
        num_experts: int,
        max_tokens: int,
        hidden: int,
        top_k: int,
        capacity: int | None = None,
        align: int = 1,
        layout: Literal["expert_major", "rank_major", "flat"] = "expert_major",
        overflow: Literal["drop", "error"] = "drop",
        dtype: torch.dtype = ...,
        out_dtype: torch.dtype | None = None,
        zero_copy: bool = False,
        num_sms: int | None = None,
    ) -> None: ...
    def buffer(self, recv: Tensor | None = None) -> EpBuffer:
        """A buffer for one microbatch."""

    def explain(self) -> str:
        """What it takes and does, in words."""

class EpBuffer:
    """The routing of one microbatch, from its dispatch to the end of its backward pass."""

    group: EpGroup
    def __init__(self, group: EpGroup, recv: Tensor | None = None) -> None: ...
    def totals(self) -> dict[str, Any]:
        """True numbers of the last routing. Waits for the device."""

    def reuse(self) -> EpBuffer:
        """The next dispatch takes the last routing again."""

    def row_index(self) -> Tensor:
        """The received row that feeds each expert-major row, [capacity] int32."""

@overload
def ep_dispatch(
    buf: EpBuffer,
    x: Tensor | QTensor,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None = None,
    *,
    num_sms: int | None = None,
    async_op: Literal[False] = False,
) -> tuple[Any, Tensor | None, Tensor]: ...
@overload
def ep_dispatch(
    buf: EpBuffer,
    x: Tensor | QTensor,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None = None,
    *,
    num_sms: int | None = None,
    async_op: Literal[True],
) -> Pending:
    """Sends each token to the ranks of its experts: (rows, their weights, m_splits)."""

@overload
def ep_combine(
    buf: EpBuffer, y: Tensor, weights: Tensor | None = None, *, async_op: Literal[False] = False
) -> Tensor: ...
@overload
def ep_combine(
    buf: EpBuffer, y: Tensor, weights: Tensor | None = None, *, async_op: Literal[True]
) -> Pending:
    """The results of the experts, back at their tokens: the sum of a token's choices."""

@overload
def attention(
    q: Tensor | QTensor,
    k: Tensor | QTensor,
    v: Tensor | QTensor,
    *,
    causal: bool = True,
    window: _Window = None,
    cu_seqlens_q: _Offsets = None,
    cu_seqlens_kv: _Offsets = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    deterministic: bool = True,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def attention(
    q: Tensor | QTensor,
    k: Tensor | QTensor,
    v: Tensor | QTensor,
    *,
    causal: bool = True,
    window: _Window = None,
    cu_seqlens_q: _Offsets = None,
    cu_seqlens_kv: _Offsets = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    deterministic: bool = True,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]:
    """``softmax(scale q k^T + bias) v`` of tensors that are here."""

@overload
def cp_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: _Group = None,
    *,
    causal: bool = True,
    window: _Window = None,
    cu_seqlens_q: _Offsets = None,
    cu_seqlens_kv: _Offsets = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    strategy: _Strategy = None,
    a2a_size: int | None = None,
    layout: _Layout = "zigzag_per_sequence",
    tokens: int | tuple[int, int] | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def cp_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: _Group = None,
    *,
    causal: bool = True,
    window: _Window = None,
    cu_seqlens_q: _Offsets = None,
    cu_seqlens_kv: _Offsets = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    strategy: _Strategy = None,
    a2a_size: int | None = None,
    layout: _Layout = "zigzag_per_sequence",
    tokens: int | tuple[int, int] | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]:
    """Attention of rows that are divided among the ranks: each holds a part of every sequence."""

def cp_shard(
    x: Tensor,
    group: _Group = None,
    *,
    cu_seqlens: _Offsets = None,
    layout: _Layout = "zigzag_per_sequence",
    dim: int | None = None,
    causal: bool = True,
    window: _Window = None,
) -> Tensor:
    """My part of a global tensor, for :func:`cp_attention`."""

def cp_unshard(
    x: Tensor,
    group: _Group = None,
    *,
    cu_seqlens: _Offsets = None,
    layout: _Layout = "zigzag_per_sequence",
    dim: int | None = None,
    causal: bool = True,
    window: _Window = None,
) -> Tensor:
    """The global tensor of all ranks' parts. Collective."""

def symm_empty(
    *shape: int | Sequence[int], dtype: torch.dtype | None = None, group: _Group = None
) -> Tensor:
    """Collective: a tensor whose memory all ranks of a world have, at the same place."""

def symm_adopt(t: Tensor, group: _Group = None) -> Tensor:
    """Collective: memory of torch's symmetric memory as symmetric memory of a world."""

def symm_handle(t: Tensor) -> SymmHandle:
    """What only symmetric memory can do with ``t``."""

class SymmHandle:
    """One tensor on all ranks: its transfers, signals and barriers."""

    rank: int
    size: int
    def __init__(self, t: Tensor) -> None: ...
    def get_tensor(self, peer: int) -> Tensor:
        """The tensor of rank ``peer``, in its memory."""

    def contiguous_view(self) -> Tensor:
        """The tensors of all ranks as one, [world, ...]."""

    def put(self, src: Tensor, peer: int) -> None:
        """Writes ``src`` to the beginning of the tensor of rank ``peer``."""

    def put_signal(self, src: Tensor, peer: int) -> None:
        """:meth:`put`, and a signal behind it."""

    def get(self, peer: int, out: Tensor | None = None) -> Tensor:
        """The tensor of rank ``peer``, copied."""

    def wait_signal(self, peer: int, n: int = 1) -> None:
        """Waits for ``n`` more signals of rank ``peer``."""

    def barrier(self) -> None:
        """Waits until all ranks have come here."""
