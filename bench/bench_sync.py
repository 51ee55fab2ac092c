"""The tensors of a Qwen2-0.5B (290, 988 MB bf16) from this process into a torch module of another.

    python bench/bench_sync.py --json FILE

Each phase is a multiple of one pass: a single-threaded ``memcpy`` of the same bytes, measured after
every round of the same run; medians.

    fill         into an arena of shared memory, with digests; nobody reads
    fill_verify  the same within a staged update, while the other process digests what is there
    apply        out of the arena into the module
    staged       all of a staged update: fill, verify, vote, pause, apply, resume
    streamed     all of a streamed one: pause, through the ring into the module, compare, resume

All with proof of what arrives; `bench_proof.py` says what other levels cost.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

import numpy as np
import torch
from common import MEMCPY, Memcpy, Rows, command_line

import weightsync as ws
from weightsync.digest import derive_seeds
from weightsync.messages import Mode
from weightsync.sources.base import fill
from weightsync.testing import build_checkpoint
from weightsync.testing.toy import ToyEngine
from weightsync.transport.shm import ShmArena, arena_offsets

MODES: tuple[Mode, ...] = ("staged", "streamed")


def run(rounds: int) -> dict[str, object]:
    manifest = ws.SafetensorsSource(build_checkpoint("qwen2_0_5b", "A")).manifest()
    tensors = {
        spec.name: torch.randn(spec.shape, dtype=torch.bfloat16) for spec in manifest.tensors
    }
    shapes = {spec.name: (spec.dtype, spec.shape) for spec in manifest.tensors}
    source = ws.StateDictSource(tensors)
    offsets, nbytes = arena_offsets(manifest)
    seeds = derive_seeds(1, manifest.identities)
    memcpy, rows, arena = Memcpy(manifest.total_bytes), Rows(), ShmArena(nbytes)
    with ExitStack() as stack:
        stack.callback(arena.close)
        senders = {}
        for mode in MODES:
            engine = stack.enter_context(ToyEngine(shapes))
            sender = ws.WeightSender(source, [engine], mode=mode, proof="received")
            senders[mode] = stack.enter_context(sender)
        for number in range(rounds + 2):
            row = {}
            for mode in MODES:
                started = time.perf_counter()
                receipt = senders[mode].sync(number)
                row[mode] = time.perf_counter() - started
                if mode == "staged":
                    row["fill_verify"] = receipt.seconds["fill"] + receipt.seconds["verify"]
                    row["apply"] = receipt.engines[0].workers[0].load_seconds
            started = time.perf_counter()
            fill(source, manifest, offsets + np.uint64(arena.address), seeds)
            row["fill"] = time.perf_counter() - started
            row[MEMCPY] = memcpy.seconds()
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
