"""The trainer's side of vLLM: a live server by URL, or an ``LLM`` object of this process. Imports
nothing of vLLM."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import httpx

from weightsync.deadline import Deadline
from weightsync.engines.base import PauseMode
from weightsync.errors import ConnectError, DeadlineExceeded

__all__ = ["VllmObject", "VllmServer", "connect_http", "wrap_object"]

CONNECT_SECONDS = 30.0
CONFIG = '{"backend": "weightsync"}'


class VllmServer:
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
        self._session_open = False
        self._multimodal = False
        try:
            self.workers = self._preflight(Deadline.after(CONNECT_SECONDS))
        except BaseException:
            self._http.close()
            raise

    def open_session(self, path: str, token: str, deadline: Deadline) -> None:
        info = {"path": path, "session": token}
        self._post("/init_weight_transfer_engine", deadline, {"init_info": info})

    def prepare(self, deadline: Deadline) -> None:
        self.begin(deadline)
        self.finish(deadline)

    def is_paused(self, deadline: Deadline) -> bool:
        return bool(self._get("/is_paused", deadline).get("is_paused"))

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        # Caches are reset after the update, once, and checked; what vLLM would clear here is
        # filled again by then.
        self._post(f"/pause?mode={mode}&clear_cache=false", deadline)

    def resume(self, deadline: Deadline) -> None:
        self._post("/resume", deadline)

    def begin(self, deadline: Deadline) -> None:
        self._session_open = True
        self._post("/start_weight_update", deadline)

    def apply(self, update_id: str, deadline: Deadline) -> None:
        self._post("/update_weights", deadline, {"update_info": {"update_id": update_id}})

    def finish(self, deadline: Deadline) -> None:
        # Without an open session vLLM raises on every rank, which at tensor parallelism above one
        # spoils its queue of replies.
        if self._session_open:
            self._post("/finish_weight_update", deadline, {})
            self._session_open = False

    def adopt_session(self, is_open: bool) -> None:
        self._session_open = is_open

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


class VllmObject:
    """A ``vllm.LLM`` of this process. See `weightsync.engines.base.Engine`.

    ``LLM`` takes steps only while its owner calls it. A sender is one more such call: it must not
    run while another thread is in ``generate``. So nothing is in flight and there is nothing to
    pause; requests that were enqueued but not run go on with the new weights.
    """

    in_process = True

    def __init__(self, llm: Any, *, name: str | None = None) -> None:
        self._llm = llm
        self.name = name or f"vllm-llm-{id(llm):x}"
        config = llm.llm_engine.vllm_config.weight_transfer_config
        if config is None or config.backend != "weightsync":
            found = None if config is None else config.backend
            raise ConnectError(
                f"this LLM was created with weight-transfer backend {found!r}, expected "
                "'weightsync'",
                remedy="create it so: LLM(..., weight_transfer_config={'backend': 'weightsync'})",
            )
        self.workers = int(llm.get_world_size())
        self._session_open = False
        self._multimodal = bool(llm.llm_engine.vllm_config.model_config.multimodal_config)

    def open_session(self, path: str, token: str, deadline: Deadline) -> None:
        info = {"path": path, "session": token}
        self._llm.init_weight_transfer_engine({"init_info": info})

    def prepare(self, deadline: Deadline) -> None:
        self.begin(deadline)
        self.finish(deadline)

    def is_paused(self, deadline: Deadline) -> bool:
        return False

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        pass

    def resume(self, deadline: Deadline) -> None:
        pass

    def begin(self, deadline: Deadline) -> None:
        self._session_open = True
        self._llm.start_weight_update()

    def apply(self, update_id: str, deadline: Deadline) -> None:
        self._llm.update_weights({"update_info": {"update_id": update_id}})

    def finish(self, deadline: Deadline) -> None:
        if self._session_open:
            self._llm.finish_weight_update()
            self._session_open = False

    def adopt_session(self, is_open: bool) -> None:
        self._session_open = is_open

    def set_version(self, version: str, deadline: Deadline) -> None:
        self._llm.update_weight_version(version)

    def reset_caches(self, deadline: Deadline, *, recompute: bool) -> None:
        while not self._llm.reset_prefix_cache(
            reset_running_requests=recompute, reset_connector=True
        ):
            deadline.rest(0.05, f"{self.name} to reset its prefix cache")
        if self._multimodal:
            self._llm.reset_mm_cache()
            self._llm.llm_engine.reset_encoder_cache()

    def version(self, deadline: Deadline) -> str | None:
        return str(self._llm.get_weight_version())

    def close(self) -> None:
        pass


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
