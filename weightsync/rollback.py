"""Going back: an engine that failed while it applied an update gets the version before it, which
was kept in the arena's other half, and serves on.

What is kept is proven again as it was proven then: digested with the same seed before it is
applied, and by the same canary afterwards. That it is still what the trainer had is not hoped.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weightsync.canary import Canary
from weightsync.commit import Flip, Flipped
from weightsync.control import Worker, ask_all
from weightsync.deadline import Deadline
from weightsync.delivery import Delivery
from weightsync.engines.base import Engine, PauseMode
from weightsync.errors import (
    EnginePoisoned,
    NotResumed,
    RolledBack,
    Superseded,
    UpdateAborted,
    reason_of,
)
from weightsync.manifest import Manifest
from weightsync.messages import Ack, Begin, Digests, Follow, Prove
from weightsync.outbox import Outbox
from weightsync.served import Judge
from weightsync.settling import end_requests
from weightsync.transport.shm import ShmArena

__all__ = ["Keeper"]


@dataclass(frozen=True, slots=True)
class Retained:
    """A version that an engine serves, and that is still in the arena.

    Attributes:
        version: as the engine reports it.
        half: of the arena.
        base: where that begins, in bytes.
        seed: under which it was proven.
        digests: of all its tensors then, shape (n, 2).
        prove: what was digested then, and is again.
        judge: says whether models hold it.
        canary: of which its engine must think alike, as it did then.
    """

    version: str
    half: int
    base: int
    seed: int
    digests: NDArray[np.uint64]
    prove: Prove
    judge: Judge
    canary: Canary | None

    @property
    def proven(self) -> bool:
        """Whether anything was proven of it."""
        return self.prove != "nothing" or self.canary is not None


class Keeper:
    """Flips engines to staged updates, and keeps what it takes to go back.

    Args:
        retains: keep the version before. Otherwise an engine that fails stays poisoned.
        seconds: that going back may take.
    """

    def __init__(self, *, retains: bool, seconds: float) -> None:
        self.retains = retains
        self._seconds = seconds
        self._kept: dict[str, Retained] = {}
        self._place: tuple[ShmArena | None, str] = (None, "")

    def make_room(self, outbox: Outbox, manifest: Manifest) -> None:
        """Choose the half of the arena that the next update goes to: one that no engine serves, as
        far as there is one. In another arena, or of another layout, nothing is kept any more."""
        if not self.retains:
            return
        place = (outbox.arena, manifest.hash)
        if self._place != place:
            self._place, self._kept = place, {}
        if outbox.half in {kept.half for kept in self._kept.values()}:
            outbox.half = 1 - outbox.half
        self._kept = {name: kept for name, kept in self._kept.items() if kept.half != outbox.half}

    def flip(
        self, engine: Engine, delivery: Delivery, pause: PauseMode, deadline: Deadline
    ) -> Flipped:
        """Flip one engine.

        Raises:
            RolledBack: it failed, and serves the version before again.
            UpdateAborted, EnginePoisoned, NotResumed, Superseded: see `Flip`.
        """
        workers = delivery.workers(engine)
        kept = self._kept.get(engine.name)
        if kept is not None and {worker.status.version for worker in workers} != {kept.version}:
            # Started anew, or updated by somebody else: what is kept is not what it serves.
            kept = None
            del self._kept[engine.name]
        flip = Flip(
            engine,
            workers,
            delivery.update_id,
            delivery.version,
            pause,
            deadline,
            judge=lambda: delivery.judges[engine.name],
            canary=delivery.canary,
            keep_requests=kept is not None,
        )
        flip.enter()
        try:
            flip.apply()
            flipped = flip.conclude(delivery.proofs(engine))
        except NotResumed:
            self._keep(engine, delivery)
            raise
        except EnginePoisoned as failure:
            if kept is None:
                raise
            settle = Deadline.after(self._seconds)
            raise _restore(engine, workers, kept, failure, settle) from failure
        except Superseded:
            raise
        except BaseException:
            if kept is not None:
                end_requests(engine)
            raise
        self._keep(engine, delivery)
        return flipped

    def _keep(self, engine: Engine, delivery: Delivery) -> None:
        if self.retains:
            self._kept[engine.name] = Retained(
                delivery.version,
                delivery.half,
                delivery.base,
                delivery.seed,
                delivery.digests,
                delivery.prove,
                delivery.judges[engine.name],
                delivery.canary,
            )


def _restore(
    engine: Engine,
    workers: Sequence[Worker],
    retained: Retained,
    failure: EnginePoisoned,
    deadline: Deadline,
) -> RolledBack:
    """Let all workers of a poisoned engine apply the version before, together.

    Args:
        failure: of the update that poisoned it.

    Returns:
        The error to raise: the engine serves the version before.

    Raises:
        EnginePoisoned: it could not be restored either.
        NotResumed: it has the version before, but is still paused.
        Superseded: a newer sender holds the engine.
    """
    update_id = f"{retained.version}-back-{secrets.token_hex(4)}"
    begin = Begin(
        update_id=update_id,
        version=retained.version,
        seed=retained.seed,
        base=retained.base,
        ring_update=0,
        filled=True,
        prove=retained.prove,
        seconds=deadline.seconds,
    )
    flip = Flip(
        engine,
        workers,
        update_id,
        retained.version,
        "keep",
        deadline,
        judge=lambda: retained.judge,
        canary=retained.canary,
    )
    try:
        ask_all(workers, begin, Ack, deadline, belongs_to=update_id)
        follow = Follow(update_id=update_id)
        proofs = ask_all(workers, follow, Digests, deadline, belongs_to=update_id)
        for worker, proof in zip(workers, proofs, strict=True):
            if (
                retained.prove != "nothing"
                and proof.digests != retained.digests.astype("<u8").tobytes()
            ):
                raise UpdateAborted(f"{worker.name} finds other bytes in what was kept")
        flip.enter()
        flip.apply()
        flip.conclude(proofs)
    except (Superseded, NotResumed):
        raise
    except BaseException as error:
        end_requests(engine)
        if not isinstance(error, Exception):
            raise
        failure.add_note(f"and version {retained.version} could not be restored: {error}")
        raise failure from error
    cause = reason_of(failure.__cause__ or failure)
    return RolledBack(
        f"{engine.name}: an update failed while it was applied: {cause}. All its workers were "
        f"given back version {retained.version}{', proven again' if retained.proven else ''}, and "
        "it serves that.",
        remedy="mend what failed and sync again; nothing has to be restarted",
    )
