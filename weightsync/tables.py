"""Tables of spans on their way to the native code: columns in, one C-contiguous array out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["U64Array", "U64Like", "table_columns", "table_rows"]

U64Array: TypeAlias = NDArray[np.uint64]
U64Like: TypeAlias = Sequence[int] | NDArray[Any]


def table_columns(**named: U64Like | None) -> dict[str, U64Array]:
    """The named columns as uint64 arrays of one length; a missing `out_index` counts up."""
    columns = {name: _column(name, values) for name, values in named.items() if values is not None}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns of different lengths: {lengths}")
    if "out_index" in named and named["out_index"] is None:
        columns["out_index"] = np.arange(next(iter(lengths.values())), dtype=np.uint64)
    return columns


def _column(name: str, values: U64Like) -> U64Array:
    # Left to itself numpy may make floats of a list with integers above 2**63; asked for uint64
    # outright, it refuses what does not fit.
    if not isinstance(values, np.ndarray):
        try:
            values = np.array(values, dtype=np.uint64)
        except OverflowError as error:
            raise ValueError(f"{name}: not an unsigned 64-bit integer") from error
    if values.ndim != 1:
        raise ValueError(f"{name} must have one dimension, not {values.ndim}")
    if values.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold integers, not {values.dtype}")
    if values.dtype.kind == "i" and values.size and int(values.min()) < 0:
        raise ValueError(f"{name}: negative value {int(values.min())}")
    return values.astype(np.uint64, copy=False)


def table_rows(columns: dict[str, U64Array]) -> U64Array:
    """The columns in the order given, as the C-contiguous table that the native code takes."""
    return np.stack(list(columns.values()), axis=1)
