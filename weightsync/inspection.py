"""A worker's side of a look at what its model holds: nothing moves, and whoever holds the worker
keeps it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from weightsync.digest import derive_seeds
from weightsync.errors import Problem, ProtocolError, reason_of
from weightsync.manifest import Manifest
from weightsync.messages import (
    Described,
    Found,
    Held,
    Inspect,
    Partial,
    WireProblem,
    WorkerStatus,
)
from weightsync.session import Session
from weightsync.target import Description, Target

__all__ = ["Inspector", "describe", "described", "found"]

log = logging.getLogger("weightsync.receiver")


class Inspector:
    """Remembers each one's last question, until the engine's thread comes by to answer them.

    Args:
        target: of this worker.
        rank: of this worker.
        status: tells how this worker stands.
    """

    def __init__(self, target: Target, rank: int, status: Callable[[], WorkerStatus]) -> None:
        self._target = target
        self._rank = rank
        self._status = status
        self._lock = threading.Lock()
        self._asked: dict[Session, tuple[Inspect, Manifest]] = {}

    def ask(self, session: Session, question: Inspect) -> None:
        """Called by the session's thread.

        Raises:
            ProtocolError, ManifestError: the question contradicts itself.
        """
        manifest = Manifest(question.tensors)
        if manifest.hash != question.manifest_hash:
            raise ProtocolError(
                f"the manifest's hash is {question.manifest_hash}, expected {manifest.hash}"
            )
        with self._lock:
            self._asked[session] = question, manifest

    def forget(self, session: Session) -> None:
        """Whoever asked is gone."""
        with self._lock:
            self._asked.pop(session, None)

    def answer(self) -> None:
        """Called by the engine's thread. Does not raise: who asked is told."""
        with self._lock:
            asked, self._asked = self._asked, {}
        for session, (question, manifest) in asked.items():
            self._answer(session, question, manifest)

    def _answer(self, session: Session, question: Inspect, manifest: Manifest) -> None:
        started = time.perf_counter()
        description = describe(self._target, manifest, whole=question.whole)
        seconds = time.perf_counter() - started
        session.answer_from_engine(described(self._rank, manifest, description, seconds=seconds))
        if description.problems:
            return
        seeds = derive_seeds(question.seed, manifest.identities)
        try:
            held = found(self._target, manifest, question.seed, seeds)
        except Exception as error:
            log.exception("what the model holds cannot be read")
            fault = WireProblem("engine", "what the model holds", reason_of(error)[:4000])
            held = Found(b"", (), (fault,), 0.0)
        session.answer_from_engine(
            Held(update_id=question.look_id, rank=self._rank, found=held, status=self._status())
        )


def describe(target: Target, manifest: Manifest, *, whole: bool) -> Description:
    """What a target says of a manifest; what it raises is one more problem."""
    try:
        return target.describe(manifest, whole=whole)
    except Exception as error:
        log.exception("cannot tell what the engine takes")
        detail = f"{type(error).__name__}: {error}"[:4000]
        return Description((Problem("loader", "the engine's loader", detail),))


def described(rank: int, manifest: Manifest, said: Description, *, seconds: float) -> Described:
    """What a target says of a manifest, as a message."""
    return Described(
        rank=rank,
        manifest_hash=manifest.hash,
        problems=tuple(WireProblem(p.kind, p.name, p.detail) for p in said.problems),
        partial=tuple(Partial(i, b.offsets, b.lengths) for i, b in said.partial),
        tied=said.tied,
        also=said.also,
        untouched=said.untouched,
        holdings=said.holdings,
        unproven=said.unproven,
        seconds=seconds,
    )


def found(target: Target, manifest: Manifest, seed: int, seeds: NDArray[np.uint64]) -> Found:
    """What a target's model holds now, as part of a message."""
    started = time.perf_counter()
    served = target.served(manifest, seed, seeds)
    return Found(
        digests=served.digests.astype("<u8").tobytes(),
        unread=tuple(sorted(served.unread.items())),
        faults=tuple(WireProblem(p.kind, p.name, p.detail) for p in served.faults),
        seconds=time.perf_counter() - started,
    )
