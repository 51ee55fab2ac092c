"""The tensors of a Qwen2-0.5B (290, 988 MB bf16) from this process into a torch module of another.

    python bench/bench_sync.py --json FILE

Each phase is a multiple of one pass: a single-threaded ``memcpy`` of the same bytes, measured after
every round of the same run; medians. ``staged`` is the whole of it: fill with digest, verify in the
other process, and copy into its module.
"""

from __future__ import annotations

import time

import torch
from common import MEMCPY, Memcpy, Rows, command_line

import weightsync as ws
from weightsync.testing import build_checkpoint
from weightsync.testing.toy import ToyEngine


def run(rounds: int) -> dict[str, object]:
    manifest = ws.SafetensorsSource(build_checkpoint("qwen2_0_5b", "A")).manifest()
    tensors = {
        spec.name: torch.randn(spec.shape, dtype=torch.bfloat16) for spec in manifest.tensors
    }
    shapes = {spec.name: (spec.dtype, spec.shape) for spec in manifest.tensors}
    memcpy, rows = Memcpy(manifest.total_bytes), Rows()
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
                MEMCPY: memcpy.seconds(),
            }
            if number >= 2:  # the first touch every page
                rows.add(row)
    return {
        "tensors": len(manifest),
        "nbytes": manifest.total_bytes,
        "rounds": rounds,
        **rows.summary(),
    }


if __name__ == "__main__":
    command_line(__doc__, run, rounds=9)
