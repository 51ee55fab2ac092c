"""What all commands share: where they write, and how errors leave them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import typer
from rich.console import Console

from weightsync.errors import PlanRefused, WeightSyncError

__all__ = ["megabytes", "milliseconds", "private_stdout", "typed_errors"]

REFUSED = 2
"""Exit status when nothing was changed because source and engine do not fit; 1 for every other
failure."""


@contextmanager
def private_stdout() -> Iterator[TextIO]:
    """The real standard output, for this command's document alone.

    Engines and their child processes print what they like; for the length of the block it goes to
    the standard error, so that ``--json`` writes one document and nothing else.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "w") as stream:
            yield stream
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def typed_errors() -> Iterator[None]:
    """Print an error of ours as its message, without a traceback, and leave with a status."""
    try:
        yield
    except WeightSyncError as error:
        notes = getattr(error, "__notes__", [])
        console = Console(stderr=True, soft_wrap=True)
        console.print(
            f"{type(error).__name__}: " + "\n".join([str(error), *notes]),
            style="red",
            markup=False,
            highlight=False,
        )
        raise typer.Exit(REFUSED if isinstance(error, PlanRefused) else 1) from error


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.0095 else f"{seconds * 1e3:.1f} ms"
