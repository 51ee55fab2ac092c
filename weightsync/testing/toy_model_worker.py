"""One worker process of a `weightsync.testing.toy_engine.ToyModelEngine`: a real receiver over its
part of a model that computes, with faults on demand."""

from __future__ import annotations

import hashlib
import json
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from weightsync.testing.toy_checkpoint import ToyConfig
from weightsync.testing.toy_faults import FaultyToyTarget
from weightsync.testing.toy_layers import Ranks
from weightsync.testing.toy_model import ToyModel
from weightsync.testing.toy_worker import Call, FaultyReceiver, hexed, serve

__all__ = ["main"]

GROUP_SECONDS = 60.0
"""How long the workers wait for one another."""


def calls(target: FaultyToyTarget) -> dict[str, Call]:
    """What this worker answers beside what every toy does."""
    model = target.model

    def logits(request: dict[str, Any]) -> dict[str, Any]:
        if target.refused is not None:
            return {"refused": target.refused}
        if model.asleep:
            return {"refused": "asleep"}
        found = model.logits(request["tokens"])
        return {"logits": [value.tolist() for value in found]}

    def hashes(request: dict[str, Any]) -> dict[str, Any]:
        found = hexed(target.everything())
        return {"hashes": {n: hashlib.blake2b(b.encode()).hexdigest() for n, b in found.items()}}

    def sleep(request: dict[str, Any]) -> dict[str, Any]:
        model.sleep(request["level"])
        if request["level"] == 2:
            target.refuse("its weights were given up to sleep; send a full update")
        return {}

    def wake(request: dict[str, Any]) -> dict[str, Any]:
        model.wake()
        return {}

    def reset_caches(request: dict[str, Any]) -> dict[str, Any]:
        model.reset_caches()
        return {}

    def loads(request: dict[str, Any]) -> dict[str, Any]:
        return {"loads": model.loads, "finalized": model.finalized}

    def tensors(request: dict[str, Any]) -> dict[str, Any]:
        return {"tensors": hexed(target.everything())}

    def evidence(request: dict[str, Any]) -> dict[str, Any]:
        return target.evidence()

    own = (logits, hashes, sleep, wake, reset_caches, loads, tensors, evidence)
    return {call.__name__: call for call in own}


def main() -> None:
    """A worker, told who it is by the first line."""
    start = json.loads(sys.stdin.readline())
    torch.set_num_threads(1)
    ranks = Ranks(start["rank"], start["world_size"])
    if ranks.size > 1:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(start["store"], ranks.size),  # type: ignore[attr-defined]
            rank=ranks.rank,
            world_size=ranks.size,
            timeout=timedelta(seconds=GROUP_SECONDS),
        )
    model = ToyModel(ToyConfig(**start["config"]), ranks)
    model.load(load_file(start["checkpoint"]).items())
    target = FaultyToyTarget(model, start["faults"])
    receiver = FaultyReceiver(target, rank=ranks.rank, world_size=ranks.size)
    serve(ranks.rank, target, receiver, calls(target))


if __name__ == "__main__":
    main()
