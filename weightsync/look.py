"""Proof without transfer: do engines hold what the trainer has, whoever brought it there?

    receipt = weightsync.prove(source, engines)      # or raises, and names what differs

Nothing moves and nothing changes; a sender that holds an engine keeps it. The digests are those of
an update.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from weightsync.canary import Canary, CanaryMaker, check_canary, make_canary
from weightsync.commit import Flipped
from weightsync.control import Worker, ask_all, close_all, gather
from weightsync.deadline import Deadline
from weightsync.digest import derive_seeds
from weightsync.engines.base import Engine
from weightsync.errors import Problem, ServedMismatch, UpdateRefused, WeightSyncError
from weightsync.evidence import SourceEvidence
from weightsync.listener import Listener
from weightsync.manifest import Manifest
from weightsync.messages import Ack, Described, Held, Inspect
from weightsync.plan.match import check_descriptions, tied_apart
from weightsync.receipt import EngineReceipt, ProofLevel, Receipt, WorkerReceipt, chain
from weightsync.receipt_log import ReceiptLog
from weightsync.record import write_receipt
from weightsync.served import LEVELS, Judge, ServedPlan, shares
from weightsync.sources.base import Source, digest_source, same_bytes
from weightsync.update import Phase

__all__ = ["prove"]

REMEDY = (
    "if the engine should hold these weights, whoever loaded what is named above got it wrong: "
    "send them with weightsync, or restart the engine from them"
)


def prove(
    source: Source,
    engines: Iterable[Engine],
    *,
    proof: Literal["served", "canary"] = "served",
    canary: CanaryMaker | None = None,
    receipts: Path | str | None = None,
    deadline: float = 600.0,
) -> Receipt:
    """Compare what engines hold with what a source has, tensor by tensor.

    The trainer must stand still meanwhile. An engine goes on serving; it looks at its weights
    between two steps.

    Args:
        source: what they should hold: all of the model.
        engines: from `weightsync.connect` or `weightsync.engine`.
        proof: ``"served"``, as of `weightsync.WeightSender`; or ``"canary"`` alone.
        canary: makes a `weightsync.Canary`; each engine is asked.
        receipts: a file that the receipt is appended to, as of `weightsync.WeightSender`.
        deadline: seconds for all of it, but for the lock of `receipts`, which may take half a
            minute more.

    Returns:
        A receipt whose version is what the engines report, "" where they report none. Tensors that
        cannot be read back are at level ``canary`` where one was asked, else ``off``: nobody has
        handed anything to anybody.

    Raises:
        ServedMismatch: an engine holds something else; names tensor, worker and place.
        CanaryFailed: an engine thinks otherwise than the trainer.
        PlanRefused: source and engine are not of one model.
        SourceError, ConnectError, TransportError: something could not be read or reached.
        UpdateRefused: no engine, two of one name, or arguments that do not go together; an engine
            changed its version meanwhile, is amid an update whose version does not count yet, is
            poisoned and refuses to serve what it holds, or is paused and was to be asked a canary.
        ReceiptLogError: `receipts` is no file for receipts.
        ReceiptNotWritten: nothing differs, but the receipt could not be written there.
    """
    engines = tuple(engines)
    names = [engine.name for engine in engines]
    if not names or len(set(names)) != len(names):
        raise UpdateRefused(f"engines of different names are needed, got {names}")
    if proof not in ("served", "canary") or (proof == "canary" and canary is None):
        raise UpdateRefused(
            f"proof is 'served', or 'canary' with one, got {proof!r} and canary={canary!r}"
        )
    log = None if receipts is None else ReceiptLog(receipts)
    limit = Deadline.after(deadline)
    manifest = source.manifest()
    before = [engine.version(limit) for engine in engines]
    versions = dict(zip(names, before, strict=True))
    look = _Look(source, manifest, limit, make_canary(canary), versions)
    flipped = look.served(engines) if proof == "served" else look.canaries(engines)
    for engine in engines:
        look.check_version(engine)
    receipt = write_receipt(
        source,
        manifest,
        flipped,
        label=", ".join(sorted({version for version in before if version is not None})),
        update_id=look.look_id,
        mode="look",
        only=(),
        seed=look.seed,
        digests=look.digests if proof == "served" else None,
        untouched=look.untouched,
        seconds=look.seconds,
    )
    receipt = chain(receipt)
    return receipt if log is None else log.append(receipt)


class _Look:
    """One look at several engines.

    Args:
        versions: by engine, what it reports.
    """

    def __init__(
        self,
        source: Source,
        manifest: Manifest,
        deadline: Deadline,
        canary: Canary | None,
        versions: Mapping[str, str | None],
    ) -> None:
        self._versions = versions
        self.look_id = f"look-{secrets.token_hex(4)}"
        self.seed = secrets.randbits(64)
        self.digests: NDArray[np.uint64] = np.zeros((len(manifest), 2), np.uint64)
        self.untouched: dict[str, tuple[str, ...]] = {}
        self.seconds: dict[str, float] = {}
        self._source = source
        self._manifest = manifest
        self._deadline = deadline
        self._canary = canary
        self._seeds = derive_seeds(self.seed, manifest.identities)

    def canaries(self, engines: Sequence[Engine]) -> list[Flipped]:
        """Ask what the engines think, and nothing else."""
        return _each(engines, self._think)

    def served(self, engines: Sequence[Engine]) -> list[Flipped]:
        """Look at what all workers of all engines hold."""
        started = time.perf_counter()
        self.digests = digest_source(self._source, self._manifest, self._seeds)
        self.seconds["read"] = time.perf_counter() - started
        listener = Listener()
        workers: list[Worker] = []
        try:
            tokens = {engine.name: secrets.token_hex(8) for engine in engines}
            expected = {tokens[engine.name]: (engine.name, engine.workers) for engine in engines}
            for engine in engines:
                engine.open_session(listener.path, tokens[engine.name], self._deadline)
            workers = listener.accept(expected, self._deadline, only_look=True)
            return _each(
                engines,
                lambda engine: self._at(engine, [w for w in workers if w.engine == engine.name]),
            )
        finally:
            close_all(workers)
            listener.close()

    def check_version(self, engine: Engine) -> None:
        """
        Raises:
            UpdateRefused: it is another one than when the look began.
        """
        version = self._versions[engine.name]
        if engine.version(self._deadline) != version:
            raise UpdateRefused(
                f"{engine.name} served version {version} when the look at it began, and serves "
                f"another now: what was found is of either",
                remedy="do not update an engine while you prove what it holds; prove it again",
            )

    def _at(self, engine: Engine, workers: Sequence[Worker]) -> Flipped:
        manifest, deadline = self._manifest, self._deadline
        started = time.perf_counter()
        question = Inspect(
            look_id=self.look_id,
            tensors=manifest.tensors,
            manifest_hash=manifest.hash,
            whole=True,
            seed=self.seed,
        )
        ask_all(workers, question, Ack, deadline)
        engine.look(deadline)
        said = gather(workers, Described, deadline, belongs_to=manifest.hash)
        pairs = [(worker.name, described) for worker, described in zip(workers, said, strict=True)]
        check_descriptions(engine.name, manifest, pairs)
        held = gather(workers, Held, deadline, belongs_to=self.look_id)
        self._check_rests(engine, workers, held)
        plan = ServedPlan(manifest, pairs)
        self._check_tied(said)
        evidence = SourceEvidence(self._source, manifest)
        expected = plan.expect(evidence, self.seed, self._seeds, self.digests)
        level: ProofLevel = "off" if self._canary is None else "canary"
        try:
            verdict = Judge(plan, expected, level).verdict([one.found for one in held])
        except ServedMismatch as error:
            self.check_version(engine)  # else it may hold what it should by now
            raise ServedMismatch(error.mismatches, error.faults, remedy=REMEDY) from error
        _check_serves(engine, workers, held)
        untouched = tuple(sorted({name for one in said for name in one.untouched}))
        if untouched:
            self.untouched[engine.name] = untouched
        seconds = {"look": time.perf_counter() - started}
        gap = self._ask(engine, seconds)
        proofs = verdict.proofs or []
        receipt = EngineReceipt(
            name=engine.name,
            engine=workers[0].description,
            pause="none",
            paused_seconds=0.0,
            seconds=seconds,
            workers=tuple(
                WorkerReceipt(worker.name, worker.device, 0.0, 0.0, 0.0, proof)
                for worker, proof in zip(workers, proofs, strict=True)
            ),
            plan_hash=verdict.plan_hash,
            levels=verdict.shares,
            canary=gap,
        )
        return Flipped(receipt, verdict.levels)

    def _think(self, engine: Engine) -> Flipped:
        levels = np.full(len(self._manifest), LEVELS.index("canary"))
        seconds: dict[str, float] = {}
        gap = self._ask(engine, seconds)
        receipt = EngineReceipt(
            name=engine.name,
            engine=engine.name,
            pause="none",
            paused_seconds=0.0,
            seconds=seconds,
            workers=(),
            plan_hash="",
            levels=shares(self._manifest, levels),
            canary=gap,
        )
        return Flipped(receipt, levels)

    def _ask(self, engine: Engine, seconds: dict[str, float]) -> float | None:
        """Let it think about the canary, if there is one.

        Returns:
            The largest difference of any log-probability.
        """
        if self._canary is None:
            return None
        if engine.is_paused(self._deadline):
            raise UpdateRefused(
                f"{engine.name} is paused, and a canary needs it to run",
                remedy="resume it first, or prove without a canary",
            )
        started = time.perf_counter()
        gap = check_canary(engine, self._canary, self._deadline)
        seconds["canary"] = time.perf_counter() - started
        return gap

    def _check_rests(self, engine: Engine, workers: Sequence[Worker], held: Sequence[Held]) -> None:
        """What lies in a model while an update is applied is of no version that its engine reports.

        Raises:
            UpdateRefused: an update is under way there.
        """
        reported = self._versions[engine.name]
        for worker, one in zip(workers, held, strict=True):
            status = one.status
            unset = status.phase == Phase.COMMITTED.value and status.holds_pause
            if status.phase == Phase.APPLYING.value or (
                unset and reported is not None and reported != status.version
            ):
                raise UpdateRefused(
                    f"{worker.name} is amid an update, and {engine.name} reports version "
                    f"{reported!r} until that has ended",
                    remedy="do not update an engine while you prove what it holds; prove it again",
                )

    def _check_tied(self, said: Sequence[Described]) -> None:
        """Tensors that are one memory in an engine must have the same bytes in the source.

        Raises:
            ServedMismatch: they do not: the engine can hold only one of the two.
        """
        tensors = self._manifest.tensors
        apart: list[Problem] = []
        for index, other in sorted({pair for described in said for pair in described.tied}):
            equal = tensors[index].dtype == tensors[other].dtype
            if not equal or not same_bytes(self._source, self._manifest, index, other):
                apart.append(tied_apart(tensors[index].name, tensors[other].name))
        if apart:
            raise ServedMismatch([], apart, remedy=REMEDY)


def _check_serves(engine: Engine, workers: Sequence[Worker], held: Sequence[Held]) -> None:
    """
    Raises:
        UpdateRefused: it holds what it should, but of no version, and refuses to serve it.
    """
    for worker, one in zip(workers, held, strict=True):
        if one.status.poisoned is not None:
            raise UpdateRefused(
                f"nothing differs in what {engine.name} can read back, but it refuses to serve "
                f"it: {worker.name} is poisoned: {one.status.poisoned}",
                remedy="sync a full update: it cures the engine without a restart",
            )


def _each(engines: Sequence[Engine], action: Callable[[Engine], Flipped]) -> list[Flipped]:
    """All engines are looked at before an error is raised: the first, with the others' texts as
    notes."""
    flipped: list[Flipped] = []
    errors: list[WeightSyncError] = []
    for engine in engines:
        try:
            flipped.append(action(engine))
        except WeightSyncError as error:
            error.add_note(f"at {engine.name}")
            errors.append(error)
    for other in errors[1:]:
        errors[0].add_note(f"and: {other}")
    if errors:
        raise errors[0]
    return flipped
