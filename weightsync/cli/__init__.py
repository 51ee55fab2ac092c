"""The command line. Each command is a file of its own; engines and torch load only where they are
needed."""

from __future__ import annotations

from typing import Annotated

import typer

from weightsync import __version__
from weightsync.cli import demo, push, receipts, verify

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="weightsync: rsync for live model weights.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


app.command("demo")(demo.demo)
app.command("push")(push.push)
app.command("verify")(verify.verify)
app.add_typer(receipts.app, name="receipts")


def main() -> None:
    """Entry point of the ``weightsync`` command."""
    app()
