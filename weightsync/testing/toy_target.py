"""A toy model as a target, through its own loader: the pattern of an adapter that proves what its
engine serves.

What is loaded is found by tracing the loader of a twin; what is held is read back by the same
trace, from parameters and from every packed copy of them; what is derived is derived again and
compared; and what no tensor goes to must have stayed what and where it was.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from weightsync.box import Box
from weightsync.errors import EnginePoisoned, Problem, UpdateRefused
from weightsync.held import HeldCopies
from weightsync.manifest import Manifest
from weightsync.messages import Mode
from weightsync.plan.lint import lint
from weightsync.plan.trace import Trace, trace_loader
from weightsync.staging import Incoming
from weightsync.surroundings import Pinned, Surroundings, pads, written
from weightsync.target import ApplyReport, Description, Served, StagedWeights, TargetStatus
from weightsync.testing.toy_layers import Reloadable
from weightsync.testing.toy_model import PACKED_MODULES, ToyModel, plain_tensors

__all__ = ["ToyTarget"]


@dataclass(slots=True)
class _Layout:
    """What is known of one manifest.

    Attributes:
        held, packed: of the parameters, and of the packed copies of some.
        pads: noted once, while the model has its weights.
        others: all that the manifest's tensors do not go to, noted before each update.
    """

    description: Description
    held: HeldCopies
    packed: HeldCopies
    pads: Surroundings
    others: Surroundings


class ToyTarget:
    """See `weightsync.target.Target`.

    Args:
        model: loaded and finalized; where its tensors lie is what a graph has captured.
    """

    modes: frozenset[Mode] = frozenset({"staged"})
    wants_tensors = True

    def __init__(self, model: ToyModel) -> None:
        self.model = model
        self.refused: str | None = None
        self._layouts: dict[tuple[str, bool], _Layout] = {}
        self._graph = Pinned(self.everything)
        self._constants = Surroundings(self._constant)
        self._constants.note()

    def describe(self, manifest: Manifest, *, whole: bool) -> Description:
        key = (manifest.hash, whole)
        if key not in self._layouts:
            self._layouts[key] = self._traced(manifest, whole=whole)
        return self._layouts[key].description

    def _traced(self, manifest: Manifest, *, whole: bool) -> _Layout:
        with torch.device("meta"):
            twin = ToyModel(self.model.config, self.model.ranks)
        trace = trace_loader(twin, twin.load_weights, manifest)
        parameters = dict(twin.named_parameters(remove_duplicate=False))
        buffers = {n: t for n, t in twin.state_dict(keep_vars=True).items() if n not in parameters}
        found = lint(trace, manifest, parameters, PACKED_MODULES, buffers=buffers, whole=whole)
        held = HeldCopies(manifest, trace, self._as_loaded)
        copies = self._unpacked(trace)
        packed = HeldCopies(
            manifest,
            trace,
            lambda: self._unpacked(trace),
            skip=[name for name in trace.aliases if trace.aliases[name] not in copies],
        )
        boxes = written(trace)
        second = (
            msgspec.structs.replace(holding, holder=f"{holding.holder} (packed)")
            for holding in packed.holdings
        )
        layout = _Layout(
            description=dataclasses.replace(
                found, holdings=(*held.holdings, *second), unproven=held.unproven
            ),
            held=held,
            packed=packed,
            pads=Surroundings(lambda: self._padding(boxes)),
            others=Surroundings(lambda: self._others(trace, boxes)),
        )
        if self.model.asleep == 0 and self.refused is None:
            layout.pads.note()
        return layout

    def verify(self, incoming: Incoming) -> NDArray[np.uint64]:
        return incoming.digest()

    def stream(self, incoming: Incoming) -> NDArray[np.uint64]:
        raise UpdateRefused("the toy's loader takes whole tensors, not bytes as they come")

    def apply(self, weights: StagedWeights) -> ApplyReport:
        if self.model.asleep:
            raise EnginePoisoned("the engine is asleep", remedy="wake it up, then sync again")
        started = time.perf_counter()
        self._layout(weights.manifest).others.note()
        taken: list[str] = []
        self.load(_counted(weights.tensors(), taken))
        if len(taken) < len(weights.manifest):
            missed = weights.manifest.tensors[len(taken)].name
            raise EnginePoisoned(f"the loader left {missed!r} and what follows as it was")
        return ApplyReport(load_seconds=time.perf_counter() - started)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Begin, load and finalize, once each."""
        self.model.load(weights)

    def restore(self) -> None:
        self.model.finish()

    def served(self, manifest: Manifest, seed: int, seeds: NDArray[np.uint64]) -> Served:
        layout = self._layout(manifest)
        held = layout.held.digest(seeds)
        packed = layout.packed.digest(seeds)
        shift = len(layout.held.holdings)
        unread = dict(layout.held.unread)
        unread |= {shift + number: why for number, why in layout.packed.unread.items()}
        faults = (
            *layout.held.faults,
            *layout.packed.faults,
            *self._stale(),
            *self._constants.changed(),
            *layout.pads.changed(),
            *layout.others.changed(),
            *self._graph.moved(),
        )
        return Served(np.concatenate([held, packed]), unread, tuple(dict.fromkeys(faults)))

    def refuse(self, reason: str) -> None:
        self.refused = reason

    def admit(self) -> None:
        self.refused = None

    def status(self) -> TargetStatus:
        return TargetStatus(engine="toy model", device="cpu")

    # --- what the model has -----------------------------------------------------------------

    def everything(self) -> dict[str, torch.Tensor]:
        """All tensors of the model, loaded or not, under all of their names."""
        return {**self.model.state(), **plain_tensors(self.model)}

    def _layout(self, manifest: Manifest) -> _Layout:
        for whole in (True, False):
            if (layout := self._layouts.get((manifest.hash, whole))) is not None:
                return layout
        raise UpdateRefused("these tensors have not been described")

    def _layers(self) -> Iterator[tuple[str, Reloadable]]:
        for path, module in self.model.named_modules():
            if isinstance(module, Reloadable):
                yield path, module

    def _as_loaded(self) -> Mapping[str, torch.Tensor]:
        found = self.model.state()
        for path, module in self._layers():
            found |= {f"{path}.{name}": tensor for name, tensor in module.as_loaded().items()}
        return found

    def _unpacked(self, trace: Trace) -> Mapping[str, torch.Tensor]:
        return {
            trace.aliases[f"{path}.{name}"]: tensor
            for path, module in self._layers()
            for name, tensor in module.unpacked().items()
        }

    def _constant(self) -> dict[str, torch.Tensor]:
        """What comes with the code: no checkpoint has it, and nothing derives it."""
        derived = {f"{p}.{name}" for p, module in self._layers() for name in module.derived}
        found = {n: t for n, t in plain_tensors(self.model).items() if n not in derived}
        loaded = ("k_scale",)
        return found | {n: b for n, b in self.model.named_buffers() if not n.endswith(loaded)}

    def _padding(self, boxes: Mapping[str, list[Box] | None]) -> dict[str, torch.Tensor]:
        state = self.model.state()
        found: dict[str, torch.Tensor] = {}
        for name, known in boxes.items():
            tensor = state.get(name)
            if known and tensor is not None and tensor.dim() == len(known[0].offsets):
                found.update(pads(name, tensor, known))
        return found

    def _others(self, trace: Trace, boxes: Mapping[str, object]) -> dict[str, torch.Tensor]:
        """Tensors that the checkpoint's do not go to, and that nothing derives from theirs."""
        loaded = {name for name, canonical in trace.aliases.items() if canonical in boxes}
        modules = {name.rpartition(".")[0] for name in loaded}
        for path, module in self._layers():
            if path in modules:
                loaded |= {f"{path}.{name}" for name in module.derived}
        return {name: t for name, t in self.everything().items() if name not in loaded}

    def _stale(self) -> Iterator[Problem]:
        """What should have been derived anew, apart from packed copies, which are digested."""
        for path, module in self._layers():
            for name, fresh in module.derive().items():
                now = getattr(module, name)
                same = now.shape == fresh.shape and torch.equal(
                    _bytes(now), _bytes(fresh.contiguous())
                )
                if name != "packed" and not same:
                    detail = f"is not what {path}.weight gives: it was derived from other weights"
                    yield Problem("stale", f"{path}.{name}", detail)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _counted(
    tensors: Iterable[tuple[str, torch.Tensor]], taken: list[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors; what the loader has asked for is noted."""
    for name, tensor in tensors:
        taken.append(name)
        yield name, tensor
