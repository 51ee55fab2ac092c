"""What was digested against what it should be."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weightsync.errors import DigestMismatch
from weightsync.manifest import Manifest

__all__ = ["mismatches"]


def mismatches(
    manifest: Manifest,
    worker: str,
    expected: NDArray[np.uint64],
    found: NDArray[np.uint64],
) -> list[DigestMismatch]:
    """The tensors whose digests on one worker are not what they should be, in order.

    Args:
        expected, found: one digest per tensor, shape (n, 2).
    """
    return [
        DigestMismatch(
            tensor=manifest.tensors[index].name,
            worker=worker,
            expected=expected[index].tobytes().hex(),
            found=found[index].tobytes().hex(),
        )
        for index in np.flatnonzero((found != expected).any(axis=1)).tolist()
    ]
