"""How each parameter of a vLLM model that a loader writes can be read back. Once per layout.

An embedding and a packed copy of it are two holdings of one tensor: one may be stale while the
other is not. What is quantized, cast or computed is named as unproven, with the reason.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weightsync.adapters.vllm.experts import ExpertPart, PackedExperts, packer, packing_of
from weightsync.adapters.vllm.packing import Span
from weightsync.adapters.vllm.probe import (
    LAYER_BUDGET,
    MODEL_BUDGET,
    PackedLayer,
    Part,
    inexact,
)
from weightsync.held import Place, places
from weightsync.holding import HeldLevel, Holding
from weightsync.manifest import Manifest
from weightsync.plan.trace import Trace

__all__ = ["Owner", "Readable", "sort_out"]

EXPERTS = ("w13_weight", "w2_weight")


@dataclass(frozen=True, slots=True)
class Owner:
    """A layer that has a parameter or a buffer, and under which names."""

    name: str
    layer: Any
    leaf: str

    @property
    def full(self) -> str:
        return f"{self.name}.{self.leaf}" if self.name else self.leaf

    def tensor(self) -> torch.Tensor | None:
        """As it is now."""
        found: torch.Tensor | None = self.layer._parameters.get(self.leaf)
        return self.layer._buffers.get(self.leaf) if found is None else found


@dataclass(slots=True)
class Readable:
    """
    Attributes:
        copies: parameters that lie as they were loaded, by canonical name, each with all layers
            that have it.
        packed: linear layers that are read through a product.
        experts: parameters of packed experts.
        unproven: by position in the manifest, why a tensor, or some of it, cannot be read back.
    """

    copies: dict[str, list[Owner]] = field(default_factory=dict)
    packed: list[PackedLayer] = field(default_factory=list)
    experts: list[PackedExperts] = field(default_factory=list)
    unproven: dict[int, str] = field(default_factory=dict)


def sort_out(model: torch.nn.Module, manifest: Manifest, trace: Trace) -> Readable:
    """Sort what a loader writes by how it can be read back.

    Args:
        model: live.
        manifest: that was traced.
        trace: through the loader of the model's twin.
    """
    owners: dict[str, list[Owner]] = defaultdict(list)
    for name, layer in model.named_modules():
        for leaf in (*layer._parameters, *layer._buffers):
            owner = Owner(name, layer, leaf)
            owners[trace.aliases.get(owner.full, owner.full)].append(owner)
    held: dict[str, list[Place]] = defaultdict(list)
    for place in places(manifest, trace)[0]:
        held[place.holding.holder].append(place)
    found = Readable()
    linears: list[_Linear] = []
    for parameter, within in held.items():
        if not owners[parameter]:
            _give_up(within, f"the live model has no {parameter}", found)
        for owner in owners[parameter]:
            why = _sort(owner, parameter, within, found, linears)
            if why is not None:
                _give_up(within, f"{owner.full} {why}", found)
    budget = MODEL_BUDGET
    for linear in sorted(linears, key=lambda each: each.cost):
        full = linear.cost <= min(budget, LAYER_BUDGET)
        budget -= linear.cost if full else 0
        _add_linear(linear, "served" if full else "spot", found)
    return found


def _give_up(within: Iterable[Place], why: str, found: Readable) -> None:
    for place in within:
        found.unproven.setdefault(place.holding.index, why)


def _sort(
    owner: Owner, parameter: str, within: list[Place], found: Readable, linears: list[_Linear]
) -> str | None:
    """Where one layer's parameter belongs, or why it cannot be read back."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    layer, layout, dtype = owner.layer, within[0].layout, within[0].dtype
    live = getattr(layer, owner.leaf)
    method = getattr(layer, "quant_method", None)
    plain = UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod
    if method is not None and type(method) not in plain:
        return f"is kept by {type(method).__name__} in a form of its own"
    if getattr(layer, "_cpu_skip_gemm_dispatch", False):
        return "is not computed with, but what attention derives of it"
    if hasattr(layer, "_cpu_unpacked_conv_weight"):
        return "is packed for convolutions"
    if live.device.type != "cpu":
        return f"lies on {live.device}, where it cannot be read yet"
    if type(method) is UnquantizedFusedMoEMethod and owner.leaf in EXPERTS:
        isa, why = packer(layer)
        if isa is not None:
            why = _add_experts(owner, parameter, within, isa, found)
        if isa is not None or why is not None:
            return why
    elif owner.leaf == "weight" and _computes_packed(layer):
        linears.append(_Linear(owner, type(method), within))
        if not live.numel():
            return None
    if tuple(live.shape) != layout.shape or live.dtype != dtype:
        return f"is kept as {live.dtype} {list(live.shape)}, loaded as {dtype} {list(layout.shape)}"
    found.copies.setdefault(parameter, []).append(owner)
    return None


def _computes_packed(layer: Any) -> bool:
    plain = torch.nn.functional.linear
    return getattr(layer, "cpu_linear", plain) is not plain


@dataclass(frozen=True, slots=True)
class _Linear:
    """A layer that computes from a packed weight.

    Attributes:
        method: vLLM's class that packs it.
        within: what its weight holds.
    """

    owner: Owner
    method: type[Any]
    within: list[Place]

    @property
    def cost(self) -> int:
        """Multiply-accumulates of reading it in full."""
        shape = self.within[0].layout.shape
        return math.prod(shape) * shape[-1]


