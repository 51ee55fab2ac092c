"""Where a worker's model holds checkpoint tensors, and how far that can be read back. Pure data.

A worker says once per layout where it holds each part of each tensor (`Holding`), and after every
update what it found there: one digest per holding. The sender knows what each must be.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from weightsync.box import Box

__all__ = ["SPOT_COLUMNS", "HeldLevel", "Holding", "spot_columns"]

HeldLevel = Literal["served", "spot"]
"""``served``: all of a holding is read. ``spot``: some of its columns, drawn anew for every update.
"""

SPOT_COLUMNS = 4
"""Columns that are drawn of each holding that is probed at random."""


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
