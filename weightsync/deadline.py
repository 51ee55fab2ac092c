"""One deadline for a whole operation, handed down instead of a time-out per call."""

from __future__ import annotations

import time
from dataclasses import dataclass

from weightsync.errors import DeadlineExceeded

__all__ = ["Deadline"]


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
        """Seconds left, always positive.

        Raises:
            DeadlineExceeded: it has passed; the error names ``awaited``.
        """
        left = self.at - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(awaited, self.seconds)
        return left

    def sooner(self, seconds: float) -> Deadline:
        """This deadline, or one ``seconds`` from now if that is earlier."""
        other = Deadline.after(seconds)
        return other if other.at < self.at else self
