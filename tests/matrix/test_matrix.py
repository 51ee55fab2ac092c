"""Every model family, in every place, by every way in, each on one engine start.

A cell's tests run in this order and share its engine. Only the first needs it as it was started;
each other begins with a full update, so that no failure carries over to the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from cells import CELLS, MODELS, Cell, Rig, fail_next_apply, refusal, running, source
from test_vllm_models import (
    MIXTURE_TOLERANCE,
    Served,
    assert_equal,
    mixed,
    served,
    weights,
)

import weightsync as ws
from weightsync.deadline import Deadline
from weightsync.errors import EnginePoisoned, PlanRefused, RolledBack
from weightsync.testing import LONG_PROMPT, PROMPTS, Rollout, load_trainer, score

WAYS = {"backend": "backend session", "extension": "worker extension"}
PARTS = {
    "a layer": "model.layers.1.*",
    "attention": "model.layers.0.self_attn.*",
    "experts or mlp": "model.layers.0.[mb]l*[pe].*",  # Mixtral calls them block_sparse_moe
    "embedding": "model.embed_tokens.weight",
    "last norm": "model.norm.weight",
}


@pytest.fixture(scope="module", params=CELLS, ids=str)
def cell(request: pytest.FixtureRequest) -> Cell:
    return request.param


@pytest.fixture(scope="module")
def rig(cell: Cell, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with running(cell, tmp_path_factory.mktemp(str(cell))) as found:
        yield found


def sync(rig: Rig, variant: str, version: str | None = None, **options) -> ws.Receipt:
    with ws.WeightSender(source(rig, variant), [rig.engine], **options) as sender:
        return sender.sync(version or variant)


def everything(rig: Rig) -> list[Rollout]:
    return rig.rollouts(PROMPTS) + rig.rollouts([LONG_PROMPT])


def version(rig: Rig) -> str | None:
    return rig.engine.version(Deadline.after(10))


def test_updates_serve_exactly_the_trainers_weights(cell: Cell, rig: Rig) -> None:
    assert rig.engine.way == WAYS[cell.via]
    rig.assert_serves("A")
    for number, variant in enumerate("BAB", start=1):
        receipt = sync(rig, variant, str(number))
        rig.assert_serves(variant)
        assert version(rig) == receipt.version == str(number)
        (engine,) = receipt.engines
        # Of tiny models every layer is read back in full.
        assert receipt.proven == "served" and set(receipt.levels) == {"served"}
        assert len(engine.workers) == (2 if cell.place == "two_workers" else 1)
    print(
        cell,
        {level: f"{share.nbytes / receipt.nbytes:.1%}" for level, share in engine.levels.items()},
    )


def test_the_weights_it_already_has_change_no_output(rig: Rig) -> None:
    sync(rig, "B")
    before = everything(rig)
    sync(rig, "B")
    assert everything(rig) == before


def test_a_missing_tensor_is_refused_by_name_and_changes_nothing(rig: Rig) -> None:
    sync(rig, "A")
    before = rig.rollouts(PROMPTS)
    state = weights(rig.name, "B")
    del state["model.norm.weight"]
    expert = [name for name in state if ".experts.3." in name and "layers.1." in name]
    for name in expert[:1]:
        del state[name]
    with (
        ws.WeightSender(ws.StateDictSource(state), [rig.engine]) as sender,
        pytest.raises(PlanRefused) as refused,
    ):
        sender.sync("never")
    missing = {problem.name for problem in refused.value.problems if problem.kind == "missing"}
    assert "model.norm.weight" in missing and "model.norm.weight" in str(refused.value)
    assert len(missing) == (2 if expert else 1), missing
    assert {problem.kind for problem in refused.value.problems} == {"missing"}
    assert rig.rollouts(PROMPTS) == before and version(rig) == "A"


@pytest.mark.parametrize("part", PARTS)
def test_a_declared_part_changes_what_it_names_and_a_full_update_the_rest(
    rig: Rig, part: str, tmp_path: Path
) -> None:
    pattern = PARTS[part]
    sync(rig, "A")
    with ws.WeightSender(source(rig, "B"), [rig.engine]) as sender:
        receipt = sender.sync("part", only=[pattern])
        assert receipt.only == (pattern,) and version(rig) == "part"
        rest = {name for name in weights(rig.name, "A") if not fnmatch(name, pattern)}
        assert len(rest) < len(weights(rig.name, "A"))
        expected = mixed(rig.name, rest, tmp_path)
        for prompts, tokens in ((PROMPTS, 64), ([LONG_PROMPT], 32)):
            comparison = score(expected, prompts, rig.rollouts(prompts))
            assert_equal(comparison, tokens, MIXTURE_TOLERANCE)
        sender.sync("B")
    rig.assert_serves("B")


def test_a_failed_apply_poisons_refuses_at_admission_and_is_cured(rig: Rig) -> None:
    sync(rig, "A")
    last = rig.engine.workers - 1
    with ws.WeightSender(source(rig, "B"), [rig.engine]) as sender:
        fail_next_apply(rig, tensors=12, rank=last)
        with pytest.raises(EnginePoisoned, match=f"worker {last}: .*broken on purpose"):
            sender.sync("B")
        assert version(rig) == "A"
        for _ in range(2):
            assert "weightsync: this engine may hold a mixture" in str(refusal(rig))
        sender.sync("cured")
    assert version(rig) == "cured"
    rig.assert_serves("B")


def test_a_failed_apply_is_rolled_back_where_the_version_before_is_kept(rig: Rig) -> None:
    state = {name: tensor.clone() for name, tensor in weights(rig.name, "A").items()}
    kept = ws.StateDictSource(state)
    with ws.WeightSender(kept, [rig.engine], rollback="retain") as sender:
        sender.sync("A")
        for name, tensor in weights(rig.name, "B").items():
            state[name].copy_(tensor)
        fail_next_apply(rig, tensors=12, rank=0)
        with pytest.raises(RolledBack, match="broken on purpose"):
            sender.sync("B")
        assert version(rig) == "A"
        rig.assert_serves("A")
        sender.sync("B")
    rig.assert_serves("B")


def test_small_buckets_serve_the_same(rig: Rig) -> None:
    sync(rig, "A")
    sync(rig, "B", bucket_bytes=1024)
    rig.assert_serves("B")


@pytest.fixture
def dummy(request: pytest.FixtureRequest) -> Iterator[Served]:
    with served(request.param, load_format="dummy") as engine:
        yield engine


@pytest.mark.parametrize("dummy", MODELS, indirect=True)
def test_an_engine_that_was_started_on_noise_serves_what_it_is_sent(dummy: Served) -> None:
    for variant in "BAB":
        dummy.sync(variant)
        dummy.assert_serves(load_trainer(dummy.name, variant))


@pytest.mark.parametrize("model", MODELS)
def test_in_bf16_an_update_equals_a_fresh_start_bit_for_bit(model: str) -> None:
    fresh = {}
    for variant in "BA":
        with served(model, variant, dtype="bfloat16") as engine:
            fresh[variant] = engine.everything()
            if variant == "B":
                continue
            for update in "BAB":
                receipt = engine.sync(update)
                assert set(receipt.casts.values()) == {"float32 -> bfloat16"}
                assert engine.everything() == fresh[update]
    assert fresh["A"] != fresh["B"]
