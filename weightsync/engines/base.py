"""The protocol of an engine as the sender sees it: a handful of calls, none of which carries
weights.

No call may wait for something that the calling thread must still send: whatever a worker needs to
answer has reached it before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from weightsync.deadline import Deadline

__all__ = ["Engine", "PauseMode"]

PauseMode = Literal["keep", "wait", "abort"]
"""What a pause does with requests in flight: freeze them and go on with the new weights (their KV
cache is recomputed), let them end first, or end them at once."""


class Engine(Protocol):
    """One inference engine. Every call raises a `weightsync.errors.WeightSyncError`: ConnectError
    where the engine answers with an error or not at all, DeadlineExceeded where it takes too long,
    UpdateRefused where it could never do what was asked as things stand.

    Attributes:
        name: for messages and receipts; unique among the engines of a sender.
        workers: number of its workers.
        in_process: its calls must come from the caller's own thread.
    """

    name: str
    workers: int
    in_process: bool

    def open_session(self, path: str, token: str, deadline: Deadline) -> None:
        """Let every worker dial in at ``path`` and introduce itself with ``token``."""
        ...

    def prepare(self, deadline: Deadline) -> None:
        """Let every worker look at the layout that waits. Changes nothing; generation may pause
        for its length."""
        ...

    def look(self, deadline: Deadline) -> None:
        """Let every worker answer who asked it what its model holds. Changes nothing; generation
        may pause for its length."""
        ...

    def is_paused(self, deadline: Deadline) -> bool:
        """Whether anybody has paused it."""
        ...

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """Take no step until `resume`; returns once the step in progress has ended."""
        ...

    def resume(self, deadline: Deadline) -> None:
        """End a pause. Harmless when there is none."""
        ...

    def begin(self, deadline: Deadline) -> None:
        """Open the engine's own update session."""
        ...

    def apply(self, update_id: str, deadline: Deadline) -> None:
        """Let every worker apply the armed update. Workers report on their own sockets, not
        here."""
        ...

    def finish(self, deadline: Deadline) -> None:
        """Close the engine's own update session, if one is open."""
        ...

    def adopt_session(self, is_open: bool) -> None:
        """Whether an update session is open is known from the workers: the next `finish` acts on
        that."""
        ...

    def set_version(self, version: str, deadline: Deadline) -> None:
        """The engine reports this version from now on."""
        ...

    def version(self, deadline: Deadline) -> str | None:
        """The version that the engine reports."""
        ...

    def reset_caches(self, deadline: Deadline, *, recompute: bool) -> None:
        """Forget everything that was computed with other weights, and make sure that it is
        forgotten.

        Args:
            recompute: requests are frozen in flight; recompute what they hold.
        """
        ...

    def logprobs(self, prompt: Sequence[int], deadline: Deadline) -> list[float]:
        """What the engine thinks of a prompt: the natural log-probability of each token after the
        first, given all before it, by the weights that it has now: nothing of it may come from a
        cache. It answers like any other request, and not at all while it is paused.

        Args:
            prompt: token ids, two at least.

        Returns:
            ``len(prompt) - 1`` numbers.

        Raises:
            UpdateRefused: it takes no such prompt, or gives no log-probabilities.
        """
        ...

    def close(self) -> None:
        """Give up what this object holds; the engine lives on."""
        ...
