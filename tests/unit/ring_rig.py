"""What the tests of the ring share: updates, processes that receive them, and a ring between."""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ring_worker import PACKET

from weightsync.deadline import Deadline
from weightsync.digest import U64Array, digest_spans
from weightsync.transport.memfd import sealed_memfd
from weightsync.transport.ring import Peer, RingReader, RingWriter
from weightsync.transport.shm import address_of

CAPACITY, CHUNK = 4096, 1024
MEMORY = 1 << 20
SECONDS = 20.0
CANARY = 0xA5


class Process:
    """A worker process and this process's socket to it."""

    def __init__(self, name: str) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(SECONDS)
        self.peer = Peer(name, self.socket.fileno())
        script = Path(__file__).with_name("ring_worker.py")
        self.process = subprocess.Popen(
            [sys.executable, script, str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        theirs.close()

    def ask(self, do: str, *, fds: Sequence[int] = (), **arguments: object) -> None:
        socket.send_fds(self.socket, [json.dumps({"do": do, **arguments}).encode()], list(fds))

    def answer(self) -> dict[str, Any]:
        return dict(json.loads(self.socket.recv(PACKET)))

    def call(self, do: str, *, fds: Sequence[int] = (), **arguments: object) -> Any:
        self.ask(do, fds=fds, **arguments)
        return self.answer()["result"]

    def stop(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()


@dataclass
class Update:
    """Tensors, where they lie in the memory of who receives them, and how they are cut up."""

    sizes: list[int]
    spans: list[tuple[int, int, int]] = field(default_factory=list)  # tensor, start, nbytes
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.spans:
            self.spans = [(i, 0, size) for i, size in enumerate(self.sizes)]
        random = np.random.default_rng(self.seed)
        self.data = [random.integers(0, 256, size, dtype=np.uint8) for size in self.sizes]
        self.seeds = [int(s) for s in random.integers(0, 1 << 63, len(self.sizes))]
        gaps = random.integers(0, 130, len(self.sizes))  # any alignment, and something between
        ends = np.cumsum(np.array(self.sizes, np.int64) + gaps)
        self.offsets = [int(o) for o in ends - np.array(self.sizes, np.int64)]

    def image(self) -> bytes:
        """The memory as it must be afterwards: nothing between the tensors has been touched."""
        memory = np.full(MEMORY, CANARY, np.uint8)
        for offset, data in zip(self.offsets, self.data, strict=True):
            memory[offset : offset + len(data)] = data
        return memory.tobytes()

    def digests(self) -> U64Array:
        addresses = [data.ctypes.data for data in self.data]
        return digest_spans(addresses, self.sizes, [0] * len(self.sizes), self.seeds)

    def columns(self) -> dict[str, list[int]]:
        return {
            "sources": [self.data[t].ctypes.data + start for t, start, _ in self.spans],
            "nbytes": [nbytes for _, _, nbytes in self.spans],
            "starts": [start for _, start, _ in self.spans],
            "seeds": [self.seeds[t] for t, _, _ in self.spans],
            "tensors": [t for t, _, _ in self.spans],
        }


class Ring:
    """A writer of this process, its readers in others, and the memory that each of them fills."""

    def __init__(
        self,
        name: str,
        processes: Sequence[Process],
        *,
        carries_bytes: bool,
        capacity: int = CAPACITY,
        chunk: int = CHUNK,
    ) -> None:
        self.name = name
        self.processes = processes
        self.writer = RingWriter(
            len(processes), carries_bytes=carries_bytes, capacity=capacity, chunk=chunk
        )
        fds = [sealed_memfd(MEMORY) for _ in range(len(processes) if carries_bytes else 1)]
        self.memories = [mmap.mmap(fd, MEMORY) for fd in fds]
        for i, process in enumerate(processes):
            process.call(
                "open",
                fds=[self.writer.fd, fds[i % len(fds)]],
                ring=name,
                nbytes=self.writer.nbytes,
                reader=i,
                memory=MEMORY,
            )
        for fd in fds:
            os.close(fd)

    def begin(self, update: Update, **options: object) -> None:
        """Begin, and set all readers to work; ``late`` may hold one delay for each."""
        late = options.pop("late", [0.0] * len(self.processes))
        for memory in self.memories:
            memory[:] = bytes([CANARY]) * MEMORY
        number = self.writer.begin(len(update.sizes), [p.peer for p in self.processes])
        for process, delay in zip(self.processes, late, strict=True):
            process.ask(
                "follow",
                ring=self.name,
                update=number,
                offsets=update.offsets,
                sizes=update.sizes,
                seeds=update.seeds,
                late=delay,
                **options,
            )

    def push(self, update: Update, *, deadline: Deadline | None = None) -> None:
        destinations = None
        if not self.writer.carries_bytes:
            base = address_of(self.memories[0])
            destinations = [base + update.offsets[t] + start for t, start, _ in update.spans]
        self.writer.push(
            **update.columns(),
            destinations=destinations,
            deadline=deadline or Deadline.after(SECONDS),
        )

    def received(self, update: Update) -> list[U64Array]:
        answers = [process.answer() for process in self.processes]
        for answer in answers:
            if "result" not in answer:
                raise AssertionError(f"a reader failed: {answer}")
        return [
            np.frombuffer(bytes.fromhex(answer["result"]), np.uint64).reshape(-1, 2)
            for answer in answers
        ]

    def deliver(self, update: Update, **options: object) -> None:
        """One whole update, every byte and every digest of it compared."""
        self.begin(update, **options)
        self.push(update)
        sent = self.writer.finish()
        received = self.received(update)
        for memory in self.memories:
            assert memory[:] == update.image()
        whole = update.digests()
        np.testing.assert_array_equal(sent.sum(axis=0, dtype=np.uint64), whole)
        if self.writer.carries_bytes:
            assert sent.shape == (1, len(update.sizes), 2)
            sent = np.repeat(sent, len(self.processes), axis=0)
        np.testing.assert_array_equal(sent, np.stack(received))

    def close(self) -> None:
        self.writer.close()
        self.memories.clear()
        for process in self.processes:
            process.call("close", ring=self.name)


class Alone:
    """Both ends in this process: the update is written before it is read, with time to meddle."""

    SIZE = 500

    def __init__(self, *, carries_bytes: bool = True, readers: int = 1) -> None:
        self.writer = RingWriter(
            readers, carries_bytes=carries_bytes, capacity=CAPACITY, chunk=CHUNK
        )
        self.reader = RingReader(os.dup(self.writer.fd), self.writer.nbytes, 0)
        self.ours, self.theirs = socket.socketpair()
        self.data = np.arange(2 * self.SIZE, dtype=np.uint8)
        self.memory = np.full(MEMORY, CANARY, np.uint8)
        self.places = [self.memory.ctypes.data + 4096, self.memory.ctypes.data + 16384]
        peers = [Peer(f"worker {i}", self.ours.fileno()) for i in range(readers)]
        self.update = self.writer.begin(2, peers)
        self.push()

    def push(self, times: int = 1) -> None:
        address = self.data.ctypes.data
        for _ in range(times):
            self.writer.push(
                [address, address + self.SIZE],
                [self.SIZE] * 2,
                [0, 0],
                [5, 6],
                [0, 1],
                destinations=None if self.writer.carries_bytes else self.places,
                deadline=Deadline.after(0.3),
            )

    def poke(self, at: int, content: bytes) -> None:
        assert os.pwrite(self.writer.fd, content, at) == len(content)

    def follow(self, seconds: float = SECONDS) -> U64Array:
        return self.reader.follow(
            self.update,
            self.places,
            [self.SIZE] * 2,
            [5, 6],
            writer=Peer("the sender", self.theirs.fileno()),
            deadline=Deadline.after(seconds),
        )

    def outside(self) -> bool:
        """Whether anything was written outside of the two tensors."""
        rest = self.memory.copy()
        rest[4096 : 4096 + self.SIZE] = CANARY
        rest[16384 : 16384 + self.SIZE] = CANARY
        return bool((rest != CANARY).any())

    def close(self) -> None:
        self.writer.close()
        self.reader.close()
        self.ours.close()
        self.theirs.close()
