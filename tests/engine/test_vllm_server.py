"""A live vLLM server in processes of its own, over HTTP: updates, refusals, failures, takeover."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from engine_settings import python_path
from servers import Server, shell_server, vllm_server

import weightsync as ws
from weightsync.adapters.vllm.ways import EXTENSION
from weightsync.deadline import Deadline
from weightsync.errors import (
    ConnectError,
    EnginePoisoned,
    PlanRefused,
    RolledBack,
    Superseded,
    UpdateAborted,
    UpdateRefused,
)
from weightsync.testing import (
    LONG_PROMPT,
    PROMPTS,
    Rollout,
    build_checkpoint,
    completions_rollouts,
    load_trainer,
    prompt_logprobs,
    score,
)

BACKEND = ("--weight-transfer-config", '{"backend": "weightsync"}')
TOLERANCE = 1e-5
HERE = Path(__file__).parent


class Rig:
    """One server and both variants of its model."""

    tolerance = TOLERANCE

    def __init__(self, name: str, server: Server, *, extension: str = EXTENSION) -> None:
        self.name = name
        self.server = server
        self.models = {variant: load_trainer(name, variant) for variant in "AB"}
        self.engine = ws.connect(f"vllm+{server.url}", extension=extension)

    def rollouts(self, prompts):
        return [completions_rollouts(self.server.complete(p, 32))[0] for p in prompts]

    def assert_serves(self, variant: str) -> None:
        for prompts, tokens in ((PROMPTS, 64), ([LONG_PROMPT], 32)):
            comparison = score(self.models[variant], prompts, self.rollouts(prompts))
            assert comparison.greedy_matches == comparison.tokens == tokens, str(comparison)
            assert comparison.max_abs_logprob_difference <= self.tolerance, str(comparison)

    def sync(self, variant: str, version: str) -> ws.Receipt:
        with ws.WeightSender(ws.ModuleSource(self.models[variant]), [self.engine]) as sender:
            return sender.sync(version)

    def version(self) -> str | None:
        return self.engine.version(Deadline.after(10))

    def fail_next_apply(self, tensors: int, how: str) -> None:
        httpx.post(
            f"{self.server.url}/collective_rpc",
            json={"method": "weightsync_test_fail_after", "args": [str(tensors), how]},
            timeout=10,
            trust_env=False,
        ).raise_for_status()


@pytest.fixture(scope="module", params=["qwen2_tied", "qwen3_moe"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    log = tmp_path_factory.mktemp("server") / f"{request.param}.log"
    extension = ("--worker-extension-cls", "fault_extension.FaultExtension")
    checkpoint = build_checkpoint(request.param, "A")
    env = {"PYTHONPATH": python_path(HERE)}
    with vllm_server(checkpoint, log, *BACKEND, *extension, env=env) as server:
        yield Rig(request.param, server)


def test_updates_serve_exactly_the_trainers_weights_also_from_the_prefix_cache(rig: Rig) -> None:
    rig.assert_serves("A")
    for version, variant in enumerate("BAB", start=1):
        with ws.WeightSender(ws.ModuleSource(rig.models[variant]), [rig.engine]) as sender:
            receipt = sender.sync(version)
            rig.assert_serves(variant)
            sender._outbox.arena.view()[:] = 0xA5
            rig.assert_serves(variant)
        assert rig.version() == receipt.version == str(version)
        assert receipt.engines[0].paused_seconds > 0


def test_what_does_not_fit_is_refused_over_http_and_changes_nothing(rig: Rig) -> None:
    rig.sync("A", "A")
    before = rig.rollouts(PROMPTS)
    state = dict(rig.models["B"].state_dict())
    del state["model.layers.0.self_attn.k_proj.weight"]
    state["model.layers.0.extra"] = state["model.norm.weight"].clone()
    with ws.WeightSender(ws.StateDictSource(state), [rig.engine]) as sender:
        with pytest.raises(PlanRefused) as refusal:
            sender.sync("B")
        found = {(problem.kind, problem.name) for problem in refusal.value.problems}
        assert ("unknown", "model.layers.0.extra") in found
        assert ("missing", "model.layers.0.self_attn.{q_proj, k_proj, v_proj}.weight") in found
    assert rig.rollouts(PROMPTS) == before and rig.version() == "A"


def in_flight(rig: Rig, pool: ThreadPoolExecutor, tokens: int):
    """A long completion that is being decoded."""
    flying = pool.submit(rig.server.complete, PROMPTS[0], tokens)
    end = Deadline.after(30)
    while not _running(rig.server):
        end.rest(0.01, "the request to run")
    return flying


@pytest.mark.parametrize("pause", ["keep", "wait", "abort"])
def test_requests_in_flight_are_treated_as_asked(rig: Rig, pause: str) -> None:
    rig.sync("A", "A")
    with (
        ThreadPoolExecutor(1) as pool,
        ws.WeightSender(ws.ModuleSource(rig.models["B"]), [rig.engine]) as sender,
    ):
        staged = sender.stage("B")
        flying = in_flight(rig, pool, 480)
        staged.commit(pause=pause)
        body = flying.result(120)
    reason = body["choices"][0]["finish_reason"]
    (rollout,) = completions_rollouts(body)
    old, new = (explained(rig.models[variant], rollout) for variant in "AB")
    if pause == "abort":
        assert reason == "abort" and len(rollout.token_ids) < 480 and all(old)
    elif pause == "wait":
        assert reason == "length" and len(rollout.token_ids) == 480 and all(old)
    else:
        # Every token before the flip is the old model's, every token after it the new one's, over
        # the whole context: nothing that the old model computed was kept.
        assert reason == "length" and len(rollout.token_ids) == 480
        flip = old.index(False)
        assert 0 < flip < 480 and all(new[flip:]) and not any(new[: flip // 2])
    rig.assert_serves("B")


def explained(model, rollout: Rollout) -> list[bool]:
    """For each token, whether this model gives it this log-probability."""
    ids = torch.tensor([PROMPTS[0] + rollout.token_ids])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(PROMPTS[0]) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
    return ((expected - torch.tensor(rollout.logprobs)).abs() <= 2 * TOLERANCE).tolist()


def test_a_request_in_flight_when_its_engine_is_poisoned_ends(rig: Rig) -> None:
    rig.sync("A", "A")
    with (
        ThreadPoolExecutor(1) as pool,
        ws.WeightSender(ws.ModuleSource(rig.models["B"]), [rig.engine]) as sender,
    ):
        staged = sender.stage("B")
        rig.fail_next_apply(20, "raise")
        flying = in_flight(rig, pool, 480)
        with pytest.raises(EnginePoisoned):
            staged.commit(pause="keep")
        assert flying.result(30)["choices"][0]["finish_reason"] == "abort"
        sender.sync("cured")
    rig.assert_serves("B")


def canary(rig: Rig, variant: str, prompt: list[int] = LONG_PROMPT) -> ws.Canary:
    return ws.Canary(prompt, prompt_logprobs(rig.models[variant], prompt), 1e-4)


def test_a_canary_over_http_passes_with_the_right_weights_and_poisons_with_others(
    rig: Rig,
) -> None:
    rig.sync("A", "A")
    for prompt in (*PROMPTS, LONG_PROMPT):
        rig.rollouts([prompt])  # in the prefix cache now, what can be
        found = rig.engine.logprobs(prompt, Deadline.after(60))
        assert found == pytest.approx(prompt_logprobs(rig.models["A"], prompt), abs=TOLERANCE)
    variant = "A"
    with (
        ThreadPoolExecutor(1) as pool,
        ws.WeightSender(
            ws.ModuleSource(rig.models["B"]),
            [rig.engine],
            proof="canary",
            canary=lambda: canary(rig, variant),
        ) as sender,
    ):
        staged = sender.stage("B")
        flying = in_flight(rig, pool, 480)
        with pytest.raises(EnginePoisoned, match="does not think as the trainer does"):
            staged.commit(pause="keep")
        assert flying.result(30)["choices"][0]["finish_reason"] == "abort"
        assert rig.version() == "A" and rig.engine.is_paused(Deadline.after(10))
        with pytest.raises(UpdateRefused, match="may hold a mixture"):
            rig.engine.logprobs(PROMPTS[0], Deadline.after(60))
        variant = "B"
        receipt = sender.sync("cured")
        assert receipt.proven == "canary" and 0 <= receipt.engines[0].canary <= TOLERANCE
        assert rig.version() == "cured" and not rig.engine.is_paused(Deadline.after(10))
        rig.assert_serves("B")
        sender._canary = lambda: ws.Canary([1] * 512, [-1.0] * 511, 0.1)
        with pytest.raises(UpdateAborted, match="does not say what it thinks"):
            sender.sync("never")
    assert rig.version() == "cured" and not rig.engine.is_paused(Deadline.after(10))
    rig.assert_serves("B")


def _running(server: Server) -> str:
    text = httpx.get(f"{server.url}/metrics", timeout=10, trust_env=False).text
    return "\n".join(
        line
        for line in text.splitlines()
        if line.startswith("vllm:num_requests_running") and not line.endswith(" 0.0")
    )


def test_a_failed_apply_is_refused_to_clients_and_cured_without_a_restart(rig: Rig) -> None:
    rig.sync("A", "A")
    rig.fail_next_apply(20, "raise")
    with ws.WeightSender(ws.ModuleSource(rig.models["B"]), [rig.engine]) as sender:
        with pytest.raises(EnginePoisoned, match="broken on purpose"):
            sender.sync("B")
        assert rig.version() == "A"
        with pytest.raises(httpx.HTTPStatusError) as refused:
            rig.rollouts(PROMPTS)
        assert refused.value.response.status_code == 400
        assert "weightsync: this engine may hold a mixture" in refused.value.response.text
        sender.sync("cured")
    assert rig.version() == "cured"
    rig.assert_serves("B")


def hammer(rig: Rig, stop: threading.Event, tokens: int = 8) -> list[httpx.Response]:
    """Ask for completions until told to stop; every answer, refusals included."""
    answers = []
    request = {
        "model": "model",
        "prompt": PROMPTS[0],
        "max_tokens": tokens,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    with httpx.Client(base_url=rig.server.url, timeout=120, trust_env=False) as client:
        while not stop.is_set():
            answers.append(client.post("/v1/completions", json=request))
    return answers


def served(rig: Rig, answer: httpx.Response) -> str:
    """Which weights an answer is wholly of, or that it was refused or ended."""
    if answer.status_code == 400 and "weightsync: this engine may hold a mixture" in answer.text:
        return "refused"
    answer.raise_for_status()
    body = answer.json()
    if body["choices"][0]["finish_reason"] == "abort":
        return "ended"
    for variant, model in rig.models.items():
        comparison = score(model, PROMPTS[:1], completions_rollouts(body))
        if comparison.max_abs_logprob_difference <= TOLERANCE:
            return variant
    return "mixture"


def test_a_poisoned_engine_refuses_every_request_under_load_until_it_is_cured(rig: Rig) -> None:
    rig.sync("A", "A")
    stop = threading.Event()
    with (
        ThreadPoolExecutor(3) as pool,
        ws.WeightSender(ws.ModuleSource(rig.models["B"]), [rig.engine]) as sender,
    ):
        flying = [pool.submit(hammer, rig, stop) for _ in range(3)]
        try:
            for version in ("first", "second"):
                rig.fail_next_apply(20, "raise")
                with pytest.raises(EnginePoisoned, match="broken on purpose"):
                    sender.sync(version)
                with ThreadPoolExecutor(8) as crowd:
                    asked = [
                        crowd.submit(rig.server.complete, PROMPTS[0], 8, timeout=30)
                        for _ in range(16)
                    ]
                    for one in asked:
                        with pytest.raises(httpx.HTTPStatusError) as refused:
                            one.result(60)
                        assert refused.value.response.status_code == 400
                sender.sync(f"{version} cured")
                rig.assert_serves("B")
        finally:
            stop.set()
        answers = [served(rig, answer) for one in flying for answer in one.result(60)]
    assert set(answers) <= {"A", "B", "refused", "ended"}, set(answers)
    assert {"B", "refused"} <= set(answers)


def test_a_failed_apply_is_rolled_back_and_requests_in_flight_go_on(rig: Rig) -> None:
    source = {name: t.clone() for name, t in rig.models["A"].state_dict().items()}
    with (
        ThreadPoolExecutor(1) as pool,
        ws.WeightSender(ws.StateDictSource(source), [rig.engine], rollback="retain") as sender,
    ):
        sender.sync("A")
        for name, tensor in rig.models["B"].state_dict().items():
            source[name].copy_(tensor)
        staged = sender.stage("B")
        rig.fail_next_apply(20, "raise")
        flying = in_flight(rig, pool, 480)
        with pytest.raises(RolledBack, match="broken on purpose"):
            staged.commit(pause="keep")
        assert rig.version() == "A"
        body = flying.result(120)
        assert body["choices"][0]["finish_reason"] == "length"
        (rollout,) = completions_rollouts(body)
        assert all(explained(rig.models["A"], rollout))
        rig.assert_serves("A")
        sender.sync("B")
        assert rig.version() == "B"
        rig.assert_serves("B")


def test_fifty_updates_leave_the_servers_processes_as_they_were(rig: Rig) -> None:
    """Descriptors, mappings, threads and memory, shared and its own, of every process of the
    server."""
    with ws.WeightSender(ws.ModuleSource(rig.models["B"]), [rig.engine]) as sender:
        for step in range(2):
            sender.sync(step)
        before = resources(rig.server)
        for step in range(50):
            sender.sync(step)
        after = resources(rig.server)
    assert after.keys() == before.keys()
    for pid, held in before.items():
        # The allocator's own, which come and go with whatever else the server does.
        assert after[pid].pop("mappings") <= held.pop("mappings") + 10
        assert after[pid].pop("resident bytes") <= held.pop("resident bytes") + (16 << 20)
    assert after == before
    rig.assert_serves("B")


def resources(server: Server) -> dict[int, dict[str, int]]:
    """By process of the server's session."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            session = int(status.read_text().rpartition(")")[2].split()[3])
            if session != server.process.pid:
                continue
            maps = (status.parent / "maps").read_text()
            rollup = (status.parent / "smaps").read_text().split("memfd:weightsync")
            found[int(status.parent.name)] = {
                "mappings": maps.count("\n"),
                "resident bytes": int(
                    (status.parent / "status").read_text().split("RssAnon:")[1].split()[0]
                )
                * 1024,
                "descriptors": len(os.listdir(status.parent / "fd")),
                "threads": len(os.listdir(status.parent / "task")),
                "shared mappings": maps.count("memfd:weightsync"),
                "shared bytes": sum(int(part.split("Size:")[1].split()[0]) for part in rollup[1:]),
            }
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


