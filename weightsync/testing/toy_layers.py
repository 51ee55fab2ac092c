"""Layers of the toy model: each loads, post-processes and computes as inference engines' layers do,
with everything that has gone wrong in theirs.

A layer has parameters in the layout that its loader writes, and may have state that it derives from
them when loading ends: a packed copy that it computes from, absorbed matrices, swapped halves. It
opens before its first weight of a reload (`open`) and is finalized once after its last
(`finalize`); what it derives is written into the memory it had, since captured graphs read that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

__all__ = [
    "Absorbed",
    "Embedding",
    "Linear",
    "RMSNorm",
    "Ranks",
    "Reloadable",
    "loader_of",
    "plain_loader",
]

BLOCK = 4
"""Rows that are packed together."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which worker this is of how many that share the model; with more than one, torch's default
    process group must be up before anything is computed."""

    rank: int = 0
    size: int = 1

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over all workers, in float32."""
        total = value.float()
        if self.size > 1:
            dist.all_reduce(total)
        return total

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        """All workers' values, side by side in the last dimension."""
        if self.size == 1:
            return value
        parts = [torch.empty_like(value) for _ in range(self.size)]
        dist.all_gather(parts, value.contiguous())
        return torch.cat(parts, dim=-1)

    def part(self, weight: torch.Tensor, dim: int) -> torch.Tensor:
        """This worker's slice of a checkpoint tensor."""
        size = weight.shape[dim] // self.size
        return weight.narrow(dim, self.rank * size, size)


class Reloadable(nn.Module):
    """Base of the layers.

    Attributes:
        derived: names of tensors, in plain attributes, that `derive` gives anew.
    """

    derived: tuple[str, ...] = ()

    def new_parameter(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, loader: Callable[..., None]
    ) -> None:
        """Register a parameter with its loader."""
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
        parameter.weight_loader = loader  # type: ignore[attr-defined]
        self.register_parameter(name, parameter)

    def open(self) -> None:
        """Bring parameters back into the layout that is loaded; what they hold may be lost."""

    def derive(self) -> Mapping[str, torch.Tensor]:
        """What the layer computes from its parameters, as it should be now."""
        return {}

    def finalize(self) -> None:
        """After the last weight of a load: derive, into the memory that was used before."""
        for name, value in self.derive().items():
            before = getattr(self, name, None)
            if before is None:
                setattr(self, name, value.contiguous().clone())
            else:
                before.copy_(value)

    def as_loaded(self) -> Mapping[str, torch.Tensor]:
        """Parameters by name in the layout that is loaded, where the layer holds another."""
        return {}

    def unpacked(self) -> Mapping[str, torch.Tensor]:
        """By name of the parameter: what a packed copy holds of it, in the parameter's shape."""
        return {}


