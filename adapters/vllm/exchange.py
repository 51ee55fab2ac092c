"""What the workers of one engine tell each other, within a call that all of them are in."""

from __future__ import annotations

from datetime import timedelta

import torch

__all__ = ["exchange"]

SECONDS = 60.0
"""How long one worker waits for the others."""


def exchange(content: bytes, world_size: int) -> list[bytes]:
    """Give everybody what everybody says, by rank. All workers must call it equally often.

    Over vLLM's own group of processes for the CPU (gloo): lengths first, then bytes.

    Raises:
        RuntimeError: a worker is gone, or did not come in time.
    """
    if world_size == 1:
        return [content]
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group().cpu_group
    lengths = _gather(torch.tensor([len(content)]), world_size, group)
    padded = torch.zeros(max(int(length) for length in lengths), dtype=torch.uint8)
    padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    gathered = _gather(padded, world_size, group)
    return [
        part[: int(length)].numpy().tobytes()
        for part, length in zip(gathered, lengths, strict=True)
    ]


def _gather(
    mine: torch.Tensor, world_size: int, group: torch.distributed.ProcessGroup
) -> list[torch.Tensor]:
    found = [torch.empty_like(mine) for _ in range(world_size)]
    work = torch.distributed.all_gather(found, mine, group=group, async_op=True)
    if work is not None:
        work.wait(timedelta(seconds=SECONDS))
    return found
