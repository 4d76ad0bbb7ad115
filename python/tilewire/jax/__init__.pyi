"""tilewire for JAX: communication hidden behind arithmetic, with gradients."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, overload

import jax
from jax import Array
from jax.typing import ArrayLike

from .._errors import Stale as Stale

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

# An axis of the world's mesh, or several.
_Axis: TypeAlias = str | tuple[str, ...]
_Algo: TypeAlias = Literal["fused", "pipelined", "ring", "sequential"] | None
_Activation: TypeAlias = Literal["relu", "gelu", "swiglu"] | None
_Wire: TypeAlias = Literal["f32", "bf16", "f16"] | None
_Sum: TypeAlias = Literal["sum", "avg"]
_Layout: TypeAlias = Literal["zigzag_per_sequence", "zigzag", "contiguous", "balanced"]
_Strategy: TypeAlias = Literal["get", "ring", "all_gather", "gated", "all_to_all", "hybrid"] | None
_Window: TypeAlias = tuple[int | None, int | None] | None
_Recipe: TypeAlias = Literal["tensor", "block1x128", "block128x128", "mx1x32"]
# Offsets: numbers or an array of numpy's, on the host; arrays of the program for `attention`.
_Offsets: TypeAlias = Sequence[int] | Any | None

class World:
    """The devices of a mesh as ranks, with their shared memory. Made by :func:`init`."""

    mesh: jax.sharding.Mesh
    shape: dict[str, int]
    size: int
    backend: str
    timeout_s: float
    def __init__(
        self, number: int, mesh: jax.sharding.Mesh, backend: str, timeout_s: float
    ) -> None: ...
    def __enter__(self) -> World: ...
    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None: ...
    def check(self) -> None:
        """Raises what ended the world, if anything did."""

    def used_bytes(self) -> int:
        """Bytes of symmetric memory per rank that calls of compiled programs take."""

    def finalize(self) -> None:
        """Ends the world in this process."""

def init(
    mesh: jax.sharding.Mesh,
    *,
    backend: str = "auto",
    heap_bytes: int | None = None,
    timeout_s: float = 600.0,
) -> World:
    """Collective over the processes of a mesh: makes each of its devices a rank."""

def check(world: World | None = None) -> None:
    """Raises what ended ``world`` (None: the first one), if anything did."""

@overload
def ag_gemm(
    x: ArrayLike | QTensor,
    w: ArrayLike | QTensor,
    axis_name: _Axis,
    *,
    bias: ArrayLike | None = None,
    activation: _Activation = None,
    rows: Sequence[int] | None = None,
    return_gathered: Literal[False] = False,
    algo: _Algo = None,
    world: World | None = None,
) -> Array: ...
@overload
def ag_gemm(
    x: ArrayLike,
    w: ArrayLike,
    axis_name: _Axis,
    *,
    bias: ArrayLike | None = None,
    activation: _Activation = None,
    rows: Sequence[int] | None = None,
    return_gathered: Literal[True],
    algo: _Algo = None,
    world: World | None = None,
) -> tuple[Array, Array]:
    """``act(all_gather(x) @ w.T + bias)``: the column-parallel linear layer."""

def gemm_rs(
    x: ArrayLike | QTensor,
    w: ArrayLike | QTensor,
    axis_name: _Axis,
    *,
    bias: ArrayLike | None = None,
    rows: Sequence[int] | None = None,
    wire: _Wire = None,
    algo: _Algo = None,
    world: World | None = None,
) -> Array:
    """``reduce_scatter(x @ w.T) + bias``: the row-parallel linear layer."""

def gemm_ar(
    x: ArrayLike | QTensor,
    w: ArrayLike | QTensor,
    axis_name: _Axis,
    *,
    bias: ArrayLike | None = None,
    wire: _Wire = None,
    algo: _Algo = None,
    world: World | None = None,
) -> Array:
    """``all_reduce(x @ w.T) + bias``: the row-parallel linear layer with whole outputs."""

def all_gather(
    x: ArrayLike,
    axis_name: _Axis,
    *,
    rows: Sequence[int] | None = None,
    world: World | None = None,
) -> Array:
    """All ranks' rows, in the order of the ranks: [m / P, ...] -> [m, ...]."""

