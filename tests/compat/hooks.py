"""What weightsync relies on in vLLM's source: names and parameters, in one list, and how to look
for them without importing anything.

Each need belongs to a *way* into the engine's workers (see `weightsync.adapters.vllm.ways`) or is
common to all. An engine offers a way if all of that way's needs are met.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

RELOAD = "model_executor/model_loader/reload"
FACTORY = "distributed/weight_transfer/factory.py"
BASE = "distributed/weight_transfer/base.py"
WORKER = "v1/worker/gpu_worker.py"
LLM = "entrypoints/llm.py entrypoints/offline_utils.py entrypoints/rl/offline.py"

NEWER_HOOK = ("config", "vllm_config", "device", "model")
OLDER_HOOK = ("config", "parallel_config", "model")


@dataclass(frozen=True)
class Callable:
    """A function or method.

    Attributes:
        files: where it may stand, separated by spaces, below vLLM's package.
        name: ``function`` or ``Class.method``; ``*.method`` for a method of any class there.
        parameters: that we pass, or are passed, in this order; others may follow.
        or_else: other ones that we know what to do with.
    """

    files: str
    name: str
    parameters: tuple[str, ...] = ()
    or_else: tuple[str, ...] | None = None

    def unmet(self, package: Path) -> str | None:
        """What is missing, or None."""
        found = [f for path in self.files.split() for f in _functions(package / path, self.name)]
        if not found:
            return f"{self.name} is not in {self.files}"
        wanted = [self.parameters] + ([] if self.or_else is None else [self.or_else])
        if any(has[: len(want)] == want for has in found for want in wanted):
            return None
        return f"{self.name} takes {found[0]}, expected {' or '.join(map(str, wanted))}"


@dataclass(frozen=True)
class Text:
    """Something that no signature shows: an attribute, a setting, a route."""

    files: str
    text: str

    def unmet(self, package: Path) -> str | None:
        for path in self.files.split():
            for file in sorted(package.glob(path)):
                if self.text in file.read_text():
                    return None
        return f"{self.text!r} is nowhere in {self.files}"


def _route(path: str) -> Text:
    return Text("entrypoints/**/*.py", f'"{path}"')


COMMON = (
    # trace
    Callable("model_executor/model_loader/utils.py", "initialize_model", ("vllm_config",)),
    Callable("config/vllm.py", "set_current_vllm_config", ("vllm_config",)),
    Text("config/compilation.py", "static_forward_context"),
    # reload
    Callable(f"{RELOAD}/layerwise.py", "initialize_layerwise_reload", ("model",)),
    Callable(f"{RELOAD}/layerwise.py", "finalize_layerwise_reload"),
    Callable(f"{RELOAD}/layerwise.py", "finalize_layerwise_processing", ("model", "model_config")),
    Callable(f"{RELOAD}/layerwise.py", "get_layerwise_info", ("layer",)),
    Callable(f"{RELOAD}/layerwise.py", "_place_kernel_tensors", ("layer", "info")),
    Callable(f"{RELOAD}/types.py", "LayerReloadingInfo.can_load"),
    Callable(f"{RELOAD}/types.py", "LayerReloadingInfo.reset"),
    Text(f"{RELOAD}/types.py", "kernel_tensors"),
    Text(f"{RELOAD}/types.py", "load_numel"),
    Text(f"{RELOAD}/types.py", "loaded_weights"),
    Callable("model_executor/model_loader/weight_utils.py", "default_weight_loader", ("param",)),
    Text("model_executor/layers/vocab_parallel_embedding.py", "class VocabParallelEmbedding"),
    Text("model_executor/layers/vocab_parallel_embedding.py", "class UnquantizedEmbeddingMethod"),
    # what the CPU engine packs, and by what it is known: a name that is gone would leave it stale
    Text("model_executor/layers/utils.py", "layer.cpu_linear ="),
    Text("model_executor/layers/fused_moe/**/*.py", "self.moe_kernel"),
    Text("model_executor/layers/fused_moe/**/*.py", "def process_weights_after_loading"),
    # guard
    Callable(
        "v1/sample/logits_processor/interface.py",
        "LogitsProcessor.validate_params",
        ("sampling_params",),
    ),
    Text("v1/sample/logits_processor/__init__.py", "vllm.logits_processors"),
    # connectors
    Callable(LLM, "*.collective_rpc", ("method", "timeout", "args", "kwargs")),
    Callable(LLM, "*.reset_prefix_cache", ("reset_running_requests", "reset_connector")),
    Callable(LLM, "*.get_world_size"),
    *map(
        _route,
        (
            "/pause",
            "/resume",
            "/is_paused",
            "/get_world_size",
            "/server_info",
            "/reset_prefix_cache",
            "/reset_mm_cache",
            "/reset_encoder_cache",
        ),
    ),
)

TAKES_OTHERS = Text("config/weight_transfer.py", "str =")
"""The name of a backend may be one that is not vLLM's own."""

