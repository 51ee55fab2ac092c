"""Writing the record of an update, or of a look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import numpy as np
from numpy.typing import NDArray

from weightsync.commit import Flipped
from weightsync.manifest import Manifest
from weightsync.proof import digest_of_digests
from weightsync.receipt import Receipt
from weightsync.served import LEVELS, shares
from weightsync.sources.base import Source

__all__ = ["write_receipt"]


def write_receipt(
    source: Source,
    manifest: Manifest,
    flipped: Sequence[Flipped],
    *,
    label: str,
    update_id: str,
    mode: str,
    only: Sequence[str],
    seed: int,
    digests: NDArray[np.uint64] | None,
    untouched: Mapping[str, tuple[str, ...]],
    seconds: Mapping[str, float],
) -> Receipt:
    """A receipt that is not yet part of a chain (`weightsync.receipt.chain`).

    Args:
        flipped: what came of each engine.
        label: the version.
        digests: of all tensors, shape (n, 2); None where nobody took them.
    """
    levels = np.max([one.levels for one in flipped], axis=0)
    taken = "" if digests is None else digest_of_digests(seed, digests.astype("<u8").tobytes())
    return Receipt(
        version=label,
        update_id=update_id,
        proven=LEVELS[int(levels.max(initial=0))],
        levels=shares(manifest, levels),
        mode=mode,
        only=tuple(only),
        nbytes=manifest.total_bytes,
        manifest_hash=manifest.hash,
        seed=f"{seed:016x}",
        digest=taken,
        casts=dict(source.casts),
        aliases=dict(source.aliases),
        untouched=dict(untouched),
        engines=tuple(one.receipt for one in flipped),
        seconds=dict(seconds),
        versions=dict(_versions()),
        at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        previous="",
    )


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    found = []
    for name in ("weightsync", "torch"):
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            found.append((name, "unknown"))
    return tuple(found)
