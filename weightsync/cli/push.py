"""``weightsync push``: a checkpoint directory into a live server, proven."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from weightsync.cli.output import megabytes, milliseconds, private_stdout, typed_errors
from weightsync.receipt import Receipt

if TYPE_CHECKING:
    import torch

__all__ = ["push"]


class Pause(StrEnum):
    """What happens to requests in flight."""

    keep = "keep"
    wait = "wait"
    abort = "abort"


def push(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT_DIR", help="Directory with safetensors files.")
    ],
    engine: Annotated[
        list[str],
        typer.Option(
            "--engine", help="Where to, as in vllm+http://127.0.0.1:8000. May be repeated."
        ),
    ],
    version: Annotated[
        str | None,
        typer.Option(help="What the engine reports afterwards. By default the directory's name."),
    ] = None,
    pause: Annotated[
        Pause,
        typer.Option(help="Requests in flight: go on with the new weights, end first, or end now."),
    ] = Pause.keep,
    dtype: Annotated[
        str | None, typer.Option(help="Cast floating-point tensors, as in bfloat16.")
    ] = None,
    deadline: Annotated[
        float, typer.Option(help="Seconds that staging and the flip may take, each.")
    ] = 600.0,
    json: Annotated[bool, typer.Option("--json", help="Print the receipt as JSON.")] = False,
) -> None:
    """Deliver a checkpoint to live engines, and prove it.

    The engines go on generating while the bytes move and are verified, and pause only to load
    them. Reads at most 32 MB of the checkpoint at a time.
    """
    from weightsync.engines import connect
    from weightsync.sender import WeightSender
    from weightsync.sources.safetensors import SafetensorsSource

    console = Console(stderr=True)
    with private_stdout() as document, typed_errors():
        source = SafetensorsSource(checkpoint, dtype=_dtype(dtype))
        engines = [connect(url) for url in engine]
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=console,
        ) as progress:
            task = progress.add_task("staging", total=source.manifest().total_bytes)
            sender = WeightSender(
                source,
                engines,
                deadline=deadline,
                on_progress=lambda done, _: progress.update(task, completed=done),
            )
            with sender:
                staged = sender.stage(version or checkpoint.resolve().name)
                progress.update(task, description="loading")
                receipt = staged.commit(pause.value)
                progress.update(task, description="proven ")
        if json:
            document.write(receipt.to_json() + "\n")
        else:
            _show(receipt, Console(file=document))


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    from weightsync.target import torch_dtype

    try:
        return torch_dtype(name)
    except TypeError as error:
        raise typer.BadParameter(str(error)) from error


def _show(receipt: Receipt, console: Console) -> None:
    tensors = sum(share.tensors for share in receipt.levels.values())
    for engine in receipt.engines:
        load = max(worker.load_seconds for worker in engine.workers)
        console.print(
            f"{engine.name} serves version {receipt.version!r}: {tensors} tensors, "
            f"{megabytes(receipt.nbytes)} proven as {receipt.proven!r} on "
            f"{len(engine.workers)} worker(s); paused {milliseconds(engine.paused_seconds)}, of "
            f"which {milliseconds(load)} in the engine's own loader",
            markup=False,
            soft_wrap=True,
        )
    console.print(f"receipt {receipt.hash}", markup=False, soft_wrap=True)
