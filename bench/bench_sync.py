"""The tensors of a Qwen2-0.5B (290, 988 MB bf16) from this process into a torch module of another.

    python bench/bench_sync.py --json FILE

Each phase is a multiple of one pass: a single-threaded ``memcpy`` of the same bytes, measured after
every round of the same run; medians. ``staged`` is the whole of it: fill with digest, verify in the
other process, and copy into its module.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

import weightsync as ws
from weightsync import _native
from weightsync.sources import SafetensorsSource
from weightsync.testing import build_checkpoint
from weightsync.testing.toy import ToyEngine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = run(options.rounds)
    text = json.dumps(found, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


def run(rounds: int) -> dict[str, object]:
    manifest = SafetensorsSource(build_checkpoint("qwen2_0_5b", "A")).manifest()
    tensors = {
        spec.name: torch.randn(spec.shape, dtype=torch.bfloat16) for spec in manifest.tensors
    }
    shapes = {spec.name: (spec.dtype, spec.shape) for spec in manifest.tensors}
    buffers = [np.ones(manifest.total_bytes, np.uint8) for _ in range(2)]
    rows: dict[str, list[float]] = {}
    with (
        ToyEngine(shapes) as engine,
        ws.WeightSender(ws.StateDictSource(tensors), [engine]) as sender,
    ):
        for number in range(rounds + 2):
            started = time.perf_counter()
            receipt = sender.sync(number)
            row = {
                "staged": time.perf_counter() - started,
                "fill": receipt.seconds["fill"],
                "verify": receipt.seconds["verify"],
                "apply": receipt.engines[0].workers[0].load_seconds,
            }
            started = time.perf_counter()
            _native.memcpy(buffers[0].ctypes.data, buffers[1].ctypes.data, buffers[0].nbytes)
            row["memcpy"] = time.perf_counter() - started
            if number >= 2:  # the first touch every page
                for key, value in row.items():
                    rows.setdefault(key, []).append(value)
    seconds = {key: statistics.median(values) for key, values in rows.items()}
    unit = seconds.pop("memcpy")
    return {
        "tensors": len(manifest),
        "nbytes": manifest.total_bytes,
        "rounds": rounds,
        "memcpy_seconds": unit,
        "seconds": seconds,
        "passes": {key: value / unit for key, value in seconds.items()},
    }


if __name__ == "__main__":
    main()
