"""What a vLLM must have for a reload. One that lacks it is refused by name before anything moves,
rather than found out half-way through a load."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from weightsync.errors import Problem

__all__ = ["lacking", "unsupported_version"]

FUNCTIONS = (
    "initialize_layerwise_reload",
    "finalize_layerwise_reload",
    "get_layerwise_info",
    "_place_kernel_tensors",
)
"""Of vLLM's module ``model_loader.reload.layerwise``."""

INFO = ("can_load", "reset", "kernel_tensors", "load_numel", "loaded_weights")
"""Of its record of one layer."""


def unsupported_version() -> list[Problem]:
    """Why this process's vLLM cannot be updated by its own reload; empty when it can."""
    import vllm

    try:
        from vllm.model_executor.model_loader.reload import layerwise, types

        missing = lacking(layerwise, types.LayerReloadingInfo)
    except (ImportError, AttributeError) as error:
        missing = [str(error)]
    return [
        Problem("engine", f"vllm {vllm.__version__}", f"its layerwise reload has no {name}")
        for name in missing
    ]


def lacking(layerwise: ModuleType | Any, info: type) -> list[str]:
    """Names that are not there.

    Args:
        layerwise: vLLM's module.
        info: vLLM's class of a layer's record; a dataclass.
    """
    fields = getattr(info, "__dataclass_fields__", {})
    return [name for name in FUNCTIONS if not hasattr(layerwise, name)] + [
        name for name in INFO if name not in fields and not hasattr(info, name)
    ]
