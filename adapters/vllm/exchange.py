"""What the workers of one engine tell each other, within a call that all of them are in."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import torch
from torch.distributed import ProcessGroup

from weightsync.errors import TransportError

__all__ = ["exchange", "exchange_among_workers"]

SECONDS = 60.0
"""How long one worker waits for the others, for the lengths and again for the bytes."""


def exchange_among_workers(content: bytes) -> list[bytes]:
    """`exchange` over vLLM's own group of this engine's workers. At once where there is only one.

    Raises:
        TransportError: as `exchange`.
    """
    from vllm.distributed.parallel_state import get_tp_group

    workers = get_tp_group()
    return [content] if workers.world_size == 1 else exchange(content, workers.cpu_group)


def exchange(content: bytes, group: ProcessGroup, *, seconds: float = SECONDS) -> list[bytes]:
    """Give everybody what everybody says, by rank. All workers must call it equally often.

    Args:
        group: gloo.
        seconds: see `SECONDS`.

    Raises:
        TransportError: a worker is gone, or did not come in time. The group cannot be used again.
    """
    try:
        lengths = _gather(torch.tensor([len(content)]), group, seconds)
        padded = torch.zeros(max(int(length) for length in lengths), dtype=torch.uint8)
        padded.numpy()[: len(content)] = np.frombuffer(content, np.uint8)
        gathered = _gather(padded, group, seconds)
    except RuntimeError as error:
        raise TransportError(
            f"waited {seconds:.0f} s for the other {group.size() - 1} worker(s) of this engine, or "
            f"one of them is gone: {error}",
            remedy="see the other workers' logs, and start the engine anew",
        ) from error
    return [
        part[: int(length)].numpy().tobytes()
        for part, length in zip(gathered, lengths, strict=True)
    ]


def _gather(mine: torch.Tensor, group: ProcessGroup, seconds: float) -> list[torch.Tensor]:
    found = [torch.empty_like(mine) for _ in range(group.size())]
    work = torch.distributed.all_gather(found, mine, group=group, async_op=True)
    if work is not None:
        work.wait(timedelta(seconds=seconds))
    return found
