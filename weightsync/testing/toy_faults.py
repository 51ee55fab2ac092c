"""A toy model's target with one fault at a time: in what its loader is given, in how it loads and
finalizes, in what it holds afterwards, or in what it says.

A fault is a dict from outside, ``{"fault": "swap", "tensor": "layers.0.attn.q_proj.weight", ...}``:
the name of a function in `weightsync.testing.toy_mutations`, and its arguments.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weightsync.held import HeldCopies
from weightsync.manifest import Manifest
from weightsync.staging import Incoming
from weightsync.target import ApplyReport, Served, StagedWeights, torch_dtype
from weightsync.testing import toy_mutations as mutations
from weightsync.testing.toy_model import ToyModel
from weightsync.testing.toy_target import ToyTarget

__all__ = ["FaultyToyTarget", "fingerprint", "wire_sums"]


class FaultyToyTarget(ToyTarget):
    """A target that has the fault in ``faults``, if there is one.

    Attributes:
        faults: one fault; and ``{"evidence": True}`` to keep what other systems would compare.
        before: what the loader was given for the update before, by checkpoint name.
        undo: what brings back what no update would, called before the next load.
    """

    def __init__(self, model: ToyModel, faults: dict[str, Any]) -> None:
        super().__init__(model)
        self.faults = faults
        self.before: dict[str, torch.Tensor] = {}
        self.undo: list[Callable[[], None]] = []
        self._wire: dict[str, list[Any]] = {}
        self._said: Served | None = None
        self._last: Manifest | None = None

    def _act(self, stage: Mapping[str, Callable[..., None]], *given: Any) -> bool:
        """Do what the fault does in a stage of loading; whether it does anything there."""
        arguments = {k: v for k, v in self.faults.items() if k != "evidence"}
        act = stage.get(arguments.pop("fault", ""))
        if act is not None:
            act(*given, **arguments)
        return act is not None

    def verify(self, incoming: Incoming) -> NDArray[np.uint64]:
        try:
            digests = super().verify(incoming)
        finally:
            if self.faults.get("evidence") and incoming.arena is not None:
                with incoming.arena.held() as address:
                    offsets = incoming.offsets + np.uint64(address)
                    self._wire = wire_sums(incoming.manifest, offsets)
        self._act(mutations.DIGESTS, digests, incoming.manifest)
        return digests

    def apply(self, weights: StagedWeights) -> ApplyReport:
        while self.undo:
            self.undo.pop()()
        return super().apply(weights)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            if self._act(mutations.LOADS, self, weights):
                return
            given = {name: tensor.clone() for name, tensor in weights}
            fed = dict(given)
            self._act(mutations.FED, fed, self.before)
            kept: dict[str, torch.Tensor] = {}
            self._act(mutations.KEPT, self.everything(), kept)
            self.model.begin()
            self._act(mutations.OPENED, self)
            self.model.load_weights(fed.items())
            if not self._act(mutations.FINISHED, self):
                self.model.finish()
            for name, tensor in kept.items():
                self.everything()[name].copy_(tensor)
            self._act(mutations.HELD, self)
            self.before = given

    def served(self, manifest: Manifest, seed: int, seeds: NDArray[np.uint64]) -> Served:
        self._last = manifest
        found = super().served(manifest, seed, seeds)
        said, self._said = self._said, found
        if self.faults.get("fault") == "says_what_it_said" and said is not None:
            return said
        return found

    def evidence(self) -> dict[str, Any]:
        """What other systems would compare of the last update.

        Returns:
            ``wire``: by checkpoint tensor, of the bytes that arrived: XOR of their 64-bit words,
            xxh3, and `fingerprint`. ``model``: ``[tensor, offsets, lengths, fingerprint]`` of each
            part that the parameters hold; fingerprint None where one cannot be read.
        """
        model = []
        if self._last is not None:
            layout, found = self._layout(self._last), self._as_loaded()
            for name, place, part in _parts(self._last, layout.held, found):
                holding = place.holding
                value = None if part is None else fingerprint(part)
                model.append([name, holding.offsets, holding.lengths, value])
        return {"wire": self._wire, "model": model}


def fingerprint(tensor: torch.Tensor) -> list[Any]:
    """Sum, sum of magnitudes, and the first five elements, of the values."""
    values = tensor.detach().reshape(-1).double()
    return [float(values.sum()), float(values.abs().sum()), values[:5].tolist()]


def wire_sums(manifest: Manifest, addresses: NDArray[np.uint64]) -> dict[str, list[Any]]:
    """By tensor: XOR of its 64-bit words, xxh3 of its bytes, and its fingerprint.

    Args:
        addresses: where the tensors' bytes lie, shape (n,).
    """
    import xxhash  # of no use but to be compared with

    found = {}
    for spec, address in zip(manifest.tensors, addresses.tolist(), strict=True):
        data = ctypes.string_at(address, spec.nbytes)
        words = np.frombuffer(data + b"\0" * (-len(data) % 8), np.uint64)
        tensor = torch.frombuffer(bytearray(data), dtype=torch_dtype(spec.dtype))
        xor = int(np.bitwise_xor.reduce(words))
        found[spec.name] = [xor, xxhash.xxh3_64_intdigest(data), fingerprint(tensor)]
    return found


def _parts(
    manifest: Manifest, held: HeldCopies, found: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, Any, torch.Tensor | None]]:
    for place in held.places:
        tensor = found.get(place.holding.holder)
        part = None
        if tensor is not None and tuple(tensor.shape) == place.layout.shape:
            offset = place.offset - place.layout.offset
            part = tensor.detach().contiguous().as_strided(place.lengths, place.stride, offset)
            order = sorted(range(part.dim()), key=lambda d: -place.whole_stride[d])
            part = part.permute(order)
        yield manifest.tensors[place.holding.index].name, place, part
