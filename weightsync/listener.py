"""Where a sender's workers dial in."""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Mapping

from weightsync.control import Worker, ask_all, close_all
from weightsync.deadline import Deadline
from weightsync.errors import DeadlineExceeded, ProtocolError, TransportError
from weightsync.messages import PROTOCOL, Hello, Joined, Welcome
from weightsync.runtime import OwnedDirectory, remove_stale
from weightsync.wire import Channel, check_peer

__all__ = ["Listener"]

log = logging.getLogger("weightsync.sender")

HELLO_SECONDS = 10.0
"""How long somebody who dialled in may take to introduce himself."""


class Listener:
    """A socket in a private directory, which goes with it, or at the next start after a crash.

    One for each time that a sender opens a session: whoever was told of an earlier one and comes
    late finds nobody.

    Raises:
        TransportError: the runtime directory cannot hold a socket.
    """

    def __init__(self) -> None:
        remove_stale("session")
        self._directory = OwnedDirectory("session")
        self.path = str(self._directory.path / "control")
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._sock.bind(self.path)
            self._sock.listen(1024)
            self._sock.setblocking(False)
        except OSError as error:
            self.close()
            raise TransportError(
                f"cannot listen at {self.path}: {error}",
                remedy="a socket's path has at most 107 bytes: set XDG_RUNTIME_DIR to a short one",
            ) from error

    def accept(
        self,
        expected: Mapping[str, tuple[str, int]],
        deadline: Deadline,
        *,
        only_look: bool = False,
    ) -> list[Worker]:
        """Let all workers of some engines in, and take them over under the next epoch.

        Args:
            expected: by session token: the engine's name and its number of workers.
            deadline: by when all must be there.
            only_look: do not take them over: whoever holds them keeps them.

        Returns:
            The workers, sorted by engine (as in ``expected``) and rank.

        Raises:
            DeadlineExceeded: names those who did not come.
            ProtocolError: a worker that was expected speaks another protocol, or comes twice.
        """
        found: dict[tuple[str, int], Worker] = {}
        awaited = {(token, r) for token, (_, n) in expected.items() for r in range(n)}
        try:
            while awaited - found.keys():
                arrival = self._accept_one(_names(expected, awaited, found), deadline)
                if arrival is None:
                    continue
                hello, channel = arrival
                if hello.session not in expected:
                    log.warning("process %d dialled in with an unknown session", hello.pid)
                    channel.close()
                    continue
                try:
                    worker = _admit(hello, channel, expected)
                    if (hello.session, hello.rank) in found:
                        raise ProtocolError(f"{worker.name} dialled in twice")
                except BaseException:
                    channel.close()
                    raise
                found[hello.session, hello.rank] = worker
            order = list(expected)
            workers = [found[key] for key in sorted(found, key=lambda k: (order.index(k[0]), k[1]))]
            epoch = None if only_look else 1 + max(worker.status.epoch for worker in workers)
            answers = ask_all(workers, Welcome(epoch=epoch), Joined, deadline)
        except BaseException:
            close_all(list(found.values()))
            raise
        for worker, answer in zip(workers, answers, strict=True):
            worker.status = answer.status
        return workers

    def close(self) -> None:
        self._sock.close()
        self._directory.close()

    def _accept_one(self, awaited: str, deadline: Deadline) -> tuple[Hello, Channel] | None:
        """The next one who introduces itself properly; None where somebody else was turned away."""
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        while True:
            try:
                poller.poll(deadline.remaining(awaited) * 1000)
            except DeadlineExceeded as error:
                raise DeadlineExceeded(
                    awaited,
                    error.seconds,
                    remedy="see the engine's log for the reason; trainer and engine must run on "
                    "one host, as one user, and see the same runtime directory",
                ) from error
            try:
                sock, _ = self._sock.accept()
                break
            except BlockingIOError:
                continue
        channel = Channel(sock, "somebody who dialled in")
        try:
            check_peer(sock)
            hello = channel.receive(deadline.sooner(HELLO_SECONDS))
            if not isinstance(hello, Hello):
                raise ProtocolError(f"{type(hello).__name__} came where a hello belongs")
        except TransportError as error:
            log.warning("turned away: %s", error)
            channel.close()
            return None
        except BaseException:
            channel.close()
            raise
        return hello, channel


def _admit(hello: Hello, channel: Channel, expected: Mapping[str, tuple[str, int]]) -> Worker:
    engine, count = expected[hello.session]
    if hello.protocol != PROTOCOL:
        raise ProtocolError(
            f"{engine} speaks protocol {hello.protocol}, this sender {PROTOCOL}",
            remedy="install the same weightsync for trainer and engine",
        )
    if hello.world_size != count or not 0 <= hello.rank < count:
        raise ProtocolError(
            f"{engine} has {count} workers, but one came as {hello.rank} of {hello.world_size}"
        )
    return Worker(engine, hello, channel)


def _names(
    expected: Mapping[str, tuple[str, int]],
    awaited: set[tuple[str, int]],
    found: Mapping[tuple[str, int], Worker],
) -> str:
    missing = sorted(awaited - found.keys())
    return (
        ", ".join(f"{expected[token][0]}, worker {rank}" for token, rank in missing) + " to dial in"
    )
