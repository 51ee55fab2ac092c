"""The sender's sockets: questions to all workers, with answers from all.

There is no thread here. Workers answer on threads of their own, so the sender may ask, call into
an engine, and only then read the answers; no answer ever has to wait for the sender to be
scheduled.
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from weightsync.deadline import Deadline
from weightsync.errors import (
    PeerLost,
    ProtocolError,
    Superseded,
    TransportError,
    UpdateRefused,
)
from weightsync.messages import (
    Ack,
    Applied,
    Described,
    Digests,
    Hello,
    Message,
    Refused,
    WorkerStatus,
)
from weightsync.wire import Channel

__all__ = ["Worker", "ask_all", "close_all", "gather", "last_words", "lost", "tell_all"]

M = TypeVar("M", bound=Message)


class Worker:
    """One connected worker of one engine.

    Attributes:
        name: for messages: engine and rank.
        rank: among the engine's workers.
        status: when this sender took it over, or as changed by this sender since.
    """

    def __init__(self, engine: str, hello: Hello, channel: Channel) -> None:
        self.name = f"{engine}, worker {hello.rank}"
        self.engine = engine
        self.rank = hello.rank
        self.device = hello.device
        self.description = hello.engine
        self.modes = hello.modes
        self.status: WorkerStatus = hello.status
        self.channel = channel
        channel.peer = self.name

    def is_now(self, **changes: Any) -> None:
        """Note what this worker has acknowledged."""
        self.status = msgspec.structs.replace(self.status, **changes)


def tell_all(
    workers: Sequence[Worker],
    message: Message | Sequence[Message],
    deadline: Deadline,
    *,
    fds: Sequence[int] = (),
) -> None:
    """Send one message to all workers, or one of several to each.

    Raises:
        DeadlineExceeded, PeerLost: a worker does not read, or is gone. Superseded: it said before
            that a newer sender has taken over.
    """
    messages = [message] * len(workers) if isinstance(message, Message) else message
    for worker, its in zip(workers, messages, strict=True):
        try:
            worker.channel.send(its, deadline, fds=fds)
        except PeerLost:
            lost([worker])  # it may have said why before it hung up
            raise


def ask_all(
    workers: Sequence[Worker],
    message: Message | Sequence[Message],
    answer: type[M],
    deadline: Deadline,
    *,
    belongs_to: str = "",
    fds: Sequence[int] = (),
) -> list[M]:
    """Send one message to all workers, or one of several to each, and gather one answer from
    each."""
    tell_all(workers, message, deadline, fds=fds)
    first = message if isinstance(message, Message) else message[0]
    of = str(first.__struct_config__.tag)
    return gather(workers, answer, deadline, belongs_to=belongs_to, of=of)


def gather(
    workers: Sequence[Worker],
    answer: type[M],
    deadline: Deadline,
    *,
    belongs_to: str = "",
    of: str = "",
) -> list[M]:
    """One answer of that type from each worker, in the workers' order.

    Late answers, to another update or layout than ``belongs_to`` or to another message than ``of``,
    are dropped.

    Raises:
        DeadlineExceeded: names the workers that are silent.
        PeerLost: names the worker that is gone.
        UpdateRefused: a worker refused; Superseded: because of a newer sender.
        ProtocolError: a worker answered something else.
    """
    answers: dict[int, M] = {}
    waiting = dict(enumerate(workers))
    poller = select.poll()
    for worker in workers:
        poller.register(worker.channel, select.POLLIN)
    while True:
        for number, worker in list(waiting.items()):
            message = worker.channel.poll()
            while message is not None and number in waiting:
                if _late(message, answer, belongs_to, of):
                    pass
                elif isinstance(message, Refused):
                    _refuse(worker, message)
                elif isinstance(message, answer):
                    answers[number] = message
                    del waiting[number]
                    poller.unregister(worker.channel)
                    break
                else:
                    raise ProtocolError(
                        f"{worker.name} answered {type(message).__name__}, "
                        f"expected {answer.__name__}"
                    )
                message = worker.channel.poll()
        if not waiting:
            return [answers[number] for number in range(len(workers))]
        names = ", ".join(worker.name for worker in waiting.values())
        poller.poll(deadline.remaining(f"{answer.__name__} from {names}") * 1000)


def _late(message: Message, answer: type[Message], belongs_to: str, of: str) -> bool:
    found = getattr(message, "update_id", None) or getattr(message, "manifest_hash", None)
    if found is not None and found != belongs_to:
        return True
    if isinstance(message, Ack):
        return message.of != of
    # An update that failed is settled without waiting for what its workers still had to say.
    return answer is Ack and isinstance(message, Applied | Digests | Described)


def _refuse(worker: Worker, message: Refused) -> None:
    if message.of == "session":
        raise Superseded(
            f"{worker.name}: {message.reason}",
            remedy="only one sender at a time; close this one, or create it anew to take over",
            engine=worker.engine,
        )
    raise UpdateRefused(f"{worker.name} refused {message.of!r}: {message.reason}")


def close_all(workers: Sequence[Worker]) -> None:
    """Hang up on all of them."""
    for worker in workers:
        worker.channel.close()


def last_words(workers: Sequence[Worker]) -> str:
    """What workers that have hung up said before, or "".

    Raises:
        Superseded: that a newer sender has taken over.
    """
    said = [(worker.name, message) for worker in workers for message in _drained(worker)[0]]
    refused = [(name, message) for name, message in said if isinstance(message, Refused)]
    return "; ".join(f"{name}: {message.reason}" for name, message in refused)


def lost(workers: Sequence[Worker]) -> str | None:
    """The name of a worker that has hung up since it was last heard of, if there is one. Only
    while no answer is awaited: what has arrived is dropped.

    Raises:
        Superseded: it said that a newer sender has taken over.
    """
    gone = [worker.name for worker in workers if _drained(worker)[1]]
    return gone[0] if gone else None


def _drained(worker: Worker) -> tuple[list[Message], bool]:
    """Everything that a worker has said, and whether it has hung up.

    Raises:
        Superseded: that a newer sender has taken over. Answers that nobody waits for any more may
            stand before that.
    """
    said: list[Message] = []
    try:
        while (message := worker.channel.poll()) is not None:
            if isinstance(message, Refused) and message.of == "session":
                _refuse(worker, message)
            said.append(message)
    except TransportError:
        return said, True
    return said, False
