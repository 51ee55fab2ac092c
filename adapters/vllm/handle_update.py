"""A full update from handles (`weightsync.handles`), on one vLLM worker."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from weightsync.adapters.vllm.target import VllmTarget
from weightsync.box import Box, union_numel
from weightsync.errors import EnginePoisoned, PlanRefused, Problem, UpdateRefused
from weightsync.handles import OpenedHandle, open_handle
from weightsync.manifest import Manifest, TensorSpec
from weightsync.receiver import Receiver
from weightsync.target import Description

__all__ = ["HandleUpdate"]

REMEDY = (
    "send every tensor of the checkpoint under its Hugging Face name, in the engine's dtype "
    "(dtype= at the source)"
)


class HandleUpdate:
    """Expects, checks, proves and applies. What raises before the weights are touched leaves them
    as they were; what raises later leaves the engine refusing requests.

    Args:
        target: the worker's.
        world_size: number of the engine's workers.
    """

    def __init__(self, target: VllmTarget, world_size: int) -> None:
        self._target = target
        self._world_size = world_size
        self._expected: frozenset[TensorSpec] | None = None
        self._described: str | None = None
        self._tied: tuple[tuple[int, int], ...] = ()

    def expect(self, tensors: Any) -> None:
        """Say beforehand what will come, and have it refused now if it does not fit.

        Args:
            tensors: ``{name: (shape, dtype)}``, the dtype a torch dtype or its name.

        Raises:
            UpdateRefused: it is no such mapping.
            PlanRefused, ManifestError: the engine does not take these tensors.
        """
        manifest = Manifest(_specs(tensors))
        self._expected = None
        self._describe(manifest)
        self._expected = frozenset(manifest.tensors)

    def run(self, handles: Any, device_id: str, receiver: Receiver) -> None:
        """Apply what this worker's handle points at.

        Args:
            handles: by device id.
            device_id: of this worker.
            receiver: of this worker; told once all is proven, right before the first weight
                changes.

        Raises:
            UpdateRefused: there is no handle for this worker, or other tensors than were expected.
            ProtocolError, ManifestError: the handle is not what it should be.
            PlanRefused: the engine does not take these tensors.
            ProofFailed: they have other bytes than were exported.
            EnginePoisoned: the engine failed to load them; a full update cures it.
        """
        if not isinstance(handles, Mapping) or device_id not in handles:
            known = ", ".join(map(str, handles)) if isinstance(handles, Mapping) else repr(handles)
            raise UpdateRefused(
                f"there is no handle for {device_id}, got {known[:1000] or 'none'}",
                remedy="key handles by what report_device_id() says on each worker",
            )
        with open_handle(handles[device_id]) as opened:
            self._check(opened.manifest)
            opened.prove()
            self._check_tied(opened)
            receiver.overwrite()
            self._apply(opened, receiver)

    def _check(self, manifest: Manifest) -> None:
        if self._expected is not None and self._expected != frozenset(manifest.tensors):
            changed = self._expected.symmetric_difference(manifest.tensors)
            raise UpdateRefused(
                f"other tensors came than prepare_refit_info announced: {len(changed)} differ, "
                f"first {min(map(str, changed))}",
                remedy="call prepare_refit_info again with what you send now",
            )
        self._describe(manifest)

    def _describe(self, manifest: Manifest) -> None:
        if self._described == manifest.hash:
            return
        description = self._target.describe(manifest, whole=True)
        problems = [*description.problems, *self._untaken(manifest, description)]
        if problems:
            raise PlanRefused("this worker", problems, remedy=REMEDY)
        self._described, self._tied = manifest.hash, description.tied

    def _check_tied(self, opened: OpenedHandle) -> None:
        """Tensors that are one memory in the engine must have the same bytes."""
        names = [spec.name for spec in opened.manifest.tensors]
        problems = [
            Problem(
                "duplicate",
                names[one],
                f"is the same memory in the engine as {names[other]!r}, but has other bytes",
            )
            for one, other in self._tied
            if not opened.same_bytes(one, other)
        ]
        if problems:
            raise PlanRefused("this worker", problems, remedy="tie them in the trainer as well")

    def _untaken(self, manifest: Manifest, description: Description) -> Iterator[Problem]:
        """Tensors that are longer than what the engine can take of them: loaders narrow what they
        are given, and say nothing.

        No worker knows what the others take. So many workers, each with as much as this one, must
        at least make the whole.
        """
        boxes: dict[int, set[Box]] = defaultdict(set)
        for index, box in description.partial:
            boxes[index].add(box)
        for index, taken in boxes.items():
            spec = manifest.tensors[index]
            if union_numel(taken) * self._world_size < spec.numel:
                yield Problem(
                    "shape",
                    spec.name,
                    f"has shape {list(spec.shape)}, of which this worker takes only "
                    f"{union_numel(taken)} elements",
                )

    def _apply(self, opened: OpenedHandle, receiver: Receiver) -> None:
        try:
            self._target.apply(opened.weights())
        except Exception as error:
            reason = f"an update from handles failed while it was applied: {error}"
            self._target.restore()
            receiver.poison(reason)
            raise EnginePoisoned(
                reason, remedy="send a full update: it cures the engine without a restart"
            ) from error
        self._target.admit()


def _specs(tensors: Any) -> list[TensorSpec]:
    """Both shapes that the field uses: ``name: (shape, dtype)`` and ``name: {shape, dtype}``."""
    specs = []
    try:
        for name, info in dict(tensors).items():
            shape, dtype = (
                (info["shape"], info["dtype"]) if isinstance(info, Mapping) else tuple(info)
            )
            sides = tuple(int(side) for side in shape)
            specs.append(TensorSpec(str(name), re.sub(r"^torch\.", "", str(dtype)), sides))
    except (TypeError, ValueError, KeyError) as error:
        raise UpdateRefused(
            f"expected {{name: (shape, dtype)}}, got something else: {error}",
            remedy="for instance {'model.norm.weight': ([64], 'float32')}",
        ) from error
    return specs
