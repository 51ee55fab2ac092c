"""The weight-transfer backend ``weightsync`` of a vLLM worker.

vLLM's calls mean here:

    init     a sender's message: dial in at its socket, or one of the calls below by its name
    start    look at the layout that waits and say what fits; touches nothing
    update   apply the update that was staged, proven and armed before
    finish   nothing that could fail

vLLM has had two hooks for backends. The one of today hands over the whole configuration and leaves
start, update and finish to the backend. The older one hands over the parallel configuration alone,
and wraps update in a layerwise reload of its own, or else keeps a session flag that a sender which
dies leaves set; so there everything goes through ``init``, which vLLM passes on as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weightsync.adapters.vllm.worker_side import WorkerSide
from weightsync.errors import ConnectError, UpdateRefused

__all__ = ["OlderHookBackend", "SessionInfo", "UpdateInfo", "WeightSyncBackend"]

log = logging.getLogger("weightsync.vllm")


@dataclass
class SessionInfo(WeightTransferInitInfo):
    """A sender's message.

    Attributes:
        call: ``join``, ``prepare``, ``look``, ``apply`` or ``finish``.
        path: where the sender listens, for ``join``.
        session: tells the sender which engine this is, for ``join``.
        update_id: which update to apply, for ``apply``.
    """

    call: str = "join"
    path: str = ""
    session: str = ""
    update_id: str = ""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Which update to apply."""

    update_id: str = ""


class _Backend(WeightTransferEngine[SessionInfo, UpdateInfo]):
    """What both hooks share."""

    init_info_cls = SessionInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    weightsync_side: WorkerSide

    def parse_init_info(self, init_dict: dict[str, Any]) -> SessionInfo:
        known = ("call", "path", "session", "update_id")
        return SessionInfo(**{name: str(init_dict[name]) for name in known if name in init_dict})

    def init_transfer_engine(self, init_info: SessionInfo) -> None:
        side = self.weightsync_side
        match init_info.call:
            case "join":
                side.join(init_info.path, init_info.session)
            case "prepare":
                side.prepare()
            case "look":
                side.look()
            case "apply":
                side.apply(init_info.update_id)
            case "finish":
                side.finish()
            case unknown:
                log.error("a sender asked for %r, which is no call of this backend", unknown)

    def shutdown(self) -> None:
        self.weightsync_side.leave()

    @staticmethod
    def trainer_send_weights(*_: Any, **__: Any) -> None:
        """Demanded by the older hook.

        Raises:
            UpdateRefused: always.
        """
        raise UpdateRefused(
            "weightsync does not send through vLLM's trainer classes",
            remedy="use weightsync.WeightSender(source, engines=[weightsync.engine(llm)])",
        )


class WeightSyncBackend(_Backend):
    """For ``create_engine(config, vllm_config, device, model)``."""

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.weightsync_side = WorkerSide(model, vllm_config)

    def start_weight_update(self) -> None:
        self.weightsync_side.prepare()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.weightsync_side.apply(str(update_info.get("update_id", "")))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.weightsync_side.apply(update_info.update_id)

    def finish_weight_update(self) -> None:
        self.weightsync_side.finish()


class OlderHookBackend(_Backend):
    """For ``create_engine(config, parallel_config, model)``.

    Raises:
        ConnectError: no layer of the model holds the worker's configuration, which this hook does
            not hand over.
    """

    def __init__(self, config: Any, parallel_config: Any, model: torch.nn.Module) -> None:
        super().__init__(config, parallel_config, model)
        self.weightsync_side = WorkerSide(model, _configuration(parallel_config, model))

    def receive_weights(self, update_info: UpdateInfo, load_weights: Callable[..., Any]) -> None:
        log.error(
            "update_weights does nothing on this vLLM, whose worker reloads layers around it: let "
            "weightsync.connect(url) or weightsync.engine(llm) make the calls"
        )


def _configuration(parallel_config: Any, model: torch.nn.Module) -> Any:
    """The worker's configuration, which vLLM leaves on every layer that can be compiled.

    A part of a multimodal model holds a changed copy of it: taken is only one that means this
    model.
    """
    from vllm.model_executor.model_loader.utils import get_model_architecture

    for module in model.modules():
        found = getattr(module, "vllm_config", None)
        if getattr(found, "parallel_config", None) is parallel_config and get_model_architecture(
            found.model_config
        )[0] is type(model):
            return found
    raise ConnectError(
        f"this vLLM does not tell a weight-transfer backend its configuration, and no layer of "
        f"{type(model).__name__} holds it",
        remedy="start the engine without weight_transfer_config and with worker_extension_cls="
        "weightsync.adapters.vllm.worker_extension.WeightSyncWorkerExtension",
    )
