"""Kinds of updates into a real vLLM: declared parts, tied heads, going back, odd tensors."""

from __future__ import annotations

import pytest
import torch
from test_vllm_in_process import Rig

from weightsync.errors import PlanRefused, SourceError
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
