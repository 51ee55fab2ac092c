"""The protocol that an engine adapter implements: what holds weights on one engine worker.

A *target* holds weights and knows the engine; the *receiver* (`weightsync.receiver`) talks to the
sender and knows the update. The receiver calls a target's verbs and never calls two of them at
once, with one exception that each verb's docstring states: `verify` runs on the receiver's own
thread while the engine goes on generating.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from weightsync.box import Box
from weightsync.digest import digest_spans
from weightsync.errors import Problem
from weightsync.manifest import Manifest
from weightsync.transport.shm import address_of

__all__ = [
    "ApplyReport",
    "Description",
    "Mode",
    "Served",
    "StagedWeights",
    "Target",
    "TargetStatus",
    "digest_staged",
    "torch_dtype",
]

Mode = Literal["staged", "streamed"]
"""``staged``: nothing is touched before everything is there. ``streamed``: buckets are applied as
they come."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a target says of a manifest.

    Attributes:
        problems: why it cannot take it; empty when it can.
        partial: boxes taken of tensors that this worker does not take whole, by position in the
            manifest. All other tensors are taken whole.
        served: positions of the tensors whose served bytes this target can digest after applying.
        tied: ``(position, position of another)`` of tensors that are the same memory here. The
            second is what is loaded; the sender makes sure that the first has the same bytes, and
            does not send it.
        untouched: persistent buffers that no tensor goes to: they stay what the engine made them.
    """

    problems: tuple[Problem, ...] = ()
    partial: tuple[tuple[int, Box], ...] = ()
    served: tuple[int, ...] = ()
    tied: tuple[tuple[int, int], ...] = ()
    untouched: tuple[str, ...] = ()


class StagedWeights:
    """Whole checkpoint tensors of one sealed and verified update, in this process's memory.

    Args:
        manifest: what they are.
        offsets: of each tensor in ``mapping``, in bytes, shape (n,).
        mapping: private to this update; it lives as long as any tensor made from it.
    """

    def __init__(self, manifest: Manifest, offsets: NDArray[np.uint64], mapping: mmap.mmap) -> None:
        self.manifest = manifest
        self._offsets = offsets
        self._mapping = mapping

    def addresses(self) -> NDArray[np.uint64]:
        """Where each tensor's bytes lie, shape (n,). Valid while this object is held."""
        return self._offsets + np.uint64(address_of(self._mapping))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """``(name, tensor)`` in manifest order; CPU tensors that view the staging memory,
        writable, never copied."""
        offsets: list[int] = self._offsets.tolist()
        for spec, offset in zip(self.manifest.tensors, offsets, strict=True):
            dtype = torch_dtype(spec.dtype)
            if spec.numel == 0:
                yield spec.name, torch.empty(spec.shape, dtype=dtype)
                continue
            flat = torch.frombuffer(self._mapping, dtype=dtype, count=spec.numel, offset=offset)
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
    """Digests of what the model holds.

    Attributes:
        index: positions in the manifest, shape (k,).
        digests: one per position, shape (k, 2), uint64.
    """

    index: Sequence[int] = ()
    digests: NDArray[np.uint64] = field(default_factory=lambda: np.zeros((0, 2), np.uint64))


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
    """What an engine adapter implements for one worker."""

    modes: frozenset[Mode]

    def describe(self, manifest: Manifest) -> Description:
        """Say what this worker takes of these tensors, without touching a weight.

        Called on the engine's thread, once per manifest. Should report every problem at once.
        """
        ...

    def verify(
        self, manifest: Manifest, addresses: NDArray[np.uint64], seeds: NDArray[np.uint64]
    ) -> NDArray[np.uint64]:
        """Digest the staged tensors at these addresses (`digest_staged` for memory of the host).

        Called on the receiver's thread, while the engine generates. Returns shape (n, 2), uint64.
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

    def served(self, manifest: Manifest, seeds: NDArray[np.uint64]) -> Served:
        """Digest what the model holds now, as far as `describe` promised. Called on the engine's
        thread."""
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


def digest_staged(
    manifest: Manifest, addresses: NDArray[np.uint64], seeds: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """`Target.verify` for whole tensors in host memory: one native call, shape (n, 2)."""
    return digest_spans(addresses, manifest.nbytes, np.zeros_like(addresses), seeds)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name (without ``torch.``).

    Raises:
        TypeError: this torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"this torch ({torch.__version__}) has no dtype {name!r}")
    return dtype
