"""What a sender and all workers agree on before the first byte of an update moves: which tensors,
of which dtypes and shapes, and that every worker's engine takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weightsync.control import ask_all, gather
from weightsync.deadline import Deadline
from weightsync.errors import PlanRefused, Problem, ProtocolError
from weightsync.manifest import Manifest
from weightsync.messages import Ack, Described, Mode
from weightsync.outbox import Outbox
from weightsync.plan.match import check_descriptions, tied_apart
from weightsync.roster import Roster
from weightsync.served import ServedPlan
from weightsync.sources.base import Source, same_bytes
from weightsync.sources.selection import Selection, named

__all__ = ["Agreed", "Agreement"]

MAX_VIEWS = 16
"""Parts of a source that are remembered at once."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """What one update is of.

    Attributes:
        source: of exactly these tensors.
        manifest: of that source.
        untouched: by engine, persistent buffers that no tensor goes to.
        plans: by engine, where it holds these tensors.
    """

    source: Source
    manifest: Manifest
    untouched: dict[str, tuple[str, ...]]
    plans: dict[str, ServedPlan]


@dataclass(frozen=True, slots=True)
class _Taken:
    """What all workers said of one layout.

    Attributes:
        tied: ``(position, position of another)`` that any worker holds as one memory.
        everywhere: those that all do.
        also: ``(position, name)``: what else a tensor's memory is called in an engine.
        untouched, plans: see `Agreed`.
    """

    tied: frozenset[tuple[int, int]]
    everywhere: frozenset[tuple[int, int]]
    also: frozenset[tuple[int, str]]
    untouched: dict[str, tuple[str, ...]]
    plans: dict[str, ServedPlan]


class Agreement:
    """Asks once per layout and session, and compares again on every update.

    Args:
        roster: of the engines.
        outbox: the memory that goes with a layout.
        mode: of all updates.
    """

    def __init__(self, roster: Roster, outbox: Outbox, mode: Mode) -> None:
        self._roster = roster
        self._outbox = outbox
        self._mode: Mode = mode
        self._taken: dict[tuple[str, bool], _Taken] = {}
        self._announced: tuple[str, bool] | None = None
        self._views: dict[tuple[int, frozenset[str], tuple[tuple[str, str], ...]], Selection] = {}

    def reach(self, source: Source, only: Sequence[str] | None, deadline: Deadline) -> Agreed:
        """Connect if need be, tell all workers what will come, and let them refuse it.

        Args:
            only: names or patterns of the tensors of a declared partial update; None for all.

        Raises:
            PlanRefused: an engine does not take these tensors; says all that is wrong.
            SourceError: the source has no such tensors, or cannot be read.
        """
        if self._roster.open(deadline):
            self._taken, self._announced = {}, None
            self._check_modes()
        whole = only is None
        view: Source = source
        if only is not None:
            view = self._select(source, named(source, only), {})
        manifest = view.manifest()
        taken = self._taken.get((manifest.hash, whole))
        if taken is None:
            taken = self._announce(manifest, whole, deadline)
        self._check_also(source, manifest, taken)
        twice = self._same(view, manifest, taken)
        if twice:
            names = frozenset(manifest.index).difference(twice)
            view = self._select(view, names, twice)
            manifest = view.manifest()
        if self._announced != (manifest.hash, whole) or not self._fits(manifest):
            taken = self._announce(manifest, whole, deadline)
        else:
            taken = self._taken[manifest.hash, whole]  # of what is sent, not of what was asked for
        return Agreed(view, manifest, taken.untouched, taken.plans)

    def _check_modes(self) -> None:
        for engine in self._roster.engines:
            workers = self._roster.of(engine)
            unable = [worker.name for worker in workers if self._mode not in worker.modes]
            if unable:
                detail = (
                    f"this engine takes updates {' or '.join(workers[0].modes)}, not {self._mode}"
                )
                problem = Problem("engine", f"mode={self._mode!r}", detail, tuple(unable))
                raise PlanRefused(
                    engine.name, [problem], remedy="create the sender with mode='staged'"
                )

    def _fits(self, manifest: Manifest) -> bool:
        return self._outbox.fit(manifest, len(self._roster.workers))

    def _announce(self, manifest: Manifest, whole: bool, deadline: Deadline) -> _Taken:
        self._announced = None
        workers = self._roster.workers
        self._outbox.fit(manifest, len(workers))
        layouts, fds = self._outbox.layouts(manifest, whole=whole)
        ask_all(workers, layouts, Ack, deadline, fds=fds)
        ties: list[frozenset[tuple[int, int]]] = []
        untouched, plans = {}, {}
        also: set[tuple[int, str]] = set()
        for engine in self._roster.engines:
            engine.prepare(deadline)
            mine = self._roster.of(engine)
            answers = gather(mine, Described, deadline, belongs_to=manifest.hash)
            pairs = [(worker.name, answer) for worker, answer in zip(mine, answers, strict=True)]
            check_descriptions(engine.name, manifest, pairs)
            plans[engine.name] = ServedPlan(manifest, pairs)
            ties += [_checked(worker, manifest, found) for worker, found in pairs]
            also |= {pair for answer in answers for pair in answer.also}
            names = {name for answer in answers for name in answer.untouched}
            if names:
                untouched[engine.name] = tuple(sorted(names))
        self._announced = (manifest.hash, whole)
        taken = _Taken(
            frozenset().union(*ties),
            frozenset(ties[0]).intersection(*ties),
            frozenset(also),
            untouched,
            plans,
        )
        self._taken[manifest.hash, whole] = taken
        return taken

    def _check_also(self, source: Source, manifest: Manifest, taken: _Taken) -> None:
        """Of a declared part: what else its tensors are called in an engine must be the same in the
        trainer, or it would change without having been named.

        Raises:
            PlanRefused: it is not.
        """
        whole = source.manifest()
        for index, name in sorted(taken.also):
            if not 0 <= index < len(manifest):
                raise ProtocolError(f"a worker described tensor {index}, which is not there")
            one, other = manifest.tensors[index], whole.index.get(name)
            if other is None or name == one.name:
                continue
            spec = whole.tensors[other]
            equal = (spec.dtype, spec.shape) == (one.dtype, one.shape)
            if not equal or not same_bytes(source, whole, whole.index[one.name], other):
                raise self._untied([tied_apart(one.name, name)])

    def _same(self, view: Source, manifest: Manifest, taken: _Taken) -> dict[str, str]:
        """Tensors that need not be sent, being the same bytes as another: ``{name: other}``.

        Raises:
            PlanRefused: two tensors that are one memory in an engine have different bytes.
        """
        same: dict[str, str] = {}
        problems = []
        for index, other in sorted(taken.tied):
            one, two = manifest.tensors[index], manifest.tensors[other]
            if one.dtype == two.dtype and same_bytes(view, manifest, index, other):
                if (index, other) in taken.everywhere:
                    same[one.name] = two.name
                continue
            problems.append(tied_apart(one.name, two.name))
        if problems:
            raise self._untied(problems)
        return same

    def _untied(self, problems: Sequence[Problem]) -> PlanRefused:
        return PlanRefused(
            ", ".join(engine.name for engine in self._roster.engines),
            problems,
            remedy="tie them in the trainer as well, or start the engine with "
            "tie_word_embeddings=False (--hf-overrides), so that each has its own memory",
        )

    def _select(self, source: Source, names: frozenset[str], twice: dict[str, str]) -> Selection:
        """A view of some tensors, with what it has worked out before."""
        key = (id(source), names, tuple(twice.items()))
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            # It holds its source, whose id is therefore not given to another.
            found = self._views[key] = Selection(source, names, twice)
        return found


def _checked(worker: str, manifest: Manifest, found: Described) -> frozenset[tuple[int, int]]:
    """Pairs that came from outside."""
    for index, other in found.tied:
        inside = 0 <= index < len(manifest) and 0 <= other < len(manifest)
        if not inside or index == other:
            raise ProtocolError(f"{worker} described tensors {index} and {other} as tied")
        if manifest.tensors[index].shape != manifest.tensors[other].shape:
            raise ProtocolError(f"{worker} described tensors of different shapes as tied")
    return frozenset(found.tied)
