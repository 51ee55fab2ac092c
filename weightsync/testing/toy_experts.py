"""The toy model's experts, stacked, and held as a kernel wants them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn

from weightsync.testing.toy_layers import Ranks, Reloadable

__all__ = ["Experts"]


class Experts(Reloadable):
    """Stacked experts, held in a kernel's layout: not what is loaded, and not idempotent to make.

    Args:
        layout: ``"swapped"``: the halves of ``w13`` change places. ``"4d"``: they are interleaved,
            and both get a fourth dimension.
    """

    w13: nn.Parameter
    w2: nn.Parameter

    def __init__(
        self, ranks: Ranks, count: int, width: int, inner: int, layout: Literal["swapped", "4d"]
    ) -> None:
        super().__init__()
        self._ranks, self._layout = ranks, layout
        self._inner = inner // ranks.size
        self._shapes = {
            "w13": (count, 2 * self._inner, width),
            "w2": (count, width, self._inner),
        }
        for name, shape in self._shapes.items():
            self.new_parameter(name, shape, torch.bfloat16, self.weight_loader)

    def weight_loader(self, parameter: nn.Parameter, loaded: torch.Tensor, part: str) -> None:
        """Copy one matrix of one expert: ``part`` is ``"3.gate_proj"``."""
        expert, _, matrix = part.partition(".")
        data = parameter.data[int(expert)]
        if matrix == "down_proj":
            data.copy_(self._ranks.part(loaded, 1))
        else:
            first = 0 if matrix == "gate_proj" else self._inner
            data.narrow(0, first, self._inner).copy_(self._ranks.part(loaded, 0))

    def open(self) -> None:
        for name, shape in self._shapes.items():
            parameter = self.get_parameter(name)
            parameter.data = parameter.data.view(shape)
            parameter.weight_loader = self.weight_loader  # type: ignore[attr-defined]

    def finalize(self) -> None:
        w13, w2, inner = self.w13, self.w2, self._inner
        halves = w13.view(len(w13), 2, inner, -1)
        if self._layout == "swapped":
            w13.data.copy_(halves.flip(1).reshape(w13.shape))
        else:
            w13.data.copy_(halves.transpose(1, 2).reshape(w13.shape))
            w13.data = w13.data.view(len(w13), inner, 2, -1)
            w2.data = w2.data.view(len(w2), -1, 2, inner)
        for parameter in (w13, w2):  # as engines do: a second load needs `open`
            if hasattr(parameter, "weight_loader"):
                del parameter.weight_loader

    def as_loaded(self) -> Mapping[str, torch.Tensor]:
        if self._layout == "swapped":
            halves = self.w13.view(len(self.w13), 2, self._inner, -1).flip(1)
        elif self.w13.dim() == 4:
            halves = self.w13.transpose(1, 2)
        else:
            return {"w13": self.w13.detach()[:, :0], "w2": self.w2}  # never finalized
        return {
            "w13": halves.reshape(self._shapes["w13"]),
            "w2": self.w2.view(self._shapes["w2"]),
        }

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """(tokens, width), and what each expert counts for each token (tokens, count)."""
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert, w2 in enumerate(self.w2.view(self._shapes["w2"])):
            w13 = self.w13[expert]
            if self._layout == "swapped":
                up, gate = w13[: self._inner], w13[self._inner :]
            else:
                gate, up = w13[:, 0], w13[:, 1]
            inner = nn.functional.silu(x @ gate.t()) * (x @ up.t())
            out += weights[:, expert, None].float() * (inner @ w2.t()).float()
        return self._ranks.sum(out).to(x.dtype)