WAYS = {
    "backend session": (
        Callable(
            FACTORY,
            "WeightTransferEngineFactory.register_engine",
            ("name", "module_path_or_cls", "class_name"),
        ),
        Callable(FACTORY, "WeightTransferEngineFactory.create_engine", NEWER_HOOK),
        Callable(BASE, "WeightTransferEngine.__init__", NEWER_HOOK),
        Callable(BASE, "WeightTransferEngine.start_weight_update"),
        Callable(BASE, "WeightTransferEngine.update_weights", ("update_info",)),
        Callable(BASE, "WeightTransferEngine.finish_weight_update"),
        Callable(WORKER, "Worker.init_weight_transfer_engine", ("init_info",)),
        Callable(WORKER, "Worker.start_weight_update"),
        Callable(WORKER, "Worker.update_weights", ("update_info",)),
        Callable(WORKER, "Worker.finish_weight_update"),
        Callable(LLM, "*.init_weight_transfer_engine", ("request",)),
        Callable(LLM, "*.start_weight_update"),
        Callable(LLM, "*.start_draft_weight_update"),  # by which this hook is recognized
        Callable(LLM, "*.update_weights", ("request",)),
        Callable(LLM, "*.finish_weight_update"),
        *map(
            _route,
            (
                "/init_weight_transfer_engine",
                "/start_weight_update",
                "/start_draft_weight_update",
                "/update_weights",
                "/finish_weight_update",
            ),
        ),
    ),
    "backend messages": (
        Callable(
            FACTORY,
            "WeightTransferEngineFactory.register_engine",
            ("name", "module_path_or_cls", "class_name"),
        ),
        Callable(FACTORY, "WeightTransferEngineFactory.create_engine", NEWER_HOOK, OLDER_HOOK),
        TAKES_OTHERS,
        Callable(BASE, "WeightTransferEngine.__init__", NEWER_HOOK, OLDER_HOOK),
        Callable(BASE, "WeightTransferEngine.init_transfer_engine", ("init_info",)),
        Callable(WORKER, "Worker.init_weight_transfer_engine", ("init_info",)),
        Text("compilation/decorators.py", "self.vllm_config = vllm_config"),
        Callable(
            "model_executor/model_loader/utils.py", "get_model_architecture", ("model_config",)
        ),
        Callable(LLM, "*.init_weight_transfer_engine", ("request",)),
        _route("/init_weight_transfer_engine"),
    ),
    "worker extension": (
        Text("config/parallel.py", "worker_extension_cls: str"),
        Text("v1/worker/worker_base.py", "worker_extension_cls"),
        Callable("v1/worker/gpu_model_runner.py", "GPUModelRunner.get_model"),
        Text("v1/worker/worker_base.py", "self.vllm_config = vllm_config"),
        _route("/collective_rpc"),
    ),
}


def unmet(package: Path) -> tuple[list[str], dict[str, list[str]]]:
    """What a vLLM lacks.

    Args:
        package: its folder ``vllm``.

    Returns:
        Of what all ways need, and, by way, of what that way needs.
    """
    return _missing(COMMON, package), {way: _missing(needs, package) for way, needs in WAYS.items()}


def _missing(needs: tuple[Callable | Text, ...], package: Path) -> list[str]:
    return [what for need in needs if (what := need.unmet(package)) is not None]


def _functions(file: Path, name: str) -> Iterator[tuple[str, ...]]:
    """The parameters of every such function, without ``self`` and ``cls``."""
    owner, _, leaf = name.rpartition(".")
    for found_owner, function in _definitions(file):
        if function.name == leaf and (owner == found_owner or (owner == "*" and found_owner)):
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            names = tuple(argument.arg for argument in arguments)
            yield names[1:] if names[:1] in (("self",), ("cls",)) else names


@lru_cache(maxsize=64)
def _definitions(file: Path) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """(class or "", function) of a module; empty if there is no such module."""
    if not file.is_file():
        return []
    found: list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]] = []
    for node in ast.parse(file.read_text()).body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append((node.name if isinstance(node, ast.ClassDef) else "", inner))
    return found
