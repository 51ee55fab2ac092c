"""Declared parts of a model, and tensors that are one memory in the engine."""

from __future__ import annotations

import pytest
import torch
from toys import SHAPES, as_hex, tensors

from weightsync import StateDictSource, WeightSender
from weightsync.deadline import Deadline
from weightsync.errors import EnginePoisoned, PlanRefused, SourceError, UpdateRefused
from weightsync.testing.toy import ToyEngine


@pytest.mark.parametrize("mode", ["staged", "streamed"])
def test_a_declared_part_changes_what_it_names_and_nothing_else(
    engine: ToyEngine, mode: str
) -> None:
    with WeightSender(StateDictSource(tensors(1)), [engine], mode=mode) as sender:
        receipt = sender.sync("part", only=["layers.0.*", "head.weight"])
        names = {"layers.0.weight", "layers.0.bias", "head.weight"}
        values = tensors(0) | {name: tensors(1)[name] for name in names}
        assert engine.tensors() == [as_hex(values)] * 2
        assert receipt.only == ("layers.0.*", "head.weight")
        assert receipt.nbytes == sum(tensors(1)[name].nbytes for name in names)
        assert receipt.levels["served"].tensors == 3
        whole = sender.sync("whole")
        assert engine.tensors() == [as_hex(tensors(1))] * 2
        assert whole.only == () and whole.levels["served"].tensors == len(SHAPES)
        sender.sync("part again", only=["embed.weight"])
    assert engine.version(Deadline.after(1)) == "part again"


@pytest.mark.parametrize("mode", ["staged", "streamed"])
def test_a_part_that_changes_what_it_does_not_name_poisons_until_all_of_it_comes(
    engine: ToyEngine, mode: str
) -> None:
    engine.set_faults({1: {"spoils_once": "head.weight"}})
    with WeightSender(StateDictSource(tensors(1)), [engine], mode=mode) as sender:
        says = r"changed: head\.weight: .* \(on toy, worker 1\)"
        with pytest.raises(EnginePoisoned, match=says):
            sender.sync("part", only=["layers.0.*"])
        assert sender.sync("whole").proven == "served"
        assert engine.tensors() == [as_hex(tensors(1))] * 2
        assert sender.sync("part", only=["layers.0.*"]).proven == "served"


def test_a_part_that_is_not_declared_is_refused(engine: ToyEngine) -> None:
    part = {name: tensors(1)[name] for name in ("layers.0.weight", "layers.0.bias")}
    with (
        WeightSender(StateDictSource(part), [engine]) as sender,
        pytest.raises(PlanRefused, match=r"missing: embed\.weight"),
    ):
        sender.sync(1)
    assert engine.tensors() == [as_hex(tensors(0))] * 2


@pytest.mark.parametrize(
    ("only", "error", "says"),
    [
        ([], SourceError, "no tensor was asked for"),
        (["layers.7.*"], SourceError, r"layers\.7\.\*"),
        ("embed.weight", SourceError, "a list"),
        (["extra.weight"], PlanRefused, r"unknown: extra\.weight"),
    ],
)
def test_a_declared_part_is_checked_like_the_whole(
    engine: ToyEngine, only, error: type[Exception], says: str
) -> None:
    source = StateDictSource({**tensors(1), "extra.weight": torch.zeros(3)})
    moved: list[int] = []
    with (
        WeightSender(source, [engine], on_progress=lambda n, _: moved.append(n)) as sender,
        pytest.raises(error, match=says),
    ):
        sender.sync(1, only=only)
    assert not moved and engine.tensors() == [as_hex(tensors(0))] * 2


def test_only_a_full_update_cures(engine: ToyEngine) -> None:
    engine.set_faults({1: {"apply_raises": "no more"}})
    with WeightSender(StateDictSource(tensors(1)), [engine]) as sender:
        with pytest.raises(EnginePoisoned):
            sender.sync(1)
        engine.set_faults({})
        with pytest.raises(UpdateRefused, match="full update"):
            sender.sync(2, only=["head.weight"])
        assert all(worker["poisoned"] and worker["refused"] for worker in engine.status())
        sender.sync(3)
    assert engine.tensors() == [as_hex(tensors(1))] * 2


# One memory in the engine, two tensors in the trainer


TIED = {"lm_head.weight": "embed.weight"}


@pytest.fixture(scope="module")
def tied_engine():
    with ToyEngine(SHAPES, workers=2, tied=TIED) as toy:
        yield toy


def with_head(seed: int) -> dict[str, torch.Tensor]:
    values = tensors(seed)
    return {**values, "lm_head.weight": values["embed.weight"].clone()}


@pytest.mark.parametrize("mode", ["staged", "streamed"])
def test_a_tied_head_that_is_sent_with_the_embeddings_bytes_is_not_sent_twice(
    tied_engine: ToyEngine, mode: str
) -> None:
    source = with_head(1)
    with WeightSender(StateDictSource(source), [tied_engine], mode=mode) as sender:
        for step in (1, 2, 3):
            source.update(with_head(step))
            calls = len(tied_engine.calls)
            receipt = sender.sync(step)
            assert receipt.aliases == TIED
            assert receipt.nbytes == sum(t.nbytes for t in tensors(step).values())
            assert tied_engine.tensors() == [as_hex(with_head(step))] * 2
        assert tied_engine.calls[calls:].count("begin") == 1  # it was looked at once


@pytest.mark.parametrize("step", [1, 2], ids=["at once", "later"])
def test_a_tied_head_with_other_bytes_than_its_embedding_is_refused_by_name(
    tied_engine: ToyEngine, step: int
) -> None:
    source = with_head(1)
    with WeightSender(StateDictSource(source), [tied_engine]) as sender:
        for good in range(1, step):
            sender.sync(good)
        before = tied_engine.tensors()
        source["lm_head.weight"].view(torch.uint8)[-1, -1] ^= 1
        with pytest.raises(PlanRefused) as refusal:
            sender.sync("untied")
        (problem,) = refusal.value.problems
        assert (problem.kind, problem.name) == ("duplicate", "lm_head.weight")
        assert "'embed.weight', but has other bytes" in problem.detail
        assert "tie" in str(refusal.value.remedy)
        assert tied_engine.tensors() == before


def test_the_other_name_of_a_tied_tensor_stands_for_it_in_a_declared_part(
    tied_engine: ToyEngine,
) -> None:
    values = tensors(4)
    source = StateDictSource({**values, "lm_head.weight": values["embed.weight"]})
    with WeightSender(StateDictSource(with_head(3)), [tied_engine]) as sender:
        sender.sync(3)
    with WeightSender(source, [tied_engine]) as sender:
        receipt = sender.sync(4, only=["lm_head.weight"])
    assert receipt.levels["served"].tensors == 1
    expected = with_head(3) | {name: values["embed.weight"] for name in ("embed.weight", *TIED)}
    assert tied_engine.tensors() == [as_hex(expected)] * 2


def test_engines_that_tie_and_engines_that_do_not_are_fed_by_one_sender() -> None:
    untied = {**SHAPES, "lm_head.weight": SHAPES["embed.weight"]}
    with (
        ToyEngine(SHAPES, tied=TIED, name="tied") as one,
        ToyEngine(untied, name="untied") as two,
        WeightSender(StateDictSource(with_head(5)), [one, two]) as sender,
    ):
        receipt = sender.sync(5)
        assert one.tensors() == two.tensors() == [as_hex(with_head(5))]
        assert receipt.aliases == {}
