"""The record of one update: what was delivered, what was proven of it, and how long it took.

Receipts form a chain: each carries the hash of the one before, so that a log of them cannot lose or
swap an entry unnoticed.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

__all__ = [
    "EngineReceipt",
    "LevelShare",
    "ProofLevel",
    "Receipt",
    "WorkerProof",
    "WorkerReceipt",
    "chain",
]

ProofLevel = Literal["served", "spot", "received", "canary", "off"]
"""What a receipt can say of a tensor: what the model holds; a packed layout probed at random
columns; what was handed to the engine's loader; trainer and engine agree on a prompt; nothing."""


class LevelShare(msgspec.Struct, frozen=True):
    """How much of the model was proven at one level."""

    tensors: int
    nbytes: int


class WorkerProof(msgspec.Struct, frozen=True):
    """What one worker's model was found to hold. Tensors that are in neither list are proven as
    ``served``.

    Attributes:
        boxes: places that were looked at.
        nbytes: of these places; of those that are probed at random columns, all of it.
        digest: over the update's seed and all their digests.
        seconds: that looking took.
        spot: tensors that were probed at random columns.
        unproven: ``{tensor: why it cannot be read back}``; proven is what the loader was handed.
    """

    boxes: int
    nbytes: int
    digest: str
    seconds: float
    spot: tuple[str, ...]
    unproven: dict[str, str]


class WorkerReceipt(msgspec.Struct, frozen=True):
    """What one worker proved.

    Attributes:
        name: engine and rank.
        device: torch's name of its device.
        verify_seconds: that taking bytes in and digesting them took, until the last had come; while
            the engine was generating, unless the update was streamed.
        apply_seconds: that applying took on this worker.
        load_seconds: thereof in the engine's own loader.
        proof: what its model was found to hold; None where that was not asked for.
    """

    name: str
    device: str
    verify_seconds: float
    apply_seconds: float
    load_seconds: float
    proof: WorkerProof | None = None


class EngineReceipt(msgspec.Struct, frozen=True):
    """How one engine took the update.

    Attributes:
        name: as the caller knows it.
        engine: name and version of the software.
        pause: how requests in flight were treated: "keep", "wait" or "abort"; "none" of a look.
        paused_seconds: from asking for the pause until the engine had resumed.
        seconds: by step: pause, apply, finish, reset, version, resume, and canary, which comes
            after the pause; of a look, look and canary.
        plan_hash: of what every worker takes of which tensor, and where it holds it.
        levels: by level, the number of tensors and bytes that all its workers have proven at it.
        canary: by how much its log-probabilities of the canary differ from the trainer's at most;
            None where it was not asked.
    """

    name: str
    engine: str
    pause: str
    paused_seconds: float
    seconds: dict[str, float]
    workers: tuple[WorkerReceipt, ...]
    plan_hash: str
    levels: dict[ProofLevel, LevelShare]
    canary: float | None = None


class Receipt(msgspec.Struct, frozen=True):
    """Proof that every worker of every engine serves one version.

    Attributes:
        version: that the engines report from now on; of a look, what they report, "" where they
            report none, and all of them, comma-separated, where they differ.
        update_id: of this update.
        proven: the weakest level among all tensors.
        levels: by level, the number of tensors and bytes proven at it, on all engines; together
            they are all that was sent.
        mode: "staged" or "streamed"; or "look", where nothing was moved (`weightsync.prove`).
        only: what the update was declared to be of; empty for the whole model.
        nbytes: of all checkpoint tensors that were sent.
        manifest_hash: of names, dtypes and shapes, in order.
        seed: of the update's digests, 16 hexadecimal digits.
        digest: over all tensors' digests and this update's seed; "" where none were taken.
        casts: declared dtype changes by tensor.
        aliases: tensors that were not sent since they are the same as another, in the trainer's
            memory, or byte for byte where they are one in the engine's.
        untouched: by engine, persistent buffers that no tensor goes to: they are what the engine
            made them.
        seconds: by phase: plan, fill, verify, expect (what models must hold), stage (all of
            staging), commit (all of committing); of a look, read (the source).
        versions: of weightsync and torch in the trainer.
        at: when it was written, UTC, ISO 8601.
        previous: hash of the sender's receipt before this one, "" for its first.
        hash: of everything above.
    """

    version: str
    update_id: str
    proven: ProofLevel
    levels: dict[ProofLevel, LevelShare]
    mode: str
    only: tuple[str, ...]
    nbytes: int
    manifest_hash: str
    seed: str
    digest: str
    casts: dict[str, str]
    aliases: dict[str, str]
    untouched: dict[str, tuple[str, ...]]
    engines: tuple[EngineReceipt, ...]
    seconds: dict[str, float]
    versions: dict[str, str]
    at: str
    previous: str
    hash: str = ""

    def to_json(self) -> str:
        """One JSON object."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Receipt:
        """The inverse of `to_json`; does not check the hash, `intact` does."""
        return msgspec.json.decode(text, type=cls)

    @property
    def intact(self) -> bool:
        """Whether the hash is that of the content."""
        return self.hash == _hash(self)


def chain(receipt: Receipt) -> Receipt:
    """The receipt with its hash filled in."""
    return msgspec.structs.replace(receipt, hash=_hash(receipt))


def _hash(receipt: Receipt) -> str:
    content = msgspec.structs.replace(receipt, hash="")
    return hashlib.blake2b(msgspec.json.encode(content, order="sorted"), digest_size=32).hexdigest()
