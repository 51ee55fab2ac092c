"""The sender's side of the proof of what models hold: what every holding of every worker must be,
and whether it is that.

A plan is made once per layout from what the workers said. For each update it works out what must be
found (`expect`), before any engine pauses; what was found is then compared (`judge`).
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from weightsync.box import Box, union_numel
from weightsync.errors import (
    DigestMismatch,
    ManifestError,
    Problem,
    ProtocolError,
    ServedMismatch,
)
from weightsync.evidence import Evidence, Part, digest_part
from weightsync.holding import Holding, canonical, not_finite, spot_columns
from weightsync.manifest import DTYPE_BYTES, Manifest
from weightsync.messages import Described, Found
from weightsync.receipt import LevelShare, ProofLevel, WorkerProof

__all__ = ["LEVELS", "Expected", "Judge", "ServedPlan", "Verdict", "shares"]

LEVELS: tuple[ProofLevel, ...] = ("served", "spot", "received", "canary", "off")
"""From the strongest to the weakest."""
_SPOT, _RECEIVED = 1, 2


@dataclass(frozen=True, slots=True)
class Expected:
    """What must be found after one update.

    Attributes:
        manifest: of the update.
        evidence: the trainer's bytes.
        seed, seeds: of its digests, and of each tensor's, shape (n,).
        digests: of each worker's holdings, shape (k, 2).
    """

    manifest: Manifest
    evidence: Evidence
    seed: int
    seeds: NDArray[np.uint64]
    digests: tuple[NDArray[np.uint64], ...]


class ServedPlan:
    """What the workers of one engine hold of one manifest.

    Args:
        workers: each one's name, and what it said.

    Attributes:
        levels: at which each tensor can be proven on all of them, shape (n,), as positions in
            `LEVELS`.
        hash: of what every worker takes and holds.

    Raises:
        ProtocolError: a worker describes what cannot be.
    """

    def __init__(self, manifest: Manifest, workers: Sequence[tuple[str, Described]]) -> None:
        self.manifest = manifest
        self._workers = [_Worker(name, manifest, described) for name, described in workers]
        self.levels = np.max([worker.levels for worker in self._workers], axis=0)
        content = msgspec.msgpack.encode(
            [(d.partial, d.tied, d.holdings, d.unproven) for _, d in workers]
        )
        self.hash = hashlib.blake2b(content, digest_size=32).hexdigest()

    def expect(
        self,
        evidence: Evidence,
        seed: int,
        seeds: NDArray[np.uint64],
        whole: NDArray[np.uint64],
    ) -> Expected:
        """What must be found after an update.

        Args:
            evidence: its bytes; must last until `judge`.
            seed, seeds: of its digests, and of each tensor's, shape (n,).
            whole: digests of its tensors, shape (n, 2).
        """
        numbers: dict[Part, int] = {}
        parts = [
            [numbers.setdefault(worker.part(i, seed), len(numbers)) for i in worker.partial]
            for worker in self._workers
        ]
        known = evidence.digests(list(numbers), seeds) if numbers else np.zeros((0, 2), np.uint64)
        digests = []
        for worker, its in zip(self._workers, parts, strict=True):
            expected = whole[worker.index]
            expected[worker.partial] = known[its]
            digests.append(expected)
        return Expected(self.manifest, evidence, seed, seeds, tuple(digests))

    def judge(self, expected: Expected, found: Sequence[Found]) -> list[WorkerProof]:
        """Compare.

        Args:
            found: what each worker found.

        Returns:
            What each worker has proven.

        Raises:
            ServedMismatch: names every tensor, worker and place that differs.
            ProtocolError: a worker looked at another number of places.
        """
        wrong: list[DigestMismatch] = []
        faults: list[Problem] = []
        proofs = []
        for worker, must, its in zip(self._workers, expected.digests, found, strict=True):
            faults += [Problem(f.kind, f.name, f.detail, (worker.name,)) for f in its.faults]
            if its.faults and not its.digests and len(must):
                continue
            if len(its.digests) != must.nbytes:
                raise ProtocolError(
                    f"{worker.name} looked at {len(its.digests) // 16} places, expected {len(must)}"
                )
            digests = np.frombuffer(its.digests, "<u8").reshape(-1, 2)
            unread = dict(its.unread)
            differing = set(np.flatnonzero((digests != must).any(axis=1)).tolist())
            more: dict[str, str] = {}
            for number in sorted(differing | unread.keys()):
                problem = worker.compare(number, expected, must, digests, unread, more)
                if problem is not None:
                    wrong.append(problem)
            proofs.append(worker.proof(its, expected.seed, more))
        if wrong or faults:
            raise ServedMismatch(wrong, faults)
        return proofs


class _Worker:
    """One worker's holdings, checked: they came from outside."""

    def __init__(self, name: str, manifest: Manifest, described: Described) -> None:
        self.name = name
        self._manifest = manifest
        self._holdings = described.holdings
        boxes = [_checked(name, manifest, holding) for holding in described.holdings]
        self._boxes = boxes
        self.index = np.array([holding.index for holding in described.holdings], np.int64)
        self.partial = [
            number
            for number, (holding, box) in enumerate(zip(described.holdings, boxes, strict=True))
            if holding.level == "spot" or box.lengths != manifest.tensors[holding.index].shape
        ]
        self._nbytes = sum(
            box.numel * DTYPE_BYTES[manifest.tensors[holding.index].dtype]
            for holding, box in zip(described.holdings, boxes, strict=True)
        )
        self.reasons = _reasons(name, manifest, described)
        self._spot = frozenset(h.index for h in described.holdings if h.level == "spot")
        tied = dict(_tied(name, manifest, described))
        self._add_uncovered(described, tied)
        self.levels = np.zeros(len(manifest), np.int64)
        self.levels[list(self._spot)] = _SPOT
        self.levels[list(self.reasons)] = _RECEIVED
        for index, other in tied.items():
            self.levels[index] = self.levels[other]  # one memory, and the same bytes

    def part(self, number: int, seed: int) -> Part:
        """What of its tensor a holding's digest is of."""
        holding, box = self._holdings[number], self._boxes[number]
        if holding.level == "served":
            return Part(holding.index, (box,))
        columns = spot_columns(seed, holding.holder, box.lengths[-1])
        return Part(
            holding.index,
            tuple(
                Box((*box.offsets[:-1], box.offsets[-1] + column), (*box.lengths[:-1], 1))
                for column in columns
            ),
        )

    def compare(
        self,
        number: int,
        expected: Expected,
        must: NDArray[np.uint64],
        digests: NDArray[np.uint64],
        unread: Mapping[int, str],
        more: dict[str, str],
    ) -> DigestMismatch | None:
        """A holding that does not look as it should: is it another value, or one that cannot be
        read back?

        Args:
            more: tensors that are unproven this time, to be added to.
        """
        holding, box = self._holdings[number], self._boxes[number]
        spec = self._manifest.tensors[holding.index]
        where = f"{holding.holder}, {_slice(box)}"
        content = expected.evidence.content(holding.index) if holding.by_value else None
        if number in unread:
            # What is not finite spoils the whole product that it would be read back by.
            if content is not None and not_finite(content, spec.dtype):
                more[spec.name] = f"{holding.holder}: {unread[number]}"
                return None
            return DigestMismatch(
                spec.name, self.name, must[number].tobytes().hex(), unread[number], where
            )
        right = must[number]
        if content is not None:
            right = digest_part(
                canonical(content, spec.dtype),
                spec.shape,
                DTYPE_BYTES[spec.dtype],
                self.part(number, expected.seed),
                expected.seeds[holding.index],
            )
        if bool((right == digests[number]).all()):
            return None
        return DigestMismatch(
            spec.name, self.name, right.tobytes().hex(), digests[number].tobytes().hex(), where
        )

    def proof(self, found: Found, seed: int, more: Mapping[str, str]) -> WorkerProof:
        names = [spec.name for spec in self._manifest.tensors]
        unproven = {names[index]: reason for index, reason in sorted(self.reasons.items())}
        digest = hashlib.blake2b(seed.to_bytes(8, "little") + found.digests, digest_size=32)
        return WorkerProof(
            boxes=len(self._holdings),
            nbytes=self._nbytes,
            digest=digest.hexdigest(),
            seconds=found.seconds,
            spot=tuple(names[index] for index in sorted(self._spot - self.reasons.keys())),
            unproven={**unproven, **more},
        )

    def _add_uncovered(self, described: Described, tied: Mapping[int, int]) -> None:
        """What a worker takes must be held somewhere that it names, or be unproven."""
        taken: dict[int, list[Box]] = defaultdict(list)
        for part in described.partial:
            taken[part.index].append(Box(part.offsets, part.lengths))
        held: dict[int, set[Box]] = defaultdict(set)
        for holding, box in zip(described.holdings, self._boxes, strict=True):
            held[holding.index].add(box)
        for index, spec in enumerate(self._manifest.tensors):
            if index in self.reasons or index in tied or spec.numel == 0:
                continue
            boxes = taken.get(index) or [Box.whole(spec.shape)]
            if set(boxes) <= held[index]:
                continue
            both = {
                common
                for box in boxes
                for other in held[index]
                if (common := box.intersect(other)) is not None
            }
            read, all_ = union_numel(both), union_numel(boxes)
            if read < all_:
                self.reasons[index] = f"only {read} of {all_} elements can be read back"


