"""The sender: stage, prove, then flip.

``stage()`` fills the arena, lets every worker of every engine digest it, and compares; engines go
on generating meanwhile. ``commit()`` pauses each engine just long enough to apply what was proven.
``sync()`` does both.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from weightsync.commit import commit_engine, release_pause
from weightsync.control import Listener, Worker, ask_all, close_all, gather, lost
from weightsync.deadline import Deadline
from weightsync.digest import derive_seeds
from weightsync.engines.base import Engine, PauseMode
from weightsync.errors import (
    DigestMismatch,
    EnginePoisoned,
    ProofFailed,
    Superseded,
    TransportError,
    UpdateAborted,
    UpdateError,
    UpdateRefused,
    WeightSyncError,
)
from weightsync.manifest import Manifest
from weightsync.plan.match import check_descriptions
from weightsync.receipt import EngineReceipt, LevelShare, ProofLevel, Receipt, chain
from weightsync.sources.base import Source, fill
from weightsync.transport.shm import ShmArena, arena_offsets
from weightsync.wire import Abort, Ack, Begin, Described, Digests, Layout, Seal

__all__ = ["StagedUpdate", "WeightSender"]

log = logging.getLogger("weightsync.sender")
T = TypeVar("T")

SUPPORTED_PROOFS: tuple[ProofLevel, ...] = ("received",)


class StagedUpdate:
    """An update that every worker has proven to hold, not yet served by any.

    Attributes:
        version: that it will be.
        update_id: of this update.
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
        self._sender._abort(self, "aborted by the caller")


