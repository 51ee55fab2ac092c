"""The protocol that an engine adapter implements: what holds weights on one engine worker.

A *target* holds weights and knows the engine; the *receiver* (`weightsync.receiver`) talks to the
sender and knows the update. The receiver calls a target's verbs on the engine's thread, one at a
time; but `verify` and `stream`, and `served` after that, run on the receiver's own, where a look
from outside (`describe` and `served`, on the engine's) may meet them: what such a look finds in the
midst of an update is thrown away.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from weightsync.box import Box
from weightsync.errors import Problem
from weightsync.holding import Holding
from weightsync.manifest import Manifest
from weightsync.messages import Mode
from weightsync.transport.shm import ArenaReader

if TYPE_CHECKING:
    from weightsync.staging import Incoming

__all__ = [
    "ApplyReport",
    "Description",
    "Served",
    "StagedWeights",
    "Target",
    "TargetStatus",
    "torch_dtype",
]


@dataclass(frozen=True, slots=True)
class Description:
    """What a target says of a manifest.

    Attributes:
        problems: why it cannot take it; empty when it can.
        partial: boxes taken of tensors that this worker does not take whole, by position in the
            manifest. All other tensors are taken whole.
        holdings: where the model holds these tensors, as far as `Target.served` can read it back.
        unproven: ``(position, why)`` of tensors that it cannot read back, or not all of.
        tied: ``(position, position of another)`` of tensors that are the same memory here. The
            second is what is loaded; the sender makes sure that the first has the same bytes, and
            does not send it.
        also: ``(position, name)``: what else the memory of a tensor is called here, where no tensor
            of that name comes. The trainer may not hold anything else under it.
        untouched: persistent buffers that no tensor goes to: they stay what the engine made them.
    """

    problems: tuple[Problem, ...] = ()
    partial: tuple[tuple[int, Box], ...] = ()
    holdings: tuple[Holding, ...] = ()
    unproven: tuple[tuple[int, str], ...] = ()
    tied: tuple[tuple[int, int], ...] = ()
    also: tuple[tuple[int, str], ...] = ()
    untouched: tuple[str, ...] = ()


class StagedWeights:
    """Whole checkpoint tensors of one sealed and verified update, in this process's memory.

    Args:
        manifest: what they are.
        offsets: of each tensor in the arena, in bytes, shape (n,).
        arena: that holds them.
    """

    def __init__(self, manifest: Manifest, offsets: NDArray[np.uint64], arena: ArenaReader) -> None:
        self.manifest = manifest
        self._offsets = offsets
        self._arena = arena
        self._private: mmap.mmap | None = None

    @contextmanager
    def addresses(self) -> Iterator[NDArray[np.uint64]]:
        """Where each tensor's bytes lie, shape (n,), to be read until the block ends."""
        with self._arena.held() as address:
            yield self._offsets + np.uint64(address)

    def map_privately(self) -> None:
        """Make what `tensors` needs, ahead of the time when it is wanted quickly.

        Raises:
            OSError: it cannot be mapped.
        """
        if self._private is None:
            first = int(self._offsets.min())
            last = int((self._offsets + self.manifest.nbytes).max())
            self._private = self._arena.private_copy(first, last - first)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """``(name, tensor)`` in manifest order; CPU tensors that view the staging memory,
        writable (a write stays with this process and this update), never copied."""
        self.map_privately()
        offsets: list[int] = self._offsets.tolist()
        for spec, offset in zip(self.manifest.tensors, offsets, strict=True):
            dtype = torch_dtype(spec.dtype)
            if spec.numel == 0:
                yield spec.name, torch.empty(spec.shape, dtype=dtype)
                continue
            flat = torch.frombuffer(self._private, dtype=dtype, count=spec.numel, offset=offset)
            yield spec.name, flat.view(spec.shape)


@dataclass(frozen=True, slots=True)
class ApplyReport:
    """How applying went on one worker.

    Attributes:
        load_seconds: spent in the engine's own loader.
    """

    load_seconds: float


@dataclass(frozen=True, slots=True)
class Served:
    """What the model holds.

    Attributes:
        digests: one per holding that was described, shape (k, 2), uint64.
        unread: by number of the holding, why it could not be read this time.
        faults: what else is wrong.
    """

    digests: NDArray[np.uint64] = field(default_factory=lambda: np.zeros((0, 2), np.uint64))
    unread: Mapping[int, str] = field(default_factory=dict)
    faults: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class TargetStatus:
    """What the target itself knows.

    Attributes:
        engine: name and version of the engine, for messages and receipts.
        device: torch's name of the worker's device.
    """

    engine: str
    device: str


class Target(Protocol):
    """What an engine adapter implements for one worker.

    Attributes:
        modes: in which it takes updates.
        wants_tensors: `apply` reads `StagedWeights.tensors`, for which memory is mapped beforehand.
    """

    modes: frozenset[Mode]
    wants_tensors: bool

    def describe(self, manifest: Manifest, *, whole: bool) -> Description:
        """Say what this worker takes of these tensors, without touching a weight.

        Called on the engine's thread, once per manifest. Should report every problem at once.

        Args:
            whole: these are meant to be all tensors of the model. Otherwise they are a declared
                part, and what they do not touch stays what it is.
        """
        ...

    def verify(self, incoming: Incoming) -> NDArray[np.uint64]:
        """Digest what is staged, as it comes in (`Incoming.digest`, for memory of the host).

        Called on the receiver's thread, while the engine generates. Returns shape (n, 2), uint64.
        """
        ...

    def stream(self, incoming: Incoming) -> NDArray[np.uint64]:
        """Take bytes into the model as they come in (`Incoming.copy_to`), and digest what was
        written. Only of a target whose `modes` say so.

        Called on the receiver's thread, while the engine is paused. Any exception means that the
        weights may now be a mixture. Returns shape (n, 2), uint64.
        """
        ...

    def apply(self, weights: StagedWeights) -> ApplyReport:
        """Make the engine serve these weights. Called on the engine's thread, while it is paused.

        Any exception means that the weights may now be a mixture.
        """
        ...

    def restore(self) -> None:
        """After a failed `apply`: bring the engine into a state where it can neither crash nor
        refuse a later `apply`.

        The weights may still be a mixture. Called on the engine's thread.
        """
        ...

    def served(self, manifest: Manifest, seed: int, seeds: NDArray[np.uint64]) -> Served:
        """Digest what the model holds now, holding by holding as `describe` named them for this
        manifest.

        Called on the engine's thread, after `apply` or alone; after `stream` on the receiver's,
        while the engine is paused.

        Args:
            seed: of the update, for drawing columns (`weightsync.holding.spot_columns`).
            seeds: of each tensor's digest, shape (n,).
        """
        ...

    def refuse(self, reason: str) -> None:
        """Let no request in from now on. Any thread; must not raise."""
        ...

    def admit(self) -> None:
        """Let requests in again. Any thread; must not raise."""
        ...

    def status(self) -> TargetStatus:
        """Who this is. Any thread."""
        ...


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name (without ``torch.``).

    Raises:
        TypeError: this torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"this torch ({torch.__version__}) has no dtype {name!r}")
    return dtype
