"""What is wrong with a trace: tensors that the engine does not know, parameters that would stay
what they were, casts, shapes.

A full update writes every parameter exactly once. A partial one, declared as such, may leave
parameters alone, but never a part of one, nor one of several that the engine reloads together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch

from weightsync.box import Box, tiles_exactly
from weightsync.errors import Problem
from weightsync.manifest import Manifest
from weightsync.plan.trace import Copy, Trace
from weightsync.target import Description

__all__ = ["lint"]


def lint(
    trace: Trace,
    manifest: Manifest,
    parameters: Mapping[str, torch.Tensor],
    packed: Mapping[str, Sequence[str]],
    *,
    buffers: Mapping[str, torch.Tensor] | None = None,
    whole: bool = True,
    units: Mapping[str, str] | None = None,
) -> Description:
    """Turn a trace into a description.

    Args:
        trace: of ``manifest`` through the engine's loader.
        parameters: of the twin, by every name, aliases included; only shapes and dtypes are read.
        packed: the engine's own ``{fused module: [checkpoint modules]}``, to name what is missing;
            may be empty.
        buffers: the twin's persistent ones, by name.
        whole: the manifest is meant to be all of the model; otherwise it is a declared part, and
            what it does not touch at all stays what it is.
        units: which parameters the engine reloads together: to each name, aliases included, that of
            its unit. By default those of one module.

    Returns:
        Problems, the boxes of tensors that this worker takes only a part of, tensors that are other
        names of one that the engine loads, and persistent buffers that stay what they are.
    """
    by_tensor: dict[int, list[Copy]] = defaultdict(list)
    by_parameter: dict[str, list[Copy]] = defaultdict(list)
    for copy in trace.copies:
        by_tensor[copy.index].append(copy)
        by_parameter[copy.parameter].append(copy)
    tied = _tied(trace, manifest, by_tensor, by_parameter)
    problems: list[Problem] = []
    partial: list[tuple[int, Box]] = []
    for index, spec in enumerate(manifest.tensors):
        if index in trace.failures:
            problems.append(_failure(spec.name, spec.shape, trace.failures[index], parameters))
            continue
        copies = by_tensor.get(index, [])
        if not copies:
            if index not in trace.unlooked and index not in tied and spec.numel:
                problems.append(
                    Problem("unknown", spec.name, "the engine's loader has no place for it")
                )
            continue
        problems += _casts(spec.name, copies)
        boxes = {copy.source.box for copy in copies if copy.source and copy.source.box}
        if all(c.source and c.source.box for c in copies) and Box.whole(spec.shape) not in boxes:
            partial += [(index, box) for box in sorted(boxes, key=lambda b: b.offsets) if box]
    if trace.unlooked:
        names = [manifest.tensors[index].name for index in trace.unlooked[:3]]
        problems.append(
            Problem(
                "loader",
                names[0],
                f"and {len(trace.unlooked) - 1} more were not looked at, too many others failed",
            )
        )
    # A second tensor for the same memory is judged by its bytes, which only the sender has.
    for copies in by_parameter.values():
        copies[:] = [copy for copy in copies if copy.index not in tied]
    problems += _uncovered(trace, by_parameter, parameters, packed, None if whole else units or {})
    untouched = sorted(name for name in buffers or {} if not by_parameter.get(name))
    return Description(
        tuple(problems),
        tuple(partial),
        tied=tuple(sorted(tied.items())),
        also=tuple(_also(trace, manifest, by_parameter)),
        untouched=tuple(untouched),
    )


def _also(
    trace: Trace, manifest: Manifest, by_parameter: Mapping[str, Sequence[Copy]]
) -> Iterator[tuple[int, str]]:
    """What else the memory that a tensor goes to is called: the head of a model that ties it, when
    only the embedding comes."""
    for name, canonical in trace.aliases.items():
        for index in {copy.index for copy in by_parameter.get(canonical, [])}:
            if name not in manifest.index and name != canonical:
                yield index, name


def _tied(
    trace: Trace,
    manifest: Manifest,
    by_tensor: Mapping[int, Sequence[Copy]],
    by_parameter: Mapping[str, Sequence[Copy]],
) -> dict[int, int]:
    """Positions of tensors that are but another name of one that is loaded, to the position of that
    one: the head of a model that ties it to its embedding.

    The loader skips such a tensor, or writes it over the other.
    """
    found: dict[int, int] = {}
    for index, spec in enumerate(manifest.tensors):
        copies = by_tensor.get(index, [])
        if copies:
            places = [(copy.parameter, copy.destination) for copy in copies]
        else:
            canonical = trace.aliases.get(spec.name, spec.name)
            if canonical == spec.name:
                continue
            places = [
                (copy.parameter, copy.destination) for copy in by_parameter.get(canonical, [])
            ]
        if not places:
            continue
        for other in {copy.index for name, _ in places for copy in by_parameter[name]} - {index}:
            same = [(copy.parameter, copy.destination) for copy in by_tensor[other]]
            later = not copies or other < index
            if later and same == places and manifest.tensors[other].shape == spec.shape:
                found.setdefault(index, other)
    return found


def _failure(
    name: str, shape: tuple[int, ...], error: str, parameters: Mapping[str, torch.Tensor]
) -> Problem:
    """Name a loader's exception for what it means."""
    same = parameters.get(name)
    if same is not None and tuple(same.shape) != shape:
        return Problem(
            "shape", name, f"has shape {list(shape)}, the engine's is {list(same.shape)}"
        )
    if error.startswith("KeyError") or "no module or parameter" in error:
        return Problem("unknown", name, f"the engine's model has no such tensor ({error})")
    return Problem("shape", name, f"shape {list(shape)} does not fit the engine's loader ({error})")


