"""The ring, when the other end or the caller does what nobody may: refused, and nothing is harmed.

Both ends are in this process, so that the memory can be reached into between write and read.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_rig import CAPACITY, CHUNK, Alone
from ring_worker import resources

from weightsync.deadline import Deadline
from weightsync.errors import (
    ProtocolError,
    StreamAborted,
    TransportError,
    UpdateRefused,
)
from weightsync.transport.memfd import sealed_memfd
from weightsync.transport.ring import Peer, RingReader, RingWriter

USES = pytest.mark.parametrize("carries_bytes", [True, False], ids=["streamed", "journal"])

# What nobody may write

DATA = 4096  # data_offset of a ring with few readers
HEAD, STATE, BASE = 64, 72, 80
TAIL = 192
TENSOR, START, NBYTES, SHARE, KIND = (DATA + at for at in (0, 8, 16, 24, 28))


@pytest.fixture
def alone() -> Iterator[Alone]:
    made = Alone()
    yield made
    made.close()


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


LARGE = (1 << 64) - 1

MALFORMED = [
    (TENSOR, u64(2), "of tensor 2, there are 2"),
    (TENSOR, u64(LARGE), "of tensor"),
    (START, u64(1), "500 bytes from byte 1 of tensor 0, which has 500"),
    (START, u64(LARGE), "bytes from byte"),
    (START, u64(LARGE - 498), "bytes from byte"),
    (NBYTES, u64(501), "501 bytes from byte 0"),
    (NBYTES, u64(LARGE), "bytes from byte 0"),
    (SHARE, u32(1), "of share 1"),
    (KIND, u32(0), "of kind 0"),
    (KIND, u32(2), "skips bytes"),
    (HEAD, u64(64), "carries 500 bytes, 0 are there"),
    (HEAD, u64(65), "written up to byte 65"),
    (HEAD, u64(CAPACITY + 64), "written up to byte"),
    (HEAD, u64(LARGE - 63), "written up to byte"),
    (BASE, u64(1), "began at byte 1"),
    (BASE, u64(1 << 40), "written up to byte"),
    (STATE, u64(2 << 8), "at update 2, not 1"),
    (STATE, u64(1 << 8 | 9), "in state 9"),
]


@pytest.mark.parametrize(("at", "content", "message"), MALFORMED)
def test_malformed_records_are_refused(alone: Alone, at: int, content: bytes, message: str) -> None:
    alone.writer.finish()
    alone.poke(at, content)
    with pytest.raises(ProtocolError, match=message):
        alone.follow()
    assert not alone.outside()


def test_untouched_it_would_have_been_taken(alone: Alone) -> None:
    """The tests above refuse what was poked, and not the ring as such."""
    sent = alone.writer.finish()
    np.testing.assert_array_equal(sent[0], alone.follow())
    assert not alone.outside()


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([HEAD, STATE, BASE, TENSOR, START, NBYTES, SHARE, KIND])
            | st.integers(0, 320)
            | st.integers(DATA, DATA + CAPACITY - 8),
            st.binary(min_size=1, max_size=8),
        ),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_no_scribbling_makes_a_reader_leave_its_tensors(
    pokes: list[tuple[int, bytes]], carries_bytes: bool
) -> None:
    alone = Alone(carries_bytes=carries_bytes)
    alone.writer.finish()
    for at, content in pokes:
        alone.poke(at, content)
    with contextlib.suppress(TransportError):
        alone.follow(seconds=0.01)
    assert not alone.outside()
    alone.close()


@pytest.mark.parametrize("tail", [CAPACITY * 8, LARGE, 1, LARGE - 63])
def test_a_reader_that_claims_what_it_cannot_have_read_is_refused(tail: int) -> None:
    alone = Alone(readers=2)
    alone.poke(TAIL + 128, u64(tail))
    with pytest.raises(ProtocolError, match="worker 1: it says that it has read up to"):
        alone.push(times=10)
    alone.close()


def test_a_reader_of_an_earlier_update_cannot_pass_for_one_of_this(alone: Alone) -> None:
    """Positions go on: what it writes late is behind where this update began."""
    alone.writer.finish()
    alone.follow()
    alone.update = alone.writer.begin(2, [Peer("worker 0", alone.ours.fileno())])
    alone.poke(TAIL, u64(64))
    with pytest.raises(ProtocolError, match="read up to byte 64"):
        alone.push(times=10)


def test_a_flipped_bit_shows_in_the_digest_of_its_tensor(alone: Alone) -> None:
    sent = alone.writer.finish()
    payload = DATA + 64
    byte = os.pread(alone.writer.fd, 1, payload + 77)[0]
    alone.poke(payload + 77, bytes([byte ^ 0x10]))
    found = alone.follow()
    assert (found[0] != sent[0, 0]).any()
    np.testing.assert_array_equal(found[1], sent[0, 1])


@pytest.mark.parametrize("at", [0, 8, 12, 16])
def test_a_header_that_is_none_is_refused(at: int) -> None:
    """Magic, version, number of readers, capacity."""
    writer = RingWriter(2, carries_bytes=True, capacity=CAPACITY, chunk=CHUNK)
    os.pwrite(writer.fd, b"\xff\xff", at)
    with pytest.raises(ProtocolError, match="malformed ring"):
        RingReader(os.dup(writer.fd), writer.nbytes, 0)
    writer.close()


def test_a_descriptor_that_is_no_ring_is_refused_and_closed(tmp_path: Path) -> None:
    before = resources()
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(8192))
    with pytest.raises(ProtocolError, match="cannot be mapped"):
        RingReader(os.open(plain, os.O_RDWR), 8192, 0)
    with pytest.raises(ProtocolError, match="malformed ring"):
        RingReader(sealed_memfd(8192), 8192, 0)
    with pytest.raises(ProtocolError, match="expected sealed memory of 4096 bytes, got 8192"):
        RingReader(sealed_memfd(8192), 4096, 0)
    writer = RingWriter(2, carries_bytes=True)
    with pytest.raises(ProtocolError, match="reader 2 of 2"):
        RingReader(os.dup(writer.fd), writer.nbytes, 2)
    writer.close()
    assert resources() == before


# What a caller may not ask for


@pytest.mark.parametrize(
    ("carries_bytes", "capacity", "chunk"),
    [(True, 4095, 64), (True, 4096, 100), (True, 4096, 1088), (True, 0, 64), (False, 4096, 0)],
)
def test_bad_sizes_are_refused(carries_bytes: bool, capacity: int, chunk: int) -> None:
    before = resources()
    with pytest.raises(ValueError):
        RingWriter(1, carries_bytes=carries_bytes, capacity=capacity, chunk=chunk)
    assert resources() == before


def test_calls_out_of_turn_are_refused(alone: Alone) -> None:
    with pytest.raises(UpdateRefused, match="under way"):
        alone.writer.begin(1, [Peer("worker 0", alone.ours.fileno())])
    alone.writer.finish()
    with pytest.raises(UpdateRefused, match="begin"):
        alone.push()
    with pytest.raises(UpdateRefused, match="begin"):
        alone.writer.finish()
    with pytest.raises(ValueError, match="1 readers, but 0 peers"):
        alone.writer.begin(1, [])
    alone.writer.close()
    with pytest.raises(TransportError, match="closed"):
        alone.writer.begin(1, [Peer("worker 0", alone.ours.fileno())])
    alone.reader.close()
    with pytest.raises(TransportError, match="closed"):
        alone.follow()


@USES
def test_spans_that_do_not_fit_the_update_are_refused_and_abort_it(carries_bytes: bool) -> None:
    alone = Alone(carries_bytes=carries_bytes)
    address, place = alone.data.ctypes.data, alone.places[0]
    arena = None if carries_bytes else [place]
    with pytest.raises(ValueError, match="out_index 2 is not below"):
        alone.writer.push(
            [address], [1], [0], [5], [2], destinations=arena, deadline=Deadline.after(1)
        )
    with pytest.raises(StreamAborted, match="the sender"):
        alone.follow()
    alone.writer.begin(2, [Peer("worker 0", alone.ours.fileno())])
    wrong = [place] if carries_bytes else None
    with pytest.raises(ValueError, match="destination"):
        alone.writer.push(
            [address], [1], [0], [5], [0], destinations=wrong, deadline=Deadline.after(1)
        )
    alone.close()
