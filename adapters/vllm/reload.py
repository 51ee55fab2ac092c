"""Whole checkpoint tensors into a live vLLM model, through vLLM's own layerwise reload. Touches
private names of vLLM.

Layerwise reload puts meta tensors in place, buffers what the loader is given until a layer is
whole, post-processes it as at start, and copies the result into the old storage. On the CPU engine
two kinds of layer are left out of that and keep serving what they packed before, without an error;
they are packed again afterwards (measured on vLLM 0.23, 0.26 and 0.32).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["reload_whole", "undo"]


def reload_whole(
    model: torch.nn.Module,
    model_config: Any,
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> float:
    """Load all tensors of a checkpoint into a live model.

    Args:
        model: the worker's.
        model_config: vLLM's, for layers that are processed last.
        tensors: must stay valid until this returns; layerwise reload keeps views of them until a
            layer is whole.

    Returns:
        Seconds, all of them the engine's own.

    Raises:
        Exception: whatever the engine's loader raises. The model may then be a mixture; see `undo`.
    """
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    started = time.perf_counter()
    with torch.no_grad():
        initialize_layerwise_reload(model)
        model.load_weights(tensors)  # type: ignore[operator]
        heads = _tied_heads(model)
        finalize_layerwise_reload(model, model_config)
        _pack_again(model, heads)
    return time.perf_counter() - started


def undo(model: torch.nn.Module) -> int:
    """After a failed `reload_whole`: put real tensors back where meta tensors stand, so that
    nothing can crash on them.

    Layers that were finished hold new weights already: the model is a mixture until a later reload
    succeeds.

    Returns:
        Number of layers that were put back.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    count = 0
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
            count += 1
    return count


def _tied_heads(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Heads of the CPU engine that compute from a packed copy of a weight they share with another
    layer. Nothing is loaded under their own name, so layerwise reload leaves their copy as it was.

    Asked between the load and its end: afterwards the record of what was loaded is gone.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return [
        layer
        for layer in model.modules()
        if isinstance(layer, VocabParallelEmbedding)
        and hasattr(layer, "cpu_linear")
        and get_layerwise_info(layer).can_load()
        and get_layerwise_info(layer).load_numel <= 0
    ]


def _pack_again(model: torch.nn.Module, heads: list[torch.nn.Module]) -> None:
    """Cures of the CPU engine; no layer of another device matches."""
    for layer in heads:
        layer.quant_method.process_weights_after_loading(layer)
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(kernel.fused_experts, "process_weights_after_loading"):
            # Experts are packed by the kernel that runs them, which layerwise reload does not know.
            kernel.fused_experts.process_weights_after_loading(layer)
