"""The sender: stage, prove, then flip.

``stage()`` fills the arena, lets every worker of every engine digest it, and compares; engines go
on generating meanwhile. ``commit()`` pauses each engine just long enough to apply what was proven.
``sync()`` does both.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from weightsync.commit import commit_engine
from weightsync.control import Worker, ask_all, gather
from weightsync.deadline import Deadline
from weightsync.digest import derive_seeds
from weightsync.engines.base import Engine, PauseMode
from weightsync.errors import (
    DigestMismatch,
    ManifestError,
    MemoryShort,
    PlanRefused,
    ProofFailed,
    SourceError,
    UpdateAborted,
    UpdateRefused,
)
from weightsync.manifest import Manifest
from weightsync.messages import Abort, Ack, Begin, Described, Digests, Layout, Seal
from weightsync.plan.match import check_descriptions
from weightsync.receipt import EngineReceipt, LevelShare, ProofLevel, Receipt, chain
from weightsync.roster import Roster
from weightsync.sources.base import Source, fill
from weightsync.transport.shm import ShmArena, arena_offsets

__all__ = ["StagedUpdate", "WeightSender"]

SUPPORTED_PROOFS: tuple[ProofLevel, ...] = ("received",)
ABORT_SECONDS = 10.0
"""What giving an update up may take before the sender hangs up instead, which says the same."""

HARMLESS = (PlanRefused, SourceError, ManifestError, MemoryShort, ProofFailed)
"""Errors that leave the connections in a known state."""


class StagedUpdate:
    """An update that every worker has proven to hold, not yet served by any.

    Attributes:
        version: that it will be.
        update_id: of this update.
        digest: over all tensors' digests and the seed of this update.
        proofs: what each worker proved, in the order of the sender's workers.
        seconds: that staging took, by phase.
    """

    def __init__(
        self,
        sender: WeightSender,
        version: str,
        update_id: str,
        digest: str,
        proofs: Sequence[Digests],
        seconds: dict[str, float],
    ) -> None:
        self._sender = sender
        self.version = version
        self.update_id = update_id
        self.digest = digest
        self.proofs = tuple(proofs)
        self.seconds = seconds

    def commit(self, pause: PauseMode = "keep") -> Receipt:
        """Flip all engines to this update. See `WeightSender.sync`."""
        return self._sender._commit(self, pause)

    def abort(self) -> None:
        """Give it up; engines keep what they serve."""
        self._sender._abort(self)


class WeightSender:
    """Delivers a trainer's weights to live engines.

    Connects on first use, holds one arena of shared memory and one connection per worker, and
    reuses them. A sender that is created for an engine that another sender holds takes it over and
    clears what that one left. Not thread-safe.

    Args:
        source: what the trainer has.
        engines: from `weightsync.connect` or `weightsync.engine`.
        proof: what must be proven of every tensor before `sync` returns. ``"received"``: the bytes
            that each worker hands to its engine's loader, digested by the worker in place.
        deadline: seconds that one `stage` or one `commit` may take.
        on_receipt: called with each receipt, after the engines have resumed. What it raises goes
            through `sync`; the receipt stays in `last_receipt`.
        on_progress: called with (bytes filled, bytes in all) while staging.

    Attributes:
        last_receipt: of the last update that was committed everywhere, or None.

    Raises:
        UpdateRefused: no engine, two of one name, a proof level that does not exist, or a deadline
            that is not positive.
    """

    def __init__(
        self,
        source: Source,
        engines: Iterable[Engine],
        *,
        proof: ProofLevel = "received",
        deadline: float = 600.0,
        on_receipt: Callable[[Receipt], None] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if proof not in SUPPORTED_PROOFS:
            raise UpdateRefused(
                f"proof {proof!r} is not available, known are {', '.join(SUPPORTED_PROOFS)}"
            )
        if not deadline > 0:
            raise UpdateRefused(f"a deadline is a positive number of seconds, got {deadline}")
        self._source = source
        self._roster = Roster(tuple(engines))
        self._proof = proof
        self._seconds = deadline
        self._on_receipt = on_receipt
        self._on_progress = on_progress
        self._arena: ShmArena | None = None
        self._manifest: Manifest | None = None
        self._offsets: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._staged: StagedUpdate | None = None
        self.last_receipt: Receipt | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def sync(self, version: int | str, *, pause: PauseMode = "keep") -> Receipt:
        """Deliver the source's weights as of now; returns only when every worker has proven them.

        Args:
            version: that the engines report afterwards.
            pause: what happens to requests in flight: ``"keep"`` freezes them and goes on with the
                new weights, ``"wait"`` lets them end first, ``"abort"`` ends them. On an engine
                that is paused already, ``"wait"`` is ``"keep"``: nothing there can end.

        Returns:
            The receipt.

        Raises:
            PlanRefused: source and engine do not fit; nothing moved.
            SourceError, ConnectError, TransportError: something could not be read, reached or
                reserved.
            ProofFailed, UpdateAborted: given up before anything was applied; the engines serve the
                old version.
            EnginePoisoned: an engine failed while applying, and refuses to serve until the next
                full update.
            NotResumed: applied and proven, but an engine could not be told so.
            Superseded: a newer sender has taken over.
        """
        return self.stage(version).commit(pause)

    def stage(self, version: int | str) -> StagedUpdate:
        """Move and prove, while the engines go on generating. Raises as `sync` does."""
        if self._staged is not None:
            raise UpdateRefused(
                f"update {self._staged.update_id} is staged already",
                remedy="commit() or abort() it first",
            )
        label = str(version)
        if not label or len(label) > 256:
            raise UpdateRefused(f"a version has 1 to 256 characters, got {len(label)}")
        deadline = Deadline.after(self._seconds)
        started = time.perf_counter()
        update_id = f"{label}-{secrets.token_hex(4)}"
        try:
            manifest = self._source.manifest()
            arena = self._announce(manifest, deadline)
            seconds = {"plan": time.perf_counter() - started}
            begin = Begin(update_id=update_id, version=label)
            ask_all(self._roster.workers, begin, Ack, deadline, belongs_to=update_id)
            staged = self._fill_and_prove(manifest, arena, label, update_id, seconds, deadline)
        except BaseException as error:
            self._give_up(update_id, error)
            raise
        staged.seconds["stage"] = time.perf_counter() - started
        self._staged = staged
        return staged

    def close(self) -> None:
        """Leave the engines as they are and give everything back. Harmless when called twice."""
        if self._staged is not None:
            self._abort(self._staged)
        self._roster.close()
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        self._manifest = None

    def _announce(self, manifest: Manifest, deadline: Deadline) -> ShmArena:
        """Connect, tell all workers what will come, and let them refuse it before a byte moves."""
        fresh = self._roster.open(deadline)
        arena = self._arena
        if arena is not None and not fresh and self._manifest == manifest:
            return arena
        self._manifest = None
        self._offsets, nbytes = arena_offsets(manifest)
        if arena is None or arena.nbytes != nbytes:
            if arena is not None:
                arena.close()
                self._arena = None
            arena = self._arena = ShmArena(nbytes)
        layout = Layout(
            tensors=manifest.tensors,
            offsets=tuple(self._offsets.tolist()),
            arena_bytes=nbytes,
            manifest_hash=manifest.hash,
        )
        ask_all(self._roster.workers, layout, Ack, deadline, fd=arena.fd)
        for engine in self._roster.engines:
            engine.prepare(deadline)
            workers = self._roster.of(engine)
            answers = gather(workers, Described, deadline, belongs_to=manifest.hash)
            named = [(w.name, answer) for w, answer in zip(workers, answers, strict=True)]
            check_descriptions(engine.name, manifest, named)
        self._manifest = manifest
        return arena

    def _fill_and_prove(
        self,
        manifest: Manifest,
        arena: ShmArena,
        version: str,
        update_id: str,
        seconds: dict[str, float],
        deadline: Deadline,
    ) -> StagedUpdate:
        clock = time.perf_counter()
        seed = secrets.randbits(64)
        seeds = derive_seeds(seed, manifest.identities)
        addresses = self._offsets + np.uint64(arena.address)
        digests = fill(self._source, manifest, addresses, seeds, self._on_progress)
        seconds["fill"] = time.perf_counter() - clock
        clock = time.perf_counter()
        workers = self._roster.workers
        seal = Seal(update_id=update_id, seed=seed)
        proofs = ask_all(workers, seal, Digests, deadline, belongs_to=update_id)
        _compare(manifest, digests, workers, proofs)
        seconds["verify"] = time.perf_counter() - clock
        digest = hashlib.blake2b(
            seed.to_bytes(8, "little") + digests.astype("<u8").tobytes(), digest_size=32
        )
        return StagedUpdate(self, version, update_id, digest.hexdigest(), proofs, seconds)

    def _commit(self, staged: StagedUpdate, pause: PauseMode) -> Receipt:
        manifest = self._manifest
        if self._staged is not staged or manifest is None:
            raise UpdateRefused(f"update {staged.update_id} is not staged any more")
        if pause not in ("keep", "wait", "abort"):
            raise UpdateRefused(f"pause is 'keep', 'wait' or 'abort', got {pause!r}")
        started = time.perf_counter()
        deadline = Deadline.after(self._seconds)
        proofs = dict(zip((w.name for w in self._roster.workers), staged.proofs, strict=True))

        def flip(engine: Engine) -> EngineReceipt:
            workers = self._roster.of(engine)
            mine = [proofs[worker.name] for worker in workers]
            return commit_engine(
                engine, workers, staged.update_id, staged.version, mine, pause, deadline
            )

        self._staged = None
        try:
            flipped = self._roster.each(flip)
        except BaseException as error:
            # Whatever state the connections are in, the next update starts with new ones.
            self._roster.drop(error)
            raise
        share = LevelShare(tensors=len(manifest), nbytes=manifest.total_bytes)
        receipt = Receipt(
            version=staged.version,
            update_id=staged.update_id,
            proven=self._proof,
            levels={self._proof: share},
            nbytes=manifest.total_bytes,
            manifest_hash=manifest.hash,
            digest=staged.digest,
            casts=dict(self._source.casts),
            aliases=dict(self._source.aliases),
            engines=tuple(flipped),
            seconds={**staged.seconds, "commit": time.perf_counter() - started},
            previous="" if self.last_receipt is None else self.last_receipt.hash,
        )
        self.last_receipt = chain(receipt)
        if self._on_receipt is not None:
            self._on_receipt(self.last_receipt)
        return self.last_receipt

    def _abort(self, staged: StagedUpdate) -> None:
        if self._staged is staged:
            self._staged = None
            self._tell_abort(staged.update_id, "given up by the trainer")

    def _give_up(self, update_id: str, error: BaseException) -> None:
        """Nothing was applied. Workers are told so, or hung up on, which tells them the same."""
        if isinstance(error, HARMLESS):
            self._tell_abort(update_id, str(error))
        else:
            self._roster.drop(error)

    def _tell_abort(self, update_id: str, reason: str) -> None:
        message = Abort(update_id=update_id, reason=reason[:1000])
        deadline = Deadline.after(ABORT_SECONDS)
        try:
            ask_all(self._roster.workers, message, Ack, deadline, belongs_to=update_id)
        except Exception as failure:
            self._roster.drop(failure)


def _compare(
    manifest: Manifest,
    expected: NDArray[np.uint64],
    workers: Sequence[Worker],
    proofs: Sequence[Digests],
) -> None:
    """Every worker's digest of every tensor against the trainer's.

    Raises:
        ProofFailed: at least one differs.
        UpdateAborted: a worker digested another number of tensors.
    """
    mismatches = []
    for worker, proof in zip(workers, proofs, strict=True):
        if len(proof.digests) != expected.nbytes:
            raise UpdateAborted(
                f"{worker.name} digested {len(proof.digests) // 16} tensors, "
                f"expected {len(manifest)}"
            )
        found = np.frombuffer(proof.digests, "<u8").reshape(-1, 2)
        for index in np.flatnonzero((found != expected).any(axis=1)).tolist():
            mismatches.append(
                DigestMismatch(
                    tensor=manifest.tensors[index].name,
                    worker=worker.name,
                    expected=expected[index].tobytes().hex(),
                    found=found[index].tobytes().hex(),
                )
            )
    if mismatches:
        raise ProofFailed(mismatches)
