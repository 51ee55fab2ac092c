"""The mark that a poisoned worker leaves, and the guard that finds it from another process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from weightsync.adapters.vllm.guard import AdmissionGuard, Mark, poisoned
from weightsync.adapters.vllm.plugin import ENGINE_ID
from weightsync.runtime import runtime_directory

WORKER = """
import sys
from weightsync.adapters.vllm.guard import Mark
mark = Mark(); mark.set(sys.argv[1]); print("set", flush=True); sys.stdin.readline(); mark.clear()
print("clear", flush=True); sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def own_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv(ENGINE_ID, "1.abc")
    monkeypatch.setattr(AdmissionGuard, "_base", None)


def worker(reason: str, engine: str = "1.abc") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, reason],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, ENGINE_ID: engine},
    )
    assert process.stdout is not None and process.stdout.readline() == "set\n"
    return process


def test_requests_are_refused_with_the_reason_while_any_worker_is_poisoned() -> None:
    AdmissionGuard.validate_params(None)
    first, second = worker("rank 0 broke"), worker("rank 1 broke")
    with pytest.raises(ValueError, match=r"weightsync: .* broke"):
        AdmissionGuard.validate_params(None)
    for process in (first, second):
        with pytest.raises(ValueError, match="broke"):
            AdmissionGuard.validate_params(None)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "clear\n"
    AdmissionGuard.validate_params(None)
    for process in (first, second):
        process.communicate("\n", timeout=20)


def test_another_engine_is_not_refused_also_one_whose_name_begins_alike() -> None:
    process = worker("other", engine="1.abcdef")
    AdmissionGuard.validate_params(None)
    process.communicate("\n\n", timeout=20)


def test_what_a_killed_worker_left_is_removed_by_the_next_mark() -> None:
    process = worker("killed", engine="9.dead")
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)
    assert poisoned(runtime_directory(), "poisoned-9.dead") == "killed"
    mark = Mark()
    mark.set("mine")
    assert poisoned(runtime_directory(), "poisoned-9.dead") is None
    mark.set("again")
    assert poisoned(runtime_directory(), "poisoned-1.abc") == "again"
    mark.clear()
    mark.clear()
    assert list(runtime_directory().iterdir()) == []


def test_the_guard_changes_no_logits() -> None:
    guard = AdmissionGuard(None, None, None)
    logits = object()
    assert guard.apply(logits) is logits and guard.apply(logits, None) is logits
    assert guard.is_argmax_invariant() and not guard.add_request(0, None)
