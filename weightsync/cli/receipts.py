"""``weightsync receipts``: what a log of receipts says, and whether it is whole."""

from __future__ import annotations

import json as jsonlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weightsync.cli.arguments import Json
from weightsync.cli.output import (
    megabytes,
    milliseconds,
    plain,
    private_stdout,
    shares_text,
    typed_errors,
)
from weightsync.receipt import EngineReceipt, Receipt, WorkerReceipt
from weightsync.receipt_check import Entry, check, entries
from weightsync.receipt_log import read_lines

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Logs of receipts.")

Log = Annotated[Path, typer.Argument(metavar="FILE", help="A log of receipts.")]


@app.command("show")
def show(
    file: Log,
    line: Annotated[
        int | None, typer.Option(min=1, help="Everything that the receipt in this line says.")
    ] = None,
    json: Json = False,
) -> None:
    """What was delivered and proven, line by line."""
    with private_stdout() as document, typed_errors():
        wanted = (entry for entry in entries(read_lines(file)) if line in (None, entry.line))
        console = Console(file=document)
        if line is not None:
            entry = next(wanted, None)
            if entry is None:
                raise typer.BadParameter(f"{file} has no line {line}", param_hint="--line")
            if json:
                document.write(jsonlib.dumps(_as_json(entry)) + "\n")
            else:
                for text in _everything(entry):
                    console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif json:
            document.write(jsonlib.dumps([_as_json(entry) for entry in wanted]) + "\n")
        else:
            console.print(_table(wanted))


@app.command("check")
def check_command(
    file: Log,
    last: Annotated[
        str | None,
        typer.Option(
            metavar="HASH",
            help="Of the last receipt, where you have kept it: lines that are missing at the end "
            "are found by nothing else.",
        ),
    ] = None,
) -> None:
    """Whether every line is as it was written, and goes on from the line before.

    Ends with 0 if so, else with 1.
    """
    if last is not None and not re.fullmatch("[0-9a-f]{64}", last):
        raise typer.BadParameter("a receipt's hash has 64 hexadecimal digits", param_hint="--last")
    with private_stdout() as document, typed_errors():
        count = 0

        def counted() -> Iterator[bytes]:
            nonlocal count
            for text in read_lines(file):
                count += 1
                yield text

        findings = check(counted(), last=last)
        console = Console(file=document, soft_wrap=True)
        for finding in findings:
            text = f"{finding}\n  What to do: {finding.remedy}"
            console.print("\n".join(map(plain, text.split("\n"))), markup=False, highlight=False)
        if findings:
            console.print(f"{len(findings)} fault(s) in {count} line(s)", highlight=False)
            raise typer.Exit(1)
        console.print(f"sound: {count} receipt(s)", highlight=False)


def _as_json(entry: Entry) -> dict[str, Any]:
    if entry.receipt is not None:
        receipt = msgspec.to_builtins(entry.receipt)
        return {"line": entry.line, "intact": entry.receipt.intact, "receipt": receipt}
    text = entry.text.decode(errors="backslashreplace")
    return {"line": entry.line, "torn": entry.torn, "text": text}


