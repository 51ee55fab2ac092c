"""The flip of one engine: pause, apply, version, caches, resume; and what happens when one of them
fails.

Before the first worker applies anything, every failure leaves the old weights. From then on an
engine either ends committed or poisoned: paused requests are ended, new ones are refused at
admission, and only a full update cures it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weightsync.canary import Canary, check_canary
from weightsync.control import Worker, ask_all, gather, lost, tell_all
from weightsync.deadline import Deadline
from weightsync.engines.base import Engine, PauseMode
from weightsync.errors import (
    EnginePoisoned,
    NotResumed,
    PeerLost,
    Superseded,
    UpdateAborted,
    UpdateRefused,
    WeightSyncError,
    reason_of,
)
from weightsync.messages import Abort, Ack, Applied, Arm, Commit, Digests, Poison, Resumed
from weightsync.receipt import EngineReceipt, WorkerProof, WorkerReceipt
from weightsync.served import Judge

__all__ = ["Flip", "Flipped", "end_requests", "release_pause"]

log = logging.getLogger("weightsync.sender")

SETTLE_SECONDS = 10.0
"""What each step may take that leaves the engine of a failed update in a defined state: telling its
workers, closing its update session, ending its requests."""


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, step: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[step] = time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class Flipped:
    """One engine that serves an update.

    Attributes:
        levels: at which each tensor is proven, shape (n,), as positions in
            `weightsync.served.LEVELS`.
    """

    receipt: EngineReceipt
    levels: NDArray[np.int64]


class Flip:
    """One engine's change to one update.

        flip.enter()                     # paused; or UpdateAborted, and nothing has changed
        flip.apply()                     # staged: the engine's workers load
        flip.conclude(digests)           # version, caches, resume: the engine's receipt

    Of a streamed update there is nothing to `apply`: whoever streams calls `poison` if that fails.

    Args:
        workers: of this engine, by rank.
        pause: what happens to requests in flight.
        judge: gives who says what the workers have proven, once everything is applied.
        canary: of which the engine must think as the trainer does, before its version counts.
        keep_requests: do not end requests when the engine is poisoned: somebody is about to cure
            it.
    """

    def __init__(
        self,
        engine: Engine,
        workers: Sequence[Worker],
        update_id: str,
        version: str,
        pause: PauseMode,
        deadline: Deadline,
        *,
        judge: Callable[[], Judge],
        canary: Canary | None,
        keep_requests: bool = False,
    ) -> None:
        self.engine = engine
        self.workers = workers
        self._update_id = update_id
        self._version = version
        self._pause: PauseMode = pause
        self._deadline = deadline
        self._judge = judge
        self._canary = canary
        self._keep_requests = keep_requests
        self._clock = _Clock()
        self._started = 0.0
        self._ours = self._was_paused = self._holds = False
        self._reports: Sequence[Applied] = ()

    def enter(self) -> None:
        """Open the engine's update session and pause it.

        Raises:
            UpdateAborted: nothing was applied; the engine serves the old version.
            Superseded: a newer sender holds the engine, which is left alone.
        """
        engine, workers, deadline = self.engine, self.workers, self._deadline
        try:
            # A pause that somebody else asked for stays; one that a failed update left is ours.
            self._was_paused = engine.is_paused(deadline)
            self._ours = not self._was_paused or any(w.status.holds_pause for w in workers)
            if self._canary is not None and not self._ours:
                raise UpdateRefused(
                    f"{engine.name} is paused by somebody else, and a canary needs it to run",
                    remedy="resume it first, or sync without a canary",
                )
            arm = Arm(update_id=self._update_id, holds_pause=self._ours)
            ask_all(workers, arm, Ack, deadline, belongs_to=self._update_id)
            for worker in workers:
                worker.is_now(holds_pause=self._ours)
            engine.begin(deadline)
            self._started = time.perf_counter()
            if not self._was_paused or self._pause == "abort":
                _still_ours(workers)
                with self._clock.measure("pause"):
                    engine.pause(self._pause, deadline)
            self._holds = engine.is_paused(deadline)
            _still_ours(workers)
        except BaseException as error:
            self.leave(error)
            if not isinstance(error, Exception):
                raise
            raise UpdateAborted(
                f"{engine.name}: update {self._update_id} was aborted before anything was applied; "
                f"it serves what it served before. {reason_of(error)}"
            ) from error

    def leave(self, error: BaseException) -> None:
        """Nothing was applied: leave the engine as it was found.

        Raises:
            Superseded: a newer sender holds the engine, which is left alone.
        """
        _raise_if_superseded(self.engine, self.workers, error)
        poisoned = any(worker.status.poisoned is not None for worker in self.workers)
        _unwind(
            self.engine,
            self.workers,
            self._update_id,
            resume=self._ours and not poisoned,
            reason=reason_of(error),
        )

    def apply(self) -> None:
        """Let all workers apply what they have staged.

        Raises:
            EnginePoisoned: one failed; the engine refuses to serve until a full update cures it.
            Superseded: a newer sender holds the engine, which is left alone.
        """
        with self._or_poison(), self._clock.measure("apply"):
            self.engine.apply(self._update_id, self._deadline)
            self._reports = gather(
                self.workers, Applied, self._deadline, belongs_to=self._update_id
            )
            named = zip(self.workers, self._reports, strict=True)
            failed = [(worker.name, report.error) for worker, report in named if report.error]
            if failed:
                raise WeightSyncError("; ".join(f"{name}: {error}" for name, error in failed))

    def conclude(self, digests: Sequence[Digests]) -> Flipped:
        """Everything is applied: make the engine serve it.

        Args:
            digests: what each worker proved, for the receipt.

        Raises:
            EnginePoisoned: a model does not hold what it should, the canary failed, caches could
                not be reset, or a worker was lost.
            NotResumed: the new weights are whole, but the engine is still paused.
            Superseded: a newer sender holds the engine, which is left alone.
        """
        engine, workers, deadline = self.engine, self.workers, self._deadline
        with self._or_poison():
            # Of a streamed update there are no reports: what it took is in its digests' time.
            reports: Sequence[Applied | None] = self._reports or [None] * len(workers)
            verdict = self._judge().verdict(
                [
                    digest.found if report is None else report.found
                    for report, digest in zip(reports, digests, strict=True)
                ]
            )
            if self._holds and not engine.is_paused(deadline):
                raise WeightSyncError("somebody resumed the engine while it was updated")
            _still_ours(workers)
            with self._clock.measure("finish"):
                engine.finish(deadline)
            with self._clock.measure("reset"):
                # Requests that were frozen hold what the old weights computed, whoever froze them.
                recompute = self._was_paused or self._pause == "keep"
                engine.reset_caches(deadline, recompute=recompute)
            commit = Commit(update_id=self._update_id)
            ask_all(workers, commit, Ack, deadline, belongs_to=self._update_id)
        for worker in workers:
            worker.is_now(poisoned=None, version=self._version)
        if self._canary is not None:
            self._go_on(resume=True)
            with self._or_poison(), self._clock.measure("canary"):
                check_canary(engine, self._canary, deadline)
            self._go_on(version=True)
        else:
            self._go_on(version=True, resume=self._ours)
        proofs: Sequence[WorkerProof | None] = verdict.proofs or [None] * len(workers)
        receipt = EngineReceipt(
            name=engine.name,
            engine=workers[0].description,
            pause=self._pause,
            paused_seconds=time.perf_counter() - self._started,
            seconds=self._clock.seconds,
            workers=tuple(
                WorkerReceipt(
                    name=worker.name,
                    device=worker.device,
                    verify_seconds=digest.seconds,
                    apply_seconds=report.seconds if report else 0.0,
                    load_seconds=report.load_seconds if report else 0.0,
                    proof=proof,
                )
                for worker, digest, report, proof in zip(
                    workers, digests, reports, proofs, strict=True
                )
            ),
            plan_hash=verdict.plan_hash,
            levels=verdict.shares,
        )
        return Flipped(receipt, verdict.levels)

    def _go_on(self, *, version: bool = False, resume: bool = False) -> None:
        label = self._version if version else None
        _go_on(
            self.engine, self.workers, self._update_id, label, resume, self._clock, self._deadline
        )

    def poison(self, error: BaseException) -> EnginePoisoned:
        """Something may have been applied: all workers refuse together.

        Returns:
            The error to raise.

        Raises:
            Superseded: a newer sender holds the engine, which is left alone.
        """
        _raise_if_superseded(self.engine, self.workers, error)
        reason = reason_of(error)
        _poison(
            self.engine,
            self.workers,
            self._update_id,
            reason,
            keep_requests=self._keep_requests,
        )
        for worker in self.workers:
            worker.is_now(poisoned=reason)
        return EnginePoisoned(
            f"{self.engine.name}: update {self._update_id} failed while it was applied; the engine "
            f"may hold a mixture of versions and refuses requests. {reason}",
            remedy="sync a full update: it cures the engine without a restart",
        )

    @contextmanager
    def _or_poison(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            poisoned = self.poison(error)
            if not isinstance(error, Exception):
                raise
            raise poisoned from error


def _go_on(
    engine: Engine,
    workers: Sequence[Worker],
    update_id: str,
    version: str | None,
    resume: bool,
    clock: _Clock,
    deadline: Deadline,
) -> None:
    """All is applied: the version counts, and the engine goes on. Tried twice, also when it is
    interrupted; never poisons."""
    interrupt: BaseException | None = None
    for last in (False, True):
        try:
            _still_ours(workers)
            if version is not None:
                with clock.measure("version"):
                    engine.set_version(version, deadline)
            with clock.measure("resume"):
                if resume:
                    _still_ours(workers)
                    engine.resume(deadline)
                    release_pause(workers, update_id, deadline)
            break
        except BaseException as error:
            _raise_if_superseded(engine, workers, error)
            if not isinstance(error, Exception):
                interrupt = error
            if last:
                if interrupt is not None:
                    raise interrupt from error
                raise NotResumed(
                    f"{engine.name}: update {update_id} is applied and proven on every worker, but "
                    f"the engine could not be told so: {error}",
                    remedy="sync again: it sets the version and resumes; the weights are whole",
                ) from error
            log.warning("%s, once more: %s", engine.name, reason_of(error))
            deadline = Deadline.after(SETTLE_SECONDS)
    if interrupt is not None:
        raise interrupt


def _still_ours(workers: Sequence[Worker]) -> None:
    """Asked before each engine call that a newer sender would suffer from, when no answer is due.

    Engine calls carry no epoch: between this look and the call, a takeover would go unnoticed.

    Raises:
        Superseded: a newer sender holds the engine.
        PeerLost: a worker has hung up.
    """
    gone = lost(workers)
    if gone is not None:
        raise PeerLost(f"{gone} has hung up")


def _raise_if_superseded(engine: Engine, workers: Sequence[Worker], error: BaseException) -> None:
    """An engine that a newer sender holds is left alone altogether; that another one is held says
    nothing of this one."""
    if isinstance(error, Superseded) and error.engine in (None, engine.name):
        raise error
    lost(workers)


def release_pause(workers: Sequence[Worker], update_id: str, deadline: Deadline) -> None:
    """Tell an engine's workers that it was resumed: nobody has to do it for this sender."""
    ask_all(workers, Resumed(update_id=update_id), Ack, deadline, belongs_to=update_id)
    for worker in workers:
        worker.is_now(holds_pause=False)


