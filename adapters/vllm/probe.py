"""Packed weights of linear layers, read back through the product that the engine computes with.

The CPU engine packs the weight of a linear layer, lets go of the original, and keeps the result
behind ``layer.cpu_linear``, in a format that is the kernel's own. A product with rows of the
identity gives the weight's columns: each output is one weight times one, plus zeros. That is exact
by value; -0.0 and, in bfloat16, denormal numbers come back as zero, so all zeros and denormals are
made +0.0 on both sides. A weight that is not finite spoils the row it stands in, which is told.

A layer is read in full where that is cheap, else at some columns that are drawn for each update.
Whether this machine's kernels are exact is tried on known values, once for each shape.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weightsync.holding import Holding, spot_columns
from weightsync.regions import Placed, RegionTable

__all__ = ["LAYER_BUDGET", "MODEL_BUDGET", "PackedLayer", "Part", "Probe", "inexact", "read"]

LAYER_BUDGET = 1 << 26
"""Multiply-accumulates that reading one layer in full may take: some milliseconds of one core."""
MODEL_BUDGET = 1 << 30
"""The same for all layers of a model that are read in full."""

CHUNK_BYTES = 4 << 20
"""Of one product's operand and result."""
TRIED_ROWS = 4096
"""Of a layer at most, to try a kernel. vLLM chooses between kernels at 1 MiB of weights."""
TRIED_COLUMNS = 32

NOT_FINITE = "is not finite somewhere in the engine, where only finite numbers can be read back"


