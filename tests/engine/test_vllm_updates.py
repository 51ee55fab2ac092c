"""Kinds of updates into a real vLLM: declared parts, tied heads, going back, odd tensors."""

from __future__ import annotations

import pytest
import torch
from test_vllm_in_process import Rig

import weightsync as ws
from weightsync.errors import (
    EnginePoisoned,
    ManifestError,
    PlanRefused,
    RolledBack,
    SourceError,
    UpdateRefused,
)
from weightsync.target import StagedWeights
from weightsync.testing import PROMPTS, load_trainer, score

TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=["qwen2", "qwen2_tied", "qwen3_moe"])
def rig(request: pytest.FixtureRequest):
    found = Rig(request.param)
    yield found
    found.close()


def assert_serves(rig: Rig, model: torch.nn.Module) -> None:
    comparison = score(model, PROMPTS, rig.rollouts(PROMPTS))
    assert comparison.greedy_matches == comparison.tokens == 64, str(comparison)
    assert comparison.max_abs_logprob_difference <= TOLERANCE, str(comparison)


PARTS = [
    ["model.norm.weight"],
    ["model.layers.1.*"],
    ["model.layers.0.self_attn.*", "model.layers.1.*layernorm.weight"],
    ["model.embed_tokens.weight"],
    ["lm_head.weight"],
    ["model.layers.0.mlp.*"],
]


@pytest.mark.parametrize("only", PARTS, ids=" ".join)
def test_a_declared_part_changes_what_it_names_and_nothing_else(rig: Rig, only: list[str]) -> None:
    """Packed copies of what it does not name included: each output is that of a model of which
    just this part was loaded."""
    with rig.sender("A") as sender:
        sender.sync("A")
    with rig.sender("B") as sender:
        receipt = sender.sync("part", only=only)
        mixed = load_trainer(rig.name, "A")
        assert receipt.only == tuple(only)
        replace(mixed, rig.models["B"], only)
        assert_serves(rig, mixed)
        sender.sync("B")
    rig.assert_serves("B")


def replace(model: torch.nn.Module, other: torch.nn.Module, only: list[str]) -> None:
    from fnmatch import fnmatch

    theirs = other.state_dict()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if any(fnmatch(name, pattern) for pattern in only):
                tensor.copy_(theirs[name])


def test_half_of_what_is_loaded_together_is_refused_in_a_declared_part_too(rig: Rig) -> None:
    with rig.sender("A") as sender:
        sender.sync("A")
    before = rig.rollouts(PROMPTS)
    if rig.name == "qwen3_moe":
        only, names = ["model.layers.0.mlp.experts.gate_up_proj"], "experts"
    else:
        only, names = ["model.layers.0.mlp.gate_proj.weight"], "{gate_proj, up_proj}"
    with rig.sender("B") as sender:
        with pytest.raises(PlanRefused) as refusal:
            sender.sync("B", only=only)
        assert any(names in problem.name for problem in refusal.value.problems)
        if rig.name != "qwen3_moe":  # a weight without its bias
            with pytest.raises(PlanRefused, match="missing"):
                sender.sync("B", only=["model.layers.0.self_attn.?_proj.weight"])
        with pytest.raises(SourceError, match="no tensor"):
            sender.sync("B", only=["model.layers.7.*"])
    assert rig.rollouts(PROMPTS) == before


