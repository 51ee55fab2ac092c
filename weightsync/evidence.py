"""The trainer's bytes of one update, to be looked at again: what parts of tensors must digest to,
and what a whole tensor holds."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from weightsync.box import Box
from weightsync.digest import digest_spans, idle_threads
from weightsync.manifest import DTYPE_BYTES, Manifest
from weightsync.regions import Placed, RegionTable
from weightsync.sources.base import Pieces, Source, pour

__all__ = ["ArenaEvidence", "Evidence", "Part", "SourceEvidence", "bytes_within", "digest_part"]


@dataclass(frozen=True, slots=True)
class Part:
    """Disjoint boxes of one tensor, digested together."""

    index: int
    boxes: tuple[Box, ...]


class Evidence(Protocol):
    """See the module."""

    def digests(self, parts: Sequence[Part], seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """What each part must digest to.

        Args:
            seeds: of each tensor of the manifest, shape (n,).

        Returns:
            Shape (len(parts), 2).
        """
        ...

    def content(self, index: int) -> NDArray[np.uint8]:
        """The bytes of one whole tensor, row-major."""
        ...


class ArenaEvidence:
    """Whole tensors that lie in this process's memory.

    Args:
        addresses: of each tensor, shape (n,), as long as this is used.
    """

    def __init__(self, manifest: Manifest, addresses: NDArray[np.uint64]) -> None:
        self._manifest = manifest
        self._addresses = addresses

    def digests(self, parts: Sequence[Part], seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
        placed = [
            _placed(self._manifest, out, part.index, box, int(self._addresses[part.index]))
            for out, part in enumerate(parts)
            for box in part.boxes
        ]
        index = np.array([part.index for part in parts], np.int64)
        return RegionTable(placed, len(parts)).digest(seeds[index], threads=idle_threads())

    def content(self, index: int) -> NDArray[np.uint8]:
        nbytes = int(self._manifest.nbytes[index])
        return _memory(int(self._addresses[index]), nbytes).copy()


class SourceEvidence:
    """What a source holds now: read anew for each question, so that the trainer must stand still
    in between."""

    def __init__(self, source: Source, manifest: Manifest) -> None:
        self._source = source
        self._manifest = manifest

    def digests(self, parts: Sequence[Part], seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """
        Raises:
            SourceError: see `weightsync.sources.base.pour`.
        """
        of_tensor: dict[int, list[int]] = defaultdict(list)
        for out, part in enumerate(parts):
            of_tensor[part.index].append(out)
        wanted = np.zeros(len(self._manifest), np.bool_)
        wanted[list(of_tensor)] = True
        sums = np.zeros((len(parts), 2), np.uint64)

        def look(batch: Pieces) -> None:
            nonlocal sums
            sums = sums + self._of_batch(batch, parts, of_tensor, seeds)

        pour(self._source, self._manifest, look, wanted=wanted)
        return sums

    def content(self, index: int) -> NDArray[np.uint8]:
        """
        Raises:
            SourceError: see `weightsync.sources.base.pour`.
        """
        wanted = np.zeros(len(self._manifest), np.bool_)
        wanted[index] = True
        whole = np.zeros(int(self._manifest.nbytes[index]), np.uint8)

        def take(batch: Pieces) -> None:
            for start, nbytes, address in zip(
                batch.start.tolist(), batch.nbytes.tolist(), batch.address.tolist(), strict=True
            ):
                whole[start : start + nbytes] = _memory(address, nbytes)

        pour(self._source, self._manifest, take, wanted=wanted)
        return whole

    def _of_batch(
        self,
        batch: Pieces,
        parts: Sequence[Part],
        of_tensor: dict[int, list[int]],
        seeds: NDArray[np.uint64],
    ) -> NDArray[np.uint64]:
        manifest = self._manifest
        whole: list[Placed] = []
        sums = np.zeros((len(parts), 2), np.uint64)
        for index, start, nbytes, address in zip(
            batch.index.tolist(),
            batch.start.tolist(),
            batch.nbytes.tolist(),
            batch.address.tolist(),
            strict=True,
        ):
            for out in of_tensor[index]:
                boxes = parts[out].boxes
                if nbytes == int(manifest.nbytes[index]):
                    whole += [_placed(manifest, out, index, box, address) for box in boxes]
                    continue
                for box in boxes:
                    runs = _runs_within(manifest, index, box, start, nbytes)
                    seed = np.full(len(runs), seeds[index])
                    at = np.uint64(address) + runs[:, 0] - np.uint64(start)
                    found = digest_spans(
                        at, runs[:, 1], runs[:, 0], seed, np.zeros(len(runs), np.uint64), 1
                    )
                    sums[out] += found[0]
        out_seeds = seeds[np.array([part.index for part in parts], np.int64)]
        return sums + RegionTable(whole, len(parts)).digest(out_seeds)


def digest_part(
    content: NDArray[np.uint8],
    shape: Sequence[int],
    itemsize: int,
    part: Part,
    seed: np.uint64,
    form: Callable[[NDArray[np.uint8]], NDArray[np.uint8]] | None = None,
) -> NDArray[np.uint64]:
    """Digest of a part of a tensor whose bytes are at hand, shape (2,).

    Args:
        form: what the bytes of each box are brought to first; as they are if None. It is given
            these alone: of a few columns of a large matrix, little.
    """
    placed, kept = [], []
    for box in part.boxes:
        place = _place(0, box, shape, itemsize, content.ctypes.data)
        if form is not None:
            formed = form(bytes_within(content, shape, itemsize, box))
            kept.append(formed)
            stride = tuple(math.prod(box.lengths[d + 1 :]) for d in range(len(shape)))
            place = dataclasses.replace(place, address=formed.ctypes.data, stride=stride)
        placed.append(place)
    found: NDArray[np.uint64] = RegionTable(placed, 1).digest([int(seed)])[0]
    return found


def bytes_within(
    content: NDArray[np.uint8], shape: Sequence[int], itemsize: int, box: Box
) -> NDArray[np.uint8]:
    """The bytes of a box, row-major, of those of its tensor."""
    elements = content.reshape(*shape, itemsize)
    sides = zip(box.offsets, box.lengths, strict=True)
    part = elements[tuple(slice(first, first + length) for first, length in sides)]
    return np.ascontiguousarray(part).reshape(-1)


def _placed(manifest: Manifest, out: int, index: int, box: Box, address: int) -> Placed:
    spec = manifest.tensors[index]
    return _place(out, box, spec.shape, DTYPE_BYTES[spec.dtype], address)


def _place(out: int, box: Box, shape: Sequence[int], itemsize: int, address: int) -> Placed:
    """A box of a whole tensor that lies at an address, row-major."""
    strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    start = sum(o * s for o, s in zip(box.offsets, strides, strict=True))
    return Placed(out, address + start * itemsize, itemsize, box.lengths, strides, strides, start)


def _runs_within(
    manifest: Manifest, index: int, box: Box, start: int, nbytes: int
) -> NDArray[np.uint64]:
    """Rows of (first byte, bytes) of a box that lie between two bytes of its tensor."""
    spec = manifest.tensors[index]
    runs = _runs(box, spec.shape) * DTYPE_BYTES[spec.dtype]
    first = np.maximum(runs[:, 0], start)
    last = np.minimum(runs[:, 0] + runs[:, 1], start + nbytes)
    inside = last > first
    return np.stack([first[inside], (last - first)[inside]], axis=1).astype(np.uint64)


def _runs(box: Box, shape: Sequence[int]) -> NDArray[np.int64]:
    """Rows of (start, length) of `Box.runs`, all at once: a column has as many as a matrix has
    rows, and is looked for in every piece of it."""
    if box.numel == 0:
        return np.zeros((0, 2), np.int64)
    split = len(shape)
    while split > 0 and box.lengths[split - 1] == shape[split - 1]:
        split -= 1
    split = max(split - 1, 0)
    starts = np.zeros(1, np.int64)
    for side, (offset, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
        stride = math.prod(shape[side + 1 :])
        steps = np.arange(offset, offset + (length if side < split else 1)) * stride
        starts = (starts[:, None] + steps).reshape(-1)
    return np.stack([starts, np.full_like(starts, math.prod(box.lengths[split:]))], axis=1)


def _memory(address: int, nbytes: int) -> NDArray[np.uint8]:
    """A view of memory that the caller keeps."""
    if nbytes == 0:
        return np.zeros(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
