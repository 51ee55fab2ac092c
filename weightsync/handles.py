"""Handles: weights in shared memory, described by plain JSON values.

For an engine that is told where weights are, instead of being spoken to over a sender's socket::

    ids = llm.collective_rpc("report_device_id")
    with weightsync.handles.export_handles(source, ids) as exported:
        done = llm.collective_rpc("update_weights_from_ipc_handles", args=(exported.handles,))

A handle names a process, a descriptor in it, and what lies there: nothing in it is code, and
nothing in it is believed. Whoever opens one looks at ``/proc/<pid>/fd/<fd>`` and takes only memory
of this user, sealed against resizing, of the inode and size that were announced, whose tensors lie
inside it; then digests every tensor in place and compares.
"""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import socket
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

import msgspec
import numpy as np

from weightsync.digest import derive_seeds
from weightsync.errors import UpdateRefused
from weightsync.manifest import MAX_BYTES, TensorSpec
from weightsync.sources.base import Source, fill
from weightsync.transport.shm import ShmArena, arena_offsets

__all__ = [
    "ArenaHandle",
    "ExportedHandles",
    "export_handles",
    "host_id",
    "state_dict_info",
]

DIGEST_BYTES = 16
_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Hex = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]*\Z")]


class ArenaHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where one update's weights lie, and what they are. JSON values only.

    Attributes:
        kind: of memory; so far ``"shm"``, shared memory of one host.
        host: `host_id` of the exporting process.
        pid: of the exporting process.
        fd: number of the memory's descriptor in that process.
        inode: of the memory.
        nbytes: size of the memory.
        tensors: name, dtype (torch's name without ``torch.``) and shape of each tensor.
        offsets: where each begins in the memory, in bytes.
        manifest_hash: of ``tensors``.
        seed: of the digests, 64 bits, hexadecimal.
        digests: of all tensors in order, 16 bytes each, hexadecimal (see `weightsync.digest`).
    """

    kind: Annotated[str, msgspec.Meta(pattern=r"^shm\Z")]
    host: str
    pid: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
    fd: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
    inode: _Number
    nbytes: _Size
    tensors: tuple[TensorSpec, ...]
    offsets: tuple[_Size, ...]
    manifest_hash: str
    seed: Annotated[_Hex, msgspec.Meta(min_length=1, max_length=16)]
    digests: _Hex


@functools.cache
def host_id() -> str:
    """Names the place within which shared-memory handles can be opened: one boot of one kernel, and
    one process-id namespace of it (a container has its own). The same for all processes there.

    Raises:
        OSError: it cannot be told at the moment.
    """
    parts = []
    for path in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
        try:
            parts.append(Path(path).read_text().strip())
            break
        except FileNotFoundError:
            continue
    else:
        parts.append(socket.gethostname())
    try:
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    except FileNotFoundError:
        parts.append("no pid namespaces")
    return "cpu-" + hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


class ExportedHandles:
    """A source's weights in an arena of this process, and the handles that describe them.

    The arena lives until `close`: keep this object until every worker has answered. Not
    thread-safe.

    Args:
        source: what the trainer has.
        device_ids: of the workers that shall take them, as each reports its own.

    Attributes:
        handles: by device id; JSON values only. All ids share one arena.

    Raises:
        UpdateRefused: no device id.
        SourceError, ManifestError, MemoryShort, TransportError: the source cannot be read, or the
            arena not be made.
    """

    def __init__(self, source: Source, device_ids: Iterable[str]) -> None:
        self._source = source
        self._device_ids = tuple(dict.fromkeys(device_ids))
        if not self._device_ids:
            raise UpdateRefused(
                "handles are keyed by device id, got none",
                remedy="pass what the workers report: llm.collective_rpc('report_device_id')",
            )
        self._manifest = source.manifest()
        self._offsets, nbytes = arena_offsets(self._manifest)
        self._arena = ShmArena(nbytes)
        self.handles: dict[str, dict[str, Any]] = {}
        try:
            self.refill()
        except BaseException:
            self._arena.close()
            raise

    def refill(self) -> None:
        """Copy the source's weights as they are now, with new digests, into the same arena.

        Call it only when every worker has answered. Replaces ``handles``.

        Raises:
            UpdateRefused: the source has other tensors than before.
            SourceError: it cannot be read.
        """
        manifest = self._source.manifest()
        if manifest != self._manifest:
            raise UpdateRefused(
                "the source has other tensors than when it was exported",
                remedy="export it anew: export_handles(source, device_ids)",
            )
        seed = secrets.randbits(64)
        seeds = derive_seeds(seed, manifest.identities)
        addresses = self._offsets + np.uint64(self._arena.address)
        digests = fill(self._source, manifest, addresses, seeds)
        handle = ArenaHandle(
            kind="shm",
            host=host_id(),
            pid=os.getpid(),
            fd=self._arena.fd,
            inode=os.fstat(self._arena.fd).st_ino,
            nbytes=self._arena.nbytes,
            tensors=manifest.tensors,
            offsets=tuple(self._offsets.tolist()),
            manifest_hash=manifest.hash,
            seed=f"{seed:x}",
            digests=digests.astype("<u8").tobytes().hex(),
        )
        plain = msgspec.json.decode(msgspec.json.encode(handle))
        self.handles = dict.fromkeys(self._device_ids, plain)

    def close(self) -> None:
        """Give the arena back; what workers have mapped of it stays until they let go. Closing
        again does nothing."""
        self._arena.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def state_dict_info(source: Source) -> dict[str, tuple[list[int], str]]:
    """What a source will send: ``{name: (shape, dtype)}``, JSON values only. For
    ``prepare_refit_info``, before the first handles."""
    return {spec.name: (list(spec.shape), spec.dtype) for spec in source.manifest().tensors}


def export_handles(source: Source, device_ids: Iterable[str]) -> ExportedHandles:
    """Put a source's weights where workers of this host can open them. See `ExportedHandles`."""
    return ExportedHandles(source, device_ids)
