"""weightsync: rsync for live model weights.

    import weightsync as ws

    engine = ws.connect("vllm+http://127.0.0.1:8000")
    sender = ws.WeightSender(ws.ModuleSource(model), engines=[engine])
    receipt = sender.sync(version=step)      # returns only when every worker has proven its bytes

Importing this package touches no GPU, starts nothing, and loads nothing heavy: names are looked up
when they are used, since every vLLM on the machine imports this package for its plug-in.
"""

from __future__ import annotations

import importlib
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightsync.canary import Canary
    from weightsync.engines import connect, engine
    from weightsync.errors import WeightSyncError
    from weightsync.look import prove
    from weightsync.manifest import Manifest, TensorSpec
    from weightsync.receipt import Receipt
    from weightsync.receipt_log import ReceiptLog
    from weightsync.sender import StagedUpdate, WeightSender
    from weightsync.sources import ModuleSource, SafetensorsSource, StateDictSource

__all__ = [
    "Canary",
    "Manifest",
    "ModuleSource",
    "Receipt",
    "ReceiptLog",
    "SafetensorsSource",
    "StagedUpdate",
    "StateDictSource",
    "TensorSpec",
    "WeightSender",
    "WeightSyncError",
    "connect",
    "engine",
    "prove",
]
__version__ = "0.1.0"

# From the repository's root, the folder there hides an installed wheel, which alone has the native
# module.
__path__ = extend_path(__path__, __name__)

_HOMES = {
    "Canary": "canary",
    "Manifest": "manifest",
    "ModuleSource": "sources",
    "Receipt": "receipt",
    "ReceiptLog": "receipt_log",
    "SafetensorsSource": "sources",
    "StagedUpdate": "sender",
    "StateDictSource": "sources",
    "TensorSpec": "manifest",
    "WeightSender": "sender",
    "WeightSyncError": "errors",
    "connect": "engines",
    "engine": "engines",
    "prove": "look",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"weightsync.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'weightsync' has no attribute {name!r}")