def reduce_scatter(
    x: ArrayLike,
    axis_name: _Axis,
    *,
    op: _Sum = "sum",
    rows: Sequence[int] | None = None,
    world: World | None = None,
) -> Array:
    """My rows of the sum over the ranks: [m, ...] -> [rows of me, ...]."""

def all_reduce(
    x: ArrayLike, axis_name: _Axis, *, op: _Sum = "sum", world: World | None = None
) -> Array:
    """The sum (``op="avg"``: mean) over the ranks, on every rank."""

def all_to_all(
    x: ArrayLike,
    splits: Sequence[Sequence[int]],
    axis_name: _Axis,
    *,
    world: World | None = None,
) -> Array:
    """Rows to and from every rank: ``splits[i][j]`` rows go from rank i to rank j."""

def grouped_gemm(
    x: ArrayLike | QTensor,
    w: ArrayLike | Sequence[QTensor],
    m_splits: ArrayLike,
    *,
    bias: ArrayLike | None = None,
) -> Array:
    """``y[rows of e] = x[rows of e] @ w[e].T + bias[e]`` for every expert e, in one launch."""

@dataclasses.dataclass(frozen=True)
class RowMap:
    """Which row each choice of a token has: made by :func:`permute`. A pytree of two arrays."""

    topk_idx: Array
    counts: Array
    num_experts: int
    capacity: int
    align: int
    @property
    def m_splits(self) -> Array: ...
    @property
    def rows(self) -> Array: ...
    @property
    def dropped(self) -> Array: ...

def permute(
    x: ArrayLike,
    topk_idx: ArrayLike,
    topk_weights: ArrayLike | None = None,
    *,
    num_experts: int,
    capacity: int | None = None,
    align: int = 1,
) -> tuple[Array, Array | None, Array, RowMap]:
    """Tokens in the order of their experts: (rows, their weights, m_splits, map)."""

def unpermute(rows: ArrayLike, row_map: RowMap, weights: ArrayLike | None = None) -> Array:
    """The sum over each token's choices of (weight times) its row."""

@dataclasses.dataclass(frozen=True)
class QTensor:
    """An FP8 matrix with scales: ``value = data * scale``. Made by :func:`quantize`."""

    data: Array
    scales: Array
    recipe: _Recipe
    axes: tuple[str, ...] = ()
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    def dequantize(self, dtype: Any = ...) -> Array:
        """The values, rounded once to ``dtype``."""

def quantize(
    x: ArrayLike,
    recipe: _Recipe = "tensor",
    *,
    dtype: Any = ...,
    pow2_scales: bool = False,
    axis_name: _Axis | None = None,
    world: World | None = None,
) -> QTensor:
    """``x`` [rows, cols] as FP8 with scales from its own magnitudes."""

@dataclasses.dataclass(frozen=True, eq=False)
class EpGroup:
    """A layer of experts over an axis of a world's mesh."""

    axis_name: str | tuple[str, ...]
    _: dataclasses.KW_ONLY
    num_experts: int
    max_tokens: int
    hidden: int
    top_k: int
    capacity: int | None = None
    align: int = 1
    layout: str = "expert_major"
    overflow: str = "drop"
    dtype: Any = ...
    out_dtype: Any = None
    num_sms: int | None = None
    world: World | None = None
    def __post_init__(self) -> None: ...
    def buffer(self) -> EpBuffer:
        """A buffer for one microbatch: static, like the group."""

@dataclasses.dataclass(frozen=True)
class EpBuffer:
    """Receive memory for the microbatches that use it, one at a time."""

    group: EpGroup
    number: int

