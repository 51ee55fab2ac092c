"""Streamed updates: straight into the model through a small ring, proven, and poisoned by any
failure."""

from __future__ import annotations

import signal
import time

import pytest
import torch
from toys import SHAPES, as_hex, tensors

from weightsync import StateDictSource, WeightSender
from weightsync.deadline import Deadline
from weightsync.errors import (
    DeadlineExceeded,
    EnginePoisoned,
    PlanRefused,
    SourceError,
    UpdateAborted,
    UpdateRefused,
)
from weightsync.sources.base import Pieces
from weightsync.testing.toy import ToyEngine

LARGE = {**SHAPES, "layers.2.weight": ("float32", (1031, 1009)), "layers.2.empty": ("int8", (0, 4))}


@pytest.fixture(scope="module")
def shared_engine():
    with ToyEngine(LARGE, workers=2) as toy:
        yield toy


@pytest.fixture
def engine(shared_engine: ToyEngine):
    shared_engine.set_faults({})
    with WeightSender(StateDictSource(tensors(0, LARGE)), [shared_engine]) as sender:
        sender.sync("base")
    shared_engine.resume(Deadline.after(1))
    shared_engine.calls.clear()
    return shared_engine


def served(engine: ToyEngine, seed: int) -> bool:
    return engine.tensors() == [as_hex(tensors(seed, LARGE))] * engine.workers


@pytest.mark.parametrize("bucket_bytes", [None, 1024, 64])
def test_every_worker_serves_exactly_the_sources_bytes(
    engine: ToyEngine, bucket_bytes: int | None
) -> None:
    source = tensors(1, LARGE)
    with WeightSender(
        StateDictSource(source), [engine], mode="streamed", bucket_bytes=bucket_bytes
    ) as sender:
        for step in (1, 2):
            source.update(tensors(step, LARGE))
            receipt = sender.sync(step)
            assert served(engine, step)
        assert sender._outbox.arena is None
    assert receipt.mode == "streamed" and receipt.proven == "served" and receipt.intact
    assert receipt.levels["served"].tensors == len(LARGE)
    assert engine.version(Deadline.after(1)) == "2"


def test_the_engine_is_paused_all_the_while_and_its_caches_are_reset(engine: ToyEngine) -> None:
    def progress(done: int, total: int) -> None:
        assert engine.is_paused(Deadline.after(1))

    source = StateDictSource(tensors(1, LARGE))
    with WeightSender(source, [engine], mode="streamed", on_progress=progress) as sender:
        sender.sync(1)
    assert engine.calls[-7:] == [
        "finish",
        "begin",
        "pause keep",
        "finish",
        "reset_caches",
        "set_version",
        "resume",
    ]


def test_bytes_that_change_on_their_way_poison_and_a_full_update_cures(engine: ToyEngine) -> None:
    engine.set_faults({1: {"verify_flips_bit": 3}})
    source = StateDictSource(tensors(1, LARGE))
    with WeightSender(source, [engine], mode="streamed") as sender:
        with pytest.raises(EnginePoisoned, match=r"layers\.1\.scale.*worker 1"):
            sender.sync(1)
        assert engine.version(Deadline.after(1)) == "base"
        assert all(worker["poisoned"] and worker["refused"] for worker in engine.status())
        engine.set_faults({})
        with pytest.raises(UpdateRefused, match="full update"):
            sender.sync(2, only=["head.weight"])
        sender.sync(3)
    assert served(engine, 1)
    assert not any(worker["poisoned"] or worker["refused"] for worker in engine.status())
    assert not engine.is_paused(Deadline.after(1))


