"""Model families in a real vLLM of this process: what is served after an update is what a fresh
load of the same checkpoint serves. One engine start per family shows every property it can."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import weightsync as ws
from weightsync.adapters.vllm import reload, trace
from weightsync.errors import ConnectError, UpdateError
from weightsync.plan.trace import trace_loader
from weightsync.testing import (
    LONG_PROMPT,
    PROMPTS,
    Comparison,
    Rollout,
    build_checkpoint,
    load_trainer,
    score,
    vllm_rollouts,
)

TOLERANCE = 1e-5
"""Largest |difference of log-probabilities| from transformers, fp32."""
MIXTURE_TOLERANCE = 3e-5
"""For mixtures of two variants, which nobody has chosen for how they round."""

FAMILIES = [
    ("qwen2", "auto"),
    ("qwen2_tied", "auto"),
    ("qwen3", "auto"),
    ("llama", "auto"),
    ("gemma3", "auto"),
    ("gemma3", "dummy"),  # noise in place of weights, buffers included
    ("qwen3_moe", "auto"),
    ("qwen3_moe", "dummy"),
    ("qwen3_moe_padded", "auto"),
    ("qwen2_moe", "auto"),
    ("mixtral", "auto"),
]


class Served:
    """A vLLM that was started on variant A of a test model.

    Attributes:
        config: vLLM's.
    """

    def __init__(self, name: str, variant: str = "A", *, dtype: str = "float32", **options) -> None:
        from vllm import LLM

        self.name = name
        self.dtype = getattr(torch, dtype)
        settings = {
            "max_model_len": 512,
            "max_num_seqs": 8,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 64 << 20,
            "seed": 0,
            "weight_transfer_config": {"backend": "weightsync"},
        }
        self.llm = LLM(
            model=str(build_checkpoint(name, variant)), dtype=dtype, **(settings | options)
        )
        self.config = self.llm.llm_engine.vllm_config

    def sync(self, variant: str) -> ws.Receipt:
        """From files: that is where Mixtral's tensors have the names that an engine knows."""
        source = ws.SafetensorsSource(build_checkpoint(self.name, variant), dtype=self.dtype)
        with ws.WeightSender(source, [ws.engine(self.llm)]) as sender:
            return sender.sync(variant)

    def rollouts(self, prompts: list[list[int]]) -> list[Rollout]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=32, logprobs=1, ignore_eos=True, detokenize=False
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        return vllm_rollouts(self.llm.generate(requests, sampling, use_tqdm=False))

    def everything(self) -> list[Rollout]:
        return self.rollouts(PROMPTS) + self.rollouts([LONG_PROMPT])

    def assert_serves(self, expected: torch.nn.Module, tolerance: float = TOLERANCE) -> None:
        for prompts, tokens in ((PROMPTS, 64), ([LONG_PROMPT], 32)):
            assert_equal(score(expected, prompts, self.rollouts(prompts)), tokens, tolerance)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """What a target does with the tensors of a partial update."""
        from vllm.config import set_current_vllm_config

        def apply(model: torch.nn.Module) -> None:
            with set_current_vllm_config(self.config):
                reload.reload_whole(
                    model, self.config.model_config, iter(tensors.items()), frozenset()
                )

        try:
            self.llm.apply_model(apply)
        except UpdateError:
            self.llm.apply_model(reload.undo)
            raise
        finally:
            assert self.llm.reset_prefix_cache()

    def units(self) -> dict[str, dict[str, set[str]]]:
        """Unit -> engine parameter -> checkpoint tensors that land in it."""
        from vllm.config import set_current_vllm_config

        manifest = ws.SafetensorsSource(build_checkpoint(self.name, "A")).manifest()
        twin = trace.meta_twin(self.config)
        with set_current_vllm_config(trace.own_config(self.config)):
            traced = trace_loader(twin, twin.load_weights, manifest)
        (unit_of,) = self.llm.apply_model(reload.units)
        assert unit_of == reload.units(twin)
        found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        for copy in traced.copies:
            name = manifest.tensors[copy.index].name
            found[unit_of[copy.parameter]][copy.parameter].add(name)
        return found

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


@contextmanager
def served(*arguments: str, **options) -> Iterator[Served]:
    engine = Served(*arguments, **options)
    try:
        yield engine
    finally:
        engine.close()


