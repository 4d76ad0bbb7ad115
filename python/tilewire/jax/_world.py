"""Worlds of JAX: a rank for each device of a mesh."""

import atexit
import collections
import hashlib
import os
import threading

import jax
import numpy as np

from .. import _native
from .._errors import InvalidArgument, Stale

_lock = threading.Lock()
# Worlds that are alive, oldest first.
_worlds = []
# How often a mesh got a world in this process. Programs hold the number of their world, and
# processes meet under it: it follows from the mesh, so that those of other meshes do not count.
_made = collections.Counter()
_TARGET = "tilewire"


def _register():
    """Gives XLA our handlers, for the CPU and for CUDA devices."""
    capsule = jax.ffi.pycapsule
    for platform, cuda in (("cpu", False), ("CUDA", True)):
        handlers, type_id, type_info = _native.jax_handlers(cuda)
        kind = {"type_id": capsule(type_id), "type_info": capsule(type_info)}
        jax.ffi.register_ffi_type("tilewire_call_site", kind, platform=platform)
        stages = {stage: capsule(address) for stage, address in handlers}
        jax.ffi.register_ffi_target(_TARGET, stages, platform=platform)


_register()
atexit.register(_native.jax_leave_all)
os.register_at_fork(after_in_child=_native.forked)


class _Store:
    """The key-value store of jax.distributed, as the place where processes meet."""

    def __init__(self, client, address):
        self._client = client
        self.where = f"the coordinator of jax.distributed at {address}"
        self.address = None

    def connect(self):
        return self

    def set(self, key, value):
        self._client.key_value_set_bytes(key, bytes(value), allow_overwrite=True)

    def check(self, keys):
        return all(self._try(key) is not None for key in keys)

    def get(self, key):
        return bytes(self._client.blocking_key_value_get_bytes(key, 1000))

    def add(self, key, number):
        return self._client.key_value_increment(key, number)

    def _try(self, key):
        try:
            return self._client.key_value_try_get_bytes(key)
        except Exception as e:
            # "Not there yet" has no type of its own.
            if "NOT_FOUND" in str(e):
                return None
            raise


class World:
    """The devices of a mesh as ranks, with their shared memory. Made by :func:`init`.

    Also a context manager, which finalizes it.
    """

    def __init__(self, number, mesh, backend, timeout_s):
        self._number = number
        self._devices = [d.id for d in mesh.devices.flat]
        #: The mesh.
        self.mesh = mesh
        #: Sizes of the mesh's axes by their names, in the order of the mesh.
        self.shape = dict(zip(mesh.axis_names, mesh.devices.shape))
        #: Number of ranks.
        self.size = mesh.devices.size
        #: How ranks reach each other's memory: host, vmm, nccl or nvshmem.
        self.backend = backend
        #: How long a wait for a live peer may last.
        self.timeout_s = timeout_s

    def __repr__(self):
        axes = ", ".join(f"{n}={s}" for n, s in self.shape.items())
        return f"World({axes}; {self.backend})"

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        self.finalize()

    def __reduce__(self):
        raise TypeError("a World belongs to its process and cannot be pickled")

    def check(self):
        """Raises what ended the world, if anything did: a dead peer, a missed deadline.

        A failure inside a compiled program comes through XLA as an exception of JAX's whose text
        has ours; this raises it as the :class:`tilewire.Error` that it is.
        """
        _native.jax_check(self._number)

    def used_bytes(self):
        """Bytes of symmetric memory per rank that calls of compiled programs take."""
        return _native.jax_used_bytes(self._number)

    def finalize(self):
        """Ends the world in this process. Launches in flight are waited for; may be called twice.

        Programs that were traced for it raise :class:`Stale`; ``jax.clear_caches()`` drops them and
        gives their memory back, but for that of layers of experts on a GPU, which the calls of many
        programs share: it stays until the world ends.
        """
        with _lock:
            if self in _worlds:
                _worlds.remove(self)
        _native.jax_finalize(self._number)


def init(mesh, *, backend="auto", heap_bytes=None, timeout_s=600.0):
    """Collective over the processes of a mesh: makes each of its devices a rank.

    Several devices may belong to one process, and several processes take part through
    ``jax.distributed.initialize``; all of them on one host.

    Args:
        mesh: a ``jax.sharding.Mesh`` of CPU or CUDA devices. Operations are called under
            ``jax.shard_map`` over this mesh, with all of its axes manual.
        backend: ``auto`` (``host`` on the CPU, ``vmm`` on GPUs), ``host``, ``vmm``, ``nccl`` or
            ``nvshmem``.
        heap_bytes: the most symmetric memory per rank, equal in all processes. Default: 4 GiB on
            the CPU, where only what is used takes memory; a quarter of the memory of a GPU.
        timeout_s: how long a wait for a live peer may last; for the ranks to meet, at most 120 s.

    Returns:
        World: the first one is what operations use with ``world=None``.

    Raises:
        InvalidArgument: no device of the mesh belongs to this process, or they are of no platform
            that is served.
        Timeout: naming the ranks that did not come, or the coordinator that gives no answer.
        Mismatch: processes are on several hosts, or ask for different things.
        Unavailable: there is no such backend here.
    """
    if not isinstance(mesh, jax.sharding.Mesh):
        raise InvalidArgument(f"`mesh` must be a jax.sharding.Mesh, not {type(mesh).__name__}")
    devices = list(mesh.devices.flat)
    platforms = {d.platform for d in devices}
    cuda = platforms <= {"gpu", "cuda"}
    if platforms != {"cpu"} and not cuda:
        raise InvalidArgument(
            f"a world is on the CPU or on CUDA devices, not on {sorted(platforms)}"
        )
    me = jax.process_index()
    # What XLA calls a device when it executes there: the CPU's by their number among those of all
    # processes, a GPU by that of the driver.
    ordinal = (lambda d: d.local_hardware_id) if cuda else (lambda d: d.id)
    mine = [(r, ordinal(d)) for r, d in enumerate(devices) if d.process_index == me]
    if not mine:
        raise InvalidArgument("no device of the mesh belongs to this process")
    axes = list(zip(map(str, mesh.axis_names), mesh.devices.shape))
    number = _number([d.id for d in devices], axes)
    store = None
    if len(mine) < len(devices):
        store = _store()
    name = f"jax.{number:x}"
    rest = (backend, cuda, heap_bytes, float(timeout_s))
    used = _native.jax_init(number, axes, mine, store, name, *rest)
    world = World(number, mesh, used, float(timeout_s))
    with _lock:
        _worlds.append(world)
    return world


