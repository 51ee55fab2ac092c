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

from weightsync.control import Worker, ask_all, gather, lost
from weightsync.deadline import Deadline
from weightsync.engines.base import Engine, PauseMode
from weightsync.errors import (
    EnginePoisoned,
    NotResumed,
    PeerLost,
    Superseded,
    UpdateAborted,
    WeightSyncError,
)
from weightsync.messages import Abort, Ack, Applied, Arm, Commit, Digests, Poison, Resumed
from weightsync.receipt import EngineReceipt, WorkerReceipt

__all__ = ["commit_engine", "release_pause"]

log = logging.getLogger("weightsync.sender")

SETTLE_SECONDS = 30.0
"""What a failed update may still take to leave the engine in a defined state."""


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, step: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[step] = time.perf_counter() - started


def commit_engine(
    engine: Engine,
    workers: Sequence[Worker],
    update_id: str,
    version: str,
    digests: Sequence[Digests],
    pause: PauseMode,
    deadline: Deadline,
) -> EngineReceipt:
    """Flip one engine to a verified update.

    Args:
        workers: of this engine, by rank.
        digests: what each worker proved while staging, for the receipt.
        pause: what happens to requests in flight.

    Raises:
        UpdateAborted: before anything was applied; the engine serves the old version.
        EnginePoisoned: later; the engine refuses to serve until a full update cures it.
        NotResumed: last of all; the new weights are whole, but the engine is still paused.
        Superseded: at any moment; a newer sender holds the engine, which is left alone.
    """
    clock = _Clock()
    ours = False
    try:
        # A pause that somebody else asked for stays; one that a failed update left is ours.
        paused = engine.is_paused(deadline)
        ours = not paused or any(worker.status.holds_pause for worker in workers)
        arm = Arm(update_id=update_id, holds_pause=ours)
        ask_all(workers, arm, Ack, deadline, belongs_to=update_id)
        engine.begin(deadline)
        started = time.perf_counter()
        if not paused or pause == "abort":
            _still_ours(workers)
            with clock.measure("pause"):
                engine.pause(pause, deadline)
        holds = engine.is_paused(deadline)
        _still_ours(workers)
    except BaseException as error:
        _raise_if_superseded(workers, error)
        poisoned = any(worker.status.poisoned for worker in workers)
        _unwind(engine, workers, update_id, resume=ours and not poisoned, reason=str(error))
        if not isinstance(error, Exception):
            raise
        raise UpdateAborted(
            f"{engine.name}: update {update_id} was aborted before anything was applied; it serves "
            f"what it served before. {error}"
        ) from error
    try:
        with clock.measure("apply"):
            engine.apply(update_id, deadline)
            reports = gather(workers, Applied, deadline, belongs_to=update_id)
        failed = [(w.name, r.error) for w, r in zip(workers, reports, strict=True) if r.error]
        if failed:
            raise WeightSyncError("; ".join(f"{name}: {error}" for name, error in failed))
        if holds and not engine.is_paused(deadline):
            raise WeightSyncError("somebody resumed the engine while it was updated")
        _still_ours(workers)
        with clock.measure("finish"):
            engine.finish(deadline)
        with clock.measure("reset"):
            # Requests that were frozen hold what the old weights computed, whoever froze them.
            engine.reset_caches(deadline, recompute=paused or pause == "keep")
        ask_all(workers, Commit(update_id=update_id), Ack, deadline, belongs_to=update_id)
    except BaseException as error:
        _raise_if_superseded(workers, error)
        _poison(engine, workers, update_id, str(error))
        if not isinstance(error, Exception):
            raise
        raise EnginePoisoned(
            f"{engine.name}: update {update_id} failed while it was applied; the engine may hold a "
            f"mixture of versions and refuses requests. {error}",
            remedy="sync a full update: it cures the engine without a restart",
        ) from error
    for worker in workers:
        worker.is_now(poisoned=None, version=version, holds_pause=ours)
    _go_on(engine, workers, update_id, version, ours, clock, deadline)
    paused_seconds = time.perf_counter() - started
    return EngineReceipt(
        name=engine.name,
        engine=workers[0].description,
        pause=pause,
        paused_seconds=paused_seconds,
        seconds=clock.seconds,
        workers=tuple(
            WorkerReceipt(
                name=worker.name,
                device=worker.device,
                verify_seconds=digest.seconds,
                apply_seconds=report.seconds,
                load_seconds=report.load_seconds,
            )
            for worker, digest, report in zip(workers, digests, reports, strict=True)
        ),
    )


def _go_on(
    engine: Engine,
    workers: Sequence[Worker],
    update_id: str,
    version: str,
    resume: bool,
    clock: _Clock,
    deadline: Deadline,
) -> None:
    """All is applied: the version counts, and the engine goes on. Tried twice; never poisons."""
    for last in (False, True):
        try:
            _still_ours(workers)
            with clock.measure("version"):
                engine.set_version(version, deadline)
            with clock.measure("resume"):
                if resume:
                    _still_ours(workers)
                    engine.resume(deadline)
                    release_pause(workers, update_id, deadline)
            return
        except Exception as error:
            _raise_if_superseded(workers, error)
            if last:
                raise NotResumed(
                    f"{engine.name}: update {update_id} is applied and proven on every worker, but "
                    f"the engine could not be told so: {error}",
                    remedy="sync again: it sets the version and resumes; the weights are whole",
                ) from error
            log.warning("%s, once more: %s", engine.name, error)
            deadline = Deadline.after(SETTLE_SECONDS)


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


def _raise_if_superseded(workers: Sequence[Worker], error: BaseException) -> None:
    """An engine that a newer sender holds is left alone altogether."""
    if isinstance(error, Superseded):
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


def _poison(engine: Engine, workers: Sequence[Worker], update_id: str, reason: str) -> None:
    """Something may have been applied: all workers refuse together, and nobody is left hanging."""
    deadline = Deadline.after(SETTLE_SECONDS)
    message = Poison(update_id=update_id, reason=reason[:1000])
    for worker in workers:
        one = [worker]
        _try(lambda one=one: ask_all(one, message, Ack, deadline, belongs_to=update_id))  # type: ignore[misc]
    _try(lambda: engine.finish(deadline))
    # Requests that are frozen in flight would wait for a cure that may never come: end them.
    _try(lambda: engine.pause("abort", deadline))


def _try(action: Callable[[], object]) -> None:
    try:
        action()
    except Exception as error:
        log.warning("while settling a failed update: %s", error)
