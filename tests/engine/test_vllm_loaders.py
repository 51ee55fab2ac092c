"""What a real vLLM's loader does besides writing parameters through their own loaders: named, or
refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_vllm_in_process import Rig

import weightsync as ws
from weightsync.errors import PlanRefused
from weightsync.testing import PROMPTS, build_checkpoint


def engine(model: Path | str, **options: Any):
    from vllm import LLM

    return LLM(
        model=str(model),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=4,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        seed=0,
        weight_transfer_config={"backend": "weightsync"},
        **options,
    )


def generated(llm) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    requests = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(requests, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def gpt_oss(directory: Path, seed: int) -> Path:
    """Its experts and sinks are copied into parameters by hand."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(seed)
    config = GptOssConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=64,
        max_position_embeddings=1024,
        layer_types=["sliding_attention", "full_attention"],
        pad_token_id=256,
        bos_token_id=257,
        eos_token_id=258,
    )
    GptOssForCausalLM(config).float().save_pretrained(directory)
    for file in build_checkpoint("qwen2", "A").glob("tok*"):
        shutil.copy(file, directory)
    return directory


def test_parameters_that_are_written_past_their_loader_are_refused_by_name(tmp_path: Path) -> None:
    llm = engine(gpt_oss(tmp_path / "A", 1))
    before = generated(llm)
    source = ws.SafetensorsSource(gpt_oss(tmp_path / "B", 2))
    with (
        ws.WeightSender(source, [ws.engine(llm)]) as sender,
        pytest.raises(PlanRefused, match="past its weight_loader") as refusal,
    ):
        sender.sync("B")
    names = {problem.name for problem in refusal.value.problems if problem.kind == "loader"}
    assert "model.layers.0.attn.sinks" in names and any("w13_weight" in name for name in names)
    assert generated(llm) == before
    llm.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_persistent_buffer_that_nobody_sends_is_named_and_refused_if_it_holds_noise(
    load_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Gemma's normalizer once was: filled with noise by a dummy start, and in no checkpoint."""
    from vllm.model_executor.models.qwen2 import Qwen2Model

    original = Qwen2Model.__init__

    def with_buffer(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        self.register_buffer("normalizer", torch.tensor(2.0), persistent=True)

    monkeypatch.setattr(Qwen2Model, "__init__", with_buffer)
    rig = Rig("qwen2", load_format=load_format)
    with rig.sender("B") as sender:
        if load_format == "auto":
            receipt = sender.sync("B")
            assert receipt.untouched == {"qwen2": ("model.normalizer",)}
            rig.assert_serves("B")
        else:
            with pytest.raises(PlanRefused, match=r"missing: model\.normalizer: .*noise"):
                sender.sync("B")
    rig.close()
