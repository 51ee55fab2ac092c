"""A real vLLM in this process: updated from weights A to B, A, B, refused, poisoned, cured."""

from __future__ import annotations

import pytest
import torch

import weightsync as ws
from weightsync.adapters.vllm.ways import EXTENSION
from weightsync.deadline import Deadline
from weightsync.errors import (
    ConnectError,
    EnginePoisoned,
    PlanRefused,
    UpdateAborted,
    UpdateRefused,
)
from weightsync.target import StagedWeights
from weightsync.testing import (
    LONG_PROMPT,
    PROMPTS,
    build_checkpoint,
    load_trainer,
    prompt_logprobs,
    score,
    vllm_rollouts,
)

TOLERANCE = 1e-5
"""Largest |difference of log-probabilities| from transformers, fp32; measured up to 7.4e-6."""


class Rig:
    """One engine and both variants of its model.

    Args:
        extension: path of the worker extension class by which the engine is recognized.
        options: of ``LLM``.

    Attributes:
        tolerance: of log-probabilities.
    """

    tolerance = TOLERANCE

    def __init__(self, name: str, *, extension: str = EXTENSION, **options) -> None:
        from vllm import LLM

        self.name = name
        self.models = {variant: load_trainer(name, variant) for variant in "AB"}
        self.llm = LLM(
            model=str(build_checkpoint(name, "A")),
            dtype="float32",
            max_model_len=512,
            max_num_seqs=8,
            enforce_eager=True,
            kv_cache_memory_bytes=64 << 20,
            seed=0,
            **{"weight_transfer_config": {"backend": "weightsync"}, **options},
        )
        self.engine = ws.engine(self.llm, name=name, extension=extension)

    def rollouts(self, prompts):
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=32, logprobs=1, ignore_eos=True, detokenize=False
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        return vllm_rollouts(self.llm.generate(requests, sampling, use_tqdm=False))

    def assert_serves(self, variant: str) -> None:
        for prompts, tokens in ((PROMPTS, 64), ([LONG_PROMPT], 32)):
            comparison = score(self.models[variant], prompts, self.rollouts(prompts))
            assert comparison.greedy_matches == comparison.tokens == tokens, str(comparison)
            assert comparison.max_abs_logprob_difference <= self.tolerance, str(comparison)

    def sender(self, variant: str, **options) -> ws.WeightSender:
        return ws.WeightSender(ws.ModuleSource(self.models[variant]), [self.engine], **options)

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module", params=["qwen2", "qwen2_tied"])
def rig(request: pytest.FixtureRequest):
    found = Rig(request.param)
    yield found
    found.close()


def test_updates_serve_exactly_the_trainers_weights_also_from_the_prefix_cache(rig: Rig) -> None:
    rig.assert_serves("A")
    for version, variant in enumerate("BAB", start=1):
        with rig.sender(variant) as sender:
            receipt = sender.sync(version)
            rig.assert_serves(variant)
            sender._outbox.arena.view()[:] = 0xA5
            rig.assert_serves(variant)
        assert rig.llm.get_weight_version() == receipt.version == str(version)
        assert receipt.proven == "served" and receipt.engines[0].workers[0].load_seconds > 0
    if rig.name == "qwen2_tied":
        assert receipt.aliases == {"lm_head.weight": "model.embed_tokens.weight"}


def test_an_engine_that_cannot_be_updated_safely_is_refused_by_the_setting() -> None:
    from vllm import LLM

    llm = LLM(
        model=str(build_checkpoint("qwen2", "A")),
        runner="pooling",
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
        weight_transfer_config={"backend": "weightsync"},
    )
    source = ws.ModuleSource(load_trainer("qwen2", "A"))
    with (
        ws.WeightSender(source, [ws.engine(llm)]) as sender,
        pytest.raises(PlanRefused, match="runner=pooling") as refusal,
    ):
        sender.sync(1)
    assert [problem.kind for problem in refusal.value.problems] == ["engine"]
    llm.llm_engine.engine_core.shutdown()