def _tied(name: str, manifest: Manifest, described: Described) -> Iterator[tuple[int, int]]:
    """Tensors that are not held by themselves, but as another."""
    held = {holding.index for holding in described.holdings}
    for index, other in described.tied:
        if not (0 <= index < len(manifest) and 0 <= other < len(manifest)):
            raise ProtocolError(f"{name} described tensors {index} and {other} as tied")
        if index not in held:
            yield index, other


def _reasons(name: str, manifest: Manifest, described: Described) -> dict[int, str]:
    for index, _ in described.unproven:
        if not 0 <= index < len(manifest):
            raise ProtocolError(f"{name} speaks of tensor {index}, which is not there")
    return dict(described.unproven)


def _checked(name: str, manifest: Manifest, holding: Holding) -> Box:
    try:
        box = holding.box
    except ManifestError as error:
        raise ProtocolError(f"{name} describes an impossible holding: {error}") from error
    if not 0 <= holding.index < len(manifest):
        raise ProtocolError(f"{name} holds a part of tensor {holding.index}, which is not there")
    spec = manifest.tensors[holding.index]
    if not box.within(spec.shape) or (holding.level == "spot" and not spec.shape):
        raise ProtocolError(f"{name} holds {box} of {spec.name!r}, which has {list(spec.shape)}")
    return box