@dataclass(frozen=True, slots=True)
class Part:
    """What a packed weight holds of one checkpoint tensor.

    Attributes:
        holding: level and holder are the layer's.
        row, column: of the weight, where the part begins.
        rows, columns: its size.
        row_stride, column_stride: in the row-major whole tensor, in elements.
        start: index of its first element in the whole tensor.
    """

    holding: Holding
    row: int
    column: int
    rows: int
    columns: int
    row_stride: int
    column_stride: int
    start: int

    def drawn(self, seed: int) -> Sequence[int]:
        """The weight's columns that are read of this part."""
        if self.holding.level == "served":
            return range(self.column, self.column + self.columns)
        drawn = spot_columns(seed, self.holding.holder, self.holding.lengths[-1])
        return [self.column + column for column in drawn]

    def placed(
        self, out: int, values: torch.Tensor, chunk: Sequence[int], drawn: Sequence[int]
    ) -> Iterator[Placed]:
        """Where this part stands in values that were read.

        Args:
            values: shape (len(chunk), rows of the weight).
            chunk: columns of the weight that they are of, ascending.
            drawn: those that are read of this part.
        """
        if isinstance(drawn, range):
            # All that lie between two columns of such a part are read, too.
            first = max(chunk[0], drawn.start)
            runs = [(first, min(chunk[-1] + 1, drawn.stop) - first)]
        else:
            runs = [(column, 1) for column in drawn if chunk[0] <= column <= chunk[-1]]
        step, across = values.stride()
        for column, length in runs:
            if length <= 0:
                continue
            at = bisect_left(chunk, column) * step + self.row * across
            yield Placed(
                out=out,
                address=values.data_ptr() + at * values.element_size(),
                itemsize=values.element_size(),
                lengths=(self.rows, length),
                stride=(across, step),
                whole_stride=(self.row_stride, self.column_stride),
                start=self.start + (column - self.column) * self.column_stride,
            )


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One layer with a packed weight.

    Attributes:
        layer: vLLM's; its ``cpu_linear`` is another one after every update.
        rows, width: of the weight.
        dtype: of the weight.
        parts: of checkpoint tensors, in it.
    """

    layer: Any
    rows: int
    width: int
    dtype: torch.dtype
    parts: tuple[Part, ...]


_Shared = tuple[PackedLayer, list[tuple[int, Part]]]
"""One of the layers that share a packed weight, and the parts of all of them, by number."""


class Probe:
    """Reads packed layers.

    Args:
        layers: all of them.

    Attributes:
        holdings: of all their parts, layer by layer.
    """

    def __init__(self, layers: Iterable[PackedLayer]) -> None:
        self._layers = tuple(layers)
        self.holdings = tuple(part.holding for layer in self._layers for part in layer.parts)

    def digest(
        self, seed: int, seeds: NDArray[np.uint64]
    ) -> tuple[NDArray[np.uint64], dict[int, str]]:
        """What the layers hold now.

        Args:
            seed: of the update.
            seeds: of each tensor of the manifest, shape (n,).

        Returns:
            A digest per holding, shape (k, 2); and why, by number of the holding, one could not be
            taken.
        """
        found = np.zeros((len(self.holdings), 2), np.uint64)
        unread: dict[int, str] = {}
        for layer, parts in self._sharing().values():
            wanted = {number: part.drawn(seed) for number, part in parts}
            columns = sorted(set().union(*wanted.values()))
            numbers = list(wanted)
            keys = seeds[[part.holding.index for _, part in parts]]
            try:
                for chunk, values in read(
                    layer.layer, columns, (layer.rows, layer.width), layer.dtype
                ):
                    finite = values.isfinite()
                    if not finite.all():
                        rows = finite.all(dim=0)
                        for number, part in parts:
                            if not rows[part.row : part.row + part.rows].all():
                                unread[number] = NOT_FINITE
                    regions = [
                        placed
                        for out, (number, part) in enumerate(parts)
                        for placed in part.placed(out, values, chunk, wanted[number])
                    ]
                    found[numbers] += RegionTable(regions, len(parts)).digest(keys)
            except (RuntimeError, ValueError) as error:
                # The layer does not compute from a packed weight of this shape any more.
                unread |= dict.fromkeys(numbers, f"cannot be read back: {error}"[:500])
        return found, unread

    def _sharing(self) -> dict[tuple[int, int], _Shared]:
        """Packed weights, each with all that it holds: layers may share one."""
        sharing: dict[tuple[int, int], _Shared] = {}
        numbers = itertools.count()
        for layer in self._layers:
            key = id(layer.layer.cpu_linear), id(layer.layer.weight)
            _, parts = sharing.setdefault(key, (layer, []))
            parts += [(next(numbers), part) for part in layer.parts]
        return sharing


def read(
    layer: Any, columns: Sequence[int], shape: tuple[int, int], dtype: torch.dtype
) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
    """Columns of a layer's packed weight, some at a time.

    Args:
        layer: vLLM's.
        columns: which, ascending.
        shape, dtype: of the weight.

    Yields:
        Columns, and what they hold: shape (columns, rows of the weight), zeros and denormals as
        +0.0.

    Raises:
        ValueError: the layer computes from a weight of another shape.
        RuntimeError: so its kernel says.
    """
    rows, width = shape
    tiny = torch.finfo(dtype).tiny
    at_once = max(1, CHUNK_BYTES // ((rows + width) * dtype.itemsize))
    for first in range(0, len(columns), at_once):
        chunk = columns[first : first + at_once]
        identity = torch.zeros((len(chunk), width), dtype=dtype)
        identity[torch.arange(len(chunk)), torch.tensor(chunk)] = 1
        with torch.no_grad():
            values = layer.cpu_linear(identity, layer.weight, None)
            if values.shape != (len(chunk), rows) or values.dtype != dtype:
                raise ValueError(f"a product gave {values.dtype} {list(values.shape)}")
            values.masked_fill_(values.abs() < tiny, 0.0)
        yield chunk, values


@functools.cache
def inexact(method: type[Any], shape: tuple[int, int], dtype: torch.dtype) -> str | None:
    """Try on known values whether packed weights of a shape can be read back on this machine.

    Args:
        method: vLLM's class that packs them, of layers that are not quantized.

    Returns:
        Why not; None if they can.
    """
    rows, width = min(shape[0], TRIED_ROWS), shape[1]
    info = torch.finfo(dtype)
    drawn = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, width, generator=drawn, dtype=torch.float32)
    weight[::2] *= info.max / 8
    weight = weight.to(dtype)
    weight[weight.abs() < info.tiny] = 0.0
    sample: Any = torch.nn.Module()
    sample.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    columns = range(0, width, -(-width // TRIED_COLUMNS))
    try:
        method().process_weights_after_loading(sample)
        exact = all(
            torch.equal(values.T, weight[:, list(chunk)])
            for chunk, values in read(sample, columns, (rows, width), dtype)
        )
    except Exception as error:
        return f"this machine's kernel cannot be tried: {type(error).__name__}: {error}"
    if exact:
        return None
    return f"this machine's kernel for {rows} x {width} {dtype} does not give back what it packed"
