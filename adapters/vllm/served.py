"""What a vLLM worker's live model holds of a checkpoint's tensors.

Norms, biases, embeddings lie as they were loaded (`weightsync.held`). Linear layers of the CPU
engine are packed, and so are the heads that compute logits (`probe`); experts are packed otherwise
(`experts`). `readable` says which is which, once per layout.

What no tensor goes to, pads and buffers, must come through an update as it was. Not looked at are
buffers of layers that set them after every load (attention's scales), pads of packed linears, and
what layers keep outside of parameters and buffers.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from weightsync.adapters.vllm.probe import Probe
from weightsync.adapters.vllm.readable import sort_out
from weightsync.held import HeldCopies
from weightsync.manifest import Manifest
from weightsync.plan.trace import Trace
from weightsync.regions import MAX_DIMS
from weightsync.surroundings import Pinned, Surroundings, pads, written
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
        self._model = model
        elsewhere = trace.layouts.keys() - found.copies
        self._copies = HeldCopies(manifest, trace, self._tensors, skip=elsewhere)
        self._probe = Probe(found.packed)
        self._experts = found.experts
        self.holdings = (
            *self._copies.holdings,
            *self._probe.holdings,
            *(holding for experts in self._experts for holding in experts.holdings),
        )
        self.unproven = tuple(sorted((dict(self._copies.unproven) | found.unproven).items()))
        self._written = written(trace)
        self._layouts = {name: trace.layouts[name].shape for name in found.copies}
        self._surroundings = Surroundings(self._rest)
        self._noted = False
        self._pinned = Pinned(lambda: dict(model.named_parameters())) if captured else None

    def begin(self) -> None:
        """An update is about to be applied: what the model has beside the tensors now is what it
        must have afterwards. Not before, since layers may change their buffers while they run; and
        not again after an update that failed, which may have changed them."""
        if not self._noted:
            self._surroundings.note()
            self._noted = True

    def end(self) -> None:
        """The update has been applied."""
        self._noted = False

    def look(self, seed: int, seeds: NDArray[np.uint64]) -> Served:
        """See `weightsync.target.Target.served`."""
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
        faults = [*self._copies.faults, *self._surroundings.changed()]
        faults += [problem for experts in self._experts for problem in experts.spoilt()]
        if self._pinned is not None:
            faults += self._pinned.moved()
        return Served(np.concatenate(found), unread, tuple(faults))

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        """Parameters and buffers of the live model, under every name."""
        found: dict[str, torch.Tensor] = dict(self._model.named_parameters(remove_duplicate=False))
        found.update(self._model.named_buffers(remove_duplicate=False))
        return found

    def _rest(self) -> Mapping[str, torch.Tensor]:
        """What no tensor goes to, and can be read here."""
        found: dict[str, torch.Tensor] = {}
        for prefix, layer in self._model.named_modules():
            if hasattr(layer, "process_weights_after_loading"):
                continue
            for name, buffer in layer.named_buffers(prefix, recurse=False):
                if name not in self._written and _legible(buffer):
                    found[name] = buffer
        tensors = self._tensors()
        for name, shape in self._layouts.items():
            tensor, boxes = tensors.get(name), self._written.get(name)
            if tensor is not None and boxes and tuple(tensor.shape) == shape:
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