class Linear(Reloadable):
    """``x @ weight.T``, computed from a copy that is packed in blocks of rows.

    Args:
        parts: rows of each checkpoint tensor that is fused into it.
        split: by rows (column parallel), by columns (row parallel), or not at all.
        across: held as the transpose of what the checkpoint has.
    """

    derived = ("packed",)
    packed: torch.Tensor
    weight: nn.Parameter

    def __init__(
        self,
        ranks: Ranks,
        width: int,
        parts: Mapping[str, int],
        split: Literal["rows", "columns", "none"],
        *,
        bias: bool = False,
        across: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self._ranks, self._split, self._across = ranks, split, across
        divide = ranks.size if split == "rows" else 1
        self._rows = {name: rows // divide for name, rows in parts.items()}
        height = sum(self._rows.values())
        width //= ranks.size if split == "columns" else 1
        self.new_parameter(
            "weight", (width, height) if across else (height, width), dtype, self.weight_loader
        )
        if bias:
            self.new_parameter("bias", (height,), dtype, self.weight_loader)

    def weight_loader(self, parameter: nn.Parameter, loaded: torch.Tensor, part: str) -> None:
        """Copy one checkpoint tensor into its slice."""
        data = parameter.data.t() if self._across and parameter.dim() == 2 else parameter.data
        first = 0
        for name, rows in self._rows.items():
            if name == part:
                break
            first += rows
        if self._split == "rows":
            loaded = self._ranks.part(loaded, 0)
        elif self._split == "columns":
            loaded = self._ranks.part(loaded, 1)
        data.narrow(0, first, self._rows[part]).copy_(loaded)

    def derive(self) -> Mapping[str, torch.Tensor]:
        weight = self.weight.t() if self._across else self.weight
        return {"packed": weight.reshape(-1, BLOCK, weight.shape[1]).transpose(1, 2)}

    def unpacked(self) -> Mapping[str, torch.Tensor]:
        rows = self.packed.transpose(1, 2).reshape(-1, self.packed.shape[1])
        return {"weight": rows.t() if self._across else rows}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, columns) to (tokens, rows); summed over the workers where columns are split."""
        y = torch.matmul(x, self.packed).transpose(0, 1).reshape(len(x), -1)
        if self._split == "columns":
            y = self._ranks.sum(y).to(x.dtype)
        bias = getattr(self, "bias", None)
        return y if bias is None else y + bias


class RMSNorm(Reloadable):
    """On every worker alike."""

    weight: nn.Parameter

    def __init__(self, width: int) -> None:
        super().__init__()
        self.new_parameter("weight", (width,), torch.bfloat16, plain_loader)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape."""
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return (x.float() * scale).to(x.dtype) * self.weight


class Embedding(Reloadable):
    """Rows of the vocabulary, padded and split over the workers; also the head that reads it from
    a packed copy.

    Args:
        tied: embedding whose weight this is as well.
    """

    packed: torch.Tensor
    weight: nn.Parameter

    def __init__(
        self,
        ranks: Ranks,
        vocabulary: int,
        padded: int,
        width: int,
        *,
        head: bool = False,
        tied: Embedding | None = None,
    ) -> None:
        super().__init__()
        self._ranks, self._vocabulary, self._head = ranks, vocabulary, head
        self._size = padded // ranks.size
        self.derived = ("packed",) if head else ()
        if tied is None:
            self.new_parameter("weight", (self._size, width), torch.bfloat16, self.weight_loader)
        else:
            self.weight = tied.weight

    def weight_loader(self, parameter: nn.Parameter, loaded: torch.Tensor, part: str) -> None:
        """Copy this worker's rows; the pad is zero."""
        if loaded.shape[0] != self._vocabulary:
            raise ValueError(f"{loaded.shape[0]} rows for a vocabulary of {self._vocabulary}")
        first = min(self._ranks.rank * self._size, self._vocabulary)
        loaded = loaded[first : first + self._size]
        parameter.data[: len(loaded)].copy_(loaded)
        parameter.data[len(loaded) :].fill_(0)

    def derive(self) -> Mapping[str, torch.Tensor]:
        if not self._head:
            return {}
        return {"packed": self.weight.view(-1, BLOCK, self.weight.shape[1]).transpose(1, 2)}

    def unpacked(self) -> Mapping[str, torch.Tensor]:
        if not self._head:
            return {}
        return {"weight": self.packed.transpose(1, 2).reshape(-1, self.packed.shape[1])}

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """(tokens,) to (tokens, width)."""
        local = tokens - self._ranks.rank * self._size
        mine = (local >= 0) & (local < self._size)
        rows = self.weight[local.clamp(0, self._size - 1)] * mine[:, None]
        return self._ranks.sum(rows).to(rows.dtype)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, width) to (tokens, vocabulary), float32."""
        y = torch.matmul(x, self.packed).transpose(0, 1).reshape(len(x), -1)
        return self._ranks.gather(y.float())[:, : self._vocabulary]


class Absorbed(Reloadable):
    """``kv_b_proj`` of a latent attention, computed with through two matrices made of it."""

    derived = ("w_kc", "w_vc")
    w_kc: torch.Tensor
    w_vc: torch.Tensor
    weight: nn.Parameter

    def __init__(self, ranks: Ranks, heads: int, dim: int, latent: int) -> None:
        super().__init__()
        self._ranks, self._dim = ranks, dim
        rows = heads * 2 * dim // ranks.size
        self.new_parameter("weight", (rows, latent), torch.bfloat16, self.weight_loader)

    def weight_loader(self, parameter: nn.Parameter, loaded: torch.Tensor, part: str) -> None:
        """Copy this worker's heads."""
        parameter.data.copy_(self._ranks.part(loaded, 0))

    def derive(self) -> Mapping[str, torch.Tensor]:
        heads = self.weight.view(-1, 2 * self._dim, self.weight.shape[1])
        scaled = (heads[:, : self._dim].float() * self._dim**-0.5).to(self.weight.dtype)
        return {"w_kc": scaled, "w_vc": heads[:, self._dim :].transpose(1, 2)}


def plain_loader(parameter: torch.Tensor, loaded: torch.Tensor, part: str) -> None:
    """Copy a tensor as it is.

    Raises:
        ValueError: it has another shape.
    """
    if parameter.shape != loaded.shape:
        raise ValueError(f"takes {list(parameter.shape)}, got {list(loaded.shape)}")
    parameter.data.copy_(loaded)


def loader_of(tensor: Any) -> Callable[..., None]:
    """
    Raises:
        AttributeError: it was dropped when the layer was finalized.
    """
    loader: Callable[..., None] = tensor.weight_loader
    return loader
