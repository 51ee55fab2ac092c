"""A log of receipts: what is in it is whole, on disk and in order; whatever happens to it is found
and named."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from receipt_examples import example
from safetensors.torch import save_file
from toys import SHAPES, tensors

import weightsync as ws
from weightsync import receipt_log
from weightsync.deadline import Deadline
from weightsync.errors import ReceiptLogError, ReceiptNotWritten, ServedMismatch
from weightsync.receipt import Receipt, chain
from weightsync.receipt_check import check, entries
from weightsync.receipt_log import ReceiptLog, read_lines
from weightsync.testing.toy import ToyEngine

HERE = Path(__file__).parent


def chained(length: int) -> list[bytes]:
    """Lines of a sound log; versions "1", "2", ..."""
    lines: list[bytes] = []
    previous = ""
    for number in range(1, length + 1):
        receipt = chain(msgspec.structs.replace(example(str(number)), previous=previous))
        previous = receipt.hash
        lines.append(receipt.to_json().encode() + b"\n")
    return lines


def found(lines: list[bytes], **known: str) -> list[tuple[str, int, str]]:
    return [(one.kind, one.line, one.version) for one in check(lines, **known)]


def split(text: bytes) -> list[bytes]:
    """As a binary file yields it."""
    return [line for line in text.replace(b"\n", b"\n\0split").split(b"\0split") if line]


def log_of(path: Path) -> list[Receipt]:
    receipts = [entry.receipt for entry in entries(read_lines(path))]
    return [receipt for receipt in receipts if receipt is not None]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "receipts.jsonl"


@pytest.fixture
def engine():
    with ToyEngine(SHAPES, workers=2) as found:
        yield found


# --- checking -------------------------------------------------------------------------------------

WHOLE = chained(5)
LAST = json.loads(WHOLE[-1])["hash"]


def test_a_log_as_it_was_written_is_sound_and_so_is_an_empty_one() -> None:
    assert check([]) == [] and check(WHOLE) == [] and check(WHOLE, last=LAST) == []
    assert check([*WHOLE[:-1], WHOLE[-1].rstrip()]) == [], "whole, but for its line's end"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_byte_that_is_changed_lost_or_added_is_found(data: st.DataObject) -> None:
    whole = b"".join(WHOLE[:3])
    at = data.draw(st.integers(0, len(whole) - 1))
    byte = bytes([data.draw(st.integers(0, 255))])
    ends = (at + data.draw(st.integers(0, 1)), data.draw(st.sampled_from([b"", byte])))
    changed = whole[:at] + ends[1] + whole[ends[0] :]
    if changed in (whole, whole[:-1]):
        return
    findings = check(split(changed))
    assert findings and abs(findings[0].line - (whole[:at].count(b"\n") + 1)) <= 1


@given(st.lists(st.integers(0, 4), max_size=8))
def test_lines_in_any_other_order_or_number_are_found(order: list[int]) -> None:
    lines = [WHOLE[i] for i in order]
    is_beginning = order == list(range(len(order)))
    assert bool(check(lines)) != is_beginning
    assert bool(check(lines, last=LAST)) != (order == [0, 1, 2, 3, 4]), "the end is known"


def edited(line: bytes, rehash: bool = False, **fields: Any) -> bytes:
    content = {**json.loads(line), **fields}
    receipt = Receipt.from_json(json.dumps(content))
    return (chain(receipt) if rehash else receipt).to_json().encode() + b"\n"


def forged(line: bytes) -> bytes:
    return edited(line, rehash=True, version="forged")


A, B, C, D, E = WHOLE


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([A, edited(B, nbytes=9), C], [("changed", 2, "2")]),
        ([A, edited(B, previous="00" * 32), C], [("changed", 2, "2")]),
        ([A, edited(B, hash="00" * 32), C], [("changed", 2, "2")]),
        ([A, B.replace(b'{"v', b'{"more":1,"v'), C], [("changed", 2, "2")]),
        ([A, B.replace(b",", b", ", 1), C], [("changed", 2, "2")]),
        ([A, forged(B), C], [("missing", 3, "3")]),
        ([A, C, D], [("missing", 2, "3")]),
        ([B, C], [("missing", 1, "2")]),
        ([A, C, B, D], [("moved", 2, "3"), ("moved", 3, "2"), ("moved", 4, "4")]),
        ([B, A], [("moved", 1, "2"), ("moved", 2, "1")]),
        ([A, B, B, C], [("doubled", 3, "2")]),
        ([A, B, C, A, D], [("doubled", 4, "1")]),
        (
            [A, B, edited(C, rehash=True, previous=json.loads(A)["hash"])],
            [("branched", 3, "3")],
        ),
        ([A, B, edited(A, rehash=True, version="x")], [("branched", 3, "x")]),
        ([A, B[:300] + b"\n", B, C], [("torn", 2, "2")]),
        ([A, B[:300] + b"\n", C], [("torn", 2, "2"), ("missing", 3, "3")]),
        ([A, B[:4]], [("torn", 2, "")]),
        ([A, B[:300] + b"\0" * 90], [("torn", 2, "2")]),
        ([A, b"\0" * 90 + b"\n", B], [("torn", 2, "")]),
        ([A, b"hello\n", B], [("foreign", 2, "")]),
        ([A, b"\n", B], [("foreign", 2, "")]),
        ([A, b"\xff\xfe\n", b"[" * 100_000], [("foreign", 2, ""), ("foreign", 3, "")]),
    ],
)
def test_a_fault_is_named_by_kind_line_and_version(
    lines: list[bytes], expected: list[tuple[str, int, str]]
) -> None:
    assert found(lines) == expected
    for finding in check(lines):
        assert finding.remedy and f"line {finding.line}" in str(finding)


def test_where_a_line_belongs_is_said() -> None:
    details = [one.detail for one in check([A, C, B, D])]
    assert details == [f"its place is right after line {n}" for n in (3, 1, 2)]
    assert "and so does line 1" in check([A, edited(A, rehash=True, version="x")])[0].detail


def test_a_missing_end_is_found_by_who_knows_the_last_hash() -> None:
    assert check(WHOLE[:3]) == [], "nothing in what is left could tell"
    assert found(WHOLE[:3], last=LAST) == [("missing", 4, "")]
    assert found([], last=LAST) == [("missing", 1, "")]


# --- writing --------------------------------------------------------------------------------------


def test_receipts_are_appended_and_go_on_from_the_last_one_in_another_process_too(
    path: Path,
) -> None:
    one = ReceiptLog(path).append(example("1"))
    two = ReceiptLog(path).append(example("2\n\u2028"))
    assert one.previous == "" and two.previous == one.hash and two.intact
    code = "import receipt_examples, sys; from weightsync import ReceiptLog\n"
    code += "print(ReceiptLog(sys.argv[1]).append(receipt_examples.example('3')).hash)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=HERE,
    )
    assert [receipt.hash for receipt in log_of(path)] == [one.hash, two.hash, done.stdout.strip()]
    assert check(read_lines(path), last=done.stdout.strip()) == []


@pytest.mark.parametrize("tensors", [0, 1, 2000, 2037, 20_000])
def test_the_last_receipt_is_found_however_long_it_is(path: Path, tensors: int) -> None:
    log = ReceiptLog(path)
    long = log.append(example("1", tensors=tensors))
    assert log.append(example("2")).previous == long.hash
    assert check(read_lines(path)) == []


@pytest.mark.parametrize("length", range(receipt_log.BLOCK - 3, receipt_log.BLOCK + 4))
def test_line_ends_at_the_edge_of_a_block_are_seen(path: Path, length: int) -> None:
    short = msgspec.structs.replace(example("1"), manifest_hash="")
    fill = length - len(chain(short).to_json()) - 1
    log = ReceiptLog(path)
    log.append(example("0"))
    exact = log.append(msgspec.structs.replace(short, manifest_hash="m" * (fill - 64)))
    assert len(exact.to_json()) + 1 == length
    assert log.append(example("2")).previous == exact.hash
    assert check(read_lines(path)) == []


def test_a_line_is_on_disk_when_append_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Synced with the whole line in the file, and its name with it when the file is new."""
    synced: list[bytes | str] = []
    fsync = os.fsync

    def seen(file: int) -> None:
        name = os.readlink(f"/proc/self/fd/{file}")
        synced.append(path.read_bytes() if name == str(path) else name)
        fsync(file)

    log = ReceiptLog(path)
    monkeypatch.setattr(os, "fsync", seen)
    one = log.append(example("1"))
    first = one.to_json().encode() + b"\n"
    assert synced == [first, str(path.parent)]
    two = log.append(example("2"))
    assert synced[2:] == [first + two.to_json().encode() + b"\n"]


