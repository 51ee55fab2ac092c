"""Digests of boxes of checkpoint tensors, read where they lie, whatever the layout of memory.

A digest is of a tensor's row-major bytes. What a model holds is often something else: the transpose
of a checkpoint tensor, a slice of a fused parameter, every second row of one. None of it has to be
copied into order first: an element adds to the digest by where it stands in the whole tensor, and
may be read from anywhere, in any order. The native code (`csrc/regions.hpp`) picks the order that
memory likes, and reads every byte once.

    table = RegionTable([placed(0, w, box, shape)], n_out=1)     # once per layout
    table.digest(seeds, threads=2)                               # (1, 2) uint64, once per update

Addresses are raw: the caller keeps the memory alive and mapped for as long as a table is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weightsync import _native
from weightsync.box import Box
from weightsync.digest import Digest
from weightsync.tables import U64Array, U64Like, table_columns

if TYPE_CHECKING:
    import torch

__all__ = ["MAX_DIMS", "Placed", "RegionTable", "digest", "placed"]

MAX_DIMS = 8
# The columns of a row, as the native code takes them.
_ADDRESS, _ITEMSIZE, _NDIM, _START, _SEED, _OUT = range(6)
_LENGTHS, _STRIDE, _WHOLE_STRIDE = 6, 6 + MAX_DIMS, 6 + 2 * MAX_DIMS
_COLUMNS = 6 + 3 * MAX_DIMS
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Placed:
    """Part of a tensor: where its elements lie in memory, and where they stand in the whole.

    Attributes:
        out: the digest that it adds to.
        address: of its first element.
        itemsize: bytes per element: 1, 2, 4, 8 or 16.
        lengths: elements per dimension; at most 8 dimensions.
        stride: elements of memory from one index to the next, per dimension; any sign, zero too.
        whole_stride: the same in the row-major whole tensor.
        start: the first element's index in the row-major whole tensor.

    Raises:
        ValueError: lengths and strides differ in number, or there are more than 8 dimensions.
            A `RegionTable` refuses all else that does not fit.
    """

    out: int
    address: int
    itemsize: int
    lengths: tuple[int, ...]
    stride: tuple[int, ...]
    whole_stride: tuple[int, ...]
    start: int

    def __post_init__(self) -> None:
        if not len(self.lengths) == len(self.stride) == len(self.whole_stride):
            raise ValueError(
                f"as many strides as lengths are needed: "
                f"{self.lengths}, {self.stride}, {self.whole_stride}"
            )
        if len(self.lengths) > MAX_DIMS:
            raise ValueError(f"a region has at most {MAX_DIMS} dimensions: {self.lengths}")


def placed(out: int, tensor: torch.Tensor, box: Box, shape: Sequence[int]) -> Placed:
    """The elements of a strided tensor, of any device, as a box of a checkpoint tensor.

    Args:
        out: the digest that they add to.
        tensor: of the shape ``box.lengths``, in any layout. The caller keeps it alive.
        box: which part of the whole checkpoint tensor it holds.
        shape: of the whole checkpoint tensor.

    Raises:
        ValueError: the tensor has another shape, the box does not lie inside the whole, there are
            more than 8 dimensions, or memory does not hold the tensor's values as they are (lazily
            conjugated or negated views).
    """
    if tuple(tensor.shape) != box.lengths:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} does not hold a box of {box.lengths}"
        )
    if not box.within(shape):
        raise ValueError(f"{box} does not lie inside a tensor of shape {tuple(shape)}")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("a lazily conjugated or negated view has other bytes than its memory")
    whole_stride = _row_major(shape)
    return Placed(
        out=out,
        address=tensor.data_ptr(),
        itemsize=tensor.element_size(),
        lengths=box.lengths,
        stride=tuple(tensor.stride()),
        whole_stride=whole_stride,
        start=sum(o * s for o, s in zip(box.offsets, whole_stride, strict=True)),
    )


def digest(tensor: torch.Tensor, box: Box, shape: Sequence[int], seed: int) -> Digest:
    """The digest of one CPU tensor that holds `box` of a whole of shape `shape`.

    Args:
        tensor, box, shape: as in `placed`.
        seed: 64-bit seed of the whole tensor.

    Raises:
        ValueError: as in `placed`, the tensor is not in host memory, or the seed is not in
            ``[0, 2**64)``.
    """
    if tensor.device.type != "cpu":
        raise ValueError(f"only host memory can be read here, not a tensor on {tensor.device}")
    table = RegionTable([placed(0, tensor, box, shape)], n_out=1).digest([seed])
    return Digest(int(table[0, 0]), int(table[0, 1]))


class RegionTable:
    """Regions whose digests are taken again and again: checked once, without a loop afterwards.

    Args:
        regions: n of them, in host memory for `digest`.
        n_out: number of digests.

    Raises:
        ValueError: an out is not below n_out, an itemsize is unknown, a length is negative, two
            elements overlap in the whole or one straddles its words, an extent exceeds 64 bits, or
            an address is null where there are elements.
    """

    def __init__(self, regions: Iterable[Placed], n_out: int) -> None:
        self._adopt(_rows(regions), n_out)

    def _adopt(self, rows: U64Array, n_out: int) -> None:
        _native.check_regions(rows, n_out)
        self._rows = rows
        self._n_out = n_out

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def n_out(self) -> int:
        """Number of digests."""
        return self._n_out

    @property
    def rows(self) -> U64Array:
        """(n, 30) uint64, read-only: a row per region as `csrc/regions_module.cpp` describes it."""
        view = self._rows.view()
        view.flags.writeable = False
        return view

    @property
    def out(self) -> U64Array:
        """(n,) uint64: the digest that each region adds to."""
        return self._rows[:, _OUT].copy()

    @property
    def nbytes(self) -> U64Array:
        """(n,) uint64: bytes of each region."""
        lengths = self._rows[:, _LENGTHS : _LENGTHS + MAX_DIMS]
        sizes: U64Array = self._rows[:, _ITEMSIZE] * lengths.prod(axis=1, dtype=np.uint64)
        return sizes

    def seeded(self, seeds: U64Like) -> U64Array:
        """The rows with their seeds filled in, for native code: (n, 30) uint64, C-contiguous.

        Args:
            seeds: (n_out,) one per digest.

        Raises:
            ValueError: another number of seeds, or one is not in ``[0, 2**64)``.
        """
        column = table_columns(seeds=seeds)["seeds"]
        if len(column) != self._n_out:
            raise ValueError(f"{self._n_out} seeds are needed, one per digest, not {len(column)}")
        rows = self._rows.copy()
        rows[:, _SEED] = column[rows[:, _OUT].astype(np.intp)]
        return rows

    def digest(self, seeds: U64Like, *, threads: int = 1) -> U64Array:
        """Reads every region where it lies, once.

        Args:
            seeds: (n_out,) the seed of each digest's tensor.
            threads: the work is split by bytes; the result is the same for any number.

        Returns:
            (n_out, 2) uint64. A digest without regions is zero.

        Raises:
            ValueError: as in `seeded`, or threads is not between 1 and 1024.
        """
        return _native.digest_regions(self.seeded(seeds), self._n_out, threads=threads)

    def moved(self, addresses: U64Like) -> RegionTable:
        """The same regions at other addresses: (n,), of their first elements.

        Raises:
            ValueError: another number of addresses, or one that the region does not fit at.
        """
        column = table_columns(addresses=addresses)["addresses"]
        if len(column) != len(self):
            raise ValueError(f"{len(self)} addresses are needed, one per region: {len(column)}")
        rows = self._rows.copy()
        rows[:, _ADDRESS] = column
        table = RegionTable.__new__(RegionTable)
        table._adopt(rows, self._n_out)
        return table


def reference_positions(box: Box, shape: Sequence[int], itemsize: int) -> NDArray[np.uint64]:
    """Where every byte of a box stands in the whole: (*box.lengths, itemsize) uint64.

    For tests, together with `digest.reference_digest_at`.
    """
    positions = np.arange(itemsize, dtype=np.uint64)
    for offset, length, stride in reversed(
        list(zip(box.offsets, box.lengths, _row_major(shape), strict=True))
    ):
        steps = np.arange(offset, offset + length, dtype=np.uint64) * np.uint64(stride * itemsize)
        positions = positions + steps.reshape(-1, *[1] * positions.ndim)
    return positions


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _rows(regions: Iterable[Placed]) -> U64Array:
    rows = [_row(region) for region in regions]
    return np.array(rows, dtype=np.uint64).reshape(len(rows), _COLUMNS)


def _row(region: Placed) -> list[int]:
    item, ndim = region.itemsize, len(region.lengths)
    unused = MAX_DIMS - ndim
    unsigned = {
        "address": region.address,
        "itemsize": item,
        "start": region.start * item,
        "out": region.out,
    }
    for name, value in unsigned.items():
        if not 0 <= value <= _MASK:
            raise ValueError(f"{name} of a region exceeds 64 bits or is negative: {region}")
    if any(length < 0 for length in region.lengths):
        raise ValueError(f"negative length of a region: {region}")
    # The stride of a dimension of length one means nothing, and of an empty region none does.
    steps = [0 if n == 1 else s * item for n, s in zip(region.lengths, region.stride, strict=True)]
    whole_steps = [
        0 if n == 1 else s * item for n, s in zip(region.lengths, region.whole_stride, strict=True)
    ]
    if any(not -(1 << 63) <= step < 1 << 63 for step in steps) or any(
        not 0 <= step <= _MASK for step in whole_steps
    ):
        raise ValueError(f"a stride of a region exceeds 64 bits or is negative: {region}")
    return [
        *(region.address, item, ndim, region.start * item, 0, region.out),
        *region.lengths,
        *[1] * unused,
        *(step & _MASK for step in steps),
        *[0] * unused,
        *whole_steps,
        *[0] * unused,
    ]
