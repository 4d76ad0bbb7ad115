"""The extension module: private to the package, which checks arguments and makes outputs.

Tensors are those of the framework in use (:func:`use_exchange_api`); outputs are given and are filled.
Worlds go by their numbers. Every call may raise :class:`tilewire.Error`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, final

# A tensor of the framework's; this module needs none to be installed.
_Tensor: TypeAlias = Any
_Spec: TypeAlias = Mapping[str, Any]
_Tensors: TypeAlias = Mapping[str, _Tensor | None]

__version__: str

@final
class World:
    """A world, seen from one rank."""

    @property
    def handle(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def backend(self) -> str: ...
    def team(self, ranks: Sequence[int], name: str) -> World | None: ...
    def check(self) -> None: ...
    def barrier(self) -> None: ...
    def memory(self) -> dict[str, int]: ...
    def finalize(self) -> None: ...

@final
class SymmBuffer:
    """Bytes that all ranks of a world have at the same place."""

    def __new__(cls, world: int, len_bytes: int) -> SymmBuffer: ...
    @staticmethod
    def at(addr: int) -> SymmBuffer | None: ...
    @staticmethod
    def adopt(world: int, addr: int, len_bytes: int) -> tuple[SymmBuffer, int]: ...
    @property
    def world(self) -> int: ...
    @property
    def len_bytes(self) -> int: ...
    def part(self, rank: int) -> object: ...
    def parts(self) -> object: ...
    def put(self, peer: int, at: int, src: _Tensor, signal: bool) -> None: ...
    def get(self, peer: int, at: int, out: _Tensor) -> None: ...
    def wait_signal(self, peer: int, n: int) -> None: ...
    def barrier(self) -> None: ...

@final
class EpGroup:
    """A layer of experts over the ranks of a world."""

    def __new__(cls, world: int, spec: _Spec) -> EpGroup: ...
    @property
    def recv_rows(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def state_bytes(self) -> int: ...
    @property
    def experts_per_rank(self) -> list[int]: ...
    def explain(self) -> str: ...
    def zero_copy(self, grad: bool) -> object: ...
    def receive_in(self, buf: SymmBuffer, at: int) -> None: ...
    def buffer(self) -> EpBuffer: ...

@final
class EpBuffer:
    """The routing of one microbatch."""

    def route(self, topk_idx: _Tensor, m_splits: _Tensor, total: _Tensor) -> None: ...
    def dispatch(
        self,
        topk_idx: _Tensor | None,
        x: _Tensor,
        topk_weights: _Tensor | None,
        scales: _Tensor | None,
        recv: _Tensor,
        recv_weights: _Tensor | None,
        recv_scales: _Tensor | None,
        m_splits: _Tensor,
    ) -> None: ...
    def dispatch_bwd(
        self, d_recv: _Tensor, d_weights: _Tensor | None, dx: _Tensor, dw: _Tensor | None
    ) -> None: ...
    def combine(self, y: _Tensor, weights: _Tensor | None, out: _Tensor) -> None: ...
    def combine_bwd(
        self, d_out: _Tensor, weights: tuple[_Tensor, _Tensor, _Tensor] | None, dy: _Tensor
    ) -> None: ...
    def row_index(self, out: _Tensor) -> None: ...
    def save(self, state: _Tensor) -> None: ...
    def load(self, state: _Tensor, tokens: int) -> None: ...
    def set_num_sms(self, num: int | None) -> None: ...
    def totals(self) -> dict[str, Any]: ...

@final
class RowMap:
    """Which row each choice of a token has."""

    def __new__(cls, x: _Tensor, topk_idx: _Tensor, spec: _Spec) -> RowMap: ...
    def permute(
        self,
        tokens: tuple[_Tensor, _Tensor | None],
        rows: tuple[_Tensor, _Tensor | None],
        m_splits: _Tensor,
    ) -> None: ...
    def permute_bwd(
        self,
        d_rows: tuple[_Tensor, _Tensor | None],
        d_tokens: tuple[_Tensor, _Tensor | None],
    ) -> None: ...
    def unpermute(self, rows: tuple[_Tensor, _Tensor | None], out: _Tensor) -> None: ...
    def unpermute_bwd(
        self,
        d_out: _Tensor,
        d_rows: _Tensor,
        weighted: tuple[_Tensor, _Tensor, _Tensor] | None,
    ) -> None: ...
    def totals(self, x: _Tensor) -> dict[str, int]: ...

def ag_gemm(
    world: int,
    x: _Tensor,
    w: _Tensor,
    bias: _Tensor | None,
    out: _Tensor,
    gathered: _Tensor | None,
    aux: _Tensor | None,
    scale: _Tensor | None,
    act: str | None,
    rows: Sequence[int] | None,
    kn: bool,
    algo: str | None,
    grad: bool,
    returns_gathered: bool,
) -> None: ...
def gemm_rs(
    world: int,
    x: _Tensor,
    w: _Tensor,
    bias: _Tensor | None,
    scale: _Tensor | None,
    out: _Tensor,
    rows: Sequence[int] | None,
    kn: bool,
    wire: str | None,
    algo: str | None,
    grad: bool,
) -> None: ...
def gemm_ar(
    world: int,
    x: _Tensor,
    w: _Tensor,
    bias: _Tensor | None,
    scale: _Tensor | None,
    out: _Tensor,
    kn: bool,
    wire: str | None,
    algo: str | None,
) -> None: ...
def prepare_gemm_ar(
    world: int, x: _Tensor, w: _Tensor, out: _Tensor, kn: bool
) -> None: ...
def quick_ag_gemm(
    world: int,
    x: _Tensor,
    w: _Tensor,
    bias: _Tensor | None,
    act: str | None,
    algo: str | None,
) -> _Tensor | bool | None: ...
def quick_ag_gemm_node(
    ctx: Any,
    x: _Tensor,
    w: _Tensor,
    bias: _Tensor | None = None,
) -> _Tensor: ...
def quick_gemm_rs(
    world: int,
    x: _Tensor,
    w: _Tensor,
    bias: _Tensor | None,
    wire: str | None,
    algo: str | None,
) -> _Tensor | bool | None: ...
def quick_gemm_rs_node(
    ctx: Any,
    x: _Tensor,
    w: _Tensor,
    bias: _Tensor | None = None,
) -> _Tensor: ...
def quick_gemm_ar(
    world: int,
    x: _Tensor,
    w: _Tensor,
    bias: _Tensor | None,
    wire: str | None,
    algo: str | None,
) -> _Tensor | bool | None: ...
def quick_gemm_ar_node(
    ctx: Any,
    x: _Tensor,
    w: _Tensor,
    bias: _Tensor | None = None,
) -> _Tensor: ...
def all_gather(
    world: int, x: _Tensor, out: _Tensor, rows: Sequence[int] | None, grad: bool
) -> None: ...
def reduce_scatter(
    world: int, x: _Tensor, out: _Tensor, op: str, rows: Sequence[int] | None, grad: bool
) -> None: ...
def all_reduce(world: int, x: _Tensor, out: _Tensor, op: str) -> None: ...
def all_to_all(
    world: int, x: _Tensor, out: _Tensor, splits: Sequence[Sequence[int]], grad: bool
) -> None: ...
def grouped_fprop(
    x: _Tensor,
    w: Sequence[_Tensor],
    bias: _Tensor | None,
    splits: _Tensor,
    out: _Tensor,
    scales: Any,
) -> None: ...
def grouped_dgrad(dy: _Tensor, w: Sequence[_Tensor], splits: _Tensor, dx: _Tensor) -> None: ...
def grouped_wgrad(
    x: _Tensor,
    dy: _Tensor,
    splits: _Tensor,
    dw: Sequence[_Tensor],
    mask: _Tensor | None,
    dbias: _Tensor | None,
) -> None: ...
def attention_fwd(spec: _Spec, tensors: _Tensors) -> None: ...
def attention_bwd(spec: _Spec, tensors: _Tensors, grads: _Tensors) -> None: ...
def cp_attention_fwd(
    world: int, spec: _Spec, tensors: _Tensors, grad: bool, dbias: bool, dsink: bool
) -> None: ...
def cp_attention_bwd(world: int, spec: _Spec, tensors: _Tensors, grads: _Tensors) -> None: ...
def cp_rows(
    cu: Sequence[int],
    layout: str,
    rank: tuple[int, int],
    mask: tuple[int | None, int | None],
) -> list[tuple[int, int]]: ...
def quantize(
    world: int, x: _Tensor, data: _Tensor, scales: _Tensor, recipe: str, pow2_scales: bool
) -> None: ...
def dequantize(data: _Tensor, scales: _Tensor, recipe: str, out: _Tensor) -> None: ...
def explain_begin() -> None: ...
def explain_end() -> list[str]: ...
def launch_us(
    world: int, x: _Tensor, w: _Tensor, out: _Tensor, times: int
) -> tuple[float, float]: ...
def use_exchange_api(tensor: type) -> None: ...
def use_torch(parts: Mapping[str, object]) -> None: ...
def use_cubins(dir: str) -> None: ...
def world_of_store(
    store: object,
    name: str,
    rank: int,
    size: int,
    backend: str,
    ordinal: int | None,
    heap_bytes: int | None,
    timeout_s: float,
    check: bool,
) -> World: ...
def world_of_environment(
    backend: str, ordinal: int | None, heap_bytes: int | None, timeout_s: float, check: bool
) -> World: ...
def backends() -> list[tuple[str, str | None]]: ...
def leave_all() -> None: ...
def forked() -> None: ...
def jax_handlers(cuda: bool) -> tuple[list[tuple[str, int]], int, int]: ...
def jax_init(
    number: int,
    axes: Sequence[tuple[str, int]],
    mine: Sequence[tuple[int, int]],
    store: object | None,
    name: str,
    backend: str,
    cuda: bool,
    heap_bytes: int | None,
    timeout_s: float,
) -> str: ...
def jax_check(number: int) -> None: ...
def jax_check_call(text: str, size: int) -> None: ...
def jax_layer(text: str, size: int) -> tuple[int, int, int]: ...
def jax_used_bytes(number: int) -> int: ...
def jax_finalize(number: int) -> None: ...
def jax_leave_all() -> None: ...
