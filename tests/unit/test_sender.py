"""The sender against toy engines: real worker processes, real sockets, real shared memory."""

from __future__ import annotations

import _thread
import os
import signal
import socket
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from toys import SHAPES, as_hex, tensors

from weightsync import StateDictSource, WeightSender
from weightsync.control import close_all
from weightsync.deadline import Deadline
from weightsync.errors import (
    ConnectError,
    DeadlineExceeded,
    EnginePoisoned,
    NotResumed,
    PlanRefused,
    ProofFailed,
    Superseded,
    TransportError,
    UpdateAborted,
    UpdateRefused,
    WeightSyncError,
)
from weightsync.messages import Begin, Follow, Hello, Welcome, WorkerStatus
from weightsync.receipt import Receipt
from weightsync.testing.toy import ToyEngine
from weightsync.testing.toy_worker import resources
from weightsync.wire import Channel


def test_every_worker_serves_exactly_the_sources_bytes(engine: ToyEngine) -> None:
    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        receipt = sender.sync(7)
    assert engine.tensors() == [as_hex(tensors(1))] * 2
    assert engine.version(Deadline.after(1)) == receipt.version == "7"
    assert receipt.proven == "served" and receipt.intact
    assert [worker.name for worker in receipt.engines[0].workers] == [
        "toy, worker 0",
        "toy, worker 1",
    ]
    assert receipt.levels["served"].tensors == len(SHAPES)
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
        "set_version",
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
        sender._outbox.arena.view()[:] = 0xA5
        assert engine.tensors() == [as_hex(tensors(1))] * 2
        sender.sync(2)  # and the next update is not taken in by it
    assert engine.tensors() == [as_hex(tensors(1))] * 2


@pytest.mark.parametrize("options", [{}, {"mode": "streamed"}, {"rollback": "retain"}], ids=str)
def test_fifty_updates_leave_both_sides_as_they_were(engine: ToyEngine, options) -> None:
    source = tensors(1)
    with WeightSender(StateDictSource(source), [engine], **options) as sender:
        for step in range(2):
            sender.sync(step)
        second = resources(), [worker["resources"] for worker in engine.status()]
        assert second[0]["shared_bytes"] > 0
        for step in range(50):
            source["layers.0.bias"].add_(1)
            sender.sync(step)
        assert (resources(), [worker["resources"] for worker in engine.status()]) == second
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
    # The tensors are smaller than a bucket, and the workers take turns: the fourth is the second's.
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


