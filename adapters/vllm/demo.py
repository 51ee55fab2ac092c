"""The engine of ``weightsync demo``: a vLLM whose core runs in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weightsync.adapters.vllm.connector import VllmObject
from weightsync.testing.reference import Rollout, vllm_rollouts

__all__ = ["RunningVllm", "start"]

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Without it the first request with logprobs compiles for longer than the whole demo takes.
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}


class RunningVllm:
    """See `weightsync.cli.demo.DemoEngine`."""

    def __init__(self, checkpoint: Path) -> None:
        import vllm

        self._llm = vllm.LLM(
            model=str(checkpoint),
            dtype="float32",
            max_model_len=256,
            max_num_seqs=4,
            enforce_eager=True,
            kv_cache_memory_bytes=64 << 20,
            seed=0,
            weight_transfer_config={"backend": "weightsync"},
        )
        self.engine = VllmObject(self._llm, name="vllm")
        self.description = f"vllm {vllm.__version__} (its core in a process of its own)"

    def generate(self, prompts: list[list[int]], tokens: int) -> list[Rollout]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, logprobs=1, ignore_eos=True, detokenize=False
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        return vllm_rollouts(self._llm.generate(requests, sampling, use_tqdm=False))

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


@contextmanager
def start(checkpoint: Path) -> Iterator[RunningVllm]:
    """Start vLLM on a checkpoint, and end it with the block."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    running = RunningVllm(checkpoint)
    try:
        yield running
    finally:
        running.close()
