"""A vLLM worker extension that breaks weightsync's next apply on purpose, in the real worker."""

from __future__ import annotations

import os
import signal

from weightsync.adapters.vllm.worker_extension import WeightSyncWorkerExtension
from weightsync.errors import DigestMismatch, ProofFailed
from weightsync.opened_handle import OpenedHandle
from weightsync.target import StagedWeights


class FaultExtension:
    """Mixed into vLLM's worker; called through ``/collective_rpc``."""

    def weightsync_test_fail_after(self, count: str, how: str, rank: str = "0") -> str:
        """One rank's next apply fails after ``count`` tensors: by an exception, or by SIGKILL."""
        if self.rank != int(rank):
            return "not me"
        original = StagedWeights.tensors
        left = int(count)

        def failing(weights: StagedWeights):
            StagedWeights.tensors = original
            for number, item in enumerate(original(weights)):
                if number == left:
                    if how == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise RuntimeError("broken on purpose")
                yield item

        StagedWeights.tensors = failing
        return "armed"

    def weightsync_test_refuse_handle(self, rank: str) -> str:
        """One rank's next handle has other bytes than were exported."""
        if self.rank != int(rank):
            return "not me"
        original = OpenedHandle.prove

        def refusing(opened: OpenedHandle) -> None:
            OpenedHandle.prove = original
            raise ProofFailed([DigestMismatch("model.norm.weight", "this worker", "00", "11")])

        OpenedHandle.prove = refusing
        return "armed"


class FaultyWorkerExtension(FaultExtension, WeightSyncWorkerExtension):
    """A worker has one extension only: this is weightsync's own as well."""