@dataclasses.dataclass(frozen=True)
class EpHandle:
    """The routing of one microbatch on this rank. A pytree of one array."""

    state: Array
    buf: EpBuffer
    tokens: int
    @property
    def m_splits(self) -> Array: ...
    @property
    def rows(self) -> Array: ...
    @property
    def dropped(self) -> Array: ...
    @property
    def row_index(self) -> Array: ...

@overload
def ep_dispatch(
    buf: EpBuffer,
    x: QTensor,
    topk_idx: ArrayLike,
    topk_weights: ArrayLike | None = None,
) -> tuple[QTensor, Array | None, Array, EpHandle]: ...
@overload
def ep_dispatch(
    buf: EpBuffer,
    x: ArrayLike,
    topk_idx: ArrayLike,
    topk_weights: ArrayLike | None = None,
) -> tuple[Array, Array | None, Array, EpHandle]:
    """Sends each token to the ranks of its experts: (rows, their weights, m_splits, handle)."""

def ep_combine(
    buf: EpBuffer, y: ArrayLike, handle: EpHandle, weights: ArrayLike | None = None
) -> Array:
    """The results of the experts, back at their tokens: the sum of a token's choices."""

@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool = True,
    window: _Window = None,
    cu_seqlens_q: _Offsets = None,
    cu_seqlens_kv: _Offsets = None,
    scale: float | None = None,
    bias: ArrayLike | None = None,
    softcap: float | None = None,
    sink: ArrayLike | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    deterministic: bool = True,
    return_lse: Literal[False] = False,
) -> Array: ...
@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool = True,
    window: _Window = None,
    cu_seqlens_q: _Offsets = None,
    cu_seqlens_kv: _Offsets = None,
    scale: float | None = None,
    bias: ArrayLike | None = None,
    softcap: float | None = None,
    sink: ArrayLike | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    deterministic: bool = True,
    return_lse: Literal[True],
) -> tuple[Array, Array]:
    """``softmax(scale q k^T + bias) v`` of arrays that are here."""

@overload
def cp_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    axis_name: _Axis,
    *,
    causal: bool = True,
    window: _Window = None,
    cu_seqlens_q: _Offsets = None,
    cu_seqlens_kv: _Offsets = None,
    scale: float | None = None,
    bias: ArrayLike | None = None,
    softcap: float | None = None,
    sink: ArrayLike | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    strategy: _Strategy = None,
    a2a_size: int | None = None,
    layout: _Layout = "zigzag_per_sequence",
    return_lse: Literal[False] = False,
    world: World | None = None,
) -> Array: ...
@overload
def cp_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    axis_name: _Axis,
    *,
    causal: bool = True,
    window: _Window = None,
    cu_seqlens_q: _Offsets = None,
    cu_seqlens_kv: _Offsets = None,
    scale: float | None = None,
    bias: ArrayLike | None = None,
    softcap: float | None = None,
    sink: ArrayLike | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    strategy: _Strategy = None,
    a2a_size: int | None = None,
    layout: _Layout = "zigzag_per_sequence",
    return_lse: Literal[True],
    world: World | None = None,
) -> tuple[Array, Array]:
    """Attention of rows that are divided among the ranks: each holds a part of every sequence."""

def cp_shard(
    x: ArrayLike,
    axis_name: _Axis,
    *,
    cu_seqlens: _Offsets = None,
    layout: _Layout = "zigzag_per_sequence",
    dim: int | None = None,
    causal: bool = True,
    window: _Window = None,
    world: World | None = None,
) -> Array:
    """My part of a global array that every rank has, for :func:`cp_attention`."""

def cp_unshard(
    x: ArrayLike,
    axis_name: _Axis,
    *,
    cu_seqlens: _Offsets = None,
    layout: _Layout = "zigzag_per_sequence",
    dim: int | None = None,
    causal: bool = True,
    window: _Window = None,
    world: World | None = None,
) -> Array:
    """The global array of all ranks' parts."""
