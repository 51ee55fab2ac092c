"""A live vLLM server by URL, from the trainer's side. Imports nothing of vLLM."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from weightsync.adapters.vllm.limits import check_quantization
from weightsync.adapters.vllm.thoughts import check_mode, of_completion, refused
from weightsync.adapters.vllm.ways import EXTENSION, Offer, ThroughWay, choose
from weightsync.deadline import Deadline
from weightsync.engines.base import PauseMode
from weightsync.errors import ConnectError, DeadlineExceeded

__all__ = ["VllmServer"]

CONNECT_SECONDS = 30.0
CONFIG = '{"backend": "weightsync"}'


class VllmServer(ThroughWay):
    """A vLLM OpenAI server in development mode, over HTTP. See `weightsync.engines.base.Engine`.

    Older servers do not report a weight version. Then `version` says what the workers know, where
    a worker extension is there to be asked, else None; the receipt says it in any case.

    Args:
        url: ``http://host:port``.
        name: for messages; the URL by default.
        headers: sent with every request, for instance an API key.
        extension: path of your own subclass of `WeightSyncWorkerExtension`, where the server was
            started with one.

    Attributes:
        way: into its workers, for messages (see `weightsync.adapters.vllm.ways`).

    Raises:
        ConnectError: nobody answers there, or the server lacks a flag, and says the exact command
            that would work; or it is quantized in a way that was not shown to work.
    """

    in_process = False

    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        headers: Mapping[str, str] | None = None,
        extension: str = EXTENSION,
    ) -> None:
        self._url = url.rstrip("/")
        self.name = name or f"vllm+{self._url}"
        self._http = httpx.Client(
            base_url=self._url, timeout=CONNECT_SECONDS, trust_env=False, headers=headers
        )
        try:
            self._preflight(extension, Deadline.after(CONNECT_SECONDS))
        except BaseException:
            self._http.close()
            raise

    def is_paused(self, deadline: Deadline) -> bool:
        return bool(self._get("/is_paused", deadline).get("is_paused"))

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        # Caches are reset after the update, once, and checked; what vLLM would clear here is
        # filled again by then.
        self._post(f"/pause?mode={mode}&clear_cache=false", deadline)

    def resume(self, deadline: Deadline) -> None:
        self._post("/resume", deadline)

    def _set_reported_version(self, version: str, deadline: Deadline) -> None:
        self._post("/update_weight_version", deadline, {"new_version": version})

    def _reported_version(self, deadline: Deadline) -> str | None:
        found = self._get("/weight_info", deadline).get("weight_version")
        return None if found is None else str(found)

    def reset_caches(self, deadline: Deadline, *, recompute: bool) -> None:
        # It may fail for a moment, while blocks are still on their way out.
        while not self._reset_prefix_cache(deadline, recompute=recompute):
            deadline.rest(0.05, f"{self.name} to reset its prefix cache")
        if self._multimodal:
            self._post("/reset_mm_cache", deadline)
            self._post("/reset_encoder_cache", deadline)

    def logprobs(self, prompt: Sequence[int], deadline: Deadline) -> list[float]:
        check_mode(self.name, self._logprobs_mode)
        body = {
            "model": self._served_name(deadline),
            "prompt": list(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 1,
        }
        answer = self._send("POST", "/v1/completions", deadline, body)
        if 400 <= answer.status_code < 500:
            raise refused(self.name, answer.text[:2000])
        return of_completion(self.name, prompt, self._content(answer, "POST", "/v1/completions"))

    def close(self) -> None:
        self._http.close()

    def _reset_prefix_cache(self, deadline: Deadline, *, recompute: bool) -> bool:
        # Where there is no KV connector, older servers call a reset that asks for it a failure.
        external = str(self._connector).lower()
        path = f"/reset_prefix_cache?reset_external={external}&reset_running_requests="
        answer = self._post(path + str(recompute).lower(), deadline)
        if "success" not in answer:
            # Older servers keep to themselves whether it went well, unless running requests are
            # to be reset with it: then a failure is an error.
            self._post(path + "true", deadline)
            return True
        return answer["success"] is True

    # --- at connect -------------------------------------------------------------------------

    def _preflight(self, extension: str, deadline: Deadline) -> None:
        model = self._model()
        has_sessions = self._has_route("/start_draft_weight_update", deadline)
        try:
            size = self._get("/get_world_size", deadline).get("world_size")
        except ConnectError as error:
            raise ConnectError(
                f"the server at {self._url} does not offer weight updates: it runs without "
                f"VLLM_SERVER_DEV_MODE=1, or it is no vLLM of 0.17 or later. {error}",
                remedy=f"start it so, with your other flags added: {self._command(model)}",
            ) from error
        config = self._get("/server_info?config_format=json", deadline).get("vllm_config") or {}
        offer = Offer(
            backend=(config.get("weight_transfer_config") or {}).get("backend"),
            extension=(config.get("parallel_config") or {}).get("worker_extension_cls") or None,
            has_sessions=has_sessions,
        )
        way = choose(offer, self, extension)
        if way is None or not isinstance(size, int):
            raise ConnectError(
                f"the server at {self._url} was started with {offer.described}; none of them is "
                "weightsync's",
                remedy="start it so, with your other flags added: "
                + self._command(model, extend=not offer.backend_would_work),
            )
        model_config = config.get("model_config") or {}
        check_quantization(f"the server at {self._url}", model_config.get("quantization"))
        self._way = way
        self._logprobs_mode = model_config.get("logprobs_mode")
        self.workers = size
        self._reports_version = self._has_route("/weight_info", deadline)
        self._connector = config.get("kv_transfer_config") is not None
        self._multimodal = bool(model_config.get("multimodal_config"))

    def _model(self) -> str:
        """What the server serves, for messages."""
        try:
            models = self._http.get("/v1/models").json()["data"]
            return str(models[0].get("root") or models[0]["id"])
        except httpx.TransportError as error:
            raise ConnectError(
                f"no server answers at {self._url}: {error}",
                remedy=f"start one: {self._command('MODEL')}",
            ) from error
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            return "MODEL"  # not the OpenAI routes; what matters is asked next

    def _served_name(self, deadline: Deadline) -> str:
        """Of the model itself; adapters, of which none is taken, would come after it."""
        models = self._get("/v1/models", deadline).get("data") or [{}]
        return str(models[0].get("id"))

    def _has_route(self, path: str, deadline: Deadline) -> bool:
        """Whether there is such a route. One that wants a POST is there, but answers no GET."""
        return self._send("GET", path, deadline, None).status_code != httpx.codes.NOT_FOUND

    def _command(self, model: str, *, extend: bool = False) -> str:
        url = httpx.URL(self._url)
        port = f" --port {url.port}" if url.port else ""
        flag = (
            f"--worker-extension-cls {EXTENSION}"
            if extend
            else f"--weight-transfer-config {shlex.quote(CONFIG)}"
        )
        return (
            "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model "
            f"{shlex.quote(model)} --host {url.host}{port} {flag}"
        )

    # --- requests ---------------------------------------------------------------------------

    def call(self, name: str, body: dict[str, Any] | None, deadline: Deadline) -> Any:
        """See `weightsync.adapters.vllm.ways.Caller`."""
        return self._post(f"/{name}", deadline, body or {})

    def rpc(self, method: str, arguments: list[str], deadline: Deadline) -> list[Any]:
        """See `weightsync.adapters.vllm.ways.Caller`. vLLM turns scalar answers into text."""
        body = {"method": method, "args": arguments}
        results = self._post("/collective_rpc", deadline, body).get("results")
        return results if isinstance(results, list) else []

    def _get(self, path: str, deadline: Deadline) -> dict[str, Any]:
        return self._request("GET", path, deadline, None)

    def _post(self, path: str, deadline: Deadline, body: Any = None) -> dict[str, Any]:
        return self._request("POST", path, deadline, body)

    def _request(self, method: str, path: str, deadline: Deadline, body: Any) -> dict[str, Any]:
        return self._content(self._send(method, path, deadline, body), method, path)

    def _content(self, answer: httpx.Response, method: str, path: str) -> dict[str, Any]:
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

    def _send(self, method: str, path: str, deadline: Deadline, body: Any) -> httpx.Response:
        awaited = f"{self.name} to answer {method} {path}"
        try:
            return self._http.request(method, path, json=body, timeout=deadline.remaining(awaited))
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(awaited, deadline.seconds) from error
        except httpx.TransportError as error:
            raise ConnectError(
                f"{self.name} does not answer {method} {path}: {error}",
                remedy="see whether the server is alive, and its log",
            ) from error
