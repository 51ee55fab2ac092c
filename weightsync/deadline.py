"""One deadline for a whole operation, handed down instead of a time-out per call."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from weightsync.errors import DeadlineExceeded

__all__ = ["Deadline"]

_LONGEST = 1e6
"""Seconds; `poll` takes a 32-bit number of milliseconds. Waits longer than that wake up once."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in monotonic time.

    Attributes:
        at: seconds on the clock of `time.monotonic`.
        seconds: how long it was when it began; for messages.
    """

    at: float
    seconds: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds, seconds)

    def remaining(self, awaited: str) -> float:
        """Seconds left, always positive, and few enough for every call of the kernel.

        Raises:
            DeadlineExceeded: it has passed; the error names ``awaited``.
        """
        left = self.at - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(awaited, self.seconds)
        return min(left, _LONGEST)

    def rest(self, seconds: float, awaited: str) -> None:
        """Let a moment pass before somebody else's state is asked for again.

        Raises:
            DeadlineExceeded: the deadline has passed; the error names ``awaited``.
        """
        threading.Event().wait(min(seconds, self.remaining(awaited)))

    def sooner(self, seconds: float) -> Deadline:
        """This deadline, or one ``seconds`` from now if that is earlier."""
        other = Deadline.after(seconds)
        return other if other.at < self.at else self
