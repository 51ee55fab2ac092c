"""What workers tell each other over gloo, in real processes: it arrives whole, and nobody waits for
ever for one that does not come."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import os, sys, time
from datetime import timedelta
import torch.distributed as dist
from weightsync.adapters.vllm.exchange import exchange
from weightsync.errors import TransportError

rank, path, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]
store = dist.FileStore(path, 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
mine = [b"", b"x" * 100_001][rank]
assert exchange(mine, dist.group.WORLD) == [b"", b"x" * 100_001]
assert exchange(b"ab"[rank:], dist.group.WORLD) == [b"ab", b"b"]
store.set(f"heard {rank}", "")
store.wait(["heard 0", "heard 1"], timedelta(seconds=60))  # or what was said last may be lost
if rank == 0 and case != "both":
    if case == "late":
        sys.stdin.read()  # until the other has given up
    os._exit(0)
if case != "both":
    started = time.monotonic()
    try:
        exchange(b"?", dist.group.WORLD, seconds=2)
    except TransportError as error:
        print("waited 2 s for the other 1 worker(s)" in str(error), time.monotonic() - started < 20)
print("done", flush=True)
os._exit(0)  # gloo itself waits, as it is torn down, for what was given up here
"""


@pytest.mark.parametrize("case", ["both", "late", "gone"])
def test_workers_hear_each_other_or_learn_in_time_that_they_do_not(
    tmp_path: Path, case: str
) -> None:
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, str(rank), str(tmp_path / "store"), case],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        second, _ = workers[1].communicate(timeout=60)
        workers[0].communicate(timeout=60)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert second.split("\n")[:-1] == (["done"] if case == "both" else ["True True", "done"])
    assert [worker.returncode for worker in workers] == [0, 0]
