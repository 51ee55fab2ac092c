"""A plain torch module of this process as a target: its tensors are written in place, byte for
byte, from the arena or straight from the ring."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from weightsync.digest import copy_spans, digest_tensors, idle_threads
from weightsync.errors import Problem, UpdateRefused
from weightsync.holding import Holding
from weightsync.manifest import Manifest
from weightsync.messages import Mode
from weightsync.sources.module import Seen, dtype_name
from weightsync.sources.names import clean_name
from weightsync.surroundings import Surroundings
from weightsync.target import ApplyReport, Description, Served, StagedWeights, TargetStatus

if TYPE_CHECKING:
    from weightsync.staging import Incoming

__all__ = ["ModuleTarget"]

MAX_MANIFESTS = 64
"""Of which is remembered what was said of them."""


class ModuleTarget:
    """See `weightsync.target.Target`.

    Every parameter and persistent buffer must be covered by exactly one checkpoint tensor of its
    name, shape and dtype; parameters that share memory are one, under any of their names. What no
    tensor of an update goes to must come through it as it was, non-persistent buffers included.

    Args:
        module: on the CPU, contiguous parameters.
        engine: name for receipts.
    """

    modes: frozenset[Mode] = frozenset({"staged", "streamed"})
    wants_tensors = False

    def __init__(self, module: torch.nn.Module, *, engine: str = "torch module") -> None:
        self._module = module
        self._engine = engine
        self._refused: str | None = None
        self._places: _Places | None = None
        self._also: dict[str, tuple[tuple[int, str], ...]] = {}
        """By manifest, what was described of it as one memory under a name that it lacks."""
        # How things were before an update, until one has been committed: a later one does not cure
        # what an earlier one broke beside its tensors.
        self._noted: Surroundings | None = None

    @property
    def refused(self) -> str | None:
        """Why requests must not be served at the moment, or None."""
        return self._refused

    def describe(self, manifest: Manifest, *, whole: bool) -> Description:
        tensors = self._tensors()
        problems: list[Problem] = []
        tied: list[tuple[int, int]] = []
        covered: dict[tuple[int, int], int] = {}
        for index, spec in enumerate(manifest.tensors):
            tensor = tensors.get(spec.name)
            if tensor is None:
                problems.append(Problem("unknown", spec.name, "the module has no such tensor"))
                continue
            if tuple(tensor.shape) != spec.shape:
                detail = f"has shape {list(spec.shape)}, the module's is {list(tensor.shape)}"
                problems.append(Problem("shape", spec.name, detail))
            if dtype_name(tensor.dtype) != spec.dtype:
                detail = f"is sent as torch.{spec.dtype}, the engine holds {tensor.dtype}"
                problems.append(Problem("dtype", spec.name, detail))
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                detail = f"the module's tensor is on {tensor.device}, or not contiguous"
                problems.append(Problem("loader", spec.name, detail))
                continue
            if tensor.numel() and _extent(tensor) in covered:
                first = covered[_extent(tensor)]
                if manifest.tensors[first].shape == spec.shape:
                    tied.append((index, first))
                else:
                    detail = f"is the same memory as {manifest.tensors[first].name!r}"
                    problems.append(Problem("duplicate", spec.name, detail))
            covered.setdefault(_extent(tensor), index)
        if whole:
            problems += [
                Problem("missing", name, f"the module's {list(tensor.shape)} would stay what it is")
                for name, tensor in tensors.items()
                if tensor.numel() and _extent(tensor) not in covered
            ]
        elsewhere = tuple(
            (covered[_extent(tensor)], name)
            for name, tensor in tensors.items()
            if tensor.numel() and _extent(tensor) in covered and name not in manifest.index
        )
        if len(self._also) >= MAX_MANIFESTS:
            self._also.clear()
        self._also[manifest.hash] = elsewhere
        return Description(
            tuple(problems),
            holdings=tuple(
                Holding(index, spec.name, (0,) * len(spec.shape), spec.shape)
                for index, spec in enumerate(manifest.tensors)
            ),
            tied=tuple(tied),
            also=elsewhere,
        )

    def verify(self, incoming: Incoming) -> NDArray[np.uint64]:
        self._places_of(incoming.manifest)  # while an update can still be refused
        return incoming.digest()

    def stream(self, incoming: Incoming) -> NDArray[np.uint64]:
        places = self._places_of(incoming.manifest)
        self._note(places)
        # Whatever becomes of the module's tensors, memory that is written to is not given back.
        held = list(map(torch.Tensor.untyped_storage, places.seen.tensors))
        digests = incoming.copy_to(places.addresses)
        now = self._places_of(incoming.manifest).addresses
        if not np.array_equal(now, places.addresses):
            raise UpdateRefused("the module's tensors were replaced while they were written")
        del held
        return digests

    def apply(self, weights: StagedWeights) -> ApplyReport:
        started = time.perf_counter()
        manifest = weights.manifest
        places = self._places_of(manifest)
        self._note(places)
        with weights.addresses() as staged:
            copy_spans(staged, places.addresses, manifest.nbytes)
        return ApplyReport(load_seconds=time.perf_counter() - started)

    def restore(self) -> None:
        """Nothing to put back: copies into place leave whole tensors behind."""

    def served(self, manifest: Manifest, seed: int, seeds: NDArray[np.uint64]) -> Served:
        places = self._places_of(manifest)
        # The engine stands still, and so does its sender.
        digests = digest_tensors(places.addresses, manifest.nbytes, seeds, threads=idle_threads())
        changed = () if self._noted is None else self._noted.changed()
        return Served(digests, faults=tuple(p for p in changed if p.name in places.rest))

    def refuse(self, reason: str) -> None:
        self._refused = reason

    def admit(self) -> None:
        self._refused = self._noted = None

    def status(self) -> TargetStatus:
        return TargetStatus(engine=self._engine, device="cpu")

    def _note(self, places: _Places) -> None:
        """Remember what the update at hand must leave alone."""
        if self._noted is None and places.rest:
            rest = places.rest
            self._noted = Surroundings(
                lambda: {name: t for name, t in self._everything().items() if name in rest}
            )
            self._noted.note()

    def _everything(self) -> dict[str, torch.Tensor]:
        return {**dict(self._module.named_buffers()), **self._module.state_dict(keep_vars=True)}

    def _places_of(self, manifest: Manifest) -> _Places:
        """Where each of the manifest's tensors lies in the module now. Looked up anew only if a
        tensor is not what it was.

        Raises:
            UpdateRefused: a tensor is not what was described: replaced, resized or made strided.
        """
        found = self._module.state_dict(keep_vars=True)
        names, tensors = list(found), list(found.values())
        places = self._places
        if places is None or places.manifest != manifest or not places.seen.still(names, tensors):
            if manifest.hash not in self._also:
                self.describe(manifest, whole=False)  # forgotten among many others
            addresses = _look_up(manifest, _cleaned(found), self._also[manifest.hash])
            seen = Seen(names, tensors)
            written = set(zip(addresses.tolist(), manifest.nbytes.tolist(), strict=True))
            rest = frozenset(
                name
                for name, tensor in self._everything().items()
                if tensor.numel() and tensor.device.type == "cpu" and _extent(tensor) not in written
            )
            self._places = places = _Places(manifest, seen, addresses, rest)
        return places

    def _tensors(self) -> dict[str, torch.Tensor]:
        return _cleaned(self._module.state_dict(keep_vars=True))


def _cleaned(found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {clean_name(name): tensor for name, tensor in found.items()}


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Where its bytes begin, and how many they are."""
    return tensor.data_ptr(), tensor.nbytes


@dataclass(frozen=True, slots=True)
class _Places:
    """Where a manifest's tensors lie, and the tensors of which that is true.

    Attributes:
        rest: names of the module's other tensors.
    """

    manifest: Manifest
    seen: Seen
    addresses: NDArray[np.uint64]
    rest: frozenset[str]


def _look_up(
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    also: Sequence[tuple[int, str]],
) -> NDArray[np.uint64]:
    for spec in manifest.tensors:
        tensor = tensors.get(spec.name)
        if (
            tensor is None
            or tuple(tensor.shape) != spec.shape
            or dtype_name(tensor.dtype) != spec.dtype
            or not tensor.is_contiguous()
            or tensor.device.type != "cpu"
        ):
            raise UpdateRefused(f"the module's {spec.name!r} is not what it was when described")
    for index, name in also:
        spec, other = manifest.tensors[index], tensors.get(name)
        if other is not None and _extent(other) != _extent(tensors[spec.name]):
            raise UpdateRefused(
                f"the module's {name!r} was one memory with {spec.name!r} when described, and is "
                "its own now: nothing would be written there",
                remedy="tie them again, or sync once more, which looks at the module anew",
            )
    return np.array([tensors[spec.name].data_ptr() for spec in manifest.tensors], np.uint64)
