"""What importing does, and must not do: every vLLM on a machine imports this package."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, **env: str) -> str:
    import os

    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd="/",
        env={**os.environ, **env},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_weightsync_loads_nothing_heavy_and_starts_nothing() -> None:
    code = (
        "import sys, threading, os; before = len(os.listdir('/proc/self/fd'))\n"
        "import weightsync, weightsync.adapters.vllm.plugin\n"
        "heavy = {'torch', 'numpy', 'vllm', 'transformers', 'httpx', 'msgspec'}\n"
        "heavy &= set(sys.modules)\n"
        "print(sorted(heavy), threading.active_count(), len(os.listdir('/proc/self/fd')) - before)"
    )
    assert run(code).split() == ["[]", "1", "0"]


def test_pushing_a_checkpoint_needs_no_torch() -> None:
    code = (
        "import sys, weightsync as ws, weightsync.cli, weightsync.adapters.vllm.connector\n"
        "ws.SafetensorsSource, ws.WeightSender, ws.connect, ws.Receipt\n"
        "print('torch' in sys.modules)"
    )
    assert run(code).strip() == "False"


def test_the_ring_needs_no_torch() -> None:
    code = "import sys, weightsync.transport.ring; print('torch' in sys.modules)"
    assert run(code).strip() == "False"


def test_every_public_name_exists() -> None:
    code = (
        "import weightsync as ws\n"
        "for name in ws.__all__: getattr(ws, name)\n"
        "import weightsync.engines\n"
        "print(callable(ws.connect), callable(ws.engine))"
    )
    assert run(code).split() == ["True", "True"]


def test_the_plugin_hook_never_raises_and_names_the_engine_once() -> None:
    code = (
        "import sys, types, os\n"
        "broken = types.ModuleType('vllm'); broken.__path__ = []\n"
        "sys.modules['vllm'] = broken\n"
        "from weightsync.adapters.vllm.plugin import ENGINE_ID, register\n"
        "register(); register(); print(os.environ[ENGINE_ID].startswith(f'{os.getpid()}.'))"
    )
    assert run(code, WEIGHTSYNC_ENGINE_ID="inherited").strip() == "True"


def test_the_guard_can_be_imported_where_vllm_is_broken() -> None:
    code = (
        "import sys, types\n"
        "broken = types.ModuleType('vllm'); broken.__path__ = []\n"
        "sys.modules['vllm'] = broken\n"
        "from weightsync.adapters.vllm.guard import AdmissionGuard\n"
        "AdmissionGuard.validate_params(None); print('fine')"
    )
    assert run(code).strip() == "fine"


@pytest.mark.parametrize("path", sorted((ROOT / "weightsync").rglob("*.py")), ids=str)
def test_the_library_imports_no_engine(path: Path) -> None:
    engines = {"vllm", "sglang", "tensorrt_llm"}
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            assert name.partition(".")[0] not in engines, f"{path}:{node.lineno} imports {name}"
            assert not name.startswith("weightsync.adapters"), f"{path}:{node.lineno}: {name}"
