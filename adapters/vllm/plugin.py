"""Entry point of the group ``vllm.general_plugins``: runs in every process of every vLLM on the
machine, maybe twice.

A fault of ours must not stop a stranger's engine: nothing heavy is imported, and nothing is raised.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import multiprocessing
import os
import secrets

__all__ = ["BACKEND", "ENGINE_ID", "register"]

BACKEND = "weightsync"
ENGINE_ID = "WEIGHTSYNC_ENGINE_ID"
"""Set in an engine's front end before its workers are started, so that they inherit it: the
guard's name for the engine."""

log = logging.getLogger("weightsync.vllm")


def register() -> None:
    """Make ``weight_transfer_config={"backend": "weightsync"}`` known to vLLM, with the class that
    fits its hook. An older vLLM has no such hook, or takes only its own backends' names there: its
    workers are extended instead (`weightsync.adapters.vllm.worker_extension`)."""
    try:
        _name_engine()
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        given = inspect.signature(WeightTransferEngineFactory.create_engine).parameters
        backend = "WeightSyncBackend" if "vllm_config" in given else "OlderHookBackend"
        with contextlib.suppress(ValueError):  # plugins are loaded more than once
            WeightTransferEngineFactory.register_engine(
                BACKEND, "weightsync.adapters.vllm.backend", backend
            )
    except Exception:
        log.exception("weightsync is not available in this vLLM")


def _name_engine() -> None:
    """A process that nobody spawned as a worker is a front end, whatever it inherited from its
    parent."""
    if ENGINE_ID not in os.environ or multiprocessing.parent_process() is None:
        os.environ[ENGINE_ID] = f"{os.getpid()}.{secrets.token_hex(6)}"
