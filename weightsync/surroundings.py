"""What a model holds beside a checkpoint's tensors: it must come through an update as it was.

Pads, buffers that no tensor goes to, tensors kept in plain attributes: no trainer knows what they
should be, but an update that changes one has gone wrong (`Surroundings`). And a captured graph goes
on reading where tensors lay when it was captured (`Pinned`).
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from weightsync.box import Box
from weightsync.errors import Problem
from weightsync.held import Named, covered_box, look_up
from weightsync.plan.trace import Trace
from weightsync.regions import RegionTable, placed

__all__ = ["Pinned", "Surroundings", "filled", "pads", "parts", "remaining", "written"]


class Surroundings:
    """Tells whether tensors have the bytes that they had.

    Compared by digests under a seed that is drawn anew for each `note`, so no copies are kept.

    Args:
        tensors: by name, on the CPU, in any layout; they may be views. Looked up anew each time.
    """

    def __init__(self, tensors: Named) -> None:
        self._tensors = tensors
        self._seed = 0
        self._before: dict[str, _Read] = {}

    def note(self) -> None:
        """Remember what they are, before an update is applied.

        Raises:
            ValueError: one cannot be read.
        """
        self._seed = secrets.randbits(64)
        self._before = _read(look_up(self._tensors), self._seed)

    def changed(self) -> list[Problem]:
        """What is not as it was noted; none before the first note.

        Raises:
            ValueError: one cannot be read.
        """
        found = _read(look_up(self._tensors), self._seed)
        problems = []
        for name, before in self._before.items():
            now = found.get(name)
            if now is None:
                detail = "was there before the update and is not any more"
            elif (now.dtype, now.shape) != (before.dtype, before.shape):
                detail = f"was {_kind(before)} before the update, is {_kind(now)}"
            elif now != before:
                detail = "no tensor goes to it, and the update changed its bytes"
            else:
                continue
            problems.append(Problem("changed", name, detail))
        return problems


class Pinned:
    """Tells whether tensors lie where they lay when this was made.

    Args:
        tensors: by name; looked up anew each time.
    """

    def __init__(self, tensors: Named) -> None:
        self._tensors = tensors
        self._first = {n: t.data_ptr() for n, t in look_up(tensors).items() if t.numel()}

    def moved(self) -> list[Problem]:
        """Those that lie elsewhere, or are gone."""
        found = look_up(self._tensors)
        problems = []
        for name, first in self._first.items():
            tensor = found.get(name)
            if tensor is not None and tensor.data_ptr() == first:
                continue
            detail = "is gone" if tensor is None else "lies elsewhere"
            detail += ": what was captured at its address goes on reading what was there"
            problems.append(Problem("moved", name, detail))
        return problems


def written(trace: Trace) -> dict[str, list[Box] | None]:
    """By canonical name of the parameter, the boxes that the loader copies tensors into; None where
    one of them is no box."""
    found: dict[str, list[Box] | None] = defaultdict(list)
    for copy in trace.copies:
        layout, boxes = trace.layouts[copy.parameter], found[copy.parameter]
        box = copy.destination.box or covered_box(layout.shape, copy.destination)
        if boxes is None or box is None:
            found[copy.parameter] = None
        elif box not in boxes:
            boxes.append(box)
    return dict(found)


def pads(
    name: str, tensor: torch.Tensor, boxes: Sequence[Box]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parts of a parameter that none of these boxes covers: ``(label, view)``, disjoint.

    Args:
        name: of the parameter; a label is ``name[8:10, 0:4]``.
        boxes: of it, as `written` gives them.

    Raises:
        ManifestError: a box is of another rank.
    """
    return parts(name, tensor, remaining(Box.whole(tensor.shape), boxes))


def parts(
    name: str, tensor: torch.Tensor, boxes: Sequence[Box]
) -> Iterator[tuple[str, torch.Tensor]]:
    """These boxes of a parameter, labelled like `pads`."""
    for box in boxes:
        spans = [slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True)]
        label = ", ".join(f"{span.start}:{span.stop}" for span in spans)
        yield f"{name}[{label}]", tensor.detach()[tuple(spans)]


def filled(trace: Trace) -> dict[str, dict[Box, float]]:
    """By canonical name of the parameter, the parts that the loader fills with a constant and
    copies no tensor into, and the constants: not what they were before, which may be noise that an
    engine was started with. What is no box is left out."""
    found: dict[str, dict[Box, float]] = defaultdict(dict)
    copied = written(trace)
    for name, region, value in trace.fills:
        box = region.box or covered_box(trace.layouts[name].shape, region)
        boxes = copied.get(name, [])
        if box is not None and boxes is not None and value is not None:
            found[name] |= dict.fromkeys(remaining(box, boxes), value)
    return dict(found)


def remaining(whole: Box, boxes: Sequence[Box]) -> list[Box]:
    """What is left of a box without these others, as disjoint boxes."""
    left = [whole] if whole.numel else []
    for box in boxes:
        left = [part for one in left for part in _without(one, box)]
    return left


def _without(one: Box, other: Box) -> Iterator[Box]:
    common = one.intersect(other)
    if common is None:
        yield one
        return
    offsets, lengths = list(one.offsets), list(one.lengths)
    for d, (low, length) in enumerate(zip(common.offsets, common.lengths, strict=True)):
        high, end = low + length, offsets[d] + lengths[d]
        for start, stop in ((offsets[d], low), (high, end)):
            if start < stop:
                yield Box(
                    (*offsets[:d], start, *offsets[d + 1 :]),
                    (*lengths[:d], stop - start, *lengths[d + 1 :]),
                )
        offsets[d], lengths[d] = low, length


@dataclass(frozen=True, slots=True)
class _Read:
    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: tuple[int, ...]


def _read(tensors: Mapping[str, torch.Tensor], seed: int) -> dict[str, _Read]:
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} lies on {tensor.device}, where it cannot be read")
    plain = [tensor.detach() for tensor in tensors.values()]
    regions = [
        placed(number, tensor, Box.whole(tensor.shape), tensor.shape)
        for number, tensor in enumerate(plain)
    ]
    seeds: NDArray[np.uint64] = np.full(len(plain), seed, np.uint64)
    digests = RegionTable(regions, len(plain)).digest(seeds).tolist()
    return {
        name: _Read(tensor.dtype, tuple(tensor.shape), tuple(digest))
        for name, tensor, digest in zip(tensors, plain, digests, strict=True)
    }


def _kind(read: _Read) -> str:
    return f"{read.dtype} {list(read.shape)}"
