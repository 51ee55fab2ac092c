"""Each setting that rules an update out is refused by its name; an ordinary engine by none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.adapters.vllm.limits import check_quantization, unsupported
from weightsync.errors import ConnectError


def config(**changes: Any) -> SimpleNamespace:
    """As far as it is looked at, what a vLLM 0.32 worker has for an ordinary engine."""
    parts = {
        "quant_config": None,
        "speculative_config": None,
        "lora_config": None,
        "offload_config": SimpleNamespace(uva=SimpleNamespace(cpu_offload_gb=0)),
        "runner_type": "generate",
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_expert_parallel": False,
        "enable_eplb": False,
        "distributed_executor_backend": "mp",
        **changes,
    }
    model = SimpleNamespace(
        runner_type=parts.pop("runner_type"),
        quantization=parts.pop("quantization", "fp8"),
        is_moe=parts.pop("is_moe", False),
    )
    top = {"quant_config", "speculative_config", "lora_config", "offload_config"}
    parallel = SimpleNamespace(**{k: v for k, v in parts.items() if k not in top})
    return SimpleNamespace(
        model_config=model, parallel_config=parallel, **{k: parts[k] for k in top}
    )


@pytest.mark.parametrize("executor", [None, "mp", "uni"])
def test_an_ordinary_engine_is_not_refused(executor: str | None) -> None:
    assert unsupported(config(distributed_executor_backend=executor)) == []


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"quant_config": SimpleNamespace(get_name=lambda: "gptq")}, "quantization=gptq"),
        ({"quant_config": object()}, "quantization=fp8"),
        ({"speculative_config": object()}, "speculative_config"),
        ({"lora_config": object()}, "enable_lora"),
        ({"runner_type": "pooling"}, "runner=pooling"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"data_parallel_size": 2}, "data_parallel_size"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel"),
        ({"enable_eplb": True}, "enable_expert_parallel"),
        (
            {"offload_config": SimpleNamespace(uva=SimpleNamespace(cpu_offload_gb=4))},
            "cpu_offload_gb",
        ),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend=ray"),
        (
            {"distributed_executor_backend": "external_launcher"},
            "distributed_executor_backend=external_launcher",
        ),
    ],
)
def test_each_setting_is_refused_by_name(changes: dict[str, Any], setting: str) -> None:
    problems = unsupported(config(**changes))
    assert [(problem.kind, problem.name) for problem in problems] == [("engine", setting)]


@pytest.mark.parametrize("name", ["fp8", "awq", "gptq", "compressed-tensors", "int8", ""])
def test_a_quantization_that_was_not_shown_is_refused_at_connect(name: str) -> None:
    with pytest.raises(ConnectError, match=f"^the server runs with quantization={name}:") as error:
        check_quantization("the server", name)
    assert "fp8_per_channel" in str(error.value.remedy)


@pytest.mark.parametrize("name", [None, "fp8_per_channel"])
def test_no_quantization_and_a_shown_one_are_not(name: str | None) -> None:
    check_quantization("the server", name)


ONLINE = SimpleNamespace(get_name=lambda: "online")


@pytest.mark.parametrize("is_moe", [False, True])
def test_what_vllm_quantizes_itself_is_taken_of_dense_models_only(is_moe: bool) -> None:
    made = config(quant_config=ONLINE, quantization="fp8_per_channel", is_moe=is_moe)
    names = [problem.name for problem in unsupported(made)]
    assert names == (["quantization=fp8_per_channel"] if is_moe else [])