def _table(log: Iterator[Entry]) -> Table:
    """Fits into 80 columns, in three or four rows for each receipt."""
    table = Table(box=SIMPLE_HEAD, leading=1, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("line", "version"):
        table.add_column(column, overflow="fold")
    for column in ("written", "delivered", "proof (tensors)"):
        table.add_column(column, no_wrap=True)
    table.add_column("took")
    for entry in log:
        if entry.receipt is not None:
            table.add_row(str(entry.line), *map(Text, _row(entry.receipt)))
        else:
            what = "torn" if entry.torn else "no receipt"
            table.add_row(str(entry.line), Text(plain(entry.version)), what, style="red")
    return table


def _row(receipt: Receipt) -> Iterator[str]:
    yield plain(receipt.version)
    day, _, time = plain(receipt.at).partition("T")
    yield f"{day}\n{time[:8]}\n{plain(receipt.mode)}{', part' if receipt.only else ''}"
    workers = " + ".join(str(len(one.workers)) for one in receipt.engines)
    yield f"{megabytes(receipt.nbytes)}\n{len(receipt.engines)} x {workers}"
    if receipt.intact:
        counts = (f" ({share.tensors})" for share in receipt.levels.values())
        shares = shares_text(receipt.levels).split(", ")
        yield "\n".join(share + count for share, count in zip(shares, counts, strict=True))
    else:
        yield "changed: not intact"
    pause = max((one.paused_seconds for one in receipt.engines), default=0.0)
    yield _seconds(receipt.seconds) + (f"; paused {milliseconds(pause)}" if pause else "")


def _seconds(phases: Mapping[str, float]) -> str:
    return ", ".join(f"{plain(phase)} {milliseconds(took)}" for phase, took in phases.items())


def _everything(entry: Entry) -> Iterator[str]:
    receipt = entry.receipt
    if receipt is None:
        yield f"line {entry.line} is {'torn' if entry.torn else 'no receipt'}:"
        yield plain(entry.text.decode(errors="backslashreplace"))
        return
    tensors = sum(share.tensors for share in receipt.levels.values())
    intact = "" if receipt.intact else " (NOT that of its content: it was changed)"
    named = {
        "line": str(entry.line),
        "version": receipt.version,
        "update": receipt.update_id,
        "written": receipt.at,
        "by": _pairs(receipt.versions),
        "mode": receipt.mode,
        "only": ", ".join(receipt.only) or "the whole model",
        "proof": f"{shares_text(receipt.levels)} (the weakest: {receipt.proven})",
        "bytes": f"{receipt.nbytes} in {tensors} tensor(s)",
        "seconds": _seconds(receipt.seconds),
        "manifest": receipt.manifest_hash,
        "seed": receipt.seed,
        "digest": receipt.digest or "none was taken",
        "previous": receipt.previous or "none, it is the first",
        "hash": f"{receipt.hash}{intact}",
    }
    for name, text in named.items():
        yield f"{name + ':':<10}{plain(text)}"
    yield from _listed("cast", receipt.casts)
    yield from _listed("not sent, the same as another", receipt.aliases)
    for engine, names in receipt.untouched.items():
        yield from _listed(f"untouched in {engine}", dict.fromkeys(names, ""))
    for one in receipt.engines:
        yield from _engine(one)


def _engine(engine: EngineReceipt) -> Iterator[str]:
    yield ""
    yield plain(f"engine {engine.name}: {engine.engine}")
    yield f"  proof:   {shares_text(engine.levels)}"
    if engine.canary is not None:
        yield f"  canary:  log-probabilities differ by {engine.canary:.2g} at most"
    yield plain(f"  pause:   {engine.pause}, {milliseconds(engine.paused_seconds)}")
    yield f"  seconds: {_seconds(engine.seconds)}"
    yield f"  plan:    {plain(engine.plan_hash)}"
    for worker in engine.workers:
        yield from _worker(worker)


def _worker(worker: WorkerReceipt) -> Iterator[str]:
    yield plain(f"  {worker.name} on {worker.device}")
    times = {
        "verify": worker.verify_seconds,
        "apply": worker.apply_seconds,
        "of which load": worker.load_seconds,
    }
    yield f"    seconds: {_seconds(times)}"
    proof = worker.proof
    if proof is None:
        yield "    what its model holds was not looked at"
        return
    yield f"    looked at {proof.boxes} places, {proof.nbytes} bytes, {milliseconds(proof.seconds)}"
    yield f"    digest {plain(proof.digest)}"
    yield from _listed("spot", dict.fromkeys(proof.spot, ""), indent="    ")
    yield from _listed("unproven", proof.unproven, indent="    ")


def _listed(title: str, named: Mapping[str, str], indent: str = "") -> Iterator[str]:
    if named:
        yield plain(f"{indent}{title}, {len(named)}:")
    for name, text in named.items():
        yield plain(f"{indent}  {name}" + (f": {text}" if text else ""))


def _pairs(named: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {text}" for name, text in named.items())
