"""What tests with toy engines share: a small model, its values, and how to tell them apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weightsync import Canary
from weightsync.testing.toy_logprobs import toy_logprobs

SHAPES = {
    "embed.weight": ("bfloat16", (17, 8)),
    "layers.0.weight": ("float32", (5, 3)),
    "layers.0.bias": ("float32", (5,)),
    "layers.1.scale": ("float32", ()),
    "layers.1.steps": ("int64", (3,)),
    "head.weight": ("float16", (7, 9)),
}


def tensors(seed: int, shapes=SHAPES) -> dict[str, torch.Tensor]:
    """Random values of these dtypes and shapes; other ones for every seed."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, (dtype, shape) in shapes.items():
        value = torch.randn(shape, generator=generator) * 100
        found[name] = value.to(getattr(torch, dtype))
    return found


def as_hex(values: dict[str, torch.Tensor]) -> dict[str, str]:
    """The bytes of every tensor, as `ToyEngine.tensors` gives them."""
    return {
        name: value.reshape(-1).view(torch.uint8).numpy().tobytes().hex()
        for name, value in values.items()
    }


def canary_of(
    values: dict[str, torch.Tensor], prompt: Sequence[int], tolerance: float = 1e-9
) -> Callable[[], Canary]:
    """Makes canaries of what these tensors hold then, as a trainer would."""
    return lambda: Canary(prompt, toy_logprobs(values, prompt), tolerance)
