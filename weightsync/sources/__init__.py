"""What a trainer has: for each checkpoint tensor, its data."""

from weightsync.sources.base import Pieces, Source
from weightsync.sources.module import ModuleSource, StateDictSource
from weightsync.sources.safetensors import SafetensorsSource

__all__ = ["ModuleSource", "Pieces", "SafetensorsSource", "Source", "StateDictSource"]
