"""Worlds of tensor-parallel groups: what ``initialize_ub`` and ``destroy_ub`` do here."""

import enum

import torch

from ..._errors import InvalidArgument, Stale, Unsupported
from .._world import World, _of_group, init, world_of

# Worlds that were made here, newest last, and teams of `initialize_ub` that no group has taken yet,
# by the ranks of torch's default group.
_made = []
_teams = {}
_initialized = False


class UserBufferQuantizationMode(enum.Enum):
    """What :func:`initialize_ub` takes in ``quantization_modes``."""

    NONE = "none"
    FP8 = "fp8"


def refuse(where, **arguments):
    """Raises for each argument that asks for what tilewire does not have."""
    for name, value in arguments.items():
        if value:
            raise Unsupported(f"{where}: {name}={value!r} has no counterpart in tilewire.torch.te")


def ranks_of(group):
    """The number of ranks of a tensor-parallel group; 1 without one."""
    if group is None:
        return 1
    return group.size if isinstance(group, World) else group.size()


def world_for(group, device=None):
    """The World of a tensor-parallel group. The first call for a group makes it, together with the
    group's other ranks."""
    if group is None or isinstance(group, World) or group in _of_group:
        return world_of(group)
    team = _teams.pop(tuple(torch.distributed.get_process_group_ranks(group)), None)
    if team is None:
        world = init(group, device=device)
        _made.append(world)
        return world
    # From now on the group's own: found by the group, and forgotten when it ends.
    team._group = group
    _of_group[group] = team
    return team


def _everyone():
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return world_for(dist.group.WORLD)
    try:
        return world_of(None)
    except Stale:
        world = init()
        _made.append(world)
        return world


def initialize_ub(
    shape,
    tp_size,
    use_fp8=False,
    quantization_modes=None,
    dtype=torch.bfloat16,
    ub_cfgs=None,
    bootstrap_backend=None,
    with_cublasmp=False,
):
    """Collective over all ranks: makes the Worlds of tensor-parallel groups of ``tp_size`` ranks
    that follow each other. :class:`Linear` works without it, and makes the World of its group then.

    Args:
        shape, dtype: accepted without effect: plans are made when a shape first comes.
        tp_size: ranks of a tensor-parallel group.
        use_fp8: unsupported.
        quantization_modes: a list of :class:`UserBufferQuantizationMode`; FP8 is unsupported.
        ub_cfgs: accepted without effect: tilewire chooses how it overlaps.
        bootstrap_backend: accepted without effect: only the store of torch.distributed is used.
        with_cublasmp: accepted without effect.

    Raises:
        RuntimeError: called twice without :func:`destroy_ub`.
        InvalidArgument: ``tp_size`` does not divide the number of ranks.
        Unsupported: FP8.
    """
    global _initialized
    refuse("initialize_ub", use_fp8=use_fp8)
    if UserBufferQuantizationMode.FP8 in (quantization_modes or ()):
        refuse("initialize_ub", quantization_modes=quantization_modes)
    if _initialized:
        raise RuntimeError("initialize_ub was already called: call destroy_ub first")
    world = _everyone()
    if tp_size < 1 or world.size % tp_size:
        raise InvalidArgument(f"initialize_ub: tp_size={tp_size} must divide {world.size} ranks")
    _initialized = True
    if tp_size == world.size:
        return
    first = world.rank // tp_size * tp_size
    ranks = tuple(range(first, first + tp_size))
    team = world.team(ranks)
    _made.append(team)
    _teams[ranks] = team


def destroy_ub():
    """Ends, on this rank, the Worlds that :func:`initialize_ub` and :class:`Linear` made. A layer
    that is used again makes the World of its group anew."""
    global _initialized
    _initialized = False
    _teams.clear()
    while _made:
        _made.pop().finalize()
