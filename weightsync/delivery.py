"""One update on its way: begun on all workers, moved while they follow, compared."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from weightsync.agreement import Agreed
from weightsync.canary import Canary, CanaryMaker, make_canary
from weightsync.commit import Flipped
from weightsync.control import Worker, ask_all, gather, last_words, tell_all
from weightsync.deadline import Deadline
from weightsync.digest import derive_seeds
from weightsync.engines.base import Engine
from weightsync.errors import DigestMismatch, PeerLost, ProofFailed, UpdateAborted
from weightsync.evidence import ArenaEvidence, Evidence, SourceEvidence
from weightsync.manifest import Manifest
from weightsync.messages import Ack, Begin, Digests, Follow, Mode, Prove
from weightsync.outbox import Outbox
from weightsync.proof import mismatches
from weightsync.receipt import ProofLevel, Receipt
from weightsync.record import write_receipt
from weightsync.roster import Roster
from weightsync.served import Judge
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
        proof: what is to be proven of it.
        canary: makes a canary.

    Attributes:
        update_id: made of the version, and unique.
        seed: of its digests; drawn for it alone.
        half, base: of the arena, and where that begins in bytes, once it has begun.
        digests: of all its tensors, once they have moved, shape (n, 2).
        judges: by engine, what says what it has proven.
        canary: of which its engines must think as the trainer does, once it has begun.
        seconds: that it took, by phase.
    """

    def __init__(
        self,
        roster: Roster,
        outbox: Outbox,
        agreed: Agreed,
        version: str,
        only: Sequence[str],
        *,
        proof: ProofLevel,
        canary: CanaryMaker | None,
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
        self.judges: dict[str, Judge] = {}
        self.canary: Canary | None = None
        self._proof = proof
        self._make_canary = canary
        self._proofs: tuple[Digests, ...] = ()

    @property
    def manifest(self) -> Manifest:
        """Of the tensors that are sent."""
        return self._agreed.manifest

    @property
    def prove(self) -> Prove:
        """What workers are to digest."""
        known: dict[ProofLevel, Prove] = {"served": "served", "received": "received"}
        return known.get(self._proof, "nothing")

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
        self.canary = make_canary(self._make_canary)
        self.half, self.base = outbox.half, outbox.base(outbox.half)
        digests = self.prove != "nothing"
        ring_update = outbox.begin(self.manifest, self.seed, workers, deadline, digests=digests)
        begin = Begin(
            update_id=self.update_id,
            version=self.version,
            seed=self.seed,
            base=self.base,
            ring_update=ring_update,
            filled=False,
            prove=self.prove,
            seconds=deadline.seconds,
        )
        ask_all(workers, begin, Ack, deadline, belongs_to=self.update_id)

    def move(self, deadline: Deadline, progress: Callable[[int, int], None] | None) -> None:
        """Read the source into the outbox while all workers follow, compare, and work out what
        their models must hold.

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
        if self.prove != "nothing":
            _compare(manifest, expected, workers, proofs)
        verified = time.perf_counter()
        self.digests = expected.sum(axis=0, dtype=np.uint64)
        self._proofs = tuple(proofs)
        self._expect()
        self.seconds["fill"] = filled - started
        self.seconds["verify"] = verified - filled
        self.seconds["expect"] = time.perf_counter() - verified

    def _expect(self) -> None:
        """Work out what every engine's models must hold."""
        manifest, source = self.manifest, self._agreed.source
        addresses = self._outbox.addresses()
        # A streamed update lies nowhere but in the source, which stands still until it is over.
        evidence: Evidence = (
            SourceEvidence(source, manifest)
            if addresses is None
            else ArenaEvidence(manifest, addresses)
        )
        seeds = derive_seeds(self.seed, manifest.identities)
        for name, plan in self._agreed.plans.items():
            expected, level = None, self._proof
            if self.prove == "served":
                expected = plan.expect(evidence, self.seed, seeds, self.digests)
                level = "received"
            self.judges[name] = Judge(plan, expected, level)

    def receipt(self, mode: Mode, flipped: Sequence[Flipped]) -> Receipt:
        """Its record, not yet part of a chain."""
        return write_receipt(
            self._agreed.source,
            self.manifest,
            flipped,
            label=self.version,
            update_id=self.update_id,
            mode=mode,
            only=self._only,
            seed=self.seed,
            digests=self.digests if self.prove != "nothing" else None,
            untouched=self._agreed.untouched,
            seconds=self.seconds,
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
