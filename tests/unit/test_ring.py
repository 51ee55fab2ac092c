"""The ring: every byte and every digest arrives, and every failure is a typed error.

Readers are processes (ring_worker.py), reused from test to test.
"""

from __future__ import annotations

import itertools
import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ring_rig import CAPACITY, CHUNK, MEMORY, SECONDS, Alone, Process, Ring, Update
from ring_worker import PACKET, resources

from weightsync.deadline import Deadline
from weightsync.digest import U64Array, reference_digest
from weightsync.errors import (
    DeadlineExceeded,
    PeerLost,
)
from weightsync.transport.memfd import sealed_memfd
from weightsync.transport.ring import Peer, RingReader, RingWriter
from weightsync.transport.shm import address_of


@pytest.fixture
def process() -> Iterator[Process]:
    made = Process("worker 0")
    yield made
    made.stop()


@pytest.fixture(scope="module")
def pool() -> Iterator[list[Process]]:
    made = [Process(f"worker {i}") for i in range(3)]
    yield made
    for process in made:
        process.stop()


USES = pytest.mark.parametrize("carries_bytes", [True, False], ids=["streamed", "journal"])


@pytest.fixture(scope="module")
def rings(pool: list[Process]) -> Iterator[dict[tuple[int, bool], Ring]]:
    made = {
        (readers, carries): Ring(f"{readers} {carries}", pool[:readers], carries_bytes=carries)
        for readers in (1, 2, 3)
        for carries in (True, False)
    }
    yield made
    for ring in made.values():
        ring.close()


# What arrives

SIZES = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 10 * CAPACITY, 0, 7, 5 * CHUNK + 3, 0]


@USES
@pytest.mark.parametrize("readers", [1, 2, 3])
def test_tensors_of_every_size_arrive(
    rings: dict[tuple[int, bool], Ring], readers: int, carries_bytes: bool
) -> None:
    rings[readers, carries_bytes].deliver(Update(SIZES))


def test_the_reference_agrees() -> None:
    """`Update.digests`, to which all else is compared, against the definition."""
    update = Update([0, 1, 9, 1000])
    for i, data in enumerate(update.data):
        expected = reference_digest(data.tobytes(), start=0, seed=update.seeds[i])
        assert tuple(update.digests()[i]) == (expected.first, expected.second)


@st.composite
def updates(draw: st.DrawFn) -> Update:
    """Tensors cut anywhere, in pieces that come in any order."""
    near = [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CAPACITY]
    sizes = draw(st.lists(st.sampled_from(near) | st.integers(0, 3000), max_size=6))
    spans = []
    for tensor, size in enumerate(sizes):
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
        spans += [(tensor, a, b - a) for a, b in itertools.pairwise(cuts)]
    spans = draw(st.permutations(spans)) or [(0, 0, 0)] * min(len(sizes), 1)
    return Update(sizes, spans, seed=draw(st.integers(0, 1 << 32)))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(updates(), st.sampled_from([1, 2, 3]), st.booleans())
def test_spans_cut_anywhere_arrive(
    rings: dict[tuple[int, bool], Ring], update: Update, readers: int, carries_bytes: bool
) -> None:
    rings[readers, carries_bytes].deliver(update)


@USES
def test_large_tensors_arrive_with_the_defaults(pool: list[Process], carries_bytes: bool) -> None:
    """Beyond 8 MiB readers copy with streaming stores: another path through the kernels."""
    size = 9 << 20
    data = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    writer = RingWriter(1, carries_bytes=carries_bytes)
    fd = sealed_memfd(size + 4096)
    memory = mmap.mmap(fd, size + 4096)
    process = pool[0]
    opened = {"nbytes": writer.nbytes, "reader": 0, "memory": size + 4096}
    process.call("open", fds=[writer.fd, fd], ring="large", **opened)
    update = writer.begin(1, [process.peer])
    asked = {"update": update, "offsets": [8], "sizes": [size], "seeds": [3]}
    process.ask("follow", ring="large", **asked)
    writer.push(
        [data.ctypes.data],
        [size],
        [0],
        [3],
        [0],
        destinations=None if carries_bytes else [address_of(memory) + 8],
        deadline=Deadline.after(SECONDS),
    )
    sums = writer.finish()
    assert process.answer()["result"] == sums.tobytes().hex()
    assert np.array_equal(np.frombuffer(memory, np.uint8)[8 : 8 + size], data)
    process.call("close", ring="large")
    writer.close()
    os.close(fd)


@USES
def test_the_writer_sleeps_while_a_reader_is_slow(
    rings: dict[tuple[int, bool], Ring], carries_bytes: bool
) -> None:
    update = Update([100 * CAPACITY])
    started, busy = time.monotonic(), time.process_time()
    rings[3, carries_bytes].deliver(update, late=[0.0, 0.5, 0.0])
    assert time.monotonic() - started >= 0.5
    assert time.process_time() - busy < 0.4


