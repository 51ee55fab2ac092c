"""What proving costs: 290 tensors of a Qwen2-0.5B (988 MB bf16) from this process into a torch
module of another, at each level of proof.

    python bench/bench_proof.py --json FILE

All levels run in every round, one after another, each with an engine and memory of its own.
``passes`` are multiples of one single-threaded ``memcpy`` of the same bytes; ``added`` is what a
level takes beyond ``off`` in the same round, as a share of that; medians.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack

import torch
from common import MEMCPY, Memcpy, Rows, command_line

import weightsync as ws
from weightsync.messages import Mode
from weightsync.receipt import ProofLevel
from weightsync.testing import build_checkpoint
from weightsync.testing.toy import ToyEngine

MODES: tuple[Mode, ...] = ("staged", "streamed")
LEVELS: tuple[ProofLevel, ...] = ("off", "received", "served")


def run(rounds: int) -> dict[str, object]:
    manifest = ws.SafetensorsSource(build_checkpoint("qwen2_0_5b", "A")).manifest()
    tensors = {
        spec.name: torch.randn(spec.shape, dtype=torch.bfloat16) for spec in manifest.tensors
    }
    shapes = {spec.name: (spec.dtype, spec.shape) for spec in manifest.tensors}
    source = ws.StateDictSource(tensors)
    return {
        "tensors": len(manifest),
        "nbytes": manifest.total_bytes,
        "rounds": rounds,
        **{mode: _mode(mode, source, shapes, manifest.total_bytes, rounds) for mode in MODES},
    }


def _mode(
    mode: Mode, source: ws.StateDictSource, shapes: dict, nbytes: int, rounds: int
) -> dict[str, object]:
    memcpy, rows = Memcpy(nbytes), Rows()
    with ExitStack() as stack:
        senders = {}
        for level in LEVELS:
            engine = stack.enter_context(ToyEngine(shapes))
            sender = ws.WeightSender(source, [engine], mode=mode, proof=level)
            senders[level] = stack.enter_context(sender)
        for number in range(rounds + 2):
            row = {}
            for level in LEVELS[number % 3 :] + LEVELS[: number % 3]:
                started = time.perf_counter()
                receipt = senders[level].sync(number)
                row[level] = time.perf_counter() - started
                if receipt.proven != level:
                    raise SystemExit(f"asked for {level}, proven is {receipt.proven}")
            row[MEMCPY] = memcpy.seconds()
            if number >= 2:  # the first touch every page
                rows.add(row)
    columns = rows.columns
    added = {
        level: statistics.median(
            one / off - 1 for one, off in zip(columns[level], columns["off"], strict=True)
        )
        for level in LEVELS[1:]
    }
    return {"added": added, **rows.summary()}


if __name__ == "__main__":
    command_line(__doc__, run, rounds=9)
