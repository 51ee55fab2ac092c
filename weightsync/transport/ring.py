"""A ring in shared memory: one sender, several workers of one host, both sides at work at once.

Two uses of one structure (csrc/ring_layout.hpp):

- **streamed** (``carries_bytes=True``): the bytes travel in the ring, which is small enough to stay
  in the processors' caches. The writer copies the trainer's tensors in, every reader copies all
  of them out into its own.
- **journal** (``carries_bytes=False``): the bytes go into an arena that all map (`shm`); the ring's
  records say which of them are there now. Chunk *i* belongs to reader ``i % readers``: each digests
  its share while the writer is still filling.

Both sides digest what they touch, in the same pass. Who compares is not decided here: `finish`
and `follow` return the sums. Only digests tell whether a tensor arrived whole; the ring itself
makes sure of one thing: nothing is ever written outside of a tensor.

    writer = RingWriter(1, carries_bytes=True)             # reader: RingReader(fd, nbytes, 0)
    update = writer.begin(n, [Peer("worker 0", socket.fileno())])
    writer.push(sources, nbytes, starts, seeds, tensors, deadline=deadline)
    sums = writer.finish()                                 # reader: follow(update, ...)

One update at a time. `begin` may be called again once every reader has said on its own socket that
it is at rest: its `follow` has returned or raised. Neither end is for several threads at once.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NoReturn

import numpy as np

from weightsync import _native
from weightsync.deadline import Deadline
from weightsync.errors import (
    DeadlineExceeded,
    PeerLost,
    ProtocolError,
    StreamAborted,
    TransportError,
    UpdateRefused,
)
from weightsync.tables import U64Array, U64Like, table_columns, table_rows
from weightsync.transport.memfd import check_sealed, sealed_memfd
from weightsync.transport.shm import address_of

__all__ = ["STREAM_CHUNK_LIMIT", "Peer", "RingReader", "RingWriter"]

# Measured (bench/bench_ring.py): from 64 KiB to 256 KiB, and from 4 MiB to 8 MiB, all are alike. A
# larger ring leaves the cache, a smaller one wakes people up more often than copying costs.
_STREAM_CAPACITY: Final = 4 << 20
STREAM_CHUNK_LIMIT: Final = _STREAM_CAPACITY // 4
"""The largest chunk of a ring of the default size that carries bytes."""
_STREAM_CHUNK: Final = 128 << 10
# 1024 records of 64 bytes: 256 MiB of arena between the writer and a reader that is busy elsewhere.
_JOURNAL_CAPACITY: Final = 64 << 10
_JOURNAL_CHUNK: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end, as this process knows it.

    Attributes:
        name: for messages.
        fd: a connected socket of its; watched for a hang-up while waiting, and nothing else.
    """

    name: str
    fd: int


class _Fault(IntEnum):
    """`RingFault` of csrc/ring_wait.hpp."""

    NONE = 0
    DEADLINE = 1
    PEER_LOST = 2
    PEER_LEFT = 3
    ABORTED = 4
    MALFORMED = 5


