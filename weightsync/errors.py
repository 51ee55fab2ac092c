"""The errors of weightsync, as a tree that a caller can catch at the right height.

Every message says what was expected, what came, and what to do next; ``remedy`` holds the last
part alone.

    WeightSyncError
      ManifestError         names, dtypes or shapes that cannot describe a model
      SourceError           the trainer's side cannot give what it promised
      ConnectError          an engine that cannot be reached, or that cannot take part
      DeviceUnavailable     a GPU, or the software that drives it, is missing
      ReceiptLogError       a file that receipts are kept in cannot be used
        ReceiptNotWritten     an update is committed, but its receipt is not in the log
      PlanRefused           the two sides' tensors do not fit; nothing has moved
      TransportError        bytes or messages did not arrive
        DeadlineExceeded      somebody was awaited for too long
        PeerLost              the other end is gone
        ProtocolError         the other end sent what nobody may send
        StreamAborted         the sender gave an update up while its bytes were under way
        MemoryShort           the staging arena does not fit into this machine
      UpdateError           an update that did not end in a receipt
        UpdateRefused         asked for in a state, or with arguments, that do not allow it
        ProofFailed           a digest differs; the update was aborted, old weights intact
          ServedMismatch        a model holds other bytes than it was handed
        CanaryFailed          trainer and engine do not agree on a prompt
        UpdateAborted         given up before anything was applied; old weights intact
        EnginePoisoned        an engine may hold a mixture and refuses to serve
        RolledBack            an engine failed while applying, and serves the version before again
        NotResumed            all is applied, but the engine could not be told so
        Superseded            a newer sender has taken over
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from weightsync.receipt import Receipt

__all__ = [
    "CanaryFailed",
    "ConnectError",
    "DeadlineExceeded",
    "DeviceUnavailable",
    "DigestMismatch",
    "EnginePoisoned",
    "ManifestError",
    "MemoryShort",
    "NotResumed",
    "PeerLost",
    "PlanRefused",
    "Problem",
    "ProofFailed",
    "ProtocolError",
    "ReceiptLogError",
    "ReceiptNotWritten",
    "RolledBack",
    "ServedMismatch",
    "SourceError",
    "StreamAborted",
    "Superseded",
    "TransportError",
    "UpdateAborted",
    "UpdateError",
    "UpdateRefused",
    "WeightSyncError",
    "reason_of",
]


class WeightSyncError(Exception):
    """Base of all errors that weightsync raises on purpose.

    Attributes:
        what: what happened, without what to do about it.
        remedy: what the caller can do about it, or None.
    """

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message if remedy is None else f"{message}\nWhat to do: {remedy}")
        self.what = message
        self.remedy = remedy


class ManifestError(WeightSyncError):
    """Names, dtypes or shapes that cannot describe a model (duplicates, unknown dtypes, ...)."""


class SourceError(WeightSyncError):
    """A source cannot give the tensors that it promised."""


class ConnectError(WeightSyncError):
    """An engine cannot be reached or lacks something that an update needs."""


class DeviceUnavailable(WeightSyncError):
    """A GPU was asked for, and it, its driver, cupy or the run-time compiler is not there."""


class ReceiptLogError(WeightSyncError):
    """A file that receipts are kept in is of another kind, or cannot be read or written to."""


class ReceiptNotWritten(ReceiptLogError):
    """All went well but for the record of it: the update is committed and the engines serve it, or
    the look has found no difference.

    Attributes:
        receipt: that is not in the log.
    """

    def __init__(self, message: str, *, remedy: str, receipt: Receipt) -> None:
        super().__init__(message, remedy=remedy)
        self.receipt = receipt


ProblemKind = Literal[
    "unknown",
    "missing",
    "shape",
    "dtype",
    "duplicate",
    "loader",
    "engine",
    "changed",
    "moved",
    "stale",
]
"""The last three are of what a model holds after an update: something that no tensor goes to has
other bytes, lies elsewhere than before, or was not derived anew from what came."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One tensor that keeps two sides from fitting.

    ``name`` is the checkpoint tensor's name where there is one, else the engine parameter's.
    """

    kind: ProblemKind
    name: str
    detail: str
    workers: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" (on {', '.join(self.workers)})" if self.workers else ""
        return f"{self.kind}: {self.name}: {self.detail}{where}"


class PlanRefused(WeightSyncError):
    """Source and engine do not fit: found out before the first byte moved.

    Attributes:
        problems: every problem, not only those that the message shows.
    """

    SHOWN = 10

    def __init__(self, engine: str, problems: Sequence[Problem], *, remedy: str) -> None:
        shown = "\n".join(f"  {problem}" for problem in problems[: self.SHOWN])
        more = len(problems) - self.SHOWN
        tail = f"\n  ... and {more} more" if more > 0 else ""
        super().__init__(
            f"{engine} cannot take these weights; nothing has moved, it serves what it served "
            f"before. {len(problems)} problem(s):\n{shown}{tail}",
            remedy=remedy,
        )
        self.engine = engine
        self.problems = tuple(problems)


class TransportError(WeightSyncError):
    """Bytes or messages did not arrive."""


class DeadlineExceeded(TransportError):
    """Somebody was awaited for longer than allowed.

    Attributes:
        awaited: who or what was awaited.
        seconds: the deadline that passed.
    """

    def __init__(self, awaited: str, seconds: float, *, remedy: str | None = None) -> None:
        super().__init__(f"waited {seconds:.1f} s for {awaited}", remedy=remedy)
        self.awaited = awaited
        self.seconds = seconds


class PeerLost(TransportError):
    """The other end of a connection is gone."""


class ProtocolError(TransportError):
    """The other end sent something malformed, out of bounds or out of turn."""


class StreamAborted(TransportError):
    """The sender gave an update up while its bytes were under way: what arrived is incomplete."""


class MemoryShort(TransportError):
    """The arena does not fit into memory. Nothing was reserved.

    Attributes:
        needed: bytes that the arena takes.
        available: bytes that this process may still take.
    """

    def __init__(self, needed: int, available: int, limit: str) -> None:
        super().__init__(
            f"staging needs {needed / 1e6:.0f} MB of memory, {available / 1e6:.0f} MB are left "
            f"({limit})",
            remedy="free memory on this host, or raise its limit; nothing has been reserved",
        )
        self.needed = needed
        self.available = available


class UpdateError(WeightSyncError):
    """An update that did not end in a receipt.

    Attributes:
        succeeded: of several engines, what came of those that went well (their
            `weightsync.receipt.EngineReceipt`, where they were committed).
    """

    succeeded: tuple[object, ...] = ()


class UpdateRefused(UpdateError):
    """An update was asked for in a state, or with arguments, that do not allow it."""


@dataclass(frozen=True, slots=True)
class DigestMismatch:
    """One tensor whose bytes on one worker are not the trainer's.

    Attributes:
        where: in the worker's model, and which part of the tensor; "" where what it was handed
            differs.
    """

    tensor: str
    worker: str
    expected: str
    found: str
    where: str = ""

    def __str__(self) -> str:
        place = f" in {self.where}" if self.where else ""
        return (
            f"{self.tensor!r} on {self.worker}{place}: digest {self.found}, expected "
            f"{self.expected}"
        )


class ProofFailed(UpdateError):
    """At least one worker holds other bytes than the trainer.

    Attributes:
        mismatches: tensor, worker, and both digests.
    """

    def __init__(self, mismatches: Sequence[DigestMismatch]) -> None:
        super().__init__(
            f"{len(mismatches)} tensor(s) arrived with other bytes than were sent, first "
            f"{mismatches[0]}. "
            "The update was aborted; the engines serve what they served before.",
            remedy="do not write to the weights while stage() runs; if nobody does, suspect this "
            "host's memory and sync again",
        )
        self.mismatches = tuple(mismatches)


class ServedMismatch(ProofFailed):
    """A model does not hold what it should: found after an update was applied, which poisons, or by
    `weightsync.prove`, which changes nothing.

    Attributes:
        mismatches: parts of tensors whose bytes differ.
        faults: what else a worker found wrong.
    """

    SHOWN = 10

    REMEDY = (
        "what was handed to the engine was proven before, so look at how the engine loads what is "
        "named above; until that is mended, restart it with these weights"
    )

    def __init__(
        self,
        mismatches: Sequence[DigestMismatch],
        faults: Sequence[Problem],
        *,
        remedy: str = REMEDY,
    ) -> None:
        found = [*map(str, mismatches), *map(str, faults)]
        shown = "".join(f"\n  {one}" for one in found[: self.SHOWN])
        more = len(found) - self.SHOWN
        tail = f"\n  ... and {more} more" if more > 0 else ""
        UpdateError.__init__(
            self,
            f"the model does not hold the trainer's weights: {len(found)} fault(s) of "
            f"{len({m.tensor for m in mismatches} | {f.name for f in faults})} tensor(s):"
            f"{shown}{tail}",
            remedy=remedy,
        )
        self.mismatches = tuple(mismatches)
        self.faults = tuple(faults)


class CanaryFailed(UpdateError):
    """Trainer and engine do not agree on a prompt."""


class UpdateAborted(UpdateError):
    """The update was given up before anything was applied. Old weights are intact."""


class EnginePoisoned(UpdateError):
    """An engine may hold a mixture of versions. It refuses to serve until a full update cures
    it."""


class RolledBack(UpdateError):
    """An engine failed while it applied an update, and all its workers were restored together: it
    serves the version before, proven, and requests are admitted."""


class NotResumed(UpdateError):
    """The update is applied and proven on every worker, but the engine could not be told so.

    It is still paused, or still reports its old version. The next sync, or a resume, ends that.
    """


class Superseded(UpdateError):
    """A newer sender has taken this engine over; this sender can do nothing more.

    Attributes:
        engine: that was taken over, or None where it is known of all.
    """

    def __init__(
        self, message: str, *, remedy: str | None = None, engine: str | None = None
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.engine = engine


def reason_of(error: BaseException) -> str:
    """What an error says, and its class where it says nothing, as an interrupt does."""
    return str(error) or type(error).__name__