def _add_linear(linear: _Linear, level: HeldLevel, found: Readable) -> None:
    shape, dtype = linear.within[0].layout.shape, linear.within[0].dtype
    if len(shape) != 2:
        _give_up(linear.within, f"{linear.owner.name} packs {len(shape)} dimensions", found)
        return
    why = inexact(linear.method, (shape[0], shape[1]), dtype)
    if why is not None:
        _give_up(linear.within, f"{linear.owner.name}: {why}", found)
        return
    parts = []
    for place in linear.within:
        part = _part(place, f"{linear.owner.name}.cpu_linear", level)
        if part is None:
            why = f"{linear.owner.name}: is packed, and loaded in steps or transposed"
            _give_up([place], why, found)
        else:
            parts.append(part)
    if parts:
        layer = PackedLayer(linear.owner.layer, shape[0], shape[1], dtype, tuple(parts))
        found.packed.append(layer)


def _part(place: Place, holder: str, level: HeldLevel) -> Part | None:
    """A place in a matrix that is read by columns; None where it is no box of it, or where columns
    of one are not columns of the other and only some are read."""
    spans = _spans(place)
    if spans is None:
        return None
    (row, rows, row_stride), (column, columns, column_stride) = spans
    held = place.holding
    if level == "spot" and (column_stride, columns) != (1, held.lengths[-1]):
        return None
    return Part(
        holding=Holding(held.index, holder, held.offsets, held.lengths, level, by_value=True),
        row=row,
        column=column,
        rows=rows,
        columns=columns,
        row_stride=row_stride,
        column_stride=column_stride,
        start=place.start,
    )


def _spans(place: Place) -> tuple[Span, ...] | None:
    """A place as a box of its parameter; None where it is none."""
    shape, strides = place.layout.shape, place.layout.stride
    if strides != tuple(math.prod(shape[d + 1 :]) for d in range(len(shape))):
        return None
    firsts, rest = [], place.offset - place.layout.offset
    for stride in strides:
        firsts.append(rest // stride)
        rest %= stride
    lengths, steps = [1] * len(shape), [0] * len(shape)
    for length, stride, whole in zip(place.lengths, place.stride, place.whole_stride, strict=True):
        if length == 1:
            continue
        along = [d for d, side in enumerate(shape) if strides[d] == stride and side > 1]
        if not along or lengths[along[0]] != 1:
            return None
        lengths[along[0]], steps[along[0]] = length, whole
    if any(f + n > side for f, n, side in zip(firsts, lengths, shape, strict=True)):
        return None
    return tuple(zip(firsts, lengths, steps, strict=True))


def _add_experts(
    owner: Owner, parameter: str, within: list[Place], isa: str, found: Readable
) -> str | None:
    """Add packed experts; or why they cannot be read."""
    shape, dtype = within[0].layout.shape, within[0].dtype
    live = getattr(owner.layer, owner.leaf)
    if live.dtype != dtype or live.dim() != 3 or len(shape) != 3:
        return f"is kept as {live.dtype} {list(live.shape)}, loaded as {dtype} {list(shape)}"
    known = packing_of(isa, live.shape[1], live.shape[2], dtype)
    if isinstance(known, str):
        return f"cannot be read back: {known}"
    padded = _padded(owner.leaf, tuple(shape), tuple(live.shape))
    if padded is None:
        return f"is padded from {list(shape)} to {list(live.shape)} in a way that is not known"
    blocks, padding = padded
    parts = []
    for place in within:
        spans = _spans(place)
        if spans is None:
            return "is packed, and loaded in steps or transposed"
        parts.append(ExpertPart(place.holding, tuple(_boxes(spans, place.start, blocks))))
    every = (0, shape[0], 0)
    found.experts.append(
        PackedExperts(
            owner.layer,
            owner.leaf,
            parameter,
            live,
            known,
            parts,
            [(every, rows, columns) for rows, columns in padding],
        )
    )
    return None


_Block = tuple[int, int, int]
"""Rows that stay together when experts are padded: first, how many, and first afterwards."""


def _padded(
    leaf: str, shape: tuple[int, ...], live: tuple[int, ...]
) -> tuple[list[_Block], list[tuple[Span, Span]]] | None:
    """How the CPU engine pads experts: the blocks of rows, and the boxes (rows, columns) that are
    added. It does so after either half of a fused gate and up, and to the columns of down."""
    experts, rows, columns = shape
    if live == shape:
        return [(0, rows, 0)], []
    if leaf == "w13_weight" and live == (experts, live[1], columns) and live[1] > rows:
        half, wide = rows // 2, live[1] // 2
        every = (0, columns, 0)
        if rows % 2 == 0 and live[1] % 2 == 0:
            added = [((first, wide - half, 0), every) for first in (half, wide + half)]
            return [(0, half, 0), (half, half, wide)], added
    if leaf == "w2_weight" and live == (experts, rows, live[2]) and live[2] > columns:
        return [(0, rows, 0)], [((0, rows, 0), (columns, live[2] - columns, 0))]
    return None


def _boxes(
    spans: tuple[Span, ...], start: int, blocks: Sequence[_Block]
) -> Iterator[tuple[Span, Span, Span, int]]:
    experts, (first, rows, step), columns = spans
    for begin, count, to in blocks:
        low, high = max(first, begin), min(first + rows, begin + count)
        if low < high:
            moved = (to + low - begin, high - low, step)
            yield experts, moved, columns, start + (low - first) * step
