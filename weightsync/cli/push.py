"""``weightsync push``: a checkpoint directory into a live server, proven."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from weightsync.cli.arguments import Checkpoint, Dtype, Engines, Receipts, parse_dtype
from weightsync.cli.output import (
    megabytes,
    milliseconds,
    plain,
    print_unproven,
    private_stdout,
    shares_text,
    typed_errors,
)
from weightsync.errors import ReceiptNotWritten
from weightsync.receipt import Receipt

__all__ = ["push"]


class Pause(StrEnum):
    """What happens to requests in flight."""

    keep = "keep"
    wait = "wait"
    abort = "abort"


class Proof(StrEnum):
    """What must be proven."""

    served = "served"
    received = "received"
    off = "off"


def push(
    checkpoint: Checkpoint,
    engine: Engines,
    version: Annotated[
        str | None,
        typer.Option(help="What the engine reports afterwards. By default the directory's name."),
    ] = None,
    pause: Annotated[
        Pause,
        typer.Option(help="Requests in flight: go on with the new weights, end first, or end now."),
    ] = Pause.keep,
    proof: Annotated[
        Proof,
        typer.Option(
            help="Of what: the bytes that the model holds afterwards, as far as they can be read "
            "back; only those that its loader is handed; nothing."
        ),
    ] = Proof.served,
    dtype: Dtype = None,
    deadline: Annotated[
        float, typer.Option(help="Seconds that staging and the flip may take, each.")
    ] = 600.0,
    receipts: Receipts = None,
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
        source = SafetensorsSource(checkpoint, dtype=parse_dtype(dtype))
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
                proof=proof.value,
                deadline=deadline,
                receipts=receipts,
                on_progress=lambda done, _: progress.update(task, completed=done),
            )
            with sender:
                staged = sender.stage(version or checkpoint.resolve().name)
                progress.update(task, description="loading")
                unwritten: ReceiptNotWritten | None = None
                try:
                    receipt = staged.commit(pause.value)
                except ReceiptNotWritten as error:
                    unwritten, receipt = error, error.receipt
                progress.update(task, description="done   ")
        if json:
            document.write(receipt.to_json() + "\n")
        else:
            _show(receipt, Console(file=document))
        if unwritten is not None:
            raise unwritten


def _show(receipt: Receipt, console: Console) -> None:
    tensors = sum(share.tensors for share in receipt.levels.values())
    for engine in receipt.engines:
        load = max(worker.load_seconds for worker in engine.workers)
        text = (
            f"{engine.name} serves version {receipt.version!r}: {tensors} tensors, "
            f"{megabytes(receipt.nbytes)}: {shares_text(engine.levels)}, on "
            f"{len(engine.workers)} worker(s); paused {milliseconds(engine.paused_seconds)}, of "
            f"which {milliseconds(load)} in the engine's own loader"
        )
        console.print(plain(text), markup=False, soft_wrap=True)
        print_unproven(engine, console)
    console.print(f"receipt {receipt.hash}", markup=False, soft_wrap=True)
