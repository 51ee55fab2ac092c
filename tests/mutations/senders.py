"""Faults in the sender's process: in its arena once everyone has proven what lies there, on the way
from the source into it, and in the calls into its engine."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from weightsync import WeightSender
from weightsync.sources.base import Pieces

__all__ = [
    "caches_kept",
    "crossed",
    "flipped",
    "halved",
    "lost",
    "misplaced",
    "overtaken",
    "replaced",
    "version_early",
    "words_swapped",
]

Fault = Callable[[WeightSender], None]


def _after_proof(act: Callable[[np.ndarray], None], tensor: str) -> Fault:
    """Something happens to a tensor's bytes in the arena between the votes and the flip."""

    def install(sender: WeightSender) -> None:
        stage = sender.stage

        def and_then(*args: Any, **kwargs: Any) -> Any:
            staged = stage(*args, **kwargs)
            act(_bytes_of(sender, tensor))
            return staged

        sender.stage = and_then  # type: ignore[method-assign]

    return install


def _bytes_of(sender: WeightSender, tensor: str) -> np.ndarray:
    manifest = sender._source.manifest()
    index = manifest.index[tensor]
    nbytes = int(manifest.nbytes[index])
    address = int(sender._outbox.addresses()[index])
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


def flipped(tensor: str, at: str) -> Fault:
    """One bit of a tensor."""

    def act(data: np.ndarray) -> None:
        data[{"first": 0, "middle": len(data) // 2, "last": len(data) - 1}[at]] ^= 1

    return _after_proof(act, tensor)


def overtaken(tensor: str) -> Fault:
    """The next update's bytes come in before this one's are taken out."""

    def act(data: np.ndarray) -> None:
        data[: len(data) // 2] = data[len(data) // 2 :]

    return _after_proof(act, tensor)


def words_swapped(tensor: str) -> Fault:
    """Two words at both ends of a tensor change places."""

    def act(data: np.ndarray) -> None:
        first, last = data[:8].copy(), data[-8:].copy()
        data[:8], data[-8:] = last, first

    return _after_proof(act, tensor)


def _on_the_way(act: Callable[[WeightSender, Pieces, np.ndarray], tuple[Pieces, Any]]) -> Fault:
    """The source's pieces go into the ring otherwise than they were read.

    ``act`` is given them, and where each goes in the arena, and gives both anew.
    """

    def install(sender: WeightSender) -> None:
        outbox = sender._outbox

        def push(batch: Pieces) -> None:
            places = outbox.addresses()[batch.index] + batch.start
            batch, places = act(sender, batch, places)
            outbox._made().push(
                batch.address,
                batch.nbytes,
                batch.start,
                outbox._seeds[batch.index],
                batch.index,
                destinations=places,
                deadline=outbox._deadline,
            )

        outbox.push = push  # type: ignore[method-assign]

    return install


def misplaced(tensor: str, by: int) -> Fault:
    """The bytes of a tensor go ``by`` bytes further than they are looked for."""

    def act(sender: WeightSender, batch: Pieces, places: np.ndarray) -> tuple[Pieces, Any]:
        here = batch.index == sender._source.manifest().index[tensor]
        return batch, np.where(here, places + np.uint64(by), places)

    return _on_the_way(act)


def crossed(one: str, two: str) -> Fault:
    """Two tensors of one size go to each other's place."""

    def act(sender: WeightSender, batch: Pieces, places: np.ndarray) -> tuple[Pieces, Any]:
        index = sender._source.manifest().index
        first, second = batch.index == index[one], batch.index == index[two]
        addresses = sender._outbox.addresses()
        shift, none = addresses[index[two]] - addresses[index[one]], np.uint64(0)
        return batch, places + np.where(first, shift, none) - np.where(second, shift, none)

    return _on_the_way(act)


def lost(tensor: str) -> Fault:
    """A tensor is left out on the way."""

    def act(sender: WeightSender, batch: Pieces, places: np.ndarray) -> tuple[Pieces, Any]:
        kept = batch.index != sender._source.manifest().index[tensor]
        columns = {n: getattr(batch, n)[kept] for n in ("index", "start", "nbytes", "address")}
        return replace(batch, **columns), places[kept]

    return _on_the_way(act)


def halved(tensor: str) -> Fault:
    """Only the first half of a tensor comes."""

    def act(sender: WeightSender, batch: Pieces, places: np.ndarray) -> tuple[Pieces, Any]:
        here = batch.index == sender._source.manifest().index[tensor]
        nbytes = np.where(here, batch.nbytes // np.uint64(2), batch.nbytes)
        return replace(batch, nbytes=nbytes), places

    return _on_the_way(act)


def replaced(tensor: str) -> Fault:
    """The trainer gives a tensor other memory once the update was agreed on: what would be read
    are old values."""

    def install(sender: WeightSender) -> None:
        source: Any = sender._source
        pieces = source.pieces

        def elsewhere(*args: Any, **kwargs: Any) -> Any:
            weight = source._mapping[tensor]
            weight.data = weight.data.clone()
            return pieces(*args, **kwargs)

        source.pieces = elsewhere

    return install


def caches_kept(sender: WeightSender) -> None:
    """The engine does not reset its caches, and says that it did."""
    _engine_of(sender).reset_caches = lambda deadline, recompute: None


def version_early(sender: WeightSender) -> None:
    """The engine reports the new version before anything was applied."""
    engine = _engine_of(sender)
    begin = engine.begin

    def announce(deadline: Any) -> None:
        engine._version = "the new one"
        begin(deadline)

    engine.begin = announce


def _engine_of(sender: WeightSender) -> Any:
    return sender._roster.engines[0]
