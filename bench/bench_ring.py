"""The ring between two processes, with digests on both sides: a Qwen2-0.5B (290 tensors, 988 MB).

    python bench/bench_ring.py --json FILE

Each phase is a multiple of one pass: a single-threaded ``memcpy`` of the same bytes, measured after
every round of the same run; medians.

- ``fill``: from the sender's tensors into an arena, with digests; nobody reads.
- ``fill_verify``: the same, while the receiver follows the journal and digests the arena.
- ``streamed``: from the sender's tensors through the ring into the receiver's own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator

import numpy as np
from common import MEMCPY, Memcpy, Rows, command_line

from weightsync.deadline import Deadline
from weightsync.digest import U64Array, copy_and_digest_spans
from weightsync.manifest import Manifest
from weightsync.sources import SafetensorsSource
from weightsync.testing import build_checkpoint
from weightsync.transport.ring import Peer, RingReader, RingWriter
from weightsync.transport.shm import ArenaReader, ShmArena, arena_offsets

SECONDS = 60.0
STREAMED, JOURNAL = 0, 1


def seeds_of(manifest: Manifest) -> U64Array:
    return np.arange(len(manifest), dtype=np.uint64)


def receive(
    control: socket.socket, manifest: Manifest, rings: list[RingWriter], arena: ShmArena
) -> None:
    """For each (ring, update) that is asked for, follow it and answer with the digests."""
    offsets, total = arena_offsets(manifest)
    readers = [RingReader(os.dup(ring.fd), ring.nbytes, 0) for ring in rings]
    own = np.ones(total, np.uint8)
    writer = Peer("sender", control.fileno())
    with ArenaReader(os.dup(arena.fd), total).held() as shared:
        addresses = {STREAMED: own.ctypes.data + offsets, JOURNAL: shared + offsets}
        while asked := control.recv(16):
            ring, update = (int(number) for number in np.frombuffer(asked, np.uint64))
            sums = readers[ring].follow(
                update,
                addresses[ring],
                manifest.nbytes,
                seeds_of(manifest),
                writer=writer,
                deadline=Deadline.after(SECONDS),
            )
            control.sendall(sums.tobytes())


@contextlib.contextmanager
def receiver(
    manifest: Manifest, rings: list[RingWriter], arena: ShmArena
) -> Iterator[socket.socket]:
    """A process that receives; its socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        status = 1
        try:
            receive(theirs, manifest, rings, arena)
            status = 0
        finally:
            os._exit(status)
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        os.waitpid(pid, 0)


def run(rounds: int) -> dict[str, object]:
    manifest = SafetensorsSource(build_checkpoint("qwen2_0_5b", "A")).manifest()
    offsets, total = arena_offsets(manifest)
    arena = ShmArena(total)
    arena.view()[:] = 1
    rings = [RingWriter(1, carries_bytes=True), RingWriter(1, carries_bytes=False)]
    rows, starts = Rows(), np.zeros(len(manifest), np.uint64)
    with receiver(manifest, rings, arena) as control:
        tensors = np.random.default_rng(0).integers(0, 256, total, dtype=np.uint8)
        sources, destinations = tensors.ctypes.data + offsets, arena.address + offsets
        memcpy = Memcpy(manifest.total_bytes)
        index = np.arange(len(manifest), dtype=np.uint64)
        spans = (sources, manifest.nbytes, starts, seeds_of(manifest), index)
        peer = Peer("receiver", control.fileno())

        def through(ring: int) -> None:
            update = rings[ring].begin(len(manifest), [peer])
            control.sendall(np.array([ring, update], np.uint64).tobytes())
            rings[ring].push(
                *spans,
                destinations=destinations if ring == JOURNAL else None,
                deadline=Deadline.after(SECONDS),
            )
            sent = rings[ring].finish()
            if control.recv(sent.nbytes) != sent.tobytes():
                raise SystemExit("the receiver found other bytes than were sent")

        def fill() -> None:
            copy_and_digest_spans(sources, destinations, *spans[1:])

        phases = {
            "fill": fill,
            "fill_verify": lambda: through(JOURNAL),
            "streamed": lambda: through(STREAMED),
            MEMCPY: memcpy.seconds,
        }
        for number in range(rounds + 1):
            row = {}
            for name, phase in phases.items():
                started = time.perf_counter()
                phase()
                row[name] = time.perf_counter() - started
            if number >= 1:  # the first touches every page
                rows.add(row)
    return {
        "tensors": len(manifest),
        "nbytes": manifest.total_bytes,
        "rounds": rounds,
        **rows.summary(),
    }


if __name__ == "__main__":
    command_line(__doc__, run, rounds=9)
