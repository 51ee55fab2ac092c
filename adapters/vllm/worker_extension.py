"""A vLLM worker extension: the way in for a vLLM whose weight-transfer hook takes no backend of
others, and the interface that NeMo RL's workers have.

    LLM(..., worker_extension_cls=
        "weightsync.adapters.vllm.worker_extension.WeightSyncWorkerExtension")

vLLM mixes this class into its worker and calls its methods by name, through ``collective_rpc``.
"""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["WeightSyncWorkerExtension"]

log = logging.getLogger("weightsync.vllm")


class WeightSyncWorkerExtension:
    """All methods run on the engine's thread, between two steps, on every worker. None raises: what
    failed answers False, is logged, and is told by `weightsync_last_error`.

    ``weightsync_*`` are what `weightsync.WeightSender` uses. The others are NeMo RL's
    ``UpdatableVllmInternalWorker``; whoever calls them keeps requests out of the engine meanwhile,
    and resets its prefix cache afterwards.
    """

    # Of vLLM's worker, into which this is mixed.
    model_runner: Any
    vllm_config: Any

    weightsync_own_side: Any = None
    weightsync_failure: str | None = None

    # --- a sender's -------------------------------------------------------------------------

    def weightsync_join(self, path: str, session: str) -> bool:
        """Dial in at a sender's socket, and introduce this engine with ``session``."""
        side = self.weightsync_side()
        return side is not None and side.join(str(path), str(session))

    def weightsync_prepare(self) -> bool:
        """Look at the layout that waits and tell the sender what fits."""
        side = self.weightsync_side()
        return side is not None and side.prepare() and side.finish()

    def weightsync_look(self) -> bool:
        """Tell who asked what the model holds."""
        side = self.weightsync_side()
        return side is not None and side.look()

    def weightsync_apply(self, update_id: str) -> bool:
        """Apply the update that was staged, proven and armed before."""
        side = self.weightsync_side()
        return side is not None and side.apply(str(update_id))

    def weightsync_version(self) -> str | None:
        """Of the last update that a sender committed here; None where there is none, and after
        weights came by handles."""
        side = self.weightsync_side()
        return None if side is None else side.version()

    def weightsync_last_error(self) -> str | None:
        """Why the last call that failed on this worker did so; None while none has."""
        side = self.weightsync_own_side
        return self.weightsync_failure if side is None else side.last_error

    # --- NeMo RL's --------------------------------------------------------------------------

    def report_device_id(self) -> str:
        """The key of this worker's handle.

        On the CPU, `weightsync.handles.host_id`: one id for all workers of a host, at tensor
        parallelism too, since all of them read the same memory, and each one's loader takes its own
        part of the whole tensors in it. On a GPU, ``GPU-`` and its UUID (not seen on hardware).
        Empty where it cannot be told.
        """
        side = self.weightsync_side()
        try:
            return "" if side is None else str(side.device_id())
        except Exception as error:
            self.weightsync_fail("report_device_id", error)
            return ""

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> bool:
        """Say what handles will hold, before the first of them.

        Args:
            state_dict_info: ``{name: (shape, dtype)}`` under the checkpoint's names, as
                `weightsync.handles.state_dict_info` tells it of a source; the dtype as torch has
                it, or its name. A tied tensor stands under the one name that it is loaded by.

        Returns:
            Whether the engine takes exactly these tensors. Handles with other ones are refused from
            then on.
        """
        side = self.weightsync_side()
        return side is not None and side.expect(state_dict_info)

    def update_weights_from_ipc_handles(self, handles: dict[str, Any]) -> bool:
        """Take a whole model's weights from memory that another process exported.

        Checked before anything is touched: the handle, the memory that it points at, every name,
        shape and dtype against what the engine's loader takes, and the digest of every tensor.
        Afterwards: that every parameter was written. All workers of the engine do so, or none.

        Args:
            handles: by device id, from `weightsync.handles.export_handles`.

        Returns:
            Whether this worker serves these weights now. If not, it serves what it served before,
            or, where loading failed half-way, its engine refuses requests until a full update
            cures it; `weightsync_last_error` says which. All workers of an engine answer the same.
        """
        side = self.weightsync_side()
        return side is not None and side.update_from_handles(handles)

    def update_weights_from_ipc(self, handles: dict[str, Any]) -> bool:
        """The documented name of `update_weights_from_ipc_handles`."""
        return self.update_weights_from_ipc_handles(handles)

    def update_weights_via_ipc_zmq(self, handles: dict[str, Any]) -> bool:
        """Upstream's present name of `update_weights_from_ipc_handles`. No socket takes part."""
        return self.update_weights_from_ipc_handles(handles)

    def init_collective(self, *_: Any, **__: Any) -> bool:
        """Refused: weights do not come by a process group yet."""
        return self.weightsync_refuse_collective("init_collective")

    def update_weights_from_collective(self, *_: Any, **__: Any) -> bool:
        """Refused: weights do not come by a process group yet."""
        return self.weightsync_refuse_collective("update_weights_from_collective")

    # --- shared -----------------------------------------------------------------------------

    def weightsync_side(self) -> Any:
        """This worker's `WorkerSide`, made on first use; the backend's, where both are configured.
        None if it cannot be made."""
        if self.weightsync_own_side is None:
            try:
                backend = getattr(self, "weight_transfer_engine", None)
                side = getattr(backend, "weightsync_side", None)
                if side is None:
                    from weightsync.adapters.vllm.worker_side import WorkerSide

                    side = WorkerSide(self.model_runner.get_model(), self.vllm_config)
                self.weightsync_own_side = side
            except Exception as error:
                self.weightsync_fail("this worker cannot take part", error)
        return self.weightsync_own_side

    def weightsync_refuse_collective(self, name: str) -> bool:
        from weightsync.errors import UpdateRefused

        refusal = UpdateRefused(
            f"{name}: weights do not come by a process group in this version of weightsync",
            remedy="use weightsync.WeightSender with weightsync.engine(llm), or "
            "update_weights_from_ipc_handles",
        )
        return self.weightsync_fail(name, refusal)

    def weightsync_fail(self, what: str, error: Exception) -> bool:
        failure = f"{what}: {type(error).__name__}: {error}"
        if self.weightsync_own_side is None:
            self.weightsync_failure = failure
        else:
            self.weightsync_own_side.last_error = failure
        log.error("%s: %s", what, error)
        return False
