"""Entry points of the trainer's side of vLLM: a live server by URL, or an ``LLM`` object of this
process. Imports nothing of vLLM."""

from __future__ import annotations

from typing import Any

from weightsync.adapters.vllm.connector_http import VllmServer
from weightsync.adapters.vllm.connector_object import VllmObject

__all__ = ["VllmObject", "VllmServer", "connect_http", "wrap_object"]


def connect_http(url: str, **options: Any) -> VllmServer:
    """``vllm+http://host:port`` or ``vllm+https://…``."""
    return VllmServer(url.removeprefix("vllm+"), **options)


def wrap_object(obj: Any, **options: Any) -> VllmObject | None:
    """An ``LLM``, or None for anything else."""
    if any(
        f"{k.__module__}.{k.__qualname__}" == "vllm.entrypoints.llm.LLM" for k in type(obj).__mro__
    ):
        return VllmObject(obj, **options)
    return None
