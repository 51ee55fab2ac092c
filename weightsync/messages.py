"""The messages between a sender and its workers: a closed set of typed structs. Pure data.

Answers carry what they belong to (an update's id, a layout's hash), so that a late one is told from
the one that is awaited.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from weightsync.errors import ProblemKind
from weightsync.holding import Holding
from weightsync.manifest import TensorSpec

__all__ = [
    "PROTOCOL",
    "Abort",
    "Ack",
    "Admit",
    "AnyMessage",
    "Applied",
    "Arm",
    "Begin",
    "Commit",
    "Described",
    "Digests",
    "Follow",
    "Found",
    "Held",
    "Hello",
    "Inspect",
    "Joined",
    "Layout",
    "Message",
    "Mode",
    "Partial",
    "Poison",
    "Prove",
    "Refused",
    "Resumed",
    "Welcome",
    "WireProblem",
    "WorkerStatus",
]

PROTOCOL: Final = 3

Mode = Literal["staged", "streamed"]
"""``staged``: nothing is touched before everything is there and proven. ``streamed``: bytes are
taken in as they come, and a failure in between poisons."""


Prove = Literal["served", "received", "nothing"]
"""What workers digest: what their models hold afterwards as well, what they are handed, nothing."""


class WorkerStatus(msgspec.Struct, frozen=True):
    """What a worker knows about itself; it outlives senders.

    Attributes:
        phase: of the update in progress, or of the last one (`weightsync.update.Phase`).
        version: of the weights served, None before the first update.
        epoch: the highest epoch that any sender has held.
        poisoned: why the worker may hold a mixture, else None.
        holds_pause: a sender paused this engine and has not said that it resumed it.
        session_open: the engine's own update session was started and not finished.
    """

    phase: str
    version: str | None
    epoch: int
    poisoned: str | None
    holds_pause: bool
    session_open: bool


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages."""


class Hello(Message, frozen=True, tag="hello"):
    """Worker to sender, first of all.

    Attributes:
        modes: in which the worker's target takes updates.
    """

    protocol: int
    session: str
    rank: int
    world_size: int
    pid: int
    device: str
    engine: str
    modes: tuple[Mode, ...]
    status: WorkerStatus


class Welcome(Message, frozen=True, tag="welcome"):
    """Sender to worker: you are mine from now on, under this epoch.

    Attributes:
        epoch: None for somebody who only looks: whoever holds the worker keeps it.
    """

    epoch: int | None


class Joined(Message, frozen=True, tag="joined"):
    """Worker to sender: what an earlier sender left has been cleared; this is how things stand."""

    rank: int
    status: WorkerStatus


class Layout(Message, frozen=True, tag="layout"):
    """Sender to worker: what will come, and through what memory. With the descriptors of the arena
    (where the update is staged) and of the ring.

    Attributes:
        tensors: the manifest, in order.
        manifest_hash: checked by the worker against its own computation.
        whole: these are meant to be all tensors of the model, not a declared part.
        arena_bytes: size of the arena; 0 where there is none.
        ring_bytes: size of the ring's memory.
        reader: this worker's number among those that follow the ring.
    """

    tensors: tuple[TensorSpec, ...]
    manifest_hash: str
    whole: bool
    mode: Mode
    arena_bytes: int
    ring_bytes: int
    reader: int


class WireProblem(msgspec.Struct, frozen=True):
    """`weightsync.errors.Problem` on the wire."""

    kind: ProblemKind
    name: str
    detail: str


class Partial(msgspec.Struct, frozen=True, array_like=True):
    """One box of a checkpoint tensor that this worker takes, where it does not take it whole."""

    index: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


class Described(Message, frozen=True, tag="described"):
    """Worker to sender: whether the target takes the layout.

    Attributes:
        manifest_hash: of the layout that was looked at.
        problems: empty when it fits.
        partial: the boxes taken of tensors that are not taken whole.
        tied: ``(position, position of another)`` of tensors that are one memory in the engine.
        also: ``(position, name)``: what else a tensor's memory is called in the engine, where no
            tensor of that name comes.
        untouched: persistent buffers of the engine that no tensor goes to.
        seconds: that looking took.
        holdings: where the model holds these tensors, as far as it can be read back.
        unproven: ``(position, why)`` of tensors that cannot be read back, not or not all of them.
    """

    rank: int
    manifest_hash: str
    problems: tuple[WireProblem, ...]
    partial: tuple[Partial, ...]
    tied: tuple[tuple[int, int], ...]
    also: tuple[tuple[int, str], ...]
    untouched: tuple[str, ...]
    seconds: float
    holdings: tuple[Holding, ...] = ()
    unproven: tuple[tuple[int, str], ...] = ()


