"""Messages arrive whole, from a closed set; whatever else arrives is a typed error in time."""

from __future__ import annotations

import ast
import os
import pickle
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weightsync
from weightsync import messages, wire
from weightsync.deadline import Deadline
from weightsync.errors import DeadlineExceeded, PeerLost, ProtocolError, TransportError
from weightsync.holding import Holding
from weightsync.manifest import DTYPE_BYTES, TensorSpec
from weightsync.messages import Message
from weightsync.wire import Channel

Pair = tuple[Channel, Channel]

STATUS = messages.WorkerStatus("idle", None, 0, None, False, False)
FOUND = messages.Found(
    bytes(32), ((1, "not finite"),), (messages.WireProblem("moved", "w", "lies elsewhere"),), 0.1
)
EVERY: list[Message] = [
    messages.Hello(2, "s", 0, 2, 4711, "cpu", "toy 1", ("staged", "streamed"), STATUS),
    messages.Welcome(7),
    messages.Joined(1, messages.WorkerStatus("poisoned", "v1", 3, "why", True, True)),
    messages.Layout(
        (TensorSpec("w", "bfloat16", (2, 3)), TensorSpec("s", "bool", ())),
        "h",
        True,
        "staged",
        4096,
        8192,
        2,
    ),
    messages.Described(
        0,
        "h",
        (messages.WireProblem("missing", "w", "is not there"),),
        (messages.Partial(1, (0, 2), (3, 4)),),
        ((3, 0),),
        ((0, "lm_head.weight"),),
        ("model.normalizer",),
        0.5,
        (Holding(0, "w.weight", (0, 0), (2, 3), "spot", True),),
        ((1, "it is packed"),),
    ),
    messages.Begin("u", "v", 2**64 - 1, 4096, 1, False, 600.0, "served"),
    messages.Follow("u"),
    messages.Digests("u", 0, bytes(range(32)), 0.25),
    messages.Arm("u", True),
    messages.Applied("u", 1, None, 1.0, 0.5, FOUND),
    messages.Digests("u", 0, bytes(16), 0.25, FOUND),
    messages.Inspect("l", (TensorSpec("w", "bfloat16", (2, 3)),), "h", True, 7),
    messages.Held("l", 0, FOUND, STATUS),
    messages.Welcome(None),
    messages.Applied("u", 1, "RuntimeError: no", 1.0, 0.0),
    messages.Admit("u"),
    messages.Commit("u"),
    messages.Resumed("u"),
    messages.Abort("u", "because"),
    messages.Poison("u", "a mixture"),
    messages.Ack("begin", "u", 0),
    messages.Refused("begin", "u", 0, "busy"),
]


def soon(seconds: float = 5.0) -> Deadline:
    return Deadline.after(seconds)


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def encoded(message: Message) -> bytes:
    return frame(msgspec.msgpack.encode(message))


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channels = Channel(left, "the left one"), Channel(right, "the right one")
    yield channels
    for channel in channels:
        channel.close()


class Raw:
    """A peer that may send anything, and the channel that must stand it."""

    def __init__(self) -> None:
        self.sock, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.channel = Channel(other, "the raw peer")

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self.sock.close()

    def receives(self, data: bytes) -> list[Message]:
        """What the channel makes of these bytes and the end after them."""
        writer = threading.Thread(target=self._write, args=(data,))
        writer.start()
        messages: list[Message] = []
        try:
            while True:
                messages.append(self.channel.receive(soon()))
        except PeerLost:
            return messages
        finally:
            self.channel.close()
            writer.join()

    def _write(self, data: bytes) -> None:
        try:
            self.sock.sendall(data)
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the channel has had enough


@pytest.fixture
def raw() -> Iterator[Raw]:
    with Raw() as peer:
        yield peer


# What is sent arrives


@pytest.mark.parametrize("message", EVERY, ids=lambda m: type(m).__name__)
def test_every_message_arrives_as_it_was_sent(message: Message, pair: Pair) -> None:
    left, right = pair
    left.send(message, soon())
    arrived = right.receive(soon())
    assert arrived == message and type(arrived) is type(message)


def test_every_type_of_message_is_in_this_file() -> None:
    assert {type(message) for message in EVERY} == set(Message.__subclasses__())


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
counts = st.integers(0, 2**63)
layouts = st.builds(
    messages.Layout,
    st.lists(
        st.builds(
            TensorSpec,
            texts,
            st.sampled_from(sorted(DTYPE_BYTES)),
            st.lists(counts, max_size=3).map(tuple),
        ),
        max_size=4,
    ).map(tuple),
    texts,
    st.booleans(),
    st.sampled_from(["staged", "streamed"]),
    counts,
    counts,
    counts,
)


