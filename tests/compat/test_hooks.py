"""The vLLM of this environment, and unpacked sources of others, have what weightsync relies on."""

from __future__ import annotations

import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import hooks
import pytest

SESSION = ("backend session", "backend messages", "worker extension")
MESSAGES = ("backend messages", "worker extension")
EXPECTED = {
    "0.20": ("worker extension",),
    "0.21": ("worker extension",),
    **dict.fromkeys(["0.22", "0.23", "0.25"], MESSAGES),
    **dict.fromkeys(["0.26", "0.32", "0.33"], SESSION),
}
"""By release: the ways in that the documentation says it has."""

SOURCES = "WEIGHTSYNC_COMPAT_SOURCES"
"""Folders ``vllm`` of other versions, separated like PATH; nothing of them is imported."""


def packages() -> list[Path]:
    spec = find_spec("vllm")
    installed = list(spec.submodule_search_locations or []) if spec is not None else []
    return [Path(p) for p in [*installed, *os.environ.get(SOURCES, "").split(os.pathsep)] if p]


def version(package: Path) -> str:
    """Release that a package is of, as 0.32."""
    found = re.search(r"version = '(\d+\.\d+)", (package / "_version.py").read_text())
    assert found is not None, package
    return found[1]


@pytest.mark.parametrize("package", packages(), ids=lambda path: path.parent.name)
def test_what_weightsync_relies_on_is_there(package: Path) -> None:
    common, ways = hooks.unmet(package)
    assert not common
    for way in EXPECTED[version(package)]:
        assert not ways[way], way


@pytest.mark.parametrize("name", ["start_weight_update", "finish_weight_update", "cpu_linear"])
def test_a_hook_that_is_renamed_is_missed(name: str, tmp_path: Path) -> None:
    """In a copy of the newest sources at hand."""
    package = max(packages(), key=lambda path: tuple(map(int, version(path).split("."))))
    copy = tmp_path / "vllm"
    shutil.copytree(
        package,
        copy,
        ignore=lambda _, names: [n for n in names if "." in n and not n.endswith(".py")],
    )
    for file in copy.rglob("*.py"):
        text = file.read_text()
        if name in text:
            file.write_text(text.replace(name, "renamed"))
    common, ways = hooks.unmet(copy)
    assert any(name in what for what in [*common, *ways["backend session"]])


def test_a_method_that_is_gone_or_takes_other_parameters_is_named(tmp_path: Path) -> None:
    source = "class Worker:\n    def update_weights(self, update_info, extra): ...\n"
    (tmp_path / "worker.py").write_text(source)
    need = hooks.Callable("worker.py", "Worker.update_weights", ("update_info",))
    assert need.unmet(tmp_path) is None
    other = hooks.Callable("worker.py", "Worker.update_weights", ("names",))
    assert "takes ('update_info', 'extra')" in str(other.unmet(tmp_path))
    gone = hooks.Callable("worker.py", "Worker.finish_weight_update")
    assert "is not in worker.py" in str(gone.unmet(tmp_path))