DYING_SENDER = """
import os, signal, sys
import weightsync as ws
from weightsync.testing import build_checkpoint

url, moment, checkpoint = sys.argv[1:]
engine = ws.connect(url)
sender = ws.WeightSender(ws.SafetensorsSource(checkpoint), [engine])
staged = sender.stage("never")

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def then_die(call):
    def called(*args, **kwargs):
        call(*args, **kwargs)
        die()
    return called

if moment == "staged":
    die()
setattr(engine, moment, then_die(getattr(engine, moment)))
staged.commit()
"""


@pytest.mark.parametrize("moment", ["staged", "begin", "pause", "apply", "finish", "reset_caches"])
def test_a_sender_that_is_killed_is_followed_by_another_without_a_restart(
    rig: Rig, moment: str, tmp_path: Path
) -> None:
    rig.sync("A", "A")
    script = tmp_path / "dying_sender.py"
    script.write_text(textwrap.dedent(DYING_SENDER))
    target = [f"vllm+{rig.server.url}", moment, str(build_checkpoint(rig.name, "B"))]
    died = subprocess.run([sys.executable, str(script), *target], timeout=120, check=False)
    assert died.returncode == -signal.SIGKILL
    with ws.WeightSender(ws.ModuleSource(rig.models["B"]), [rig.engine]) as sender:
        sender.sync("after")
    assert rig.version() == "after"
    rig.assert_serves("B")
    assert not rig.engine.is_paused(Deadline.after(10))