def odd(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values, laid out in memory in ways that torch allows."""
    found = {}
    for number, (name, tensor) in enumerate(state.items()):
        if tensor.dim() > 1 and number % 3 == 0:
            found[name] = tensor.transpose(0, -1).contiguous().transpose(0, -1)
        elif number % 3 == 1:
            wide = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
            wide[..., 1] = tensor
            found[name] = wide[..., 1]
        else:
            room = torch.zeros(tensor.numel() + 3, dtype=tensor.dtype)
            room[3:] = tensor.reshape(-1)
            found[name] = room[3:].view(tensor.shape)
    return found


@pytest.mark.parametrize("bucket_bytes", [None, 1024])
def test_strided_sources_and_small_buckets_serve_the_same(
    rig: Rig, bucket_bytes: int | None
) -> None:
    with rig.sender("A") as sender:
        sender.sync("A")
    state = dict(rig.models["B"].state_dict())
    if rig.name == "qwen2_tied":
        del state["lm_head.weight"]
    source = ws.StateDictSource(odd(state))
    with ws.WeightSender(source, [rig.engine], bucket_bytes=bucket_bytes) as sender:
        sender.sync("B")
    rig.assert_serves("B")


def test_a_tied_head_that_is_sent_apart_must_have_its_embeddings_bytes(rig: Rig) -> None:
    if rig.name != "qwen2_tied":
        pytest.skip("its head is not tied")
    state = {name: t.clone() for name, t in rig.models["B"].state_dict().items()}
    with ws.WeightSender(ws.StateDictSource(state), [rig.engine]) as sender:
        receipt = sender.sync("B")
        assert receipt.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
        assert receipt.levels["served"].tensors == len(state) - 1
        rig.assert_serves("B")
        before = rig.rollouts(PROMPTS)
        state["lm_head.weight"][-1, -1] += 1
        with pytest.raises(PlanRefused, match=r"duplicate: lm_head\.weight.*other bytes"):
            sender.sync("untied")
    assert rig.rollouts(PROMPTS) == before and rig.llm.get_weight_version() == "B"


def test_an_untied_head_keeps_its_own_bytes(rig: Rig) -> None:
    if rig.name == "qwen2_tied":
        pytest.skip("its head is tied")
    state = dict(rig.models["A"].state_dict())
    state["lm_head.weight"] = rig.models["B"].state_dict()["lm_head.weight"]
    expected = load_trainer(rig.name, "A")
    replace(expected, rig.models["B"], ["lm_head.weight"])
    with ws.WeightSender(ws.StateDictSource(state), [rig.engine]) as sender:
        assert sender.sync("mixed").aliases == {}
    assert_serves(rig, expected)


def test_a_failed_apply_is_rolled_back_to_the_version_before(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = StagedWeights.tensors
    calls: list[int] = []

    def failing_once(weights: StagedWeights):
        calls.append(1)
        for number, item in enumerate(original(weights)):
            if number == 20 and len(calls) == 1:
                raise RuntimeError("broken on purpose")
            yield item

    source = {name: t.clone() for name, t in rig.models["A"].state_dict().items()}
    if rig.name == "qwen2_tied":
        source["lm_head.weight"] = source["model.embed_tokens.weight"]
    with ws.WeightSender(ws.StateDictSource(source), [rig.engine], rollback="retain") as sender:
        sender.sync("A")
        for name, tensor in rig.models["B"].state_dict().items():
            source[name].copy_(tensor)
        monkeypatch.setattr(StagedWeights, "tensors", failing_once)
        with pytest.raises(RolledBack, match="on purpose"):
            sender.sync("B")
        rig.assert_serves("A")
        assert rig.llm.get_weight_version() == "A"
        sender.sync("B")
    rig.assert_serves("B")


def test_a_part_does_not_cure(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(weights: StagedWeights):
        raise RuntimeError("broken on purpose")
        yield

    with rig.sender("B") as sender:
        with monkeypatch.context() as patch, pytest.raises(EnginePoisoned):
            patch.setattr(StagedWeights, "tensors", failing)
            sender.sync("never")
        with pytest.raises(UpdateRefused, match="full update"):
            sender.sync("part", only=["model.norm.weight"])
        with pytest.raises(Exception, match="weightsync: this engine may hold a mixture"):
            rig.rollouts(PROMPTS)
        sender.sync("B")
    rig.assert_serves("B")


@pytest.mark.parametrize("case", ["duplicate name", "no tensor", "no tensor declared"])
def test_what_is_no_update_is_refused_before_anything_moves(rig: Rig, case: str) -> None:
    with rig.sender("A") as sender:
        sender.sync("A")
    before = rig.rollouts(PROMPTS)
    state = dict(rig.models["B"].state_dict())
    only = None
    if case == "duplicate name":
        state["_orig_mod.model.norm.weight"] = state["model.norm.weight"].clone()
    elif case == "no tensor":
        state.clear()
    else:
        only = []
    moved: list[int] = []
    with (
        ws.WeightSender(
            ws.StateDictSource(state), [rig.engine], on_progress=lambda n, _: moved.append(n)
        ) as sender,
        pytest.raises((ManifestError, SourceError)) as refusal,
    ):
        sender.sync("B", only=only)
    if case == "duplicate name":
        assert "'model.norm.weight'" in str(refusal.value)
    assert refusal.value.remedy and not moved
    assert rig.rollouts(PROMPTS) == before and rig.llm.get_weight_version() == "A"
