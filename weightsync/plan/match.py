"""Do the two sides fit? Decided from what every worker of an engine said of one manifest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from weightsync.box import Box
from weightsync.errors import PlanRefused, Problem
from weightsync.manifest import Manifest
from weightsync.wire import Described

__all__ = ["check_descriptions"]


def check_descriptions(
    engine: str, manifest: Manifest, descriptions: Sequence[tuple[str, Described]]
) -> None:
    """Accept, or refuse by name.

    Args:
        descriptions: worker's name and what it said, for all workers of one engine.

    Raises:
        PlanRefused: a worker reported a problem, or all workers together leave a part of a tensor
            untaken.
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
    problems += _untaken(manifest, [described for _, described in descriptions])
    if problems:
        raise PlanRefused(engine, problems, remedy=_remedy(problems))


def _untaken(manifest: Manifest, descriptions: Sequence[Described]) -> list[Problem]:
    """Tensors that are longer than what all workers together take of them.

    Loaders narrow what they are given; one that is given too much takes a part of it and says
    nothing.
    """
    boxes: dict[int, set[Box]] = defaultdict(set)
    takers: dict[int, int] = defaultdict(int)
    for described in descriptions:
        for index in {part.index for part in described.partial}:
            takers[index] += 1
        for part in described.partial:
            boxes[part.index].add(Box(part.offsets, part.lengths))
    problems = []
    for index, found in boxes.items():
        spec = manifest.tensors[index]
        if takers[index] < len(descriptions):
            continue  # another worker takes it whole
        taken = sum(box.numel for box in found)
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
    if "loader" in kinds:
        advice.append("see the engine's log for the loader's own error")
    return "; ".join(advice) or "compare the names above with the engine's checkpoint"
