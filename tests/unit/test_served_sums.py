"""What parts must digest to is read once more from bytes that were proven: they must still be
those."""

from __future__ import annotations

import numpy as np
import pytest

from weightsync.digest import derive_seeds, digest_tensors
from weightsync.errors import ProofFailed
from weightsync.evidence import ArenaEvidence
from weightsync.holding import Holding
from weightsync.manifest import Manifest, TensorSpec
from weightsync.messages import Described, Partial
from weightsync.served import ServedPlan

MANIFEST = Manifest(
    [
        TensorSpec("cut", "float32", (6, 4)),
        TensorSpec("whole", "float32", (5,)),
        TensorSpec("shared", "int16", (4, 3)),
    ]
)


def rank(number: int) -> Described:
    rows = Holding(0, "cut", (3 * number, 0), (3, 4))
    # Both ranks hold the middle of `shared`: its parts add up to more than the whole.
    overlap = Holding(2, "shared", (number, 0), (3, 3))
    partial = tuple(Partial(h.index, h.offsets, h.lengths) for h in (rows, overlap))
    holdings = (rows, Holding(1, "whole", (0,), (5,)), overlap)
    return Described(number, MANIFEST.hash, (), partial, (), (), (), 0.0, holdings)


@pytest.fixture
def content() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, 256, spec.nbytes, np.uint8) for spec in MANIFEST.tensors]


def evidence_of(content: list[np.ndarray]) -> tuple[ArenaEvidence, np.ndarray, np.ndarray]:
    addresses = np.array([one.ctypes.data for one in content], np.uint64)
    seeds = derive_seeds(7, MANIFEST.identities)
    whole = digest_tensors(addresses, MANIFEST.nbytes, seeds)
    return ArenaEvidence(MANIFEST, addresses), seeds, whole


def test_parts_of_what_was_proven_are_expected(content: list[np.ndarray]) -> None:
    evidence, seeds, whole = evidence_of(content)
    plan = ServedPlan(MANIFEST, [(f"worker {n}", rank(n)) for n in range(2)])
    expected = plan.expect(evidence, 7, seeds, whole)
    halves = [digests[0] for digests in expected.digests]
    np.testing.assert_array_equal(sum(halves), whole[0])
    assert (halves[0] != halves[1]).any()


@pytest.mark.parametrize("at", [0, 48, 95])
def test_bytes_that_have_changed_since_are_noticed(content: list[np.ndarray], at: int) -> None:
    evidence, seeds, whole = evidence_of(content)
    plan = ServedPlan(MANIFEST, [(f"worker {n}", rank(n)) for n in range(2)])
    content[0][at] ^= 1
    with pytest.raises(ProofFailed, match="'cut'") as failure:
        plan.expect(evidence, 7, seeds, whole)
    assert [mismatch.tensor for mismatch in failure.value.mismatches] == ["cut"]
