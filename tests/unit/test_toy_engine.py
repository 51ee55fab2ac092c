"""A model that is served by real worker processes takes updates as if it had started with them.

The golden check: logits, and the bytes of every tensor, loaded or not, are those of an engine that
was freshly started with the same weights.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from weightsync import WeightSender
from weightsync.deadline import Deadline
from weightsync.errors import EnginePoisoned, PlanRefused, UpdateRefused, WeightSyncError
from weightsync.sources import StateDictSource
from weightsync.testing.toy_checkpoint import ToyConfig, checkpoint
from weightsync.testing.toy_engine import ToyModelEngine
from weightsync.testing.toy_model import ToyModel, plain_tensors

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
KINDS = [
    ToyConfig("swapped", tied=True),
    ToyConfig("4d", tied=True),
    ToyConfig("swapped", tied=False),
]

Golden = tuple[list[list[float]], list[dict[str, str]]]


def golden(engine: ToyModelEngine) -> Golden:
    return engine.logits(PROMPT), engine.hashes()


_FRESH: dict[object, Golden] = {}


def fresh(seed: int, workers: int, config: ToyConfig | None = None) -> Golden:
    """Of an engine that was started with these weights and never updated."""
    key = seed, workers, config
    if key not in _FRESH:
        with ToyModelEngine(checkpoint(seed, config), config=config, workers=workers) as engine:
            _FRESH[key] = golden(engine)
    return _FRESH[key]


def sender(engine: ToyModelEngine, weights: dict[str, torch.Tensor], **how: object) -> WeightSender:
    return WeightSender(StateDictSource(weights), [engine], proof="served", deadline=50, **how)


def test_fresh_engines_with_other_weights_are_told_apart() -> None:
    one, two = fresh(1, 1), fresh(2, 1)
    assert one[0] != two[0]
    same = {name for name, found in one[1][0].items() if found == two[1][0][name]}
    assert same == {"embed_scale", "layers.0.attn.cos_sin", "layers.0.attn.slopes"}
    split = fresh(1, 2)
    assert torch.allclose(torch.tensor(one[0]), torch.tensor(split[0]), atol=0.1)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("config", KINDS, ids=str)
def test_there_and_back_equals_a_fresh_engine(workers: int, config: ToyConfig) -> None:
    a, b = checkpoint(1, config), checkpoint(2, config)
    weights = dict(b)
    with (
        ToyModelEngine(a, config=config, workers=workers) as engine,
        sender(engine, weights) as to,
    ):
        engine.logits(PROMPT)  # leaves a prefix behind
        first = to.sync(1)
        assert first.levels.keys() == {"served"}
        assert golden(engine) == fresh(2, workers, config)
        for state in engine.loads():
            assert state["loads"] == 2
            assert set(state["finalized"].values()) == {1}
        for name, value in a.items():
            weights[name].copy_(value)
        to.sync(2)
        assert golden(engine) == fresh(1, workers, config)
        to.sync(3)  # the same once more changes nothing
        assert golden(engine) == fresh(1, workers, config)


@pytest.mark.parametrize("bucket", [64, 1024, None])
def test_the_size_of_buckets_makes_no_difference(bucket: int | None) -> None:
    with (
        ToyModelEngine(checkpoint(1), workers=2) as engine,
        sender(engine, checkpoint(2), bucket_bytes=bucket) as to,
    ):
        to.sync(1)
        assert golden(engine) == fresh(2, 2)


def test_prefixes_of_old_weights_are_forgotten() -> None:
    class Keeps(ToyModelEngine):
        def reset_caches(self, deadline: object, *, recompute: bool) -> None:
            self.calls.append("reset_caches")

    for kind, equal in ((ToyModelEngine, True), (Keeps, False)):
        with kind(checkpoint(1)) as engine, sender(engine, checkpoint(2)) as to:
            engine.logits(PROMPT[:-2])
            to.sync(1)
            assert (engine.logits(PROMPT) == fresh(2, 1)[0]) is equal


@pytest.mark.parametrize("config", KINDS[:2], ids=str)
def test_after_deep_sleep_nothing_is_served_until_a_sync_which_equals_a_fresh_engine(
    config: ToyConfig,
) -> None:
    weights = checkpoint(2, config)
    with (
        ToyModelEngine(checkpoint(1, config), config=config, workers=2) as engine,
        sender(engine, weights) as to,
    ):
        for round_ in range(3):
            engine.sleep(2)
            with pytest.raises(EnginePoisoned, match="asleep"):
                to.sync(f"{round_} while asleep")
            engine.wake()
            with pytest.raises(UpdateRefused, match="serves nothing"):
                engine.logits(PROMPT)
            to.sync(round_)
            assert golden(engine) == fresh(2, 2, config)


def test_light_sleep_keeps_everything() -> None:
    with ToyModelEngine(checkpoint(1), workers=2) as engine:
        engine.sleep(1)
        with pytest.raises(UpdateRefused, match="asleep"):
            engine.logits(PROMPT)
        lost = engine.hashes()
        engine.wake()
        assert golden(engine) == fresh(1, 2) != (None, lost)


def test_a_declared_part_leaves_the_rest_and_finalizes_only_what_it_goes_to() -> None:
    a, b = checkpoint(1), checkpoint(2)
    part = {name for name in b if name.startswith("layers.1.attn.kv_b_proj")}
    with ToyModelEngine(a, workers=2) as engine, sender(engine, b) as to:
        to.sync(1, only=sorted(part))
        assert all(s["finalized"] == {"layers.1.attn.kv_b_proj": 1} for s in engine.loads())
        mixed = {name: (b if name in part else a)[name] for name in a}
        with ToyModelEngine(mixed, workers=2) as other:
            assert golden(engine) == golden(other)
        with pytest.raises(PlanRefused, match="experts"):
            to.sync(2, only=["layers.1.mlp.experts.0.*"])


def test_a_worker_that_is_late_is_waited_for(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    late = {1: {"fault": "waits", "path": str(gate)}}
    with (
        ToyModelEngine(checkpoint(1), workers=2, faults=late) as engine,
        sender(engine, checkpoint(2)) as to,
    ):
        opener = threading.Timer(0.5, gate.touch)
        opener.start()
        to.sync(1)
        assert gate.exists(), "sync returned before the second worker had loaded"
        opener.join()
        assert golden(engine) == fresh(2, 2)


@pytest.mark.parametrize("moment", ["follow", "apply", "after_apply"])
def test_a_worker_that_dies_fails_the_update_and_is_named(moment: str) -> None:
    with (
        ToyModelEngine(checkpoint(1), workers=2, faults={1: {"kills_at": moment}}) as engine,
        sender(engine, checkpoint(2)) as to,
    ):
        with pytest.raises(WeightSyncError, match="toy, worker 1"):
            to.sync(1)
        assert engine.version(Deadline.after(5)) is None


def test_names_that_the_model_lacks_and_tensors_that_are_missing_are_refused() -> None:
    weights = checkpoint(2)
    with ToyModelEngine(checkpoint(1)) as engine:
        renamed = {name.replace("wq", "q_b_proj"): value for name, value in weights.items()}
        with sender(engine, renamed) as to, pytest.raises(PlanRefused) as refused:
            to.sync(1)
        found = {(p.kind, p.name) for p in refused.value.problems}
        assert found == {
            ("unknown", "layers.1.attn.q_b_proj.weight"),
            ("missing", "layers.1.attn.wq.weight"),
        }
        assert golden(engine) == fresh(1, 1)


# The model alone


def chunks(weights: dict[str, torch.Tensor], size: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    every = list(weights.items())
    for first in range(0, len(every), size):
        yield every[first : first + size]


def everything(model: ToyModel) -> dict[str, bytes]:
    found = {**model.state(), **plain_tensors(model)}
    return {
        name: t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, t in found.items()
    }


def loaded(seed: int, config: ToyConfig) -> ToyModel:
    model = ToyModel(config)
    model.load(checkpoint(seed, config).items())
    return model


@pytest.mark.parametrize("config", KINDS, ids=str)
@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_one_bracket_around_chunks_equals_one_load(config: ToyConfig, size: int) -> None:
    model = loaded(1, config)
    model.begin()
    for chunk in chunks(checkpoint(2, config), size):
        model.load_weights(chunk)
    model.finish()
    assert everything(model) == everything(loaded(2, config))


@pytest.mark.parametrize("config", KINDS, ids=str)
def test_finalizing_per_chunk_or_twice_is_a_fault_that_the_toy_really_has(
    config: ToyConfig,
) -> None:
    right = everything(loaded(2, config))
    model = loaded(1, config)
    for chunk in chunks(checkpoint(2, config), 3):
        model.load(chunk)
    assert everything(model) != right
    again = loaded(2, config)
    if config.experts == "swapped":
        again.layers[1].mlp.experts.finalize()
        assert everything(again) != right
        assert not torch.equal(again.logits(PROMPT)[0], loaded(2, config).logits(PROMPT)[0])


def test_a_loader_that_is_dropped_when_finalized_is_there_again_in_the_next_load() -> None:
    model = loaded(1, ToyConfig())
    experts = model.layers[1].mlp.experts
    assert not hasattr(experts.w13, "weight_loader")
    model.load(checkpoint(2).items())
    model._opened = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(AttributeError, match="weight_loader"):
        model.load(checkpoint(2).items())


def test_forward_computes_from_packed_copies_and_absorbed_matrices() -> None:
    model = loaded(1, ToyConfig())
    before, proposed = model.logits(PROMPT)
    packed = [
        name
        for name, p in model.named_parameters()
        if name.endswith("weight") and f"{name.rpartition('.')[0]}.packed" in plain_tensors(model)
    ]
    assert len(packed) == 8
    for name in packed:
        model.get_parameter(name).data.fill_(float("nan"))
    model.get_parameter("layers.1.attn.kv_b_proj.weight").data.fill_(float("nan"))
    model.reset_caches()
    assert torch.equal(model.logits(PROMPT)[0], before)
    for name, tensor in plain_tensors(model).items():
        kept = tensor.clone()
        tensor.mul_(1.5)
        model.reset_caches()
        target, draft = model.logits(PROMPT)
        changed = draft if name == "draft.fc.packed" else target
        assert not torch.equal(changed, proposed if name == "draft.fc.packed" else before), name
        tensor.copy_(kept)
