"""What a vLLM worker's model takes: a twin of it on the meta device, and its own loader traced.
Touches private names of vLLM."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch

from weightsync.adapters.vllm import reload
from weightsync.adapters.vllm.limits import quantizes_shown
from weightsync.adapters.vllm.loaders import recorded
from weightsync.errors import Problem
from weightsync.manifest import Manifest
from weightsync.plan.lint import lint
from weightsync.plan.trace import Trace, trace_loader
from weightsync.target import Description

__all__ = ["Traced", "describe", "meta_twin", "own_config"]


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    """What a worker's model would make of a manifest.

    Attributes:
        found: said of it, but for where the model holds what.
        destinations: names of all parameters that would be written.
        trace: of the loader.
    """

    found: Description
    destinations: frozenset[str]
    trace: Trace


def meta_twin(vllm_config: Any) -> torch.nn.Module:
    """A second model of the same class, configuration and rank, without storage.

    Layers register themselves by name in the configuration when they are built; the twin gets a
    copy of it in which nothing is registered, so that the live model's entries stay.
    """
    from vllm.model_executor.model_loader.utils import initialize_model

    config = own_config(vllm_config)
    before = torch.get_default_dtype()
    # As vLLM's own loader does: layers take the default dtype unless they say otherwise.
    torch.set_default_dtype(config.model_config.dtype)
    try:
        with torch.device("meta"):
            return initialize_model(vllm_config=config)
    finally:
        torch.set_default_dtype(before)


def describe(vllm_config: Any, manifest: Manifest, *, whole: bool) -> Traced:
    """Trace the loader of this worker's model over a manifest. Called on the engine's thread:
    vLLM's current config is global.

    Args:
        whole: the manifest is meant to be all of the model, not a declared part.
    """
    from vllm.config import set_current_vllm_config

    twin = meta_twin(vllm_config)
    own = [*twin.named_parameters(remove_duplicate=False), *twin.named_buffers()]
    with (
        set_current_vllm_config(own_config(vllm_config)),
        recorded(tensor for _, tensor in own) as through,
    ):
        trace = trace_loader(twin, twin.load_weights, manifest)
    destinations = frozenset(copy.parameter for copy in trace.copies)
    seen = {trace.aliases.get(name, name) for name, tensor in own if tensor in through}
    packed = getattr(twin, "packed_modules_mapping", None) or {}
    parameters = dict(twin.named_parameters(remove_duplicate=False))
    kept = twin.state_dict(keep_vars=True)
    # Attention layers set their own buffers (scales) after every load.
    buffers = {
        name: kept[name]
        for name in kept.keys() - parameters.keys()
        if not hasattr(twin.get_submodule(name.rpartition(".")[0]), "process_weights_after_loading")
    }
    found = lint(
        trace,
        manifest,
        parameters,
        packed,
        buffers=buffers,
        whole=whole,
        units=reload.units(twin),
    )
    if whole and found.untouched and vllm_config.load_config.load_format == "dummy":
        # Noise went into everything that is saved, and nothing that comes replaces it.
        noise = [
            Problem("missing", name, "the engine was started with noise in it (load_format=dummy)")
            for name in found.untouched
        ]
        found = dataclasses.replace(found, problems=(*found.problems, *noise))
    lost = [
        Problem("loader", name, "is written past its weight_loader, where vLLM's reload loses it")
        for name in sorted(destinations - seen)
    ]
    found = dataclasses.replace(found, problems=(*found.problems, *lost))
    return Traced(found, destinations, trace)


def own_config(vllm_config: Any) -> Any:
    """A copy of the configuration in which no layer is registered.

    Layers that quantize what they load would do so in a twin as well. It is built without: what
    they are loaded from is an ordinary checkpoint.
    """
    config = copy.copy(vllm_config)
    if quantizes_shown(vllm_config):
        config.quant_config = None
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}
    if hasattr(config.compilation_config, "static_all_moe_layers"):
        config.compilation_config.static_all_moe_layers = []
    return config