def test_a_byte_that_changes_in_the_arena_before_it_is_verified_is_caught(
    engine: ToyEngine, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    engine.set_faults({rank: {"verify_waits": str(gate)} for rank in range(2)})

    def corrupt(done: int, total: int) -> None:
        if done == total:
            sender._outbox.arena.view()[3] ^= 1
            gate.touch()

    sender = WeightSender(StateDictSource(tensors(1)), [engine], on_progress=corrupt)
    with sender, pytest.raises(ProofFailed) as failure:
        sender.sync(1)
    # Each byte is looked at by one of the workers that share the arena.
    assert [m.tensor for m in failure.value.mismatches] == ["embed.weight"]


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


def test_a_worker_refuses_before_it_cleans_up_and_even_if_that_fails(engine: ToyEngine) -> None:
    engine.set_faults({1: {"apply_raises": "no more", "restore_raises": "nor this"}})
    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        with pytest.raises(EnginePoisoned, match="no more"):
            sender.sync(1)
        assert [worker["refused_at_restore"] for worker in engine.status()] == [None, True]
        assert all(worker["poisoned"] and worker["refused"] for worker in engine.status())
        engine.set_faults({})
        sender.sync(2)
    assert engine.tensors() == [as_hex(tensors(1))] * 2


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
        with pytest.raises(Superseded, match="newer sender"):
            staged.commit()
        with pytest.raises(Superseded):
            old.sync(3)
        new.sync(4)
    assert engine.tensors() == [as_hex(tensors(2))] * 2
    old.close()


@pytest.mark.parametrize(
    "step", ["is_paused", "begin", "pause", "apply", "finish", "reset_caches", "resume"]
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_sender_that_was_replaced_in_the_middle_touches_the_engine_no_more(
    engine: ToyEngine, step: str, when: str
) -> None:
    """It was stalled in one step, a newer one took over and went through, and now it wakes up."""
    original = getattr(engine, step)
    new = WeightSender(StateDictSource(tensors(2)), [engine])

    def stalled(*args, **kwargs):
        setattr(engine, step, original)
        if when == "before":
            new.sync("new")
        result = original(*args, **kwargs)
        if when == "after":
            new.sync("new")
        return result

    old = WeightSender(StateDictSource(tensors(1)), [engine])
    staged = old.stage("old")
    setattr(engine, step, stalled)
    with pytest.raises(Superseded):
        staged.commit()
    assert engine.tensors() == [as_hex(tensors(2))] * 2
    assert not any(worker["refused"] or worker["holds_pause"] for worker in engine.status())
    if not (step == "pause" and when == "before"):
        # The one call that was under way could not be called back; all others were not made.
        assert not engine.is_paused(Deadline.after(1))
    new.sync("newer")
    with pytest.raises(Superseded):
        old.sync("older")
    assert engine.version(Deadline.after(1)) == "newer"
    new.close()
    old.close()


def test_a_replaced_sender_stays_replaced_also_when_another_engine_fails_worse(
    engine: ToyEngine,
) -> None:
    with ToyEngine(SHAPES, name="bad", faults={0: {"apply_raises": "no"}}) as bad:
        old = WeightSender(StateDictSource(tensors(1)), [engine, bad])
        staged = old.stage(1)
        with WeightSender(StateDictSource(tensors(2)), [engine]) as new:
            new.sync(2)
            with pytest.raises(EnginePoisoned, match="bad"):
                staged.commit()
            with pytest.raises(Superseded):
                old.sync(3)
            new.sync(4)
        old.close()


def test_a_sender_that_has_stopped_reading_does_not_keep_a_new_one_out() -> None:
    shapes = {f"layers.{i}.weight": ("float32", (2,)) for i in range(20_000)}
    with ToyEngine(shapes) as engine:
        old = WeightSender(StateDictSource(tensors(1, shapes)), [engine])
        old.stage(1).abort()
        # It asks for 320 kB of digests, more than a socket holds, and never reads them.
        begin = Begin(
            "stuck", "1", seed=1, base=0, ring_update=0, filled=True, seconds=60, prove="received"
        )
        for message in (begin, Follow("stuck")):
            old._roster.workers[0].channel.send(message, Deadline.after(5))
        started = time.monotonic()
        source = StateDictSource(tensors(2, shapes))
        with WeightSender(source, [engine], deadline=20) as new:
            new.sync(2)
        assert time.monotonic() - started < 15
        assert engine.status()[0]["resources"]["threads"] <= 2
        old.close()


def test_a_version_that_a_dead_sender_committed_but_did_not_set_is_set_by_the_next(
    engine: ToyEngine,
) -> None:
    class DiedError(BaseException):
        pass

    def killed(*_: object) -> None:
        close_all(dead._roster.workers)
        raise DiedError

    dead = WeightSender(StateDictSource(tensors(1)), [engine])
    staged = dead.stage("committed")
    original, engine.set_version = engine.set_version, killed  # type: ignore[method-assign]
    with pytest.raises(DiedError):
        staged.commit()
    engine.set_version = original  # type: ignore[method-assign]
    assert engine.version(Deadline.after(1)) == "base" and engine.is_paused(Deadline.after(1))
    refused = {**tensors(2), "extra": torch.zeros(1)}
    with (
        WeightSender(StateDictSource(refused), [engine]) as sender,
        pytest.raises(PlanRefused),
    ):
        sender.sync("refused")
    assert engine.version(Deadline.after(1)) == "committed"
    assert not engine.is_paused(Deadline.after(1))


@pytest.mark.parametrize("pause", ["keep", "wait", "abort"])
def test_what_was_frozen_before_is_recomputed_or_ended_as_asked(
    engine: ToyEngine, pause: str
) -> None:
    asked: list[bool] = []
    original = engine.reset_caches

    def reset_caches(deadline: Deadline, *, recompute: bool) -> None:
        asked.append(recompute)
        original(deadline, recompute=recompute)

    engine.reset_caches = reset_caches  # type: ignore[method-assign]
    engine.pause("keep", Deadline.after(1))
    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        sender.sync(1, pause=pause)
    engine.reset_caches = original  # type: ignore[method-assign]
    assert asked == [True]
    assert ("pause abort" in engine.calls) == (pause == "abort")
    assert engine.is_paused(Deadline.after(1))


def test_an_engine_that_somebody_resumes_while_it_is_updated_is_poisoned(
    engine: ToyEngine,
) -> None:
    original = engine.apply

    def apply(update_id: str, deadline: Deadline) -> None:
        original(update_id, deadline)
        engine.resume(deadline)

    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        engine.apply = apply  # type: ignore[method-assign]
        with pytest.raises(EnginePoisoned, match="somebody resumed"):
            sender.sync(1)
        engine.apply = original  # type: ignore[method-assign]
        sender.sync(2)


def test_an_untyped_failure_of_an_engine_call_becomes_a_typed_one(engine: ToyEngine) -> None:
    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        failing_once(engine, "pause", RuntimeError("what is this"))
        with pytest.raises(UpdateAborted, match="what is this"):
            sender.sync(1)
        failing_once(engine, "apply", RuntimeError("what is that"))
        with pytest.raises(EnginePoisoned, match="what is that"):
            sender.sync(2)
        sender.sync(3)


@pytest.mark.parametrize("moment", ["staged", "armed", "paused", "applied", "reset"])
def test_what_a_dead_sender_left_is_cleared_by_the_next(engine: ToyEngine, moment: str) -> None:
    dead = WeightSender(StateDictSource(tensors(1)), [engine])
    staged = dead.stage(1)
    die = {
        "armed": ("begin", engine.begin),
        "paused": ("pause", engine.pause),
        "applied": ("finish", engine.finish),
        "reset": ("reset_caches", engine.reset_caches),
    }

    class DiedError(BaseException):
        pass

    def killed(*_: object, **__: object) -> None:
        # What the kernel does to a killed process's sockets. Nothing of the sender runs after it.
        close_all(dead._roster.workers)
        raise DiedError

    if moment != "staged":
        name, original = die[moment]
        setattr(engine, name, killed)
        with pytest.raises(DiedError), pytest.MonkeyPatch.context() as patch:
            patch.setattr("weightsync.settling.unwind", lambda *_, **__: None)
            patch.setattr("weightsync.settling.poison", lambda *_, **__: None)
            staged.commit()
        setattr(engine, name, original)
    else:
        close_all(dead._roster.workers)
    if moment in ("applied", "reset"):
        end = time.monotonic() + 10
        while not all(w["refused"] for w in engine.status()) and time.monotonic() < end:
            pass
        assert all("sender was lost" in worker["refused"] for worker in engine.status())
        assert engine.is_paused(Deadline.after(1))
    assert engine.version(Deadline.after(1)) == "base", "it changes after success only"
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
            with pytest.raises(EnginePoisoned, match="bad: update") as failure:
                sender.sync(1)
            assert [taken.name for taken in failure.value.succeeded] == ["good"]
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
        WeightSender(source, [engine], proof="sworn")  # type: ignore[arg-type]
    with pytest.raises(UpdateRefused, match="canary"):
        WeightSender(source, [engine], proof="canary")
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


def failing_once(engine: ToyEngine, name: str, error: Exception, times: int = 1) -> None:
    """The engine's next calls of that name fail."""
    original, left = getattr(engine, name), times

    def call(*args, **kwargs):
        nonlocal left
        if left == 0:
            setattr(engine, name, original)
            return original(*args, **kwargs)
        left -= 1
        raise error

    setattr(engine, name, call)


def test_an_engine_that_was_down_at_first_is_reached_by_the_same_sender() -> None:
    with (
        ToyEngine(SHAPES, name="first") as first,
        ToyEngine(SHAPES, name="second") as second,
        WeightSender(StateDictSource(tensors(1)), [first, second], deadline=30) as sender,
    ):
        failing_once(second, "open_session", ConnectError("down"), times=2)
        for _ in range(2):
            with pytest.raises(ConnectError, match="down"):
                sender.sync(1)
        sender.sync(2)
        assert first.tensors() == second.tensors() == [as_hex(tensors(1))]


def test_strangers_who_dial_in_are_turned_away_and_keep_nobody_out(engine: ToyEngine) -> None:
    original = engine.open_session
    strangers: list[socket.socket] = []

    def with_strangers(path: str, token: str, deadline: Deadline) -> None:
        hello = Hello(
            2, "nobody", 0, 1, 1, "cpu", "x", (), WorkerStatus("idle", None, 0, None, False, False)
        )
        for sent in (
            b"\x05\x00\x00\x00hello",
            b"",
            b"\xff\xff\xff\xff",
            framed(hello),
            framed(Welcome(1)),
        ):
            stranger = socket.socket(socket.AF_UNIX)
            stranger.connect(path)
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            strangers.append(stranger)
        original(path, token, deadline)

    engine.open_session = with_strangers  # type: ignore[method-assign]
    try:
        with WeightSender(StateDictSource(tensors(1)), [engine], deadline=30) as sender:
            sender.sync(1)
    finally:
        engine.open_session = original  # type: ignore[method-assign]
        for stranger in strangers:
            stranger.close()
    assert engine.tensors() == [as_hex(tensors(1))] * 2


def framed(message) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body


def test_caches_that_cannot_be_reset_poison_and_the_version_stays(engine: ToyEngine) -> None:
    failing_once(engine, "reset_caches", ConnectError("blocks are held"))
    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        with pytest.raises(EnginePoisoned, match="blocks are held"):
            sender.sync(1)
        assert engine.version(Deadline.after(1)) == "base"
        assert all(worker["refused"] and worker["version"] == "base" for worker in engine.status())
        sender.sync(2)
    assert engine.version(Deadline.after(1)) == "2"


@pytest.mark.parametrize("call", ["set_version", "resume"])
def test_a_hiccup_after_all_is_applied_is_tried_again_and_never_poisons(
    engine: ToyEngine, call: str
) -> None:
    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        failing_once(engine, call, ConnectError("a hiccup"))
        sender.sync(1)
        assert engine.version(Deadline.after(1)) == "1" and not engine.is_paused(Deadline.after(1))
        failing_once(engine, call, ConnectError("gone"), times=2)
        with pytest.raises(NotResumed, match="applied and proven on every worker"):
            sender.sync(2)
        assert not any(worker["refused"] or worker["poisoned"] for worker in engine.status())
        assert {worker["version"] for worker in engine.status()} == {"2"}
        sender.sync(3)
    assert engine.version(Deadline.after(1)) == "3" and not engine.is_paused(Deadline.after(1))


def test_a_cured_engine_is_resumed_like_any_other_when_a_later_update_is_aborted(
    engine: ToyEngine,
) -> None:
    engine.set_faults({1: {"apply_raises": "no more"}})
    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        with pytest.raises(EnginePoisoned):
            sender.sync(1)
        engine.set_faults({})
        sender.sync(2)
        original = engine.pause

        def late(mode: str, deadline: Deadline) -> None:
            original(mode, deadline)
            raise ConnectError("too late")

        engine.pause = late  # type: ignore[method-assign]
        with pytest.raises(UpdateAborted):
            sender.sync(3)
        engine.pause = original  # type: ignore[method-assign]
        assert not engine.is_paused(Deadline.after(1))
        assert not any(worker["holds_pause"] for worker in engine.status())


def test_a_target_that_cannot_refuse_still_answers_at_once(engine: ToyEngine) -> None:
    engine.set_faults({1: {"apply_raises": "no more", "refuse_raises": True}})
    started = time.monotonic()
    with WeightSender(StateDictSource(tensors(1)), [engine], deadline=60) as sender:
        with pytest.raises(EnginePoisoned, match="no more"):
            sender.sync(1)
        assert time.monotonic() - started < 20 and engine.is_paused(Deadline.after(1))
        engine.set_faults({})
        sender.sync(2)


def test_an_interrupt_at_any_moment_of_staging_leaves_a_sender_that_works(
    engine: ToyEngine,
) -> None:
    def interrupt(done: int, total: int) -> None:
        if moments:
            moments.pop()
            raise KeyboardInterrupt

    moments = [1]
    with WeightSender(StateDictSource(tensors(1)), [engine], on_progress=interrupt) as sender:
        with pytest.raises(KeyboardInterrupt):
            sender.sync(1)
        sender.sync(2)
    assert engine.version(Deadline.after(1)) == "2"


def test_a_runtime_directory_that_is_too_deep_for_a_socket_is_a_typed_error(
    engine: ToyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    before = len(os.listdir("/proc/self/fd"))
    with (
        WeightSender(StateDictSource(tensors(1)), [engine]) as sender,
        pytest.raises(TransportError, match="107 bytes"),
    ):
        sender.sync(1)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not any((deep / f"weightsync-{os.geteuid()}").iterdir())


def test_a_receipt_is_not_lost_when_its_callback_raises(engine: ToyEngine) -> None:
    def full(receipt: Receipt) -> None:
        raise OSError("the log is full")

    with WeightSender(StateDictSource(tensors(1)), [engine], on_receipt=full) as sender:
        with pytest.raises(OSError, match="full"):
            sender.sync(1)
        assert sender.last_receipt is not None and sender.last_receipt.version == "1"
    assert not engine.is_paused(Deadline.after(1))


def test_a_deadline_may_be_infinite_but_not_zero(engine: ToyEngine) -> None:
    with WeightSender(StateDictSource(tensors(1)), [engine], deadline=float("inf")) as sender:
        sender.sync(1)
    for deadline in (0, -1, float("nan")):
        with pytest.raises(UpdateRefused, match="positive"):
            WeightSender(StateDictSource(tensors(1)), [engine], deadline=deadline)


def test_an_interrupt_in_the_middle_of_a_commit_leaves_no_engine_half_way() -> None:
    with ToyEngine(SHAPES, name="first") as first, ToyEngine(SHAPES, name="second") as second:
        original = second.apply

        def apply(update_id: str, deadline: Deadline) -> None:
            _thread.interrupt_main()
            deadline.rest(0.3, "the interrupt to arrive first")
            original(update_id, deadline)

        with WeightSender(StateDictSource(tensors(1)), [first, second]) as sender:
            staged = sender.stage(1)
            second.apply = apply  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                staged.commit()
            second.apply = original  # type: ignore[method-assign]
            for engine in (first, second):
                assert engine.tensors() == [as_hex(tensors(1))]
                assert engine.version(Deadline.after(1)) == "1"
                assert not engine.is_paused(Deadline.after(1)) and not engine.status()[0]["refused"]
            sender.sync(2)