class Begin(Message, frozen=True, tag="begin"):
    """Sender to worker: an update of the announced layout.

    Attributes:
        seed: of this update's digests.
        base: where the update's bytes begin in the arena.
        ring_update: its number in the ring.
        filled: the bytes are in the arena already, from an earlier update; nothing will come
            through the ring.
        seconds: in which the sender means to be done.
        prove: what is to be digested.
    """

    update_id: str
    version: str
    seed: int
    base: int
    ring_update: int
    filled: bool
    seconds: float
    prove: Prove


class Follow(Message, frozen=True, tag="follow"):
    """Sender to worker: take in what the ring announces, to its end. Staged: digest this worker's
    share of it in the arena, or all of it where it was filled before. Streamed: copy it into place,
    and digest what was copied.

    Answered by `Digests`, or by `Ack` where the sender has given up.
    """

    update_id: str


class Found(msgspec.Struct, frozen=True):
    """What a model holds now.

    Attributes:
        digests: one per holding, as (k, 2) little-endian u64.
        unread: ``(holding, why)`` of those that could not be read this time.
        faults: what is wrong, as far as the worker itself can tell.
        seconds: that looking took.
    """

    digests: bytes
    unread: tuple[tuple[int, str], ...]
    faults: tuple[WireProblem, ...]
    seconds: float


class Digests(Message, frozen=True, tag="digests"):
    """Worker to sender: one digest per tensor, as (n, 2) little-endian u64, of those of its bytes
    that this worker looked at. Each covers these bytes and their number.

    Attributes:
        found: of a streamed update, what the model holds afterwards, where that was asked for.
    """

    update_id: str
    rank: int
    digests: bytes
    seconds: float
    found: Found | None = None


class Arm(Message, frozen=True, tag="arm"):
    """Sender to worker: all have voted, the next apply with this id is allowed.

    Attributes:
        holds_pause: the sender is about to pause the engine; whoever comes after it must resume it.
    """

    update_id: str
    holds_pause: bool


class Applied(Message, frozen=True, tag="applied"):
    """Worker to sender: how applying went.

    Attributes:
        error: None, or what went wrong.
        seconds: that applying took, all in all.
        load_seconds: thereof in the engine's own loader.
        found: what the model holds afterwards, where that was asked for.
    """

    update_id: str
    rank: int
    error: str | None
    seconds: float
    load_seconds: float
    found: Found | None = None


class Inspect(Message, frozen=True, tag="inspect"):
    """Somebody who only looks, to worker: what does the model hold of these tensors? The engine's
    thread answers, by `Described` and, if they fit, by `Held`.

    Attributes:
        look_id: of this question.
        tensors: the manifest, in order.
        manifest_hash: checked by the worker against its own computation.
        whole: these are meant to be all tensors of the model.
        seed: of the digests.
    """

    look_id: str
    tensors: tuple[TensorSpec, ...]
    manifest_hash: str
    whole: bool
    seed: int


class Held(Message, frozen=True, tag="held"):
    """Worker to somebody who only looks: what its model holds.

    Attributes:
        status: right after it was read.
    """

    update_id: str
    rank: int
    found: Found
    status: WorkerStatus


class Admit(Message, frozen=True, tag="admit"):
    """Sender to worker: every worker applied it, and the engine is about to be asked what it thinks
    of a prompt: let requests in. The version does not count yet."""

    update_id: str


class Commit(Message, frozen=True, tag="commit"):
    """Sender to worker: every worker applied it; this version is served from now on."""

    update_id: str


class Resumed(Message, frozen=True, tag="resumed"):
    """Sender to worker: the engine is no longer paused by this sender."""

    update_id: str


class Abort(Message, frozen=True, tag="abort"):
    """Sender to worker: nothing will be applied; the arena means nothing."""

    update_id: str
    reason: str


class Poison(Message, frozen=True, tag="poison"):
    """Sender to worker: another worker failed to apply; serve nothing until cured."""

    update_id: str
    reason: str


class Ack(Message, frozen=True, tag="ack"):
    """Worker to sender: done. ``of`` is the tag of the message that is answered."""

    of: str
    update_id: str
    rank: int


class Refused(Message, frozen=True, tag="refused"):
    """Worker to sender: this can't be done, and why. The worker's state has not changed."""

    of: str
    update_id: str
    rank: int
    reason: str


AnyMessage = (
    Hello
    | Welcome
    | Joined
    | Layout
    | Described
    | Begin
    | Follow
    | Inspect
    | Held
    | Digests
    | Arm
    | Applied
    | Admit
    | Commit
    | Resumed
    | Abort
    | Poison
    | Ack
    | Refused
)
