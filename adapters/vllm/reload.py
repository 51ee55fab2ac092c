"""Whole checkpoint tensors into a live vLLM model, through vLLM's own layerwise reload. Touches
private names of vLLM.

Layerwise reload puts meta tensors in place, buffers what the loader is given until a layer is
whole, post-processes it as at start, and copies the result into the old storage; a layer that
nothing is loaded into gets its old tensors back. Two kinds of layer are treated apart.

*Embeddings and heads.* Their parameter is served as it is loaded, so it is loaded in place: no
second copy, no fresh memory (of a Qwen2-0.5B, 272 MB of page faults). On the CPU engine they also
keep a packed copy, from which a head computes. Layerwise reload would leave that of a tied head as
it was, without an error, because nothing is loaded under its name. Here it is packed once for all
layers that share the weight.

*Experts* of the CPU engine are packed by the kernel that runs them, at start only, and padded where
their size is no multiple of 32. Those that were loaded are packed again, exactly once: packing is
not idempotent.

Measured on vLLM 0.23, 0.26 and 0.32.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from weightsync.adapters.vllm.loaders import recorded
from weightsync.errors import UpdateError

__all__ = ["reload_whole", "undo", "units"]


def reload_whole(
    model: torch.nn.Module,
    model_config: Any,
    tensors: Iterable[tuple[str, torch.Tensor]],
    destinations: frozenset[str],
) -> float:
    """Load checkpoint tensors into a live model: all of them, or whole `units` of it.

    Args:
        model: the worker's.
        model_config: vLLM's, for layers that are processed last.
        tensors: must stay valid until this returns; layerwise reload keeps views of them until a
            layer is whole.
        destinations: names of all parameters that these tensors go to, from the trace.

    Returns:
        Seconds, all of them the engine's own.

    Raises:
        UpdateError: a layer got some of its parameters, but not all; or a parameter, nothing.
        Exception: whatever the engine's loader raises. After any, the model may be a mixture; see
            `undo`.
    """
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    started = time.perf_counter()
    with torch.no_grad():
        initialize_layerwise_reload(model)
        with _embeddings_in_place(model) as embeddings, _unpadded(model):
            model.load_weights(tensors)  # type: ignore[operator]
            _check_complete(model)
            _check_arrived(model, destinations, embeddings)
        # The record of what was loaded is gone after the end.
        experts = [layer for layer in _packed_experts(model) if _was_loaded(layer)]
        finalize_layerwise_reload(model, model_config)
        _pack_embeddings(model, embeddings.written)
        for layer in experts:
            layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)
    return time.perf_counter() - started


def undo(model: torch.nn.Module) -> int:
    """After a failed `reload_whole`: put real tensors back where meta tensors stand, so that
    nothing can crash on them.

    Layers that were finished hold new weights already: the model is a mixture until a later reload
    succeeds.

    Returns:
        Number of layers that were put back.
    """
    return sum(_put_back(layer) for layer in model.modules())


def units(model: torch.nn.Module) -> dict[str, str]:
    """Which parameters must come together in a partial update.

    A layer is post-processed whole, and what was packed cannot be read back: a linear layer's
    weight cannot stay while its bias is loaded, nor one of an expert layer's matrices while the
    other is. Parameters of one layer are therefore one unit, and so are layers that share one.

    Args:
        model: live, or a twin of it.

    Returns:
        Name of every parameter, aliases included -> name of its unit, a layer's.
    """
    unit_of: dict[str, str] = {}
    owner: dict[torch.nn.Parameter, str] = {}
    for layer_name, layer in model.named_modules(remove_duplicate=False):
        own = dict(layer.named_parameters(layer_name, recurse=False, remove_duplicate=False))
        known = [owner[parameter] for parameter in own.values() if parameter in owner]
        unit = known[0] if known else layer_name
        for merged in known[1:]:
            unit_of = {name: unit if old == merged else old for name, old in unit_of.items()}
            owner = {tensor: unit if old == merged else old for tensor, old in owner.items()}
        for name, parameter in own.items():
            unit_of[name] = owner[parameter] = unit
    return unit_of


def _put_back(layer: torch.nn.Module) -> bool:
    """End a layer's part in a reload: its old tensors stand again, and loaders write to them."""
    from vllm.model_executor.model_loader.reload import layerwise

    info = layerwise.get_layerwise_info(layer)
    if not info.can_load():
        return False
    if info.kernel_tensors is not None:
        layerwise._place_kernel_tensors(layer, info)
    info.reset()
    return True


def _was_loaded(layer: torch.nn.Module) -> bool:
    """Asked between the load and its end, of a layer that the reload began with."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    info = get_layerwise_info(layer)
    return not info.can_load() or info.load_numel > 0


def _check_complete(model: torch.nn.Module) -> None:
    """No layer may be finished with a tensor that nothing was loaded into: it would serve
    whatever the memory held.

    Raises:
        UpdateError: names the layer and the tensor.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer_name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or info.load_numel <= 0:
            continue
        loaded = {name for name, _ in info.loaded_weights}
        # Buffers that vLLM itself keeps; releases before 0.26 keep none.
        kept = getattr(info, "kernel_non_persistent_buffers", frozenset())
        own = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
        for name, tensor in own:
            if tensor.is_meta and tensor.numel() and name not in loaded and name not in kept:
                raise UpdateError(
                    f"{layer_name} got {sorted(loaded)} but not {name}, and was given up",
                    remedy="send all parameters of a layer together",
                )


