"""Leaving the engine of an update in a defined state, whatever has happened: going on with the new
weights, back to the old ones, or poisoned."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from weightsync.control import Worker, ask_all, gather, lost, tell_all
from weightsync.deadline import Deadline
from weightsync.engines.base import Engine
from weightsync.errors import NotResumed, PeerLost, Superseded, reason_of
from weightsync.messages import Abort, Ack, Poison, Resumed

__all__ = [
    "end_requests",
    "go_on",
    "poison",
    "raise_if_superseded",
    "release_pause",
    "still_ours",
    "unwind",
]

log = logging.getLogger("weightsync.sender")

SETTLE_SECONDS = 10.0
"""What each step may take that leaves the engine of a failed update in a defined state: telling its
workers, closing its update session, ending its requests."""


def go_on(
    engine: Engine,
    workers: Sequence[Worker],
    update_id: str,
    version: str,
    deadline: Deadline,
    *,
    resume: bool,
    release: bool,
    measure: Callable[[str], AbstractContextManager[None]],
) -> None:
    """All is applied: the version counts, and the engine goes on. Tried twice, also when it is
    interrupted; never poisons.

    Args:
        resume: it is paused, by this sender.
        release: the workers know of a pause by this sender, which has ended then.
        measure: notes what a step takes.

    Raises:
        NotResumed: the engine could not be told so.
        Superseded: a newer sender holds the engine, which is left alone.
    """
    interrupt: BaseException | None = None
    for last in (False, True):
        try:
            still_ours(workers)
            with measure("version"):
                engine.set_version(version, deadline)
            with measure("resume"):
                if resume:
                    still_ours(workers)
                    engine.resume(deadline)
                if release:
                    release_pause(workers, update_id, deadline)
            break
        except BaseException as error:
            raise_if_superseded(engine, workers, error)
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


def still_ours(workers: Sequence[Worker]) -> None:
    """Asked before each engine call that a newer sender would suffer from, when no answer is due.

    Engine calls carry no epoch: between this look and the call, a takeover would go unnoticed.

    Raises:
        Superseded: a newer sender holds the engine.
        PeerLost: a worker has hung up.
    """
    gone = lost(workers)
    if gone is not None:
        raise PeerLost(f"{gone} has hung up")


def raise_if_superseded(engine: Engine, workers: Sequence[Worker], error: BaseException) -> None:
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


def unwind(
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


def poison(
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
