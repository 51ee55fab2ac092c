"""A streamed update: one ring feeds all workers of all engines, which are paused together first."""

from __future__ import annotations

from collections.abc import Callable

from weightsync.commit import Flip, Flipped
from weightsync.deadline import Deadline
from weightsync.delivery import Delivery
from weightsync.engines.base import Engine, PauseMode
from weightsync.errors import Superseded
from weightsync.roster import Roster

__all__ = ["Flips"]


class Flips:
    """The flips of all engines to one update.

    Args:
        delivery: begun on all workers.
    """

    def __init__(
        self, roster: Roster, delivery: Delivery, pause: PauseMode, deadline: Deadline
    ) -> None:
        self._roster = roster
        self._delivery = delivery
        self._deadline = deadline
        self._flips = {
            engine.name: Flip(
                engine,
                delivery.workers(engine),
                delivery.update_id,
                delivery.version,
                pause,
                deadline,
                judge=lambda name=engine.name: delivery.judges[name],  # type: ignore[misc]
                canary=delivery.canary,
            )
            for engine in roster.engines
        }

    def enter(self) -> None:
        """Pause all engines, or none.

        Raises:
            UpdateAborted: one could not be paused; nothing has changed on any.
        """
        entered: list[Flip] = []

        def one(engine: Engine) -> None:
            self._flips[engine.name].enter()
            entered.append(self._flips[engine.name])

        try:
            self._roster.each(one)
        except BaseException as error:
            superseded: list[Superseded] = []
            for flip in entered:
                try:
                    flip.leave(error)
                except Superseded as other:
                    superseded.append(other)
            if superseded:
                raise superseded[0] from error
            raise

    def stream(self, progress: Callable[[int, int], None] | None) -> list[Flipped]:
        """Move the bytes into all models, and let the engines serve them.

        Raises:
            EnginePoisoned: bytes did not arrive as they were sent, or an engine failed.
        """
        try:
            self._delivery.move(self._deadline, progress)
        except BaseException as error:
            self._poison(error)
            raise
        return self._roster.each(
            lambda engine: self._flips[engine.name].conclude(self._delivery.proofs(engine))
        )

    def _poison(self, cause: BaseException) -> None:
        # As results, not raised: every engine is to hear of it.
        results = self._roster.each(lambda engine: (self._flips[engine.name].poison(cause),))
        if not isinstance(cause, Exception):
            return
        (first,), *others = results
        for (other,) in others:
            first.add_note(f"and: {other}")
        raise first from cause
