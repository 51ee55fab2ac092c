"""What all commands share: where they write, how errors leave them, and how receipts are put into
words."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

import typer
from rich.console import Console

from weightsync.errors import PlanRefused, WeightSyncError
from weightsync.receipt import EngineReceipt, LevelShare, ProofLevel

__all__ = [
    "megabytes",
    "milliseconds",
    "plain",
    "print_unproven",
    "private_stdout",
    "shares_text",
    "typed_errors",
    "unproven",
]

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


SHOWN = 10
"""Of a list of tensors that is given in full with ``--json``."""


def plain(text: str) -> str:
    """Text from elsewhere, without what a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shares_text(levels: Mapping[ProofLevel, LevelShare]) -> str:
    """As in "98.9 % served, 1.1 % spot": of bytes, or of tensors where there are none."""
    of_bytes = any(share.nbytes for share in levels.values())
    parts = {n: s.nbytes if of_bytes else s.tensors for n, s in levels.items()}
    whole = sum(parts.values())
    names = {name: "unproven" if name == "off" else name for name in parts}
    return ", ".join(f"{_percent(part, whole)} {names[name]}" for name, part in parts.items())


def _percent(part: int, whole: int) -> str:
    """Never 100 % of what is not all, nor 0 % of what is not nothing."""
    if part == whole:
        return "100 %"
    tenths = round(1000 * part / whole)
    if tenths == 0 and part:
        return "< 0.1 %"
    return "> 99.9 %" if tenths == 1000 else f"{tenths / 10:.1f} %"


def unproven(engine: EngineReceipt) -> list[tuple[str, str, list[str]]]:
    """Tensors that an engine's workers could not read back: name, why, and on which workers."""
    found: dict[tuple[str, str], list[str]] = {}
    for worker in engine.workers:
        for name, why in ({} if worker.proof is None else worker.proof.unproven).items():
            found.setdefault((name, why), []).append(worker.name)
    return [(name, why, workers) for (name, why), workers in found.items()]


def print_unproven(engine: EngineReceipt, console: Console) -> None:
    """The first of what could not be read back."""
    found = unproven(engine)
    for name, why, workers in found[:SHOWN]:
        line = f"  {name!r} cannot be read back: {why} (on {', '.join(workers)})"
        console.print(plain(line), markup=False, soft_wrap=True)
    if len(found) > SHOWN:
        console.print(f"  ... and {len(found) - SHOWN} more; --json names all", soft_wrap=True)


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.0095 else f"{seconds * 1e3:.1f} ms"
