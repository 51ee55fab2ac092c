"""A toy engine that serves a model: real worker processes that share it by tensor parallelism,
compute logits, cache prefixes and sleep.

    with ToyModelEngine(checkpoint(seed=1), workers=2) as engine:
        WeightSender(StateDictSource(checkpoint(seed=2)), [engine], proof="served").sync(2)
        engine.logits([3, 1, 4, 1, 5])

Each worker is ``python -m weightsync.testing.toy_model_worker``.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import save_file

from weightsync.deadline import Deadline
from weightsync.errors import UpdateRefused
from weightsync.testing.toy import Faults, ToyEngine
from weightsync.testing.toy_checkpoint import ToyConfig

__all__ = ["ToyModelEngine"]

CALL_SECONDS = 60.0


class ToyModelEngine(ToyEngine):
    """See `weightsync.testing.toy.ToyEngine`, and `weightsync.testing.toy_model.ToyModel` for what
    it serves.

    Args:
        weights: that it starts with, through its own loader, as from a checkpoint on disk.
        config: what kind of model.
        faults: by rank, as `weightsync.testing.toy_faults` knows them.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        *,
        config: ToyConfig | None = None,
        workers: int = 1,
        name: str = "toy",
        faults: Faults | None = None,
    ) -> None:
        folder = tempfile.mkdtemp(prefix="weightsync-toy-")
        try:
            save_file(dict(weights), os.path.join(folder, "model.safetensors"))
            first = {
                "config": dataclasses.asdict(config or ToyConfig()),
                "checkpoint": os.path.join(folder, "model.safetensors"),
                "store": os.path.join(folder, "store"),
            }
            self._start("weightsync.testing.toy_model_worker", first, name, workers, faults or {})
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # all workers have met and have loaded

    def reset_caches(self, deadline: Deadline, *, recompute: bool) -> None:
        self._called("reset_caches", deadline, "reset_caches")

    def logits(self, tokens: Sequence[int]) -> list[list[float]]:
        """After the last token: the target's and the draft's.

        Raises:
            UpdateRefused: a worker serves nothing at the moment.
        """
        found = self._ask("logits", tokens=list(tokens))
        for answer in found:
            if "refused" in answer:
                raise UpdateRefused(f"{self.name} serves nothing: {answer['refused']}")
        logits: list[list[float]] = found[0]["logits"]
        return logits

    def logprobs(self, prompt: Sequence[int], deadline: Deadline) -> list[float]:
        """Of each token after the first, by the target."""
        while self.is_paused(deadline):
            deadline.rest(0.01, f"{self.name} to be resumed")
        found = []
        for length in range(1, len(prompt)):
            after = torch.tensor(self.logits(prompt[:length])[0]).log_softmax(-1)
            found.append(float(after[prompt[length]]))
        return found

    def hashes(self) -> list[dict[str, str]]:
        """By worker: of every tensor of its model, loaded or not, derived or not."""
        return [answer["hashes"] for answer in self._ask("hashes")]

    def loads(self) -> list[dict[str, Any]]:
        """By worker: ``loads`` so far, and how often each layer was ``finalized`` in the last."""
        return self._ask("loads")

    def evidence(self) -> list[dict[str, Any]]:
        """By worker: what other systems would compare (`FaultyToyTarget.evidence`)."""
        return self._ask("evidence")

    def sleep(self, level: int) -> None:
        """1 keeps the weights on the host, 2 keeps nothing."""
        self._ask("sleep", level=level)

    def wake(self) -> None:
        """After `sleep`. What was given up has to be sent."""
        self._ask("wake")

    def _ask(self, call: str, **arguments: Any) -> list[dict[str, Any]]:
        return self.call_workers(call, Deadline.after(CALL_SECONDS), **arguments)
