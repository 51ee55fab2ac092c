"""The protocol of an engine as the sender sees it: a handful of calls, none of which carries
weights.

No call may wait for something that the calling thread must still send: whatever a worker needs to
answer has reached it before.
"""

from __future__ import annotations

from typing import Literal, Protocol

from weightsync.deadline import Deadline

__all__ = ["Engine", "PauseMode"]

PauseMode = Literal["keep", "wait", "abort"]
"""What a pause does with requests in flight: freeze them and go on with the new weights (their KV
cache is recomputed), let them end first, or end them at once."""


class Engine(Protocol):
    """One inference engine.

    Attributes:
        name: for messages and receipts; unique among the engines of a sender.
        workers: number of its workers.
        in_process: its calls must come from the caller's own thread.
    """

    name: str
    workers: int
    in_process: bool

    def open_session(self, path: str, session: str, deadline: Deadline) -> None:
        """Let every worker dial in at ``path`` and introduce itself with ``session``."""
        ...

    def prepare(self, deadline: Deadline) -> None:
        """Let every worker look at the layout that waits. Changes nothing; generation may pause
        for its length."""
        ...

    def is_paused(self, deadline: Deadline) -> bool: ...

    def pause(self, mode: PauseMode, deadline: Deadline) -> None: ...

    def resume(self, deadline: Deadline) -> None: ...

    def begin(self, deadline: Deadline) -> None:
        """Open the engine's own update session."""
        ...

    def apply(self, update_id: str, deadline: Deadline) -> None:
        """Let every worker apply the armed update. Workers report on their own sockets, not
        here."""
        ...

    def finish(self, version: str | None, deadline: Deadline) -> None:
        """Close the engine's own update session; the engine reports ``version`` from now on unless
        it is None."""
        ...

    def adopt_session(self) -> None:
        """An earlier sender left the engine's own update session open; the next `finish` closes
        it."""
        ...

    def reset_caches(self, deadline: Deadline, *, recompute: bool) -> None:
        """Forget everything that was computed with other weights, and make sure that it is
        forgotten.

        Args:
            recompute: requests are frozen in flight; recompute what they hold.
        """
        ...

    def version(self, deadline: Deadline) -> str | None:
        """The version that the engine reports."""
        ...

    def close(self) -> None: ...