@given(
    st.lists(
        layouts | st.builds(messages.Digests, texts, counts, st.binary(), st.floats(0)),
        max_size=4,
    )
)
@settings(max_examples=50)
def test_messages_arrive_in_order_and_alone(messages: list[Message]) -> None:
    with Raw() as raw:
        assert raw.receives(b"".join(encoded(message) for message in messages)) == messages


def test_a_message_cut_at_any_byte_arrives_whole(raw: Raw) -> None:
    message = EVERY[3]
    data = encoded(message)
    for cut in range(1, len(data)):
        raw.sock.sendall(data[:cut])
        assert raw.channel.poll() is None
        raw.sock.sendall(data[cut:])
        assert raw.channel.poll() == message
        assert raw.channel.poll() is None


def test_a_message_that_comes_byte_by_byte_arrives_whole(raw: Raw) -> None:
    for byte in encoded(EVERY[4]) + encoded(EVERY[5]):
        raw.sock.sendall(bytes([byte]))
        message = raw.channel.poll()
        if message is not None:
            last = message
    assert last == EVERY[5]


def test_a_message_much_larger_than_a_sockets_buffer_arrives_whole(pair: Pair) -> None:
    left, right = pair
    message = messages.Digests("u", 0, random.Random(0).randbytes(3 << 20), 0.0)
    sender = threading.Thread(target=left.send, args=(message, soon(30)))
    sender.start()
    assert right.receive(soon(30)) == message
    sender.join()


def test_poll_does_not_wait(pair: Pair) -> None:
    started = time.monotonic()
    assert pair[0].poll() is None
    assert time.monotonic() - started < 1.0


def test_messages_that_came_before_the_end_are_still_delivered(raw: Raw) -> None:
    assert raw.receives(encoded(EVERY[1]) + encoded(EVERY[5])) == [EVERY[1], EVERY[5]]


# Descriptors


def test_a_descriptor_travels_with_its_message(pair: Pair) -> None:
    left, right = pair
    fd = os.memfd_create("test")
    os.write(fd, b"hello")
    left.send(EVERY[5], soon())
    left.send(EVERY[3], soon(), fds=[fd])
    left.send(EVERY[8], soon())
    assert right.receive(soon()) == EVERY[5]
    assert right.receive(soon()) == EVERY[3]
    taken = right.take_fd()
    assert os.fstat(taken).st_ino == os.fstat(fd).st_ino
    assert not os.get_inheritable(taken)
    assert right.receive(soon()) == EVERY[8]
    with pytest.raises(ProtocolError, match="the right one sent no"):
        right.take_fd()
    os.close(taken)
    os.close(fd)


def test_two_descriptors_travel_in_their_order(pair: Pair) -> None:
    left, right = pair
    fds = [os.memfd_create(f"test{number}") for number in range(2)]
    left.send(EVERY[3], soon(), fds=fds)
    assert right.receive(soon()) == EVERY[3]
    taken = [right.take_fd() for _ in fds]
    assert [os.fstat(fd).st_ino for fd in taken] == [os.fstat(fd).st_ino for fd in fds]
    for fd in (*fds, *taken):
        os.close(fd)


def test_a_descriptor_goes_once_even_if_its_message_goes_in_pieces(pair: Pair) -> None:
    left, right = pair
    fd = os.memfd_create("test")
    message = messages.Digests("u", 0, bytes(2 << 20), 0.0)
    sender = threading.Thread(target=left.send, args=(message, soon(30)), kwargs={"fds": [fd]})
    sender.start()
    assert right.receive(soon(30)) == message
    sender.join()
    os.close(right.take_fd())
    with pytest.raises(ProtocolError):
        right.take_fd()
    os.close(fd)


@pytest.mark.parametrize("count", [3, 4, 50])
def test_more_descriptors_than_belong_are_refused_and_closed(count: int) -> None:
    fd = os.memfd_create("test")
    before = open_fds()
    with Raw() as raw:
        socket.send_fds(raw.sock, [encoded(EVERY[5])], [fd] * count)
        with pytest.raises(ProtocolError, match="more file descriptors"):
            raw.channel.receive(soon())
    assert open_fds() == before
    os.close(fd)


def test_descriptors_that_pile_up_untaken_are_refused_and_closed() -> None:
    fd = os.memfd_create("test")
    before = open_fds()
    with Raw() as raw:
        for _ in range(3):
            socket.send_fds(raw.sock, [encoded(EVERY[5])], [fd])
        raw.channel.receive(soon())
        raw.channel.receive(soon())
        with pytest.raises(ProtocolError, match="more file descriptors"):
            raw.channel.receive(soon())
    assert open_fds() == before
    os.close(fd)