def assert_equal(comparison: Comparison, tokens: int, tolerance: float = TOLERANCE) -> None:
    assert comparison.greedy_matches == comparison.tokens == tokens, str(comparison)
    assert comparison.max_abs_logprob_difference <= tolerance, str(comparison)


def weights(name: str, variant: str) -> dict[str, torch.Tensor]:
    return load_file(build_checkpoint(name, variant) / "model.safetensors")


def mixed(name: str, from_a: set[str], directory: Path) -> torch.nn.Module:
    """Variant B but for the tensors named, freshly loaded by transformers."""
    tensors = weights(name, "B") | {
        key: tensor for key, tensor in weights(name, "A").items() if key in from_a
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = (build_checkpoint(name, "A") / "config.json").read_text()
    (directory / "config.json").write_text(config)
    return load_trainer(directory)


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: "-".join(family))
def family(request: pytest.FixtureRequest) -> Iterator[Served]:
    name, load_format = request.param
    with served(name, load_format=load_format) as engine:
        yield engine


def test_updates_equal_a_fresh_load(family: Served) -> None:
    models = {variant: load_trainer(family.name, variant) for variant in "AB"}
    if family.config.load_config.load_format != "dummy":
        family.assert_serves(models["A"])
    for variant in "BAB":
        family.sync(variant)
        family.assert_serves(models[variant])


def test_the_weights_it_already_has_change_no_output(family: Served) -> None:
    family.sync("B")
    before = family.everything()
    family.sync("B")
    assert family.everything() == before


def test_units_alone_change_what_they_hold_and_nothing_else(family: Served, tmp_path: Path) -> None:
    """Every second unit of A into B equals a fresh load of that mixture; the other units too."""
    family.sync("B")
    before = family.everything()
    tensors = [set().union(*unit.values()) for unit in family.units().values()]
    for number, halves in enumerate((tensors[::2], tensors[1::2])):
        chosen = set().union(*halves)
        expected = tmp_path / str(number)
        expected.mkdir()
        a, b = (weights(family.name, variant) for variant in "AB")
        family.load({name: tensor for name, tensor in a.items() if name in chosen})
        family.assert_serves(mixed(family.name, chosen, expected), MIXTURE_TOLERANCE)
        family.load({name: tensor for name, tensor in b.items() if name in chosen})
        assert family.everything() == before


def test_a_part_of_a_unit_is_right_or_raises_and_a_full_update_cures_it(
    family: Served, tmp_path: Path
) -> None:
    """Never garbage in place of what was not sent."""
    a = weights(family.name, "A")
    raised = []
    for unit, parameters in family.units().items():
        if "layers.1." in unit or len(parameters) < 2:
            continue
        for parameter, names in parameters.items():
            family.sync("B")
            try:
                family.load({name: a[name] for name in names})
            except UpdateError as error:
                raised.append(parameter)
                assert unit in str(error) and error.remedy
            else:
                expected = tmp_path / parameter
                expected.mkdir()
                family.assert_serves(mixed(family.name, names, expected), MIXTURE_TOLERANCE)
    family.sync("A")
    family.assert_serves(load_trainer(family.name, "A"))
    expected_to_raise = {
        "qwen2": ["qkv_proj.bias"],
        "qwen2_tied": ["qkv_proj.bias"],
        "qwen2_moe": ["w13_weight", "w2_weight", "qkv_proj.bias"],
        "qwen3_moe": ["w13_weight", "w2_weight"],
        "qwen3_moe_padded": ["w13_weight", "w2_weight"],
        "mixtral": ["w13_weight", "w2_weight"],
    }.get(family.name, [])
    assert len(raised) == len(expected_to_raise), raised
    assert all(map(str.endswith, sorted(raised), expected_to_raise)), raised


def test_a_tied_head_is_packed_once_and_only_when_its_embedding_came() -> None:
    def packed(model: torch.nn.Module) -> list[object]:
        return [model.model.embed_tokens.cpu_linear, model.lm_head.cpu_linear]

    a = weights("qwen2_tied", "A")
    with served("qwen2_tied") as engine:
        engine.sync("B")
        (before,) = engine.llm.apply_model(packed)
        engine.load({name: tensor for name, tensor in a.items() if "layers" in name})
        assert engine.llm.apply_model(packed) == [before]
        engine.load({"model.embed_tokens.weight": a["model.embed_tokens.weight"]})
        ((embedding, head),) = engine.llm.apply_model(packed)
        assert embedding is head is not before[0]