class RingWriter:
    """The sender's end.

    Args:
        readers: number of workers that read, at least 1.
        carries_bytes: streamed, or a journal.
        capacity: bytes of the ring, a multiple of 4096.
        chunk: bytes that are copied, digested and published at once, a multiple of 64; a quarter
            of the capacity at most where the ring carries bytes.

    Attributes:
        fd: descriptor to pass to the readers.
        nbytes: size of the memory behind it, to be announced along with it.

    Raises:
        TransportError: the memory cannot be had.
        ValueError: an argument out of bounds.
    """

    def __init__(
        self,
        readers: int,
        *,
        carries_bytes: bool,
        capacity: int | None = None,
        chunk: int | None = None,
    ) -> None:
        if capacity is None:
            capacity = _STREAM_CAPACITY if carries_bytes else _JOURNAL_CAPACITY
        if chunk is None:
            chunk = min(_STREAM_CHUNK, capacity // 4) if carries_bytes else _JOURNAL_CHUNK
        if readers < 1 or capacity < 1 or chunk < 1:
            raise ValueError(f"must be positive: {readers=}, {capacity=}, {chunk=}")
        self.carries_bytes = carries_bytes
        self.readers = readers
        self.nbytes = _native.ring_bytes(readers, capacity)
        try:
            self.fd = sealed_memfd(self.nbytes)
        except OSError as error:
            raise TransportError(
                f"cannot reserve a ring of {self.nbytes} bytes: {error}"
            ) from error
        try:
            self._map: mmap.mmap | None = mmap.mmap(self.fd, self.nbytes, flags=mmap.MAP_SHARED)
            self._native = _native.RingWriter(
                address_of(self._map), self.nbytes, readers, capacity, carries_bytes, chunk
            )
        except OSError as error:
            os.close(self.fd)
            raise TransportError(f"cannot map a ring of {self.nbytes} bytes: {error}") from error
        except BaseException:
            os.close(self.fd)
            raise
        self._peers: tuple[Peer, ...] = ()
        self._tensors = 0
        self._pushed = np.zeros(0)

    def begin(self, tensors: int, peers: Sequence[Peer]) -> int:
        """Start an update. Every reader must be at rest.

        Args:
            tensors: how many tensors the update is of.
            peers: the readers, in order.

        Returns:
            The update's number, which the readers need to follow it.

        Raises:
            TransportError: the ring is closed.
            UpdateRefused: another update is under way.
            ValueError: there are not as many peers as readers.
        """
        _held(self._map)
        if self._peers:
            raise UpdateRefused(
                "an update is under way on this ring", remedy="finish() or abort() it first"
            )
        if len(peers) != self.readers:
            raise ValueError(f"{self.readers} readers, but {len(peers)} peers")
        if tensors < 0:
            raise ValueError(f"tensors must not be negative: {tensors}")
        update = self._native.begin(tensors)
        self._peers = tuple(peers)
        self._tensors = tensors
        self._pushed = np.zeros(tensors)
        return update

    @property
    def pushed(self) -> U64Array:
        """(tensors,) uint64: bytes of each tensor that were pushed in this update, or the last."""
        return self._pushed.astype(np.uint64)

    def push(
        self,
        sources: U64Like,
        nbytes: U64Like,
        starts: U64Like,
        seeds: U64Like,
        tensors: U64Like,
        *,
        destinations: U64Like | None = None,
        digests: bool = True,
        deadline: Deadline,
    ) -> None:
        """Copy, digest and publish n spans, in one native call that releases the GIL.

        It returns when all are in the ring, not when they have been read. After any error the
        update is aborted, and readers are told.

        Args:
            sources: (n,) addresses. The caller keeps the memory alive.
            nbytes: (n,) lengths; zero is allowed.
            starts: (n,) byte offset of each span's first byte in its tensor.
            seeds: (n,) seed of each span's tensor.
            tensors: (n,) index of each span's tensor, below the number given to `begin`.
            destinations: (n,) addresses in the arena, of a journal and of nothing else.
            digests: take them; otherwise this only copies.
            deadline: for waiting until readers have made room.

        Raises:
            DeadlineExceeded: a reader, which the error names, did not make room.
            PeerLost: a reader's process is gone, or it stopped reading.
            ProtocolError: a reader wrote into the ring what it may not.
            TransportError: the ring is closed.
            UpdateRefused: no update is under way.
            ValueError: lengths differ, a value is negative or a tensor's index too large, a span
                overlaps its destination, or destinations were given where there is no arena.
        """
        mapping = _held(self._map)
        peers = self._underway()
        given = {"sources": sources, "destinations": destinations, "nbytes": nbytes}
        given |= {"starts": starts, "seeds": seeds, "tensors": tensors}
        try:
            columns = table_columns(**given)
            kind, who, detail = self._native.push(
                table_rows(columns),
                destinations is not None,
                digests,
                [peer.fd for peer in peers],
                deadline.at,
            )
            if kind != _Fault.NONE:
                _raise(_Fault(kind), peers[who].name, detail, "read from the ring", deadline)
        except BaseException:
            self.abort()
            raise
        del mapping  # held until here
        # In float64, which is exact below 2**53 bytes.
        self._pushed += np.bincount(
            columns["tensors"].astype(np.intp),
            weights=columns["nbytes"],
            minlength=self._tensors,
        )

    def finish(self) -> U64Array:
        """Publish that nothing more comes. Readers may still be reading what is in the ring.

        Returns:
            Digests of all that was pushed: (shares, tensors, 2) uint64. A journal has as many
            shares as readers, to be compared reader by reader; a ring that carries bytes has one.

        Raises:
            TransportError: the ring is closed.
            UpdateRefused: no update is under way.
        """
        _held(self._map)
        self._underway()
        self._native.finish()
        self._peers = ()
        shares = 1 if self.carries_bytes else self.readers
        return self._native.sums().reshape(shares, self._tensors, 2)

    def abort(self) -> None:
        """Tell the readers that nothing more comes, if an update is under way. Never raises."""
        if self._map is not None and self._peers:
            self._native.abort()
        self._peers = ()

    def close(self) -> None:
        """Abort what is under way and give the memory back."""
        self.abort()
        if self._map is not None:
            self._map = None
            os.close(self.fd)

    def _underway(self) -> tuple[Peer, ...]:
        if not self._peers:
            raise UpdateRefused("no update is under way on this ring", remedy="call begin() first")
        return self._peers


class RingReader:
    """A worker's end.

    Args:
        fd: descriptor that came from the sender; owned by the reader from now on.
        nbytes: size that was announced.
        reader: this worker's index among the readers.

    Attributes:
        carries_bytes: streamed, or a journal.

    Raises:
        ProtocolError: the descriptor is no ring of that size, or one with fewer readers.
    """

    def __init__(self, fd: int, nbytes: int, reader: int) -> None:
        try:
            check_sealed(fd, nbytes)
            self._map: mmap.mmap | None = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
        except OSError as error:
            raise ProtocolError(f"the ring's descriptor cannot be mapped: {error}") from error
        finally:
            os.close(fd)  # the mapping has its own
        (_, _, detail), native = _native.open_ring_reader(address_of(self._map), nbytes, reader)
        if native is None:
            self._map = None
            raise ProtocolError(f"malformed ring: {detail}")
        self._native = native
        self.carries_bytes = native.carries_bytes

    def follow(
        self,
        update: int,
        addresses: U64Like,
        nbytes: U64Like,
        seeds: U64Like,
        *,
        digests: bool = True,
        writer: Peer,
        deadline: Deadline,
    ) -> U64Array:
        """Take one update to its end, in one native call that releases the GIL.

        Args:
            update: its number, from the writer's `begin`.
            addresses: (n,) where each tensor's bytes go or, of a journal, where they lie in this
                process's mapping of the arena. The caller keeps the memory alive.
            nbytes: (n,) size of each tensor. Nothing outside of it is written or read.
            seeds: (n,) seed of each tensor.
            digests: take them; otherwise zeros are returned, and of a journal nothing is read.
            writer: the sender.
            deadline: for all of it.

        Returns:
            (n, 2) uint64: of each tensor the digest of the bytes that were copied into it or, of a
            journal, of those in the arena that belong to this reader's share.

        Raises:
            DeadlineExceeded: the writer did not finish in time.
            PeerLost: its process is gone.
            StreamAborted: it gave the update up.
            ProtocolError: a record is malformed or out of bounds, or the ring is at another update.
            TransportError: the ring is closed.
            ValueError: lengths differ, or an address is null where nbytes is not zero.
        """
        mapping = _held(self._map)
        columns = table_columns(addresses=addresses, nbytes=nbytes, seeds=seeds)
        (kind, _, detail), sums = self._native.follow(
            update, table_rows(columns), digests, [writer.fd], deadline.at
        )
        del mapping  # held until here, even if the reader has been closed meanwhile
        if kind != _Fault.NONE:
            _raise(_Fault(kind), writer.name, detail, "write to the ring", deadline)
        return sums

    def close(self) -> None:
        """Give the memory back, once no `follow` is at work in it."""
        self._map = None


def _held(mapping: mmap.mmap | None) -> mmap.mmap:
    if mapping is None:
        raise TransportError("the ring is closed")
    return mapping


def _raise(fault: _Fault, peer: str, detail: str, task: str, deadline: Deadline) -> NoReturn:
    match fault:
        case _Fault.DEADLINE:
            raise DeadlineExceeded(f"{peer} to {task} ({detail})", deadline.seconds)
        case _Fault.PEER_LOST:
            raise PeerLost(f"{peer} is gone: {detail}", remedy="look at its own log")
        case _Fault.PEER_LEFT:
            raise PeerLost(f"{peer} gave up: {detail}", remedy="look at its own error")
        case _Fault.ABORTED:
            raise StreamAborted(f"{peer} aborted the update")
        case _:
            raise ProtocolError(f"malformed ring of {peer}: {detail}")
