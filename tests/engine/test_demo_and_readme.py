"""The demo, the README's example, and the example script do what they say."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from weightsync.cli import demo

ROOT = Path(__file__).resolve().parents[2]
ENV = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=cwd,
        env=ENV,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def test_the_demo_proves_every_step_and_closes_the_gap(tmp_path: Path) -> None:
    done = run("-m", "weightsync.cli", "demo", "--json", "--steps", "3", cwd=tmp_path)
    document = json.loads(done.stdout)
    assert [step["version"] for step in document["steps"]] == ["1", "2", "3"]
    for step in document["steps"]:
        assert step["bytes"] == 1_708_544 and step["proven"] in step["levels"]
        assert step["levels"].keys() <= {"served", "spot", "received"}
        assert sum(share["bytes"] for share in step["levels"].values()) == step["bytes"]
        assert {"fill", "verify", "commit", "paused", "load"} <= step["seconds"].keys()
        assert step["logprob_gap_after"] <= 1e-5 < 1e-2 < step["logprob_gap_before"]
    assert len({step["receipt"] for step in document["steps"]}) == 3


def test_the_readmes_example_runs_as_it_stands(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    script = tmp_path / "example.py"
    script.write_text(blocks[0])
    lines = [line for line in blocks[0].splitlines() if line.strip()]
    assert len(lines) <= 10
    done = run(str(script), cwd=tmp_path)
    receipt = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert receipt["version"] == "1" and receipt["proven"] == "served"


def test_the_demo_says_of_how_much_it_has_proven_what() -> None:
    """Of all levels that there can be; today's engines show the first alone."""
    levels = {"served": 9895, "spot": 100, "received": 5}
    step = {
        "version": "1",
        "proven": "received",
        "levels": {level: {"tensors": 1, "bytes": n} for level, n in levels.items()},
        "bytes": 10_000,
        "seconds": dict.fromkeys(("fill", "verify", "load", "paused"), 0.01),
        "logprob_gap_before": 0.5,
        "logprob_gap_after": 1e-6,
    }
    printed = io.StringIO()
    document = {"model": "m", "engine": "e", "steps": [step, step]}
    demo._show(document, Console(file=printed, width=80))
    closing = printed.getvalue().partition("All steps are proven")[2].splitlines()
    assert closing[1].startswith("  99.0 % served: what the model holds was read back")
    assert closing[2].startswith("  1.0 % spot: what the engine has packed was read back at")
    assert closing[3].startswith("  < 0.1 % received: what cannot be read back: what the engine's")


def test_the_demo_names_what_it_does_not_know() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "weightsync.cli", "demo", "--engine", "nonesuch"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2 and "vllm" in done.stderr
