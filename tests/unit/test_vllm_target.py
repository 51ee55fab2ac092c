"""What a vLLM worker's target remembers of manifests; of vLLM itself, nothing is started."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from weightsync.adapters.vllm import target as module
from weightsync.adapters.vllm.trace import Traced
from weightsync.errors import Problem
from weightsync.manifest import Manifest, TensorSpec
from weightsync.plan.trace import Trace
from weightsync.target import Description, Served

PART = Manifest((TensorSpec("norm.weight", "float32", (4,)),))


class Held:
    """Stands for what a model holds: one place."""

    def __init__(self, *_, **__) -> None:
        self.holdings, self.unproven = (), ()

    def look(self, seed: int, seeds: np.ndarray) -> Served:
        return Served(np.ones((1, 2), np.uint64))


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch):
    def described(config, manifest: Manifest, *, whole: bool) -> Traced:
        missing = (Problem("missing", "head.weight", "would stay what it is"),) if whole else ()
        return Traced(Description(missing), frozenset(), Trace((), {}, {}, {}))

    monkeypatch.setattr(module.trace, "describe", described)
    monkeypatch.setattr(module, "ServedModel", Held)
    monkeypatch.setattr(module, "unsupported_version", list)
    monkeypatch.setattr(module, "unsupported", lambda config: [])
    config = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=True))
    made = module.VllmTarget(torch.nn.Linear(1, 1), config, torch.device("cpu"))
    yield made
    made.close()


def test_a_look_that_is_refused_leaves_a_declared_parts_proof_alone(target) -> None:
    """Somebody asks whether the part is all of the model. It is not; the sender whose part it is
    goes on, and would be told of no place at all after its next update."""
    assert not target.describe(PART, whole=False).problems
    assert target.describe(PART, whole=True).problems
    assert len(target.served(PART, 1, np.zeros(1, np.uint64)).digests) == 1


def test_a_declared_part_that_was_forgotten_among_many_is_still_proven(target) -> None:
    target.describe(PART, whole=False)
    for number in range(module.MAX_LAYOUTS + 1):
        target.describe(Manifest((TensorSpec(f"{number}", "float32", (4,)),)), whole=False)
    assert len(target.served(PART, 1, np.zeros(1, np.uint64)).digests) == 1
