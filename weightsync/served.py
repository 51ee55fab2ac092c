"""The sender's side of the proof of what models hold: what every holding of every worker must be,
and whether it is that.

A plan is made once per layout from what the workers said. For each update it works out what must be
found (`expect`), before any engine pauses; what was found is then compared (`judge`).
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from weightsync.box import Box, tiles_exactly
from weightsync.errors import (
    DigestMismatch,
    Problem,
    ProofFailed,
    ProtocolError,
    ServedMismatch,
)
from weightsync.evidence import Evidence, Part
from weightsync.manifest import Manifest
from weightsync.messages import Described, Found
from weightsync.receipt import LevelShare, ProofLevel, WorkerProof
from weightsync.worker_plan import LEVELS, Expected, WorkerPlan, read_otherwise

__all__ = ["LEVELS", "Expected", "Judge", "ServedPlan", "Verdict", "shares"]


class ServedPlan:
    """What the workers of one engine hold of one manifest.

    Args:
        workers: each one's name, and what it said.

    Attributes:
        levels: at which each tensor can be proven on all of them, shape (n,), as positions in
            `LEVELS`.
        hash: of what every worker takes of which tensor, and where it holds it.

    Raises:
        ProtocolError: a worker describes what cannot be.
    """

    def __init__(self, manifest: Manifest, workers: Sequence[tuple[str, Described]]) -> None:
        self.manifest = manifest
        self._workers = [WorkerPlan(name, manifest, described) for name, described in workers]
        self.levels = np.max([worker.levels for worker in self._workers], axis=0)
        self._tiles = _tiles(manifest, self._workers)
        content = msgspec.msgpack.encode(
            [manifest.hash, *((d.partial, d.tied, d.holdings, d.unproven) for _, d in workers)]
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

        Raises:
            ProofFailed: the evidence is not what these digests are of.
        """
        numbers: dict[Part, int] = {tile: number for number, tile in enumerate(self._tiles)}
        parts = [
            [numbers.setdefault(worker.part(i, seed), len(numbers)) for i in worker.partial]
            for worker in self._workers
        ]
        known = evidence.digests(list(numbers), seeds) if numbers else np.zeros((0, 2), np.uint64)
        self._check_sums(known[: len(self._tiles)], whole)
        digests = []
        for worker, its in zip(self._workers, parts, strict=True):
            expected = whole[worker.index]
            expected[worker.partial] = known[its]
            digests.append(expected)
        return Expected(self.manifest, evidence, seed, seeds, whole, tuple(digests))

    def _check_sums(self, known: NDArray[np.uint64], whole: NDArray[np.uint64]) -> None:
        """Parts that tile a tensor add up to it: what they are read from is still what was proven.

        Args:
            known: digests of the tiles.
        """
        index = np.array([tile.index for tile in self._tiles], np.int64)
        sums = np.zeros_like(whole)
        np.add.at(sums, index, known)
        tiled = np.zeros(len(self.manifest), np.bool_)
        tiled[index] = True
        wrong = np.flatnonzero(tiled & (sums != whole).any(axis=1)).tolist()
        if wrong:
            raise ProofFailed(
                [read_otherwise(self.manifest.tensors[i].name, whole[i], sums[i]) for i in wrong]
            )

    def judge(self, expected: Expected, found: Sequence[Found]) -> list[WorkerProof]:
        """Compare.

        Args:
            found: what each worker found.

        Returns:
            What each worker has proven.

        Raises:
            ServedMismatch: names every tensor, worker and place that differs.
            ProtocolError: a worker looked at another number of places, or at others.
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
            if any(not 0 <= number < len(must) for number in unread):
                raise ProtocolError(f"{worker.name} speaks of a place that it did not describe")
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


def _tiles(manifest: Manifest, workers: Sequence[WorkerPlan]) -> tuple[Part, ...]:
    """Parts that make up each tensor of which some is expected by itself. The holdings, each once,
    where all workers' together tile it exactly: it is cut among ranks, or into the pieces of a
    stack. Else all of it, which is read once more."""
    of_tensor: dict[int, dict[Part, None]] = defaultdict(dict)
    for worker in workers:
        for part in worker.slices:
            of_tensor[part.index][part] = None
        for index in worker.index[worker.partial].tolist():
            of_tensor.setdefault(index, {})
    tiles: list[Part] = []
    for index, parts in of_tensor.items():
        shape = manifest.tensors[index].shape
        exact = tiles_exactly([part.boxes[0] for part in parts], shape)
        tiles += parts if exact else [Part(index, (Box.whole(shape),))]
    return tuple(tiles)


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
        level: of all tensors, where nobody looks; else of those that cannot be read back.
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
                levels[plan.manifest.index[name]] = self._level
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
