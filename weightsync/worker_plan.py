"""What one worker holds of a manifest, as it said, and what must be found there."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weightsync.box import Box, union_numel
from weightsync.errors import DigestMismatch, ManifestError, ProtocolError
from weightsync.evidence import Evidence, Part, bytes_within, digest_part
from weightsync.holding import Holding, canonical, not_finite, spot_columns
from weightsync.manifest import DTYPE_BYTES, Manifest, TensorSpec
from weightsync.messages import Described, Found
from weightsync.plan.match import taken_box
from weightsync.proof import digest_of_digests
from weightsync.receipt import ProofLevel, WorkerProof

__all__ = ["LEVELS", "Expected", "WorkerPlan", "read_otherwise"]

LEVELS: tuple[ProofLevel, ...] = ("served", "spot", "received", "canary", "off")
"""From the strongest to the weakest."""
_SPOT = LEVELS.index("spot")


@dataclass(frozen=True, slots=True)
class Expected:
    """What must be found after one update.

    Attributes:
        manifest: of the update.
        evidence: the trainer's bytes.
        seed, seeds: of its digests, and of each tensor's, shape (n,).
        whole: digests of the tensors as they were sent, shape (n, 2).
        digests: of each worker's holdings, shape (k, 2).
    """

    manifest: Manifest
    evidence: Evidence
    seed: int
    seeds: NDArray[np.uint64]
    whole: NDArray[np.uint64]
    digests: tuple[NDArray[np.uint64], ...]


class WorkerPlan:
    """One worker's holdings, checked: they came from outside.

    Attributes:
        index: of each holding's tensor, shape (k,).
        partial: numbers of the holdings whose digest is not that of a whole tensor.
        reasons: by tensor, why it cannot be read back, not or not all of it.
        levels: of each tensor that can, shape (n,), as positions in `LEVELS`.

    Raises:
        ProtocolError: they cannot be.
    """

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
        self._spot = {h.index for h in described.holdings if h.level == "spot"}
        self._tied = _tied(name, manifest, described)
        self._add_uncovered(described)
        for index, root in self._tied.items():  # one memory, and the same bytes
            if root in self.reasons:
                self.reasons.setdefault(index, self.reasons[root])
            if root in self._spot:
                self._spot.add(index)
        self.levels = np.zeros(len(manifest), np.int64)
        self.levels[list(self._spot)] = _SPOT

    @property
    def slices(self) -> list[Part]:
        """What is held of tensors that are not held whole, and read in full."""
        served = [n for n in self.partial if self._holdings[n].level == "served"]
        return [self.part(number, 0) for number in served]

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
        if content is not None:
            # What is no evidence of what was sent any more excuses nothing.
            sent, whole = expected.whole[holding.index], _whole(content, spec, expected, holding)
            if not bool((whole == sent).all()):
                return read_otherwise(spec.name, sent, whole)
        if number in unread:
            # What is not finite spoils the whole product that it would be read back by. What other
            # workers hold of the tensor does not.
            size = DTYPE_BYTES[spec.dtype]
            if content is not None and not_finite(
                bytes_within(content, spec.shape, size, box), spec.dtype
            ):
                more[spec.name] = f"{holding.holder}: {unread[number]}"
                return None
            return DigestMismatch(
                spec.name, self.name, must[number].tobytes().hex(), unread[number], where
            )
        right = must[number]
        if content is not None:
            right = digest_part(
                content,
                spec.shape,
                DTYPE_BYTES[spec.dtype],
                self.part(number, expected.seed),
                expected.seeds[holding.index],
                functools.partial(canonical, dtype=spec.dtype),
            )
        if bool((right == digests[number]).all()):
            return None
        return DigestMismatch(
            spec.name, self.name, right.tobytes().hex(), digests[number].tobytes().hex(), where
        )

    def proof(self, found: Found, seed: int, more: Mapping[str, str]) -> WorkerProof:
        """
        Args:
            more: tensors that are unproven this time, and why.
        """
        names = [spec.name for spec in self._manifest.tensors]
        unproven = {names[index]: reason for index, reason in sorted(self.reasons.items())}
        for index, root in self._tied.items():
            if names[root] in more:
                unproven.setdefault(names[index], more[names[root]])
        unproven = {**unproven, **more}
        return WorkerProof(
            boxes=len(self._holdings),
            nbytes=self._nbytes,
            digest=digest_of_digests(seed, found.digests),
            seconds=found.seconds,
            spot=tuple(names[i] for i in sorted(self._spot) if names[i] not in unproven),
            unproven=unproven,
        )

    def _add_uncovered(self, described: Described) -> None:
        """What a worker takes must be held somewhere that it names, or be unproven."""
        taken: dict[int, list[Box]] = defaultdict(list)
        for part in described.partial:
            taken[part.index].append(taken_box(self.name, self._manifest, part))
        held: dict[int, set[Box]] = defaultdict(set)
        for holding, box in zip(described.holdings, self._boxes, strict=True):
            held[holding.index].add(box)
        for index, spec in enumerate(self._manifest.tensors):
            if index in self.reasons or index in self._tied or spec.numel == 0:
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


def read_otherwise(
    tensor: str, sent: NDArray[np.uint64], found: NDArray[np.uint64]
) -> DigestMismatch:
    """The trainer's bytes are not what was sent any more: nothing can be compared with them."""
    return DigestMismatch(
        tensor,
        "the trainer",
        sent.tobytes().hex(),
        found.tobytes().hex(),
        "the bytes as they are read once more",
    )


def _whole(
    content: NDArray[np.uint8], spec: TensorSpec, expected: Expected, holding: Holding
) -> NDArray[np.uint64]:
    part = Part(holding.index, (Box.whole(spec.shape),))
    size = DTYPE_BYTES[spec.dtype]
    return digest_part(content, spec.shape, size, part, expected.seeds[holding.index])


def _tied(name: str, manifest: Manifest, described: Described) -> dict[int, int]:
    """Tensors that are not held by themselves, but as another that is not held as a third: were
    they only to point at each other, nothing of them would be looked at."""
    held = {holding.index for holding in described.holdings}
    other: dict[int, int] = {}
    for one, two in described.tied:
        inside = 0 <= one < len(manifest) and 0 <= two < len(manifest)
        if not inside or manifest.tensors[one].shape != manifest.tensors[two].shape:
            raise ProtocolError(f"{name} described tensors {one} and {two} as tied")
        if one not in held:
            other[one] = two
    roots = {}
    for index in other:
        root, steps = index, 0
        while root in other:
            root, steps = other[root], steps + 1
            if steps > len(other):
                raise ProtocolError(f"{name} described tensor {index} as tied to nothing")
        roots[index] = root
    return roots


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
