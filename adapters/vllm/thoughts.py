"""What a vLLM says of a prompt's tokens, in its own words. Imports nothing of vLLM.

Log-probabilities of a prompt are computed anew for each request: one that asks for them does not
read the prefix cache. One candidate beside the token itself is asked for, since vLLM takes an asked
zero for nothing where it looks whether it could answer wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weightsync.errors import ConnectError, UpdateRefused

__all__ = ["check_mode", "is_of_request", "of_completion", "of_output", "refused"]


def check_mode(engine: str, mode: Any) -> None:
    """
    Args:
        mode: the engine's ``logprobs_mode``; None where it has none.

    Raises:
        UpdateRefused: what it calls log-probabilities are none.
    """
    if mode is not None and str(mode).endswith("_logits"):
        raise UpdateRefused(
            f"{engine} gives logits where log-probabilities were asked for (logprobs_mode={mode})",
            remedy="start it without --logprobs-mode, or prove without a canary",
        )


def is_of_request(error: BaseException | None) -> bool:
    """Whether vLLM does not take a request, rather than having failed with it. Newer ones have a
    class for that, told by its name; older ones raised ValueError."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, ValueError) or "VLLMClientError" in names


def refused(engine: str, said: str) -> UpdateRefused:
    """It does not take such a request."""
    return UpdateRefused(
        f"{engine} does not say what it thinks of this prompt: {said}",
        remedy="a canary is a prompt of the model's own tokens, shorter than its context by one, "
        "and needs an engine of a generating model that was started with --max-logprobs of 1 or "
        "more",
    )


def of_output(engine: str, prompt: Sequence[int], found: Any) -> list[float]:
    """Of ``RequestOutput.prompt_logprobs``: for each token, what was said of it and others.

    Raises:
        ConnectError: it says nothing of some token.
    """
    return _picked(engine, prompt, found, lambda at, token: at[token].logprob)


def of_completion(engine: str, prompt: Sequence[int], answer: Mapping[str, Any]) -> list[float]:
    """Of the answer to ``POST /v1/completions``.

    Raises:
        ConnectError: it says nothing of some token.
    """
    choices = answer.get("choices") or [{}]
    found = choices[0].get("prompt_logprobs")
    return _picked(engine, prompt, found, lambda at, token: at[str(token)]["logprob"])


def _picked(engine: str, prompt: Sequence[int], found: Any, value: Any) -> list[float]:
    try:
        pairs = list(zip(prompt, found, strict=True))[1:]  # of the first token there is none
        return [float(value(at, token)) for token, at in pairs]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConnectError(
            f"{engine} did not give a log-probability of every token of the prompt "
            f"({type(error).__name__}: {error})",
            remedy="see the engine's log; a canary needs a vLLM that answers prompt_logprobs",
        ) from error
