"""Worlds of torch: the ranks of a process group, or of what a launcher started."""

import atexit
import os
import threading
import weakref

import torch

from .. import _native
from .._errors import InvalidArgument, Stale

_native.use_exchange_api(torch.Tensor)
atexit.register(_native.leave_all)
os.register_at_fork(after_in_child=_native.forked)

_lock = threading.Lock()
# Worlds that are alive, oldest first; of process groups by the group.
_worlds = []
_of_group = weakref.WeakKeyDictionary()
# What ``group=None`` means: the number that operations take, 0 without a world.
_default_handle = 0


class World:
    """The ranks of one process group, with their shared memory. Made by :func:`init`.

    Also a context manager, which finalizes it.
    """

    def __init__(self, native, parent=None, group=None):
        self._native = native
        self._group = group
        self._parent = parent
        self._teams = []
        self._formed = 0
        #: The number that operations take.
        self.handle = native.handle
        #: My rank.
        self.rank = native.rank
        #: Number of ranks.
        self.size = native.size
        #: Where the tensors of its operations lie.
        self.device = torch.device(native.device)
        #: How ranks reach each other's memory: host, vmm, nccl or nvshmem.
        self.backend = native.backend

    def __repr__(self):
        return f"World(rank {self.rank} of {self.size}, {self.device}, {self.backend})"

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        self.finalize()

    def __reduce__(self):
        raise TypeError("a World belongs to its process and cannot be pickled")

    def team(self, ranks, name=None):
        """Collective over ``ranks`` (ranks of this world, in team order): a world of them.

        ``None`` for ranks that are not among them, which do not wait. The same ranks may form
        several teams; all of them must call in the same order.
        """
        ranks = [int(r) for r in ranks]
        name = name or "team/" + ",".join(map(str, ranks))
        native = self._native.team(ranks, name)
        if native is None:
            return None
        team = World(native, parent=self)
        self._teams.append(team)
        return team

    def check(self):
        """Raises what ended the team, if anything did: a dead peer, a missed deadline."""
        self._native.check()

    def barrier(self):
        """The host waits until all ranks have come here. Work of GPUs is not waited for: that is
        what ``SymmHandle.barrier`` orders, on a stream."""
        self._native.barrier()

    def memory(self):
        """Plans and bytes of symmetric memory in use, as a dict."""
        return self._native.memory()

    def finalize(self):
        """Ends the world and its teams on this rank, and gives their memory back.

        In any order with ``torch.distributed.destroy_process_group``; may be called twice. Work in
        flight is waited for. Captured graphs keep what they use.
        """
        global _default_handle
        while self._teams:
            self._teams.pop().finalize()
        with _lock:
            if self in _worlds:
                _worlds.remove(self)
            if self._group is not None and _of_group.get(self._group) is self:
                del _of_group[self._group]
            if _default_handle == self.handle:
                _default_handle = _worlds[0].handle if _worlds else 0
        self._native.finalize()


def init(
    group=None,
    *,
    device=None,
    backend="auto",
    heap_bytes=None,
    timeout_s=600.0,
    check=False,
):
    """Collective: makes the world of a process group.

    Args:
        group: a ``torch.distributed.ProcessGroup`` of any backend: only its store is used. ``None``
            is the default group, or, where torch.distributed is not in use, the ranks that a
            launcher started (``torchrun``, ``tilewire run``, ``mpirun``), or this process alone.
        device: where tensors lie, as torch names it. Default: the current CUDA device if there is
            one, else the CPU.
        backend: ``auto`` (``host`` on the CPU, ``vmm`` on GPUs), ``host``, ``vmm``, ``nccl`` or
            ``nvshmem``.
        heap_bytes: the most symmetric memory per rank, equal on all ranks. Default: 4 GiB on the
            CPU, where only what is used takes memory; a quarter of the memory of a GPU.
        timeout_s: how long a wait for a live peer may last; for the ranks to meet, at most 120 s.
        check: compare operations and sizes of all ranks before each eager call.

    Returns:
        World: the first one is what operations use with ``group=None``.

    Raises:
        Timeout: naming the ranks that did not come, or the store that gives no answer.
        Mismatch: ranks are on several hosts, or ask for different things.
        Unavailable: there is no such backend here.
    """
    global _default_handle
    if group is not None and group in _of_group:
        raise InvalidArgument("this group has a world already: finalize it first")
    ordinal = _ordinal(device)
    rest = (backend, ordinal, heap_bytes, float(timeout_s), bool(check))
    group, place = _place(group)
    if place is None:
        native = _native.world_of_environment(*rest)
    else:
        native = _native.world_of_store(*place, *rest)
    world = World(native, group=group)
    with _lock:
        _worlds.append(world)
        if group is not None:
            _of_group[group] = world
        if not _default_handle:
            _default_handle = world.handle
    return world


def _ordinal(device):
    if device is None:
        return torch.cuda.current_device() if torch.cuda.is_available() else None
    device = torch.device(device)
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        raise InvalidArgument(f"a world is on the CPU or a CUDA device, not on {device}")
    return torch.cuda.current_device() if device.index is None else device.index


def _place(group):
    """The group that is meant, and where its ranks meet: its store, a name, my rank, the size."""
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized():
        if group is not None:
            raise InvalidArgument("torch.distributed is not initialized, so there are no groups")
        return None, None
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        # What `new_group` gives to processes that are not in the group.
        raise InvalidArgument(
            f"`group` must be a ProcessGroup that this process is in, not {group!r}"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise InvalidArgument("this process is not in the group")
    store = _Store(dist.distributed_c10d._get_process_group_store(group))
    return group, (store, group.group_name, rank, dist.get_world_size(group))


class _Store:
    """The store of a process group, as the place where ranks meet."""

    def __init__(self, store):
        self._store = store
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        self.where = f"torch's {type(store).__name__}"
        self.address = None
        if isinstance(store, torch.distributed.TCPStore):
            self.address = (store.host, store.port)
            self.where += f" at {store.host}:{store.port}"

    def connect(self):
        """A connection of its own: whoever waits in one keeps others from using it."""
        try:
            return self._store.clone()
        except (AttributeError, RuntimeError, NotImplementedError):
            return self._store


def handle_of(group):
    """The number of a world: of ``None``, a World, or a process group that has one."""
    if group is None:
        handle = _default_handle
        if handle == 0:
            raise Stale("there is no world: call tilewire.torch.init() first")
        return handle
    if isinstance(group, World):
        return group.handle
    return world_of(group).handle


def world_of(group):
    """As :func:`handle_of`, the world itself."""
    if isinstance(group, World):
        return group
    if group is None:
        handle = handle_of(None)
        with _lock:
            return next(w for w in _worlds if w.handle == handle)
    try:
        return _of_group[group]
    except (KeyError, TypeError):
        raise Stale(f"{group!r} has no world: call tilewire.torch.init(group) first") from None
