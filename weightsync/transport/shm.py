"""Shared memory on one host: one sealed memfd, created once, passed by descriptor, reused for
every update.

The sender maps it shared and writes; workers map it read-only to digest it, and privately
(copy-on-write) for the engine's loader, so that torch gets writable views without anybody being
able to write into the arena. A memfd has no name: when the last process that holds it dies, it is
gone. Its size is sealed before it leaves the sender, so no reader can meet SIGBUS.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from weightsync.errors import MemoryShort, ProtocolError, TransportError
from weightsync.manifest import Manifest
from weightsync.transport.memfd import check_sealed, sealed_memfd

__all__ = [
    "ALIGNMENT",
    "ArenaReader",
    "ShmArena",
    "address_of",
    "arena_offsets",
    "available_memory",
]

ALIGNMENT: Final = 64
"""Bytes; a cache line, and a multiple of every dtype's size."""

_MADV_POPULATE_READ: Final = 22


def arena_offsets(manifest: Manifest) -> tuple[NDArray[np.uint64], int]:
    """Where each tensor lies in an arena, in manifest order.

    Returns:
        Offsets in bytes, shape (n,), each a multiple of `ALIGNMENT`, and the arena's size in bytes.
    """
    padded = (manifest.nbytes + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
    ends = np.cumsum(padded, dtype=np.uint64)
    return ends - padded, max(int(ends[-1]), mmap.PAGESIZE)


def address_of(buffer: mmap.mmap) -> int:
    """The address of a mapping's first byte. Valid while somebody holds the mapping."""
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def available_memory(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> tuple[int, str]:
    """Bytes that may still be taken, and which limit says so: the host's or the cgroup's (v2 or
    v1)."""
    host = 0
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            host = int(line.split()[1]) * 1024
    candidates = [(host, "MemAvailable of the host")]
    for directory, limit, usage, cache in _cgroups(proc, cgroup):
        try:
            allowed = (directory / limit).read_text().strip()
            used = int((directory / usage).read_text())
            reclaimable = [
                int(line.split()[1])
                for line in (directory / "memory.stat").read_text().splitlines()
                if line.split()[0] == cache
            ]
        except (OSError, ValueError, IndexError):
            continue
        if allowed != "max":
            candidates.append((int(allowed) - used + sum(reclaimable), f"cgroup limit {limit}"))
    return min(candidates)


def _cgroups(proc: Path, root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Directories whose limits bind this process (its own cgroup and all above it), each with the
    names of its limit, its usage, and the reclaimable part of its statistics."""
    v2 = ("memory.max", "memory.current", "inactive_file")
    v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    own = {"v2": "/", "v1": "/"}
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                own["v2"] = path
            elif "memory" in controllers.split(","):
                own["v1"] = path
    for base, path, names in ((root, own["v2"], v2), (root / "memory", own["v1"], v1)):
        inner = Path(path.lstrip("/"))
        for part in (inner, *inner.parents):
            yield (base / part, *names)


class ShmArena:
    """The sender's end.

    Args:
        nbytes: size of the arena.

    Raises:
        MemoryShort: it does not fit; checked before anything is reserved.
    """

    def __init__(self, nbytes: int) -> None:
        available, limit = available_memory()
        if nbytes > available:
            raise MemoryShort(nbytes, available, limit)
        self.nbytes = nbytes
        try:
            self.fd = sealed_memfd(nbytes)
            try:
                self._map: mmap.mmap | None = mmap.mmap(self.fd, nbytes, flags=mmap.MAP_SHARED)
            except OSError:
                os.close(self.fd)
                raise
        except OSError as error:
            raise TransportError(f"cannot reserve an arena of {nbytes} bytes: {error}") from error
        self.address = address_of(self._map)

    def view(self) -> NDArray[np.uint8]:
        """The arena's bytes, writable, shape (nbytes,)."""
        if self._map is None:
            raise TransportError("the arena is closed")
        return np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        """Give the memory back; workers that map it keep what they map."""
        if self._map is not None:
            self._map = None
            os.close(self.fd)


class ArenaReader:
    """A worker's end.

    Args:
        fd: descriptor that came from the sender; owned by the reader from now on.
        nbytes: size that was announced.

    Raises:
        ProtocolError: the descriptor is no sealed memory of that size.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd = fd
        self.nbytes = nbytes
        try:
            check_sealed(fd, nbytes)
            self._map: mmap.mmap | None = mmap.mmap(
                fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ
            )
        except OSError as error:
            os.close(fd)
            raise ProtocolError(f"the arena's descriptor cannot be mapped: {error}") from error
        except ProtocolError:
            os.close(fd)
            raise

    @contextmanager
    def held(self) -> Iterator[int]:
        """The arena's address, mapped until the block ends even if the reader is closed meanwhile.

        Raises:
            TransportError: the arena is closed.
        """
        mapping = self._map
        if mapping is None:
            raise TransportError("the arena is closed")
        yield address_of(mapping)
        del mapping

    def private_copy(self, first: int = 0, nbytes: int | None = None) -> mmap.mmap:
        """A fresh copy-on-write mapping: writable for its holder, invisible to everybody else.

        A new one for each update: a page that an earlier loader wrote to would stay as it was then.
        It is unmapped when the last tensor that views it is gone.

        Args:
            first, nbytes: the part that is about to be read, whose pages are touched now.
        """
        if self._map is None:
            raise TransportError("the arena is closed")
        copy = mmap.mmap(
            self._fd, self.nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
        # Page faults now, before an engine is paused, rather than in its loader.
        start = first // mmap.PAGESIZE * mmap.PAGESIZE
        length = self.nbytes - start if nbytes is None else max(first + nbytes - start, 1)
        with contextlib.suppress(OSError):  # Linux before 5.14 does not know it
            copy.madvise(_MADV_POPULATE_READ, start, length)
        return copy

    def close(self) -> None:
        if self._map is not None:
            self._map = None
            os.close(self._fd)
