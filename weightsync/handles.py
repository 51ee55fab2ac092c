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

import fcntl
import functools
import hashlib
import os
import secrets
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from weightsync.digest import derive_seeds, digest_tensors
from weightsync.errors import ProofFailed, ProtocolError, UpdateRefused
from weightsync.evidence import ArenaEvidence
from weightsync.manifest import MAX_BYTES, Manifest, TensorSpec
from weightsync.messages import Described
from weightsync.proof import mismatches
from weightsync.served import Expected, ServedPlan
from weightsync.sources.base import Source, fill
from weightsync.target import StagedWeights
from weightsync.transport.shm import ALIGNMENT, ArenaReader, ShmArena, arena_offsets

__all__ = [
    "ExportedHandles",
    "OpenedHandle",
    "export_handles",
    "host_id",
    "open_handle",
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


Expectation = tuple[ServedPlan, Expected]
"""Who judges, and what must be found."""


class OpenedHandle:
    """A handle that was checked, and its memory mapped. See `open_handle`.

    Attributes:
        manifest: of the tensors that lie there.
    """

    def __init__(
        self,
        manifest: Manifest,
        offsets: NDArray[np.uint64],
        arena: ArenaReader,
        seed: int,
        digests: NDArray[np.uint64],
    ) -> None:
        self.manifest = manifest
        self._offsets = offsets
        self._arena = arena
        self._seed = seed
        self._digests = digests

    def prove(self) -> None:
        """Digest every tensor where it lies, and compare.

        Raises:
            ProofFailed: at least one has other bytes than were exported.
        """
        found = self._digest(derive_seeds(self._seed, self.manifest.identities))
        wrong = mismatches(self.manifest, "this worker", self._digests, found)
        if wrong:
            raise ProofFailed(wrong)

    def expect(self, described: Described) -> Expectation:
        """What this worker's model must hold once these weights are applied; while this is open.

        Args:
            described: what the worker said of them.

        Raises:
            ProofFailed: the memory has changed since it was proven.
            ProtocolError: the worker describes what cannot be.
        """
        seeds = derive_seeds(self._seed, self.manifest.identities)
        plan = ServedPlan(self.manifest, [("this worker", described)])
        with self._arena.held() as address:
            addresses = self._offsets + np.uint64(address)
            evidence = ArenaEvidence(self.manifest, addresses)
            return plan, plan.expect(evidence, self._seed, seeds, self._digests)

    def weights(self) -> StagedWeights:
        """The tensors, through a private mapping of their own."""
        return StagedWeights(self.manifest, self._offsets, self._arena)

    def same_bytes(self, one: int, other: int) -> bool:
        """Whether two tensors of one shape and dtype hold the same bytes. Told by digests under one
        random seed: unequal tensors pass with a probability below 2**-60."""
        both = np.array([one, other])
        seeds = np.full(2, secrets.randbits(64), np.uint64)
        first, second = self._digest(seeds, both)
        return bool((first == second).all())

    def _digest(
        self, seeds: NDArray[np.uint64], index: NDArray[np.int64] | slice = slice(None)
    ) -> NDArray[np.uint64]:
        with self._arena.held() as address:
            addresses = self._offsets[index] + np.uint64(address)
            return digest_tensors(addresses, self.manifest.nbytes[index], seeds)


@contextmanager
def open_handle(raw: object) -> Iterator[OpenedHandle]:
    """Check a handle, and map its memory for the length of the block.

    Args:
        raw: as it came, of JSON values.

    Raises:
        ProtocolError: it is malformed, contradicts itself, or points at anything but sealed memory
            of this user that holds all of its tensors.
        ManifestError: its tensors describe no model.
    """
    try:
        handle = msgspec.convert(raw, ArenaHandle)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"this is no handle: {error}") from error
    if handle.host != host_id():
        raise ProtocolError(
            f"the handle comes from {handle.host}, this is {host_id()}: shared memory reaches no "
            "other host or container",
            remedy="run trainer and engine in one container, or send over a network",
        )
    manifest = Manifest(handle.tensors)
    if manifest.hash != handle.manifest_hash:
        raise ProtocolError(f"its hash is {handle.manifest_hash}, expected {manifest.hash}")
    if len(handle.digests) != 2 * DIGEST_BYTES * len(manifest):
        raise ProtocolError(
            f"{len(handle.digests)} digits of digests for {len(manifest)} tensors, expected "
            f"{2 * DIGEST_BYTES * len(manifest)}"
        )
    offsets = _checked_offsets(handle, manifest)
    arena = ArenaReader(_open_memory(handle), handle.nbytes)
    try:
        digests = np.frombuffer(bytes.fromhex(handle.digests), "<u8").reshape(-1, 2)
        yield OpenedHandle(
            manifest, offsets, arena, int(handle.seed, 16), digests.astype(np.uint64)
        )
    finally:
        arena.close()


def _checked_offsets(handle: ArenaHandle, manifest: Manifest) -> NDArray[np.uint64]:
    """Each tensor aligned, inside the memory, and behind the one before."""
    if len(handle.offsets) != len(manifest):
        raise ProtocolError(f"{len(handle.offsets)} offsets for {len(manifest)} tensors")
    end = 0
    for spec, offset in zip(manifest.tensors, handle.offsets, strict=True):
        if offset % ALIGNMENT or offset < end or offset + spec.nbytes > handle.nbytes:
            raise ProtocolError(
                f"{spec.name} would lie at bytes {offset} to {offset + spec.nbytes}; expected a "
                f"multiple of {ALIGNMENT} between {end} and the memory's end at {handle.nbytes}"
            )
        end = offset + spec.nbytes
    return np.array(handle.offsets, dtype=np.uint64)


def _open_memory(handle: ArenaHandle) -> int:
    """A read-only descriptor of the memory that a handle points at, if it is what it should be."""
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        # Looked at before it is opened: opening something else, a pipe say, could wait for ever.
        _check_memory(handle, os.stat(path))
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ProtocolError(
            f"descriptor {handle.fd} of process {handle.pid} cannot be opened: {error.strerror}",
            remedy="keep the exported handles open until every worker has answered; run trainer "
            "and engine as one user",
        ) from error
    try:
        _check_memory(handle, os.fstat(fd))
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        os.close(fd)
        raise ProtocolError(
            f"descriptor {handle.fd} of process {handle.pid} is no memory that can be sealed"
        ) from error
    except ProtocolError:
        os.close(fd)
        raise
    return fd


def _check_memory(handle: ArenaHandle, found: os.stat_result) -> None:
    is_right = (
        stat.S_ISREG(found.st_mode)
        and found.st_uid == os.geteuid()
        and found.st_ino == handle.inode
        and found.st_size == handle.nbytes
    )
    if not is_right:
        raise ProtocolError(
            f"descriptor {handle.fd} of process {handle.pid} is not the memory that was exported: "
            f"expected {handle.nbytes} bytes of user {os.geteuid()} at inode {handle.inode}, got "
            f"{found.st_size} bytes of user {found.st_uid} at inode {found.st_ino}"
        )
