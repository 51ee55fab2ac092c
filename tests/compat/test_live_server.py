"""One live server per way into the vLLM of this environment: updated while a request is running."""

from __future__ import annotations

import shlex
import threading
from pathlib import Path

import pytest
from servers import Server, vllm_server
from test_live_update import EXTENSION, expected_way

import weightsync as ws
from weightsync.errors import ConnectError
from weightsync.testing import (
    LONG_PROMPT,
    PROMPTS,
    build_checkpoint,
    completions_rollouts,
    load_trainer,
    score,
)

TOLERANCE = 1e-5
FLAGS = {
    "backend": ("--weight-transfer-config", '{"backend": "weightsync"}'),
    "extension": ("--worker-extension-cls", EXTENSION),
}


def assert_serves(server: Server, model: object) -> None:
    for prompt in (*PROMPTS, LONG_PROMPT):
        rollouts = completions_rollouts(server.complete(prompt, 32))
        comparison = score(model, [prompt], rollouts)
        assert comparison.greedy_matches == comparison.tokens == 32, str(comparison)
        assert comparison.max_abs_logprob_difference <= TOLERANCE, str(comparison)


@pytest.mark.parametrize("options", FLAGS)
def test_a_server_is_updated_while_a_request_runs(options: str, tmp_path: Path) -> None:
    if expected_way(options) is None:
        pytest.skip("this vLLM takes no backend but its own")
    checkpoint = build_checkpoint("qwen2_tied", "A")
    models = {variant: load_trainer("qwen2_tied", variant) for variant in "AB"}
    answers: list[dict] = []
    with vllm_server(checkpoint, tmp_path / "log", *FLAGS[options]) as server:
        engine = ws.connect(f"vllm+{server.url}")
        assert engine.way == expected_way(options)
        assert_serves(server, models["A"])
        for version, variant in enumerate("BAB", start=1):
            request = threading.Thread(
                target=lambda: answers.append(server.complete(PROMPTS[0], 400))
            )
            request.start()
            with ws.WeightSender(ws.ModuleSource(models[variant]), [engine]) as sender:
                sender.sync(version)
            request.join(60)
            assert len(answers) == version
            assert_serves(server, models[variant])
        engine.close()
        if options == "extension":
            with pytest.raises(ConnectError, match="start it so") as refusal:
                ws.connect(f"vllm+{server.url}", extension="somebody.elses.Extension")
            flag = "backend" if expected_way("backend") == "backend session" else "extension"
            assert shlex.join(FLAGS[flag]) in str(refusal.value.remedy)
