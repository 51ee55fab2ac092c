"""What a poisoned worker leaves, and the guard that finds it from another process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
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
    monkeypatch.setattr(AdmissionGuard, "_ours", False)


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


def test_what_a_killed_worker_left_is_removed_when_the_next_one_starts() -> None:
    process = worker("killed", engine="9.dead")
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)
    assert poisoned(runtime_directory(), "engine-9.dead-") == (1, "killed")
    mark = Mark()
    assert poisoned(runtime_directory(), "engine-9.dead-") == (0, None)
    mark.close()
    mark.close()
    assert list(runtime_directory().iterdir()) == []


def test_the_last_reason_counts_and_clearing_twice_is_harmless() -> None:
    mark = Mark()
    assert poisoned(runtime_directory(), "engine-1.abc-") == (1, None)
    mark.set("mine")
    mark.set("again")
    assert poisoned(runtime_directory(), "engine-1.abc-") == (1, "again")
    mark.clear()
    mark.clear()
    assert poisoned(runtime_directory(), "engine-1.abc-") == (1, None)
    mark.close()


def test_threads_that_set_at_once_leave_one_mark_that_one_clear_removes() -> None:
    mark = Mark()
    threads = [threading.Thread(target=mark.set, args=(f"{n}",)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mark.clear()
    AdmissionGuard.validate_params(None)
    mark.close()


def test_a_swept_runtime_directory_means_no_until_the_worker_marks_again() -> None:
    mark = Mark()
    AdmissionGuard.validate_params(None)
    mark.set("broken")
    shutil.rmtree(runtime_directory())
    with pytest.raises(ValueError, match="cannot be told"):
        AdmissionGuard.validate_params(None)
    mark.set("broken")
    with pytest.raises(ValueError, match="broken"):
        AdmissionGuard.validate_params(None)
    mark.clear()
    AdmissionGuard.validate_params(None)
    mark.close()


def test_a_strangers_engine_is_admitted_whatever_is_wrong_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    AdmissionGuard.validate_params(None)
    shutil.rmtree(runtime_directory())
    AdmissionGuard.validate_params(None)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setattr(AdmissionGuard, "_base", None)
    AdmissionGuard.validate_params(None)


def test_the_guard_changes_no_logits() -> None:
    guard = AdmissionGuard(None, None, None)
    logits = object()
    assert guard.apply(logits) is logits and guard.apply(logits, None) is logits
    assert guard.is_argmax_invariant() and not guard.add_request(0, None)
