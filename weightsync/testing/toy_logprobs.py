"""What a toy thinks of a prompt: a bag-of-tokens softmax over all its parameters' values.

Canary(prompt, toy_logprobs(trainers_tensors, prompt), tolerance=1e-9)
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["VOCABULARY", "bias_of", "logprobs_of", "toy_logprobs"]

VOCABULARY = 32


def bias_of(tensors: Mapping[str, torch.Tensor]) -> NDArray[np.float64]:
    """What parameters add to each token's logit, shape (VOCABULARY,): every value of every
    parameter counts, by name and position. What is not finite makes NaN of it."""
    bias = np.zeros(VOCABULARY)
    for name, tensor in sorted(tensors.items()):
        values = tensor.detach().reshape(-1).to(torch.float64).numpy()
        at = (np.arange(values.size) + zlib.crc32(name.encode())) % VOCABULARY
        with np.errstate(invalid="ignore"):
            np.add.at(bias, at, values / (1 + np.abs(values)))
    return bias


def logprobs_of(bias: NDArray[np.float64], prompt: Sequence[int]) -> list[float]:
    """The log-probability of each token after the first: logits are the bias, scaled by the mean of
    the tokens before.

    Raises:
        ValueError: a token is not in the vocabulary.
    """
    tokens = np.array(prompt, np.int64)
    if tokens.min(initial=0) < 0 or tokens.max(initial=0) >= VOCABULARY:
        raise ValueError(f"tokens are 0 to {VOCABULARY - 1}, got {list(prompt)}")
    scales = (np.cumsum(tokens + 1.0) / np.arange(1, tokens.size + 1)) / VOCABULARY
    logits = scales[:-1, None] * bias
    highest = logits.max(axis=1, keepdims=True)
    total = highest + np.log(np.exp(logits - highest).sum(axis=1, keepdims=True))
    found = (logits - total)[np.arange(tokens.size - 1), tokens[1:]]
    return [float(one) for one in found]


def toy_logprobs(tensors: Mapping[str, torch.Tensor], prompt: Sequence[int]) -> list[float]:
    """What a toy with these parameters thinks of a prompt, ``len(prompt) - 1`` numbers.

    Args:
        tensors: all that its workers hold, under all their names.
        prompt: tokens below `VOCABULARY`.
    """
    return logprobs_of(bias_of(tensors), prompt)