def test_a_trainers_optimizer_step_reaches_the_engine(rig: Rig) -> None:
    model = load_trainer(rig.name, "B")
    with ws.WeightSender(ws.ModuleSource(model), [rig.engine]) as sender:
        sender.sync("before")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        rollouts = rig.rollouts(PROMPTS)
        stale = score(model, PROMPTS, rollouts).max_abs_logprob_difference
        sender.sync("after")
    fresh = score(model, PROMPTS, rig.rollouts(PROMPTS)).max_abs_logprob_difference
    assert fresh <= TOLERANCE < stale / 10


def without(name: str):
    return lambda state: state.pop(name)


def only_q_proj(state: dict[str, torch.Tensor]) -> None:
    del state["model.layers.0.self_attn.k_proj.weight"]
    del state["model.layers.0.self_attn.v_proj.weight"]


def taller(state: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    state[name] = torch.cat([state[name], state[name]])


def more_heads(state: dict[str, torch.Tensor]) -> None:
    """Too long in the dimension that loaders narrow: they would take a part without a word."""
    name = "model.layers.1.self_attn.q_proj.weight"
    state[name] = torch.cat([state[name], state[name]])


REFUSALS = {
    "unknown name": (
        lambda state: state.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(2, 2)}),
        "unknown",
        "model.layers.9.mlp.up_proj.weight",
    ),
    "silently skipped name": (
        lambda state: state.update({"model.layers.0.mlp.up_proj.bias": torch.zeros(256)}),
        "unknown",
        "model.layers.0.mlp.up_proj.bias",
    ),
    "missing name": (without("model.norm.weight"), "missing", "model.norm.weight"),
    "only q_proj": (
        only_q_proj,
        "missing",
        "model.layers.0.self_attn.{q_proj, k_proj, v_proj}.weight",
    ),
    "only gate_proj": (
        without("model.layers.1.mlp.up_proj.weight"),
        "missing",
        "model.layers.1.mlp.{gate_proj, up_proj}.weight",
    ),
    "other shape": (taller, "shape", "model.layers.1.mlp.down_proj.weight"),
    "too many heads": (more_heads, "shape", "model.layers.1.self_attn.q_proj.weight"),
    "other dtype": (
        lambda state: state.update({"model.norm.weight": state["model.norm.weight"].bfloat16()}),
        "dtype",
        "model.norm.weight",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(rig: Rig, case: str) -> None:
    change, kind, name = REFUSALS[case]
    with rig.sender("A") as sender:
        sender.sync("A")
    before = rig.rollouts(PROMPTS)
    state = dict(rig.models["B"].state_dict())
    change(state)
    moved: list[int] = []
    source = ws.StateDictSource(state)
    with (
        ws.WeightSender(source, [rig.engine], on_progress=lambda n, _: moved.append(n)) as sender,
        pytest.raises(PlanRefused) as refusal,
    ):
        sender.sync("B")
    assert (kind, name) in {(p.kind, p.name) for p in refusal.value.problems}, str(refusal.value)
    assert name in str(refusal.value) and refusal.value.remedy
    assert not moved
    assert rig.rollouts(PROMPTS) == before
    assert rig.llm.get_weight_version() == "A"


@pytest.mark.parametrize("other", ["llama", "gemma3", "qwen3_moe"])
def test_another_architecture_is_refused_by_name(rig: Rig, other: str) -> None:
    before = rig.rollouts(PROMPTS)
    source = ws.ModuleSource(load_trainer(other, "A"))
    with ws.WeightSender(source, [rig.engine]) as sender:
        with pytest.raises(PlanRefused, match="nothing has moved") as refusal:
            sender.sync("other")
        names = {problem.name for problem in refusal.value.problems}
        assert any("q_proj" in name and name.endswith("bias") for name in names), names
    assert rig.rollouts(PROMPTS) == before


def test_a_failed_apply_poisons_refuses_at_admission_and_is_cured_by_a_full_update(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.exceptions import VLLMValidationError

    original = StagedWeights.tensors

    def failing(weights: StagedWeights):
        for number, item in enumerate(original(weights)):
            if number == 20:
                raise RuntimeError("broken on purpose")
            yield item

    with rig.sender("A") as sender:
        sender.sync("A")
    with rig.sender("B") as sender:
        with monkeypatch.context() as patch, pytest.raises(EnginePoisoned, match="on purpose"):
            patch.setattr(StagedWeights, "tensors", failing)
            sender.sync("B")
        assert rig.llm.get_weight_version() == "A"
        assert rig.llm.apply_model(parameters_without_storage) == [0]
        with pytest.raises(VLLMValidationError, match="weightsync: this engine may hold a mixture"):
            rig.rollouts(PROMPTS)
        sender.sync("cured")
    rig.assert_serves("B")


def in_flight(rig: Rig, request_id: str, steps: int = 5) -> None:
    """A request that its owner has taken some steps of."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=32, logprobs=1, ignore_eos=True, detokenize=False
    )
    engine = rig.llm.llm_engine
    engine.add_request(request_id, {"prompt_token_ids": PROMPTS[0]}, sampling)
    for _ in range(steps):
        engine.step()


def finished(rig: Rig) -> list:
    engine, outputs = rig.llm.llm_engine, []
    while engine.has_unfinished_requests():
        outputs += [output for output in engine.step() if output.finished]
    return outputs


def test_requests_in_flight_are_kept_or_ended_as_asked_and_never_waited_for(rig: Rig) -> None:
    with rig.sender("A") as sender:
        sender.sync("A")
    in_flight(rig, "kept")
    with rig.sender("B") as sender:
        sender.sync("B", pause="keep")
        (output,) = finished(rig)
        assert len(output.outputs[0].token_ids) == 32
        in_flight(rig, "ended")
        sender.sync("B again", pause="abort")
        assert finished(rig) == []
        in_flight(rig, "waited for")
        with pytest.raises(UpdateAborted, match=r"1 request.*cannot be waited for"):
            sender.sync("never", pause="wait")
        assert len(finished(rig)) == 1 and rig.llm.get_weight_version() == "B again"
        sender.sync("idle", pause="wait")
    rig.assert_serves("B")


def test_a_poisoned_engine_ends_what_was_in_flight(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(weights: StagedWeights):
        raise RuntimeError("broken on purpose")
        yield

    in_flight(rig, "doomed")
    with rig.sender("B") as sender:
        with monkeypatch.context() as patch, pytest.raises(EnginePoisoned):
            patch.setattr(StagedWeights, "tensors", failing)
            sender.sync("never")
        assert finished(rig) == []
        sender.sync("cured")
    rig.assert_serves("B")


def thinks(rig: Rig, variant: str, prompt: list[int]) -> float:
    """By how much the engine's log-probabilities of a prompt differ from a trainer's."""
    found = rig.engine.logprobs(prompt, Deadline.after(60))
    expected = prompt_logprobs(rig.models[variant], prompt)
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def noise(model: torch.nn.Module) -> None:
    """Another model, also in what it keeps of earlier tokens."""
    for name, parameter in model.named_parameters():
        if name.endswith("layers.0.input_layernorm.weight"):
            with torch.no_grad():
                parameter.mul_(torch.linspace(0.5, 1.5, parameter.numel()))


def test_what_it_thinks_of_a_prompt_comes_from_no_cache(rig: Rig) -> None:
    for variant in "BA":
        with rig.sender(variant) as sender:
            sender.sync(variant)
        for prompt in (*PROMPTS, LONG_PROMPT):
            rig.rollouts([prompt])  # in the cache now, what can be
            assert thinks(rig, variant, prompt) <= TOLERANCE
    # Other weights, behind the back of everybody who would reset a cache.
    before = {name: p.clone() for name, p in rig.models["A"].named_parameters()}
    try:
        noise(rig.models["A"])
        assert thinks(rig, "A", LONG_PROMPT) > 100 * TOLERANCE
        rig.llm.apply_model(noise)
        assert thinks(rig, "A", LONG_PROMPT) <= TOLERANCE
    finally:
        with torch.no_grad():
            for name, parameter in rig.models["A"].named_parameters():
                parameter.copy_(before[name])
        with rig.sender("A") as sender:
            sender.sync("mended")
    rig.assert_serves("A")


def canary(rig: Rig, variant: str, prompt: list[int] = LONG_PROMPT) -> ws.Canary:
    return ws.Canary(prompt, prompt_logprobs(rig.models[variant], prompt), 1e-4)


def test_a_canary_passes_with_the_right_weights_and_poisons_with_others(rig: Rig) -> None:
    with rig.sender("A") as sender:
        sender.sync("A")
    variant = "A"
    with rig.sender("B", proof="canary", canary=lambda: canary(rig, variant)) as sender:
        with pytest.raises(EnginePoisoned, match="does not think as the trainer does"):
            sender.sync("B")
        assert rig.llm.get_weight_version() == "A"
        with pytest.raises(UpdateRefused, match="may hold a mixture"):
            rig.engine.logprobs(PROMPTS[0], Deadline.after(60))
        variant = "B"
        receipt = sender.sync("cured")
    assert receipt.proven == "canary" and receipt.digest == ""
    assert 0 <= receipt.engines[0].canary <= TOLERANCE
    assert rig.llm.get_weight_version() == "cured"
    rig.assert_serves("B")


def test_what_keeps_an_engine_from_answering_is_found_out_before_anything_changes(
    rig: Rig,
) -> None:
    with rig.sender("A") as sender:
        sender.sync("A")
    made = canary(rig, "B")
    in_flight(rig, "kept")
    with rig.sender("B", canary=lambda: made) as sender:
        with pytest.raises(UpdateAborted, match=r"1 request\(s\) in flight"):
            sender.sync("never")
        (output,) = finished(rig)
        assert len(output.outputs[0].token_ids) == 32
        in_flight(rig, "ended")
        sender.sync("B", pause="abort")
        assert finished(rig) == []
        for prompt in ([1] * 512, [1, 10**6]):  # as long as its context; no token of it
            made = ws.Canary(prompt, [-1.0] * (len(prompt) - 1), 0.1)
            with pytest.raises(UpdateAborted, match="does not say what it thinks"):
                sender.sync("never")
    assert rig.llm.get_weight_version() == "B"
    rig.assert_serves("B")


def parameters_without_storage(model: torch.nn.Module) -> int:
    """A step on one of them would end the engine."""
    return sum(parameter.is_meta for parameter in model.parameters())


def test_the_traced_copies_are_what_the_engines_own_loader_does(rig: Rig) -> None:
    """Replayed as strided copies on real memory, bit for bit, pads and all."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    from weightsync.adapters.vllm.trace import meta_twin, own_config
    from weightsync.plan.trace import trace_loader

    config = rig.llm.llm_engine.vllm_config
    source = ws.ModuleSource(rig.models["B"])
    manifest = source.manifest()
    values = dict(rig.models["B"].state_dict())
    twin = meta_twin(config)
    with set_current_vllm_config(own_config(config)):
        trace = trace_loader(twin, twin.load_weights, manifest)
        with torch.device("cpu"):
            real = initialize_model(vllm_config=own_config(config))
        for parameter in real.parameters():
            parameter.data.fill_(7)
        real.load_weights((spec.name, values[spec.name]) for spec in manifest.tensors)
    replayed = {name: torch.full_like(tensor, 7) for name, tensor in real.named_parameters()}
    for copy in trace.copies:
        assert copy.source is not None
        to, origin = copy.destination, copy.source
        part = values[manifest.tensors[copy.index].name].as_strided(
            origin.shape, origin.stride, origin.offset
        )
        replayed[copy.parameter].as_strided(to.shape, to.stride, to.offset).copy_(part)
    assert len(trace.copies) == len(manifest) and not trace.failures
    for name, tensor in real.named_parameters():
        assert torch.equal(replayed[name], tensor), name


def test_an_engine_without_the_backend_is_refused_with_the_remedy() -> None:
    from vllm import LLM

    llm = LLM(
        model=str(build_checkpoint("qwen2", "A")),
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
    )
    with pytest.raises(ConnectError, match="weight_transfer_config="):
        ws.engine(llm)
    llm.llm_engine.engine_core.shutdown()


def test_objects_that_no_adapter_knows_are_refused() -> None:
    with pytest.raises(ConnectError, match=r"builtins\.dict.*vllm"):
        ws.engine({})
