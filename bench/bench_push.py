"""A Qwen2-0.5B-sized checkpoint (988 MB bf16) into a live vLLM server: each phase, and what the
pause is made of.

    python bench/bench_push.py --json FILE

Phases are multiples of one pass: a single-threaded ``memcpy`` of the same bytes, measured between
the rounds of the same run. The pause is compared with the engine's own load twice: with the
seconds that its loader took inside that pause, and with vLLM's ``reload_weights`` from disk
(page cache) on the same server, which moves nothing and proves nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "engine"))

import weightsync as ws
from weightsync import _native
from weightsync.testing import build_checkpoint

NAME = "qwen2_0_5b"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = run(options.rounds)
    text = json.dumps(found, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


def run(rounds: int) -> dict[str, object]:
    from servers import vllm_server

    sources = [ws.SafetensorsSource(build_checkpoint(NAME, variant)) for variant in "BA"]
    nbytes = sources[0].manifest().total_bytes
    memcpy = Memcpy(nbytes)
    backend = ("--weight-transfer-config", '{"backend": "weightsync"}')
    rows: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "server.log"
        checkpoint = build_checkpoint(NAME, "A")
        with vllm_server(checkpoint, log, *backend, dtype="bfloat16") as server:
            engine = ws.connect(f"vllm+{server.url}")
            for number in range(rounds + 1):
                row = one_round(sources[number % 2], engine, number)
                row["own_reload"] = own_reload(server.url)
                row["memcpy"] = memcpy.seconds()
                if number == 0:
                    continue  # the first touches every page of a new arena
                for key, value in row.items():
                    rows.setdefault(key, []).append(value)
    seconds = {key: statistics.median(values) for key, values in rows.items()}
    unit = seconds["memcpy"]
    return {
        "model": NAME,
        "nbytes": nbytes,
        "rounds": rounds,
        "memcpy_seconds": unit,
        "seconds": seconds,
        "passes": {key: value / unit for key, value in seconds.items() if key != "memcpy"},
        "pause_over_load": statistics.median(
            p / n for p, n in zip(rows["paused"], rows["load"], strict=True)
        ),
        "pause_over_own_reload": seconds["paused"] / seconds["own_reload"],
    }


def one_round(source: ws.SafetensorsSource, engine: object, number: int) -> dict[str, float]:
    """One update by a sender that is kept, as a trainer keeps it."""
    sender = _SENDERS.setdefault("only", ws.WeightSender(source, [engine]))
    sender._source = source
    receipt = sender.sync(number)
    taken = receipt.engines[0]
    return {
        "fill": receipt.seconds["fill"],
        "verify": receipt.seconds["verify"],
        "stage": receipt.seconds["stage"],
        "paused": taken.paused_seconds,
        "load": max(worker.load_seconds for worker in taken.workers),
    }


_SENDERS: dict[str, ws.WeightSender] = {}


def own_reload(url: str) -> float:
    """Seconds of vLLM's own reload from disk, timed at the client as the pause is."""
    with httpx.Client(base_url=url, timeout=300, trust_env=False) as client:
        client.post("/pause?mode=keep").raise_for_status()
        started = time.perf_counter()
        client.post("/collective_rpc", json={"method": "reload_weights"}).raise_for_status()
        seconds = time.perf_counter() - started
        client.post("/resume").raise_for_status()
    return seconds


class Memcpy:
    """One pass over as many bytes, between two buffers that are warm."""

    def __init__(self, nbytes: int) -> None:
        self._buffers = [np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)]

    def seconds(self) -> float:
        source, destination = self._buffers
        started = time.perf_counter()
        _native.memcpy(destination.ctypes.data, source.ctypes.data, source.nbytes)
        return time.perf_counter() - started


if __name__ == "__main__":
    main()
