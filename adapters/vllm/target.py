"""One vLLM worker's weights as a target."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weightsync.adapters.vllm import reload, trace
from weightsync.adapters.vllm.guard import Mark
from weightsync.adapters.vllm.limits import unsupported
from weightsync.errors import UpdateRefused
from weightsync.manifest import Manifest
from weightsync.messages import Mode
from weightsync.staging import Incoming
from weightsync.target import ApplyReport, Description, Served, StagedWeights, TargetStatus

__all__ = ["VllmTarget"]


class VllmTarget:
    """See `weightsync.target.Target`. Whole tensors through the engine's own loader.

    Args:
        model: the worker's live model.
        vllm_config: the worker's configuration.
        device: of the worker.
    """

    modes: frozenset[Mode] = frozenset({"staged"})
    wants_tensors = True

    def __init__(self, model: torch.nn.Module, vllm_config: Any, device: torch.device) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self._device = device
        self._mark = Mark()

    def describe(self, manifest: Manifest, *, whole: bool) -> Description:
        problems = unsupported(self._vllm_config)
        if problems:
            return Description(tuple(problems))
        return trace.describe(self._vllm_config, manifest, whole=whole)

    def verify(self, incoming: Incoming) -> NDArray[np.uint64]:
        return incoming.digest()

    def stream(self, incoming: Incoming) -> NDArray[np.uint64]:
        raise UpdateRefused("vLLM's loader takes whole tensors, not bytes as they come")

    def apply(self, weights: StagedWeights) -> ApplyReport:
        seconds = reload.reload_whole(
            self._model, self._vllm_config.model_config, weights.tensors()
        )
        return ApplyReport(load_seconds=seconds)

    def restore(self) -> None:
        reload.undo(self._model)

    def served(self, manifest: Manifest, seeds: NDArray[np.uint64]) -> Served:
        """Nothing: the CPU engine's linear layers hold packed copies. What was handed to its
        loader is proven instead."""
        return Served()

    def refuse(self, reason: str) -> None:
        self._mark.set(reason)

    def admit(self) -> None:
        self._mark.clear()

    def close(self) -> None:
        """The engine ends."""
        self._mark.close()

    def status(self) -> TargetStatus:
        import vllm

        return TargetStatus(engine=f"vllm {vllm.__version__}", device=str(self._device))