def _unwind(
    engine: Engine, workers: Sequence[Worker], update_id: str, *, resume: bool, reason: str
) -> None:
    """Nothing was applied: leave the engine as it was found."""
    deadline = Deadline.after(SETTLE_SECONDS)
    message = Abort(update_id=update_id, reason=reason[:1000])
    _try(lambda: ask_all(workers, message, Ack, deadline, belongs_to=update_id))
    _try(lambda: engine.finish(deadline))
    if resume:
        _try(lambda: engine.resume(deadline))
        _try(lambda: release_pause(workers, update_id, deadline))


def _poison(
    engine: Engine,
    workers: Sequence[Worker],
    update_id: str,
    reason: str,
    *,
    keep_requests: bool,
) -> None:
    """Something may have been applied: all workers refuse together, and nobody is left hanging."""
    deadline = Deadline.after(SETTLE_SECONDS)
    message = Poison(update_id=update_id, reason=reason[:1000])
    each = [[worker] for worker in workers]
    # All are told before any is waited for: one that stands still must not keep it from the others.
    told = [one for one in each if _try(lambda one=one: tell_all(one, message, deadline))]  # type: ignore[misc]
    for one in told:
        _try(lambda one=one: gather(one, Ack, deadline, belongs_to=update_id, of="poison"))  # type: ignore[misc]
    _try(lambda: engine.finish(Deadline.after(SETTLE_SECONDS)))
    if not keep_requests:
        end_requests(engine)


def end_requests(engine: Engine) -> None:
    """Requests that are frozen in flight would wait for a cure that may never come: end them."""
    _try(lambda: engine.pause("abort", Deadline.after(SETTLE_SECONDS)))


def _try(action: Callable[[], object]) -> bool:
    """Whether it went well."""
    try:
        action()
    except Exception as error:
        log.warning("while settling a failed update: %s", error)
        return False
    return True
