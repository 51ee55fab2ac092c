"""The flip of one engine: pause, apply, caches, version, resume; and what happens when one of them
fails.

Before the first worker applies anything, every failure leaves the old weights. From then on an
engine either ends committed or poisoned: paused requests are ended, new ones are refused at
admission, and only a full update cures it. With a canary it is resumed before its version counts,
since an engine that is paused cannot be asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weightsync import settling
from weightsync.canary import Canary, check_canary, rehearse
from weightsync.control import Worker, ask_all, gather
from weightsync.deadline import Deadline
from weightsync.engines.base import Engine, PauseMode
from weightsync.errors import (
    EnginePoisoned,
    UpdateAborted,
    UpdateRefused,
    WeightSyncError,
    reason_of,
)
from weightsync.messages import Ack, Admit, Applied, Arm, Commit, Digests
from weightsync.receipt import EngineReceipt, WorkerProof, WorkerReceipt
from weightsync.served import Judge

__all__ = ["Flip", "Flipped"]


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, step: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        taken = time.perf_counter() - started
        self.seconds[step] = self.seconds.get(step, 0.0) + taken


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
        flip.conclude(digests)           # caches, version, resume: the engine's receipt

    Of a streamed update there is nothing to `apply`: whoever streams calls `poison` if that fails.

    Args:
        workers: of this engine, by rank.
        pause: what happens to requests in flight.
        judge: gives who says what the workers have proven, once everything is applied.
        canary: of which the engine must think as the trainer does, before its version counts.
        keep_requests: do not end requests that have stood still when the engine is poisoned:
            somebody is about to cure it.
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
        self._started = self._paused_seconds = 0.0
        self._ours = self._was_paused = self._holds = False
        self._reported: str | None = None
        """The version that the engine reported before."""
        self._runs = False
        """It was resumed before its version counts: requests have taken steps with new weights."""
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
            self._reported = engine.version(deadline)
            self._ours = not self._was_paused or any(w.status.holds_pause for w in workers)
            if self._canary is not None and not self._ours:
                raise UpdateRefused(
                    f"{engine.name} is paused by somebody else, and a canary needs it to run",
                    remedy="resume it first, or sync without a canary",
                )
            if self._canary is not None and self._answers:
                rehearse(engine, self._canary, deadline)
            arm = Arm(update_id=self._update_id, holds_pause=self._ours)
            ask_all(workers, arm, Ack, deadline, belongs_to=self._update_id)
            for worker in workers:
                worker.is_now(holds_pause=self._ours)
            engine.begin(deadline)
            self._started = time.perf_counter()
            if not self._was_paused or self._pause == "abort":
                settling.still_ours(workers)
                with self._clock.measure("pause"):
                    engine.pause(self._pause, deadline)
            self._holds = engine.is_paused(deadline)
            settling.still_ours(workers)
        except BaseException as error:
            self.leave(error)
            if not isinstance(error, Exception):
                raise
            raise UpdateAborted(
                f"{engine.name}: update {self._update_id} was aborted before anything was applied; "
                f"it serves what it served before. {reason_of(error)}"
            ) from error

    @property
    def _answers(self) -> bool:
        """Before the pause, an engine can be asked, unless it refuses or stands still. Where
        requests are to be ended, it may be they that keep it from answering."""
        poisoned = any(worker.status.poisoned is not None for worker in self.workers)
        return not self._was_paused and not poisoned and self._pause != "abort"

    def leave(self, error: BaseException) -> None:
        """Nothing was applied: leave the engine as it was found.

        Raises:
            Superseded: a newer sender holds the engine, which is left alone.
        """
        settling.raise_if_superseded(self.engine, self.workers, error)
        poisoned = any(worker.status.poisoned is not None for worker in self.workers)
        settling.unwind(
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
            settling.still_ours(workers)
            with self._clock.measure("finish"):
                engine.finish(deadline)
            reported = engine.version(deadline)
            if reported != self._reported:
                raise WeightSyncError(
                    f"{engine.name} reports version {reported!r} before it was told to, and "
                    f"reported {self._reported!r} before this update",
                    remedy="let nothing but this sender set the version while an update is applied",
                )
            with self._clock.measure("reset"):
                # Requests that were frozen hold what the old weights computed, whoever froze them.
                recompute = self._was_paused or self._pause == "keep"
                engine.reset_caches(deadline, recompute=recompute)
            gap = None if self._canary is None else self._try_out(self._canary)
            commit = Commit(update_id=self._update_id)
            ask_all(workers, commit, Ack, deadline, belongs_to=self._update_id)
        for worker in workers:
            worker.is_now(poisoned=None, version=self._version)
        settling.go_on(
            engine,
            workers,
            self._update_id,
            self._version,
            deadline,
            resume=self._ours and not self._runs,
            release=self._ours,
            measure=self._clock.measure,
        )
        if not self._runs:
            self._paused_seconds = time.perf_counter() - self._started
        proofs: Sequence[WorkerProof | None] = verdict.proofs or [None] * len(workers)
        receipt = EngineReceipt(
            name=engine.name,
            engine=workers[0].description,
            pause=self._pause,
            paused_seconds=self._paused_seconds,
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
            canary=gap,
        )
        return Flipped(receipt, verdict.levels)

    def _try_out(self, canary: Canary) -> float:
        """Let the engine run before its version counts, and ask it. Its workers remember the pause
        until then: should it fail, the engine is paused again, and by this sender.

        Returns:
            The largest difference of any log-probability.
        """
        engine, workers, deadline = self.engine, self.workers, self._deadline
        admit = Admit(update_id=self._update_id)
        ask_all(workers, admit, Ack, deadline, belongs_to=self._update_id)
        settling.still_ours(workers)
        self._runs = True
        with self._clock.measure("resume"):
            engine.resume(deadline)
        self._paused_seconds = time.perf_counter() - self._started
        with self._clock.measure("canary"):
            gap = check_canary(engine, canary, deadline)
        settling.still_ours(workers)
        return gap

    def poison(self, error: BaseException) -> EnginePoisoned:
        """Something may have been applied: all workers refuse together.

        Returns:
            The error to raise.

        Raises:
            Superseded: a newer sender holds the engine, which is left alone.
        """
        settling.raise_if_superseded(self.engine, self.workers, error)
        reason = reason_of(error)
        settling.poison(
            self.engine,
            self.workers,
            self._update_id,
            reason,
            # What has taken steps meanwhile holds tokens of a version that never was.
            keep_requests=self._keep_requests and not self._runs,
        )
        for worker in self.workers:
            worker.is_now(poisoned=reason)
        what, remedy = reason, "sync a full update: it cures the engine without a restart"
        if isinstance(error, WeightSyncError) and error.remedy is not None:
            what, remedy = error.what, f"{remedy}. If it fails again: {error.remedy}"
        return EnginePoisoned(
            f"{self.engine.name}: update {self._update_id} failed while it was applied; the engine "
            f"may hold a mixture of versions and refuses requests. {what}",
            remedy=remedy,
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
