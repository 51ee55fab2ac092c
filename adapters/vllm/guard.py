"""Refuses requests at admission while a worker of the engine is poisoned.

vLLM calls ``validate_params`` of every installed logits processor for each request, in the process
that admits it: an error there reaches a caller of ``LLM.generate`` as it is, an HTTP client as
status 400, and leaves the engine untouched. Workers live in other processes: each holds a locked
directory, named after the engine, in this user's runtime directory, and a poisoned one leaves its
reason there.

This module is imported by every vLLM on the machine, where an import error would be fatal: it
tolerates any vLLM, and admits everything where no worker of this project is.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

from weightsync.adapters.vllm.plugin import ENGINE_ID
from weightsync.runtime import OwnedDirectory, remove_stale, runtime_directory

__all__ = ["AdmissionGuard", "Mark", "poisoned"]

log = logging.getLogger("weightsync.vllm")

_REASON = "poisoned"


def _prefix() -> str:
    return f"engine-{os.environ.get(ENGINE_ID, 'unnamed')}-"


class Mark:
    """One worker's directory. It is gone when the worker is.

    Raises:
        TransportError: the runtime directory cannot be used.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        remove_stale("engine")
        self._directory = OwnedDirectory(_prefix().removesuffix("-"))

    def set(self, reason: str) -> None:
        """Refuse requests. Makes the directory anew if somebody has swept it away."""
        with self._lock:
            if not self._directory.path.is_dir():
                self._directory.close()
                self._directory = OwnedDirectory(_prefix().removesuffix("-"))
            (self._directory.path / _REASON).write_text(reason)

    def clear(self) -> None:
        """Admit requests."""
        with self._lock:
            (self._directory.path / _REASON).unlink(missing_ok=True)

    def close(self) -> None:
        with self._lock:
            self._directory.close()


def poisoned(base: Path, prefix: str) -> tuple[int, str | None]:
    """How many workers an engine has, and why it refuses requests, or None. One directory listing.

    Raises:
        OSError: the directory is not there, or cannot be read.
    """
    with os.scandir(base) as entries:
        workers = [entry.path for entry in entries if entry.name.startswith(prefix)]
    for worker in workers:
        try:
            return len(workers), (Path(worker) / _REASON).read_text() or "no reason was given"
        except FileNotFoundError:
            continue
    return len(workers), None


def _bases() -> tuple[type, ...]:
    """The interfaces of both of vLLM's model runners, as far as this vLLM has them."""
    found: list[type] = []
    for module in (
        "vllm.v1.sample.logits_processor.interface",
        "vllm.v1.worker.gpu.sample.logits_processor.interface",
    ):
        try:
            imported = __import__(module, fromlist=["LogitsProcessor"])
        except Exception as error:
            log.debug("this vLLM has no %s: %s", module, error)
            continue
        base = getattr(imported, "LogitsProcessor", None)
        if isinstance(base, type):
            found.append(base)
    return tuple(found) or (object,)


class AdmissionGuard(*_bases()):  # type: ignore[misc]
    """A logits processor that changes no logits; only its ``validate_params`` does anything."""

    _base: Path | None = None
    _ours = False
    """Whether this process has ever seen a worker of its engine: from then on, not being able to
    tell means no."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raises ValueError while the engine is poisoned."""
        try:
            if AdmissionGuard._base is None:
                AdmissionGuard._base = runtime_directory()
            workers, reason = poisoned(AdmissionGuard._base, _prefix())
            AdmissionGuard._ours = AdmissionGuard._ours or workers > 0
        except Exception as error:
            if not AdmissionGuard._ours:
                return
            reason = f"It cannot be told whether it does: {error}"
        if reason is not None:
            raise ValueError(
                "weightsync: this engine may hold a mixture of weight versions and serves nothing "
                f"until a full update cures it. {reason}"
            )

    def __init__(self, *_: Any) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        pass

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        return False

    def apply(self, logits: Any, ctx: Any = None) -> Any:
        return logits
