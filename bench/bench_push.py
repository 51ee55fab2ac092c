"""A Qwen2-0.5B-sized checkpoint (988 MB bf16) into a live vLLM server: each phase, and what the
pause is made of.

    python bench/bench_push.py --json FILE

Phases are multiples of one pass: a single-threaded ``memcpy`` of the same bytes, measured between
the rounds of the same run. The pause is compared with the engine's own load twice: with the
seconds that its loader took inside that pause, and with vLLM's ``reload_weights`` from disk
(page cache) on the same server, which moves nothing and proves nothing.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx
from common import MEMCPY, Memcpy, Rows, command_line

import weightsync as ws
from weightsync.testing import build_checkpoint

NAME = "qwen2_0_5b"


def run(rounds: int) -> dict[str, object]:
    # The server of the engine tests.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "engine"))
    from servers import vllm_server

    sources = [ws.SafetensorsSource(build_checkpoint(NAME, variant)) for variant in "BA"]
    nbytes = sources[0].manifest().total_bytes
    memcpy, rows = Memcpy(nbytes), Rows()
    backend = ("--weight-transfer-config", '{"backend": "weightsync"}')
    checkpoint = build_checkpoint(NAME, "A")
    with (
        tempfile.TemporaryDirectory() as scratch,
        vllm_server(checkpoint, Path(scratch) / "server.log", *backend, dtype="bfloat16") as server,
        # One sender that is kept, as a trainer keeps it.
        ws.WeightSender(sources[0], [ws.connect(f"vllm+{server.url}")], proof="received") as sender,
    ):
        for number in range(rounds + 1):
            sender._source = sources[number % 2]
            row = phases(sender.sync(number))
            row["own_reload"] = own_reload(server.url)
            row[MEMCPY] = memcpy.seconds()
            if number > 0:  # the first touches every page of a new arena
                rows.add(row)
    ratios = {
        other: [p / n for p, n in zip(rows.columns["paused"], rows.columns[other], strict=True)]
        for other in ("load", "own_reload")
    }
    return {
        "model": NAME,
        "nbytes": nbytes,
        "rounds": rounds,
        **rows.summary(),
        **{f"pause_over_{other}": statistics.median(found) for other, found in ratios.items()},
    }


def phases(receipt: ws.Receipt) -> dict[str, float]:
    taken = receipt.engines[0]
    return {
        "fill": receipt.seconds["fill"],
        "verify": receipt.seconds["verify"],
        "stage": receipt.seconds["stage"],
        "paused": taken.paused_seconds,
        "load": max(worker.load_seconds for worker in taken.workers),
    }


def own_reload(url: str) -> float:
    """Seconds of vLLM's own reload from disk, timed at the client as the pause is."""
    with httpx.Client(base_url=url, timeout=300, trust_env=False) as client:
        client.post("/pause?mode=keep").raise_for_status()
        started = time.perf_counter()
        client.post("/collective_rpc", json={"method": "reload_weights"}).raise_for_status()
        seconds = time.perf_counter() - started
        client.post("/resume").raise_for_status()
    return seconds


if __name__ == "__main__":
    command_line(__doc__, run, rounds=7)