ELSEWHERE = """
import json, sys
from test_vllm_models import served
name, variants, options = json.loads(sys.argv[1])
with served(name, **options) as engine:
    (kind,) = engine.llm.apply_model(lambda model: type(model).__name__)
    found = []
    for variant in variants:
        engine.sync(variant)
        found.append([(r.token_ids, r.logprobs) for r in engine.everything()])
    level = int(engine.config.compilation_config.mode)
print(json.dumps([kind, level, found]))
"""


def update_elsewhere(name: str, variants: str, **options) -> tuple[str, int, list[list[Rollout]]]:
    """An engine in a process of its own, updated to one variant after the other.

    Returns:
        Its model's class, whether it was compiled, and what it generated after each update.
    """
    answer = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, json.dumps([name, variants, options])],
        cwd=Path(__file__).parent,
        env={**os.environ, "TORCHDYNAMO_DISABLE": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    kind, level, found = json.loads(answer.stdout.splitlines()[-1])
    return kind, level, [[Rollout(*rollout) for rollout in each] for each in found]


@pytest.mark.parametrize("name", ["qwen2", "qwen2_tied"])
def test_transformers_own_modeling_code_as_the_engines_model(name: str) -> None:
    """Elsewhere, since vLLM changes transformers' classes, which here give the reference."""
    kind, _, found = update_elsewhere(name, "BAB", model_impl="transformers")
    assert kind.startswith("Transformers")
    for variant, rollouts in zip("BAB", found, strict=True):
        assert_equal(score(load_trainer(name, variant), [*PROMPTS, LONG_PROMPT], rollouts), 96)


def test_a_compiled_engine_computes_from_the_new_weights() -> None:
    """Packed weights could be constants of a compiled graph. Elsewhere, since nothing is compiled
    in this process."""
    name = "qwen2_tied"
    _, level, found = update_elsewhere(name, "BAB", enforce_eager=False)
    assert level > 0
    for variant, rollouts in zip("BAB", found, strict=True):
        assert_equal(score(load_trainer(name, variant), [*PROMPTS, LONG_PROMPT], rollouts), 96)


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_in_bf16_an_update_equals_a_fresh_start_bit_for_bit(name: str) -> None:
    """So its distance from transformers is vLLM's own."""
    with served(name, "B", dtype="bfloat16") as engine:
        fresh = engine.everything()
    with served(name, "A", dtype="bfloat16") as engine:
        assert engine.everything() != fresh
        for variant in "BAB":
            receipt = engine.sync(variant)
        updated = engine.everything()
    assert len(receipt.casts) == len(weights(name, "B"))
    assert set(receipt.casts.values()) == {"float32 -> bfloat16"}
    assert updated == fresh
    trainer = load_trainer(name, "B").to(torch.bfloat16)
    own = score(trainer, PROMPTS, fresh[:2])
    # Measured: 0.02 and 0.50, where rounding makes a token choose another expert.
    assert own.max_abs_logprob_difference < {"qwen2": 0.1, "qwen3_moe": 1.0}[name], str(own)


@pytest.mark.parametrize("name", ["qwen2", "qwen2_tied", "llama"])
def test_what_vllm_quantizes_to_fp8_while_it_loads_equals_a_fresh_start(name: str) -> None:
    options = {"dtype": "bfloat16", "quantization": "fp8_per_channel"}
    with served(name, "B", **options) as engine:
        fresh = engine.everything()
    with served(name, "A", **options) as engine:
        for variant in "BAB":
            engine.sync(variant)
            assert (engine.everything() == fresh) == (variant == "B")


@pytest.mark.parametrize("quantization", ["int8_per_channel_weight_only"])
def test_a_quantized_engine_is_refused_by_name_and_serves_on(quantization: str) -> None:
    with served("qwen2", dtype="bfloat16", quantization=quantization) as engine:
        before = engine.everything()
        with pytest.raises(ConnectError, match="not shown to equal a fresh load") as refusal:
            engine.sync("B")
        assert f"quantization={quantization}" in str(refusal.value) and refusal.value.remedy
        assert engine.everything() == before
