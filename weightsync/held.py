"""What a live model holds of a checkpoint's tensors, read back where the engine's loader puts it.

The trace of a loader (`weightsync.plan.trace`) says of every copy which box of which tensor lands
in which strided region of which parameter. The same copies, read the other way, are where the model
holds the tensors: each is digested in place, whatever its layout, as the box that it is of the
whole tensor. So a worker proves a slice of a fused parameter, or a transposed one, and gathers
nothing.

The guarantee ends where the bytes do: what a loader casts or computes is no copy and is named as
unproven, and what an engine packs elsewhere (`skip`) is for its adapter to read.

    held = HeldCopies(manifest, trace, lambda: dict(model.named_parameters()))
    held.holdings, held.unproven              # once per layout, for `Target.describe`
    held.digest(seeds)                        # (k, 2) after every update, for `Target.served`
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from weightsync.box import Box
from weightsync.digest import idle_threads
from weightsync.errors import Problem
from weightsync.holding import Holding
from weightsync.manifest import Manifest
from weightsync.plan.trace import Copy, Region, Trace
from weightsync.regions import MAX_DIMS, Placed, RegionTable
from weightsync.sources.module import dtype_name

__all__ = ["HeldCopies", "Named", "Place", "covered_box", "look_up", "places"]

Named = Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]]
"""Tensors by name, or what gives them by name as they are now."""


@dataclass(frozen=True, slots=True)
class Place:
    """A holding, and how its elements lie in the parameter.

    Attributes:
        lengths: elements per dimension of the copy.
        stride, offset: of the copy's destination, in elements of the twin's storage.
        whole_stride, start: the same in the row-major whole tensor.
        layout: of all of the parameter, as the twin lays it out in its storage.
        dtype: of the parameter.
    """

    holding: Holding
    lengths: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    whole_stride: tuple[int, ...]
    start: int
    layout: Region
    dtype: torch.dtype


def look_up(named: Named) -> Mapping[str, torch.Tensor]:
    """The tensors as they are now."""
    return named() if callable(named) else named


def places(
    manifest: Manifest, trace: Trace, *, skip: Collection[str] = ()
) -> tuple[tuple[Place, ...], tuple[tuple[int, str], ...]]:
    """Where a model that a loader filled holds the tensors of a manifest.

    Args:
        skip: names of parameters (any alias of them) that are read another way.

    Returns:
        The places, by position in the manifest; and ``(position, why)`` of tensors that are not
        held as they are, or not all of whose parts are.
    """
    skipped = {trace.aliases.get(name, name) for name in skip}
    copies: dict[int, list[Copy]] = defaultdict(list)
    into: dict[str, set[int]] = defaultdict(set)
    for copy in trace.copies:
        copies[copy.index].append(copy)
        into[copy.parameter].add(copy.index)
    found: dict[tuple[object, ...], Place] = {}
    unproven: dict[int, str] = {}
    for index, spec in enumerate(manifest.tensors):
        made = copies.get(index, [])
        if not made:
            # Another name of a parameter that a tensor of this shape goes to: a tied head.
            canonical = trace.aliases.get(spec.name, spec.name)
            others = [i for i in into[canonical] if manifest.tensors[i].shape == spec.shape]
            made = copies[others[0]] if others and canonical != spec.name else []
        if not made and spec.numel:
            unproven[index] = "the engine's loader copies nothing of it into the model"
        for copy in made:
            if copy.parameter in skipped:
                continue
            why = _unproven(copy, spec.shape)
            if why is not None:
                unproven.setdefault(index, why)
            elif copy.source is not None:
                key = (index, copy.source, copy.parameter, copy.destination)
                if key not in found:
                    found[key] = _place(index, spec.shape, copy, copy.source, trace)
    ordered = sorted(found.values(), key=lambda place: place.holding.index)
    return tuple(ordered), tuple(sorted(unproven.items()))


def covered_box(shape: Sequence[int], region: Region) -> Box | None:
    """The box that a strided region of a contiguous tensor covers, as a set: transposed and
    reshaped regions count by what they cover. None where that is no box, or some of it twice.

    Args:
        shape: of the tensor.
    """
    rank = len(shape)
    strides = [math.prod(shape[d + 1 :]) for d in range(rank)]
    if math.prod(region.shape) == 0:
        return Box.whole(shape) if math.prod(shape) == 0 else Box((0,) * rank, (0,) * rank)
    merged: list[list[int]] = []  # (length, stride), longest stride first
    solid = [(s, n) for n, s in zip(region.shape, region.stride, strict=True) if n > 1]
    for stride, length in sorted(solid, reverse=True):
        if merged and merged[-1][1] == stride * length:
            merged[-1] = [merged[-1][0] * length, stride]
        else:
            merged.append([length, stride])
    offsets, rest = [], region.offset
    for side, stride in zip(shape, strides, strict=True):
        index = rest // stride if side > 1 else 0
        offsets.append(index)
        rest -= index * stride
    lengths = [1] * rank
    for length, stride in merged:
        for d in reversed(range(rank)):
            if length > 1 and strides[d] == stride and shape[d] > 1 and lengths[d] == 1:
                taken = length if length <= shape[d] else shape[d]
                if length % taken:
                    return None
                lengths[d] = taken
                length, stride = length // taken, stride * taken
        if length > 1:
            return None
    box = Box(tuple(offsets), tuple(lengths))
    return box if rest == 0 and box.within(shape) else None


class HeldCopies:
    """Digests of what a model holds, by the copies that its loader made.

    Args:
        manifest: of the update.
        trace: of it through the loader of the model's twin.
        parameters: of the live model, under the twin's names, buffers included; looked up anew on
            each call, and read only on the CPU.
        skip: names of parameters that are read another way.

    Attributes:
        places: k of them, by position in the manifest; no two are the same.
        holdings: what they hold.
        unproven: ``(position, why)`` of tensors that are not, or not wholly, held as they are.
        unread: by number of the holding, why the last `digest` could not read it.
        faults: what the last `digest` found wrong with the model's parameters, each named once.
    """

    def __init__(
        self,
        manifest: Manifest,
        trace: Trace,
        parameters: Named,
        *,
        skip: Collection[str] = (),
    ) -> None:
        self.places, self.unproven = places(manifest, trace, skip=skip)
        self.holdings = tuple(place.holding for place in self.places)
        self.unread: dict[int, str] = {}
        self.faults: tuple[Problem, ...] = ()
        self._parameters = parameters
        self._index = np.array([h.index for h in self.holdings], dtype=np.intp)
        self._names = tuple(dict.fromkeys(h.holder for h in self.holdings))
        self._seen: list[tuple[object, ...]] | None = None
        self._table = RegionTable((), 0)

    def digest(self, seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """What each holding holds now, shape (k, 2); zeros for those in `unread`.

        Args:
            seeds: of each tensor of the manifest, shape (n,).
        """
        found = look_up(self._parameters)
        tensors = [found.get(name) for name in self._names]
        seen = [_seen(tensor) for tensor in tensors]
        if seen != self._seen:
            self._rebuild(dict(zip(self._names, tensors, strict=True)))
            self._seen = seen
        return self._table.digest(seeds[self._index], threads=idle_threads())

    def _rebuild(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        self.unread = {}
        faults: dict[str, Problem] = {}
        regions = []
        for number, place in enumerate(self.places):
            name = place.holding.holder
            region = _located(number, place, tensors[name])
            if isinstance(region, Problem):
                self.unread[number] = region.detail
                faults.setdefault(name, region)
            else:
                regions.append(region)
        self.faults = tuple(faults.values())
        self._table = RegionTable(regions, len(self.places))


def _unproven(copy: Copy, shape: tuple[int, ...]) -> str | None:
    """Why a copy does not leave bytes of the checkpoint where it goes, or None."""
    if copy.source_dtype != copy.destination_dtype:
        before, after = dtype_name(copy.source_dtype), dtype_name(copy.destination_dtype)
        return f"is cast from {before} to {after} while it is loaded"
    if copy.source is None:
        return "goes through arithmetic in the engine's loader"
    if covered_box(shape, copy.source) is None:
        return "is taken apart by the engine's loader, in steps or repeats that make no box"
    if len(copy.source.shape) > MAX_DIMS:
        return f"is copied in {len(copy.source.shape)} dimensions, {MAX_DIMS} can be read back"
    return None


def _place(index: int, shape: tuple[int, ...], copy: Copy, source: Region, trace: Trace) -> Place:
    box = covered_box(shape, source) or Box.whole(shape)  # `_unproven` lets no other through
    return Place(
        holding=Holding(index, copy.parameter, box.offsets, box.lengths),
        lengths=source.shape,
        stride=copy.destination.stride,
        offset=copy.destination.offset,
        whole_stride=source.stride,
        start=source.offset,
        layout=trace.layouts[copy.parameter],
        dtype=copy.destination_dtype,
    )


def _seen(tensor: torch.Tensor | None) -> tuple[object, ...]:
    """All that a row of the table says of a tensor. The tensor itself is not kept: one that the
    engine has replaced must not go on living here."""
    if tensor is None:
        return ()
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def _located(number: int, place: Place, tensor: torch.Tensor | None) -> Placed | Problem:
    """Where a place lies now, or what keeps it from being read."""
    name, layout = place.holding.holder, place.layout
    if tensor is None:
        return Problem("missing", name, "the model has no such parameter any more")
    if tuple(tensor.shape) != layout.shape:
        detail = (
            f"has shape {list(tensor.shape)}, the checkpoint is loaded into {list(layout.shape)}: "
            "what it holds is no copy of the checkpoint's layout"
        )
        return Problem("shape", name, detail)
    if tensor.dtype != place.dtype:
        detail = f"holds {tensor.dtype}, the checkpoint is loaded into {place.dtype}"
        return Problem("dtype", name, detail)
    if tensor.device.type != "cpu":
        return Problem("engine", name, f"lies on {tensor.device}, where it cannot be read")
    if tensor.is_conj() or tensor.is_neg():
        return Problem("engine", name, "is a lazy view, whose memory has other bytes")
    found = _relaid(place, tuple(tensor.stride()))
    if found is None:
        detail = f"has strides {list(tensor.stride())}, which its loader's copies do not fit"
        return Problem("engine", name, detail)
    stride, offset = found
    return Placed(
        out=number,
        address=tensor.data_ptr() + offset * tensor.element_size(),
        itemsize=tensor.element_size(),
        lengths=place.lengths,
        stride=stride,
        whole_stride=place.whole_stride,
        start=place.start,
    )


def _relaid(place: Place, now: tuple[int, ...]) -> tuple[tuple[int, ...], int] | None:
    """Strides and offset of a place in a parameter that has the twin's shape and these strides;
    None where a dimension of the copy runs across several of the parameter's."""
    twin, offset = place.layout, place.offset - place.layout.offset
    if now == twin.stride or math.prod(place.lengths) == 0:
        return place.stride, offset
    solid = sorted(
        (d for d, side in enumerate(twin.shape) if side > 1), key=lambda d: -twin.stride[d]
    )
    last = [0] * len(twin.shape)  # index that the copy reaches, per dimension of the parameter
    moved = 0
    for d in solid:
        index = offset // twin.stride[d] if twin.stride[d] else 0
        last[d], moved = index, moved + index * now[d]
        offset -= index * twin.stride[d]
    stride = []
    for length, step in zip(place.lengths, place.stride, strict=True):
        along = [d for d in solid if 0 < twin.stride[d] <= step]
        if length == 1:
            stride.append(0)
            continue
        if not along or step % twin.stride[along[0]]:
            return None
        times = step // twin.stride[along[0]]
        last[along[0]] += (length - 1) * times
        stride.append(times * now[along[0]])
    inside = all(last[d] < twin.shape[d] for d in solid)
    return (tuple(stride), moved) if inside and offset == 0 else None