class WeightSender:
    """Delivers a trainer's weights to live engines.

    Connects on first use, holds one arena of shared memory and one connection per worker, and
    reuses them. A sender that is created for an engine that another sender holds takes it over and
    clears what that one left. Not thread-safe.

    Args:
        source: what the trainer has.
        engines: from `weightsync.engines` or `weightsync.engine`.
        proof: what must be proven of every tensor before `sync` returns. ``"received"``: the bytes
            that each worker hands to its engine's loader, digested by the worker in place.
        deadline: seconds that one `stage` or one `commit` may take.
        on_receipt: called with each receipt, after the engines have resumed.
        on_progress: called with (bytes filled, bytes in all) while staging.

    Raises:
        UpdateRefused: no engine, two of one name, or a proof level that does not exist.
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
        self._source = source
        self._engines = tuple(engines)
        names = [engine.name for engine in self._engines]
        if not names or len(set(names)) != len(names):
            raise UpdateRefused(f"a sender needs engines of different names, got {names}")
        if proof not in SUPPORTED_PROOFS:
            raise UpdateRefused(
                f"proof {proof!r} is not available, known are {', '.join(SUPPORTED_PROOFS)}"
            )
        self._proof = proof
        self._seconds = deadline
        self._on_receipt = on_receipt
        self._on_progress = on_progress
        self._listener: Listener | None = None
        self._workers: list[Worker] = []
        self._arena: ShmArena | None = None
        self._manifest: Manifest | None = None
        self._offsets: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._staged: StagedUpdate | None = None
        self._last_hash = ""
        self._superseded: Superseded | None = None
        self._pool: ThreadPoolExecutor | None = None

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
                new weights, ``"wait"`` lets them end first, ``"abort"`` ends them.

        Returns:
            The receipt.

        Raises:
            PlanRefused: source and engine do not fit; nothing moved.
            SourceError, ConnectError, TransportError: something could not be read, reached or
            reserved. ProofFailed, UpdateAborted: given up before anything was applied; the engines
            serve the old version. EnginePoisoned: an engine failed while applying, and refuses to
            serve until the next full update. Superseded: a newer sender has taken over.
        """
        return self.stage(version).commit(pause)

    def stage(self, version: int | str) -> StagedUpdate:
        """Move and prove, while the engines go on generating. Raises as `sync` does."""
        if self._superseded is not None:
            raise self._superseded
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
        seconds: dict[str, float] = {}
        update_id = f"{label}-{secrets.token_hex(4)}"
        try:
            manifest = self._source.manifest()
            self._open_session(deadline)
            arena = self._announce(manifest, deadline)
            seconds["plan"] = time.perf_counter() - started
            begin = Begin(update_id=update_id, version=label)
            ask_all(self._workers, begin, Ack, deadline, update_id=update_id)
        except (TransportError, Superseded) as error:
            self._drop_session(error)
            raise
        try:
            staged = self._fill_and_prove(manifest, arena, label, update_id, seconds, deadline)
        except BaseException as error:
            self._settle(update_id, error)
            raise
        staged.seconds["stage"] = time.perf_counter() - started
        self._staged = staged
        return staged

    def close(self) -> None:
        """Leave the engines as they are and give everything back. Harmless when called twice."""
        if self._staged is not None:
            self._abort(self._staged, "the sender was closed")
        close_all(self._workers)
        self._workers = []
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._manifest = None

    # --- sessions and layouts ---------------------------------------------------------------

    def _open_session(self, deadline: Deadline) -> None:
        if self._workers:
            gone = lost(self._workers)
            if gone is None:
                return
            log.warning("%s is gone; opening a new session", gone)
            self._drop_session(None)
        if self._listener is None:
            self._listener = Listener()
        expected = {secrets.token_hex(8): (e.name, e.workers) for e in self._engines}
        path = self._listener.path
        tokens = dict(zip(self._engines, expected, strict=True))
        self._each(lambda engine: engine.open_session(path, tokens[engine], deadline))
        self._workers = self._listener.accept(expected, deadline)
        for engine in self._engines:
            self._clear_leftovers(engine, deadline)

    def _clear_leftovers(self, engine: Engine, deadline: Deadline) -> None:
        """What a sender that died left on an engine: an open update session, and a pause."""
        statuses = [worker.status for worker in self._of(engine)]
        if any(status.session_open for status in statuses):
            engine.adopt_session()
            engine.finish(None, deadline)
        if any(s.holds_pause for s in statuses) and not any(s.poisoned for s in statuses):
            engine.resume(deadline)
            release_pause(self._of(engine), "", deadline)
            log.warning("%s was left paused by an earlier sender; resumed", engine.name)

    def _drop_session(self, error: BaseException | None) -> None:
        close_all(self._workers)
        self._workers, self._manifest = [], None
        if isinstance(error, Superseded):
            self._superseded = error

    def _announce(self, manifest: Manifest, deadline: Deadline) -> ShmArena:
        """Tell all workers what will come, and let them refuse it before the first byte moves."""
        arena = self._arena
        if arena is not None and self._manifest is not None and self._manifest == manifest:
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
        ask_all(self._workers, layout, Ack, deadline, fd=arena.fd)
        for engine in self._engines:
            engine.prepare(deadline)
            workers = self._of(engine)
            answers = gather(workers, Described, deadline)
            check_descriptions(
                engine.name, manifest, [(w.name, d) for w, d in zip(workers, answers, strict=True)]
            )
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
        seal = Seal(update_id=update_id, seed=seed)
        proofs = ask_all(self._workers, seal, Digests, deadline, update_id=update_id)
        _compare(manifest, digests, self._workers, proofs)
        seconds["verify"] = time.perf_counter() - clock
        digest = hashlib.blake2b(
            seed.to_bytes(8, "little") + digests.astype("<u8").tobytes(), digest_size=32
        )
        return StagedUpdate(self, version, update_id, digest.hexdigest(), proofs, seconds)

    # --- the end of an update ---------------------------------------------------------------

    def _commit(self, staged: StagedUpdate, pause: PauseMode) -> Receipt:
        if self._staged is not staged:
            raise UpdateRefused(f"update {staged.update_id} is not staged any more")
        if pause not in ("keep", "wait", "abort"):
            raise UpdateRefused(f"pause is 'keep', 'wait' or 'abort', got {pause!r}")
        started = time.perf_counter()
        deadline = Deadline.after(self._seconds)
        manifest = self._manifest
        if manifest is None:
            raise UpdateRefused("the session that staged this update is gone")
        proofs = dict(zip((w.name for w in self._workers), staged.proofs, strict=True))

        def flip(engine: Engine) -> EngineReceipt:
            workers = self._of(engine)
            mine = [proofs[worker.name] for worker in workers]
            return commit_engine(
                engine, workers, staged.update_id, staged.version, mine, pause, deadline
            )

        try:
            flipped = self._each(flip)
        except BaseException as error:
            # Whatever state the connections are in, the next update starts with new ones.
            self._staged = None
            self._drop_session(error.__cause__ if isinstance(error.__cause__, Superseded) else None)
            raise
        self._staged = None
        share = LevelShare(tensors=len(manifest), nbytes=manifest.total_bytes)
        receipt = chain(
            Receipt(
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
                previous=self._last_hash,
            )
        )
        self._last_hash = receipt.hash
        if self._on_receipt is not None:
            self._on_receipt(receipt)
        return receipt

    def _abort(self, staged: StagedUpdate, reason: str) -> None:
        if self._staged is not staged:
            return
        self._staged = None
        self._settle(staged.update_id, UpdateAborted(reason))

    def _settle(self, update_id: str, error: BaseException) -> None:
        """Tell the workers that nothing comes of it; if they can't be told, hang up, which says
        the same."""
        if isinstance(error, Superseded):
            self._drop_session(error)
            return
        message = Abort(update_id=update_id, reason=str(error)[:1000])
        try:
            ask_all(self._workers, message, Ack, Deadline.after(10.0), update_id=update_id)
        except WeightSyncError:
            self._drop_session(None)

    # --- engines ----------------------------------------------------------------------------

    def _of(self, engine: Engine) -> list[Worker]:
        return [worker for worker in self._workers if worker.engine == engine.name]

    def _each(self, action: Callable[[Engine], T]) -> list[T]:
        """Run an action for all engines at once; those of this process on this thread.

        All are run to their end before the first error is raised, so that no engine is left
        half-way.
        """
        remote = [engine for engine in self._engines if not engine.in_process]
        if len(self._engines) == 1 or not remote:
            return _all_or_raise([_attempt(action, engine) for engine in self._engines])
        if self._pool is None:
            self._pool = ThreadPoolExecutor(len(remote), thread_name_prefix="weightsync-sender")
        futures = {engine.name: self._pool.submit(_attempt, action, engine) for engine in remote}
        local = {e.name: _attempt(action, e) for e in self._engines if e.in_process}
        return _all_or_raise(
            [local[e.name] if e.in_process else futures[e.name].result() for e in self._engines]
        )