def test_a_descriptor_that_nobody_took_is_closed_with_the_channel() -> None:
    fd = os.memfd_create("test")
    before = open_fds()
    for _ in range(20):
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        a, b = Channel(left, "a"), Channel(right, "b")
        a.send(EVERY[3], soon(), fds=[fd])
        b.receive(soon())
        a.close()
        b.close()
    assert open_fds() == before
    os.close(fd)


# Peers that are slow, gone, or somebody else


def test_who_does_not_read_is_named_when_the_deadline_passes(pair: Pair) -> None:
    left, _ = pair
    with pytest.raises(DeadlineExceeded, match="the left one") as caught:
        left.send(messages.Digests("u", 0, bytes(8 << 20), 0.0), soon(0.2))
    assert caught.value.awaited == "the left one" and caught.value.seconds == 0.2


def test_who_does_not_write_is_named_when_the_deadline_passes(pair: Pair) -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="the right one"):
        pair[1].receive(soon(0.1))
    assert 0.1 <= time.monotonic() - started < 3.0


def test_who_writes_half_a_message_and_stops_is_named(raw: Raw) -> None:
    raw.sock.sendall(encoded(EVERY[3])[:-1])
    with pytest.raises(DeadlineExceeded, match="the raw peer"):
        raw.channel.receive(soon(0.1))


def test_a_closed_peer_is_lost_for_readers_and_writers(pair: Pair) -> None:
    left, right = pair
    right.close()
    with pytest.raises(PeerLost, match="the left one"):
        left.receive(soon())
    with pytest.raises(PeerLost, match="the left one"):
        left.send(EVERY[5], soon())


def test_a_peer_that_closes_while_it_is_written_to_is_lost(pair: Pair) -> None:
    left, right = pair
    closer = threading.Timer(0.1, right.close)
    closer.start()
    with pytest.raises(PeerLost, match="the left one"):
        left.send(messages.Digests("u", 0, bytes(8 << 20), 0.0), soon())
    closer.join()


def test_this_user_is_let_in_with_its_pid_and_another_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with left, right:
        assert wire.check_peer(left) == os.getpid()
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
        with pytest.raises(ProtocolError, match=f"of user {me}"):
            wire.check_peer(left)


# What nobody may send