def test_no_wake_up_is_lost(rings: dict[tuple[int, bool], Ring]) -> None:
    """Thousands of waits on both sides. Each lost wake-up would cost a slice of 50 ms."""
    update = Update([(MEMORY - 4096) // 4] * 4)
    for readers in (1, 2, 3):
        started = time.monotonic()
        for _ in range(2):
            rings[readers, True].deliver(update)
        assert time.monotonic() - started < 4


def test_both_ends_leave_the_interpreter_to_others() -> None:
    """Writer and reader in one process: one would never come to work if the other held on to it."""
    alone = Alone()
    sums: list[U64Array] = []
    thread = threading.Thread(target=lambda: sums.append(alone.follow()))
    thread.start()
    alone.push(times=20)
    sent = alone.writer.finish()
    thread.join(SECONDS)
    np.testing.assert_array_equal(sums[0], sent[0])
    alone.close()


def test_a_writer_that_is_gone_after_its_end_has_not_failed() -> None:
    alone = Alone()
    sent = alone.writer.finish()
    alone.ours.close()
    np.testing.assert_array_equal(alone.follow(), sent[0])
    alone.close()


# Who fails


@USES
def test_a_killed_reader_is_noticed_at_once(
    pool: list[Process], process: Process, carries_bytes: bool
) -> None:
    ring = Ring("killed", [pool[0], process], carries_bytes=carries_bytes)
    update = Update([200 * CAPACITY])
    process.process.send_signal(signal.SIGSTOP)  # so that it is killed before the end
    ring.begin(update)
    timer = threading.Timer(0.2, process.process.kill)
    timer.start()
    started = time.monotonic()
    with pytest.raises(PeerLost, match="worker 0 is gone"):
        ring.push(update)
    assert time.monotonic() - started < 2
    timer.join()
    # The other reader has been told.
    assert pool[0].answer()["error"] == "StreamAborted"
    ring.writer.close()
    pool[0].call("close", ring="killed")


def test_a_killed_writer_is_noticed_at_once(process: Process) -> None:
    process.ask("write", nbytes=1000)
    _, fds, _, _ = socket.recv_fds(process.socket, PACKET, 1)
    begun = process.answer()["result"]
    reader = RingReader(fds[0], begun["nbytes"], 0)
    tensor = np.zeros(2000, np.uint8)
    timer = threading.Timer(0.2, process.process.kill)
    timer.start()
    started = time.monotonic()
    with pytest.raises(PeerLost, match="the sender is gone"):
        reader.follow(
            begun["update"],
            [tensor.ctypes.data],
            [2000],
            [1],
            writer=Peer("the sender", process.socket.fileno()),
            deadline=Deadline.after(SECONDS),
        )
    assert time.monotonic() - started < 2
    timer.join()
    reader.close()


@USES
def test_an_abort_reaches_sleeping_readers_and_the_next_update_is_whole(
    rings: dict[tuple[int, bool], Ring], carries_bytes: bool
) -> None:
    ring = rings[2, carries_bytes]
    for sent in ([(0, 0, 10)], [(0, 0, 3 * CAPACITY)]):
        update = Update([3 * CAPACITY], sent)
        ring.begin(update)
        ring.push(update)
        ring.writer.abort()
        for process in ring.processes:
            answer = process.answer()
            assert answer["error"] == "StreamAborted" and "sender" in answer["text"]
        ring.deliver(Update(SIZES, seed=1))


def test_a_reader_that_left_early_is_named(rings: dict[tuple[int, bool], Ring]) -> None:
    """It does not know the tensor that comes: an error there, and none of waiting here."""
    ring = rings[3, True]
    update = Update([50 * CAPACITY])
    number = ring.writer.begin(1, [process.peer for process in ring.processes])
    for i, process in enumerate(ring.processes):
        known = {"offsets": update.offsets, "sizes": update.sizes, "seeds": update.seeds}
        if i == 1:
            known = {"offsets": [], "sizes": [], "seeds": []}
        process.ask("follow", ring=ring.name, update=number, **known)
    started = time.monotonic()
    with pytest.raises(PeerLost, match="worker 1 gave up"):
        ring.push(update)
    assert time.monotonic() - started < 2
    errors = [process.answer()["error"] for process in ring.processes]
    assert errors == ["StreamAborted", "ProtocolError", "StreamAborted"]
    ring.deliver(Update(SIZES))


def test_the_writers_deadline_names_who_is_slow(rings: dict[tuple[int, bool], Ring]) -> None:
    ring = rings[3, True]
    update = Update([50 * CAPACITY])
    ring.begin(update, late=[0.0, 0.0, 0.6])
    with pytest.raises(DeadlineExceeded, match="worker 2") as caught:
        ring.push(update, deadline=Deadline.after(0.2))
    assert caught.value.seconds == 0.2
    assert {process.answer()["error"] for process in ring.processes} == {"StreamAborted"}
    ring.deliver(Update(SIZES))


def test_the_readers_deadline_names_the_sender(rings: dict[tuple[int, bool], Ring]) -> None:
    ring = rings[1, True]
    ring.begin(Update([10]), seconds=0.1)
    answer = ring.processes[0].answer()
    assert answer["error"] == "DeadlineExceeded" and "sender" in answer["text"]
    ring.writer.abort()
    ring.deliver(Update(SIZES))


def test_a_signal_ends_a_wait(rings: dict[tuple[int, bool], Ring]) -> None:
    """Ctrl-C in the sender's main thread, while no reader makes room."""

    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    ring = rings[1, True]
    update = Update([50 * CAPACITY])
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        ring.begin(update, late=[1.0])
        timer = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGUSR1])
        timer.start()
        started = time.monotonic()
        with pytest.raises(Interrupted):
            ring.push(update)
        assert time.monotonic() - started < 0.9
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ring.processes[0].answer()["error"] == "StreamAborted"


def test_resources_are_flat(pool: list[Process], rings: dict[tuple[int, bool], Ring]) -> None:
    counts = []
    for number in range(50):
        for carries_bytes in (True, False):
            ring = rings[2, carries_bytes]
            if number % 3 == 0:
                update = Update([100])
                ring.begin(update)
                ring.writer.abort()
                assert [p.answer()["error"] for p in ring.processes] == ["StreamAborted"] * 2
            ring.deliver(Update([CHUNK, 0, 3 * CAPACITY], seed=number))
        counts.append([resources(), *(process.call("resources") for process in pool)])
    assert counts[1] == counts[-1]