def _number(devices, axes):
    """The number of the next world of these devices: equal in all processes of the mesh, which make
    the same worlds of it, and of no other mesh."""
    mesh = f"{devices} {axes}"
    with _lock:
        _made[mesh] += 1
        text = f"{mesh} {_made[mesh]}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


def _store():
    from jax._src import distributed

    state = distributed.global_state
    if state.client is None:
        raise InvalidArgument(
            "the mesh has devices of other processes, and jax.distributed is not initialized"
        )
    return _Store(state.client, state.coordinator_address)


def world_of(world):
    """``world``, or the first one."""
    if world is None:
        with _lock:
            if not _worlds:
                raise Stale("there is no world: call tilewire.jax.init(mesh) first")
            return _worlds[0]
    if not isinstance(world, World):
        raise InvalidArgument(f"`world` must be a tilewire.jax.World, not {type(world).__name__}")
    with _lock:
        if world not in _worlds:
            raise Stale("the world has been finalised: make a new one by tilewire.jax.init(mesh)")
    return world


def names_of(axis_name):
    """Axes as a tuple of names."""
    names = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
    if not names or len(set(names)) != len(names):
        raise InvalidArgument(
            f"`axis_name` must be the name of an axis, or several, not {axis_name!r}"
        )
    return tuple(names)


def team_of(axis_name, world):
    """World, axes and number of ranks of a call that is being traced.

    The call must be under ``shard_map`` over a mesh with the axes of the world's, all of them
    manual: each rank computes on what it has, and XLA divides nothing behind our back.
    """
    world, axes = world_of(world), names_of(axis_name)
    for name in axes:
        if name not in world.shape:
            raise InvalidArgument(f"the world has no axis {name!r}; it has {list(world.shape)}")
    mesh = jax.sharding.get_abstract_mesh()
    manual = set(getattr(mesh, "manual_axes", ()))
    if not manual.issuperset(axes):
        raise InvalidArgument(
            f"axis {axes} is not manual here: call the operation under jax.shard_map over the"
            " world's mesh"
        )
    here = dict(zip(mesh.axis_names, mesh.axis_sizes))
    if list(here.items()) != list(world.shape.items()):
        raise InvalidArgument(
            f"this mesh is {here}, but the world was made for {world.shape}: use the mesh that was"
            " passed to tilewire.jax.init"
        )
    if manual != set(here):
        raise InvalidArgument(
            f"axes {sorted(set(here) - manual)} are not manual: pass all axes of the mesh to"
            " jax.shard_map as `axis_names`"
        )
    return world, axes, int(np.prod([world.shape[n] for n in axes]))


def around():
    """Number of the world whose program is being traced, 0 if there is none: a local call that
    fails in it must end the world, or the other ranks would wait for this one in a later call."""
    mesh = jax.sharding.get_abstract_mesh()
    if not getattr(mesh, "manual_axes", ()):
        return 0
    here = list(zip(mesh.axis_names, mesh.axis_sizes))
    with _lock:
        return next((w._number for w in _worlds if list(w.shape.items()) == here), 0)


def check_devices(world_number, mesh):
    """Raises unless the mesh of a program that is being lowered has the world's devices in its
    order."""
    with _lock:
        world = next((w for w in _worlds if w._number == world_number), None)
    if world is None:
        raise Stale(
            "the world that this was traced for has been finalised: call jax.clear_caches() after a"
            " new tilewire.jax.init"
        )
    if not isinstance(mesh, jax.sharding.Mesh):
        raise InvalidArgument(
            "the devices of the mesh are not known: pass the mesh to jax.shard_map, or enter it by"
            " jax.set_mesh"
        )
    devices = [d.id for d in mesh.devices.flat]
    if devices != world._devices:
        raise InvalidArgument(
            f"the mesh has devices {devices}, but the world was made for {world._devices}: use the"
            " mesh that was passed to tilewire.jax.init"
        )


def check(world=None):
    """Raises what ended ``world`` (None: the first one), if anything did: :meth:`World.check`."""
    world_of(world).check()
