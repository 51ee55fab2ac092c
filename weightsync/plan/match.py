"""Do the two sides fit? Decided from what every worker of an engine said of one manifest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from weightsync.box import Box, tiles_exactly, union_numel
from weightsync.errors import ManifestError, PlanRefused, Problem, ProtocolError
from weightsync.manifest import Manifest
from weightsync.messages import Described, Partial

__all__ = ["check_descriptions", "taken_box", "tied_apart"]


def tied_apart(name: str, other: str) -> Problem:
    """Two tensors that are one memory in an engine hold different bytes in the trainer."""
    detail = f"is the same memory in the engine as {other!r}, but has other bytes"
    return Problem("duplicate", name, detail)


def check_descriptions(
    engine: str, manifest: Manifest, descriptions: Sequence[tuple[str, Described]]
) -> None:
    """Accept, or refuse by name.

    Args:
        descriptions: worker's name and what it said, for all workers of one engine.

    Raises:
        PlanRefused: a worker reported a problem, or all workers together leave a part of a tensor
            untaken.
        ProtocolError: a worker described a part that the manifest does not have.
    """
    by_problem: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for worker, described in descriptions:
        for problem in described.problems:
            by_problem[(problem.kind, problem.name, problem.detail)].append(worker)
    everybody = len(descriptions)
    problems = [
        Problem(kind, name, detail, () if len(workers) == everybody else tuple(workers))  # type: ignore[arg-type]
        for (kind, name, detail), workers in by_problem.items()
    ]
    problems += _untaken(manifest, descriptions)
    if problems:
        raise PlanRefused(engine, problems, remedy=_remedy(problems))


def _untaken(manifest: Manifest, descriptions: Sequence[tuple[str, Described]]) -> list[Problem]:
    """Tensors that are longer than what all workers together take of them.

    Loaders narrow what they are given; one that is given too much takes a part of it and says
    nothing.
    """
    boxes: dict[int, set[Box]] = defaultdict(set)
    takers: dict[int, int] = defaultdict(int)
    for worker, described in descriptions:
        for part in described.partial:
            boxes[part.index].add(taken_box(worker, manifest, part))
        for index in {part.index for part in described.partial}:
            takers[index] += 1
    problems = []
    for index, found in boxes.items():
        spec = manifest.tensors[index]
        if takers[index] < len(descriptions):
            continue  # another worker takes it whole
        if tiles_exactly(list(found), spec.shape):
            continue
        taken = union_numel(found)  # workers may share a part, as those that repeat a kv head do
        if taken < spec.numel:
            problems.append(
                Problem(
                    "shape",
                    spec.name,
                    f"has shape {list(spec.shape)}, of which the engine takes {taken} of "
                    f"{spec.numel} elements and would leave the rest",
                )
            )
    return problems


def taken_box(worker: str, manifest: Manifest, part: Partial) -> Box:
    """The box of a part that came from outside.

    Raises:
        ProtocolError: the manifest has no such part.
    """
    try:
        box = Box(part.offsets, part.lengths)
    except ManifestError as error:
        raise ProtocolError(f"{worker} described an impossible part: {error}") from error
    if not 0 <= part.index < len(manifest) or not box.within(manifest.tensors[part.index].shape):
        raise ProtocolError(f"{worker} described {box} of tensor {part.index}, which has none")
    return box


def _remedy(problems: Sequence[Problem]) -> str:
    kinds = {problem.kind for problem in problems}
    advice = []
    if "dtype" in kinds:
        wanted = {p.detail.rpartition(" ")[2] for p in problems if p.kind == "dtype"}
        dtype = wanted.pop() if len(wanted) == 1 else "{pattern: dtype, ...}"
        advice.append(f"declare the cast at the source, as in ModuleSource(model, dtype={dtype})")
    if kinds & {"unknown", "missing", "shape"}:
        advice.append(
            "send the tensors of the checkpoint that this engine was started with, all of them and "
            "under its names; an engine of another architecture needs a restart with that model"
        )
    if "engine" in kinds:
        advice.append("start the engine without what is named above; it is not supported yet")
    if "loader" in kinds:
        advice.append("see the engine's log for the loader's own error")
    return "; ".join(advice) or "compare the names above with the engine's checkpoint"
