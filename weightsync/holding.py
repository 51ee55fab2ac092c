"""Where a worker's model holds checkpoint tensors, and how far that can be read back. Pure data.

A worker says once per layout where it holds each part of each tensor (`Holding`), and after every
update what it found there: one digest per holding. The sender knows what each must be.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from weightsync.box import Box

__all__ = ["SPOT_COLUMNS", "HeldLevel", "Holding", "canonical", "not_finite", "spot_columns"]

HeldLevel = Literal["served", "spot"]
"""``served``: all of a holding is read. ``spot``: some of its columns, drawn anew for every update.
"""

SPOT_COLUMNS = 4
"""Columns that are drawn of each holding that is probed at random."""

_EXPONENT: Final[dict[str, tuple[type[Any], int]]] = {
    "float64": (np.uint64, 0x7FF0_0000_0000_0000),
    "float32": (np.uint32, 0x7F80_0000),
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
}
"""Bits of the exponent by dtype, and the unsigned integers of its size. IEEE 754: all clear in
zeros and denormal numbers, all set in infinities and NaNs."""


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """One place in a worker's model that holds a part of a checkpoint tensor.

    Attributes:
        index: of the tensor in the manifest.
        holder: name of the place, for messages and for drawing columns: what has one name is
            probed at the same columns.
        offsets, lengths: the box of the tensor that lies there.
        level: how much of it is read.
        by_value: read back through arithmetic, which does not give -0.0 and denormal numbers: both
            count as 0.0.
    """

    index: int
    holder: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    level: HeldLevel = "served"
    by_value: bool = False

    @property
    def box(self) -> Box:
        """
        Raises:
            ManifestError: it is none.
        """
        return Box(self.offsets, self.lengths)


def spot_columns(seed: int, holder: str, width: int) -> tuple[int, ...]:
    """Which columns of a holder are looked at: the same on both sides, and not to be known before
    the update's seed is.

    Args:
        seed: of the update.
        holder: see `Holding`.
        width: number of columns that there are, the length of the last dimension.

    Returns:
        At most `SPOT_COLUMNS` of ``range(width)``, ascending.
    """
    if width <= SPOT_COLUMNS:
        return tuple(range(width))
    drawn: set[int] = set()
    number = 0
    while len(drawn) < SPOT_COLUMNS:
        text = f"{seed}/{holder}/{number}".encode()
        drawn.add(int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little") % width)
        number += 1
    return tuple(sorted(drawn))


def canonical(content: NDArray[np.uint8], dtype: str) -> NDArray[np.uint8]:
    """Values as arithmetic gives them back: -0.0 and denormal numbers count as 0.0.

    Args:
        content: bytes of elements of that dtype.
        dtype: a floating-point one of 16, 32 or 64 bits; what is another one is left alone.

    Returns:
        As many bytes.
    """
    if dtype not in _EXPONENT:
        return content
    kind, mask = _EXPONENT[dtype]
    bits: NDArray[Any] = content.view(kind).copy()
    bits[(bits & kind(mask)) == 0] = 0
    return bits.view(np.uint8)


def not_finite(content: NDArray[np.uint8], dtype: str) -> bool:
    """Whether any element is infinite or no number. Arguments as of `canonical`."""
    if dtype not in _EXPONENT:
        return False
    kind, mask = _EXPONENT[dtype]
    return bool(((content.view(kind) & kind(mask)) == kind(mask)).any())