def _attempt(action: Callable[[Engine], T], engine: Engine) -> T | BaseException:
    try:
        return action(engine)
    except BaseException as error:
        return error


def _all_or_raise(results: Sequence[T | BaseException]) -> list[T]:
    """The results, or the gravest error; the others' texts go with it."""
    errors = [result for result in results if isinstance(result, BaseException)]
    if not errors:
        return [result for result in results if not isinstance(result, BaseException)]
    errors.sort(key=lambda e: (isinstance(e, UpdateError), not isinstance(e, EnginePoisoned)))
    first = errors[0]
    for other in errors[1:]:
        first.add_note(f"and: {other}")
    raise first


def _compare(
    manifest: Manifest,
    expected: NDArray[np.uint64],
    workers: Sequence[Worker],
    proofs: Sequence[Digests],
) -> None:
    """Every worker's digest of every tensor against the trainer's.

    Raises:
        ProofFailed: at least one differs, or a worker read another number of bytes.
    """
    mismatches = []
    for worker, proof in zip(workers, proofs, strict=True):
        if len(proof.digests) != expected.nbytes or proof.nbytes != manifest.total_bytes:
            raise UpdateAborted(
                f"{worker.name} digested {proof.nbytes} bytes of {len(proof.digests) // 16} "
                f"tensors, expected {manifest.total_bytes} bytes of {len(manifest)}"
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
