"""The demo, the README's example, and the example script do what they say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

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
        assert step["proven"] == "received" and step["bytes"] == 1_708_544
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
    assert receipt["version"] == "1" and receipt["proven"] == "received"


def test_the_demo_names_what_it_does_not_know() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "weightsync.cli", "demo", "--engine", "nonesuch"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2 and "vllm" in done.stderr