BAD_BODIES = {
    "nothing": b"",
    "nil": b"\xc0",
    "no map": msgspec.msgpack.encode([1, 2]),
    "no tag": msgspec.msgpack.encode({"update_id": "u"}),
    "unknown tag": msgspec.msgpack.encode({"type": "shutdown"}),
    "tag of another type": msgspec.msgpack.encode({"type": 3}),
    "field missing": msgspec.msgpack.encode({"type": "begin", "update_id": "u"}),
    "field of another type": msgspec.msgpack.encode({"type": "welcome", "epoch": "1"}),
    "float for int": msgspec.msgpack.encode({"type": "welcome", "epoch": 1.5}),
    "bool for int": msgspec.msgpack.encode({"type": "welcome", "epoch": True}),
    "str for bytes": msgspec.msgpack.encode(
        {"type": "digests", "update_id": "", "rank": 0, "digests": 5, "nbytes": 0, "seconds": 0.0}
    ),
    "unknown kind": msgspec.msgpack.encode(EVERY[4]).replace(b"missing", b"musings"),
    "spec too short": msgspec.msgpack.encode(
        {
            "type": "layout",
            "tensors": [["w", "int8"]],
            "offsets": [],
            "arena_bytes": 1,
            "manifest_hash": "",
        }
    ),
    "rubbish behind": msgspec.msgpack.encode(EVERY[1]) + b"\x00",
    "cut off": msgspec.msgpack.encode(EVERY[4])[:-3],
    "no UTF-8": msgspec.msgpack.encode(EVERY[5]).replace(b"\xa1u", b"\xa1\xff"),
    "deeply nested": b"\x91" * 100_000 + b"\xc0",
    "nested in a field": b"\x82\xa4type\xa7welcome\xa5epoch" + b"\x91" * 100_000 + b"\xc0",
    "nested in a field that nobody knows": b"\x83\xa4type\xa6commit\xa9update_id\xa1u\xa1x"
    + b"\x91" * 100_000
    + b"\xc0",
    "extension": b"\xc7\x04\x05abcd",
    "huge array announced": b"\xdd\xff\xff\xff\xff",
    "huge map announced": b"\xdf\xff\xff\xff\xff",
    "huge string announced": b"\x82\xa4type\xdb\xff\xff\xff\xff",
    "json": b'{"type":"commit","update_id":"u"}',
    "http": b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_a_frame_that_is_no_message_is_a_protocol_error(body: bytes, raw: Raw) -> None:
    with pytest.raises(ProtocolError, match="the raw peer sent something that is no message"):
        raw.receives(frame(body))


@pytest.mark.parametrize("length", [wire.MAX_FRAME + 1, 2**31, 2**32 - 1])
def test_a_frame_longer_than_allowed_is_refused_before_it_is_awaited(length: int, raw: Raw) -> None:
    raw.sock.sendall(struct.pack("<I", length))
    with pytest.raises(ProtocolError, match=str(length)):
        raw.channel.receive(soon())


def test_a_message_larger_than_a_frame_is_not_sent(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME", 1000)
    with pytest.raises(ProtocolError, match="exceeds 1000"):
        pair[0].send(messages.Digests("u", 0, bytes(1000), 0.0), soon())
    assert pair[1].poll() is None


@pytest.mark.parametrize("keep", [0, 1, 3, 4, 5, 20])
def test_a_frame_that_ends_early_is_a_lost_peer(keep: int, raw: Raw) -> None:
    assert raw.receives(encoded(EVERY[3])[:keep]) == []


def survives(data: bytes) -> None:
    """Only the two allowed errors, or messages of the closed set; no hang, no descriptor left."""
    with Raw() as raw:
        try:
            messages = raw.receives(data)
        except ProtocolError:
            return
        assert all(type(message) in Message.__subclasses__() for message in messages)


@given(st.binary(max_size=300))
@settings(max_examples=200)
def test_random_bytes_end_in_a_typed_error(data: bytes) -> None:
    survives(data)
    survives(frame(data))


@given(st.sampled_from(EVERY), st.data())
@settings(max_examples=200)
def test_a_damaged_message_ends_in_a_typed_error(message: Message, data: st.DataObject) -> None:
    body = bytearray(msgspec.msgpack.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    survives(frame(bytes(body)))
    survives(encoded(message)[:cut])
    survives(frame(bytes(body[:cut])))


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | texts
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(EVERY), st.data())
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
def test_wrong_types_in_any_field_end_in_a_typed_error(
    message: Message, data: st.DataObject
) -> None:
    fields = msgspec.to_builtins(message, builtin_types=(bytes,))
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(plain)
    survives(frame(msgspec.msgpack.encode(fields)))


def test_no_descriptor_is_left_after_all_of_this() -> None:
    survives(b"")
    before = open_fds()
    for body in BAD_BODIES.values():
        survives(frame(body))
    assert open_fds() == before


class _Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused_and_never_run(protocol: int, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    payload = pickle.dumps(_Payload(marker), protocol)
    inside = msgspec.msgpack.encode(messages.Digests("u", 0, payload, 0.0))
    as_text = msgspec.msgpack.encode({"type": "begin", "update_id": payload, "version": payload})
    for body in (payload, as_text):
        with Raw() as raw, pytest.raises(TransportError):
            raw.receives(frame(body))
            raise AssertionError("a pickle was taken for a message")
    with Raw() as raw:
        [message] = raw.receives(frame(inside))
        assert isinstance(message, messages.Digests) and message.digests == payload
    assert not marker.exists()
    pickle.loads(payload)
    assert marker.exists(), "the payload would not have shown anything"


# No module can run what it reads


FORBIDDEN_MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
}
FORBIDDEN_CALLS = {"eval", "exec", "compile"}


def forbidden(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(alias.name for alias in node.names)]
        found += [name for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
        if isinstance(node, ast.Call):
            target = node.func
            if isinstance(target, ast.Name) and target.id in FORBIDDEN_CALLS:
                found.append(target.id)
            if isinstance(target, ast.Attribute):
                call = ast.unparse(target)
                if call == "torch.load" or target.attr == "load_module":
                    found.append(call)
                if call.split(".")[-1] in ("loads", "Unpickler") and call != "json.loads":
                    found.append(call)
                if any(k.arg == "allow_pickle" for k in node.keywords):
                    found.append("allow_pickle")
    return found


def modules() -> list[Path]:
    package = Path(weightsync.__file__).parent
    adapters = package.parent / "adapters"
    assert adapters.is_dir()
    return sorted([*package.rglob("*.py"), *adapters.rglob("*.py")])


@pytest.mark.parametrize("path", modules(), ids=lambda path: "/".join(path.parts[-3:]))
def test_no_module_can_decode_code(path: Path) -> None:
    assert forbidden(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, marshal as m",
        "from pickle import loads",
        "def f():\n    import shelve",
        "from torch import x; torch.load('f')",
        "eval('1')",
        "exec('1')",
        "x.loads(b)",
        "np.load('f', allow_pickle=True)",
    ],
)
def test_the_walk_over_modules_would_find_it(source: str) -> None:
    assert forbidden(source)
