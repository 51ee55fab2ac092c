"""Boxes: axis-aligned parts of a checkpoint tensor. Pure data, no I/O.

A box has one offset and one length per dimension, in elements of the **whole** checkpoint tensor.
Trainer shards and engine parameters are both expressed as boxes, so that the two sides meet in one
coordinate system.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from weightsync.errors import ManifestError

__all__ = ["Box", "Run", "box_of_view", "tiles_exactly", "union_numel"]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive elements of a box, both in the whole tensor and in the box itself.

    Attributes:
        start: first element's index in the row-major whole tensor.
        local: first element's index in the row-major box.
        length: elements.
    """

    start: int
    local: int
    length: int


@dataclass(frozen=True, slots=True)
class Box:
    """``offsets[d] <= index[d] < offsets[d] + lengths[d]`` for every dimension d.

    Raises:
        ManifestError: offsets and lengths differ in number, or one is negative.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.lengths):
            raise ManifestError(
                f"a box needs one length per offset, got {self.offsets} and {self.lengths}"
            )
        if any(value < 0 for value in (*self.offsets, *self.lengths)):
            raise ManifestError(f"a box has no negative sides: {self.offsets}, {self.lengths}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.lengths)

    def within(self, shape: Sequence[int]) -> bool:
        """Whether the box lies inside a tensor of that shape."""
        return len(shape) == len(self.offsets) and all(
            offset + length <= side
            for offset, length, side in zip(self.offsets, self.lengths, shape, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None where there is none (empty boxes have none with anything)."""
        if len(self.offsets) != len(other.offsets):
            raise ManifestError(f"boxes of different rank cannot meet: {self} and {other}")
        offsets, lengths = [], []
        for a, n, b, m in zip(
            self.offsets, self.lengths, other.offsets, other.lengths, strict=True
        ):
            low, high = max(a, b), min(a + n, b + m)
            if low >= high:
                return None
            offsets.append(low)
            lengths.append(high - low)
        return Box(tuple(offsets), tuple(lengths))

    def runs(self, shape: Sequence[int]) -> Iterator[Run]:
        """The box as maximal runs of consecutive elements of the whole, in row-major order.

        Args:
            shape: of the whole tensor.

        Raises:
            ManifestError: the box does not lie inside ``shape``.
        """
        if not self.within(shape):
            raise ManifestError(f"{self} does not lie inside a tensor of shape {tuple(shape)}")
        if self.numel == 0:
            return
        # Trailing dimensions that the box takes whole belong to one run, and so does one more.
        split = max(len(shape) - 1, 0)
        while split > 0 and self.lengths[split] == shape[split]:
            split -= 1
        length = math.prod(self.lengths[split:])
        strides = _strides(shape)
        base = sum(o * s for o, s in zip(self.offsets, strides, strict=True))
        outer = self.lengths[:split]
        index = [0] * split
        for number in range(math.prod(outer)):
            start = base + sum(i * s for i, s in zip(index, strides[:split], strict=True))
            yield Run(start, number * length, length)
            for d in reversed(range(split)):
                index[d] += 1
                if index[d] < outer[d]:
                    break
                index[d] = 0


def box_of_view(
    shape: Sequence[int], view_shape: Sequence[int], view_stride: Sequence[int], view_offset: int
) -> Box | None:
    """The box that a strided view covers in a contiguous tensor, or None if it is not a box.

    Dimensions of length one may be missing or added in the view, as `select`, `squeeze` and
    `unsqueeze` do; anything else (transposes, steps, reshapes across dimensions) is not a box. A
    tensor without elements has none.

    Args:
        shape: of the whole, contiguous tensor.
        view_shape: of the view, in elements.
        view_stride: of the view, in elements.
        view_offset: of the view's first element, in elements from the whole's first.
    """
    if 0 in shape:
        return None
    strides = _strides(shape)
    offsets, rest = [], view_offset
    for side, stride in zip(shape, strides, strict=True):
        index = rest // stride if side > 1 else 0
        offsets.append(index)
        rest -= index * stride
    if rest:
        return None
    lengths = [1] * len(shape)
    last = -1
    for side, stride in zip(view_shape, view_stride, strict=True):
        if side == 1:
            continue
        found = next((d for d in range(last + 1, len(shape)) if strides[d] == stride), None)
        if found is None:
            return None
        lengths[found] = side
        last = found
    box = Box(tuple(offsets), tuple(lengths))
    return box if box.within(shape) else None


def tiles_exactly(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether the boxes cover a tensor of that shape with no gap and no overlap."""
    if sum(box.numel for box in boxes) != math.prod(shape):
        return False
    if not all(box.within(shape) for box in boxes):
        return False
    # Equal volume and no overlap means no gap. Sorting on the first dimension keeps the pairs few.
    ordered = sorted((b for b in boxes if b.numel), key=lambda b: b.offsets)
    for number, box in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if other.offsets[0] >= box.offsets[0] + box.lengths[0]:
                break
            if box.intersect(other) is not None:
                return False
    return True


def union_numel(boxes: Collection[Box]) -> int:
    """Elements that lie in at least one of the boxes, all of one rank."""
    solid = [box for box in boxes if box.numel]
    if not solid or not solid[0].offsets:
        return len(solid[:1])
    cuts = sorted({at for b in solid for at in (b.offsets[0], b.offsets[0] + b.lengths[0])})
    total = 0
    for low, high in itertools.pairwise(cuts):
        slab = {
            Box(b.offsets[1:], b.lengths[1:])
            for b in solid
            if b.offsets[0] <= low and high <= b.offsets[0] + b.lengths[0]
        }
        total += (high - low) * union_numel(slab)
    return total


def _strides(shape: Sequence[int]) -> list[int]:
    """Of the row-major tensor of that shape, in elements."""
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]