class Torn(StateDictSource):
    """A source that notices, after half of its bytes, that it was written to."""

    def pieces(self, wanted=None):
        for batch in super().pieces(wanted):
            half = slice(0, batch.index.size // 2)
            yield Pieces(
                batch.index[half], batch.start[half], batch.nbytes[half], batch.address[half]
            )
            raise SourceError("written to meanwhile")


def test_a_source_that_fails_half_way_poisons(engine: ToyEngine) -> None:
    with WeightSender(Torn(tensors(1, LARGE)), [engine], mode="streamed") as sender:
        with pytest.raises(EnginePoisoned, match="written to meanwhile"):
            sender.sync(1)
        assert all(worker["poisoned"] for worker in engine.status())
    with WeightSender(StateDictSource(tensors(2, LARGE)), [engine], mode="streamed") as sender:
        sender.sync(2)
    assert served(engine, 2)


def test_a_worker_whose_model_was_changed_says_so_and_poisons(engine: ToyEngine) -> None:
    engine.set_faults({0: {"stream_raises": "a parameter was replaced"}})
    source = StateDictSource(tensors(1, LARGE))
    started = time.monotonic()
    with (
        WeightSender(source, [engine], mode="streamed", bucket_bytes=1024) as sender,
        pytest.raises(EnginePoisoned, match="a parameter was replaced"),
    ):
        sender.sync(1)
    assert time.monotonic() - started < 20
    engine.set_faults({})
    with WeightSender(source, [engine]) as sender:
        sender.sync(2)
    assert served(engine, 1)


def test_a_worker_that_is_killed_ends_it_at_once_and_by_name() -> None:
    with ToyEngine(LARGE, workers=2, faults={1: {"verify_kills": True}}) as engine:
        started = time.monotonic()
        source = StateDictSource(tensors(1, LARGE))
        with (
            WeightSender(source, [engine], mode="streamed", deadline=60) as sender,
            pytest.raises(EnginePoisoned, match="worker 1"),
        ):
            sender.sync(1)
        assert time.monotonic() - started < 20
        assert engine.version(Deadline.after(1)) is None


def test_a_worker_that_stands_still_is_named_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weightsync.settling.SETTLE_SECONDS", 2.0)
    large = {**SHAPES, "large.weight": ("float32", (4096, 1024))}  # more than a ring holds
    with (
        ToyEngine(large, workers=2) as engine,
        WeightSender(
            StateDictSource(tensors(1, large)), [engine], mode="streamed", deadline=30
        ) as sender,
    ):
        sender.sync(1)
        sender._seconds = 2.0
        still = engine._processes[1]
        pause = engine.pause

        def pause_and_stop(*arguments) -> None:
            pause(*arguments)
            still.send_signal(signal.SIGSTOP)

        engine.pause = pause_and_stop  # type: ignore[method-assign]
        started = time.monotonic()
        with pytest.raises(EnginePoisoned) as failure:
            sender.sync(2)
        assert time.monotonic() - started < 20
        cause = failure.value.__cause__
        assert isinstance(cause, DeadlineExceeded) and "worker 1" in cause.awaited
        assert "worker 0" not in cause.awaited
        still.send_signal(signal.SIGCONT)


def test_of_two_engines_none_begins_if_one_cannot_be_paused() -> None:
    with ToyEngine(SHAPES, name="good") as good, ToyEngine(SHAPES, name="bad") as bad:
        source = StateDictSource(tensors(1))

        def refuse(*_: object) -> None:
            raise RuntimeError("cannot be paused")

        bad.pause = refuse  # type: ignore[method-assign]
        with WeightSender(source, [good, bad], mode="streamed") as sender:
            with pytest.raises(UpdateAborted, match="cannot be paused"):
                sender.sync(1)
            zeros = as_hex({n: torch.zeros_like(t) for n, t in tensors(1).items()})
            assert good.tensors() == bad.tensors() == [zeros]
            assert not good.is_paused(Deadline.after(1))
            del bad.pause
            sender.sync(2)
            assert good.tensors() == bad.tensors() == [as_hex(tensors(1))]


def test_a_staged_sender_and_a_streaming_one_take_turns(engine: ToyEngine) -> None:
    for step, mode in enumerate(["streamed", "staged"] * 2):
        source = StateDictSource(tensors(step, LARGE))
        with WeightSender(source, [engine], mode=mode) as sender:  # type: ignore[arg-type]
            sender.sync(step)
        assert served(engine, step)


def test_a_target_that_takes_only_whole_tensors_is_refused_by_name() -> None:
    with (
        ToyEngine(SHAPES, faults={0: {"only_staged": True}}) as engine,
        WeightSender(StateDictSource(tensors(1)), [engine], mode="streamed") as sender,
        pytest.raises(PlanRefused, match=r"mode='streamed'.*staged") as refusal,
    ):
        sender.sync(1)
    assert "mode='staged'" in str(refusal.value.remedy)


def test_what_makes_no_sense_is_refused(engine: ToyEngine) -> None:
    source = StateDictSource(tensors(1))
    with pytest.raises(UpdateRefused, match="'staged' or 'streamed'"):
        WeightSender(source, [engine], mode="direct")  # type: ignore[arg-type]
    for nbytes in (0, -64, 100):
        with pytest.raises(UpdateRefused, match="multiple of 64"):
            WeightSender(source, [engine], bucket_bytes=nbytes)
    with (
        WeightSender(source, [engine], mode="streamed") as sender,
        pytest.raises(UpdateRefused, match="call sync"),
    ):
        sender.stage(1)
