"""``weightsync verify``: does a live server hold this checkpoint, whoever loaded it there?"""

from __future__ import annotations

import json as jsonlib
from typing import Annotated, TextIO

import msgspec
import typer
from rich.console import Console

from weightsync.cli.arguments import Checkpoint, Dtype, Engines, Json, Receipts, parse_dtype
from weightsync.cli.output import (
    megabytes,
    plain,
    print_unproven,
    private_stdout,
    shares_text,
    typed_errors,
)
from weightsync.errors import ReceiptNotWritten, ServedMismatch, WeightSyncError
from weightsync.receipt import EngineReceipt, Receipt

__all__ = ["verify"]


def verify(
    checkpoint: Checkpoint,
    engine: Engines,
    dtype: Dtype = None,
    deadline: Annotated[float, typer.Option(help="Seconds for all of it.")] = 600.0,
    receipts: Receipts = None,
    json: Json = False,
) -> None:
    """Compare what live engines hold with a checkpoint, tensor by tensor.

    Nothing is moved and nothing changes; the engines go on serving. Ends with 0 if nothing differs,
    and 1 if something does, or if an engine can read nothing back.
    """
    from weightsync.engines import connect
    from weightsync.look import prove
    from weightsync.sources.safetensors import SafetensorsSource

    with private_stdout() as document, typed_errors():
        source = SafetensorsSource(checkpoint, dtype=parse_dtype(dtype))
        engines = [connect(url) for url in engine]
        unwritten: ReceiptNotWritten | None = None
        try:
            with Console(stderr=True).status("reading and comparing"):
                receipt = prove(source, engines, deadline=deadline, receipts=receipts)
        except ReceiptNotWritten as error:
            unwritten, receipt = error, error.receipt
        except ServedMismatch as error:
            if json:
                _write_difference(error, document)
            raise
        if json:
            document.write(receipt.to_json() + "\n")
        else:
            _show(receipt, Console(file=document))
        if unwritten is not None:
            raise unwritten
        _check_any_read(receipt)


def _show(receipt: Receipt, console: Console) -> None:
    reports = f"reports version {receipt.version!r}" if receipt.version else "reports no version"
    for engine in receipt.engines:
        tensors = sum(share.tensors for share in engine.levels.values())
        found = "differs in nothing that it can read back" if _reads(engine) else "reads nothing back"
        text = (
            f"{engine.name} {reports}, and {found}: {tensors} tensors, "
            f"{megabytes(receipt.nbytes)}: {shares_text(engine.levels)}, on "
            f"{len(engine.workers)} worker(s)"
        )
        console.print(plain(text), markup=False, soft_wrap=True)
        print_unproven(engine, console)
    console.print(f"receipt {receipt.hash}", markup=False, soft_wrap=True)


def _reads(engine: EngineReceipt) -> bool:
    return bool({"served", "spot"} & engine.levels.keys())


def _check_any_read(receipt: Receipt) -> None:
    """
    Raises:
        WeightSyncError: nothing was found to differ, because nothing was looked at.
    """
    blind = [engine.name for engine in receipt.engines if not _reads(engine)]
    if blind:
        raise WeightSyncError(
            f"nothing is proven of {', '.join(blind)}: no tensor can be read back there",
            remedy="push the checkpoint, which proves what the engine's loader is handed",
        )


def _write_difference(error: ServedMismatch, document: TextIO) -> None:
    notes = getattr(error, "__notes__", [])
    found = {
        "error": type(error).__name__,
        "message": "\n".join([str(error), *notes]),
        "mismatches": msgspec.to_builtins(error.mismatches),
        "faults": msgspec.to_builtins(error.faults),
    }
    document.write(jsonlib.dumps(found) + "\n")
