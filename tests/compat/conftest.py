"""Tests that run in several environments, each with another vLLM: `tests/compat/run`."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "engine")]

from engine_settings import apply_settings, mark_below  # noqa: E402

apply_settings()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_below(HERE, items, pytest.mark.compat, seconds=300)
