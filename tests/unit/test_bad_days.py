"""What goes wrong beside the update: interrupts without a word, takeovers in the middle, processes
that end or were forked, sources that count wrongly, memory that moves."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
import torch
from toys import SHAPES, as_hex, tensors

from weightsync import StateDictSource, WeightSender
from weightsync.deadline import Deadline
from weightsync.errors import (
    EnginePoisoned,
    NotResumed,
    PlanRefused,
    RolledBack,
    SourceError,
    Superseded,
    UpdateRefused,
)
from weightsync.manifest import Manifest, TensorSpec
from weightsync.module_target import ModuleTarget
from weightsync.sources.base import Pieces
from weightsync.staging import Incoming
from weightsync.testing.toy import ToyEngine


@pytest.fixture
def engine():
    with ToyEngine(SHAPES, workers=2) as toy:
        with WeightSender(StateDictSource(tensors(0)), [toy]) as sender:
            sender.sync("base")
        toy.calls.clear()
        yield toy


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


# Interrupts, which say nothing


@pytest.mark.parametrize("mode", ["staged", "streamed"])
def test_an_interrupt_without_a_text_leaves_poison_and_the_next_sender_heeds_it(
    engine: ToyEngine, mode: str
) -> None:
    original = engine.finish
    with WeightSender(StateDictSource(tensors(1)), [engine], mode=mode) as sender:
        sender.stage(1).abort() if mode == "staged" else None
        pause = engine.pause

        def pause_then_break(*arguments) -> None:
            pause(*arguments)
            engine.reset_caches = interrupted  # type: ignore[method-assign]

        engine.pause = pause_then_break  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            sender.sync(1)
    del engine.reset_caches, engine.pause
    engine.finish = original  # type: ignore[method-assign]
    assert all(worker["poisoned"] and worker["refused"] for worker in engine.status())
    engine.calls.clear()
    other = StateDictSource({"unknown": torch.zeros(1)})
    with WeightSender(other, [engine]) as sender, pytest.raises(PlanRefused):
        sender.sync(2)
    assert "resume" not in engine.calls and engine.is_paused(Deadline.after(1))
    with WeightSender(StateDictSource(tensors(2)), [engine]) as sender:
        sender.sync(3)
    assert engine.tensors() == [as_hex(tensors(2))] * 2
    assert not engine.is_paused(Deadline.after(1))


def test_an_interrupt_of_what_could_be_rolled_back_ends_the_requests(engine: ToyEngine) -> None:
    with WeightSender(StateDictSource(tensors(1)), [engine], rollback="retain") as sender:
        sender.sync(1)
        engine.reset_caches = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            sender.sync(2)
        del engine.reset_caches
        assert engine.calls[-1] == "pause abort"
        assert all(worker["poisoned"] for worker in engine.status())


def test_an_interrupt_after_all_is_applied_still_resumes(engine: ToyEngine) -> None:
    original, calls = engine.set_version, []

    def interrupted_once(*arguments) -> None:
        calls.append(arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt
        original(*arguments)

    engine.set_version = interrupted_once  # type: ignore[method-assign]
    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        with pytest.raises(KeyboardInterrupt):
            sender.sync(1)
        assert not engine.is_paused(Deadline.after(1))
        assert engine.version(Deadline.after(1)) == "1"
        assert not any(worker["poisoned"] for worker in engine.status())


# Takeovers


def test_a_sender_that_is_replaced_while_it_rolls_back_leaves_its_successor_alone(
    engine: ToyEngine,
) -> None:
    with WeightSender(StateDictSource(tensors(1)), [engine], rollback="retain") as old:
        old.sync(1)
        engine.set_faults({0: {"apply_raises_once": "no more"}})
        begin, news = engine.begin, []

        def taken_over(deadline: Deadline) -> None:
            begin(deadline)
            if any(worker["poisoned"] for worker in engine.status()) and not news:
                engine.begin = begin  # type: ignore[method-assign]
                new = WeightSender(StateDictSource(tensors(2)), [engine])
                news.append(new)
                new.sync("new")
                engine.calls.clear()

        engine.begin = taken_over  # type: ignore[method-assign]
        with pytest.raises(Superseded):
            old.sync(2)
        assert engine.calls == [] and engine.tensors() == [as_hex(tensors(2))] * 2
        assert not engine.is_paused(Deadline.after(1))
        with pytest.raises(Superseded):
            old.sync(3)
        news[0].close()


@pytest.mark.parametrize("moment", ["pause", "move"])
def test_of_two_streamed_engines_the_one_that_is_still_ours_is_settled(moment: str) -> None:
    with ToyEngine(SHAPES, name="one") as one, ToyEngine(SHAPES, name="two") as two:
        news: list[WeightSender] = []

        def take_over() -> None:
            if not news:
                news.append(WeightSender(StateDictSource(tensors(2)), [two]))
                news[0].sync("new")

        sender = WeightSender(
            StateDictSource(tensors(1)),
            [one, two],
            mode="streamed",
            on_progress=lambda *_: take_over() if moment == "move" else None,
        )
        sender._roster.open(Deadline.after(30))
        pause = two.pause
        if moment == "pause":
            two.pause = lambda *a: (pause(*a), take_over())  # type: ignore[method-assign]
        with pytest.raises((Superseded, EnginePoisoned)):
            sender.sync(1)
        two.pause = pause  # type: ignore[method-assign]
        assert two.tensors() == [as_hex(tensors(2))]
        (worker,) = one.status()
        if moment == "pause":
            assert not one.is_paused(Deadline.after(1)) and not worker["session_open"]
            assert not worker["poisoned"]
        else:
            assert worker["poisoned"] and worker["refused"] and one.calls[-1] == "pause abort"
        sender.close()
        news[0].close()


# What is kept to go back to


def test_a_version_that_could_not_be_told_is_still_the_one_before_the_next(
    engine: ToyEngine,
) -> None:
    source = tensors(1)
    with WeightSender(StateDictSource(source), [engine], rollback="retain") as sender:
        sender.sync(1)
        original = engine.resume

        def refuses(*_: object) -> None:
            raise RuntimeError("not now")

        engine.resume = refuses  # type: ignore[method-assign]
        source.update(tensors(2))
        with pytest.raises(NotResumed):
            sender.sync(2)
        engine.resume = original  # type: ignore[method-assign]
        engine.set_faults({0: {"apply_raises_once": "no more"}})
        source.update(tensors(3))
        with pytest.raises(RolledBack, match="version 2"):
            sender.sync(3)
        assert engine.tensors() == [as_hex(tensors(2))] * 2


def test_an_engine_that_was_updated_by_somebody_else_is_not_given_back_what_is_kept(
    engine: ToyEngine,
) -> None:
    source = tensors(1)
    with WeightSender(StateDictSource(source), [engine], rollback="retain") as sender:
        sender.sync(1)
        kept = sender._keeper
    with WeightSender(StateDictSource(tensors(5)), [engine]) as other:
        other.sync("other")
    engine.set_faults({0: {"apply_raises_once": "no more"}})
    with WeightSender(StateDictSource(source), [engine], rollback="retain") as sender:
        sender._keeper = kept  # as if it were the same, over a restart of the engine
        kept.make_room = lambda *_: None  # type: ignore[method-assign]
        with pytest.raises(EnginePoisoned) as failure:
            sender.sync(2)
        assert not any("restored" in note for note in getattr(failure.value, "__notes__", ()))


# Sources and memory


class HalfTwice(StateDictSource):
    """Yields the first half of every tensor twice, and never the second."""

    def pieces(self, wanted=None):
        for batch in super().pieces(wanted):
            half = batch.nbytes // 2
            for rest in (half, batch.nbytes - half):
                yield Pieces(batch.index, batch.start, rest, batch.address, batch.manifest)


@pytest.mark.parametrize("workers", [1, 2])
def test_bytes_that_come_twice_do_not_stand_for_bytes_that_never_come(workers: int) -> None:
    shapes = {"even.weight": ("float32", (8, 8))}
    with (
        ToyEngine(shapes, workers=workers) as toy,
        WeightSender(HalfTwice(tensors(1, shapes)), [toy]) as sender,
        pytest.raises(SourceError, match=r"even\.weight.*not each of them once"),
    ):
        sender.sync(1)


@pytest.mark.parametrize("mode", ["staged", "streamed"])
@pytest.mark.parametrize("name", ["embed.weight", "lm_head.weight"])
def test_a_part_that_would_change_what_it_does_not_name_is_refused(mode: str, name: str) -> None:
    tied = {"lm_head.weight": "embed.weight"}
    source = {**tensors(1), "lm_head.weight": tensors(2)["embed.weight"]}
    with (
        ToyEngine(SHAPES, tied=tied) as toy,
        WeightSender(StateDictSource(source), [toy], mode=mode) as sender,
    ):
        with pytest.raises(PlanRefused, match="other bytes"):
            sender.sync(1, only=[name])
        source["lm_head.weight"] = source["embed.weight"].clone()
        sender.sync(2, only=[name])
        assert toy.tensors()[0]["embed.weight"] == as_hex(source)["embed.weight"]


def test_a_parameter_that_begins_where_a_larger_one_does_is_not_the_same() -> None:
    module = torch.nn.Module()
    flat = torch.zeros(10)
    module.flat, module.part = torch.nn.Parameter(flat), torch.nn.Parameter(flat[:5])
    manifest = Manifest([TensorSpec("part", "float32", (5,))])
    found = ModuleTarget(module).describe(manifest, whole=True)
    assert [(p.kind, p.name) for p in found.problems] == [("missing", "flat")]


def test_a_module_on_another_device_is_refused_before_anything_moves() -> None:
    module = torch.nn.Linear(4, 4, device="meta")
    manifest = Manifest(
        [TensorSpec("weight", "float32", (4, 4)), TensorSpec("bias", "float32", (4,))]
    )
    found = ModuleTarget(module).describe(manifest, whole=True)
    assert {p.name for p in found.problems if p.kind == "loader"} == {"weight", "bias"}


def test_a_parameter_that_is_replaced_while_it_is_written_is_an_error() -> None:
    module = torch.nn.Linear(4, 4, bias=False)
    manifest = Manifest([TensorSpec("weight", "float32", (4, 4))])
    target = ModuleTarget(module)

    class Replacing(Incoming):
        def copy_to(self, addresses):
            module.weight.data = torch.zeros(4, 4)
            return np.zeros((1, 2), np.uint64)

    parts = {field: None for field in Incoming.__dataclass_fields__}
    with pytest.raises(UpdateRefused, match="replaced while"):
        target.stream(Replacing(**{**parts, "manifest": manifest}))


# Arguments


def test_a_pause_that_does_not_exist_is_refused_before_anything_moves(engine: ToyEngine) -> None:
    moved: list[int] = []
    source = StateDictSource(tensors(1))
    with WeightSender(source, [engine], on_progress=lambda n, _: moved.append(n)) as sender:
        with pytest.raises(UpdateRefused, match="'keep', 'wait' or 'abort'"):
            sender.sync(1, pause="typo")  # type: ignore[arg-type]
        assert not moved
        sender.sync(2)


def test_an_interrupt_between_stage_and_commit_leaves_a_sender_that_works(
    engine: ToyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(WeightSender, "_commit", interrupted)
            sender.sync(1)
        sender.sync(2)


@pytest.mark.parametrize(
    "arguments",
    [
        {"bucket_bytes": 64.0},
        {"bucket_bytes": 1 << 64},
        {"bucket_bytes": 2 << 20, "mode": "streamed"},
        {"deadline": "5"},
    ],
    ids=str,
)
def test_arguments_of_another_kind_are_typed_errors(engine: ToyEngine, arguments) -> None:
    with pytest.raises(UpdateRefused):
        WeightSender(StateDictSource(tensors(1)), [engine], **arguments)


def test_a_version_that_is_no_text_is_refused(engine: ToyEngine) -> None:
    with (
        WeightSender(StateDictSource(tensors(1)), [engine]) as sender,
        pytest.raises(UpdateRefused, match="no Unicode"),
    ):
        sender.sync("\ud800")


# Processes


def test_a_worker_that_ends_in_the_middle_of_an_update_ends_normally() -> None:
    """Its thread is in native code then, where the interpreter would end it by force."""
    with ToyEngine(SHAPES, name="ending") as toy:
        process = toy._processes[0]

        def end(done: int, total: int) -> None:
            if done:
                assert process.stdin is not None
                process.stdin.close()
                assert process.wait(20) == 0

        class Slow(StateDictSource):
            def pieces(self, wanted=None):
                for batch in super().pieces(wanted):
                    for row in range(batch.index.size):
                        one = slice(row, row + 1)
                        yield Pieces(
                            batch.index[one],
                            batch.start[one],
                            batch.nbytes[one],
                            batch.address[one],
                        )

        source = Slow(tensors(1))
        started = time.monotonic()
        with (
            WeightSender(source, [toy], on_progress=end, deadline=30) as sender,
            pytest.raises(Exception, match="ending, worker 0"),
        ):
            sender.sync(1)
        assert time.monotonic() - started < 20


def test_closing_is_noticed_although_a_forked_child_holds_the_sockets(engine: ToyEngine) -> None:
    sender = WeightSender(StateDictSource(tensors(1)), [engine])
    sender.stage(1)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reader, 1)
        os._exit(0)
    try:
        sender.close()
        deadline = Deadline.after(15)
        while any(worker["resources"]["threads"] > 1 for worker in engine.status()):
            deadline.rest(0.01, "the workers to notice")
    finally:
        os.write(writer, b"x")
        os.waitpid(child, 0)
    assert {worker["phase"] for worker in engine.status()} == {"aborted"}


def test_deadlines_bound_a_commit_whose_worker_stands_still(engine: ToyEngine) -> None:
    with WeightSender(StateDictSource(tensors(1)), [engine], deadline=30) as sender:
        staged = sender.stage(1)
        sender._seconds = 1.0
        process = engine._processes[0]
        apply = engine.apply

        def stop_first(*arguments) -> None:
            process.send_signal(signal.SIGSTOP)
            engine.apply = apply  # type: ignore[method-assign]
            raise RuntimeError("never called")

        engine.apply = stop_first  # type: ignore[method-assign]
        started = time.monotonic()
        with pytest.raises(EnginePoisoned):
            staged.commit()
        took = time.monotonic() - started
        process.send_signal(signal.SIGCONT)
        assert took < 35, took