def test_the_example_script_trains_and_syncs(rig: Rig) -> None:
    script = HERE.parents[1] / "examples" / "sync_after_each_step.py"
    model = str(build_checkpoint(rig.name, "A"))
    done = subprocess.run(
        [sys.executable, str(script), model, rig.server.url],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        "step 1",
        "step 2",
        "step 3",
    ]
    assert rig.version() == "3"


def test_an_update_of_a_sleeping_engine_ends_and_is_served_when_it_wakes(rig: Rig) -> None:
    """Sleep is bookkeeping on the CPU: its weights stay where they are."""
    rig.sync("A", "A")
    with httpx.Client(base_url=rig.server.url, timeout=30, trust_env=False) as client:
        client.post("/sleep?level=1").raise_for_status()
        assert client.get("/is_sleeping").json() == {"is_sleeping": True}
        rig.sync("B", "B")
        assert client.get("/is_sleeping").json() == {"is_sleeping": True}
        client.post("/wake_up").raise_for_status()
    assert rig.version() == "B"
    rig.assert_serves("B")


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weightsync.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_pushed_checkpoint_is_verified_and_another_is_told_from_it(
    rig: Rig, tmp_path: Path
) -> None:
    url, log = f"vllm+{rig.server.url}", tmp_path / "receipts.jsonl"
    both = {variant: build_checkpoint(rig.name, variant) for variant in "AB"}
    for proof in ("off", "received", "served"):
        pushed = command(
            *("push", both["B"], "--engine", url, "--version", f"B {proof}"),
            *("--proof", proof, "--receipts", log),
        )
        assert pushed.returncode == 0, pushed.stderr
        says = {"off": "100 % unproven", "received": "100 % received"}.get(proof, "% ")
        assert f"serves version 'B {proof}'" in pushed.stdout and says in pushed.stdout
    verify = ("verify", both["B"], "--engine", url)
    looked = command(*verify, "--receipts", log)
    receipt = ws.Receipt.from_json(command(*verify, "--json").stdout)
    assert receipt.intact and receipt.mode == "look" and receipt.version == "B served"
    read = sum(
        receipt.levels[level].nbytes for level in ("served", "spot") if level in receipt.levels
    )
    assert read > 0
    assert looked.returncode == 0, looked.stderr
    assert f"{rig.engine.name} reports version 'B served', and differs in nothing" in looked.stdout
    unproven = {n for w in receipt.engines[0].workers if w.proof for n in w.proof.unproven}
    assert looked.stdout.count("cannot be read back") == min(len(unproven), 10)
    other = command("verify", both["A"], "--engine", url, "--receipts", log)
    assert other.returncode == 1 and "the model does not hold the trainer's" in other.stderr
    assert "model.norm.weight" in command("verify", both["A"], "--engine", url, "--json").stdout
    rig.assert_serves("B")
    shown = json.loads(command("receipts", "show", log, "--json").stdout)
    found = [one["receipt"] for one in shown]
    assert [one["mode"] for one in found] == ["staged"] * 3 + ["look"]
    assert [one["version"] for one in found] == ["B off", "B received", *["B served"] * 2]
    assert found[2]["levels"] == found[3]["levels"], "what was proven once is found again"
    sound = command("receipts", "check", log, "--last", found[-1]["hash"])
    assert sound.stdout == "sound: 4 receipt(s)\n"


