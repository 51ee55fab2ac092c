"""Engines by URL scheme, and by object.

An adapter registers its connectors under the entry-point groups ``weightsync.engines`` (by URL
scheme: ``callable(url, **options) -> Engine``) and ``weightsync.engine_objects`` (by name:
``callable(object, **options) -> Engine | None``, None for an object that is not its own).
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from weightsync.engines.base import Engine, PauseMode
from weightsync.errors import ConnectError

__all__ = ["Engine", "PauseMode", "connect", "engine"]

_SCHEMES = "weightsync.engines"
_OBJECTS = "weightsync.engine_objects"


def connect(url: str, **options: Any) -> Engine:
    """A live engine by its URL, for instance ``vllm+http://127.0.0.1:8000``. Looks before it leaps.

    Args:
        url: scheme, host and port.
        options: passed to the scheme's connector.

    Raises:
        ConnectError: unknown scheme, nobody answers, or the engine lacks something; says the
            command that would work.
    """
    scheme = url.partition("://")[0]
    known = {point.name: point for point in entry_points(group=_SCHEMES)}
    if scheme not in known or "://" not in url:
        schemes = ", ".join(f"{name}://" for name in sorted(known)) or "none"
        raise ConnectError(
            f"cannot connect to {url!r}: known are {schemes}",
            remedy="write the engine's kind in front, as in vllm+http://127.0.0.1:8000",
        )
    connector = known[scheme].load()
    found: Engine = connector(url, **options)
    return found


def engine(obj: Any, **options: Any) -> Engine:
    """An engine object of this process, for instance ``vllm.LLM(...)``.

    Raises:
        ConnectError: no adapter knows it, or it lacks something.
    """
    points = entry_points(group=_OBJECTS)
    for point in points:
        found: Engine | None = point.load()(obj, **options)
        if found is not None:
            return found
    kind = f"{type(obj).__module__}.{type(obj).__qualname__}"
    known = ", ".join(sorted(point.name for point in points)) or "none"
    raise ConnectError(
        f"no adapter knows a {kind}; adapters: {known}",
        remedy="pass the engine object itself, as in ws.engine(LLM(...))",
    )
