"""One engine of two worker processes, one sender; one fault at a time goes through a real `sync`,
and a good full update cures it.

Beside weightsync's own proof, the checks that other systems make are made on the same fault, each
where they make it, and against the trainer's own tensors, which is the most that they could see:
XOR and xxh3 of the bytes that arrived, before they are loaded; sums, and the first five elements,
of the engine's parameters as they are read back by name. Sums are compared
within 1e-6 of the sum of magnitudes, first elements within 0.002: tighter ones would not stand
another order of summation, and these are the tolerances in use. Where weightsync stops an update
before it is loaded, what arrived stands for what would have been loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from catalogue import Case

from weightsync import Canary, WeightSender
from weightsync.errors import EnginePoisoned, ProofFailed, ServedMismatch, WeightSyncError
from weightsync.manifest import Manifest
from weightsync.sources import StateDictSource
from weightsync.testing.toy_checkpoint import checkpoint
from weightsync.testing.toy_engine import ToyModelEngine
from weightsync.testing.toy_faults import fingerprint, wire_sums
from weightsync.testing.toy_model import ToyConfig, ToyModel

__all__ = ["RIVALS", "Outcome", "Rig"]

WORKERS = 2
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
RIVALS = ("sum", "xor", "xxh3", "first 5")
SUM_TOLERANCE, FIRST_TOLERANCE = 1e-6, 0.002


@dataclass(slots=True)
class Outcome:
    """What came of one fault.

    Attributes:
        error: that `sync` raised.
        named: tensors that it names, and workers.
        rivals: which of `RIVALS` saw it.
        cured: a good full update went through afterwards.
    """

    error: WeightSyncError | None
    named: set[str] = field(default_factory=set)
    workers: set[str] = field(default_factory=set)
    rivals: frozenset[str] = frozenset()
    cured: bool = False


class Rig:
    """Starts the engine on entry, and ends it on exit."""

    def __init__(self) -> None:
        self._seed = 1
        self.weights = _values(1)
        self.source = StateDictSource(self.weights)
        self.engine = ToyModelEngine(_values(0), workers=WORKERS)
        self.sender = WeightSender(
            self.source, [self.engine], proof="served", bucket_bytes=4096, deadline=30
        )
        self.sender.sync("first")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.sender.close()
        self.engine.close()

    def run(self, case: Case | None) -> Outcome:
        """One update with a fault, or with none, and one without."""
        self._renew()
        faults: dict[int, dict[str, Any]] = {rank: {"evidence": True} for rank in range(WORKERS)}
        if case is not None and case.fault is not None:
            for rank in case.workers:
                faults[rank] |= case.fault
        self.engine.set_faults(faults)
        if case is not None and case.sender is not None:
            case.sender(self.sender)
        if case is not None and case.canary:
            self.sender._canary = self._canary
        try:
            self.sender.sync(f"{self._seed}")
            outcome = Outcome(None)
        except WeightSyncError as error:
            outcome = _named(error)
        finally:
            for patched, name in (
                (self.sender, "stage"),
                (self.sender._outbox, "push"),
                (self.engine, "reset_caches"),
                (self.engine, "begin"),
                (self.source, "pieces"),
            ):
                vars(patched).pop(name, None)
            self.sender._canary = None
        outcome.rivals = self._rivals(applied=not _stopped_before(outcome.error))
        self.engine.set_faults({})
        self._renew()
        receipt = self.sender.sync(f"{self._seed}")
        outcome.cured = set(receipt.levels) == {"served"}
        return outcome

    def complaints(self, case: Case, outcome: Outcome) -> list[str]:
        """What the error fails to say, or says wrongly."""
        if outcome.error is None:
            return ["sync() returned a receipt"]
        found, text = [], str(outcome.error)
        named = {n for n in case.names if any(one.startswith(n) for one in outcome.named)}
        if not case.workers:  # the sender's own fault
            named |= {name for name in case.names if name in text}
        found += [f"{name} is not named" for name in sorted(set(case.names) - named)]
        found += [f"{n} is blamed" for n in sorted(outcome.named - set(case.names)) if case.exact]
        must = {f"{self.engine.name}, worker {rank}" for rank in case.workers}
        # Of what arrives each worker looks at a share: not each of them sees what is wrong with it.
        right = outcome.workers == must
        if isinstance(outcome.error, ProofFailed) and must:
            right = bool(outcome.workers) and outcome.workers <= must
        if not right:
            found.append(f"{sorted(outcome.workers)} are blamed, not {sorted(must)}")
        found += [f"the message lacks {part!r}" for part in ("\nWhat to do: ",) if part not in text]
        if not any(name in text for name in case.names):
            found.append("the message names no tensor")
        return found

    def _canary(self) -> Canary:
        """What the trainer thinks of a prompt."""
        model = ToyModel(ToyConfig())
        model.load(self.weights.items())
        logprobs = []
        for length in range(1, len(PROMPT)):
            after = model.logits(PROMPT[:length])[0].log_softmax(-1)
            logprobs.append(float(after[PROMPT[length]]))
        return Canary(PROMPT, logprobs, tolerance=1e-3)

    def _renew(self) -> None:
        """Another step of the trainer."""
        self._seed += 1
        for name, value in _values(self._seed).items():
            self.weights[name].copy_(value)

    def _rivals(self, *, applied: bool) -> frozenset[str]:
        manifest = self.source.manifest()
        truth = wire_sums(manifest, _addresses(manifest, self.weights))
        seen: set[str] = set()
        for answer in self.engine.evidence():
            for name, (xor, xxh3, arrived) in answer["wire"].items():
                seen |= {"xor"} if xor != truth[name][0] else set()
                seen |= {"xxh3"} if xxh3 != truth[name][1] else set()
                if not applied:
                    seen |= _differs(arrived, truth[name][2])
            for name, offsets, lengths, found in answer["model"] if applied else ():
                place = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
                seen |= _differs(found, fingerprint(self.weights[name][place]))
        return frozenset(seen)


def _values(seed: int) -> dict[str, torch.Tensor]:
    found = checkpoint(seed)
    found["layers.1.norm1.weight"][5] = 0.0  # a zero whose sign can be lost
    return found


def _addresses(manifest: Manifest, weights: Mapping[str, torch.Tensor]) -> Any:
    return np.array([weights[spec.name].data_ptr() for spec in manifest.tensors], np.uint64)


def _differs(found: list[Any] | None, truth: list[Any]) -> set[str]:
    """Which of the checks of values see a difference; both, where a tensor cannot be read."""
    if found is None:
        return {"sum", "first 5"}
    total = abs(found[0] - truth[0]) <= SUM_TOLERANCE * truth[1]
    first = all(abs(a - b) <= FIRST_TOLERANCE for a, b in zip(found[2], truth[2], strict=True))
    return ({"sum"} if not total else set()) | ({"first 5"} if not first else set())


def _named(error: WeightSyncError) -> Outcome:
    outcome = Outcome(error)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ProofFailed):
            outcome.named |= {m.tensor for m in cause.mismatches}
            outcome.workers |= {m.worker for m in cause.mismatches}
        if isinstance(cause, ServedMismatch):
            outcome.named |= {fault.name for fault in cause.faults}
            outcome.workers |= {worker for fault in cause.faults for worker in fault.workers}
        cause = cause.__cause__
    return outcome


def _stopped_before(error: WeightSyncError | None) -> bool:
    return error is not None and not isinstance(error, EnginePoisoned)
