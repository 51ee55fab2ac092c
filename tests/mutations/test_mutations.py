"""Every fault of the catalogue makes `sync` fail, with an error that names the tensor, the worker
and the next step; and a good full update cures it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from catalogue import CASES, Case
from rig import PROMPT, Rig

from weightsync.testing.toy_engine import ToyModelEngine

pytestmark = pytest.mark.mutations


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig() as made:
        yield made


def test_without_a_fault_nothing_is_found(rig: Rig) -> None:
    outcome = rig.run(None)
    assert outcome.error is None and outcome.cured
    assert outcome.rivals == frozenset(), "the other checks raise no false alarm"


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.title)
def test_a_fault_is_found_and_named_and_cured(rig: Rig, case: Case) -> None:
    outcome = rig.run(case)
    assert rig.complaints(case, outcome) == []
    assert outcome.cured


def test_after_all_faults_the_engine_equals_a_fresh_one(rig: Rig) -> None:
    with ToyModelEngine(rig.weights, workers=rig.engine.workers) as fresh:
        assert rig.engine.logits(PROMPT) == fresh.logits(PROMPT)
        assert rig.engine.hashes() == fresh.hashes()


def test_faults_are_distinct() -> None:
    assert len({case.title for case in CASES}) == len(CASES) >= 60
    kinds = [str((case.fault, case.workers, case.sender)) for case in CASES]
    assert len(set(kinds)) == len(CASES)
