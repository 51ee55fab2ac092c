"""One end of a ring in a process of its own, told what to do on a socket: for test_ring.py.

Messages are JSON, one per packet; descriptors come along. Every request is answered.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.transport.ring import Peer, RingReader, RingWriter
from weightsync.transport.shm import address_of

PACKET = 1 << 16


def resources() -> dict[str, int]:
    """What must not grow from update to update."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": Path("/proc/self/maps").read_text().count("memfd:"),
        "threads": len(os.listdir("/proc/self/task")),
    }


class Worker:
    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.peer = Peer("sender", control.fileno())
        self.readers: dict[str, RingReader] = {}
        self.memories: dict[str, mmap.mmap] = {}
        self.writer: RingWriter | None = None

    def open(self, fds: list[int], *, ring: str, nbytes: int, reader: int, memory: int) -> None:
        self.readers[ring] = RingReader(fds[0], nbytes, reader)
        self.memories[ring] = mmap.mmap(fds[1], memory)
        os.close(fds[1])

    def follow(
        self,
        _: list[int],
        *,
        ring: str,
        update: int,
        offsets: list[int],
        sizes: list[int],
        seeds: list[int],
        seconds: float = 20.0,
        late: float = 0.0,
    ) -> str:
        threading.Event().wait(late)
        sums = self.readers[ring].follow(
            update,
            address_of(self.memories[ring]) + np.array(offsets, np.uint64),
            np.array(sizes, np.uint64),
            np.array(seeds, np.uint64),
            writer=self.peer,
            deadline=Deadline.after(seconds),
        )
        return sums.tobytes().hex()

    def close(self, _: list[int], *, ring: str) -> None:
        self.readers.pop(ring).close()
        del self.memories[ring]

    def resources(self, _: list[int]) -> dict[str, int]:
        return resources()

    def write(self, _: list[int], *, nbytes: int) -> dict[str, int]:
        """Begin an update of one tensor, send its first bytes, and leave it at that."""
        data = np.zeros(nbytes, np.uint8)
        self.writer = RingWriter(1, carries_bytes=True)
        socket.send_fds(self.control, [b"ring"], [self.writer.fd])
        update = self.writer.begin(1, [self.peer])
        deadline = Deadline.after(20)
        self.writer.push([data.ctypes.data], [nbytes], [0], [1], [0], deadline=deadline)
        return {"nbytes": self.writer.nbytes, "update": update}

    def serve(self) -> None:
        while True:
            packet, fds, _, _ = socket.recv_fds(self.control, PACKET, 2)
            if not packet:
                return
            request: dict[str, Any] = json.loads(packet)
            work = getattr(self, request.pop("do"))
            try:
                answer = {"result": work(fds, **request)}
            except WeightSyncError as error:
                answer = {"error": type(error).__name__, "text": str(error)}
            self.control.send(json.dumps(answer).encode())


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as socket_of_the_test:
        Worker(socket_of_the_test).serve()
