"""Settings of the real engines in a test process, to be made before anything imports them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def apply_settings() -> None:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="WARNING",
        # Without it the first request with logprobs compiles for many seconds.
        TORCHDYNAMO_DISABLE="1",
    )


def mark_below(
    folder: Path, items: list[pytest.Item], marker: pytest.MarkDecorator, seconds: int
) -> None:
    """Mark the tests of one folder, and give each of them that long."""
    for item in items:
        if folder in item.path.parents:
            item.add_marker(marker)
            item.add_marker(pytest.mark.timeout(seconds))


def python_path(folder: Path) -> str:
    """A ``PYTHONPATH`` by which child processes import from a folder too."""
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
