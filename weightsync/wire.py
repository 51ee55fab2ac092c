"""How messages travel between a sender and the workers of one host.

A frame is a little-endian u32 length and that many bytes of MessagePack, decoded against a closed
set of typed structs (msgspec): no pickle, no code, nothing that is not declared here. Sockets are
Unix stream sockets in a directory of mode 0700, both ends check each other's user by
``SO_PEERCRED``, and file descriptors travel by ``SCM_RIGHTS``.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
from collections.abc import Sequence
from typing import Final

import msgspec

from weightsync.deadline import Deadline
from weightsync.errors import PeerLost, ProtocolError
from weightsync.messages import AnyMessage, Message

__all__ = ["Channel", "check_peer"]

MAX_FRAME: Final = 64 << 20
"""Bytes of the largest frame: the layout of some 500,000 tensors."""
MAX_FDS: Final = 2

_HEADER = struct.Struct("<I")
_DECODER = msgspec.msgpack.Decoder(AnyMessage)
_ENCODER = msgspec.msgpack.Encoder()


def _frame(message: Message) -> memoryview:
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME:
        raise ProtocolError(f"a message of {len(body)} bytes exceeds {MAX_FRAME}")
    return memoryview(_HEADER.pack(len(body)) + body)


def check_peer(sock: socket.socket) -> int:
    """The pid at the other end of a Unix socket, if it belongs to this user.

    Raises:
        ProtocolError: it belongs to somebody else.
    """
    size = struct.calcsize("3i")
    pid, uid, _gid = struct.unpack(
        "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    if uid != os.geteuid():
        raise ProtocolError(
            f"process {pid} of user {uid} is at the other end, expected user {os.geteuid()}",
            remedy="run trainer and engine as the same user",
        )
    return int(pid)


class Channel:
    """One connected socket that carries whole messages. Not thread-safe.

    Args:
        sock: connected Unix stream socket; owned by the channel from now on.
        peer: what the other end is called in errors.
    """

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._received = bytearray()
        self._fds: list[int] = []
        self.peer = peer

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        # A process that was forked from this one holds the socket too: closing alone would leave
        # the other end connected for as long as it lives.
        self.hang_up()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._sock.close()

    def send(self, message: Message, deadline: Deadline, *, fds: Sequence[int] = ()) -> None:
        """Send one message, and descriptors with it.

        Raises:
            DeadlineExceeded: the other end does not read.
            PeerLost: the other end is gone.
            ProtocolError: the message is larger than a frame may be.
        """
        whole = _frame(message)
        rest = self._push(whole, fds)
        while rest:
            self._wait(select.POLLOUT, deadline)
            rest = self._push(rest, fds if len(rest) == len(whole) else ())

    def send_at_once(self, message: Message) -> memoryview:
        """As much of one message as the socket takes without waiting.

        Returns:
            The rest, for `send_rest`, before which nothing else may be sent.

        Raises:
            PeerLost, ProtocolError: as `send` does.
        """
        return self._push(_frame(message), ())

    def send_rest(self, rest: memoryview, deadline: Deadline) -> None:
        """The rest of a message. Raises as `send` does."""
        while rest:
            self._wait(select.POLLOUT, deadline)
            rest = self._push(rest, ())

    def _push(self, frame: memoryview, fds: Sequence[int]) -> memoryview:
        rights = [_rights(fds)] if fds else []
        while frame:
            try:
                sent = self._sock.sendmsg([frame], rights, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                break
            except OSError as error:
                raise PeerLost(f"{self.peer} is gone: {error}") from error
            frame, rights = frame[sent:], []
        return frame

    def receive(self, deadline: Deadline | None) -> Message:
        """The next message.

        Args:
            deadline: None to wait until the other end speaks or is gone; only for who has nothing
                else to do, on a thread of his own.

        Raises:
            DeadlineExceeded: none came in time.
            PeerLost: the other end is gone.
            ProtocolError: it is malformed or too large.
        """
        while True:
            message = self.poll()
            if message is not None:
                return message
            self._wait(select.POLLIN, deadline)

    def hang_up(self) -> None:
        """End both directions, from any thread: who waits on this channel wakes up and finds the
        other end gone. The channel still has to be closed."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def poll(self) -> Message | None:
        """The next message if it is here already, else None. Raises as `receive` does."""
        message = self._take()
        while message is None and self._read():
            message = self._take()
        return message

    def take_fd(self) -> int:
        """The descriptor that came with the last message; the caller closes it.

        Raises:
            ProtocolError: none came.
        """
        if not self._fds:
            raise ProtocolError(f"{self.peer} sent no file descriptor where one belongs")
        return self._fds.pop(0)

    def _take(self) -> Message | None:
        if len(self._received) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._received)
        if length > MAX_FRAME:
            raise ProtocolError(
                f"{self.peer} announced a frame of {length} bytes, allowed {MAX_FRAME}"
            )
        end = _HEADER.size + length
        if len(self._received) < end:
            return None
        body = bytes(self._received[_HEADER.size : end])
        del self._received[:end]
        try:
            message: Message = _DECODER.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(
                f"{self.peer} sent something that is no message: {error}"
            ) from error
        return message

    def _read(self) -> bool:
        """Read what is here; False if nothing is."""
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(
                1 << 18,
                socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize),
                socket.MSG_CMSG_CLOEXEC,
            )
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerLost(f"{self.peer} is gone: {error}") from error
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                self._fds.extend(fds)
        if flags & socket.MSG_CTRUNC or len(self._fds) > MAX_FDS:
            raise ProtocolError(f"{self.peer} sent more file descriptors than expected")
        if not data:
            raise PeerLost(f"{self.peer} closed the connection")
        self._received += data
        return True

    def _wait(self, events: int, deadline: Deadline | None) -> None:
        poller = select.poll()
        poller.register(self._sock, events)
        poller.poll(None if deadline is None else deadline.remaining(self.peer) * 1000)


def _rights(fds: Sequence[int]) -> tuple[int, int, array.array[int]]:
    return (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
