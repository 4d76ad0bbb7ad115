"""Tiles over wires: communication hidden behind arithmetic."""

from ._errors import Aborted as Aborted
from ._errors import ConfigError as ConfigError
from ._errors import Corrupt as Corrupt
from ._errors import DeviceLost as DeviceLost
from ._errors import Error as Error
from ._errors import Exhausted as Exhausted
from ._errors import Internal as Internal
from ._errors import InvalidArgument as InvalidArgument
from ._errors import IoError as IoError
from ._errors import Mismatch as Mismatch
from ._errors import NotPrepared as NotPrepared
from ._errors import PeerDead as PeerDead
from ._errors import PermissionDenied as PermissionDenied
from ._errors import ProtocolError as ProtocolError
from ._errors import Stale as Stale
from ._errors import Timeout as Timeout
from ._errors import Unavailable as Unavailable
from ._errors import Unsupported as Unsupported
from ._native import __version__ as __version__
from ._native import backends as backends

__all__ = [
    "Aborted",
    "ConfigError",
    "Corrupt",
    "DeviceLost",
    "Error",
    "Exhausted",
    "Internal",
    "InvalidArgument",
    "IoError",
    "Mismatch",
    "NotPrepared",
    "PeerDead",
    "PermissionDenied",
    "ProtocolError",
    "Stale",
    "Timeout",
    "Unavailable",
    "Unsupported",
    "__version__",
    "backends",
]
