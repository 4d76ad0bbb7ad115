"""Symmetric tensors: the same memory on every rank of a world, which its peers read and write."""

import torch

from .. import _native
from .._errors import InvalidArgument
from ._world import handle_of, world_of




def symm_empty(*shape, dtype=None, group=None):
    """Collective: a tensor whose memory all ranks of a world have, at the same place.

    It is used like any other tensor, also by the operations; :func:`symm_handle` gives what only
    symmetric memory can do. The memory returns when the last tensor over it is gone on all ranks
    and a rank needs memory again; as with torch's own memory, work of other streams than the one on
    which it was made must be ordered before that. Its values are undefined.

    Args:
        shape: sizes, or one sequence of them; the same on all ranks.
        dtype: default: torch's default dtype.
        group: a World, a ProcessGroup that has one, or None for the first world.

    Raises:
        Exhausted: it does not fit the world's ``heap_bytes``.
        Mismatch: another rank called something else, or asks for another size.
        NotPrepared: a capture is in progress.
    """
    if len(shape) == 1 and not isinstance(shape[0], int):
        shape = tuple(shape[0])
    dtype = dtype or torch.get_default_dtype()
    num = 1
    for n in shape:
        num *= n
    if any(n < 0 for n in shape):
        raise InvalidArgument(f"symm_empty: the shape {shape} has a negative dimension")
    native = _native.SymmBuffer(handle_of(group), num * dtype.itemsize)
    rank = native.world & 0xFFF
    flat = torch.utils.dlpack.from_dlpack(native.part(rank)).view(-1)
    return flat[: num * dtype.itemsize].view(dtype).view(shape)


def symm_adopt(t, group=None):
    """Collective: the memory of ``t``, a GPU tensor of
    ``torch.distributed._symmetric_memory.empty``, as symmetric memory of a world.

    Peers write to and read from the very memory that ``t`` has. It stays part of the world's memory
    as long as the world lives, also when ``t`` is gone.

    Args:
        t: contiguous; the same shape and dtype on all ranks.
        group: as :func:`symm_empty`.

    Returns:
        A tensor of t's shape and dtype over the same memory, at other addresses:
        :func:`symm_handle` and :meth:`EpGroup.buffer` take it.

    Raises:
        Unsupported: the memory was not made to be shared with other processes, or lies on the CPU,
            or the world's backend is not ``vmm``.
        Mismatch: the allocations of the ranks are not alike.
    """
    if not isinstance(t, torch.Tensor) or not t.is_contiguous() or t.numel() == 0:
        raise InvalidArgument("symm_adopt: a contiguous tensor with elements is expected")
    world, num = handle_of(group), t.numel() * t.element_size()
    device = world_of(group).device
    if t.is_cuda and t.device != device:
        raise InvalidArgument(f"symm_adopt: the tensor is on {t.device}, but the world on {device}")
    addr = t.data_ptr() if t.is_cuda else 0
    native, inside = _native.SymmBuffer.adopt(world, addr, num)
    flat = torch.utils.dlpack.from_dlpack(native.part(world & 0xFFF)).view(-1)
    return flat[inside : inside + num].view(t.dtype).view(t.shape)


def symm_handle(t):
    """What only symmetric memory can do with ``t``: a tensor of :func:`symm_empty`, or a contiguous
    part of one.

    Raises:
        InvalidArgument: the memory of ``t`` is not symmetric, or ``t`` is not contiguous.
    """
    return SymmHandle(t)


class SymmHandle:
    """One tensor on all ranks. Transfers, signals and barriers take their place on the current
    stream, and can be captured; on the CPU they have run when the call returns.

    A transfer becomes visible to its peer behind a later signal or barrier. Signals are counted:
    each ``put_signal`` to a rank lets one ``wait_signal`` of that rank pass, for each symmetric
    tensor and each pair of ranks.
    """

    def __init__(self, t):
        if not isinstance(t, torch.Tensor) or not t.is_contiguous():
            raise InvalidArgument("symm_handle: a contiguous tensor of symm_empty is expected")
        start = t.untyped_storage().data_ptr()
        self._native = _native.SymmBuffer.at(start) if start else None
        if self._native is None:
            raise InvalidArgument(
                "symm_handle: this tensor's memory is not symmetric: make it by symm_empty"
            )
        # The tensor itself is not kept: tensors made here keep the memory.
        self._shape, self._dtype = t.shape, t.dtype
        # Of the buffer: a storage that was adopted begins there, whatever the tensor's offset says.
        self._at = t.data_ptr() - start
        self._len = t.numel() * t.element_size()
        #: My rank, and the number of ranks.
        self.rank, self.size = self._native.world & 0xFFF, self._native.world >> 12 & 0xFFF

    def __reduce__(self):
        raise TypeError("a SymmHandle belongs to its process and cannot be pickled")

    def _peer(self, peer):
        if not 0 <= peer < self.size:
            raise InvalidArgument(f"symm_handle: rank {peer} is not in a world of {self.size}")
        return peer

    def get_tensor(self, peer):
        """The tensor of rank ``peer``, in its memory: its use is ordered by signals and barriers.

        Raises:
            Unsupported: peers' memory has no addresses here (GPUs that do not reach each other).
        """
        capsule = self._native.part(self._peer(peer))
        flat = torch.utils.dlpack.from_dlpack(capsule).view(-1)
        return flat[self._at : self._at + self._len].view(self._dtype).view(self._shape)

    def contiguous_view(self):
        """The tensors of all ranks as one, [world, ...]: each is contiguous, and they lie in even
        steps in their ranks' memory.

        Raises:
            Unsupported: peers' memory has no addresses here, or does not lie in even steps (more
                than two ranks of the backend ``nvshmem``).
        """
        rows = torch.utils.dlpack.from_dlpack(self._native.parts())
        rows = rows[:, self._at : self._at + self._len]
        return rows.view(self._dtype).view(self.size, *self._shape)

    def _checked(self, what, t):
        if t.dtype != self._dtype or t.numel() * t.element_size() > self._len:
            raise InvalidArgument(
                f"symm_handle: {what} {tuple(t.shape)} {t.dtype} does not fit"
                f" {tuple(self._shape)} {self._dtype}"
            )
        return t.contiguous()

    def put(self, src, peer):
        """Writes ``src`` to the beginning of the tensor of rank ``peer``: elements of its dtype, at
        most as many as it has."""
        self._native.put(self._peer(peer), self._at, self._checked("src", src), False)

    def put_signal(self, src, peer):
        """:meth:`put`, and a signal behind it."""
        self._native.put(self._peer(peer), self._at, self._checked("src", src), True)

    def get(self, peer, out=None):
        """The tensor of rank ``peer``, copied: to ``out``, contiguous elements of its dtype, at
        most as many as it has, or to a new tensor.

        Raises:
            Unsupported: peers' memory has no addresses here.
        """
        if out is None:
            device = torch.utils.dlpack.from_dlpack(self._native.part(self.rank)).device
            out = torch.empty(self._shape, dtype=self._dtype, device=device)
        elif self._checked("out", out) is not out:
            raise InvalidArgument("symm_handle: out is not contiguous")
        self._native.get(self._peer(peer), self._at, out)
        return out

    def wait_signal(self, peer, n=1):
        """Waits for ``n`` more signals of rank ``peer``: what it put before is here then."""
        if n < 1:
            raise InvalidArgument(f"symm_handle: a wait must be for a signal at least, not {n}")
        self._native.wait_signal(self._peer(peer), n)

    def barrier(self):
        """Waits until all ranks have come here: what each put before is at its destination then."""
        self._native.barrier()
