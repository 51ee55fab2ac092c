"""What the benchmarks share: the command line, the unit, and medians as multiples of it."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from weightsync import _native

MEMCPY = "memcpy"


def command_line(description: str, run: Callable[[int], dict[str, object]], rounds: int) -> None:
    """``--rounds N --json FILE``: run, print the result, and write it where it was asked for."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    text = json.dumps(run(options.rounds), indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


class Memcpy:
    """One pass over as many bytes, between two buffers that are warm."""

    def __init__(self, nbytes: int) -> None:
        self._buffers = [np.ones(nbytes, np.uint8) for _ in range(2)]

    def seconds(self) -> float:
        source, destination = self._buffers
        started = time.perf_counter()
        _native.memcpy(destination.ctypes.data, source.ctypes.data, source.nbytes)
        return time.perf_counter() - started


class Rows:
    """Seconds by phase, one row per round; the phase `MEMCPY` is the unit."""

    def __init__(self) -> None:
        self.columns: dict[str, list[float]] = {}

    def add(self, row: Mapping[str, float]) -> None:
        for phase, seconds in row.items():
            self.columns.setdefault(phase, []).append(seconds)

    def summary(self) -> dict[str, object]:
        """Medians, and each as a multiple of the unit's median."""
        seconds = {phase: statistics.median(values) for phase, values in self.columns.items()}
        unit = seconds.pop(MEMCPY)
        return {
            "memcpy_seconds": unit,
            "seconds": seconds,
            "passes": {phase: value / unit for phase, value in seconds.items()},
        }
