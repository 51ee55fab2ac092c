"""A worker's connection to one sender, and the thread that serves it."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import stat
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import Protocol

from weightsync.deadline import Deadline
from weightsync.errors import PeerLost, ProtocolError, UpdateRefused, WeightSyncError
from weightsync.messages import Hello, Joined, Message, Refused, Welcome
from weightsync.wire import Channel, check_peer

__all__ = ["Session", "SessionOwner"]

log = logging.getLogger("weightsync.receiver")

ANSWER_SECONDS = 60.0
"""How long a worker waits for a sender to take an answer, or to welcome it."""
ENGINE_CALL_SECONDS = 24 * 3600.0
"""How long an engine call may take whose answer waits; a sender that is gone is noticed at once."""
FAREWELL_SECONDS = 0.5
"""How long a sender that is replaced may take to hear it."""
EXIT_SECONDS = 5.0
"""How long a process that ends waits for a session's thread."""
CONNECT_SECONDS = 5.0
"""How long an engine's thread may be held up by dialling in."""


_live: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Before the interpreter ends: it would end a thread that is in native code by force."""
    for session in list(_live):
        session.stop(EXIT_SECONDS)


class SessionOwner(Protocol):
    """What a session needs of its receiver. All calls come from the session's thread."""

    rank: int

    def hello(self, token: str) -> Hello: ...

    def take_over(self, session: Session, epoch: int | None) -> Joined:
        """The session holds the worker from now on; or, without an epoch, may only look."""
        ...

    def handle(self, session: Session, message: Message) -> Message:
        """Act on one message; the answer."""
        ...

    def lost(self, session: Session, reason: str) -> None:
        """The connection has ended. Called once, last of all."""
        ...


class Session:
    """Dials in at once, in the caller's thread; serves the sender in a thread of its own.

    Args:
        owner: acts on what the sender says.
        path: of the sender's socket, in a private directory of this user.
        token: introduces the engine.

    Raises:
        OSError, ProtocolError: nobody listens there, or somebody who must not.
    """

    def __init__(self, owner: SessionOwner, path: str, token: str) -> None:
        _check_place(path)
        self._owner = owner
        self._token = token
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(CONNECT_SECONDS)
            sock.connect(path)
            self.channel = Channel(sock, f"the sender (pid {check_peer(sock)})")
        except BaseException:
            sock.close()
            raise
        self._send_lock = threading.Lock()
        self._backlog: deque[Message] = deque()
        """Answers of the engine's thread that wait to be sent, the first of them under way."""
        self._backlog_lock = threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="weightsync-receiver", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._close()
            raise
        _live.add(self)

    def answer(self, message: Message) -> None:
        """Send. A lost sender is no error here, the session's own thread notices it."""
        try:
            with self._send_lock:
                if not self._ended:
                    self.channel.send(message, Deadline.after(ANSWER_SECONDS))
        except (WeightSyncError, OSError, ValueError) as error:
            log.warning("an answer did not reach the sender: %s", error)

    def answer_from_engine(self, message: Message) -> None:
        """Send, from the engine's thread, which must not wait: the sender may read only once the
        engine call is over. What the socket does not take at once is sent by a thread of its own,
        and so is what comes after it.
        """
        with self._backlog_lock:
            if self._backlog:
                self._backlog.append(message)
                return
            locked = self._send_lock.acquire(blocking=False)
            try:
                rest = None
                if locked:
                    rest = memoryview(b"") if self._ended else self.channel.send_at_once(message)
                    if not rest:
                        return
                self._backlog.append(message)
                threading.Thread(
                    target=self._send_backlog, args=(rest,), name="weightsync-answer", daemon=True
                ).start()
                locked = False  # the thread's from now on
            except (WeightSyncError, OSError, ValueError, RuntimeError) as error:
                self._backlog.clear()
                self._lose(error)
            finally:
                if locked:
                    self._send_lock.release()

    def _send_backlog(self, rest: memoryview | None) -> None:
        """
        Args:
            rest: of the first message, which is under way, with the lock held for it; None where
                it is not.
        """
        deadline = Deadline.after(ENGINE_CALL_SECONDS)
        try:
            if rest is not None:
                try:
                    self.channel.send_rest(rest, deadline)
                finally:
                    self._send_lock.release()
                if not self._next_in_backlog():
                    return
            while True:
                with self._send_lock:
                    if not self._ended:
                        self.channel.send(self._backlog[0], deadline)
                if not self._next_in_backlog():
                    return
        except (WeightSyncError, OSError, ValueError) as error:
            self._lose(error)
            with self._backlog_lock:
                self._backlog.clear()

    def _next_in_backlog(self) -> bool:
        """The first was sent; whether there is another."""
        with self._backlog_lock:
            self._backlog.popleft()
            return bool(self._backlog)

    def _lose(self, error: Exception) -> None:
        """Half a message may be out: nothing can follow it."""
        log.warning("an answer did not reach the sender: %s", error)
        self.channel.hang_up()

    def supersede(self, epoch: int) -> None:
        """Tell this sender that a newer one has taken over, if it listens, and hang up. Does not
        wait: a sender that has stopped reading must not keep a new one out."""
        reason = f"a newer sender (epoch {epoch}) has taken over"
        message = Refused(of="session", update_id="", rank=self._owner.rank, reason=reason)
        if self._send_lock.acquire(blocking=False):
            try:
                if not self._ended:
                    self.channel.send(message, Deadline.after(FAREWELL_SECONDS))
            except (WeightSyncError, OSError) as error:
                log.warning("the former sender was not told: %s", error)
            finally:
                self._send_lock.release()
        self.channel.hang_up()

    def stop(self, seconds: float = ANSWER_SECONDS) -> None:
        """Let the thread end, and wait for it unless it is the caller."""
        self.channel.hang_up()
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def _run(self) -> None:
        reason = "its connection was closed"
        try:
            self.answer(self._owner.hello(self._token))
            welcome = self.channel.receive(Deadline.after(ANSWER_SECONDS))
            if not isinstance(welcome, Welcome):
                raise ProtocolError(f"expected a welcome, got {type(welcome).__name__}")
            self.answer(self._owner.take_over(self, welcome.epoch))
            self._serve()
        except PeerLost as error:
            reason = str(error)
        except WeightSyncError as error:
            reason = str(error)
            log.error("session ended: %s", error)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            log.exception("session ended by a fault of its own")
        finally:
            try:
                self._owner.lost(self, reason)
            finally:
                self._close()

    def _serve(self) -> None:
        while True:
            # Idle between updates, however long they are apart: the wait ends with the next
            # message, with the sender's death, or when another thread hangs up.
            message = self.channel.receive(None)
            try:
                reply = self._owner.handle(self, message)
            except WeightSyncError as error:
                self.answer(self._refused(message, error))
                if not isinstance(error, UpdateRefused):
                    raise
                continue
            except Exception as error:
                self.answer(self._refused(message, error))
                raise
            self.answer(reply)

    def _refused(self, message: Message, error: Exception) -> Refused:
        return Refused(
            of=str(message.__struct_config__.tag),
            update_id=getattr(message, "update_id", ""),
            rank=self._owner.rank,
            reason=str(error)[:4000],
        )

    def _close(self) -> None:
        self.channel.hang_up()  # who is still sending notices
        with self._send_lock:
            self._ended = True
            self.channel.close()


def _check_place(path: str) -> None:
    """A path that came over HTTP must lead to a place that only this user can have made."""
    directory = Path(path).parent
    found = directory.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ProtocolError(
            f"{directory} must be a directory of mode 0700 that belongs to user {os.geteuid()}"
        )
