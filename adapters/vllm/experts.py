"""Experts that the CPU engine has packed, read where they lie, bit for bit.

Packing moves elements and changes none; `packing` learns where to. It is not idempotent, so experts
that were packed twice, or not at all, read back as others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weightsync.adapters.vllm.packing import Packing, Span, learn
from weightsync.errors import Problem
from weightsync.holding import Holding
from weightsync.regions import RegionTable

__all__ = ["ExpertPart", "PackedExperts", "packer", "packing_of"]


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """What packed experts hold of one checkpoint tensor.

    Attributes:
        boxes: of their matrices: experts, rows, columns, and the index in the whole tensor of a
            box's first element.
    """

    holding: Holding
    boxes: tuple[tuple[Span, Span, Span, int], ...]


class PackedExperts:
    """One packed parameter of a layer's experts.

    Args:
        layer: vLLM's; its parameter is another one after every update.
        leaf: name of the parameter in it.
        name: for messages.
        live: the parameter as it is now: shape (experts, rows, columns).
        packing: of it.
        parts: of checkpoint tensors, in it.
        padding: boxes of it that nothing is loaded into: experts, rows, columns.
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        leaf: str,
        name: str,
        live: torch.Tensor,
        packing: Packing,
        parts: Sequence[ExpertPart],
        padding: Sequence[tuple[Span, Span, Span]] = (),
    ) -> None:
        self.holdings = tuple(part.holding for part in parts)
        self._layer = layer
        self._leaf = leaf
        self._name = name
        self._shape, self._dtype = live.shape, live.dtype
        self._packing = packing
        self._index = np.array([holding.index for holding in self.holdings], np.intp)
        self._pieces = [
            (out, piece)
            for out, part in enumerate(parts)
            for box in part.boxes
            for piece in packing.pieces(*box)
        ]
        offsets = [piece.offset * live.element_size() for _, piece in self._pieces]
        self._offsets = np.array(offsets, np.uint64)
        self._table: RegionTable | None = None
        self._padding = {
            f"{name}[:, {rows[0]}:{sum(rows)}, {columns[0]}:{sum(columns)}]": list(
                packing.pieces(experts, rows, columns, 0)
            )
            for experts, rows, columns in padding
        }

    def digest(self, seeds: NDArray[np.uint64]) -> NDArray[np.uint64] | str:
        """A digest per holding, shape (k, 2); or why they could not be taken.

        Args:
            seeds: of each tensor of the manifest, shape (n,).
        """
        memory = self._memory()
        if memory is None:
            shape, dtype = list(self._shape), self._dtype
            return f"{self._name} is not what it was: {dtype} {shape}, contiguous"
        if self._table is None:
            regions = [piece.placed(out, memory) for out, piece in self._pieces]
            self._table = RegionTable(regions, len(self.holdings))
        table = self._table.moved(self._offsets + np.uint64(memory.data_ptr()))
        return table.digest(seeds[self._index])

    def spoilt(self) -> list[Problem]:
        """Padding that is not zero, as it is when it is made; none where it cannot be read."""
        memory = self._memory() if self._padding else None
        if memory is None:
            return []
        return [
            Problem("changed", name, "is padding, and not zero any more")
            for name, pieces in self._padding.items()
            if any(bool(piece.view(memory).count_nonzero()) for piece in pieces)
        ]

    def _memory(self) -> torch.Tensor | None:
        live = self._layer._parameters.get(self._leaf)
        if live is None or not live.is_contiguous() or live.device.type != "cpu":
            return None
        if (live.shape, live.dtype) != (self._shape, self._dtype):
            return None
        return self._packing.plain(live.detach())


def packer(layer: Any) -> tuple[str | None, str | None]:
    """How a layer of vLLM's packs its experts: the name of the instructions that its kernel is made
    for, None where they lie as they were loaded; or why that cannot be said."""
    method = layer.quant_method
    kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    # Releases of a while ago keep the CPU engine's elsewhere.
    kernel = kernel or getattr(method, "cpu_fused_moe", None)
    if getattr(kernel, "_use_zentorch", False):
        return None, None
    isa = getattr(kernel, "isa", None)
    if isa is None or isa == "none":
        return None, f"{type(kernel).__name__} keeps its experts in a form that is not known"
    return isa, None


@functools.cache
def packing_of(isa: str, rows: int, columns: int, dtype: torch.dtype) -> Packing | str:
    """How the CPU engine packs experts of that shape; or why that cannot be said."""
    try:
        return learn(functools.partial(_prepack, isa=isa), rows, columns, dtype)
    except Exception as error:
        return f"how experts are packed cannot be tried: {type(error).__name__}: {error}"


def _prepack(weight: torch.Tensor, isa: str) -> torch.Tensor:
    from vllm._custom_ops import cpu_prepack_moe_weight

    return cpu_prepack_moe_weight(weight, isa)
