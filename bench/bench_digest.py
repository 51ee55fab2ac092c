"""Digests and copies against one memcpy of the same bytes, the unit of every figure here.

    python bench/bench_digest.py --json digest.json

Two figures are demanded of one core with AVX-512: a digest runs at 0.7 of the speed of a plain read
of the same bytes, and a copy that digests at 0.85 of the speed of memcpy. Digests of boxes are of a
bfloat16 matrix of the same number of bytes, and their passes are of the bytes that the box has.

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
from weightsync.regions import Placed, RegionTable

MEMCPY, READ = "memcpy", "read"
COLUMNS = 8192  # of the matrix whose boxes are digested
ITEMSIZE = 2
# Figure -> what is measured, against what, and the least share that is demanded.
DEMANDED = {
    "digest_share_of_read": ("digest", READ, 0.7),
    "copy_digest_share_of_memcpy": ("copy+digest", MEMCPY, 0.85),
}


def boxes(address: int, nbytes: int) -> dict[str, Placed]:
    """Name -> a box of a row-major matrix that fills `nbytes`, or of its transpose."""
    rows = nbytes // ITEMSIZE // COLUMNS

    def box(height: int, width: int, row: int = 0, column: int = 0) -> Placed:
        start = row * COLUMNS + column
        stride = (COLUMNS, 1)
        at = address + start * ITEMSIZE
        return Placed(0, at, ITEMSIZE, (height, width), stride, stride, start)

    transposed = Placed(0, address, ITEMSIZE, (COLUMNS, rows), (1, COLUMNS), (rows, 1), 0)
    return {
        "row slice": box(rows // 2, COLUMNS, row=rows // 4),
        "column slice": box(rows, COLUMNS // 2, column=COLUMNS // 4),
        "narrow column slice": box(rows, COLUMNS // 32, column=COLUMNS // 4),
        "transposed matrix": transposed,
    }


def build_variants(
    nbytes: int, threads: int
) -> tuple[dict[str, Callable[[], object]], dict[str, int]]:
    """Name -> one pass over `nbytes`, or over fewer bytes: those are in the second answer.

    Memory is written once first: no variant pays page faults.
    """
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
        READ: lambda: _native.read(from_, nbytes),
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
    smaller = {}
    for name, box in boxes(from_, nbytes).items():
        table = RegionTable([box], 1)
        variants[f"digest of a {name}"] = lambda table=table: table.digest([1], threads=threads)
        smaller[f"digest of a {name}"] = int(table.nbytes[0])
    return variants, smaller


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


def shares_of_demands(times: dict[str, list[float]]) -> dict[str, float]:
    """The demanded figures with the best instructions of this machine: medians of the rounds."""
    best = _native.isa_name(_native.isa())
    return {
        name: statistics.median(
            unit / s for s, unit in zip(times[f"{what} {best}"], times[against], strict=True)
        )
        for name, (what, against, _) in DEMANDED.items()
    }


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
    variants, smaller = build_variants(nbytes, arguments.threads)
    times = measure(variants, arguments.rounds)
    figures = {}
    for name, seconds in times.items():
        size = smaller.get(name, nbytes)
        ratios = [s / unit * nbytes / size for s, unit in zip(seconds, times[MEMCPY], strict=True)]
        figures[name] = {
            "gb_per_s": size / statistics.median(seconds) / 1e9,
            "passes": statistics.median(ratios),
            "nbytes": size,
            "seconds": seconds,
        }
        row = figures[name]
        print(f"{name:36s} {row['gb_per_s']:6.2f} GB/s {row['passes']:6.2f} passes")
    demanded = shares_of_demands(times)
    for name, share in demanded.items():
        print(f"{name:36s} {share:6.2f} (demanded: {DEMANDED[name][2]:.2f})")
    if arguments.json is not None:
        report = {
            "nbytes": nbytes,
            "rounds": arguments.rounds,
            "threads": arguments.threads,
            "isa": _native.isa_name(_native.isa()),
            "demanded": {
                name: {"share": share, "at_least": DEMANDED[name][2]}
                for name, share in demanded.items()
            },
            "figures": figures,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
