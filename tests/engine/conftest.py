import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from engine_settings import apply_settings, mark_below  # noqa: E402

apply_settings()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_below(HERE, items, pytest.mark.engine, seconds=600)
