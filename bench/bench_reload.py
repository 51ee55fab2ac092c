"""A whole update of a Qwen2-0.5B (290 tensors, 988 MB bf16) in a live vLLM, against vLLM's own
reload of the same tensors.

    python bench/bench_reload.py --json FILE

One engine in this process. In every round vLLM's ``reload_weights`` takes the tensors from memory,
and a sender syncs them: staged in shared memory with digests, verified, loaded, admitted; once with
proof of what the loader is handed, then with proof of what the model holds. Which goes first
alternates. vLLM's own reload proves nothing, and leaves a head that is tied to the embedding as it
was.
"""

from __future__ import annotations

import os
import statistics
import time

# Before anything imports torch or vLLM. One thread, as everywhere else in these benchmarks.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)
os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import MEMCPY, Memcpy, Rows, command_line

import weightsync as ws
from weightsync.receipt import ProofLevel
from weightsync.testing import build_checkpoint, load_trainer

NAME = "qwen2_0_5b"


def run(rounds: int) -> dict[str, object]:
    from vllm import LLM

    llm = LLM(
        model=str(build_checkpoint(NAME, "A")),
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=8,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        weight_transfer_config={"backend": "weightsync"},
    )
    tensors = dict(load_trainer(NAME, "B").named_parameters())
    source = ws.StateDictSource({name: tensor.detach() for name, tensor in tensors.items()})
    nbytes = source.manifest().total_bytes
    memcpy = Memcpy(nbytes)

    def reload() -> dict[str, float]:
        held = [(name, tensor.detach()) for name, tensor in tensors.items()]
        started = time.perf_counter()
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(held)})
        return {"reload": time.perf_counter() - started}

    def measure(proof: ProofLevel) -> dict[str, object]:
        rows = Rows()
        with ws.WeightSender(source, [ws.engine(llm)], proof=proof) as sender:

            def sync(version: int) -> dict[str, float]:
                started = time.perf_counter()
                receipt = sender.sync(version)
                taken = receipt.engines[0]
                proofs = [worker.proof for worker in taken.workers]
                return {
                    "sync": time.perf_counter() - started,
                    "fill": receipt.seconds["fill"],
                    "verify": receipt.seconds["verify"],
                    "paused": taken.paused_seconds,
                    "load": max(worker.load_seconds for worker in taken.workers),
                    "look": max(one.seconds if one else 0.0 for one in proofs),
                }

            for number in range(rounds + 2):
                row = {**reload(), **sync(number)} if number % 2 else {**sync(number), **reload()}
                row[MEMCPY] = memcpy.seconds()
                if number >= 2:  # the first touch every page
                    rows.add(row)
        return _summary(rows)

    found = {proof: measure(proof) for proof in ("received", "served")}
    llm.llm_engine.engine_core.shutdown()
    return {"model": NAME, "nbytes": nbytes, "rounds": rounds, **found}


def _summary(rows: Rows) -> dict[str, object]:
    columns = rows.columns
    return {
        **rows.summary(),
        **{
            f"{phase}_over_reload": statistics.median(
                taken / own for taken, own in zip(columns[phase], columns["reload"], strict=True)
            )
            for phase in ("sync", "paused", "load")
        },
    }


if __name__ == "__main__":
    command_line(__doc__, run, rounds=9)
