"""Refuses requests at admission while a worker of the engine is poisoned.

vLLM calls ``validate_params`` of every installed logits processor for each request, in the process
that admits it: an error there reaches a caller of ``LLM.generate`` as it is, an HTTP client as
status 400, and leaves the engine untouched. Workers live in other processes, so a poisoned one
leaves a mark: a locked directory in the runtime directory, named after the engine.

This module is imported by every vLLM on the machine, where an import error would be fatal: it
tolerates any vLLM.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from weightsync.adapters.vllm.plugin import ENGINE_ID
from weightsync.runtime import OwnedDirectory, remove_stale, runtime_directory

__all__ = ["AdmissionGuard", "Mark"]

log = logging.getLogger("weightsync.vllm")

_REASON = "reason"


def _prefix() -> str:
    return f"poisoned-{os.environ.get(ENGINE_ID, 'unnamed')}"


class Mark:
    """One worker's mark. It is gone when the worker is."""

    def __init__(self) -> None:
        self._directory: OwnedDirectory | None = None

    def set(self, reason: str) -> None:
        if self._directory is None:
            remove_stale("poisoned")
            self._directory = OwnedDirectory(_prefix())
        (self._directory.path / _REASON).write_text(reason)

    def clear(self) -> None:
        if self._directory is not None:
            self._directory.close()
            self._directory = None


def poisoned(base: Path, prefix: str) -> str | None:
    """Why an engine refuses requests, or None. One directory listing."""
    with os.scandir(base) as entries:
        found = [entry.path for entry in entries if entry.name.startswith(prefix + "-")]
    if not found:
        return None
    try:
        return (Path(found[0]) / _REASON).read_text() or "no reason was given"
    except OSError:
        return "no reason was given"


def _bases() -> tuple[type, ...]:
    """The interfaces of both of vLLM's model runners, as far as this vLLM has them."""
    found: list[type] = []
    for module in (
        "vllm.v1.sample.logits_processor.interface",
        "vllm.v1.worker.gpu.sample.logits_processor.interface",
    ):
        try:
            base = getattr(
                __import__(module, fromlist=["LogitsProcessor"]), "LogitsProcessor", None
            )
        except Exception as error:
            log.debug("this vLLM has no %s: %s", module, error)
            continue
        if isinstance(base, type):
            found.append(base)
    return tuple(found) or (object,)


class AdmissionGuard(*_bases()):  # type: ignore[misc]
    """A logits processor that changes no logits; only its ``validate_params`` does anything."""

    _base: Path | None = None

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raises ValueError while the engine is poisoned."""
        try:
            if AdmissionGuard._base is None:
                AdmissionGuard._base = runtime_directory()
            reason = poisoned(AdmissionGuard._base, _prefix())
        except Exception as error:
            log.warning("cannot tell whether this engine is poisoned: %s", error)
            return
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
