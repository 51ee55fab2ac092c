"""One update on its way: begun on all workers, moved while they follow, compared."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from weightsync.agreement import Agreed
from weightsync.control import Worker, ask_all, gather, last_words, tell_all
from weightsync.deadline import Deadline
from weightsync.engines.base import Engine
from weightsync.errors import DigestMismatch, PeerLost, ProofFailed, UpdateAborted
from weightsync.manifest import Manifest
from weightsync.messages import Ack, Begin, Digests, Follow, Mode
from weightsync.outbox import Outbox
from weightsync.proof import mismatches
from weightsync.receipt import EngineReceipt, LevelShare, ProofLevel, Receipt
from weightsync.roster import Roster
from weightsync.sources.base import pour

__all__ = ["Delivery"]


class Delivery:
    """See the module.

    Args:
        roster: with an open session.
        outbox: that fits what was agreed on.
        agreed: what the update is of.
        version: that the engines will report.
        only: names or patterns that it was declared to be of; empty for the whole model.

    Attributes:
        update_id: made of the version, and unique.
        seed: of its digests; drawn for it alone.
        half, base: of the arena, and where that begins in bytes, once it has begun.
        digests: of all its tensors, once they have moved, shape (n, 2).
        seconds: that it took, by phase.
    """

    def __init__(
        self, roster: Roster, outbox: Outbox, agreed: Agreed, version: str, only: Sequence[str]
    ) -> None:
        self._roster = roster
        self._outbox = outbox
        self._agreed = agreed
        self._only = tuple(only)
        self.version = version
        self.update_id = f"{version}-{secrets.token_hex(4)}"
        self.seed = secrets.randbits(64)
        self.half = 0
        self.base = 0
        self.digests: NDArray[np.uint64] = np.zeros((0, 2), np.uint64)
        self.seconds: dict[str, float] = {}
        self._proofs: tuple[Digests, ...] = ()

    @property
    def manifest(self) -> Manifest:
        """Of the tensors that are sent."""
        return self._agreed.manifest

    def workers(self, engine: Engine) -> list[Worker]:
        """The workers of one engine, by rank."""
        return self._roster.of(engine)

    def proofs(self, engine: Engine) -> list[Digests]:
        """What they have digested, by rank."""
        pairs = zip(self._roster.workers, self._proofs, strict=True)
        return [proof for worker, proof in pairs if worker.engine == engine.name]

    def begin(self, deadline: Deadline) -> None:
        """Let all workers know that bytes are about to come. Whoever gives up from here on aborts
        the outbox."""
        workers, outbox = self._roster.workers, self._outbox
        self.half, self.base = outbox.half, outbox.base(outbox.half)
        ring_update = outbox.begin(self.manifest, self.seed, workers, deadline)
        begin = Begin(
            update_id=self.update_id,
            version=self.version,
            seed=self.seed,
            base=self.base,
            ring_update=ring_update,
            filled=False,
            prove="received",
            seconds=deadline.seconds,
        )
        ask_all(workers, begin, Ack, deadline, belongs_to=self.update_id)

    def move(self, deadline: Deadline, progress: Callable[[int, int], None] | None) -> None:
        """Read the source into the outbox while all workers follow, and compare.

        Args:
            progress: called with (bytes done, bytes in all).

        Raises:
            ProofFailed: a worker saw other bytes than were read.
            SourceError: the source could not be read, or was written to.
        """
        started = time.perf_counter()
        workers, manifest = self._roster.workers, self.manifest
        try:
            tell_all(workers, Follow(update_id=self.update_id), deadline)
            pour(self._agreed.source, manifest, self._outbox.push, progress=progress)
        except BaseException as error:
            self._outbox.abort()
            if isinstance(error, PeerLost) and (said := last_words(workers)):
                raise PeerLost(f"{error}; before, it said: {said}") from error
            raise
        expected = self._outbox.finish()
        filled = time.perf_counter()
        proofs = gather(workers, Digests, deadline, belongs_to=self.update_id)
        _compare(manifest, expected, workers, proofs)
        self.seconds["fill"] = filled - started
        self.seconds["verify"] = time.perf_counter() - filled
        self.digests = expected.sum(axis=0, dtype=np.uint64)
        self._proofs = tuple(proofs)

    def receipt(self, proof: ProofLevel, mode: Mode, engines: Sequence[EngineReceipt]) -> Receipt:
        """Its record, not yet part of a chain."""
        manifest, source = self.manifest, self._agreed.source
        digest = hashlib.blake2b(
            self.seed.to_bytes(8, "little") + self.digests.astype("<u8").tobytes(), digest_size=32
        )
        share = LevelShare(tensors=len(manifest), nbytes=manifest.total_bytes)
        return Receipt(
            version=self.version,
            update_id=self.update_id,
            proven=proof,
            levels={proof: share},
            mode=mode,
            only=self._only,
            nbytes=manifest.total_bytes,
            manifest_hash=manifest.hash,
            digest=digest.hexdigest(),
            casts=dict(source.casts),
            aliases=dict(source.aliases),
            untouched=self._agreed.untouched,
            engines=tuple(engines),
            seconds=self.seconds,
            previous="",
        )


def _compare(
    manifest: Manifest,
    expected: NDArray[np.uint64],
    workers: Sequence[Worker],
    proofs: Sequence[Digests],
) -> None:
    """Every worker's digest of every tensor against the trainer's.

    Args:
        expected: digests of the trainer's bytes: of each worker's share, shape (workers, n, 2), or
            of all that every worker takes in, shape (1, n, 2).
        proofs: one for each worker.

    Raises:
        ProofFailed: at least one differs.
        UpdateAborted: a worker digested another number of tensors.
    """
    wrong: list[DigestMismatch] = []
    for worker, proof, trainers in zip(
        workers, proofs, np.broadcast_to(expected, (len(workers), len(manifest), 2)), strict=True
    ):
        if len(proof.digests) != trainers.nbytes:
            raise UpdateAborted(
                f"{worker.name} digested {len(proof.digests) // 16} tensors, "
                f"expected {len(manifest)}"
            )
        found = np.frombuffer(proof.digests, "<u8").reshape(-1, 2)
        wrong += mismatches(manifest, worker.name, trainers, found)
    if wrong:
        raise ProofFailed(wrong)
