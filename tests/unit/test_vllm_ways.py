"""Which way into an engine is chosen, what each sends, and what is missing in an older vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from weightsync.adapters.vllm.connector_http import VllmServer
from weightsync.adapters.vllm.support import FUNCTIONS, INFO, lacking
from weightsync.adapters.vllm.ways import EXTENSION, Offer, choose
from weightsync.deadline import Deadline
from weightsync.errors import ConnectError, UpdateRefused


def soon() -> Deadline:
    return Deadline.after(60)


class Recorder:
    """A caller that answers every question alike, and keeps what it was asked."""

    def __init__(self, answers: list[Any] | None = None) -> None:
        self.calls: list[Any] = []
        self.answers = answers or []

    def call(self, name: str, body: dict[str, Any] | None, deadline: Deadline) -> Any:
        self.calls.append((name, body))

    def rpc(self, method: str, arguments: list[str], deadline: Deadline) -> list[Any]:
        self.calls.append((method, *arguments))
        return self.answers


@pytest.mark.parametrize(
    ("offer", "way"),
    [
        (Offer("weightsync", None, True), "backend session"),
        (Offer("weightsync", None, False), "backend messages"),
        (Offer("weightsync", EXTENSION, True), "backend session"),
        (Offer("nccl", EXTENSION, True), "worker extension"),
        (Offer(None, EXTENSION, False), "worker extension"),
        (Offer("nccl", None, True), None),
        (Offer(None, "their.Extension", True), None),
    ],
)
def test_the_backend_goes_before_the_extension(offer: Offer, way: str | None) -> None:
    found = choose(offer, Recorder(), EXTENSION)
    assert (None if found is None else found.name) == way


def test_somebodys_own_subclass_is_known_by_its_path() -> None:
    found = choose(Offer(None, "mine.Mine", True), Recorder(), "mine.Mine")
    assert found is not None and found.name == "worker extension"


def drive(offer: Offer) -> list[Any]:
    """Everything that a sender asks of an engine in one update."""
    caller = Recorder()
    way = choose(offer, caller, EXTENSION)
    assert way is not None
    way.open_session("/run/socket", "token", soon())
    way.prepare(soon())
    way.begin(soon())
    way.apply("u1", soon())
    way.finish(soon())
    way.finish(soon())
    return caller.calls


def test_a_session_is_finished_once_and_only_if_it_was_started() -> None:
    assert drive(Offer("weightsync", None, True)) == [
        ("init_weight_transfer_engine", {"init_info": {"path": "/run/socket", "session": "token"}}),
        ("start_weight_update", None),
        ("finish_weight_update", None),
        ("start_weight_update", None),
        ("update_weights", {"update_info": {"update_id": "u1"}}),
        ("finish_weight_update", None),
    ]


def test_the_older_hook_is_never_asked_for_a_session() -> None:
    calls = drive(Offer("weightsync", None, False))
    assert {name for name, _ in calls} == {"init_weight_transfer_engine"}
    assert [body["init_info"]["call"] for _, body in calls] == [
        "join",
        "prepare",
        "finish",
        "apply",
    ]


def test_an_extension_is_called_by_its_own_names() -> None:
    assert drive(Offer(None, EXTENSION, False)) == [
        ("weightsync_join", "/run/socket", "token"),
        ("weightsync_prepare",),
        ("weightsync_apply", "u1"),
    ]


@pytest.mark.parametrize(
    ("answers", "version"),
    [(["3", "3"], "3"), (["3", "4"], None), ([None, None], None), ([], None)],
)
def test_the_workers_version_is_what_they_agree_on(answers: list[Any], version: str | None) -> None:
    way = choose(Offer(None, EXTENSION, False), Recorder(answers), EXTENSION)
    assert way is not None and way.version(soon()) == version


# --- a server, as far as it answers a connector at connect ------------------------------------


class Server:
    """Answers as a vLLM server does that has these routes and was started so."""

    def __init__(
        self,
        *,
        sessions: bool,
        versions: bool,
        says_success: bool,
        backend: str | None = None,
        extension: str = "",
    ) -> None:
        self.asked: list[str] = []
        self.routes: dict[str, Any] = {
            "/v1/models": {"data": [{"id": "m", "root": "/models/m"}]},
            "/get_world_size": {"world_size": 1},
            "/server_info": {
                "vllm_config": {
                    "weight_transfer_config": backend and {"backend": backend},
                    "parallel_config": {"worker_extension_cls": extension},
                    "model_config": {"multimodal_config": None},
                }
            },
            "/reset_prefix_cache": {"success": True} if says_success else None,
            "/collective_rpc": {"results": ["7"]},
        }
        self.posts = {"/start_draft_weight_update"} if sessions else set()
        if versions:
            self.routes |= {"/weight_info": {"weight_version": "5"}, "/update_weight_version": {}}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(f"{request.method} {request.url.raw_path.decode()}")
        path = request.url.path
        if path in self.posts:
            return httpx.Response(405)
        if path not in self.routes:
            return httpx.Response(404)
        body = self.routes[path]
        return httpx.Response(200) if body is None else httpx.Response(200, json=body)


def connect(
    server: Callable[[httpx.Request], httpx.Response], monkeypatch: pytest.MonkeyPatch
) -> VllmServer:
    original = httpx.Client

    def client(**options: Any) -> httpx.Client:
        return original(transport=httpx.MockTransport(server), **options)

    monkeypatch.setattr(httpx, "Client", client)
    return VllmServer("http://127.0.0.1:8000")


def test_a_server_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(sessions=True, versions=True, says_success=True, backend="weightsync")
    engine = connect(server, monkeypatch)
    assert (engine.way, engine.version(soon())) == ("backend session", "5")
    engine.reset_caches(soon(), recompute=False)
    assert [a for a in server.asked if "reset" in a] == [
        "POST /reset_prefix_cache?reset_external=false&reset_running_requests=false"
    ]


def test_an_older_server_reports_what_its_workers_know(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(sessions=False, versions=False, says_success=False, extension=EXTENSION)
    engine = connect(server, monkeypatch)
    assert (engine.way, engine.version(soon())) == ("worker extension", "7")
    engine.set_version("8", soon())
    assert not any("weight_version" in asked for asked in server.asked)


def test_a_reset_that_says_nothing_is_repeated_so_that_a_failure_would_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(sessions=False, versions=False, says_success=False, backend="weightsync")
    engine = connect(server, monkeypatch)
    assert (engine.way, engine.version(soon())) == ("backend messages", None)
    engine.reset_caches(soon(), recompute=False)
    assert [a.rpartition("=")[2] for a in server.asked if "reset" in a] == ["false", "true"]


@pytest.mark.parametrize(
    ("sessions", "flag"),
    [(True, "--weight-transfer-config"), (False, f"--worker-extension-cls {EXTENSION}")],
)
def test_the_refusal_names_the_flag_that_works_there(
    sessions: bool, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(sessions=sessions, versions=False, says_success=True, backend="nccl")
    with pytest.raises(ConnectError, match="'nccl'") as refusal:
        connect(server, monkeypatch)
    assert flag in str(refusal.value.remedy) and "/models/m" in str(refusal.value.remedy)


# --- what an engine thinks of a prompt --------------------------------------------------------


def thinking(monkeypatch: pytest.MonkeyPatch, answer: Any, mode: str | None = None) -> VllmServer:
    """A server that answers completions so."""
    server = Server(sessions=True, versions=True, says_success=True, backend="weightsync")
    server.routes["/server_info"]["vllm_config"]["model_config"]["logprobs_mode"] = mode

    def respond(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/v1/completions":
            return server(request)
        asked = json.loads(request.content)
        assert (asked["model"], asked["prompt"], asked["prompt_logprobs"]) == ("m", [5, 6, 7], 1)
        return answer

    return connect(respond, monkeypatch)


def said(*values: Any) -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"prompt_logprobs": list(values)}]})


def test_what_is_said_of_the_prompts_own_tokens_is_picked_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    best = {"9": {"logprob": -0.25, "rank": 1}}
    answer = said(None, {**best, "6": {"logprob": -1.5}}, {"7": {"logprob": -2.5}, **best})
    engine = thinking(monkeypatch, answer, "raw_logprobs")
    assert engine.logprobs((5, 6, 7), soon()) == [-1.5, -2.5]


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (httpx.Response(400, text="longer than the context"), UpdateRefused, "longer than"),
        (httpx.Response(404, text="no such model"), UpdateRefused, "no such model"),
        (httpx.Response(500, text="not JSON compliant"), ConnectError, "not JSON"),
        (httpx.Response(200, text="hello"), ConnectError, "every token"),
        (httpx.Response(200, json={"choices": []}), ConnectError, "every token"),
        (httpx.Response(200, json={"choices": [{"text": ""}]}), ConnectError, "every token"),
        (said(None, {"6": {"logprob": -1.0}}), ConnectError, "every token"),
        (said(None, {"6": {"logprob": -1.0}}, {"8": {"logprob": -1.0}}), ConnectError, "every"),
        (said(None, None, {"7": {"logprob": -1.0}}), ConnectError, "every token"),
        (said(None, {"6": {"logprob": None}}, {"7": {"logprob": 0}}), ConnectError, "every"),
    ],
)
def test_an_answer_that_says_less_is_a_typed_error(
    answer: httpx.Response, error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(error, match=says):
        thinking(monkeypatch, answer).logprobs((5, 6, 7), soon())


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_logits_are_not_taken_for_log_probabilities(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UpdateRefused, match=f"logprobs_mode={mode}"):
        thinking(monkeypatch, said(), mode).logprobs((5, 6, 7), soon())


# --- reload -----------------------------------------------------------------------------------


def test_a_reload_that_lacks_a_name_is_told_by_it() -> None:
    module = SimpleNamespace(**dict.fromkeys(FUNCTIONS, print))
    info = type("Info", (), dict.fromkeys(INFO, 1))
    assert lacking(module, info) == []
    del module.get_layerwise_info
    others = [name for name in INFO if name != "reset"]
    assert lacking(module, type("Info", (), {"reset": 1})) == ["get_layerwise_info", *others]
