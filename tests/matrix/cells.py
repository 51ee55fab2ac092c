"""The cells of the matrix, and a running engine for each: the rigs of ``tests/engine``, started so
that any worker's next apply can be made to fail, whatever the way in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal, get_args

import fault_extension
import httpx
import test_vllm_in_process
import test_vllm_server
from engine_settings import python_path
from servers import vllm_server
from test_vllm_tensor_parallel import ParallelRig

import weightsync as ws
from weightsync.deadline import Deadline
from weightsync.sources.base import Source
from weightsync.testing import PROMPTS, build_checkpoint

__all__ = ["CELLS", "MODELS", "Cell", "Rig", "fail_next_apply", "refusal", "running", "source"]

MODELS = (
    "qwen2",
    "qwen2_tied",
    "qwen3",
    "llama",
    "gemma3",
    "qwen3_moe",
    "qwen3_moe_padded",
    "qwen2_moe",
    "mixtral",
)
Place = Literal["in_process", "two_workers", "server"]
Via = Literal["backend", "extension"]
Rig = test_vllm_in_process.Rig | test_vllm_server.Rig

ROUNDING = {("qwen3_moe_padded", "two_workers"): 1.5e-5}
"""Where a fresh start of vLLM is further from transformers than 1e-5, and by how much: 1.1e-5."""

FAULTY = "fault_extension.FaultyWorkerExtension"
"""weightsync's own extension, that can also be told to fail."""
FAULTY_ALONE = "fault_extension.FaultExtension"


@dataclass(frozen=True)
class Cell:
    """One engine start.

    Attributes:
        model: a test model.
        place: the engine's core and only worker in this process; its core in a process of its own,
            with two tensor-parallel workers; a server, over HTTP.
        via: the way into its workers.
    """

    model: str
    place: Place
    via: Via

    def __str__(self) -> str:
        return f"{self.model}-{self.place}-{self.via}"


CELLS = [
    Cell(model, place, via) for place, model, via in product(get_args(Place), MODELS, get_args(Via))
]
"""The quick ones first."""


@contextmanager
def running(cell: Cell, directory: Path) -> Iterator[Rig]:
    """Start a cell's engine on variant A of its model, and end it afterwards.

    Args:
        directory: for a server's log.
    """
    rig: Rig
    if cell.place == "server":
        flags = ("--worker-extension-cls", FAULTY)
        if cell.via == "backend":
            flags = ("--worker-extension-cls", FAULTY_ALONE, *test_vllm_server.BACKEND)
        checkpoint = build_checkpoint(cell.model, "A")
        env = {"PYTHONPATH": python_path(Path(fault_extension.__file__).parent)}
        with vllm_server(checkpoint, directory / "server.log", *flags, env=env) as server:
            rig = test_vllm_server.Rig(cell.model, server, extension=FAULTY)
            with closing(rig.engine):
                yield rig
        return
    options: dict[str, object] = {"worker_extension_cls": FAULTY}
    if cell.via == "extension":
        options["weight_transfer_config"] = None
    elif cell.place == "two_workers":
        options["worker_extension_cls"] = FAULTY_ALONE
    # In one process, vLLM mixes all extensions into one worker class, and refuses a second one that
    # has an attribute of the first. There, the backend's engines have the whole extension too.
    kind = ParallelRig if cell.place == "two_workers" else test_vllm_in_process.Rig
    with closing(kind(cell.model, extension=FAULTY, **options)) as rig:
        rig.tolerance = ROUNDING.get((cell.model, cell.place), rig.tolerance)
        yield rig


def source(rig: Rig, variant: str) -> Source:
    """What a trainer has, under names that the engine knows: Mixtral's experts have other ones in a
    module than in a checkpoint."""
    if rig.name == "mixtral":
        return ws.SafetensorsSource(build_checkpoint(rig.name, variant))
    return ws.ModuleSource(rig.models[variant])


def fail_next_apply(rig: Rig, *, tensors: int, rank: int) -> None:
    """One worker's next apply raises after that many tensors."""
    arguments = [str(tensors), "raise", str(rank)]
    answers = rig.engine.rpc("weightsync_test_fail_after", arguments, Deadline.after(30))
    if sorted(answers) != ["armed"] + ["not me"] * (rig.engine.workers - 1):
        raise RuntimeError(f"no worker, or another one, will fail: {answers}")


def refusal(rig: Rig) -> str | None:
    """Why a request is refused at admission; None where it is answered."""
    from vllm.exceptions import VLLMValidationError

    try:
        rig.rollouts(PROMPTS[:1])
    except VLLMValidationError as refused:
        return str(refused)
    except httpx.HTTPStatusError as refused:
        if refused.response.status_code != 400:
            raise
        return refused.response.text
    return None