def test_an_older_sender_learns_that_it_was_superseded(rig: Rig) -> None:
    old = ws.WeightSender(ws.ModuleSource(rig.models["A"]), [rig.engine])
    old.sync("old")
    rig.sync("B", "new")
    with pytest.raises(Superseded):
        old.sync("older")
    old.close()
    rig.assert_serves("B")


def test_every_answer_under_load_is_wholly_old_or_wholly_new(rig: Rig) -> None:
    rig.sync("A", "A")
    stop = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        flying = [pool.submit(hammer, rig, stop) for _ in range(2)]
        try:
            for version, variant in enumerate("BA" * 8):
                with ws.WeightSender(ws.ModuleSource(rig.models[variant]), [rig.engine]) as sender:
                    sender.stage(version).commit(pause="wait")
        finally:
            stop.set()
        answers = [served(rig, answer) for one in flying for answer in one.result(60)]
    assert len(answers) > 10 and set(answers) <= {"A", "B"}


@pytest.mark.parametrize(
    ("flags", "env", "says"),
    [
        (BACKEND, {"VLLM_SERVER_DEV_MODE": ""}, "VLLM_SERVER_DEV_MODE=1"),
        ((), {}, "backend None"),
        (
            (*BACKEND, "--quantization", "int8_per_channel_weight_only", "--dtype", "bfloat16"),
            {},
            "quantization=int8_per_channel_weight_only: .* not shown to equal a fresh load",
        ),
    ],
    ids=["no development mode", "no backend", "quantized"],
)
def test_a_server_without_a_flag_is_refused_with_the_command_that_works(
    flags: tuple[str, ...], env: dict[str, str], says: str, tmp_path: Path
) -> None:
    checkpoint = build_checkpoint("qwen2", "A")
    with vllm_server(checkpoint, tmp_path / "log", *flags, env=env) as server:
        with pytest.raises(ConnectError, match=says) as refused:
            ws.connect(f"vllm+{server.url}")
        port = server.url.rpartition(":")[2]
    remedy = str(refused.value.remedy)
    if "--quantization" in flags:
        assert "fp8_per_channel" in remedy
        return
    command = remedy[remedy.index("VLLM_SERVER_DEV_MODE=1") :]
    assert command == (
        "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model "
        f"{checkpoint} --host 127.0.0.1 --port {port} "
        """--weight-transfer-config '{"backend": "weightsync"}'"""
    )
    if flags:
        return  # the command is the same: one start of it is enough
    # "With your other flags added": of this server's, the one without which it compiles for long.
    with shell_server(f"{command} --enforce-eager", server.url, tmp_path / "log"):
        engine = ws.connect(f"vllm+{server.url}")
        # Started so, vLLM runs an fp32 checkpoint in bf16; a cast has to be declared.
        source = ws.SafetensorsSource(build_checkpoint("qwen2", "B"), dtype=torch.bfloat16)
        with ws.WeightSender(source, [engine]) as sender:
            assert len(sender.sync(1).casts) == 27
        assert engine.version(Deadline.after(10)) == "1"


def test_nobody_at_the_url_is_an_error_with_the_command() -> None:
    with pytest.raises(ConnectError, match="no server answers") as refused:
        ws.connect("vllm+http://127.0.0.1:1")
    assert "VLLM_SERVER_DEV_MODE=1 python -m" in str(refused.value.remedy)
