"""A canary: a prompt of which trainer and engine must think alike.

It says little of any one tensor and much of all of them together, and it is the only proof for an
engine that runs none of our code.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weightsync.deadline import Deadline
from weightsync.engines.base import Engine
from weightsync.errors import CanaryFailed, ConnectError, UpdateRefused

__all__ = ["Canary", "CanaryMaker", "check_canary", "make_canary", "rehearse"]

log = logging.getLogger("weightsync.sender")


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
        try:
            # What came as a tensor or an array is taken apart here, not when an engine waits.
            object.__setattr__(self, "prompt", tuple(map(operator.index, self.prompt)))
            object.__setattr__(self, "logprobs", tuple(map(float, self.logprobs)))
            object.__setattr__(self, "tolerance", float(self.tolerance))
        except (TypeError, ValueError) as error:
            raise UpdateRefused(
                f"a canary has token ids, log-probabilities and a tolerance: {error}"
            ) from error
        if len(self.prompt) < 2 or len(self.logprobs) != len(self.prompt) - 1:
            raise UpdateRefused(
                f"a canary has a prompt of two tokens or more and a log-probability for each but "
                f"the first, got {len(self.prompt)} tokens and {len(self.logprobs)}"
            )
        if min(self.prompt) < 0:
            raise UpdateRefused(f"a token id is not negative, got {min(self.prompt)}")
        if not 0 < self.tolerance < math.inf or not all(map(math.isfinite, self.logprobs)):
            raise UpdateRefused(
                f"a canary has finite log-probabilities and a positive, finite tolerance, got "
                f"{self.tolerance} and {list(self.logprobs)[:10]}"
            )
        if max(self.logprobs) > self.tolerance:
            raise UpdateRefused(
                f"a log-probability is not above 0, got {max(self.logprobs):.6g}",
                remedy="give natural logarithms of probabilities, as log_softmax does, not "
                "probabilities, logits or losses",
            )


CanaryMaker = Callable[[], Canary]
"""Called in the trainer for every update, right before it moves, with the weights that it is of."""


def make_canary(maker: CanaryMaker | None) -> Canary | None:
    """
    Raises:
        UpdateRefused: it makes something else than a canary. What it raises itself goes through.
    """
    if maker is None:
        return None
    made = maker()
    if not isinstance(made, Canary):
        raise UpdateRefused(
            f"canary= made a {type(made).__name__}",
            remedy="pass a callable that returns a weightsync.Canary",
        )
    return made


def rehearse(engine: Engine, canary: Canary, deadline: Deadline) -> None:
    """Find out, while nothing has changed, whether an engine can answer at all: a prompt that it
    refuses would poison it once new weights are in. What it thinks is dropped.

    Raises:
        UpdateRefused: it takes no such prompt. CanaryFailed: it says something of other tokens.
        DeadlineExceeded: it does not answer in time.
    """
    try:
        _ask(engine, canary, deadline)
    except ConnectError as error:
        # Of the weights that it has now: those of the update may cure that.
        log.warning("%s cannot answer the canary yet: %s", engine.name, error)


def check_canary(engine: Engine, canary: Canary, deadline: Deadline) -> float:
    """Let an engine think about the prompt.

    Returns:
        The largest difference of any log-probability.

    Raises:
        CanaryFailed: it is above the tolerance.
        UpdateRefused, ConnectError, DeadlineExceeded: the engine does not answer.
    """
    found = _ask(engine, canary, deadline)
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


def _ask(engine: Engine, canary: Canary, deadline: Deadline) -> list[float]:
    """What an engine thinks of a prompt.

    Raises:
        CanaryFailed: it does not say it of each token.
    """
    found = engine.logprobs(canary.prompt, deadline)
    if len(found) != len(canary.logprobs):
        raise CanaryFailed(
            f"{engine.name} gave {len(found)} log-probabilities for a prompt of "
            f"{len(canary.prompt)} tokens, expected {len(canary.logprobs)}",
            remedy="see whether the engine cuts prompts, or answers from something that it has "
            "kept",
        )
    return found