def _check_arrived(
    model: torch.nn.Module, destinations: frozenset[str], embeddings: _InPlace
) -> None:
    """Everything that was to be written, was: layerwise reload sees only what goes through a
    parameter's ``weight_loader``, and puts the old tensors back where it has seen nothing.

    Raises:
        UpdateError: names the parameters that got nothing.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    missed = []
    for layer_name, layer in model.named_modules(remove_duplicate=False):
        info = get_layerwise_info(layer)
        loaded = {name for name, _ in info.loaded_weights}
        for name, tensor in [*layer._parameters.items(), *layer._buffers.items()]:
            full = f"{layer_name}.{name}" if layer_name else name
            if tensor is None or full not in destinations:
                continue
            # A layer that is whole has been finished, and has no record any more.
            finished = not info.can_load() and tensor not in embeddings.all
            if not finished and name not in loaded and tensor not in embeddings.written:
                missed.append(full)
    if missed:
        raise UpdateError(
            f"the engine's loader wrote nothing to {len(missed)} parameter(s), first {missed[0]}",
            remedy="report this model: its loader was seen to write them when it was traced",
        )


def _embeddings(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Unquantized embeddings and heads without a bias."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    return [
        layer
        for layer in model.modules()
        if isinstance(layer, VocabParallelEmbedding)
        and type(layer.quant_method) is UnquantizedEmbeddingMethod
        and [name for name, _ in layer.named_parameters(recurse=False)] == ["weight"]
        and not layer._buffers
    ]


@dataclass(frozen=True, slots=True)
class _InPlace:
    """Weights that are loaded in place: all of them, and those that were written to so far."""

    all: frozenset[torch.Tensor]
    written: set[torch.Tensor]


@contextmanager
def _embeddings_in_place(model: torch.nn.Module) -> Iterator[_InPlace]:
    """During the load, embeddings whose live weight has the layout it is loaded in are out of the
    reload: the engine's loader writes straight into them.

    Yields:
        Their weights. What it wrote to is known as layerwise reload knows it: by the loader that
        was called.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    in_place: list[torch.Tensor] = []
    for layer in _embeddings(model):
        info = get_layerwise_info(layer)
        if not info.can_load() or info.kernel_tensors is None:
            continue
        live, fresh = info.kernel_tensors[0].get("weight"), layer.weight
        if live is None or live.is_meta:
            continue
        if (live.shape, live.stride(), live.dtype) == (fresh.shape, fresh.stride(), fresh.dtype):
            _put_back(layer)
            in_place.append(live)
    with recorded(in_place) as written:
        yield _InPlace(frozenset(in_place), written)


def _pack_embeddings(model: torch.nn.Module, written: set[torch.Tensor]) -> None:
    """Pack each of these weights once, for all layers that compute from it; only the CPU engine's
    layers have a packed copy."""
    sharing: dict[torch.Tensor, list[Any]] = {weight: [] for weight in written}
    for layer in model.modules():
        if hasattr(layer, "cpu_linear") and layer.weight in sharing:
            sharing[layer.weight].append(layer)
    for first, *others in filter(None, sharing.values()):
        for layer in (first, *others):
            # Lets go of the old copies before there is a new one, and computes the same.
            layer.cpu_linear = torch.nn.functional.linear
        first.quant_method.process_weights_after_loading(first)
        for layer in others:
            layer.cpu_linear = first.cpu_linear


def _packed_experts(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Expert layers whose weights their kernel packs; the CPU engine's."""
    found = []
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if hasattr(getattr(kernel, "fused_experts", None), "process_weights_after_loading"):
            found.append(layer)
    return found


@contextmanager
def _unpadded(model: torch.nn.Module) -> Iterator[None]:
    """During the load, memory of the right size in place of expert weights that were padded: what
    is loaded is copied there, and padded and packed after. A layer that nothing was loaded into, or
    not all of it before an error, keeps its own."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    padded: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
    for layer in _packed_experts(model):
        info = get_layerwise_info(layer)
        live = info.kernel_tensors[0] if info.can_load() and info.kernel_tensors else {}
        for name in ("w13_weight", "w2_weight"):
            if name in live and live[name].shape != getattr(layer, name).shape:
                padded.append((layer, name, live[name]))
                live[name] = _like(live[name], getattr(layer, name).shape)
    failed = True
    try:
        yield
        failed = False
    finally:
        for layer, name, parameter in padded:
            info = get_layerwise_info(layer)
            if info.can_load() and (failed or info.load_numel <= 0):
                info.kernel_tensors[0][name] = parameter


def _like(parameter: torch.nn.Parameter, shape: torch.Size) -> torch.nn.Parameter:
    """An empty parameter of another shape, with the same attributes."""
    other = torch.nn.Parameter(parameter.data.new_empty(shape), requires_grad=False)
    other.__dict__.update(parameter.__dict__)
    return other
