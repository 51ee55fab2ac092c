"""A worker's view of one announced layout: the manifest, and the memory that carries it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weightsync.deadline import Deadline
from weightsync.digest import derive_seeds, digest_tensors
from weightsync.errors import ProtocolError, UpdateRefused
from weightsync.manifest import Manifest
from weightsync.messages import Begin, Layout, Prove
from weightsync.target import StagedWeights
from weightsync.transport.ring import Peer, RingReader
from weightsync.transport.shm import ALIGNMENT, ArenaReader, arena_offsets
from weightsync.wire import Channel

__all__ = ["Incoming", "Staging"]

MAX_READERS = 1 << 16
SLACK_SECONDS = 30.0
"""How much longer than its sender a worker follows the ring: the sender gives up first."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """The bytes of one update, as they come in. For one call of `Target.verify` or `Target.stream`.

    Attributes:
        manifest: of the update.
        seeds: of each tensor's digest, shape (n,).
        digests: take them; otherwise zeros stand in their place.
        arena: that the update is staged in, or None.
        offsets: of each tensor in the arena, shape (n,).
        filled: all of it is there already.
        ring: that says what is there, or carries it.
        ring_update: its number there.
        sender: noticed when it dies.
        deadline: to the end of the ring.
    """

    manifest: Manifest
    seeds: NDArray[np.uint64]
    digests: bool
    arena: ArenaReader | None
    offsets: NDArray[np.uint64]
    filled: bool
    ring: RingReader
    ring_update: int
    sender: Channel
    deadline: Deadline

    def digest(self) -> NDArray[np.uint64]:
        """Digest this worker's share of what is staged, shape (n, 2), chunk by chunk while it is
        still in the cache; or all of it, where it was filled before.

        Raises:
            StreamAborted: the sender has given up. DeadlineExceeded, PeerLost, ProtocolError: see
                `RingReader.follow`.
        """
        if self.arena is None:
            raise ProtocolError("nothing is staged in a streamed update")
        with self.arena.held() as address:
            addresses = self.offsets + np.uint64(address)
            if not self.filled:
                return self._follow(addresses)
            if not self.digests:
                return np.zeros((len(self.manifest), 2), np.uint64)
            return digest_tensors(addresses, self.manifest.nbytes, self.seeds)

    def copy_to(self, addresses: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Copy every tensor to its address, shape (n,), and digest what was written, shape (n, 2).

        Raises:
            as `digest`. What was written until then stays.
        """
        return self._follow(addresses)

    def _follow(self, addresses: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return self.ring.follow(
            self.ring_update,
            addresses,
            self.manifest.nbytes,
            self.seeds,
            digests=self.digests,
            writer=Peer(self.sender.peer, self.sender.fileno()),
            deadline=self.deadline,
        )


class Staging:
    """Everything that a layout claims is checked before it is believed.

    Args:
        layout: as it came.
        ring_fd, arena_fd: that came with it; owned from here on, and closed if it is refused. A
            streamed layout has no arena.

    Attributes:
        described: the target takes this layout.
        base: where the update in progress begins in the arena.
        prove: what is to be digested of it.
        seed, seeds: of its digests, and of each tensor's, shape (n,).
        weights: of the armed update, ready to be applied; None at any other time.

    Raises:
        ProtocolError, ManifestError: the layout contradicts itself or its memory.
    """

    def __init__(self, layout: Layout, ring_fd: int, arena_fd: int | None) -> None:
        self.described = False
        self.whole = layout.whole
        self.mode = layout.mode
        self.weights: StagedWeights | None = None
        self._arena: ArenaReader | None = None
        self.base = 0
        self.prove: Prove = "nothing"
        self.seed = 0
        self.seeds: NDArray[np.uint64] = np.zeros(0, np.uint64)
        try:
            if not 0 <= layout.reader < MAX_READERS:
                os.close(ring_fd)
                raise ProtocolError(f"reader {layout.reader} is none of a ring's")
            self._ring = RingReader(ring_fd, layout.ring_bytes, layout.reader)
        except BaseException:
            if arena_fd is not None:
                os.close(arena_fd)
            raise
        try:
            if arena_fd is not None:
                self._arena = ArenaReader(arena_fd, layout.arena_bytes)
            if self._ring.carries_bytes != (layout.mode == "streamed"):
                raise ProtocolError(f"a {layout.mode} layout came with a ring of the other kind")
            self.manifest = Manifest(layout.tensors)
            self._offsets, self._nbytes = arena_offsets(self.manifest)
            if self.manifest.hash != layout.manifest_hash:
                raise ProtocolError(
                    f"the layout's hash is {layout.manifest_hash}, expected {self.manifest.hash}"
                )
            self._check_base(0)
        except BaseException:
            self.close()
            raise

    def incoming(self, begin: Begin, sender: Channel) -> Incoming:
        """What comes in for one update.

        Raises:
            ProtocolError: it would lie outside the arena.
        """
        self._check_base(begin.base)
        self.prove, self.seed = begin.prove, begin.seed
        self.seeds = derive_seeds(begin.seed, self.manifest.identities)
        return Incoming(
            manifest=self.manifest,
            seeds=self.seeds,
            digests=begin.prove != "nothing",
            arena=self._arena,
            offsets=self._offsets + np.uint64(begin.base),
            filled=begin.filled,
            ring=self._ring,
            ring_update=begin.ring_update,
            sender=sender,
            deadline=Deadline.after(begin.seconds + SLACK_SECONDS),
        )

    def arm(self, *, wants_tensors: bool) -> None:
        """Get the update ready to be applied, before the engine is paused.

        Raises:
            UpdateRefused: the arena cannot be mapped.
        """
        if self._arena is None:
            raise UpdateRefused("a streamed update is not applied, it is taken in as it comes")
        weights = StagedWeights(self.manifest, self._offsets + np.uint64(self.base), self._arena)
        if wants_tensors:
            try:
                weights.map_privately()
            except OSError as error:
                raise UpdateRefused(f"the staging memory cannot be mapped: {error}") from error
        self.weights = weights

    def take(self) -> StagedWeights | None:
        """The armed weights, once: their mapping goes when the engine lets go of its tensors."""
        weights, self.weights = self.weights, None
        return weights

    def close(self) -> None:
        self.weights = None
        if self._arena is not None:
            self._arena.close()
        self._ring.close()

    def _check_base(self, base: int) -> None:
        if self._arena is None:
            if base != 0 or self.mode != "streamed":
                raise ProtocolError("a staged layout came without an arena")
        elif base < 0 or base % ALIGNMENT or base + self._nbytes > self._arena.nbytes:
            raise ProtocolError(
                f"an update of {self._nbytes} bytes at {base} is not inside the arena of "
                f"{self._arena.nbytes}"
            )
