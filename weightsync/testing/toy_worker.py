"""One worker process of a `weightsync.testing.toy.ToyEngine`: a real receiver over a small module,
with faults on demand."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from weightsync.manifest import Manifest
from weightsync.module_target import ModuleTarget
from weightsync.receiver import Receiver
from weightsync.target import ApplyReport, StagedWeights, torch_dtype

__all__ = ["FaultyTarget", "main", "toy_module"]


class FaultyTarget(ModuleTarget):
    """A module target that fails on demand.

    Faults, all off by default:

        verify_flips_bit: position of a tensor whose first byte is digested wrongly
        verify_skips: position of a tensor that is not digested
        apply_raises: text of an exception raised after half of the tensors were written
        apply_kills: SIGKILL of this process, after half of the tensors were written
        verify_kills: SIGKILL of this process instead of an answer
        refuse_raises: requests cannot be refused
    """

    def __init__(self, module: torch.nn.Module, faults: dict[str, Any]) -> None:
        super().__init__(module, engine="toy")
        self.faults = faults

    def verify(
        self, manifest: Manifest, addresses: NDArray[np.uint64], seeds: NDArray[np.uint64]
    ) -> NDArray[np.uint64]:
        if self.faults.get("verify_kills"):
            os.kill(os.getpid(), signal.SIGKILL)
        digests = super().verify(manifest, addresses, seeds)
        if "verify_flips_bit" in self.faults:
            digests[self.faults["verify_flips_bit"], 0] ^= np.uint64(1)
        if "verify_skips" in self.faults:
            digests[self.faults["verify_skips"]] = 0
        return digests

    def refuse(self, reason: str) -> None:
        if "refuse_raises" in self.faults:
            raise OSError("no space for a mark")
        super().refuse(reason)

    def apply(self, weights: StagedWeights) -> ApplyReport:
        if "apply_raises" in self.faults or "apply_kills" in self.faults:
            tensors = self._tensors()
            with torch.no_grad():
                for number, (name, value) in enumerate(weights.tensors()):
                    if number >= max(len(tensors) // 2, 1):
                        break
                    tensors[name].copy_(value)
            if "apply_kills" in self.faults:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(self.faults["apply_raises"])
        return super().apply(weights)


def toy_module(shapes: dict[str, tuple[str, list[int]]]) -> torch.nn.Module:
    """A module whose ``state_dict`` has these names, dtypes and shapes, all zero."""
    root = torch.nn.Module()
    for name, (dtype, shape) in shapes.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        data = torch.zeros(shape, dtype=torch_dtype(dtype))
        module.register_parameter(leaf, torch.nn.Parameter(data, requires_grad=False))
    return root


def main() -> None:
    """Serve calls, one line of JSON each after a first that says who this is, until the standard
    input ends."""
    start = json.loads(sys.stdin.readline())
    target = FaultyTarget(toy_module(start["shapes"]), start["faults"])
    receiver = Receiver(target, rank=start["rank"], world_size=start["world_size"])
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        call = request.pop("call")
        if call == "join":
            receiver.join(request["path"], request["token"])
        elif call == "prepare":
            receiver.prepare()
        elif call == "apply":
            receiver.apply(request["update_id"])
        elif call == "finish":
            receiver.finish()
        elif call == "faults":
            target.faults = request["faults"][str(start["rank"])]
        elif call == "tensors":
            answer["tensors"] = {
                name: tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes().hex()
                for name, tensor in target._tensors().items()
            }
        elif call == "status":
            answer = {
                **msgspec.to_builtins(receiver.status()),
                "refused": target.refused,
                "resources": {
                    "fds": len(os.listdir("/proc/self/fd")),
                    "arenas": Path("/proc/self/maps").read_text().count("memfd:weightsync"),
                    "threads": threading.active_count(),
                },
            }
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
