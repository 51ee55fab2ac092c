"""A handle (`weightsync.handles`) as a worker opens it: checked, mapped, proven."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
from numpy.typing import NDArray

from weightsync.digest import derive_seeds, digest_tensors
from weightsync.errors import ProofFailed, ProtocolError
from weightsync.evidence import ArenaEvidence
from weightsync.handles import DIGEST_BYTES, ArenaHandle, host_id
from weightsync.manifest import Manifest
from weightsync.messages import Described
from weightsync.proof import mismatches
from weightsync.served import Expected, ServedPlan
from weightsync.target import StagedWeights
from weightsync.transport.shm import ALIGNMENT, ArenaReader

__all__ = ["OpenedHandle", "open_handle"]

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
