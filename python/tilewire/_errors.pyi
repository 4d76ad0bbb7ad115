"""Exceptions: a class for each kind of error, with what is known about it as attributes."""

from collections.abc import Mapping

class Error(Exception):
    """What failed, where, between which ranks, and what to do about it. Attributes that are not
    known are ``None``."""

    message: str | None
    op: str | None
    phase: str | None
    team: str | None
    rank: int | None
    peer: int | None
    world_rank: int | None
    world_peer: int | None
    culprit: int | None
    seq: int | None
    expected: str | None
    seen: str | None
    elapsed_ms: float | None
    hint: str | None
    cause: str | None

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

def make(kind: str, text: str, fields: Mapping[str, object]) -> Error:
    """The exception of an error of the library."""
