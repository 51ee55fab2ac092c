"""A worker's view of one announced layout: the manifest, and the arena that carries it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weightsync.digest import derive_seeds
from weightsync.errors import ProtocolError, UpdateRefused, WeightSyncError
from weightsync.manifest import Manifest
from weightsync.messages import Layout
from weightsync.target import StagedWeights, Target
from weightsync.transport.shm import ArenaReader, arena_offsets

__all__ = ["Staging"]


class Staging:
    """Everything that a layout claims is checked before it is believed.

    Args:
        layout: as it came.
        fd: of the arena; owned from here on, and closed if it is refused.

    Attributes:
        described: the target takes this layout.
        weights: of the armed update, ready to be applied; None at any other time.

    Raises:
        ProtocolError, ManifestError: the layout contradicts itself or the arena.
    """

    def __init__(self, layout: Layout, fd: int) -> None:
        self.arena = ArenaReader(fd, layout.arena_bytes)
        try:
            self.manifest = Manifest(layout.tensors)
            self._offsets, nbytes = arena_offsets(self.manifest)
            if self.manifest.hash != layout.manifest_hash:
                raise ProtocolError(
                    f"the layout's hash is {layout.manifest_hash}, expected {self.manifest.hash}"
                )
            if nbytes != layout.arena_bytes or self._offsets.tolist() != list(layout.offsets):
                raise ProtocolError("the layout's offsets are not those of its tensors")
        except WeightSyncError:
            self.arena.close()
            raise
        self.described = False
        self.weights: StagedWeights | None = None

    def verify(self, target: Target, seed: int) -> NDArray[np.uint64]:
        """Digests of the arena as it is now, shape (n, 2). It may be closed meanwhile."""
        seeds = derive_seeds(seed, self.manifest.identities)
        with self.arena.held() as address:
            return target.verify(self.manifest, self._offsets + np.uint64(address), seeds)

    def arm(self) -> None:
        """Map the arena for the engine's loader, before the engine is paused.

        Raises:
            UpdateRefused: it cannot be mapped.
        """
        try:
            mapping = self.arena.private_copy()
        except OSError as error:
            raise UpdateRefused(f"the staging memory cannot be mapped: {error}") from error
        self.weights = StagedWeights(self.manifest, self._offsets, mapping)

    def take(self) -> StagedWeights | None:
        """The armed weights, once: their mapping goes when the engine lets go of its tensors."""
        weights, self.weights = self.weights, None
        return weights

    def close(self) -> None:
        self.weights = None
        self.arena.close()
