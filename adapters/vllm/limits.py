"""Engines that an update is known to get wrong, or that were never tried: refused by name, before
anything moves."""

from __future__ import annotations

from typing import Any

from weightsync.errors import ConnectError, Problem

__all__ = ["check_quantization", "quantizes_shown", "unsupported"]

SHOWN = frozenset({"fp8_per_channel"})
"""Quantizations that vLLM does itself while it loads, of which a reload was seen to equal a fresh
start. Dense models only: no engine at hand starts with quantized experts."""


WHY_NOT = (
    "an update of weights in this format was not shown to equal a fresh load, and one of int8 "
    "weights was seen to serve garbage"
)


def check_quantization(engine: str, name: str | None) -> None:
    """Asked at connect, from the trainer's side, where only the setting is known.

    Args:
        name: of the engine's quantization, or None.

    Raises:
        ConnectError: it is none that was shown to work.
    """
    if name is not None and name not in SHOWN:
        raise ConnectError(
            f"{engine} runs with quantization={name}: {WHY_NOT}",
            remedy=f"start it without quantization, or with {', '.join(sorted(SHOWN))}, which was "
            "shown for dense models",
        )


def unsupported(vllm_config: Any) -> list[Problem]:
    """What of a worker's configuration rules an update out; empty when nothing does."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    found = []

    def refuse(setting: str, why: str) -> None:
        found.append(Problem("engine", setting, why))

    if vllm_config.quant_config is not None and not quantizes_shown(vllm_config):
        name = getattr(vllm_config.quant_config, "get_name", lambda: model.quantization)()
        if name == "online":  # vLLM's word for all that it quantizes itself while it loads
            name = model.quantization
        refuse(f"quantization={name}", WHY_NOT)
    if vllm_config.speculative_config is not None:
        refuse("speculative_config", "the draft model would keep its old weights")
    if vllm_config.lora_config is not None:
        refuse("enable_lora", "reloading under adapters was not tried")
    if getattr(model, "runner_type", "generate") != "generate":
        refuse(f"runner={model.runner_type}", "requests of pooling models pass the admission guard")
    if parallel.pipeline_parallel_size > 1:
        refuse("pipeline_parallel_size", "a worker that holds only some layers was not tried")
    if parallel.data_parallel_size > 1:
        refuse("data_parallel_size", "several engine cores behind one front end were not tried")
    if parallel.enable_expert_parallel or getattr(parallel, "enable_eplb", False):
        refuse("enable_expert_parallel", "experts that are spread or moved were not tried")
    offload = getattr(getattr(vllm_config, "offload_config", None), "uva", None)
    if getattr(offload, "cpu_offload_gb", 0):
        refuse("cpu_offload_gb", "reloading weights that are elsewhere was not tried")
    executor = parallel.distributed_executor_backend
    if executor not in (None, "mp", "uni"):
        refuse(
            f"distributed_executor_backend={executor}",
            "its workers do not inherit the front end's name, so that it could not refuse requests "
            "while one of them is poisoned",
        )
    return found


def quantizes_shown(vllm_config: Any) -> bool:
    """Whether an engine takes the tensors of an ordinary checkpoint and quantizes them itself, in a
    way that was shown."""
    model = vllm_config.model_config
    name = getattr(vllm_config.quant_config, "get_name", lambda: None)()
    return name == "online" and model.quantization in SHOWN and not model.is_moe
