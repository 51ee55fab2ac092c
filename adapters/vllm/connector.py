"""The trainer's side of vLLM: a live server by URL, or an ``LLM`` object of this process. Imports
nothing of vLLM."""

from __future__ import annotations

import shlex
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from weightsync.deadline import Deadline
from weightsync.engines.base import PauseMode
from weightsync.errors import ConnectError, DeadlineExceeded

__all__ = ["VllmObject", "VllmServer", "connect_http", "wrap_object"]

CONNECT_SECONDS = 30.0
CHECK_SECONDS = 0.5
"""How often a call into another process looks whether that is still alive."""
CONFIG = '{"backend": "weightsync"}'


class _UpdateSession(ABC):
    """vLLM's own update session: finished if it was started, and only then.

    Without one that is open, finishing raises on every rank, which at tensor parallelism above one
    spoils vLLM's queue of replies.
    """

    _session_open = False

    @abstractmethod
    def _start(self, deadline: Deadline) -> None: ...

    @abstractmethod
    def _finish(self, deadline: Deadline) -> None: ...

    def prepare(self, deadline: Deadline) -> None:
        self.begin(deadline)
        self.finish(deadline)

    def begin(self, deadline: Deadline) -> None:
        self._session_open = True
        self._start(deadline)

    def finish(self, deadline: Deadline) -> None:
        if self._session_open:
            self._finish(deadline)
            self._session_open = False

    def adopt_session(self, is_open: bool) -> None:
        self._session_open = is_open


