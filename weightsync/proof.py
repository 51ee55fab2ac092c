"""What was digested against what it should be."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from weightsync.errors import DigestMismatch
from weightsync.manifest import Manifest

__all__ = ["digest_of_digests", "mismatches"]


def digest_of_digests(seed: int, digests: bytes) -> str:
    """One text for a receipt, over an update's seed and digests taken under it, as (n, 2)
    little-endian u64: 64 hexadecimal digits."""
    return hashlib.blake2b(seed.to_bytes(8, "little") + digests, digest_size=32).hexdigest()


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
