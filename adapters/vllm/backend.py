"""The weight-transfer backend ``weightsync`` of a vLLM worker.

vLLM's calls mean here:

    init     dial in at a sender's socket
    start    look at the layout that waits and say what fits; touches nothing
    update   apply the update that was staged, proven and armed before
    finish   nothing that could fail

None of them raises: at tensor parallelism above one, an exception on one rank would leave the other
ranks' replies in vLLM's queue, and every later call would get an earlier one's answer. Results
travel on the receiver's own socket.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weightsync.adapters.vllm.target import VllmTarget
from weightsync.receiver import Receiver

__all__ = ["SessionInfo", "UpdateInfo", "WeightSyncBackend"]

log = logging.getLogger("weightsync.vllm")


@dataclass
class SessionInfo(WeightTransferInitInfo):
    """Where the sender listens, and the token that tells it which engine this is."""

    path: str = ""
    session: str = ""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Which update to apply."""

    update_id: str = ""


class WeightSyncBackend(WeightTransferEngine[SessionInfo, UpdateInfo]):
    """See the module's docstring."""

    init_info_cls = SessionInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = vllm_config.parallel_config
        world_size = parallel.world_size * parallel.data_parallel_size
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._target = VllmTarget(model, vllm_config, device)
        self._receiver = Receiver(self._target, rank=rank, world_size=world_size)

    def parse_init_info(self, init_dict: dict[str, Any]) -> SessionInfo:
        return SessionInfo(
            path=str(init_dict.get("path", "")), session=str(init_dict.get("session", ""))
        )

    def init_transfer_engine(self, init_info: SessionInfo) -> None:
        self._receiver.join(init_info.path, init_info.session)

    def start_weight_update(self) -> None:
        try:
            self._receiver.prepare()
        except Exception:
            log.exception("start_weight_update failed")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        try:
            self._receiver.apply(str(update_info.get("update_id", "")))
        except Exception:
            log.exception("update_weights failed")

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.update_weights({"update_id": update_info.update_id})

    def finish_weight_update(self) -> None:
        self._receiver.finish()

    def shutdown(self) -> None:
        try:
            self._receiver.close()
        except Exception:
            log.exception("shutdown failed")

    def __del__(self) -> None:
        # vLLM also calls `shutdown` to let one trainer go; the mark lives as long as the worker.
        target = getattr(self, "_target", None)
        if target is not None:
            target.close()
