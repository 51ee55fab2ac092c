"""One worker process of a `weightsync.testing.toy.ToyEngine`: a real receiver over a small module,
with faults on demand."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from weightsync.deadline import Deadline
from weightsync.errors import UpdateRefused
from weightsync.manifest import Manifest
from weightsync.messages import Message
from weightsync.module_target import ModuleTarget
from weightsync.receiver import Receiver
from weightsync.session import Session
from weightsync.staging import Incoming
from weightsync.target import ApplyReport, Description, Served, StagedWeights, torch_dtype
from weightsync.testing.toy_logprobs import bias_of

__all__ = [
    "Call",
    "FaultyReceiver",
    "FaultyTarget",
    "hexed",
    "main",
    "resources",
    "serve",
    "toy_module",
]


class FaultyTarget(ModuleTarget):
    """A module target that fails on demand.

    Faults, all off by default:

        verify_flips_bit: position of a tensor whose first byte is digested wrongly
        verify_skips: position of a tensor that is not digested
        spoils: name of a parameter of which a bit is flipped after each update, once it was applied
        spoils_once: the same, after the next update alone
        serves: {name of a parameter: value} that its first element has after each update
        unreadable: {name of a parameter: why} that it does not say where it holds
        served_raises: text of an exception raised instead of a look at what is held
        apply_raises: text of an exception raised after half of the tensors were written
        apply_raises_once: the same, for the next update alone
        stream_raises: text of a refusal before anything is taken in
        only_staged: updates cannot be streamed
        replaces: name of a parameter that is made anew before the next update is taken in
        apply_kills: SIGKILL of this process, after half of the tensors were written
        verify_kills: SIGKILL of this process instead of an answer
        verify_waits: path of a file that must be there before anything is taken in
        refuse_raises: requests cannot be refused
        restore_raises: text of an exception raised by what cleans up after a failed apply

    Attributes:
        refused_at_restore: whether requests were refused when that began; None before.
    """

    refused_at_restore: bool | None = None

    def __init__(self, module: torch.nn.Module, faults: dict[str, Any]) -> None:
        super().__init__(module, engine="toy")
        self.faults = faults
        self._unreadable: dict[str, str] = {}
        if "only_staged" in faults:
            self.modes = frozenset({"staged"})

    def verify(self, incoming: Incoming) -> NDArray[np.uint64]:
        return self._spoiled(super().verify, incoming)

    def stream(self, incoming: Incoming) -> NDArray[np.uint64]:
        if "stream_raises" in self.faults:
            raise UpdateRefused(self.faults["stream_raises"])
        digests = self._spoiled(super().stream, incoming)
        self._spoil()
        return digests

    def _spoiled(
        self, take: Callable[[Incoming], NDArray[np.uint64]], incoming: Incoming
    ) -> NDArray[np.uint64]:
        if (name := self.faults.pop("replaces", None)) is not None:
            parent, _, leaf = name.rpartition(".")
            module = self._module.get_submodule(parent)
            old = module.get_parameter(leaf)
            module.register_parameter(leaf, torch.nn.Parameter(old.clone(), requires_grad=False))
            self._kept = old  # so that its place is not given to the new one
        if self.faults.get("verify_kills"):
            os.kill(os.getpid(), signal.SIGKILL)
        if "verify_waits" in self.faults:
            deadline = Deadline.after(30)
            while not os.path.exists(self.faults["verify_waits"]):
                deadline.rest(0.01, "the test to open the gate")
        digests = take(incoming)
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
        once = self.faults.pop("apply_raises_once", None)
        if once or "apply_raises" in self.faults or "apply_kills" in self.faults:
            tensors = self._tensors()
            with torch.no_grad():
                for number, (name, value) in enumerate(weights.tensors()):
                    if number >= max(len(tensors) // 2, 1):
                        break
                    tensors[name].copy_(value)
            if "apply_kills" in self.faults:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(once or self.faults["apply_raises"])
        report = super().apply(weights)
        self._spoil()
        return report

    def _spoil(self) -> None:
        """What an engine's loader may do to weights that were proven before."""
        tensors = self._tensors()
        for fault in (self.faults.get("spoils"), self.faults.pop("spoils_once", None)):
            if fault is not None:
                # The highest bit of the last element: of floating-point numbers, the sign.
                tensors[fault].detach().reshape(-1).view(torch.uint8)[-1] ^= 0x80
        for name, value in self.faults.get("serves", {}).items():
            tensors[name].detach().reshape(-1)[0] = float(value)

    def served(self, manifest: Manifest, seed: int, seeds: NDArray[np.uint64]) -> Served:
        if "served_raises" in self.faults:
            raise RuntimeError(self.faults["served_raises"])
        found = super().served(manifest, seed, seeds)
        readable = [spec.name not in self._unreadable for spec in manifest.tensors]
        return replace(found, digests=found.digests[readable])

    def describe(self, manifest: Manifest, *, whole: bool) -> Description:
        said = super().describe(manifest, whole=whole)
        self._unreadable = dict(self.faults.get("unreadable", {}))
        return replace(
            said,
            holdings=tuple(
                held
                for held in said.holdings
                if manifest.tensors[held.index].name not in self._unreadable
            ),
            unproven=tuple((manifest.index[name], why) for name, why in self._unreadable.items()),
        )

    def restore(self) -> None:
        self.refused_at_restore = self.refused is not None
        if "restore_raises" in self.faults:
            raise RuntimeError(self.faults["restore_raises"])
        super().restore()


