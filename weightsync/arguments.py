"""What a caller of the sender may ask for."""

from __future__ import annotations

from weightsync.canary import CanaryMaker
from weightsync.errors import UpdateRefused
from weightsync.receipt import ProofLevel
from weightsync.transport.ring import STREAM_CHUNK_LIMIT

__all__ = ["check_arguments", "check_pause", "label_of"]

PROOFS: tuple[ProofLevel, ...] = ("served", "received", "canary", "off")
STAGED_CHUNK_LIMIT = 1 << 30


def check_arguments(
    proof: str,
    canary: CanaryMaker | None,
    mode: str,
    rollback: str,
    bucket_bytes: int | None,
    deadline: float,
) -> None:
    """Arguments of a `weightsync.WeightSender`.

    Raises:
        UpdateRefused: they make no sense, alone or together.
    """
    if proof not in PROOFS:
        raise UpdateRefused(f"proof is {' or '.join(map(repr, PROOFS))}, got {proof!r}")
    if proof == "canary" and canary is None:
        raise UpdateRefused(
            "proof='canary' was asked for without one",
            remedy="pass canary=, a callable that returns a weightsync.Canary",
        )
    if mode not in ("staged", "streamed"):
        raise UpdateRefused(f"mode is 'staged' or 'streamed', got {mode!r}")
    if rollback not in ("none", "retain"):
        raise UpdateRefused(f"rollback is 'none' or 'retain', got {rollback!r}")
    if mode == "streamed" and rollback == "retain":
        raise UpdateRefused(
            "a streamed update is nowhere kept, so that there is nothing to go back to",
            remedy="use mode='staged' with rollback='retain'",
        )
    most = STREAM_CHUNK_LIMIT if mode == "streamed" else STAGED_CHUNK_LIMIT
    if bucket_bytes is not None and not (
        isinstance(bucket_bytes, int) and 64 <= bucket_bytes <= most and bucket_bytes % 64 == 0
    ):
        raise UpdateRefused(
            f"bucket_bytes of a {mode} update is a multiple of 64 up to {most}, got {bucket_bytes}"
        )
    if not isinstance(deadline, int | float) or not deadline > 0:
        raise UpdateRefused(f"a deadline is a positive number of seconds, got {deadline}")


def label_of(version: int | str) -> str:
    """A version as engines report it.

    Raises:
        UpdateRefused: no engine could.
    """
    label = str(version)
    try:
        label.encode()
    except UnicodeEncodeError as error:
        raise UpdateRefused(f"the version {label!r} is no Unicode text") from error
    if not label or len(label) > 256:
        raise UpdateRefused(f"a version has 1 to 256 characters, got {len(label)}")
    return label


def check_pause(pause: str) -> None:
    """
    Raises:
        UpdateRefused: there is no such pause.
    """
    if pause not in ("keep", "wait", "abort"):
        raise UpdateRefused(f"pause is 'keep', 'wait' or 'abort', got {pause!r}")
