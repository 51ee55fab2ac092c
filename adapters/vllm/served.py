"""What a vLLM worker's live model holds of a checkpoint's tensors.

Norms, biases, embeddings lie as they were loaded (`weightsync.held`). Linear layers of the CPU
engine are packed, and so are the heads that compute logits (`probe`); experts are packed otherwise
(`experts`). `readable` says which is which, once per layout.

What no tensor goes to, pads, buffers and what a partial update leaves alone, must come through an
update as it was. Not looked at are buffers of layers that set them after every load (attention's
scales), pads of packed linears and packed linears that no tensor goes to, and what layers keep
outside of parameters and buffers.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from weightsync.adapters.vllm.probe import Probe
from weightsync.adapters.vllm.readable import Owner, sort_out
from weightsync.box import Box
from weightsync.errors import Problem
from weightsync.held import HeldCopies
from weightsync.manifest import Manifest
from weightsync.plan.trace import Trace
from weightsync.regions import MAX_DIMS
from weightsync.surroundings import (
    Pinned,
    Surroundings,
    filled,
    pads,
    parts,
    remaining,
    written,
)
from weightsync.target import Served

__all__ = ["ServedModel"]


class ServedModel:
    """What a model holds of one manifest.

    Args:
        model: the worker's, live.
        manifest: of an update.
        trace: of it through the loader of the model's twin.
        captured: graphs may have been captured, which go on reading where tensors lie now. Not seen
            on hardware.

    Attributes:
        holdings, unproven: see `weightsync.target.Description`.
    """

    def __init__(
        self, model: torch.nn.Module, manifest: Manifest, trace: Trace, *, captured: bool
    ) -> None:
        found = sort_out(model, manifest, trace)
        self._owners = found.copies
        elsewhere = trace.layouts.keys() - found.copies.keys()
        self._copies = HeldCopies(manifest, trace, self._tensors, skip=elsewhere)
        self._probe = Probe(found.packed)
        self._experts = found.experts
        self.holdings = (
            *self._copies.holdings,
            *self._probe.holdings,
            *(holding for experts in self._experts for holding in experts.holdings),
        )
        self.unproven = tuple(sorted((dict(self._copies.unproven) | found.unproven).items()))
        boxes = written(trace)
        # Layers set attention's buffers anew after every load; the others are watched. Of a partial
        # update, so are the parameters that it leaves alone; but not what a layer that is loaded
        # makes of its weights (scales).
        loaded = {
            name.rpartition(".")[0] for name, whole in trace.aliases.items() if whole in boxes
        }
        owners = [
            Owner(name, layer, leaf)
            for name, layer in model.named_modules()
            if not hasattr(layer, "process_weights_after_loading")
            for leaf in (*layer._buffers, *layer._parameters)
            if leaf in layer._buffers or f"{name}.{leaf}" in trace.aliases or name not in loaded
        ]
        self._others = [
            owner for owner in owners if trace.aliases.get(owner.full, owner.full) not in boxes
        ]
        self._padded: dict[str, tuple[tuple[int, ...], list[Box]]] = {}
        self._filled = {n: those for n, those in filled(trace).items() if n in found.copies}
        for name in found.copies:
            covered, shape = boxes.get(name), trace.layouts[name].shape
            if covered is not None:
                covered = [*covered, *self._filled.get(name, ())]
            if covered and remaining(Box.whole(shape), covered):
                self._padded[name] = shape, covered
        self._surroundings = Surroundings(self._rest)
        self._pinned = Pinned(lambda: dict(model.named_parameters())) if captured else None

    def note(self) -> None:
        """Remember what the model has beside the tensors, right before an update is applied: layers
        may change their buffers while they run."""
        self._surroundings.note()

    def changed(self) -> list[Problem]:
        """What of it is not as it was noted."""
        return self._surroundings.changed()

    def look(self, seed: int, seeds: NDArray[np.uint64]) -> Served:
        """See `weightsync.target.Target.served`; but for what `changed` tells."""
        copies = self._copies.digest(seeds)
        unread = dict(self._copies.unread)
        packed, why = self._probe.digest(seed, seeds)
        unread |= {len(copies) + number: reason for number, reason in why.items()}
        found = [copies, packed]
        number = len(copies) + len(packed)
        for experts in self._experts:
            digests = experts.digest(seeds)
            if isinstance(digests, str):
                unread |= dict.fromkeys(range(number, number + len(experts.holdings)), digests)
                digests = np.zeros((len(experts.holdings), 2), np.uint64)
            found.append(digests)
            number += len(digests)
        faults = [*self._copies.faults, *self._parted(), *self._overwritten()]
        faults += [problem for experts in self._experts for problem in experts.spoilt()]
        if self._pinned is not None:
            faults += self._pinned.moved()
        return Served(np.concatenate(found), unread, tuple(faults))

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        """What lies as it was loaded, by canonical name."""
        found = ((name, owners[0].tensor()) for name, owners in self._owners.items())
        return {name: tensor for name, tensor in found if tensor is not None}

    def _parted(self) -> list[Problem]:
        """Layers that shared a parameter, and do not any more: what the others have is proven."""
        found = []
        for owners in self._owners.values():
            if len(owners) == 1:
                continue
            first = owners[0].tensor()
            for other in owners[1:]:
                tensor = other.tensor()
                if tensor is None or first is None or tensor.data_ptr() != first.data_ptr():
                    detail = f"was one with {owners[0].full} and is other memory now"
                    found.append(Problem("stale", other.full, detail))
        return found

    def _overwritten(self) -> list[Problem]:
        """Pads that are not what the engine's loader fills them with."""
        found = []
        for name, constants in self._filled.items():
            tensor = self._owners[name][0].tensor()
            if tensor is None or not all(box.within(tensor.shape) for box in constants):
                continue  # which is a fault of its own
            views = parts(name, tensor, tuple(constants))
            for (label, view), value in zip(views, constants.values(), strict=True):
                if not bool((view == value).all()):
                    detail = f"is padding that the engine's loader fills with {value}, and is not"
                    found.append(Problem("changed", label, detail))
        return found

    def _rest(self) -> Mapping[str, torch.Tensor]:
        """What no tensor goes to, and can be read here."""
        found: dict[str, torch.Tensor] = {}
        for owner in self._others:
            tensor = owner.tensor()
            if tensor is not None and _legible(tensor):
                found[owner.full] = tensor
        for name, (shape, boxes) in self._padded.items():
            tensor = self._owners[name][0].tensor()
            if tensor is not None and tuple(tensor.shape) == tuple(shape):
                found.update(pads(name, tensor, boxes))
        return found


def _legible(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.dim() <= MAX_DIMS
    )