@pytest.mark.parametrize("fails", ["write", "fsync"])
def test_what_could_not_be_written_is_taken_back(
    path: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = ReceiptLog(path)
    log.append(example("1"))
    before = path.read_bytes()
    write = os.write
    calls = []

    def half(file: int, line: bytes) -> int:
        calls.append(len(line))
        if len(calls) > 1:
            raise OSError(errno.EIO, "Input/output error")
        return write(file, line[: len(line) // 2])

    def no(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, fails, half if fails == "write" else no)
        with pytest.raises(ReceiptNotWritten, match="Input/output error") as refused:
            log.append(example("2"))
    assert path.read_bytes() == before
    assert refused.value.receipt.version == "2"
    again = ReceiptLog(path).append(refused.value.receipt)
    assert again.previous == json.loads(before)["hash"] and check(read_lines(path)) == []


FULL = """
import resource, sys
from receipt_examples import example
from weightsync.errors import ReceiptNotWritten
from weightsync.receipt_log import ReceiptLog

path, room = sys.argv[1], int(sys.argv[2])
log = ReceiptLog(path)
log.append(example("1"))
before = open(path, "rb").read()
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room, hard))
try:
    log.append(example("2"))
except ReceiptNotWritten as error:
    print(error)
else:
    raise SystemExit("there was no room for it")
if open(path, "rb").read() != before:
    raise SystemExit("a part of it is there")
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
log.append(example("3"))
"""


@pytest.mark.parametrize("room", [0, 1, 700])
def test_where_there_is_no_room_nothing_is_left_and_it_goes_on_once_there_is(
    path: Path, room: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(path), str(room)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=HERE,
    )
    assert done.returncode == 0, done.stderr
    assert "the update is committed" in done.stdout and "File too large" in done.stdout
    assert [receipt.version for receipt in log_of(path)] == ["1", "3"]
    assert check(read_lines(path)) == []


KILLED = """
import os, signal, sys
from receipt_examples import example
from weightsync.receipt_log import ReceiptLog

path, version, cut = sys.argv[1], sys.argv[2], float(sys.argv[3])
log = ReceiptLog(path)
write = os.write

def partly(file, line):
    write(file, line[: round(cut * len(line)) if cut <= 1 else len(line) - 1])
    os.kill(os.getpid(), signal.SIGKILL)

os.write = partly
log.append(example(version))
"""


def killed(path: Path, version: str, cut: float) -> None:
    """A process that dies when it has written this share of a line; 2: all but its end."""
    died = subprocess.run(
        [sys.executable, "-c", KILLED, str(path), version, str(cut)],
        timeout=60,
        check=False,
        cwd=HERE,
    )
    assert died.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("cut", "torn"), [(0, False), (0.003, True), (0.5, True), (2, False), (1, False)]
)
@pytest.mark.parametrize("first", [True, False])
def test_a_line_whose_writer_was_killed_is_told_apart_and_the_log_goes_on(
    path: Path, cut: float, torn: bool, first: bool
) -> None:
    log = ReceiptLog(path)
    before = 0
    if not first:
        log.append(example("1"))
        before = 1
    killed(path, "killed", cut)
    assert found(list(read_lines(path))) == (
        [("torn", before + 1, "killed" if cut > 0.1 else "")] if torn else []
    )
    log.append(example("2"))
    log.append(example("3"))
    findings = check(read_lines(path))
    assert [one.kind for one in findings] == (["torn"] if torn else [])
    survivors = [receipt.version for receipt in log_of(path) if receipt.version != "killed"]
    assert survivors == ["1", "2", "3"][1 - before :]
    lines = list(read_lines(path))
    if torn:
        del lines[findings[0].line - 1]
    assert check(lines) == [], "a torn line may be deleted"


def test_several_torn_lines_in_a_row_do_not_hide_the_last_receipt(path: Path) -> None:
    log = ReceiptLog(path)
    one = log.append(example("1"))
    for _ in range(3):
        killed(path, "killed", 0.4)
    assert log.append(example("2")).previous == one.hash
    assert found(list(read_lines(path))) == [("torn", n, "killed") for n in (2, 3, 4)]


APPENDER = """
import sys
from receipt_examples import example
from weightsync.receipt_log import ReceiptLog

path, name, number, tensors = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
print("ready", flush=True)
sys.stdin.readline()
for i in range(number):
    ReceiptLog(path).append(example(f"{name}-{i}", tensors=tensors))
    print(i, flush=True)
"""


class Appenders:
    """Processes that append to one file, all at once."""

    def __init__(self, path: Path, names: str, number: int, tensors: int) -> None:
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", APPENDER, str(path), name, str(number), str(tensors)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=HERE,
            )
            for name in names
        ]

    def __enter__(self) -> list[subprocess.Popen[bytes]]:
        for process in self.processes:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
        return self.processes

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait(20)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def test_processes_that_append_to_one_file_make_one_chain(path: Path) -> None:
    with Appenders(path, "abcd", 40, tensors=20) as processes:
        for process in processes:
            assert process.wait(60) == 0
    assert check(read_lines(path)) == []
    versions = [receipt.version for receipt in log_of(path)]
    assert sorted(versions) == sorted(f"{name}-{i}" for name in "abcd" for i in range(40))
    assert versions != sorted(versions), "they were not at work at the same time"


