"""A canary: a prompt of which trainer and engine must think alike.

It says little of any one tensor and much of all of them together, and it is the only proof for an
engine that runs none of our code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weightsync.deadline import Deadline
from weightsync.engines.base import Engine
from weightsync.errors import CanaryFailed, UpdateRefused

__all__ = ["Canary", "CanaryMaker", "check_canary"]


@dataclass(frozen=True, slots=True)
class Canary:
    """What the trainer says of a prompt.

    Attributes:
        prompt: token ids, two at least.
        logprobs: of each token after the first, given all before it: natural logarithms,
            ``len(prompt) - 1`` of them.
        tolerance: by how much the engine's may differ. What two implementations differ by with the
            same weights is a matter of the dtype: 1e-4 is ample for float32, 0.05 to 0.3 for
            bfloat16.

    Raises:
        UpdateRefused: it is none that could say anything.
    """

    prompt: Sequence[int]
    logprobs: Sequence[float]
    tolerance: float

    def __post_init__(self) -> None:
        if len(self.prompt) < 2 or len(self.logprobs) != len(self.prompt) - 1:
            raise UpdateRefused(
                f"a canary has a prompt of two tokens or more and a log-probability for each but "
                f"the first, got {len(self.prompt)} tokens and {len(self.logprobs)}"
            )
        if not self.tolerance > 0 or not all(map(math.isfinite, self.logprobs)):
            raise UpdateRefused(
                f"a canary has finite log-probabilities and a positive tolerance, got "
                f"{self.tolerance} and {list(self.logprobs)[:10]}"
            )


CanaryMaker = Callable[[], Canary]
"""Called in the trainer when an update has been staged, with the weights that it is of."""


def check_canary(engine: Engine, canary: Canary, deadline: Deadline) -> float:
    """Let an engine think about the prompt.

    Returns:
        The largest difference of any log-probability.

    Raises:
        CanaryFailed: it is above the tolerance.
        ConnectError, DeadlineExceeded: the engine does not answer.
    """
    found = engine.logprobs(canary.prompt, deadline)
    if len(found) != len(canary.logprobs):
        raise CanaryFailed(
            f"{engine.name} gave {len(found)} log-probabilities for a prompt of "
            f"{len(canary.prompt)} tokens"
        )
    gaps = [abs(one - other) for one, other in zip(found, canary.logprobs, strict=True)]
    at = max(range(len(gaps)), key=lambda i: math.inf if math.isnan(gaps[i]) else gaps[i])
    if not gaps[at] <= canary.tolerance:
        raise CanaryFailed(
            f"{engine.name} does not think as the trainer does: token {at + 1} of the canary "
            f"({canary.prompt[at + 1]}) has log-probability {found[at]:.6g} there and "
            f"{canary.logprobs[at]:.6g} here, which differ by more than {canary.tolerance:g}",
            remedy="if both hold the same weights (proof='served' tells), raise the tolerance; "
            "else look at how the engine loads them",
        )
    return gaps[at]
