"""Exceptions: a class for each kind of error, with what is known about it as attributes."""


class Error(Exception):
    """What failed, where, between which ranks, and what to do about it.

    Attributes that are not known are ``None``.

    Attributes:
        message: the sentence, without the context that ``str`` adds.
        op: the operation; phase: its phase.
        team: name of the team whose ranks are meant; rank: the reporting rank; peer: the other one.
        world_rank, world_peer: the same two by their numbers in the world.
        culprit: world rank of the rank that is to blame, which may wait for nobody.
        seq: number of the launch on its team.
        expected, seen: what was expected and what was there instead.
        elapsed_ms: how long was waited.
        hint: what to do about it.
        cause: the error underneath.
    """

    message = op = phase = team = rank = peer = seq = None
    world_rank = world_peer = culprit = None
    expected = seen = elapsed_ms = hint = cause = None


class InvalidArgument(Error, ValueError):
    """The arguments are not acceptable; nothing was done."""


class Unsupported(Error, NotImplementedError):
    """The combination is legal but this backend does not provide it."""


class Unavailable(Error):
    """A library, device or file that this needs is not there."""


class NotPrepared(Error):
    """A captured call needs a plan that was not made before the capture."""


class Mismatch(Error):
    """Ranks disagree about what they are doing."""


class Timeout(Error, TimeoutError):
    """A wait passed its deadline while the peer was still alive."""


class PeerDead(Error):
    """A peer's process has ended."""


class Aborted(Error):
    """The team was aborted by another rank, or by the caller."""


class ProtocolError(Error):
    """A rule of the protocol was broken."""


class Exhausted(Error, MemoryError):
    """Memory, descriptors or slots ran out."""


class Stale(Error):
    """A world, buffer or handle of an earlier generation, or of the parent process, was used."""


class PermissionDenied(Error, PermissionError):
    """The operating system refused."""


class IoError(Error, OSError):
    """Reading or writing a file or socket failed."""


class ConfigError(Error, ValueError):
    """An environment variable or configuration value is not acceptable."""


class Corrupt(Error):
    """Stored data is damaged or belongs to something else."""


class DeviceLost(Error):
    """The accelerator is gone."""


class Internal(Error):
    """A bug in tilewire."""


_KINDS = {
    "invalid_argument": InvalidArgument,
    "unsupported": Unsupported,
    "unavailable": Unavailable,
    "not_prepared": NotPrepared,
    "mismatch": Mismatch,
    "timeout": Timeout,
    "peer_dead": PeerDead,
    "aborted": Aborted,
    "protocol": ProtocolError,
    "exhausted": Exhausted,
    "stale": Stale,
    "permission": PermissionDenied,
    "io": IoError,
    "config": ConfigError,
    "corrupt": Corrupt,
    "device_lost": DeviceLost,
    "internal": Internal,
}


def make(kind, text, fields):
    """The exception of an error of the library."""
    e = _KINDS.get(kind, Error)(text)
    for name, value in fields.items():
        setattr(e, name, value)
    return e
