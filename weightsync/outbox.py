"""The memory through which a sender's updates go: an arena that they are staged in, of one half or
two, and a ring that says what is there, or carries it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from weightsync.control import Worker
from weightsync.deadline import Deadline
from weightsync.digest import derive_seeds
from weightsync.errors import TransportError
from weightsync.manifest import Manifest
from weightsync.messages import Layout, Mode
from weightsync.sources.base import Pieces
from weightsync.transport.ring import Peer, RingWriter
from weightsync.transport.shm import ShmArena, arena_offsets

__all__ = ["Outbox"]


class Outbox:
    """Memory that is made once per layout, and reused for every update of it.

    Args:
        mode: of all updates.
        halves: 2 where the version before is kept in the arena.
        bucket_bytes: that are moved at once; None for what measures best.

    Attributes:
        arena: None in a streamed update, or before the first.
        half: that the next update goes to, or the last one went to.
    """

    def __init__(self, mode: Mode, *, halves: int, bucket_bytes: int | None) -> None:
        self.arena: ShmArena | None = None
        self.half = 0
        self._mode = mode
        self._halves = halves
        self._bucket_bytes = bucket_bytes
        self._ring: RingWriter | None = None
        self._offsets = np.zeros(0, np.uint64)
        self._half_bytes = 0
        self._deadline = Deadline.after(0)
        self._manifest: Manifest | None = None
        self._digests = True
        self._seeds = np.zeros(0, np.uint64)

    def fit(self, manifest: Manifest, readers: int) -> bool:
        """Make memory for updates of this manifest, or keep what fits.

        Returns:
            Whether what is kept is still the same memory.

        Raises:
            MemoryShort, TransportError: there is not enough.
        """
        self._offsets, self._half_bytes = arena_offsets(manifest)
        kept = True
        if self._mode == "staged":
            needed = self._half_bytes * self._halves
            # A part of the model goes through the same memory as the whole.
            if self.arena is None or self.arena.nbytes < needed:
                self._close_arena()
                self.arena = ShmArena(needed)
                self.half, kept = 0, False
        if self._ring is None or self._ring.readers != readers:
            self._close_ring()
            self._ring = RingWriter(
                readers, carries_bytes=self._mode == "streamed", chunk=self._bucket_bytes
            )
            kept = False
        return kept

    def layouts(self, manifest: Manifest, *, whole: bool) -> tuple[list[Layout], list[int]]:
        """What each worker is told of it, and the descriptors that go with that."""
        ring = self._made()
        layouts = [
            Layout(
                tensors=manifest.tensors,
                manifest_hash=manifest.hash,
                whole=whole,
                mode=self._mode,
                arena_bytes=0 if self.arena is None else self.arena.nbytes,
                ring_bytes=ring.nbytes,
                reader=number,
            )
            for number in range(ring.readers)
        ]
        return layouts, [*([] if self.arena is None else [self.arena.fd]), ring.fd]

    def base(self, half: int) -> int:
        """Where a half of the arena begins."""
        return half * self._half_bytes

    def begin(
        self,
        manifest: Manifest,
        seed: int,
        workers: Sequence[Worker],
        deadline: Deadline,
        *,
        digests: bool,
    ) -> int:
        """An update begins, and all workers are at rest.

        Args:
            digests: take them while bytes are moved.

        Returns:
            Its number in the ring.
        """
        self._deadline = deadline
        self._manifest = manifest
        self._digests = digests
        self._seeds = derive_seeds(seed, manifest.identities)
        peers = [Peer(worker.name, worker.channel.fileno()) for worker in workers]
        return self._made().begin(len(manifest), peers)

    def addresses(self) -> NDArray[np.uint64] | None:
        """Where each tensor of the update lies in the arena, shape (n,); None where there is
        none."""
        if self.arena is None:
            return None
        return self._offsets + np.uint64(self.arena.address + self.base(self.half))

    def push(self, batch: Pieces) -> None:
        """Copy pieces to where they go and announce them. See `weightsync.sources.base.pour`.

        Raises:
            DeadlineExceeded: a worker does not take them in. PeerLost: one is gone.
        """
        addresses = self.addresses()
        destinations = None if addresses is None else addresses[batch.index] + batch.start
        self._made().push(
            batch.address,
            batch.nbytes,
            batch.start,
            self._seeds[batch.index],
            batch.index,
            destinations=destinations,
            digests=self._digests,
            deadline=self._deadline,
        )

    def finish(self) -> NDArray[np.uint64]:
        """Nothing more comes.

        Returns:
            Digests of what was read from the source: of each reader's share, shape (readers, n, 2);
            or, where all readers take in everything, shape (1, n, 2).

        Raises:
            TransportError: not every byte was pushed: what both ends lack, their digests agree on.
        """
        ring, manifest = self._made(), self._manifest
        if manifest is not None and (ring.pushed != manifest.nbytes).any():
            short = np.flatnonzero(ring.pushed != manifest.nbytes)
            first = int(short[0])
            spec = manifest.tensors[first]
            raise TransportError(
                f"{short.size} tensor(s) were not sent once and whole, first {spec.name!r}: "
                f"{ring.pushed[first]} bytes of {spec.nbytes}. The update was aborted; the engines "
                "serve what they served before.",
                remedy="this is a fault of weightsync: sync again, and report it",
            )
        return ring.finish()

    def abort(self) -> None:
        """Nothing comes of it: let the workers stop waiting."""
        if self._ring is not None:
            self._ring.abort()

    def close(self) -> None:
        self._close_arena()
        self._close_ring()

    def _made(self) -> RingWriter:
        if self._ring is None:
            raise TransportError("the memory of this sender is closed")
        return self._ring

    def _close_arena(self) -> None:
        if self.arena is not None:
            self.arena.close()
            self.arena = None

    def _close_ring(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None
