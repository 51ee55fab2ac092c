"""The sender against toy engines: real worker processes, real sockets, real shared memory."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from weightsync import StateDictSource, WeightSender
from weightsync.control import close_all
from weightsync.deadline import Deadline
from weightsync.errors import (
    ConnectError,
    DeadlineExceeded,
    EnginePoisoned,
    PlanRefused,
    ProofFailed,
    Superseded,
    TransportError,
    UpdateAborted,
    UpdateRefused,
    WeightSyncError,
)
from weightsync.receipt import Receipt
from weightsync.testing.toy import ToyEngine
from weightsync.wire import Channel

SHAPES = {
    "embed.weight": ("bfloat16", (17, 8)),
    "layers.0.weight": ("float32", (5, 3)),
    "layers.0.bias": ("float32", (5,)),
    "layers.1.scale": ("float32", ()),
    "layers.1.steps": ("int64", (3,)),
    "head.weight": ("float16", (7, 9)),
}


def tensors(seed: int, shapes=SHAPES) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, (dtype, shape) in shapes.items():
        value = torch.randn(shape, generator=generator) * 100
        found[name] = value.to(getattr(torch, dtype))
    return found


def as_hex(values: dict[str, torch.Tensor]) -> dict[str, str]:
    return {
        name: value.reshape(-1).view(torch.uint8).numpy().tobytes().hex()
        for name, value in values.items()
    }


@pytest.fixture(scope="module")
def shared_engine():
    with ToyEngine(SHAPES, workers=2) as toy:
        yield toy


@pytest.fixture
def engine(shared_engine: ToyEngine):
    """Two workers that serve version "base", whatever the test before has done to them."""
    shared_engine.set_faults({})
    with WeightSender(StateDictSource(tensors(0)), [shared_engine]) as sender:
        sender.sync("base")
    shared_engine.resume(Deadline.after(1))
    shared_engine.calls.clear()
    return shared_engine


def test_every_worker_serves_exactly_the_sources_bytes(engine: ToyEngine) -> None:
    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        receipt = sender.sync(7)
    assert engine.tensors() == [as_hex(tensors(1))] * 2
    assert engine.version(Deadline.after(1)) == receipt.version == "7"
    assert receipt.proven == "received" and receipt.intact
    assert [worker.name for worker in receipt.engines[0].workers] == [
        "toy, worker 0",
        "toy, worker 1",
    ]
    assert receipt.levels["received"].tensors == len(SHAPES)
    assert {"plan", "fill", "verify", "stage", "commit"} <= receipt.seconds.keys()


def test_the_engine_is_paused_for_the_flip_only_and_resumed_after_its_caches_were_reset(
    engine: ToyEngine,
) -> None:
    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        staged = sender.stage(1)
        assert not any(call.startswith("pause") for call in engine.calls)
        assert engine.version(Deadline.after(1)) == "base"
        engine.calls.clear()
        staged.commit(pause="wait")
    assert engine.calls == [
        "begin",
        "pause wait",
        "apply",
        "finish",
        "reset_caches",
        "resume",
    ]


def test_an_engine_that_somebody_else_paused_stays_paused(engine: ToyEngine) -> None:
    engine.pause("keep", Deadline.after(1))
    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        sender.sync(1)
    assert engine.is_paused(Deadline.after(1))
    assert engine.tensors() == [as_hex(tensors(1))] * 2


def test_scribbling_over_the_arena_after_commit_changes_nothing_served(engine: ToyEngine) -> None:
    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        sender.sync(1)
        sender._arena.view()[:] = 0xA5
        assert engine.tensors() == [as_hex(tensors(1))] * 2
        sender.sync(2)  # and the next update is not taken in by it
    assert engine.tensors() == [as_hex(tensors(1))] * 2


def test_resources_are_flat_over_updates_on_both_sides(engine: ToyEngine) -> None:
    def here() -> tuple[int, int, int]:
        maps = Path("/proc/self/maps").read_text().count("memfd:weightsync")
        return len(os.listdir("/proc/self/fd")), maps, threading.active_count()

    source = tensors(1)
    with WeightSender(StateDictSource(source), [engine]) as sender:
        for step in range(2):
            sender.sync(step)
        second = here(), [worker["resources"] for worker in engine.status()]
        for step in range(2, 30):
            source["layers.0.bias"].add_(1)
            sender.sync(step)
        assert (here(), [worker["resources"] for worker in engine.status()]) == second
    assert engine.tensors() == [as_hex(source)] * 2


def test_resources_are_flat_over_senders_and_layouts() -> None:
    wide = {**SHAPES, "layers.0.bias": ("float32", (5,))}
    with ToyEngine(wide) as engine:

        def once(step: int) -> tuple[int, dict]:
            with WeightSender(StateDictSource(tensors(step)), [engine]) as sender:
                sender.sync(step)
            # The worker notices the hang-up on a thread of its own.
            end = time.monotonic() + 10
            while engine.status()[0]["resources"]["threads"] > 1 and time.monotonic() < end:
                pass
            return len(os.listdir("/proc/self/fd")), engine.status()[0]["resources"]

        once(0)
        second = once(1)
        assert [once(step) for step in range(2, 8)] == [second] * 6


@pytest.mark.parametrize(
    ("change", "kind", "name"),
    [
        (lambda t: t.update({"lm.extra": torch.zeros(2)}), "unknown", "lm.extra"),
        (lambda t: t.pop("head.weight"), "missing", "head.weight"),
        (lambda t: t.update({"layers.0.bias": torch.zeros(6)}), "shape", "layers.0.bias"),
        (
            lambda t: t.update({"embed.weight": torch.zeros(17, 8)}),
            "dtype",
            "embed.weight",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name_before_a_byte_moves(
    engine: ToyEngine, change, kind: str, name: str
) -> None:
    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        sender.sync(1)
    other = tensors(2)
    change(other)
    moved: list[int] = []
    with WeightSender(
        StateDictSource(other), [engine], on_progress=lambda done, _: moved.append(done)
    ) as sender:
        with pytest.raises(PlanRefused) as refusal:
            sender.sync(2)
        assert [(p.kind, p.name) for p in refusal.value.problems] == [(kind, name)]
        assert name in str(refusal.value) and refusal.value.remedy
        assert not moved
        assert engine.tensors() == [as_hex(tensors(1))] * 2
        assert engine.version(Deadline.after(1)) == "1"
        other.clear()
        other.update(tensors(2))
        sender.sync(2)  # the same sender goes on once it fits
    assert engine.tensors() == [as_hex(tensors(2))] * 2


@pytest.mark.parametrize("fault", ["verify_flips_bit", "verify_skips"])
def test_a_wrong_digest_names_tensor_and_worker_and_aborts(engine: ToyEngine, fault: str) -> None:
    engine.set_faults({1: {fault: 3}})
    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        with pytest.raises(ProofFailed) as failure:
            sender.sync(1)
        assert [(m.tensor, m.worker) for m in failure.value.mismatches] == [
            ("layers.1.scale", "toy, worker 1")
        ]
        assert "pause keep" not in engine.calls and engine.version(Deadline.after(1)) == "base"
        assert {worker["phase"] for worker in engine.status()} == {"aborted"}
        engine.set_faults({})
        sender.sync(1)
    assert engine.tensors() == [as_hex(tensors(1))] * 2


def test_a_byte_that_changes_in_the_arena_after_it_was_filled_is_caught(engine: ToyEngine) -> None:
    def corrupt(done: int, total: int) -> None:
        if done == total:
            sender._arena.view()[3] ^= 1

    sender = WeightSender(StateDictSource(tensors(1)), [engine], on_progress=corrupt)
    with sender, pytest.raises(ProofFailed) as failure:
        sender.sync(1)
    assert {m.tensor for m in failure.value.mismatches} == {"embed.weight"}
    assert len(failure.value.mismatches) == 2


def test_a_failing_worker_poisons_the_whole_engine_and_a_full_update_cures_it(
    engine: ToyEngine,
) -> None:
    engine.set_faults({1: {"apply_raises": "no more"}})
    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        with pytest.raises(EnginePoisoned, match="no more") as failure:
            sender.sync(1)
        assert "toy, worker 1" in str(failure.value)
        assert all(worker["poisoned"] and worker["refused"] for worker in engine.status())
        assert engine.version(Deadline.after(1)) == "base"
        assert engine.is_paused(Deadline.after(1)) and engine.calls[-1] == "pause abort"
        engine.set_faults({})
        sender.sync(2)
    assert engine.tensors() == [as_hex(tensors(1))] * 2
    assert not any(worker["poisoned"] or worker["refused"] for worker in engine.status())
    assert engine.version(Deadline.after(1)) == "2"
    assert not engine.is_paused(Deadline.after(1))


def test_an_update_that_is_aborted_on_a_poisoned_engine_leaves_it_poisoned(
    engine: ToyEngine,
) -> None:
    engine.set_faults({1: {"apply_raises": "no more"}})
    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        with pytest.raises(EnginePoisoned):
            sender.sync(1)
        sender.stage(2).abort()
        assert all(w["phase"] == "poisoned" and w["refused"] for w in engine.status())


@pytest.mark.parametrize("fault", ["verify_kills", "apply_kills"])
def test_a_worker_that_is_killed_ends_the_update_with_its_name_and_no_wait(fault: str) -> None:
    with ToyEngine(SHAPES, workers=2, faults={1: {fault: True}}) as engine:
        started = time.monotonic()
        with WeightSender(StateDictSource(tensors(1)), [engine], deadline=60) as sender:
            with pytest.raises((TransportError, EnginePoisoned), match="worker 1"):
                sender.sync(1)
            assert time.monotonic() - started < 20
            assert engine.version(Deadline.after(1)) is None
            with pytest.raises(WeightSyncError, match="worker 1"):
                sender.sync(2)


def test_a_silent_worker_is_named_when_the_deadline_passes(engine: ToyEngine) -> None:
    with WeightSender(StateDictSource(tensors(1)), [engine], deadline=30) as sender:
        sender.sync(1)
        sender._seconds = 1.5
        pid = engine._processes[1].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineExceeded, match="toy, worker 1") as failure:
                sender.sync(2)
            assert "worker 0" not in failure.value.awaited
        finally:
            os.kill(pid, signal.SIGCONT)
        sender._seconds = 30
        sender.sync(3)
    assert engine.version(Deadline.after(1)) == "3"


def test_a_new_sender_takes_over_and_the_old_one_is_told_so(engine: ToyEngine) -> None:
    old = WeightSender(StateDictSource(tensors(1)), [engine])
    staged = old.stage(1)
    with WeightSender(StateDictSource(tensors(2)), [engine]) as new:
        new.sync(2)
        with pytest.raises(UpdateAborted, match="newer sender"):
            staged.commit()
        with pytest.raises(Superseded):
            old.sync(3)
        new.sync(4)
    assert engine.tensors() == [as_hex(tensors(2))] * 2
    old.close()


@pytest.mark.parametrize("moment", ["staged", "armed", "paused", "applied"])
def test_what_a_dead_sender_left_is_cleared_by_the_next(engine: ToyEngine, moment: str) -> None:
    dead = WeightSender(StateDictSource(tensors(1)), [engine])
    staged = dead.stage(1)
    die = {
        "armed": ("begin", engine.begin),
        "paused": ("pause", engine.pause),
        "applied": ("finish", engine.finish),
    }

    class DiedError(BaseException):
        pass

    def killed(*_: object, **__: object) -> None:
        # What the kernel does to a killed process's sockets. Nothing of the sender runs after it.
        close_all(dead._workers)
        raise DiedError

    if moment != "staged":
        name, original = die[moment]
        setattr(engine, name, killed)
        with pytest.raises(DiedError), pytest.MonkeyPatch.context() as patch:
            patch.setattr("weightsync.commit._unwind", lambda *_, **__: None)
            patch.setattr("weightsync.commit._poison", lambda *_: None)
            staged.commit()
        setattr(engine, name, original)
    else:
        close_all(dead._workers)
    if moment == "applied":
        end = time.monotonic() + 10
        while not all(w["refused"] for w in engine.status()) and time.monotonic() < end:
            pass
        assert all("sender was lost" in worker["refused"] for worker in engine.status())
        assert engine.is_paused(Deadline.after(1))
    with WeightSender(StateDictSource(tensors(2)), [engine]) as sender:
        sender.sync(2)
    assert engine.tensors() == [as_hex(tensors(2))] * 2
    assert engine.version(Deadline.after(1)) == "2"
    assert not engine.is_paused(Deadline.after(1))
    assert not any(w["refused"] or w["holds_pause"] or w["session_open"] for w in engine.status())


def test_a_failure_between_arm_and_apply_leaves_the_old_weights_and_resumes(
    engine: ToyEngine,
) -> None:
    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        sender.sync(1)
        staged = sender.stage(2)

        def refuses(mode: str, deadline: Deadline) -> None:
            raise ConnectError("the engine would not pause")

        engine.pause, original = refuses, engine.pause  # type: ignore[method-assign]
        with pytest.raises(UpdateAborted, match="would not pause"):
            staged.commit()
        engine.pause = original  # type: ignore[method-assign]
        assert engine.version(Deadline.after(1)) == "1"
        assert not any(worker["refused"] for worker in engine.status())
        assert not any(worker["holds_pause"] for worker in engine.status())
        sender.sync(3)


def test_of_two_engines_the_healthy_one_is_committed_and_the_other_is_named() -> None:
    with (
        ToyEngine(SHAPES, name="good") as good,
        ToyEngine(SHAPES, name="bad", faults={0: {"apply_raises": "no"}}) as bad,
    ):
        with WeightSender(StateDictSource(tensors(1)), [good, bad]) as sender:
            with pytest.raises(EnginePoisoned, match="bad: update"):
                sender.sync(1)
            assert good.version(Deadline.after(1)) == "1" and bad.version(Deadline.after(1)) is None
            assert not good.status()[0]["refused"] and bad.status()[0]["refused"]
            bad.set_faults({})
            receipt = sender.sync(2)
        assert [engine.name for engine in receipt.engines] == ["good", "bad"]
        assert good.tensors() == bad.tensors() == [as_hex(tensors(1))]


def test_a_mismatch_on_one_engine_applies_nothing_on_any() -> None:
    with (
        ToyEngine(SHAPES, name="good") as good,
        ToyEngine(SHAPES, name="bad", faults={0: {"verify_flips_bit": 0}}) as bad,
        WeightSender(StateDictSource(tensors(1)), [good, bad]) as sender,
    ):
        with pytest.raises(ProofFailed, match="bad, worker 0"):
            sender.sync(1)
        assert "apply" not in good.calls + bad.calls


def test_messages_and_calls_do_not_grow_with_the_number_of_tensors(monkeypatch) -> None:
    def count(number: int) -> tuple[int, int]:
        shapes = {f"layers.{i}.weight": ("float32", (2, 3)) for i in range(number)}
        with (
            ToyEngine(shapes) as engine,
            WeightSender(StateDictSource(tensors(1, shapes)), [engine]) as sender,
        ):
            sent = 0
            original = Channel.send

            def counted(self, *args, **kwargs):
                nonlocal sent
                sent += 1
                return original(self, *args, **kwargs)

            with monkeypatch.context() as patch:
                patch.setattr(Channel, "send", counted)
                sender.sync(1)
            return sent, len(engine.calls)

    assert count(1) == count(2000)


def test_receipts_form_a_chain_and_are_handed_out(engine: ToyEngine) -> None:
    handed: list[Receipt] = []
    with WeightSender(StateDictSource(tensors(1)), [engine], on_receipt=handed.append) as sender:
        first, second = sender.sync("a"), sender.sync("b")
    assert handed == [first, second]
    assert first.previous == "" and second.previous == first.hash
    assert first.digest != second.digest, "a fresh seed gives the same bytes another digest"


def test_declared_casts_reach_the_engine_and_the_receipt() -> None:
    with ToyEngine({"w": ("bfloat16", (4, 4))}) as engine:
        value = torch.randn(4, 4)
        source = StateDictSource({"w": value}, dtype=torch.bfloat16)
        with WeightSender(source, [engine]) as sender:
            receipt = sender.sync(1)
        assert receipt.casts == {"w": "float32 -> bfloat16"}
        assert engine.tensors() == [as_hex({"w": value.to(torch.bfloat16)})]


def test_bytes_that_compare_equal_or_never_equal_arrive_as_they_are() -> None:
    values = torch.tensor([0x80000000, 0x7FC00001, 0xFFC12345, 0x00000000], dtype=torch.uint32)
    with ToyEngine({"w": ("float32", (4,))}) as engine:
        source = StateDictSource({"w": values.view(torch.float32)})
        with WeightSender(source, [engine]) as sender:
            sender.sync(1)
        assert engine.tensors() == [{"w": values.numpy().tobytes().hex()}]


def test_requests_that_make_no_sense_are_refused_with_a_reason(engine: ToyEngine) -> None:
    source = StateDictSource(tensors(1))
    with pytest.raises(UpdateRefused, match="engines of different names"):
        WeightSender(source, [])
    with pytest.raises(UpdateRefused, match="engines of different names"):
        WeightSender(source, [engine, engine])
    with pytest.raises(UpdateRefused, match="proof"):
        WeightSender(source, [engine], proof="served")
    with WeightSender(source, [engine]) as sender:
        with pytest.raises(UpdateRefused, match="version"):
            sender.stage("")
        staged = sender.stage(1)
        with pytest.raises(UpdateRefused, match="staged already"):
            sender.stage(2)
        with pytest.raises(UpdateRefused, match="pause"):
            staged.commit(pause="soon")  # type: ignore[arg-type]
        staged.commit()
        with pytest.raises(UpdateRefused, match="not staged"):
            staged.commit()
    sender.close()


def test_a_layout_may_change_between_updates(engine: ToyEngine) -> None:
    source = tensors(1)
    with WeightSender(StateDictSource(source), [engine]) as sender:
        sender.sync(1)
        reordered = dict(reversed(source.items()))
        source.clear()
        source.update(reordered)
        source["layers.0.bias"] = torch.arange(5, dtype=torch.float32)
        sender.sync(2)
    assert engine.tensors()[0]["layers.0.bias"] == np.arange(5, dtype="<f4").tobytes().hex()
    assert engine.tensors()[1]["head.weight"] == as_hex(tensors(1))["head.weight"]