def _casts(name: str, copies: Sequence[Copy]) -> list[Problem]:
    wrong = {
        copy.destination_dtype for copy in copies if copy.source_dtype != copy.destination_dtype
    }
    return [
        Problem("dtype", name, f"is sent as {copies[0].source_dtype}, the engine holds {dtype}")
        for dtype in sorted(wrong, key=str)
    ]


def _uncovered(
    trace: Trace,
    by_parameter: Mapping[str, Sequence[Copy]],
    parameters: Mapping[str, torch.Tensor],
    packed: Mapping[str, Sequence[str]],
    units: Mapping[str, str] | None,
) -> list[Problem]:
    """Parameters that are not written exactly once: all of them, or, with ``units``, those of the
    units that are touched at all."""

    def unit(name: str) -> str:
        return (units or {}).get(name, name.rpartition(".")[0])

    touched = {unit(name) for name, copies in by_parameter.items() if copies}
    fills: dict[str, list[Box]] = defaultdict(list)
    for name, region, _ in trace.fills:
        if region.box is not None and region.box not in fills[name]:
            fills[name].append(region.box)
    problems = []
    for name, parameter in parameters.items():
        if trace.aliases.get(name, name) != name or parameter.numel() == 0:
            continue
        # A weight that is reloaded without its bias would leave noise in that.
        if units is not None and unit(name) not in touched:
            continue
        copies = by_parameter.get(name, [])
        boxes = [copy.destination.box for copy in copies] + fills[name]
        known = [box for box in boxes if box is not None]
        written = sum(math.prod(copy.destination.shape) for copy in copies)
        written += sum(box.numel for box in fills[name])
        # What is no box cannot be laid beside the others: there, only the amount is judged.
        exact = tiles_exactly([box for box in known if box.numel], parameter.shape)
        if exact or (len(known) < len(boxes) and written == parameter.numel()):
            continue
        parts = _parts(name, packed)
        if written > parameter.numel():
            detail = f"would be written {written} times for {parameter.numel()} elements"
            problems.append(Problem("duplicate", name, detail))
        else:
            detail = (
                f"the engine's {name} {list(parameter.shape)} would get {written} of "
                f"{parameter.numel()} elements"
            )
            problems.append(Problem("missing", parts, detail))
    return problems


def _parts(name: str, packed: Mapping[str, Sequence[str]]) -> str:
    """The checkpoint's names for an engine's fused parameter, as far as the engine tells them."""
    module, _, leaf = name.rpartition(".")
    parent, _, last = module.rpartition(".")
    if last in packed:
        inner = ", ".join(packed[last])
        return f"{parent}.{{{inner}}}.{leaf}" if parent else f"{{{inner}}}.{leaf}"
    return name
