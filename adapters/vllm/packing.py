"""Where a kernel moves the elements of matrices when it packs them, learnt from the kernel itself.

It packs tensors whose bits are the numbers of their elements, and the result says where each went.
Known layouts are blocked: rows and columns are numbers in mixed radix, each digit with a stride of
its own in packed memory. So a box of the matrix is a few strided regions of it, which can be read
in place. Of any other permutation, the inverse is gathered.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from weightsync.digest import digest_tensors
from weightsync.regions import MAX_DIMS, Placed, RegionTable

__all__ = ["Digit", "Packing", "Piece", "Span", "learn"]

Span = tuple[int, int, int]
"""Of one dimension: first index, length, and stride in the whole checkpoint tensor."""

ROWS_AT_FIRST = (128, 64)
"""Of how many rows a packing is learnt at first."""


@dataclass(frozen=True, slots=True)
class Digit:
    """Rows, or columns, are counted in mixed radix: one digit of it.

    Attributes:
        extent: of its values.
        stride: elements of packed memory from one value to the next.
    """

    extent: int
    stride: int


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the elements of one expert's matrix went.

    Attributes:
        rows, columns: their digits, least significant first; those of a plain matrix where the
            elements are to be gathered first.
        gather: for each element of the plain matrix, where it lies in the packed one; None where
            that need not be.
    """

    rows: tuple[Digit, ...]
    columns: tuple[Digit, ...]
    gather: torch.Tensor | None = field(default=None, compare=False)

    def plain(self, packed: torch.Tensor) -> torch.Tensor:
        """Memory in which the digits count: the packed tensor itself, or its elements in order.

        Args:
            packed: shape (experts, rows, columns), contiguous.
        """
        if self.gather is None:
            return packed
        return packed.flatten(1)[:, self.gather]

    def pieces(self, experts: Span, rows: Span, columns: Span, start: int) -> Iterator[Piece]:
        """Where a box of all experts' matrices lies.

        Args:
            experts, rows, columns: the box, and how it stands in the whole checkpoint tensor.
            start: index in the whole of the box's first element.
        """
        numel = math.prod(digit.extent for digit in (*self.rows, *self.columns))
        for row_digits in _split(rows[0], rows[1], self.rows):
            for column_digits in _split(columns[0], columns[1], self.columns):
                lengths, stride, whole = [experts[1]], [numel], [experts[2]]
                offset, begin = experts[0] * numel, start
                for (first, _, step), digits, radix in (
                    (rows, row_digits, self.rows),
                    (columns, column_digits, self.columns),
                ):
                    unit, value = 1, 0
                    for (low, length), digit in zip(digits, radix, strict=True):
                        lengths.append(length)
                        stride.append(digit.stride)
                        whole.append(unit * step)
                        offset += low * digit.stride
                        value += low * unit
                        unit *= digit.extent
                    begin += (value - first) * step
                yield Piece(tuple(lengths), tuple(stride), offset, tuple(whole), begin)


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of packed memory, in elements of it, and where they stand in the whole.

    Attributes:
        lengths, stride, offset: in packed memory.
        whole_stride, start: in the row-major whole checkpoint tensor.
    """

    lengths: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    whole_stride: tuple[int, ...]
    start: int

    def placed(self, out: int, memory: torch.Tensor) -> Placed:
        """In memory that `Packing.plain` gave."""
        size = memory.element_size()
        address = memory.data_ptr() + self.offset * size
        return Placed(out, address, size, self.lengths, self.stride, self.whole_stride, self.start)

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """In memory that `Packing.plain` gave."""
        return memory.as_strided(self.lengths, self.stride, memory.storage_offset() + self.offset)


def learn(
    pack: Callable[[torch.Tensor], torch.Tensor], rows: int, columns: int, dtype: torch.dtype
) -> Packing | str:
    """Learn from its results where a function moves the elements of matrices.

    Numbers of all elements take many times the memory of a large expert, and long. So a few rows
    are asked first; what they say of all is held against one packing of random elements.

    Args:
        pack: of a tensor of shape (experts, rows, columns); gives one of the same shape and dtype.
        rows, columns, dtype: of the matrices.

    Returns:
        The packing; or why it is none that moves elements within each expert and changes none.
    """
    for few in ROWS_AT_FIRST:
        if rows % few or rows <= few:
            continue
        found = _learn_all(pack, few, columns, dtype)
        if isinstance(found, Packing) and found.gather is None and found.rows:
            outer = found.rows[-1]
            last = Digit(outer.extent * (rows // few), outer.stride)
            found = Packing((*found.rows[:-1], last), found.columns)
            if _is_of(found, pack, rows, columns, dtype):
                return found
    return _learn_all(pack, rows, columns, dtype)


def _is_of(
    packing: Packing,
    pack: Callable[[torch.Tensor], torch.Tensor],
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> bool:
    """Whether two experts of random elements are packed like that: told by digests, under a seed
    that was not known before."""
    shape = 2, rows, columns
    nbytes = math.prod(shape) * dtype.itemsize
    drawn = torch.from_numpy(np.frombuffer(np.random.default_rng().bytes(nbytes), np.uint8).copy())
    packed = pack(drawn.view(dtype).reshape(shape)).contiguous()
    if packed.shape != shape or packed.dtype != dtype:
        return False
    box = (0, 2, rows * columns), (0, rows, columns), (0, columns, 1)
    table = RegionTable([piece.placed(0, packed) for piece in packing.pieces(*box, 0)], 1)
    seed = secrets.randbits(64)
    expected = digest_tensors([drawn.data_ptr()], [nbytes], [seed])
    return bool(np.array_equal(table.digest([seed]), expected))


def _learn_all(
    pack: Callable[[torch.Tensor], torch.Tensor], rows: int, columns: int, dtype: torch.dtype
) -> Packing | str:
    """From the numbers of all elements."""
    numel = rows * columns
    found = _numbers(pack, (2, rows, columns), dtype)
    if found is None:
        return f"packing changes the shape or the dtype of experts of {rows} x {columns}"
    first, second = found.reshape(2, numel)
    seen = np.zeros(numel, bool)
    seen[first[first < numel]] = True
    if not seen.all() or not np.array_equal(second, first + numel):
        return f"packing does more to experts of {rows} x {columns} than to move their elements"
    digits = _digits(first, columns)
    # A region has room for the experts, and for so many digits.
    if digits is not None and len(digits[0]) + len(digits[1]) < MAX_DIMS:
        return Packing(*digits)
    gather = np.empty(numel, np.int64)
    gather[first] = np.arange(numel)
    return Packing((Digit(rows, columns),), (Digit(columns, 1),), torch.from_numpy(gather))


def _numbers(
    pack: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> NDArray[np.int64] | None:
    """Numbers of the elements, as packing leaves them; as many bits at a time as an element has."""
    size = dtype.itemsize
    words = np.dtype(f"u{size}")
    numbers = np.arange(np.prod(shape), dtype=np.int64)
    found = np.zeros_like(numbers)
    for shift in range(0, 64, 8 * size):
        if not (numbers[-1] >> shift):
            break
        bits = (numbers >> shift).astype(words)
        packed = pack(torch.from_numpy(bits.view(np.uint8)).view(dtype).reshape(shape))
        if packed.shape != shape or packed.dtype != dtype:
            return None
        back = packed.contiguous().flatten().view(torch.uint8).numpy().view(words)
        found |= back.astype(np.int64) << shift
    return found


def _digits(
    order: NDArray[np.int64], columns: int
) -> tuple[tuple[Digit, ...], tuple[Digit, ...]] | None:
    """A permutation of a matrix as digits of rows and of columns; None where it is no blocked
    layout.

    Args:
        order: by place in packed memory, the number of the element in the plain matrix.
        columns: of that.
    """
    found: dict[int, list[tuple[int, Digit]]] = {0: [], 1: []}
    stride, rest = 1, order
    while len(rest) > 1:
        step = int(rest[1] - rest[0])
        breaks = np.flatnonzero(np.diff(rest) != step)
        extent = int(breaks[0]) + 1 if len(breaks) else len(rest)
        outer = rest[::extent]
        if step <= 0 or len(rest) % extent:
            return None
        if not np.array_equal(rest, (outer[:, None] + np.arange(extent) * step).reshape(-1)):
            return None
        for row, (size, value, per) in enumerate(_divide(extent, step, columns)):
            if size > 1:
                found[row].append((value, Digit(size, stride * per)))
        stride, rest = stride * extent, outer
    radices = []
    for row in (1, 0):
        weight = 1
        for value, digit in sorted(found[row], key=lambda each: each[0]):
            if value != weight:
                return None
            weight *= digit.extent
        radices.append(tuple(digit for _, digit in sorted(found[row], key=lambda each: each[0])))
        if weight != (len(order) // columns if row else columns):
            return None
    return radices[0], radices[1]


def _divide(extent: int, step: int, columns: int) -> Sequence[tuple[int, int, int]]:
    """A run of equal steps, as one within a row and one from row to row: ``(extent, value of one
    step in columns or in rows, steps of the run from one to the next)``. What does not divide
    evenly is found out by who adds the digits up."""
    if step >= columns:
        return ((1, 1, 1), (extent, step // columns if step % columns == 0 else 0, 1))
    within = min(extent, columns // step)
    return ((within, step, 1), (extent // within, 1, within))


def _split(low: int, length: int, radix: Sequence[Digit]) -> Iterator[tuple[tuple[int, int], ...]]:
    """A range of numbers as boxes of digits: for each digit, first value and how many."""
    if not radix:
        yield ()
        return
    lesser = radix[:-1]
    unit = 1
    for digit in lesser:
        unit *= digit.extent
    high = low + length
    while low < high:
        value, inside = divmod(low, unit)
        if inside == 0 and high - low >= unit:
            count, taken = (high - low) // unit, unit
        else:
            count, taken = 1, min(high - low, unit - inside)
        for digits in _split(inside, taken, lesser):
            yield (*digits, (value, count))
        low += count * taken
