"""Digests and copies against one memcpy of the same bytes, the unit of every figure here.

    python bench/bench_digest.py --json digest.json

All variants run in every round, one after another in a new order, so that a slow moment of the
machine hits them alike. Times are divided by the same round's memcpy; medians are reported.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from weightsync import _native

MEMCPY = "memcpy"


def build_variants(nbytes: int, threads: int) -> dict[str, Callable[[], object]]:
    """Name -> one pass over `nbytes`. Memory is written once first: no variant pays page faults."""
    source = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    destination = np.ones(nbytes, dtype=np.uint8)
    from_, to = source.ctypes.data, destination.ctypes.data
    digest_row = np.array([[from_, nbytes, 0, 1, 0]], dtype=np.uint64)
    copy_row = np.array([[from_, to, nbytes]], dtype=np.uint64)
    fused_row = np.array([[from_, to, nbytes, 0, 1, 0]], dtype=np.uint64)

    def memcpy(keep: tuple[object, ...] = (source, destination)) -> None:
        _native.memcpy(to, from_, nbytes)

    variants: dict[str, Callable[[], object]] = {
        MEMCPY: memcpy,
        "copy": lambda: _native.copy_table(copy_row, threads=threads),
        "copy, cached stores": lambda: _native.copy_table(copy_row, threads=threads, streaming=0),
    }
    for isa in range(_native.isa() + 1):
        name = _native.isa_name(isa)
        variants[f"digest {name}"] = lambda isa=isa: _native.digest_table(
            digest_row, 1, isa, threads
        )
        variants[f"copy+digest {name}"] = lambda isa=isa: _native.copy_digest_table(
            fused_row, 1, isa, threads
        )
        variants[f"copy+digest {name}, cached stores"] = lambda isa=isa: _native.copy_digest_table(
            fused_row, 1, isa, threads, 0
        )
    return variants


def measure(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every variant in every round, after one round that is thrown away."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    order = list(variants)
    shuffle = random.Random(0).shuffle
    for round_ in range(rounds + 1):
        shuffle(order)
        for name in order:
            begin = time.perf_counter()
            variants[name]()
            elapsed = time.perf_counter() - begin
            if round_ > 0:
                times[name].append(elapsed)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.rounds < 7:
        parser.error("fewer than 7 rounds say nothing on a shared machine")

    nbytes = arguments.mebibytes << 20
    times = measure(build_variants(nbytes, arguments.threads), arguments.rounds)
    figures = {}
    for name, seconds in times.items():
        ratios = [s / unit for s, unit in zip(seconds, times[MEMCPY], strict=True)]
        figures[name] = {
            "gb_per_s": nbytes / statistics.median(seconds) / 1e9,
            "passes": statistics.median(ratios),
            "seconds": seconds,
        }
        row = figures[name]
        print(f"{name:36s} {row['gb_per_s']:6.2f} GB/s {row['passes']:6.2f} passes")
    if arguments.json is not None:
        report = {
            "nbytes": nbytes,
            "rounds": arguments.rounds,
            "threads": arguments.threads,
            "figures": figures,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
