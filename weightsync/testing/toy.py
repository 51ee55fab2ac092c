"""A toy engine for tests: real worker processes, real sockets and shared memory, a small module,
and a switch per fault.

    shapes = {"a.weight": ("float32", [4, 3])}
    with ToyEngine(shapes, workers=2, faults={1: {"apply_raises": "no"}}) as engine:
        WeightSender(source, [engine]).sync(1)

Each worker is ``python -m weightsync.testing.toy_worker``, spoken to in lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from weightsync.deadline import Deadline
from weightsync.engines.base import PauseMode
from weightsync.errors import ConnectError, UpdateRefused
from weightsync.testing.toy_logprobs import logprobs_of

__all__ = ["Faults", "Shapes", "ToyEngine"]

Shapes = Mapping[str, tuple[str, Sequence[int]]]
"""``{name: (dtype, shape)}`` of the toy's parameters."""

Faults = Mapping[int, Mapping[str, Any]]
"""By rank, faults as `weightsync.testing.toy_worker.FaultyTarget` knows them."""


class ToyEngine:
    """See `weightsync.engines.base.Engine`. Ends its processes on exit.

    Args:
        shapes: of its parameters.
        workers: number of its processes.
        faults: that they begin with.
        tied: ``{name: name of the parameter that it is the same as}``.

    Attributes:
        calls: names of the engine calls so far, in order.
    """

    in_process = False

    def __init__(
        self,
        shapes: Shapes,
        *,
        workers: int = 1,
        name: str = "toy",
        faults: Faults | None = None,
        tied: Mapping[str, str] | None = None,
    ) -> None:
        tensors = {n: [d, list(s)] for n, (d, s) in shapes.items()}
        first = {"shapes": tensors, "tied": dict(tied or {})}
        self._start("weightsync.testing.toy_worker", first, name, workers, faults or {})

    def _start(
        self, module: str, first: Mapping[str, Any], name: str, workers: int, faults: Faults
    ) -> None:
        """Start the workers.

        Args:
            module: that each of them runs.
            first: what each is told first, beside who it is.
        """
        self.name = name
        self.workers = workers
        self.calls: list[str] = []
        self._version: str | None = None
        self._paused = False
        self._session_open = False
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(workers):
            process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                cwd=tempfile.gettempdir(),
            )
            self._processes.append(process)
            who = {"rank": rank, "world_size": workers, "faults": dict(faults.get(rank, {}))}
            self._write(rank, {**who, **first})
        self.call_workers("ready", Deadline.after(60))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- the engine protocol ----------------------------------------------------------------

    def open_session(self, path: str, token: str, deadline: Deadline) -> None:
        self._called("open_session", deadline, "join", path=path, token=token)

    def prepare(self, deadline: Deadline) -> None:
        self.begin(deadline)
        self.finish(deadline)

    def look(self, deadline: Deadline) -> None:
        self._called("look", deadline, "look")

    def is_paused(self, deadline: Deadline) -> bool:
        return self._paused

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        self.calls.append(f"pause {mode}")
        self._paused = True

    def resume(self, deadline: Deadline) -> None:
        self.calls.append("resume")
        self._paused = False

    def begin(self, deadline: Deadline) -> None:
        self._called("begin", deadline, "prepare")
        self._session_open = True

    def apply(self, update_id: str, deadline: Deadline) -> None:
        self._called("apply", deadline, "apply", update_id=update_id)

    def finish(self, deadline: Deadline) -> None:
        if self._session_open:
            self._called("finish", deadline, "finish")
            self._session_open = False

    def adopt_session(self, is_open: bool) -> None:
        self._session_open = is_open

    def set_version(self, version: str, deadline: Deadline) -> None:
        self.calls.append("set_version")
        self._version = version

    def reset_caches(self, deadline: Deadline, *, recompute: bool) -> None:
        self.calls.append("reset_caches")

    def version(self, deadline: Deadline) -> str | None:
        return self._version

    def logprobs(self, prompt: Sequence[int], deadline: Deadline) -> list[float]:
        """See `weightsync.testing.toy_logprobs`. Every worker adds up what its parameters say; here
        they are averaged, as ranks of a real engine reduce theirs."""
        self.calls.append("logprobs")
        while self._paused:
            deadline.rest(0.01, f"{self.name} to be resumed")
        answers = self.call_workers("think", deadline)
        for rank, answer in enumerate(answers):
            if answer["refused"] is not None:
                raise ConnectError(
                    f"{self.name}, worker {rank} refuses requests: {answer['refused']}"
                )
        try:
            return logprobs_of(np.mean([answer["bias"] for answer in answers], axis=0), prompt)
        except ValueError as error:
            raise UpdateRefused(f"{self.name} takes no such prompt: {error}") from error

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(20)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(
                        BrokenPipeError
                    ):  # a call that a dead worker never read
                        pipe.close()

    # --- what tests look at -----------------------------------------------------------------

    def tensors(self) -> list[dict[str, str]]:
        """By worker: hex bytes of every parameter, as it is served."""
        return [answer["tensors"] for answer in self.call_workers("tensors", Deadline.after(30))]

    def status(self) -> list[dict[str, Any]]:
        """By worker: `weightsync.messages.WorkerStatus` as a dict, ``refused``, and ``resources``
        (fds, mappings, threads)."""
        return self.call_workers("status", Deadline.after(30))

    def set_faults(self, faults: Faults) -> None:
        """Replace all workers' faults."""
        every = {str(rank): dict(faults.get(rank, {})) for rank in range(self.workers)}
        self.call_workers("faults", Deadline.after(30), faults=every)

    def kill(self, rank: int) -> None:
        """SIGKILL one worker."""
        self._processes[rank].send_signal(signal.SIGKILL)
        self._processes[rank].wait(20)

    def call_workers(self, call: str, deadline: Deadline, **arguments: Any) -> list[dict[str, Any]]:
        """One call to every worker, answered by every worker.

        Raises:
            ConnectError: a worker is dead.
            DeadlineExceeded: a worker is silent.
        """
        for rank in range(self.workers):
            self._write(rank, {"call": call, **arguments})
        return [
            self._answer(rank, process, deadline) for rank, process in enumerate(self._processes)
        ]

    def _write(self, rank: int, content: Mapping[str, Any]) -> None:
        pipe = self._processes[rank].stdin
        if pipe is None:
            raise ConnectError(f"{self.name}, worker {rank} has no pipe")
        try:
            pipe.write(json.dumps(content).encode() + b"\n")
            pipe.flush()
        except OSError as error:
            raise ConnectError(f"{self.name}, worker {rank} is dead") from error

    def _called(self, name: str, deadline: Deadline, call: str, **arguments: Any) -> None:
        self.calls.append(name)
        self.call_workers(call, deadline, **arguments)

    def _answer(
        self, rank: int, process: subprocess.Popen[bytes], deadline: Deadline
    ) -> dict[str, Any]:
        awaited = f"{self.name}, worker {rank}"
        pipe = process.stdout
        if pipe is None:
            raise ConnectError(f"{awaited} has no pipe")
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while not selector.select(deadline.remaining(awaited)):
                pass
        line = pipe.readline()
        if not line:
            raise ConnectError(f"{awaited} died")
        answer: dict[str, Any] = json.loads(line)
        return answer
