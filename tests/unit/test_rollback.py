"""Going back to the version before, on all workers together."""

from __future__ import annotations

import pytest
from toys import SHAPES, as_hex, tensors

from weightsync import StateDictSource, WeightSender
from weightsync.deadline import Deadline
from weightsync.errors import EnginePoisoned, RolledBack, TransportError, UpdateRefused
from weightsync.testing.toy import ToyEngine


@pytest.fixture
def engine():
    with ToyEngine(SHAPES, workers=2) as toy:
        yield toy


def served(engine: ToyEngine, seed: int) -> bool:
    return engine.tensors() == [as_hex(tensors(seed))] * 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("updates", [1, 2, 3], ids="{} before".format)
def test_all_workers_serve_the_version_before_when_one_fails(
    engine: ToyEngine, rank: int, updates: int
) -> None:
    source = tensors(1)
    with WeightSender(StateDictSource(source), [engine], rollback="retain") as sender:
        for step in range(1, updates + 1):
            source.update(tensors(step))
            sender.sync(step)
        receipt = sender.last_receipt
        engine.set_faults({rank: {"apply_raises_once": "no more"}})
        source.update(tensors(99))
        engine.calls.clear()
        with pytest.raises(RolledBack, match=f"worker {rank}: RuntimeError: no more") as failure:
            sender.sync("99")
        assert served(engine, updates)
        assert f"version {updates}, proven again" in str(failure.value) and failure.value.remedy
        assert engine.version(Deadline.after(1)) == str(updates)
        assert not engine.is_paused(Deadline.after(1))
        assert not any(worker["poisoned"] or worker["refused"] for worker in engine.status())
        # Requests that were frozen go on: nothing was ended, and their caches are computed anew.
        assert "pause abort" not in engine.calls and "reset_caches" in engine.calls
        assert sender.last_receipt is receipt
        sender.sync("99")
        assert served(engine, 99)


def test_an_engine_that_fails_twice_is_poisoned_and_a_full_update_cures_it(
    engine: ToyEngine,
) -> None:
    source = tensors(1)
    with WeightSender(StateDictSource(source), [engine], rollback="retain") as sender:
        sender.sync(1)
        engine.set_faults({1: {"apply_raises": "for good"}})
        source.update(tensors(2))
        with pytest.raises(EnginePoisoned, match="for good") as failure:
            sender.sync(2)
        assert any("version 1 could not be restored" in note for note in failure.value.__notes__)
        assert all(worker["poisoned"] and worker["refused"] for worker in engine.status())
        assert engine.is_paused(Deadline.after(1)) and engine.calls[-1] == "pause abort"
        engine.set_faults({})
        sender.sync(3)
        assert served(engine, 2)


def test_before_the_first_update_there_is_nothing_to_go_back_to(engine: ToyEngine) -> None:
    engine.set_faults({0: {"apply_raises_once": "no more"}})
    with WeightSender(StateDictSource(tensors(1)), [engine], rollback="retain") as sender:
        with pytest.raises(EnginePoisoned):
            sender.sync(1)
        sender.sync(2)
        assert served(engine, 1)


def test_what_was_kept_is_proven_again_before_it_is_given_back(engine: ToyEngine) -> None:
    source = tensors(1)
    with WeightSender(StateDictSource(source), [engine], rollback="retain") as sender:
        sender.sync(1)
        sender._outbox.arena.view()[0] ^= 1  # the half that is served
        engine.set_faults({0: {"apply_raises_once": "no more"}})
        source.update(tensors(2))
        with pytest.raises(EnginePoisoned) as failure:
            sender.sync(2)
        assert any("other bytes in what was kept" in note for note in failure.value.__notes__)
        sender.sync(3)
        assert served(engine, 2)


def test_updates_that_were_given_up_leave_what_is_kept_alone(engine: ToyEngine) -> None:
    source = tensors(1)
    with WeightSender(StateDictSource(source), [engine], rollback="retain") as sender:
        sender.sync(1)
        for step in range(2, 5):
            source.update(tensors(step))
            sender.stage(step).abort()
        engine.set_faults({1: {"apply_raises_once": "no more"}})
        with pytest.raises(RolledBack):
            sender.sync(5)
        assert served(engine, 1)


def test_a_worker_that_is_lost_is_not_rolled_back_to(engine: ToyEngine) -> None:
    source = tensors(1)
    with WeightSender(StateDictSource(source), [engine], rollback="retain", deadline=30) as sender:
        sender.sync(1)
        engine.set_faults({1: {"apply_kills": True}})
        with pytest.raises((EnginePoisoned, TransportError), match="worker 1"):
            sender.sync(2)


def test_of_two_engines_one_goes_on_and_the_other_goes_back() -> None:
    source = tensors(1)
    with (
        ToyEngine(SHAPES, name="good") as good,
        ToyEngine(SHAPES, name="bad") as bad,
        WeightSender(StateDictSource(source), [good, bad], rollback="retain") as sender,
    ):
        sender.sync(1)
        for step in (2, 3):
            bad.set_faults({0: {"apply_raises_once": "no more"}})
            source.update(tensors(step))
            with pytest.raises((RolledBack, EnginePoisoned)) as failure:
                sender.sync(step)
            assert [receipt.name for receipt in failure.value.succeeded] == ["good"]
            assert good.tensors() == [as_hex(tensors(step))]
            if step == 2:
                assert isinstance(failure.value, RolledBack)
                assert bad.tensors() == [as_hex(tensors(1))]
        # The second time, the other half was needed for what the good engine served.
        assert isinstance(failure.value, EnginePoisoned)
        assert not any("restored" in note for note in getattr(failure.value, "__notes__", ()))
        source.update(tensors(4))
        sender.sync(4)
        assert good.tensors() == bad.tensors() == [as_hex(tensors(4))]


def test_what_does_not_go_together_is_refused(engine: ToyEngine) -> None:
    source = StateDictSource(tensors(1))
    with pytest.raises(UpdateRefused, match="nowhere kept"):
        WeightSender(source, [engine], mode="streamed", rollback="retain")
    with pytest.raises(UpdateRefused, match="'none' or 'retain'"):
        WeightSender(source, [engine], rollback="always")  # type: ignore[arg-type]
    with (
        WeightSender(source, [engine], rollback="retain") as sender,
        pytest.raises(UpdateRefused, match="keeps whole versions"),
    ):
        sender.sync(1, only=["head.weight"])
