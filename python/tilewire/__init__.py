"""Tiles over wires: communication hidden behind arithmetic.

``tilewire.torch`` has the operations for PyTorch, ``tilewire.jax`` those for JAX. This module needs
neither: it has the exceptions and what this machine can do (``python -m tilewire doctor``).
"""

import os

from . import _native
from ._errors import (
    Aborted,
    ConfigError,
    Corrupt,
    DeviceLost,
    Error,
    Exhausted,
    Internal,
    InvalidArgument,
    IoError,
    Mismatch,
    NotPrepared,
    PeerDead,
    PermissionDenied,
    ProtocolError,
    Stale,
    Timeout,
    Unavailable,
    Unsupported,
)
from ._native import __version__, backends

# Kernels that were built with the package, if it has any; others are compiled when they are used.
_native.use_cubins(os.path.join(os.path.dirname(__file__), "cubins"))

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