class FaultyReceiver(Receiver):
    """A receiver whose process dies on demand.

    Fault ``kills_at``: the tag of a message, or the name of an engine call, instead of whose
    handling this process is killed (SIGKILL); with ``after_`` before it, once it is handled.
    """

    def __init__(self, target: FaultyTarget | Any, **arguments: Any) -> None:
        super().__init__(target, **arguments)
        self._faults = target

    def handle(self, session: Session, message: Message) -> Message:
        tag = str(message.__struct_config__.tag)
        self.moment(tag)
        answer = super().handle(session, message)
        self.moment(f"after_{tag}")
        return answer

    def moment(self, name: str) -> None:
        """Die, if this is the time."""
        if self._faults.faults.get("kills_at") == name:
            os.kill(os.getpid(), signal.SIGKILL)


def toy_module(
    shapes: Mapping[str, tuple[str, list[int]]], tied: Mapping[str, str] | None = None
) -> torch.nn.Module:
    """A module whose ``state_dict`` has these names, dtypes and shapes, all zero.

    Args:
        tied: ``{name: name of the parameter that it is the same as}``.
    """
    root = torch.nn.Module()
    made: dict[str, torch.nn.Parameter] = {}
    for name, (dtype, shape) in shapes.items():
        data = torch.zeros(shape, dtype=torch_dtype(dtype))
        made[name] = torch.nn.Parameter(data, requires_grad=False)
    for name, parameter in [*made.items(), *((a, made[b]) for a, b in (tied or {}).items())]:
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.register_parameter(leaf, parameter)
    return root


def resources() -> dict[str, int]:
    """What this process holds of what an update could leave behind.

    Returns:
        Open descriptors, threads, and number and bytes of mappings of shared memory.
    """
    mapped = [
        line.split()[0].split("-")
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "memfd:weightsync" in line
    ]
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "arenas": len(mapped),
        "shared_bytes": sum(int(last, 16) - int(first, 16) for first, last in mapped),
        "threads": threading.active_count(),
    }


Call = Callable[[dict[str, Any]], dict[str, Any]]
"""Answers a request of a worker's own."""


class Faulty(Protocol):
    """A target whose faults are set from outside."""

    faults: dict[str, Any]

    @property
    def refused(self) -> str | None:
        """Why requests must not be served at the moment, or None."""
        ...


def serve(rank: int, target: Faulty, receiver: FaultyReceiver, own: Mapping[str, Call]) -> None:
    """Serve calls, one line of JSON each, until the standard input ends.

    Args:
        own: calls beside those of every toy.
    """
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        call = request.pop("call")
        receiver.moment(call)
        if call in own:
            answer = own[call](request)
        elif call == "join":
            receiver.join(request["path"], request["token"])
        elif call == "prepare":
            receiver.prepare()
        elif call == "look":
            receiver.look()
        elif call == "apply":
            receiver.apply(request["update_id"])
        elif call == "finish":
            receiver.finish()
        elif call == "faults":
            target.faults = request["faults"][str(rank)]
        elif call == "status":
            answer = {
                **msgspec.to_builtins(receiver.status()),
                "refused": target.refused,
                "refused_at_restore": getattr(target, "refused_at_restore", None),
                "resources": resources(),
            }
        receiver.moment(f"after_{call}")
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def hexed(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The bytes of every tensor."""
    return {
        name: tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex()
        for name, tensor in tensors.items()
    }


def main() -> None:
    """A worker, told who it is by the first line."""
    start = json.loads(sys.stdin.readline())
    target = FaultyTarget(toy_module(start["shapes"], start["tied"]), start["faults"])
    receiver = FaultyReceiver(target, rank=start["rank"], world_size=start["world_size"])

    def tensors(_: dict[str, Any]) -> dict[str, Any]:
        return {"tensors": hexed(target._tensors())}

    def think(_: dict[str, Any]) -> dict[str, Any]:
        return {"refused": target.refused, "bias": bias_of(target._tensors()).tolist()}

    serve(start["rank"], target, receiver, {"tensors": tensors, "think": think})


if __name__ == "__main__":
    main()
