"""The vLLM of this environment, and unpacked sources of others, have what weightsync relies on."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import hooks
import pytest

SOURCES = "WEIGHTSYNC_COMPAT_SOURCES"
"""Folders ``vllm`` of other versions, separated like PATH; nothing of them is imported."""


def packages() -> list[Path]:
    spec = find_spec("vllm")
    installed = list(spec.submodule_search_locations or []) if spec is not None else []
    return [Path(p) for p in [*installed, *os.environ.get(SOURCES, "").split(os.pathsep)] if p]


@pytest.mark.parametrize("package", packages(), ids=lambda path: path.parent.name)
def test_what_weightsync_relies_on_is_there(package: Path) -> None:
    common, ways = hooks.unmet(package)
    assert not common
    assert not ways["worker extension"]
    if hooks.TAKES_OTHERS.unmet(package) is None:
        assert not ways["backend messages"]


def test_a_method_that_is_gone_or_takes_other_parameters_is_named(tmp_path: Path) -> None:
    source = "class Worker:\n    def update_weights(self, update_info, extra): ...\n"
    (tmp_path / "worker.py").write_text(source)
    need = hooks.Callable("worker.py", "Worker.update_weights", ("update_info",))
    assert need.unmet(tmp_path) is None
    other = hooks.Callable("worker.py", "Worker.update_weights", ("names",))
    assert "takes ('update_info', 'extra')" in str(other.unmet(tmp_path))
    gone = hooks.Callable("worker.py", "Worker.finish_weight_update")
    assert "is not in worker.py" in str(gone.unmet(tmp_path))
