"""SIGKILL of either side at any moment: the survivor ends with an error that names the dead, and
the next start finds nothing in its way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from toys import SHAPES, as_hex, canary_of, tensors

from weightsync import StateDictSource, WeightSender
from weightsync.deadline import Deadline
from weightsync.errors import NotResumed, WeightSyncError
from weightsync.messages import AnyMessage
from weightsync.runtime import runtime_directory
from weightsync.testing.toy import ToyEngine

CALLS = ("join", "prepare", "apply", "finish")
TOLD = ("layout", "begin", "follow", "arm", "commit", "resumed")
ASKED = ("admit", "think")
"""Where there is a canary."""
IN_STAGED = [*CALLS, *TOLD, *ASKED, *(f"after_{tag}" for tag in (*TOLD, *ASKED))]
IN_STREAMED = [moment for moment in IN_STAGED if moment != "apply"]

MOMENTS = [("staged", m) for m in IN_STAGED] + [("streamed", m) for m in IN_STREAMED]


@pytest.fixture(scope="module", autouse=True)
def runtime(tmp_path_factory: pytest.TempPathFactory):
    """A runtime directory of this file's own: what is left in it was left here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield runtime_directory()


@pytest.fixture(scope="module")
def engine(runtime: Path):
    """One that outlives all who die here."""
    with ToyEngine(SHAPES, workers=2) as toy:
        yield toy


def test_every_message_that_a_worker_is_told_is_a_moment_here() -> None:
    answers = {"hello", "joined", "described", "digests", "applied", "held", "ack", "refused"}
    # The handshake; after a failure; of who only looks (test_look.py).
    elsewhere = {"welcome", "abort", "poison", "inspect"}
    tags = {str(message.__struct_config__.tag) for message in AnyMessage.__args__}
    assert tags == answers | elsewhere | {*TOLD, "admit"}


def maker(moment: str):
    """A canary, where one is needed for the moment to come."""
    return canary_of(tensors(1), (1, 2, 3)) if moment.removeprefix("after_") in ASKED else None


@pytest.mark.parametrize(("mode", "moment"), MOMENTS)
def test_a_worker_that_is_killed_is_named_and_nothing_stands_in_the_next_ones_way(
    mode: str, moment: str, engine: ToyEngine, runtime: Path
) -> None:
    dying = ToyEngine(SHAPES, workers=2, name="dying", faults={1: {"kills_at": moment}})
    source = StateDictSource(tensors(1))
    with (
        dying,
        WeightSender(source, [dying], mode=mode, deadline=30, canary=maker(moment)) as sender,
    ):
        started = time.monotonic()
        with pytest.raises(WeightSyncError, match="dying, worker 1") as failure:
            sender.sync(1)
        assert time.monotonic() - started < 15
        # Only of an update that all have acknowledged does anything but an error come.
        last = moment in ("resumed", "after_resumed", "after_commit")
        assert last or not isinstance(failure.value, NotResumed)
    with WeightSender(StateDictSource(tensors(2)), [engine], mode=mode) as sender:
        sender.sync(2)
        assert engine.tensors() == [as_hex(tensors(2))] * 2
    assert list(runtime.iterdir()) == []


DYING = """
import json, os, signal, sys

from toys import canary_of, tensors

from weightsync import StateDictSource, WeightSender
from weightsync.control import Worker
from weightsync.testing.toy import ToyEngine
from weightsync.wire import Channel

moment, mode, shared = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])


class Borrowed(ToyEngine):
    '''The engine of another process, called through its pipes.'''

    def __init__(self):
        self.name, self.workers, self.calls = "toy", 2, []
        self._version, self._paused, self._session_open = None, False, False
        self._pipes = [(open(a, "wb", 0), open(b, "rb", 0)) for a, b in shared]

    def call_workers(self, call, deadline, **arguments):
        for out, _ in self._pipes:
            out.write(json.dumps({"call": call, **arguments}).encode() + b"\\n")
        answers = [json.loads(back.readline()) for _, back in self._pipes]
        if at(call):
            die()
        return answers


paused = False

def at(name):
    '''The handshake and the plan have calls and messages of the same names: those before a pause
    are their own moments.'''
    return moment == name and (paused or name not in ("finish", "set_version", "think"))

def die():
    os.kill(os.getpid(), signal.SIGKILL)

send = Channel.send

def dying_send(self, message, *args, **kwargs):
    send(self, message, *args, **kwargs)
    if at(message.__struct_config__.tag):
        die()

Channel.send = dying_send
engine = Borrowed()
for name in ("pause", "resume", "reset_caches", "set_version"):
    def dying(*args, call=getattr(engine, name), name=name, **kwargs):
        global paused
        call(*args, **kwargs)
        paused = paused or name == "pause"
        if at(name):
            die()
    setattr(engine, name, dying)

def progress(done, total):
    if at("filled"):
        die()

values = tensors(1)
canary = canary_of(values, (1, 2, 3)) if moment in ("admit", "think") else None
source = StateDictSource(values)
WeightSender(source, [engine], mode=mode, on_progress=progress, canary=canary).sync("never")
"""

SENDERS = [
    (mode, moment)
    for mode in ("staged", "streamed")
    for moment in (
        "join",
        "welcome",
        "prepare",
        *TOLD,
        *ASKED,
        "filled",
        "pause",
        "apply",
        "finish",
        "reset_caches",
        "set_version",
        "resume",
    )
    if (mode, moment) != ("streamed", "apply")
]


@pytest.mark.parametrize(("mode", "moment"), SENDERS)
def test_a_sender_that_is_killed_is_followed_by_another(
    mode: str, moment: str, engine: ToyEngine, runtime: Path
) -> None:
    with WeightSender(StateDictSource(tensors(0)), [engine], mode=mode) as sender:
        sender.sync("base")
    pipes = [
        [f"/proc/{os.getpid()}/fd/{pipe.fileno()}" for pipe in (p.stdin, p.stdout)]
        for p in engine._processes
    ]
    died = subprocess.run(
        [sys.executable, "-c", DYING, moment, mode, json.dumps(pipes)],
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    assert died.returncode == -signal.SIGKILL
    quiet(engine)
    poisoned = [worker["poisoned"] is not None for worker in engine.status()]
    applied = ("apply", "finish", "reset_caches", *ASKED)
    if moment in applied or (mode, moment) == ("streamed", "filled"):
        assert all(poisoned)
    elif moment in ("set_version", "resume", "resumed"):
        assert not any(poisoned) and engine.tensors() == [as_hex(tensors(1))] * 2
    elif moment != "commit" and (mode, moment) != ("streamed", "follow"):  # told to one of two
        assert not any(poisoned) and engine.tensors() == [as_hex(tensors(0))] * 2
    with WeightSender(StateDictSource(tensors(2)), [engine], mode=mode, deadline=30) as sender:
        sender.sync("after")
        assert engine.tensors() == [as_hex(tensors(2))] * 2
        assert engine.version(Deadline.after(1)) == "after"
        resources = [worker["resources"] for worker in engine.status()]
        sender.sync("again")
        assert [worker["resources"] for worker in engine.status()] == resources
    assert not any(w["refused"] or w["holds_pause"] for w in engine.status())
    assert list(runtime.iterdir()) == []


def quiet(engine: ToyEngine) -> None:
    """Until the workers have noticed that their sender is gone."""
    deadline = Deadline.after(15)
    while any(worker["resources"]["threads"] > 1 for worker in engine.status()):
        deadline.rest(0.01, "the workers to notice")
