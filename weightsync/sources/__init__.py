"""What a trainer has: for each checkpoint tensor, its data.

Names are looked up when they are used: reading a checkpoint directory needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightsync.sources.base import Pieces, Source
    from weightsync.sources.module import ModuleSource, StateDictSource
    from weightsync.sources.safetensors import SafetensorsSource

__all__ = ["ModuleSource", "Pieces", "SafetensorsSource", "Source", "StateDictSource"]

_HOMES = {
    "ModuleSource": "module",
    "Pieces": "base",
    "SafetensorsSource": "safetensors",
    "Source": "base",
    "StateDictSource": "module",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"weightsync.sources.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