def test_writers_that_are_killed_lose_nothing_that_was_acknowledged(path: Path) -> None:
    """Lines of 4 MB, killed while one grows. The log may have torn lines, and no other fault."""
    acknowledged: list[str] = []
    for names in ("ab", "cd", "ef"):
        with Appenders(path, names, 1000, tensors=70_000) as processes:
            for process, name in zip(processes, names, strict=True):
                assert process.stdout is not None
                said = process.stdout.readline()
                size = path.stat().st_size
                end = Deadline.after(30)
                while path.stat().st_size == size:
                    end.rest(0.0002, "a line to be written")
                process.kill()
                said += process.stdout.read()
                acknowledged += [f"{name}-{i}" for i in range(said.count(b"\n"))]
        assert {one.kind for one in check(read_lines(path))} <= {"torn"}
    ReceiptLog(path).append(example("last"))
    assert {one.kind for one in check(read_lines(path))} <= {"torn"}
    versions = [receipt.version for receipt in log_of(path)]
    assert len(acknowledged) >= 6 and set(acknowledged) <= set(versions)
    assert versions[-1] == "last"


def test_threads_of_one_process_make_one_chain_too(path: Path) -> None:
    log = ReceiptLog(path)
    threads = [
        threading.Thread(target=lambda: [log.append(example()) for _ in range(25)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(log_of(path)) == 100 and check(read_lines(path)) == []


def test_who_waits_for_a_lock_in_vain_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = ReceiptLog(path)
    monkeypatch.setattr(receipt_log, "LOCK_SECONDS", 0.2)
    with path.open("rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_SH)
        assert list(read_lines(path)) == [], "readers do not keep each other out"
        with pytest.raises(ReceiptNotWritten, match=r"waited 0\.2 s for the lock"):
            log.append(example())
    log.append(example())


def test_a_file_that_is_moved_away_begins_anew_also_while_its_lock_is_waited_for(
    path: Path, tmp_path: Path
) -> None:
    log = ReceiptLog(path)
    log.append(example("1"))
    written: list[Receipt] = []
    with path.open("rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: written.append(log.append(example("2"))))
        thread.start()
        end = Deadline.after(20)
        # The other end of the wait: its descriptor of the file, beside this test's own.
        while sum(os.path.realpath(f) == str(path) for f in Path("/proc/self/fd").iterdir()) < 2:
            end.rest(0.002, "the appender to wait for the lock")
        path.rename(tmp_path / "old.jsonl")
    thread.join(20)
    assert written[0].previous == "" and [r.version for r in log_of(path)] == ["2"]
    assert [r.version for r in log_of(tmp_path / "old.jsonl")] == ["1"]


def test_a_line_that_is_being_written_is_not_taken_for_a_torn_one(path: Path) -> None:
    ReceiptLog(path).append(example("1"))
    line = (
        chain(msgspec.structs.replace(example("2"), previous=log_of(path)[-1].hash))
        .to_json()
        .encode()
    )
    found: list[list[bytes]] = []
    with path.open("ab", buffering=0) as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        writer.write(line[:500])
        reader = threading.Thread(target=lambda: found.append(list(read_lines(path))))
        reader.start()
        end = Deadline.after(20)
        while sum(os.path.realpath(f) == str(path) for f in Path("/proc/self/fd").iterdir()) < 2:
            end.rest(0.002, "the reader to wait for the lock")
        writer.write(line[500:] + b"\n")
        fcntl.flock(writer, fcntl.LOCK_UN)
        reader.join(20)
    assert len(found[0]) == 2 and check(found[0]) == []
    reading = read_lines(path)
    next(reading)
    with path.open("ab") as writer:
        writer.write(line[:500])
    assert len(list(reading)) == 1, "what comes later is left out"


def test_nothing_stays_open(path: Path) -> None:
    log = ReceiptLog(path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        log.append(example())
        list(read_lines(path))
        with pytest.raises(ReceiptLogError):
            ReceiptLog(path.parent)
    assert len(os.listdir("/proc/self/fd")) == before


def strangers(directory: Path) -> dict[str, Path]:
    checkpoint = directory / "model.safetensors"
    save_file({"w": torch.zeros(3)}, checkpoint)
    texts = {
        "notes": "some notes\n",
        "json": '{"version": "1"}\n',
        "pretty": json.dumps(json.loads(A), indent=1) + "\n",
        "no end": '{"x": 1}',
        "log of something else": '{"step": 1, "loss": 0.5}\n' * 3,
    }
    found = {"checkpoint": checkpoint, "directory": directory}
    for name, text in texts.items():
        found[name] = directory / name
        found[name].write_text(text)
    return found


NAMES = ["checkpoint", "directory", "notes", "json", "pretty", "no end", "log of something else"]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_another_kind_is_refused_and_left_as_it_is(name: str, tmp_path: Path) -> None:
    stranger = strangers(tmp_path)[name]
    before = None if stranger.is_dir() else stranger.read_bytes()
    for attempt in (ReceiptLog, lambda path: list(read_lines(path))):
        with pytest.raises(ReceiptLogError) as refused:
            attempt(stranger)
        assert str(stranger) in str(refused.value) and refused.value.remedy
        if name != "directory":
            assert "expected one in JSON on each line, found" in str(refused.value)
    assert before is None or stranger.read_bytes() == before


def test_a_pipe_and_a_place_that_is_not_there_are_refused_without_a_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for attempt in (ReceiptLog, lambda path: list(read_lines(path))):
        with pytest.raises(ReceiptLogError, match="expected a regular file"):
            attempt(tmp_path / "pipe")
        with pytest.raises(ReceiptLogError, match="No such file"):
            attempt(tmp_path / "nowhere" / "log")
    with pytest.raises(ReceiptLogError, match="No such file"):
        list(read_lines(tmp_path / "log"))
    assert not (tmp_path / "log").exists(), "readers make nothing"


# --- by a sender, and by a look -------------------------------------------------------------------


def test_a_senders_receipts_are_in_the_log_before_they_are_handed_out(
    path: Path, engine: ToyEngine
) -> None:
    handed: list[bool] = []

    def hand(receipt: Receipt) -> None:
        handed.append(log_of(path)[-1] == receipt)

    source = ws.StateDictSource(tensors(1))
    for _ in range(2):  # two senders: the second one's first receipt goes on from the file
        with ws.WeightSender(source, [engine], receipts=path, on_receipt=hand) as sender:
            returned = [sender.sync("a"), sender.sync("b")]
            assert sender.last_receipt == returned[-1]
    looked = ws.prove(source, [engine], receipts=str(path))
    receipts = log_of(path)
    assert handed == [True] * 4 and receipts[2:] == [*returned, looked]
    assert [r.mode for r in receipts] == ["staged"] * 4 + ["look"]
    assert check(read_lines(path), last=looked.hash) == []


def test_a_look_that_finds_a_difference_leaves_no_receipt(path: Path, engine: ToyEngine) -> None:
    with ws.WeightSender(ws.StateDictSource(tensors(1)), [engine], receipts=path) as sender:
        sender.sync(1)
    before = path.read_bytes()
    with pytest.raises(ServedMismatch):
        ws.prove(ws.StateDictSource(tensors(2)), [engine], receipts=path)
    assert path.read_bytes() == before


def test_a_receipt_that_cannot_be_written_is_no_failed_update(
    path: Path, engine: ToyEngine
) -> None:
    handed: list[Receipt] = []
    source = ws.StateDictSource(tensors(1))
    with ws.WeightSender(source, [engine], receipts=path, on_receipt=handed.append) as sender:
        first = sender.sync("1")
        path.rename(path.with_suffix(".kept"))
        path.mkdir()
        with pytest.raises(ReceiptNotWritten, match="the update is committed") as refused:
            sender.sync("2")
        assert engine.version(Deadline.after(1)) == "2" and not engine.is_paused(Deadline.after(1))
        assert all(status["poisoned"] is None for status in engine.status())
        unwritten = refused.value.receipt
        assert sender.last_receipt == unwritten and unwritten.version == "2" and unwritten.intact
        assert handed == [first]
        with pytest.raises(ReceiptNotWritten, match="nothing was changed by looking"):
            look_while_broken(source, engine, path)
        path.rmdir()
        path.with_suffix(".kept").rename(path)
        ReceiptLog(path).append(unwritten)  # as the error says
        sender.sync("3")
    assert [receipt.version for receipt in log_of(path)] == ["1", "2", "3"]
    assert check(read_lines(path)) == []


def look_while_broken(source: ws.StateDictSource, engine: ToyEngine, path: Path) -> None:
    """The log breaks in the midst of a look."""
    log = path.with_suffix(".look")

    class Breaking(ws.StateDictSource):
        def manifest(self) -> ws.Manifest:
            log.unlink()
            log.mkdir()
            return super().manifest()

    ws.prove(Breaking(tensors(1)), [engine], receipts=log)


def test_a_file_of_another_kind_is_refused_before_anything_moves(
    tmp_path: Path, engine: ToyEngine
) -> None:
    stranger = strangers(tmp_path)["notes"]
    source = ws.StateDictSource(tensors(1))
    with pytest.raises(ReceiptLogError):
        ws.WeightSender(source, [engine], receipts=stranger)
    with pytest.raises(ReceiptLogError):
        ws.prove(source, [engine], receipts=stranger)
    assert engine.calls == []
