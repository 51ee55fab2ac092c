"""Memory without a name, shared by passing its descriptor.

It is reserved whole and sealed against resizing, so that nobody who maps it can ever meet SIGBUS.
When the last process that holds it dies, it is gone.
"""

from __future__ import annotations

import fcntl
import os
from typing import Final

from weightsync.errors import ProtocolError

__all__ = ["check_sealed", "sealed_memfd"]

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def sealed_memfd(nbytes: int) -> int:
    """A descriptor of ``nbytes`` zeroed bytes.

    Raises:
        OSError: they cannot be had.
    """
    fd = os.memfd_create("weightsync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        # Reserve every page now: a write into a hole of a full memory limit would be SIGBUS.
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def check_sealed(fd: int, nbytes: int) -> None:
    """Whether a descriptor from elsewhere is sealed memory of the size that was announced.

    Raises:
        ProtocolError: it is not.
        OSError: it is no memfd at all.
    """
    size = os.fstat(fd).st_size
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if size != nbytes or nbytes <= 0 or seals & _SEALS != _SEALS:
        raise ProtocolError(
            f"expected sealed memory of {nbytes} bytes, got {size} bytes with seals {seals:#x}"
        )
