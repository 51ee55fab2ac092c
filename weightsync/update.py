"""The state machine of one update, as every worker keeps it. No I/O, no clock, no thread.

    idle -> receiving -> sealed -> verified -> applying -> committed
                 \\          \\          \\           \\
                  +----------+----------+-> aborted   +-> poisoned

A streamed update is applied while it is received: receiving -> applying.

``aborted`` means that the old weights are intact; ``poisoned`` that a worker may hold a mixture.
Poison stays through later updates until one is committed: an update that is aborted on a poisoned
worker leaves it poisoned.
"""

from __future__ import annotations

import enum

from weightsync.errors import UpdateRefused

__all__ = ["Phase", "UpdateState"]


class Phase(enum.Enum):
    """Where an update stands."""

    IDLE = "idle"
    RECEIVING = "receiving"
    SEALED = "sealed"
    VERIFIED = "verified"
    APPLYING = "applying"
    COMMITTED = "committed"
    ABORTED = "aborted"
    POISONED = "poisoned"


_RESTING = frozenset({Phase.IDLE, Phase.COMMITTED, Phase.ABORTED, Phase.POISONED})
_NEXT = {
    Phase.SEALED: Phase.RECEIVING,
    Phase.VERIFIED: Phase.SEALED,
    Phase.APPLYING: Phase.VERIFIED,
    Phase.COMMITTED: Phase.APPLYING,
}


class UpdateState:
    """A worker's record of where it stands.

    Attributes:
        phase: of the update in progress, or how the last one ended.
        update_id: of that update.
        version: of the weights that are served; changes only on commit.
        poisoned: why the worker may hold a mixture, else None.
    """

    def __init__(self) -> None:
        self.phase = Phase.IDLE
        self.update_id: str | None = None
        self.version: str | None = None
        self.poisoned: str | None = None
        self._pending: str | None = None
        self._before: str | None = None

    @property
    def resting(self) -> bool:
        """Whether no update is in progress."""
        return self.phase in _RESTING

    def begin(self, update_id: str, version: str, *, whole: bool = True) -> None:
        """An update starts. Allowed when none is in progress; on a poisoned worker, only one of the
        whole model."""
        if not self.resting:
            raise UpdateRefused(
                f"update {update_id} cannot begin: update {self.update_id} is {self.phase.value}",
                remedy="commit or abort the update in progress first",
            )
        if self.poisoned is not None and not whole:
            raise UpdateRefused(
                f"update {update_id} is of a part of the model, and the worker may hold a mixture: "
                f"{self.poisoned}",
                remedy="sync a full update: only that cures it",
            )
        self.phase, self.update_id, self._pending = Phase.RECEIVING, update_id, version

    def stream(self, update_id: str) -> None:
        """Bytes are taken in as they come: from here on the old weights may be gone."""
        self.expect(update_id, Phase.RECEIVING)
        self.phase = Phase.APPLYING

    def seal(self, update_id: str) -> None:
        """All bytes are there."""
        self._advance(update_id, Phase.SEALED)

    def verify(self, update_id: str) -> None:
        """Every voter has proven its bytes."""
        self._advance(update_id, Phase.VERIFIED)

    def apply(self, update_id: str) -> None:
        """From here on the old weights may be gone."""
        self._advance(update_id, Phase.APPLYING)

    def commit(self, update_id: str) -> None:
        """Every worker has applied it. Cures poison."""
        self._advance(update_id, Phase.COMMITTED)
        self._before, self.version, self.poisoned = self.version, self._pending, None

    def abort(self) -> None:
        """Give the update in progress up. Nothing in progress: nothing happens.

        Raises:
            UpdateRefused: it is being applied; only poison or commit can follow.
        """
        if self.resting:
            return
        if self.phase is Phase.APPLYING:
            raise UpdateRefused(f"update {self.update_id} is being applied and cannot be aborted")
        self.phase = Phase.ABORTED if self.poisoned is None else Phase.POISONED

    def poison(self, reason: str, update_id: str | None = None) -> None:
        """The worker may hold a mixture. Allowed at any time.

        Args:
            update_id: of the update that is to blame. If it was committed already, the version is
                again what it was before.
        """
        if self.phase is Phase.COMMITTED and update_id == self.update_id:
            self.version = self._before
        self.phase, self.poisoned = Phase.POISONED, reason or "no reason was given"

    def forget(self) -> None:
        """The weights came another way, whole: nothing is in progress, and no version is known."""
        self.phase, self.update_id, self._pending = Phase.IDLE, None, None
        self.version = self.poisoned = None

    def expect(self, update_id: str, phase: Phase) -> None:
        """Check that this very update stands at ``phase``.

        Raises:
            UpdateRefused: another update, or another phase.
        """
        if self.update_id != update_id:
            raise UpdateRefused(
                f"update {update_id} is unknown here; the last one is {self.update_id}"
            )
        if self.phase is not phase:
            raise UpdateRefused(f"update {update_id} is {self.phase.value}, expected {phase.value}")

    def _advance(self, update_id: str, to: Phase) -> None:
        self.expect(update_id, _NEXT[to])
        self.phase = to
