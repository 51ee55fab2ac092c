"""What every way into a vLLM worker shares: one target, one receiver, and entry points that never
raise.

At tensor parallelism above one, an exception on one rank would leave the other ranks' replies in
vLLM's queue, and every later call would get an earlier one's answer. Results of an update travel on
the receiver's own socket; what else went wrong is logged and kept in ``last_error``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from weightsync.adapters.vllm.exchange import exchange_among_workers
from weightsync.adapters.vllm.handle_update import HandleUpdate
from weightsync.adapters.vllm.target import VllmTarget
from weightsync.handles import host_id
from weightsync.receiver import Receiver

__all__ = ["WorkerSide"]

log = logging.getLogger("weightsync.vllm")


class WorkerSide:
    """One worker's target and receiver.

    Args:
        model: the worker's live model.
        vllm_config: the worker's configuration, with its rank.

    Attributes:
        device: that the model lies on; some workers do not say their own.
        last_error: why the last call that failed did so; None while none has.

    Raises:
        TransportError: the runtime directory cannot be used (see `weightsync.runtime`).
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        parallel = vllm_config.parallel_config
        self.device = next(model.parameters()).device
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        world_size = parallel.world_size * parallel.data_parallel_size
        self._target = VllmTarget(model, vllm_config, self.device)
        self._receiver = Receiver(self._target, rank=rank, world_size=world_size)
        self._handles = HandleUpdate(self._target, parallel.rank, exchange_among_workers)
        self.last_error: str | None = None

    def join(self, path: str, session: str) -> bool:
        """Dial in at a sender's socket."""
        return self._quietly("join", lambda: self._receiver.join(path, session))

    def prepare(self) -> bool:
        """Look at the layout that waits and tell the sender what fits; touches nothing."""
        return self._quietly("prepare", self._receiver.prepare)

    def look(self) -> bool:
        """Tell who asked what the model holds; touches nothing."""
        return self._quietly("look", self._receiver.look)

    def apply(self, update_id: str) -> bool:
        """Apply the update that was staged, proven and armed before; the sender is told how it
        went."""
        return self._quietly("apply", lambda: self._receiver.apply(update_id))

    def finish(self) -> bool:
        """The engine's own update session is over."""
        return self._quietly("finish", self._receiver.finish)

    def leave(self) -> bool:
        """Let the sender go."""
        return self._quietly("leave", self._receiver.close)

    def version(self) -> str | None:
        """Of the last update that was committed here; None before the first, and after weights
        came by handles, which carry no version."""
        return self._receiver.status().version

    def expect(self, tensors: Any) -> bool:
        """See `HandleUpdate.expect`."""
        return self._quietly("prepare_refit_info", lambda: self._handles.expect(tensors))

    def device_id(self) -> str:
        """See `WeightSyncWorkerExtension.report_device_id`."""
        if self.device.type == "cuda":
            return f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"
        return host_id()

    def update_from_handles(self, handles: Any) -> bool:
        """See `HandleUpdate.run`. A sender that holds this worker loses it."""
        return self._quietly(
            "update_weights_from_ipc_handles",
            lambda: self._handles.run(handles, self.device_id, self._receiver),
        )

    def close(self) -> None:
        """The engine ends."""
        self._target.close()

    def __del__(self) -> None:
        # vLLM lets a trainer go without ending; the mark lives as long as the worker.
        target = getattr(self, "_target", None)
        if target is not None:
            target.close()

    def _quietly(self, what: str, action: Callable[[], object]) -> bool:
        try:
            action()
        except Exception as error:
            self.last_error = f"{what}: {type(error).__name__}: {error}"
            log.exception("%s failed", what)
            return False
        return True
