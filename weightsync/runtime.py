"""Places on this machine that belong to this user alone, and that a killed process does not leave
behind for good.

Whatever is left lying is locked by the process that made it. A lock dies with its process, in
whatever container: who can take it knows that nobody lives there any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from pathlib import Path

from weightsync.errors import TransportError

__all__ = ["OwnedDirectory", "remove_stale", "runtime_directory"]

UNBORN_SECONDS = 60.0
"""A directory that has not got its name by then never will: its maker was killed."""


def runtime_directory() -> Path:
    """A directory of this user alone (mode 0700), for sockets and marks.

    Raises:
        TransportError: somebody else owns what stands there, or it cannot be made.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    path = Path(base) / f"weightsync-{os.geteuid()}"
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
    except OSError as error:
        raise TransportError(
            f"cannot make the directory {path}: {error.strerror}",
            remedy="set XDG_RUNTIME_DIR to an existing directory of your own, or unset it",
        ) from error
    if (
        not stat.S_ISDIR(found.st_mode)
        or found.st_uid != os.geteuid()
        or stat.S_IMODE(found.st_mode) & 0o077
    ):
        raise TransportError(
            f"{path} must be a directory of mode 0700 that belongs to user {os.geteuid()}",
            remedy="remove it, or set XDG_RUNTIME_DIR to a directory of your own",
        )
    return path


class OwnedDirectory:
    """A fresh directory ``<prefix>-<random>`` in the runtime directory, removed by `close` or
    after its process's death."""

    def __init__(self, prefix: str) -> None:
        base = runtime_directory()
        name = f"{prefix}-{secrets.token_hex(6)}"
        unborn = base / f"new-{name}"
        unborn.mkdir(mode=0o700)
        self._lock = os.open(unborn / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # It gets its name only once it is locked, so that no cleaner finds it unlocked.
        self.path = base / name
        unborn.rename(self.path)

    def close(self) -> None:
        """Remove it. Closing again does nothing."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def remove_stale(prefix: str) -> None:
    """Remove the directories of that prefix whose processes are dead."""
    base = runtime_directory()
    unborn = [
        directory
        for directory in base.glob(f"new-{prefix}-*")
        if time.time() - directory.lstat().st_mtime > UNBORN_SECONDS
    ]
    for directory in unborn:
        shutil.rmtree(directory, ignore_errors=True)
    for directory in base.glob(f"{prefix}-*"):
        try:
            lock = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