class VllmServer(_UpdateSession):
    """A vLLM OpenAI server in development mode, over HTTP. See `weightsync.engines.base.Engine`.

    Args:
        url: ``http://host:port``.
        name: for messages; the URL by default.
        headers: sent with every request, for instance an API key.

    Raises:
        ConnectError: nobody answers there, or the server lacks a flag; says the exact command that
            would work.
    """

    in_process = False

    def __init__(
        self, url: str, *, name: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        self._url = url.rstrip("/")
        self.name = name or f"vllm+{self._url}"
        self._http = httpx.Client(
            base_url=self._url, timeout=CONNECT_SECONDS, trust_env=False, headers=headers
        )
        self._multimodal = False
        try:
            self.workers = self._preflight(Deadline.after(CONNECT_SECONDS))
        except BaseException:
            self._http.close()
            raise

    def open_session(self, path: str, token: str, deadline: Deadline) -> None:
        info = {"path": path, "session": token}
        self._post("/init_weight_transfer_engine", deadline, {"init_info": info})

    def is_paused(self, deadline: Deadline) -> bool:
        return bool(self._get("/is_paused", deadline).get("is_paused"))

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        # Caches are reset after the update, once, and checked; what vLLM would clear here is
        # filled again by then.
        self._post(f"/pause?mode={mode}&clear_cache=false", deadline)

    def resume(self, deadline: Deadline) -> None:
        self._post("/resume", deadline)

    def _start(self, deadline: Deadline) -> None:
        self._post("/start_weight_update", deadline)

    def apply(self, update_id: str, deadline: Deadline) -> None:
        self._post("/update_weights", deadline, {"update_info": {"update_id": update_id}})

    def _finish(self, deadline: Deadline) -> None:
        self._post("/finish_weight_update", deadline, {})

    def set_version(self, version: str, deadline: Deadline) -> None:
        self._post("/update_weight_version", deadline, {"new_version": version})

    def reset_caches(self, deadline: Deadline, *, recompute: bool) -> None:
        running = "true" if recompute else "false"
        path = f"/reset_prefix_cache?reset_running_requests={running}&reset_external=true"
        # It may fail for a moment, while blocks are still on their way out.
        while self._post(path, deadline).get("success") is not True:
            deadline.rest(0.05, f"{self.name} to reset its prefix cache")
        if self._multimodal:
            self._post("/reset_mm_cache", deadline)
            self._post("/reset_encoder_cache", deadline)

    def version(self, deadline: Deadline) -> str | None:
        found = self._get("/weight_info", deadline).get("weight_version")
        return None if found is None else str(found)

    def close(self) -> None:
        self._http.close()

    def _preflight(self, deadline: Deadline) -> int:
        model = "MODEL"
        try:
            models = self._http.get("/v1/models").json()["data"]
            model = str(models[0].get("root") or models[0]["id"])
        except httpx.TransportError as error:
            raise ConnectError(
                f"no server answers at {self._url}: {error}",
                remedy=f"start one: {self._command(model)}",
            ) from error
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            pass  # not the OpenAI routes; what matters is asked next
        try:
            size = self._get("/get_world_size", deadline).get("world_size")
        except ConnectError as error:
            raise ConnectError(
                f"the server at {self._url} does not offer weight updates: it runs without "
                f"VLLM_SERVER_DEV_MODE=1, or it is no vLLM of 0.22 or later. {error}",
                remedy=f"start it so, with your other flags added: {self._command(model)}",
            ) from error
        config = self._get("/server_info?config_format=json", deadline).get("vllm_config") or {}
        backend = (config.get("weight_transfer_config") or {}).get("backend")
        if backend != "weightsync" or not isinstance(size, int):
            raise ConnectError(
                f"the server at {self._url} was started with weight-transfer backend {backend!r}, "
                "expected 'weightsync'",
                remedy=f"start it so, with your other flags added: {self._command(model)}",
            )
        self._multimodal = bool((config.get("model_config") or {}).get("multimodal_config"))
        return size

    def _command(self, model: str) -> str:
        url = httpx.URL(self._url)
        port = f" --port {url.port}" if url.port else ""
        return (
            "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model "
            f"{shlex.quote(model)} --host {url.host}{port} "
            f"--weight-transfer-config {shlex.quote(CONFIG)}"
        )

    def _get(self, path: str, deadline: Deadline) -> dict[str, Any]:
        return self._call("GET", path, deadline, None)

    def _post(self, path: str, deadline: Deadline, body: Any = None) -> dict[str, Any]:
        return self._call("POST", path, deadline, body)

    def _call(self, method: str, path: str, deadline: Deadline, body: Any) -> dict[str, Any]:
        awaited = f"{self.name} to answer {method} {path}"
        try:
            answer = self._http.request(
                method, path, json=body, timeout=deadline.remaining(awaited)
            )
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(awaited, deadline.seconds) from error
        except httpx.TransportError as error:
            raise ConnectError(
                f"{self.name} does not answer {method} {path}: {error}",
                remedy="see whether the server is alive, and its log",
            ) from error
        if answer.status_code >= 400:
            raise ConnectError(
                f"{self.name} answered {answer.status_code} to {method} {path}: "
                f"{answer.text[:2000]}",
                remedy="see the server's log",
            )
        try:
            found = answer.json()
        except ValueError:
            found = {}
        return found if isinstance(found, dict) else {}


class VllmObject(_UpdateSession):
    """A ``vllm.LLM`` of this process. See `weightsync.engines.base.Engine`.

    ``LLM`` takes steps only while its owner calls it. A sender is one more such call: it must not
    run while another thread is in ``generate``. So nothing is in flight and there is nothing to
    pause; requests that were enqueued but not run go on with the new weights.

    Args:
        llm: created with ``weight_transfer_config={"backend": "weightsync"}``.
        name: for messages.

    Raises:
        ConnectError: it was created without it.
    """

    in_process = True

    def __init__(self, llm: Any, *, name: str | None = None) -> None:
        self._llm = llm
        self.name = name or f"vllm-llm-{id(llm):x}"
        config = llm.llm_engine.vllm_config
        backend = getattr(config.weight_transfer_config, "backend", None)
        if backend != "weightsync":
            raise ConnectError(
                f"this LLM was created with weight-transfer backend {backend!r}, expected "
                "'weightsync'",
                remedy="create it so: LLM(..., weight_transfer_config={'backend': 'weightsync'})",
            )
        self.workers = int(llm.get_world_size())
        self._multimodal = bool(config.model_config.multimodal_config)
        core = llm.llm_engine.engine_core
        self._core = core
        self._same_process = any(kind.__name__ == "InprocClient" for kind in type(core).__mro__)

    def open_session(self, path: str, token: str, deadline: Deadline) -> None:
        info = {"path": path, "session": token}
        self._call(deadline, self._llm.init_weight_transfer_engine, {"init_info": info})

    def is_paused(self, deadline: Deadline) -> bool:
        return False

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """Nothing to do, see the class."""

    def resume(self, deadline: Deadline) -> None:
        """Nothing to do, see the class."""

    def _start(self, deadline: Deadline) -> None:
        self._call(deadline, self._llm.start_weight_update)

    def apply(self, update_id: str, deadline: Deadline) -> None:
        info = {"update_info": {"update_id": update_id}}
        self._call(deadline, self._llm.update_weights, info)

    def _finish(self, deadline: Deadline) -> None:
        self._call(deadline, self._llm.finish_weight_update)

    def set_version(self, version: str, deadline: Deadline) -> None:
        self._call(deadline, self._llm.update_weight_version, version)

    def version(self, deadline: Deadline) -> str | None:
        return str(self._call(deadline, self._llm.get_weight_version))

    def reset_caches(self, deadline: Deadline, *, recompute: bool) -> None:
        while not self._call(deadline, self._llm.reset_prefix_cache, recompute, True):
            deadline.rest(0.05, f"{self.name} to reset its prefix cache")
        if self._multimodal:
            self._call(deadline, self._llm.reset_mm_cache)
            self._call(deadline, self._llm.llm_engine.reset_encoder_cache)

    def close(self) -> None:
        """Nothing to give up."""

    def _call(self, deadline: Deadline, call: Callable[..., Any], *arguments: Any) -> Any:
        """A call into vLLM, with a deadline and a typed error.

        vLLM waits for its core without a deadline, and for ever if it dies at the wrong moment. So
        where the core is another process, it is waited for on a thread that can be left behind;
        where it is this one, the call is the work itself, and runs here.
        """
        outcome: list[Any] = []
        failure: list[BaseException] = []

        def run() -> None:
            try:
                outcome.append(call(*arguments))
            except BaseException as error:
                failure.append(error)

        if self._same_process:
            run()
        else:
            self._wait(deadline, threading.Thread(target=run, daemon=True), call.__name__)
        if failure:
            error = failure[0]
            if not isinstance(error, Exception):
                raise error
            raise ConnectError(
                f"{self.name} failed in {call.__name__}: {type(error).__name__}: {error}",
                remedy="see the engine's log",
            ) from error
        return outcome[0]

    def _wait(self, deadline: Deadline, thread: threading.Thread, name: str) -> None:
        thread.start()
        while thread.is_alive():
            thread.join(min(CHECK_SECONDS, deadline.remaining(f"{self.name} to answer {name}")))
            if thread.is_alive() and getattr(self._core.resources, "engine_dead", False):
                # It was alive a moment ago: what it has answered may still be on its way.
                thread.join(CHECK_SECONDS)
                if thread.is_alive():
                    raise ConnectError(
                        f"{self.name}'s core has died", remedy="start the engine anew"
                    )


def connect_http(url: str, **options: Any) -> VllmServer:
    """``vllm+http://host:port`` or ``vllm+https://…``."""
    return VllmServer(url.removeprefix("vllm+"), **options)


def wrap_object(obj: Any, **options: Any) -> VllmObject | None:
    """An ``LLM``, or None for anything else."""
    if any(
        f"{k.__module__}.{k.__qualname__}" == "vllm.entrypoints.llm.LLM" for k in type(obj).__mro__
    ):
        return VllmObject(obj, **options)
    return None