def _slice(box: Box) -> str:
    sides = zip(box.offsets, box.lengths, strict=True)
    return "[" + ", ".join(f"{first}:{first + length}" for first, length in sides) + "]"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one engine has proven.

    Attributes:
        proofs: of its workers; None where nobody looked at what they hold.
        levels: of each tensor, shape (n,), as positions in `LEVELS`.
        shares: how much of the manifest is at each level.
        plan_hash: see `ServedPlan`.
    """

    proofs: list[WorkerProof] | None
    levels: NDArray[np.int64]
    shares: dict[ProofLevel, LevelShare]
    plan_hash: str


class Judge:
    """Says what one engine has proven of one update.

    Args:
        expected: what its models must hold; None where nobody is to look.
        level: of all tensors, where nobody looks.
    """

    def __init__(self, plan: ServedPlan, expected: Expected | None, level: ProofLevel) -> None:
        self._plan = plan
        self._expected = expected
        self._level = LEVELS.index(level)

    @property
    def looks(self) -> bool:
        """Whether it wants to know what models hold."""
        return self._expected is not None

    def verdict(self, found: Sequence[Found | None]) -> Verdict:
        """
        Args:
            found: what each worker says that its model holds.

        Raises:
            ServedMismatch: it is something else.
            ProtocolError: a worker did not look.
        """
        plan = self._plan
        if self._expected is None:
            levels = np.full(len(plan.manifest), self._level)
            return Verdict(None, levels, shares(plan.manifest, levels), plan.hash)
        looked = [one for one in found if one is not None]
        if len(looked) != len(found):
            raise ProtocolError("a worker did not say what its model holds")
        proofs = plan.judge(self._expected, looked)
        levels = plan.levels.copy()
        for proof in proofs:
            for name in proof.unproven:
                levels[plan.manifest.index[name]] = LEVELS.index("received")
        return Verdict(proofs, levels, shares(plan.manifest, levels), plan.hash)


def shares(manifest: Manifest, levels: NDArray[np.int64]) -> dict[ProofLevel, LevelShare]:
    """How much of a manifest is at each level, from the strongest.

    Args:
        levels: of each tensor, shape (n,), as positions in `LEVELS`.
    """
    found: dict[ProofLevel, LevelShare] = {}
    for number, level in enumerate(LEVELS):
        at = levels == number
        if at.any():
            found[level] = LevelShare(int(at.sum()), int(manifest.nbytes[at].sum()))
    return found
