"""One vLLM worker's weights as a target."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weightsync.adapters.vllm import reload, trace
from weightsync.adapters.vllm.guard import Mark
from weightsync.adapters.vllm.limits import unsupported
from weightsync.adapters.vllm.served import ServedModel
from weightsync.adapters.vllm.support import unsupported_version
from weightsync.errors import EnginePoisoned, UpdateRefused, reason_of
from weightsync.manifest import Manifest
from weightsync.messages import Mode
from weightsync.staging import Incoming
from weightsync.target import ApplyReport, Description, Served, StagedWeights, TargetStatus

__all__ = ["VllmTarget"]

log = logging.getLogger("weightsync.vllm")

MAX_LAYOUTS = 64
"""Whose traces are remembered at once."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """What is remembered of a manifest.

    Attributes:
        destinations: names of all parameters that it writes.
        held: where the model holds it; None where that cannot be told.
    """

    destinations: frozenset[str]
    held: ServedModel | None


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
        self._layouts: dict[str, _Layout] = {}
        # What noted how things were before an update, until one has been committed: a later one
        # does not cure what an earlier one broke beside the tensors.
        self._under_way: ServedModel | None = None

    def describe(self, manifest: Manifest, *, whole: bool) -> Description:
        problems = [*unsupported_version(), *unsupported(self._vllm_config)]
        if problems:
            return Description(tuple(problems))
        traced = trace.describe(self._vllm_config, manifest, whole=whole)
        if traced.found.problems:
            # Nothing will come of it; what was said to somebody else of the same tensors, declared
            # as a part, goes on to hold.
            return traced.found
        if len(self._layouts) >= MAX_LAYOUTS:
            self._layouts.clear()
        try:
            held = ServedModel(self._model, manifest, traced.trace, captured=self._captured())
        except Exception as error:
            # An update is possible nevertheless; only its proof ends before the model.
            log.exception("what the model holds cannot be read back")
            self._layouts[manifest.hash] = _Layout(traced.destinations, None)
            unproven = tuple(
                (index, f"cannot be read back: {reason_of(error)}"[:500])
                for index in range(len(manifest))
            )
            return dataclasses.replace(traced.found, unproven=unproven)
        self._layouts[manifest.hash] = _Layout(traced.destinations, held)
        return dataclasses.replace(traced.found, holdings=held.holdings, unproven=held.unproven)

    def verify(self, incoming: Incoming) -> NDArray[np.uint64]:
        return incoming.digest()

    def stream(self, incoming: Incoming) -> NDArray[np.uint64]:
        raise UpdateRefused("vLLM's loader takes whole tensors, not bytes as they come")

    def apply(self, weights: StagedWeights) -> ApplyReport:
        from vllm.config import set_current_vllm_config

        manifest = weights.manifest
        layout = self._layout(manifest)
        if layout.held is not None and self._under_way is None:
            layout.held.note()
            self._under_way = layout.held
        taken: list[str] = []
        # Some hooks of some versions set vLLM's current configuration around this, others do not.
        with set_current_vllm_config(self._vllm_config):
            seconds = reload.reload_whole(
                self._model,
                self._vllm_config.model_config,
                _counted(weights.tensors(), taken),
                layout.destinations,
            )
        self._check_all_updated(manifest, taken)
        return ApplyReport(load_seconds=seconds)

    def _check_all_updated(self, manifest: Manifest, taken: list[str]) -> None:
        """The loader has asked for every tensor, and left no parameter without storage.

        Raises:
            EnginePoisoned: it has not; the weights are a mixture.
        """
        missed = [spec.name for spec in manifest.tensors[len(taken) :]]
        missed += [name for name, param in self._model.named_parameters() if param.is_meta]
        if missed:
            raise EnginePoisoned(
                f"the engine's loader left {len(missed)} tensor(s) as they were, first {missed[0]}",
                remedy="send a full update",
            )

    def restore(self) -> None:
        reload.undo(self._model)

    def served(self, manifest: Manifest, seed: int, seeds: NDArray[np.uint64]) -> Served:
        layout = self._layout(manifest)
        if layout.held is None:
            return Served()
        found, under_way = layout.held.look(seed, seeds), self._under_way
        if under_way is None:
            return found
        # What this update wrote, an earlier one that failed may have left alone.
        changed = [p for p in under_way.changed() if p.name not in layout.destinations]
        return dataclasses.replace(found, faults=(*found.faults, *changed))

    def _layout(self, manifest: Manifest) -> _Layout:
        if manifest.hash not in self._layouts:
            # Forgotten among many others. Whether it is all of the model was settled then.
            self.describe(manifest, whole=False)
        if manifest.hash not in self._layouts:
            raise UpdateRefused("the engine does not take these tensors any more")
        return self._layouts[manifest.hash]

    def _captured(self) -> bool:
        """Whether graphs were captured that read weights where they lay then."""
        return self._device.type == "cuda" and not self._vllm_config.model_config.enforce_eager

    def refuse(self, reason: str) -> None:
        self._mark.set(reason)

    def admit(self) -> None:
        self._under_way = None
        self._mark.clear()

    def close(self) -> None:
        """The engine ends."""
        self._mark.close()

    def status(self) -> TargetStatus:
        import vllm

        return TargetStatus(engine=f"vllm {vllm.__version__}", device=str(self._device))


def _counted(
    tensors: Iterable[tuple[str, torch.Tensor]], taken: list[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors; what the loader has asked for is noted."""
    for name, tensor in tensors:
        taken.append(name)
        yield name, tensor
