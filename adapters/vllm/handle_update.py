"""A full update from handles (`weightsync.handles`), on one vLLM worker."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec

from weightsync.errors import EnginePoisoned, PlanRefused, UpdateRefused, reason_of
from weightsync.inspection import described, found
from weightsync.manifest import Manifest, TensorSpec
from weightsync.messages import Described
from weightsync.opened_handle import OpenedHandle, open_handle
from weightsync.plan.match import check_descriptions, tied_apart
from weightsync.receiver import Receiver
from weightsync.target import Target

__all__ = ["HandleUpdate"]


class Report(msgspec.Struct, frozen=True):
    """What a worker tells the others.

    Attributes:
        error: why it cannot, or None.
        described: what its engine says of the tensors, where it got that far.
    """

    error: str | None
    described: Described | None = None


class HandleUpdate:
    """Expects, checks, proves and applies, on all workers of an engine or on none.

    All of them are in the same call at the same time. They tell each other twice how things stand:
    before the weights of any are touched, when everybody must have proven everything; and after
    they were loaded, when a failure of one poisons all.

    Args:
        target: the worker's.
        rank: of this worker.
        exchange: gives everybody what everybody says, by rank; called equally often by all workers,
            whatever happens on them.
    """

    def __init__(self, target: Target, rank: int, exchange: Callable[[bytes], list[bytes]]) -> None:
        self._target = target
        self._rank = rank
        self._exchange = exchange
        self._expected: frozenset[TensorSpec] | None = None
        self._known: dict[str, Described] = {}

    def expect(self, tensors: Any) -> None:
        """Say beforehand what will come, and have it refused now if it does not fit.

        Args:
            tensors: ``{name: (shape, dtype)}``, the dtype a torch dtype or its name.

        Raises:
            UpdateRefused: it is no such mapping, or another worker refuses.
            PlanRefused, ManifestError: the engine does not take these tensors.
        """
        self._expected = None
        with self._agreed() as agree:
            manifest = Manifest(_specs(tensors))
            agree(manifest)
        self._expected = frozenset(manifest.tensors)

    def run(self, handles: Any, device_id: Callable[[], str], receiver: Receiver) -> None:
        """Apply what this worker's handle points at.

        Args:
            handles: by device id.
            device_id: of this worker; asked where a failure is told to the others.
            receiver: of this worker.

        Raises:
            UpdateRefused: there is no handle for this worker, other tensors came than were
                expected, or another worker refuses; nothing was touched on any.
            ProtocolError, ManifestError: the handle is not what it should be; likewise.
            PlanRefused, ProofFailed: the tensors do not fit, or have other bytes than were
                exported; likewise.
            TransportError: the others were not heard before anything was touched.
            EnginePoisoned: a worker failed to load them, or was not heard afterwards; a full update
                cures the engine.
        """
        with ExitStack() as stack:
            with self._agreed() as agree:
                opened = stack.enter_context(open_handle(_of(handles, device_id())))
                self._check_expected(opened.manifest)
                opened.prove()
                described = agree(opened.manifest)
                _check_tied(opened, described)
            self._apply(opened, described, receiver)
        self._target.admit()

    @contextmanager
    def _agreed(self) -> Iterator[Callable[[Manifest], Described]]:
        """The block's checks succeed on all workers, or on none. It must hand its manifest to what
        it is given."""
        manifest: Manifest | None = None
        described: Described | None = None
        failure: BaseException | None = None

        def agree(found: Manifest) -> Described:
            nonlocal manifest, described
            manifest, described = found, self._describe(found)
            return described

        try:
            yield agree
        except BaseException as error:  # after an interrupt, too, the others wait for an answer
            failure = error
        try:
            reports = self._tell(failure, described)
        except Exception as lost:
            if failure is not None:
                raise failure from lost
            raise
        if failure is not None:
            raise failure
        failed = _failed(reports)
        if failed:
            raise UpdateRefused(
                "nothing was touched: "
                + "; ".join(f"worker {rank} refuses: {error}" for rank, error in failed.items())
            )
        if manifest is None:
            raise UpdateRefused("nothing was announced")
        all_described = [(f"worker {rank}", r.described) for rank, r in enumerate(reports)]
        if any(d is None or d.manifest_hash != manifest.hash for _, d in all_described):
            raise UpdateRefused("workers were handed different tensors")
        pairs = [(name, found) for name, found in all_described if found is not None]
        check_descriptions("this engine", manifest, pairs)

    def _apply(self, opened: OpenedHandle, described: Described, receiver: Receiver) -> None:
        failure: BaseException | None = None
        try:
            plan, expected = opened.expect(described)
            receiver.apply_whole(opened.weights())
            plan.judge(
                expected, [found(self._target, opened.manifest, expected.seed, expected.seeds)]
            )
        except BaseException as error:
            failure = error
        try:
            failed = _failed(self._tell(failure))
        except BaseException as lost:
            # Who does not hear the others may be the only one that serves the new weights.
            failed = {self._rank: reason_of(failure or lost)}
            failure = failure or lost
        if not failed:
            return
        reason = "an update from handles failed while it was applied: " + "; ".join(
            f"worker {rank}: {error}" for rank, error in failed.items()
        )
        receiver.poison(reason)
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        raise EnginePoisoned(
            reason, remedy="send a full update: it cures the engine without a restart"
        ) from failure

    def _tell(
        self, failure: BaseException | None, described: Described | None = None
    ) -> list[Report]:
        """Tell the others how it went here; what all say, by rank."""
        report = Report(None if failure is None else reason_of(failure), described)
        answers = self._exchange(msgspec.msgpack.encode(report))
        return [msgspec.msgpack.decode(answer, type=Report) for answer in answers]

    def _check_expected(self, manifest: Manifest) -> None:
        if self._expected is not None and self._expected != frozenset(manifest.tensors):
            changed = self._expected.symmetric_difference(manifest.tensors)
            raise UpdateRefused(
                f"other tensors came than prepare_refit_info announced: {len(changed)} differ, "
                f"first {min(map(str, changed))}",
                remedy="call prepare_refit_info again with what you send now",
            )

    def _describe(self, manifest: Manifest) -> Described:
        found = self._known.get(manifest.hash)
        if found is None:
            description = self._target.describe(manifest, whole=True)
            found = described(self._rank, manifest, description, seconds=0.0)
            self._known = {manifest.hash: found}
        return found


def _failed(reports: list[Report]) -> dict[int, str]:
    """What went wrong, by rank."""
    return {rank: r.error for rank, r in enumerate(reports) if r.error is not None}


def _of(handles: Any, device_id: str) -> Any:
    if not isinstance(handles, Mapping) or device_id not in handles:
        known = ", ".join(map(str, handles)) if isinstance(handles, Mapping) else repr(handles)
        raise UpdateRefused(
            f"there is no handle for {device_id}, got {known[:1000] or 'none'}",
            remedy="key handles by what report_device_id() says on each worker",
        )
    return handles[device_id]


def _check_tied(opened: OpenedHandle, found: Described) -> None:
    """Tensors that are one memory in the engine must have the same bytes."""
    names = [spec.name for spec in opened.manifest.tensors]
    problems = [
        tied_apart(names[one], names[other])
        for one, other in found.tied
        if not opened.same_bytes(one, other)
    ]
    if problems:
        raise PlanRefused("this worker", problems, remedy="tie them in the trainer as well")


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
